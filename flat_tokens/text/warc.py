"""WARC files, and WET, which is the same with text: a document a record, cut and read at records.

Conversion records are text as they are. Responses and resources that are HTML or plain text are documents by their payload,
decoded by its charset; steps make text of HTML. Other records are rows without a document.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from flat_tokens.extras import pa
from flat_tokens.text import limits
from flat_tokens.text.rows import Collected, Range, Rows, SourceFormat, TextFile, check_columns, too_long, utf8

BEGIN = b"WARC/"
LARGEST_HEAD = 1 << 20
"""Bytes of a record's headers, or of those of a response, at most."""
AFTER = b"\r\n\r\n"
"""The bytes between a record and the next, in most files."""

COLUMNS: Mapping[str, str] = {
    "id": "warc-record-id",
    "url": "warc-target-uri",
    "date": "warc-date",
    "type": "warc-type",
    "language": "warc-identified-content-language",
    "digest": "warc-block-digest",
    "refers_to": "warc-refers-to",
}
"""Columns, and the headers that have their values. A header is also a column by its own name, such as ``WARC-IP-Address``."""
OF_CONTENT = ("content_type", "charset", "status")
"""Columns of the content: its media type, the charset by which it was decoded, the status of a response."""
TEXT = "text"

HTML = ("text/html", "application/xhtml+xml")
TEXTUAL = (*HTML, "text/plain")
META = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([a-zA-Z0-9_:.-]+)""", re.IGNORECASE)
META_BYTES = 1024
"""Bytes of a page that may say its charset."""
AS_BROWSERS = {
    "iso-8859-1": "cp1252",
    "latin-1": "cp1252",
    "latin1": "cp1252",
    "us-ascii": "cp1252",
    "ascii": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc-kr": "cp949",
    "big5": "big5hkscs",
}
"""Charsets that are read as ones with more characters, as browsers do."""
CONTROLS = {0xDC00 + byte: byte for byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D)}
"""Bytes that Windows' charset does not have, which are controls there, as browsers read them."""
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))

Headers = dict[str, str]


class Record(NamedTuple):
    """A record: its number in the range, its headers by their names in lower case, and where its content begins and ends.
    ``following``: where the next record begins.
    """

    number: int
    headers: Headers
    start: int
    stop: int
    following: int


def _records(file: TextFile, opened: BinaryIO, start: int, stop: int) -> Iterator[Record]:
    """The records of a file from byte *start* to *stop*; *opened* may be moved between them. ValueError, with the place of the
    record, where one is damaged or cut off.
    """
    at, number = start, 0
    while at < stop:
        opened.seek(at)

        def refused(why: str, at: int = at) -> ValueError:
            return ValueError(f"{file.name}, the record at byte {at:,}: {why}. Fetch the file again, or leave the record out.")

        head = _head(opened, LARGEST_HEAD)
        if head is None:
            raise refused(f"its headers do not end, or have more than {LARGEST_HEAD:,} bytes")
        first, _, rest = head.partition(b"\n")
        if not first.startswith(BEGIN):
            raise refused(f"it begins with {first[:16]!r}, not with {BEGIN.decode()}")
        headers = _headers(rest)
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise refused(f"its Content-Length is {length!r}" if length else "it has no Content-Length")
        begin = at + len(head)
        end = begin + int(length)
        if end > file.size:
            raise refused(f"it has {int(length):,} bytes, and the file ends after {file.size - begin:,} of them")
        opened.seek(end)
        following = end
        while blank := opened.read(len(AFTER)):
            following += len(blank) - len(blank.lstrip(b"\r\n"))
            if blank.strip(b"\r\n"):
                break
        yield Record(number, headers, begin, end, following)
        at = following
        number += 1


def _head(opened: BinaryIO, most: int) -> bytes | None:
    """The lines up to the first empty one, and it; None where it does not come within *most* bytes."""
    lines, size = list[bytes](), 0
    while size < most:
        line = opened.readline(most - size)
        lines.append(line)
        size += len(line)
        if line in (b"\r\n", b"\n") and len(lines) > 1:
            return b"".join(lines)
        if not line.endswith(b"\n"):
            return None
    return None


