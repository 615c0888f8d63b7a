"""``latest.json``, the record of an output: its latest version, those that were, the one that waits, pins, and what people
decided. Readers need its first three facts alone. Every change of it is a compare-and-swap, so that none is lost.

A candidate is a whole version that a gate holds back. It waits as long as ``latest`` stays where it was when the gates looked
at it: every move ends that. An approval is such a move, which notes the decision, too.

Next to it is the history: a record of each run, and a line of ``runs/refreshes.jsonl`` for each version that a refresh
published. Nothing depends on the lines: a refresh that is killed may leave none.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.forgotten import check_list, read_forgotten
from flat_tokens.manifest import (
    LINK,
    MANIFEST,
    OF_PEOPLE,
    POINTER,
    RESTORE,
    check_pointer,
    counts_of,
    history_digest,
    manifest_digest,
    pointer_digest,
    read_manifest,
)
from flat_tokens.stores import signing
from flat_tokens.stores.local import kind_of, locked, sync
from flat_tokens.stores.signing import Kind, Statement
from flat_tokens.stores.store import Store, json_object, read_json
from tasks.gates import Finding, Gate
from tasks.models import Digest, Model, Name
from tasks.output.changes import DocumentChangeCounts
from tasks.output.leases import entries
from tasks.output.paths import EXPORTS, FORGOTTEN, LOCK, ORIGINS, REFRESHES, RUNS, check_places, version_key, version_store
from tasks.output.swap import compare_and_swap, read_if_there, sign

FORMER_KEPT = 100
"""Former versions, withdrawn ones and rejected ones that are remembered."""
DECISIONS_KEPT = 1000
LISTS = ("former", "withdrawn", "rejected")


class Former(Model):
    """A version that was the latest, or waited, and until when (ISO 8601)."""

    version: str
    until: str

    @classmethod
    def until_now(cls, version: str) -> Former:
        return cls(version=version, until=datetime.now(UTC).isoformat())


class ForgottenList(Model):
    """How many documents an output had forgotten, and the digest of the list."""

    documents: int
    sha256: str


class Pin(Model):
    """A mark that keeps a version. ``moved_from``: versions that had it before, which lost forgotten documents."""

    at: datetime
    note: str = ""
    moved_from: tuple[Name, ...] = ()


class Decision(Model):
    """A person's decision on a version that gates held back: its time, author and reason. ``findings``: those of the gates."""

    what: Literal["approved", "rejected", "published anyway"]
    at: datetime
    by: str
    why: str
    findings: tuple[Finding, ...] = ()


class RefreshRecord(Model):
    """A refresh that published a version, or a decision of one that was held. ``documents``, ``tokens``: of the version.
    ``added`` and so on count documents, and are None if they are unknown. ``text_bytes_tokenized``: 0 if all tokens
    were there.
    """

    at: datetime
    version: Name
    documents: int
    tokens: int
    added: int | None
    removed: int | None
    changed: int | None
    moved: int | None
    split_changes: int | None = None
    text_bytes_tokenized: int = 0
    seconds: float = 0.0
    decision: Decision | None = None


class Candidate(Model):
    """A version that waits for a person. ``before``: the latest one when the gates looked at it. ``gates``: those that did.
    ``changes``: of documents, None if they are unknown.
    """

    version: Name
    manifest_sha256: Digest
    before: Name | None
    at: datetime
    gates: tuple[Gate, ...]
    findings: tuple[Finding, ...]
    documents: int
    tokens: int
    changes: DocumentChangeCounts | None = None

    def ways(self, place: str) -> list[str]:
        """The commands that decide of it, at its *place* or at its output."""
        output = shlex.quote(place.removesuffix(f"/{version_key(self.version)}"))
        return [f"python -m flows {what} {output} {self.version[:8]} --reason TEXT" for what in ("approve", "reject")]

    def decided(
        self, what: Literal["approved", "rejected", "published anyway"], why: str, by: str | None = None
    ) -> RefreshRecord:
        """The record of a decision of it."""
        decision = Decision(what=what, at=datetime.now(UTC), by=by or current_user(), why=why, findings=self.findings)
        counts = dict.fromkeys(("added", "removed", "changed", "moved"))
        if self.changes is not None:
            counts = self.changes.model_dump(include={*counts})
        totals = {"documents": self.documents, "tokens": self.tokens}
        return RefreshRecord(at=decision.at, version=self.version, decision=decision, **totals, **counts)


