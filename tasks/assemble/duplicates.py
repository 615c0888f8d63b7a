"""Duplicates: documents whose text an earlier document has, byte for byte. The first in the order of the sources stays."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.manifest import DUPLICATE
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.opening import open_part
from tasks.parts.part import Copies, ShardPart
from tasks.parts.stored import open_digests
from tasks.progress import meter

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]


class Originals(NamedTuple):
    """Documents that are copies, by their numbers among those that were added: int64[m]; and the file and the row of the document
    that each is a copy of: uint64[m].
    """

    copies: Int64s
    file: UInt64s
    row: UInt64s


class _SortedDigests(NamedTuple):
    """Texts by the halves of their digests, in the order of ``high``; and the file and the row where each was first."""

    high: UInt64s
    low: UInt64s
    file: npt.NDArray[np.uint32]
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

    def add(self, digests: UInt64s, files: UInt64s, rows: UInt64s) -> Originals:
        """Meet texts in their order: digests uint64[n, 2], files and rows uint64[n]. Return those that were met before."""
        high, low = digests[:, 0], digests[:, 1]
        order = np.argsort(high, kind="stable")  # equal ones stay in their order
        if (np.diff(high[order]) == 0)[np.diff(low[order]) != 0].any():  # two digests have the same half
            order = np.lexsort((low, high))
        high, low = high[order], low[order]
        is_first = np.append(True, (high[1:] != high[:-1]) | (low[1:] != low[:-1]))[: len(order)]
        group = np.cumsum(is_first) - 1
        first = order[is_first]
        mine = _SortedDigests(high[is_first], low[is_first], files[first].astype(np.uint32), rows[first])
        is_known = np.zeros(len(mine.high), bool)
        for run in self._runs:
            at = run.find(mine.high, mine.low)
            there = at >= 0
            mine.file[there], mine.row[there] = run.file[at[there]], run.row[at[there]]
            is_known |= there
        is_copy = is_known[group] | ~is_first
        copies = np.flatnonzero(_scattered(is_copy, order))
        of = _scattered(group, order)[copies]
        found = Originals(copies, mine.file[of].astype(np.uint64), mine.row[of])
        new = ~is_known
        self._keep(_SortedDigests(mine.high[new], mine.low[new], mine.file[new], mine.row[new]))
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
    """State of the duplicate filter: digests seen so far, parts looked at, seconds spent. The lists of copies are objects of the
    target.
    """

    target: Target
    seen: FirstTexts = field(default_factory=FirstTexts)
    parts: int = 0
    seconds: float = 0.0


def drop_duplicates(part: ShardPart, duplicates: DuplicateFilter) -> ShardPart:
    """Stage duplicates: a part, and which documents it lacks: those whose texts were seen before. Parts arrive in the order of
    the sources. The list of the copies of a part is an object of the version.
    """
    begun = time.monotonic()
    number, duplicates.parts = duplicates.parts, duplicates.parts + 1
    if part.shard.written:
        part = part.model_copy(update={"copies": _copies_of(part, number, duplicates)})
    meter.add("duplicates", part.shard.text_bytes, part.shard.written)
    duplicates.seconds += time.monotonic() - begun
    return part


def _copies_of(part: ShardPart, number: int, duplicates: DuplicateFilter) -> Copies | None:
    target = duplicates.target
    documents, arrays = open_part(part, target, f"{DOCUMENTS}/row"), open_digests(target.root, part.shard, "digest")
    places = documents.places()
    assert arrays.digest is not None
    digests = arrays.digest.read(0, 2 * part.shard.written).reshape(-1, 2)
    found = duplicates.seen.add(digests, places.file, places.row)
    if not len(found.copies):
        return None
    listed = np.empty(len(found.copies), DUPLICATE)
    listed["document"], listed["key"], listed["row"] = found.copies, documents.keys[found.copies], places.row[found.copies]
    listed["file"], listed["of_file"], listed["of_row"] = places.file[found.copies], found.file, found.row
    stored = target.store.put(Copies.name_of(number), listed.tobytes())
    return Copies(
        number=number,
        size=stored.size,
        digest=stored.digest,
        documents=len(found.copies),
        token_count=int(documents.lengths[found.copies].sum()),
        text_bytes=int(arrays.text_bytes.take(found.copies).sum()),
    )
