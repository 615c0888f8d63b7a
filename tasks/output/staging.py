"""Staging: scratch space of one attempt, removed at its end. That of dead processes is swept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from flat_tokens.stores.store import Store
from tasks.models import Model
from tasks.output.paths import STAGING


class Place(Model):
    """Where a build writes: the output, the local directory of this attempt alone, and the one for fetched files."""

    output: str
    staging: str
    scratch: str = ""

    @property
    def root(self) -> Store:
        return Store.at(self.output, self.staging, read_once=True)


@contextlib.contextmanager
def attempt(output: str, scratch: Path, build_id: str) -> Iterator[Place]:
    """Make a staging directory for this process alone, and remove it at the end. Those of dead processes are swept first.

    A live process holds a lock, which the system releases however the process dies.
    """
    root = Store.at(output)
    staging = Path(root.root) / STAGING if root.is_local else scratch / STAGING
    sweep(staging)
    lock, descriptor = _lock_in(staging / build_id)
    directory = lock.with_suffix("")
    try:
        directory.mkdir()
        yield Place(output=output, staging=os.fspath(directory), scratch=os.fspath(scratch))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)
        _remove_empty(directory.parent, staging)


def _lock_in(parent: Path) -> tuple[Path, int]:
    """Make a new file in *parent* and lock it. Return it and its descriptor. It is there before the directory that it guards:
    without a lock, the process is dead.
    """
    while True:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock = parent / f"{uuid.uuid4().hex[:12]}.lock"
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except (FileNotFoundError, FileExistsError):
            if parent.exists() and not parent.is_dir():
                raise
            continue  # it was empty, and swept between the two lines
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if lock.exists():
            return lock, descriptor
        os.close(descriptor)  # it was not locked yet, and swept


def sweep(staging: Path) -> None:
    """Remove the staging of attempts whose process is gone."""
    builds = _entries(staging)
    # Listed before the locks are looked for: a directory that is here by now had its lock before.
    directories = [path for build in builds for path in _entries(build) if path.suffix != ".lock"]
    locks = [path for build in builds for path in _entries(build) if path.suffix == ".lock"]
    for lock in locks:
        with contextlib.suppress(FileNotFoundError), lock.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    for directory in directories:
        if not directory.with_suffix(".lock").exists():
            shutil.rmtree(directory, ignore_errors=True)
    _remove_empty(*builds, staging)


def _entries(directory: Path) -> list[Path]:
    """The entries of a directory; none where it has just gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(directory.iterdir())
    return []


def _remove_empty(*directories: Path) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # another attempt is in it, or it is gone
            directory.rmdir()
