"""``latest.json``: the version of an output that readers get, and the ones before. It is moved without losing a move."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flat_tokens.arrays.layouts import group_metadata
from flat_tokens.forgotten import check_list, read_forgotten
from flat_tokens.manifest import LINK, MANIFEST, POINTER, check_pointer
from flat_tokens.stores import signing
from flat_tokens.stores.local import kind_of, sync
from flat_tokens.stores.records import json_object, read_record
from flat_tokens.stores.retry import persist, status_of
from flat_tokens.stores.signing import SIGNATURE, Kind, Statement
from flat_tokens.stores.store import Store
from tasks.output.paths import EXPORTS, FORGOTTEN, LOCK, ORIGINS, PINS, RUNS, check_places, version_key, version_store
from tasks.output.staging import entries

FORMER_KEPT = 100
"""Former versions that a pointer remembers."""

MARKERS = tuple(list(group_metadata(zarr_format, {}))[-1] for zarr_format in (3, 2))
"""The object that is written last and makes a directory a dataset, in either version of zarr."""

HALF_WRITTEN = re.compile(r"\.(latest\.fresh|.+\.(jsonl?|html)(\.ed25519)?\.\w+\.part)")


class Former(NamedTuple):
    """A version that was the latest, and until when (ISO 8601)."""

    version: str
    until: str


class ForgottenList(NamedTuple):
    """How many documents an output had forgotten, and the digest of the list."""

    documents: int
    sha256: str


class Pointer(NamedTuple):
    """The content of ``latest.json``. ``former``: versions that a rollback leads to, the last one last. ``withdrawn``: versions
    that were rolled back; a refresh does not bring them back by itself. ``forgotten``: the list when the pointer was moved.
    """

    version: str | None
    manifest_sha256: str | None
    sequence: int
    former: tuple[Former, ...] = ()
    withdrawn: tuple[Former, ...] = ()
    forgotten: ForgottenList | None = None

    def json(self) -> bytes:
        lists = {name: [one._asdict() for one in getattr(self, name)] for name in ("former", "withdrawn")}
        value = {**self._asdict(), **lists, "forgotten": self.forgotten and self.forgotten._asdict()}
        return (json.dumps({key: item for key, item in value.items() if item not in ([], None)}, indent=2) + "\n").encode()

    def moved(self, version: str, manifest_sha256: str, *, is_there: bool) -> Pointer:
        """The next pointer, at *version*. This one's version is remembered if it is there."""
        former = _without(version, (*self.former, *([self._until_now()] if is_there else [])))[-FORMER_KEPT:]
        return Pointer(version, manifest_sha256, self.sequence + 1, former, _without(version, self.withdrawn))

    def moved_back(self, version: str, manifest_sha256: str) -> Pointer:
        """The next pointer, at *version*, after this one's version was withdrawn."""
        names = [one.version for one in self.former]
        former = self.former[: names.index(version)] if version in names else self.former
        withdrawn = (*_without(self.version, self.withdrawn), self._until_now())[-FORMER_KEPT:]
        return Pointer(version, manifest_sha256, self.sequence + 1, former, _without(version, withdrawn))

    def renamed(self, root: Store, mapping: Mapping[str, str]) -> Pointer:
        """The next pointer, after versions were replaced by others, old name -> new one; this one where none of its was."""
        version = mapping.get(self.version or "", self.version)
        lists = {
            name: tuple(one._replace(version=mapping.get(one.version, one.version)) for one in getattr(self, name))
            for name in ("former", "withdrawn")
        }
        if version == self.version and all(lists[name] == getattr(self, name) for name in lists):
            return self
        sha256 = self.manifest_sha256 if version in (None, self.version) else manifest_digest(root, version)
        return Pointer(version, sha256, self.sequence + 1, lists["former"], lists["withdrawn"])

    def _until_now(self) -> Former:
        assert self.version is not None
        return Former(self.version, datetime.now(UTC).isoformat())


def _without(version: str | None, several: tuple[Former, ...]) -> tuple[Former, ...]:
    return tuple(one for one in several if one.version != version)


def read_pointer(root: Store) -> Pointer:
    """The pointer; sequence number 0 where nothing was ever published. ValueError where there is something else."""
    return _parse(root, read_if_there(root, POINTER))


