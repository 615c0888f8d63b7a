"""Duplicates: documents whose text an earlier document has, byte for byte. The first in the order of the sources stays.

A slice that is streamed into the version is compared while its tokens are on their way: those before it have been by then. One
that is stored is compared when its part is added.

Near-duplicates: documents whose texts are nearly that of another. Of a cluster the first in the order of the sources stays, or
all stay, and the lowest key names it. A document may join two clusters that were apart, so what stays is known when all documents
are: their signatures go to a file of the staging, which the system keeps in memory as far as there is room, and the clusters are
found when the last part has arrived: banding finds pairs, an estimate decides, union-find joins them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.annotations import Bools, Floats, Int64Pair, Int64s, UInt64s, UInts
from flat_tokens.keys import mix
from flat_tokens.rows.split import ahead
from tasks.config import NearDuplicates
from tasks.output.target import Target
from tasks.parts.opening import open_part, with_repeats
from tasks.parts.part import NEAR_DUPLICATE_REASON, ShardPart
from tasks.progress import meter
from tasks.rows import DIGEST, KEY, OF, REASON, SIMILARITY, TEXT_BYTES, fact
from tasks.text.signatures import BYTES, NO_SHINGLE, NUMBERS, similarity


class Originals(NamedTuple):
    """Documents that are copies, by their numbers among those that were added: int64[m]; and the key of the document that each
    is a copy of: uint64[m].
    """

    copies: Int64s
    of: UInt64s


class _SortedDigests(NamedTuple):
    """Texts by the halves of their digests, in the order of ``high``; and the key of the first document."""

    high: UInt64s
    low: UInt64s
    key: UInt64s

    def find(self, high: UInt64s, low: UInt64s) -> Int64s:
        """The place of each digest, -1 if it is not there: int64[m]."""
        at, found, open_ = np.searchsorted(self.high, high), np.full(len(high), -1), np.arange(len(high))
        while len(open_):
            open_ = open_[at[open_] < len(self.high)]
            open_ = open_[self.high[at[open_]] == high[open_]]
            is_it = self.low[at[open_]] == low[open_]
            found[open_[is_it]] = at[open_[is_it]]
            open_ = open_[~is_it]  # another digest with the same half follows
            at[open_] += 1
        return found

    def merged(self, other: _SortedDigests) -> _SortedDigests:
        order = np.argsort(np.concatenate([self.high, other.high]), kind="stable")
        both: Any = zip(self, other, strict=True)
        return _SortedDigests(*(np.concatenate(pair)[order] for pair in both))


@dataclass
class FirstTexts:
    """The texts that have been met, by their digests: 24 bytes of memory each, and three times that for a moment."""

    _runs: list[_SortedDigests] = field(default_factory=list)

    def copy(self) -> FirstTexts:
        """The texts that have been met by now."""
        return FirstTexts([*self._runs])

    def add(self, digests: UInt64s, keys: UInt64s) -> Originals:
        """Meet texts, in order: digests uint64[n, 2], keys of their documents uint64[n]. Return those that were met before."""
        high, low = digests[:, 0], digests[:, 1]
        order = np.argsort(high, kind="stable")  # equal ones stay in their order
        if (np.diff(high[order]) == 0)[np.diff(low[order]) != 0].any():  # two digests have the same half
            order = np.lexsort((low, high))
        high, low = high[order], low[order]
        is_first = np.append(True, (high[1:] != high[:-1]) | (low[1:] != low[:-1]))[: len(order)]
        group = np.cumsum(is_first) - 1
        first = order[is_first]
        mine = _SortedDigests(high[is_first], low[is_first], keys[first])
        is_known = np.zeros(len(mine.high), bool)
        for run in self._runs:
            at = run.find(mine.high, mine.low)
            there = at >= 0
            mine.key[there] = run.key[at[there]]
            is_known |= there
        is_copy = is_known[group] | ~is_first
        copies = np.flatnonzero(_scattered(is_copy, order))
        found = Originals(copies, mine.key[_scattered(group, order)[copies]])
        new = ~is_known
        self._runs.append(_SortedDigests(mine.high[new], mine.low[new], mine.key[new]))
        # Runs of about the same length are merged: there are few, and a text is moved a few times.
        while len(self._runs) > 1 and len(self._runs[-2].high) <= 2 * len(self._runs[-1].high):
            last = self._runs.pop()
            self._runs.append(self._runs.pop().merged(last))
        return found


def _scattered(values: npt.NDArray[np.generic], order: Int64s) -> npt.NDArray[np.generic]:
    """(sorted) -> (as they came)"""
    found = np.empty_like(values)
    found[order] = values
    return found


@dataclass
class DuplicateFilter:
    """State of the duplicate filter: the texts of all slices so far, copies in slices that were streamed and have no part yet,
    how many parts there were, seconds spent.
    """

    target: Target
    seen: FirstTexts = field(default_factory=FirstTexts)
    streamed: dict[int, list[Originals]] = field(default_factory=dict)
    compared: int = 0
    seconds: float = 0.0


class SliceFilter:
    """Finds the copies in slice *number* while it is streamed: all before it have been compared."""

    def __init__(self, duplicates: DuplicateFilter, number: int) -> None:
        self._duplicates, self._number, self._count = duplicates, number, 0
        self._before = duplicates.seen.copy()
        duplicates.streamed[number] = []

    def find(self, rows: pa.RecordBatch) -> Int64s:
        """Which of the next documents are copies, by their rows: int64[m], their numbers among these."""
        begun = time.monotonic()
        found = self._duplicates.seen.add(fact(rows, DIGEST), fact(rows, KEY))
        self._duplicates.streamed[self._number].append(found._replace(copies=found.copies + self._count))
        self._count += len(rows)
        self._duplicates.seconds += time.monotonic() - begun
        return found.copies

    def take_back(self) -> None:
        """The slice is not streamed after all: it is compared when its part is added."""
        self._duplicates.seen = self._before
        del self._duplicates.streamed[self._number]


def drop_duplicates(part: ShardPart, duplicates: DuplicateFilter) -> ShardPart:
    """Stage duplicates: a part, and which documents it lacks: those whose texts were seen before. Parts arrive in the order of
    the sources.
    """
    begun, number = time.monotonic(), duplicates.compared
    duplicates.compared += 1
    streamed = duplicates.streamed.pop(number, None)
    if part.shard.seq_count and (streamed is None or any(len(some.copies) for some in streamed)):
        documents = open_part(part, duplicates.target, KEY, DIGEST, TEXT_BYTES)
        if streamed is None:
            there = np.flatnonzero(documents.fact(REASON) == 0)
            found = duplicates.seen.add(documents.fact(DIGEST)[there], documents.keys[there])
            found = found._replace(copies=there[found.copies])
        else:
            found = Originals(*map(np.concatenate, zip(*streamed, strict=True)))
        if len(found.copies):
            facts = {"document": found.copies.astype(np.uint64), OF: found.of}
            part = with_repeats(part, documents, duplicates.target, number, "duplicate", facts, found.copies)
    meter.add("duplicates", part.shard.text_bytes, part.shard.seq_count)
    duplicates.seconds += time.monotonic() - begun
    return part


WIDE_FROM = 0.9
"""From this threshold on a band is eight bytes: 99 in 100 pairs at the threshold share one of 32. Below, four bytes of 64."""
NEIGHBOURS = 16
"""Documents of a band are compared with so many before them, and with the first one."""
PAIRS = 1 << 11
"""Pairs compared at a time, and texts whose bands are copied at a time: they stay in the processor's cache."""
BANDS_BYTES = 1 << 28
"""Of the bands that are copied out of the signatures at a time."""
LOW = np.uint64(0xFFFFFFFF)
"""The half of a number that has the text when a band is sorted; the other half has what the texts are sorted by."""
ERRORS = 1.0
"""Standard errors by which an estimate may be below the threshold."""


