"""Bringing files here: busy and broken servers, copies that are used again, compressed files, and which files there are."""

import contextlib
import gzip
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import zstandard

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.config import Source
from tasks.download.fetch import fetch_file
from tasks.download.outlines import bytes_to_cut
from tasks.download.small import read_small
from tasks.download.sources import ATTEMPTS, resolve_source
from tasks.models import FoundFile, SourceFile
from tests.calls import before_each_call
from tests.processes import in_threads, serving
from tests.refusal import refusal

BODY = b"".join(b'{"text": "document %06d"}\n' % i for i in range(40_000))
"""Longer than what one read of a response takes."""


class Server(ThreadingHTTPServer):
    """One file on loopback. Each request takes the next of ``moves``, which may spoil it; without any it is served well, but a
    path with ``to`` in it ``leads`` elsewhere.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.body, self.etag, self.with_ranges, self.with_head, self.with_length = BODY, '"one"', True, True, True
        self.moves: list[Callable[[Request], None]] = []
        self.seen: list[str] = []
        self.paths, self.headers, self.to, self.leads = [], [], "/to/", ""
        self.sent = 0

    @property
    def home(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def url(self, name: str = "data.jsonl") -> str:
        return f"{self.home}/files/{name}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that we break on purpose are not worth a word."""


class Request(BaseHTTPRequestHandler):
    """A request; what was asked is noted as ``GET`` or ``GET 100-``."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        self.server.seen.append(f"{self.command} {asked}".strip())
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        if self.server.moves:
            self.server.moves.pop(0)(self)
        elif self.command == "HEAD" and not self.server.with_head:
            self.refuse(405)
        elif self.server.to in self.path:
            self.refuse(302, Location=self.server.leads)
        else:
            self.serve()

    def refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def serve(self, stop_after: int | None = None) -> None:
        """The file, or the part that is asked for; *stop_after* so many bytes of it the connection breaks."""
        body, start = self.server.body, 0
        same = self.headers.get("If-Range", self.server.etag) == self.server.etag
        if self.server.with_ranges and same and (asked := self.headers.get("Range")):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if self.server.with_length:
            self.send_header("Content-Length", str(len(body) - start))
        else:
            self.send_header("Connection", "close")
        if self.server.etag:
            self.send_header("ETag", self.server.etag)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[start : None if stop_after is None else start + stop_after])
        if stop_after is not None:
            self.close_connection = True


def without_end(head: str, block: bytes = bytes(1 << 16), pause: float = 0.0, headers: float = 0.0) -> Callable[[Request], None]:
    """Send this beginning, and then blocks until the client goes away; *headers*: a line each such time without an end."""

    def move(request: Request) -> None:
        request.close_connection = True
        with contextlib.suppress(OSError):
            request.wfile.write(f"HTTP/1.1 {head}\r\n".encode())
            while headers:
                request.wfile.write(b"X: y\r\n")
                time.sleep(headers)
            request.wfile.write(b"\r\n")
            while request.server.sent < 1 << 30:
                request.wfile.write(block)
                request.server.sent += len(block)
                time.sleep(pause)

    return move


def busy(status: int, **headers: str) -> Callable[[Request], None]:
    return lambda request: request.refuse(status, **headers)


def well(request: Request) -> None:
    request.serve()


def breaking(after: int) -> Callable[[Request], None]:
    """End the body early, as if it were whole."""
    return lambda request: request.serve(after)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(server := Server()):
        yield server


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of waiting, note for how long."""
    noted = []
    # Threads of others wait, too: only what fetches is told another time.
    monkeypatch.setattr("flat_tokens.stores.retry.time", SimpleNamespace(monotonic=time.monotonic, sleep=noted.append))
    return noted


def resolve(url: str) -> tuple[FoundFile, ...]:
    return resolve_source(Source(path=url), 0).files


def fetch(found: FoundFile, scratch: Path, **settings: Any) -> SourceFile:
    return fetch_file(found, (Source.model_validate({"path": "x", **settings}),), scratch)


def bring(url: str, scratch: Path) -> SourceFile:
    """Resolve and fetch the only file of a source."""
    (found,) = resolve(url)
    return fetch(found, scratch)


def is_whole(file: SourceFile, body: bytes = BODY) -> bool:
    digest = hashlib.sha256(body).hexdigest()
    return (file.sha256, file.size) == (digest, len(body)) and Path(file.location).read_bytes() == body


def local(path: Path) -> FoundFile:
    return FoundFile(source=0, name=path.name, uri=str(path), size=path.stat().st_size)


