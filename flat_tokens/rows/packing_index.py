"""The packing index: which documents go together in a pack.

It holds no tokens, is made in one pass over ``seq_starts``, and can be kept in a file that all processes map.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import logging
import posixpath
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeAlias

import google_crc32c
import numpy as np

from flat_tokens.annotations import Bools, Int64Pair, Int64s, IntPair
from flat_tokens.manifest import dataset_of, digest_below, json_digest
from flat_tokens.rows.views import (
    Covered,
    document_bounds,
    end_to_end,
    ranges,
    read_starts,
    running_sums,
    settings_of,
    spread,
    walk,
)
from flat_tokens.stores.store import PathOrUrl, Store

if TYPE_CHECKING:
    from flat_tokens.rows.split import FlatTokens


def fitted(
    pieces: Iterable[Int64s], fit: Callable[[Int64s], tuple[Int64s, Int64s, Int64s]]
) -> tuple[Int64s, Int64s, Int64s, int]:
    """Rows of *pieces*: int64[3, n], some at a time, documents, where in these, and lengths, none of them 0. They are fitted
    together 262,144 at a time, so that memory is bounded and the documents of a row are near each other.

    *fit*: pieces -> how many each row has, int64[rows]; the pieces row by row, int64[2, n], without lengths; those that wait for
    more, int64[3, n]. Returns the same of all, and the tokens of all pieces.
    """
    counts, packed, waiting, total = [np.empty(0, np.int64)], [np.empty((2, 0), np.int64)], np.empty((3, 0), np.int64), 0
    for fresh in _of_size(pieces, PARTS_AT_A_TIME):
        total += int(fresh[2].sum())
        per_row, pool, waiting = fit(np.concatenate([waiting, fresh], axis=1))
        counts.append(per_row)
        packed.append(pool)
    return np.concatenate(counts), np.concatenate(packed, axis=1), waiting, total


def cropped_rows(pieces: Iterable[Int64s], length: int, *, keep: bool) -> ListedPacks:
    """Full rows of *length* tokens. Pieces that do not fill a row wait for the next ones; the last ones are in none.

    Row k is pieces ``firsts[k]:firsts[k + 1]``, each from token ``offsets`` of its document on. All but the last one go to
    the end of their documents; that one fills the row. Returns ``firsts``, int64[rows + 1], documents and offsets, int64[pieces].
    """

    def cropped(pool: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        filling = _Filling(length, crop=True, keep=keep)
        pool = pool[:, filling.add(pool[2], pool[1] > 0)]
        left = ranges(*np.array(filling.fill(), np.int64).reshape(-1, 2).T)
        cut, taken = np.array(filling.cuts, np.int64).reshape(-1, 2).T
        # The pieces, then the rest of each that was cut, which may be of a rest before it
        count = pool.shape[1]
        origin, shift = np.concatenate([np.arange(count), cut]), np.concatenate([np.zeros(count, np.int64), taken])
        while (origin >= count).any():  # rest -> the piece that it is a rest of, each time over twice as many rests
            origin, shift = origin[origin], shift + shift[origin]
        pool = np.stack([pool[0, origin], pool[1, origin] + shift, pool[2, origin] - shift])
        per_row, order = filling.rows()
        return per_row, pool[:2, order], pool[:, left]

    counts, packed, *_ = fitted(pieces, cropped)
    return running_sums(counts), *packed


class _EqualPieces:
    """Pieces of one length, numbers ``start`` to ``start + count``. ``taken``: how many of them the open row has."""

    __slots__ = ("count", "start", "taken")

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count, self.taken = start, count, 0


class _Stock:
    """Runs of pieces by length. ``sizes``: the lengths up to a row's that are there, in order."""

    def __init__(self, length: int) -> None:
        self.sizes, self._runs = list[int](), dict[int, deque[_EqualPieces]]()
        self._length, self._long, self._number = length, list[tuple[int, int, _EqualPieces]](), 0

    def __bool__(self) -> bool:
        return bool(self.sizes or self._long)

    def add(self, size: int, run: _EqualPieces) -> None:
        if size > self._length:
            self._number += 1
            heapq.heappush(self._long, (size, self._number, run))
        elif size in self._runs:
            self._runs[size].append(run)
        else:
            insort(self.sizes, size)
            self._runs[size] = deque((run,))

    def longest(self, room: int) -> int:
        """The length of the longest piece that fits; 0 if there is none."""
        count = bisect_right(self.sizes, room)
        return self.sizes[count - 1] if count else 0

    def shortest(self) -> int:
        """The length of the shortest piece, of those that there are."""
        return self.sizes[0] if self.sizes else self._long[0][0]

    def first(self, size: int) -> _EqualPieces:
        """The first run of pieces of this length, which is there."""
        return self._long[0][2] if size > self._length else self._runs[size][0]

    def drop(self, size: int) -> None:
        """Forget the first run of this length, which is used up."""
        if size > self._length:
            heapq.heappop(self._long)
            return
        self._runs[size].popleft()
        if not self._runs[size]:
            del self._runs[size], self.sizes[bisect_left(self.sizes, size)]