def least_similarity(threshold: float) -> Floats:
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
                found, bins = similarity(signatures[a], signatures[b])
                similar = found >= least[bins]
                forest.join(a[similar], b[similar])
    return forest.roots(np.arange(len(signatures)))


def _bands(signatures: UInt64s, threshold: float) -> Iterator[UInts]:
    """The bands of all texts: uint64[n] or uint32[n] each."""
    at_once = max(1, min(NUMBERS, BANDS_BYTES // (8 * max(len(signatures), 1))))
    for start in range(0, NUMBERS, at_once):
        bands = np.empty((min(at_once, NUMBERS - start), len(signatures)), np.uint64)
        for first in range(0, len(signatures), PAIRS):
            bands[:, first : first + PAIRS] = signatures[first : first + PAIRS, start : start + at_once].T
        for numbers in bands:
            yield from (numbers,) if threshold >= WIDE_FROM else np.ascontiguousarray(numbers.view("<u4").reshape(-1, 2).T)


def _runs(band: UInts) -> Int64Pair:
    """The texts that agree in a band with others, run after run, in order; and where each one's run begins: int64[m] each."""
    packed = np.arange(len(band), dtype="<u8")
    packed.view("<u4")[1::2] = band if band.itemsize == 4 else mix(band.copy()) >> np.uint64(32)
    packed.sort()  # numbers alone are sorted in a quarter of the time that their order takes, and as fast at any count
    begins = _begins(packed.view("<u4")[1::2])
    texts = (packed[~(begins[1:] & begins[:-1])] & LOW).view(np.int64)
    texts = texts[band[texts] != band.dtype.type(NO_SHINGLE & np.uint64(np.iinfo(band.dtype).max))]
    if band.itemsize == 8:  # a few texts agree in the half that was sorted, and in no more
        texts = texts[np.lexsort((texts, band[texts]))]
    begins = _begins(band[texts])
    members = np.flatnonzero(~(begins[1:] & begins[:-1]))
    firsts = np.flatnonzero(begins[members])
    return texts[members], np.repeat(firsts, np.diff(firsts, append=len(members)))


def _begins(ordered: UInts) -> Bools:
    """True at the first item of each run of equal values, and at the end: bool[n + 1]."""
    begins = np.ones(len(ordered) + 1, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:-1])
    return begins


def _candidates(texts: Int64s, first: Int64s, forest: _Forest) -> Iterator[Int64Pair]:
    """Pairs of texts that agree in a band, as far as they are near each other in it."""
    for back in range(1, NEIGHBOURS + 2):
        if not len(texts):
            return
        roots, begins = forest.roots(texts), np.flatnonzero(first == np.arange(len(texts)))
        sizes = np.diff(begins, append=len(texts))
        # Runs that are one cluster by now, or have been compared, need no more.
        apart = np.logical_or.reduceat(roots != roots[first], begins) & (sizes > back)
        some, sizes = np.repeat(apart, sizes), sizes[apart]
        texts, roots, first = texts[some], roots[some], np.repeat(np.cumsum(sizes) - sizes, sizes)
        at = np.flatnonzero(np.arange(len(texts)) - back >= first)
        before = at - back if back <= NEIGHBOURS else first[at]
        some = roots[before] != roots[at]
        yield texts[before[some]], texts[at[some]]


class _Forest:
    """Union-find over many pairs at a time: the root of a tree is its least number."""

    def __init__(self, count: int) -> None:
        self._parent = np.arange(count)

    def roots(self, numbers: Int64s) -> Int64s:
        """The root of each."""
        found = self._parent[numbers]
        while ((above := self._parent[found]) != found).any():
            self._parent[numbers] = found = above
        return found

    def join(self, one: Int64s, other: Int64s) -> None:
        """Join the trees of each pair."""
        while len(one):
            one, other = self.roots(one), self.roots(other)
            apart = one != other
            one, other = one[apart], other[apart]
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))


