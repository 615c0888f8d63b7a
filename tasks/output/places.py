"""Places that a command writes to: the output and the scratch directory, which are checked before any work."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.stores.local import kind_of, make_directory
from flat_tokens.stores.reading import SCRATCH
from flat_tokens.stores.retry import brief
from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.locations import CHECK_ACCESS, local_path, plain_location, writable
from tasks.output.leases import Workspace
from tasks.output.paths import CACHE, PROBE, check_places

if TYPE_CHECKING:
    from tasks.derive.request import DeriveRequest, ForgetRequest, ImportRequest
    from tasks.groups import Group

    Request = BuildConfig | DeriveRequest | ImportRequest
    """Settings of something that publishes a version."""

FIRST_CONTACT_SECONDS = 10.0
"""A store that does not answer for this long before any work was done is rather a wrong address than a busy store."""


@contextmanager
def removed_if_empty(root: Store) -> Iterator[None]:
    """If the block fails, remove the local directories that it made for an output and left empty."""
    above = [path for path in (Path(root.root), *Path(root.root).parents) if root.is_local and kind_of(path) is None]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first that is not empty
            for path in above:
                path.rmdir()
        raise


def layout_of(request: Request, root: Store) -> LayoutName:
    """The layout that is asked for; ``auto`` is mmap on local disks, compact elsewhere."""
    if request.layout != "auto":
        return request.layout
    return "mmap" if root.is_local else "compact"


def scratch_of(request: Request | ForgetRequest | Group, root: Store) -> Path:
    """The local directory for downloads, and for staging if the output is remote: this worker's, else the request's."""
    if root.is_local and not os.environ.get(SCRATCH) and request.scratch is None:
        return Path(root.root) / CACHE
    return scratch_apart(request.scratch)


def reading_at(request: Request, root: Store) -> Workspace:
    """The workspace of what only reads the text of a request: it has no staging."""
    return Workspace(root, staging="", scratch=os.fspath(scratch_of(request, root)))


def scratch_apart(wanted: str | None) -> Path:
    """The local directory, below no output, for what is made on the way: this worker's, else the one that is *wanted*."""
    if own := os.environ.get(SCRATCH):
        return Path(own)
    if wanted is not None:
        return Path(local_path(writable(plain_location(wanted))) or wanted)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flat-tokens"


def check_output(request: Request) -> Store:
    """The output's root. ValueError, before any work, if nothing can be written there, or to the scratch directory."""
    root = Store.at(request.output)
    if root.is_local:
        _check_directory(Path(root.root), f"output {request.output}")
    else:
        store = replace(root, patience=FIRST_CONTACT_SECONDS)
        try:
            store.put(PROBE, b"")  # one name for all: what a killed command leaves the next one removes
            store.remove_object(PROBE)
        except Exception as error:
            # Every store has errors of its own, and few of them are an OSError.
            raise ValueError(f"cannot write to output {request.output} ({brief(error)}). {CHECK_ACCESS}") from error
    check_places(root)
    if request.scratch is not None:
        _check_directory(scratch_of(request, root), f"scratch {request.scratch}")
    return root


def _check_directory(directory: Path, what: str) -> None:
    try:
        make_directory(directory)
        tempfile.TemporaryFile(dir=directory, prefix=".probe-").close()  # without a name, where the file system can
    except OSError as error:
        raise ValueError(f"cannot write to {what}: {error.strerror}. Choose another {what.split()[0]}.") from error


def check_apart(inner: str, outer: str, message: str) -> None:
    """Refuse a location within another one: the next run would read what this one wrote. *message* names both."""
    if f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/"):
        raise ValueError(f"{message}. Keep them apart.")


def check_writable(root: Store) -> None:
    """ValueError if a build could not write to its output, as far as that is known without writing."""
    if not root.is_local:
        return
    path = nearest(Path(root.root))
    problem = errno.ENOTDIR if kind_of(path) != "directory" else 0 if os.access(path, os.W_OK | os.X_OK) else errno.EACCES
    if problem:
        raise ValueError(f"cannot write to output {root.root}: {path}: {os.strerror(problem)}. Choose another output.")


def nearest(path: Path) -> Path:
    """A directory, or the nearest above it that is there."""
    return next(one for one in (path, *path.parents) if kind_of(one) is not None)
