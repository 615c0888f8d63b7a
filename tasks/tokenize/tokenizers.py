"""Tokenizers of builds: the table of engines, each with a reference and, if one is known, a fast engine that must agree.

An engine takes an Arrow array of texts and gives flat token ids with offsets; a fast one never makes a Python object
per document. Text that looks like a special token is ordinary text in every engine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.text.rows import text_buffers
from flat_tokens.vocabulary import (
    CL100K,
    O200K,
    PATTERNS,
    R50K,
    ByteValues,
    PublishedRanks,
    Ranks,
    SentencePieceModel,
    TokenizerJson,
    resolve,
    token_bytes_of,
)
from tasks.config import TokenizerConfig
from tasks.tokenize.characters import CHARACTERS_OF_17, LETTERS_OF_17, Choose, changed_by_nfc, divided
from tasks.tokenize.engines import Encode, Tokenizer, Tokens, concatenate, gigatoken_encode, with_timeout
from tasks.tokenize.fast_json import NotKnownError, fast_definition
from tasks.tokenize.probes import texts_of_json, texts_of_pieces, texts_of_ranks
from tasks.tokenize.trial import is_from_a_file, try_out

FAST_SCHEMES = {R50K: "gpt2", CL100K: "gpt4", O200K: "o200k"}
"""The fast engine's name for a pattern. It has no other patterns: there the reference engine works alone."""


@lru_cache(maxsize=8)
def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load a tokenizer, once a process. ValueError, with the next step, if the name means nothing or the vocabulary
    does not fit the format; nothing that a file says is ever run as code.
    """
    fault = try_out(config)
    definition = resolve(config.name, pattern=config.pattern, revision=config.revision, pin=True)
    if isinstance(definition, Ranks) and definition.pattern is None:
        raise ValueError(
            f"{config.name} holds ranks, not the pattern that splits text before merging. Set tokenizer.pattern to the pattern, "
            f"or to the encoding whose it is: {', '.join(PATTERNS)}."
        )
    tokenizer = replace(ENGINES[type(definition)](definition), token_bytes=partial(token_bytes_of, definition))
    if is_from_a_file(config.name):
        reference, make_fast = tokenizer.reference, tokenizer.make_fast
        fast = None if make_fast is None else lambda: with_timeout(make_fast(), config)
        tokenizer = replace(
            tokenizer, reference=with_timeout(reference, config), make_fast=fast, limits=(config.lossy, config.max_seconds)
        )
    if tokenizer.highest_id > MAX_TOKEN_ID:
        raise ValueError(
            f"tokenizer {config.name!r} has token ids up to {tokenizer.highest_id}, but the format holds 0 to {MAX_TOKEN_ID}"
        )
    if fault:
        raise ValueError(fault)
    return tokenizer


def bytes_tokenizer(definition: ByteValues) -> Tokenizer:
    def encode(texts: pa.LargeStringArray) -> Tokens:
        data, offsets = text_buffers(texts)
        ids = data[offsets[0] : offsets[-1]].astype(np.uint32)
        ids += np.uint32(1)
        return Tokens(ids, offsets - offsets[0])

    return Tokenizer(
        definition.name, definition.digest, 256, encode, None, lambda ids: bytes(i - 1 for i in ids).decode("utf-8", "replace")
    )


def ranks_tokenizer(definition: Ranks) -> Tokenizer:
    """The tokenizer of ranks. The fast engine takes the patterns in FAST_SCHEMES, and ids without gaps."""
    pattern = definition.pattern or ""

    def encode(texts: pa.LargeStringArray) -> Tokens:
        encode_one = partial(definition.encoding.encode_to_numpy, disallowed_special=())
        return concatenate(map(encode_one, texts.to_pylist()))

    def make_fast() -> Encode:
        import gigatoken  # slow to import, and not of use to every build

        with _path_of(definition.file) as path:
            # No special tokens: text that looks like one is text.
            fast = gigatoken_encode(gigatoken.Tokenizer.from_tiktoken(path, FAST_SCHEMES[pattern], special_tokens={}))
        return divided(fast, encode, LETTERS_OF_17.texts)

    why_slow = None
    if pattern not in FAST_SCHEMES:
        why_slow = "its pattern is none of r50k_base, cl100k_base and o200k_base"
    elif definition.highest != definition.file.count(b"\n") - 1:
        why_slow = "its ids have gaps"
    fast = make_fast if why_slow is None else None
    probes = partial(texts_of_ranks, definition)
    return Tokenizer(
        definition.name,
        definition.digest or "",
        definition.highest,
        encode,
        fast,
        definition.encoding.decode,
        definition.revision,
        why_slow=why_slow,
        probes=probes,
    )


@contextlib.contextmanager
def _path_of(data: bytes) -> Iterator[Path]:
    """A path at which *data* can be read meanwhile: of memory, if the system has that, as no kill leaves a file there."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("ranks"), "wb") as memory:
            memory.write(data)
            memory.flush()
            yield Path(f"/proc/self/fd/{memory.fileno()}")
    else:
        with tempfile.NamedTemporaryFile(prefix="ranks-") as file:
            file.write(data)
            file.flush()
            yield Path(file.name)


def json_tokenizer(of: TokenizerJson) -> Tokenizer:
    """ValueError if its tokens are random."""
    definition, tokenizer = of.definition, of.tokenizer
    if (definition.get("model") or {}).get("dropout"):
        raise ValueError(f"{of.name}: the model has dropout {definition['model']['dropout']}, so its tokens are random")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(texts: pa.LargeStringArray) -> Tokens:
        encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        return concatenate(np.array(encoding.ids, np.uint32) for encoding in encodings)

    why_slow = None
    try:
        known = fast_definition(of)
    except NotKnownError as error:
        why_slow = str(error)

    def make_fast() -> Encode:
        import gigatoken  # slow to import, and not of use to every build

        fast, choices = gigatoken_encode(gigatoken.Tokenizer.from_json(known.json)), list[Choose]()
        if known.is_nfc:  # it does not put several accents in order
            choices.append(changed_by_nfc)
        if known.tells_letters:
            choices.append(CHARACTERS_OF_17.texts if known.tells_symbols else LETTERS_OF_17.texts)
        return divided(fast, encode, *choices) if choices else fast

    decode, probes = partial(tokenizer.decode, skip_special_tokens=False), partial(texts_of_json, of)
    fast = make_fast if why_slow is None else None
    return Tokenizer(of.name, of.digest, highest, encode, fast, decode, of.revision, why_slow=why_slow, probes=probes)


def pieces_tokenizer(definition: SentencePieceModel) -> Tokenizer:
    """A control piece in text is text; a piece that the model's maker has defined is found in text, as SentencePiece does."""
    processor, highest = definition.processor, len(definition.pieces.pieces) - 1

    def encode(texts: pa.LargeStringArray) -> Tokens:
        # One thread: the task runner already has one for every core.
        found = processor.encode(texts.to_pylist(), out_type=int, num_threads=1)
        return concatenate(np.array(ids, np.uint32) for ids in found)

    return Tokenizer(
        definition.name,
        definition.digest,
        highest,
        encode,
        None,
        processor.decode,
        definition.revision,
        why_slow="it is a model of SentencePiece",
        probes=partial(texts_of_pieces, definition),
    )


ENGINES: dict[type, Callable[[Any], Tokenizer]] = {
    ByteValues: bytes_tokenizer,
    Ranks: ranks_tokenizer,
    PublishedRanks: ranks_tokenizer,
    TokenizerJson: json_tokenizer,
    SentencePieceModel: pieces_tokenizer,
}
"""By the kind of a tokenizer's definition, the function that makes its engines."""
