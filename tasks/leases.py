"""Who uses an output: builds share it, and what a build needs is not collected as garbage while one runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from flat_tokens.storage import Store, make_directory

logger = logging.getLogger(__name__)

RUNNING = "_running"
COLLECTION = f"{RUNNING}/collection.json"

RENEW_SECONDS = 60.0
EXPIRY_SECONDS = 600.0
"""A lease that was not renewed for so long is that of a dead process, or of a clock that is wrong by as much."""

WAIT_SECONDS = 1.0


@contextlib.contextmanager
def building(root: Store, scratch: Path) -> Iterator[None]:
    """Use an output, and the downloads in *scratch*, until the block ends; waits while a collection takes things away.

    On local disks a lock on the directory itself says so, which the system releases however the process dies; on object
    stores it is an object that is renewed, and expires.
    """
    with contextlib.ExitStack() as held:
        if not scratch.is_relative_to(root.root) or not root.is_local:
            make_directory(scratch)
            held.enter_context(_locked(scratch, fcntl.LOCK_SH))
        if root.is_local:
            held.enter_context(_locked(Path(root.root), fcntl.LOCK_SH))
        else:
            held.enter_context(_lease(root, f"{RUNNING}/{uuid.uuid4().hex}.json"))
            # Each of the two writes its lease before it looks for the other's: one of them sees the other.
            _wait_for(root, COLLECTION)
        yield


@contextlib.contextmanager
def collecting(root: Store) -> Iterator[str | None]:
    """Keep builds from beginning until the block ends. None, or who uses the output already: then nothing must be taken away
    that a build may need.
    """
    if not root.is_local:
        if _is_live(root, COLLECTION):
            raise ValueError(f"{root.url}: another collection is running ({COLLECTION}). Wait for it.")
        with _lease(root, COLLECTION):
            yield _somebody(root)
        return
    with contextlib.ExitStack() as held:
        busy = None
        # The cache has a lock of its own: builds of other outputs may take their downloads from it.
        for directory in (Path(root.root), Path(root.root, "_cache")):
            try:
                if directory.is_dir():
                    held.enter_context(_locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                busy = "a build is running"
            except OSError as error:  # network file systems lock files, if anything
                busy = f"{directory} cannot be locked ({error.strerror}), so whether a build is running cannot be known"
        yield busy


@contextlib.contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a directory. A shared one is waited for, and done without where the file system has none."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if kind & fcntl.LOCK_NB:
                raise
            logger.info("Waiting until the collection of garbage in %s ends", directory)
            fcntl.flock(descriptor, kind)
        except OSError as error:
            if kind & fcntl.LOCK_NB or error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lease(root: Store, key: str) -> Iterator[None]:
    """An object that says that this process is alive, renewed until the block ends."""

    def renew() -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        root.put(key, json.dumps({"at": now, "host": platform.node(), "process": os.getpid()}).encode())

    done = threading.Event()

    def keep_alive() -> None:
        while not done.wait(RENEW_SECONDS):
            try:
                renew()
            except Exception as error:  # noqa: BLE001  # every store has errors of its own, and there is another time
                logger.warning("The lease %s could not be renewed: %s", root.path(key), error)

    renew()
    thread = threading.Thread(target=keep_alive, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        root.remove(key)


def _is_live(root: Store, key: str) -> bool:
    try:
        at = datetime.fromisoformat(json.loads(root.read(key))["at"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # whatever it is, nobody is hurt by leaving things where they are
    return abs((datetime.now(UTC) - at).total_seconds()) < EXPIRY_SECONDS


def _wait_for(root: Store, key: str) -> None:
    told = False
    while _is_live(root, key):
        if not told:
            logger.info("Waiting until the collection of garbage in %s ends", root.url)
            told = True
        time.sleep(WAIT_SECONDS)


def _somebody(root: Store) -> str | None:
    root.fs.invalidate_cache()
    for key, _ in (root / RUNNING).listing():
        if f"{RUNNING}/{key}" != COLLECTION and _is_live(root, f"{RUNNING}/{key}"):
            return f"a build is running ({RUNNING}/{key})"
    return None


def expired_leases(root: Store) -> list[tuple[str, int]]:
    """Leases of dead processes: key and size."""
    if root.is_local or not root.exists(RUNNING):
        return []
    leases = [(f"{RUNNING}/{key}", size) for key, size in (root / RUNNING).listing()]
    return [(key, size) for key, size in leases if not _is_live(root, key)]
