"""Mapped files: one bound for all arrays of a process, and errors of the system as they are. And what threads share."""

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numcodecs
import numpy as np
import pytest
import zarr

from flat_tokens.arrays import maps
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.arrays.maps import Recent, share_work
from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.stores.store import Store
from tests.calls import before_each_call
from tests.flat_tokens.arrays.test_arrays import OBJECT, small, write
from tests.refusal import refusal

KINDS = ("mmap", "compact", "blosc")


def written(root: Path, kind: str, items: np.ndarray[Any, Any]) -> StoredArray:
    """An array of many small files."""
    if kind == "blosc":
        array = zarr.create_array(
            root / kind, shape=items.shape, chunks=(OBJECT,), dtype="<u4", zarr_format=2, compressors=numcodecs.Blosc("lz4")
        )
        array[:] = items
        return open_array(Store.at(root / kind), "uint32")
    return write(root, small(cast(LayoutName, kind)), items, kind)


def gathered(array: StoredArray, starts: np.ndarray[Any, Any], length: int = 3) -> np.ndarray[Any, Any]:
    out = np.empty((len(starts), length), array.numpy_dtype)
    array.gather(starts, np.full(len(starts), length), out.reshape(-1), np.arange(len(starts)) * length)
    return out


FEW_DESCRIPTORS = """
import os, resource, sys, threading
from pathlib import Path
import numpy as np
from tests.flat_tokens.arrays.test_maps import KINDS, gathered, open_array
from flat_tokens.stores.store import Store

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
items = np.arange(12 * 40, dtype=np.uint32)
arrays = [open_array(Store.at(f"{sys.argv[1]}/{k}/{kind}"), "uint32") for k in range(4) for kind in KINDS]
problems = []

def read(seed):
    rng = np.random.default_rng(seed)
    try:
        for turn in range(3):
            for array in (arrays[k] for k in rng.permutation(len(arrays))):
                starts = rng.integers(0, len(items) - 3, 60)
                if not np.array_equal(gathered(array, starts), items[starts[:, None] + np.arange(3)]):
                    raise ValueError("other items than were written")
                for start in starts[:5].tolist():
                    if not np.array_equal(array.read(start, start + 3), items[start : start + 3]):
                        raise ValueError("other items than were written")
                if not np.array_equal(array.read(0, len(items)), items):
                    raise ValueError("other items than were written")
    except BaseException as error:
        problems.append(error)
        raise

read(0)  # all that is imported late is there: a fork in the middle of an import leaves its lock behind
threads = [threading.Thread(target=read, args=(seed,)) for seed in range(1, 5)]
for thread in threads:
    thread.start()
child = os.fork()
for thread in threads if child else []:
    thread.join()
if not child:
    read(9)
elif os.waitpid(child, 0)[1]:
    problems.append("the child failed")
if problems:
    os._exit(1)
"""


