"""Objects appear whole or not at all, with a digest of what is in them, and ranges of them read right."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from blake3 import blake3
from fsspec.spec import AbstractFileSystem

from flat_tokens.stores import local
from flat_tokens.stores.local import DIRECT_ALIGNMENT, SMALL_BYTES, WRITE_BUFFER_BYTES
from flat_tokens.stores.retry import SILENCE_SECONDS
from flat_tokens.stores.store import DIRECT_READ_BYTES, PART_BYTES, Store, StoredObject
from tests.flat_tokens.arrays.test_arrays import files
from tests.refusal import refusal

MEBIBYTE = 1 << 20


def some_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


# Writing


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("before", [0, 4092, WRITE_BUFFER_BYTES - 131_076, WRITE_BUFFER_BYTES - 1])
@pytest.mark.parametrize(
    ("count", "width"), [(0, 10), (3, 10), (40, 131_076), (2, WRITE_BUFFER_BYTES), (2, WRITE_BUFFER_BYTES + 1)]
)
def test_rows_follow_each_other_whichever_of_them_fit_the_buffer(tmp_path, where, before, count, width):
    store = Store.at(tmp_path if where == "local" else f"memory://{uuid.uuid4().hex}")
    head, rows = some_bytes(before), np.frombuffer(some_bytes(count * width), np.uint8).reshape(count, width)

    def fill(some: np.ndarray[Any, np.dtype[np.uint8]], first: int) -> None:
        some[:] = rows[first : first + len(some)]

    with store.create("object") as writer:
        writer.write(head)
        writer.write_rows(count, width, fill)
        assert writer.size == before + count * width
        writer.write(b"tail")
    data = head + rows.tobytes() + b"tail"
    assert store.read("object") == data
    assert writer.stored == StoredObject("object", len(data), f"blake3:{blake3(data).hexdigest()}")


def interrupted(store: Store, size: int) -> None:
    """Write an object, but for its end."""
    with store.create("object") as writer:
        writer.write(some_bytes(size))
        raise InterruptedError("somebody pulled the plug")


@pytest.mark.parametrize("size", [10, 9_999_991])
def test_nothing_or_the_former_object_is_there_until_the_new_one_is_whole(tmp_path, size):
    store = Store.at(tmp_path)
    with store.create("object") as writer:
        writer.write(some_bytes(size))
        assert not (tmp_path / "object").exists()
    store.put("object", b"old")
    with store.create("object") as writer:
        writer.write(some_bytes(size))
        assert store.read("object") == b"old"
    with refusal("plug", InterruptedError):
        interrupted(store, size + 1)
    assert store.read("object") == some_bytes(size)
    assert list(files(tmp_path)) == ["object"]


def test_large_objects_wait_in_the_staging_directory(tmp_path):
    """A crash leaves what is unfinished there, not among the finished objects."""
    store = Store.at(tmp_path / "store", staging=str(tmp_path / "staging/attempt"))
    with store.create("below/object") as writer:
        writer.write(some_bytes(9_999_991))
        assert len(files(tmp_path / "staging")) == 1
        assert files(tmp_path / "store") == {}
    assert files(tmp_path) == {"store/below/object": some_bytes(9_999_991)}
    store.put("small", b"small")
    assert files(tmp_path / "staging") == {}
    assert store.read("small") == b"small"


@pytest.mark.parametrize("failing", range(5))
def test_a_full_disk_surfaces_with_the_objects_name_and_leaves_nothing(tmp_path, monkeypatch, failing):
    """At the first write, in the middle, or at the last."""
    real, left, data = os.write, [failing], some_bytes(17 * MEBIBYTE + 5)

    def full(fd: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        Store.at(tmp_path).put("object", data)
    monkeypatch.undo()
    assert raised.value.errno == errno.ENOSPC
    assert str(tmp_path / "object") in str(raised.value)
    assert files(tmp_path) == {}
    Store.at(tmp_path).put("object", data)  # the writing threads and buffers are none the worse
    assert files(tmp_path) == {"object": data}


@pytest.mark.parametrize("size", [5, 9_999_991])
@pytest.mark.parametrize("function", ["fsync", "replace", "ftruncate"])
def test_a_failure_at_the_end_surfaces_and_leaves_nothing(tmp_path, monkeypatch, function, size):
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, function, fail)
    with refusal("Input/output error", OSError):
        Store.at(tmp_path).put("object", some_bytes(size))
    monkeypatch.undo()
    assert files(tmp_path) == {}


def test_writes_that_the_system_cuts_short_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(4096, len(data) // 3 // 4096 * 4096)]))
    data = some_bytes(9_999_991)
    Store.at(tmp_path).put("object", data)
    monkeypatch.undo()
    assert files(tmp_path) == {"object": data}


def test_no_descriptor_is_left_open(tmp_path, monkeypatch):
    """Neither by what succeeds nor by what fails."""
    Store.at(tmp_path).put("object", some_bytes(9_999_991))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Store.at(tmp_path).put("object", some_bytes(9_999_991))
        with pytest.raises(InterruptedError):
            interrupted(Store.at(tmp_path), 9_999_991)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_threads_write_at_once(tmp_path):
    """Each object is its own thread's, although buffers and writing threads are shared."""
    store, barrier = Store.at(tmp_path), threading.Barrier(6)

    def put(seed: int) -> None:
        barrier.wait()
        for round_ in range(3):
            store.put(f"{seed}/{round_}", some_bytes(5 * MEBIBYTE + seed, seed))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(put, range(6)))
    assert files(tmp_path) == {f"{s}/{r}": some_bytes(5 * MEBIBYTE + s, s) for s in range(6) for r in range(3)}


