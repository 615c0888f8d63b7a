"""Leases: builds share an output, and none of what they need is collected as garbage while one runs. And staging: scratch space
of one attempt, removed at its end. That of dead processes is swept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import core_schema

from flat_tokens.annotations import AnyArray
from flat_tokens.stores.local import (
    directory_below,
    kind_of,
    locked,
    make_directory,
    named_errors,
    refuse_links,
    remove,
    remove_empty,
)
from flat_tokens.stores.retry import brief
from flat_tokens.stores.store import Store, read_json
from tasks.output.paths import CACHE, RUNNING, STAGING
from tasks.progress import repeating


class Workspace(NamedTuple):
    """One process's workspace: the output, its own staging directory, and the directory of fetched files. ``keeps``: these are
    kept; otherwise each is removed when its slices are settled. ``room``: bytes that those may take that are not kept, and the
    ranges that are read of Parquet files; None: such files are fetched, too.
    """

    root: Store
    staging: str
    scratch: str = ""
    keeps: bool = True
    room: int | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """In JSON it is null: every process has its own, which the context of a validation has as ``workspace``."""
        nothing = core_schema.plain_serializer_function_ser_schema(lambda _: None, when_used="json")
        return core_schema.with_info_plain_validator_function(
            lambda value, info: (info.context or {})["workspace"] if value is None else value, serialization=nothing
        )

    @property
    def attempt(self) -> str:
        """The name of the attempt, which no other one has."""
        return Path(self.staging).name

    def path(self, name: str) -> Path:
        """Path of a file of the staging."""
        return Path(self.staging, name)

    def write(self, name: str, items: AnyArray, mode: str = "wb") -> None:
        """Write the items of an array to a file of the staging. OSError, with its path, if the disk has no room for them."""
        # ndarray.tofile has neither the cause nor the path in its error, and no error at all where few items are lost.
        with named_errors(path := self.path(name)), open(path, mode) as file:
            file.write(np.ascontiguousarray(items).data)


@contextlib.contextmanager
def attempt(root: Store, scratch: Path, build_id: str) -> Iterator[Workspace]:
    """Make a staging directory for this process alone, and remove it at the end. Those of dead processes are swept first.

    A live process holds a lock, which the system releases however the process dies.
    """
    home = root.root if root.is_local else os.fspath(scratch)
    sweep(home)
    with contextlib.ExitStack() as held:
        with named_errors(home):
            directory = _lock_in(Path(home, STAGING, build_id), home, held).with_suffix("")
        here, key = os.fspath(directory), f"{STAGING}/{build_id}/{directory.name}"
        try:
            directory.mkdir()
            yield Workspace(replace(root, staging=here, read_once=True), here, os.fspath(scratch))
        finally:
            _try_to_remove(home, _moved_away(home, key))
            _try_to_remove(home, f"{key}.lock")
            held.close()
            remove_empty(home, f"{STAGING}/{build_id}", STAGING)


def _lock_in(parent: Path, home: str, held: contextlib.ExitStack) -> Path:
    """Make a new file in *parent*, whose lock is *held*. It is there before the directory that it guards: without a lock, the
    process is dead.
    """
    while True:
        lock = parent / f"{uuid.uuid4().hex[:12]}.lock"
        try:
            refuse_links(parent, home)
            make_directory(parent)  # and with it, perhaps, the output
            held.enter_context(locked(lock))
        except (FileNotFoundError, FileExistsError):
            if kind_of(parent) not in (None, "directory"):
                raise
            continue  # it was empty, and swept between the two lines
        if kind_of(lock) is not None:
            return lock
        held.close()  # it was not locked yet, and swept


def dead_attempts(home: str) -> Iterator[str]:
    """Keys of the staging in *home* of attempts whose process is gone, in order. The lock of each is held until the next one, if
    it is there.
    """
    builds = [f"{STAGING}/{name}" for name in entries(home, STAGING)]
    # A directory that is listed had its lock before.
    keys = {f"{build}/{name}".removesuffix(".lock") for build in builds for name in entries(home, build)}
    for key in sorted(keys):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(Path(home, key).with_suffix(".lock"), waits=False, mode=0))
            except BlockingIOError:
                continue
            except FileNotFoundError:
                pass
            yield key


def sweep(home: str) -> None:
    """Remove the staging in *home* of attempts whose process is gone."""
    for key in dead_attempts(home):
        _try_to_remove(home, key)
        remove(home, os.fspath(Path(key).with_suffix(".lock")))
    remove_empty(home, *(f"{STAGING}/{name}" for name in entries(home, STAGING)), STAGING)


def sweep_homes(root: Store, scratch: Path) -> None:
    """Sweep the places where processes that write to an output stage and fetch: the output, or *scratch* if it is remote."""
    for home in (root.root if root.is_local else os.fspath(scratch), os.fspath(scratch / "files")):
        sweep(home)


def _moved_away(home: str, key: str) -> str:
    """Rename a staging directory, before it is removed. Return its key. A thread that was interrupted twice may still be moving a
    shard from it to its place: that would lose the files that are removed at the same moment.
    """
    parent, _, name = key.rpartition("/")
    try:
        with directory_below(home, parent) as here:
            os.rename(name, f"{name}.ended", src_dir_fd=here, dst_dir_fd=here)
    except OSError:
        return key
    return f"{key}.ended"


def _try_to_remove(home: str, key: str) -> None:
    with contextlib.suppress(OSError):  # the next attempt tries again
        remove(home, key)


def entries(home: str, key: str) -> list[str]:
    """Names in a directory; none if it has just gone, or is a link."""
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with gone, named_errors(os.path.join(home, key)), directory_below(home, key) as directory:
        return os.listdir(directory)
    return []


logger = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
EXPIRY_SECONDS = 600.0
"""A lease that was not renewed for this long belongs to a dead process, or to a clock that is as wrong."""

LEAVING_SECONDS = 10.0
WAIT_SECONDS = 1.0
WAITING = "Waiting until the collection of garbage in %s ends"


@contextlib.contextmanager
def build_lease(root: Store, scratch: Path) -> Iterator[None]:
    """Use an output, and the downloads in *scratch*, until the block ends. Wait while a collection removes things.

    On local disks this is a lock on the directory, which the system releases however the process dies. On object stores it is
    an object that is renewed, and expires.
    """
    with contextlib.ExitStack() as held:
        if not scratch.is_relative_to(root.root) or not root.is_local:
            held.enter_context(shared_scratch(scratch))
        if root.is_local:
            held.enter_context(_locked(Path(root.root), fcntl.LOCK_SH))
        else:
            held.enter_context(_lease(root, "build"))
            # Each of the two writes its lease before it looks for the other's: one of them sees the other.
            has_said = False
            while _live(root, "collection"):
                if not has_said:
                    logger.info(WAITING, root.url)
                    has_said = True
                time.sleep(WAIT_SECONDS)
        yield


@contextlib.contextmanager
def shared_scratch(scratch: Path) -> Iterator[None]:
    """Use the downloads in a local directory until the block ends."""
    make_directory(scratch)
    with _locked(scratch, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def collection_lease(root: Store) -> Iterator[str | None]:
    """Keep builds from beginning until the block ends. Yield None, or the reason why nothing that builds need may be removed:
    one is running. Collections do not disturb each other.
    """
    if not root.is_local:
        with _lease(root, "collection"):
            yield in_use(root)
        return
    with contextlib.ExitStack() as held:
        yield _exclude_builds(root, held)


def in_use(root: Store) -> str | None:
    """The user of an output at this moment, as far as it is known; None if nobody uses it."""
    if root.is_local:
        with contextlib.ExitStack() as held:
            return _exclude_builds(root, held)
    builds = _live(root, "build")
    return f"a build is running ({RUNNING}/{builds[0]})" if builds else None


def _exclude_builds(root: Store, held: contextlib.ExitStack) -> str | None:
    # The cache has a lock of its own: builds of other outputs may take their downloads from it.
    for directory in (Path(root.root), Path(root.root, CACHE)):
        try:
            if kind_of(directory) == "directory":
                held.enter_context(_locked(directory, fcntl.LOCK_EX))
        except BlockingIOError:
            return "a build is running, or another collection"
        except OSError as error:  # network file systems lock files, if anything
            return f"{directory} cannot be locked ({error.strerror}), so whether a build is running cannot be known"
    return None


@contextlib.contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Lock a directory: shared, which is waited for, if the file system has locks; or exclusive, else BlockingIOError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if kind == fcntl.LOCK_EX:
                raise
            logger.info(WAITING, directory)
            fcntl.flock(descriptor, kind)
        except OSError as error:
            if kind == fcntl.LOCK_EX or error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lease(root: Store, what: str) -> Iterator[None]:
    """Keep an object that says that this process is alive, renewed until the block ends."""
    key = f"{RUNNING}/{what}-{uuid.uuid4().hex}.json"

    def renew() -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        root.put(key, json.dumps({"at": now, "host": platform.node(), "process": os.getpid(), "among": _processes()}).encode())

    def keep_alive() -> None:
        try:
            renew()
        except Exception as error:  # noqa: BLE001  # every store has errors of its own, and there is another time
            logger.warning("The lease %s could not be renewed: %s", root.path(key), brief(error))

    renew()
    try:
        with repeating(RENEW_SECONDS, keep_alive, "lease"):
            yield
    finally:
        try:
            replace(root, patience=LEAVING_SECONDS).remove_object(key)
        except Exception as error:  # noqa: BLE001  # as above; what was done is done, and what went wrong is what is reported
            logger.warning("The lease %s could not be removed, and expires: %s", root.path(key), brief(error))


def _processes() -> str:
    """A name for the processes that this one can see, of one start of one machine; empty if the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def _is_live(root: Store, key: str) -> bool:
    try:
        lease = read_json(root, key)
        if lease.get("among") == _processes() != "" and kind_of(f"/proc/{int(lease['process'])}") is None:
            return False
        age = datetime.now(UTC) - datetime.fromisoformat(lease["at"])  # TypeError where it has no zone
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, OverflowError):
        return True  # whatever it is, nobody is hurt by leaving things where they are
    return abs(age.total_seconds()) < EXPIRY_SECONDS


def _leases(root: Store) -> list[tuple[str, int]]:
    """Names and sizes of all leases."""
    with contextlib.suppress(FileNotFoundError):
        return list((root / RUNNING).listing())
    return []


def _live(root: Store, what: str) -> list[str]:
    return [name for name, _ in _leases(root) if name.startswith(f"{what}-") and _is_live(root, f"{RUNNING}/{name}")]


def expired_leases(root: Store) -> list[tuple[str, int]]:
    """Leases of dead processes: key and size."""
    return [(f"{RUNNING}/{name}", size) for name, size in _leases(root) if not _is_live(root, f"{RUNNING}/{name}")]
