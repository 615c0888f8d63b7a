"""Tokenized documents on their way from an engine to a token shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.batch import TokenBatch
from flat_tokens.text.rows import text_buffers
from tasks.models import Slice
from tasks.shards.index import StoredTokens
from tasks.shards.recipe import Recipe
from tasks.text.digests import text_digests
from tasks.text.documents import Tally, TextBatch
from tasks.tokenize.engines import Encoder, tokens_of
from tasks.tokenize.segments import DIGEST_BYTES, Segments


class Batch(NamedTuple):
    """Some documents: their tokens, keys and rows, uint64[n] each, and kept columns, of ``kinds``. Where duplicates are dropped,
    the digests of the texts and their lengths, uint64[2 n] and uint64[n]; where near-duplicates are looked for, the signatures of
    the texts, uint64[NUMBERS * n]. ``split_keys``: uint64[n], if other values than the keys decide on splits.
    """

    tokens: TokenBatch
    keys: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    columns: pa.RecordBatch | None
    kinds: Mapping[str, str]
    digests: npt.NDArray[np.uint64] | None = None
    text_bytes: npt.NDArray[np.uint64] | None = None
    split_keys: npt.NDArray[np.uint64] | None = None
    signatures: npt.NDArray[np.uint64] | None = None


class Tokenized(NamedTuple):
    """Some segments: their documents, in batches; the name and the number of documents of each segment; bytes of text, and those
    whose tokens were there already. ``refused``: counts of the documents that the engine did not take.
    """

    batches: list[Batch]
    names: npt.NDArray[np.void]
    documents: npt.NDArray[np.int64]
    text_bytes: int
    text_bytes_taken: int
    refused: Tally


def tokenize_segments(
    read: tuple[Segments, Mapping[str, str]], slice_: Slice, recipe: Recipe, encoder: Encoder, known: StoredTokens
) -> Tokenized:
    """Tokenize segments of a slice, which were *read* with the kinds of their kept columns, but for those that are *known*."""
    segments, kinds = read
    names, numbers = known.find(segments, recipe.of_segments(slice_))
    borders = np.concatenate([[0], segments.ends])
    counts, refused, taken = np.diff(borders), Tally(), 0
    batches: list[Batch] = []
    for first, last in known.stretches(numbers):
        part = segments.documents.part(int(borders[first]), int(borders[last]))
        tokens = known.take(numbers[first:last]) if numbers[first] >= 0 else None
        signed = known.signatures(numbers[first:last], recipe.signed) if tokens is not None and recipe.signed else None
        if tokens is not None:
            taken += text_length(part)
        else:
            last_rows = part.rows[borders[first + 1 : last + 1] - borders[first] - 1]
            tokens, part = tokens_of(part, slice_, recipe.source(slice_), recipe.documents, encoder, refused)
            counts[first:last] = np.diff(np.searchsorted(part.rows, last_rows, "right"), prepend=0)
        batch = Batch(tokens, part.keys, part.rows, part.columns, kinds, split_keys=part.split_keys)
        if recipe.documents.compares:
            batch = batch._replace(text_bytes=np.diff(text_buffers(part.texts)[1]).astype(np.uint64))
        if recipe.documents.duplicates == "drop":
            batch = batch._replace(digests=text_digests(part.texts, recipe.of_texts(slice_)).reshape(-1))
        if recipe.signed:
            signatures = recipe.signatures_of(part.texts, slice_) if signed is None else signed
            batch = batch._replace(signatures=signatures.reshape(-1))
        batches.append(batch)
    names[counts != np.diff(borders)] = np.void(bytes(DIGEST_BYTES))  # not known by what it has lost
    return Tokenized(batches, names, counts, text_length(segments.documents) + refused.text_bytes, taken, refused)


def text_length(documents: TextBatch) -> int:
    """Bytes of text."""
    _, offsets = text_buffers(documents.texts)
    return int(offsets[-1] - offsets[0])


def bytes_read(read: tuple[Segments, Mapping[str, str]]) -> int:
    """Bytes of text of segments that were read."""
    return text_length(read[0].documents)
