"""Datasets on web servers that are busy and cut connections: what is read is right."""

from collections.abc import Iterator

import fsspec
import numpy as np
import pytest

import flat_tokens
from tests.faults.stores import hurry
from tests.flat_tokens.stores.test_remote import root, sequences, web_server  # noqa: F401  fixtures
from tests.proxy import Proxy, at_random, proxy


@pytest.fixture
def between(web_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:  # noqa: F811
    hurry(monkeypatch)
    with proxy(web_server) as between:
        yield between
    fsspec.get_filesystem_class("http").clear_instance_cache()


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_readers_of_a_spoiled_web_server_read_right(between, layout):
    expected = np.concatenate(sequences())
    rows = np.random.default_rng(1).permutation(len(expected) // 256)[:40]
    for seed in range(2):
        between.spoil = at_random(seed)
        packed = flat_tokens.open(f"{between.url}/{layout}").train.packed(256)
        assert packed.batch(rows).targets.tolist() == [expected[row * 256 : (row + 1) * 256].tolist() for row in rows]
    assert between.faults
