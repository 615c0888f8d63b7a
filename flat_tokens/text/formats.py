"""The source formats and the compressions of source files: a table of each, and how a file's own are found."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import lzma
import posixpath
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

import zstandard

from flat_tokens.text import limits, warc
from flat_tokens.text.arrow import ARROW
from flat_tokens.text.csv import CSV
from flat_tokens.text.foreign import FOREIGN, LZ4, SKIPPABLE, ZSTD, packed_as, refuse_foreign
from flat_tokens.text.jsonl import JSONL
from flat_tokens.text.parquet import PARQUET
from flat_tokens.text.plain import BOM, PLAIN
from flat_tokens.text.rows import Range, SourceFormat, TextFile
from flat_tokens.text.tar import TAR, has_header
from flat_tokens.text.warc import WARC

FileFormat = Literal["parquet", "jsonl", "text", "arrow", "csv", "warc", "tar"]

FORMATS: dict[FileFormat, SourceFormat] = {
    "parquet": PARQUET,
    "jsonl": JSONL,
    "text": PLAIN,
    "arrow": ARROW,
    "csv": CSV,
    "warc": WARC,
    "tar": TAR,
}

ENCRYPTED = b"PARE"
"""Parquet files whose footer is encrypted, too, begin so."""
HEAD_BYTES = 4096
"""Bytes of a file that tell its format, and its compression too."""

UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
BLOCK_BYTES = 4 << 20
PACKED_BYTES = 1 << 10
"""Compressed bytes unpacked at a time by zstd: few, for each may stand for 32 kB."""
STREAM_BYTES = 64 << 10
"""Compressed bytes read at a time for bz2 and xz, which unpack no more of them than they are asked for."""
ZSTD_HEADER_BYTES = 18
"""Bytes of the longest header of a frame."""
ZSTD_CUT = "the file ends within a compressed frame"


class _UnreadError(ValueError):
    """A compressed file that is sound and cannot be unpacked here. The message says why, and the next step."""


_long_windows = threading.Lock()
"""A process unpacks one file at a time that needs a window above limits.ANY_WINDOW."""


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


def _streams(new: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor], file: BinaryIO) -> Iterator[bytes]:
    """The unpacked bytes of consecutive streams, with zeros in between. Python's own files of bz2 and lzma end at the first byte
    that begins no stream, so that all streams after it would be missing silently.
    """
    data = file.read(STREAM_BYTES)
    while data:
        unpacker = new()
        while not unpacker.eof:
            if unpacker.needs_input and not (data := data or file.read(STREAM_BYTES)):
                raise EOFError("the file ends within a compressed stream")
            yield unpacker.decompress(data, BLOCK_BYTES)
            data = b""
        data = unpacker.unused_data.lstrip(b"\0")
        while not data and (block := file.read(STREAM_BYTES)):
            data = block.lstrip(b"\0")


def _unzstd(file: BinaryIO, max_window: int) -> Iterator[bytes]:
    """The unpacked blocks of consecutive zstd frames. A frame's window is at most *max_window* bytes."""
    data = file.read(PACKED_BYTES)
    while data:
        data += file.read(PACKED_BYTES) if len(data) < ZSTD_HEADER_BYTES else b""
        if re.match(SKIPPABLE, data):
            data = _skipped(file, data)
            continue
        window = _window_of(data, max_window)
        with _long_windows if window > limits.ANY_WINDOW else contextlib.nullcontext():
            decompressor = zstandard.ZstdDecompressor(max_window_size=max(window, limits.ANY_WINDOW)).decompressobj()
            while not decompressor.eof:
                if not data:
                    raise EOFError(ZSTD_CUT)
                try:
                    yield decompressor.decompress(data)
                except zstandard.ZstdError as error:
                    if "not enough memory" in str(error):
                        raise MemoryError(f"unpacking takes {window:,} bytes") from error
                    raise ValueError(str(error)) from error
                data = decompressor.unused_data if decompressor.eof else file.read(PACKED_BYTES)
        data = data or file.read(PACKED_BYTES)


