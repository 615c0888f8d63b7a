"""WARC files, and WET, which is the same with text: a document a record, cut and read at records. fastwarc finds the records,
resiliparse what a page says of its charset.

Conversion records are text as they are. Responses and resources that are HTML or plain text are documents by their payload,
decoded by its charset; steps make text of HTML. Other records are rows without a document.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from flat_tokens.extras import LazyModule, pa
from flat_tokens.text import limits
from flat_tokens.text.rows import BadRowError, CollectedRows, Range, Rows, SourceFormat, TextFile, check_names, too_long, utf8

if TYPE_CHECKING:
    from fastwarc import warc as fastwarc
    from resiliparse.parse import encoding
else:
    fastwarc = LazyModule("fastwarc.warc", "reading WARC")
    encoding = LazyModule("resiliparse.parse.encoding", "reading pages of WARC")

BEGIN = b"WARC/"
HEADERS, HEADERS_BYTES = 100, 64 << 10
"""Headers of a record or a response, and bytes of those of a record, at most: of a response fastwarc parses half as many."""
ENCODINGS = 4
"""Encodings of a payload, one within another, at most."""

COLUMNS: Mapping[str, str] = {
    "id": "WARC-Record-ID",
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "type": "WARC-Type",
    "language": "WARC-Identified-Content-Language",
    "digest": "WARC-Block-Digest",
    "refers_to": "WARC-Refers-To",
}
"""Columns, and the headers that have their values. A header is also a column by its own name, such as ``WARC-IP-Address``."""
OF_CONTENT = ("content_type", "charset", "status")
"""Columns of the content: its media type, the charset by which it was decoded, the status of a response."""
TEXT = "text"
KINDS = ("conversion", "response", "resource", "continuation")
"""Records that are documents, or parts of them."""

HTML = ("text/html", "application/xhtml+xml")
TEXTUAL = (*HTML, "text/plain")
META_BYTES = 1024
"""Bytes of a page that may say its charset."""
SUPERSETS = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs", "iso8859-11": "cp874"}
"""Charsets that browsers read as ones with more characters, by the names of Python's codecs."""
CONTROLS = {0xDC00 + byte: byte for byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D)}
"""Bytes that Windows' charset does not have, which are controls there, as browsers read them."""
MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    *((begin, "utf-16-le") for begin in (b"\xff\xfe", b"<\0?\0x\0")),
    *((begin, "utf-16-be") for begin in (b"\xfe\xff", b"\0<\0?\0x")),
)
XML = re.compile(rb"""<\?xml\s[^>]*?\sencoding\s*=\s*["']([\w.:-]+)["']""")

CODECS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "gzip", "br": "brotli", "zstd": "zstd"}
"""Arrow's codecs by HTTP's encodings. The codec for gzip also reads zlib's format, which is that of deflate."""
INFLATED_BYTES = 4096
"""Bytes that are inflated at a time: few, for each may stand for 1 kB."""
UNPRINTABLE = re.compile(rb"[\0-\x08\x0e-\x1f]")


class Record(NamedTuple):
    """A record, with its number in the range, its headers, and where it begins. ``length``: of its content. ``kind``: its
    WARC-Type, in small letters.
    """

    number: int
    start: int
    length: int
    kind: str
    headers: fastwarc.HeaderMap
    content: fastwarc.WarcRecordPayloadReader | BinaryIO


def _records(file: TextFile, start: int, stop: int) -> Iterator[Record]:
    """The records of a file that begin from byte *start* to *stop*. The content of one can be read until the next one is asked
    for. ValueError, with the place of the record, if one is damaged or cut off.
    """
    place = f"the record at byte {start:,}"

    def refused(why: object) -> ValueError:
        return ValueError(f"{file.name}, {place}: {why}. Fetch the file again, or leave the record out.")

    with file.open() as opened:
        opened.seek(start)
        options: dict[str, Any] = {"parse_http": False, "max_header_len": HEADERS_BYTES, "stream_detect": False}
        records = fastwarc.ArchiveIterator(opened, **options)
        for number in itertools.count():
            try:
                record = next(records, None)
            except OSError as error:
                if error.errno is not None:
                    raise  # the disk, not the file
                raise refused(error) from error
            if record is None or record.stream_pos >= stop:
                return
            place = f"the record at byte {record.stream_pos:,}"
            said, length, begin = record.headers.get("Content-Length") or "", record.content_length, 0
            if len(record.headers) > HEADERS:
                raise refused(f"it has {len(record.headers):,} headers, and {HEADERS} are read at most")
            kind = record.headers.get("WARC-Type") or ""
            if "\nWARC/" in kind:
                raise refused("its headers end in a line feed alone, so that the next record looks like one of them")
            if said != f"{length}":  # fastwarc knows none by a name in small letters
                if not re.fullmatch("[0-9]{1,19}", said):
                    raise refused(f"its Content-Length is {said[:40]!r}" if said else "it has no Content-Length")
                opened.seek(record.stream_pos)
                begin = record.stream_pos + opened.read(2 * HEADERS_BYTES).index(b"\r\n\r\n") + 4
                opened.seek(begin)
                length = int(said)
            content = opened if begin else record.reader
            yield Record(number, record.stream_pos, length, kind.lower(), record.headers, content)
            record.consume()
            if (there := file.size - begin if begin else record.reader.tell()) < length:
                raise refused(f"it has {length:,} bytes, and the file ends after {there:,} of them")
            if begin:
                opened.seek(begin + length)
                records = fastwarc.ArchiveIterator(opened, **options)
            place = f"after the record at byte {record.stream_pos:,}"


