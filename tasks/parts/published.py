"""Documents of a slice in a published version, with those that it left out, which are in its reserve."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.columns import Columns, batch_of, columns_of, with_kinds
from flat_tokens.manifest import LOSS_MASK, read_manifest, splits_at, splits_of
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store
from tasks.models import Name, PublishedLocation, TokenShard
from tasks.output.paths import DOCUMENTS, version_store
from tasks.output.target import SPLIT_KEY
from tasks.parts.documents import Documents, Places, stored_arrays
from tasks.parts.reserve import left_out_columns, left_out_split_keys, open_left_out

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
    of_files = _open_files(opened, version) if location.first_file is not None else none
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

    split_keys = None
    if shard.has_split_keys:
        arrays = _open_split_keys(opened, version)
        if has_more:
            arrays = (*arrays, left_out_split_keys(opened, version))
        split_keys = np.concatenate(
            [array.read(first, first + count) for array, (first, count) in zip(arrays, runs, strict=True)]
        )

    return Documents(
        np.concatenate([some.keys for some in found])[order],
        np.repeat(np.arange(len(splits), dtype=np.int8), [len(some.keys) for some in found])[order],
        np.concatenate([some.starts[:-1] for some in found])[order],
        np.concatenate([np.diff(some.starts) for some in found])[order],
        tuple(stored_arrays(split.tokens) for split in splits),
        lambda: Places(files[order], rows[order]),
        columns,
        None if split_keys is None else split_keys[order],
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
        tokens = open_array(once / f"{name}/encoded_tokens", "uint32")
        mask = split.loss_mask and open_array(once / f"{name}/{LOSS_MASK}", "uint8")
        columns = (open_array(store / f"{DOCUMENTS}/{name}/{column}", "uint64") for column in ("key", "row"))
        opened.append(_OpenSplit(replace(split, encoded_tokens=tokens, loss_mask=mask), *columns))
    return tuple(opened)


@functools.lru_cache(VERSIONS_OPEN)
def _open_files(root: Store, version: Name) -> tuple[StoredArray, ...]:
    """The file of each document of all splits of a version."""
    return _open_document_arrays(version_store(root, version), "file")


@functools.lru_cache(VERSIONS_OPEN)
def _open_split_keys(root: Store, version: Name) -> tuple[StoredArray, ...]:
    """The split key of each document of all splits of a version."""
    return _open_document_arrays(version_store(root, version), SPLIT_KEY)


def _open_document_arrays(store: Store, name: str) -> tuple[StoredArray, ...]:
    return tuple(open_array(store / f"{DOCUMENTS}/{split}/{name}", "uint64") for split in splits_at(store))


@functools.lru_cache(VERSIONS_OPEN)
def _columns_of_version(root: Store, version: Name) -> tuple[Columns, ...]:
    """The kept columns of all splits of a version."""
    store = version_store(root, version)
    manifest = read_manifest(store)
    return tuple(columns_of(store, manifest, split) for split in splits_of(manifest["totals"]))