def _skipped(file: BinaryIO, data: bytes) -> bytes:
    """The bytes after the skippable frame with which *data* begins. pzstd writes one before each frame."""
    left = 8 + int.from_bytes(data[4:8], "little")
    while len(data) < left:
        left -= len(data)
        if not (data := file.read(BLOCK_BYTES)):
            raise EOFError(ZSTD_CUT)
    return data[left:] or file.read(PACKED_BYTES)


def _window_of(data: bytes, max_window: int) -> int:
    """The window of the frame with which *data* begins: the bytes of text that its unpacking keeps in memory. _UnreadError if
    they are more than *max_window*, or if the frame needs a dictionary.
    """
    if re.match(LZ4, data):  # its skippable frames begin as those of zstd
        raise _UnreadError("is packed as .lz4, which is not read here. Unpack it first: lz4 -d")
    try:
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        if len(data) < ZSTD_HEADER_BYTES and ZSTD.startswith(data[: len(ZSTD)]):
            raise EOFError(ZSTD_CUT) from error
        raise ValueError(str(error)) from error
    if frame.dict_id:
        raise _UnreadError(f"is compressed with a dictionary (id {frame.dict_id}). Unpack it first: zstd -d -D DICTIONARY")
    window = int(frame.window_size)
    if window > (most := max(max_window, limits.ANY_WINDOW)):
        raise _UnreadError(
            f"is compressed with a window of {window:,} bytes, and unpacking it takes as much memory; {most:,} are allowed here. "
            f"Unpack it first: zstd -d --long={(window - 1).bit_length()}"
        )
    return window


Unpacker = Callable[[BinaryIO, int], Iterator[bytes]]

COMPRESSIONS: dict[str, Unpacker] = {
    ".gz": lambda file, _: _gunzip(file),
    ".zst": _unzstd,
    ".bz2": lambda file, _: _streams(bz2.BZ2Decompressor, file),
    ".xz": lambda file, _: _streams(lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), file),
}
"""Compressions by the ending of their files: the function that yields their unpacked bytes, given the largest window that may be
kept in memory.
"""

OTHER_ENDINGS = (".gzip", ".zstd", ".bzip2")
"""Other endings of files of COMPRESSIONS."""
PACKED = frozenset((*COMPRESSIONS, *OTHER_ENDINGS, *FOREIGN))


def compression_of(head: bytes, name: str = "") -> str | None:
    """The ending of the compression whose files begin like *head*; None if the file is not compressed. ValueError if *name*
    says that it is, and it begins neither so nor as text or a known format.
    """
    if (found := packed_as(head)) is not None:
        return found
    refuse_foreign(head, name)
    ending = posixpath.splitext(name)[1].lower()
    if ending in PACKED and head and not head.startswith(MAGICS) and not _is_text(head):
        remedy = f"Unpack it first: {FOREIGN[ending][1]} {PurePath(name).name}" if ending in FOREIGN else "Fetch it again"
        raise ValueError(f"{name} begins with {head[:8]!r}, as no {ending} file does that is read here. {remedy}, or rename it.")
    return None


MAGICS = tuple(magic for row in FORMATS.values() for magic in row.begins)


