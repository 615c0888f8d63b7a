"""Requests that lead elsewhere: every hop is checked, by every client that reads what people name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.stores.reading import INPUT_ROOTS
from flat_tokens.stores.store import Store
from tasks.config import Source
from tasks.download.fetch import fetch_file
from tasks.download.sources import resolve_source
from tasks.locations import check_hop
from tasks.models import FoundFile
from tests.processes import serving
from tests.refusal import refusal

BODY = b'{"text": "a document"}\n'


class Server(ThreadingHTTPServer):
    """Files below /data and /secret; a path below /to leads to where the server's ``leads`` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.leads, self.seen, self.headers = "", [], []
        self.to = "/to/"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        self.server.headers.append(dict(self.headers))
        if self.server.to in self.path:
            self.send_response(302)
            self.send_header("Location", self.server.leads)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(BODY)


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with serving(one := Server()), serving(other := Server()):
        yield one, other


def looks(url: str, tmp_path: Path) -> object:
    return resolve_source(Source(path=url), 0)


def fetches(url: str, tmp_path: Path) -> object:
    return fetch_file(FoundFile(source=0, name="a.jsonl", uri=url, size=None), (Source(path="x"),), tmp_path)


def reads(url: str, tmp_path: Path) -> object:
    return Store.at(url).read("")


CLIENTS = pytest.mark.parametrize("client", [looks, fetches, reads])
Client = Callable[[str, Path], object]


@CLIENTS
@pytest.mark.parametrize("leads", ["{other}/data/a.jsonl", "/secret/a.jsonl", "/to/x/../../secret/a", "/data/%2e%2e/secret/a"])
def test_a_redirect_out_of_the_roots_is_refused_before_it_is_followed(
    servers: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client, leads: str
) -> None:
    one, other = servers
    monkeypatch.setenv(INPUT_ROOTS, f"{one.url}/data,x,{tmp_path}")
    monkeypatch.chdir(tmp_path)
    one.leads = leads.format(other=other.url)
    with refusal(r"which may not be read here: FLAT_TOKENS_INPUT_ROOTS allows", (ValueError, OSError)):
        client(f"{one.url}/data/to/a.jsonl", tmp_path)
    assert other.seen == []
    assert not any("secret" in path for path in one.seen)


@CLIENTS
def test_a_redirect_within_the_roots_is_followed(
    servers: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    one, other = servers
    monkeypatch.chdir(tmp_path)
    one.leads = f"{other.url}/data/a.jsonl"
    for roots in ("", f"{one.url}/data,{other.url}/data/,x"):
        monkeypatch.setenv(INPUT_ROOTS, roots)
        client(f"{one.url}/data/to/a.jsonl", tmp_path)
        assert other.seen.pop() == "/data/a.jsonl"


@CLIENTS
@pytest.mark.parametrize("leads", ["/data/a.jsonl", "{one}/data/b.jsonl", "/again/to/a.jsonl"])
def test_a_redirect_to_another_path_of_the_same_server_is_followed(
    servers: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client, leads: str
) -> None:
    """Also where that leads on, and where the server keeps the connection."""
    one, _ = servers
    monkeypatch.setattr(Request, "protocol_version", "HTTP/1.1")
    one.leads, one.to = leads.format(one=one.url), "/to/" if leads != "/again/to/a.jsonl" else "/first/to/"
    client(f"{one.url}/first/to/a.jsonl", tmp_path)
    assert one.seen[-1] == leads.removeprefix("{one}")


@CLIENTS
def test_a_redirect_to_an_address_of_credentials_is_refused(
    servers: tuple[Server, Server], tmp_path: Path, client: Client
) -> None:
    servers[0].leads = "http://[2002:a9fe:a9fe::1]/latest"
    with refusal("an address at which cloud machines get", (ValueError, OSError)):
        client(f"{servers[0].url}/to/a.jsonl", tmp_path)


@CLIENTS
def test_a_name_of_a_link_local_address_is_refused_when_it_is_connected_to(
    servers: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    """What the name led to is looked at, not what it may lead to the next time."""
    import tasks.locations

    numbers = tasks.locations._numbers
    monkeypatch.setattr(tasks.locations, "_numbers", lambda host: numbers("169.254.0.1" if host == "127.0.0.1" else host))
    url = servers[0].url.replace("127.0.0.1", "localhost")
    with refusal(r"localhost \(127.0.0.1\), an address at which cloud", (ValueError, OSError)):
        client(f"{url}/data/a.jsonl", tmp_path)
    assert servers[0].seen == []


def test_headers_of_ours_stay_with_the_first_server(servers: tuple[Server, Server]) -> None:
    one, other = servers
    one.leads = f"{other.url}/data/a.jsonl"
    import fsspec

    fs = fsspec.filesystem(
        "http", client_kwargs={"headers": {"X-Key": "ours", "Authorization": "ours"}}, skip_instance_cache=True
    )
    assert fs.cat(f"{one.url}/to/a.jsonl") == BODY
    assert one.headers[0]["X-Key"] == one.headers[0]["Authorization"] == "ours"
    assert not {"X-Key", "Authorization"} & set(other.headers[0])


def test_what_begins_at_the_hub_may_lead_to_public_servers_by_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INPUT_ROOTS, "https://huggingface.co/datasets/org")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    hub = "https://huggingface.co/datasets/org/name/resolve/main/a.parquet"
    for url in ("https://cdn-lfs.hf.co/repos/a?Signature=x", "https://huggingface.co/api/resolve-cache/a", hub):
        check_hop(hub, url)
    check_hop(hub, "https://cdn-lfs.hf.co/a", "93.184.215.14")
    for url, address in (
        ("http://cdn-lfs.hf.co/a", ""),
        ("https://127.0.0.1/a", ""),
        ("https://2130706433/a", ""),
        ("https://10.0.0.1/a", ""),
        ("https://cdn-lfs.hf.co/a", "10.0.0.1"),
        ("https://cdn-lfs.hf.co/a", "169.254.169.254"),
        ("file:///etc/passwd", ""),
    ):
        with refusal("may not be read here"):
            check_hop(hub, url, address)
    with refusal("may not be read here"):
        check_hop("https://huggingface.co.example/a", "https://cdn-lfs.hf.co/a")


def test_a_root_may_name_a_link_local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INPUT_ROOTS, "http://169.254.7.7:8080/data")
    assert Source(path="http://169.254.7.7:8080/data/a.jsonl").path
    with refusal("may not be read here"):
        Source(path="http://169.254.7.7/data/a.jsonl")
