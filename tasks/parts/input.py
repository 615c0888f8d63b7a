"""Documents of an input dataset: those that a selection takes of a range of sequences."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flat_tokens.annotations import Bools, Int64s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import Columns, batch_of, with_kinds
from flat_tokens.formats.contract import checked_entries
from flat_tokens.keys import mix
from flat_tokens.manifest import CLUSTER, read_manifest
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.rows.documents import Recorded, matching, recorded_of
from flat_tokens.rows.orders import derive_keys
from flat_tokens.stores.store import Store
from flat_tokens.where import parse
from tasks.models import ALL_SPLITS, LEFT_OUT, Split
from tasks.output.forgotten import forgotten_at
from tasks.output.paths import DOCUMENTS, fact_key, version_store
from tasks.output.target import Selection, Target
from tasks.parts.documents import Documents, read_fact, stored_arrays
from tasks.parts.part import InputPart
from tasks.parts.published import left_out_columns
from tasks.parts.runs import Reads
from tasks.rows import FILE, ROW, SIMILARITY

BLOCK_TOKENS = 1 << 18
WHOLE_BLOCKS = Reads(BLOCK_TOKENS, None, whole=True)
SAMPLING = 0x5A3B1E
"""Samples and validation are drawn with different keys, or a sample of the same seed would begin with validation's documents."""


def open_input(part: InputPart) -> FlatTokens:
    """The split of a part. One of ours is read past the page cache."""
    return open_split(Store.at(part.location, read_once=not part.foreign) / part.split)


def input_documents(part: InputPart, target: Target) -> Documents:
    """All documents of a part, their files by the output's numbers. ValueError where the input is damaged."""
    tokens = open_input(part)
    starts = checked_entries(tokens, part.start, part.stop).astype(np.int64)
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
    """A fact of a part's documents, the file by the output's number. ValueError where that is none of the input's."""
    start, stop = part.start + first, part.start + stop
    if name in (texts := target.texts_of(part.split)):
        array = open_array(target.root / fact_key(version_of(part), part.split, name), "uint64")
        found = read_fact(array, texts[name], start, stop)
        if name == SIMILARITY and target.clusters:
            mine = _renamed(Path(target.workspace.staging) / target.clusters, part.split)
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
        found = np.load(Path(target.workspace.staging) / part.made_keys, mmap_mode="r")[start - part.start : stop - part.start]
    if name != FILE:
        return found
    if len(found) and (largest := int(found.max())) >= part.source_stops[-1]:
        raise ValueError(
            f"{Store.at(part.location).url}/{DOCUMENTS}/{part.split}/file: names file {largest}, but the manifest lists "
            f"{part.source_stops[-1]}. The dataset is damaged: run flat_tokens.verify on it."
        )
    return found + np.uint64(part.file)


def _columns(part: InputPart, numbers: Int64s, target: Target) -> pa.RecordBatch:
    """The kept columns of documents *numbers*, int64[n], of the input's split, as the target's kinds; null without any."""
    kept = _kept_by(part, target)
    names = [name for name in target.columns if name in kept.kinds]
    if not names:
        return with_kinds(batch_of({name: pa.nulls(len(numbers)) for name in target.columns}), target.columns)
    taken = with_kinds(kept.take(numbers, names), target.columns)
    return _with_names(taken, part, numbers, target) if target.clusters else taken


def _kept_by(part: InputPart, target: Target) -> Columns:
    if part.split != LEFT_OUT:
        return _recorded_at(part.location).columns[part.split]
    version = version_of(part)
    return left_out_columns(target.root, version, read_manifest(version_store(target.root, version)))


def version_of(part: InputPart) -> str:
    """The version of a part of an output."""
    return part.location.rpartition("/")[2]


def _with_names(columns: pa.RecordBatch, part: InputPart, numbers: Int64s, target: Target) -> pa.RecordBatch:
    """The columns of documents *numbers*, int64[n], with the names that clusters have from now on."""
    mine = _renamed(Path(target.workspace.staging) / target.clusters, part.split)
    at = np.searchsorted(mine["document"], numbers.astype(np.uint64))
    is_renamed = np.isin(numbers.astype(np.uint64), mine["document"])
    new = mine[at[is_renamed]]
    names = pa.array(new["name"], mask=new["name"] == 0)
    place = columns.schema.get_field_index(CLUSTER)
    named = pc.replace_with_mask(columns.column(place), pa.array(is_renamed), names)
    return columns.set_column(place, columns.schema.field(place), named)


@functools.lru_cache(len(ALL_SPLITS))
def _renamed(path: Path, split: Split) -> npt.NDArray[np.void]:
    renamed = np.load(path)
    return cast("npt.NDArray[np.void]", renamed[renamed["split"] == ALL_SPLITS.index(split)])


def choose(part: InputPart, documents: Documents, selection: Selection, target: Target) -> tuple[Bools, Counter[str]]:
    """Documents of a part that are taken, bool[n], and counts of the others by the first reason against them."""
    keep = np.ones(len(documents), bool)
    skipped: Counter[str] = Counter()

    def without(reason: str, let_through: Bools) -> None:
        nonlocal keep
        before, keep = int(keep.sum()), keep & let_through
        skipped[reason] += before - int(keep.sum())

    if part.split == selection.dropped:
        without("split", np.zeros(len(keep), bool))
    if part.split not in selection.splits:
        return keep, skipped
    if target.forgotten:
        without("forgotten", ~forgotten_at(target.root, target.forgotten).those(documents.keys))
    if part.wanted is not None:
        without("source", np.isin(sources_of(part, documents), part.wanted))
    if selection.min_tokens is not None:
        without("too_short", documents.lengths >= selection.min_tokens)
    if selection.max_tokens is not None:
        without("too_long", documents.lengths <= selection.max_tokens)
    if selection.where is not None:
        tokens, recorded = open_split(Store.at(part.location) / part.split), functools.partial(_recorded_at, part.location)
        without("where", matching(tokens, parse(selection.where), part.start, part.stop, recorded))
    if selection.listed is not None:
        without("not_listed", _listed(documents.keys, Path(target.workspace.staging) / selection.listed))
    if selection.below is not None:
        hashes, below = sample_hashes(documents.keys, selection.seed), selection.below[part.split]
        if below < 1 << 64:
            tied = np.flatnonzero(keep & (hashes == np.uint64(below)))[: part.ties]
            drawn = hashes < np.uint64(below)
            drawn[tied] = True
            without("not_sampled", drawn)
    return keep, skipped


@functools.lru_cache(4)
def _recorded_at(location: str) -> Recorded:
    """The facts of an input's documents that its manifest has. They do not change."""
    return recorded_of(Store.at(location))


def sources_of(part: InputPart, documents: Documents) -> Int64s:
    """The source of each document of the part, by its index in the input: int64[n]."""
    files = documents.fact(FILE) - np.uint64(part.file)
    return np.searchsorted(np.array(part.source_stops, np.uint64), files, side="right")


def _listed(keys: UInt64s, path: Path) -> Bools:
    """Whether each key is in a saved list. Those that were found are noted next to the list."""
    listed = np.load(path, mmap_mode="r")
    if not len(listed):
        return np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(listed, keys), len(listed) - 1)
    found = cast("Bools", listed[at] == keys)
    # Threads write the same byte: that it was found.
    np.memmap(path.with_suffix(".found"), np.uint8, "r+")[at[found]] = 1
    return found


def sample_hashes(keys: UInt64s, seed: int) -> UInt64s:
    """Hashes that decide whether documents are in a sample: uint64[n]. Different keys have different hashes."""
    return mix(keys ^ derive_keys(seed, SAMPLING))
