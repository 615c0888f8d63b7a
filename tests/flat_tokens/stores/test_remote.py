"""Reading from object stores and web servers: few requests, all at once, in every process."""

import functools
import http.server
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from aiohttp import web

import flat_tokens
from tests.made import write_sequences
from tests.processes import serving
from tests.proxy import Proxy, proxy, serving_app

SEQUENCES = 3000
LENGTH = 300


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 100_000, LENGTH, dtype=np.uint32) for _ in range(SEQUENCES)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in every layout, on a disk."""
    root = tmp_path_factory.mktemp("datasets")
    for layout in flat_tokens.LAYOUTS:
        write_sequences(root / layout, sequences(), layout=layout)
    return root


@pytest.fixture(scope="module")
def web_server(root: Path) -> Iterator[str]:
    """A server of those files that answers questions for ranges, on loopback."""
    app = web.Application()
    app.router.add_static("/", root)
    with serving_app(app) as url:
        yield url


@pytest.fixture
def slow_web(web_server: str) -> Iterator[Proxy]:
    with proxy(web_server, delay=0.05) as slow:
        yield slow
    fsspec.get_filesystem_class("http").clear_instance_cache()


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_once_open_a_packed_row_is_one_request(slow_web, layout):
    packed = flat_tokens.open(f"{slow_web.url}/{layout}").train.packed(256)
    expected = np.concatenate(sequences()).reshape(-1)
    packed[0]  # compact: asks for the shard's index as well
    slow_web.requests.clear()
    assert packed[3000].targets.tolist() == expected[3000 * 256 : 3001 * 256].tolist()
    assert len(slow_web.requests) == 1
    if layout == "mmap":
        # 3000 * 256 items and the checksums of 11 chunks of 65,536 stand before it
        first = 4 * (3000 * 256 + 11)
        assert slow_web.requests[0][1:] == ("/mmap/train/encoded_tokens/c/0", f"bytes={first}-{first + 1023}")


@pytest.mark.parametrize(("layout", "kept"), [("mmap", 1 << 24), ("compact", 1 << 24), ("compact", 1)])
def test_64_rows_are_asked_for_together(slow_web, layout, kept, monkeypatch):
    """One round trip; two where the shard's index is not known yet. Also of an array that is too large to be kept."""
    monkeypatch.setattr("flat_tokens.arrays.stored.DECODED_BYTES", kept)
    packed = flat_tokens.open(f"{slow_web.url}/{layout}").train.packed(256)
    rows = np.random.default_rng(1).permutation(len(packed))[:64]
    expected = np.concatenate(sequences())
    slow_web.requests.clear()
    slow_web.most_waiting = 0
    batch = packed.batch(rows)
    assert batch.targets.tolist() == [expected[row * 256 : (row + 1) * 256].tolist() for row in rows]
    asked = [request for request in slow_web.requests if not request[2].startswith("bytes=-")]
    assert len(slow_web.requests) - len(asked) == (1 if layout == "compact" else 0)
    assert len(asked) <= 64  # rows that lie close together share one
    assert slow_web.most_waiting > len(asked) // 2


def test_a_server_that_knows_no_ranges_is_read_as_well(root):
    """It answers with the whole file."""
    handler = functools.partial(_Quiet, directory=str(root))
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        for layout in flat_tokens.LAYOUTS:
            train = flat_tokens.open(f"{url}/{layout}").train
            assert train.sequence(17).tolist() == sequences()[17].tolist()
            assert train.packed(100)[99].targets[:3].tolist() == sequences()[33][:3].tolist()
    fsspec.get_filesystem_class("http").clear_instance_cache()


def test_threads_read_at_once(root, web_server):
    order, expected = np.random.default_rng(2).integers(0, SEQUENCES, 400), sequences()
    for path in (*(root / layout for layout in flat_tokens.LAYOUTS), f"{web_server}/compact"):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(flat_tokens.open(path).train.sequence, order))
        assert np.array_equal(found, [expected[i] for i in order])
    fsspec.get_filesystem_class("http").clear_instance_cache()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def _read(split: flat_tokens.FlatTokens, i: int) -> list[int]:
    return split.sequence(i).tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_read_what_their_parent_opened(root, web_server, method):
    """The parent has read, so there are mapped files, connections and an event loop that a child must not share."""
    for path in (str(root / "mmap"), str(root / "compact"), f"{web_server}/mmap", f"{web_server}/compact"):
        train = flat_tokens.open(path).train
        expected = [_read(train, i) for i in range(0, SEQUENCES, 500)]
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            found = pool.starmap_async(_read, [(train, i) for i in range(0, SEQUENCES, 500)]).get(120)
        assert found == expected
    fsspec.get_filesystem_class("http").clear_instance_cache()