class _WarcReader:
    """Reads the documents of a range. ``stored``: bytes of its records so far; ``unpacked``: bytes of what was packed in them."""

    def __init__(self, file: TextFile) -> None:
        self.file = file
        self.stored = self.unpacked = 0

    def add(self, collected: CollectedRows, record: Record) -> None:
        """Add the document of a record, if it has one. BadRowError if it cannot be read."""
        headers, length, file = record.headers, record.length, self.file
        if (kind := record.kind) not in KINDS:
            return
        if kind == "continuation" or "WARC-Segment-Number" in headers:
            raise BadRowError("malformed", "the page is in segments, a record each, which are not put together")
        is_text = kind == "conversion"
        if length > (file.max_bytes if is_text else limits.longest_line(file.max_bytes)):
            raise BadRowError("too_long", too_long(length, file.max_bytes))
        data = record.content.read(length)
        if len(data) < length:
            raise OSError(f"it ends within the record at byte {record.start:,}")
        self.stored += length
        content = {"content_type": _media_type(headers)}
        if not is_text:
            try:
                page = self._page(data, headers, kind)
            except ValueError as error:
                raise BadRowError("malformed", f"the {kind} cannot be read ({error})") from error
            if page is None:
                return
            data, content = page

        def value(name: str) -> bytes | None:
            if name == TEXT:
                return data
            found = content.get(name) if name in OF_CONTENT else headers.get(COLUMNS.get(name, name))
            # wget writes URIs in brackets, as identifiers are written.
            return None if found is None else (found.removeprefix("<").removesuffix(">") if name in COLUMNS else found).encode()

        identity = value(file.id_column) if file.id_column else None
        collected.add(record.number, data, identity, [value(name) for name in file.kept_here])
        collected.size += len(data)

    def _page(self, data: bytes, headers: fastwarc.HeaderMap, kind: str) -> tuple[bytes, dict[str, str | None]] | None:
        """The text of a response or a resource in UTF-8, and the columns of its content. None if the content is of another
        kind, or an error of the server. ValueError if it contradicts its headers, or is too long.
        """
        status = None
        if kind == "response" and data.startswith(b"HTTP/"):
            if (end := re.search(rb"\r?\n\r?\n", data[: HEADERS_BYTES // 2])) is None:
                raise ValueError(f"its HTTP headers do not end within {HEADERS_BYTES // 2:,} bytes")
            headers = fastwarc.HeaderMap()
            headers.parse(io.BytesIO(re.sub(rb"\r?\n", b"\r\n", data[: end.end()])))
            if len(headers) > HEADERS:
                raise ValueError(f"it has {len(headers):,} HTTP headers")
            status = f"{headers.status_code or ''}"
            if not status.startswith("2"):
                return None
            names = ",".join(headers.get(name) or "" for name in ("Content-Encoding", "Transfer-Encoding")).lower().split(",")
            encodings = [name for one in names if (name := one.strip()) not in ("", "identity")]
            if len(encodings) > ENCODINGS:
                raise ValueError(f"it has {len(encodings):,} encodings, one within another")
            data = data[end.end() :]
            for name in reversed(encodings):  # the last is the outermost
                if name == "chunked":
                    data = _unchunked(data)
                elif name in CODECS:
                    data = self._unpacked(data, name)
                else:
                    raise ValueError(f"its Content-Encoding is {name[:40]!r}")
        kind_of = _media_type(headers)
        if kind_of not in TEXTUAL:
            return None
        charset = _charset(data, headers.get("Content-Type") or "", kind_of)
        if charset != "utf-8":
            written = data.decode(charset, "surrogateescape")
            data = utf8(written.translate(CONTROLS) if charset == "cp1252" else written)
        return data.removeprefix(codecs.BOM_UTF8), {"content_type": kind_of, "charset": charset, "status": status}

    def _unpacked(self, data: bytes, name: str) -> bytes:
        """The unpacked payload. Archives often keep the header of a payload that they have unpacked: that is as it is."""
        try:
            with pa.CompressedInputStream(pa.BufferReader(data), CODECS[name]) as stream:
                return self._bounded(iter(lambda: stream.read(limits.BATCH_BYTES), b""))
        except OSError as error:
            if name == "deflate":
                with contextlib.suppress(zlib.error):
                    return self._bounded(_inflated(data))
            if UNPRINTABLE.search(data):
                raise ValueError(f"its Content-Encoding {name} is damaged: {error}") from error
            return data

    def _bounded(self, blocks: Iterable[bytes]) -> bytes:
        """All blocks. ValueError if they are too long for a document or for the file."""
        room = max(limits.ANY_EXPANSION, self.file.max_expansion * self.stored) - self.unpacked
        most, parts, size = min(limits.longest_line(self.file.max_bytes), room), list[bytes](), 0
        for block in blocks:
            parts.append(block)
            size += len(block)
            self.unpacked += len(block)
            if size > most:
                raise ValueError(f"unpacked it has more than {most:,} bytes")
        return b"".join(parts)


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    collected, end, seen = CollectedRows(file), 0, 0
    reading = _WarcReader(file)
    for record in _records(file, part.start, part.stop):
        end, seen = record.number + 1, record.start + record.length - part.start
        try:
            reading.add(collected, record)
        except BadRowError as error:
            collected.faults.append((record.number, *error.fault))
        limits.check_expansion(reading.unpacked, reading.stored, file.max_expansion, file.name)
        yield from collected.batch(end, seen)
    if end:
        yield collected.rows(end, seen)


def _media_type(headers: fastwarc.HeaderMap) -> str | None:
    return (headers.get("Content-Type") or "").partition(";")[0].strip().lower() or None


def _inflated(data: bytes) -> Iterator[bytes]:
    """The unpacked payload of deflate without zlib's header, which some servers send. zlib.error if it is none, or cut off."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    for start in range(0, len(data), INFLATED_BYTES):
        if unpacker.eof:
            raise zlib.error("it ends before the payload does")
        yield unpacker.decompress(data[start : start + INFLATED_BYTES])
    if not unpacker.eof or unpacker.unused_data:
        raise zlib.error("it does not end with the payload")


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


def _charset(data: bytes, content_type: str, kind: str) -> str:
    """The charset of a page as browsers find it: of its mark, its server or itself; else UTF-8 if it is that, else Windows'."""
    for mark, charset in MARKS:
        if data.startswith(mark):
            return charset
    said = re.search(r"""charset\s*=\s*["']?\s*([^\s"';,]+)""", content_type, re.IGNORECASE)
    found = encoding.map_encoding_to_html5(said[1], fallback_utf8=False) if said else None
    if found is None and kind in HTML:
        # Without a charset in the page it is guessed by other bytes: what two endings do not change is said.
        head = data[:META_BYTES].translate(None, bytes(range(128, 256)))
        guesses = {encoding.detect_encoding(head + end, from_html_meta=True) for end in (b"", "é".encode())}
        if len(guesses) == 1:
            (found,) = guesses
        elif declared := XML.match(head):
            found = encoding.map_encoding_to_html5(declared[1].decode(), fallback_utf8=False)
        found = "utf-8" if found and found.startswith("utf-16") else found  # it was read in ASCII
    if found is not None:
        name = codecs.lookup(found).name
        return SUPERSETS.get(name, name)
    try:
        data.decode()
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def columns(file: TextFile) -> list[str]:
    return [TEXT, *COLUMNS, *OF_CONTENT, *(name for name in file.columns if name.lower().startswith("warc-"))]


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    if file.completion_column is not None or file.has_messages or file.text_column != TEXT:
        raise ValueError(f"{file.name} is WARC, which has no column {file.text_column!r}. Its text is in the column {TEXT!r}.")
    check_names(file, dict.fromkeys(columns(file)))
    start = last = 0
    for record in _records(file, 0, file.size):
        # A range ends before the record with which it would be too large.
        if record.start > start and record.start + record.length - start > range_bytes:
            yield Range(start, record.start, None, record.start - start)
            start = record.start
        last = record.start + 1
    if last:
        yield Range(start, file.size, None, file.size - start)


def rows_before(file: TextFile, part: Range) -> int:
    return sum(1 for _ in _records(file, 0, part.start))


WARC = SourceFormat((".warc", ".wet"), ranges, read, rows_before, columns=columns)
