"""Kept columns: what is written is read, by any numbers, in any row groups, and kinds that fit."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flat_tokens.columns
from flat_tokens.columns import (
    BEYOND,
    Columns,
    ColumnsWriter,
    Part,
    as_kind,
    common,
    in_manifest,
    joined,
    kind_of,
    name_of,
    parts_of,
    type_of,
)
from flat_tokens.stores.store import Store
from flat_tokens.text.jsonl import JSONL
from flat_tokens.text.rows import Range, TextFile, as_kept
from tests.examples import examples
from tests.refusal import refusal

KINDS = {"n": "int64", "x": "float64", "t": "text", "none": "null"}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_tokens.columns, "GROUP_ROWS", 3)


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"n": i, "x": i / 2, "t": None if i % 4 == 3 else f"text {i}", "none": None} for i in range(start, stop)]


def batch(start: int, stop: int) -> pa.RecordBatch:
    schema = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("t", pa.large_string()), ("none", pa.null())])
    return pa.RecordBatch.from_pylist(rows(start, stop), schema)


def write(store: Store, key: str, *edges: int) -> bytes:
    """Write the rows from one edge to the next, a batch at a time."""
    with store.create(key) as stored, ColumnsWriter(stored, KINDS) as writer:
        for start, stop in itertools.pairwise(edges):
            writer.append(batch(start, stop))
    return store.read(key)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 10))
@example([2, 0, 0], 0)  # as many as a row group has
@examples(40)
def test_documents_are_taken_by_their_numbers(tmp_path_factory, numbers, cut):
    """In any order, more than once, from one object or two."""
    store = Store.at(tmp_path_factory.mktemp("columns"))
    edges = [0, *([cut] if 0 < cut < 10 else []), 10]
    for first, stop in itertools.pairwise(edges):
        write(store, name_of("train", first), first, stop)
    columns = Columns(store, KINDS, parts_of([name_of("train", first) for first in edges[:-1]], "train", 10))
    assert columns.take(np.array(numbers, np.int64), ["t", "n"]).to_pylist() == [
        {"t": row["t"], "n": row["n"]} for row in (rows(i, i + 1)[0] for i in numbers)
    ]
    assert list(columns.faults()) == []


def test_bytes_do_not_depend_on_how_rows_came(tmp_path):
    store = Store.at(tmp_path)
    assert write(store, "a", 0, 10) == write(store, "b", 0, 1, 2, 6, 6, 10)


def test_objects_of_a_split_are_found_by_their_names():
    keys = [
        "documents/train/columns/20.parquet",
        name_of("train", 0),
        name_of("validation", 0),
        "documents/train/columns/x.parquet",
    ]
    assert parts_of([*keys, "documents/train/columns/007.parquet"], "train", 25) == (
        Part("documents/train/columns/0.parquet", 0, 20),
        Part("documents/train/columns/20.parquet", 20, 25),
    )
    assert parts_of(keys[3:], "train", 0) == ()


def test_kinds_fit_or_do_not():
    assert [common("null", "text"), common("int64", "float64"), common("bool", "bool")] == ["text", "float64", "bool"]
    assert [common("int64", "text"), common("bool", "int64"), common("int64", "uint64")] == [None, None, None]
    whole, parts = (pa.record_batch({"n": values}) for values in ([1, 2], [0.5]))
    assert joined([whole, parts, pa.record_batch({"n": pa.nulls(1)})]).column(0).to_pylist() == [1.0, 2.0, 0.5, None]
    with refusal("column 'n' cannot be float64: Integer value 9007199254740993"):
        as_kind(pa.array([(1 << 53) + 1]), "float64", "n")
    assert as_kind(pa.array([1.0, None]), "int64", "n").to_pylist() == [1, None]


MOST = (1 << 63) - 1


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, 1 << 53], "int64"),
        ([(1 << 53) + 1], BEYOND),
        ([-(1 << 53) - 1, None], BEYOND),
        ([1 << 54, -(1 << 63), (1 << 53) + 2], "int64"),  # float64 has these
        ([1 << 54, MOST], BEYOND),
        ([], "int64"),
    ],
)
def test_integers_that_float64_does_not_have_are_a_kind_of_their_own(values, kind):
    """In shards: a manifest has int64 for both."""
    found = pa.array([7, *values], pa.int64())[1:]
    assert kind_of(found) == kind
    assert (in_manifest(kind), type_of(kind)) == ("int64", pa.int64())
    assert common("int64", kind) == common(kind, "int64") == common("null", kind) == kind
    if kind == BEYOND:
        assert common(kind, "float64") is common("float64", kind) is None
        with refusal(r"column 'n' cannot be float64: Integer value .* Write its values as text"):
            as_kind(found, "float64", "n")
    else:
        assert as_kind(found, "float64", "n").to_pylist() == values


def test_a_null_is_no_integer_whatever_stands_in_its_place():
    data = np.array([MOST, 1], np.int64)
    found = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\2"), pa.py_buffer(data)])
    assert found.to_pylist() == [None, 1]
    assert kind_of(found) == "int64"


def test_damage_is_told_with_the_object(tmp_path):
    store = Store.at(tmp_path)
    data = write(store, name_of("train", 0), 0, 6)
    columns = Columns(store, KINDS, (Part(name_of("train", 0), 0, 6),))
    for damaged in (data[:-20], data[:10] + b"\xff" * 20 + data[30:], b""):
        store.put(name_of("train", 0), damaged)
        with refusal(r"columns/0\.parquet: cannot be read .*: run flat_tokens.verify"):
            columns.take(np.arange(6), list(KINDS))
        (fault,) = columns.faults()
        assert "columns/0.parquet: cannot be read" in fault


def test_documents_that_are_not_there_are_told(tmp_path):
    store = Store.at(tmp_path)
    write(store, name_of("train", 0), 0, 5)
    columns = Columns(store, KINDS, (Part(name_of("train", 0), 0, 6),))
    with refusal(r"0\.parquet has 5 rows instead of 6"):
        columns.take(np.array([1]), ["n"])
    with refusal("has no columns of document 9"):
        columns.take(np.array([9]), ["n"])
    assert list(Columns(store, {"n": "text"}, (Part(name_of("train", 0), 0, 5),)).faults()) == [
        "documents/train/columns/0.parquet has the columns ['n', 'x', 't', 'none'] instead of ['n']"
    ]


def written(path: Path, values: Iterable[Any]) -> Path:
    """A file of JSON lines with these values."""
    path.write_text("".join(json.dumps({"text": "a", "v": value}) + "\n" for value in values))
    return path


def read(path: Path) -> Iterator[pa.RecordBatch]:
    file = TextFile(str(path), path.name, path.stat().st_size, "text", kept_columns=("v",))
    for found in JSONL.read(file, Range(0, file.size, None, file.size)):
        assert found.columns is not None
        yield found.columns


@pytest.mark.parametrize("told", [[True, None], [1, None, -(1 << 60)], [0.5, -1e6, 2], ["", "é", None], [None]], ids=str)
def test_json_lines_have_the_values_that_they_say(tmp_path, told):
    """However many lines are read at a time, by Arrow's parser and by Python's."""
    lines = [json.dumps({"text": "a"} if value is None else {"text": "a", "v": value}) for value in [*told, *told]]
    for end, size in (("\n", 1 << 20), ("\n", 30), ("\n\n", 1 << 20), ("\n\n", 30)):  # Arrow's parser takes no blank lines
        (tmp_path / "x.jsonl").write_text("".join(line + end for line in lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flat_tokens.text.limits.BATCH_BYTES", size)
            assert joined(list(read(tmp_path / "x.jsonl"))).column("v").to_pylist() == [*told, *told]


def test_values_of_several_kinds_are_refused(tmp_path):
    for told in ([1, "a"], [True, 2.5]):
        with refusal(r"x.jsonl: column 'v' holds values of type .* and "):
            list(read(written(tmp_path / "x.jsonl", told)))


@pytest.mark.parametrize("size", [1 << 20, 30])
@pytest.mark.parametrize(("value", "other"), [("9007199254740993", "0.5"), ("100000000000000000001", "1"), ("-1e400", "1")])
def test_numbers_that_float64_does_not_have_are_refused(tmp_path, monkeypatch, size, value, other):
    """Next to fractions, or beyond 64 bits; in one block with the other number or not."""
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", size)
    for pair in ((value, other), (other, value)):
        (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "a", "v": {number}}}\n' for number in pair))
        with refusal(r"column 'v' .*float64"):
            joined(list(read(tmp_path / "x.jsonl")))


def test_integers_that_float64_has_stand_beside_fractions(tmp_path):
    values = [1 << 54, 0.5, -(1 << 70), 1e300, None]
    assert joined(list(read(written(tmp_path / "x.jsonl", values)))).column("v").to_pylist() == values


def test_decimals_that_float64_does_not_have_are_refused():
    whole = [Decimal(1 << 60), Decimal(-5), None]
    assert as_kept(pa.array(whole, pa.decimal128(38, 0)), "v", "x.parquet").to_pylist() == [1 << 60, -5, None]
    assert as_kept(pa.array([Decimal("0.1"), None]), "v", "x.parquet").to_pylist() == [0.1, None]
    for value in (Decimal((1 << 53) + 1), Decimal("9007199254740992.5")):
        with refusal(rf"^x.parquet: column 'v' is float64 here, which does not have its value {value}"):
            as_kept(pa.array([value, Decimal(0)], pa.decimal128(38, 1)), "v", "x.parquet")


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.date64()])
def test_times_that_are_in_no_calendar_are_refused(kind):
    with refusal(rf"^x.parquet: column 'v' has a {re.escape(str(kind))} that is out of range. Write its values as text"):
        as_kept(pa.array([0, 1 << 62]).view(kind), "v", "x.parquet")