class _Filling:
    """Rows that are being filled of numbered pieces. With *crop* none has room left: if no piece fits, one is cut.

    ``cuts``: (piece, tokens that were taken of it), with *keep*. The rests are numbered in this order, after all pieces.
    """

    def __init__(self, length: int, *, crop: bool, keep: bool = False) -> None:
        self._length, self._crop, self._keep = length, crop, keep
        self._documents, self._rests = _Stock(length), _Stock(length)
        self._row_count, self._piece_count = 0, 0
        # (first piece, step from row to row, pieces in each row, first row, rows, place in the row)
        self._fills = list[tuple[int, int, int, int, int, int]]()
        self.cuts = list[IntPair]()

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

    def fill(self) -> list[IntPair]:
        """Fill rows until the pieces, with *crop*, do not fill one more. Returns those that are left: (first piece, how many)."""
        while self._documents or self._rests:
            taken, missing, is_cut = self._row()
            if missing and self._crop:
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
            elif not self._crop:
                break
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

    def rows(self) -> Int64Pair:
        """The number of pieces in each row, int64[rows], and the numbers of the pieces, row by row: int64[n]."""
        start, step, each, row, rows, place = np.array(self._fills, np.int64).reshape(-1, 6).T
        # fill -> its parts of rows -> pieces
        fill, of_fill = spread(np.zeros_like(rows), rows)
        part_row, counts = row[fill] + of_fill, each[fill]
        by_row = np.lexsort((place[fill], part_row))
        numbers = ranges((start[fill] + step[fill] * of_fill)[by_row], counts[by_row])
        per_row = np.zeros(self._row_count, np.int64)
        np.add.at(per_row, part_row, counts)
        return per_row, numbers


Fit = Literal["greedy", "best", "crop"]
TooLong = Literal["error", "cut"]
OnCrop = Literal["drop", "keep"]
PARTS_AT_A_TIME = 1 << 18
"""Parts of documents that ``fit="best"`` and ``"crop"`` fit together. Another number gives other packs."""
PACKS_AT_A_TIME = 1 << 14
WHOLE = 1 << 62
"""A length that no document has."""
ListedPacks: TypeAlias = tuple[Int64s, Int64s, Int64s]
"""``firsts``, ``documents`` and ``offsets`` of `Packs` of listed parts."""
INDEX_VERSION = 3

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """Contents of some packs, as parts of documents: parts ``splits[r]:splits[r + 1]`` are row r's, in order.

    ``splits``: int64[rows + 1]. ``documents``, ``offsets``, ``lengths``: int64[parts], where a part begins in its document.
    ``document_range``: int64[rows, 2]. ``starts``, ``counts``, ``at``: int64[reads], the tokens to read, and their places
    in the rows laid end to end.
    """

    splits: Int64s
    documents: Int64s
    offsets: Int64s
    lengths: Int64s
    document_range: Int64s
    starts: Int64s
    counts: Int64s
    at: Int64s


