"""WARC and WET: the documents of records, against another reader of the same files, and files that are damaged."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.text.formats import FORMATS, detect_format
from flat_tokens.text.rows import TextFile
from flat_tokens.text.warc import WARC

HTML = "text/html; charset=utf-8"


def record(kind: str, content: bytes, version: str = "1.0", **headers: str) -> bytes:
    named = {"WARC-Type": kind, "Content-Length": str(len(content)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"WARC/{version}\r\n{lines}\r\n".encode() + content + b"\r\n\r\n"


def conversion(number: int, text: bytes) -> bytes:
    return record(
        "conversion",
        text,
        WARC_Record_ID=f"<urn:uuid:{number:032x}>",
        WARC_Target_URI=f"https://example.org/{number}",
        WARC_Date="2026-07-31T12:00:00Z",
        Content_Type="text/plain",
        WARC_Identified_Content_Language="eng",
    )


def response(body: bytes, content_type: str | None = HTML, status: str = "200 OK", **headers: str) -> bytes:
    of_http = {**({"Content-Type": content_type} if content_type else {}), **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = f"HTTP/1.1 {status}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in of_http.items()) + "\r\n"
    return record("response", head.encode() + body, Content_Type="application/http; msgtype=response")


def read(
    path: Path, data: bytes, columns: Sequence[str] = (), identity: str | None = None, range_bytes: int = 1 << 30, **more: Any
) -> list[tuple[Any, ...]]:
    """Row, text, id and columns of each document."""
    path.write_bytes(data)
    file = TextFile(str(path), path.name, len(data), "text", identity, kept_columns=tuple(columns), **more)
    found: list[tuple[Any, ...]] = []
    before = 0
    for part in WARC.ranges(file, range_bytes):
        assert WARC.rows_before(file, part) == before
        end = 0
        for rows in WARC.read(file, part):
            ids = [None] * len(rows.texts) if rows.ids is None else rows.ids.to_pylist()
            kept = [] if rows.columns is None else [column.to_pylist() for column in rows.columns.columns]
            found += zip((rows.rows + before).tolist(), rows.texts.to_pylist(), ids, *kept, strict=True)
            found += [(row + before, *fault) for row, *fault in rows.faults]
            end = rows.end
        before += end
    return sorted(found, key=lambda one: one[0])


def test_text_of_wet_is_as_it_is_with_what_its_headers_say(tmp_path: Path) -> None:
    info = record("warcinfo", b"software: x\r\n", WARC_Filename="x")
    data = info + conversion(1, "héllo\r\n\r\nWARC/1.0\n".encode()) + record("metadata", b"a: b") + conversion(2, b"")
    columns = ("url", "date", "type", "language", "content_type", "status", "WARC-Record-ID")
    found = read(tmp_path / "x.warc.wet", data, columns, "id")
    expected = ("2026-07-31T12:00:00Z", "conversion", "eng", "text/plain", None)
    uuid = "urn:uuid:" + "0" * 31
    assert found == [
        (1, "héllo\r\n\r\nWARC/1.0\n".encode(), f"{uuid}1".encode(), "https://example.org/1", *expected, f"<{uuid}1>"),
        (3, b"", f"{uuid}2".encode(), "https://example.org/2", *expected, f"<{uuid}2>"),
    ]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.integers(1, 400))
def test_ranges_have_the_records_of_the_file(tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], size: int) -> None:
    data = b"".join(conversion(number, text) for number, text in enumerate(texts))
    found = read(tmp_path_factory.mktemp("warc") / "x.warc", data, range_bytes=size)
    assert [(row, text) for row, text, _ in found] == list(enumerate(texts))


GERMAN = "<html>Grüße „x“</html>"


@pytest.mark.parametrize(
    ("page", "text", "charset"),
    [
        (response(GERMAN.encode()), GERMAN, "utf-8"),
        (response(GERMAN.encode("cp1252"), "text/html; charset=ISO-8859-1"), GERMAN, "cp1252"),
        (response(b"\xef\xbb\xbf" + GERMAN.encode(), "text/html; charset=latin1"), GERMAN, "utf-8"),
        (response(b"<meta charset='iso-8859-15'>\xa4", "text/html"), "<meta charset='iso-8859-15'>€", "iso8859-15"),
        (response(GERMAN.encode("cp1252"), "text/html"), GERMAN, "cp1252"),
        (response("<p>中文".encode("gbk"), "text/html; charset=gb2312"), "<p>中文", "gb18030"),
        (response("<p>é".encode(), "text/html; charset=rot13"), "<p>é", "utf-8"),
        (response(b"a\x81", "text/plain; charset=cp1252"), "a\x81", "cp1252"),
        (response(gzip.compress(GERMAN.encode()), Content_Encoding="gzip"), GERMAN, "utf-8"),
        (response(zlib.compress(GERMAN.encode()), Content_Encoding="deflate"), GERMAN, "utf-8"),
        (response(gzip.compress(b"<p>one") + gzip.compress(b" two") + b"\0\0", Content_Encoding="gzip"), "<p>one two", "utf-8"),
        (response(GERMAN.encode(), Content_Encoding="gzip"), GERMAN, "utf-8"),  # unpacked by the archive
        (response(b"5\r\n<p>ab\r\n2;x=y\r\ncd\r\n0\r\n\r\n", Transfer_Encoding="chunked"), "<p>abcd", "utf-8"),
        (response(b"<p>abcd", Transfer_Encoding="chunked"), "<p>abcd", "utf-8"),  # put together by the archive
        (record("resource", b"<p>x", Content_Type="text/html"), "<p>x", "utf-8"),
    ],
)
def test_pages_are_decoded_by_their_charset(tmp_path: Path, page: bytes, text: str, charset: str) -> None:
    assert read(tmp_path / "x.warc", page, ("charset",)) == [(0, text.encode(), None, charset)]


@pytest.mark.parametrize(
    "other",
    [
        response(b"gone", status="404 Not Found"),
        response(b"\x89PNG", "image/png"),
        response(b"?", None),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        record("revisit", b""),
    ],
    ids=["an error", "an image", "of no type", "a request", "a revisit"],
)
def test_what_is_not_text_is_no_document(tmp_path: Path, other: bytes) -> None:
    assert read(tmp_path / "x.warc", other + conversion(1, b"a")) == [(1, b"a", None)]


def test_a_response_that_cannot_be_read_and_a_long_one_are_bad_documents(tmp_path: Path) -> None:
    damaged = gzip.compress(b"<p>" * 90)[:20] + b"x" * 20
    pages = [
        response(damaged, Content_Encoding="gzip"),
        response(gzip.compress(b"<p>" * 9)[:-9], Content_Encoding="gzip"),
        response(gzip.compress(b"<p>") + b"more", Content_Encoding="gzip"),
        response(b"<p>", Content_Encoding="br"),
        record("response", b"HTTP/1.1 200 OK\r\nno end", Content_Type="application/http"),
        conversion(3, b"a" * 101),
        conversion(4, b"a" * 100),
    ]
    found = read(tmp_path / "x.warc", b"".join(pages), max_bytes=100)
    assert [(row, reason) for row, reason, _ in found[:6]] == [*((i, "malformed") for i in range(5)), (5, "too_long")]
    assert [detail.partition("(")[2][:20] for _, _, detail in found[:5]] == [
        *["its Content-Encoding"] * 4,
        "its HTTP headers do ",
    ]
    assert found[6] == (6, b"a" * 100, None)


GOOD = conversion(1, b"text")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (GOOD + GOOD[:-8], f"x.warc, the record at byte {len(GOOD):,}: it has 4 bytes, and the file ends after 0 of them"),
        (GOOD + b"WARC/1.0\r\nWARC-Type: x\r\n", "its headers do not end"),
        (GOOD + b"GARBAGE\r\n\r\n", "it begins with b'GARBAGE"),
        (GOOD.replace(b"Content-Length: 4", b"Content-Length: 4x"), "its Content-Length is '4x'"),
        (GOOD.replace(b"Content-Length: 4", b"X: 4"), "it has no Content-Length"),
    ],
    ids=["cut off", "headers", "garbage", "a length", "no length"],
)
def test_a_damaged_file_is_refused_with_the_place_of_the_record(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "x.warc", data)


def test_errors_name_the_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'lang'; it has 'text', 'id', 'url', .*Set source.keep_columns"):
        read(tmp_path / "x.warc", GOOD, ("lang",))
    file = TextFile(str(tmp_path / "x.warc"), "x.warc", len(GOOD), "body")
    with pytest.raises(ValueError, match=r"x.warc is WARC, which has no column 'body'. Its text is in the column 'text'"):
        list(WARC.ranges(file, 1))


def test_a_name_of_text_stays_text() -> None:
    assert detect_format(GOOD, "x.txt") == "text"
    assert [detect_format(GOOD, name) for name in ("x.warc.wet.gz", "x.wet", "x")] == ["warc"] * 3
    assert FORMATS["warc"] is WARC


@pytest.mark.needs("fastwarc")
def test_another_reader_finds_the_same_records(tmp_path: Path) -> None:
    from fastwarc.warc import ArchiveIterator

    pages = [conversion(i, f"text {i}\n".encode() * i) for i in range(20)]
    pages += [response(GERMAN.encode()), response(b"5\r\n<p>ab\r\n0\r\n\r\n", Transfer_Encoding="chunked")]
    data = b"".join(pages)
    theirs = []
    for one in ArchiveIterator(io.BytesIO(b"".join(map(gzip.compress, pages))), auto_decode="all"):
        theirs.append((one.reader.read(), one.headers.get("WARC-Target-URI")))
    assert [(text, url) for _, text, _, url in read(tmp_path / "x.warc", data, ("url",))] == theirs
