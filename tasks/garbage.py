"""Garbage of an output: superfluous versions by policy, and all that no kept version and no running build needs."""

from __future__ import annotations

import functools
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter

from flat_tokens.manifest import read_manifest
from flat_tokens.stores.local import directory_below, kind_of, make_directory, named_errors, remove_empty, sync
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store, read_json, read_record
from tasks.config import Source
from tasks.download.table import table_key
from tasks.models import Model, digest_of
from tasks.output import paths
from tasks.output.leases import collection_lease, dead_attempts, expired_leases, in_use, sweep
from tasks.output.paths import GROUPS, STAGING, VERSIONS, receipt_key, shard_key, version_key
from tasks.output.pointer import MARKERS, is_dataset, pointer_lock, read_pointer
from tasks.output.versions import Version, changed_at, if_there, list_versions, names_of, read_origin_files
from tasks.shards.index import read_index
from tasks.shards.receipts import read_receipt

COLLECTED = "collected"
"""Directory below the staging for things that are being removed. The next build would sweep it, too."""
SHARD_KEY = re.compile(r"[0-9a-f]{64}")
HELD = "a version holds its tokens"
READERS = 16
SOURCES = TypeAdapter(tuple[Source, ...])
NEVER, ALWAYS = (at.replace(tzinfo=UTC) for at in (datetime.min, datetime.max))

Kind = Literal[
    "version",
    "staging",
    "unfinished version",
    "unfinished objects",
    "left out",
    "shard",
    "file",
    "quarantine",
    "record",
    "group",
    "lease",
]


class Policy(Model):
    """Retention: the latest and pinned versions are kept, the most recently used ones, and what was in use in the last days."""

    keep_versions: int = Field(3, ge=1)
    """Versions that are kept, the latest one among them."""
    grace_days: float = Field(7.0, ge=0)
    """Nothing goes that was in use, or made, in so many days."""


class Garbage(Model):
    """Something that may go: its kind, its name below the output, its size, and why."""

    kind: Kind
    name: str
    byte_count: int
    why: str


class GarbageReport(Model):
    """Garbage that may be removed, or was if ``deleted``. ``left``: why things that builds may need were left, if any were.
    ``recent_bytes``: of things that no version needs, but that a repeated build may, as they were stored within the days of
    grace.
    """

    garbage: tuple[Garbage, ...]
    recent_bytes: int
    kept: tuple[Version, ...]
    deleted: bool
    left: str | None

    @property
    def byte_count(self) -> int:
        return sum(item.byte_count for item in self.garbage)


def collect(root: Store, policy: Policy, *, delete: bool = False) -> GarbageReport:
    """Find garbage, and with *delete* remove it. Killed at any moment, it leaves complete versions and whole shards. ValueError
    if something is not understood: then nothing is known to be garbage.
    """
    paths.check_places(root)
    if not delete:
        kept, going = divide_versions(list_versions(root), policy)
        versions = [_garbage(version, policy) for version in going]
        garbage = (*versions, *dead_staging(root), *unneeded(root, kept, going, policy))
        recent = unfinished_bytes(root, {item.name for item in garbage})
        return GarbageReport(garbage=garbage, recent_bytes=recent, kept=tuple(kept), deleted=False, left=in_use(root))
    with collection_lease(root) as busy:
        gone = [*_remove_versions(root, policy, busy), *dead_staging(root)]
        if root.is_local:
            sweep(root.root)
        kept = list_versions(root)
        if busy is None:
            for item in unneeded(root, kept, [], policy):
                remove_below(root, item.name)
                gone.append(item)
        _tidy(root)
    recent = unfinished_bytes(root)
    return GarbageReport(garbage=tuple(gone), recent_bytes=recent, kept=tuple(kept), deleted=True, left=busy)


def unfinished_bytes(root: Store, others: Collection[str] = ()) -> int:
    """Bytes of token shards, unfinished objects and unfinished versions that no version needs. A build that is run again resumes
    from them. Those named in *others* are left out.
    """
    shards = _unneeded_shards(root, list_versions(root), ALWAYS) if stored_shards(root) else ()
    unfinished = (f"{VERSIONS}/{name}" for name in names_of(root, VERSIONS) if not is_dataset(root, name))
    found = [
        *(item for item in shards if item.why != HELD),
        *unneeded_objects(root, ()),
        *_unwritten_since(root, unfinished, ALWAYS, "unfinished version", "never finished"),
    ]
    return sum(item.byte_count for item in found if item.name not in others)


