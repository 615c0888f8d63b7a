"""A dataset in a store, read through a cache: the same bytes, each fetched once, whatever becomes of the cache."""

import multiprocessing
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import flat_tokens
from flat_tokens.stores import cached
from tests.damage import flip
from tests.elsewhere import elsewhere
from tests.refusal import refusal
from tests.slow_store import SlowStore, in_all_layouts, quick  # noqa: F401  a fixture

ROOMY = 1 << 30
IDS = np.random.default_rng(0).integers(0, 60_000, (3000, 300)).astype(np.uint32)
ROWS = IDS.reshape(-1, 250)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_all_layouts(tmp_path_factory.mktemp("datasets"), IDS)


def read_all(path: Path, cache: Path, most_bytes: int = ROOMY) -> None:
    """Compare every row and every document of a dataset at ``slow://``."""
    train = flat_tokens.open(f"slow://{path}", cache=cache, cache_bytes=most_bytes).train
    order = np.random.default_rng(1).permutation(len(ROWS))
    for part in np.array_split(order, 7):
        assert np.array_equal(train.packed(250).batch(part).targets, ROWS[part])
    assert np.array_equal(train.documents(300).batch(np.arange(0, 3000, 7)).targets, IDS[::7])
    assert np.array_equal(train.sequence(2999), IDS[2999])


def rows_of(root: Path, cache: Path) -> Any:
    """Packed rows of the dataset at ``slow://``."""
    return flat_tokens.open(f"slow://{root}/mmap", cache=cache, cache_bytes=ROOMY).train.packed(250)


def asked_for() -> list[str]:
    """The objects of arrays that were asked for."""
    return [path for path, _, _ in SlowStore.requests if "/c/" in path or "/encoded_tokens/" in path]


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_what_was_read_once_is_not_fetched_again_by_any_process(root, tmp_path, layout):
    read_all(root / layout, tmp_path)
    assert len(SlowStore.requests) == len(set(SlowStore.requests))
    SlowStore.reset()
    read_all(root / layout, tmp_path)
    assert asked_for() == []
    shutil.copytree(root / layout, tmp_path / "elsewhere")  # units are found by content, not by place
    read_all(tmp_path / "elsewhere", tmp_path)
    assert asked_for() == []


def test_what_a_slow_disk_has_not_got_yet_is_not_fetched_again(root, tmp_path, monkeypatch):
    is_handed_over, may_write = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        is_handed_over.set()
        may_write.wait(60)

    train = flat_tokens.open(f"slow://{root}/mmap", cache=tmp_path, cache_bytes=ROOMY, read_ahead=0).train
    store = cast("cached.CachedStore", train.encoded_tokens.store)
    first, second, *_ = units = store.units_of([("c/0", 0, 3 << 20)])
    monkeypatch.setattr(cached.DiskCache, "add", wait)
    monkeypatch.setattr(store.units, "_most_bytes", first.stop)  # of one unit
    store.fetch_ahead(units[:1])
    assert is_handed_over.wait(60)
    store.read_range("c/0", second.start, second.stop)  # takes its place
    before = len(asked_for())
    assert len(store.read_range("c/0", 0, first.stop)) == first.stop
    assert len(asked_for()) == before
    assert store.units._begin(second, store.chunks, store.units._due)[0].found.done()  # it has come since a reader looked
    may_write.set()


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_a_damaged_cache_is_fetched_again(root, tmp_path, layout):
    read_all(root / layout, tmp_path)
    for path in tmp_path.iterdir():
        flip(path)
    SlowStore.reset()
    read_all(root / layout, tmp_path)
    assert asked_for()
    SlowStore.reset()
    read_all(root / layout, tmp_path)
    assert asked_for() == []


@pytest.mark.parametrize(
    ("key", "place", "message"),
    [
        ("seq_starts/c/0", 50, "seq_starts/c/0: does not have the digest that the manifest says"),
        ("encoded_tokens/c/0", 4 * (3 * 65_537 + 9), "encoded_tokens/c/0: inner chunk 3 does not match its crc32c"),
        ("encoded_tokens/c/0", 4 * (13 * 65_537 + 65_536), "encoded_tokens/c/0: inner chunk 13 does not match its crc32c"),
    ],
)
def test_wrong_bytes_of_the_store_are_an_error_and_are_not_kept(root, tmp_path, key, place, message):
    shutil.copytree(root / "mmap", tmp_path / "dataset")
    path = tmp_path / "dataset/train" / key
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with refusal(message):
        read_all(tmp_path / "dataset", tmp_path / "cache")
    shutil.copytree(root / "mmap", tmp_path / "dataset", dirs_exist_ok=True)
    read_all(tmp_path / "dataset", tmp_path / "cache")


