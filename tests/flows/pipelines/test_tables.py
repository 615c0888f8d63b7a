"""Delta and Iceberg tables as sources: pinned to a version, refreshed by what changed, refused by name if they cannot be read."""

import json
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flows.pipelines.plan import plan
from flows.pipelines.refresh import RefreshResult
from tasks.config import BuildConfig, Source
from tasks.download import iceberg
from tasks.download.sources import resolve_source
from tests.faults.support import Settings, build_here, digests, refresh_here, same_bytes
from tests.flows.pipelines.test_reruns import tokenized  # noqa: F401  a fixture
from tests.flows.test_stores import bucket, s3  # noqa: F401  fixtures
from tests.processes import serving
from tests.refusal import refusal
from tests.sources import held

deltalake = pytest.importorskip("deltalake")
pyiceberg = pytest.importorskip("pyiceberg")
types = pytest.importorskip("pyiceberg.types")
load_catalog = pytest.importorskip("pyiceberg.catalog").load_catalog


def rows(first: int, stop: int) -> pa.Table:
    numbers = range(first, stop)
    return pa.table(
        {
            "id": [f"d{i}" for i in numbers],
            "text": [f"text of document {i} " * 9 for i in numbers],
            "lang": pa.array(["en" if i < 60 else None for i in numbers], pa.string()),
            "n": list(numbers),
        }
    )


def settings(tmp_path: Path, table: str, output: str = "out", **source: Any) -> Settings:
    whole = {"name": "web", "table": table, "id_column": "id", "keep_columns": ["lang", "n"], **source}
    return {"output": str(tmp_path / output), "sources": [whole], "tokenizer": "bytes", "slice_bytes": 1500}


def documents(output: str | Path) -> list[tuple[Any, ...]]:
    """The texts of a dataset, each with its kept columns, in the order of the texts."""
    return sorted((one.text, *one.columns.values()) for docs in held(output).values() for one in docs)


def made_from_nothing(refreshed: RefreshResult, options: Settings, tmp_path: Path) -> bool:
    """Whether a build at another place makes the same version."""
    places = {"output": str(tmp_path / f"other-{refreshed.version}"), "scratch": str(tmp_path / "scratch")}
    return same_bytes(refreshed, build_here({**options, **places}))