FORK = """
import os, sys, time
from blake3 import blake3
from flat_tokens.stores.store import Store

store = Store.at(sys.argv[1])

def put(name, seed):
    data = bytes([seed]) * (9 << 20)
    stored = store.put(name, data)
    if stored.digest != f"blake3:{blake3(open(store.path(name), 'rb').read()).hexdigest()}":
        raise SystemExit(f"{name} is not what was written")

put("before", 1)
children = []
for child in range(2):
    if not (pid := os.fork()):
        for i in range(3):
            put(f"child-{child}-{i}", 10 + child)
        os._exit(0)
    children.append(pid)
for i in range(3):
    put(f"parent-{i}", 2)
for pid in children:
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("a child failed")
"""


def test_parent_and_child_both_write_after_a_fork(tmp_path):
    """At the same time: the child has threads of its own, and shares no buffer with the parent."""
    ignored = "ignore:This process:DeprecationWarning"  # Python 3.12 says so of every fork where there are threads
    run = subprocess.run([sys.executable, "-W", ignored, "-c", FORK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    written = {name: set(data) for name, data in files(tmp_path).items()}
    expected = {"before": {1}} | {f"parent-{i}": {2} for i in range(3)}
    assert written == expected | {f"child-{child}-{i}": {10 + child} for child in range(2) for i in range(3)}


# Reading


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    root, data = tmp_path_factory.mktemp("large"), some_bytes(10 * MEBIBYTE + 123)
    Store.at(root).put("object", data)
    return root, data


EDGES = [0, 1, DIRECT_ALIGNMENT - 1, DIRECT_ALIGNMENT, DIRECT_READ_BYTES - 1, DIRECT_READ_BYTES, DIRECT_READ_BYTES + 1]
EDGES += [WRITE_BUFFER_BYTES - 2 * DIRECT_ALIGNMENT + i for i in (-1, 0, 1)] + [WRITE_BUFFER_BYTES]


@pytest.mark.parametrize("length", [*EDGES, MEBIBYTE, 2 * MEBIBYTE, 10 * MEBIBYTE + 123])
@pytest.mark.parametrize(
    "start", [*EDGES, 9 * MEBIBYTE, 9 * MEBIBYTE + 123, 10 * MEBIBYTE + 113, 10 * MEBIBYTE + 122, 10 * MEBIBYTE + 124]
)
def test_every_way_to_read_a_range_gives_the_same_bytes(large, start, length):
    """Through the page cache, and past it for what is read once; what is beyond the end is cut off."""
    root, data = large
    stop = start + length
    for store in (Store.at(root), Store.at(root, read_once=True)):
        assert store.read_range("object", start, stop) == data[start:stop]
        with store.borrow_range("object", start, stop) as borrowed:
            assert borrowed == data[start:stop]


def test_borrowed_ranges_do_not_share_a_buffer(large):
    root, data = large
    store = Store.at(root, read_once=True)
    with store.borrow_range("object", 0, MEBIBYTE) as first, store.borrow_range("object", MEBIBYTE, 2 * MEBIBYTE) as second:
        assert first == data[:MEBIBYTE]
        assert second == data[MEBIBYTE : 2 * MEBIBYTE]


@pytest.mark.parametrize("read_once", [False, True])
def test_what_is_not_there_is_a_file_not_found_error(tmp_path, read_once):
    store = Store.at(tmp_path, read_once=read_once)
    for attempt in (store.read, store.size, store.digest, lambda key: store.read_range(key, 0, MEBIBYTE)):
        with refusal(f"{tmp_path}/nothing", FileNotFoundError):
            attempt("nothing")
    with refusal(f"{tmp_path}/nothing", FileNotFoundError), store.borrow_range("nothing", 0, MEBIBYTE):
        pass
    assert not store.exists("nothing")
    store.remove("nothing")


# Stores


@pytest.fixture(params=["path", "file://", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param != "memory://":
        yield Store.at(tmp_path if request.param == "path" else f"file://{tmp_path}")
        return
    name = f"memory://{uuid.uuid4().hex}"
    yield Store.at(name)
    fsspec.filesystem("memory").store.clear()


def test_every_store_keeps_objects(store):
    data = some_bytes(100_000)
    stored = store.put("a/b/object", data)
    assert stored == StoredObject("a/b/object", 100_000, f"blake3:{blake3(data).hexdigest()}") == store.digest("a/b/object")
    assert store.read("a/b/object") == data
    assert store.read_range("a/b/object", 17, 4321) == data[17:4321]
    assert store.size("a/b/object") == 100_000
    assert store.exists("a")
    assert [store.has(key) for key in ("a/b/object", "a/b/nothing", "a")] == [True, False, False]
    assert store.put("empty", b"").size == 0
    below = store / "a" / "b"
    assert below.read("object") == data
    assert Store.at(below.url).read("object") == data


def test_every_store_lists_and_removes(store):
    for key in ("a/one", "a/b/two", "three", ".hidden"):
        store.put(key, key.encode())
    assert dict(store.listing()) == {"a/one": 5, "a/b/two": 7, "three": 5, ".hidden": 7}
    assert dict((store / "a").listing()) == {"one": 5, "b/two": 7}
    store.remove("three")
    store.remove("a/b")
    store.remove("nothing")
    assert dict(store.listing()) == {"a/one": 5, ".hidden": 7}


@pytest.mark.parametrize("size", [0, 10, WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES + 1, 3 * WRITE_BUFFER_BYTES])
@pytest.mark.parametrize("fails", [False, True])
def test_large_objects_of_a_remote_store_are_held_in_the_staging_directory(tmp_path, size, fails):
    """Until they are whole; nothing is left there, and nothing of them is seen before."""
    staging = tmp_path / "made/when needed"
    store = Store.at(f"memory://{uuid.uuid4().hex}", staging=str(staging))
    with refusal("plug", InterruptedError) if fails else nullcontext(), store.create("object") as writer:
        for start in range(0, size, 1_000_003):
            writer.write(some_bytes(size)[start : start + 1_000_003])
        assert sum(path.stat().st_size for path in staging.rglob("*")) + WRITE_BUFFER_BYTES >= size
        assert not store.exists("object")
        if fails:
            raise InterruptedError("somebody pulled the plug")
    assert store.exists("object") is not fails
    assert fails or store.read("object") == some_bytes(size)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("size", [0, 10, PART_BYTES, 2 * PART_BYTES + 5])
def test_files_are_uploaded_and_read_in_blocks(tmp_path, size):
    data = some_bytes(size)
    (tmp_path / "file").write_bytes(data)
    store = Store.at(f"memory://{uuid.uuid4().hex}")
    store.upload("below/object", tmp_path / "file")
    assert b"".join(store.blocks("below/object")) == data == b"".join(Store.at(tmp_path).blocks("file"))
    assert b"".join(store.blocks("below/object", 7)) == data[7:] == b"".join(Store.at(tmp_path).blocks("file", 7))
    assert store.digest("below/object", "sha256").digest == hashlib.sha256(data).hexdigest()


def test_what_a_person_has_configured_goes_before(monkeypatch):
    """Clients are told how long to wait; credentials and other settings of theirs come from fsspec's configuration."""
    pytest.importorskip("s3fs")
    settings = {
        "http": {"client_kwargs": {"headers": {"Authorization": "Bearer x"}}},
        "s3": {"key": "k", "secret": "s", "config_kwargs": {"read_timeout": 7}},
    }
    monkeypatch.setattr(fsspec.config, "conf", settings)
    client = Store.at("http://127.0.0.1:9/out").fs.client_kwargs
    assert client["headers"] == {"Authorization": "Bearer x"}
    assert client["timeout"].sock_read == SILENCE_SECONDS
    s3 = Store.at("s3://bucket/out").fs
    assert (s3.key, s3.secret, s3.config_kwargs["read_timeout"]) == ("k", "s", 7)
    assert s3.config_kwargs["retries"]["mode"] == "standard"
    for protocol in settings:
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


class Forbidding(AbstractFileSystem):  # type: ignore[misc]
    """A store that answers nothing."""

    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        raise PermissionError(path)

    def cat_file(self, path: str, **_: Any) -> bytes:
        raise PermissionError(path)


@pytest.mark.parametrize("ask", [Store.exists, Store.has])
def test_no_answer_is_not_taken_for_an_absence(ask):
    with pytest.raises(PermissionError):
        ask(Store("bucket", Forbidding()), "object")


def test_a_root_is_written_one_way(tmp_path):
    assert Store.at(tmp_path) == Store.at(f"{tmp_path}/") == Store.at(f"file://{tmp_path}")
    assert Store.at(tmp_path).url == str(tmp_path)
    assert (Store.at(tmp_path) / "a").path("b/c") == f"{tmp_path}/a/b/c"
    assert Store.at("/").path("a") == "/a"


@pytest.mark.parametrize("before", [0, 5, SMALL_BYTES + 1, WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES + 5])
@pytest.mark.parametrize("after", [0, 7, WRITE_BUFFER_BYTES])
def test_what_was_settled_stands_in_the_unfinished_file(tmp_path, before, after):
    """With what is to come behind it, whose place is taken by what comes: the object is that of a writer that did not settle."""
    head, tail = some_bytes(before), some_bytes(after)
    store, unfinished = Store.at(tmp_path / "store"), tmp_path / "unfinished/object"
    with store.create("object", unfinished) as writer:
        writer.write(head)
        for rest in (b"three", b"", b"the last rest"):
            writer.settle(rest)
            assert unfinished.read_bytes()[: before + len(rest)] == head + rest
        writer.write(tail)
        assert not (tmp_path / "store/object").exists()
    assert store.read("object") == head + tail
    assert writer.stored == StoredObject("object", before + after, f"blake3:{blake3(head + tail).hexdigest()}")
    assert not unfinished.exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_what_was_settled_has_a_name_on_the_disk_at_every_moment(tmp_path, has_links, monkeypatch):
    """Where the file system gives a file two names, the old one goes when the new one is on the disk."""
    store, unfinished = Store.at(tmp_path / "store"), tmp_path / "unfinished"
    synced = []
    real = local.sync

    def noted(path: Path) -> None:
        real(path)
        if path == tmp_path / "store":
            synced.append((unfinished.exists(), (path / "object").exists()))

    def no_link(*names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(local, "sync", noted)
    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    with store.create("object", unfinished) as writer:
        writer.write(b"some bytes")
        writer.settle(b"")
    assert synced[-1] == (has_links, True)
    assert store.read("object") == b"some bytes"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["object", "store"]


@pytest.mark.parametrize("settled", [True, False])
def test_an_unfinished_file_outlives_a_failure_if_it_was_settled(tmp_path, settled):
    store, unfinished = Store.at(tmp_path / "store"), tmp_path / "unfinished"
    with refusal("stop"), store.create("object", unfinished) as writer:
        writer.write(b"some bytes")
        if settled:
            writer.settle(b"")
        writer.write(some_bytes(WRITE_BUFFER_BYTES))
        raise ValueError("stop")
    assert unfinished.exists() == settled
    assert not settled or unfinished.read_bytes().startswith(b"some bytes")
    assert not (tmp_path / "store/object").exists()
