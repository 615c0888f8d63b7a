"""WARC and WET: the documents of records, against another reader of the same files, and files that are damaged."""

import gzip
import zlib
from functools import partial

import pyarrow as pa
import pytest
import zstandard

from flat_tokens.text.formats import detect_format
from flat_tokens.text.warc import WARC
from tests.refusal import refusal
from tests.sources import documents_of

HTML = "text/html; charset=utf-8"


def record(kind: str, content: bytes, **headers: str) -> bytes:
    named = {"WARC_Type": kind, "Content_Length": len(content), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"WARC/1.0\r\n{lines}\r\n".encode() + content + b"\r\n\r\n"


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


def response(body: bytes, content_type: str = HTML, status: str = "200 OK", **headers: str) -> bytes:
    lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in {"Content_Type": content_type, **headers}.items())
    return record("response", f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


read = partial(documents_of, WARC)


def test_text_of_wet_is_as_it_is_with_what_its_headers_say(tmp_path):
    info = record("warcinfo", b"software: x\r\n", WARC_Filename="x")
    data = info + conversion(1, "héllo\r\n\r\nWARC/1.0\n".encode()) + record("metadata", b"a: b") + conversion(2, b"")
    columns = ("url", "date", "type", "language", "content_type", "status", "WARC-Record-ID")
    found = read(tmp_path / "x.warc.wet", data.replace(b"Length: 19", b"length: 19"), columns, "id")
    expected = ("2026-07-31T12:00:00Z", "conversion", "eng", "text/plain", None)
    uuid = "urn:uuid:" + "0" * 31
    assert found == [
        (1, "héllo\r\n\r\nWARC/1.0\n", f"{uuid}1", "https://example.org/1", *expected, f"<{uuid}1>"),
        (3, "", f"{uuid}2", "https://example.org/2", *expected, f"<{uuid}2>"),
    ]


@pytest.mark.parametrize("size", [1, 250, 261, 400, 600])
def test_ranges_have_the_records_of_the_file(tmp_path, size):
    texts = ["text", "", "é" * 200, "text", "\r\n\r\nWARC/1.0\r\n", "text"]
    data = b"".join(conversion(number, text.encode()) for number, text in enumerate(texts))
    assert [one[:2] for one in read(tmp_path / "x.warc", data, range_bytes=size)] == list(enumerate(texts))


GERMAN = "<html>Grüße „x“</html>"


@pytest.mark.parametrize(
    ("text", "codec", "content_type", "charset"),
    [
        (GERMAN, "cp1252", "text/html; charset=ISO-8859-1", "cp1252"),
        (f"\ufeff{GERMAN}", "utf-8", "text/html; charset=latin1", "utf-8"),
        (GERMAN, "cp1252", "text/html", "cp1252"),
        (GERMAN, "utf-8", "text/html; charset=rot13", "utf-8"),
        ("a\x81", "latin-1", "text/plain; charset=cp1252", "cp1252"),
        ("<p>中文", "gbk", "text/html; charset=gb2312", "gb18030"),
        ("<meta charset='iso-8859-15'>€", "iso-8859-15", "text/html", "iso8859-15"),
        ("<meta charset='koi8-r'>é", "cp1252", "text/html; charset=latin1", "cp1252"),
        (" " * 1024 + "<meta charset='koi8-r'>é", "cp1252", "text/html", "cp1252"),
        ("<meta charset='utf-16'>é", "utf-8", "text/html", "utf-8"),
        ("<?xml version='1.0'?>é", "utf-16-be", "text/html", "utf-16-be"),
        *(
            (f"{head}<p>Привет", "cp1251", "application/xhtml+xml", "cp1251")
            for head in (
                '<?xml version="1.0" encoding="windows-1251"?>',
                '<?xml version="1.0" encoding="koi8-r"?><meta charset="windows-1251">',
                '<!-- <meta charset="koi8-r"> --><meta charset="windows-1251">',
                '<meta name="x" content="text/html; charset=koi8-r"><META http-equiv=content-type content="charset=cp1251">',
                '<p title="<meta charset=koi8-r>"><meta data-charset=koi8-r><meta charset=cp1251>',
            )
        ),
    ],
)
def test_pages_are_decoded_by_their_charset(tmp_path, text, codec, content_type, charset):
    found = read(tmp_path / "x.warc", response(text.encode(codec), content_type), ("charset",))
    assert found == [(0, text.removeprefix("\ufeff"), None, charset)]


PAGE = GERMAN.encode()


@pytest.mark.parametrize(
    ("body", "encoding", "transfer"),
    [
        (gzip.compress(PAGE), "gzip", ""),
        (gzip.compress(PAGE[:9]) + gzip.compress(PAGE[9:]), "x-gzip", ""),
        (zlib.compress(PAGE)[2:-4], "deflate", ""),
        (pa.compress(PAGE, "brotli", asbytes=True), "br", ""),
        (zstandard.compress(PAGE), "zstd", "identity"),
        (gzip.compress(zlib.compress(PAGE)), "Deflate, gzip", ""),
        (chunked(gzip.compress(PAGE)), "", "gzip, chunked"),
        (chunked(gzip.compress(PAGE)), "gzip", "chunked"),
        (b"5;x=y\r\n" + PAGE[:5] + b"\r\n" + chunked(PAGE[5:]), "", "chunked"),
        *((PAGE, kept, "chunked") for kept in ("gzip", "deflate", "br", "zstd")),  # unpacked and put together by the archive
    ],
)
def test_payloads_are_unpacked(tmp_path, body, encoding, transfer):
    page = response(body, Content_Encoding=encoding, Transfer_Encoding=transfer)
    bare = record("response", b"HTTP/1.1 200 OK\nContent-Type: text/html\n\n" + PAGE) + record(
        "resource", PAGE, Content_Type=HTML
    )
    assert [text for _, text, _ in read(tmp_path / "x.warc", page + bare)] == [GERMAN] * 3


@pytest.mark.parametrize(
    "other",
    [
        response(b"gone", status="404 Not Found"),
        response(b"\x89PNG", "image/png"),
        response(b"?", ""),
        record("revisit", b""),
    ],
)
def test_what_is_not_text_is_no_document(tmp_path, other):
    assert read(tmp_path / "x.warc", other + conversion(1, b"a")) == [(1, "a", None)]


@pytest.mark.parametrize(
    ("body", "encoding", "words"),
    [
        (gzip.compress(PAGE)[:20] + b"x" * 20, "gzip", "its Content-Encoding gzip is damaged"),
        (gzip.compress(PAGE)[:-9], "gzip", "is damaged: Truncated"),
        (gzip.compress(PAGE) + b"more", "gzip", "is damaged"),
        (PAGE, "lzma", "its Content-Encoding is 'lzma'"),
        (PAGE, "gzip," * 5, "it has 5 encodings"),
    ],
)
def test_a_payload_that_cannot_be_unpacked_is_a_bad_document(tmp_path, body, encoding, words):
    [(row, reason, detail)] = read(tmp_path / "x.warc", response(body, Content_Encoding=encoding))
    assert (row, reason) == (0, "malformed")
    assert words in detail


def test_a_record_that_cannot_be_read_and_a_long_one_are_bad_documents(tmp_path):
    heads = (b"no end", b"A: b\r\n" * 101 + b"\r\n", b"A: " + b"b" * (32 << 10) + b"\r\n\r\n")
    pages = [record("response", b"HTTP/1.1 200 OK\r\n" + head) for head in heads]
    pages += [record(kind, b"a", WARC_Segment_Number="1") for kind in ("conversion", "continuation")]
    found = read(tmp_path / "x.warc", b"".join((*pages, conversion(3, b"a" * 101), conversion(4, b"a" * 100))), max_bytes=100)
    assert [reason for _, reason, _ in found[:6]] == [*["malformed"] * 5, "too_long"]
    assert "it has 101 HTTP headers" in found[1][2]
    assert found[6] == (6, "a" * 100, None)


GOOD = conversion(1, b"text")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (GOOD[-8:], b"", "the record at byte 261: it has 4 bytes, and the file ends after 0 of them"),
        (GOOD, b"GARBAGE\r\n\r\n", "after the record at byte 0: Invalid WARC header"),
        (b"Date", b"Date: x\r\n y" + b"y" * (64 << 10), "after the record at byte 0: Maximum header length"),
        (b"WARC-Type", b"X: y\r\n" * 94 + b"WARC-Type", "it has 101 headers"),
        (b": 4", b": 9223372036854775807", "and the file ends after 8 of them"),
        (b": 4", b": " + b"9" * 5000, "its Content-Length is '9"),
        (b": 4", ": ²".encode(), "its Content-Length is '²'"),
        (b"Content-Length: 4", b"content-length: 9", "it has 9 bytes, and the file ends after 8 of them"),
        (b"\r\n", b"\n", "it has no Content-Length"),
        (GOOD, GOOD.replace(b"\r\n", b"\n") + GOOD, "its headers end in a line feed alone"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place_of_the_record(tmp_path, old, new, words):
    with refusal(f"x.warc, .*{words}"):
        read(tmp_path / "x.warc", GOOD + GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("columns", "text", "words"),
    [
        (("lang",), "text", "no column 'lang'; it has 'text', 'id', 'url', .*Set source.keep_columns"),
        ((), "body", "x.warc is WARC, which has no column 'body'. Its text is in the column 'text'"),
    ],
)
def test_errors_name_the_columns(tmp_path, columns, text, words):
    with refusal(words):
        read(tmp_path / "x.warc", GOOD, columns, text=text)


def test_a_name_of_text_stays_text():
    assert detect_format(GOOD, "x.txt") == "text"
    assert [detect_format(GOOD, name) for name in ("x.warc.wet.gz", "x.wet", "x")] == ["warc"] * 3


def test_what_is_packed_in_records_counts_as_the_files_own(tmp_path, monkeypatch):
    """A page is a bad document if it alone is too long; if all are, the file is refused. Time is at most linear."""
    monkeypatch.setattr("flat_tokens.text.limits.ANY_EXPANSION", 1 << 20)
    large, small = (response(zstandard.compress(bytes(size)), Content_Encoding="zstd") for size in (9 << 20, 200_000))
    for pages in (large, small * 20):
        with refusal(r"x.warc: .* stand for .* or more; source.max_expansion allows 500 times"):
            read(tmp_path / "x.warc", pages)
    [(_, _, detail)] = read(tmp_path / "x.warc", large, max_bytes=1, max_expansion=100_000)
    assert "unpacked it has more than 8,388,608 bytes" in detail
    members = response(gzip.compress(b"") * 100_000 + gzip.compress(b"<p>"), Content_Encoding="gzip")
    lines = GOOD.replace(b"WARC-Type", b"X: a\r\n" + b" b\r\n" * 10_000 + b"WARC-Type")
    assert [one[1] for one in read(tmp_path / "x.warc", members + lines)] == ["<p>", "text"]