def current_user() -> str:
    """The user of this process, as far as the system knows: NAME@HOST."""
    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (OSError, KeyError):  # a user without a name
        return platform.node()


class Pointer(Model):
    """The content of ``latest.json``. ``sequence``: the number of moves. ``former``: versions that a rollback leads to, the last
    one last. ``withdrawn``: versions that were rolled back; a refresh does not bring them back by itself. ``rejected``: versions
    that a person rejected; a refresh that gives one again leaves it alone. ``forgotten``: the list when the pointer was moved.
    """

    version: str | None
    manifest_sha256: str | None
    sequence: int
    former: tuple[Former, ...] = ()
    withdrawn: tuple[Former, ...] = ()
    rejected: tuple[Former, ...] = ()
    forgotten: ForgottenList | None = None
    candidate: Candidate | None = None
    pins: dict[Name, Pin] = Field({})
    decisions: tuple[RefreshRecord, ...] = ()

    def as_json(self) -> bytes:
        facts = self.model_dump(mode="json", exclude_defaults=True)
        if facts.keys() & {*OF_PEOPLE}:
            facts["sha256"] = pointer_digest(facts)
        return (json.dumps(facts, indent=2) + "\n").encode()

    def names(self, *states: str) -> list[str]:
        """Names of the versions of these lists, such as ``former``, in order."""
        return [one.version for state in states for one in getattr(self, state)]

    def moved(self, version: str, manifest_sha256: str, *, is_there: bool) -> Pointer:
        """The next pointer, at *version*. This one's version is remembered if it is there."""
        former = (*self.former, *([Former.until_now(self.version)] if self.version and is_there else []))
        return self._at(version, manifest_sha256, former, self.withdrawn)

    def moved_back(self, version: str, manifest_sha256: str) -> Pointer:
        """The next pointer, at *version*, after this one's version was withdrawn."""
        assert self.version is not None
        names = self.names("former")
        former = self.former[: names.index(version)] if version in names else self.former
        withdrawn = (*_without(self.version, self.withdrawn), Former.until_now(self.version))
        return self._at(version, manifest_sha256, former, withdrawn)

    def _at(self, version: str, sha256: str, former: tuple[Former, ...], withdrawn: tuple[Former, ...]) -> Pointer:
        lists = {"former": former, "withdrawn": withdrawn, "rejected": self.rejected}
        kept = {name: _without(version, of)[-FORMER_KEPT:] for name, of in lists.items()}
        facts = {"version": version, "manifest_sha256": sha256, "sequence": self.sequence + 1, "candidate": None}
        return self.model_copy(update={**facts, **kept})

    def rejecting(self, version: str) -> Pointer:
        """The next pointer, after *version*, which waited, was rejected."""
        rejected = (*_without(version, self.rejected), Former.until_now(version))[-FORMER_KEPT:]
        return self.model_copy(update={"rejected": rejected, "candidate": None})

    def noting(self, decided: RefreshRecord) -> Pointer:
        """The next pointer, with one more decision."""
        return self.model_copy(update={"decisions": (*self.decisions, decided)[-DECISIONS_KEPT:]})


def _without(version: str, several: tuple[Former, ...]) -> tuple[Former, ...]:
    return tuple(one for one in several if one.version != version)


MARKERS = ("zarr.json", ".zgroup")
"""The object that is written last and makes a directory a dataset: in zarr v3, and in v2."""

HALF_WRITTEN = re.compile(r"\.(latest\.fresh|.+\.(jsonl?|html)(\.ed25519)?\.\w+\.part)")

UNPUBLISHED = Pointer(version=None, manifest_sha256=None, sequence=0)


