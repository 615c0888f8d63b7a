"""Columns by path, in every format that has structs: fields are read as columns are. Columns by the names of directories."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_tokens.text.jsonl
from flat_tokens.text.formats import FORMATS, FileFormat
from flat_tokens.text.partitions import partitions_of
from flat_tokens.text.paths import ABSENT, column_at, steps_of, value_at
from flat_tokens.text.rows import TextFile
from tests.refusal import refusal
from tests.sources import arrow_bytes, as_line, documents_of, parquet_bytes


def test_a_longer_name_comes_first():
    assert value_at({"a": {"b.c": 1}, "a.b": {"c": 2}}, "a.b.c") == 2
    assert value_at({"a": {"b.c": 1}, "a.b": {"d": 2}}, "a.b.c") == 1
    assert value_at({"a": {"b": {"c": None}}}, "a.b.c") is value_at({"a": None}, "a.b.c") is None
    assert {value_at({"a": value}, "a.b.c") for value in ("text", {"c": 1}, {"b": 5})} == {ABSENT}
    fields = {"a": pa.struct([("b.c", pa.int64()), ("l", pa.list_(pa.struct([("x", pa.int8())])))]), "n": pa.int64()}
    assert steps_of(fields, "a.b.c") == ["a", "b.c"]
    assert [steps_of(fields, path) for path in ("n", "n.x", "a.l.x", "a.x", ".", "a.")] == [["n"], None, None, None, None, None]


AS_BYTES = {"parquet": partial(parquet_bytes, row_group_size=3), "arrow": arrow_bytes}


def lines(*rows: Any) -> bytes:
    return "".join(map(as_line, rows)).encode()


META = pa.struct([("url", pa.string()), ("n", pa.int64())])
DOC = pa.struct([("text", pa.string()), ("id", pa.string()), ("meta", META), ("other", pa.list_(pa.int64()))])
NAMES = ("doc.meta.url", "doc.meta.n")


def read(path: Path, kind: FileFormat, data: bytes, names: tuple[str, ...] = NAMES) -> list[tuple[Any, ...]]:
    """Row, text, id and kept columns of each document."""
    return documents_of(FORMATS[kind], path / "x", data, names, "doc.id", text="doc.text", range_bytes=40)


METAS = ({"url": "u", "n": 1}, None, {"url": None, "n": -(1 << 40)}, {"url": "", "n": None})


@pytest.mark.parametrize("kind", ["jsonl", *AS_BYTES])
def test_nested_rows_are_read_as_flat_ones_are(tmp_path, kind):
    rows = [{"doc": {"text": f"é{i}", "id": f"{i}", "meta": METAS[i % 4], "other": [1, 2]}} for i in range(9)]
    table = pa.Table.from_pylist(rows, pa.schema([("doc", DOC)]))
    data = lines(*rows) if kind == "jsonl" else AS_BYTES[kind](table)
    metas = ((meta["url"], meta["n"]) if meta else (None, None) for meta in METAS * 3)
    expected = [(i, f"é{i}", f"{i}", *values) for i, values in zip(range(9), metas, strict=False)]
    assert read(tmp_path, kind, data) == expected


def test_lines_of_a_block_go_through_the_fast_parser_if_no_key_has_dots(tmp_path, monkeypatch):
    row = {"doc": {"text": "a", "id": "1", "meta": {"url": "u", "n": 1}}}
    with monkeypatch.context() as patch:
        patch.setattr(flat_tokens.text.jsonl, "_parse_lines", None)
        assert [one[1] for one in read(tmp_path, "jsonl", lines(row, row))] == ["a"] * 2
    data = lines(row, row | {"doc.text": "b", "doc.meta.url": "v"})
    for written in (data, data.replace(b"doc.text", b"doc\\u002etext")):
        assert [(one[1], one[3]) for one in read(tmp_path, "jsonl", written)] == [("a", "u"), ("b", "v")]


@pytest.mark.parametrize("kind", AS_BYTES)
def test_a_column_of_the_very_name_comes_first(tmp_path, kind):
    table = pa.table({"doc": [{"text": "field", "id": "f"}] * 4, "doc.text": ["column"] * 4, "doc.id": [7] * 4})
    for order in (["doc", "doc.text", "doc.id"], ["doc.text", "doc.id", "doc"]):
        found = read(tmp_path, kind, AS_BYTES[kind](table.select(order)), ("doc.id",))
        assert [one[1:] for one in found] == [("column", "7", 7)] * 4


def test_a_field_is_null_where_its_struct_is():
    batch = pa.record_batch({"a": [{"b": "x"}, None, {"b": None}, {"b": "y"}]})
    assert [column_at(batch.slice(n), "a.b").to_pylist() for n in (0, 1)] == [["x", None, None, "y"], [None, None, "y"]]


def test_errors_name_the_path(tmp_path):
    table = pa.Table.from_pylist([{"doc": {"text": "a", "id": "1"}}], pa.schema([("doc", DOC)]))
    pq.write_table(table, path := tmp_path / "x.parquet")
    for column, words in {
        "text": r"no column 'text'; it has 'doc'. Set source.text_column to 'doc.text', a field of its structs",
        "url": r"Set source.text_column to 'doc.meta.url'",
        "doc.none": r"no column 'doc.none'; it has 'doc'. Set source.text_column\.",
        "doc.meta": r"column 'doc.meta' is struct<.*, not text",
        "doc.other": r"column 'doc.other' is list<.*, not text",
    }.items():
        with refusal(words):
            list(FORMATS["parquet"].ranges(TextFile(str(path), "x.parquet", path.stat().st_size, column), 1 << 20))


def test_messages_may_be_within_a_struct(tmp_path):
    talk = [{"role": "user", "content": "hi"}]
    data = parquet_bytes(pa.Table.from_pylist([{"doc": {"messages": talk}}] * 3))
    found = documents_of(FORMATS["parquet"], tmp_path / "x", data, text="doc.messages", has_messages=True)
    assert [json.loads(text) for _, text, _ in found] == [talk] * 3


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("a/lang=en/b/year=2024/k=v.parquet", {"lang": "en", "year": "2024"}),
        ("lang=__HIVE_DEFAULT_PARTITION__/x", {"lang": None}),
        ("lang=/x", {"lang": ""}),
        ("=en/x", {}),
        ("a%20b=c%2Fd%C3%A9=1%/x", {"a b": "c/dé=1%"}),
        ("k=%FF/x", {"k": "\ufffd"}),
        ("k=1/k=2/x", {"k": "2"}),
    ],
)
def test_columns_are_the_directories_with_an_equals_sign(name, columns):
    assert partitions_of(name) == columns
