"""Facts of documents that an expression may name: their length, source, file, row and key, and the columns that are kept."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flat_tokens.array_types import Bools, Int64s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import Columns, columns_of
from flat_tokens.manifest import dataset_of, manifest_of, splits_of
from flat_tokens.where import Where, pa

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens
    from flat_tokens.stores.store import Store

DOCUMENTS_AT_A_TIME = 1 << 20
NAMES = ("tokens", "source", "file", "row", "key")
HEXADECIMAL = np.array([list(f"{byte:02x}".encode()) for byte in range(256)], np.uint8)

Sources = Sequence[tuple[str, Sequence[str]]]
"""The name of each source, and those of its files."""


def chosen_by(tokens: FlatTokens, where: Where) -> Int64s:
    """The sequences for which an expression is true, in order: int64[n]. It reads the facts that are named, and no token."""
    known = list[Recorded]()

    def recorded() -> Recorded:
        if not known:
            known.append(recorded_of(dataset_of(tokens.store)))
        return known[0]

    matching(tokens, where, 0, 0, recorded)
    found = [np.empty(0, np.int64)]
    for start in range(0, tokens.seq_count, DOCUMENTS_AT_A_TIME):
        stop = min(start + DOCUMENTS_AT_A_TIME, tokens.seq_count)
        found.append(np.flatnonzero(matching(tokens, where, start, stop, recorded)) + start)
    return np.concatenate(found)


def matching(tokens: FlatTokens, where: Where, start: int, stop: int, recorded: Callable[[], Recorded]) -> Bools:
    """For which of the sequences ``start:stop`` an expression is true: bool[stop - start].

    ValueError for a name that it cannot have, and for a comparison of a number with a text.
    """
    return where.holds(lambda name: values_of(tokens, name, start, stop, recorded))


def values_of(tokens: FlatTokens, name: str, start: int, stop: int, recorded: Callable[[], Recorded]) -> Any:
    """A fact of the sequences ``start:stop``, by its name: an Arrow array. ValueError for a name that it cannot have."""
    dataset, split = dataset_of(tokens.store), posixpath.basename(tokens.store.root)

    def entries(name: str) -> UInt64s:
        array = open_array(dataset / f"documents/{split}/{name}", "uint64")
        found: UInt64s = array.read(start, stop) if tokens.numbers is None else array.take(tokens.numbers[start:stop])
        return found

    if name not in NAMES:
        kept = recorded().columns.get(split)
        if kept is None or name not in kept.kinds:
            raise ValueError(f"there is no column {name!r}; there are {', '.join((*NAMES, *(kept.kinds if kept else ())))}")
        numbers = np.arange(start, stop) if tokens.numbers is None else tokens.numbers[start:stop]
        return replace(kept, store=dataset).take(numbers, [name]).column(0)
    if name == "tokens":
        return pa.array(np.diff(tokens.seq_starts.read(start, stop + 1).astype(np.int64)))
    try:
        if name == "row":
            return pa.array(entries("row").astype(np.int64))
        return hexadecimal(entries("key")) if name == "key" else named(name, entries("file"), recorded().sources)
    except FileNotFoundError as error:
        raise ValueError(f"there is no column {name!r}: {dataset.url} has no record of its documents") from error


class Recorded(NamedTuple):
    """Facts of a dataset's documents, by its manifest: their sources, and by split the columns that are kept."""

    sources: Sources
    columns: Mapping[str, Columns]


def recorded_of(dataset: Store) -> Recorded:
    """The facts of a dataset's documents that its manifest has."""
    manifest = manifest_of(dataset)
    made_of = manifest.get("provenance", {})
    sources = [(source["name"], [file["name"] for file in source["files"]]) for source in made_of.get("sources") or ()]
    return Recorded(sources, {split: columns_of(dataset, manifest, split) for split in splits_of(manifest.get("totals", {}))})


def kept_columns(tokens: FlatTokens) -> Columns | None:
    """The columns that a dataset keeps of the sequences of a split; None where it keeps none."""
    found = recorded_of(dataset_of(tokens.store)).columns.get(posixpath.basename(tokens.store.root))
    return found if found is not None and found.kinds else None


def named(name: str, files: UInt64s, sources: Sources) -> Any:
    """The name of each document's source, or of its file. *files*: numbers through all sources."""
    names = [source if name == "source" else file for source, its in sources for file in its]
    if len(files) and int(files.max()) >= len(names):
        raise ValueError(f"a document is of file {files.max()}, but the manifest has {len(names)} files: run flat_tokens.verify")
    return pa.array(names, pa.large_string()).take(pa.array(files.astype(np.int64)))


def hexadecimal(keys: UInt64s) -> Any:
    """Keys as 16 hexadecimal digits each."""
    digits = HEXADECIMAL[keys.astype(">u8").view(np.uint8)].reshape(-1)
    offsets = np.arange(len(keys) + 1, dtype=np.int64) * 16
    return pa.LargeStringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(digits))
