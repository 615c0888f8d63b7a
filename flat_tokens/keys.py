"""Document keys: a stable 64-bit hash of a document's identity, the same on every machine and in every version.

The key of a byte string of n bytes is ``mix(n * A + sum over j of mix(word_j ^ ((j + 1) * B)))`` modulo 2**64, where
``word_j`` is its j-th group of eight bytes, little-endian, the last one padded with zero bytes, and
``mix(x) = x' * D`` with ``x' = y ^ (y >> 32)`` and ``y = x * C``, all modulo 2**64.
Sums of mixed words vectorise over whole batches of documents, where a chained hash would need a call for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import TokenBatch

A = np.uint64(0x9E3779B97F4A7C15)
B = np.uint64(0xC2B2AE3D27D4EB4F)
C = np.uint64(0xD6E8FEB86659FD93)
D = np.uint64(0xFF51AFD7ED558CCD)
SHIFT = np.uint64(32)

BLOCK_BYTES = 1 << 18
"""Bytes hashed at a time: the temporaries of one block stay in the processor's second-level cache."""


def document_keys(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The keys of many byte strings: uint64[n]; string i is ``data[offsets[i]:offsets[i + 1]]``."""
    lengths = np.diff(offsets)
    sums = np.zeros(len(lengths), np.uint64)
    first = 0
    while first < len(lengths):
        # Whole strings of about one block; a longer one stands alone and is hashed block by block.
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1)
        if last == first + 1:
            sums[first] = _long_sum(data[offsets[first] : offsets[last]])
        else:
            sums[first:last] = _block_sums(data, offsets[first : last + 1])
        first = last
    return mix(lengths.astype(np.uint64) * A + sums)


def token_keys(batches: Iterable[TokenBatch]) -> Iterator[npt.NDArray[np.uint64]]:
    """The keys of sequences that have only their tokens for an identity: of the ids as little-endian uint32. Arrays uint64[n]
    with one key for each sequence, in order.

    Batches follow one another and may end within a sequence; see ``Readable.batches``.
    """
    last: _TokenSum | None = None  # the sum of the sequence that may continue in the next batch
    for batch in batches:
        ids = batch.encoded_tokens >> np.uint32(1)
        starts = batch.seq_starts.astype(np.int64)
        if last is not None:
            last.add(ids[: starts[0]])
        if len(starts) == 1:
            continue
        before = [] if last is None else [last.key()]
        yield np.concatenate([*before, document_keys(ids.view(np.uint8), starts[:-1] * 4)])
        last = _TokenSum()
        last.add(ids[starts[-2] :])
    if last is not None:
        yield last.key()


class _TokenSum:
    """The key of one sequence whose tokens come in parts."""

    def __init__(self) -> None:
        self._sum = np.zeros(1, np.uint64)
        self._words = self._tokens = 0
        self._odd = np.empty(0, np.uint32)

    def add(self, ids: npt.NDArray[np.uint32]) -> None:
        """Add uint32[n]."""
        self._tokens += len(ids)
        if len(self._odd):
            ids = np.concatenate([self._odd, ids])
        even = len(ids) // 2 * 2
        for start in range(0, even, BLOCK_BYTES // 4):
            self._add_words(ids[start : min(start + BLOCK_BYTES // 4, even)].view(np.uint64).copy())
        self._odd = ids[even:].copy()

    def key(self) -> npt.NDArray[np.uint64]:
        """uint64[1]. Nothing is added afterwards."""
        if len(self._odd):
            self._add_words(self._odd.astype(np.uint64))
        return mix(np.array([4 * self._tokens], np.uint64) * A + self._sum)

    def _add_words(self, words: npt.NDArray[np.uint64]) -> None:
        positions = np.arange(self._words + 1, self._words + 1 + len(words), dtype=np.uint64)
        positions *= B
        words ^= positions
        self._sum += np.add.reduce(mix(words))
        self._words += len(words)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter the bits of each element; changes *x*."""
    x *= C
    x ^= x >> SHIFT
    x *= D
    return x


def _long_sum(data: npt.NDArray[np.uint8]) -> np.uint64:
    total = np.zeros(1, np.uint64)
    for start in range(0, len(data), BLOCK_BYTES):
        piece = data[start : start + BLOCK_BYTES]
        words = np.zeros(-(-len(piece) // 8), np.uint64)
        words.view(np.uint8)[: len(piece)] = piece
        positions = np.arange(start // 8 + 1, start // 8 + 1 + len(words), dtype=np.uint64)
        positions *= B
        words ^= positions
        total += np.add.reduce(mix(words))
    return total[0]  # type: ignore[no-any-return]


def _block_sums(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
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
