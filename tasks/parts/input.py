"""Documents of datasets: those of a slice in a published version, with those that it left out; and those of a range of an input's
sequences.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Bools, Int64Pair, Int64s, Structs, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TOKEN_ARRAYS
from flat_tokens.columns import Columns, batch_of, columns_left_out, columns_of, with_kinds
from flat_tokens.manifest import CLUSTER, manifest_of, read_manifest
from flat_tokens.reader import open_split
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store
from tasks.models import ALL_SPLITS, LEFT_OUT, Name, PublishedLocation, Split, TokenShard
from tasks.output.paths import DOCUMENTS, beside_key, fact_key, home_key, version_store
from tasks.output.target import RENAMED, Target
from tasks.parts.documents import Documents, Reads, read_fact, stored_arrays
from tasks.parts.part import COMPARED, InputPart
from tasks.rows import FILE, KEY, OF_CHOICE, REASON, ROW, SIMILARITY

VERSIONS_OPEN = 4


class _SplitDocuments(NamedTuple):
    """The documents of a slice in a split: keys, files, rows and why the slice left them out, uint64[n]; and where each starts,
    with the end of the last: int64[n + 1].
    """

    keys: UInt64s
    files: UInt64s
    rows: UInt64s
    reasons: UInt64s
    starts: Int64s


def published_documents(root: Store, shard: TokenShard, location: PublishedLocation) -> Documents:
    """The documents that a version has of a slice, in all splits, in the order that a stored shard has: that of their files and
    rows, those last that the slice itself left out.
    """
    opened, version = replace(root, staging=None, read_once=False), location.version
    names = [split for split in ALL_SPLITS if location.of(split)[1]] or [*ALL_SPLITS[:1]]
    splits, runs = [_open_split(opened, version, split) for split in names], list(map(location.of, names))
    found = [_documents_in(opened, location, split, of) for split, of in zip(names, splits, strict=True)]
    keys, files, rows, reasons = map(np.concatenate, list(zip(*found, strict=True))[:-1])
    order = np.lexsort((rows, files, reasons > 0))
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
    read_before = {KEY: keys[order], FILE: files[order], ROW: rows[order], REASON: reasons[order]}

    def read(name: str, first: int, stop: int) -> UInt64s:
        if name in read_before or name not in (*shard.facts, *OF_CHOICE):
            return read_before.get(name, read_before[KEY])[first:stop]
        split_of, numbers = places(order[first:stop])
        found = np.zeros((stop - first, shard.facts.get(name, 1)), np.uint64)
        for number, split in enumerate(names):
            mine = split_of == number
            if mine.any() and (name not in OF_CHOICE or split == LEFT_OUT):
                some = numbers[mine]
                first_of, end = int(some.min()), int(some.max()) + 1
                values = read_fact(_open_fact(opened, version, split, name), found.shape[1], first_of, end)
                found[mine] = values.reshape(-1, found.shape[1])[some - first_of]
        return found if found.shape[1] > 1 else found[:, 0]

    return Documents(
        np.repeat(np.arange(len(splits), dtype=np.int8), counts)[order],
        np.concatenate([some.starts[:-1] for some in found])[order],
        np.concatenate([np.diff(some.starts) for some in found])[order],
        tuple(map(stored_arrays, splits)),
        read,
        columns,
    )


def _documents_in(root: Store, location: PublishedLocation, name: Split, tokens: FlatTokens) -> _SplitDocuments:
    """The documents of a slice in a split. (version, file, row) -> (slice, file, row)"""
    first, count = location.of(name)
    stop = first + count

    def fact(of: str) -> UInt64s:
        return _open_fact(root, location.version, name, of).read(first, stop)

    rows, starts = fact(ROW), tokens.seq_starts.read(first, stop + 1).astype(np.int64)
    if location.first_file is None:
        files, rows = np.zeros(count, np.uint64), rows - np.uint64(location.first_row)
    else:
        files = fact(FILE) - np.uint64(location.first_file)
    reasons = np.zeros(count, np.uint64)
    if name == LEFT_OUT:
        reasons = fact(REASON)
        reasons[np.isin(reasons, COMPARED)] = 0  # comparing the slice's documents gave those, not the slice
    return _SplitDocuments(fact(KEY), files, rows, reasons, starts)


@functools.lru_cache(len(ALL_SPLITS) * VERSIONS_OPEN)
def _open_split(root: Store, version: Name, split: Split) -> FlatTokens:
    """A split of a version, which never changes: what is opened once is good for all its slices."""
    store = root / home_key(version, split)
    tokens = open_split(store / split)
    # The entries of documents are kept, as several slices share a chunk; tokens are read once.
    once = replace(store, read_once=True)
    arrays: Any = {of: open_array(once / f"{split}/{of}", TOKEN_ARRAYS[of].dtype) for of in tokens.arrays}
    return replace(tokens, **arrays)


@functools.lru_cache(8 * len(ALL_SPLITS) * VERSIONS_OPEN)
def _open_fact(root: Store, version: Name, split: Split, name: str) -> StoredArray:
    """A fact of the documents of a split."""
    return open_array(root / fact_key(version, split, name), "uint64")


@functools.lru_cache(len(ALL_SPLITS) * VERSIONS_OPEN)
def _columns_of(root: Store, version: Name, split: Split) -> Columns:
    """The kept columns of a split."""
    store, beside = version_store(root, version), root / beside_key(version)
    manifest = read_manifest(store)
    if split == LEFT_OUT:
        return columns_left_out(beside, manifest, open_split(beside / LEFT_OUT).seq_count)
    return columns_of(store, manifest, split)


BLOCK_TOKENS = 1 << 18
WHOLE_BLOCKS = Reads(BLOCK_TOKENS, None, whole=True)


def open_input(part: InputPart) -> FlatTokens:
    """The split of a part. One of ours is read past the page cache."""
    return open_split(Store.at(part.location, read_once=not part.foreign) / part.split)


def input_documents(part: InputPart, target: Target) -> Documents:
    """All documents of a part, their files by the output's numbers. ValueError if the input is damaged."""
    tokens = open_input(part)
    starts = tokens.entries(part.start, part.stop).astype(np.int64)
    numbers = np.arange(part.start, part.stop)
    columns = lambda wanted: _columns(part, numbers[wanted], target)  # noqa: E731
    return Documents(
        np.zeros(len(numbers), np.int8),
        starts[:-1],
        np.diff(starts),
        (stored_arrays(tokens, WHOLE_BLOCKS),),
        functools.partial(_read, part, target),
        columns,
    )


