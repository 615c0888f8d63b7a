"""Document keys: a stable 64-bit hash of a document's identity, the same on every machine and in every version.

The key of a byte string of n bytes is ``mix(n * A + sum over j of mix(word_j ^ ((j + 1) * B)))`` modulo 2**64, where
``word_j`` is its j-th group of eight bytes, little-endian, the last one filled up with zero bytes, and
``mix(x) = x' * D`` with ``x' = y ^ (y >> 32)`` and ``y = x * C``, all modulo 2**64.
Sums of mixed words vectorise over whole batches of documents, where a chained hash would need a call for each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
        # Whole strings of about one block; a longer one stands alone and is hashed piece by piece.
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1)
        if last == first + 1:
            sums[first] = _long_sum(data[offsets[first] : offsets[last]])
        else:
            sums[first:last] = _block_sums(data, offsets[first : last + 1])
        first = last
    return mix(lengths.astype(np.uint64) * A + sums)


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