def _parse(root: Store, data: bytes | None) -> Pointer:
    if data is None:
        return Pointer(None, None, 0)
    try:
        value = json_object(data, root.path(POINTER))
    except ValueError as error:
        raise ValueError(f"{error}. Restore it or remove it, and run again.") from error
    check_pointer(value, root.path(POINTER))
    former, withdrawn = (tuple(Former(**one) for one in value.get(name, ())) for name in ("former", "withdrawn"))
    known = ForgottenList(**value["forgotten"]) if value.get("forgotten") else None
    return Pointer(value["version"], value["manifest_sha256"], value["sequence"], former, withdrawn, known)


def publish(root: Store, version: str, since: int) -> int:
    """Let ``latest`` point at a version. Return the pointer's sequence number. *since* is the sequence number when this build
    began: where another build has moved the pointer meanwhile, it is left alone, and a ValueError says so.
    """

    def after(pointer: Pointer) -> Pointer:
        digest = manifest_digest(root, version)
        if pointer.version == version:
            if pointer.manifest_sha256 != digest:
                raise ValueError(
                    f"{root.path(POINTER)}: names version {version}, but another {MANIFEST} than it has: one of them is damaged. "
                    "Remove the version and run again; if this comes again, remove the pointer."
                )
            return pointer
        if pointer.sequence != since:
            raise ValueError(
                f"{root.url}: another build published {pointer.version} while this one ran. Version {version} is complete; "
                "run the build again to make it the latest."
            )
        return pointer.moved(version, digest, is_there=pointer.version is not None and is_dataset(root, pointer.version))

    return move(root, after).sequence


def manifest_digest(root: Store, version: str) -> str:
    return hashlib.sha256(read_record(version_store(root, version), MANIFEST)).hexdigest()


def move(root: Store, after: Callable[[Pointer], Pointer]) -> Pointer:
    """Compare-and-swap the pointer with ``after(pointer)``, and return the new one. Retried when another machine moved it first;
    *after* raises if that makes the move wrong.
    """
    with pointer_lock(root):
        while True:
            seen = look(root, POINTER)
            before = _parse(root, seen.data)
            now = after(before)
            if now != before:
                found = read_forgotten(root)
                check_list(root, before.forgotten and before.forgotten._asdict(), found)
                now = now._replace(forgotten=ForgottenList(len(found.digests), found.sha256) if found.sha256 else None)
                say_of_move(root, now, "offered")  # a kill before the next statement raises no alarm
            if now == before or swap(root, POINTER, seen, now.json()):
                break
        assert now.version is not None
        _link_latest(root, now.version)
        say_of_move(root, now, "latest")
    if not root.is_local and now != before and not is_dataset(root, now.version):
        # Without a lock that all machines share, it may have been collected a moment ago. The collection looks at the pointer
        # when it has taken the marker away, so that one of the two sees the other.
        seen_now = look(root, POINTER)
        if before.version is not None and _parse(root, seen_now.data) == now:
            swap(root, POINTER, seen_now, before._replace(sequence=now.sequence + 1).json())
        raise ValueError(f"{root.url}: version {now.version} has just been removed. Run the build again to make it again.")
    return now


def say_of_move(root: Store, now: Pointer, kind: Kind) -> None:
    """Sign that the pointer is about to be this, or is, next to the manifest of its version. Without a key, nothing is said."""
    if signing.keys() and now.version and now.manifest_sha256:
        said = Statement(kind, now.sequence, now.version, now.manifest_sha256)
        _sign(root, f"{version_key(now.version)}/{MANIFEST}{SIGNATURE}", said)


def _sign(root: Store, beside: str, said: Statement) -> None:
    """Add a statement to those next to a record, to which other processes may add theirs."""
    while True:
        there = look(root, beside)
        lines = signing.with_statement(there.data or b"", said)
        if lines == there.data or swap(root, beside, there, lines):
            return


def is_dataset(root: Store, version: str) -> bool:
    """Whether readers find a version, of whatever layout."""
    return any(version_store(root, version).has(marker) for marker in MARKERS)