def divide_versions(versions: list[Version], policy: Policy) -> tuple[list[Version], list[Version]]:
    """The versions that the policy keeps, one that waits for a person, and the others. Where none is the latest, the pointer is
    lost, and all are kept.
    """
    limit = _limit(policy)
    lost = not any(version.state == "latest" for version in versions)
    ranked = [version for version in versions if version.state != "held"]
    recent = ranked[: policy.keep_versions]
    kept = [
        version
        for version in versions
        if lost or version.state == "held" or version in recent or version.pinned is not None or version.last_used > limit
    ]
    return kept, [version for version in versions if version not in kept]


def _garbage(version: Version, policy: Policy) -> Garbage:
    why = f"not among the last {policy.keep_versions}, not in use since {version.last_used:%Y-%m-%d}"
    return Garbage(kind="version", name=version_key(version.version), byte_count=version.byte_count, why=why)


def _limit(policy: Policy) -> datetime:
    return datetime.now(UTC) - timedelta(days=policy.grace_days)


def remove_superfluous(root: Store, policy: Policy) -> list[Garbage]:
    """Remove the versions that the policy does not keep. Return them."""
    with collection_lease(root) as busy:
        gone = _remove_versions(root, policy, busy)
        for version in names_of(root, paths.ORIGINS) if busy is None else ():
            if _is_half_removed(root, version.removesuffix(".json")):
                remove_version(root, version.removesuffix(".json"))
        _tidy(root)
    return gone


def _remove_versions(root: Store, policy: Policy, busy: str | None) -> list[Garbage]:
    with pointer_lock(root):  # other collections remove nothing meanwhile, and a lost link leads somewhere again
        there = list_versions(root)
    _, going = divide_versions(there, policy)
    if busy is not None:  # a running build takes tokens from any of them, or is about to publish one
        return []
    return [_garbage(version, policy) for version in going if remove_version(root, version.version)]


def _is_half_removed(root: Store, version: str) -> bool:
    """Whether the removal of a version was killed on an object store: its origin, which is written when a version is there, has
    outlived its marker. A local version goes in one step.
    """
    return not root.is_local and root.exists(paths.origin_key(version)) and not is_dataset(root, version)


def remove_version(root: Store, version: str) -> bool:
    """Remove a version, at once for readers, unless it has just become the latest, or was pinned or held. Return whether it
    went.
    """
    directory = version_key(version)
    if root.is_local:
        with pointer_lock(root):
            if _is_wanted(root, version) or not root.exists(directory):  # another collection was faster
                return False
            trash = _throw_away(root, directory)
            sync(Path(root.path(VERSIONS)))  # or a power loss might bring it back without what is removed next
        root.remove(trash)
    else:
        markers = dict[str, bytes]()
        for marker in MARKERS:
            with suppress(*NO_OBJECT):  # or another collection was faster
                markers[marker] = root.read(f"{directory}/{marker}")
        for marker in markers:
            root.remove(f"{directory}/{marker}")
        # A process that moves the pointer here, or pins this, looks for the marker afterwards: one of the two sees the other.
        if _is_wanted(root, version):
            for marker, data in markers.items():
                root.put(f"{directory}/{marker}", data)
            return False
        root.fs.invalidate_cache()
        root.remove(directory)
    for record in (paths.index_key(version), paths.origin_key(version)):
        root.remove(record)
        root.remove(record + SIGNATURE)
    root.remove(paths.beside_key(version))
    return True


def remove_held_shards(root: Store) -> None:
    """Remove the token shards whose tokens a version holds, and unfinished objects, unless a build may be reading them."""
    if not stored_shards(root) and not has_unfinished(root):
        return
    with collection_lease(root) as busy, ThreadPoolExecutor(READERS) as pool:
        if busy is None:
            shards, held, names = stored_shards(root), set[str](), [*names_of(root, VERSIONS)]
            latest = read_pointer(root).version if names[1:] else None
            for version in sorted(names, key=lambda name: name != latest):
                if held.issuperset(shards):  # as a rule after the latest one
                    break
                if is_dataset(root, version):
                    held.update(shard.key for shard in read_index(root, version).published)
            gone = [shard_key(key) for key in shards if key in held]
            gone += (item.name for item in unneeded_objects(root, {key for key in shards if key not in held}))
            list(pool.map(functools.partial(remove_below, root), gone))
            _tidy(root)


def remove_abandoned_objects(root: Store) -> None:
    """Remove what killed attempts have left of unfinished objects that no receipt names, unless a build is running. Without that
    each of them would leave a copy of the objects that it had open, and a crash loop would fill the disk.
    """
    if not has_unfinished(root):
        return
    with collection_lease(root) as busy:
        if busy is None:
            for item in unneeded_objects(root, stored_shards(root)):
                remove_below(root, item.name)
            _tidy(root)


def stored_shards(root: Store) -> list[str]:
    """Keys of the token shards at an output, whole or not."""
    return [key for key in names_of(root, paths.CACHE) if SHARD_KEY.fullmatch(key)]


