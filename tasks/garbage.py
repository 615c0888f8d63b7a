"""Garbage of an output: superfluous versions by policy, and all that no kept version and no running build needs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from flat_tokens.manifest import read_manifest
from flat_tokens.stores.local import make_directory, sync_directory
from flat_tokens.stores.store import Store
from tasks.models import Model, digest_of
from tasks.output.leases import collecting, expired_leases, in_use
from tasks.output.paths import (
    CACHE,
    FILES,
    GROUPS,
    ORIGINS,
    QUARANTINE,
    RECEIPT,
    RUNS,
    STAGING,
    VERSIONS,
    origin_key,
    pin_key,
    receipt_key,
    shard_key,
    version_key,
    version_store,
)
from tasks.output.pointer import MARKERS, is_dataset, pointer_lock, read_pointer
from tasks.output.staging import sweep
from tasks.output.versions import Version, changed_at, list_versions, names_of, read_origin
from tasks.shards.receipts import read_receipt
from tasks.shards.recipe import ingredients_needed, ingredients_of

COLLECTED = "collected"
"""Directory below the staging for things that are being removed. The next build would sweep it, too."""

SHARD_KEY = re.compile(r"[0-9a-f]{64}")
READERS = 16

Kind = Literal["version", "staging", "unfinished version", "shard", "file", "quarantine", "record", "group", "lease"]


class Policy(Model):
    """Retention: the latest version and pinned ones are always kept. So are the most recently used ones, and whatever was in
    use in the last days.
    """

    keep_versions: int = Field(3, ge=1, description="Versions that are kept, the latest one among them")
    grace_days: float = Field(7.0, ge=0, description="Nothing goes that was in use, or made, in so many days")


class Garbage(Model):
    """Something that may go: its kind, its name below the output, its size, and why."""

    kind: Kind
    name: str
    byte_count: int
    why: str


class Collected(Model):
    """Garbage that may go, or went if ``deleted``. ``left``: why things that builds may need were left, if they were."""

    garbage: tuple[Garbage, ...]
    kept: tuple[Version, ...]
    deleted: bool
    left: str | None

    @property
    def byte_count(self) -> int:
        return sum(item.byte_count for item in self.garbage)


def collect(root: Store, policy: Policy, *, delete: bool = False) -> Collected:
    """Find garbage, and with *delete* remove it. Killed at any moment, it leaves whole versions and whole shards.

    ValueError where something is not understood: then nothing is known to be garbage.
    """
    if not delete:
        kept, going = divide(list_versions(root), policy)
        versions = [_garbage(version, policy) for version in going]
        return Collected(
            garbage=(*versions, *dead_staging(root), *unneeded(root, kept, going, policy)),
            kept=tuple(kept),
            deleted=False,
            left=in_use(root),
        )
    with collecting(root) as busy:
        gone = [*_remove_versions(root, policy, busy), *dead_staging(root)]
        if root.is_local:
            sweep(Path(root.path(STAGING)))
        kept = list_versions(root)
        if busy is None:
            for item in unneeded(root, kept, [], policy):
                _remove(root, item)
                gone.append(item)
        _tidy(root)
    return Collected(garbage=tuple(gone), kept=tuple(kept), deleted=True, left=busy)


def divide(versions: list[Version], policy: Policy) -> tuple[list[Version], list[Version]]:
    """The versions that the policy keeps, and the others. Where none is the latest, the pointer is lost, and all are kept."""
    limit = _limit(policy)
    lost = not any(version.state == "latest" for version in versions)
    kept = [
        version
        for rank, version in enumerate(versions)
        if lost or rank < policy.keep_versions or version.pinned is not None or version.last_used > limit
    ]
    return kept, [version for version in versions if version not in kept]


def _garbage(version: Version, policy: Policy) -> Garbage:
    why = f"not among the last {policy.keep_versions}, not in use since {version.last_used:%Y-%m-%d}"
    return Garbage(kind="version", name=version_key(version.version), byte_count=version.byte_count, why=why)


def _limit(policy: Policy) -> datetime:
    return datetime.now(UTC) - timedelta(days=policy.grace_days)


def remove_superfluous(root: Store, policy: Policy) -> list[Garbage]:
    """Remove the versions that the policy does not keep. Return them."""
    with collecting(root) as busy:
        gone = _remove_versions(root, policy, busy)
        _tidy(root)
    return gone


def _remove_versions(root: Store, policy: Policy, busy: str | None) -> list[Garbage]:
    _, going = divide(list_versions(root), policy)
    # A version that was never the latest may be one that a running build is about to publish.
    sure = [version for version in going if busy is None or version.state != "other"]
    return [_garbage(version, policy) for version in sure if _remove_version(root, version.version)]


def _remove_version(root: Store, version: str) -> bool:
    """Remove a version, unless somebody has just made it the latest or pinned it. Return whether it went. Readers lose it at
    once.
    """
    directory = version_key(version)
    if root.is_local:
        with pointer_lock(root):
            if _is_wanted(root, version):
                return False
            trash = _throw_away(root, directory)
            sync_directory(Path(root.path(VERSIONS)))  # or a power loss might bring it back without what is removed next
        for marker in MARKERS:
            (trash / marker).unlink(missing_ok=True)
        _remove_tree(trash)
    else:
        markers = {marker: root.read(f"{directory}/{marker}") for marker in MARKERS if root.exists(f"{directory}/{marker}")}
        for marker in markers:
            root.remove(f"{directory}/{marker}")
        # A process that moves the pointer here, or pins this, looks for the marker afterwards: one of the two sees the other.
        if _is_wanted(root, version):
            for marker, data in markers.items():
                root.put(f"{directory}/{marker}", data)
            return False
        _remove_prefix(root, directory)
    root.remove(origin_key(version))
    return True


def _is_wanted(root: Store, version: str) -> bool:
    return read_pointer(root).version == version or root.exists(pin_key(version))


def _throw_away(root: Store, key: str) -> Path:
    """Move a local directory out of sight in one step. Return its new place."""
    source = Path(root.path(key))
    trash = Path(root.path(STAGING), COLLECTED, f"{source.name}-{uuid.uuid4().hex[:8]}")
    while True:
        try:
            make_directory(trash.parent)
            os.rename(source, trash)
        except FileNotFoundError:
            if not source.exists():
                raise
            continue  # the directory above was empty, and swept in between
        return trash


def _remove_tree(directory: Path) -> None:
    """Remove a directory that was thrown away. A build that begins at this moment may remove it too."""

    def stop(_: Callable[..., Any], __: str, fault: Any) -> None:
        if not isinstance(fault[1], FileNotFoundError):
            raise fault[1]

    shutil.rmtree(directory, onerror=stop)


def _tidy(root: Store) -> None:
    """Remove directories of thrown away things and of groups where they are empty by now."""
    if root.is_local:
        for directory in (f"{STAGING}/{COLLECTED}", STAGING, GROUPS):
            with contextlib.suppress(OSError):  # something else is in it, or it never was there
                os.rmdir(root.path(directory))


def _remove_prefix(root: Store, key: str) -> None:
    root.fs.invalidate_cache()
    root.remove(key)


def _remove(root: Store, item: Garbage) -> None:
    """Remove garbage other than a version. A shard's receipt goes first."""
    if not root.is_local:
        if item.kind == "shard":
            root.remove(f"{item.name}/{RECEIPT}")
        _remove_prefix(root, item.name)
    elif os.path.isdir(root.path(item.name)):
        with contextlib.suppress(FileNotFoundError):
            _remove_tree(_throw_away(root, item.name))
    else:
        Path(root.path(item.name)).unlink(missing_ok=True)


