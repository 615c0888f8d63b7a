"""The cache on a local disk: never over its bound, never a wrong byte, whatever dies and whatever is damaged."""

import builtins
import errno
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flat_tokens.stores import local
from flat_tokens.stores.disk_cache import DATA_BYTES, DiskCache
from tests.examples import first_fast
from tests.refusal import refusal

SIZE = 40_000
"""Three pages, of which the last is short."""
TAKEN = 40_960 + 256
"""Such a unit on the disk: whole blocks of 4 KiB, and its entry in the directory."""


def name(number: int) -> str:
    return f"{number:032x}-0-{SIZE:x}"


def content(number: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size)


def bound(units: int) -> int:
    return 16_384 + units * TAKEN


def on_disk(directory: Path) -> int:
    """What `du` says of the units, the lock and the directory."""
    return sum(entry.lstat().st_blocks * 512 for entry in [directory, *directory.iterdir()])


def add(cache: DiskCache, numbers: Iterable[int]) -> None:
    for number in numbers:
        cache.add(name(number), content(number))


def has(cache: DiskCache, number: int) -> bool:
    return cache.find(name(number), 0, SIZE) == content(number)


def kept(cache: DiskCache, numbers: range) -> list[int]:
    return [number for number in numbers if Path(cache.directory, name(number)).exists()]


def test_the_units_that_were_used_longest_ago_go(tmp_path):
    cache = DiskCache(tmp_path, bound(4))
    add(cache, range(4))
    cache.note_use(name(0))
    add(cache, [4])
    assert kept(cache, range(6)) == [0, 2, 3, 4]
    add(cache, [5])
    assert kept(cache, range(6)) == [0, 3, 4, 5]
    assert has(cache, 0)
    assert cache.find(name(1), 0, SIZE) is None
    for room in (0, 1):
        add(small := DiskCache(tmp_path / f"{room}", bound(room)), [1])
        assert has(small, 1) == (room > 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, data: data[:16_384],
        lambda path, data: b"",
        lambda path, data: path.with_name(name(0)).read_bytes(),
        lambda path, data: data[16_384:32_768] + data[:16_384] + data[32_768:],
        lambda path, data: path.mkdir(),
        lambda path, data: os.mkfifo(path),
        lambda path, data: path.symlink_to("/nowhere"),
    ],
    ids=["cut", "empty", "other unit", "pages swapped", "directory", "fifo", "link to nothing"],
)
def test_what_is_not_as_it_was_written_is_no_hit_and_is_written_again(tmp_path, spoil):
    cache = DiskCache(tmp_path, bound(5))
    add(cache, range(2))
    path = tmp_path / name(1)
    data = path.read_bytes()
    path.unlink()
    if (other := spoil(path, data)) is not None:
        path.write_bytes(other)
    assert cache.find(name(1), 0, SIZE) is None
    if path.is_dir():
        path.rmdir()
    add(cache, [1])
    assert has(cache, 1)
    assert cache.find(name(1), DATA_BYTES - 1, DATA_BYTES + 1) == content(1)[DATA_BYTES - 1 : DATA_BYTES + 1]


@pytest.mark.parametrize("record", [b"", b"\0" * 12, b"\xff" * 12, b"\0" * 13, b"x"])
def test_a_damaged_sum_is_counted_anew(tmp_path, record):
    cache = DiskCache(tmp_path, bound(2))
    for number in range(5):
        (tmp_path / "lock").write_bytes(record)
        add(cache, [number])
        assert on_disk(tmp_path) <= bound(2)
    assert kept(cache, range(5)) == [3, 4]


