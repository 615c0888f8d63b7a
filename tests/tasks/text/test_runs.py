"""Runs of small files: read together, they have the documents that each file has alone."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tasks.text.runs
from flat_tokens.columns import joined, merged
from flat_tokens.text import plain
from flat_tokens.text.formats import FileFormat
from tasks.config import DocumentPolicy, Source
from tasks.models import FileRange, Slice, SourceFile
from tasks.rows import ROW, fact, kept_of
from tasks.text.documents import Tally, read_documents
from tasks.text.files import plan_ranges, stamp
from tests.examples import examples
from tests.refusal import refusal
from tests.tasks.text.test_slices import WRITERS

PIECES = [b"a", b"\n", b"\r\n", b"\r", b"--", b"-", b"\n\n", plain.BOM, b"\xff", "é".encode(), b"0123456789"]
CONTENTS = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map(b"".join), min_size=2, max_size=9)
"""The bytes of some files."""
POLICIES = st.builds(
    DocumentPolicy,
    on_bad=st.sampled_from(["error", "skip", "replace"]),
    empty=st.sampled_from(["keep", "skip"]),
    max_bytes=st.sampled_from([3, 20, 1 << 20]),
)


class Found(NamedTuple):
    """What was read of some files: texts, keys, file and row of each document, kept columns, and the counts."""

    documents: list[tuple[str, int, int, int]]
    columns: pa.RecordBatch | None
    kinds: Any
    file_rows: list[int]
    counts: Counter[str]


def written(directory: Path, contents: list[bytes], kind: FileFormat, source: Source) -> list[FileRange]:
    """Files with these contents, each as its one range."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    ranges = []
    for number, content in enumerate(contents):
        path = directory / f"{number:03}.{kind}"
        path.write_bytes(content)
        ends = "crlf" if kind == "text" and b"\r\n" in content and source.document_separator else None
        facts = {"location": str(path), "stamp": stamp(str(path)), "line_ends": ends}
        file = SourceFile(0, path.name, len(content), f"{number:064x}", kind, **facts)
        ranges += plan_ranges(file, source, 1 << 30)
    return ranges


def read(slices: list[Slice], source: Source, policy: DocumentPolicy) -> Found:
    documents, columns, kinds, counts, file_rows, file = [], [], {}, Counter(), [], 0
    for slice_ in slices:
        tally, begun = Tally(), []
        for batch in read_documents(slice_, source, policy, tally):
            begun += zip(batch.texts.to_pylist(), batch.keys.tolist(), fact(batch.rows, ROW).tolist(), strict=True)
            if kept := kept_of(batch.rows):
                columns.append(kept)
        starts = np.cumsum([0, *tally.file_rows])
        for text, key, row in begun:
            number = int(np.searchsorted(starts, row, "right")) - 1
            documents.append((text, key, file + number, row - int(starts[number])))
        file += len(slice_.ranges)
        file_rows += tally.file_rows
        kinds = merged(kinds or tally.kinds.now, tally.kinds.now)
        counts.update({field: getattr(tally, field) for field in ("rows", "read", "written", "text_bytes")})
        counts.update(tally.skipped)
        counts.update({f"replaced {reason}": count for reason, count in tally.replaced.items()})
    return Found(documents, joined(columns) if columns else None, kinds, file_rows, +counts)


def outcome(slices: list[Slice], source: Source, policy: DocumentPolicy) -> Found | str:
    try:
        return read(slices, source, policy)
    except ValueError as error:
        return str(error)


