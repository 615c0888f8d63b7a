"""Shuffling the documents of a split that fits in no memory, in two passes over the disk.

Document i of the split goes to place ``p(i)``; p is a keyed permutation that depends on the seed alone. The places are cut into
*buckets*. The first pass reads one piece of the input after the other and stores its documents in the order of their places: a
flat-tokens array for each piece, in which every bucket has its share. The second pass reads the shares of a bucket, puts their
documents into their places and writes whole objects of the output. Both passes read and write long runs, and hold one piece or
one bucket for each worker.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TokenBatch
from flat_tokens.columns import Columns, ColumnsWriter, Kinds, Part, joined
from flat_tokens.manifest import LOSS_MASK, SPLITS
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys
from flat_tokens.rows.views import Int64s
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.derive.pieces import ALL, BLOCK_TOKENS, Piece, Taken, columns_of, open_piece, read_documents, taken_of
from tasks.models import Model, Split
from tasks.output.paths import DOCUMENTS
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.read import SHARD_LAYOUT, document_spec
from tasks.split.spans import Placed
from tasks.split.write import DOCUMENT_ARRAYS

BUCKET_TOKENS = 1 << 23
MAX_BUCKET_TOKENS = 1 << 26
BUCKET_DOCUMENTS = 1 << 20
MAX_BUCKETS = 1 << 12
"""With more buckets their runs would be too short for a disk. Buckets become larger instead, as far as memory goes."""
GATHERED_TOKENS = 1 << 17
"""Tokens put into their places at a time, few enough for the processor's cache."""
OPEN_PIECES = 1 << 14


class Shuffling(Model):
    """How a split is shuffled: its *seq_count* documents go to so many *buckets*."""

    split: Split
    seed: int
    seq_count: int
    buckets: int
    kinds: dict[str, str] = Field({}, description="Of the kept columns")

    @property
    def directory(self) -> str:
        """Directory of the stored pieces, below the staging."""
        return f"shuffled/{self.split}"

    def places(self, documents: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The places of documents of the split: uint64[n]."""
        return KeyedPermutation(self.seq_count)(documents, derive_keys(self.seed, SPLITS.index(self.split)))

    def bounds(self) -> npt.NDArray[np.uint64]:
        """The first place of each bucket, and the end of the last one: uint64[buckets + 1]."""
        return np.array([self.seq_count * b // self.buckets for b in range(self.buckets + 1)], np.uint64)


class Bucket(Placed):
    """A range of places of a shuffled split. Its documents are in *pieces* stored pieces."""

    shuffling: Shuffling
    pieces: int
    number: int


def shuffling_of(split: Split, seed: int, pieces: Sequence[Piece], kinds: Kinds) -> Shuffling:
    """How the documents of *pieces* are shuffled."""
    tokens, documents = sum(piece.token_count for piece in pieces), sum(piece.seq_count for piece in pieces)
    size = min(max(BUCKET_TOKENS, tokens // MAX_BUCKETS), MAX_BUCKET_TOKENS)
    buckets = max(-(-tokens // size), -(-documents // BUCKET_DOCUMENTS))
    return Shuffling(split=split, seed=seed, seq_count=documents, buckets=min(buckets, documents), kinds=dict(kinds))


def scatter(piece: Piece, shufflings: dict[Split, Shuffling], place: Place) -> tuple[int, ...]:
    """Store a piece's documents in the order of their places. Return its count of tokens for each bucket."""
    shuffling, spec = shufflings[piece.split], document_spec(SHARD_LAYOUT)
    source = open_piece(piece)
    taken = taken_of(piece, ALL, source, place)
    places = shuffling.places(np.arange(piece.first_seq, piece.first_seq + len(taken.key), dtype=np.uint64))
    order = np.argsort(places)
    tokens = _all_of(source.encoded_tokens, taken, piece.token_count)
    mask = None if source.loss_mask is None else _all_of(source.loss_mask, taken, piece.token_count)
    begins = taken.begins - (taken.begins[0] if len(taken.begins) else 0)  # a piece is one run of the input
    bounds = np.searchsorted(places[order], shuffling.bounds())
    of_documents = [column[order] for column in (places, taken.key, taken.file, taken.row)]
    store = Store.at(place.staging) / f"{shuffling.directory}/{piece.number}"
    blocks = gather(tokens, begins[order], taken.lengths[order])
    masks = itertools.repeat(None) if mask is None else (some for some, _ in gather(mask, begins[order], taken.lengths[order]))
    with FlatTokensWriter(store, SHARD_LAYOUT, mask is not None) as writer:
        for (block, lengths), of_block in zip(blocks, masks, strict=False):
            writer.append(TokenBatch(block, np.append(0, np.cumsum(lengths)).astype(np.uint64), 0, of_block))
            meter.add("shuffle", block.nbytes, len(lengths), len(block))
    for name, column in zip(COLUMNS, [*of_documents, bounds.astype(np.uint64)], strict=True):
        with ArrayWriter(store / DOCUMENTS, name, spec) as column_writer:
            column_writer.append(column)
    if shuffling.kinds and len(order):
        kept = columns_of(piece, taken.numbers, shuffling.kinds).take(pa.array(order))
        with store.create(SCATTERED) as stored, ColumnsWriter(stored, shuffling.kinds) as columns_writer:
            columns_writer.append(kept)
    sums = np.append(0, np.cumsum(taken.lengths[order]))
    return tuple(np.diff(sums[bounds]).tolist())


def _all_of(source: StoredArray, taken: Taken, count: int) -> npt.NDArray[Any]:
    """The items of the documents that are taken, one behind the other: dtype[count]."""
    items, at = np.empty(count, source.numpy_dtype), 0
    for block in read_documents(source, taken.begins, taken.lengths):
        items[at : at + len(block)] = block
        at += len(block)
    return items


def gather(tokens: npt.NDArray[Any], begins: Int64s, lengths: Int64s) -> Iterator[tuple[npt.NDArray[Any], Int64s]]:
    """Runs of *tokens*, one behind the other, in blocks of whole runs, each with the lengths of its runs."""
    ends = np.cumsum(lengths)
    first, done = 0, 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(ends, done + GATHERED_TOKENS, "right")))
        mine, here = lengths[first:last], begins[first:last]
        if last == first + 1:
            yield tokens[here[0] : here[0] + mine[0]], mine
        else:
            # place in the gathered block -> place in tokens: each run's begin, and on from there
            index = np.arange(int(ends[last - 1]) - done)
            index += np.repeat(here - (ends[first:last] - mine - done), mine)
            yield tokens[index], mine
        first, done = last, int(ends[last - 1])