def test_a_file_is_asked_for_once_and_fetched_once(server, tmp_path):
    """A query is not a pattern, and not part of its name."""
    url = server.url("my%20data.jsonl?download=true")
    (found,) = resolve(url)
    assert found == FoundFile(source=0, name="my data.jsonl", uri=url, size=len(BODY), immutable='ETag:"one"')
    file = fetch(found, tmp_path)
    assert is_whole(file)
    assert (file.name, file.format) == ("my data.jsonl", "jsonl")
    assert server.seen == ["HEAD", "GET"]


@pytest.mark.parametrize("before", [[], [well]], ids=["found", "fetched"])
def test_a_busy_server_is_asked_again_when_it_wants(server, tmp_path, waits, before, caplog):
    trouble = [busy(429, Retry_After="7"), busy(503), busy(503, Retry_After="Wed, 21 Oct 2065 07:28:00 GMT"), busy(500)]
    server.moves = [*before, *trouble]
    assert is_whole(bring(server.url(), tmp_path))
    assert waits[0] == 7
    assert [0.25 * 2**i <= wait <= 0.5 * 2**i for i, wait in enumerate(waits[1:], 2)] == [True] * 3
    assert f"{server.url()}: HTTP status 429 Too Many Requests; trying again in 7 s" in caplog.messages


def test_a_server_that_stays_busy_is_given_up(server, tmp_path, waits):
    (found,) = resolve(server.url())
    server.moves = [busy(503)] * 99
    with refusal(rf"^{server.url()} cannot be fetched \({ATTEMPTS} tries\): HTTP status 503 Service Unavail", OSError):
        fetch(found, tmp_path)
    assert len(waits) == ATTEMPTS - 1
    assert not list(tmp_path.rglob("*.part"))


def test_a_broken_connection_goes_on_behind_what_came(server, tmp_path):
    server.moves = [well, breaking(600_000), breaking(300_000)]
    assert is_whole(bring(server.url(), tmp_path))
    assert server.seen[:2] == ["HEAD", "GET"]
    starts = [int(seen.removeprefix("GET ").removesuffix("-")) for seen in server.seen[2:]]
    assert len(starts) == 2
    assert 300_000 < starts[0] <= 600_000
    assert starts[0] < starts[1] <= starts[0] + 300_000


def test_a_connection_that_breaks_is_tried_again(server, tmp_path):
    """Progress gives it new tries."""
    server.moves = [well, *[breaking(300_000), *[busy(503)] * 6] * 3]
    assert is_whole(bring(server.url(), tmp_path))
    assert len(server.seen) == 23


def test_a_server_that_always_breaks_at_the_same_place_is_given_up(server, tmp_path):
    """Bytes that had come before are not progress."""
    server.with_ranges = False
    server.moves = [well, *[breaking(600_000)] * 99]
    with refusal(r"cannot be fetched \(8 tries\)", OSError):
        bring(server.url(), tmp_path)
    assert len(server.seen) < 12


def test_a_file_that_is_not_there_is_told_at_once(server, tmp_path, waits):
    server.moves = [busy(404)]
    with refusal(rf"^the source: there is nothing at {server.url()}. Check the address, the network"):
        resolve(server.url())
    (found,) = resolve(server.url())
    server.moves = [busy(404)]
    with refusal(rf"^{server.url()} cannot be fetched \(1 try\): HTTP status 404 Not Found$", OSError):
        fetch(found, tmp_path)
    assert waits == []


def test_a_file_that_changes_within_the_answer_is_an_error(server, tmp_path):
    """What had come of the old one is never joined with the new one."""

    def break_and_change(request: Request) -> None:
        request.serve(600_000)
        server.body, server.etag = BODY.replace(b"document", b"Document"), '"two"'

    server.moves = [well, break_and_change]
    with refusal("it changed after the build had found it", OSError):
        bring(server.url(), tmp_path)


@pytest.mark.parametrize("size", [len(BODY) - 1, len(BODY) + 1])
def test_a_file_of_another_size_than_was_found_is_an_error(server, tmp_path, size):
    (found,) = resolve(server.url())
    with refusal(r"changed while it was fetched|ended after \d+ of \d+ bytes", OSError):
        fetch(found._replace(size=size, immutable=None), tmp_path)


def test_a_server_that_does_not_know_head_or_sizes_is_enough(server, tmp_path):
    server.with_head = server.with_length = False
    (found,) = resolve(server.url())
    assert found.size is None
    assert is_whole(fetch(found, tmp_path))


def test_a_pattern_finds_the_files_to_which_a_page_leads(server):
    server.body = b"".join(b'<a href="/files/%s">x</a>' % name for name in (b"a.jsonl", b"b.jsonl/", b"c.txt"))
    assert [found.name for found in resolve(server.url("*.jsonl"))] == ["a.jsonl"]


