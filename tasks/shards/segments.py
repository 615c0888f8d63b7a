"""The segments of a slice: read, or taken from files that are known, and tokenized but for those that are known."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64s, Structs
from flat_tokens.batch import TOKENS, TokenBatch
from flat_tokens.columns import as_arrow, with_kinds
from flat_tokens.keys import strings_by_key
from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.text.rows import text_buffers
from tasks.models import Slice
from tasks.parts.documents import Documents
from tasks.rows import FILE, KEY, REASON, ROW, as_rows, changed, fact, kept_of
from tasks.shards.index import (
    StoredTokens,
    as_text,
    files_of,
    segments_without,
)
from tasks.shards.recipe import Recipe
from tasks.shards.writers import BATCH_TOKENS, Batch
from tasks.text.documents import Tally, TextBatch, read_documents
from tasks.tokenize.engines import Encoder, tokens_of
from tasks.tokenize.segments import NO_DIGEST, STORED, STORED_FILE, Segments, cut


class Tokenized(NamedTuple):
    """Some segments: their documents, in batches; the segments as STORED[m]; bytes of text, and those whose tokens were there
    already. ``refused``: counts of the documents that the engine did not take. ``byte_count``: of tokens that were taken unread.
    """

    batches: list[Batch]
    segments: Structs
    text_bytes: int
    text_bytes_taken: int
    refused: Tally
    byte_count: int = 0


class ReadSegments(NamedTuple):
    """Some segments of files of a slice that were read: their bytes of text, and the kinds of their kept columns."""

    slice_: Slice
    segments: Segments
    byte_count: int
    kinds: Mapping[str, str]


def read_slice(
    slice_: Slice, files: Int64s, recipe: Recipe, known: StoredTokens, tally: Tally
) -> Generator[ReadSegments | Tokenized]:
    """The documents of a slice. Those of *files* that are known, by their numbers, are not read: -1 for the others."""
    for first, stop in known.files.stretches(files):
        if files[first] >= 0:
            yield from take_files(slice_.ranges[first].file.name, files[first:stop], known, tally)
            continue
        part = Slice(slice_.ranges[first:stop], tally.rows)
        texts = read_documents(part, recipe.source(part), recipe.documents, tally, split_by=recipe.split_by_of(part))
        for segments in cut(texts):
            yield ReadSegments(part, segments, text_length(segments.documents), tally.kinds.now)


def take_files(name: str, numbers: Int64s, known: StoredTokens, tally: Tally) -> Iterator[Tokenized]:
    """The documents of known files that stand side by side in a shard, by their *numbers*. *name*: of the first one. *tally*
    counts them.
    """
    shard, first = known.files.shards[known.files.shard[numbers[0]]], int(known.files.first[numbers[0]])
    stop, starts, rows_before = first + len(numbers), shard.file_starts, np.uint64(tally.rows)
    text_bytes, opened = files_of(shard)["text_bytes"][first:stop].tolist(), known.opened(shard)
    assert opened is not None

    def rows_of(documents: Documents, *facts: str) -> pa.RecordBatch:
        # (shard, file, row) -> (shard, row) -> (slice, row)
        rows = documents.fact(ROW) + starts[documents.fact(FILE).astype(np.int64)] - starts[first] + rows_before
        kept = documents.columns(np.arange(len(documents))) if shard.columns else None
        return as_rows({**{name: documents.fact(name) for name in facts}, ROW: rows}, kept)

    places = [np.searchsorted(some.fact(FILE), np.array([first, stop], np.uint64)).tolist() for some in opened]
    kept, others = (some.part(*place) for some, place in zip(opened, places, strict=True))
    left_out, reasons = rows_of(others, KEY, REASON), strings_by_key(shard.skipped)
    tally.kinds.add(shard.columns, name)
    tally.left_out += [left_out] if len(left_out) else []
    tally.skipped.update(reasons[key] for key in fact(left_out, REASON).tolist())
    tally.rows += int(starts[stop] - starts[first])
    tally.read += len(kept) + len(left_out)
    tally.written += len(kept)
    tally.text_bytes += sum(text_bytes)
    tally.file_rows += np.diff(starts[first : stop + 1]).tolist()
    tally.file_bytes += text_bytes
    tally.file_kinds += [shard.columns] * len(numbers)
    gone = np.ones(shard.written, bool)
    gone[slice(*places[0])] = False
    segments = segments_without(shard, gone)
    borders = np.searchsorted(np.cumsum(kept.lengths), np.arange(0, int(kept.lengths.sum()), BATCH_TOKENS))
    for low, high in itertools.pairwise(np.unique([0, *borders, len(kept)]).tolist()):
        part = kept.part(low, high)
        batch = Batch(part.batch(shard.token_arrays), rows_of(part, *shard.facts), tally.kinds.now)
        size = TOKEN_BYTES * batch.tokens.token_count
        yield Tokenized([batch], segments, sum(text_bytes), sum(text_bytes), Tally(), size)
        segments, text_bytes = segments[:0], []


def files_as_text(slice_: Slice, recipe: Recipe, tally: Tally, refused: Tally) -> str:
    """The files of a run as its receipt has them. Those are not known that have documents which an engine *refused*, or kept
    columns of other kinds than the run.
    """
    if len(slice_.ranges) == 1:
        return ""
    files = np.zeros(len(slice_.ranges), STORED_FILE)
    files["digest"] = recipe.of_files(slice_)
    files["text_bytes"] = tally.file_bytes
    unknown = np.array([kinds != tally.kinds.now for kinds in tally.file_kinds])
    for rows in refused.left_out:
        unknown[np.searchsorted(np.cumsum(tally.file_rows), fact(rows, ROW).astype(np.int64), "right")] = True
    files["digest"][unknown] = NO_DIGEST
    return as_text(files)


def tokenize_segments(read: ReadSegments | Tokenized, recipe: Recipe, encoder: Encoder, known: StoredTokens) -> Tokenized:
    """Tokenize segments of a slice, but for those that are *known*."""
    if isinstance(read, Tokenized):
        return read
    slice_, segments, text_bytes, kinds = read
    names, numbers = known.find(segments, recipe.of_segments(slice_))
    borders = np.concatenate([[0], segments.ends])
    counts, refused, taken = np.diff(borders), Tally(), 0
    batches, of_texts = list[Batch](), recipe.facts_of_texts(slice_)
    for first, last in known.segments.stretches(numbers):
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
    stored = np.empty(len(counts), STORED)
    stored["digest"], stored["documents"] = names, counts
    stored["digest"][counts != np.diff(borders)] = NO_DIGEST  # not known by what it has lost
    return Tokenized(batches, stored, text_bytes + refused.text_bytes, taken, refused)


def rows_left_out(left_out: Iterable[pa.RecordBatch], facts: Mapping[str, int], kinds: Mapping[str, str]) -> Batch:
    """Documents that are left out, in the order of their rows. They have no tokens, columns *kinds* and 0 for other *facts*."""
    parts = list[pa.RecordBatch]()
    for rows in left_out:
        zeros = {name: np.zeros((len(rows), *[numbers] * (numbers > 1)), np.uint64) for name, numbers in facts.items()}
        kept = kept_of(rows)
        kept = with_kinds(rows.select([ROW]) if kept is None else kept, kinds)  # no column is called as that
        parts.append(changed(as_rows(zeros, kept), rows.select([KEY, ROW, REASON])))
    rows = pa.concat_batches(parts)
    rows = rows.take(as_arrow(np.argsort(fact(rows, ROW))))
    tokens = TokenBatch.of_arrays({TOKENS: np.empty(0, np.uint32)}, np.zeros(len(rows) + 1, np.uint64), 0)
    return Batch(tokens, rows, kinds)


def text_length(documents: TextBatch) -> int:
    """Bytes of text."""
    _, offsets = text_buffers(documents.texts)
    return int(offsets[-1] - offsets[0])