def dead_staging(root: Store) -> list[Garbage]:
    """Staging of local attempts whose process is gone."""
    if not root.is_local:
        return []
    found = []
    for build in names_of(root, STAGING):
        for name in names_of(root, f"{STAGING}/{build}"):
            key = f"{STAGING}/{build}/{name}"
            path = Path(root.path(key))
            if path.suffix != ".lock" and not _is_held(path.with_suffix(".lock")):
                found.append(Garbage(kind="staging", name=key, byte_count=_size(root, key)[0], why="its process is gone"))
    return found


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def unneeded(root: Store, kept: list[Version], going: list[Version], policy: Policy) -> Iterator[Garbage]:
    """Everything that no kept version needs, nor a resumed build of the last days, once the versions that are *going* have
    gone. A running build may need it.
    """
    limit = _limit(policy)
    needs = needs_of(root, kept)
    unfinished = (version_key(version) for version in names_of(root, VERSIONS) if not is_dataset(root, version))
    yield from _left(root, unfinished, limit, "unfinished version", "never finished")
    yield from _unneeded_shards(root, needs, limit)
    yield from _unneeded_files(root, needs, limit)
    yield from _quarantined(root, limit)
    yield from _stale_records(root, {version.version for version in going}, limit)
    groups = (f"{GROUPS}/{name}" for name in names_of(root, GROUPS))
    yield from _left(root, groups, limit, "group", "its build died or was another one")
    for key, size in expired_leases(root):
        yield Garbage(kind="lease", name=key, byte_count=size, why="its process is gone")


