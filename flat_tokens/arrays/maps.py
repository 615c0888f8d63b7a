"""Mapped local files. Each holds a descriptor, so all arrays of a process share one bound, below its limit of open files.

Beyond the bound the files that were used longest ago are dropped, and mapped again when they are read. A map lasts as long as
somebody reads from it, so a read of many files maps some at a time. Nothing here waits or locks: a forked child shares the maps
that there are, and has a bound of its own.

And caches that threads share, and work that is shared out among them.
"""

from __future__ import annotations

import collections
import errno
import itertools
import mmap
import os
import resource
import stat
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from flat_tokens.stores import local, reading

MOST = 4096
"""More files are not kept mapped, whatever the limit is: the system allows 65,530 maps to a process."""
AT_A_TIME = 16
"""A read maps one of this many parts of the bound at a time: 32 files of the 512 that the usual limit of 1,024 leaves."""


class MappedFile:
    """A mapped file, object *number* of an array. ``content``: what the array made of it. ``used``: when it was used last."""

    __slots__ = ("__weakref__", "content", "home", "number", "used")

    def __init__(self, content: Any, home: weakref.ref[Maps], number: int) -> None:
        self.content, self.home, self.number, self.used = content, home, number, clock.now


class Maps(dict[int, MappedFile]):
    """The files that an array has mapped, by the number of the object. Who finds one says so: ``mapped.used = clock.now``."""

    __slots__ = ("__weakref__",)

    def keep(self, number: int, content: Any) -> MappedFile:
        """Keep what was made of a mapped file."""
        clock.now += 1
        self[number] = mapped = MappedFile(content, weakref.ref(self), number)
        _remember(_kept, mapped)
        return mapped


clock = SimpleNamespace(now=0)
"""Counts the files that were mapped: a time, for uses."""
_numbers = itertools.count()
_kept: dict[int, weakref.ref[Any]] = {}
"""Mapped files that arrays keep."""
_alive: dict[int, weakref.ref[Any]] = {}
"""Maps that hold a descriptor: those that are kept, and those that somebody still reads from."""


def _remember(those: dict[int, weakref.ref[Any]], thing: Any) -> None:
    """Add something to *those*, until it is gone."""
    number = next(_numbers)
    those[number] = weakref.ref(thing, lambda _: those.pop(number, None))


def most_maps() -> int:
    """The most files that are mapped at a time: half of the limit of open files leaves room for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if limit == resource.RLIM_INFINITY else max(min(limit // 2, MOST), 1)


def maps_of_a_read() -> int:
    """The most files that one read maps before it lets go of them."""
    return max(most_maps() // AT_A_TIME, 1)


def map_file(path: str, damaged: Callable[[str], Exception]) -> mmap.mmap:
    """Map a file. The system prefetches nothing of it. Errors of the system are raised as they are, with the path. For an empty
    file, or something other than a plain file, the exception that *damaged* makes of a sentence is raised.
    """
    _make_room(most_maps() - 1)
    while True:
        try:
            return _map(path, damaged)
        except OSError as error:
            # Others hold the descriptors: fewer maps must do. Without any it is as it is.
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not _make_room(len(_kept) // 2):
                if error.errno == errno.ENODEV:  # the file system has no maps
                    error.strerror = f"{error.strerror}. Copy the file to a file system whose files can be mapped"
                local.raise_named(error, path)


def _map(path: str, damaged: Callable[[str], Exception]) -> mmap.mmap:
    """Map a file, as ``map_file`` does, if a descriptor is free."""
    fd = reading.open_descriptor(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise damaged("is a directory" if stat.S_ISDIR(status.st_mode) else "is not a plain file")
        if not status.st_size:
            raise damaged("is empty")
        data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    _remember(_alive, data)
    data.madvise(mmap.MADV_RANDOM)
    return data


def _make_room(most: int) -> int:
    """Drop maps that were used longest ago if more than *most* are alive. Returns the number of those dropped."""
    if len(_alive) <= most:
        return 0
    kept = [mapped for found in list(_kept.values()) if (mapped := found()) is not None]
    kept.sort(key=lambda mapped: mapped.used)
    # An eighth at a time, so that the next files need no search.
    dropped = kept[: max(len(_alive) - most, len(kept) // 8)]
    for mapped in dropped:
        if (home := mapped.home()) is not None:
            home.pop(mapped.number, None)
    return len(dropped)


ITEMS_A_THREAD = 8
"""Less work is done where it is asked for."""


class Recent(collections.OrderedDict[Any, Any]):
    """A cache of the *limit* values that were used last. Threads may share it; it is pickled and copied empty."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self._lock = limit, threading.Lock()
        _caches.add(self)

    def __hash__(self) -> int:  # type: ignore[override] # not by its items: a set of all caches holds it
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self.limit,)

    def find(self, key: Any) -> Any:
        with self._lock:
            if (value := self.get(key)) is not None:
                self.move_to_end(key)
            return value

    def keep(self, key: Any, value: Any) -> Any:
        with self._lock:
            self[key] = value
            while len(self) > self.limit:
                self.popitem(last=False)
        return value


_caches: weakref.WeakSet[Recent] = weakref.WeakSet()
_decoders: list[ThreadPoolExecutor] = []


def _begin_anew_after_fork() -> None:
    _decoders.clear()
    for cache in list(_caches):
        cache._lock = threading.Lock()  # the thread that may hold it is not in the child


os.register_at_fork(after_in_child=_begin_anew_after_fork)


def share_work(work: Callable[[range], None], count: int) -> None:
    """Do *work* on parts of ``range(count)``, on all processors if it is worth while."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = min(count // ITEMS_A_THREAD, processors)
    if parts < 2:
        work(range(count))
        return
    if not _decoders:
        _decoders.append(ThreadPoolExecutor(processors, "flat-tokens-decode"))
    bounds = [count * k // parts for k in range(parts + 1)]
    others = [_decoders[0].submit(work, range(*pair)) for pair in itertools.pairwise(bounds[1:])]
    work(range(bounds[1]))
    for other in others:
        other.result()
