"""Duplicates: documents whose text an earlier document has, byte for byte. The first in the order of the sources stays.

A slice that is streamed into the version is compared while its tokens are on their way: those before it have been by then. One
that is stored is compared when its part is added. The list of a slice's copies is written when its part is added, as it is not
known earlier where the slice's files begin.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.array_types import Int64s, UInt32s, UInt64s
from flat_tokens.manifest import DUPLICATE
from tasks.output.target import Target
from tasks.parts.documents import places_of
from tasks.parts.opening import open_shard
from tasks.parts.part import Copies, ShardPart
from tasks.progress import meter
from tasks.rows import DIGEST, FILE, KEY, ROW, TEXT_BYTES, fact


class Originals(NamedTuple):
    """Documents that are copies, by their numbers among those that were added: int64[m]; and the document that each is a copy of:
    the number of its slice, and its row there: uint64[m] each.
    """

    copies: Int64s
    slice: UInt64s
    row: UInt64s


class _SortedDigests(NamedTuple):
    """Texts by the halves of their digests, in the order of ``high``; and the slice and the row where each was first."""

    high: UInt64s
    low: UInt64s
    slice: UInt32s
    row: UInt64s

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
    """The texts that have been met, by their digests: 28 bytes of memory each, and three times that for a moment."""

    _runs: list[_SortedDigests] = field(default_factory=list)

    def copy(self) -> FirstTexts:
        """The texts that have been met by now."""
        return FirstTexts([*self._runs])

    def add(self, digests: UInt64s, number: int, rows: UInt64s) -> Originals:
        """Meet texts of slice *number*, in order: digests uint64[n, 2], rows uint64[n]. Return those that were met before."""
        high, low = digests[:, 0], digests[:, 1]
        order = np.argsort(high, kind="stable")  # equal ones stay in their order
        if (np.diff(high[order]) == 0)[np.diff(low[order]) != 0].any():  # two digests have the same half
            order = np.lexsort((low, high))
        high, low = high[order], low[order]
        is_first = np.append(True, (high[1:] != high[:-1]) | (low[1:] != low[:-1]))[: len(order)]
        group = np.cumsum(is_first) - 1
        first = order[is_first]
        mine = _SortedDigests(high[is_first], low[is_first], np.full(len(first), number, np.uint32), rows[first])
        is_known = np.zeros(len(mine.high), bool)
        for run in self._runs:
            at = run.find(mine.high, mine.low)
            there = at >= 0
            mine.slice[there], mine.row[there] = run.slice[at[there]], run.row[at[there]]
            is_known |= there
        is_copy = is_known[group] | ~is_first
        copies = np.flatnonzero(_scattered(is_copy, order))
        of = _scattered(group, order)[copies]
        found = Originals(copies, mine.slice[of].astype(np.uint64), mine.row[of])
        new = ~is_known
        self._keep(_SortedDigests(mine.high[new], mine.low[new], mine.slice[new], mine.row[new]))
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


class _SlicePlace(NamedTuple):
    """Where the rows of a slice are: the number of its first file, of which ``first_row`` is its first row, and the row of the
    slice at which each of its files begins.
    """

    file: int
    first_row: int
    file_starts: UInt64s

    def places(self, rows: UInt64s) -> tuple[UInt64s, UInt64s]:
        """(slice, row) -> (version, file, row)"""
        file, row = places_of(rows, self.file_starts)
        return file + np.uint64(self.file), row + np.where(file == 0, np.uint64(self.first_row), np.uint64(0))


@dataclass
class DuplicateFilter:
    """State of the duplicate filter: the texts of all slices so far, copies in slices that were streamed and have no list yet,
    the places of those that have one, seconds spent. The lists of copies are objects of the target.
    """

    target: Target
    seen: FirstTexts = field(default_factory=FirstTexts)
    streamed: dict[int, list[Originals]] = field(default_factory=dict)
    places: list[_SlicePlace] = field(default_factory=list)
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
        found = self._duplicates.seen.add(fact(rows, DIGEST), self._number, fact(rows, ROW))
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
    the sources. The list of the copies of a part is an object of the version.
    """
    begun = time.monotonic()
    number = len(duplicates.places)
    duplicates.places.append(_SlicePlace(part.file, part.first_row, part.shard.file_starts))
    if part.shard.written:
        part = part.model_copy(update={"copies": _copies_of(part, number, duplicates)})
    meter.add("duplicates", part.shard.text_bytes, part.shard.written)
    duplicates.seconds += time.monotonic() - begun
    return part


def _copies_of(part: ShardPart, number: int, duplicates: DuplicateFilter) -> Copies | None:
    target, streamed = duplicates.target, duplicates.streamed.pop(number, None)
    if streamed is not None and not any(len(some.copies) for some in streamed):
        return None
    documents, file_starts = open_shard(target.root, part.shard, KEY, ROW, DIGEST, TEXT_BYTES), part.shard.file_starts
    rows = documents.fact(ROW) + file_starts[documents.fact(FILE)]  # (slice, file, row) -> (slice, row)
    if streamed is None:
        found = duplicates.seen.add(documents.fact(DIGEST), number, rows)
    else:
        found = Originals(*map(np.concatenate, zip(*streamed, strict=True)))
    if not len(found.copies):
        return None
    listed = np.empty(len(found.copies), DUPLICATE)
    listed["document"], listed["key"] = found.copies, documents.keys[found.copies]
    listed["file"], listed["row"] = duplicates.places[number].places(rows[found.copies])
    for one in np.unique(found.slice).tolist():
        mine = found.slice == one
        listed["of_file"][mine], listed["of_row"][mine] = duplicates.places[one].places(found.row[mine])
    stored = target.store.put(Copies.name_of(number), listed.tobytes())
    return Copies(
        number=number,
        size=stored.size,
        digest=stored.digest,
        documents=len(found.copies),
        token_count=int(documents.lengths[found.copies].sum()),
        text_bytes=int(documents.fact(TEXT_BYTES)[found.copies].sum()),
    )
