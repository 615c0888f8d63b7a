"""Durable files: written under another name, synced, then renamed; large ones past the page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

WRITE_BUFFER_BYTES = 4 << 20
DIRECT_ALIGNMENT = 4096


# Page-aligned buffers for direct reads and writes, kept because touching fresh memory costs more than the disk does.
_spare_buffers: list[mmap.mmap] = []
_spare_buffers_lock = threading.Lock()


def take_buffer() -> mmap.mmap:
    with _spare_buffers_lock:
        return _spare_buffers.pop() if _spare_buffers else mmap.mmap(-1, WRITE_BUFFER_BYTES)


def give_back(buffer: mmap.mmap) -> None:
    with _spare_buffers_lock:
        _spare_buffers.append(buffer)


@functools.cache
def _writing_threads() -> ThreadPoolExecutor:
    """Threads that wait for the disk instead of the one that makes the data."""
    return ThreadPoolExecutor(4, "disk")


def _forget_after_fork() -> None:
    """Drop the parent's threads, which a child does not have, and its buffers, which are mapped into both."""
    global _spare_buffers_lock
    _spare_buffers_lock = threading.Lock()
    _spare_buffers.clear()
    _writing_threads.cache_clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def read_direct(path: str, start: int, stop: int, buffer: mmap.mmap) -> memoryview | None:
    """Bytes ``start:stop`` of a local file, read into *buffer* past the page cache; None if that is not possible."""
    if not hasattr(os, "O_DIRECT"):
        return None
    begin = start // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    wanted = -(-(stop - begin) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
    view = memoryview(buffer)
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        if os.preadv(fd, [view[:wanted]], begin) < stop - begin:  # the file's end, or an interruption
            return None
        return view[start - begin : stop - begin]
    except OSError as error:
        if error.errno == errno.EINVAL:  # not on this file system
            return None
        raise
    finally:
        if fd >= 0:
            os.close(fd)


class LocalSink:
    """A file written past the page cache where the system allows it, synced, then renamed into place.

    Token data is written once and read much later, if at all by this machine. If it pushed everything else out of the
    page cache, a build would be slower than its disk. While one buffer is written, the next one is filled.
    """

    def __init__(self, target: Path, staging: Path) -> None:
        self._target = target
        self._temporary = staging / f".{self._target.name}.{uuid.uuid4().hex}.part"
        self._fd = -1
        self._filled = 0
        self._size = 0
        self._buffer: mmap.mmap | None = take_buffer()
        self._writing: tuple[Future[None], mmap.mmap] | None = None

    def write(self, data: memoryview) -> None:
        with named_errors(self._target):
            while data:
                assert self._buffer is not None
                part = data[: WRITE_BUFFER_BYTES - self._filled]
                self._buffer[self._filled : self._filled + len(part)] = part
                self._filled += len(part)
                self._size += len(part)
                data = data[len(part) :]
                if self._filled == WRITE_BUFFER_BYTES:
                    self._flush(WRITE_BUFFER_BYTES)

    def commit(self) -> None:
        try:
            with named_errors(self._target):
                assert self._buffer is not None
                if self._fd < 0:  # small: not worth a direct write
                    self._fd = self._open(direct=False)
                    _write_all(self._fd, self._buffer, self._filled)
                elif self._filled:
                    # A direct write covers whole blocks; the bytes behind the end are cut off below.
                    self._flush(-(-self._filled // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
                self._wait()
                os.ftruncate(self._fd, self._size)
                os.fsync(self._fd)
                self._close()
                make_directory(self._target.parent)
                os.replace(self._temporary, self._target)
                sync_directory(self._target.parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the write that failed is why we are here
            self._wait()
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self, length: int) -> None:
        """Hand the buffer to a writing thread after it has written the one before."""
        assert self._buffer is not None
        if self._fd < 0:
            self._fd = self._open(direct=True)
        self._wait()
        self._writing = (_writing_threads().submit(_write_all, self._fd, self._buffer, length), self._buffer)
        self._buffer, self._filled = take_buffer(), 0

    def _wait(self) -> None:
        if self._writing is not None:
            future, buffer = self._writing
            self._writing = None
            try:
                future.result()
            finally:
                give_back(buffer)

    def _open(self, *, direct: bool) -> int:
        make_directory(self._temporary.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if direct and hasattr(os, "O_DIRECT"):
            try:
                return os.open(self._temporary, flags | os.O_DIRECT, 0o644)
            except OSError as error:  # not on this file system (tmpfs, some network mounts)
                if error.errno != errno.EINVAL:
                    raise
                self._temporary.unlink(missing_ok=True)
        return os.open(self._temporary, flags, 0o644)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._buffer is not None:
            give_back(self._buffer)
            self._buffer = None


def _write_all(fd: int, buffer: mmap.mmap, length: int) -> None:
    with memoryview(buffer) as view:
        written = 0
        while written < length:
            with view[written:length] as rest:
                try:
                    written += os.write(fd, rest)
                except OSError as error:
                    # A device with larger blocks, or a limit within this write: the page cache takes it, or says why not.
                    if error.errno != errno.EINVAL or not _end_direct(fd):
                        raise


def _end_direct(fd: int) -> bool:
    """Let further writes go through the page cache. False if they do already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add to errors of the system, which knows only descriptors, the object's path and the remedy."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.strerror == os.strerror(error.errno):
            error.strerror += ". Make room and run the same command again"
        raise


def make_directory(path: Path) -> None:
    """Make a directory and its parents so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and creations in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
