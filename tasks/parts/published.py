"""Documents of a slice in a published version, with those that it left out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64Pair, Int64s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TOKEN_ARRAYS
from flat_tokens.columns import Columns, batch_of, columns_left_out, columns_of, with_kinds
from flat_tokens.manifest import read_manifest, splits_at
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store
from tasks.models import ALL_SPLITS, LEFT_OUT, Name, PublishedLocation, Split, TokenShard
from tasks.output.paths import beside_key, fact_key, home_key, version_store
from tasks.parts.documents import Documents, read_fact, stored_arrays
from tasks.parts.part import COMPARED
from tasks.rows import FILE, KEY, OF_CHOICE, REASON, ROW

VERSIONS_OPEN = 4


class _OpenSplit(NamedTuple):
    """A split of an open version, and the keys and the rows of its documents."""

    tokens: FlatTokens
    key: StoredArray
    row: StoredArray


class _SplitDocuments(NamedTuple):
    """Its documents: keys, files and rows, uint64[n]; and where each starts, with the end of the last: int64[n + 1]."""

    keys: UInt64s
    files: UInt64s
    rows: UInt64s
    starts: Int64s


def published_documents(root: Store, shard: TokenShard, location: PublishedLocation) -> Documents:
    """The documents that a version has of a slice, in all splits, in the order of their files and rows."""
    opened, version = replace(root, staging=None, read_once=False), location.version
    names: list[Split] = [*splits_at(version_store(opened, version))]
    names += [LEFT_OUT] if location.left_out[1] else []
    splits, runs = [_open_split(opened, version, split) for split in names], list(map(location.of, names))
    found = [_read(opened, location, split, of) for split, of in zip(names, splits, strict=True)]
    files, rows = (np.concatenate([getattr(some, name) for some in found]) for name in ("files", "rows"))
    order = np.lexsort((rows, files))
    firsts, counts = np.array(runs, np.int64).T
    before = np.cumsum(counts) - counts

    def places(at: Int64s) -> Int64Pair:
        # (split after split, document) -> (split, document)
        split_of = np.searchsorted(before + counts, at, "right")
        return split_of, at - before[split_of] + firsts[split_of]

    def columns(wanted: Int64s) -> pa.RecordBatch:
        # (shard, document) -> (split after split, document) -> (split, document) -> (shard, document)
        at, kept = order[wanted], list(shard.columns)
        split_of, numbers = places(at)
        of_splits = enumerate(_columns_of(opened, version, split) for split in names)
        batches = [of_split.take(numbers[split_of == number], kept) for number, of_split in of_splits]
        together = pa.Table.from_batches([with_kinds(batch, shard.columns) for batch in batches])
        back = np.empty(len(at), np.int64)
        back[np.argsort(split_of, kind="stable")] = np.arange(len(at))
        return batch_of({name: together.column(name).combine_chunks().take(pa.array(back)) for name in kept})

    # Of all splits one after another, in the documents' order.
    keys, files, rows = (np.concatenate([getattr(some, name) for some in found])[order] for name in ("keys", "files", "rows"))
    read_before = {KEY: keys, FILE: files, ROW: rows}

    def read(name: str, first: int, stop: int) -> UInt64s:
        if name in read_before or name not in (*shard.facts, *OF_CHOICE):
            return read_before.get(name, keys)[first:stop]
        split_of, numbers = places(order[first:stop])
        found = np.zeros((stop - first, shard.facts.get(name, 1)), np.uint64)
        for number, split in enumerate(names):
            mine = split_of == number
            if mine.any() and (name not in OF_CHOICE or split == LEFT_OUT):
                some = numbers[mine]
                first_of, end = int(some.min()), int(some.max()) + 1
                values = read_fact(_open_fact(opened, version, split, name), found.shape[1], first_of, end)
                found[mine] = values.reshape(-1, found.shape[1])[some - first_of]
        if name == REASON:  # of the slice, not those that comparing its documents gave
            found[np.isin(found, COMPARED)] = 0
        return found if found.shape[1] > 1 else found[:, 0]

    return Documents(
        np.repeat(np.arange(len(splits), dtype=np.int8), counts)[order],
        np.concatenate([some.starts[:-1] for some in found])[order],
        np.concatenate([np.diff(some.starts) for some in found])[order],
        tuple(stored_arrays(split.tokens) for split in splits),
        read,
        columns,
    )


def _read(root: Store, location: PublishedLocation, name: Split, split: _OpenSplit) -> _SplitDocuments:
    """The documents of a slice in a split. (version, file, row) -> (slice, file, row)"""
    first, count = location.of(name)
    stop = first + count
    rows, starts = split.row.read(first, stop), split.tokens.seq_starts.read(first, stop + 1).astype(np.int64)
    if location.first_file is None:
        files, rows = np.zeros(count, np.uint64), rows - np.uint64(location.first_row)
    else:
        files = _open_fact(root, location.version, name, FILE).read(first, stop) - np.uint64(location.first_file)
    return _SplitDocuments(split.key.read(first, stop), files, rows, starts)


@functools.lru_cache(len(ALL_SPLITS) * VERSIONS_OPEN)
def _open_split(root: Store, version: Name, split: Split) -> _OpenSplit:
    """A split of a version, which never changes: what is opened once is good for all its slices."""
    store = root / home_key(version, split)
    tokens = open_split(store / split)
    # The entries of documents are kept, as several slices share a chunk; tokens are read once.
    once = replace(store, read_once=True)
    arrays: Any = {of: open_array(once / f"{split}/{of}", TOKEN_ARRAYS[of].dtype) for of in tokens.arrays}
    return _OpenSplit(replace(tokens, **arrays), *(_open_fact(root, version, split, name) for name in (KEY, ROW)))


@functools.lru_cache(4 * len(ALL_SPLITS) * VERSIONS_OPEN)
def _open_fact(root: Store, version: Name, split: Split, name: str) -> StoredArray:
    """A fact of the documents of a split."""
    return open_array(root / fact_key(version, split, name), "uint64")


@functools.lru_cache(len(ALL_SPLITS) * VERSIONS_OPEN)
def _columns_of(root: Store, version: Name, split: Split) -> Columns:
    """The kept columns of a split."""
    store = version_store(root, version)
    manifest = read_manifest(store)
    return left_out_columns(root, version, manifest) if split == LEFT_OUT else columns_of(store, manifest, split)


def left_out_columns(root: Store, version: str, manifest: Mapping[str, Any]) -> Columns:
    """The kept columns of the documents that a version left out."""
    store = root / beside_key(version)
    return columns_left_out(store, manifest, open_split(store / LEFT_OUT).seq_count)
