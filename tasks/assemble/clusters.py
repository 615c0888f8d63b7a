"""Clusters of similar texts, by their signatures: banding finds pairs, an estimate decides, union-find joins them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import Bools, Int64Pair, Int64s, UInt64s
from flat_tokens.formats.contract import ahead
from flat_tokens.keys import mix
from tasks.text.signatures import BYTES, NO_SHINGLE, NUMBERS, similarity

WIDE_FROM = 0.9
"""From this threshold on a band is eight bytes: 99 in 100 pairs at the threshold share one of 32. Below, four bytes of 64."""
NEIGHBOURS = 16
"""Documents of a band are compared with so many before them, and with the first one."""
PAIRS = 1 << 15
"""Pairs compared at a time."""
BANDS_BYTES = 1 << 28
"""Of the bands that are copied out of the signatures at a time."""
LOW = np.uint64(0xFFFFFFFF)
"""The half of a number that has the text when a band is sorted; the other half has what the texts are sorted by."""
ERRORS = 1.0
"""Standard errors by which an estimate may be below the threshold."""


def least_similarity(threshold: float) -> npt.NDArray[np.float64]:
    """The least estimate at which two texts belong together, by the bins that it goes by: float64[BYTES + 1]. Few bins of many
    are nearly all of the shingles: such an estimate is nearly exact.
    """
    bins = np.arange(BYTES + 1)
    with np.errstate(divide="ignore"):
        shingles = -BYTES * np.log1p(-bins / BYTES)  # of which so many bins are full; infinite for all of them
    unseen = np.maximum(1 - bins / np.maximum(shingles, 1), 0)
    error = np.sqrt(threshold * (1 - threshold) / np.maximum(bins, 1) * unseen)
    return np.where(bins > 0, threshold - ERRORS * error, 2.0)


def clusters(signatures: UInt64s, threshold: float) -> Int64s:
    """The number of the first text of each text's cluster: int64[n]. *signatures*: uint64[n, NUMBERS]. Texts that have no
    words are alone.
    """
    forest, least = _Forest(len(signatures)), least_similarity(threshold)
    for texts, first in ahead(map(_runs, _bands(signatures, threshold))):
        for one, other in _candidates(texts, first, forest):
            for start in range(0, len(one), PAIRS):
                a, b = one[start : start + PAIRS], other[start : start + PAIRS]
                apart = forest.roots(a) != forest.roots(b)
                a, b = a[apart], b[apart]
                found, bins = similarity(signatures[a], signatures[b])
                similar = found >= least[bins]
                forest.join(a[similar], b[similar])
    return forest.roots(np.arange(len(signatures)))


def _bands(signatures: UInt64s, threshold: float) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """The bands of all texts: uint64[n] or uint32[n] each."""
    at_once = max(1, min(NUMBERS, BANDS_BYTES // (8 * max(len(signatures), 1))))
    for start in range(0, NUMBERS, at_once):
        for numbers in np.ascontiguousarray(signatures[:, start : start + at_once].T):
            yield from (numbers,) if threshold >= WIDE_FROM else np.ascontiguousarray(numbers.view("<u4").reshape(-1, 2).T)


def _runs(band: npt.NDArray[np.unsignedinteger]) -> Int64Pair:
    """The texts that agree in a band with others, run after run, in order; and where each one's run begins: int64[m] each."""
    packed = mix(band.copy()) & ~LOW if band.itemsize == 8 else band.astype(np.uint64) << np.uint64(32)
    packed |= np.arange(len(band), dtype=np.uint64)
    packed.sort()  # numbers alone are sorted in a quarter of the time that their order takes, and as fast at any count
    order, begins = (packed & LOW).view(np.int64), _begins(packed >> np.uint64(32))
    members = np.flatnonzero(~(begins[1:] & begins[:-1]))
    texts = order[members]
    texts = texts[band[texts] != band.dtype.type(NO_SHINGLE & np.uint64(np.iinfo(band.dtype).max))]
    if band.itemsize == 8:  # a few texts agree in the half that was sorted, and in no more
        texts = texts[np.lexsort((texts, band[texts]))]
    begins = _begins(band[texts])
    members = np.flatnonzero(~(begins[1:] & begins[:-1]))
    firsts = np.flatnonzero(begins[members])
    return texts[members], np.repeat(firsts, np.diff(firsts, append=len(members)))


def _begins(ordered: npt.NDArray[np.unsignedinteger]) -> Bools:
    """Where another value begins, and the end: bool[n + 1]."""
    begins = np.ones(len(ordered) + 1, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:-1])
    return begins


def _candidates(texts: Int64s, first: Int64s, forest: _Forest) -> Iterator[Int64Pair]:
    """Pairs of texts that agree in a band, as far as they are near each other in it."""
    if not len(texts):
        return
    for back in range(1, NEIGHBOURS + 1):
        at = np.flatnonzero(np.arange(len(texts)) - back >= first)
        if not len(at):
            return
        yield texts[at - back], texts[at]
        if back == 1:  # runs that are one cluster by now need no more
            roots, begins = forest.roots(texts), np.flatnonzero(first == np.arange(len(texts)))
            apart, sizes = np.logical_or.reduceat(roots != roots[first], begins), np.diff(begins, append=len(texts))
            texts, sizes = texts[np.repeat(apart, sizes)], sizes[apart]
            if not len(texts):
                return
            first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    at = np.flatnonzero(np.arange(len(texts)) - NEIGHBOURS > first)
    if len(at):
        yield texts[first[at]], texts[at]


class _Forest:
    """Union-find over many pairs at a time: the root of a tree is its least number."""

    def __init__(self, count: int) -> None:
        self._parent = np.arange(count)

    def roots(self, numbers: Int64s) -> Int64s:
        """The root of each."""
        found = self._parent[numbers]
        while True:
            above = self._parent[found]
            if (above == found).all():
                break
            found = above
        self._parent[numbers] = found
        return found

    def join(self, one: Int64s, other: Int64s) -> None:
        """Join the trees of each pair."""
        while len(one):
            one, other = self.roots(one), self.roots(other)
            apart = one != other
            one, other = one[apart], other[apart]
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))
