"""Train or validation: which documents go where, where each lands, and writing the final arrays object by object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from flat_tokens.arrays import LAYOUTS, ArrayWriter, Layout, LayoutName, group_metadata
from flat_tokens.keys import A, mix
from flat_tokens.reader import SPLITS, FlatTokens
from flat_tokens.storage import Store, StoredObject
from tasks.caching import CACHE, Place
from tasks.known import KnownStore
from tasks.models import Model, Split, TokenShard
from tasks.progress import meter
from tasks.shards import SHARD_LAYOUT, DocumentArrays, document_spec, open_shard

SPAN_TOKENS = 1 << 26
"""Tokens that one task writes, at least one stored object."""

SPAN_DOCUMENTS = 1 << 20
READ_AHEAD = 3
MAX_SLICES_OF_A_BLOCK = 8

DOCUMENT_ARRAYS = ("key", "file", "row")


class Reads(NamedTuple):
    """How tokens are read: *block* of them at a time; where less than one part in *sparse* of a block is wanted, only the runs
    that are wanted, each alone. None: never so.
    """

    block: int
    sparse: int | None


FROM_DISK = Reads(1 << 19, 8)
FROM_STORE = Reads(1 << 20, None)
"""A request of an object store takes as long as some megabytes of its answer."""


class SplitRule(Model):
    """A document is validation if a hash of its key and the seed falls below the fraction: so membership depends on the
    document alone, not on the tokenizer, the order, the number of workers or what else the dataset holds.
    """

    fraction: float
    seed: int

    def draws(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which documents are validation: bool[n]."""
        if self.fraction >= 1:
            return np.ones(len(keys), bool)
        salt = mix(np.array([self.seed], np.uint64) * A + A)
        return mix(keys ^ salt) < np.uint64(int(self.fraction * 2**64))


class ShardPlace(Model):
    """A shard's place in a split: its sequences and tokens of that split start at ``first_seq`` and ``first_token``."""

    shard: TokenShard
    file: int
    first_row: int
    all_in: Split | None
    first_seq: int = 0
    seq_count: int = 0
    first_token: int = 0
    token_count: int = 0


class Extent(Model):
    """A run of whole stored objects of one split that one task writes: items ``start:stop`` of the tokens, or of the arrays
    that have an entry a document.
    """

    split: Split
    of_tokens: bool
    start: int
    stop: int
    last_entry: int | None = Field(None, description="The token count, for the one that ends seq_starts")

    @property
    def label(self) -> str:
        return f"{self.split} {'tokens' if self.of_tokens else 'documents'} {self.start:,} to {self.stop:,}"


class Span(Extent):
    """An extent whose items come from token shards."""

    places: tuple[ShardPlace, ...]


class Entries(NamedTuple):
    """What is stored of some documents beside their tokens: where each starts, its key, its file and its row, uint64[n]."""

    starts: npt.NDArray[np.uint64]
    key: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]


class Written(NamedTuple):
    """What a task wrote of a span."""

    objects: tuple[StoredObject, ...]
    max_token_id: int


class Counts(NamedTuple):
    """What a shard holds of each split."""

    train_seqs: int
    train_tokens: int
    validation_seqs: int
    validation_tokens: int


