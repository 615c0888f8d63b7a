"""Iceberg tables: a metadata file, which a catalog names, lists a table's snapshots. Files are read through this service's
stores, with its own credentials and limits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, BinaryIO

from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import NO_OBJECT, Store
from tasks.config import SQLITE, Source
from tasks.download.table_versions import BATCH_ROWS, DataFile, TableError, TableVersion, columns_of, library, reading, top_level
from tasks.locations import absolute, readable
from tasks.models import digest_of

CATALOG_SECONDS = 60.0
"""A catalog that has not answered by then is given up."""


class StoreInput:
    """A file of a table, as pyiceberg opens it."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._store = Store.at(readable(location))

    def open(self, seekable: bool = True) -> BinaryIO:
        return self._store.open("")


class StoreIO:
    """The files of tables, as pyiceberg finds them: those that may be read here."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self.properties = properties

    def new_input(self, location: str) -> StoreInput:
        return StoreInput(location)


def version_of_table(source: Source, what: str) -> TableVersion:
    """The files of an Iceberg table in the snapshot that a source names."""
    place, name = _metadata_of(source, what), "latest" if source.version is None else str(source.version)
    table = _opened(place)
    if name == "latest":
        snapshot = table.current_snapshot()
    else:
        snapshot = table.snapshot_by_name(name) or (table.snapshot_by_id(int(name)) if name.isdecimal() else None)
    if snapshot is None:
        there = [one.snapshot_id for one in table.snapshots()[-5:]]
        raise TableError(
            f"{what} has no snapshot, branch or tag {name!r}, or it expired. There are {there} and {sorted(table.refs())}. Set "
            "source.version to one of them."
        )
    version, columns = str(snapshot.snapshot_id), tuple(columns_of(source))
    what = f"{what}, version {version}"
    schema, tasks, since = reading(what, lambda: _planned(place, version, columns))
    renamed = str(schema) if _has_other_names(table, schema) else ""
    files = []
    for uri, task in tasks.items():
        if task.file.file_format.name != "PARQUET":
            raise TableError(f"{what} has files of {task.file.file_format.name}, such as {uri}; Parquet is read. Rewrite them.")
        deletes = sorted(one.file_path for one in task.delete_files)
        changed = digest_of(deletes, renamed) if deletes or renamed else ""
        files.append(DataFile(uri, since[uri], changed=changed))
    return TableVersion(version, place, table.location(), _schema_of(table, snapshot).as_arrow(), files)


def rows_of(place: str, version: str, uri: str, columns: Sequence[str]) -> Iterator[Any]:
    """The schema of a data file's rows as the table has them, and batches of them."""
    table = _opened(place)
    schema, tasks, _ = _planned(place, version, tuple(columns))
    scan = library("pyiceberg.io.pyarrow").ArrowScan(
        table.metadata, table.io, schema, library("pyiceberg.expressions").AlwaysTrue()
    )
    rows = scan.to_table([tasks[uri]])
    yield rows.schema
    yield from rows.to_batches(BATCH_ROWS)


def _metadata_of(source: Source, what: str) -> str:
    """The metadata file of a table that is its latest, or that the source names."""
    assert source.table is not None
    if source.catalog is not None:
        return _answer_of_catalog(source.catalog, source.table, what)
    place = absolute(source.table).rstrip("/")
    if place.endswith(".metadata.json"):
        return place
    try:
        hint = Store.at(readable(place)).read("metadata/version-hint.text").decode().strip()
    except NO_OBJECT as error:
        raise TableError(
            f"{what} has neither _delta_log nor metadata/version-hint.text, which would name the latest metadata file of an "
            "Iceberg table. Set source.catalog to the catalog that has it, or source.table to its directory or metadata file."
        ) from error
    return f"{place}/metadata/{hint if hint.endswith('.metadata.json') else f'v{hint}.metadata.json'}"


def _answer_of_catalog(catalog: str, name: str, what: str) -> str:
    """The metadata file that a catalog names for a table."""
    properties = {"py-io-impl": f"{__name__}.{StoreIO.__name__}", "init_catalog_tables": "false"}
    if "://" in catalog:
        properties["uri"] = catalog
    if catalog.startswith(SQLITE) and kind_of(catalog.removeprefix(SQLITE)) is None:
        raise TableError(f"{what} is not there: there is no file {catalog.removeprefix(SQLITE)}. Check source.catalog.")
    load = library("pyiceberg.catalog").load_catalog
    answer = Future[str]()

    def ask() -> None:
        try:
            found = load("default" if "://" in catalog else catalog, **properties)
            answer.set_result(str(found.load_table(name).metadata_location))
        except BaseException as error:  # noqa: BLE001  it is raised where the answer is awaited
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()  # its requests have no limit of their own
    try:
        return readable(answer.result(CATALOG_SECONDS))
    except TimeoutError as error:
        raise TableError(
            f"{what} cannot be read: the catalog did not answer in {CATALOG_SECONDS:.0f} seconds. Try again later, or check "
            "source.catalog."
        ) from error


@functools.lru_cache(maxsize=2)
def _opened(place: str) -> Any:
    """A table by its metadata file. Properties in the file do not choose what code reads it."""
    files = StoreIO({})
    metadata = library("pyiceberg.serializers").FromInputFile.table_metadata(files.new_input(place))
    catalog = library("pyiceberg.catalog.noop").NoopCatalog("none")
    return library("pyiceberg.table").StaticTable(("table",), metadata, place, files, catalog)


def _schema_of(table: Any, snapshot: Any) -> Any:
    """The columns of the table when a snapshot was made; if a branch ends with it, those that the table has now."""
    if any(ref.snapshot_id == snapshot.snapshot_id and ref.snapshot_ref_type == "branch" for ref in table.refs().values()):
        return table.schema()
    return next((one for one in table.metadata.schemas if one.schema_id == snapshot.schema_id), table.schema())


@functools.lru_cache(maxsize=2)
def _planned(place: str, version: str, columns: tuple[str, ...]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The schema of columns in a snapshot; its data files by their URIs, each with the files that delete rows of it; and of each
    file a number that is larger if it was added later.
    """
    table = _opened(place)
    snapshot = table.snapshot_by_id(int(version))
    whole = _schema_of(table, snapshot)
    there = {field.name for field in whole.fields}
    schema = whole.select(*(name for name in dict.fromkeys(top_level(columns, there)) if name in there))
    since = dict[str, int]()

    def note(entry: Any) -> bool:
        since[entry.data_file.file_path] = entry.sequence_number or 0
        return True

    planner = library("pyiceberg.table").ManifestGroupPlanner(table.metadata, table.io)
    return schema, {task.file.file_path: task for task in planner.plan_files(snapshot.manifests(table.io), note)}, since


def _has_other_names(table: Any, schema: Any) -> bool:
    """Whether a column has another name, other fields or no value at all in files that are older than the schema."""
    ids, names = {field.field_id for field in schema.fields}, {field.name for field in schema.fields}
    ever = {
        (field.field_id, field.name, "" if field.field_type.is_primitive else str(field.field_type))
        for one in table.metadata.schemas
        for field in one.fields
        if field.field_id in ids or field.name in names
    }
    return len(ever) > len(ids) or any(field.initial_default is not None for field in schema.fields)
