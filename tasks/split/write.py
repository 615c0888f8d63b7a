"""Writing the final arrays of a version: every stored object whole, by one task."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.arrays.writing import ArrayWriter
from flat_tokens.reader import FlatTokens
from flat_tokens.stores.store import StoredObject
from tasks.output.paths import DOCUMENTS, version_key, version_store
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.read import document_spec, open_arrays
from tasks.split.spans import ShardPlace, Span, SplitRule, chosen

READ_AHEAD = 3
MAX_SLICES_OF_A_BLOCK = 8

DOCUMENT_ARRAYS = ("key", "file", "row")


class Reads(NamedTuple):
    """How tokens are read: in blocks of *block* tokens. Where less than one part in *sparse* of a block is wanted, each run is
    read alone; None: never. ``whole``: all of a block is read, so that the checksums of its inner chunks are checked.
    """

    block: int
    sparse: int | None
    whole: bool = False


FROM_DISK = Reads(1 << 19, 8)
FROM_STORE = Reads(1 << 20, None)
"""A request of an object store takes as long as reading some megabytes."""


class Entries(NamedTuple):
    """Entries of documents beside their tokens: each one's start, key, file and row, uint64[n]."""

    starts: npt.NDArray[np.uint64]
    key: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]


class Written(NamedTuple):
    """The objects of a written span, and its largest token id."""

    objects: tuple[StoredObject, ...]
    max_token_id: int


def names_below_output(written: Written, rule: SplitRule, layout: LayoutName, place: Place, version: str) -> list[str]:
    """Names below the output of the objects that ``write_span`` wrote, given what it was told."""
    return [f"{version_key(version)}/{stored.key}" for stored in written.objects]


def write_span(span: Span, rule: SplitRule, layout: LayoutName, place: Place, version: str) -> Written:
    """Write a span's objects below ``versions/<version>``, each once and whole."""
    if span.of_tokens:
        tokens = (tokens for at in span.places for tokens in _tokens_of(span, at, rule, place))
        return store_tokens(span, tokens, layout, place, version)
    entries = (_entries_of(span, at, rule, place) for at in span.places)
    return store_documents(span, entries, layout, place, version)


def store_tokens(at: Span, tokens: Iterable[npt.NDArray[np.uint32]], layout: LayoutName, place: Place, version: str) -> Written:
    """Write the objects of a span of tokens, from arrays of them one behind the other."""
    spec = LAYOUTS[layout].encoded_tokens
    store = version_store(place.root, version) / at.split
    largest = 0
    first = at.start // spec.object_length
    with ArrayWriter(store, "encoded_tokens", spec, first_object=first, write_metadata=False) as writer:
        for some in tokens:
            largest = max(largest, int(some.max(initial=0)))
            writer.append(some)
            meter.add("split", some.nbytes)
    _check_length(at, writer.length)
    return Written(_named(at.split, writer.objects), largest >> 1)


def store_documents(at: Span, entries: Iterable[Entries], layout: LayoutName, place: Place, version: str) -> Written:
    """Write the objects of a span of documents: seq_starts, and key, file and row beside the arrays of the format."""
    spec, beside = LAYOUTS[layout].seq_starts, document_spec(LAYOUTS[layout])
    store = version_store(place.root, version)
    first = at.start // spec.object_length
    starts = ArrayWriter(store / at.split, "seq_starts", spec, first_object=first, write_metadata=False)
    columns = {
        name: ArrayWriter(store / f"{DOCUMENTS}/{at.split}", name, beside, first_object=first, write_metadata=False)
        for name in DOCUMENT_ARRAYS
    }
    with starts, columns["key"], columns["file"], columns["row"]:
        for some in entries:
            starts.append(some.starts)
            for name, column in columns.items():
                column.append(getattr(some, name))
        _check_length(at, starts.length)
        if at.last_entry is not None:
            starts.append(np.array([at.last_entry], np.uint64))
    beside_objects = [stored for name in DOCUMENT_ARRAYS for stored in columns[name].objects]
    return Written(
        (*_named(at.split, starts.objects), *_named(f"{DOCUMENTS}/{at.split}", beside_objects)),
        0,
    )


def _tokens_of(span: Span, at: ShardPlace, rule: SplitRule, place: Place) -> Iterator[npt.NDArray[np.uint32]]:
    """The span's tokens that come from one shard, in order."""
    source, documents = open_arrays(place.root, at.shard, "seq_starts", f"{DOCUMENTS}/key", "encoded_tokens")
    keep = chosen(span.split, at.all_in, rule, documents.key.read(0, source.seq_count))
    starts = source.seq_starts.read(0, source.seq_count + 1).astype(np.int64)
    # Kept documents that stand side by side make one run of tokens.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]])))
    begins, ends = starts[edges[0::2]], starts[edges[1::2]]
    # (split, token) -> (shard, run): cut the first and last run at the span's borders
    before = np.concatenate([[0], np.cumsum(ends - begins)])
    low, high = span.start - at.first_token, span.stop - at.first_token
    begins = np.maximum(begins, begins + low - before[:-1])
    ends = np.minimum(ends, ends + high - before[1:])
    some = begins < ends
    yield from read_runs(source, begins[some], ends[some], FROM_DISK if source.store.is_local else FROM_STORE)


