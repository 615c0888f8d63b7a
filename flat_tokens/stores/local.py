"""Durable files: written under another name, synced, then renamed; large ones past the page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

WRITE_BUFFER_BYTES = 2 << 20
SMALL_BYTES = 1 << 16
"""A file of this many bytes takes none of the buffers, of which each stays in memory that was once filled."""
DIRECT_ALIGNMENT = 4096

REMEDIES = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room",
    errno.EIO: "Check the disk",
    errno.ESTALE: "Mount it again",
    errno.EMFILE: "Allow the process more open files (ulimit -n)",
    errno.ENFILE: "Allow the machine more open files (fs.file-max)",
    errno.ENOMEM: "Free memory, or allow the process more maps (vm.max_map_count)",
}
"""Remedies by the error with which the system refuses an operation."""


Buffer = npt.NDArray[np.uint8]
Fill = Callable[[Buffer, int], object]
"""``fill(rows, first)`` writes rows of an object, those from *first* on, into memory: uint8[n, width]."""
# Page-aligned buffers for direct reads and writes, kept because touching fresh memory costs more than the disk does.
_spare_buffers: list[Buffer] = []


def take_buffer() -> Buffer:
    """A buffer, uint8[WRITE_BUFFER_BYTES]."""
    try:
        return _spare_buffers.pop()
    except IndexError:
        return np.frombuffer(mmap.mmap(-1, WRITE_BUFFER_BYTES), np.uint8)


def give_back(buffer: Buffer) -> None:
    _spare_buffers.append(buffer)


@functools.cache
def _writing_threads() -> ThreadPoolExecutor:
    """Threads that wait for the disk instead of the one that makes the data."""
    return ThreadPoolExecutor(4, "disk")


def _forget_after_fork() -> None:
    """Drop the parent's threads, which a child does not have, and its buffers, which are mapped into both."""
    _spare_buffers.clear()
    _writing_threads.cache_clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class LocalSink:
    """A file written past the page cache if the system allows it, synced if it is to be *durable*, then renamed into place.
    Token data is written once and read much later, if at all by this machine: if it pushed everything else out of the page
    cache, a build would be slower than its disk. While one buffer is written, the next one is filled. *seen* gets the file's
    bytes in order, a buffer at a time. *unfinished*: the path of the file until it is complete; else it has a new name in
    *staging*.
    """

    def __init__(
        self,
        target: Path,
        staging: Path,
        seen: Callable[[memoryview], object],
        top: str | None = None,
        durable: bool = True,
        unfinished: Path | None = None,
    ) -> None:
        self._target, self._seen, self._top, self._durable = target, seen, top, durable
        self._in_staging = staging / f".{self._target.name}.{uuid.uuid4().hex}.part"
        self._temporary = unfinished or self._in_staging
        self._is_settled = False
        self._fd, self._filled, self._size = -1, 0, 0
        self._held = bytearray()
        self._buffer: Buffer | None = None
        self._writing: tuple[Future[None], Buffer] | None = None

    def write(self, data: memoryview) -> None:
        if self._buffer is None:
            if len(self._held) + len(data) <= SMALL_BYTES:
                self._held += data
                return
            self._buffer = take_buffer()
            self._fill(memoryview(self._held))
        self._fill(data)

    def write_rows(self, count: int, width: int, fill: Fill) -> None:
        """Append *count* rows of *width* bytes. Those that fit are written where they stay until the disk has them."""
        first = 0
        while first < count:
            fitting = 0 if self._buffer is None else min((WRITE_BUFFER_BYTES - self._filled) // width, count - first)
            if self._buffer is not None and fitting:
                end = self._filled + fitting * width
                fill(self._buffer[self._filled : end].reshape(fitting, width), first)
                self._advance(fitting * width)
            else:
                fitting = 1
                row = np.empty((1, width), np.uint8)
                fill(row, first)
                self.write(row.reshape(-1).data)
            first += fitting

    def _advance(self, length: int) -> None:
        """Count bytes that the buffer has got. A full one goes to the disk."""
        self._filled += length
        self._size += length
        if self._filled == WRITE_BUFFER_BYTES:
            with named_errors(self._target):
                self._flush(WRITE_BUFFER_BYTES)

    def _fill(self, data: memoryview) -> None:
        while data:
            assert self._buffer is not None
            part = data[: WRITE_BUFFER_BYTES - self._filled]
            # numpy copies without the interpreter's lock.
            self._buffer[self._filled : self._filled + len(part)] = np.frombuffer(part, np.uint8)
            self._advance(len(part))
            data = data[len(part) :]

    def commit(self) -> None:
        try:
            with named_errors(self._target):
                if self._top is not None:
                    refuse_links(self._target.parent, self._top)
                if self._buffer is None or self._fd < 0:  # small: not worth a direct write
                    if self._fd < 0:
                        self._fd = self._open(direct=False)
                    else:
                        _end_direct(self._fd)
                    data = np.frombuffer(self._held, np.uint8) if self._buffer is None else self._buffer[: self._filled]
                    self._seen(data.data)
                    _write_all(self._fd, data, len(data))
                    self._size = len(data)
                elif self._filled:
                    # A direct write covers whole blocks; the bytes after the end are cut off below.
                    self._flush(-(-self._filled // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
                self._wait()
                os.ftruncate(self._fd, self._size)
                if self._durable:
                    os.fsync(self._fd)
                self._close()
                self._make_directory(self._target.parent)
                self._move()
        except BaseException:
            self.discard()
            raise

    def _move(self) -> None:
        """Give the file its place. Others count on one that was settled. It keeps its old name until the new one is on the disk:
        a power loss in the middle of a rename may leave neither.
        """
        goes = self._temporary
        if self._is_settled:
            with contextlib.suppress(OSError):  # a file system without a second name for a file
                self._make_directory(self._in_staging.parent)
                os.link(self._temporary, self._in_staging)
                goes = self._in_staging
        os.replace(goes, self._target)
        if self._durable:
            sync(self._target.parent)
        if goes != self._temporary:
            with contextlib.suppress(OSError):  # it is garbage now, and found as such
                os.unlink(self._temporary)

    def settle(self, rest: memoryview) -> None:
        """Make what was written, and *rest* after it, survive a power loss and the end of this process, in the unfinished file.
        *rest* is none of the file's bytes: what is written next takes its place.
        """
        with named_errors(self._temporary):
            if self._fd < 0:
                self._fd = self._open(direct=True)
            self._wait()
            held = self._held if self._buffer is None else self._buffer[: self._filled].data
            length = len(held) + len(rest)
            padded = -(-length // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
            if padded:
                last = np.frombuffer(mmap.mmap(-1, padded), np.uint8)  # page-aligned, and zeros after
                last[: len(held)], last[len(held) : length] = np.frombuffer(held, np.uint8), np.frombuffer(rest, np.uint8)
                place = os.lseek(self._fd, 0, os.SEEK_CUR)
                _write_all(self._fd, last, padded)
                os.lseek(self._fd, place, os.SEEK_SET)
            os.fsync(self._fd)
            if not self._is_settled:
                sync(self._temporary.parent)
                self._is_settled = True

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # the write that failed is why we are here
            self._wait()
        self._close()
        if not self._is_settled:
            self._temporary.unlink(missing_ok=True)

    def _flush(self, length: int) -> None:
        """Hand the buffer to a writing thread after it has written the one before."""
        assert self._buffer is not None
        self._seen(self._buffer[: self._filled].data)
        if self._fd < 0:
            self._fd = self._open(direct=self._durable)
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

    def _make_directory(self, path: Path) -> None:
        if self._durable:
            make_directory(path)
        else:
            path.mkdir(parents=True, exist_ok=True)

    def _open(self, *, direct: bool) -> int:
        self._make_directory(self._temporary.parent)
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


def _write_all(fd: int, buffer: Buffer, length: int) -> None:
    with buffer.data as view:
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
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add to errors of the system, which knows only descriptors and names below them, the object's path and the remedy."""
    try:
        yield
    except OSError as error:
        raise_named(error, path)


def raise_named(error: OSError, path: str | os.PathLike[str]) -> NoReturn:
    """Raise an error of the system with the object's path, if it has no whole one, and the remedy."""
    named = isinstance(error.filename, str | os.PathLike) and os.path.isabs(error.filename)
    if error.errno is not None and not named:  # those of libraries without a number have a message of their own
        error.filename = os.fspath(path)
        del error.filename2
    if error.errno in REMEDIES and error.strerror == os.strerror(error.errno):
        error.strerror += f". {REMEDIES[error.errno]} and run the same command again"
    raise error


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, waits: bool = True, mode: int = 0o666) -> Iterator[int]:
    """A block in which no other process has the lock of the file at *path*: its descriptor. A link is refused. *waits*: for
    another process that has the lock, instead of a BlockingIOError. *mode*: of the file if it has to be made; 0: it is not.
    """
    with named_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if mode else 0), mode)
    try:
        with named_errors(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)


def refuse_links(path: Path, top: str) -> None:
    """NotADirectoryError if a link is in place of *path* or a directory between it and *top*, above it."""
    place = os.fspath(path)
    while len(place) > len(top):
        if kind_of(place, follow_links=False) == "link":
            raise NotADirectoryError(errno.ENOTDIR, "Is a link instead of a directory. Move it away and run again", place)
        place = os.path.dirname(place)


def kind_of(path: str | os.PathLike[str], *, follow_links: bool = True) -> Literal["file", "directory", "link", "special"] | None:
    """The kind of file at a path; None if nothing is there. OSError, naming the path, if the lookup fails without an answer."""
    try:
        mode = os.stat(path, follow_symlinks=follow_links).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise_named(error, path)
    if stat.S_ISREG(mode):
        return "file"
    return "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "special"


def real_path(path: str | os.PathLike[str]) -> str:
    """The path without links. A failed lookup is not taken for the absence of a link."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno in REMEDIES:
            raise_named(error, path)
        return os.path.realpath(path)  # nothing is there, or nobody may look


def pattern_base(path: str) -> tuple[str, str]:
    """The directory below which a pattern is matched, and the pattern. A part of the path that is there by its very name is no
    pattern, whatever characters it has.
    """
    base, *parts = Path(path).parts or (".",)
    if MAGIC & set(base) and kind_of(base) is None:
        base, parts = ".", [base, *parts]
    for k, part in enumerate(parts):
        if k == len(parts) - 1 or (MAGIC & set(part) and kind_of(os.path.join(base, part)) is None):
            return base, os.path.join(*parts[k:])
        base = os.path.join(base, part)
    return ".", base


MAGIC = frozenset("*?[")
"""Characters of patterns."""


def make_directory(path: Path) -> None:
    """Make a directory and its parents, if nothing is, so that they survive a power loss."""
    if kind_of(path) is None:
        make_directory(path.parent)
        with contextlib.suppress(FileExistsError):  # made by another process, which may have removed it again by now
            path.mkdir()
        sync(path.parent)


def make_durable(top: Path) -> None:
    """Make all that is in a directory survive a power loss. Together this takes the disk much less time than one by one."""

    def stop(error: OSError) -> None:
        raise error

    places = [Path(directory, name) for directory, _, names in os.walk(top, onerror=stop) for name in ("", *names)]
    list(_writing_threads().map(sync, places))


def sync(path: Path) -> None:
    """Make what was written to a file, or renames and creations in a directory, survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with named_errors(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def directory_below(root: str, key: str) -> Iterator[int]:
    """A descriptor of a directory below *root*, reached through no link. NotADirectoryError names a link or file in the way."""
    path, fd = root, os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in filter(None, key.split("/")):
            path = os.path.join(path, name)
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    error.strerror = "Not a directory, but a link or a file, through which nothing is removed"
                raise_named(error, path)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def remove(root: str, key: str) -> None:
    """Remove a file, a link or a directory below *root*, never the target of a link. It may be gone already, or be removed
    meanwhile.
    """
    parent, _, name = key.rpartition("/")

    def stop(_: Callable[..., Any], path: str, fault: Any) -> None:
        if not isinstance(fault[1], FileNotFoundError):
            fault[1].filename = os.path.join(root, parent, path)
            raise fault[1]

    gone, named = contextlib.suppress(FileNotFoundError), named_errors(os.path.join(root, key))
    with gone, directory_below(root, parent) as here, named:
        if stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
            shutil.rmtree(name, onerror=stop, dir_fd=here)
        else:
            os.unlink(name, dir_fd=here)


def remove_empty(root: str, *keys: str) -> None:
    """Remove directories below *root* that are empty. Others stay, as do links."""
    for key in keys:
        parent, _, name = key.rpartition("/")
        with contextlib.suppress(OSError), directory_below(root, parent) as here:
            os.rmdir(name, dir_fd=here)
