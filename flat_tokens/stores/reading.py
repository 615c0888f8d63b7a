"""Reading local files: the one place that opens them, and the roots in which they must be. A process that may write below a
root can replace a file, or a directory above it, by a link at any moment. So no path is checked first and opened later: it is
opened without any effect on the file, the system says which file was opened, and that very file is read. `python -m
tests.doors` refuses code that opens files in another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import struct
import sys
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

from flat_tokens.stores.local import DIRECT_ALIGNMENT, Buffer, raise_named, real_path

INPUT_ROOTS, OUTPUT_ROOTS = "FLAT_TOKENS_INPUT_ROOTS", "FLAT_TOKENS_OUTPUT_ROOTS"
"""Environment variables of the workers: paths and URLs, with commas between them, to which the reads and writes of
all runs are bound. Writing includes reading. Without a variable there is no such bound."""
SCRATCH = "FLAT_TOKENS_SCRATCH"
"""Environment variable of a worker: its directory for downloads and staging, whatever a configuration says."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe has perhaps nobody who writes
_DESCRIPTORS = "/proc/self/fd"
_lent: dict[str, int] = {}


def named_roots(first: str, *more: str) -> list[str]:
    """The roots of several variables; none if the *first* is not set."""
    listed = ",".join(os.environ.get(name, "") for name in (first, *more)) if os.environ.get(first) else ""
    return [root.strip() for root in listed.split(",") if root.strip()]