HEAD = "200 OK\r\nConnection: close"
GZIP = f"{HEAD}\r\nContent-Encoding: GZIP"


@pytest.mark.parametrize(
    ("size", "move", "complaint"),
    [
        (100, without_end(HEAD), "it has more than 100 bytes, which is the size that the server said"),
        (100, without_end(f"{HEAD}\r\nContent-Length: {1 << 40}"), "it has more than 100 bytes"),
        (None, without_end(HEAD), r"more than 300,000 bytes, which is source\.max_bytes or left of scratch_bytes: raise that if"),
        (100, without_end(GZIP), r"sends it packed \(Content-Encoding 'GZIP'\), which was not asked for"),
        (100, without_end("302 Found\r\nLocation: /files/data.jsonl"), "HTTP status 302"),
        (1 << 20, without_end(HEAD, b"x", 0.01), r"\(8 tries\).* the least speed is 1,000 bytes a second"),
        (100, without_end("200 OK", headers=0.01), "answer had not begun after 0 s"),
    ],
)
def test_a_server_without_an_end_is_given_up(
    server,
    tmp_path,
    monkeypatch,
    size,
    move,
    complaint,
):
    """After little of it, whether a file is small or large."""
    monkeypatch.setattr("flat_tokens.stores.answers.WINDOW_SECONDS", 0.2)
    monkeypatch.setattr("tasks.locations.ANSWER_SECONDS", 0.06 if "begun" in complaint else 60)
    server.moves = [move] * 99
    found = FoundFile(source=0, name="data.jsonl", uri=server.url(), size=size)
    sources = (Source(path="x", max_bytes=300_000),)
    with refusal(complaint, OSError):
        fetch_file(found, sources, tmp_path / "scratch")
    if size == 100:
        with refusal(complaint, OSError):
            list(read_small([found], sources, tmp_path / "scratch"))
    assert server.sent < 1 << 28  # not the gigabyte that there is; what buffers hold depends on the machine
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file() and path.stat().st_size] == []


@pytest.mark.parametrize(
    ("move", "complaint"),
    [
        (without_end(HEAD.replace("200", "206")), "more than the 100 bytes that were asked for"),
        (without_end(GZIP), "sends it packed"),
        (without_end(HEAD, b"x", 0.01), "the least speed is"),
    ],
)
def test_a_store_without_an_end_is_given_up(server, monkeypatch, move, complaint):
    monkeypatch.setattr("flat_tokens.stores.answers.WINDOW_SECONDS", 0.2)
    server.moves = [move] * 99
    with refusal(complaint, (ValueError, TimeoutError)):
        replace(Store.at(server.url("")), patience=0.1).read_ranges(["x"], [10], [110])
    assert server.sent < 1 << 28


def test_answers_without_a_range_have_a_limit(server, monkeypatch):
    """Objects, listings, and what opening a dataset reads."""
    monkeypatch.setattr("flat_tokens.stores.answers.MOST_BYTES", 1 << 20)
    server.moves = [without_end(HEAD)] * 99
    store = Store.at(server.url(""))
    for call in (lambda: store.read("x"), lambda: resolve(server.url("*.jsonl"))):
        with refusal("more than the 1,048,576 bytes", (ValueError, OSError)):
            call()
    with refusal(r"latest\.json: is larger than a record may be"):
        flat_tokens.open(server.url(""))
    assert store.read_range("x", 10, 110) == bytes(100)  # it knows no ranges


def test_a_disk_keeps_a_reserve(server, tmp_path, monkeypatch):
    free = os.statvfs(tmp_path)
    monkeypatch.setattr("tasks.download.fetch.FREE_BYTES", free.f_bavail * free.f_frsize + (1 << 40))
    monkeypatch.setattr("tasks.download.fetch.FREE_SHARE", 1)
    with refusal(r"the disk of the downloads would have [\d,]+ bytes left, and [\d,]+ stay free", OSError):
        bring(server.url(), tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda path: os.truncate(path, 5), lambda path: path.write_bytes(BODY[:-1] + b"X"), Path.unlink]
)
def test_a_damaged_copy_is_fetched_again(server, tmp_path, damage):
    damage(Path(bring(server.url(), tmp_path).location))
    assert is_whole(bring(server.url(), tmp_path))
    assert server.seen == ["HEAD", "GET"] * 2


@pytest.mark.parametrize("etag", ['"two"', "", 'W/"one"'])
def test_another_no_or_a_weak_etag_is_fetched_again(server, tmp_path, etag):
    bring(server.url(), tmp_path)
    server.etag, server.body = etag, BODY[:1000]
    assert is_whole(bring(server.url(), tmp_path), BODY[:1000])
    assert is_whole(bring(server.url(), tmp_path), BODY[:1000])
    assert server.seen.count("GET") == (2 if etag == '"two"' else 3)


