"""The documents of a token shard in the order of their rows, wherever its arrays lie: in objects of its own, or in a version."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.columns import Columns, batch_of, columns_of, with_kinds
from flat_tokens.manifest import LOSS_MASK, SPLITS, read_manifest
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store
from tasks.models import Held, Name, TokenShard, Within
from tasks.output.paths import DOCUMENTS, version_store
from tasks.shards.columns import shard_columns
from tasks.shards.read import open_arrays
from tasks.shards.runs import FROM_DISK, FROM_STORE, read_runs, runs_in_memory
from tasks.shards.streamed import read_entries, tokens_within

WINDOW_TOKENS = 1 << 21
"""Tokens that are put together at a time where they come from both splits of a version."""
VERSIONS_OPEN = 4


Parts = Sequence[npt.NDArray[np.uint32]]
"""Tokens in memory, in parts one behind the other."""


class InMemory(NamedTuple):
    """Tokens of a shard that has no loss mask, in memory or mapped into it."""

    encoded_tokens: Parts
    loss_mask: None = None


class Contents(NamedTuple):
    """The documents of a shard. Tokens of document i: ``begins[i]`` and ``lengths[i]`` on, of the array ``arrays[array[i]]``.

    ``keys``: uint64[n]; ``array``: int8[n]; ``begins``, ``lengths``: int64[n]; ``rows()``: uint64[n], counted from the slice's
    first one. ``columns(i)``: the kept columns of documents i, int64[m], ascending.
    """

    keys: npt.NDArray[np.uint64]
    array: npt.NDArray[np.int8]
    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    arrays: tuple[FlatTokens, ...] | tuple[InMemory, ...]
    rows: Callable[[], npt.NDArray[np.uint64]]
    columns: Callable[[npt.NDArray[np.int64]], pa.RecordBatch]

    def tokens(self, wanted: npt.NDArray[np.bool_], low: int, high: int) -> Iterator[npt.NDArray[np.uint32]]:
        """Of the tokens of documents *wanted*, bool[n], those from *low* to *high*. An array is valid until the next comes."""
        return self._items([array.encoded_tokens for array in self.arrays], wanted, low, high)

    def masks(self, wanted: npt.NDArray[np.bool_], low: int, high: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Which of the same tokens count for the loss. All do where the arrays have no mask."""
        masks = [array.loss_mask for array in self.arrays if array.loss_mask is not None]
        if len(masks) == len(self.arrays):
            yield from self._items(masks, wanted, low, high)
            return
        count = min(int(self.lengths[wanted].sum()), high) - max(low, 0)
        for start in range(0, count, WINDOW_TOKENS):
            yield np.ones(min(WINDOW_TOKENS, count - start), np.uint8)

    def _items(
        self, arrays: Sequence[StoredArray | Parts], wanted: npt.NDArray[np.bool_], low: int, high: int
    ) -> Iterator[npt.NDArray[Any]]:
        array, begins, lengths = self.array[wanted], self.begins[wanted], self.lengths[wanted]
        some = lengths > 0
        array, begins, ends = array[some], begins[some], (begins + lengths)[some]
        # Documents that stand side by side make one run of tokens.
        apart = (begins[1:] != ends[:-1]) | (array[1:] != array[:-1])
        array, begins = array[np.append(True, apart)[: len(array)]], begins[np.append(True, apart)[: len(begins)]]
        ends = ends[np.append(apart, True)[: len(ends)]]
        # Cut the first and the last run at the borders.
        before = np.cumsum(ends - begins) - (ends - begins)
        begins, ends = np.maximum(begins, begins + low - before), np.minimum(ends, begins + high - before)
        some = begins < ends
        yield from _runs(arrays, array[some], begins[some], ends[some])


def _runs(
    arrays: Sequence[StoredArray | Parts], array: npt.NDArray[np.int8], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[Any]]:
    """The items of runs, one behind the other, each of the array of that number."""
    if not len(array):
        return
    if (array == array[0]).all():
        yield from _runs_of(arrays[int(array[0])], begins, ends)
        return
    windows = np.cumsum(ends - begins) // WINDOW_TOKENS
    for window in np.split(np.arange(len(array)), np.flatnonzero(np.diff(windows)) + 1):
        lengths = ends[window] - begins[window]
        items = np.empty(int(lengths.sum()), arrays[0].numpy_dtype if isinstance(arrays[0], StoredArray) else np.uint32)
        for i, source in enumerate(arrays):
            mine = array[window] == i
            parts = [part.copy() for part in _runs_of(source, begins[window][mine], ends[window][mine])]
            items[np.repeat(mine, lengths)] = np.concatenate([*parts, items[:0]])
        yield items


def _runs_of(
    source: StoredArray | Parts, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[Any]]:
    """The items of runs of one array, one behind the other."""
    if isinstance(source, StoredArray):
        return read_runs(source, begins, ends, FROM_DISK if source.store.is_local else FROM_STORE)
    return runs_in_memory(source, begins, ends)


Opened = Callable[[Store, TokenShard], Contents]
"""How a shard is opened for its documents."""