def test_files_of_others_are_left_alone_and_a_smaller_bound_holds_from_the_open_on(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    cache = DiskCache(tmp_path, bound(4))
    add(cache, range(4))
    smaller = DiskCache(tmp_path, bound(1))
    assert len(kept(smaller, range(4))) <= 1
    assert mine.read_text() == "mine"
    with refusal(r"mine.txt is not a directory, so there is no cache in it", NotADirectoryError):
        DiskCache(mine, bound(1))


# Kills


def dies_at(call: int, directory: Path, room: int) -> None:
    """Add units, and die at the so-manieth call of the system that changes something; in the middle of it, if it is a write."""
    calls = 0

    def deadly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os._exit(9)
        return function(*arguments, **options)

    def half(file: int, parts: list[Any]) -> int:
        if calls == call - 1:
            write(file, parts[: len(parts) // 2])
        return cast("int", deadly(write, file, parts))

    write = os.writev
    os.writev = half  # type: ignore[assignment]
    for function in ("open", "pwrite", "ftruncate", "unlink", "utime"):
        setattr(os, function, partial(deadly, getattr(os, function)))
    builtins.open = partial(deadly, builtins.open)
    cache = DiskCache(directory, bound(room))
    for number in range(10, 14):
        add(cache, [number])
        cache.note_use(name(number))
    os._exit(0)


@pytest.mark.parametrize("every", first_fast([5, 1]))
def test_a_kill_at_any_moment_leaves_a_cache_within_its_bound(tmp_path, every):
    """The next process goes on with it, and finds the right bytes or none. Slowly, at every call of the system."""
    context = multiprocessing.get_context("fork")
    call, code = 0, 9
    while code == 9:
        call += every
        cache = DiskCache(tmp_path, bound(3))
        add(cache, [call % 5])
        child = context.Process(target=dies_at, args=(call, tmp_path, 3))
        child.start()
        child.join(60)
        code = child.exitcode
        assert code in (0, 9)
        assert on_disk(tmp_path) <= bound(3)
        for number in range(16):
            assert cache.find(name(number), 0, SIZE) in (None, content(number))
        add(cache, [7])
        assert has(cache, 7)
        assert on_disk(tmp_path) <= bound(3)
    assert call > 20


def test_a_child_forked_while_a_unit_is_added_does_not_keep_the_lock(tmp_path):
    cache = DiskCache(tmp_path, bound(3))
    with cache._locked():
        blocked = multiprocessing.get_context("fork").Process(target=lambda: None)
        starts = threading.Thread(target=blocked.start)
        starts.start()
        starts.join(0.2)
        assert starts.is_alive()  # it waits until the lock is given back
    starts.join(60)
    blocked.join(60)
    add(cache, [1])
    assert has(cache, 1)


# Disks that take nothing


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


def read_only(path: Any, flags: int, *mode: int, real: Callable[..., int] = os.open, **options: Any) -> int:
    return (refusing(errno.EROFS) if flags & (os.O_RDWR | os.O_CREAT) else real)(path, flags, *mode, **options)


@pytest.mark.parametrize(
    ("module", "function", "instead"),
    [
        (os, "writev", refusing(errno.ENOSPC)),
        (os, "writev", lambda file, parts: os.write(file, parts[0][:5000])),
        (os, "open", read_only),
        (local.fcntl, "flock", refusing(errno.ENOLCK)),
    ],
    ids=["full", "no byte more", "read-only", "no locks"],
)
def test_a_disk_that_takes_nothing_costs_one_warning(tmp_path, module, function, instead, caplog):
    cache = DiskCache(tmp_path, bound(9))
    add(cache, [0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, instead)
        add(cache, range(1, 4))
        assert kept(cache, range(5)) == [0]
        assert has(cache, 0)
    assert len(caplog.records) == 1
    assert f"{tmp_path}: the cache keeps nothing more, and what it lacks is fetched each time: " in caplog.text


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file/cache", bound(9))
    add(cache, [0])
    assert cache.find(name(0), 0, SIZE) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702, 0o720, 0o1777])
def test_a_cache_that_others_may_write_is_refused(tmp_path, mode):
    """Its files are read without a digest: even under a signed manifest they would be believed."""
    directory = tmp_path / "a cache"
    directory.mkdir()
    directory.chmod(mode)
    with refusal(r"other users may write to the cache.* Close it: chmod go-w '", PermissionError):
        DiskCache(directory, bound(4))


def test_a_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path, bound(4))
    cache.add("unit", b"data")
    assert cache.find("unit", 0, 4) == b"data"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.find("unit", 0, 4) is None
    with refusal(r"is another user's\. Name a directory of your own", PermissionError):
        DiskCache(tmp_path, bound(4))


def test_files_of_a_cache_are_private(tmp_path):
    before = os.umask(0)
    try:
        cache = DiskCache(tmp_path / "new", bound(4))
        cache.add("unit", b"data")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
