"""Documents of a slice in a published version, with those that it left out, which are in its reserve."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TOKEN_ARRAYS
from flat_tokens.columns import Columns, batch_of, columns_of, with_kinds
from flat_tokens.manifest import read_manifest, splits_at, splits_of
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store
from tasks.models import Name, PublishedLocation, TokenShard
from tasks.output.paths import DOCUMENTS, version_store
from tasks.parts.documents import Documents, read_fact, stored_arrays
from tasks.parts.reserve import left_out_array, left_out_columns, open_left_out, reserved_texts
from tasks.rows import FILE, KEY, ROW, SPLIT_KEY

VERSIONS_OPEN = 4


class _OpenSplit(NamedTuple):
    """One split of an open version, or what it left out, and the arrays with an entry a document."""

    tokens: FlatTokens
    key: StoredArray
    row: StoredArray


class _SplitDocuments(NamedTuple):
    """Its documents: keys, files and rows, uint64[n]; and where each starts, with the end of the last: int64[n + 1]."""

    keys: npt.NDArray[np.uint64]
    files: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]


def published_documents(root: Store, shard: TokenShard, location: PublishedLocation) -> Documents:
    """The documents that a version has of a slice, in all splits, and those that it left out, in the order of their files and
    rows.
    """
    opened, version, has_more = replace(root, staging=None, read_once=False), location.version, location.left_out[1] > 0
    splits = _open_version(opened, version)
    runs = [location.of(split) for split in splits_at(version_store(opened, version))]
    none: tuple[StoredArray | None, ...] = (None,) * len(splits)
    of_files = _open_arrays(opened, version, FILE) if location.first_file is not None else none
    begin = _FirstPlace(location.first_file, location.first_row)
    found = [_read(split, of_file, *run, begin) for split, of_file, run in zip(splits, of_files, runs, strict=True)]
    if has_more:
        tokens, key, file, row = open_left_out(opened, version)
        splits, runs = (*splits, _OpenSplit(tokens, key, row)), [*runs, location.left_out]
        found.append(_read(splits[-1], file, *location.left_out, _OF_SLICE))
    files, rows = (np.concatenate([getattr(some, name) for some in found]) for name in ("files", "rows"))
    order = np.lexsort((rows, files))
    firsts, counts = np.array(runs, np.int64).T
    before = np.cumsum(counts) - counts

    def columns(wanted: npt.NDArray[np.int64]) -> pa.RecordBatch:
        # (shard, document) -> (split after split, document) -> (split, document) -> (shard, document)
        at, names = order[wanted], list(shard.columns)
        split_of = np.searchsorted(before + counts, at, "right")
        kept = _columns_of_version(opened, version)
        if has_more:
            kept = (*kept, left_out_columns(opened, version, kept[0].kinds))
        numbers = at - before[split_of] + firsts[split_of]
        batches = [of_split.take(numbers[split_of == number], names) for number, of_split in enumerate(kept)]
        together = pa.Table.from_batches([with_kinds(batch, shard.columns) for batch in batches])
        back = np.empty(len(at), np.int64)
        back[np.argsort(split_of, kind="stable")] = np.arange(len(at))
        return batch_of({name: together.column(name).combine_chunks().take(pa.array(back)) for name in names})

    # Of all splits one after another, in the documents' order.
    keys, files, rows = (np.concatenate([getattr(some, name) for some in found])[order] for name in ("keys", "files", "rows"))
    read_before = {KEY: keys, FILE: files, ROW: rows}

    def read(name: str, first: int, stop: int) -> npt.NDArray[np.uint64]:
        if name == SPLIT_KEY and name in shard.facts and name not in read_before:
            arrays = _open_arrays(opened, version, name)
            arrays = (*arrays, left_out_array(opened, version, name)) if has_more else arrays
            parts = zip(arrays, runs, strict=True)
            read_before[name] = np.concatenate([array.read(at, at + count) for array, (at, count) in parts])[order]
        if name in shard.of_texts:
            array, at = reserved_texts(opened, location, name)
            return read_fact(array, shard.facts[name], at + first, at + stop)
        return read_before[KEY if name == SPLIT_KEY and name not in read_before else name][first:stop]

    return Documents(
        np.repeat(np.arange(len(splits), dtype=np.int8), [len(some.keys) for some in found])[order],
        np.concatenate([some.starts[:-1] for some in found])[order],
        np.concatenate([np.diff(some.starts) for some in found])[order],
        tuple(stored_arrays(split.tokens) for split in splits),
        read,
        columns,
    )


class _FirstPlace(NamedTuple):
    """The file and the row at which a slice begins. No file: it is of one."""

    file: int | None
    row: int


_OF_SLICE = _FirstPlace(0, 0)
"""Where files and rows are those of the slice."""


def _read(split: _OpenSplit, of_file: StoredArray | None, first: int, count: int, begin: _FirstPlace) -> _SplitDocuments:
    """The documents ``first:first + count`` of a split; *of_file*: the file of each, for a run of files.
    (version, file, row) -> (slice, file, row)
    """
    stop = first + count
    rows, starts = split.row.read(first, stop), split.tokens.seq_starts.read(first, stop + 1).astype(np.int64)
    if of_file is None or begin.file is None:
        files, rows = np.zeros(count, np.uint64), rows - np.uint64(begin.row)
    else:
        files = of_file.read(first, stop) - np.uint64(begin.file)
    return _SplitDocuments(split.key.read(first, stop), files, rows, starts)


@functools.lru_cache(VERSIONS_OPEN)
def _open_version(root: Store, version: Name) -> tuple[_OpenSplit, ...]:
    """The splits of a version, which never changes: what is opened once is good for all its slices."""
    store = version_store(root, version)
    opened = []
    for name in splits_at(store):
        split = open_split(store / name)
        # The entries of documents are kept, as several slices share a chunk; tokens are read once.
        once = replace(store, read_once=True)
        arrays: Any = {of: open_array(once / f"{name}/{of}", TOKEN_ARRAYS[of].dtype) for of in split.arrays}
        columns = (open_array(store / f"{DOCUMENTS}/{name}/{column}", "uint64") for column in ("key", "row"))
        opened.append(_OpenSplit(replace(split, **arrays), *columns))
    return tuple(opened)


@functools.lru_cache(2 * VERSIONS_OPEN)
def _open_arrays(root: Store, version: Name, fact: str) -> tuple[StoredArray, ...]:
    """A fact of the documents of each split of a version."""
    store = version_store(root, version)
    return tuple(open_array(store / f"{DOCUMENTS}/{split}/{fact}", "uint64") for split in splits_at(store))


@functools.lru_cache(VERSIONS_OPEN)
def _columns_of_version(root: Store, version: Name) -> tuple[Columns, ...]:
    """The kept columns of all splits of a version."""
    store = version_store(root, version)
    manifest = read_manifest(store)
    return tuple(columns_of(store, manifest, split) for split in splits_of(manifest["totals"]))