def append_delta(place: str, first: int, stop: int, **options: Any) -> None:
    deltalake.write_deltalake(place, rows(first, stop), mode="append", **options)


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    """A catalog in a file of SQLite, next to its warehouse."""
    (tmp_path / "warehouse").mkdir()
    found = load_catalog("default", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    found.create_namespace("texts")
    return found


@contextmanager
def served(catalog: Any) -> Iterator[str]:
    """The address of a REST catalog with the tables of another one, as far as it is asked to read them."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            words = self.path.partition("?")[0].split("/")[2:]
            body: dict[str, Any] = {"defaults": {}, "overrides": {}}
            if words[0] == "namespaces":
                table = type(catalog)(catalog.name, **catalog.properties).load_table((words[1], words[3]))
                body = {"metadata-location": table.metadata_location, "metadata": table.metadata.model_dump(mode="json")}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as url:
        yield url


def test_a_rest_catalog_names_tables(tmp_path, catalog):
    """Its snapshots, tags, and branches, also one called as a number. Without a catalog a metadata file names one."""
    table = catalog.create_table("texts.web", rows(0, 1).schema)
    table.append(rows(0, 5))
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_branch(first, "20260731").create_tag(first, "of today").commit()
    catalog.load_table("texts.web").append(rows(5, 7))
    with served(catalog) as url:
        for version, count in (("latest", 7), ("main", 7), ("20260731", 5), ("of today", 5), (first, 5)):
            options = settings(tmp_path, "texts.web", str(version), catalog=url, version=version)
            assert len(documents(build_here(options).path)) == count
    with refusal(rf"Iceberg table texts.web of catalog {url} cannot be read: .*refused"):
        build_here(settings(tmp_path, "texts.web", catalog=url))
    assert len(documents(build_here(settings(tmp_path, table.metadata_location, "named")).path)) == 5


def delta_table(tmp_path: Path, catalog: Any) -> Any:
    """A source of 100 files, what gives the version that is the latest, and changes, each with what a refresh reports, and the
    number of files whose text is tokenized.
    """
    place = str(tmp_path / "tab")
    table = partial(deltalake.DeltaTable, place)

    def append(first: int, stop: int) -> None:
        for number in range(first, stop, 5):
            append_delta(place, number, number + 5, partition_by=["lang"])

    append(0, 500)
    changes = [
        (lambda: append(1000, 1100), "20 files added", 20),
        (lambda: table().optimize.compact(partition_filters=[("lang", "=", "en")]), "1 file added, 12 removed", 1),
        (lambda: table().delete("n = 98"), "1 file added, 1 removed", 1),
    ]
    return {"table": place}, lambda: table().version(), changes


def iceberg_table(tmp_path: Path, catalog: Any) -> Any:
    """The same of Iceberg."""
    table = catalog.create_table("texts.web", rows(0, 1).schema)

    def append(first: int, stop: int) -> None:
        paths = [tmp_path / "warehouse" / f"{number:04d}.parquet" for number in range(first, stop, 5)]
        for number, path in enumerate(paths):
            pq.write_table(rows(first + 5 * number, first + 5 * number + 5), path)
        table.add_files([f"file://{path}" for path in paths])

    def tag() -> None:
        table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "of today").commit()

    append(0, 500)
    changes = [
        (lambda: append(1000, 1100), "20 files added", 20),
        (lambda: table.overwrite(rows(0, 60), "n < 60"), "1 file added, 12 removed", 1),
        (tag, "nothing changed", 0),
    ]
    source = {"table": "texts.web", "catalog": f"sqlite:///{tmp_path}/catalog.db"}
    return source, lambda: table.current_snapshot().snapshot_id, changes


@pytest.mark.slow
@pytest.mark.parametrize(("make", "called"), [(delta_table, "tab) (Delta"), (iceberg_table, "web) (Iceberg")])
def test_a_refresh_of_a_table_reads_the_files_that_changed(
    make,
    called,
    tmp_path,
    catalog,
    tokenized,  # noqa: F811
):
    """Files are added and joined, rows deleted. Each version is the one of a build from nothing."""
    source, latest, changes = make(tmp_path, catalog)
    options = settings(tmp_path, **source)
    before, first, files = latest(), refresh_here(options), resolve_source(Source(**source), 0).files
    assert (first.changes.headline, len(tokenized)) == ("100 files added", 100)
    for change, headline, count in changes:
        tokenized.clear()
        change()
        was, files = files, resolve_source(Source(**source), 0).files
        assert files[: len(was)] == was or "removed" in headline  # those that came first stay first
        again = refresh_here(options)
        assert (again.changes.headline.partition(", web.")[0], len({*tokenized})) == (headline, count)
        assert made_from_nothing(again, options, tmp_path)
    of = read_manifest(Store.at(again.path))["provenance"]["sources"][0]
    assert (of["from"], of["revision"]) == (f"local files ({called} table)", str(latest()))
    assert plan(BuildConfig.model_validate(options)).pinned == {"web": f"{of['from']} at {of['revision']}"}
    old = build_here(settings(tmp_path, output="old", **source, version=before))
    assert documents(old.path) == sorted(tuple(row.values())[1:] for row in rows(0, 500).to_pylist())


Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def deletion_vector(*deleted: int) -> dict[str, Any]:
    """Rows of a file that are deleted, as the log of a Delta table has them: a bitmap of roaring's portable form."""
    values = struct.pack(f"<{len(deleted)}H", *deleted)
    body = struct.pack("<iqiii2H", 1681511377, 1, 0, 12346, 1, 0, len(deleted) - 1) + struct.pack("<i", 16) + values
    words = (int.from_bytes((body + b"\0" * 3)[at : at + 4]) for at in range(0, len(body), 4))
    text = "".join(Z85[word // 85**k % 85] for word in words for k in (4, 3, 2, 1, 0))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(body), "cardinality": len(deleted)}


def commit(place: str, version: int, *actions: dict[str, Any]) -> None:
    Path(place, f"_delta_log/{version:020}.json").write_text("".join(json.dumps(one) + "\n" for one in actions))


def actions_of(place: str, version: int) -> dict[str, Any]:
    lines = Path(place, f"_delta_log/{version:020}.json").read_text().splitlines()
    return {kind: action for line in lines for kind, action in json.loads(line).items()}


def test_rows_that_a_deletion_vector_names_are_left_out(tmp_path, tokenized):  # noqa: F811
    """A file is read again when its vector changes; others are not."""
    place, options = str(tmp_path / "tab"), settings(tmp_path, str(tmp_path / "tab"), keep_columns=["n"])
    append_delta(place, 0, 5)
    append_delta(place, 5, 8)
    refresh_here(options)
    file = actions_of(place, 0)["add"]
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
    before = {}
    for version, deleted, left in ((2, (1, 3), {0, 2, 4}), (3, (0, 1, 3), {2, 4})):
        vector = {"deletionVector": deletion_vector(*deleted)}
        remove = {"path": file["path"], "dataChange": True, "deletionTimestamp": 1, **before}
        commit(place, version, *([protocol] if version == 2 else []), {"remove": remove}, {"add": {**file, **vector}})
        before = vector
        tokenized.clear()
        again = refresh_here(options)
        assert {n for _, n in documents(again.path)} == {*left, 5, 6, 7}
        assert tokenized == [file["path"]]
        assert made_from_nothing(again, options, tmp_path)


@pytest.mark.parametrize("mode", ["name", "id"])
def test_columns_of_a_delta_table_that_have_other_names_in_its_files(tmp_path, mode):
    place = str(tmp_path / "tab")
    deltalake.write_deltalake(place, rows(0, 3).rename_columns(["id", "col-7f", "col-lang", "n"]), partition_by=["col-lang"])
    actions = actions_of(place, 0)
    schema = json.loads(actions["metaData"]["schemaString"])
    names = {"col-7f": "text", "col-lang": "lang"}
    for number, field in enumerate(schema["fields"]):
        physical = field["name"]
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical}
        field["name"] = names.get(physical, physical)
    configuration = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "4"}
    metadata = {**actions["metaData"], "schemaString": json.dumps(schema), "configuration": configuration}
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    commit(place, 0, {"protocol": protocol}, {"metaData": {**metadata, "partitionColumns": ["lang"]}}, {"add": actions["add"]})
    if mode == "id":
        with refusal(r"Delta table .*tab, version 0, maps columns by id; .* without column mapping"):
            build_here(settings(tmp_path, place))
        return
    assert documents(build_here(settings(tmp_path, place)).path) == [tuple(row.values())[1:] for row in rows(0, 3).to_pylist()]


def test_a_column_that_older_files_lack_is_null_there(tmp_path):
    """Truths by which a table is partitioned are texts as its directories have them."""
    place = str(tmp_path / "tab")
    deltalake.write_deltalake(place, rows(0, 2).append_column("good", pa.array([True, None])), partition_by=["good"])
    more = rows(2, 3).append_column("good", pa.array([False])).append_column("doc", pa.array([{"score": 0.5}]))
    deltalake.write_deltalake(place, more, mode="append", schema_mode="merge")
    built = build_here(settings(tmp_path, place, keep_columns=["doc.score", "n", "good"]))
    assert [row[1:] for row in documents(built.path)] == [(None, 0, "true"), (None, 1, None), (0.5, 2, "false")]


def with_deletes(catalog: Any, content: str, columns: dict[str, tuple[int, list[Any]]], tmp_path: Path) -> Any:
    """Add a file of deletes to the table, which pyiceberg does not write."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

    table, path = catalog.load_table("texts.web"), tmp_path / f"{content}.parquet"
    kinds = {name: pa.array(values) for name, (_, values) in columns.items()}
    fields = [pa.field(name, kinds[name].type, metadata={"PARQUET:field_id": str(n)}) for name, (n, _) in columns.items()]
    pq.write_table(pa.table(list(kinds.values()), schema=pa.schema(fields)), path)
    file = DataFile.from_args(
        content=DataFileContent[content],
        file_path=f"file://{path}",
        file_format=FileFormat.PARQUET,
        partition=next(iter(table.scan().plan_files())).file.partition,
        record_count=1,
        file_size_in_bytes=path.stat().st_size,
        equality_ids=[4] if content == "EQUALITY_DELETES" else None,
    )
    file.spec_id = 0
    with table.transaction() as change, change.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def test_rows_that_an_iceberg_table_deleted_are_left_out_and_columns_are_found_by_their_ids(tmp_path, catalog):
    table = catalog.create_table("texts.web", rows(0, 1).schema)
    table.append(rows(0, 3))
    with table.update_schema() as change:
        change.rename_column("text", "body")
        change.add_column("score", types.DoubleType())
    (task,) = table.scan().plan_files()
    positions = {"file_path": (2147483546, [task.file.file_path]), "pos": (2147483545, [1])}
    with_deletes(catalog, "POSITION_DELETES", positions, tmp_path)
    table = catalog.load_table("texts.web")
    table.append(rows(3, 4).rename_columns(["id", "body", "lang", "n"]))
    source = {"catalog": f"sqlite:///{tmp_path}/catalog.db", "text_column": "body", "keep_columns": ["score", "n"]}
    options = settings(tmp_path, "texts.web", **source)
    assert [row[1:] for row in documents(build_here(options).path)] == [(None, 0), (None, 2), (None, 3)]
    with_deletes(catalog, "EQUALITY_DELETES", {"n": (4, [2])}, tmp_path)
    with refusal(r"Iceberg table texts.web of catalog sqlite.*, version [0-9]+ cannot be read: .*equality deletes"):
        build_here(options)


def test_columns_of_an_iceberg_table_are_those_that_a_branch_has_now(tmp_path, catalog):
    """An older snapshot has those of its time. A wider type of numbers is read."""
    table = catalog.create_table("texts.web", pa.schema([("text", pa.string()), ("n", pa.int32())]))
    table.append(rows(0, 2).select(["text", "n"]).cast(pa.schema([("text", pa.string()), ("n", pa.int32())])))
    old = table.current_snapshot().snapshot_id
    web = {"catalog": f"sqlite:///{tmp_path}/catalog.db", "id_column": None, "keep_columns": ["n"]}
    options = settings(tmp_path, "texts.web", **web)
    refresh_here(options)
    with table.update_schema() as change:
        change.update_column("n", types.LongType())
    table.append(pa.table({"text": ["wide"], "n": [1 << 40]}))
    assert documents(refresh_here(options).path)[-1] == ("wide", 1 << 40)
    then = build_here(settings(tmp_path, "texts.web", "old", **web, version=old))
    assert [n for _, n in documents(then.path)] == [0, 1]


@pytest.mark.slow
def test_tables_in_stores_give_what_they_give_on_a_disk(tmp_path, bucket):  # noqa: F811
    """Read with the credentials of this service's stores, which the tables' libraries do not know."""
    place = str(tmp_path / "tab")
    for first in (0, 5, 10):
        append_delta(place, first, first + 5, partition_by=["lang"])
    deltalake.DeltaTable(place).create_checkpoint()
    append_delta(place, 15, 20, partition_by=["lang"])
    store = Store.at(bucket)
    for key, _ in Store.at(place).listing():
        store.upload(f"tab/{key}", f"{place}/{key}")
    here, there = (build_here(settings(tmp_path, one, name)) for one, name in ((place, "a"), (f"{bucket}/tab", "b")))
    assert documents(here.path) == documents(there.path)
    assert read_manifest(Store.at(there.path))["provenance"]["sources"][0]["from"] == f"{bucket}/tab (Delta table)"
    store.remove("tab/" + actions_of(place, 3)["add"]["path"])
    with refusal(r"tab, version 3 needs the file .*/lang=en/part-.*, which is gone: the table was vacuumed"):
        build_here(settings(tmp_path, f"{bucket}/tab"))
    assert len(resolve_source(Source(table=f"{bucket}/tab", version=2), 0).files) == 3


@pytest.mark.slow
def test_an_iceberg_table_is_read_from_a_store(tmp_path, s3):  # noqa: F811
    files = {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO", "warehouse": f"{s3}/warehouse"}
    catalog = load_catalog("default", uri=f"sqlite:///{tmp_path}/catalog.db", **files)
    catalog.create_namespace("texts")
    table = catalog.create_table("texts.web", rows(0, 1).schema)
    table.append(rows(0, 5))
    assert len(documents(build_here(settings(tmp_path, table.metadata_location)).path)) == 5


def test_a_table_that_cannot_be_read_is_refused_with_its_version(tmp_path, catalog, monkeypatch):
    place, log = str(tmp_path / "tab"), tmp_path / "tab/_delta_log"
    append_delta(place, 0, 2)
    append_delta(place, 2, 4)
    table = catalog.create_table("texts.web", rows(0, 1).schema)
    table.append(rows(0, 2))
    old, sql = table.current_snapshot().snapshot_id, f"sqlite:///{tmp_path}/catalog.db"
    table.append(rows(2, 4))
    Store.at(tmp_path).remove(table.metadata.snapshots[0].manifest_list.removeprefix(f"file://{tmp_path}/"))
    (tmp_path / "empty").mkdir()
    web = {"table": "texts.web", "catalog": sql}
    silent = socket.create_server(("127.0.0.1", 0))
    build_here(settings(tmp_path, place))
    before = digests(tmp_path / "out/versions"), (tmp_path / "out/latest.json").read_bytes()

    def refused(words: str, **source: Any) -> None:
        with refusal(words):
            refresh_here(settings(tmp_path, **{"table": place, **source}))
        assert (digests(tmp_path / "out/versions"), (tmp_path / "out/latest.json").read_bytes()) == before

    with silent:
        refused("has no version 7: its log has 0 to 1. Set source.version to one of these, or to latest", version=7)
        refused("has numbers for versions, not 'main'", version="main")
        refused(r"Delta table .*/tab, version 1: column 'n' is int64, not text", text_column="n")
        refused("version 1 has no column 'url'; it has 'id', 'text', 'lang', 'n'", keep_columns=["url"])
        refused("empty has neither _delta_log nor metadata/version-hint.text", table=str(tmp_path / "empty"))
        refused("Delta table .*/empty is not there: there is no log in", table=str(tmp_path / "empty"), format="delta")
        refused(
            "Iceberg table texts.web of catalog .* has no snapshot, branch or tag '12', or it expired. There are .*'main'",
            **web,
            version=12,
        )
        refused("has no snapshot, branch or tag '0'", **web, version=0)
        refused(
            f"Iceberg table texts.web of catalog .*, version {old} cannot be read: there is no file .*avro, as after its",
            **web,
            version=old,
        )
        refused("Iceberg table texts.none of catalog .*Table does not exist", table="texts.none", catalog=sql)
        refused("there is no file .*/none.db", table="texts.web", catalog=f"sqlite:///{tmp_path}/none.db")
        monkeypatch.setattr(iceberg, "CATALOG_SECONDS", 1.0)
        refused("the catalog did not answer in 1 seconds", table="a.b", catalog=f"http://127.0.0.1:{silent.getsockname()[1]}")
    file = tmp_path / "tab" / actions_of(place, 1)["add"]["path"]
    pq.write_table(rows(2, 4).set_column(1, "text", pa.array([1, 2])), file)
    refused(r"source 'web': table .*/tab, version 1: part-.*: column 'text' is int64, not text")
    pq.write_table(rows(2, 4).set_column(3, "n", pa.array(["a", "b"])), file)
    refused(r"column 'n' is .* of local files \(tab\) \(Delta table\), version 1 and .* version 1\. Repair one")
    file.unlink()
    refused(r"Delta table .*/tab, version 1 needs the file .*tab/part-.*, which is gone: the table was vacuumed, or")
    (log / f"{2:020}.json").write_text("")
    refused("tab, version 2 is being written: its log is empty")
    (log / f"{2:020}.json").write_text('{"add": {"pa')
    refused("Delta table .*tab, version 2 cannot be read: .*Json error.*If it is being written, try again later")
    (log / f"{2:020}.json").unlink()
    deltalake.write_deltalake(place, rows(0, 2).drop_columns("text"), mode="overwrite", schema_mode="overwrite")
    refused("tab, version 2 has no column 'text'; it has 'id', 'lang', 'n'. Set source.text_column")
    deltalake.DeltaTable(place).create_checkpoint()
    for number in range(2):
        (log / f"{number:020}.json").unlink()
    refused("tab has no version 1: its log has 2 to 2", version=1)
    table.refresh()
    data = Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
    data.rename(data.with_suffix(".away"))
    refused(
        r"Iceberg table texts.web of .*, version \d+ needs the file .*parquet, which is gone: .* or its snapshot expired", **web
    )


def test_without_its_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    append_delta(str(tmp_path / "tab"), 0, 2)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with refusal(r"a table as a source needs the package 'deltalake'\. Install it: pip install", ModuleNotFoundError):
        build_here(settings(tmp_path, str(tmp_path / "tab")))
