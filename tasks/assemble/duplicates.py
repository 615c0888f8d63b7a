"""Duplicates: documents whose text an earlier document has, byte for byte. The first in the order of the sources stays.

A slice that is streamed into the version is compared while its tokens are on their way: those before it have been by then. One
that is stored is compared when its part is added.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.array_types import Int64s, UInt64s
from tasks.output.target import Target
from tasks.parts.opening import open_part, with_repeats
from tasks.parts.part import ShardPart
from tasks.progress import meter
from tasks.rows import DIGEST, KEY, OF, REASON, TEXT_BYTES, fact


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
        """The place of each digest, -1 where it is not there: int64[m]."""
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
        self._keep(_SortedDigests(mine.high[new], mine.low[new], mine.key[new]))
        return found

    def _keep(self, run: _SortedDigests) -> None:
        """Keep a run. Those of about the same length are merged: there are few, and a text is moved a few times."""
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2].high) <= 2 * len(self._runs[-1].high):
            last = self._runs.pop()
            self._runs.append(self._runs.pop().merged(last))


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

    def of_slice(self, number: int) -> SliceFilter:
        """The filter of slice *number*, which is about to be streamed: all before it have been compared."""
        return SliceFilter(self, number)


class SliceFilter:
    """Finds the copies in a slice while it is streamed."""

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
