"""CSV and TSV files, read strictly: a quote that is not closed is an error. A file is one range: no byte of it says whether
it is within quotes. Arrow's parser reads a block of rows at a time, as long as all quotes are where CSV wants them; from
the first block on where they do not, Python's reads row by row, and says what is wrong.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import BinaryIO, Literal

import numpy as np

from flat_tokens.annotations import Int64s
from flat_tokens.extras import pa
from flat_tokens.text import limits
from flat_tokens.text.plain import BOM
from flat_tokens.text.rows import CollectedRows, Range, Rows, SourceFormat, TextFile, check_names

csv.field_size_limit(1 << 40)  # whole rows are limited below
QUOTE = ord('"')
NONE = np.empty(0, np.int64)
DELIMITERS = ";\t|,:"
"""Delimiters that a file may well have."""
MAX_BLOCK = 1 << 30
"""Bytes that Arrow's parser takes at a time."""


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    limit = limits.longest_line(file.max_bytes)
    header = next(_rows(file, limit))
    assert not isinstance(header, str)  # or there were no range
    at = end = 0
    is_headed = False  # blank lines may fill blocks before the header
    with file.open() as opened:
        for block in _blocks(opened, limit, file.batch_bytes or limits.BATCH_BYTES, file.quotes != "none"):
            if block is None or (table := _parse(block if at else block.removeprefix(BOM), file, header)) is None:
                break
            first, is_headed = int(not is_headed), is_headed or len(table) > 0
            at += len(block)
            for start in range(first, len(table), limits.BATCH_ROWS):
                some = table.slice(start, limits.BATCH_ROWS)
                yield Rows.of_batch(file, some, end, at)
                end += len(some)
        else:
            return
    yield from _read_rows(file, header, limit, at if is_headed else 0, end)


def _blocks(opened: BinaryIO, limit: int, size: int, quoted: bool) -> Iterator[bytes | None]:
    """Blocks of whole rows of about *size* bytes, as far as quotes tell; None, at the end, if a row is longer than *limit*."""
    pending = b""
    while data := opened.read(size):
        pending += data
        if len(pending) > limit:
            bytes_ = np.frombuffer(pending, np.uint8)
            ends = _outside(np.flatnonzero(bytes_ == ord("\n")), np.flatnonzero(bytes_ == QUOTE) if quoted else NONE)
            if np.diff(ends, prepend=-1, append=len(pending) - 1).max() > limit:
                yield None
                return
        if end := _last_end(pending) if quoted else pending.rfind(b"\n") + 1:
            yield pending[:end]
            pending = pending[end:]
    if pending:
        yield pending


def _last_end(data: bytes) -> int:
    """The end of the last complete row in *data*, which begins with a row, as far as quotes show it; 0 if no row ends."""
    at = data.rfind(b"\n")
    is_quoted = np.count_nonzero(np.frombuffer(data, np.uint8, max(at, 0)) == QUOTE) % 2 == 1
    while at >= 0 and is_quoted:
        begin = data.rfind(b'"', 0, at)
        at = data.rfind(b"\n", 0, begin)
        is_quoted = data.count(b'"', max(at, 0), begin) % 2 == 1
    return at + 1


def _outside(places: Int64s, quotes: Int64s) -> Int64s:
    """The *places* that are not within quotes."""
    return places[np.searchsorted(quotes, places) % 2 == 0] if quotes.size else places


def _parse(block: bytes, file: TextFile, header: list[str]) -> pa.RecordBatch | None:
    """The rows of a block by Arrow's parser, which is not strict. None if Python's might read them otherwise, or not."""
    delimiter = _delimiter(file)
    padded = np.frombuffer(b"\n%b\n" % block, np.uint8)  # byte i of the block is i + 1 here
    quotes = np.flatnonzero(padded[1:-1] == QUOTE) if file.quotes != "none" else NONE
    begins, ends = (np.zeros(256, bool) for _ in range(2))
    begins[[ord(delimiter), ord("\n"), QUOTE]] = ends[[ord(delimiter), ord("\n"), ord("\r"), QUOTE]] = True
    if len(quotes) % 2 or not begins[padded[quotes[::2]]].all() or not ends[padded[quotes[1::2] + 2]].all():
        return None
    if block.startswith(BOM) or len(block) > MAX_BLOCK:
        return None
    returns = np.flatnonzero(padded[1:-1] == ord("\r"))
    if _outside(returns[padded[returns + 2] != ord("\n")], quotes).size:
        return None
    if len(quotes) and _may_merge_rows(file):
        ends = np.flatnonzero(padded[1:] == ord("\n"))  # with that behind the block
        bounds = np.concatenate([[0], _outside(ends, quotes) + 1])
        several = np.flatnonzero(np.diff(np.searchsorted(ends, bounds)) > 1) if len(bounds) <= len(ends) else NONE
        for i in several:
            _check_row(file, block[bounds[i] : bounds[i + 1]], len(header), delimiter.encode())
    wanted = {file.columns[k]: f"{header.index(name)}" for k, name in enumerate(file.columns)}
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(block),
            pa.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=[f"{i}" for i in range(len(header))]),
            pa.csv.ParseOptions(delimiter=delimiter, quote_char=file.quotes != "none" and '"', newlines_in_values=True),
            pa.csv.ConvertOptions(column_types=dict.fromkeys(wanted.values(), pa.binary()), include_columns=[*wanted.values()]),
        )
    except pa.ArrowException:
        return None
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in table.columns], [*wanted])


def _may_merge_rows(file: TextFile) -> bool:
    """Whether a quote may be text, so that rows are several: tab-separated text often has no quotes of CSV. Of a comma no file
    says, as texts have them, too.
    """
    return file.quotes is None and _delimiter(file) != ","