AT_A_TIME = 1 << 14


@dataclass
class SignedDocuments:
    """Signatures and keys of all documents of a version, in the order of the sources; how many there are, how many parts
    are marked and how many documents these have, and the seconds that were spent. *together*: a cluster goes to one split.
    *name*: the fact that is the signature.
    """

    target: Target
    name: str
    policy: NearDuplicates
    together: bool
    count: int = 0
    marked: int = 0
    marked_documents: int = 0
    seconds: float = 0.0

    def _mapped(self, name: str, width: int) -> UInt64s:
        if not self.count:  # an empty file cannot be mapped
            return np.empty((0, width), np.uint64)
        return np.memmap(self.target.workspace.path(name), np.uint64, "r").reshape(-1, width)

    @cached_property
    def signatures(self) -> UInt64s:
        return self._mapped("signatures", NUMBERS)

    @cached_property
    def keys(self) -> UInt64s:
        return self._mapped("keys", 1)[:, 0]

    @cached_property
    def clusters(self) -> Int64s:
        """The number of the document that names each one's cluster: int64[n]. Where the others are left out, it is the first of
        them; else that of the lowest key, of those that a version keeps in train if there are any: it changes with few others.
        """
        first = clusters(self.signatures, self.policy.threshold)
        if self.policy.action == "drop":
            return first
        members, keys = np.flatnonzero(np.bincount(first, minlength=len(first))[first] > 1), self.keys
        kept = self.target.rule.kept if self.together else None
        others = np.zeros(len(members), bool) if kept is None else ~kept.has(keys[members])
        members = members[np.lexsort((keys[members], others, first[members]))]
        _, begins, sizes = np.unique(first[members], return_index=True, return_counts=True)
        first[members] = np.repeat(members[begins], sizes)
        return first

    @cached_property
    def sizes(self) -> Int64s:
        """The documents of the cluster that each names: int64[n]."""
        return np.bincount(self.clusters, minlength=len(self.clusters))


