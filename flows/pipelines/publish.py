"""Publication: the skeleton of everything that publishes a version - build, refresh, retokenize, derive, import."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.checker import verify
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.retry import brief
from flat_tokens.stores.store import Store
from tasks.download.sources import CHECK_ACCESS
from tasks.finalize.provenance import Provenance, build_id
from tasks.finalize.seal import is_published
from tasks.locations import local_path
from tasks.models import Model
from tasks.output.leases import building
from tasks.output.paths import CACHE, RUNS, version_store
from tasks.output.pointer import Pointer, publish, read_pointer
from tasks.output.staging import Place, attempt
from tasks.progress import meter

FIRST_CONTACT_SECONDS = 10.0
"""A store that does not answer for so long before any work was done is rather a wrong address than a busy store."""


class Destination(Protocol):
    """The settings of a configuration or a request that say where to write."""

    @property
    def output(self) -> str: ...

    @property
    def scratch(self) -> str | None: ...


class Request(Destination, Protocol):
    """A configuration or a request of something that publishes a version."""

    @property
    def layout(self) -> Literal["auto"] | LayoutName: ...

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


class Published(Model):
    """Result of whatever publishes a version. ``was_published``: the version was there, and there was nothing to do.
    ``seconds``: how long each stage took.
    """

    path: str
    version: str
    sequence: int
    was_published: bool
    layout: LayoutName
    totals: dict[str, Any]
    byte_count: int
    seconds: dict[str, float]


P = TypeVar("P", bound=Published)


@dataclass
class OpenOutput:
    """An output that a version is about to be published at, opened once. ``pointer``: as it was then. ``seconds``: how long each
    stage has taken so far.
    """

    request: Request
    root: Store
    scratch: Path
    pointer: Pointer
    seconds: dict[str, float] = field(default_factory=dict)

    def result(self, kind: type[P], version: str, sequence: int, was_published: bool, **particular: Any) -> P:
        """The result of the publication of a version; *particular*: the fields of *kind* that others do not have."""
        manifest = read_manifest(version_store(self.root, version))
        return kind(
            path=version_store(self.root, version).url,
            version=version,
            sequence=sequence,
            was_published=was_published,
            layout=manifest["layout"],
            totals=manifest["totals"],
            byte_count=sum(stored["size"] for stored in manifest["objects"]),
            seconds=self.seconds,
            **particular,
        )

    def finish(self, result: P, **facts: Any) -> P:
        """Keep a record of the run beside the versions: when, where, how long, what it was told (with *facts* on top)."""
        now = datetime.now(UTC)
        told = {**self.request.model_dump(mode="json"), **facts}
        record = {"at": now.isoformat(), "host": platform.node(), "config": told, **result.model_dump()}
        name = f"{RUNS}/{now:%Y%m%dT%H%M%S%f}-{result.version}.json"
        self.root.put(name, (json.dumps(record, indent=2) + "\n").encode())
        meter.begin("done")
        return result


@dataclass
class Publication:
    """A version on its way to readers. ``place``: where the attempt at it writes; None where the version is there already.
    ``sequence``: the pointer's sequence number, once ``latest`` points at the version.
    """

    output: OpenOutput
    name: str
    place: Place | None
    sequence: int = 0

    def finish(self, kind: type[P], facts: dict[str, Any] | None = None, **particular: Any) -> P:
        """The result, and a record of the run."""
        result = self.output.result(kind, self.name, self.sequence, self.place is None, **particular)
        return self.output.finish(result, **(facts or {}))


@contextlib.contextmanager
def opened(request: Request) -> Iterator[OpenOutput]:
    """Use an output until the block ends: no garbage is collected from it meanwhile. ValueError, before any work, where nothing
    can be written there.
    """
    meter.reset()
    root, scratch = check_output(request), scratch_of(request)
    pointer = read_pointer(root)
    with building(root, scratch):
        yield OpenOutput(request, root, scratch, pointer)


@contextlib.contextmanager
def publication(
    output: OpenOutput, made_of: Provenance, layout: LayoutName, remember: Callable[[str], object] = lambda version: None
) -> Iterator[Publication]:
    """Publish the version that *made_of* gives. The block finalizes it, unless it is there (``place`` is None). Then *remember*
    is called with its name, and ``latest`` points at it.
    """
    root, version = output.root, build_id(made_of, layout)
    if is_published(root, version, layout):
        here = Publication(output, version, None)
        yield here
        with timed("finalize", output.seconds):
            remember(version)
            verify(version_store(root, version).url)
            here.sequence = publish(root, version, output.pointer.sequence)
        return
    with attempt(root.url, output.scratch, version) as place:
        here = Publication(output, version, place)
        yield here
        with timed("finalize", output.seconds):
            remember(version)
            here.sequence = publish(root, version, output.pointer.sequence)


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a stage, and show that it has begun."""
    meter.begin(name)
    begun = time.monotonic()
    yield
    seconds[name] = round(seconds.get(name, 0) + time.monotonic() - begun, 3)


def layout_of(request: Request, root: Store) -> LayoutName:
    """The layout that is asked for; ``auto`` is mmap on local disks, compact elsewhere."""
    if request.layout != "auto":
        return request.layout
    return "mmap" if root.is_local else "compact"


def scratch_of(request: Destination) -> Path:
    """The local directory for downloads, and for staging where the output is remote."""
    if request.scratch is not None:
        return Path(local_path(request.scratch) or request.scratch)
    root = Store.at(request.output)
    if root.is_local:
        return Path(root.root) / CACHE
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flat-tokens"


def check_output(request: Destination) -> Store:
    """The output's root. ValueError, before any work, where nothing can be written there, or to the scratch directory."""
    root = Store.at(request.output)
    if root.is_local:
        _check_directory(Path(root.root), f"output {request.output}")
    else:
        probe, store = f".probe-{uuid.uuid4().hex}", replace(root, patience=FIRST_CONTACT_SECONDS)
        try:
            store.put(probe, b"")
            store.remove(probe)
        except Exception as error:
            # Every store has errors of its own, and few of them are an OSError.
            raise ValueError(f"cannot write to output {request.output} ({brief(error)}). {CHECK_ACCESS}") from error
    if request.scratch is not None:
        _check_directory(scratch_of(request), f"scratch {request.scratch}")
    return root


def _check_directory(directory: Path, what: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {what}: {error.strerror}. Choose another {what.split()[0]}.") from error


def check_apart(inner: str, outer: str, told: str) -> None:
    """Refuse a location within another one, whose *told* names both: the next run would read what this one wrote."""
    if f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/"):
        raise ValueError(f"{told}. Keep them apart.")
