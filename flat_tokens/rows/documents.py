"""Documents of a dataset: by their keys, with the facts that an expression may name, and as a table.

The facts are the length, source, file, row and key of a document, and the columns that the dataset keeps. The table has a row for
each document, those that were left out among them. It is computed from the record of the documents.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, Int64s, JsonObject, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import Columns, columns_left_out, columns_of, type_of
from flat_tokens.extras import pa
from flat_tokens.keys import strings_by_key
from flat_tokens.manifest import BESIDE, CLUSTER, dataset_of, manifest_of, splits_of
from flat_tokens.rows.where import Where
from flat_tokens.stores.store import Store

if TYPE_CHECKING:
    from flat_tokens.arrays.stored import StoredArray
    from flat_tokens.rows.split import FlatTokens


KEYS_AT_A_TIME = 1 << 20
KEY = re.compile("[0-9a-f]{16}")


def stored_fact(tokens: FlatTokens, name: str) -> StoredArray:
    """The ``key``, ``file`` or ``row`` of each document of the split as it is stored. FileNotFoundError for a dataset that does
    not record them.
    """
    return open_array(dataset_of(tokens.store) / f"documents/{posixpath.basename(tokens.store.root)}/{name}", "uint64")


def fact_of(tokens: FlatTokens, stored: StoredArray, start: int, stop: int) -> UInt64s:
    """A stored fact of sequences ``start:stop``: uint64[stop - start]."""
    found: UInt64s = stored.read(start, stop) if tokens.numbers is None else stored.take(tokens.numbers[start:stop])
    return found


def numbers_of(tokens: FlatTokens, keys: UInt64s) -> Int64s:
    """The numbers of the documents with these keys, the first of each: int64[n], -1 if there is none. One pass over all."""
    stored, asked, which = stored_fact(tokens, "key"), *np.unique(keys, return_inverse=True)
    found = np.full(len(asked), -1)
    if not len(asked):
        return found
    for first in range(0, tokens.seq_count, KEYS_AT_A_TIME):
        stop = min(first + KEYS_AT_A_TIME, tokens.seq_count)
        its = fact_of(tokens, stored, first, stop)
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
    """The sequences for which an expression is true, in order: int64[n]. It reads the facts that are named, and no token.

    ValueError for a name that it cannot have, and for a comparison of a number with a text, even if there are no sequences.
    """
    recorded, found = cache(lambda: recorded_of(dataset_of(tokens.store))), []
    for start in range(0, max(tokens.seq_count, 1), DOCUMENTS_AT_A_TIME):
        stop = min(start + DOCUMENTS_AT_A_TIME, tokens.seq_count)
        found.append(np.flatnonzero(matching(tokens, where, start, stop, recorded)) + start)
    return np.concatenate(found)


def matching(tokens: FlatTokens, where: Where, start: int, stop: int, recorded: Callable[[], RecordedFacts]) -> Bools:
    """For which of the sequences ``start:stop`` an expression is true: bool[stop - start].

    ValueError for a name that it cannot have, and for a comparison of a number with a text.
    """
    return where.holds(lambda name: values_of(tokens, name, start, stop, recorded))


def values_of(tokens: FlatTokens, name: str, start: int, stop: int, recorded: Callable[[], RecordedFacts]) -> Any:
    """A fact of the sequences ``start:stop``, by its name: an Arrow array. ValueError for a name that it cannot have."""
    dataset = dataset_of(tokens.store)
    if name not in NAMES:
        kept = recorded().columns.get(posixpath.basename(tokens.store.root))
        if kept is None or name not in kept.kinds:
            raise ValueError(f"there is no column {name!r}; there are {', '.join((*NAMES, *(kept.kinds if kept else ())))}")
        numbers = np.arange(start, stop) if tokens.numbers is None else tokens.numbers[start:stop]
        return replace(kept, store=dataset).take(numbers, [name]).column(0)
    if name == "tokens":
        return pa.array(np.diff(tokens.seq_starts.read(start, stop + 1).astype(np.int64)))
    try:
        found = fact_of(tokens, stored_fact(tokens, "file" if name == "source" else name), start, stop)
        if name == "row":
            return pa.array(found.astype(np.int64))
        return hexadecimal(found) if name == "key" else named(name, found, recorded().sources)
    except FileNotFoundError as error:
        raise ValueError(f"there is no column {name!r}: {dataset.url} has no record of its documents") from error


class RecordedFacts(NamedTuple):
    """Facts of a dataset's documents, by its manifest: their sources, and by split the columns that are kept."""

    sources: Sources
    columns: Mapping[str, Columns]