def open_descriptor(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of what is at a path, open for reading with more *flags*. ValueError if roots are set and it is outside."""
    roots = os.environ.get(INPUT_ROOTS)
    return _opened_within(os.fspath(path), flags, roots) if roots else os.open(path, _FLAGS | flags)


def descriptor(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of a plain file. ValueError for any other kind: a device has no end, and a pipe may have no writer."""
    found = open_descriptor(path, flags)
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise ValueError(f"{os.fspath(path)} is not a plain file")


def open_plain(path: str | os.PathLike[str]) -> BufferedReader:
    """A plain file, open for reading. Raises as ``descriptor`` does."""
    return open(path, "rb", opener=lambda name, _: descriptor(name))


@contextlib.contextmanager
def library_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """The path at which a library opens, within the block, the very file that was checked. If roots are set, ValueError as
    ``descriptor`` raises it.
    """
    if not os.environ.get(INPUT_ROOTS):
        yield os.fspath(path)
        return
    found = descriptor(path)
    try:
        yield f"{_DESCRIPTORS}/{found}" if hasattr(os, "O_PATH") else os.fspath(path)
    finally:
        os.close(found)


def resolved_path(path: str | os.PathLike[str]) -> str:
    """The path without links. ValueError if roots are set and it leads out of them."""
    real = real_path(path)
    if os.environ.get(INPUT_ROOTS):
        _check(os.fspath(path), real)
    return real


@contextlib.contextmanager
def lent(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let a temporary file that this process has made be opened within the block, wherever it is."""
    real = real_path(path)
    _lent[real] = _lent.get(real, 0) + 1
    try:
        yield
    finally:
        _lent[real] -= 1
        if not _lent[real]:
            del _lent[real]


def read_direct(path: str, start: int, stop: int, buffer: Buffer) -> memoryview | None:
    """Bytes ``start:stop`` of a local file, read into *buffer* past the page cache; None if that is not possible."""
    if not hasattr(os, "O_DIRECT"):
        return None
    begin = start // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    wanted = -(-(stop - begin) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
    view = buffer.data
    try:
        fd = descriptor(path, os.O_DIRECT)
        try:
            count = os.preadv(fd, [view[:wanted]], begin)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise_named(error, path)
        return None  # not on this file system
    return view[start - begin : stop - begin] if count >= stop - begin else None  # the file's end, or an interruption


def _opened_within(path: str, flags: int, input_roots: str) -> int:
    """A descriptor of the file at a path within the roots. No file outside of them is opened, not even for a moment."""
    if _openat2 is not None and path.startswith(_local_roots(input_roots)) and "/.." not in path:
        # Below a root by its name, and no link on the way: then it is below the root.
        found: int = _openat2(_OPENAT2, _AT_FDCWD, path.encode("utf-8", "surrogateescape"), _how(_FLAGS | flags), _HOW_BYTES)
        if found >= 0:
            return found
        if (number := ctypes.get_errno()) not in _OTHERWISE:
            raise OSError(number, os.strerror(number), path)
    if not hasattr(os, "O_PATH"):
        return _opened_and_compared(path, flags)
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | flags & os.O_NOFOLLOW)
    try:
        link = f"{_DESCRIPTORS}/{found}"
        _check(path, os.readlink(link))
        return os.open(link, _FLAGS | flags & ~os.O_NOFOLLOW)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(found)


@functools.cache
def _how(flags: int) -> bytes:
    """The argument of openat2 that opens with *flags* and follows no link."""
    return struct.pack("=QQQ", flags | getattr(os, "O_LARGEFILE", 0), 0, _RESOLVE_NO_SYMLINKS)


_OPENAT2, _AT_FDCWD, _RESOLVE_NO_SYMLINKS, _HOW_BYTES = ctypes.c_long(437), -100, 4, ctypes.c_size_t(24)
"""Numbers of Linux, the same on all machines."""
_OTHERWISE = {errno.ELOOP, errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL, errno.EAGAIN}
"""There is a link, or the system or a container does not know the call, or not these flags."""


_openat2: Any = None
"""The function that makes a system call by its number; None on another system."""
if sys.platform == "linux":
    _openat2 = ctypes.CDLL(None, use_errno=True).syscall
    _openat2.restype = ctypes.c_long  # its arguments are passed as they are: saying their types takes as long as the call


def _opened_and_compared(path: str, flags: int) -> int:
    """A descriptor of the file at a path, on a system that does not say which file a descriptor is of: it is compared with the
    path.
    """
    found = os.open(path, _FLAGS | flags)
    try:
        real = real_path(path)
        _check(path, real)
        if not os.path.samestat(os.fstat(found), os.stat(real)):
            raise ValueError(f"{path} changed while it was opened. Run the same command again.")
    except BaseException:
        os.close(found)
        raise
    return found


def _check(path: str, real: str) -> None:
    """ValueError if a path leads out of the roots. The worker's own directories of fetched files are separate: a path in one
    must lead to a file in one, and no link below a root may lead there.
    """
    real += "/"  # so that a root which is a file is one, too
    listed = os.environ.get(INPUT_ROOTS), os.environ.get(OUTPUT_ROOTS)
    if real.startswith(_local_roots(*listed)) or real[:-1] in _lent:
        return
    own, named = _own_directories(*map(os.environ.get, _OWN)), f"{os.path.abspath(path)}/"
    if real.startswith(own) and named.startswith(own):
        return
    if not listed[1] and not named.startswith((*_local_roots(*listed), *_local_roots(*listed, real=False))):
        return  # an output, which may be anywhere: it was named by its path, and no link below a root leads to it
    _local_roots.cache_clear()  # a root may be a link that has been changed
    if not real.startswith(_local_roots(*listed)):
        allowed = f"{INPUT_ROOTS} allows {', '.join(named_roots(INPUT_ROOTS, OUTPUT_ROOTS))}"
        raise ValueError(f"{path} leads out of what may be read here: {allowed}. Put the file itself there instead of a link.")


@functools.lru_cache(8)
def _local_roots(*listed: str | None, real: bool = True) -> tuple[str, ...]:
    """The local ones of listed roots, without links or as they are named, with a slash at the end."""
    place = real_path if real else os.path.abspath
    roots = (root.strip() for root in ",".join(filter(None, listed)).split(","))
    paths = (root.removeprefix("file://").removeprefix("local://") for root in roots)
    return tuple(f"{place(os.path.expanduser(path)).rstrip('/')}/" for path in paths if path and "://" not in path)


_OWN = (SCRATCH, "XDG_CACHE_HOME", "HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


@functools.lru_cache(8)
def _own_directories(*settings: str | None) -> tuple[str, ...]:
    """The directories of fetched files, this service's and those of the hub's client, as they are named and without links."""
    scratch, cache, home, hub_home, *hub = settings
    caches = cache or os.path.join(home or os.path.expanduser("~"), ".cache")
    hub_caches = [*filter(None, hub), os.path.join(hub_home or os.path.join(caches, "huggingface"), "hub")]
    paths = [scratch or os.path.join(caches, "flat-tokens"), hub_caches[0]]
    named = [os.path.abspath(os.path.expanduser(path)) for path in paths]
    return tuple(f"{path.rstrip('/')}/" for path in (*named, *map(real_path, named)))
