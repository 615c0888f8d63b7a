"""CSV by blocks and row by row: one result, one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text import csv, limits
from flat_tokens.text.csv import CSV
from flat_tokens.text.rows import Range, TextFile
from tests.examples import examples


def rows_of(path: Path, columns: tuple[str, str | None], max_bytes: int = 1 << 31) -> tuple[list[Any], str]:
    """All rows, texts and ids as bytes, with the faults; and the error that ended it."""
    file = TextFile(str(path), path.name, path.stat().st_size, *columns, max_bytes=max_bytes)
    found: list[Any] = []
    end = 0
    try:
        for rows in CSV.read(file, Range(0, file.size, None, file.size)):
            ids = [None] * len(rows.texts) if rows.ids is None else rows.ids.to_pylist()
            found += zip(rows.rows.tolist(), rows.texts.to_pylist(), ids, strict=True)
            found += rows.faults
            assert rows.end >= end
            end = rows.end
    except ValueError as error:
        return sorted(found, key=lambda row: row[0]), str(error)
    return [*sorted(found, key=lambda row: row[0]), end], ""


LINE = st.text(st.sampled_from('aé",\n\r\t\0 \ufeff'), max_size=8)
CELL = st.text(st.sampled_from('aé",\n\r\t\0 \ufeff'), max_size=6).map(lambda text: '"' + text.replace('"', '""') + '"')
ROW = st.one_of(LINE, LINE, st.tuples(CELL, CELL).map(",".join), st.tuples(CELL, CELL, CELL).map("\t".join))


@given(
    rows=st.lists(st.tuples(ROW, st.sampled_from(["\n", "\r\n", "\n\n", "\r", ""])), max_size=12),
    head=st.sampled_from(["id,text\n", '\ufeff"id","text"\r\n', "\n\ntext\n", "id\ttext\tmore\n"]),
    tab=st.booleans(),
    block=st.integers(1, 40),
    limit=st.sampled_from([5, 20, 1 << 20]),
)
@example([('"a', ""), ('b""', "\n"), ('"', "\n")], "id,text\n", False, 7, 20)
@examples(80)
def test_blocks_give_what_rows_give(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], head: str, tab: bool, block: int, limit: int
) -> None:
    """With any mixture of quotes, ends of lines, blank lines and rows too long, at every size of a block."""
    path = tmp_path_factory.mktemp("csv") / ("a.tsv" if tab else "a.csv")
    path.write_bytes((head + "".join(row + end for row, end in rows)).encode() + b"\xff,\xfe\n" * (block % 2))
    columns = ("text", "id" if "id" in head else None)
    if ("\t" in head) != tab and head != "\n\ntext\n":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LONGEST_LINE", limit + 10)
        patch.setattr(limits, "BATCH_BYTES", block)
        by_blocks = rows_of(path, columns, 1)
        patch.setattr(csv, "_blocks", lambda opened, limit, size: iter([None]))
        by_rows = rows_of(path, columns, 1)
    if not by_rows[1]:
        assert by_blocks == by_rows
    else:
        assert by_blocks[1] == by_rows[1]
        assert by_blocks[0][: len(by_rows[0])] == by_rows[0] or by_rows[0][: len(by_blocks[0])] == by_blocks[0]


def test_sound_csv_is_never_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n" + '1,"a ""b"", c\nd"\n2,e\n' * 100, "utf-8")
    monkeypatch.setattr(csv, "_read_rows", None)
    monkeypatch.setattr(limits, "BATCH_BYTES", 100)
    monkeypatch.setattr(limits, "BATCH_ROWS", 3)
    found, error = rows_of(path, ("text", "id"))
    assert (len(found), error) == (201, "")
    assert found[:2] == [(0, b'a "b", c\nd', b"1"), (1, b"e", b"2")]