class PackSettings(NamedTuple):
    """The settings that an index depends on."""

    length: int
    split_across_pack: bool
    max_packs: int | None
    fit: Fit
    too_long: TooLong
    pad_to: int = 1
    on_crop: OnCrop = "drop"

    def filled(self, lengths: Int64s) -> Int64s:
        """Places in a pack that documents of these lengths take, with their padding: int64[n]."""
        padded = -(-lengths // self.pad_to) * self.pad_to
        return np.minimum(padded, self.length) if self.too_long == "cut" else padded


class Packs(NamedTuple):
    """The documents of each pack.

    In order, pack k is documents ``firsts[k]:firsts[k + 1]``. If documents are split, it begins with token ``offsets[k]`` of the
    first one, and ends in document ``firsts[k + 1]``, if the next pack begins inside that. Else pack k is the listed parts
    ``firsts[k]:firsts[k + 1]``, each of a document of ``documents``, from token ``offsets`` on to its end, or as far as the pack
    has room. ``offsets`` is empty if all parts begin their documents.
    """

    tokens: FlatTokens
    plan: PackSettings
    firsts: Int64s
    documents: Int64s
    offsets: Int64s

    @classmethod
    def make(cls, tokens: FlatTokens, plan: PackSettings) -> Self:
        none = np.empty(0, np.int64)
        if plan.fit == "greedy":
            firsts, offsets = _split(tokens, plan) if plan.split_across_pack else (_whole(tokens, plan), none)
            return cls(tokens, plan, firsts, none, offsets)
        if plan.fit == "crop":
            whole = document_parts(tokens, plan._replace(length=WHOLE))
            firsts, documents, offsets = cropped_rows(whole, plan.length, keep=plan.on_crop == "keep")
        else:
            firsts, documents, offsets = _best(tokens, plan)
        if plan.max_packs is not None:
            firsts = firsts[: plan.max_packs + 1]
            documents, offsets = documents[: firsts[-1]], offsets[: firsts[-1]]
        # A copy, or all of the array that both are rows of would stay in memory.
        return cls(tokens, plan, firsts, documents.copy(), offsets if offsets.any() else none)

    @property
    def pack_count(self) -> int:
        return len(self.firsts) - 1

    def parts(self, packs: Int64s) -> Parts:
        plan, first, stop = self.plan, self.firsts[packs], self.firsts[packs + 1]
        is_in_order, is_split = plan.fit == "greedy", plan.split_across_pack and plan.fit == "greedy"
        if is_in_order:
            stop = stop + (self.offsets[packs + 1] > 0) if is_split else stop
            document_range = np.stack([first, stop], axis=1)
            starts, lengths, splits = document_bounds(self.tokens, first, stop)
            documents, offsets = ranges(first, stop - first), np.zeros(len(starts), np.int64)
            if is_split:
                offsets[splits[:-1]] = self.offsets[packs]
        else:
            listed, splits = ranges(first, stop - first), running_sums(stop - first)
            document_range, documents = np.zeros((len(packs), 2), np.int64), self.documents[listed]
            starts, lengths = self.tokens.bounds(documents)
            offsets = self.offsets[listed] if len(self.offsets) else np.zeros(len(listed), np.int64)
        starts, lengths = starts + offsets, lengths - offsets
        if is_split or not is_in_order or plan.too_long == "cut":
            np.minimum(lengths, plan.length, out=lengths)
        sums = running_sums(lengths)
        if is_split or plan.fit == "crop":  # what the last one has beyond the pack is cut
            last = splits[1:] - 1
            lengths[last] = np.minimum(lengths[last], plan.length - (sums[last] - sums[splits[:-1]]))
            sums = running_sums(lengths)
        if is_in_order and plan.pad_to == 1:
            # A document that is cut has its pack to itself, so that a pack's tokens are always stored together.
            counts, at = np.diff(sums[splits]), np.arange(len(packs)) * plan.length
            return Parts(splits, documents, offsets, lengths, document_range, starts[splits[:-1]], counts, at)
        padded = plan.filled(lengths) if plan.pad_to > 1 else lengths
        sums = running_sums(padded)
        at = sums[:-1] + np.repeat(np.arange(len(packs)) * plan.length - sums[splits[:-1]], np.diff(splits))
        return Parts(splits, documents, offsets, padded, document_range, starts, lengths, at)

    def packs_of(self, documents: Int64s) -> Int64Pair:
        """The packs that have parts of *documents*: int64[k], which of the documents, and int64[k], the pack."""
        if self.plan.fit == "greedy":
            stops = self.firsts[1:] + (self.offsets[1:] > 0) if len(self.offsets) else self.firsts[1:]
            first = np.searchsorted(stops, documents, side="right")
            counts = np.searchsorted(self.firsts[:-1], documents, side="right") - first
            return spread(first, counts)
        some = np.flatnonzero(np.isin(self.documents, documents))
        some = some[np.argsort(self.documents[some], kind="stable")]
        first, stop = (np.searchsorted(self.documents[some], documents, side=side) for side in ("left", "right"))
        of, listed = spread(first, stop - first)
        return of, np.searchsorted(self.firsts, some[listed], side="right") - 1

    def coverage(self) -> Covered:
        """Tokens in a pack of each document from number *first* on. Listed packs are all looked at: eight bytes a document."""
        length, end = self.plan.length, int(self.firsts[-1])
        if self.plan.fit == "greedy":
            if self.plan.split_across_pack:
                return lambda first, entries: np.diff(np.minimum(entries, self.pack_count * length))
            return lambda first, entries: (
                np.minimum(np.diff(entries), length) * (np.arange(first, first + len(entries) - 1) < end)
            )
        found = np.zeros(self.tokens.seq_count, np.int64)
        for first in range(0, self.pack_count, PACKS_AT_A_TIME):
            parts = self.parts(np.arange(first, min(first + PACKS_AT_A_TIME, self.pack_count)))
            np.add.at(found, parts.documents, parts.counts)
        return lambda first, entries: found[first : first + len(entries) - 1]


def packs_together(found: Sequence[Parts], length: int) -> Parts:
    """The parts of the packs of several views, one view's after another's."""
    if len(found) == 1:
        return found[0]
    rows = running_sums(np.array([len(one.splits) - 1 for one in found])) * length
    splits = running_sums(np.concatenate([np.diff(one.splits) for one in found]))
    _, *rest = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    joined = Parts(splits, *rest)
    return joined._replace(at=np.concatenate([one.at + begin for one, begin in zip(found, rows, strict=False)]))


def _whole(tokens: FlatTokens, plan: PackSettings) -> Int64s:
    """``firsts`` of whole documents in order."""
    starts = read_starts(tokens)
    if plan.too_long == "cut" or plan.pad_to > 1:
        starts = end_to_end(plan.filled(np.diff(entries)) for entries in starts)
    return first_documents(starts, plan.length, plan.max_packs, tokens.store.url)


def _split(tokens: FlatTokens, plan: PackSettings) -> Int64Pair:
    """``firsts`` and ``offsets`` of documents in order that are split."""
    found, first = [np.empty((2, 0), np.int64)], 0
    for entries in read_starts(tokens):
        # The first tokens of the packs that begin here. A document of no token where two packs meet belongs to the first of them.
        begins = np.arange(-(-int(entries[0]) // plan.length) * plan.length, int(entries[-1]), plan.length)
        of = np.searchsorted(entries, begins, side="right") - 1
        found.append(np.stack([of + first, begins - entries[of]]))
        first += len(entries) - 1
    found.append(np.array([[first], [0]]))
    firsts, offsets = np.concatenate(found, axis=1)[:, : None if plan.max_packs is None else plan.max_packs + 1]
    firsts[:1] = 0  # with the documents of no token before the first
    return firsts, offsets


def _best(tokens: FlatTokens, plan: PackSettings) -> ListedPacks:
    """``firsts``, ``documents`` and ``offsets`` of packs with little padding."""

    def closest(pool: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        firsts, order = best_fit(pool[2], plan.length)
        pool = pool[:, order]
        least = int(np.add.reduceat(pool[2], firsts[:-1]).argmin())  # the pack that is filled least waits
        part = slice(*firsts[least : least + 2].tolist())
        return np.delete(np.diff(firsts), least), np.delete(pool[:2], part, axis=1), pool[:, part]

    counts, packed, waiting, total = fitted(document_parts(tokens, plan), closest)
    documents, numbers = np.concatenate([packed, waiting[:2]], axis=1)
    last = np.array([waiting.shape[1]])
    firsts = running_sums(np.concatenate([counts, last[last > 0]]))
    if (len(firsts) - 1) * plan.length - total >= plan.length:  # in their order, documents may take fewer packs
        starts = end_to_end(parts[2] for parts in document_parts(tokens, plan))
        in_order = first_documents(starts, plan.length, None, tokens.store.url)
        if len(in_order) < len(firsts):
            documents, numbers = np.concatenate([parts[:2] for parts in document_parts(tokens, plan)], axis=1)
            firsts = in_order
    return firsts, documents, numbers * plan.length


def first_documents(starts: Iterable[Int64s], length: int, max_packs: int | None, name: str) -> Int64s:
    """The first document of every pack of whole documents in order, and one past the last pack's: int64[packs + 1]. *starts*:
    as `read_starts` gives them. ValueError for a document longer than *length*, unless it comes after *max_packs* packs.
    """
    firsts, pack_count, document_count, token_count = [np.zeros(1, np.int64)], 0, 0, 0
    limit = length  # where the open pack is full
    for entries in starts:
        count = len(entries) - 1
        # document -> the first one that is too much for a pack opened by it; count, where that is in a later array
        successors = np.searchsorted(entries, entries[:-1] + length, side="right") - 1
        too_long = successors == np.arange(count)
        successors[too_long] = count
        path = walk(int(np.searchsorted(entries, limit, side="right")) - 1, successors)
        path = path if max_packs is None else path[: max_packs - pack_count]
        opens = np.concatenate([[0], path]) if document_count == 0 else path
        if count and (wrong := opens[too_long[opens]]).size:
            raise ValueError(_too_long(name, document_count + int(wrong[0]), int(np.diff(entries)[wrong[0]]), length))
        firsts.append(path + document_count)
        pack_count += len(path)
        limit = int(entries[path[-1]]) + length if len(path) else limit
        document_count, token_count = document_count + count, int(entries[-1])
        if pack_count == max_packs:
            return np.concatenate(firsts)
    if token_count:
        firsts.append(np.array([document_count]))
    return np.concatenate(firsts)


def document_parts(tokens: FlatTokens, plan: PackSettings) -> Iterator[Int64s]:
    """The parts to pack, some at a time: int64[3, n], each one's document, its number in that, and its length."""
    document_count = 0
    for entries in read_starts(tokens):
        sizes = np.diff(entries)
        if not plan.split_across_pack:
            if plan.too_long == "error" and (wrong := np.flatnonzero(sizes > plan.length)).size:
                raise ValueError(_too_long(tokens.store.url, document_count + int(wrong[0]), int(sizes[wrong[0]]), plan.length))
            sizes = np.minimum(sizes, plan.length)
        counts = -(-sizes // plan.length)
        documents, numbers = spread(np.zeros(len(sizes), np.int64), counts)
        lengths = np.minimum(sizes[documents] - numbers * plan.length, plan.length)
        yield np.stack([documents + document_count, numbers, plan.filled(lengths)])
        document_count += len(sizes)


def _too_long(name: str, document: int, size: int, length: int) -> str:
    return (
        f"{name}: document {document} has {size} tokens, but a pack has {length}. "
        "Take longer packs, split_across_pack=True, or too_long='cut'."
    )


class IndexFile(NamedTuple):
    """The file of an index: int64 alone, little-endian, that begin with ``key``, a digest of all that the index depends on."""

    directory: str
    name: str
    key: bytes

    @classmethod
    def at(cls, cache: PathOrUrl, tokens: FlatTokens, plan: PackSettings) -> Self:
        """The file in the directory *cache*, or next to the dataset. ValueError if that is not a local path."""
        beside = posixpath.dirname(tokens.store.root) + ".packing"
        store = replace(tokens.store, root=beside) if cache == "beside" else Store.at(cache)
        if not store.is_local:
            raise ValueError(f"{store.url}: a packing index is mapped, so it is kept on a local disk. Set cache to a directory.")
        depends_on = {"version": INDEX_VERSION, "seq_starts": _identity(tokens), **plan._asdict()}
        depends_on |= {"token_count": tokens.token_count, "seq_count": tokens.seq_count}
        key = json_digest(depends_on)
        return cls(store.root, f"{plan.fit}-{plan.length}-{key[:32]}.packs", bytes.fromhex(key))

    def load(self) -> list[Int64s] | None:
        """The index's arrays, mapped; None if the file is missing, cut short, or of another index."""
        try:
            # No header: two threads that parse one at once fail under Python 3.11.
            stored = np.asarray(np.memmap(posixpath.join(self.directory, self.name), "<i8", "r"))
        except (OSError, ValueError):
            return None
        key = np.frombuffer(self.key, "<i8")
        if not np.array_equal(stored[: len(key)], key):
            return None
        # key, crc32c of all that follows, number of arrays, their lengths, the arrays one after another
        checksum, rest = stored[len(key) : len(key) + 1], stored[len(key) + 1 :]
        if not len(rest) or google_crc32c.value(rest) != checksum[0]:
            return None
        splits = running_sums(rest[1 : 1 + rest[0]]) + 1 + rest[0]
        return [rest[first:stop] for first, stop in pairwise(splits)]

    def save(self, arrays: Sequence[Int64s]) -> None:
        """Write the file, which appears whole or not at all. OSError if that fails."""
        parts = [np.array([len(arrays), *map(len, arrays)], np.int64), *arrays]
        checksum = 0
        for part in parts:
            checksum = google_crc32c.extend(checksum, np.ascontiguousarray(part))
        parts = [np.frombuffer(self.key, "<i8"), np.array([checksum]), *parts]
        with Store.at(self.directory).create(self.name) as writer:
            for part in parts:
                writer.write(np.ascontiguousarray(part, "<i8"))


def _identity(tokens: FlatTokens) -> str:
    """A digest of ``seq_starts``: of its objects' digests if the manifest has them, else its content's. A selection and
    documents that are filled in the middle have starts of their own.
    """
    as_stored = tokens.numbers is None and "fim" not in settings_of(tokens)
    prefix = f"{posixpath.basename(tokens.store.root)}/seq_starts/"
    with contextlib.suppress(OSError, ValueError):  # another writer's dataset
        if as_stored and (found := digest_below(dataset_of(tokens.store), prefix)):
            return found
    sha256 = hashlib.sha256()
    for entries in read_starts(tokens):
        sha256.update(entries.astype("<i8", copy=False).data)
    return sha256.hexdigest()


def kept_index(tokens: FlatTokens, plan: PackSettings, file: IndexFile | None) -> tuple[Packs, IndexFile | None]:
    """The index, and *file* if it is mapped from that. It is made and kept there first if need be; without a file it is
    made in memory. Processes that make the same index at the same time write the same bytes.
    """
    if file is None:
        return Packs.make(tokens, plan), None
    if (arrays := file.load()) is not None:
        return Packs(tokens, plan, *arrays), file
    made = Packs.make(tokens, plan)
    try:
        file.save(made[2:])
    except OSError as error:
        log.warning("The packing index is rebuilt each time, because it can't be kept: %s", error)
        return made, None
    arrays = file.load()
    return (made, None) if arrays is None else (Packs(tokens, plan, *arrays), file)


def _of_size(parts: Iterable[Int64s], size: int) -> Iterator[Int64s]:
    """The columns of int64[3, n] arrays, *size* at a time: packs must not depend on how much is read at once."""
    rest = np.zeros((3, 0), np.int64)
    for some in parts:
        rest = np.concatenate([rest, some], axis=1)
        while rest.shape[1] >= size:
            yield rest[:, :size]
            rest = rest[:, size:]
    if rest.size:
        yield rest


def best_fit(lengths: Int64s, length: int) -> Int64Pair:
    """Fill packs with the longest parts that fit, one pack after another. *lengths*: int64[n], each 1 to *length*. The packs as
    (``firsts``: int64[packs + 1], ``order``: int64[n]): pack k holds parts ``order[firsts[k]:firsts[k + 1]]``. Packs are in
    the order of their first parts, and so are a pack's parts.
    """
    filling = _Filling(length, crop=False)
    by_length = filling.add(lengths, np.zeros(len(lengths), bool))
    filling.fill()
    per_pack, numbers = filling.rows()
    pack_count, pack_of = len(per_pack), np.empty(len(lengths), np.int64)
    pack_of[by_length[numbers]] = np.repeat(np.arange(pack_count), per_pack)
    first_parts = np.empty(pack_count, np.int64)
    first_parts[pack_of[::-1]] = np.arange(len(lengths))[::-1]  # of equal places the last assignment stays: the first part
    ranks = np.empty(pack_count, np.int64)
    ranks[np.argsort(first_parts)] = np.arange(pack_count)
    pack_of = ranks[pack_of]
    return running_sums(np.bincount(pack_of, minlength=pack_count)), np.argsort(pack_of, kind="stable")
