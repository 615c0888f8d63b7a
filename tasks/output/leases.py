"""Leases: builds share an output, and none of what they need is collected as garbage while one runs."""

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

from flat_tokens.stores.local import kind_of, make_directory
from flat_tokens.stores.records import read_json
from flat_tokens.stores.retry import brief
from flat_tokens.stores.store import Store
from tasks.output.paths import CACHE, RUNNING
from tasks.progress import repeating

logger = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
EXPIRY_SECONDS = 600.0
"""A lease that was not renewed for this long belongs to a dead process, or to a clock that is as wrong."""

LEAVING_SECONDS = 10.0
WAIT_SECONDS = 1.0
WAITING = "Waiting until the collection of garbage in %s ends"


@contextlib.contextmanager
def building(root: Store, scratch: Path) -> Iterator[None]:
    """Use an output, and the downloads in *scratch*, until the block ends. Wait while a collection removes things.

    On local disks this is a lock on the directory, which the system releases however the process dies. On object stores it is
    an object that is renewed, and expires.
    """
    with contextlib.ExitStack() as held:
        if not scratch.is_relative_to(root.root) or not root.is_local:
            held.enter_context(sharing(scratch))
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
def sharing(scratch: Path) -> Iterator[None]:
    """Use the downloads in a local directory until the block ends."""
    make_directory(scratch)
    with _locked(scratch, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def collecting(root: Store) -> Iterator[str | None]:
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
    """Lock a directory: shared, which is waited for, where the file system has locks; or exclusive, else BlockingIOError."""
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
    """A name for the processes that this one can see, of one start of one machine; empty where the system has none."""
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
