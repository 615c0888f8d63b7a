"""Tokenizers by name: the definition that a name stands for, read without running anything that a file says.

A definition is all that decides a tokenizer's tokens. The tools make vocabularies of it, builds make engines.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.extras import extra

R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PATTERNS = {"gpt2": R50K, "r50k_base": R50K, "cl100k_base": CL100K, "o200k_base": O200K}
"""Published split patterns, by the encoding that uses them: a pattern may be named instead of spelled out."""


@dataclass(frozen=True, eq=False)
class ByteValues:
    """The reference's byte tokenizer: token id = byte value + 1."""

    name: str = "bytes"
    digest: str = hashlib.sha256(b"bytes: value + 1").hexdigest()


@dataclass(frozen=True, eq=False)
class Ranks:
    """A byte-pair encoding of tiktoken: ids by tokens. Without a ``pattern``, which splits text before tokens are merged, it
    has no ``encoding`` (a ``tiktoken.Encoding``) and no digest.
    """

    name: str
    ranks: Mapping[bytes, int]
    special: Mapping[str, int] = field(default_factory=dict)
    pattern: str | None = None
    encoding: Any = None

    @cached_property
    def file(self) -> bytes:
        """The ranks as a .tiktoken file, in order."""
        by_rank = sorted(self.ranks.items(), key=lambda item: item[1])
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in by_rank)

    @cached_property
    def digest(self) -> str | None:
        return None if self.pattern is None else hashlib.sha256(self.pattern.encode() + b"\0" + self.file).hexdigest()


@dataclass(frozen=True, eq=False)
class TokenizerJson:
    """A tokenizer.json: as JSON, and as a ``tokenizers.Tokenizer`` that neither pads nor cuts nor knows special tokens in text.
    ``revision``: the commit of the hub.
    """

    name: str
    digest: str
    definition: Mapping[str, Any]
    tokenizer: Any
    revision: str | None = None


Definition = ByteValues | Ranks | TokenizerJson


def resolve(name: str, *, pattern: str | None = None, revision: str | None = None, pin: bool = False) -> Definition:
    """The tokenizer that a name stands for: a tiktoken encoding, ``bytes``, a ``.tiktoken`` file, a ``tokenizer.json`` or a
    directory with one, or a hub repository. *pattern* is for ``.tiktoken`` files; *pin* asks the hub for the commit first.

    ValueError, with the next step, where the name means nothing or a file is malformed; ModuleNotFoundError where a package
    is not installed.
    """
    path = Path(name)
    if name == "bytes":
        return ByteValues()
    if path.suffix == ".tiktoken":
        return _rank_file(path, pattern)
    if path.suffix == ".json" or path.is_dir():
        return _tokenizer_json(name, _read(path / "tokenizer.json" if path.is_dir() else path))
    if name.count("/") == 1 and not path.is_absolute() and ".." not in path.parts:
        return _from_hub(name, revision, pin)
    tiktoken = extra("tiktoken", f"the tokenizer {name!r}")
    if name not in tiktoken.list_encoding_names():
        raise ValueError(
            f"there is no tokenizer {name!r}. Set tokenizer to one of {', '.join(tiktoken.list_encoding_names())}, bytes, "
            "a .tiktoken file, a tokenizer.json, or a hub repository such as openai-community/gpt2."
        )
    encoding = _encoding(tiktoken, name)
    return Ranks(name, encoding._mergeable_ranks, encoding._special_tokens, encoding._pat_str, encoding)


def _encoding(tiktoken: Any, name: str) -> Any:
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the download raised: the name is right, the vocabulary cannot be had
        raise ValueError(
            f"the vocabulary of {name!r} cannot be loaded ({type(error).__name__}). Without a network, set "
            "TIKTOKEN_CACHE_DIR to a directory that has it, or name a .tiktoken file."
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def _rank_file(path: Path, pattern: str | None) -> Ranks:
    """A file of lines 'base64 rank'."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is not 'base64 rank' ({error})") from error
        if not 0 <= rank <= MAX_TOKEN_ID:
            raise ValueError(f"{path}, line {number}: token id {rank} is not one of 0 to {MAX_TOKEN_ID}, which the format holds")
        if token in ranks or rank in taken:
            raise ValueError(f"{path}, line {number}: token {token!r} or its id {rank} has been on a line before")
        ranks[token] = rank
        taken.add(rank)
    if pattern is None:
        return Ranks(path.name, ranks)
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise ValueError(f"{path}: has no token for the byte {missing[0]:#04x}; every byte needs one")
    tiktoken = extra("tiktoken", f"encoding with {path.name}")
    spelled = PATTERNS.get(pattern, pattern)
    if spelled in tiktoken.list_encoding_names():
        spelled = str(_encoding(tiktoken, spelled)._pat_str)
    try:
        encoding = tiktoken.Encoding(path.stem, pat_str=spelled, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise ValueError(f"{path}: cannot be used with pattern {pattern!r}: {error}") from error
    return Ranks(path.name, ranks, {}, spelled, encoding)


def _from_hub(repository: str, revision: str | None, pin: bool) -> TokenizerJson:
    hub = extra("huggingface_hub", f"the tokenizer {repository} of the hub")
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        if pin:  # a branch or tag is one commit for all processes of a build
            revision = hub.HfApi(endpoint=endpoint).model_info(repository, revision=revision).sha
        path = hub.hf_hub_download(repository, "tokenizer.json", revision=revision, endpoint=endpoint)
    except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer {repository!r} cannot be had from the hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or name a tokenizer.json."
        ) from error
    return _tokenizer_json(repository, Path(path).read_bytes(), revision)


def _tokenizer_json(name: str, data: bytes, revision: str | None = None) -> TokenizerJson:
    tokenizers = extra("tokenizers", f"the tokenizer {name}")
    try:
        definition = json.loads(data)
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{name} is not a tokenizer.json that 'tokenizers' {tokenizers.__version__} loads: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return TokenizerJson(name, hashlib.sha256(data).hexdigest(), definition, tokenizer, revision)