class Needs(NamedTuple):
    """Digests of what kept versions were made of: ingredients of shards, files, and what ``datasets`` converted."""

    shards: frozenset[str]
    files: frozenset[str]
    converted: frozenset[str]


def needs_of(root: Store, kept: list[Version]) -> Needs:
    shards, files, converted = set(), set(), set()
    for version in kept:
        made_of = read_manifest(version_store(root, version.version))["provenance"]
        shards |= {ingredients.digest for ingredients in ingredients_needed(made_of)}
        files |= {file["sha256"] for source in made_of.get("sources", ()) for file in source.get("files", ())}
        if origin := read_origin(root, version.version):
            converted |= {digest_of("converted", found.uri) for source in origin.pinned for found in source.files}
    return Needs(frozenset(shards), frozenset(files), frozenset(converted))


def _left(root: Store, names: Iterable[str], limit: datetime, kind: Kind, why: str) -> Iterator[Garbage]:
    """The directories *names* below the output in which nothing was written since *limit*."""
    for name in names:
        size, newest = _size(root, name)
        if newest is None or newest < limit:
            yield Garbage(kind=kind, name=name, byte_count=size, why=why)


def _unneeded_shards(root: Store, needs: Needs, limit: datetime) -> Iterator[Garbage]:
    def judge(key: str) -> Garbage | None:
        name = shard_key(key)
        try:
            data = root.read(receipt_key(key))
            receipt = read_receipt(data)
            if ingredients_of(receipt.inputs).digest in needs.shards or not _is_before(root, receipt_key(key), limit):
                return None
            return Garbage(kind="shard", name=name, byte_count=receipt.byte_count + len(data), why="no kept version needs it")
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, IndexError):
            size, newest = _size(root, name)
            if newest is not None and newest >= limit:
                return None
            return Garbage(kind="shard", name=name, byte_count=size, why="it has no receipt that can be read")

    keys = [key for key in names_of(root, CACHE) if SHARD_KEY.fullmatch(key)]
    with ThreadPoolExecutor(READERS) as pool:
        yield from filter(None, pool.map(judge, keys))


def _unneeded_files(root: Store, needs: Needs, limit: datetime) -> Iterator[Garbage]:
    for name in names_of(root, FILES):
        key = f"{FILES}/{name}"
        stem = name.partition(".")[0]
        needed = name == ".lock" or stem in needs.files or (name.endswith(".parquet") and stem in needs.converted)
        if name.endswith(".json") and not needed:
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                needed = json.loads(root.read(key))["sha256"] in needs.files
        if not needed and _is_before(root, key, limit):
            yield Garbage(kind="file", name=key, byte_count=_size(root, key)[0], why="no kept version was made of it")


def _quarantined(root: Store, limit: datetime) -> Iterator[Garbage]:
    for name in names_of(root, QUARANTINE):
        key = f"{QUARANTINE}/{name}"
        if name != ".lock" and _is_before(root, key, limit):
            yield Garbage(kind="quarantine", name=key, byte_count=_size(root, key)[0], why="damaged, and built again")


def _stale_records(root: Store, going: set[str], limit: datetime) -> Iterator[Garbage]:
    """Records of versions that are gone. A version's origin goes with it."""
    there = set(names_of(root, VERSIONS))
    for directory, kept in ((RUNS, there - going), (ORIGINS, there)):
        for name in names_of(root, directory):
            version = name.removesuffix(".json").rpartition("-")[2]
            key = f"{directory}/{name}"
            if version not in kept and _is_before(root, key, limit):
                yield Garbage(kind="record", name=key, byte_count=_size(root, key)[0], why=f"version {version} is gone")


def _is_before(root: Store, key: str, limit: datetime) -> bool:
    """Whether an object was last written before *limit*. One without a known time, or that has just gone, was not."""
    try:
        at = changed_at(root.info(key))
    except FileNotFoundError:
        return False
    return at is not None and at < limit


def _size(root: Store, key: str) -> tuple[int, datetime | None]:
    """Bytes of an object, or of all below a prefix, and when the newest of them was written."""
    root.fs.invalidate_cache()
    try:
        infos = root.ask("find", key, detail=True).values()
    except FileNotFoundError:
        return 0, None
    times = [at for info in infos if (at := changed_at(info)) is not None]
    return sum(int(info["size"] or 0) for info in infos), max(times, default=None)