class _Block(NamedTuple):
    """Tokens ``begin:end`` of a shard that are read at once, and the runs ``first:last`` that lie in them."""

    begin: int
    end: int
    first: int
    last: int


def _blocks(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], reads: Reads, length: int) -> Iterator[_Block]:
    """The blocks to read for many runs. Where a block holds little of them, each run is a block."""
    starts = np.arange(int(begins[0]) // reads.block * reads.block, int(ends[-1]), reads.block)
    firsts = np.searchsorted(ends, starts, "right")
    lasts = np.searchsorted(begins, starts + reads.block, "left")
    for start, first, last in zip(starts.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        if first == last:
            continue
        low, high = np.maximum(begins[first:last], start), np.minimum(ends[first:last], start + reads.block)
        if reads.whole:
            yield _Block(start, min(start + reads.block, length), first, last)
        elif reads.sparse is not None and (high - low).sum() * reads.sparse < high[-1] - low[0]:
            yield from map(_Block, low.tolist(), high.tolist(), range(first, last), range(first + 1, last + 1))
        else:
            yield _Block(int(low[0]), int(high[-1]), first, last)


def read_runs(
    source: FlatTokens, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], reads: Reads
) -> Iterator[npt.NDArray[np.uint32]]:
    """The tokens of many runs, in order, which are not empty and do not overlap. The next blocks are read while one is used:
    an array is valid until the next one is asked for.
    """
    if not len(begins):
        return
    buffers = deque(np.empty((READ_AHEAD + 1, reads.block), np.uint32))

    with ThreadPoolExecutor(READ_AHEAD) as readers:
        under_way: deque[tuple[_Block, Future[npt.NDArray[np.uint32]]]] = deque()
        for block in _blocks(begins, ends, reads, source.token_count):
            out = buffers[0][: block.end - block.begin]
            buffers.rotate(-1)  # a buffer is used again when all the others have been
            under_way.append((block, readers.submit(source.encoded_tokens.read, block.begin, block.end, out)))
            if len(under_way) == READ_AHEAD:
                yield from _of_block(*under_way.popleft(), begins, ends)
        while under_way:
            yield from _of_block(*under_way.popleft(), begins, ends)


def _of_block(
    block: _Block, reading: Future[npt.NDArray[np.uint32]], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.uint32]]:
    """The tokens of a block that belong to its runs."""
    tokens = reading.result()
    low = np.maximum(begins[block.first : block.last], block.begin) - block.begin
    high = np.minimum(ends[block.first : block.last], block.end) - block.begin
    if len(low) <= MAX_SLICES_OF_A_BLOCK:
        yield from (tokens[i:j] for i, j in zip(low, high, strict=True))
        return
    edge = np.zeros(len(tokens) + 1, np.int8)
    edge[low] += 1
    edge[high] -= 1
    yield tokens[np.cumsum(edge[:-1], dtype=np.int8).view(bool)]


def _entries_of(span: Span, at: ShardPlace, rule: SplitRule, place: Place) -> Entries:
    """The span's documents that come from one shard."""
    source, documents = open_arrays(place.root, at.shard, "seq_starts", f"{DOCUMENTS}/key", f"{DOCUMENTS}/row")
    keys = documents.key.read(0, source.seq_count)
    keep = np.flatnonzero(chosen(span.split, at.all_in, rule, keys))
    lengths = np.diff(source.seq_starts.read(0, source.seq_count + 1))[keep]
    ends = np.cumsum(lengths) + np.uint64(at.first_token)
    here = slice(max(span.start - at.first_seq, 0), min(span.stop - at.first_seq, len(keep)))
    rows = documents.row.read(0, source.seq_count)[keep][here]
    file = np.full(len(rows), at.file, np.uint64)
    return Entries((ends - lengths)[here], keys[keep][here], file, rows + np.uint64(at.first_row))


def _check_length(at: Span, length: int) -> None:
    if length != at.stop - at.start:
        raise AssertionError(f"{at.label}: {length} items came instead of {at.stop - at.start}")


def _named(prefix: str, objects: list[StoredObject]) -> tuple[StoredObject, ...]:
    return tuple(stored._replace(key=f"{prefix}/{stored.key}") for stored in objects)