@pytest.mark.slow
def test_any_number_of_files_is_read_below_the_limit_of_descriptors(tmp_path):
    """By several threads and a forked child: 480 files of 12 arrays, with 64 descriptors."""
    items = np.arange(OBJECT * 40, dtype=np.uint32)
    for k in range(4):
        for kind in KINDS:
            written(tmp_path / str(k), kind, items)
    ignored = "ignore:This process:DeprecationWarning"  # the fork while there are threads is the point
    done = subprocess.run(
        [sys.executable, "-W", ignored, "-c", FEW_DESCRIPTORS, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_many_ranges_and_single_items_are_those_that_were_written(tmp_path, kind, monkeypatch):
    """In windows of mapped files too, whatever is before and after them in what is read."""
    monkeypatch.setattr("flat_tokens.arrays.stored.MANY_RANGES", 2)
    monkeypatch.setattr("flat_tokens.arrays.stored.RANGES_AT_A_TIME", 5)
    monkeypatch.setattr("flat_tokens.arrays.stored.WINDOWS", (3, 2, 1))
    items = np.arange(100, 100 + OBJECT * 20 - 5, dtype=np.uint32)
    array = written(tmp_path, kind, items)
    rng = np.random.default_rng(0)
    for _ in range(20):
        starts = rng.integers(0, len(items), 60)
        lengths = np.minimum(rng.integers(0, 6, 60), len(items) - starts)
        at = np.cumsum(lengths + 1) - lengths
        out = np.zeros(at[-1] + lengths[-1] + 1, np.uint32)
        array.gather(starts, lengths, out, at)
        expected = np.zeros_like(out)
        for start, length, place in zip(starts, lengths, at, strict=True):
            expected[place : place + length] = items[start : start + length]
        assert np.array_equal(out, expected)
        assert np.array_equal(array.take(starts), items[starts])
    assert array.take(np.empty(0, np.int64)).tolist() == []


def test_blocks_of_a_small_array_are_decoded_once(tmp_path):
    array = written(tmp_path, "compact", np.arange(OBJECT * 3, dtype=np.uint32))
    gathered(array, np.array([0, 17, 30]))
    Path(array.store.path(array._spec.object_key(1))).unlink()
    maps._make_room(0)
    assert gathered(array, np.array([1, 17])).tolist() == [[1, 2, 3], [17, 18, 19]]


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound of eight files. What other tests have mapped is let go."""
    gc.collect()
    maps._make_room(0)
    monkeypatch.setattr(maps, "most_maps", lambda: 8)
    return 8


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_share_the_bound(tmp_path, eight, kind):
    items = np.arange(OBJECT * 20, dtype=np.uint32)
    arrays = [written(tmp_path / str(k), kind, items) for k in range(3)]
    starts = np.random.default_rng(0).permutation(np.arange(20) * OBJECT)
    for _ in range(2):
        for array in arrays:
            assert np.array_equal(gathered(array, starts)[:, 0], items[starts])
            assert len(maps._alive) <= eight
    del arrays, array
    gc.collect()
    assert len(maps._alive) == len(maps._kept) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_used_last_stays_mapped(tmp_path, eight, kind):
    """A file that is read now and then is not opened again, however many others are read in between."""
    hot, cold = (written(tmp_path / name, kind, np.arange(OBJECT * 40, dtype=np.uint32)) for name in ("hot", "cold"))
    hot.read(0, 3)
    mapped = (hot._files or hot._words)[0]
    for k in range(40):
        cold.read(k * OBJECT, k * OBJECT + 3)
        hot._decoded.clear()
        assert hot.read(0, 3).tolist() == [0, 1, 2]
    assert (hot._files or hot._words)[0] is mapped


def test_the_bound_follows_the_limit(monkeypatch):
    for limit, expected in ((1024, 512), (3, 1), (1, 1), (1 << 20, 4096), (maps.resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(maps.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert maps.most_maps() == expected
        assert 1 <= maps.maps_of_a_read() <= expected


@pytest.mark.parametrize("kind", KINDS)
def test_where_others_hold_the_descriptors_fewer_files_are_mapped(tmp_path, eight, kind, monkeypatch):
    items = np.arange(OBJECT * 20, dtype=np.uint32)
    array = written(tmp_path, kind, items)
    array.read(0, len(items))
    real, free = mmap.mmap, 2

    def refused(*arguments: Any, **options: Any) -> mmap.mmap:
        if len(maps._alive) >= free:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", refused)
    array._decoded.clear()
    assert np.array_equal(array.read(0, len(items)), items)
    assert len(maps._alive) <= free


SYSTEM = ("EMFILE", "ENFILE", "EACCES", "ESTALE", "EIO", "ENODEV")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["mmap.mmap", "os.open"])
def test_errors_of_the_system_are_raised_as_they_are(tmp_path, kind, operation, monkeypatch):
    """With the file's path, and never as damage of the file."""
    array = written(tmp_path, kind, np.arange(OBJECT * 3, dtype=np.uint32))
    array.read(0, 3)  # its index is known
    path = array.store.path(array._spec.object_key(0))
    for name in SYSTEM:
        number = getattr(errno, name)

        def refuse(first: Any, *_: Any, number: int = number) -> None:
            if operation == "mmap.mmap" or first == path:
                raise OSError(number, os.strerror(number))

        maps._make_room(0)
        array._decoded.clear()
        with monkeypatch.context() as patch:
            before_each_call(patch, operation, refuse)
            for read in (lambda: array.read(0, 3), lambda: gathered(array, np.array([0, 5])), lambda: array.read(0, 3 * OBJECT)):
                with pytest.raises(OSError, match=rf"^\[Errno {number}\] {os.strerror(number)}(?!.*damaged)") as caught:
                    read()
                assert (caught.value.errno, caught.value.filename) == (number, path)
    assert array.read(0, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_damage(tmp_path, kind):
    array = written(tmp_path, kind, np.arange(OBJECT * 3, dtype=np.uint32))
    array.read(0, 3)
    path = Path(array.store.path(array._spec.object_key(0)))
    path.unlink()
    for make, complaint in (
        (path.touch, "is empty"),
        (path.mkdir, "is a directory"),
        (lambda: os.mkfifo(path), "is not a plain file"),
    ):
        make()
        maps._make_room(0)
        array._decoded.clear()
        with refusal(f"{path}: {complaint}. The file is damaged: remove it and build again."):
            array.read(0, 3)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And none of the threads that other tests began, on the processors that there are."""
    monkeypatch.setattr(maps.os, "sched_getaffinity", lambda _: range(4), raising=False)
    before = maps._decoders[:]
    maps._decoders.clear()
    yield
    for mine in maps._decoders:
        mine.shutdown()
    maps._decoders[:] = before


@pytest.mark.parametrize("count", [0, 1, 15, 16, 33, 1000])
def test_all_of_the_work_is_done_once(four_processors, count):
    done = []
    share_work(lambda part: done.extend(part), count)
    assert sorted(done) == list(range(count))


def test_much_work_is_done_by_several_threads_at_once(four_processors):
    """Each part waits for the three others: with fewer threads none would come to an end."""
    together = threading.Barrier(4, timeout=60)
    share_work(lambda part: together.wait() and None, 100)


def test_an_error_of_any_part_is_raised(four_processors):
    def work(part: range) -> None:
        if 99 in part:
            raise ValueError("the last one")

    with refusal("the last one"):
        share_work(work, 100)


FORK = """
import os
from flat_tokens.arrays import maps
maps.os.sched_getaffinity = lambda _: range(4)
maps.share_work(lambda part: None, 100)
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
maps.share_work(lambda part: None, 100)
os._exit(7)
"""


def test_a_forked_process_has_threads_of_its_own():
    """In a process of its own: what other tests imported may mind a fork."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=60)
    assert ran.returncode == 7


def test_the_values_used_last_are_kept():
    cache = Recent(2)
    for key in "ab":
        cache.keep(key, key.upper())
    assert cache.find("a") == "A"
    cache.keep("c", "C")
    assert [cache.find(key) for key in "abc"] == ["A", None, "C"]
