"""Tokenized documents on their way from an engine to a token shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.array_types import Int64s
from flat_tokens.batch import TOKENS, TokenBatch
from flat_tokens.columns import with_kinds
from flat_tokens.text.rows import text_buffers
from tasks.models import Slice
from tasks.rows import KEY, REASON, ROW, as_rows, changed, fact, kept_of
from tasks.shards.index import StoredTokens
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally, TextBatch
from tasks.tokenize.engines import Encoder, tokens_of
from tasks.tokenize.segments import DIGEST_BYTES, Segments


class Batch(NamedTuple):
    """Some documents: their tokens and their rows, whose kept columns are of ``kinds``."""

    tokens: TokenBatch
    rows: pa.RecordBatch
    kinds: Mapping[str, str]


class Tokenized(NamedTuple):
    """Some segments: their documents, in batches; the name and the number of documents of each segment; bytes of text, and those
    whose tokens were there already. ``refused``: counts of the documents that the engine did not take.
    """

    batches: list[Batch]
    names: npt.NDArray[np.void]
    documents: Int64s
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
    batches, of_texts = list[Batch](), recipe.facts_of_texts(slice_)
    for first, last in known.stretches(numbers):
        part = segments.documents.part(int(borders[first]), int(borders[last]))
        tokens, facts = known.take(numbers[first:last], of_texts) if numbers[first] >= 0 else (None, {})
        if tokens is not None:
            taken += text_length(part)
        else:
            last_rows = fact(part.rows, ROW)[borders[first + 1 : last + 1] - borders[first] - 1]
            tokens, part = tokens_of(part, slice_, recipe.source(slice_), recipe.documents, encoder, refused)
            counts[first:last] = np.diff(np.searchsorted(fact(part.rows, ROW), last_rows, "right"), prepend=0)
        made = {name: facts[name] if name in facts else of.of(part.texts) for name, of in of_texts.items()}
        batches.append(Batch(tokens, changed(part.rows, as_rows(made)), kinds))
    names[counts != np.diff(borders)] = np.void(bytes(DIGEST_BYTES))  # not known by what it has lost
    return Tokenized(batches, names, counts, text_length(segments.documents) + refused.text_bytes, taken, refused)


def rows_left_out(left_out: Iterable[pa.RecordBatch], facts: Mapping[str, int], kinds: Mapping[str, str]) -> Batch:
    """Documents that are left out, in the order of their rows. They have no tokens, columns *kinds* and 0 for other *facts*."""
    parts = list[pa.RecordBatch]()
    for rows in left_out:
        zeros = {name: np.zeros((len(rows), *[numbers] * (numbers > 1)), np.uint64) for name, numbers in facts.items()}
        kept = kept_of(rows)
        kept = with_kinds(rows.select([ROW]) if kept is None else kept, kinds)  # no column is called as that
        parts.append(changed(as_rows(zeros, kept), rows.select([KEY, ROW, REASON])))
    rows = pa.concat_batches(parts)
    rows = rows.take(pa.array(np.argsort(fact(rows, ROW))))
    tokens = TokenBatch.of_arrays({TOKENS: np.empty(0, np.uint32)}, np.zeros(len(rows) + 1, np.uint64), 0)
    return Batch(tokens, rows, kinds)


def text_length(documents: TextBatch) -> int:
    """Bytes of text."""
    _, offsets = text_buffers(documents.texts)
    return int(offsets[-1] - offsets[0])


def bytes_read(read: tuple[Segments, Mapping[str, str]]) -> int:
    """Bytes of text of segments that were read."""
    return text_length(read[0].documents)