def test_two_sources_may_bring_the_same_file_at_once(server, tmp_path):
    """Nobody sees a file change under him, nothing half-fetched is left."""
    server.etag = ""
    (found,) = resolve(server.url())
    first = fetch(found, tmp_path)
    in_threads(lambda _: fetch(found, tmp_path), range(4))
    assert fetch(found, tmp_path) == first  # its time stamps too
    assert not list(tmp_path.rglob("*.part"))


def test_other_stores_are_read_and_pinned_too(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe({"/download/data/b.jsonl": b"{}\n", "/download/data/a.jsonl": b"{}\n\n", "/download/data/_SUCCESS": b""})
    try:
        assert [(file.name, file.size) for file in resolve("memory://download/data")] == [("a.jsonl", 4), ("b.jsonl", 3)]
        assert [file.name for file in resolve("memory://download/data/b*")] == ["b.jsonl"]
        assert is_whole(bring("memory://download/data/a.jsonl", tmp_path), b"{}\n\n")
        with refusal("there is nothing at memory://download/other"):
            resolve("memory://download/other")
    finally:
        fs.rm("/download", recursive=True)


@pytest.mark.parametrize(
    ("name", "content", "separator", "expected"),
    [
        ("a.txt", b"a\r\nb\n", "\n", "crlf"),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\r\n", "\n", "crlf"),  # where one block ends and the next begins
        ("a.txt", b"a\nb\rc\n\r", "\n", None),
        ("a.txt", b"a\r\n", "\r\n", None),
        ("a.jsonl", b'{"text": "a"}\r\n', "\n", None),
    ],
)
def test_a_text_is_looked_through_for_crlf_where_its_separator_has_a_line_feed(tmp_path, name, content, separator, expected):
    """It is part of what names the file in keys, as it decides what a document is."""
    (tmp_path / name).write_bytes(content)
    source = Source(path="x", document_separator=separator)
    assert fetch_file(local(tmp_path / name), (source,), tmp_path / "scratch").line_ends == expected


def packed(kind: str, *parts: bytes) -> bytes:
    pack = gzip.compress if kind == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    return b"".join(pack(part) for part in parts)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_packed_files_are_unpacked_once(tmp_path, monkeypatch, kind):
    """Of many frames, one of them empty. The digest is that of the packed file, the size that of the unpacked one."""
    path, scratch = tmp_path / "data.jsonl", tmp_path / "scratch"  # told by content, not by name
    path.write_bytes(packed(kind, b"", *(BODY[i : i + 1000] for i in range(0, len(BODY), 1000))))
    file = fetch(local(path), scratch)
    assert Path(file.location).read_bytes() == BODY
    assert (file.size, file.format) == (len(BODY), "jsonl")
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for note in scratch.rglob("*.json"):
        note.unlink()  # it is unpacked again, and a copy that somebody reads stays the same file
    assert fetch(local(path), scratch) == file
    monkeypatch.setattr("tasks.download.fetch.unpacked", None)
    assert fetch(local(path), scratch) == file


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data + b"garbage",
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    ],
    ids=["end missing", "garbage behind", "bit flip"],
)
def test_damaged_packed_files_are_refused_before_any_of_them_is_used(tmp_path, kind, spoil):
    path = tmp_path / f"data.jsonl.{kind}"
    path.write_bytes(spoil(packed(kind, BODY)))
    with refusal(rf"^data.jsonl.{kind} is damaged at byte \d+ or before: "):
        fetch(local(path), tmp_path / "scratch")
    assert [file.name for file in (tmp_path / "scratch").rglob("*") if file.is_file()] == []


def test_a_file_that_changes_while_its_digest_is_taken_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_bytes(BODY)
    before_each_call(monkeypatch, "flat_tokens.stores.store.Store.digest", lambda *_: path.write_bytes(BODY.upper()))
    with refusal(r"data.jsonl changed while the build read it"):
        fetch(local(path), tmp_path / "scratch")


def test_of_a_parquet_file_whose_version_is_told_the_end_is_enough():
    found = FoundFile(source=0, name="a.parquet", uri="hf://datasets/o/n@c/a.parquet", size=5 << 20, content="sha256:" + "0" * 64)
    assert bytes_to_cut(found) == 1 << 20
    assert bytes_to_cut(found._replace(size=9)) == 9
    for other in ({"content": None}, {"name": "a.jsonl"}, {"name": "a.parquet.gz"}):
        assert bytes_to_cut(found._replace(**other)) == 5 << 20
    assert bytes_to_cut(found._replace(size=None)) == 1_000_000_000
