"""Requests that lead elsewhere: every hop is checked, by every client that reads what people name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
from tests.tasks.download.test_fetch import BODY, Server


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
def test_a_redirect_out_of_the_roots_is_refused_before_it_is_followed(servers, tmp_path, monkeypatch, client, leads):
    one, other = servers
    monkeypatch.setenv(INPUT_ROOTS, f"{one.home}/data,x,{tmp_path}")
    monkeypatch.chdir(tmp_path)
    one.leads = leads.format(other=other.home)
    with refusal(r"which may not be read here: FLAT_TOKENS_INPUT_ROOTS allows", (ValueError, OSError)):
        client(f"{one.home}/data/to/a.jsonl", tmp_path)
    assert other.paths == []
    assert not any("secret" in path for path in one.paths)


@CLIENTS
def test_a_redirect_within_the_roots_is_followed(servers, tmp_path, monkeypatch, client):
    one, other = servers
    monkeypatch.chdir(tmp_path)
    one.leads = f"{other.home}/data/a.jsonl"
    for roots in ("", f"{one.home}/data,{other.home}/data/,x"):
        monkeypatch.setenv(INPUT_ROOTS, roots)
        client(f"{one.home}/data/to/a.jsonl", tmp_path)
        assert other.paths.pop() == "/data/a.jsonl"


@CLIENTS
@pytest.mark.parametrize("leads", ["/data/a.jsonl", "{one}/data/b.jsonl", "/again/to/a.jsonl"])
def test_a_redirect_to_another_path_of_the_same_server_is_followed(servers, tmp_path, client, leads):
    """Also where that leads on."""
    one, _ = servers
    one.leads, one.to = leads.format(one=one.home), "/to/" if leads != "/again/to/a.jsonl" else "/first/to/"
    client(f"{one.home}/first/to/a.jsonl", tmp_path)
    assert one.paths[-1] == leads.removeprefix("{one}")


@CLIENTS
def test_a_redirect_to_an_address_of_credentials_is_refused(servers, tmp_path, client):
    servers[0].leads = "http://[2002:a9fe:a9fe::1]/latest"
    with refusal("an address at which cloud machines get", (ValueError, OSError)):
        client(f"{servers[0].home}/to/a.jsonl", tmp_path)


@CLIENTS
def test_a_name_of_a_link_local_address_is_refused_when_it_is_connected_to(servers, tmp_path, monkeypatch, client):
    """What the name led to is looked at, not what it may lead to the next time."""
    import tasks.locations

    numbers = tasks.locations._numbers
    monkeypatch.setattr(tasks.locations, "_numbers", lambda host: numbers("169.254.0.1" if host == "127.0.0.1" else host))
    url = servers[0].home.replace("127.0.0.1", "localhost")
    with refusal(r"localhost \(127.0.0.1\), an address at which cloud", (ValueError, OSError)):
        client(f"{url}/data/a.jsonl", tmp_path)
    assert servers[0].paths == []


def test_headers_of_ours_stay_with_the_first_server(servers):
    one, other = servers
    one.leads = f"{other.home}/data/a.jsonl"
    import fsspec

    fs = fsspec.filesystem(
        "http", client_kwargs={"headers": {"X-Key": "ours", "Authorization": "ours"}}, skip_instance_cache=True
    )
    assert fs.cat(f"{one.home}/to/a.jsonl") == BODY
    assert one.headers[0]["X-Key"] == one.headers[0]["Authorization"] == "ours"
    assert not {"X-Key", "Authorization"} & set(other.headers[0])


def test_what_begins_at_the_hub_may_lead_to_public_servers_by_https(monkeypatch):
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


def test_a_root_may_name_a_link_local_address(monkeypatch):
    monkeypatch.setenv(INPUT_ROOTS, "http://169.254.7.7:8080/data")
    assert Source(path="http://169.254.7.7:8080/data/a.jsonl").path
    with refusal("may not be read here"):
        Source(path="http://169.254.7.7/data/a.jsonl")
