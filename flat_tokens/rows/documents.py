"""Documents of a dataset: by their keys, with the facts that an expression may name, and as a table.

The facts are the length, source, file, row and key of a document, and the columns that the dataset keeps. The table has a row for
each document, and for each duplicate that was left out. It is computed from the record of the documents.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import Bools, Int64s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import Columns, columns_of, type_of
from flat_tokens.manifest import DUPLICATE, DUPLICATES, NEAR_DUPLICATE, NEAR_DUPLICATES, dataset_of, manifest_of, splits_of
from flat_tokens.stores.store import Store, stored_object
from flat_tokens.where import Where, pa

if TYPE_CHECKING:
    from flat_tokens.arrays.stored import StoredArray
    from flat_tokens.reader import FlatTokens


KEYS_AT_A_TIME = 1 << 20
KEY = re.compile("[0-9a-f]{16}")


def stored_keys(tokens: FlatTokens) -> StoredArray:
    """The key of each document of the split as it is stored. FileNotFoundError for a dataset that does not record them."""
    return open_array(dataset_of(tokens.store) / f"documents/{posixpath.basename(tokens.store.root)}/key", "uint64")


def numbers_of(tokens: FlatTokens, keys: UInt64s) -> Int64s:
    """The numbers of the documents with these keys, the first of each: int64[n], -1 if there is none. One pass over all."""
    stored, asked, which = stored_keys(tokens), *np.unique(keys, return_inverse=True)
    found = np.full(len(asked), -1)
    if not len(asked):
        return found
    for first in range(0, tokens.seq_count, KEYS_AT_A_TIME):
        stop = min(first + KEYS_AT_A_TIME, tokens.seq_count)
        its = stored.read(first, stop) if tokens.numbers is None else stored.take(tokens.numbers[first:stop])
        at = np.minimum(np.searchsorted(asked, its), len(asked) - 1)
        there = np.flatnonzero(asked[at] == its)[::-1]  # of equal places the last assignment stays: the first document
        earlier = found[at[there]] >= 0
        found[at[there[~earlier]]] = there[~earlier] + first
    return found[which.reshape(-1)]


def key_of(given: Any) -> int:
    """A key as a number: given as one, or as 16 hexadecimal digits. ValueError for other texts."""
    if isinstance(given, str):
        if not KEY.fullmatch(given):
            raise ValueError(f"a key is {given!r}, but it is a number or 16 hexadecimal digits, such as '9f1c0a3b5d7e2468'")
        return int(given, 16)
    if not 0 <= (key := index(given)) < 1 << 64:
        raise ValueError(f"a key is {key}, but it is from 0 to 2**64 - 1")
    return key


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


AT_A_TIME = 1 << 17
FACTS = {
    **dict.fromkeys(("key", "source", "file"), "text"),
    "row": "int64",
    "split": "text",
    **dict.fromkeys(("place", "tokens"), "int64"),
    **dict.fromkeys(("reason", "of"), "text"),
    "similarity": "float64",
}
"""Columns of the table, before those that the dataset keeps. A kept column of the same name is ``columns.NAME``."""

Column = Callable[[str], Any]
"""The name of a column -> its values for some documents, an Arrow array."""


def name_of_kept(column: str) -> str:
    """The name that a kept column has in the table."""
    return f"columns.{column}" if column in FACTS else column


def numbered(file: UInt64s, row: UInt64s) -> UInt64s:
    """A number for each place: files are fewer than 2**24, rows of one fewer than 2**40."""
    return file.astype(np.uint64) << np.uint64(40) | row.astype(np.uint64)


def lists_of(store: Store, manifest: Mapping[str, Any], kind: str, files: int) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
    """The lists below *kind* of a dataset with so many *files*, in their order, with their names: DUPLICATE[n] or
    NEAR_DUPLICATE[n]. ValueError if one is damaged.
    """
    dtype = DUPLICATE if kind == DUPLICATES else NEAR_DUPLICATE
    listed = {stored["key"]: stored_object(stored) for stored in manifest.get("objects", ())}
    for key in sorted(key for key in listed if posixpath.dirname(key) == kind):
        data = store.read(key)
        if not listed[key].is_of(data) or len(data) % dtype.itemsize:
            raise ValueError(f"{store.path(key)}: is not the list of duplicates that was published. Find out: flat-tokens verify")
        entries = np.frombuffer(data, dtype)
        if (most := int(max(entries["file"].max(initial=0), entries["of_file"].max(initial=0)))) >= files:
            raise ValueError(f"{store.path(key)}: names file {most}, but there are {files}")
        yield key, entries


def _column_of(batch: Any, name: str) -> Any:
    return batch.column(name) if name in batch.schema.names else pa.nulls(len(batch))


@dataclass(frozen=True)
class DocumentTable:
    """The documents of a dataset, its *splits* first, then what it left out, as far as it and its build's output say so."""

    store: Store
    splits: Mapping[Any, Any]

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        return manifest_of(self.store)

    @cached_property
    def _recorded(self) -> Recorded:
        return recorded_of(self.store)

    @property
    def _skipped(self) -> dict[str, int] | None:
        """How many documents were left out, by reason; None if that is not said."""
        found: dict[str, int] | None = ((self._manifest.get("totals") or {}).get("documents") or {}).get("skipped")
        return found

    @cached_property
    def _kept(self) -> dict[str, str]:
        """The kept columns, by their names in the table."""
        return {name_of_kept(name): name for name in self._manifest.get("columns") or {}}

    @cached_property
    def schema(self) -> Any:
        """The schema of the table: a pyarrow.Schema."""
        kinds = {**FACTS, **{name: self._manifest["columns"][of] for name, of in self._kept.items()}}
        return pa.schema([(name, pa.string() if kind == "text" else type_of(kind)) for name, kind in kinds.items()])

    @cached_property
    def unknown(self) -> str | None:
        """A sentence, if documents that were left out are not in the table; None if all are."""
        if self._skipped is None:
            return f"{self.store.url}: does not say which documents it was made of, so that only those in it are listed"
        if not (missing := sum(self._skipped.values()) - len(self._left_out)):
            return None
        return (
            f"{self.store.url}: {missing:,} documents that it left out are not listed: only duplicates and near-duplicates are "
            "known by their places. The manifest counts the others by reason"
        )

    @property
    def copies(self) -> tuple[UInt64s, UInt64s]:
        """Keys of the documents that are left out as copies, and of those that stayed: uint64[n] each."""
        found = np.concatenate([np.empty(0, NEAR_DUPLICATE), *(some for some, _ in self._copies())])
        return found["key"], self._keys_at(numbered(found["of_file"], found["of_row"]))

    @cached_property
    def _left_out(self) -> Any:
        """Documents that are known to be in no split, in the order of their places: an Arrow table."""
        parts = [(np.empty(0, NEAR_DUPLICATE), np.empty(0, object)), *self._copies()]
        rows, reasons = (np.concatenate(some) for some in zip(*parts, strict=True))
        order = np.argsort(numbered(rows["file"], rows["row"]), kind="stable")
        rows = rows[order]
        of = self._keys_at(numbered(rows["of_file"], rows["of_row"]))
        alike, sources = rows["similarity"], self._recorded.sources
        return pa.table(
            {
                "key": hexadecimal(rows["key"]),
                "of": hexadecimal(of),
                "reason": pa.array(reasons[order], pa.string()),
                **{name: named(name, rows["file"], sources) for name in ("source", "file")},
                "row": rows["row"].astype(np.int64),
                "similarity": pa.array(alike / 1e6, mask=alike == 0),
            }
        )

    def _copies(self) -> Iterator[tuple[npt.NDArray[np.void], Any]]:
        """Copies that are left out, by the lists of them, and their reasons."""
        policy = (self._manifest.get("provenance") or {}).get("documents") or {}
        near = (policy.get("near_duplicates") or {}).get("action") != "keep"
        files = sum(len(files) for _, files in self._recorded.sources)
        for kind, reason in ((DUPLICATES, "duplicate"), *([(NEAR_DUPLICATES, "near_duplicate")] if near else [])):
            for _, entries in lists_of(self.store, self._manifest, kind, files):
                some = np.zeros(len(entries), NEAR_DUPLICATE)
                for name in entries.dtype.names or ():
                    some[name] = entries[name]
                yield some, np.full(len(some), reason, object)

    def _keys_at(self, places: UInt64s) -> UInt64s:
        """The keys of the documents at some places, 0 for none: uint64[n]."""
        wanted, back = np.unique(np.append(places, np.uint64(0)), return_inverse=True)
        keys = np.zeros(len(wanted), np.uint64)
        for split in self.splits if len(places) else ():
            arrays = [open_array(self.store / f"documents/{split}/{name}", "uint64") for name in ("file", "row", "key")]
            for start in range(0, arrays[0].length, AT_A_TIME):
                file, row, key = (array.read(start, min(start + AT_A_TIME, array.length)) for array in arrays)
                here = numbered(file, row)
                at = np.minimum(np.searchsorted(wanted, here), len(wanted) - 1)
                keys[at[wanted[at] == here]] = key[wanted[at] == here]
        return keys[back[:-1]]

    def _column_of_split(self, split: str, start: int, stop: int) -> Column:
        def column(name: str) -> Any:
            if name in ("reason", "of", "similarity"):
                return pa.nulls(stop - start)
            if name in ("split", "place"):
                return pa.repeat(split, stop - start) if name == "split" else pa.array(np.arange(start, stop))
            return values_of(self.splits[split], self._kept.get(name, name), start, stop, lambda: self._recorded)

        return column

    def batches(self, names: Sequence[str] | None = None, where: Where | None = None) -> Iterator[Any]:
        """Record batches of the columns *names*, all without them, of the documents for which *where* is true. Only what is named
        is read. ValueError for a name that there is not.
        """
        chosen = list(self.schema.names if names is None else names)
        if unknown := [name for name in (*chosen, *sorted(where.names if where else ())) if name not in self.schema.names]:
            raise ValueError(f"there is no column {unknown[0]!r}; there are {', '.join(self.schema.names)}")
        return self._chosen(chosen, where)

    def _chosen(self, names: Sequence[str], where: Where | None) -> Iterator[Any]:
        needed = dict.fromkeys((*names, *(where.names if where else ())))
        for column in self._columns():
            read = {name: column(name).cast(self.schema.field(name).type) for name in needed}
            batch = pa.RecordBatch.from_arrays([read[name] for name in names], names=names)
            yield batch if where is None else batch.filter(pa.array(where.holds(read.__getitem__)))

    def _columns(self) -> Iterator[Column]:
        for split, tokens in self.splits.items():
            for start in range(0, tokens.seq_count, AT_A_TIME):
                yield self._column_of_split(split, start, min(start + AT_A_TIME, tokens.seq_count))
        for batch in self._left_out.to_batches(AT_A_TIME):
            yield partial(_column_of, batch)

    def read(self, names: Sequence[str] | None = None) -> Any:
        """A pyarrow.RecordBatchReader of the columns *names*, all without them."""
        schema = pa.schema([self.schema.field(name) for name in names or self.schema.names])
        return pa.RecordBatchReader.from_batches(schema, self.batches(names))