def sources_of(manifest: JsonObject) -> Sources:
    """The sources that a dataset's manifest names, in order."""
    made_of = manifest.get("provenance", {}).get("sources") or ()
    return [(source["name"], [file["name"] for file in source["files"]]) for source in made_of]


def recorded_of(dataset: Store) -> RecordedFacts:
    """The facts of a dataset's documents that its manifest has."""
    manifest = manifest_of(dataset)
    return RecordedFacts(
        sources_of(manifest), {split: columns_of(dataset, manifest, split) for split in splits_of(manifest.get("totals", {}))}
    )


def kept_columns(tokens: FlatTokens) -> Columns | None:
    """The columns that a dataset keeps of the sequences of a split; None if it keeps none."""
    found = recorded_of(dataset_of(tokens.store)).columns.get(posixpath.basename(tokens.store.root))
    return found if found is not None and found.kinds else None


def named(name: str, files: UInt64s, sources: Sources) -> Any:
    """The name of each document's source, or of its file. *files*: numbers through all sources."""
    names = [source if name == "source" else file for source, its in sources for file in its]
    return pa.array(names, pa.large_string()).take(pa.array(checked_files(files, len(names))))


def checked_files(files: UInt64s, count: int) -> Int64s:
    """Numbers of files. ValueError if one is not below *count*."""
    if len(files) and int(files.max()) >= count:
        raise ValueError(f"a document is of file {files.max()}, but the manifest has {count} files: run flat_tokens.verify")
    return files.astype(np.int64)


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

LEFT_OUT = "left_out"
OF_COPIES = ("reason", "of", "similarity")
"""Columns that are stored as numbers where documents are left out: a key made of the reason, a key, and millionths."""


def name_of_kept(column: str) -> str:
    """The name that a kept column has in the table."""
    return f"columns.{column}" if column.removeprefix("columns.") in FACTS else column


def _repeated(values: Mapping[str, str | None], count: int, name: str) -> Any:
    return pa.repeat(value, count) if (value := values.get(name)) else pa.nulls(count)


def beside(version: Store) -> Store:
    """The store of what a version left out, below its output."""
    above, name = posixpath.split(version.root)
    return replace(version, root=posixpath.join(posixpath.dirname(above), BESIDE, name))


