"""Versions of an output: listing them, their origins, pinning them, and going back to one; and the decision of the one that a
gate holds, which a person approves or rejects once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic_core
from pydantic import BeforeValidator, ConfigDict, TypeAdapter

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.checker import verify
from flat_tokens.manifest import MANIFEST, check_name, counts_of, manifest_digest, read_manifest
from flat_tokens.reader import without_links
from flat_tokens.stores.local import kind_of, real_path
from flat_tokens.stores.store import Store, read_record
from tasks.config import BuildConfig, with_absolute_paths
from tasks.models import FoundFile, Model, PinnedSource, SourceFile
from tasks.output.forgotten import check_without_forgotten
from tasks.output.paths import CACHE, ORIGINS, VERSIONS, origin_key, version_store
from tasks.output.pointer import (
    LISTS,
    MARKERS,
    Candidate,
    Decision,
    Pin,
    Pointer,
    RefreshRecord,
    change_pointer,
    is_dataset,
    moved_to,
    pointer_lock,
    put_run,
    read_pointer,
)

T = TypeVar("T")
SomeOrigin = TypeVar("SomeOrigin", bound="Origin")


class Version(Model):
    """A version, as it is listed. ``at``: when it was first there; ``until``: when it ceased to be the latest, or since when it
    is held or rejected.
    """

    version: str
    at: datetime | None
    until: datetime | None
    state: Literal["latest", "former", "withdrawn", "held", "rejected", "other"]
    pinned: str | None
    documents: int
    tokens: int
    tokenizer: str
    layout: LayoutName
    byte_count: int

    @property
    def last_used(self) -> datetime:
        """When it ceased to be the latest, or was made if it never was; the end of time for the latest."""
        if self.state == "latest":
            return datetime.max.replace(tzinfo=UTC)
        return self.until or self.at or datetime.min.replace(tzinfo=UTC)

    @property
    def marks(self) -> str:
        """For people, such as ``former until 2026-07-31 12:00, pinned: the paper``; empty if it never was the latest, and has no
        pin.
        """
        since = f" {'until' if self.state == 'former' else 'since'} {self.until:%Y-%m-%d %H:%M}" if self.until else ""
        pinned = f"pinned: {self.pinned}" if self.pinned else None if self.pinned is None else "pinned"
        return ", ".join(filter(None, ("" if self.state == "other" else self.state + since, pinned)))


class Origin(Model):
    """The origin of a version: its settings, as they were when its sources last gave it. It is next to the version, whose bytes
    know of no place or time. ``at``: when they first gave it; ``looked_up``: when they last did.
    """

    # The record also has the sources and their files, which may be many: ``read_origin_files`` reads them.
    model_config = ConfigDict(extra="ignore")

    at: datetime
    looked_up: datetime | None = None
    config: JsonObject


COLUMNS = TypeAdapter(dict[str, list[Any]])


def _as_columns(files: Sequence[FoundFile | SourceFile], without: str) -> dict[str, tuple[Any, ...]]:
    """The facts of files, a column each, as an origin has them, but for one that says nothing elsewhere."""
    names = files[0]._fields if files else ()
    return {name: values for name, values in zip(names, zip(*files, strict=True), strict=True) if name != without}


def _as_rows(columns: Any) -> list[dict[str, Any]]:
    facts = COLUMNS.validate_python(columns)
    return [dict(zip(facts, values, strict=True)) for values in zip(*facts.values(), strict=True)]


class OriginFiles(Origin):
    """The origin of a version with the files of all its sources: as they were listed when they last gave the version, and as
    they were read.
    """

    found: Annotated[tuple[FoundFile, ...], BeforeValidator(_as_rows)]
    files: Annotated[tuple[SourceFile, ...], BeforeValidator(_as_rows)]


class Status(Model):
    """An output: its versions, the latest first; when its sources were last looked up; the bytes in its ``_cache``; and the
    version that waits for a person, if one does.
    """

    output: str
    versions: tuple[Version, ...]
    last_refresh: datetime | None
    cache_bytes: int
    held: Candidate | None = None

    @property
    def latest(self) -> Version | None:
        return next((one for one in self.versions if one.state == "latest"), None)


def status_of(root: Store) -> Status:
    """The state of an output. It lists ``_cache``."""
    versions = list_versions(root)
    # A refresh looks the sources up also where its version waits, or was rolled back or rejected.
    names = [name.removesuffix(".json") for name in names_of(root, ORIGINS) if name.endswith(".json")]
    looked_up = (origin.looked_up or origin.at for name in names if (origin := read_origin(root, name)) is not None)
    return Status(
        output=root.url,
        versions=tuple(versions),
        last_refresh=max(looked_up, default=None),
        cache_bytes=sum(stored for _, stored in (root / CACHE).listing()) if root.exists(CACHE) else 0,
        held=read_pointer(root).candidate,
    )


def list_versions(root: Store) -> list[Version]:
    """Every published version: the latest first, then those that were the latest most recently."""
    pointer = read_pointer(root)
    described = (if_there(root, name, lambda store: describe(root, store, pointer)) for name in names_of(root, VERSIONS))
    return sorted(filter(None, described), key=lambda one: one.last_used, reverse=True)


def if_there(root: Store, version: str | None, look: Callable[[Store], T]) -> T | None:
    """The value that *look* gives of a version; None if there is none, or another process has just removed it."""
    if version is None or not is_dataset(root, version):
        return None
    try:
        return look(version_store(root, version))
    except FileNotFoundError:
        if is_dataset(root, version):
            raise
        return None


def names_of(root: Store, directory: str) -> Iterator[str]:
    """Names of the entries of a directory of the output."""
    root.fs.invalidate_cache()
    try:
        paths = root.ask("ls", directory, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from sorted(PurePosixPath(path).name for path in paths if path != root.path(directory))  # a file lists itself


def describe(root: Store, store: Store, pointer: Pointer) -> Version:
    """A version for people: its state, times, counts, tokenizer and size."""
    version = PurePosixPath(store.root).name
    manifest = read_manifest(store)
    until: dict[str, tuple[Any, str | None]]
    until = {one.version: (state, one.until) for state in reversed(LISTS) for one in getattr(pointer, state)}
    if waits := pointer.candidate:
        until[waits.version] = ("held", waits.at.isoformat())
    state, since = ("latest", None) if version == pointer.version else until.get(version, ("other", None))
    origin = read_origin(root, version)
    committed = (changed_at(store.info(marker)) for marker in MARKERS if store.exists(marker))
    return Version(
        version=version,
        at=origin.at if origin else next(committed, None),
        until=datetime.fromisoformat(since) if since else None,
        state=state,
        pinned=pointer.pins[version].note if version in pointer.pins else None,
        **counts_of(manifest["totals"]),
        tokenizer=(manifest["provenance"].get("tokenizer") or {}).get("name") or "",
        layout=manifest["layout"],
        byte_count=sum(stored["size"] for stored in manifest["objects"]),
    )


def changed_at(info: JsonObject) -> datetime | None:
    """When an object was last written, as its store says it."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        if isinstance(value, str):
            return datetime.fromisoformat(value)
    return None


