"""Chosen documents of a split, as a split: its arrays hold no tokens, they tell where the chosen ones are stored.

Chosen documents that are stored side by side are one *run* of tokens. Token t of the selection, in run r, is stored at
``sources[r] + t - begins[r]``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import AnyArray, Int64s, UInt64s
from flat_tokens.arrays.stored import StoredArray, read_gathered
from flat_tokens.options import whole_numbers
from flat_tokens.rows.views import ranges, read_starts, running_sums
from flat_tokens.stores.cached import Unit
from flat_tokens.stores.store import Store

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

FEW = 64
"""Where less than one document in this many is chosen, entries are read one by one; else all between, some at a time."""
DENSE = 4
"""Where one in so many is chosen, all entries between may be in memory."""
STARTS_AT_A_TIME = 1 << 20


def selected(tokens: FlatTokens, indices: npt.ArrayLike) -> FlatTokens:
    """The split of the documents *indices* (int64[n]), in this order. It reads their places, and no token.

    TypeError for indices that are not whole numbers, IndexError for one that is not from 0 to ``seq_count - 1``.
    """
    numbers = _checked(tokens, np.asarray(indices))
    # A selection of a selection is one of the split.
    if tokens.numbers is not None and isinstance(tokens.encoded_tokens, _SelectedTokens):
        numbers, tokens = tokens.numbers[numbers], tokens.encoded_tokens.split
    numbers.flags.writeable = False
    starts, lengths = _bounds(tokens, numbers)
    entries = running_sums(lengths)
    some = np.flatnonzero(lengths)
    begin, end = starts[some], (starts + lengths)[some]
    # document with tokens -> whether it does not begin where the one before it ends
    first = np.flatnonzero(np.append(True, begin[1:] != end[:-1])[: len(some)])
    encoded = _SelectedTokens(tokens, tokens.encoded_tokens, begin[first], np.append(entries[some[first]], entries[-1]))
    made: Any = {"encoded_tokens": encoded, "seq_starts": StartsInMemory(entries.view(np.uint64), tokens.seq_starts.store)}
    if tokens.loss_mask is not None:
        made["loss_mask"] = encoded.beside(tokens.loss_mask)
    return replace(tokens, numbers=numbers, **made)


def _checked(tokens: FlatTokens, indices: AnyArray) -> Int64s:
    indices = whole_numbers("indices are whole numbers,", indices)
    if (outside := np.flatnonzero((indices < 0) | (indices >= tokens.seq_count))).size:
        raise IndexError(f"{tokens.store.url}: there is no sequence {indices[outside[0]]}; there are {tokens.seq_count}")
    return np.array(indices, np.int64)


def _bounds(tokens: FlatTokens, numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Starts and lengths of the documents: int64[n], int64[n]."""
    first, stop = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)
    if len(numbers) * FEW < stop - first:
        return tokens.bounds(numbers)
    is_ascending = bool((numbers[1:] >= numbers[:-1]).all())
    if not is_ascending and stop - first <= len(numbers) * DENSE:  # sorting would take longer than all other steps together
        parts = [entries[:-1] for entries in read_starts(tokens, first, stop, STARTS_AT_A_TIME)]
        whole = np.concatenate([*parts, tokens.seq_starts.read(stop, stop + 1).astype(np.int64)])
        starts = whole[numbers - first]
        return starts, whole[numbers - first + 1] - starts
    order = None if is_ascending else np.argsort(numbers)
    ascending = numbers if order is None else numbers[order]
    found, done = np.empty((2, len(numbers)), np.int64), 0
    for entries in read_starts(tokens, first, stop, STARTS_AT_A_TIME):
        end = int(np.searchsorted(ascending, first + len(entries) - 1))
        within = ascending[done:end] - first
        into = slice(done, end) if order is None else order[done:end]
        found[0, into] = starts = entries[within]
        found[1, into] = entries[within + 1] - starts
        first, done = first + len(entries) - 1, end
    return found[0], found[1]


class StartsInMemory:
    """``seq_starts`` of documents that are not stored so, such as a selection's, in memory."""

    def __init__(self, entries: UInt64s, store: Store) -> None:
        self._entries, self.length, self.store = entries, len(entries), store

    def read(self, start: int, stop: int) -> UInt64s:
        return self._entries[start:stop].copy()

    def take(self, indices: Int64s) -> UInt64s:
        return self._entries[indices]

    def gather(self, starts: Int64s, lengths: Int64s, out: UInt64s, at: Int64s) -> None:
        out[ranges(at, lengths)] = self._entries[ranges(starts, lengths)]


class _SelectedTokens:
    """``encoded_tokens`` of a selection of *split*, or its ``loss_mask``."""

    def __init__(self, split: FlatTokens, array: StoredArray, sources: Int64s, begins: Int64s) -> None:
        self.split, self._array, self._sources, self._begins = split, array, sources, begins
        self.length, self.store, self.numpy_dtype = int(begins[-1]), array.store, array.numpy_dtype

    def beside(self, array: StoredArray) -> _SelectedTokens:
        """The same places of another array."""
        return _SelectedTokens(self.split, array, self._sources, self._begins)

    read = read_gathered

    def take(self, indices: Int64s) -> AnyArray:
        run = np.searchsorted(self._begins, indices, side="right") - 1
        return self._array.take(indices - self._begins[run] + self._sources[run])

    def gather(self, starts: Int64s, lengths: Int64s, out: AnyArray, at: Int64s) -> None:
        of, within, stored, counts = self._stored(starts, lengths)
        self._array.gather(stored, counts, out, at[of] + within)

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        _, _, stored, counts = self._stored(starts, lengths)
        return self._array.units_of(stored, counts)

    def _stored(self, starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Ranges of the selection -> parts of runs: the range of each, its place in that, where it is stored, its length."""
        first = np.searchsorted(self._begins, starts, side="right") - 1
        last = np.searchsorted(self._begins, starts + lengths)
        counts = np.where(lengths > 0, last - first, 0)
        of, run = np.repeat(np.arange(len(starts)), counts), ranges(first, counts)
        begin = np.maximum(self._begins[run], starts[of])
        end = np.minimum(self._begins[run + 1], (starts + lengths)[of])
        return of, begin - starts[of], begin - self._begins[run] + self._sources[run], end - begin
