"""Shuffling the documents of a split that fits in no memory, in two passes over the disk.

Document i of the split goes to place ``p(i)``; p is a keyed permutation that depends on the seed alone. The places are cut into
*buckets*. The first pass reads one piece of the input after the other and stores its documents in the order of their places: a
flat-tokens array for each piece, in which every bucket has its share. The second pass reads the shares of a bucket, puts their
documents into their places and writes whole objects of the output. Both passes read and write long runs, and hold one piece or
one bucket for each worker.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.arrays.writing import ArrayWriter
from flat_tokens.batch import TokenBatch
from flat_tokens.manifest import SPLITS
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys
from flat_tokens.stores.store import Store
from flat_tokens.writer import FlatTokensWriter
from tasks.derive.pieces import ALL, BLOCK_TOKENS, Piece, Taken, open_piece, read_documents, taken_of
from tasks.models import Model, Split
from tasks.output.paths import DOCUMENTS
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.read import SHARD_LAYOUT, document_spec

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


class Bucket(Model):
    """A range of places of a shuffled split. Its documents are in *pieces* stored pieces."""

    shuffling: Shuffling
    pieces: int
    number: int
    first_seq: int
    seq_count: int
    first_token: int
    token_count: int


def shuffling_of(split: Split, seed: int, pieces: Sequence[Piece]) -> Shuffling:
    """How the documents of *pieces* are shuffled."""
    tokens, documents = sum(piece.token_count for piece in pieces), sum(piece.seq_count for piece in pieces)
    size = min(max(BUCKET_TOKENS, tokens // MAX_BUCKETS), MAX_BUCKET_TOKENS)
    buckets = max(-(-tokens // size), -(-documents // BUCKET_DOCUMENTS))
    return Shuffling(split=split, seed=seed, seq_count=documents, buckets=min(buckets, documents))


def scatter(piece: Piece, shufflings: dict[Split, Shuffling], place: Place) -> tuple[int, ...]:
    """Store a piece's documents in the order of their places. Return its count of tokens for each bucket."""
    shuffling, spec = shufflings[piece.split], document_spec(SHARD_LAYOUT)
    source = open_piece(piece)
    taken = taken_of(piece, ALL, source, place)
    places = shuffling.places(np.arange(piece.first_seq, piece.first_seq + len(taken.key), dtype=np.uint64))
    order = np.argsort(places)
    tokens = np.empty(piece.token_count, np.uint32)
    at = 0
    for block in read_documents(source, taken.begins, taken.lengths):
        tokens[at : at + len(block)] = block
        at += len(block)
    begins = taken.begins - (taken.begins[0] if len(taken.begins) else 0)  # a piece is one run of the input
    bounds = np.searchsorted(places[order], shuffling.bounds())
    columns = {
        "place": places[order],
        "key": taken.key[order],
        "file": taken.file[order],
        "row": taken.row[order],
        "bucket": bounds.astype(np.uint64),
    }
    store = Store.at(place.staging) / f"{shuffling.directory}/{piece.number}"
    with FlatTokensWriter(store, SHARD_LAYOUT) as writer:
        for block, lengths in gather(tokens, begins[order], taken.lengths[order]):
            writer.append(TokenBatch(block, np.append(0, np.cumsum(lengths)).astype(np.uint64), 0))
            meter.add("shuffle", block.nbytes, len(lengths), len(block))
    for name, column in columns.items():
        with ArrayWriter(store / DOCUMENTS, name, spec) as column_writer:
            column_writer.append(column)
    sums = np.append(0, np.cumsum(taken.lengths[order]))
    return tuple(np.diff(sums[bounds]).tolist())


def gather(
    tokens: npt.NDArray[np.uint32], begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]:
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


class Scattered(NamedTuple):
    """A stored piece: its documents in the order of their places, and where those of each bucket begin."""

    tokens: FlatTokens
    place: StoredArray
    key: StoredArray
    file: StoredArray
    row: StoredArray
    bucket: StoredArray


@functools.lru_cache(OPEN_PIECES)
def _open_scattered(path: str) -> Scattered:
    """Open a stored piece once: the staging has a new name in each attempt, so what lies there never changes."""
    store = Store.at(path, read_once=True)
    columns = (open_array(store / f"{DOCUMENTS}/{name}", "uint64") for name in Scattered._fields[1:])
    return Scattered(open_split(store), *columns)


class _Share(NamedTuple):
    """A bucket's documents in one stored piece: ``first:last``, and where each starts."""

    piece: Scattered
    first: int
    last: int
    starts: npt.NDArray[np.int64]


def _shares_of(bucket: Bucket, place: Place) -> Iterator[_Share]:
    for number in range(bucket.pieces):
        piece = _open_scattered(f"{place.staging}/{bucket.shuffling.directory}/{number}")
        first, last = map(int, piece.bucket.read(bucket.number, bucket.number + 2))
        if first < last:
            yield _Share(piece, first, last, piece.tokens.seq_starts.read(first, last + 1).astype(np.int64))


def documents_of(bucket: Bucket, place: Place) -> Taken:
    """A bucket's documents in the order of their places. They begin in the tokens of its shares, one behind the other."""
    shares = list(_shares_of(bucket, place))
    lengths = np.concatenate([np.diff(share.starts) for share in shares])
    order = np.argsort(_column("place", shares))
    begins = np.cumsum(lengths) - lengths
    return Taken(begins[order], lengths[order], *(_column(name, shares)[order] for name in ("key", "file", "row")))


def _column(name: str, shares: list[_Share]) -> npt.NDArray[np.uint64]:
    return np.concatenate([getattr(share.piece, name).read(share.first, share.last) for share in shares])


def tokens_of(bucket: Bucket, documents: Taken, low: int, high: int, place: Place) -> Iterator[npt.NDArray[np.uint32]]:
    """Tokens ``low:high`` of a bucket whose documents are in their places."""
    tokens = np.empty(bucket.token_count, np.uint32)
    at = 0
    for share in _shares_of(bucket, place):
        for start in range(int(share.starts[0]), int(share.starts[-1]), BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, int(share.starts[-1]))
            share.piece.tokens.encoded_tokens.read(start, stop, tokens[at : at + stop - start])
            at += stop - start
    ends = np.cumsum(documents.lengths)
    first, last = int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends - documents.lengths, high))
    done = int(ends[first] - documents.lengths[first]) if first < len(ends) else 0
    for block, lengths in gather(tokens, documents.begins[first:last], documents.lengths[first:last]):
        yield block[max(low - done, 0) : max(high - done, 0)]
        done += int(lengths.sum())
