"""Full rows: the longest piece that fits, again and again, and where none fits, the shortest one, cut.

A *piece* is a document, or with *keep* the rest of one that was cut. Only the last piece of a row is ever cut.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from flat_tokens.array_types import Bools, Int64s
from flat_tokens.rows.views import ranges, running_sums

WORD_BITS = 6


class CroppedRows(NamedTuple):
    """Row k is pieces ``firsts[k]:firsts[k + 1]``, each from token ``offsets`` of its document on. All but the last one go to
    the end of their documents; that one fills the row. ``firsts``: int64[rows + 1]; the others: int64[pieces].
    """

    firsts: Int64s
    documents: Int64s
    offsets: Int64s


def cropped_rows(pieces: Iterable[Int64s], length: int, *, keep: bool) -> CroppedRows:
    """Full rows of *length* tokens. *pieces*, some at a time, are fitted together: int64[3, n], documents, offsets and lengths,
    none of them 0. Pieces that do not fill a row wait for the next ones; the last ones are in none.
    """
    counts, documents, offsets = ([np.empty(0, np.int64)] for _ in range(3))
    waiting = np.empty((3, 0), np.int64)
    for fresh in pieces:
        pool = np.concatenate([waiting, fresh], axis=1)
        filling = _Filling(length, keep)
        pool = pool[:, filling.add(pool[2], pool[1] > 0)]
        waiting_numbers = ranges(*np.array(filling.fill(), np.int64).reshape(-1, 2).T)
        pool = _with_rests(pool, *np.array(filling.cuts, np.int64).reshape(-1, 2).T)
        per_row, order = filling.rows()
        counts.append(per_row)
        documents.append(pool[0, order])
        offsets.append(pool[1, order])
        waiting = pool[:, waiting_numbers]
    return CroppedRows(running_sums(np.concatenate(counts)), np.concatenate(documents), np.concatenate(offsets))


def _with_rests(pool: Int64s, cut: Int64s, taken: Int64s) -> Int64s:
    """The pieces, then the rest of each that was *cut* after *taken* tokens: int64[3, n]. A rest may be of a rest before it."""
    count = pool.shape[1]
    origin, shift = np.concatenate([np.arange(count), cut]), np.concatenate([np.zeros(count, np.int64), taken])
    while (origin >= count).any():  # rest -> the piece that it is a rest of, each time over twice as many rests
        origin, shift = origin[origin], shift + shift[origin]
    return np.stack([pool[0, origin], pool[1, origin] + shift, pool[2, origin] - shift])


class _EqualPieces:
    """Pieces of one length, numbers ``start`` to ``start + count``. ``taken``: how many of them the open row has."""

    __slots__ = ("count", "start", "taken")

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count, self.taken = start, count, 0


class _Stock:
    """Runs of pieces by length. A bit of ``words`` is set for each length up to a row's that is there, a bit of ``top`` for
    each word that is not 0.
    """

    def __init__(self, length: int) -> None:
        self._runs: dict[int, deque[_EqualPieces]] = {}
        self._words, self._top = [0] * ((length >> WORD_BITS) + 1), 0
        self._length, self._long, self._number = length, list[tuple[int, int, _EqualPieces]](), 0

    def __bool__(self) -> bool:
        return bool(self._top or self._long)

    def add(self, size: int, run: _EqualPieces) -> None:
        if size > self._length:
            self._number += 1
            heapq.heappush(self._long, (size, self._number, run))
        elif size in self._runs:
            self._runs[size].append(run)
        else:
            self._runs[size] = deque((run,))
            self._words[size >> WORD_BITS] |= 1 << (size & 63)
            self._top |= 1 << (size >> WORD_BITS)

    def longest(self, room: int) -> int:
        """The length of the longest piece that fits; 0 if there is none."""
        word = room >> WORD_BITS
        if found := self._words[word] & ((2 << (room & 63)) - 1):
            return (word << WORD_BITS) + found.bit_length() - 1
        if not (below := self._top & ((1 << word) - 1)):
            return 0
        word = below.bit_length() - 1
        return (word << WORD_BITS) + self._words[word].bit_length() - 1

    def shortest(self) -> int:
        """The length of the shortest piece; 0 if there is none."""
        if not self._top:
            return self._long[0][0] if self._long else 0
        word = (self._top & -self._top).bit_length() - 1
        bits = self._words[word]
        return (word << WORD_BITS) + (bits & -bits).bit_length() - 1

    def first(self, size: int) -> _EqualPieces:
        """The first run of pieces of this length, which is there."""
        return self._long[0][2] if size > self._length else self._runs[size][0]

    def drop(self, size: int) -> None:
        """Forget the first run of this length, which is used up."""
        if size > self._length:
            heapq.heappop(self._long)
            return
        runs = self._runs[size]
        runs.popleft()
        if not runs:
            del self._runs[size]
            self._words[size >> WORD_BITS] &= ~(1 << (size & 63))
            if not self._words[size >> WORD_BITS]:
                self._top &= ~(1 << (size >> WORD_BITS))


class _Filling:
    """Rows that are being filled of numbered pieces.

    ``cuts``: (piece, tokens that were taken of it), with *keep*. The rests are numbered in this order, after all pieces.
    """

    def __init__(self, length: int, keep: bool) -> None:
        self._length, self._keep = length, keep
        self._documents, self._rests = _Stock(length), _Stock(length)
        self._row_count, self._piece_count = 0, 0
        # (first piece, step from row to row, pieces in each row, first row, rows, place in the row)
        self._fills = list[tuple[int, int, int, int, int, int]]()
        self.cuts = list[tuple[int, int]]()

    def add(self, lengths: Int64s, is_rest: Bools) -> Int64s:
        """Number the pieces by length, in a stable order, documents before rests. Returns that order: int64[n]."""
        # Without rests it does not matter how much is left of a piece that is longer than a row.
        capped = np.minimum(lengths, self._length + 1)
        order = np.argsort(capped.astype(np.min_scalar_type(self._length + 1)), kind="stable")  # two bytes sort in linear time
        long = order[np.searchsorted(capped[order], self._length + 1) :]
        long[:] = long[np.argsort(lengths[long], kind="stable")]
        if is_rest.any():
            order = np.concatenate([order[~is_rest[order]], order[is_rest[order]]])
        sizes = (lengths if self._keep else capped)[order]
        edges = np.flatnonzero((np.diff(sizes, prepend=0) != 0) | np.diff(is_rest[order], prepend=False))
        for start, count in zip(edges.tolist(), np.diff(edges, append=len(order)).tolist(), strict=True):
            stock = self._rests if is_rest[order[start]] else self._documents
            stock.add(int(sizes[start]), _EqualPieces(start, count))
        self._piece_count = len(order)
        return order

    def fill(self) -> list[tuple[int, int]]:
        """Fill rows until the pieces do not fill one more. Returns those that are left: (first piece, how many)."""
        while self._documents or self._rests:
            taken, missing, is_cut = self._row()
            if missing:
                return [(start, each) for _, start, each, _, _ in taken]
            # The next rows are alike as long as no run ends. A rest, shorter than all that is left, changes the next row.
            more = 0 if is_cut and self._keep else min(run.count // run.taken for run, *_ in taken)
            place = 0
            for run, start, each, _, _ in taken:
                self._fills.append((start, run.taken, each, self._row_count, 1 + more, place))
                place += each
            for run, _, _, size, stock in taken:
                if more and run.taken:
                    run.start, run.count = run.start + more * run.taken, run.count - more * run.taken
                    if not run.count:
                        stock.drop(size)
                run.taken = 0
            self._row_count += 1 + more
        return []

    def _row(self) -> tuple[list[tuple[_EqualPieces, int, int, int, _Stock]], int, bool]:
        """Fill a row. Returns what it took, (run, first piece, how many, their length, stock), the tokens that are missing, and
        whether the last piece was cut.
        """
        taken, room = list[tuple[_EqualPieces, int, int, int, _Stock]](), self._length
        documents, rests, is_cut = self._documents, self._rests, False
        while room and (documents or rests):
            opens_with_document = bool(documents) and not taken  # while one is left
            longest = documents.longest(room)
            size, stock = longest, documents
            if not opens_with_document and (rest := rests.longest(room)) > longest:
                size, stock = rest, rests
            if size:
                each = 1 if opens_with_document and rests else room // size
            else:
                stock = documents
                if not documents or (not opens_with_document and rests and rests.shortest() < documents.shortest()):
                    stock = rests
                size, each, is_cut = stock.shortest(), 1, True
            run = stock.first(size)
            each = min(each, run.count)
            taken.append((run, run.start, each, size, stock))
            run.start, run.count, run.taken = run.start + each, run.count - each, run.taken + each
            if not run.count:
                stock.drop(size)
            if is_cut and self._keep:
                self.cuts.append((taken[-1][1], room))
                rests.add(size - room, _EqualPieces(self._piece_count, 1))
                self._piece_count += 1
            room = 0 if is_cut else room - size * each
        return taken, room, is_cut

    def rows(self) -> tuple[Int64s, Int64s]:
        """How many pieces each row has, int64[rows], and their numbers, row by row: int64[n]."""
        start, step, each, row, rows, place = np.array(self._fills, np.int64).reshape(-1, 6).T
        # fill -> its parts of rows -> pieces
        fill = np.repeat(np.arange(len(start)), rows)
        of_fill = np.arange(len(fill)) - np.repeat(running_sums(rows)[:-1], rows)
        part_row, counts = row[fill] + of_fill, each[fill]
        by_row = np.lexsort((place[fill], part_row))
        numbers = ranges((start[fill] + step[fill] * of_fill)[by_row], counts[by_row])
        per_row = np.zeros(self._row_count, np.int64)
        np.add.at(per_row, part_row, counts)
        return per_row, numbers