def _headers(data: bytes) -> Headers:
    """Headers by their names in lower case. A line that begins with a space goes on with the one before it."""
    found, name = Headers(), ""
    for line in data.decode("utf-8", "replace").splitlines():
        if line[:1] in (" ", "\t") and name:
            found[name] += " " + line.strip()
            continue
        key, colon, value = line.partition(":")
        if colon:
            name = key.strip().lower()
            found[name] = value.strip()
    return found


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    collected, size, end, seen = Collected(file), 0, 0, 0
    with file.open() as opened:
        for record in _records(file, opened, part.start, part.stop):
            end, seen = record.number + 1, record.stop - part.start
            size += _add(collected, file, opened, record)
            if size >= (file.batch_bytes or limits.BATCH_BYTES) or len(collected) >= limits.BATCH_ROWS:
                yield collected.rows(end, seen)
                collected, size = Collected(file), 0
    if end:
        yield collected.rows(end, seen)


def _add(collected: Collected, file: TextFile, opened: BinaryIO, record: Record) -> int:
    """Add the document of a record, if it has one; the bytes of its text."""
    kind = record.headers.get("warc-type", "").lower()
    if kind not in ("conversion", "response", "resource"):
        return 0
    is_text = kind == "conversion"
    if record.stop - record.start > (file.max_bytes if is_text else limits.longest_line(file.max_bytes)):
        length = record.stop - record.start
        collected.faults.append((record.number, "too_long", too_long(length, file.max_bytes)))
        return 0
    opened.seek(record.start)
    data = opened.read(record.stop - record.start)
    if len(data) < record.stop - record.start:
        raise OSError(f"it ends within the record at byte {record.start:,}")
    content = {"content_type": _media_type(record.headers.get("content-type", ""))}
    if not is_text:
        try:
            page = _page(data, record.headers, kind, limits.longest_line(file.max_bytes))
        except ValueError as error:
            collected.faults.append((record.number, "malformed", f"the {kind} cannot be read ({error})"))
            return 0
        if page is None:
            return 0
        data, content = page
    values = {TEXT: data, **{name: None if of is None else of.encode() for name, of in content.items()}}

    def value(name: str) -> bytes | None:
        if name in values:
            return values[name]
        if name in OF_CONTENT:
            return None
        found = record.headers.get(COLUMNS.get(name, name.lower()))
        found = found.removeprefix("<").removesuffix(">") if found is not None and name in ("id", "refers_to") else found
        return None if found is None else found.encode()

    identity = value(file.id_column) if file.id_column else None
    collected.add(record.number, data, identity, [value(name) for name in file.kept_here])
    return len(data)


def _media_type(value: str) -> str | None:
    return value.partition(";")[0].strip().lower() or None


def _page(data: bytes, headers: Headers, kind: str, most: int) -> tuple[bytes, dict[str, str | None]] | None:
    """The text of a response or a resource in UTF-8, and the columns of its content; None where it is another kind of content, or
    an error of the server. ValueError where it is not what it says, or has more than *most* bytes.
    """
    status = None
    if kind == "response" and data[:5] == b"HTTP/":
        end = next((at + len(gap) for gap in (b"\r\n\r\n", b"\n\n") if 0 <= (at := data.find(gap)) < LARGEST_HEAD), -1)
        if end < 0:
            raise ValueError("its HTTP headers do not end")
        first, _, rest = data[:end].partition(b"\n")
        words = first.split(None, 2)
        status = words[1].decode("ascii", "replace") if len(words) > 1 else ""
        headers, data = _headers(rest), data[end:]
        if not status.startswith("2"):
            return None
        data = _decoded(data, headers, most)
    kind_of = _media_type(headers.get("content-type", ""))
    if kind_of not in TEXTUAL:
        return None
    charset = _charset(data, headers.get("content-type", ""), kind_of)
    text = data
    if charset != "utf-8":
        written = data.decode(charset, "surrogateescape")
        text = utf8(written.translate(CONTROLS) if charset == "cp1252" else written)
    text = text.removeprefix(codecs.BOM_UTF8)
    return text, {"content_type": kind_of, "charset": charset, "status": status}


