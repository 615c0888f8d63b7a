"""Texts of any Arrow type as the one type that the project works on."""

import itertools
import json
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.text.arrow import ARROW
from flat_tokens.text.parquet import PARQUET
from flat_tokens.text.rows import TextFile, as_plain, check_columns, messages_as_json, to_large
from tests.refusal import refusal
from tests.sources import arrow_bytes, documents_of, parquet_bytes


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_stay_the_same_wherever_they_lie_in_an_array(kind):
    texts = ["a", None, "é" * 20, "", None, "b"]
    for start, stop in itertools.combinations(range(7), 2):
        large = to_large(pa.array(texts, kind)[start:stop])
        large.validate(full=True)
        assert (large.type, large.to_pylist()) == (pa.large_string(), texts[start:stop])


def extension(kind: pa.DataType, values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


def test_a_uuid_is_its_36_characters_wherever_it_lies_in_an_array():
    ids = [uuid.UUID(int=5), None, uuid.UUID(int=2**127), None, uuid.UUID(int=7)]
    texts = as_plain(extension(pa.uuid(), [one and one.bytes for one in ids])[1:4])
    texts.validate(full=True)
    assert texts.to_pylist() == [one and str(one) for one in ids[1:4]]


@pytest.mark.skipif(
    int(pa.__version__.partition(".")[0]) < 23, reason="this pyarrow reads Parquet's UUID and JSON as what they are stored as"
)
@pytest.mark.parametrize("form", ["parquet", "parquet of another writer", "arrow"])
def test_columns_of_json_and_uuids_are_read_as_text(tmp_path, form):
    """As texts, ids, kept columns and conversations; other extension types as what they are stored as."""
    ids = [uuid.UUID(int=5), None, uuid.UUID(int=2**127)]
    talks = ['[{"role": "user", "content": "é"}]', "[]", None]
    table = pa.table(
        {
            "text": extension(pa.json_(pa.large_string()), talks),
            "id": extension(pa.uuid(), [one and one.bytes for one in ids]),
            "other": extension(pa.opaque(pa.binary_view(), "name", "vendor"), ["a", None, "b"]),
            "fixed": pa.array([b"ab", None, "é".encode()], pa.binary(2)),
        }
    )
    if form == "arrow":
        content, kind = arrow_bytes(table), ARROW
    else:
        content, kind = parquet_bytes(table, row_group_size=2, store_schema=form == "parquet"), PARQUET
    told = {"id": [one and str(one) for one in ids], "text": talks, "other": ["a", None, "b"], "fixed": ["ab", None, "é"]}
    for text, settings in (("text", {}), ("text", {"has_messages": True}), ("id", {}), ("other", {}), ("fixed", {})):
        found = documents_of(kind, tmp_path / "x", content, [*told], "id", text=text, **settings)
        assert found == list(zip(range(3), told[text], told["id"], *told.values(), strict=True))


def test_bytes_of_a_fixed_length_are_read_a_few_at_a_time(tmp_path):
    """A value may be as long as a text."""
    content = parquet_bytes(pa.table({"text": pa.array([bytes(1000)] * 100, pa.binary(1000))}))
    (tmp_path / "x").write_bytes(content)
    file = TextFile(str(tmp_path / "x"), "x", len(content), "text", batch_bytes=4000)
    (part,) = PARQUET.ranges(file, 1 << 20)
    assert [len(rows.texts) for rows in PARQUET.read(file, part)] == [4] * 25


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        (pa.timestamp("us"), 1, "1970-01-01 00:00:00.000001"),
        (pa.timestamp("ns", "America/New_York"), 1, "1970-01-01 00:00:00.000000001Z"),
        (pa.timestamp("s", "Nowhere/Here"), 5, "1970-01-01 00:00:05Z"),
        (pa.time64("ns"), 1, "00:00:00.000000001"),
        (pa.duration("ns"), 7, 7),
        (pa.decimal128(9, 2), Decimal("1.50"), "1.50"),
        (pa.struct([("at", pa.date32())]), {"at": 1}, {"at": "1970-01-02"}),
        (pa.float64(), 0.5, 0.5),
    ],
)
def test_values_of_messages_that_json_does_not_have(kind, value, written):
    messages = pa.array(
        [[{"role": "user", "more": value}], None, [None]], pa.list_(pa.struct([("role", pa.string()), ("more", kind)]))
    )
    found = messages_as_json(messages).to_pylist()
    assert [one and json.loads(one) for one in found] == [[{"role": "user", "more": written}], None, [None]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@given(st.lists(st.lists(st.fixed_dictionaries(dict.fromkeys(("role", "content"), st.text(max_size=6)))), max_size=4))
def test_messages_of_texts_are_json(kind, talks):
    values = pa.array(talks, pa.list_(pa.struct([("role", kind), ("content", kind)])))
    found = messages_as_json(values[1:]).to_pylist()
    assert found == messages_as_json(pa.array([*talks[1:], None], values.type)).to_pylist()[:-1]  # written one by one
    assert list(map(json.loads, found)) == talks[1:]


def test_bytes_of_messages_that_are_not_text_are_seen_later():
    """They make their own conversation a bad one, in a column of text, too."""
    values = pa.array([b"\xff", b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, values.buffers())
    for column in (values, text):
        messages = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([column], ["content"]))
        assert messages_as_json(messages).to_pylist() == [b'[{"content": "\xff"}]', b'[{"content": "good"}]']


def test_two_fields_of_a_name_in_a_column_of_messages_are_an_error():
    kind = pa.list_(pa.struct([("role", pa.string()), ("calls", pa.list_(pa.struct([("a", pa.int64()), ("a", pa.int64())])))]))
    file = TextFile("x", "x.parquet", 1, "talk", has_messages=True)
    with refusal(r"x\.parquet: column 'talk' has two fields named 'a'; give them different names"):
        check_columns(file, pa.schema([("talk", kind)]))