def chosen(split: Split, all_in: Split | None, rule: SplitRule, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which documents of a shard belong to *split*: bool[n]."""
    if all_in is not None:
        return np.full(len(keys), all_in == split)
    drawn = rule.draws(keys)
    return drawn if split == "validation" else ~drawn


def count_documents(at: ShardPlace, rule: SplitRule, root: Store) -> Counts:
    """How many sequences and tokens of each split a shard holds, from its keys and starts."""
    tokens, documents = _open(root, at.shard, "seq_starts", "documents/key")
    here = (tokens.seq_count, tokens.token_count)
    if at.all_in is not None or rule.fraction == 0:
        return Counts(0, 0, *here) if at.all_in == "validation" else Counts(*here, 0, 0)
    lengths = np.diff(tokens.seq_starts.read(0, tokens.seq_count + 1))
    drawn = rule.draws(documents.key.read(0, tokens.seq_count))
    seqs, count = int(drawn.sum()), int(lengths[drawn].sum())
    return Counts(tokens.seq_count - seqs, tokens.token_count - count, seqs, count)


def lay_out(counted: Iterable[tuple[ShardPlace, Counts]], layout: LayoutName) -> Iterator[Span]:
    """The spans of both splits, by prefix sums over the shards' counts, each as soon as its last shard is known: objects
    can be written while later slices are still tokenized.
    """
    lines = [_Line(split, of_tokens, LAYOUTS[layout]) for split in SPLITS for of_tokens in (True, False)]
    for at, counts in counted:
        for line in lines:
            yield from line.add(at, counts)
    ends = {line.split: line.end for line in lines if line.of_tokens}
    for line in lines:
        yield from line.rest(ends[line.split])


def items_a_task(of_tokens: bool, layout: Layout) -> int:
    """How many items of an array one task writes: as many as whole objects hold."""
    length = layout.encoded_tokens.object_length if of_tokens else layout.seq_starts.object_length
    return length * max(1, (SPAN_TOKENS if of_tokens else SPAN_DOCUMENTS) // length)


class _Line:
    """One array's items as they come, cut into spans. (shard, item) -> (split, item): a shard's items begin where those of
    the shards before it end.
    """

    def __init__(self, split: Split, of_tokens: bool, layout: Layout) -> None:
        self.split, self.of_tokens = split, of_tokens
        self._step = items_a_task(of_tokens, layout)
        self._start = self._seqs = self._tokens = 0
        self._open: list[ShardPlace] = []

    @property
    def end(self) -> int:
        return self._tokens if self.of_tokens else self._seqs

    def add(self, at: ShardPlace, counts: Counts) -> Iterator[Span]:
        seqs, tokens = counts[:2] if self.split == "train" else counts[2:]
        if seqs == 0:
            return
        place = {"first_seq": self._seqs, "seq_count": seqs, "first_token": self._tokens, "token_count": tokens}
        self._open.append(at.model_copy(update=place))
        self._seqs += seqs
        self._tokens += tokens
        while self.end >= self._start + self._step:
            yield self._span(self._start + self._step, None)

    def rest(self, token_count: int) -> Iterator[Span]:
        """What is left; the documents' last span may have none, but it ends seq_starts."""
        if not self.of_tokens:
            yield self._span(self.end, token_count)
        elif self.end > self._start:
            yield self._span(self.end, None)

    def _span(self, stop: int, last_entry: int | None) -> Span:
        span = Span(
            split=self.split,
            of_tokens=self.of_tokens,
            start=self._start,
            stop=stop,
            places=tuple(self._open),
            last_entry=last_entry,
        )
        self._start = stop
        self._open = [at for at in self._open if self._end_of(at) > stop]
        return span

    def _end_of(self, at: ShardPlace) -> int:
        return at.first_token + at.token_count if self.of_tokens else at.first_seq + at.seq_count


def write_span(span: Span, rule: SplitRule, layout: LayoutName, place: Place, version: str) -> Written:
    """Write a span's objects below ``versions/<version>``, each once and whole."""
    if span.of_tokens:
        tokens = (tokens for at in span.places for tokens in _tokens_of(span, at, rule, place))
        return store_tokens(span, tokens, layout, place, version)
    entries = (_entries_of(span, at, rule, place) for at in span.places)
    return store_documents(span, entries, layout, place, version)


def store_tokens(at: Extent, tokens: Iterable[npt.NDArray[np.uint32]], layout: LayoutName, place: Place, version: str) -> Written:
    """Write the objects of an extent of tokens: *tokens*, one array behind the other."""
    spec = LAYOUTS[layout].encoded_tokens
    store = place.root / "versions" / version / at.split
    largest = 0
    first = at.start // spec.object_length
    with ArrayWriter(store, "encoded_tokens", spec, first_object=first, write_metadata=False) as writer:
        for some in tokens:
            largest = max(largest, int(some.max(initial=0)))
            writer.append(some)
            meter.add("split", some.nbytes)
    _check_length(at, writer.length)
    return Written(_named(at.split, writer.objects), largest >> 1)


def store_documents(at: Extent, entries: Iterable[Entries], layout: LayoutName, place: Place, version: str) -> Written:
    """Write the objects of an extent of documents: seq_starts and, beside the arrays of the format, key, file and row."""
    spec, beside = LAYOUTS[layout].seq_starts, document_spec(LAYOUTS[layout])
    store = place.root / "versions" / version
    first = at.start // spec.object_length
    starts = ArrayWriter(store / at.split, "seq_starts", spec, first_object=first, write_metadata=False)
    columns = {
        name: ArrayWriter(store / f"documents/{at.split}", name, beside, first_object=first, write_metadata=False)
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
        (*_named(at.split, starts.objects), *_named(f"documents/{at.split}", beside_objects)),
        0,
    )


def _open(root: Store, shard: TokenShard, *names: str) -> tuple[FlatTokens, DocumentArrays]:
    """A shard of which the arrays *names* are about to be read. No store is asked for what the receipt tells."""
    if root.is_local:
        return open_shard(root, shard)
    directory = f"{CACHE}/{shard.key}"
    store = KnownStore.of(root, directory, shard.objects, _metadata_of(shard))
    store.fetch(f"{directory}/{stored.key}" for stored in shard.objects if stored.key.startswith(names))
    return open_shard(store, shard)


def _metadata_of(shard: TokenShard) -> Iterator[bytes]:
    """The metadata that a shard has if it was written by this code."""
    column = document_spec(SHARD_LAYOUT)
    for spec, length in (
        (SHARD_LAYOUT.encoded_tokens, shard.token_count),
        (SHARD_LAYOUT.seq_starts, shard.written + 1),
        (column, shard.written),
    ):
        yield from spec.metadata(length).values()
    yield from group_metadata(SHARD_LAYOUT.zarr_format, {"max_token_id": shard.max_token_id}).values()


def _tokens_of(span: Span, at: ShardPlace, rule: SplitRule, place: Place) -> Iterator[npt.NDArray[np.uint32]]:
    """The span's tokens that come from one shard, in order."""
    source, documents = _open(place.root, at.shard, "seq_starts", "documents/key", "encoded_tokens")
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
    yield from _runs(source, begins[some], ends[some])


class _Piece(NamedTuple):
    """Tokens ``begin:end`` of a shard that are read at once, and the runs ``first:last`` that lie in them."""

    begin: int
    end: int
    first: int
    last: int


def _pieces(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], reads: Reads) -> Iterator[_Piece]:
    """What is read for many runs: blocks, or, where a block holds little of them, each run alone."""
    starts = np.arange(int(begins[0]) // reads.block * reads.block, int(ends[-1]), reads.block)
    firsts = np.searchsorted(ends, starts, "right")
    lasts = np.searchsorted(begins, starts + reads.block, "left")
    for start, first, last in zip(starts.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        if first == last:
            continue
        low, high = np.maximum(begins[first:last], start), np.minimum(ends[first:last], start + reads.block)
        if reads.sparse is not None and (high - low).sum() * reads.sparse < high[-1] - low[0]:
            yield from map(_Piece, low.tolist(), high.tolist(), range(first, last), range(first + 1, last + 1))
        else:
            yield _Piece(int(low[0]), int(high[-1]), first, last)


def _runs(source: FlatTokens, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint32]]:
    """The tokens of many runs, the next pieces being read while one is used."""
    if not len(begins):
        return
    reads = FROM_DISK if source.store.is_local else FROM_STORE
    buffers = deque(np.empty((READ_AHEAD + 1, reads.block), np.uint32))

    with ThreadPoolExecutor(READ_AHEAD) as readers:
        under_way: deque[tuple[_Piece, Future[npt.NDArray[np.uint32]]]] = deque()
        for piece in _pieces(begins, ends, reads):
            out = buffers[0][: piece.end - piece.begin]
            buffers.rotate(-1)  # a buffer is used again when all the others have been
            under_way.append((piece, readers.submit(source.encoded_tokens.read, piece.begin, piece.end, out)))
            if len(under_way) == READ_AHEAD:
                yield from _of_piece(*under_way.popleft(), begins, ends)
        while under_way:
            yield from _of_piece(*under_way.popleft(), begins, ends)


def _of_piece(
    piece: _Piece, reading: Future[npt.NDArray[np.uint32]], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.uint32]]:
    """The tokens of a piece that belong to its runs."""
    block = reading.result()
    low = np.maximum(begins[piece.first : piece.last], piece.begin) - piece.begin
    high = np.minimum(ends[piece.first : piece.last], piece.end) - piece.begin
    if len(low) <= MAX_SLICES_OF_A_BLOCK:
        yield from (block[i:j] for i, j in zip(low, high, strict=True))
        return
    edge = np.zeros(len(block) + 1, np.int8)
    edge[low] += 1
    edge[high] -= 1
    yield block[np.cumsum(edge[:-1], dtype=np.int8).view(bool)]


def _entries_of(span: Span, at: ShardPlace, rule: SplitRule, place: Place) -> Entries:
    """The span's documents that come from one shard."""
    source, documents = _open(place.root, at.shard, "seq_starts", "documents/key", "documents/row")
    keys = documents.key.read(0, source.seq_count)
    keep = np.flatnonzero(chosen(span.split, at.all_in, rule, keys))
    lengths = np.diff(source.seq_starts.read(0, source.seq_count + 1))[keep]
    ends = np.cumsum(lengths) + np.uint64(at.first_token)
    here = slice(max(span.start - at.first_seq, 0), min(span.stop - at.first_seq, len(keep)))
    rows = documents.row.read(0, source.seq_count)[keep][here]
    file = np.full(len(rows), at.file, np.uint64)
    return Entries((ends - lengths)[here], keys[keep][here], file, rows + np.uint64(at.first_row))


def _check_length(at: Extent, length: int) -> None:
    if length != at.stop - at.start:
        raise AssertionError(f"{at.label}: {length} items came instead of {at.stop - at.start}")


def _named(prefix: str, objects: list[StoredObject]) -> tuple[StoredObject, ...]:
    return tuple(stored._replace(key=f"{prefix}/{stored.key}") for stored in objects)
