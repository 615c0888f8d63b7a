"""Documents of a part: their keys, their places in the source, and readers of their tokens, masks and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.stored import StoredArray
from flat_tokens.reader import FlatTokens
from tasks.parts.runs import FROM_DISK, FROM_STORE, Reads, read_runs

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

WINDOW_TOKENS = 1 << 21
"""Tokens that are put together at a time where they come from several splits of a version."""

Runs = Callable[[Int64s, Int64s], Iterator[npt.NDArray[Any]]]
"""The items of runs of an array, by where each begins and ends: int64[n] each. An array is valid until the next is asked for."""


class TokenArrays(NamedTuple):
    """Arrays with an item a token that documents are in: uint32 encoded tokens, and uint8 loss masks, None where all count."""

    tokens: Runs
    masks: Runs | None


def stored_runs(array: StoredArray, reads: Reads | None = None) -> Runs:
    """Runs of a stored array."""
    how = reads or (FROM_DISK if array.store.is_local else FROM_STORE)
    return lambda begins, ends: read_runs(array, begins, ends, how)


def stored_arrays(tokens: FlatTokens, reads: Reads | None = None) -> TokenArrays:
    """The arrays of a stored flat-tokens array."""
    mask = tokens.loss_mask
    return TokenArrays(stored_runs(tokens.encoded_tokens, reads), None if mask is None else stored_runs(mask, reads))


class Places(NamedTuple):
    """The number of the file and the row in it of each document: uint64[n] each."""

    file: UInt64s
    row: UInt64s

    def those(self, keep: npt.NDArray[np.bool_]) -> Places:
        return Places(self.file[keep], self.row[keep])


class Documents(NamedTuple):
    """Documents in their order. Tokens of document i: ``begins[i]`` and ``lengths[i]`` on, of ``arrays[array[i]]``.

    ``keys``: uint64[n]; ``split_keys``: uint64[n], None where these are the keys; ``array``: int8[n]; ``begins``, ``lengths``:
    int64[n]. ``places()``: files and rows, read when they are
    asked for. ``columns(i)``: the kept columns of documents i, int64[m], ascending.
    """

    keys: UInt64s
    array: npt.NDArray[np.int8]
    begins: Int64s
    lengths: Int64s
    arrays: tuple[TokenArrays, ...]
    places: Callable[[], Places]
    columns: Callable[[Int64s], pa.RecordBatch]
    split_keys: UInt64s | None = None

    @property
    def drawn_by(self) -> UInt64s:
        """The values that decide on the documents' splits: uint64[n]."""
        return self.keys if self.split_keys is None else self.split_keys

    def those(self, keep: npt.NDArray[np.bool_]) -> Documents:
        """The documents *keep*, bool[n]."""
        if keep.all():
            return self
        numbers = np.flatnonzero(keep)
        return Documents(
            self.keys[keep],
            self.array[keep],
            self.begins[keep],
            self.lengths[keep],
            self.arrays,
            lambda: self.places().those(keep),
            lambda wanted: self.columns(numbers[wanted]),
            None if self.split_keys is None else self.split_keys[keep],
        )

    def tokens(self, low: int, high: int) -> Iterator[npt.NDArray[np.uint32]]:
        """The documents' tokens from *low* to *high*. An array is valid until the next is asked for."""
        return self._items([arrays.tokens for arrays in self.arrays], low, high, np.dtype(np.uint32))

    def masks(self, low: int, high: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Which of the same tokens count for the loss. All do where an array has no mask."""
        masks = [arrays.masks for arrays in self.arrays if arrays.masks is not None]
        if len(masks) == len(self.arrays):
            yield from self._items(masks, low, high, np.dtype(np.uint8))
            return
        count = min(int(self.lengths.sum()), high) - max(low, 0)
        for start in range(0, count, WINDOW_TOKENS):
            yield np.ones(min(WINDOW_TOKENS, count - start), np.uint8)

    def _items(self, runs: Sequence[Runs], low: int, high: int, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
        some = self.lengths > 0
        array, begins, ends = self.array[some], self.begins[some], (self.begins + self.lengths)[some]
        # Consecutive documents make one run of tokens.
        edge = (begins[1:] != ends[:-1]) | (array[1:] != array[:-1])
        array, begins = array[np.append(True, edge)[: len(array)]], begins[np.append(True, edge)[: len(begins)]]
        ends = ends[np.append(edge, True)[: len(ends)]]
        # Cut the first and the last run at the borders.
        before = np.cumsum(ends - begins) - (ends - begins)
        begins, ends = np.maximum(begins, begins + low - before), np.minimum(ends, begins + high - before)
        some = begins < ends
        return _merged(runs, array[some], begins[some], ends[some], dtype)


def _merged(
    runs: Sequence[Runs], array: npt.NDArray[np.int8], begins: Int64s, ends: Int64s, dtype: np.dtype[Any]
) -> Iterator[npt.NDArray[Any]]:
    """The items of consecutive runs, each of the array of that number."""
    if not len(array):
        return
    if (array == array[0]).all():
        yield from runs[int(array[0])](begins, ends)
        return
    windows = np.cumsum(ends - begins) // WINDOW_TOKENS
    for window in np.split(np.arange(len(array)), np.flatnonzero(np.diff(windows)) + 1):
        lengths = ends[window] - begins[window]
        items = np.empty(int(lengths.sum()), dtype)
        for i, of_array in enumerate(runs):
            mine = array[window] == i
            parts = [part.copy() for part in of_array(begins[window][mine], ends[window][mine])]
            items[np.repeat(mine, lengths)] = np.concatenate([*parts, items[:0]])
        yield items


def one_array(keys: UInt64s, lengths: Int64s) -> tuple[npt.NDArray[np.int8], Int64s]:
    """The array and the begin of consecutive documents of a single array."""
    return np.zeros(len(keys), np.int8), np.cumsum(lengths) - lengths


def shard_places(rows: UInt64s, file_starts: UInt64s) -> Places:
    """The places of documents by their *rows* in the slice, relative to its first file. (slice, row) -> (file, row)"""
    if len(file_starts) == 1:
        return Places(np.zeros(len(rows), np.uint64), rows)
    file = np.searchsorted(file_starts, rows, "right") - 1
    return Places(file.astype(np.uint64), rows - file_starts[file])