def read_pointer(root: Store) -> Pointer:
    """The pointer; sequence number 0 if nothing was ever published. ValueError if there is something else."""
    return _parse(root, read_if_there(root, POINTER))


def _parse(root: Store, data: bytes | None) -> Pointer:
    if data is None:
        return UNPUBLISHED
    try:
        value = json_object(data, root.path(POINTER))
    except ValueError as error:
        raise ValueError(f"{error}. {RESTORE}") from error
    check_pointer(value, root.path(POINTER))
    try:
        return Pointer.model_validate({name: fact for name, fact in value.items() if name != "sha256"})
    except ValueError as error:
        raise ValueError(f"{root.path(POINTER)}: is not the record of an output. {RESTORE}") from error


def publish(root: Store, version: str, since: int, decided: RefreshRecord | None = None) -> int:
    """Let ``latest`` point at a version. Return the pointer's sequence number. *since* is the sequence number when this build
    began: if another build has moved the pointer meanwhile, it is left alone, and a ValueError says so. *decided*: by whom it
    was let through.
    """

    def after(pointer: Pointer) -> Pointer:
        digest = manifest_digest(version_store(root, version))
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
        moved = moved_to(root, pointer, version, digest)
        return moved.noting(decided) if decided else moved

    return change_pointer(root, after).sequence


def moved_to(root: Store, pointer: Pointer, version: str, manifest_sha256: str) -> Pointer:
    """The next pointer, at *version*."""
    is_there = pointer.version is not None and is_dataset(root, pointer.version)
    return pointer.moved(version, manifest_sha256, is_there=is_there)


def change_pointer(root: Store, after: Callable[[Pointer], Pointer]) -> Pointer:
    """Compare-and-swap the pointer with ``after(pointer)``, and return the new one. Retried when another machine changed it
    first; *after* raises if that makes the change wrong.
    """
    parse = partial(_parse, root)

    def checked(before: Pointer) -> Pointer:
        now = after(before)
        if now.sequence != before.sequence:
            found = read_forgotten(root)
            check_list(root, before.forgotten.model_dump() if before.forgotten else None, found)
            known = ForgottenList(documents=len(found.digests), sha256=found.sha256) if found.sha256 else None
            now = now.model_copy(update={"forgotten": known})
            say_of_move(root, now, "offered")  # a kill before the next statement raises no alarm
        return now

    def back(seen: Pointer) -> Pointer:
        update = {name: getattr(before, name) for name in ("version", "manifest_sha256", "former", "withdrawn")}
        return seen.model_copy(update={**update, "sequence": now.sequence + 1}) if seen.sequence == now.sequence else seen

    with pointer_lock(root):
        before, now = compare_and_swap(root, POINTER, parse, checked, Pointer.as_json)
        if now.version is not None:
            _link_latest(root, now.version)
            say_of_move(root, now, "latest")
    if not root.is_local and now.sequence != before.sequence and now.version and not is_dataset(root, now.version):
        # Without a lock that all machines share, it may have been collected a moment ago. The collection looks at the pointer
        # when it has taken the marker away, so that one of the two sees the other.
        if before.version is not None:
            compare_and_swap(root, POINTER, parse, back, Pointer.as_json)
        raise ValueError(f"{root.url}: version {now.version} has just been removed. Run the build again to make it again.")
    return now


def renamed(root: Store, pointer: Pointer, mapping: Mapping[str, str]) -> Pointer:
    """The next pointer, after versions were replaced by others, old name -> new one. A version that waits goes on waiting, and
    a pin says which version it was of.
    """
    facts: JsonObject = {
        name: tuple(one.model_copy(update={"version": mapping.get(one.version, one.version)}) for one in getattr(pointer, name))
        for name in LISTS
    }
    facts["pins"] = {
        mapping.get(name, name): pin.model_copy(update={"moved_from": (*pin.moved_from, *([name] if name in mapping else []))})
        for name, pin in pointer.pins.items()
    }
    if (waits := pointer.candidate) is not None:
        other: JsonObject = {"before": mapping.get(waits.before or "", waits.before)}
        if (name := mapping.get(waits.version)) is not None:
            store = version_store(root, name)
            other |= {"version": name, "manifest_sha256": manifest_digest(store), **counts_of(read_manifest(store)["totals"])}
        facts["candidate"] = waits.model_copy(update=other)
    if (version := mapping.get(pointer.version or "")) is not None:
        facts |= {"version": version, "manifest_sha256": manifest_digest(version_store(root, version))}
    now = pointer.model_copy(update=facts)
    is_moved = any(getattr(now, name) != getattr(pointer, name) for name in ("version", "former", "withdrawn"))
    return now.model_copy(update={"sequence": pointer.sequence + is_moved})