def find_version(root: Store, name: str) -> str:
    """The published version of that name, or the only one whose name begins with it. ValueError if there is none."""
    check_name(name)
    if is_dataset(root, name):
        return name
    there = [version for version in names_of(root, VERSIONS) if is_dataset(root, version)]
    matching = [version for version in there if version.startswith(name)]
    if len(matching) != 1:
        listed = ", ".join(matching or there) or "none"
        raise ValueError(f"{root.url}: {'several versions begin' if matching else 'no version begins'} with {name!r}: {listed}")
    return matching[0]


def roll_back(root: Store, name: str | None = None) -> Pointer:
    """Let ``latest`` point at the version before, or at the named one. Return the pointer as it is then.

    The version before the move is withdrawn: a refresh that gives it again does not publish it. Going back to a withdrawn
    version by its name ends that. ValueError if there is nothing to go back to, or if it is damaged.
    """
    if (seen := read_pointer(root)).version is None:
        raise ValueError(f"{root.url}: nothing was ever published here, so there is nothing to go back to")
    with pointer_lock(root):  # which repairs what a rollback before left undone
        seen = read_pointer(root)
    before = [one for one in seen.names("former") if is_dataset(root, one)]
    if name is None and not before:
        raise ValueError(
            f"{root.url}: no version before {seen.version} is left. Name one: python -m flows versions {shlex.quote(root.url)} "
            "lists them."
        )
    version = before[-1] if name is None else find_version(root, name)
    if version == seen.version:
        raise ValueError(f"{root.url}: {version} is the latest version already")
    if seen.candidate is not None and seen.candidate.version == version:
        raise ValueError(
            f"{root.url}: version {version} waits for a person. Decide: python -m flows approve {shlex.quote(root.url)} "
            f"{version[:8]} --reason TEXT, or reject"
        )
    verify(version_store(root, version).url)
    check_without_forgotten(root, version)

    def after(pointer: Pointer) -> Pointer:
        if pointer.sequence != seen.sequence:
            raise ValueError(f"{root.url}: latest moved to {pointer.version} just now. Look again, and run again if need be.")
        if not is_dataset(root, version):
            raise ValueError(f"{root.url}: version {version} has just been removed")
        digest = manifest_digest(version_store(root, version))
        forward = version in pointer.names("withdrawn")
        return pointer.moved(version, digest, is_there=True) if forward else pointer.moved_back(version, digest)

    return change_pointer(root, after)