@contextlib.contextmanager
def pointer_lock(root: Store) -> Iterator[None]:
    """Let this machine's processes move the pointer and write records in order. What dead ones left is repaired."""
    if not root.is_local:
        yield
        return
    check_places(root)
    with open(root.path(LOCK), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for directory in ("", PINS, ORIGINS, RUNS, FORGOTTEN, EXPORTS):
            for name in filter(HALF_WRITTEN.fullmatch, entries(root.root, directory)):  # its process is dead, for it had the lock
                root.remove(f"{directory}/{name}".lstrip("/"))
        with contextlib.suppress(ValueError):  # who needs the pointer says what is wrong with it
            if (version := read_pointer(root).version) and is_dataset(root, version):
                _link_latest(root, version)
        yield


def read_if_there(root: Store, key: str) -> bytes | None:
    """The bytes of a record; None if there is none. One request to a store."""
    try:
        return read_record(root, key)
    except FileNotFoundError:
        return None


class Seen(NamedTuple):
    """An object as it was: its bytes, None if there was none, and the store's own name for that state."""

    data: bytes | None
    state: str | None


def look(root: Store, key: str) -> Seen:
    """Read an object, to compare it with when it is swapped."""
    try:
        # The state before the bytes: of an object that changes in between, a swap fails instead of undoing the change.
        info = {} if root.is_local else root.info(key)
        state = next((str(info[name]) for name in ("generation", "ETag", "etag") if info.get(name)), None)
        return Seen(read_record(root, key), state)
    except FileNotFoundError:
        return Seen(None, None)


_swapping = threading.Lock()

REFUSED = (409, 412)
"""Statuses with which stores refuse a write to an object that is not as it was seen."""


def swap(root: Store, key: str, seen: Seen, data: bytes) -> bool:
    """Replace an object if it still is what was *seen*. Return whether it was replaced. Local callers hold a lock.

    S3, Google Cloud Storage and Azure compare and write in one step. On other remote stores, the object is compared right
    before and right after the write.
    """
    if root.is_local:
        root.put(key, data)
        return True
    if place := signing.place_of(root.path(key)):  # signed first, next to what other processes are about to write
        _sign(root, key + SIGNATURE, signing.of_record(place, data))
    tried = False

    def try_once() -> bool:
        nonlocal tried
        if (now := read_if_there(root, key)) != seen.data:
            return tried and now == data
        tried = True
        try:
            if _write_if(root, key, seen, data):
                return True
        except Exception as error:
            # Refused, or done and its acknowledgement lost, so that the second try found the first one's work.
            if (now := read_if_there(root, key)) != seen.data:
                return now == data
            if status_of(error) in REFUSED:
                return False
            if getattr(error, "errno", None) != errno.ENOSYS:  # an S3 server that knows no conditions
                raise
            root.put(key, data)
        return read_if_there(root, key) == data

    with _swapping:
        return persist(try_once, (root / key).url, root.patience)


def _write_if(root: Store, key: str, seen: Seen, data: bytes) -> bool:
    """Write an object. Return whether the store checked in the same step that the object was as it was seen."""
    fs, path = root.fs, root.path(key)
    if seen.data is None and {"s3", "gs", "abfs", "memory"} & root.protocols:
        fs.pipe_file(path, data, mode="create")
    elif seen.state and "s3" in root.protocols:
        fs.pipe_file(path, data, IfMatch=seen.state)
    elif seen.state and "abfs" in root.protocols:
        fs.pipe_file(path, data, headers={"If-Match": seen.state})
    elif seen.state and "gs" in root.protocols:
        bucket, name, _ = fs.split_path(path)
        # As gcsfs uploads small objects, but for the condition, for which it has no parameter.
        fs.call(
            "POST",
            f"{fs._location}/upload/storage/v1/b/{bucket}/o",
            uploadType="media",
            name=name,
            ifGenerationMatch=seen.state,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
        )
    else:
        root.put(key, data)
        return False
    return True


def _link_latest(root: Store, version: str) -> None:
    """Make a symbolic link on a local disk, for people and for readers that do not know the pointer."""
    if not root.is_local:
        return
    link, target = Path(root.path(LINK)), version_key(version)
    if kind_of(link, follow_links=False) == "link" and os.readlink(link) == target:
        return
    fresh = link.with_name(f".{LINK}.fresh")
    fresh.symlink_to(target)
    os.replace(fresh, link)
    sync(link.parent)
