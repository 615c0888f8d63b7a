"""Sources on web servers and hubs that are busy, cut connections and change: whole files, or a clear error."""

import hashlib
import time
import types
from collections.abc import Iterator

import fsspec
import numpy as np
import pytest

import flat_tokens
import flat_tokens.stores.retry
import tasks.download.fetch
import tasks.download.sources
from flat_tokens.stores.store import Store
from tasks.config import HubDataset, Source
from tasks.download.fetch import fetch_file
from tasks.download.hub import fetch_hub, resolve_hub
from tasks.download.sources import resolve_source
from tests.faults.stores import QUICKER
from tests.flat_tokens.stores.test_remote import root, sequences, web_server  # noqa: F401  fixtures
from tests.proxy import MANY_FAULTS, Proxy, at_random, proxy
from tests.stand_in_hub import isolate, serve

SEEDS = range(6)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no try wait long for the next one, and no silence be borne for long."""
    quick = types.SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr("flat_tokens.stores.retry.time", quick)
    for module in (tasks.download.sources, tasks.download.fetch):
        monkeypatch.setattr(module, "TIMEOUT", (10, 1.5))
    monkeypatch.setattr("flat_tokens.stores.retry.FIRST_WAIT", flat_tokens.stores.retry.FIRST_WAIT / QUICKER)
    monkeypatch.setattr("flat_tokens.stores.store.SILENCE_SECONDS", 1.5)


@pytest.fixture
def between(web_server: str) -> Iterator[Proxy]:  # noqa: F811
    with proxy(web_server) as between:
        yield between
    fsspec.get_filesystem_class("http").clear_instance_cache()


def test_files_of_a_spoiled_web_server_come_whole(between, root, tmp_path):  # noqa: F811
    """Cut off, they go on where they were."""
    data = b"".join(b'{"text": "document %06d %d"}\n' % (i, i * i) for i in range(60_000))
    (root / "data.jsonl").write_bytes(data)
    source = Source(path=f"{between.url}/data.jsonl")
    for seed in SEEDS:
        between.spoil = at_random(seed, {**MANY_FAULTS, "half": 0.4})
        (found,) = resolve_source(source, 0).files
        file = fetch_file(found, (source,), tmp_path / str(seed))
        assert (file.sha256, file.size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert any(asked for _, _, asked in between.requests)
    assert "half" in between.faults


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_readers_of_a_spoiled_web_server_read_right(between, layout):
    expected = np.concatenate(sequences())
    rows = np.random.default_rng(1).permutation(len(expected) // 256)[:40]
    for seed in SEEDS[:2]:
        between.spoil = at_random(seed)
        packed = flat_tokens.open(f"{between.url}/{layout}").train.packed(256)
        assert packed.batch(rows).targets.tolist() == [expected[row * 256 : (row + 1) * 256].tolist() for row in rows]
    assert between.faults


def test_what_a_busy_web_server_does_not_tell_is_not_absent(between):
    store = Store.at(f"{between.url}/mmap")
    between.left[:] = ["503", "reset"] * 3
    assert store.exists("zarr.json")
    assert between.left == []
    assert not store.exists("nothing.json")


def test_files_of_a_spoiled_hub_come_whole(tmp_path, monkeypatch):
    from huggingface_hub import HfFileSystem, close_session
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http, "time", types.SimpleNamespace(sleep=lambda seconds: None, time=lambda: 0.0))
    names = {f"data/train-{i}.jsonl": b'{"text": "%d"}\n' % i * 20_000 for i in range(3)}
    with serve() as hub, proxy(hub.url) as between:
        between.stall_seconds = 0.5
        commit = hub.commit("org/name", names)
        for seed in SEEDS[:3]:
            isolate(monkeypatch, between.url, tmp_path / f"home-{seed}")
            between.spoil = at_random(seed)
            pinned = resolve_hub(Source(hub=HubDataset(path="org/name")), 0)
            assert pinned.revision == commit
            assert {file.name: fetch_hub(file, tmp_path / f"files-{seed}").read_bytes() for file in pinned.files} == names
            close_session()
            HfFileSystem.clear_instance_cache()
        assert between.faults
