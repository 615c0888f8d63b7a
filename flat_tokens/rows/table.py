"""The table of the documents that a dataset was made of: where each is, and why it is in no split."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import type_of
from flat_tokens.manifest import DUPLICATE, DUPLICATES, NEAR_DUPLICATE, NEAR_DUPLICATES, manifest_of
from flat_tokens.rows.facts import Recorded, hexadecimal, named, recorded_of, values_of
from flat_tokens.stores.store import Store, stored_object
from flat_tokens.where import Where, pa

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
