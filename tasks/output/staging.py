"""Staging: scratch space of one attempt, removed at its end. That of dead processes is swept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import core_schema

from flat_tokens.stores.local import directory_below, kind_of, make_directory, named_errors, refuse_links, remove, remove_empty
from flat_tokens.stores.store import Store
from tasks.output.paths import STAGING


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
        return core_schema.with_info_plain_validator_function(_of_this_process, serialization=nothing)

    @property
    def attempt(self) -> str:
        """The name of the attempt, which no other one has."""
        return Path(self.staging).name


def _of_this_process(value: Any, info: core_schema.ValidationInfo) -> Any:
    return value if value is not None else (info.context or {})["workspace"]


@contextlib.contextmanager
def attempt(root: Store, scratch: Path, build_id: str) -> Iterator[Workspace]:
    """Make a staging directory for this process alone, and remove it at the end. Those of dead processes are swept first.

    A live process holds a lock, which the system releases however the process dies.
    """
    home = root.root if root.is_local else os.fspath(scratch)
    sweep(home)
    with named_errors(home):
        lock, descriptor = _lock_in(Path(home, STAGING, build_id), home)
    directory, key = lock.with_suffix(""), f"{STAGING}/{build_id}/{lock.stem}"
    try:
        directory.mkdir()
        here = os.fspath(directory)
        yield Workspace(replace(root, staging=here, read_once=True), here, os.fspath(scratch))
    finally:
        _try_to_remove(home, _moved_away(home, key))
        _try_to_remove(home, f"{key}.lock")
        os.close(descriptor)
        remove_empty(home, f"{STAGING}/{build_id}", STAGING)


def _lock_in(parent: Path, home: str) -> tuple[Path, int]:
    """Make a new file in *parent* and lock it. Return it and its descriptor. It is there before the directory that it guards:
    without a lock, the process is dead.
    """
    while True:
        try:
            refuse_links(parent, home)
            make_directory(parent)  # and with it, perhaps, the output
            lock = parent / f"{uuid.uuid4().hex[:12]}.lock"
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except (FileNotFoundError, FileExistsError):
            if kind_of(parent) not in (None, "directory"):
                raise
            continue  # it was empty, and swept between the two lines
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if kind_of(lock) is not None:
            return lock, descriptor
        os.close(descriptor)  # it was not locked yet, and swept


def sweep(home: str) -> None:
    """Remove the staging in *home* of attempts whose process is gone."""
    builds = [f"{STAGING}/{name}" for name in entries(home, STAGING)]
    # Listed before the locks are looked for: a directory that is here by now had its lock before.
    keys = [f"{build}/{name}" for build in builds for name in entries(home, build)]
    locks = [f"{build}/{name}" for build in builds for name in entries(home, build) if name.endswith(".lock")]
    for lock in locks:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(home, lock), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _try_to_remove(home, lock.removesuffix(".lock"))
            remove(home, lock)
    for key in keys:
        if not key.endswith(".lock") and kind_of(Path(home, key).with_suffix(".lock")) is None:
            _try_to_remove(home, key)
    remove_empty(home, *builds, STAGING)


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
    """Names in a directory; none where it has just gone, or is a link."""
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with gone, named_errors(os.path.join(home, key)), directory_below(home, key) as directory:
        return os.listdir(directory)
    return []
