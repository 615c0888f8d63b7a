"""Columns by path, in every format that has structs: fields are read as columns are. Columns by the names of directories."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens.text.jsonl
from flat_tokens.text.formats import FORMATS, FileFormat
from flat_tokens.text.partitions import partitions_of
from flat_tokens.text.paths import ABSENT, column_at, nearest_path, steps_of, value_at
from flat_tokens.text.rows import TextFile
from tests.refusal import refusal
from tests.sources import documents_of, write_arrow


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ({"a.b": 1, "a": {"b": 2}}, 1),
        ({"a": {"b": 2}}, 2),
        ({"a": {"b": None}}, None),
        ({"a": None}, None),
        ({"a": {"c": 1}}, ABSENT),
        ({"a": "text"}, ABSENT),
        ({"b": 1}, ABSENT),
        ({"a": [{"b": 1}]}, ABSENT),
    ],
)
def test_a_value_is_the_columns_or_else_the_fields(line, value):
    assert value_at(line, "a.b") is value


def test_a_longer_name_comes_first():
    assert value_at({"a": {"b.c": 1}, "a.b": {"c": 2}}, "a.b.c") == 2
    assert value_at({"a": {"b.c": 1}, "a.b": {"d": 2}}, "a.b.c") == 1
    fields = {"a": pa.struct([("b.c", pa.int64()), ("l", pa.list_(pa.struct([("x", pa.int8())])))]), "n": pa.int64()}
    assert steps_of(fields, "a.b.c") == ["a", "b.c"]
    assert [steps_of(fields, path) for path in ("n", "n.x", "a.l.x", "a.x", ".", "a.")] == [["n"], None, None, None, None, None]


def test_a_field_is_null_where_its_struct_is():
    inner = pa.struct([("b", pa.string())])
    batch = pa.record_batch({"a": pa.array([{"b": "x"}, None, {"b": None}, {"b": "y"}], inner)})
    assert column_at(batch, "a.b").to_pylist() == ["x", None, None, "y"]
    assert column_at(batch.slice(1), "a.b").to_pylist() == [None, None, "y"]
    assert nearest_path(batch.schema, "b") == "a.b"
    assert nearest_path(batch.schema, "z") is None


def written(path: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    table = pa.Table.from_pylist(rows, pa.schema([("doc", DOC)]))
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        write_arrow(path, table, 3)
    return path


META = pa.struct([("url", pa.string()), ("n", pa.int64())])
DOC = pa.struct([("text", pa.string()), ("id", pa.string()), ("meta", META), ("other", pa.list_(pa.int64()))])
NAMES = ("doc.meta.url", "doc.meta.n")


def read(path: Path, kind: FileFormat, names: tuple[str, ...] = NAMES) -> list[tuple[Any, ...]]:
    """Row, text, id and kept columns of each document."""
    return documents_of(FORMATS[kind], path, path.read_bytes(), names, "doc.id", text="doc.text", range_bytes=40)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
META_OF = st.fixed_dictionaries({"url": st.none() | TEXTS, "n": st.none() | st.integers(-(1 << 40), 1 << 40)})
ROWS = st.fixed_dictionaries({"text": TEXTS, "id": TEXTS, "meta": st.none() | META_OF, "other": st.just([1, 2])})


@given(st.lists(ROWS, min_size=1, max_size=8))
def test_nested_rows_are_read_as_flat_ones_are(tmp_path_factory, docs):
    here = tmp_path_factory.mktemp("nested")
    expected = [
        (i, doc["text"], doc["id"], *((doc["meta"] or {}).get(name) for name in ("url", "n"))) for i, doc in enumerate(docs)
    ]
    for kind in ("jsonl", "parquet", "arrow"):
        path = written(here / f"x.{kind}", [{"doc": doc} for doc in docs], kind)
        assert read(path, kind) == expected  # type: ignore[arg-type]


def test_lines_of_a_block_go_through_the_fast_parser_if_no_key_has_dots(tmp_path, monkeypatch):
    row = {"doc": {"text": "a", "id": "1", "meta": {"url": "u", "n": 1}}}
    path = written(tmp_path / "x.jsonl", [row] * 3, "jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(flat_tokens.text.jsonl, "_parse_lines", None)
        assert [one[1] for one in read(path, "jsonl")] == ["a"] * 3
    literal = row | {"doc.text": "b", "doc.meta.url": "v"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, literal)))
    assert [(one[1], one[3]) for one in read(path, "jsonl")] == [("a", "u"), ("b", "v")]
    path.write_text(json.dumps(row) + "\n" + json.dumps(literal).replace("doc.text", "doc\\u002etext") + "\n")
    assert [one[1] for one in read(path, "jsonl")] == ["a", "b"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_of_the_very_name_comes_first(tmp_path, kind):
    fields = {"doc": [{"text": "field", "id": "f"}] * 4, "doc.text": ["column"] * 4, "doc.id": [7] * 4}
    table, path = pa.table(fields), tmp_path / f"x.{kind}"
    for order in (["doc", "doc.text", "doc.id"], ["doc.text", "doc.id", "doc"]):
        some = table.select(order)
        if kind == "parquet":
            pq.write_table(some, path)
        else:
            write_arrow(path, some)
        assert [one[1:] for one in read(path, kind, ("doc.id",))] == [("column", "7", 7)] * 4


def test_errors_name_the_path(tmp_path):
    path = written(tmp_path / "x.parquet", [{"doc": {"text": "a", "id": "1"}}], "parquet")
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
    table = pa.Table.from_pylist([{"doc": {"messages": talk}}] * 3)
    pq.write_table(table, path := tmp_path / "x.parquet")
    found = documents_of(FORMATS["parquet"], path, path.read_bytes(), text="doc.messages", has_messages=True)
    assert [json.loads(text) for _, text, _ in found] == [talk] * 3


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("part.parquet", {}),
        ("lang=en/part.parquet", {"lang": "en"}),
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
