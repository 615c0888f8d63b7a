"""Faults at the N-th operation on files: a library for tests of anything that writes files from Python.

A test forks a child that has everything imported, installs a `Watch` there and runs the program in it::

    def work():
        watch = Watch("/dev/shm/here", Fault("rename", 3, "EIO"))  # the 3rd rename below that directory fails
        watch.install()
        return program(), watch.fired

    ended = Child(work, "/dev/shm/log").ended()  # ended.value, ended.output, ended.died

`Fault` names an operation by its kind, its number and, if wanted, a pattern of its path, and what is done to it: an error, half
of a read or write, or death. Without a fault, a `Watch` counts the operations of each kind (``counts``): the numbers to go
through. With ``record=True`` it also keeps what changed the disk: `power_loss` replays that.

What is reached: every function of ``os`` that opens, reads, writes, syncs, lists or renames, and all that is made of them.
``open`` is replaced by Python's own implementation in Python (``_pyio``), whose files call those functions, so that ``open``,
``pathlib``, ``shutil``, ``tempfile``, ``numpy.save`` and streams of gzip and zstd are reached too.

What is not: code in C++ and Rust that opens files by itself (pyarrow's readers of a path, tokenizers), reads of mapped memory,
locks, other processes, and EINTR where Python repeats the call itself (PEP 475), but in rename, link, unlink and mkdir.
"""

import _pyio  # type: ignore[import-not-found]
import builtins
import contextlib
import errno
import faulthandler
import fcntl
import functools
import io
import os
import pickle
import re
import select
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

_FULL = ("ENOSPC", "EDQUOT", "EIO", "ESTALE")
_NAMES = ("EIO", "EACCES", "EROFS", "ESTALE", "EINTR", "EIO done")

KINDS: dict[str, tuple[str, ...]] = {
    "create": (*_FULL, "EMFILE", "EACCES", "EROFS"),  # open for write
    "write": (*_FULL, "short"),
    "truncate": _FULL,
    "fsync": _FULL,
    "rename": ("ENOSPC", "EDQUOT", *_NAMES),
    "link": ("ENOSPC", "EDQUOT", *_NAMES),  # and symlink
    "mkdir": ("ENOSPC", "EDQUOT", *_NAMES),
    "unlink": _NAMES,  # and rmdir
    "open": ("EMFILE", "EACCES", "EIO", "ESTALE"),  # for reading
    "read": ("EIO", "ESTALE", "short"),
    "list": ("EMFILE", "EACCES", "EIO", "ESTALE"),
    "stat": ("EACCES", "EIO", "ESTALE"),
}
"""Kinds of operations, and what is done to each. ``EIO done``: it is done, and said to have failed."""

GROUPS: dict[str, tuple[str, ...]] = {
    "change": ("create", "write", "truncate", "rename", "link", "mkdir", "unlink"),
    "space": ("create", "write", "truncate", "rename", "link", "mkdir"),
    "opening": ("create", "open", "list"),
    "any": tuple(KINDS),
}
"""Names that stand for several kinds, whose operations are counted together."""

LASTING = (
    ("space", "ENOSPC"),
    ("space", "EDQUOT"),
    ("change", "EROFS"),
    ("opening", "EMFILE"),
    ("any", "EIO"),
    ("any", "ESTALE"),
)
"""Faults that stay: a disk that is full or read-only from a moment on, no descriptors left, a disk or server that is gone."""

FUNCTIONS = {
    "write": ("write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range"),
    "truncate": ("truncate", "ftruncate"),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace"),
    "link": ("link", "symlink"),
    "mkdir": ("mkdir",),
    "unlink": ("unlink", "remove", "rmdir"),
    "read": ("read", "pread", "readv", "preadv"),
    "list": ("listdir", "scandir"),
    "stat": ("stat", "lstat"),
}
TWO_PATHS = ("rename", "replace", "link", "symlink")
KILL, KILL_WITHIN = "kill", "kill within"
KILLS = (("change", KILL), ("change", KILL), ("write", KILL_WITHIN))
"""Deaths, as they are drawn: most are right behind an operation."""
PAUSE, INTERRUPT = "pause", "interrupt"
"""Both with milliseconds behind: how long an operation takes, and how long after a first Ctrl-C a second one comes."""


