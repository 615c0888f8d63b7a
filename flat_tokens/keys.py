"""Document keys: a stable 64-bit hash of a document's identity, the same on every machine and in every version.

The key of a byte string of n bytes is ``mix(n * A + sum over j of mix(word_j ^ ((j + 1) * B)))`` modulo 2**64, where
``word_j`` is its j-th group of eight bytes, little-endian, the last one padded with zero bytes, and
``mix(x) = x' * D`` with ``x' = y ^ (y >> 32)`` and ``y = x * C``, all modulo 2**64.
Sums of mixed words vectorise over whole batches of documents, where a chained hash would need a call for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np

from flat_tokens.annotations import Int64s, UInt8s, UInt64s
from flat_tokens.batch import TokenBatch

A = np.uint64(0x9E3779B97F4A7C15)
B = np.uint64(0xC2B2AE3D27D4EB4F)
C = np.uint64(0xD6E8FEB86659FD93)
D = np.uint64(0xFF51AFD7ED558CCD)
SHIFT = np.uint64(32)

BLOCK_BYTES = 1 << 18
"""Bytes hashed at a time: the temporaries of one block stay in the processor's second-level cache."""


def document_keys(data: UInt8s, offsets: Int64s) -> UInt64s:
    """The keys of many byte strings: uint64[n]; string i is ``data[offsets[i]:offsets[i + 1]]``."""
    lengths = np.diff(offsets)
    sums = np.zeros(len(lengths), np.uint64)
    first = 0
    while first < len(lengths):
        # Whole strings of about one block; a longer one stands alone and is hashed block by block.
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1)
        if last == first + 1:
            sums[first] = _Sum().add(data[offsets[first] : offsets[last]]).total()[0]
        else:
            sums[first:last] = _block_sums(data, offsets[first : last + 1])
        first = last
    return mix(lengths.astype(np.uint64) * A + sums)


def keys_of_bytes(strings: Sequence[bytes]) -> UInt64s:
    """The keys of some byte strings: uint64[n]."""
    return document_keys(np.frombuffer(b"".join(strings), np.uint8), np.cumsum([0, *map(len, strings)]))


def strings_by_key(strings: Iterable[str]) -> dict[int, str]:
    """Strings by their keys."""
    some = list(strings)
    return dict(zip(keys_of_bytes([one.encode() for one in some]).tolist(), some, strict=True))


def token_keys(batches: Iterable[TokenBatch]) -> Iterator[UInt64s]:
    """The keys of sequences that have only their tokens for an identity: of the ids as little-endian uint32. Arrays uint64[n]
    with one key for each sequence, in order. Batches may end within a sequence; see ``Readable.batches``.
    """
    last: _Sum | None = None  # of the sequence that may continue in the next batch
    for batch in batches:
        ids = (batch.encoded_tokens >> np.uint32(1)).view(np.uint8)
        starts = batch.seq_starts.astype(np.int64) * 4
        if last is not None:
            last.add(ids[: starts[0]])
        if len(starts) == 1:
            continue
        before = [] if last is None else [last.key()]
        yield np.concatenate([*before, document_keys(ids, starts[:-1])])
        last = _Sum().add(ids[starts[-2] :])
    if last is not None:
        yield last.key()


class _Sum:
    """The sum of one string's mixed words, whose bytes come in parts."""

    def __init__(self) -> None:
        self._size = self._words = 0
        self._sum, self._rest = np.zeros(1, np.uint64), np.empty(0, np.uint8)

    def add(self, data: UInt8s) -> Self:
        self._size += len(data)
        if len(self._rest):
            data = np.concatenate([self._rest, data])
        whole = len(data) // 8 * 8
        for start in range(0, whole, BLOCK_BYTES):
            self._add_words(data[start : min(start + BLOCK_BYTES, whole)].view(np.uint64).copy())
        self._rest = data[whole:].copy()
        return self

    def total(self) -> UInt64s:
        """uint64[1]. Nothing is added afterwards."""
        if len(self._rest):
            self._add_words(np.pad(self._rest, (0, 8 - len(self._rest))).view(np.uint64))
        return self._sum

    def key(self) -> UInt64s:
        """The string's key: uint64[1]. Nothing is added afterwards."""
        return mix(np.array([self._size], np.uint64) * A + self.total())

    def _add_words(self, words: UInt64s) -> None:
        positions = np.arange(self._words + 1, self._words + 1 + len(words), dtype=np.uint64)
        positions *= B
        words ^= positions
        self._sum += np.add.reduce(mix(words))
        self._words += len(words)


def concatenated(parts: Iterable[UInt64s]) -> UInt64s:
    """Several arrays as one, an empty one of none: uint64[n]."""
    return np.concatenate([*parts, np.empty(0, np.uint64)])


def mix(x: UInt64s) -> UInt64s:
    """Scatter the bits of each element; changes *x*."""
    x *= C
    x ^= x >> SHIFT
    x *= D
    return x


def _block_sums(data: UInt8s, offsets: Int64s) -> UInt64s:
    """The sum of mixed words of each byte string in a block: uint64[n], modulo 2**64."""
    begin, end = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(end - begin + 8, np.uint8)
    padded[: end - begin] = data[begin:end]
    windows = np.ndarray(end - begin + 1, "<u8", padded, strides=(1,))  # windows[i] = bytes i to i + 7
    lengths = np.diff(offsets)
    counts = (lengths + 7) >> 3
    ends = np.cumsum(counts)
    # word k of the block -> word j of its string: j = k - words of the strings before it
    index = np.arange(int(ends[-1]), dtype=np.int64)
    index -= np.repeat(ends - counts, counts)
    positions = index.astype(np.uint64)
    positions += np.uint64(1)
    positions *= B
    index <<= 3
    index += np.repeat(offsets[:-1] - begin, counts)
    words = windows[index].astype(np.uint64, copy=False)
    partial = np.flatnonzero(lengths & 7)
    words[ends[partial] - 1] &= (np.uint64(1) << (lengths[partial] & 7).astype(np.uint64) * np.uint64(8)) - np.uint64(1)
    words ^= positions
    sums = np.zeros(len(counts), np.uint64)
    full = counts > 0  # reduceat gives an empty group its neighbour's first element
    sums[full] = np.add.reduceat(mix(words), (ends - counts)[full]) if len(words) else 0
    return sums
