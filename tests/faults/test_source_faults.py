"""Datasets on web servers and sources on hubs that are busy and cut connections: what is read is right."""

import types
from collections.abc import Iterator

import fsspec
import numpy as np
import pytest

import flat_tokens
from tasks.config import HubDataset, Source
from tasks.download.hub import fetch_hub, resolve_hub
from tests.faults.stores import hurry
from tests.flat_tokens.stores.test_remote import root, sequences, web_server  # noqa: F401  fixtures
from tests.proxy import Proxy, at_random, proxy
from tests.stand_in_hub import isolate, serve

SEEDS = range(6)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no try wait long for the next one, and no silence be borne for long."""
    hurry(monkeypatch)


@pytest.fixture
def between(web_server: str) -> Iterator[Proxy]:  # noqa: F811
    with proxy(web_server) as between:
        yield between
    fsspec.get_filesystem_class("http").clear_instance_cache()


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_readers_of_a_spoiled_web_server_read_right(between, layout):
    expected = np.concatenate(sequences())
    rows = np.random.default_rng(1).permutation(len(expected) // 256)[:40]
    for seed in SEEDS[:2]:
        between.spoil = at_random(seed)
        packed = flat_tokens.open(f"{between.url}/{layout}").train.packed(256)
        assert packed.batch(rows).targets.tolist() == [expected[row * 256 : (row + 1) * 256].tolist() for row in rows]
    assert between.faults


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