class Fault(NamedTuple):
    """What is done to which operation.

    ``kind``: of `KINDS` or `GROUPS`. ``number``: which of them, from 1. ``action``: the name of an error; ``X done`` for an error
    of an operation that is done all the same; ``short``; ``kill`` (right behind the operation) or ``kill within`` (behind the
    first half of a write); ``pause MS`` (the operation waits first) or ``interrupt MS`` (Ctrl-C before it, and once more later).
    ``lasting``: all further ones of the kind fail too. ``path``: a regular expression; only operations on paths in which it is
    found are counted.
    """

    kind: str
    number: int
    action: str
    lasting: bool = False
    path: str = ""

    def meets(self, number: int) -> bool:
        """Whether it happens to this one of the operations that it counts."""
        return number == self.number or (self.lasting and number > self.number)

    def __str__(self) -> str:
        where = f" on /{self.path}/" if self.path else ""
        return f"{self.action} at {self.kind} {self.number}{where}{' and after' if self.lasting else ''}"


class Watch:
    """Counts the operations of this process below *root*, and does to one of them what *fault* says."""

    def __init__(self, root: str | os.PathLike[str], fault: Fault | None = None, record: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.fired = ""
        """The function and the path that the fault met."""
        self.recorded: list[tuple[Any, ...]] = []
        self._root, self._fault, self._record = os.path.realpath(root), fault, record
        self._open: dict[int, str] = {}
        self._lock = threading.RLock()
        self._seen = 0

    def install(self) -> None:
        """Replace the functions of this process, for good: it is meant to be a fork."""
        for kind, names in FUNCTIONS.items():
            for name in names:
                if hasattr(os, name):
                    setattr(os, name, self._watched(kind, name, getattr(os, name)))
        real_open, real_close = os.open, os.close

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
            where = self._below_root(path, dir_fd)
            if where is None:
                return real_open(path, flags, mode, dir_fd=dir_fd)
            kind = "create" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else "open"

            def opened(path: Any, flags: int) -> int:
                return real_open(path, flags, mode, dir_fd=dir_fd)

            fd = self._do(kind, "open", where, opened, (path, flags), {})
            self._open[fd] = where
            return fd

        def close(fd: int) -> None:
            self._open.pop(fd, None)
            real_close(fd)

        os.open, os.close = open_, close
        io.open = builtins.open = _pyio.open

    def _watched(self, kind: str, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*arguments: Any, **named: Any) -> Any:
            if name in TWO_PATHS:
                where = self._below_root(arguments[1], named.get("dst_dir_fd"))
            else:
                where = self._below_root(arguments[0] if arguments else named.get("path", "."), named.get("dir_fd"))
            if where is None:
                return real(*arguments, **named)
            return self._do(kind, name, where, real, arguments, named)

        return call

    def _below_root(self, path: Any, dir_fd: int | None) -> str | None:
        """The absolute path; None if it is not below the root."""
        if isinstance(path, int):
            return self._open.get(path)
        name = os.fsdecode(path)
        if dir_fd is not None:
            if dir_fd not in self._open:
                return None
            name = os.path.join(self._open[dir_fd], name)
        name = os.path.abspath(name)
        return name if name == self._root or name.startswith(f"{self._root}/") else None

    def _do(
        self,
        kind: str,
        function: str,
        path: str,
        real: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        with self._lock:
            self.counts[kind] += 1
            for group, kinds in GROUPS.items():
                self.counts[group] += kind in kinds
            action = self._action(kind, path)
            if self._record:
                return self._noting(function, path, real, arguments, named)
        if action is None:
            return real(*arguments, **named)
        self.fired = self.fired or f"{function} {path}"
        name, _, more = action.partition(" ")
        if name in (PAUSE, INTERRUPT):
            if name == PAUSE:
                time.sleep(int(more) / 1000)
            else:
                # As the terminal does for Ctrl-C, now and again later, unless the process has ended.
                os.kill(os.getpid(), signal.SIGINT)
                again = threading.Timer(int(more) / 1000, os.kill, (os.getpid(), signal.SIGINT))
                again.daemon = True
                again.start()
            return real(*arguments, **named)
        if action == KILL:
            with contextlib.suppress(OSError):  # such as making a directory that is there
                real(*arguments, **named)
            _die()
        if action in ("short", KILL_WITHIN):
            result = real(*_halved(function, arguments), **named)
            return result if action == "short" else _die()
        if more:
            real(*arguments, **named)
        code = getattr(errno, name)
        # Of a call with a descriptor, the system does not know the path; of one with two paths, it tells both.
        told = [] if isinstance(arguments[0], int) else [arguments[0]]
        raise OSError(code, os.strerror(code), *told, *((None, arguments[1]) if function in TWO_PATHS else ()))

    def _action(self, kind: str, path: str) -> str | None:
        fault = self._fault
        if fault is None or (kind != fault.kind and kind not in GROUPS.get(fault.kind, ())):
            return None
        if fault.path and not re.search(fault.path, path):
            return None
        self._seen += 1
        return fault.action if fault.meets(self._seen) else None

    def _noting(
        self, function: str, path: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Do an operation and keep what it changed, in terms of inodes, as `power_loss.Disk` takes it."""
        note = self.recorded.append
        parent, name = _REAL_STAT(os.path.dirname(path)).st_ino, os.path.basename(path)
        there = None
        match function:
            case "open":
                with contextlib.suppress(OSError, TypeError):
                    there = _REAL_STAT(path, follow_symlinks=False)
                fd = real(*arguments, **named)
                if there is None:
                    note(("create", parent, name, os.fstat(fd).st_ino))
                elif arguments[1] & os.O_TRUNC:
                    note(("truncate", os.fstat(fd).st_ino, 0))
                return fd
            case "write":
                fd = arguments[0]
                appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
                at = os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)
                count = real(*arguments, **named)
                note(("write", os.fstat(fd).st_ino, at, bytes(memoryview(arguments[1]).cast("B")[:count])))
                return count
            case "pwrite" | "writev" | "pwritev" | "sendfile" | "copy_file_range":
                raise NotImplementedError(f"os.{function} is not recorded yet")
        source = self._below_root(arguments[0], named.get("src_dir_fd")) if function in ("rename", "replace", "link") else None
        result = real(*arguments, **named)
        match function:
            case "truncate" | "ftruncate":
                number = os.fstat(arguments[0]) if isinstance(arguments[0], int) else _REAL_STAT(path)
                note(("truncate", number.st_ino, arguments[1]))
            case "fsync" | "fdatasync":
                note(("sync", os.fstat(arguments[0]).st_ino))
            case "rename" | "replace":
                assert source is not None, f"{path} was made of {arguments[0]}, which is not below the root"
                note(("rename", _REAL_STAT(os.path.dirname(source)).st_ino, os.path.basename(source), parent, name))
            case "link":
                note(("link", parent, name, _REAL_STAT(path).st_ino))
            case "symlink":
                note(("symlink", parent, name, os.fspath(arguments[0])))
            case "mkdir":
                note(("mkdir", parent, name, _REAL_STAT(path).st_ino))
            case "unlink" | "remove" | "rmdir":
                note(("unlink", parent, name))
        return result


_REAL_STAT = os.stat


def _halved(function: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a read or write of half as many bytes, and of one at least."""
    fd, what, *rest = arguments
    if function in ("read", "pread"):
        return (fd, max(what // 2, 1), *rest)
    if function in ("write", "pwrite"):
        view = memoryview(what).cast("B")
        return (fd, view[: max(len(view) // 2, 1)], *rest)
    first = memoryview(what[0]).cast("B")
    return (fd, [first[: max(len(first) // 2, 1)]], *rest)


def _die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Ended(NamedTuple):
    """How a child ended: what *work* returned, or None; the traceback of the error that it raised; what it printed, where that
    was kept; whether it died of a kill; whether it had to be killed because it took too long; its exit status.
    """

    value: Any
    error: str | None
    output: str
    died: bool
    hung: bool
    status: int = 0

    def must(self) -> Any:
        """The value. RuntimeError if there is none."""
        if self.error or self.status:
            raise RuntimeError(f"{self.output}{self.error}")
        return self.value


class Child:
    """A fork of this process, which must not have threads. It runs *work*, as another *user* if wanted. What it prints goes to
    the file *log*, if there is one.
    """

    def __init__(self, work: Callable[[], Any], log: str | os.PathLike[str] | None = None, user: int | None = None) -> None:
        self._log = log
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        os.close(self._read)
        status = 1
        try:
            if log is not None:
                out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            try:
                message: tuple[Any, str | None] = (work(), None)
            except BaseException:
                message = (None, traceback.format_exc())
            data = memoryview(pickle.dumps(message))
            while data:
                data = data[os.write(write, data) :]
            status = 0
        finally:
            os._exit(status)

    def ended(self, seconds: float = 600, kill_after: float | None = None) -> Ended:
        """Wait for the child. It hangs, and is killed, if it takes longer than *seconds*. What its threads were doing is
        behind its output then. *kill_after*: it is killed in any case when so many seconds have passed.
        """
        deadline, parts, hung = time.monotonic() + (seconds if kill_after is None else kill_after), [], False
        while select.select([self._read], [], [], max(deadline - time.monotonic(), 0))[0]:
            if not (part := os.read(self._read, 1 << 20)):
                break
            parts.append(part)
        else:
            hung = kill_after is None
            if hung and self._log is not None:
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(0.5)
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._read)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        output = ""
        if self._log is not None:
            with contextlib.suppress(FileNotFoundError), open(self._log, errors="replace") as file:  # it may not have begun
                output = file.read()
                os.unlink(self._log)
        value, error = pickle.loads(b"".join(parts)) if status == 0 else (None, None)
        return Ended(value, error, output, status == -signal.SIGKILL and not hung, hung, status)