def _check_row(file: TextFile, row: bytes, columns: int, delimiter: bytes) -> None:
    """ValueError if a row has several lines, each of which would be a row by itself."""
    lines = row.removesuffix(b"\n").split(b"\n")
    if len(lines) > 1 and all(line.count(delimiter) == columns - 1 for line in lines):
        begin = lines[0][:40].decode("utf-8", "replace")
        raise ValueError(
            f"{file.name}: the row that begins {begin!r} goes over several lines by its quotes, and each of the lines has "
            f"{columns} columns. Set source.quotes to none if quotes are text like any other there, or to csv if the row is one."
        )


def _read_rows(file: TextFile, header: list[str], limit: int, start: int, end: int) -> Iterator[Rows]:
    """The rows from byte *start* on, of which the first is row *end*; at byte 0 the header is passed over."""
    found = _rows(file, limit, start, end if start else -1, len(header))
    if not start:
        next(found)
    text_at, id_at = [header.index(name) for name in file.text_columns], header.index(file.id_column) if file.id_column else None
    kept_at = [header.index(name) for name in file.kept_here]
    collected = CollectedRows(file)
    seen = start
    for row in found:
        if isinstance(row, str):
            collected.faults.append((end, "malformed", row))
        elif len(row) != len(header):
            collected.faults.append((end, "malformed", f"the row has {len(row)} columns instead of {len(header)}"))
        else:
            *texts, identity = (None if i is None else row[i].encode("utf-8", "surrogateescape") for i in (*text_at, id_at))
            parts = {name: pa.array([text], pa.large_binary()) for name, text in zip(file.text_columns, texts, strict=True)}
            kept = [row[i].encode("utf-8", "surrogateescape") for i in kept_at]
            collected.add(end, file.texts(parts)[0].as_py() if len(texts) > 1 else texts[0], identity, kept)
            collected.size += sum(len(row[i]) for i in text_at)
        end += 1
        seen += len(row) if isinstance(row, str) else sum(map(len, row)) + len(row)  # what stands between them too
        yield from collected.batch(end, seen)
    yield from collected.batch(end, seen, is_last=True)


def _delimiter(file: TextFile) -> str:
    if file.delimiter is not None:
        return file.delimiter
    return "\t" if ".tsv" in PurePath(file.name).suffixes else ","


def _rows(file: TextFile, limit: int, start: int = 0, number: int = -1, columns: int = 0) -> Iterator[list[str] | str]:
    """The rows of a CSV file, its header first, without blank lines, from byte *start* on, where row *number* begins. For a row
    that is not CSV, the error as a string. Bytes that are not UTF-8 become surrogates. ValueError if a quote is not closed, or
    not within *limit* characters; and, if the number of *columns* is given, if a row may well be several.
    """
    length, ended = 0, False
    held: list[str] = []  # the lines of a row

    def where() -> str:
        return f"row {number}" if number >= 0 else "header"

    def lines() -> Iterator[str]:
        nonlocal length, ended
        while line := text.readline(limit + 1):
            length += len(line)
            if length > limit:
                raise ValueError(
                    f"{file.name}, {where()}: goes on for more than {limit:,} characters. Close its quotes, or raise "
                    "documents.max_bytes."
                )
            held.append(line)
            yield line
        ended = True

    opened = file.open()
    opened.seek(start)
    with io.TextIOWrapper(opened, "utf-8" if start else "utf-8-sig", "surrogateescape", newline="") as text:
        quoting: Literal[0, 3] = csv.QUOTE_NONE if file.quotes == "none" else csv.QUOTE_MINIMAL
        rows = csv.reader(lines(), delimiter=_delimiter(file), strict=True, quoting=quoting)
        checked = columns > 0 and _may_merge_rows(file)
        while True:
            try:
                row: list[str] | str = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if ended:
                    raise ValueError(
                        f"{file.name}, {where()}: a quote is not closed before the file ends. Repair it, or set source.quotes to "
                        "none if quotes are text like any other there."
                    ) from error
                row = f"the row is not CSV ({error})"
            if checked and len(held) > 1:
                _check_row(file, "".join(held).encode("utf-8", "surrogateescape"), columns, _delimiter(file).encode())
            held.clear()
            if row:
                yield row
                number += 1
            length = 0


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    header = next(_rows(file, limits.LOOK_BYTES), [])
    try:
        if isinstance(header, str):
            raise ValueError(f"{file.name}: the first row, which names the columns, is damaged: {header}")
        check_names(file, header)
    except ValueError as error:
        with file.open() as opened:
            first = opened.readline(limits.LOOK_BYTES).removeprefix(BOM).decode("utf-8", "replace")
        if re.fullmatch('"?sep=.?"?[\r\n]*', first):
            raise ValueError(
                f"{file.name}: its first line, {first.strip()!r}, is for Excel; the columns' names come after it. Remove it: "
                f"tail -n +2 {PurePath(file.name).name}"
            ) from error
        # A delimiter by which the first row names all columns that are wanted.
        others = (one for one in DELIMITERS if one != _delimiter(file) and set(file.columns) <= set(_cells(first, one)))
        if (other := next(others, None)) is None:
            raise
        raise ValueError(f"{error} Its delimiter looks like {other!r}: set source.delimiter to that.") from error
    yield Range(0, file.size, None, file.size)


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of a line; none if it is not a line of such a file."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def columns(file: TextFile) -> list[str] | None:
    header = next(_rows(file, limits.LOOK_BYTES), [])
    return None if isinstance(header, str) else header


CSV = SourceFormat((".csv", ".tsv"), ranges, read, rows_before=lambda file, part: 0, columns=columns)
