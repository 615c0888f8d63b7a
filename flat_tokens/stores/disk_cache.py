"""A bounded cache on a local disk, which the processes of a machine share.

It keeps units: ranges of objects, each a file whose name is the digest of the object and the range. A file is pages of 16 KiB,
each of which ends in a crc32c over the unit's name, the page's number and its data. What is damaged, cut off, half written or of
another unit fails that and is not a hit, so nothing is synced, and a reader needs no lock.

A process that adds or removes units holds a lock (``flock``), which the system releases if the process dies. The lock's file
says how many bytes the units have: first the sum is raised, then a unit is written, so that a kill in between leaves it too
high, never too low. The sum is counted again if its file is damaged or older than the machine's start, or if units must be
evicted. The least recently used ones are evicted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import shlex
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from flat_tokens.annotations import UInt8s
from flat_tokens.stores.local import kind_of, locked

logger = logging.getLogger(__name__)

PAGE_BYTES = 1 << 14
DATA_BYTES = PAGE_BYTES - 4
"""Bytes of a unit in a page."""
LOCK = "lock"
UNIT = re.compile("[0-9a-f]{32}(-[0-9a-f]+){2}")
"""The names of units: no other file of the directory is ever removed."""
PARTS = 1024
"""Parts of a file that the system takes by one call."""
SUM = struct.Struct("<QI")
OWN_BYTES = 1 << 14
"""For the directory and the lock, which count too."""
NAME_BYTES = 256
"""For a unit's entry in the directory."""
LISTED_QUICKLY = 1000
USE_SECONDS = 1.0
"""Uses are noted in the files' times so often, and before units go."""

_one_thread = threading.Lock()
# No fork while a lock is held: the child would hold it, too.
os.register_at_fork(before=_one_thread.acquire, after_in_parent=_one_thread.release, after_in_child=_one_thread.release)


class OthersCacheError(PermissionError):
    """Another user may have written to a cache."""