def pin(root: Store, name: str, note: str = "") -> str:
    """Keep a version, whatever the policy says, until it is unpinned. Return its whole name."""
    version = find_version(root, name)
    made = Pin(at=datetime.now(UTC).replace(microsecond=0), note=note)
    change_pointer(root, lambda now: now.model_copy(update={"pins": {**now.pins, version: made}}))
    if not is_dataset(root, version):
        unpin(root, version)
        raise ValueError(f"{root.url}: version {version} has just been removed")
    return version


def unpin(root: Store, name: str) -> str:
    """Let the policy decide over a version again. Return its whole name. ValueError if it was not pinned."""
    check_name(name)

    def after(pointer: Pointer) -> Pointer:
        nonlocal name
        matching = [version for version in pointer.pins if version.startswith(name)]
        if len(matching) != 1:
            raise ValueError(f"{root.url}: {name!r} is not pinned; pinned are: {', '.join(pointer.pins) or 'none'}")
        (name,) = matching
        return pointer.model_copy(update={"pins": {version: pin for version, pin in pointer.pins.items() if version != name}})

    change_pointer(root, after)
    return name


def remember_origin(
    root: Store, version: str, config: BuildConfig, pinned: Sequence[PinnedSource], files: Sequence[SourceFile]
) -> None:
    """Record the origin of a version, with paths that mean the same in any working directory."""
    known = read_origin(root, version)
    now = datetime.now(UTC).replace(microsecond=0)
    origin = Origin(
        at=known.at if known else now,
        looked_up=now,
        config=with_absolute_paths(config).model_dump(mode="json", exclude_unset=True),
    )
    lists = {
        "found": _as_columns([file for one in pinned for file in one.files], "stamp"),
        "files": _as_columns(files, "found"),
    }
    settings = json.dumps(origin.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":")).encode()
    # Of many files this takes a quarter of json's time. Small floats of settings would have other digits.
    record = settings[:-1] + b"," + pydantic_core.to_json(lists)[1:] + b"\n"
    with pointer_lock(root):
        root.put(origin_key(version), record)


def read_origin(root: Store, version: str) -> Origin | None:
    """The origin of a version; None if it is not known, which costs time at most."""
    return _read_origin(root, version, Origin)


def read_origin_files(root: Store, version: str) -> OriginFiles | None:
    """The sources and files of the origin of a version; None if they are not known."""
    return _read_origin(root, version, OriginFiles)


def _read_origin(root: Store, version: str, kind: type[SomeOrigin]) -> SomeOrigin | None:
    try:
        return kind.model_validate_json(read_record(root, origin_key(version)))
    except (FileNotFoundError, ValueError):
        return None


def check_distinct(outputs: Sequence[str]) -> None:
    """Refuse two names of one place: a version published at one would be the latest of the other."""
    named: dict[str, str] = {}
    for output in outputs:
        root = Store.at(output)
        place = real_path(root.root) if root.is_local else root.url.rstrip("/")
        if place in named:
            raise ValueError(f"{named[place]} and {output} are one place. Give each dataset an output of its own.")
        named[place] = output


def at_dataset(path_or_url: str) -> tuple[Store, str]:
    """The output and the version that a path means. It names an output (its latest version), a version, or the link ``latest``.
    ValueError if no published version of an output is there.
    """
    store = without_links(Store.at(path_or_url))
    if store.is_local and kind_of(store.root) == "file":
        raise ValueError(
            f"{path_or_url}: is a file, not a dataset. Give the output that it names; a run takes the settings, too."
        )
    parent, name = store.root.rpartition("/")[::2]
    if parent.rpartition("/")[2] == VERSIONS and store.exists(MANIFEST):
        root = Store.at(parent.rpartition("/")[0]) if store.is_local else Store(parent.rpartition("/")[0], store.fs)
        return root, name
    version = read_pointer(store).version
    if version is None:
        raise ValueError(f"{path_or_url}: is neither a configuration file nor an output with a published version (latest.json)")
    return store, version


def hold(root: Store, candidate: Candidate, since: int) -> Candidate:
    """Let a version wait for a person, in place of whatever waited before, unless it was rejected meanwhile. ValueError if
    ``latest`` is not at the number *since* any more, at which the gates looked at it, or the version has gone.
    """

    def after(pointer: Pointer) -> Pointer:
        if pointer.sequence != since:
            raise ValueError(
                f"{root.url}: another build published {pointer.version} while this one ran. Version {candidate.version} is "
                "complete; run it again to compare it with that."
            )
        if candidate.version in pointer.names("rejected"):
            return pointer
        return pointer.model_copy(update={"candidate": candidate})

    change_pointer(root, after)
    if not is_dataset(root, candidate.version):
        raise ValueError(f"{root.url}: version {candidate.version} has just been removed. Run the build again to make it again.")
    return candidate