def _is_text(head: bytes) -> bool:
    """Whether bytes are text in UTF-8, as in a file that was unpacked and kept its name."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head, len(head) < HEAD_BYTES)  # else it may end within a character
    except UnicodeDecodeError:
        return False
    return re.search("[\0-\x08\x0e-\x1f]", text) is None


def unpacked(
    file: BinaryIO,
    ending: str,
    name: str,
    max_expansion: int = limits.MAX_EXPANSION,
    max_window: int = limits.LONGEST_WINDOW,
) -> Iterator[bytes]:
    """The unpacked bytes of a compressed file, in blocks. ValueError, with *name* and the place, if it is damaged, if its
    bytes so far become more than *max_expansion* times as many, or if unpacking keeps more than *max_window* bytes in memory.
    """
    size = 0
    try:
        for block in COMPRESSIONS[ending](file, max_window):
            size += len(block)
            if size > max(limits.ANY_EXPANSION, max_expansion * file.tell()):
                break
            yield block
    except _UnreadError as error:
        raise ValueError(f"{name} {error} {PurePath(name).name}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the file
        raise ValueError(
            f"{name} is damaged at byte {file.tell()} or before: {error}. Fetch it again, or pack it again."
        ) from error
    limits.check_expansion(size, file.tell(), max_expansion, name)


def detect_format(head: bytes, name: str, wanted: FileFormat | Literal["auto"] = "auto") -> FileFormat:
    """The format of a file that begins with *head*: from its content, else the *wanted* one, else from its name. ValueError if
    these contradict each other, or if none of them decides.
    """
    if not head:
        raise ValueError(f"{name} is empty (0 bytes). Remove it, or write it again.")
    refuse_foreign(head, name)
    if (twice := compression_of(head)) is not None:
        raise ValueError(f"{name} is compressed twice: its unpacked bytes are {twice} again. Unpack it once before.")
    claimed = named_format(name) if wanted == "auto" else wanted
    is_text = head.startswith((ENCRYPTED, *MAGICS)) and claimed in (None, "text", "csv") and _is_text(head)
    begins = b"" if is_text else head  # a text may begin with PARENTS
    if begins.startswith(ENCRYPTED):
        raise ValueError(f"{name} is encrypted Parquet, for which there are no keys here. Write it without encryption first.")
    by_archive: FileFormat | None = "tar" if head.startswith(b"ustar", 257) else None
    if found := next((kind for kind, row in FORMATS.items() if begins.startswith(row.begins)), by_archive):
        if wanted not in ("auto", found):
            raise ValueError(f"{name} is {found}, not {wanted}. Leave source.format out, or repair the file.")
        return found
    if claimed == "tar" and not has_header(head):
        raise ValueError(f"{name} is not an archive: it begins with {head[:8]!r}. Fetch it again, or rename it.")
    if claimed and FORMATS[claimed].begins:
        raise ValueError(f"{name} is not {claimed}: it begins with {head[:8]!r}. Set source.format to what it is, or repair it.")
    if head.startswith((*UTF_32, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found_code = "UTF-32" if head.startswith(UTF_32) else "UTF-16"
        raise ValueError(
            f"{name} is {found_code}, not UTF-8. Convert it first: iconv -f {found_code} -t UTF-8 {PurePath(name).name}"
        )
    text = head.removeprefix(BOM).lstrip()
    if claimed == "jsonl" and text[:1] == b"[":
        raise ValueError(
            f"{name} is one JSON array, not one JSON object a line. Convert it first: jq -c '.[]' {PurePath(name).name}"
        )
    if claimed == "jsonl" and text.split(b"\n")[0].rstrip() == b"{":
        raise ValueError(
            f"{name} has JSON objects of several lines, not one a line. Convert it first: jq -c . {PurePath(name).name}"
        )
    if claimed:
        return claimed
    if text[:1] == b"{":
        return "jsonl"
    if head.startswith(warc.BEGIN):
        return "warc"
    *most, last = FORMATS
    raise ValueError(
        f"cannot tell the format of {name}, which begins with {head[:8]!r}. Set source.format if it is {', '.join(most)} or "
        f"{last}; convert it if it is something else."
    )


def named_format(name: str) -> FileFormat | None:
    """The format that a file's name says, whatever it is compressed by."""
    stem, ending = posixpath.splitext(name)
    if ending.lower() in PACKED:
        ending = posixpath.splitext(stem)[1]
    return _FORMATS_BY_ENDING.get(ending.lower())


_FORMATS_BY_ENDING = {ending: kind for kind, row in FORMATS.items() for ending in row.endings}


def holding(kind: FileFormat, file: TextFile, rows: Sequence[int]) -> Iterator[tuple[Range, int]]:
    """Checked ranges of a file that hold all of *rows* that it has, each with the row at which it begins."""
    if (by_rows := FORMATS[kind].holding) is not None:
        yield from by_rows(file, rows)
    else:
        yield from ((part, 0) for part in FORMATS[kind].ranges(file, max(file.size, 1) << 32))