def check_same(ranges: list[FileRange], source: Source, policy: DocumentPolicy, batch_bytes: int) -> None:
    """A run of files gives what each of them gives alone, or the same error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flat_tokens.text.limits.BATCH_BYTES", batch_bytes)
        patch.setattr(tasks.text.runs, "ENTRY_BYTES", 1)
        together = outcome([Slice(tuple(ranges))], source, policy)
        alone = outcome([Slice((part,)) for part in ranges], source, policy)
    assert together == alone


@examples(300)
@given(CONTENTS, POLICIES, st.sampled_from([None, "\n", "\n\n", "--", "\r\n", "a"]), st.sampled_from([1, 7, 30, 1 << 20]))
@example([b"a-", b"-b", b"---"], DocumentPolicy(), "--", 1 << 20)
def test_plain_text_together(tmp_path, contents, policy, separator, batch_bytes):
    source = Source(path="x", document_separator=separator)
    check_same(written(tmp_path / "in", contents, "text", source), source, policy, batch_bytes)


VALUES = st.sampled_from(["text", "", "é\u2028", None, 5, ["x"]])
LINES = st.one_of(
    st.fixed_dictionaries(
        {"text": VALUES},
        optional={"id": st.sampled_from(["one", 2, None, 1.5]), "n": st.sampled_from([None, 1, 2.5]), "m": st.just(7)},
    ).map(lambda line: json.dumps(line).encode()),
    st.sampled_from(
        [b"", b" ", b"{", b"[]", b'{"text": "\\ud800"}', b'{"text": "\xff"}', b'{"text": "a"}\r', b'{"text": "b"} null']
    ),
)
JSON_FILES = st.lists(
    st.tuples(st.sampled_from([b"", plain.BOM]), st.lists(LINES, min_size=1, max_size=4), st.sampled_from([b"", b"\n", b"\n\n"])),
    min_size=2,
    max_size=7,
).map(lambda files: [begin + b"\n".join(lines) + end or b"\n" for begin, lines, end in files])
SOURCES = st.sampled_from([{}, {"id_column": "id"}, {"keep_columns": ("m", "n")}, {"messages_column": "text"}])


@examples(300)
@given(JSON_FILES, POLICIES, SOURCES, st.sampled_from([1, 60, 1 << 20]))
@example([plain.BOM] * 2, DocumentPolicy(), {"keep_columns": ("m",)}, 60)
def test_json_lines_together(tmp_path, contents, policy, settings, batch_bytes):
    source = Source(path="x", **settings)
    try:
        ranges = written(tmp_path / "in", contents, "jsonl", source)
    except ValueError:  # a file without the column, which no build gets further with
        return
    check_same(ranges, source, policy, batch_bytes)


ROWS = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["one", "", "é", "two" * 9]), st.integers(0, 99), st.sampled_from([1.5, 2.0])), max_size=5
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.parametrize("kind", WRITERS)
@examples(60)
@given(files=ROWS, policy=POLICIES, settings=SOURCES.filter(lambda one: "messages_column" not in one), few=st.booleans())
def test_rows_together(
    tmp_path,
    kind,
    files,
    policy,
    settings,
    few,
):
    form, write = WRITERS[kind]
    source, contents = Source(path="x", **settings), []
    for number, rows in enumerate(files):
        texts, ids, n = zip(*rows, strict=True) if rows else ((), (), ())
        # Types differ from file to file, as those of files by several writers do.
        kinds = (pa.string(), pa.large_string()) if form in ("parquet", "arrow") else (pa.string(), pa.string())
        columns = {"text": pa.array(texts, kinds[number % 2]), "id": pa.array(ids, pa.int64()), "m": pa.array(ids, pa.int32())}
        write(tmp_path / "file", pa.table({**columns, "n": pa.array(n, pa.float64())}), 1 + number % 4)
        contents.append((tmp_path / "file").read_bytes())
    try:
        ranges = written(tmp_path / "in", contents, form, source)
    except ValueError:  # JSON lines without a line, CSV without a header
        return
    if len(ranges) > 1:
        check_same(ranges, source, policy, 20 if few else 1 << 20)


def test_a_bad_document_is_named_by_its_file_and_row(tmp_path):
    source = Source(path="x")
    good = b'{"text": "a"}\n\n{"text": "b"}\n'
    ranges = written(tmp_path / "in", [good, good, b'{"text": "c"}\n{"text": null}\n', good], "jsonl", source)
    with refusal(r"^002.jsonl, line 2 \(row 1\): the text is null \[null\]"):
        read([Slice(tuple(ranges))], source, DocumentPolicy())
    ranges = written(tmp_path / "in", [b"a", plain.BOM, b"\xff", b"\xfe"], "text", source)
    with refusal(r"^002.text, row 0: the text is not valid UTF-8"):
        read([Slice(tuple(ranges))], source, DocumentPolicy())


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"more"),
        lambda path: os.utime(path, (0, 0)),
        Path.unlink,
        replace_by_a_pipe,
        replace_by_a_link,
    ],
)
@pytest.mark.parametrize("kind", ["text", "jsonl", "csv"])
def test_a_file_that_changes_is_named(tmp_path, change, kind):
    source = Source(path="x", text_column="text")
    content = {"text": b"some text", "jsonl": b'{"text": "a"}', "csv": b"text\na\n"}[kind]
    ranges = written(tmp_path / "in", [content] * 3, kind, source)
    change(tmp_path / "in" / f"001.{kind}")
    with refusal(rf"001\.{kind} (changed while the build read it|is not a plain file)"):
        read([Slice(tuple(ranges))], source, DocumentPolicy())