def open_contents(root: Store, shard: TokenShard, *names: str) -> Contents:
    """Open a shard for its documents. *names*: arrays beside its keys and starts that are read, too."""
    if shard.held is not None:
        return _held(root, shard, shard.held)
    if shard.within is not None:
        return _within(root, shard, shard.within)
    tokens, documents = open_arrays(root, shard, "seq_starts", f"{DOCUMENTS}/key", *names)
    starts = tokens.seq_starts.read(0, tokens.seq_count + 1).astype(np.int64)
    keys = documents.key.read(0, tokens.seq_count)
    return Contents(
        keys,
        np.zeros(len(keys), np.int8),
        starts[:-1],
        np.diff(starts),
        (tokens,),
        lambda: documents.row.read(0, tokens.seq_count),
        functools.partial(columns_of_shard, root, shard),
    )


def columns_of_shard(root: Store, shard: TokenShard, wanted: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The kept columns of documents *wanted*, int64[m], of a shard with objects of its own."""
    return shard_columns(root, shard).take(wanted, list(shard.columns))


def _within(root: Store, shard: TokenShard, within: Within) -> Contents:
    """The documents of a shard whose tokens an unfinished version has."""
    entries = read_entries(root, shard)
    lengths, begins = entries.length.astype(np.int64), np.empty(len(entries.length), np.int64)
    for mine in (entries.in_validation, ~entries.in_validation):
        begins[mine] = np.cumsum(lengths[mine]) - lengths[mine]
    return Contents(
        entries.key,
        entries.in_validation.astype(np.int8),  # a number in SPLITS
        begins,
        lengths,
        tuple(InMemory(list(tokens_within(root, within, split))) for split in SPLITS),
        lambda: entries.row,
        functools.partial(columns_of_shard, root, shard),
    )


class _Split(NamedTuple):
    """One split of an open version, and the arrays beside it."""

    tokens: FlatTokens
    key: StoredArray
    file: StoredArray
    row: StoredArray


def _held(root: Store, shard: TokenShard, held: Held) -> Contents:
    """The documents that a version has of a slice, merged by their rows."""
    opened = replace(root, staging=None, read_once=False)
    splits = _open_version(opened, held.version)
    found: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int8]]] = []
    file_starts = shard.file_starts
    for i, (split, (first, count)) in enumerate(zip(splits, (held.train, held.validation), strict=True)):
        stop = first + count
        starts = split.tokens.seq_starts.read(first, stop + 1).astype(np.int64)
        rows = split.row.read(first, stop)
        if held.first_file is None:
            rows = rows - np.uint64(held.first_row)
        else:  # (file, row) -> (slice, row)
            rows = rows + file_starts[split.file.read(first, stop) - np.uint64(held.first_file)]
        found.append((split.key.read(first, stop), rows, starts, np.full(count, i, np.int8)))
    all_rows = np.concatenate([rows for _, rows, _, _ in found])
    order = np.argsort(all_rows, kind="stable")

    def columns(wanted: npt.NDArray[np.int64]) -> pa.RecordBatch:
        # (shard, document) -> (split, document) -> both splits' one behind the other -> (shard, document)
        at, names = order[wanted], list(shard.columns)
        is_train, kept = at < held.train[1], _columns_of_version(opened, held.version)
        train = kept[0].take(at[is_train] + held.train[0], names)
        validation = kept[1].take(at[~is_train] - held.train[1] + held.validation[0], names)
        both = pa.Table.from_batches([with_kinds(batch, shard.columns) for batch in (train, validation)])
        places = np.where(is_train, np.cumsum(is_train) - 1, is_train.sum() + np.cumsum(~is_train) - 1)
        return batch_of({name: both.column(name).combine_chunks().take(pa.array(places)) for name in names})

    return Contents(
        np.concatenate([keys for keys, _, _, _ in found])[order],
        np.concatenate([array for _, _, _, array in found])[order],
        np.concatenate([starts[:-1] for _, _, starts, _ in found])[order],
        np.concatenate([np.diff(starts) for _, _, starts, _ in found])[order],
        tuple(split.tokens for split in splits),
        lambda: all_rows[order],
        columns,
    )


@functools.lru_cache(VERSIONS_OPEN)
def _open_version(root: Store, version: Name) -> tuple[_Split, ...]:
    """Both splits of a version, which never changes: what is opened once is good for all its slices."""
    store = version_store(root, version)
    opened = []
    for name in SPLITS:
        split = open_split(store / name)
        # The entries of documents are kept, as several slices share a chunk; tokens are read once.
        once = replace(store, read_once=True)
        tokens = open_array(once / f"{name}/encoded_tokens", "uint32")
        mask = split.loss_mask and open_array(once / f"{name}/{LOSS_MASK}", "uint8")
        beside = (open_array(store / f"{DOCUMENTS}/{name}/{column}", "uint64") for column in ("key", "file", "row"))
        opened.append(_Split(replace(split, encoded_tokens=tokens, loss_mask=mask), *beside))
    return tuple(opened)


@functools.lru_cache(VERSIONS_OPEN)
def _columns_of_version(root: Store, version: Name) -> tuple[Columns, ...]:
    """The kept columns of both splits of a version."""
    store = version_store(root, version)
    manifest = read_manifest(store)
    return tuple(columns_of(store, manifest, split) for split in SPLITS)
