"""Tokenizers by name, each with a reference engine and, where one is known, a fast engine that must agree with it.

An engine takes an Arrow array of texts and gives flat token ids with offsets; a fast one never makes a Python object
per document. Text that looks like a special token is ordinary text in every engine.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.text.rows import text_buffers
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import Encode, Tokenizer, Tokens, awkward_texts, concatenate, gigatoken_encode

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
"""Published split patterns, by the encoding that uses them: ``pattern`` may name one instead of spelling it out."""

FAST_SCHEMES = {R50K: "gpt2", CL100K: "gpt4", O200K: "o200k"}
"""The fast engine's name for a pattern. It has no other patterns: there the reference engine works alone."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load a tokenizer, once a process. ValueError, with the next step, where the name means nothing or the vocabulary
    does not fit the format; nothing that a file says is ever run as code.
    """
    tokenizer = _load(config)
    if tokenizer.highest_id > MAX_TOKEN_ID:
        raise ValueError(
            f"tokenizer {config.name!r} has token ids up to {tokenizer.highest_id}, but the format holds 0 to {MAX_TOKEN_ID}"
        )
    if tokenizer.make_fast is not None:
        importlib.import_module("awkward")  # half a second, spent where the caller may have other work under way
    return tokenizer


@lru_cache(maxsize=8)
def _load(config: TokenizerConfig) -> Tokenizer:
    name, path = config.name, Path(config.name)
    if name == "bytes":
        return _bytes_tokenizer()
    if path.suffix == ".tiktoken":
        return _tiktoken_file(config, path)
    if path.suffix == ".json" or path.is_dir():
        return _tokenizer_json(name, _read_tokenizer_file(path / "tokenizer.json" if path.is_dir() else path))
    import tiktoken

    if name in tiktoken.list_encoding_names():
        return _tiktoken_encoding(name)
    if name.count("/") == 1 and not path.is_absolute() and ".." not in path.parts:
        return _hub_tokenizer(config)
    raise ValueError(
        f"there is no tokenizer {name!r}. Set tokenizer to one of {', '.join(tiktoken.list_encoding_names())}, bytes, "
        "a .tiktoken file, a tokenizer.json, or a hub repository such as openai-community/gpt2."
    )


def _read_tokenizer_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def _bytes_tokenizer() -> Tokenizer:
    """The reference's byte tokenizer: byte value + 1."""

    def encode(texts: pa.LargeStringArray) -> Tokens:
        data, offsets = text_buffers(texts)
        ids = data[offsets[0] : offsets[-1]].astype(np.uint32)
        ids += np.uint32(1)
        return Tokens(ids, offsets - offsets[0])

    def decode(ids: list[int]) -> str:
        return bytes(i - 1 for i in ids).decode("utf-8", "replace")

    return Tokenizer("bytes", hashlib.sha256(b"bytes: value + 1").hexdigest(), 256, encode, None, decode)


def _tiktoken_encoding(name: str) -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the download raised: the name is right, the vocabulary cannot be had
        raise ValueError(
            f"the vocabulary of {name!r} cannot be loaded ({type(error).__name__}). Without a network, set "
            "TIKTOKEN_CACHE_DIR to a directory that has it, or name a .tiktoken file."
        ) from error
    return _from_encoding(name, encoding)


def _tiktoken_file(config: TokenizerConfig, path: Path) -> Tokenizer:
    import tiktoken

    if config.pattern is None:
        raise ValueError(
            f"{path} holds ranks, not the pattern that splits text before merging. Set tokenizer.pattern to the pattern, or to "
            f"the encoding whose it is: {', '.join(PATTERNS)}."
        )
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(_read_tokenizer_file(path).splitlines(), 1):
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
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise ValueError(f"{path}: has no token for the byte {missing[0]:#04x}; every byte needs one")
    try:
        encoding = tiktoken.Encoding(
            path.stem, pat_str=PATTERNS.get(config.pattern, config.pattern), mergeable_ranks=ranks, special_tokens={}
        )
        lost = next((text for text in awkward_texts() if encoding.decode(encoding.encode_ordinary(text)) != text), None)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be used with pattern {config.pattern!r}: {error}") from error
    if lost is not None:
        raise ValueError(
            f"{path}: pattern {config.pattern!r} passes over a part of {lost[:20]!r}, so that text would be lost. Set "
            f"tokenizer.pattern to one that takes all text, or to one of {', '.join(PATTERNS)}."
        )
    return _from_encoding(path.name, encoding)


def _from_encoding(name: str, encoding: Any) -> Tokenizer:
    ranks, pattern = encoding._mergeable_ranks, encoding._pat_str
    rank_file = b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in sorted(ranks.items(), key=lambda item: item[1]))

    def encode_one(text: str) -> npt.NDArray[np.uint32]:
        return encoding.encode_to_numpy(text, disallowed_special=())  # type: ignore[no-any-return]

    def encode(texts: pa.LargeStringArray) -> Tokens:
        return concatenate(map(encode_one, texts.to_pylist()))

    def make_fast() -> Encode:
        import gigatoken

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "ranks.tiktoken")
            path.write_bytes(rank_file)
            # No special tokens: text that looks like one is text.
            return gigatoken_encode(gigatoken.Tokenizer.from_tiktoken(path, FAST_SCHEMES[pattern], special_tokens={}))

    digest = hashlib.sha256(pattern.encode() + b"\0" + rank_file).hexdigest()
    fast = make_fast if pattern in FAST_SCHEMES and max(ranks.values()) == len(ranks) - 1 else None
    return Tokenizer(name, digest, max(ranks.values()), encode, fast, encoding.decode)


def _hub_tokenizer(config: TokenizerConfig) -> Tokenizer:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        # A branch or tag is pinned first: two processes of one build read the same commit.
        commit = HfApi(endpoint=endpoint).model_info(config.name, revision=config.revision).sha
        path = hf_hub_download(config.name, "tokenizer.json", revision=commit, endpoint=endpoint)
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"the tokenizer {config.name!r} cannot be had from the hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or name a tokenizer.json."
        ) from error
    return _tokenizer_json(config.name, Path(path).read_bytes(), commit)


def _tokenizer_json(name: str, data: bytes, revision: str | None = None) -> Tokenizer:
    import tokenizers

    try:
        definition = json.loads(data)
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{name} is not a tokenizer.json that 'tokenizers' {tokenizers.__version__} loads: {error}") from error
    if (definition.get("model") or {}).get("dropout"):
        raise ValueError(f"{name}: the model has dropout {definition['model']['dropout']}, so its tokens are random")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)

    def encode(texts: pa.LargeStringArray) -> Tokens:
        encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        return concatenate(np.array(encoding.ids, np.uint32) for encoding in encodings)

    # The fast engine would take a special token's text for the token: it does not get to know them.
    plain = {
        **definition,
        "added_tokens": [token for token in definition.get("added_tokens") or [] if not token.get("special")],
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }

    def make_fast() -> Encode:
        import gigatoken

        return gigatoken_encode(gigatoken.Tokenizer.from_json(json.dumps(plain)))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return Tokenizer(
        name, hashlib.sha256(data).hexdigest(), max(vocabulary.values(), default=0), encode, make_fast, decode, revision
    )