def _read(part: InputPart, target: Target, name: str, first: int, stop: int) -> UInt64s:
    """A fact of a part's documents, the file by the output's number. ValueError if that is none of the input's."""
    start, stop = part.start + first, part.start + stop
    if name in (texts := target.texts_of(part.split)):
        array = open_array(target.root / fact_key(version_of(part), part.split, name), "uint64")
        found = read_fact(array, texts[name], start, stop)
        if name == SIMILARITY and target.clusters:
            mine = _renamed(target.workspace.path(target.clusters), part.split)
            mine = mine[slice(*np.searchsorted(mine["document"], (start, stop)))]
            found = found.copy()
            found[mine["document"].astype(np.int64) - start] = mine["similarity"]
        return found
    if part.made_keys is None:
        found = open_array(Store.at(part.location) / f"{DOCUMENTS}/{part.split}/{name}", "uint64").read(start, stop)
    elif name == FILE:
        found = np.full(stop - start, ALL_SPLITS.index(part.split), np.uint64)
    elif name == ROW:
        found = np.arange(start, stop, dtype=np.uint64)
    else:
        found = np.fromfile(target.workspace.path(part.made_keys), np.uint64, stop - start, offset=8 * first)
    if name != FILE:
        return found
    if len(found) and (largest := int(found.max())) >= part.source_stops[-1]:
        raise ValueError(
            f"{Store.at(part.location).url}/{DOCUMENTS}/{part.split}/file: names file {largest}, but the manifest lists "
            f"{part.source_stops[-1]}. The dataset is damaged: run flat_tokens.verify on it."
        )
    return found + np.uint64(part.file)


def _columns(part: InputPart, numbers: Int64s, target: Target) -> pa.RecordBatch:
    """The kept columns of documents *numbers*, int64[n], of the input's split, as the target's kinds; null without any. Clusters
    have the names that they have from now on.
    """
    is_left_out = part.split == LEFT_OUT
    kept = _columns_of(target.root, version_of(part), LEFT_OUT) if is_left_out else _columns_at(part.location, part.split)
    names = [name for name in target.columns if name in kept.kinds]
    if not names:
        return with_kinds(batch_of({name: pa.nulls(len(numbers)) for name in target.columns}), target.columns)
    columns = with_kinds(kept.take(numbers, names), target.columns)
    if not target.clusters:
        return columns
    from pyarrow import compute  # slow to import, and not of use to every build

    mine = _renamed(target.workspace.path(target.clusters), part.split)
    at = np.searchsorted(mine["document"], numbers.astype(np.uint64))
    is_renamed = np.isin(numbers.astype(np.uint64), mine["document"])
    new = mine[at[is_renamed]]
    clusters = pa.array(new["name"], mask=new["name"] == 0)
    place = columns.schema.get_field_index(CLUSTER)
    named = compute.replace_with_mask(columns.column(place), pa.array(is_renamed), clusters)
    return columns.set_column(place, columns.schema.field(place), named)


@functools.lru_cache(len(ALL_SPLITS) * VERSIONS_OPEN)
def _columns_at(location: str, split: Split) -> Columns:
    """The kept columns of a split of an input, which do not change."""
    store = Store.at(location)
    return columns_of(store, manifest_of(store), split)


def version_of(part: InputPart) -> str:
    """The version of a part of an output."""
    return part.location.rpartition("/")[2]


@functools.lru_cache(len(ALL_SPLITS))
def _renamed(path: Path, split: Split) -> Structs:
    renamed = np.fromfile(path, RENAMED)  # without a header: two threads that parse one at once fail under Python 3.11
    return cast("Structs", renamed[renamed["split"] == ALL_SPLITS.index(split)])


def documents_taken(part: InputPart, target: Target) -> Bools:
    """Which documents of a part are taken, as it was decided when they were counted: bool[n]."""
    count = part.stop - part.start
    if part.seq_count in (0, count):
        return np.full(count, part.seq_count > 0)
    return np.fromfile(target.workspace.path(part.choice), bool)