class DecisionResult(NamedTuple):
    """A decision of a version, and the pointer as it is then. ``was_decided``: it had been decided so before."""

    made: RefreshRecord
    pointer: Pointer
    was_decided: bool

    @property
    def decision(self) -> Decision:
        assert self.made.decision is not None
        return self.made.decision

    @property
    def headline(self) -> str:
        """Such as ``approved 80d2fd78..., which is latest now (number 4)``."""
        before = f" ({self.decision.by} had done so {self.decision.at:%Y-%m-%d %H:%M} UTC)" if self.was_decided else ""
        if self.decision.what == "rejected":
            return f"rejected {self.made.version}{before}: latest stays at {self.pointer.version or 'nothing'}"
        return f"approved {self.made.version}{before}: it is latest now (number {self.pointer.sequence})"


def approve(root: Store, name: str | None, why: str, by: str | None = None) -> DecisionResult:
    """Let ``latest`` name the version that waits. *name*: which one that has to be, or how it begins. ValueError if it is
    damaged, or does not wait.
    """
    found = _waiting(read_pointer(root), name)
    if found is not None:
        verify(version_store(root, found.version).url)
        check_without_forgotten(root, found.version)

    def moved(pointer: Pointer, candidate: Candidate) -> Pointer:
        if manifest_digest(version_store(root, candidate.version)) != candidate.manifest_sha256:
            raise ValueError(f"{root.url}: version {candidate.version} is not what the gates looked at. Refresh again.")
        return moved_to(root, pointer, candidate.version, candidate.manifest_sha256)

    return _decide(root, found, name, "approved", why, by, moved)


def reject(root: Store, name: str | None, why: str, by: str | None = None) -> DecisionResult:
    """Leave ``latest`` where it is: a refresh that gives the version again does not hold it again. ValueError if it does not
    wait.
    """
    found = _waiting(read_pointer(root), name)
    return _decide(root, found, name, "rejected", why, by, lambda pointer, candidate: pointer.rejecting(candidate.version))


def _waiting(pointer: Pointer, name: str | None) -> Candidate | None:
    """The candidate, if its name begins so."""
    wanted, found = "" if name is None else check_name(name), pointer.candidate
    return found if found is not None and found.version.startswith(wanted) else None


def _decide(
    root: Store,
    found: Candidate | None,
    name: str | None,
    what: Literal["approved", "rejected"],
    why: str,
    by: str | None,
    after: Callable[[Pointer, Candidate], Pointer],
) -> DecisionResult:
    """Record a decision on the candidate that was *found*, within the change *after* of the pointer. ValueError if another
    candidate or none waits, unless the same was decided before.
    """
    made = found.decided(what, why, by) if found is not None else None
    before: RefreshRecord | None = None

    def noted(pointer: Pointer) -> Pointer:
        nonlocal before
        if found is not None and made is not None and pointer.candidate == found:
            return after(pointer, found).noting(made)
        before = _decided_before(root, pointer, found.version if found else name, what)
        return pointer

    pointer = change_pointer(root, noted)
    if before is not None:
        return DecisionResult(before, pointer, was_decided=True)
    assert made is not None
    decided = DecisionResult(made, pointer, was_decided=False)
    decision = decided.decision.model_dump(mode="json")
    facts: JsonObject = {
        "at": datetime.now(UTC).isoformat(),
        "version": made.version,
        "latest": pointer.version,
        "sequence": pointer.sequence,
        "findings": decision.pop("findings"),
        "decision": decision,
    }
    put_run(root, made.at, made.version, facts)
    return decided


def _decided_before(root: Store, pointer: Pointer, name: str | None, what: str) -> RefreshRecord:
    """The last decision of the version of that name, if it is the same. ValueError, with what is there instead, if not."""
    last = next((one for one in reversed(pointer.decisions) if one.version.startswith(name or "")), None)
    listed = f"python -m flows status {shlex.quote(root.url)} says what is there."
    if last is not None and last.decision is not None:
        is_latest = pointer.version == last.version
        if last.decision.what == what and (is_latest or what == "rejected"):
            return last
        state = f"was {last.decision.what} by {last.decision.by} ({last.decision.at:%Y-%m-%d %H:%M} UTC)"
        remedy = f"To publish it all the same: python -m flows rollback {shlex.quote(root.url)} {last.version}"
        raise ValueError(f"{root.url}: version {last.version} {state}. {remedy if not is_latest else listed}")
    there = f"; {pointer.candidate.version} does" if pointer.candidate else ""
    raise ValueError(
        f"{root.url}: {f'version {name} does not wait' if name else 'no version waits'} for a person{there}. One waits until "
        f"latest moves, which is {pointer.version or 'nothing'} now: refresh again. {listed}"
    )
