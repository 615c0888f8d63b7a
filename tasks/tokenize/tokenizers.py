"""Tokenizers of builds: the table of engines, each with a reference and, where one is known, a fast engine that must agree.

An engine takes an Arrow array of texts and gives flat token ids with offsets; a fast one never makes a Python object
per document. Text that looks like a special token is ordinary text in every engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.text.rows import text_buffers
from flat_tokens.tokenizers import PATTERNS, ByteValues, Ranks, TokenizerJson, resolve
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import Tokenizer, Tokens
from tasks.tokenize.ranks import check_all_text_is_taken, ranks_tokenizer
from tasks.tokenize.tokenizer_json import json_tokenizer


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
    is_ranks = config.name.endswith(".tiktoken")
    if is_ranks and config.pattern is None:
        raise ValueError(
            f"{config.name} holds ranks, not the pattern that splits text before merging. Set tokenizer.pattern to the pattern, "
            f"or to the encoding whose it is: {', '.join(PATTERNS)}."
        )
    definition = resolve(config.name, pattern=config.pattern, revision=config.revision, pin=True)
    if isinstance(definition, Ranks) and is_ranks:
        check_all_text_is_taken(definition, config.name, str(config.pattern))
    return ENGINES[type(definition)](definition)


def bytes_tokenizer(definition: ByteValues) -> Tokenizer:
    def encode(texts: pa.LargeStringArray) -> Tokens:
        data, offsets = text_buffers(texts)
        ids = data[offsets[0] : offsets[-1]].astype(np.uint32)
        ids += np.uint32(1)
        return Tokens(ids, offsets - offsets[0])

    def decode(ids: list[int]) -> str:
        return bytes(i - 1 for i in ids).decode("utf-8", "replace")

    return Tokenizer(definition.name, definition.digest, 256, encode, None, decode)


ENGINES: dict[type, Callable[[Any], Tokenizer]] = {
    ByteValues: bytes_tokenizer,
    Ranks: ranks_tokenizer,
    TokenizerJson: json_tokenizer,
}
"""By the kind of a tokenizer's definition, the function that makes its engines."""
