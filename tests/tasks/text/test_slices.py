"""Cutting files into slices: every document once, whatever the size of a slice and of a block, with its row and its key."""

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.keys import document_keys
from flat_tokens.text.formats import FileFormat, detect_format
from flat_tokens.text.parquet import MAX_CUTS_OF_A_ROW_GROUP
from tasks.config import DocumentPolicy, Source
from tasks.models import Slice, SourceFile
from tasks.rows import ROW, fact
from tasks.text.documents import Tally, read_documents
from tasks.text.files import plan_ranges
from tests.examples import examples
from tests.refusal import refusal
from tests.slices import slices_of
from tests.sources import write_arrow

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


class Document(NamedTuple):
    """A document as a slice gives it, its row counted from the start of the file."""

    text: str
    key: int
    row: int


def source_file(path: Path, kind: FileFormat) -> SourceFile:
    return SourceFile(source=0, name=path.name, location=str(path), size=path.stat().st_size, sha256="0" * 64, format=kind)


def key_of(identity: str) -> int:
    data = np.frombuffer(identity.encode(), np.uint8)
    return int(document_keys(data, np.array([0, len(data)]))[0])


class Outcome(NamedTuple):
    """All that comes of a file: documents, and what was counted."""

    documents: list[Document]
    tally: Tally


def read(part: Slice, source: Source, policy: DocumentPolicy) -> Outcome:
    tally, documents = Tally(), []
    for batch in read_documents(part, source, policy, tally):
        documents += map(Document, batch.texts.to_pylist(), batch.keys.tolist(), fact(batch.rows, ROW).tolist())
    tally.skipped, tally.replaced = +tally.skipped, +tally.replaced
    return Outcome(documents, tally)


def read_slices(slices: list[Slice], source: Source, policy: DocumentPolicy | None = None) -> list[Document]:
    """The documents of slices that follow each other in a file."""
    found, first_row = [], 0
    for part in slices:
        documents, tally = read(part, source, policy or DocumentPolicy())
        found += [one._replace(row=one.row + first_row) for one in documents]
        first_row += tally.rows
    return found


def whole(path: Path, kind: FileFormat, source: Source, slice_bytes: int) -> list[Document]:
    return read_slices(slices_of(source_file(path, kind), source, slice_bytes), source)


def documents(texts: list[str], ids: list[str] | None = None) -> list[Document]:
    return [Document(text, key_of(ids[row] if ids else text), row) for row, text in enumerate(texts)]


def write_parquet(path: Path, table: pa.Table, rows_at_a_time: int) -> None:
    pq.write_table(table, path, row_group_size=rows_at_a_time)


def write_csv(path: Path, table: pa.Table, rows_at_a_time: int) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\r\n" if rows_at_a_time % 2 else "\n", quoting=csv.QUOTE_ALL)
        writer.writerow(table.column_names)
        writer.writerows(zip(*(column.to_pylist() for column in table.columns), strict=True))


def write_jsonl(path: Path, table: pa.Table, rows_at_a_time: int) -> None:
    lines = [json.dumps(row, ensure_ascii=rows_at_a_time % 2 == 1) for row in table.to_pylist()]
    path.write_bytes("\n".join(lines).encode() + (b"\n" if rows_at_a_time % 3 else b""))


WRITERS: dict[str, tuple[FileFormat, Callable[[Path, pa.Table, int], None]]] = {
    "parquet": ("parquet", write_parquet),
    "arrow file": ("arrow", write_arrow),
    "arrow stream": ("arrow", partial(write_arrow, stream=True)),
    "csv": ("csv", write_csv),
    "jsonl": ("jsonl", write_jsonl),
}