SCATTERED = f"{DOCUMENTS}/columns.parquet"
COLUMNS = ("place", "key", "file", "row", "bucket")
"""The arrays beside a stored piece's tokens: facts of its documents in the order of their places; where each bucket's begin."""


@functools.lru_cache(OPEN_PIECES)
def _open_scattered(path: str) -> tuple[FlatTokens, dict[str, StoredArray]]:
    """Open a stored piece once: the staging has a new name in each attempt, so what lies there never changes."""
    store = Store.at(path, read_once=True)
    return open_split(store), {name: open_array(store / f"{DOCUMENTS}/{name}", "uint64") for name in COLUMNS}


class _Share(NamedTuple):
    """A bucket's documents in one stored piece: ``first:last``, and where each starts."""

    tokens: FlatTokens
    columns: dict[str, StoredArray]
    first: int
    last: int
    starts: Int64s


def _shares_of(bucket: Bucket, place: Place) -> Iterator[_Share]:
    for number in range(bucket.pieces):
        tokens, columns = _open_scattered(f"{place.staging}/{bucket.shuffling.directory}/{number}")
        first, last = map(int, columns["bucket"].read(bucket.number, bucket.number + 2))
        if first < last:
            yield _Share(tokens, columns, first, last, tokens.seq_starts.read(first, last + 1).astype(np.int64))


def documents_of(bucket: Bucket, place: Place) -> Taken:
    """A bucket's documents in the order of their places. They begin in the tokens of its shares, one behind the other."""
    shares = list(_shares_of(bucket, place))

    def column(name: str) -> npt.NDArray[np.uint64]:
        return np.concatenate([share.columns[name].read(share.first, share.last) for share in shares])

    lengths = np.concatenate([np.diff(share.starts) for share in shares])
    order = np.argsort(column("place"))
    begins = np.cumsum(lengths) - lengths
    key, file, row = (column(name)[order] for name in DOCUMENT_ARRAYS)
    return Taken(begins[order], lengths[order], key, file, row, order)


def columns_in(bucket: Bucket, documents: Taken, place: Place) -> pa.RecordBatch:
    """The kept columns of a bucket whose documents are in their places."""
    kinds, found = bucket.shuffling.kinds, []
    for share in _shares_of(bucket, place):
        kept = Columns(share.tokens.store, kinds, (Part(SCATTERED, 0, share.tokens.seq_count),))
        found.append(kept.take(np.arange(share.first, share.last), list(kinds)))
    return joined(found).take(pa.array(documents.numbers))


def items_of(bucket: Bucket, documents: Taken, low: int, high: int, place: Place, name: str) -> Iterator[npt.NDArray[Any]]:
    """Items ``low:high`` of the array *name*, with one a token, of a bucket whose documents are in their places."""
    tokens, at = np.empty(bucket.token_count, np.uint8 if name == LOSS_MASK else np.uint32), 0
    for share in _shares_of(bucket, place):
        array = getattr(share.tokens, name)
        for start in range(int(share.starts[0]), int(share.starts[-1]), BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, int(share.starts[-1]))
            array.read(start, stop, tokens[at : at + stop - start])
            at += stop - start
    ends = np.cumsum(documents.lengths)
    first, last = int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends - documents.lengths, high))
    done = int(ends[first] - documents.lengths[first]) if first < len(ends) else 0
    for block, lengths in gather(tokens, documents.begins[first:last], documents.lengths[first:last]):
        yield block[max(low - done, 0) : max(high - done, 0)]
        done += int(lengths.sum())