def say_of_move(root: Store, now: Pointer, kind: Kind) -> None:
    """Sign that the pointer is about to be this, or is, next to the manifest of its version. Without a key, nothing is said."""
    if signing.keys() and now.version and now.manifest_sha256:
        said = Statement(kind, now.sequence, now.version, now.manifest_sha256)
        sign(root, f"{version_key(now.version)}/{MANIFEST}", said)


def is_dataset(root: Store, version: str, layout: LayoutName | None = None) -> bool:
    """Whether readers find a version, of any layout. One request to a store if the *layout* is known."""
    markers = MARKERS if layout is None else (MARKERS[3 - LAYOUTS[layout].zarr_format],)
    return any(version_store(root, version).has(marker) for marker in markers)


@contextlib.contextmanager
def pointer_lock(root: Store) -> Iterator[None]:
    """Let this machine's processes move the pointer and write records in order. What dead ones left is repaired."""
    if not root.is_local:
        yield
        return
    check_places(root)
    with locked(root.path(LOCK)):
        for directory in ("", ORIGINS, RUNS, FORGOTTEN, EXPORTS):
            for name in filter(HALF_WRITTEN.fullmatch, entries(root.root, directory)):  # its process is dead, for it had the lock
                root.remove(f"{directory}/{name}".lstrip("/"))
        with contextlib.suppress(ValueError):  # who needs the pointer says what is wrong with it
            if (version := read_pointer(root).version) and is_dataset(root, version):
                _link_latest(root, version)
        yield


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


KEPT = 1000
"""Refreshes that are remembered."""


def read_history(root: Store) -> tuple[RefreshRecord, ...]:
    """The refreshes and decisions so far, the last one last. ValueError, naming the record, if it holds something else."""
    refreshes = _refreshes_in(root, read_if_there(root, REFRESHES))
    return tuple(sorted((*refreshes, *read_pointer(root).decisions), key=lambda one: one.at))


def remember(root: Store, refresh: RefreshRecord) -> None:
    """Add a refresh to the history. Other machines may do so at the same time."""

    def lines(refreshes: tuple[RefreshRecord, ...]) -> bytes:
        return "".join(one.model_dump_json(exclude={"decision"}) + "\n" for one in refreshes).encode()

    with pointer_lock(root):
        compare_and_swap(root, REFRESHES, partial(_refreshes_in, root), lambda before: (*before, refresh)[-KEPT:], lines)


def put_run(root: Store, at: datetime, version: str, facts: JsonObject) -> None:
    """Write the record of a run that ended *at* a time with a *version*, on this host. Next to it: the pointer's history."""
    facts = {"at": at.isoformat(), "host": platform.node(), **facts}
    with pointer_lock(root):
        if root.is_local and facts["latest"] is not None:
            facts = {**facts, "history_sha256": history_digest(read_json(root, POINTER))}
        root.put(f"{RUNS}/{at:%Y%m%dT%H%M%S%f}-{version}.json", (json.dumps(facts, indent=2) + "\n").encode())


def _refreshes_in(root: Store, data: bytes | None) -> tuple[RefreshRecord, ...]:
    try:
        return tuple(RefreshRecord.model_validate_json(line) for line in (data or b"").splitlines())
    except ValueError as error:
        remedy = "Restore it or remove it, and run again."
        raise ValueError(f"{root.path(REFRESHES)}: is not a history of refreshes. {remedy}") from error