@dataclass(frozen=True)
class DocumentTable:
    """The documents of a dataset: those of its *splits*, LEFT_OUT among them if its build's output is there."""

    store: Store
    splits: Mapping[Any, Any]

    @cached_property
    def _manifest(self) -> JsonObject:
        return manifest_of(self.store)

    @cached_property
    def recorded(self) -> RecordedFacts:
        """The facts of the documents that the manifest has."""
        found, left_out = recorded_of(self.store), self.splits.get(LEFT_OUT)
        if left_out is None:
            return found
        kept = columns_left_out(dataset_of(left_out.store), self._manifest, left_out.seq_count)
        return found._replace(columns={**found.columns, LEFT_OUT: kept})

    @property
    def _totals(self) -> JsonObject:
        """Counts of the documents, as far as the manifest has them."""
        return (self._manifest.get("totals") or {}).get("documents") or {}

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
        if "skipped" not in self._totals:
            return f"{self.store.url}: does not say which documents it was made of, so that only those in it are listed"
        if not (missing := sum(count for _, reason, count in self._counted() if reason != "forgotten")):
            return None
        return (
            f"{self.store.url}: of {missing:,} documents that it left out the source and the reason alone are known: the rest is "
            "in its build's output, or in the datasets that it was derived from"
        )

    def _counted(self) -> Iterator[tuple[str | None, str, int]]:
        """Documents of which no more is known: their source, if that is, the reason why they are left out, and how many."""
        counts, names = Counter[tuple[str | None, str]](), ["source", "reason"]
        for source in self._totals.get("by_source") or ():
            counts.update({(source["name"], reason): count for reason, count in (source.get("skipped") or {}).items()})
        for reason, count in (self._totals.get("skipped") or {}).items():
            counts[None, reason] = count - sum(some for (_, of), some in counts.items() if of == reason)
        for split, start, stop in self.ranges():
            if split == LEFT_OUT:
                rows = pa.table([self._column(split, start, stop, name) for name in names], names)
                for one in rows.group_by(names).aggregate([([], "count_all")]).to_pylist():
                    counts[one["source"], one["reason"]] -= one["count_all"]
        for (name, reason), count in (+counts).items():
            yield name, reason, count

    @cached_property
    def _reasons(self) -> dict[int, str]:
        """The reasons why documents are left out, by their keys."""
        return strings_by_key(sorted(self._totals.get("skipped") or ()))

    def facts(self, split: str, name: str, start: int, stop: int) -> UInt64s:
        """A fact of documents ``start:stop`` of a split, its key, file or row, or one of OF_COPIES: uint64[n], 0 for none."""
        store, kind = dataset_of(self.splits[split].store), "documents"
        if name in OF_COPIES and split != LEFT_OUT:
            policy = ((self._manifest.get("provenance") or {}).get("documents") or {}).get("near_duplicates") or {}
            if policy.get("action") != "keep" or CLUSTER not in self._manifest.get("columns", ()) or name == "reason":
                return np.zeros(stop - start, np.uint64)
            if name == "of":
                cluster = values_of(self.splits[split], CLUSTER, start, stop, lambda: self.recorded).fill_null(0).to_numpy()
                return np.where(cluster == self.facts(split, "key", start, stop), 0, cluster).astype(np.uint64)
            store = beside(store)
        if name in OF_COPIES:
            kind = "texts"
            if not store.exists(f"{kind}/{split}/{name}/zarr.json"):
                return np.zeros(stop - start, np.uint64)  # of a copy of the dataset
        return open_array(store / f"{kind}/{split}/{name}", "uint64").read(start, stop)

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Its documents, some of a split at a time: the split, the first one, and where they end."""
        for split, tokens in self.splits.items():
            for start in range(0, tokens.seq_count, AT_A_TIME):
                yield split, start, min(start + AT_A_TIME, tokens.seq_count)

    def _column(self, split: str, start: int, stop: int, name: str) -> Any:
        """A column of documents ``start:stop`` of a split, as an Arrow array."""
        if name in OF_COPIES:
            found = self.facts(split, name, start, stop)
            if name == "similarity":
                return pa.array(found / 1e6, mask=found == 0)
            if name == "of":
                return hexadecimal(found).take(pa.array(np.arange(len(found)), mask=found == 0))
            different, which = np.unique(found, return_inverse=True)
            names = [self._reasons.get(reason, f"{reason:016x}") if reason else None for reason in different.tolist()]
            return pa.array(names, pa.string()).take(pa.array(which))
        if name in ("split", "place"):
            if split == LEFT_OUT:
                return pa.nulls(stop - start)
            return pa.repeat(split, stop - start) if name == "split" else pa.array(np.arange(start, stop))
        return values_of(self.splits[split], self._kept.get(name, name), start, stop, lambda: self.recorded)

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

    def _columns(self) -> Iterator[Callable[[str], Any]]:
        """The columns of some documents at a time, by their names: Arrow arrays."""
        for where in self.ranges():
            yield partial(self._column, *where)
        for source, reason, count in self._counted():
            for start in range(0, count, AT_A_TIME):
                yield partial(_repeated, {"source": source, "reason": reason}, min(AT_A_TIME, count - start))

    def read(self, names: Sequence[str] | None = None) -> Any:
        """A pyarrow.RecordBatchReader of the columns *names*, all without them."""
        schema = pa.schema([self.schema.field(name) for name in names or self.schema.names])
        return pa.RecordBatchReader.from_batches(schema, self.batches(names))
