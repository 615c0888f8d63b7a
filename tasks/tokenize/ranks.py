"""Engines of byte-pair encodings: tiktoken, and gigatoken where it knows the pattern."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.tokenizers import CL100K, O200K, PATTERNS, R50K, Ranks
from tasks.tokenize.engines import Encode, Tokenizer, Tokens, awkward_texts, concatenate, gigatoken_encode

FAST_SCHEMES = {R50K: "gpt2", CL100K: "gpt4", O200K: "o200k"}
"""The fast engine's name for a pattern. It has no other patterns: there the reference engine works alone."""


def ranks_tokenizer(definition: Ranks) -> Tokenizer:
    encoding, pattern, highest = definition.encoding, definition.pattern or "", max(definition.ranks.values())

    def encode_one(text: str) -> npt.NDArray[np.uint32]:
        return encoding.encode_to_numpy(text, disallowed_special=())  # type: ignore[no-any-return]

    def encode(texts: pa.LargeStringArray) -> Tokens:
        return concatenate(map(encode_one, texts.to_pylist()))

    def make_fast() -> Encode:
        import gigatoken  # slow to import, and not of use to every build

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "ranks.tiktoken")
            path.write_bytes(definition.file)
            # No special tokens: text that looks like one is text.
            return gigatoken_encode(gigatoken.Tokenizer.from_tiktoken(path, FAST_SCHEMES[pattern], special_tokens={}))

    fast = make_fast if pattern in FAST_SCHEMES and highest == len(definition.ranks) - 1 else None
    return Tokenizer(definition.name, definition.digest or "", highest, encode, fast, encoding.decode)


def check_all_text_is_taken(definition: Ranks, path: str, pattern: str) -> None:
    """ValueError where a file's *pattern* leaves out some text."""
    encoding = definition.encoding
    try:
        lost = next((text for text in awkward_texts() if encoding.decode(encoding.encode_ordinary(text)) != text), None)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be used with pattern {pattern!r}: {error}") from error
    if lost is not None:
        raise ValueError(
            f"{path}: pattern {pattern!r} passes over a part of {lost[:20]!r}, so that text would be lost. Set "
            f"tokenizer.pattern to one that takes all text, or to one of {', '.join(PATTERNS)}."
        )
