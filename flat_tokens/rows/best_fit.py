"""Packs with little padding: each is filled with the longest parts of documents that fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

from flat_tokens.rows.starts import Int64s, running_sums

PARTS_AT_A_TIME = 1 << 18
"""Parts of documents that ``fit="best"`` fits together. Another number gives other packs."""


def best_packs(parts: Iterable[Int64s], length: int) -> tuple[Int64s, Int64s, int]:
    """Packs with little padding. *parts*, some at a time: int64[3, n], their documents, numbers in these, and lengths.

    Returns ``firsts``, int64[packs + 1], the documents and numbers of parts, int64[2, n], of which pack k has
    ``firsts[k]:firsts[k + 1]``, and how many tokens of padding there are. Parts are taken 262,144 at a time, so that
    memory is bounded and a pack's documents are near each other; those in the pack that is filled least wait for more.
    """
    counts, packed, padding = [np.zeros(0, np.int64)], [np.zeros((2, 0), np.int64)], 0
    waiting = np.zeros((3, 0), np.int64)
    for fresh in _of_size(parts, PARTS_AT_A_TIME):
        pool = np.concatenate([waiting, fresh], axis=1)
        firsts, order = best_fit(pool[2], length)
        pool = pool[:, order]
        filled = np.add.reduceat(pool[2], firsts[:-1])
        least = int(filled.argmin())
        first, stop = firsts[least : least + 2].tolist()
        waiting = pool[:, first:stop]
        counts += [np.diff(firsts[: least + 1]), np.diff(firsts[least + 1 :])]
        packed += [pool[:2, :first], pool[:2, stop:]]
        padding += int((length - filled).sum() - (length - filled[least]))
    if waiting.size:
        counts.append(np.array([waiting.shape[1]]))
        packed.append(waiting[:2])
        padding += length - int(waiting[2].sum())
    return running_sums(np.concatenate(counts)), np.concatenate(packed, axis=1), padding


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


def best_fit(lengths: Int64s, length: int) -> tuple[Int64s, Int64s]:
    """Fill packs with the longest parts that fit, one pack after another.

    *lengths*: int64[n], each 1 to *length*. The packs as (``firsts``: int64[packs + 1], ``order``: int64[n]): pack k holds
    parts ``order[firsts[k]:firsts[k + 1]]``. Packs are in the order of their first parts, and so are a pack's parts.
    """
    by_length = np.argsort(lengths.astype(np.min_scalar_type(length)), kind="stable")  # two bytes sort in linear time
    ascending = lengths[by_length]
    groups = np.flatnonzero(np.diff(ascending, prepend=0))
    sizes, counts = ascending[groups].tolist(), np.diff(groups, append=len(lengths)).tolist()
    used, pack_count = groups.tolist(), 0
    fills = []
    for filling, repeats in _fillings(sizes, counts, length):
        for group, each in filling:
            fills.append((used[group], pack_count, each, each * repeats))
            used[group] += each * repeats
        pack_count += repeats
    # fill -> its parts: those from start on in ascending order, each of them to a pack, from pack on
    start, pack, per_pack, total = np.array(sorted(fills), np.int64).reshape(-1, 4).T
    place = np.arange(len(lengths)) - np.repeat(start, total)
    pack_of = np.empty(len(lengths), np.int64)
    pack_of[by_length] = np.repeat(pack, total) + place // np.repeat(per_pack, total)

    first_parts = np.empty(pack_count, np.int64)
    first_parts[pack_of[::-1]] = np.arange(len(lengths))[::-1]  # of equal places the last assignment stays: the first part
    ranks = np.empty(pack_count, np.int64)
    ranks[np.argsort(first_parts)] = np.arange(pack_count)
    pack_of = ranks[pack_of]
    return running_sums(np.bincount(pack_of, minlength=pack_count)), np.argsort(pack_of, kind="stable")


def _fillings(sizes: list[int], counts: list[int], length: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Fillings of packs: ([(size's number, parts of it in each pack)], how many packs are filled like that).

    *sizes* ascend. Equal fillings repeat while there are parts for them, so they are found at once.
    """
    sizes, left = [0, *sizes], [0, *counts]
    lower = list(range(len(sizes)))  # number -> itself while parts of that size are left, then a lower one; 0: none are

    def with_pieces(number: int) -> int:
        while lower[number] != number:
            lower[number] = lower[lower[number]]
            number = lower[number]
        return number

    while number := with_pieces(len(sizes) - 1):
        filling, room = [], length
        while number:
            each = min(left[number], room // sizes[number])
            filling.append((number - 1, each))
            room -= each * sizes[number]
            number = with_pieces(min(number, bisect_right(sizes, room)) - 1)
        repeats = min(left[group + 1] // each for group, each in filling)
        for group, each in filling:
            left[group + 1] -= each * repeats
            if not left[group + 1]:
                lower[group + 1] = group
        yield filling, repeats
