"""The source formats: one table, and how a file's format is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Literal

from flat_tokens.text.arrow import ARROW
from flat_tokens.text.blocks import BOM
from flat_tokens.text.compression import COMPRESSIONS
from flat_tokens.text.csv import CSV
from flat_tokens.text.jsonl import JSONL
from flat_tokens.text.parquet import PARQUET
from flat_tokens.text.plain import PLAIN
from flat_tokens.text.rows import Range, SourceFormat, TextFile

FileFormat = Literal["parquet", "jsonl", "text", "arrow", "csv"]

FORMATS: dict[FileFormat, SourceFormat] = {"parquet": PARQUET, "jsonl": JSONL, "text": PLAIN, "arrow": ARROW, "csv": CSV}

HEAD_BYTES = 4096
"""Bytes of a file that tell its format, and its compression too."""


def detect_format(head: bytes, name: str, wanted: FileFormat | Literal["auto"] = "auto") -> FileFormat:
    """The format of a file that begins with *head*: what its content shows, else what is *wanted*, else what its name says.

    ValueError where these contradict each other, or where none of them tells.
    """
    if not head:
        raise ValueError(f"{name} is empty (0 bytes). Remove it, or write it again.")
    bare = PurePath(name)
    ending = (bare.with_suffix("") if bare.suffix in COMPRESSIONS else bare).suffix.lower()
    found = next((kind for kind, row in FORMATS.items() if head.startswith(row.begins)), None)
    named = next((kind for kind, row in FORMATS.items() if ending in row.endings), None)
    claimed = named if wanted == "auto" else wanted
    if found:
        if wanted not in ("auto", found):
            raise ValueError(f"{name} is {found}, not {wanted}. Leave source.format out, or mend the file.")
        return found
    if claimed and FORMATS[claimed].begins:
        raise ValueError(f"{name} is not {claimed}: it begins with {head[:8]!r}. Set source.format to what it is, or mend it.")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{name} is UTF-16, not UTF-8. Convert it first: iconv -f UTF-16 -t UTF-8 {bare.name}")
    text = head.removeprefix(BOM).lstrip()
    if claimed == "jsonl" and text[:1] == b"[":
        raise ValueError(f"{name} is one JSON array, not one JSON object a line. Convert it first: jq -c '.[]' {bare.name}")
    if claimed == "jsonl" and text.split(b"\n")[0].rstrip() == b"{":
        raise ValueError(f"{name} has JSON objects of several lines, not one a line. Convert it first: jq -c . {bare.name}")
    if claimed:
        return claimed
    if text[:1] == b"{":
        return "jsonl"
    *most, last = FORMATS
    raise ValueError(
        f"cannot tell the format of {name}, which begins with {head[:8]!r}. Set source.format if it is {', '.join(most)} or "
        f"{last}; convert it if it is something else."
    )


def holding(kind: FileFormat, file: TextFile, rows: Sequence[int]) -> Iterator[tuple[Range, int]]:
    """Checked ranges of a file that hold all of *rows* that it has, each with the row at which it begins."""
    if (by_rows := FORMATS[kind].holding) is not None:
        yield from by_rows(file, rows)
    else:
        yield from ((part, 0) for part in FORMATS[kind].ranges(file, max(file.size, 1) << 32))