def has_unfinished(root: Store) -> bool:
    """Whether there is a directory of unfinished objects, which may be empty: a process was killed when it had made it."""
    return root.is_local and root.exists(paths.UNFINISHED)


def unneeded_objects(root: Store, shards: Iterable[str]) -> list[Garbage]:
    """Unfinished objects of earlier attempts that no receipt of *shards* names."""
    attempts, needed = list(names_of(root, paths.UNFINISHED)) if root.is_local else [], set[str]()
    for key in shards if attempts else ():
        with suppress(*NO_OBJECT, ValueError):  # a shard that is not trusted needs nothing
            unfinished = read_receipt(read_record(root, receipt_key(key))).unfinished
            needed |= {unfinished.attempt} if unfinished else set()
    left = (f"{paths.UNFINISHED}/{attempt}" for attempt in attempts if attempt not in needed)
    why = "no token shard is in it"
    return [Garbage(kind="unfinished objects", name=key, byte_count=_size(root, key)[0], why=why) for key in left]


def _is_wanted(root: Store, version: str) -> bool:
    pointer = read_pointer(root)
    return version in (pointer.version, *pointer.pins, pointer.candidate and pointer.candidate.version)


def _throw_away(root: Store, key: str) -> str:
    """Move a local directory out of sight in one step. Return its new key. No link is followed."""
    parent, _, name = key.rpartition("/")
    trash, bin_ = f"{name}-{uuid.uuid4().hex[:8]}", f"{STAGING}/{COLLECTED}"
    while True:
        with suppress(FileNotFoundError):
            make_directory(Path(root.path(bin_)))
            named = named_errors(root.path(key))
            with directory_below(root.root, bin_) as there, directory_below(root.root, parent) as here, named:
                os.rename(name, trash, src_dir_fd=here, dst_dir_fd=there)
            return f"{bin_}/{trash}"
        if not root.exists(key):
            raise FileNotFoundError(f"{root.path(key)}: has just gone")
        # The directory above was empty, and swept in between.


def _tidy(root: Store) -> None:
    """Remove directories of thrown away things and of groups if they are empty by now."""
    if root.is_local:
        remove_empty(root.root, f"{STAGING}/{COLLECTED}", STAGING, GROUPS, paths.UNFINISHED, paths.BESIDE, paths.SETS)


def remove_below(root: Store, key: str) -> None:
    """Remove an object, or all below a prefix: at once for readers of a local output, of a shard elsewhere the receipt first."""
    if not root.is_local:
        if SHARD_KEY.fullmatch(key.removeprefix(f"{paths.CACHE}/")):
            root.remove_object(f"{key}/{paths.RECEIPT}")
        root.fs.invalidate_cache()
        root.remove(key)
    elif kind_of(root.path(key)) == "directory":
        with suppress(FileNotFoundError):
            root.remove(_throw_away(root, key))
    else:
        root.remove(key)


def dead_staging(root: Store) -> list[Garbage]:
    """Staging of local attempts whose process is gone."""
    keys = filter(root.exists, dead_attempts(root.root) if root.is_local else ())
    return [Garbage(kind="staging", name=key, byte_count=_size(root, key)[0], why="its process is gone") for key in keys]


def unneeded(root: Store, kept: list[Version], going: list[Version], policy: Policy) -> Iterator[Garbage]:
    """Everything that neither a kept version nor a resumed build of the last days needs, once the versions *going* are removed.
    A running build may still need it.
    """
    limit = _limit(policy)
    for version in names_of(root, VERSIONS):
        if _is_half_removed(root, version):
            yield from _unwritten_since(root, [version_key(version)], ALWAYS, "unfinished version", "its removal was killed")
        elif not is_dataset(root, version):
            yield from _unwritten_since(root, [version_key(version)], limit, "unfinished version", "never finished")
    shards = list(_unneeded_shards(root, kept, limit))
    yield from shards
    gone = {item.name for item in shards}
    yield from unneeded_objects(root, (key for key in stored_shards(root) if shard_key(key) not in gone))
    yield from _unneeded_files(root, kept, limit)
    sets = (f"{paths.SETS}/{name}" for name in names_of(root, paths.SETS))
    yield from _written_before(root, sets, limit, "file", "an evaluation set, which the next build reads again")
    damaged = (f"{paths.QUARANTINE}/{name}" for name in names_of(root, paths.QUARANTINE) if name != ".lock")
    yield from _unwritten_since(root, damaged, limit, "quarantine", "damaged, and rebuilt")
    probes = (name for name in names_of(root, "") if name == paths.PROBE or name.startswith(f"{paths.PROBE}-"))
    yield from _written_before(root, probes, ALWAYS, "staging", "its process is gone")
    yield from _stale_records(root, {version.version for version in going}, limit)
    there = {*names_of(root, VERSIONS)} - {version.version for version in going}
    left_out = (f"{paths.BESIDE}/{name}" for name in names_of(root, paths.BESIDE) if name not in there)
    yield from _unwritten_since(root, left_out, ALWAYS, "left out", "its version is gone")
    groups = (f"{GROUPS}/{name}" for name in names_of(root, GROUPS))
    yield from _unwritten_since(root, groups, limit, "group", "its build died or was another one")
    for key, size in expired_leases(root):
        yield Garbage(kind="lease", name=key, byte_count=size, why="its process is gone")