def test_an_object_that_is_gone_is_an_error_that_names_it(root, tmp_path):
    shutil.copytree(root / "mmap", tmp_path / "dataset")
    train = flat_tokens.open(f"slow://{tmp_path}/dataset", cache=tmp_path / "cache", cache_bytes=ROOMY).train
    (tmp_path / "dataset/train/encoded_tokens/c/0").unlink()
    with refusal("encoded_tokens/c/0", FileNotFoundError):
        train.packed(250)[0]


def test_a_dataset_without_a_manifest_has_no_cache(root, tmp_path):
    shutil.copytree(root / "mmap", tmp_path / "dataset")
    (tmp_path / "dataset/manifest.json").unlink()
    with refusal(r"has no manifest.json, which a cache needs"):
        flat_tokens.open(f"slow://{tmp_path}/dataset", cache=tmp_path / "cache", cache_bytes=ROOMY)
    for options in ({"cache": tmp_path}, {"cache_bytes": 5}, {"cache": tmp_path, "cache_bytes": 0}):
        with refusal("cache"):
            flat_tokens.open(f"slow://{tmp_path}/dataset", **options)


def test_a_local_dataset_takes_no_cache(root, tmp_path):
    dataset = flat_tokens.open(root / "mmap", cache=tmp_path / "cache", cache_bytes=ROOMY)
    assert np.array_equal(dataset.train.packed(250)[3].targets, ROWS[3])
    assert not (tmp_path / "cache").exists()


def test_threads_that_want_the_same_ask_once(root, tmp_path, monkeypatch):
    monkeypatch.setattr(cached, "FIRST_LATE", 60)  # on a busy machine a request may take a second
    view = rows_of(root, tmp_path)
    SlowStore.reset(lambda number, path: 0.02)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: view.batch(np.arange(k % 3, len(view), 40)).targets, range(24)))
    assert all(np.array_equal(rows, ROWS[k % 3 :: 40]) for k, rows in enumerate(found))
    assert len(SlowStore.requests) == len(set(SlowStore.requests)) == 4


def test_an_error_of_a_request_ahead_is_not_that_of_the_read(root, tmp_path, monkeypatch):
    """A read that waits for such a request asks anew when it fails."""
    view = rows_of(root, tmp_path)
    begun, joined, released = threading.Event(), threading.Event(), threading.Event()

    def fails_once(number: int, path: str) -> float:
        if number == 0:
            begun.set()
            released.wait(60)
            raise PermissionError(path)
        return 0

    def begin(*arguments: Any) -> Any:
        found = ask(*arguments)
        joined.set()
        return found

    SlowStore.reset(fails_once)
    array = cast("Any", view.tokens.encoded_tokens)
    array.store.fetch_ahead(array.units_of(*view.token_ranges(np.array([0]))))
    assert begun.wait(60)
    ask = cached.Units._begin
    monkeypatch.setattr(cached.Units, "_begin", begin)
    with ThreadPoolExecutor(1) as reader:
        found = reader.submit(lambda: view[0].targets)
        assert joined.wait(60)
        released.set()
        assert np.array_equal(found.result(60), ROWS[0])
    assert len(SlowStore.requests) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_takes_too_long_is_made_once_more(root, tmp_path, monkeypatch, fails):
    """By another thread: the first one may be the only one that there is, as where all else is on the disk. It counts if the
    second one fails.
    """
    monkeypatch.setattr(cached, "FIRST_LATE", 0.05)
    for _ in range(2):
        view = rows_of(root, tmp_path)
    released = threading.Event()

    def stuck(number: int, path: str) -> float:
        if number == 0:
            released.wait(60)
        elif fails:
            threading.Timer(0.3, released.set).start()
            raise PermissionError
        return 0

    SlowStore.reset(stuck)
    assert np.array_equal(view[0].targets, ROWS[0])
    assert SlowStore.requests[0] == SlowStore.requests[1]
    assert fails or len(SlowStore.requests) == 2
    assert fails or cast("Any", view.tokens.encoded_tokens).store.units.asked_again == 1
    released.set()


def test_loaders_with_a_cache_can_be_pickled_and_forked(root, tmp_path):
    view = rows_of(root, tmp_path)
    assert np.array_equal(view[1].targets, ROWS[1])  # its threads run
    assert np.array_equal(pickle.loads(pickle.dumps(view))[2].targets, ROWS[2])
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(not np.array_equal(view[3500].targets, ROWS[3500]))
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.slow
def test_processes_share_a_cache(root, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(elsewhere, read_all, root / "mmap", tmp_path, 3_000_000) for _ in range(3)]:
            done.result()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3_000_000