def _decoded(data: bytes, headers: Headers, most: int) -> bytes:
    """The payload of a response without the encodings of its transfer."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        data = _unchunked(data)
    for name in reversed([name.strip().lower() for name in headers.get("content-encoding", "").split(",")]):
        if name in ("gzip", "x-gzip", "deflate"):
            data = _inflated(data, most)
        elif name not in ("", "identity"):
            raise ValueError(f"its Content-Encoding is {name!r}")
    return data


def _unchunked(data: bytes) -> bytes:
    """The payload of chunks. Archives often keep the header of a payload that they have put together: that is as it is."""
    parts, at = list[bytes](), 0
    while (end := data.find(b"\n", at, at + 64)) >= 0:
        try:
            size = int(data[at:end].split(b";")[0].strip(), 16)
        except ValueError:
            break
        if not 0 <= size <= len(data) - end - 1:
            break
        if size == 0:
            return b"".join(parts)
        parts.append(data[end + 1 : end + 1 + size])
        at = end + 1 + size
        at += 2 if data[at : at + 2] == b"\r\n" else 1
    if parts:
        raise ValueError(f"its chunks end within byte {at:,}")
    return data


def _inflated(data: bytes, most: int) -> bytes:
    """The payload of gzip or deflate. Archives often keep the header of a payload that they have unpacked: that is as it is."""
    if data[:2] != b"\x1f\x8b" and (len(data) < 2 or data[0] & 15 != 8 or int.from_bytes(data[:2], "big") % 31):
        return data
    parts, left, size = list[bytes](), data, 0
    while left:
        unpacker = zlib.decompressobj(32 + zlib.MAX_WBITS)
        try:
            parts.append(unpacker.decompress(left, most + 1 - size))
        except zlib.error as error:
            raise ValueError(f"its Content-Encoding is damaged: {error}") from error
        if (size := size + len(parts[-1])) > most:
            raise ValueError(f"unpacked it has more than {most:,} bytes")
        if not unpacker.eof:
            raise ValueError("its Content-Encoding is damaged: it is cut off")
        left = unpacker.unused_data.lstrip(b"\0")
    return b"".join(parts)


def _charset(data: bytes, content_type: str, kind: str) -> str:
    """The charset of a page: what its mark, its server or itself says, else UTF-8 where it is that, else that of Windows."""
    for mark, charset in MARKS:
        if data.startswith(mark):
            return charset
    said = re.search(r"""charset\s*=\s*["']?\s*([^\s"';,]+)""", content_type, re.IGNORECASE)
    in_page = META.search(data[:META_BYTES]) if kind in HTML else None
    for name in (said and said[1], in_page and in_page[1].decode("ascii", "replace")):
        if name and (known := _known(name)) is not None:
            return known
    try:
        data.decode()
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _known(name: str) -> str | None:
    """A charset of text by the name of a codec; None if it has no such name."""
    name = AS_BROWSERS.get(name.lower(), name.lower())
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    return codec.name if getattr(codec, "_is_text_encoding", False) and codec.name not in NOT_CHARSETS else None


NOT_CHARSETS = frozenset({"idna", "punycode", "raw_unicode_escape", "unicode_escape", "undefined", "mbcs", "oem", "utf-7"})
"""Codecs of Python that no page is written in, or that make other text of ASCII."""


def columns(file: TextFile) -> list[str]:
    return [TEXT, *COLUMNS, *OF_CONTENT, *(name for name in file.columns if name.lower().startswith("warc-"))]


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    if file.completion_column is not None or file.has_messages or file.text_column != TEXT:
        raise ValueError(f"{file.name} is WARC, which has no column {file.text_column!r}. Its text is in the column {TEXT!r}.")
    check_columns(file, pa.schema([(name, pa.string()) for name in dict.fromkeys(columns(file))]))
    start = end = 0
    with file.open() as opened:
        for record in _records(file, opened, 0, file.size):
            # A range ends before the record with which it would be too large.
            if end > start and record.stop - start > range_bytes:
                yield Range(start, end, None, end - start)
                start = end
            end = record.following
    if end > start:
        yield Range(start, end, None, end - start)


def rows_before(file: TextFile, part: Range) -> int:
    with file.open() as opened:
        return sum(1 for _ in _records(file, opened, 0, part.start))


WARC = SourceFormat((".warc", ".wet"), ranges, read, rows_before, columns=columns)
