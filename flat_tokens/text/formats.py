"""The source formats and the compressions of source files: a table of each, and how a file's own are told."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

import zstandard

from flat_tokens.text import limits
from flat_tokens.text.arrow import ARROW
from flat_tokens.text.csv import CSV
from flat_tokens.text.jsonl import JSONL
from flat_tokens.text.parquet import PARQUET
from flat_tokens.text.plain import BOM, PLAIN
from flat_tokens.text.rows import Range, SourceFormat, TextFile

FileFormat = Literal["parquet", "jsonl", "text", "arrow", "csv"]

FORMATS: dict[FileFormat, SourceFormat] = {"parquet": PARQUET, "jsonl": JSONL, "text": PLAIN, "arrow": ARROW, "csv": CSV}

HEAD_BYTES = 4096
"""Bytes of a file that tell its format, and its compression too."""

BLOCK_BYTES = 4 << 20
PACKED_BYTES = 1 << 10
"""Compressed bytes unpacked at a time by zstd: few, for each may stand for 32 kB."""


def _read(opener: Callable[[BinaryIO], Any], file: BinaryIO) -> Iterator[bytes]:
    with opener(file) as unpacked:
        yield from iter(lambda: unpacked.read(BLOCK_BYTES), b"")


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    try:
        from isal import igzip, igzip_lib  # it reads what gzip reads, three times as fast; not everybody has it
    except ModuleNotFoundError:
        yield from _read(gzip.open, file)
        return
    try:
        yield from _read(igzip.open, file)
    except igzip_lib.IsalError as error:  # type: ignore[misc]  # its stub says what it is an instance of
        raise ValueError(str(error)) from error


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    decompressor: Any = None
    while data := file.read(PACKED_BYTES):
        while data:
            if decompressor is None:
                decompressor = zstandard.ZstdDecompressor().decompressobj()
            try:
                yield decompressor.decompress(data)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            data = b""
            if decompressor.eof:
                data, decompressor = decompressor.unused_data, None
    if decompressor is not None:
        raise EOFError("the file ends within a compressed frame")


COMPRESSIONS: dict[str, tuple[bytes, Callable[[BinaryIO], Iterator[bytes]]]] = {
    ".gz": (rb"\x1f\x8b", _gunzip),
    ".zst": (rb"\x28\xb5\x2f\xfd", _unzstd),
    ".bz2": (rb"BZh[1-9]1AY&SY", partial(_read, bz2.open)),
    ".xz": (rb"\xfd7zXZ\x00", partial(_read, lzma.open)),
}
"""Compressions by the ending of their files: a pattern of how these begin, and the function that yields their unpacked bytes."""


def compression_of(head: bytes) -> str | None:
    """The ending of the compression whose files begin like *head*; None where the file is not compressed."""
    return next((ending for ending, (begins, _) in COMPRESSIONS.items() if re.match(begins, head)), None)


def unpacked(file: BinaryIO, ending: str, name: str, max_expansion: int = limits.MAX_EXPANSION) -> Iterator[bytes]:
    """The unpacked bytes of a compressed file, in blocks. ValueError, with *name* and the place, where it is damaged or its bytes
    so far become more than *max_expansion* times as many.
    """
    size = 0
    try:
        for block in COMPRESSIONS[ending][1](file):
            size += len(block)
            if size > max(limits.ANY_EXPANSION, max_expansion * file.tell()):
                break
            yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the file
        raise ValueError(f"{name} is damaged at byte {file.tell()} or before: {error}") from error
    limits.check_expansion(size, file.tell(), max_expansion, name)


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