@pytest.fixture
def blocks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Read files in blocks of so many bytes."""

    def set_size(size: int) -> None:
        monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", size)
        monkeypatch.setattr("flat_tokens.text.limits.LOOK_BYTES", size)

    return set_size


@pytest.mark.parametrize("kind", WRITERS)
@given(
    texts=st.lists(TEXTS, max_size=12),
    with_ids=st.booleans(),
    slice_bytes=st.integers(1, 200),
    block=st.integers(1, 80),
    rows_at_a_time=st.integers(1, 8),
)
@example(texts=[], with_ids=True, slice_bytes=1, block=1, rows_at_a_time=1)
@example(texts=['"new\nlines", \r\n', "\0", "\ufeff", "a\x85b\u2028c"], with_ids=True, slice_bytes=1, block=3, rows_at_a_time=2)
def test_every_document_comes_once_in_order_with_its_row_and_key(
    tmp_path,
    blocks_of,
    kind,
    texts,
    with_ids,
    slice_bytes,
    block,
    rows_at_a_time,
):
    format_, write = WRITERS[kind]
    path = tmp_path / "file"
    ids = [f"id {i // 2}" for i in range(len(texts))]
    write(path, pa.table({"id": pa.array(ids, pa.string()), "text": pa.array(texts, pa.string())}), rows_at_a_time)
    source = Source(path="x", id_column="id" if with_ids else None)
    blocks_of(max(block, 13) if kind == "csv" else block)  # a header has to fit
    assert whole(path, format_, source, slice_bytes) == documents(texts, ids if with_ids else None)


@given(
    data=st.text("ab-|é", max_size=60) | st.text("a-\r\n", max_size=60),
    separator=st.sampled_from(["-", "--", "---", "-|-", "a-a", "|", "é", "\r\n", "\n", "\n\n", "-\n", "\n-\n"]),
    slice_bytes=st.integers(1, 70),
    block=st.integers(1, 20),
    bom=st.booleans(),
)
@example(data="a-----b", separator="--", slice_bytes=2, block=1, bom=False)
@example(data="a-a-a-a", separator="a-a", slice_bytes=3, block=2, bom=False)
@example(data="--", separator="--", slice_bytes=1, block=1, bom=True)
@example(data="a\r\n\r\nb\n\r\n\n-", separator="\n\n", slice_bytes=2, block=1, bom=False)
@example(data="a\n\r\nb\n\n", separator="\n\n", slice_bytes=99, block=20, bom=False)
@examples(500)
def test_texts_are_cut_at_separators_from_left_to_right(tmp_path, blocks_of, data, separator, slice_bytes, block, bom):
    """As ``re.split`` does, but that a separator at the very end ends the last document; also across slices and blocks. A line
    feed of it may be CR LF, at each place by itself.
    """
    path = tmp_path / "file.txt"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + data.encode())
    lines = [separator] if "\r" in separator else separator.split("\n")
    expected = re.split("\r?\n".join(map(re.escape, lines)), data)
    if not expected[-1]:
        expected.pop()
    blocks_of(block)
    source, file = Source(path="x", document_separator=separator), source_file(path, "text")
    found = slices_of(file._replace(line_ends="crlf" if len(lines) > 1 else None), source, slice_bytes)
    assert read_slices(found, source) == documents(expected)


def test_a_document_too_long_is_passed_over_up_to_its_separator_of_crlf(tmp_path, blocks_of):
    path = tmp_path / "file.txt"
    path.write_bytes(b"\r\n\r\n".join([b"a", b"x" * 50, b"b", b"c" * 20]))
    source, file = Source(path="x", document_separator="\n\n"), source_file(path, "text")
    for block in range(1, 8):
        blocks_of(block)
        slices = slices_of(file._replace(line_ends="crlf"), source, 1000)
        found = read_slices(slices, source, DocumentPolicy(max_bytes=20, on_bad="skip"))
        assert [(document.text, document.row) for document in found] == [("a", 0), ("b", 2), ("c" * 20, 3)]


def test_slices_of_about_the_wanted_size_cover_the_file(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"text":"0123456789"}\n' * 1000)  # 22 bytes each
    ranges = plan_ranges(source_file(path, "jsonl"), Source(path="x"), 2200)
    assert [(part.start, part.stop) for part in ranges] == [(i * 2200, (i + 1) * 2200) for i in range(10)]


def test_many_small_row_groups_share_a_slice(tmp_path):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"text": ["sixteen bytes..."] * 3200}), path, row_group_size=100, use_dictionary=False)
    ranges = plan_ranges(source_file(path, "parquet"), Source(path="x"), 17_000)  # 20 bytes a row as Parquet stores it
    assert [(part.start, part.stop) for part in ranges] == [(0, 8), (8, 16), (16, 24), (24, 32)]


def test_a_giant_row_group_is_cut_into_a_few_slices_by_rows(tmp_path):
    path = tmp_path / "file.parquet"
    texts = [f"{i:0500}" for i in range(999)]
    pq.write_table(pa.table({"text": ["before", *texts]}), path, use_dictionary=False)
    source = Source(path="x")
    slices = slices_of(source_file(path, "parquet"), source, 1000)
    assert len(slices) == MAX_CUTS_OF_A_ROW_GROUP
    assert [part.ranges[0].rows for part in slices] == [(i * 125, (i + 1) * 125) for i in range(8)]
    assert read_slices(slices, source) == documents(["before", *texts])


@pytest.mark.parametrize(
    ("head", "name", "wanted", "expected"),
    [
        (b"\xff\xff\xff\xff\x10\0\0\0", "a.bin", "auto", "arrow"),
        (b'\xef\xbb\xbf \n{"text": "a"}', "a.unknown", "auto", "jsonl"),
        (b'{"text": "a"}', "a.txt", "auto", "text"),
        (b"text\na\n", "A.CSV", "auto", "csv"),
        (b"text\na\n", "a.tsv.zst", "auto", "csv"),
        (b"anything", "a", "text", "text"),
        (b"[not json]", "a.txt", "auto", "text"),
        (b"PARENTS", "a.txt", "auto", "text"),
    ],
)
def test_formats_are_told_by_content_then_setting_then_name(head, name, wanted, expected):
    assert detect_format(head, name, wanted) == expected


@pytest.mark.parametrize("slice_bytes", [60, 10_000])
@pytest.mark.parametrize(("kind", "rows"), [("parquet", 40), *((kind, 4) for kind in (*WRITERS, "text"))])
def test_an_error_names_the_row_of_the_file_not_of_the_slice(tmp_path, kind, rows, slice_bytes):
    """So do rows that count what was skipped."""
    texts = [f"document {i}" if i != 30 else "x" * 99 for i in range(40)]
    (tmp_path / "file").write_text("##".join(texts))
    format_, write = WRITERS.get(kind, ("text", None))
    if write:
        write(tmp_path / "file", pa.table({"text": texts}), rows)
    source = Source(path="x", document_separator="##" if kind == "text" else None)
    slices = slices_of(source_file(tmp_path / "file", format_), source, slice_bytes)
    assert (len(slices) > 1) == (slice_bytes == 60 and kind != "csv")
    with refusal(f"^file, {'line 31 .row 30.' if kind == 'jsonl' else 'row 30'}: the document has 99 bytes"):
        read_slices(slices, source, DocumentPolicy(max_bytes=20))
    found = read_slices(slices, source, DocumentPolicy(max_bytes=20, on_bad="skip"))
    assert [(document.text, document.row) for document in found] == [(texts[i], i) for i in range(40) if i != 30]


@pytest.mark.parametrize("slice_bytes", [1, 9, 15, 99])
@pytest.mark.parametrize(
    ("kind", "data", "rows"),
    [
        ("jsonl", '\n{"text":"a"}\n \r\n\n{"text":"b"}\n{"text":"c"}', [("a", 1), ("b", 4), ("c", 5)]),
        ("csv", 'id,text\n\n1,"a\n\nb"\n\n2,c\n3,"d ""e"""\n', [("a\n\nb", 0), ("c", 1), ('d "e"', 2)]),
    ],
)
def test_blank_lines_count_as_rows_of_json_and_not_of_csv(tmp_path, kind, data, rows, slice_bytes):
    path = tmp_path / f"file.{kind}"
    path.write_bytes(data.encode())
    assert [(d.text, d.row) for d in whole(path, kind, Source(path="x"), slice_bytes)] == rows


@pytest.mark.parametrize("kind", WRITERS)
def test_ids_are_those_of_their_digits_and_may_be_the_text(tmp_path, kind):
    """In files of whatever formats."""
    format_, write = WRITERS[kind]
    write(tmp_path / "file", pa.table({"text": ["a", "b"], "id": pa.array([7, -1], pa.int32())}), 1)
    for column, ids in (("text", ["a", "b"]), ("id", ["7", "-1"])):
        found = whole(tmp_path / "file", format_, Source(path="x", id_column=column), 1)
        assert found == documents(["a", "b"], ids)


@pytest.mark.parametrize(
    "type_", [pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_text_of_any_arrow_type_is_the_same_text(tmp_path, type_):
    texts = ["one", "", "zwei é", "one", "longer than twelve bytes, so not inline"]
    table = pa.table({"text": pa.array(texts).cast(type_)})
    write_arrow(tmp_path / "a", table, 2)
    assert whole(tmp_path / "a", "arrow", Source(path="x"), 10) == documents(texts)
    pq.write_table(table, tmp_path / "p", row_group_size=2)  # a dictionary each
    assert whole(tmp_path / "p", "parquet", Source(path="x"), 1000) == documents(texts)