class DiskCache:
    """A cache of *most_bytes* in *directory*. Where it can't be written, it warns once and keeps nothing more. OthersCacheError
    if other users may write to it.
    """

    def __init__(self, directory: str | os.PathLike[str], most_bytes: int) -> None:
        self.directory, self.most_bytes = os.path.abspath(directory), most_bytes
        self._is_broken = False
        self._used: dict[str, int] = {}
        self._noted = time.monotonic()
        if kind_of(self.directory) not in ("directory", None):
            raise NotADirectoryError(f"{self.directory} is not a directory, so there is no cache in it. Name another path.")
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
            # Its files are read without a digest.
            status, remedy = os.stat(self.directory), "Name a directory of your own."
            if status.st_uid != os.geteuid():
                raise OthersCacheError(f"the cache {self.directory} is another user's. {remedy}")
            if status.st_mode & 0o022:
                close = f"Close it: chmod go-w {shlex.quote(self.directory)}"
                raise OthersCacheError(f"other users may write to the cache {self.directory}. {close}")
            with self._locked() as lock:
                self._record(lock, self._make_room(0))
        except OthersCacheError:
            raise
        except OSError as error:
            self._give_up(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskCache, (self.directory, self.most_bytes)

    def find(self, unit: str, start: int, stop: int) -> bytes | None:
        """Bytes ``start:stop`` of a unit; None if it is not kept, or not as it was written."""
        first, last = start // DATA_BYTES, -(-stop // DATA_BYTES)
        try:
            file = os.open(self._path(unit), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if os.fstat(file).st_uid != os.geteuid():
                    return None
                stored = os.pread(file, (last - first) * PAGE_BYTES, first * PAGE_BYTES)
            finally:
                os.close(file)
        except OSError:
            return None
        parts, seed, view = [], google_crc32c.value(unit.encode()), np.frombuffer(stored, np.uint8)
        for number in range(first, last):
            at = (number - first) * PAGE_BYTES
            end = min(at + PAGE_BYTES, len(stored)) - 4
            if end < at or _checksum(seed, number, view[at:end]) != stored[end : end + 4]:
                return None
            parts.append(view[at + max(start - number * DATA_BYTES, 0) : min(at + stop - number * DATA_BYTES, end)])
        found = b"".join(part.data for part in parts)
        return found if len(found) == stop - start else None

    def has(self, unit: str) -> bool:
        """Whether a unit seems to be kept: its bytes are not looked at."""
        try:
            return os.stat(self._path(unit)).st_size > 0
        except OSError:
            return False

    def add(self, unit: str, data: bytes) -> None:
        """Keep a unit, if it is not there yet. Others go for it."""
        parts = list(_pages(unit, data))
        size = sum(part.nbytes for part in parts)
        if self._is_broken or OWN_BYTES + _taken(size) > self.most_bytes or self.find(unit, 0, len(data)) is not None:
            return
        try:
            with self._locked() as lock:
                with contextlib.suppress(FileNotFoundError):  # damaged: the sum stays too high until the next count
                    os.unlink(self._path(unit))
                total = self._recorded(lock)
                if total is None or total + _taken(size) > self.most_bytes:
                    total = self._make_room(_taken(size))
                self._record(lock, total + _taken(size))
                try:
                    with open(
                        self._path(unit), "xb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)
                    ) as file:
                        written = [os.writev(file.fileno(), parts[k : k + PARTS]) for k in range(0, len(parts), PARTS)]
                        if sum(written) < size:
                            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path(unit))
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(self._path(unit))
                    raise
        except OSError as error:
            self._give_up(error)

    def note_use(self, unit: str) -> None:
        """Note that a unit is used now, from the disk or from memory."""
        self._used[unit] = time.time_ns()
        if time.monotonic() - self._noted > USE_SECONDS:
            self._write_uses()

    def _write_uses(self) -> None:
        self._noted = time.monotonic()
        with contextlib.suppress(KeyError):  # other threads note uses, and write them
            while self._used:
                unit, when = self._used.popitem()
                with contextlib.suppress(OSError):  # it is gone, or may only be read
                    os.utime(self._path(unit), ns=(when, when))

    def _make_room(self, size: int) -> int:
        """Remove the units that were used longest ago until *size* bytes fit. Returns the bytes of those that stay."""
        self._write_uses()
        kept = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if UNIT.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    kept.append((status.st_mtime_ns, entry.name, _taken(status.st_size)))
        total = OWN_BYTES + sum(taken for _, _, taken in kept)
        if total + size > self.most_bytes:
            # Of many, a sixteenth more than is needed: listing them takes a while.
            wanted = self.most_bytes - size - (self.most_bytes // 16 if len(kept) > LISTED_QUICKLY else 0)
            for _, name, taken in sorted(kept):
                if total <= wanted:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(name))
                total -= taken
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        with _one_thread, locked(self._path(LOCK), mode=0o600) as file:
            yield file

    def _recorded(self, lock: int) -> int | None:
        """The sum in the lock's file; None if it is damaged, or was written before the machine's start."""
        found = os.pread(lock, SUM.size + 1, 0)
        if len(found) != SUM.size:
            return None
        total, crc32c = SUM.unpack(found)
        return int(total) if google_crc32c.extend(_boot(), found[:8]) == crc32c else None

    def _record(self, lock: int, total: int) -> None:
        found = total.to_bytes(8, "little")
        os.pwrite(lock, SUM.pack(total, google_crc32c.extend(_boot(), found)), 0)
        os.ftruncate(lock, SUM.size)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _give_up(self, error: OSError) -> None:
        known, self._is_broken = self._is_broken, True
        if not known:
            logger.warning("%s: the cache keeps nothing more, and what it lacks is fetched each time: %s", self.directory, error)


def _pages(unit: str, data: bytes) -> Iterator[memoryview]:
    """The data and the checksum of each page. The data are not copied."""
    seed, view = google_crc32c.value(unit.encode()), np.frombuffer(data, np.uint8)
    for number in range(-(-len(data) // DATA_BYTES)):
        part = view[number * DATA_BYTES : (number + 1) * DATA_BYTES]
        yield part.data
        yield memoryview(_checksum(seed, number, part))


def _checksum(seed: int, number: int, data: UInt8s) -> bytes:
    return int(google_crc32c.extend(google_crc32c.extend(seed, number.to_bytes(4, "little")), data)).to_bytes(4, "little")


def _taken(size: int) -> int:
    """The bytes of the disk that a file takes."""
    return -(-size // 4096) * 4096 + NAME_BYTES


@functools.cache
def _boot() -> int:
    """A number of this start of the machine: after a power loss the sum may be older than the units."""
    try:
        return int(google_crc32c.value(Path("/proc/sys/kernel/random/boot_id").read_bytes()))
    except OSError:
        return 0