def _unneeded_files(root: Store, kept: list[Version], limit: datetime) -> Iterator[Garbage]:
    """Fetched files, converted ones and tables of files of which no kept version was made."""
    files, converted, tables = set[str](), set[str](), set[str]()
    for version in kept:
        if (manifest := if_there(root, version.version, read_manifest)) is None:
            continue  # another collection has just removed it
        made_of = manifest["provenance"]
        files |= {file["sha256"] for source in made_of.get("sources") or () for file in source.get("files", ())}
        if origin := read_origin_files(root, version.version):
            uris = (found.uri for found in origin.found)
            converted |= {digest_of("converted", uri) for uri in uris if uri.startswith("datasets://")}
            with suppress(ValueError):  # settings that are refused today are not built today
                tables |= {table_key(source) for source in SOURCES.validate_python(origin.config.get("sources", ()))}
    for name in names_of(root, paths.FILES):
        key, name = f"{paths.FILES}/{name}", name.removesuffix(SIGNATURE)  # a signature goes with its record
        stem = name.partition(".")[0]
        needed = name == ".lock" or stem in files or (name.endswith(".parquet") and stem in converted)
        needed = needed or key.removesuffix(SIGNATURE) in tables
        if name.endswith(".json") and not needed:
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                needed = read_json(root, key.removesuffix(SIGNATURE))["sha256"] in files
        if not needed:
            yield from _written_before(root, [key], limit, "file", "no kept version was made of it")


def _unwritten_since(
    root: Store, names: Iterable[str], limit: datetime, kind: Kind, why: str, unknown: datetime = NEVER
) -> Iterator[Garbage]:
    """The objects and directories *names* below the output in which nothing was written since *limit*. *unknown*: a time for one
    that has none, as it is empty or has just gone.
    """
    for name in names:
        size, newest = _size(root, name)
        if (newest or unknown) < limit:
            yield Garbage(kind=kind, name=name, byte_count=size, why=why)


_written_before = functools.partial(_unwritten_since, unknown=ALWAYS)
"""The same of objects: one without a known time was written after any limit."""


def _unneeded_shards(root: Store, kept: list[Version], limit: datetime) -> Iterator[Garbage]:
    """Token shards whose slices kept versions hold, or that no build has used since *limit*."""
    indexes = [read_index(root, version.version) for version in kept]
    held = {shard.key for index in indexes for shard in index.published}

    def judge(key: str) -> Garbage | None:
        before, why = (ALWAYS, HELD) if key in held else (limit, "no build went on with it")
        return next(_unwritten_since(root, [shard_key(key)], before, "shard", why), None)

    with ThreadPoolExecutor(READERS) as pool:
        yield from filter(None, pool.map(judge, stored_shards(root)))


def _stale_records(root: Store, going: set[str], limit: datetime) -> Iterator[Garbage]:
    """Records of versions that are gone. A version's origin goes with it."""
    there = {version for version in names_of(root, VERSIONS) if not _is_half_removed(root, version)}
    # An origin is written when its version is there.
    with_version = ((paths.RUNS, there - going, limit), (paths.ORIGINS, there, ALWAYS), (paths.INDEX, there, ALWAYS))
    for directory, kept, before in with_version:
        for name in names_of(root, directory):
            version = name.removesuffix(SIGNATURE).removesuffix(".json").rpartition("-")[2]
            if version not in kept and f"{directory}/{name}" != paths.REFRESHES:
                yield from _written_before(root, [f"{directory}/{name}"], before, "record", f"version {version} is gone")


def _size(root: Store, key: str) -> tuple[int, datetime | None]:
    """Bytes of an object, or of all below a prefix, and when the newest of them was written."""
    try:
        is_file = root.is_local and kind_of(root.path(key)) == "file"
        infos = [root.info(key)] if is_file else [info for _, info in (root / key).infos()]
    except FileNotFoundError:
        return 0, None
    times = [at for info in infos if (at := changed_at(info)) is not None]
    return sum(int(info["size"] or 0) for info in infos), max(times, default=None)