def gather_signatures(part: ShardPart, signed: SignedDocuments) -> ShardPart:
    """Stage signatures: take the signatures of a part's documents. Those that are left out already have none. Parts arrive in the
    order of the sources.
    """
    begun, target = time.monotonic(), signed.target
    signatures, keys = np.empty((0, NUMBERS), np.uint64), np.empty(0, np.uint64)
    if part.shard.seq_count:
        documents = open_part(part, target, KEY, signed.name)
        signatures, keys = documents.fact(signed.name), documents.keys
        signatures = np.where(documents.fact(REASON)[:, None], NO_SHINGLE, signatures)
    target.workspace.write("signatures", signatures, "ab")
    target.workspace.write("keys", keys, "ab")
    signed.count += len(signatures)
    signed.seconds += time.monotonic() - begun
    return part


def mark_near_duplicates(part: ShardPart, signed: SignedDocuments) -> ShardPart:
    """Stage near-duplicates: a part, and which of its documents are near-duplicates. Parts arrive in the order of the sources,
    when the signatures of all have been taken.
    """
    begun, number, first = time.monotonic(), signed.marked, signed.marked_documents
    mine = np.arange(first, first + part.shard.seq_count)
    signed.marked, signed.marked_documents = number + 1, first + len(mine)
    is_later = signed.clusters[mine] != mine
    dropped = signed.policy.action == "drop"
    wanted = mine[is_later if dropped else signed.sizes[signed.clusters[mine]] > 1]
    if len(wanted):
        of, alike = signed.clusters[wanted], np.zeros(len(wanted), np.uint64)
        for start in range(0, len(wanted), AT_A_TIME):
            some = slice(start, start + AT_A_TIME)
            alike[some] = np.round(1e6 * similarity(signed.signatures[wanted[some]], signed.signatures[of[some]])[0])
        # (version, document) -> (part, document)
        facts = {"document": (wanted - first).astype(np.uint64), OF: signed.keys[of], SIMILARITY: alike}
        documents, later = open_part(part, signed.target, TEXT_BYTES), wanted[wanted != of] - first
        reason: Literal["near_duplicate"] | None = NEAR_DUPLICATE_REASON if dropped else None
        part = with_repeats(part, documents, signed.target, number, reason, facts, later, together=signed.together)
    meter.add("near-duplicates", part.shard.text_bytes, part.shard.seq_count)
    signed.seconds += time.monotonic() - begun
    return part
