"""CSV by blocks and row by row: one result, one error."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text.csv import CSV
from flat_tokens.text.rows import Range, TextFile
from tests.examples import examples
from tests.refusal import refusal


def rows_of(path: Path, columns: tuple[str, str | None], max_bytes: int = 1 << 31, **settings: Any) -> tuple[list[Any], str]:
    """All rows, texts and ids as bytes, with the faults; and the error that ended it."""
    file = TextFile(str(path), path.name, path.stat().st_size, *columns, max_bytes=max_bytes, **settings)
    found = []
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
    quotes=st.sampled_from([None, "csv", "none"]),
)
@example([('"a', ""), ('b""', "\n"), ('"', "\n")], "id,text\n", False, 7, 20, None)
@example([('1\t"a\t', "\n"), ('1\tb"\t', "\n"), ("c\td\te", "\n")], "id\ttext\tmore\n", True, 40, 1 << 20, None)
@examples(120)
def test_blocks_give_what_rows_give(
    tmp_path_factory,
    rows,
    head,
    tab,
    block,
    limit,
    quotes,
):
    """With any mixture of quotes, ends of lines, blank lines and rows too long, at every size of a block."""
    path = tmp_path_factory.mktemp("csv") / ("a.tsv" if tab else "a.csv")
    path.write_bytes((head + "".join(row + end for row, end in rows)).encode() + b"\xff,\xfe\n" * (block % 2))
    columns = ("text", "id" if "id" in head else None)
    if ("\t" in head) != tab and head != "\n\ntext\n":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flat_tokens.text.limits.LONGEST_LINE", limit + 10)
        patch.setattr("flat_tokens.text.limits.BATCH_BYTES", block)
        by_blocks = rows_of(path, columns, 1, quotes=quotes)
        patch.setattr("flat_tokens.text.csv._blocks", lambda *_: iter([None]))
        by_rows = rows_of(path, columns, 1, quotes=quotes)
    if not by_rows[1]:
        assert by_blocks == by_rows
    else:
        assert by_blocks[1] == by_rows[1]
        assert by_blocks[0][: len(by_rows[0])] == by_rows[0] or by_rows[0][: len(by_blocks[0])] == by_blocks[0]


def test_sound_csv_is_never_read_row_by_row(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n" + '1,"a ""b"", c\nd"\n2,e\n' * 100, "utf-8")
    monkeypatch.setattr("flat_tokens.text.csv._read_rows", None)
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", 100)
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_ROWS", 3)
    found, error = rows_of(path, ("text", "id"))
    assert (len(found), error) == (201, "")
    assert found[:2] == [(0, b'a "b", c\nd', b"1"), (1, b"e", b"2")]


BARE = 'id\ttext\n0\ta\n1\t"I came,\n2\tI saw, I conquered."\n3\tend\n'
BARE_ROWS = [(0, b"a", b"0"), (1, b'"I came,', b"1"), (2, b'I saw, I conquered."', b"2"), (3, b"end", b"3")]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("name", "delimiter"), [("a.tsv", None), ("a.csv", ";"), ("a.txt", "|")])
def test_rows_are_not_merged_by_bare_quotes(tmp_path, monkeypatch, name, delimiter, end, by_rows):
    """Whether the quotes are text is not to be seen: a setting says it."""
    path = tmp_path / name
    path.write_bytes(BARE.replace("\t", delimiter or "\t").replace("\n", end).encode())
    if by_rows:
        monkeypatch.setattr("flat_tokens.text.csv._blocks", lambda *_: iter([None]))
    told = {"delimiter": delimiter}
    _, error = rows_of(path, ("text", "id"), **told)
    assert error.startswith(f"{name}: the row that begins '1")
    assert "goes over several lines by its quotes, and each of the lines has 2 columns. Set source.quotes to none if" in error
    assert rows_of(path, ("text", "id"), quotes="none", **told) == ([*BARE_ROWS, 4], "")
    merged = f"I came,{end}2{delimiter or chr(9)}I saw, I conquered.".encode()
    assert rows_of(path, ("text", "id"), quotes="csv", **told) == ([BARE_ROWS[0], (1, merged, b"1"), (2, b"end", b"3"), 3], "")


@pytest.mark.parametrize(("name", "delimiter", "text"), [("a.tsv", "\t", "one\ntwo\nthree"), ("a.csv", ",", "one\ntwo,\nthree")])
def test_text_of_several_lines_is_one_row(tmp_path, name, delimiter, text):
    """In tab-separated text too, where its lines are no rows; with commas, which texts have, always."""
    (tmp_path / name).write_text(f'id{delimiter}text\n1{delimiter}"{text}"\n2{delimiter}"in quotes"\n')
    assert rows_of(tmp_path / name, ("text", "id")) == ([(0, text.encode(), b"1"), (1, b"in quotes", b"2"), 2], "")


@pytest.mark.parametrize(("delimiter", "shown"), [(";", "';'"), ("\t", r"'\t'"), ("|", "'|'")])
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_file_with_another_delimiter_is_told_by_its_header(tmp_path, delimiter, shown, quote):
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{quote}{a}{quote}{delimiter}{quote}{b}{quote}\n" for a, b in (("id", "text"), ("1", "one,two"))))
    file = TextFile(str(path), path.name, path.stat().st_size, "text", "id")
    with refusal(rf"^a.csv.*Its delimiter looks like {re.escape(shown)}: set source.delimiter to that"):
        list(CSV.ranges(file, 1 << 20))
    assert rows_of(path, ("text", "id"), delimiter=delimiter) == ([(0, b"one,two", b"1"), 1], "")


EXCEL = r"a.csv: its first line, .*sep=.* is for Excel.* Remove it: tail -n \+2 a.csv"


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.csv", "sep=;\nid;text\n1;one\n", {"delimiter": ";"}, EXCEL),
        ("a.csv", '\ufeff"sep=\t"\r\nid;text\n1;one\n', {"delimiter": ";"}, EXCEL),
        ("a.tsv", "id,text\n1,one\n", {}, r"Its delimiter looks like ',': set source\.delimiter"),
    ],
)
def test_a_first_line_that_is_no_header_is_named(tmp_path, name, text, options, words):
    path = tmp_path / name
    path.write_text(text, newline="")
    with refusal(words):
        list(CSV.ranges(TextFile(str(path), name, path.stat().st_size, "text", **options), 1 << 20))
