"""CSV and TSV files, read strictly: a quote that is not closed is an error. A file is one range: no byte of it tells whether
it stands within quotes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import PurePath

from flat_tokens.text import limits
from flat_tokens.text.arrow_library import pa
from flat_tokens.text.rows import Collected, Range, Rows, SourceFormat, TextFile, check_columns

csv.field_size_limit(1 << 40)  # whole rows are limited below


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    found = _rows(file, limits.longest_line(file.max_bytes))
    header = next(found)
    text_at, id_at = header.index(file.text_column), header.index(file.id_column) if file.id_column else None
    collected = Collected(file)
    size = end = seen = 0
    for row in found:
        if isinstance(row, str):
            collected.faults.append((end, "malformed", row))
        elif len(row) != len(header):
            collected.faults.append((end, "malformed", f"the row has {len(row)} columns instead of {len(header)}"))
        else:
            values = [None if i is None else row[i].encode("utf-8", "surrogateescape") for i in (text_at, id_at)]
            collected.add(end, values[0], values[1])
            size += len(row[text_at])
        end += 1
        seen += len(row) if isinstance(row, str) else sum(map(len, row)) + len(row)  # what stands between them too
        if size >= limits.BATCH_BYTES or len(collected) >= limits.BATCH_ROWS:
            yield collected.rows(end, seen)
            collected, size = Collected(file), 0
    if len(collected):
        yield collected.rows(end, seen)


def _rows(file: TextFile, limit: int) -> Iterator[list[str] | str]:
    """The rows of a CSV file, its header first, without blank lines; for a row that is not CSV, the error as a string.
    Bytes that are not UTF-8 become surrogates. ValueError where a quote is not closed, or not within *limit* characters.
    """
    length, number, ended = 0, -1, False

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
            yield line
        ended = True

    with io.TextIOWrapper(file.open(), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.reader(lines(), delimiter="\t" if ".tsv" in PurePath(file.name).suffixes else ",", strict=True)
        while True:
            try:
                row: list[str] | str = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if ended:
                    raise ValueError(f"{file.name}, {where()}: a quote is not closed before the file ends. Mend it.") from error
                row = f"the row is not CSV ({error})"
            if row:
                yield row
                number += 1
            length = 0


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    header = next(_rows(file, limits.LOOK_BYTES), [])
    if isinstance(header, str):
        raise ValueError(f"{file.name}: the first row, which names the columns, is damaged: {header}")
    check_columns(file, pa.schema([(name.encode(errors="replace"), pa.string()) for name in header]))
    yield Range(0, file.size, None, file.size)


def rows_before(file: TextFile, part: Range) -> int:
    return 0


CSV = SourceFormat((".csv", ".tsv"), ranges, read, rows_before)
