"""Delta tables. The log of one in a store is copied, so that it is read with this service's own credentials and limits."""

from __future__ import annotations

import functools
import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from flat_tokens.annotations import Bools, JsonFacts
from flat_tokens.extras import pa
from flat_tokens.stores.store import NO_OBJECT, Store, is_below, read_json
from tasks.config import Source
from tasks.download.table_versions import BATCH_ROWS, DataFile, TableError, TableVersion, columns_of, library, reading, top_level
from tasks.locations import absolute, readable
from tasks.models import digest_of

LOG = "_delta_log"
LOG_FILE = re.compile(r"(\d{20})\.(?:json|checkpoint\..+|\d{20}\.compacted\.json)")
DELETION_VECTOR = re.compile(r"(.+/)?deletion_vector_[^/]+\.bin")
MAPPING, PHYSICAL = "delta.columnMapping.mode", "delta.columnMapping.physicalName"


def version_of_table(source: Source, what: str) -> TableVersion:
    """The files of a Delta table at the version that a source names."""
    assert source.table is not None
    wanted = None if source.version in (None, "latest") else str(source.version)
    if wanted is not None and not wanted.isdecimal():
        raise TableError(f"{what} has numbers for versions, not {wanted!r}. Set source.version to one, or to latest.")
    place, columns = absolute(source.table).rstrip("/"), columns_of(source)
    with ExitStack() as stack:
        table = _opened(place, None if wanted is None else int(wanted), stack, what)
        names, deleted = _physical_names(table, columns, what), _deleted(table)
        added = pa.table(table.get_add_actions())
        partitions = added["partition"].to_pylist() if "partition" in added.column_names else [{}] * len(added)
        files = []
        times = added["modification_time"].cast(pa.int64()).to_pylist()
        for path, since, partition in zip(added["path"].to_pylist(), times, partitions, strict=True):
            if not is_below(path := unquote(path)):
                raise TableError(f"{what} has files of another table, such as {path}, as clones have. Copy them into one.")
            given = {
                name: None if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)
                for name, value in partition.items()
            }
            rows = hashlib.sha256(deleted[path].tobytes()).hexdigest() if path in deleted else ""
            files.append(DataFile(f"{place}/{path}", since, given, digest_of(names, rows) if names or rows else ""))
        return TableVersion(str(table.version()), place, place, pa.schema(table.schema().to_arrow()), files)


def rows_of(place: str, version: str, uri: str, columns: Sequence[str]) -> Iterator[Any]:
    """The schema of a data file's rows as the table has them, and batches of them."""
    import pyarrow.parquet as pq

    deleted, names = _changes(place, version, tuple(columns))
    gone = deleted.get(uri[len(place) + 1 :], np.zeros(0, bool))
    with Store.at(readable(uri)).open("") as opened, pq.ParquetFile(opened, page_checksum_verification=True) as parquet:
        there = set(parquet.schema_arrow.names)
        own = {name: names.get(name, name) for name in dict.fromkeys(top_level(columns, there | names.keys()))}
        own = {name: physical for name, physical in own.items() if physical in there}
        schema = pa.schema([parquet.schema_arrow.field(physical).with_name(name) for name, physical in own.items()])
        yield schema
        row = 0
        for batch in parquet.iter_batches(BATCH_ROWS, columns=list(own.values()), use_threads=False):
            keep = np.ones(len(batch), bool)
            of_batch = gone[row : row + len(batch)]
            keep[: len(of_batch)] = ~of_batch
            arrays = [batch.column(physical) for physical in own.values()]
            yield pa.record_batch(arrays, schema=schema).filter(pa.array(keep))
            row += len(batch)


@functools.lru_cache(maxsize=2)
def _changes(place: str, version: str, columns: tuple[str, ...]) -> tuple[JsonFacts, Mapping[str, str]]:
    """The deleted rows of a version's files, and the names that columns have in files."""
    with ExitStack() as stack:
        table = _opened(place, int(version), stack, place)
        return _deleted(table), _physical_names(table, columns, place)


def _opened(place: str, version: int | None, stack: ExitStack, what: str) -> Any:
    """A table at a version, without one at its latest, for as long as *stack* is open. TableError if it has no such version."""
    deltalake, store = library("deltalake"), Store.at(readable(place))
    log = store / LOG
    readable(log.url)
    sizes = dict(log.listing())
    numbers = sorted({int(match[1]) for name in sizes if (match := LOG_FILE.fullmatch(name))})
    if not numbers:
        raise TableError(f"{what} is not there: there is no log in {log.url}. Check source.table.")
    chosen = numbers[-1] if version is None else version
    if chosen not in numbers:
        raise TableError(
            f"{what} has no version {chosen}: its log has {numbers[0]} to {numbers[-1]}. Set source.version to one of "
            "these, or to latest."
        )
    what = f"{what}, version {chosen}"
    if sizes.get(f"{chosen:020}.json", 1) == 0:
        raise TableError(f"{what} is being written: its log is empty. Try again when it is complete.")
    if store.is_local:
        return reading(what, lambda: deltalake.DeltaTable(store.root, version=chosen))
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-")))
    try:
        first = int(read_json(log, "_last_checkpoint")["version"])
    except (*NO_OBJECT, ValueError, KeyError, TypeError):
        first = 0
    needed = range(first if first <= chosen else 0, chosen + 1)
    files = [f"{LOG}/{name}" for name in sizes if (match := LOG_FILE.fullmatch(name)) and int(match[1]) in needed]
    _copy(store, [*files, *(f"{LOG}/{name}" for name in sizes if name.startswith("_sidecars/"))], directory)
    table = reading(what, lambda: deltalake.DeltaTable(directory, version=chosen))
    if _has_deletions(table):
        _copy(store, [name for name, _ in store.listing() if DELETION_VECTOR.fullmatch(name)], directory)
    return table


def _copy(store: Store, names: Sequence[str], directory: Path) -> None:
    store.connected().get([store.path(name) for name in names], [str(directory / name) for name in names])


def _has_deletions(table: Any) -> bool:
    return "deletionVectors" in (table.protocol().reader_features or ())


def _deleted(table: Any) -> dict[str, Bools]:
    """The rows of files that the table has deleted: bool[rows], at least up to the last of them."""
    if not _has_deletions(table):
        return {}
    found, root = pa.table(table.deletion_vectors()), Path(table.table_uri.removeprefix("file://")).as_uri()
    vectors = zip(found["filepath"].to_pylist(), found["selection_vector"], strict=True)
    return {unquote(uri[len(root) + 1 :]): ~kept.values.to_numpy(zero_copy_only=False) for uri, kept in vectors}


def _physical_names(table: Any, columns: Sequence[str], what: str) -> dict[str, str]:
    """The names in files of those columns that have others in the table. TableError if they cannot be read by name."""
    mode = table.metadata().configuration.get(MAPPING, "none")
    if mode == "none":
        return {}
    fields = {field.name: field for field in table.schema().fields}
    names = top_level(columns, fields)
    if mode != "name" or any(type(fields[name].type).__name__ != "PrimitiveType" for name in names if name in fields):
        raise TableError(
            f"{what}, version {table.version()}, maps columns by {mode}; that is read by name, and of plain columns, alone. "
            "Write its rows to a table without column mapping."
        )
    physical = {name: fields[name].metadata.get(PHYSICAL, name) for name in names if name in fields}
    return {name: of for name, of in physical.items() if name != of}
