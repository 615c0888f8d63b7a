"""``held.json``: the version of an output that waits for a person, and what people decided.

A candidate is a whole version that a gate holds back. It is one as long as ``latest`` is where it was when the gates looked at
it: whatever moves the pointer, a publication, a rollback, ends that. So an approval is a move of the pointer on that condition.
"""

from __future__ import annotations

import getpass
import platform
import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from pydantic import Field

from flat_tokens.annotations import JsonObject
from flat_tokens.checker import verify
from flat_tokens.manifest import check_name, read_manifest, splits_of
from flat_tokens.stores.store import Store
from tasks.gates import Finding, Gate
from tasks.models import Digest, Model, Name
from tasks.output.changes import DocumentChangeCounts
from tasks.output.forgotten import check_without_forgotten
from tasks.output.history import Decision, Refreshed, put_run, read_history, remember
from tasks.output.paths import HELD, version_store
from tasks.output.pointer import (
    Pointer,
    Seen,
    is_dataset,
    look,
    manifest_digest,
    pointer_lock,
    publish,
    read_if_there,
    read_pointer,
    swap,
)

REJECTED_KEPT = 100
"""Rejected versions that are remembered."""


class Rejected(Model):
    """A version that a person rejected: a refresh that gives it again leaves it alone."""

    version: Name
    at: datetime


class Candidate(Model):
    """A version that waits for a person. ``sequence``, ``before``: of the pointer when the gates looked at it. ``gates``: those
    that did. ``changes``: of documents, None where they are unknown.
    """

    version: Name
    manifest_sha256: Digest
    before: Name | None
    sequence: int
    at: datetime
    gates: tuple[Gate, ...]
    findings: tuple[Finding, ...]
    documents: int
    tokens: int
    changes: DocumentChangeCounts | None = None
    decision: Decision | None = None


class HeldVersions(Model):
    """The content of ``held.json``. ``candidate``: what was held last."""

    candidate: Candidate | None = None
    rejected: tuple[Rejected, ...] = Field((), max_length=REJECTED_KEPT)

    @property
    def rejected_names(self) -> set[str]:
        return {one.version for one in self.rejected}

    @property
    def names_of_versions(self) -> set[str]:
        """Versions of which somebody has to decide, or did."""
        return self.rejected_names | ({self.candidate.version} if self.candidate else set())

    def as_json(self) -> bytes:
        return (self.model_dump_json(indent=2) + "\n").encode()


def read_held(root: Store) -> HeldVersions:
    """The record, whatever became of the version since. ValueError, naming it, where it is none."""
    return _parse(root, read_if_there(root, HELD))


def _parse(root: Store, data: bytes | None) -> HeldVersions:
    try:
        return HeldVersions.model_validate_json(data) if data is not None else HeldVersions()
    except ValueError as error:
        raise ValueError(f"{root.path(HELD)}: is not a record of a held version. Remove it, and refresh again.") from error


def candidate_of(root: Store, pointer: Pointer) -> Candidate | None:
    """The candidate of an output whose pointer is *pointer*, decided or not; None where nothing is held."""
    found = read_held(root).candidate
    return found if found is not None and is_current(found, pointer) else None


def is_current(candidate: Candidate, pointer: Pointer) -> bool:
    """Whether ``latest`` is where it was when the gates looked at the candidate, and nobody rejected it."""
    is_rejected = candidate.decision is not None and candidate.decision.what == "rejected"
    return candidate.sequence == pointer.sequence and not is_rejected


def hold(root: Store, candidate: Candidate) -> Candidate:
    """Let a version wait for a person, in place of whatever waited before. Return it as it is recorded: the same one with a
    decision is left alone. ValueError where ``latest`` has moved since the gates looked at it, or the version has gone.
    """

    def after(held: HeldVersions) -> HeldVersions:
        was = held.candidate
        is_same = was is not None and (was.version, was.sequence) == (candidate.version, candidate.sequence)
        if is_same and was is not None and was.decision is not None:
            return held
        return held.model_copy(update={"candidate": candidate})

    now = _change(root, after).candidate
    assert now is not None
    if (pointer := read_pointer(root)).sequence != candidate.sequence:
        raise ValueError(
            f"{root.url}: another build published {pointer.version} while this one ran. Version {candidate.version} is complete; "
            "run it again to compare it with that."
        )
    if not is_dataset(root, candidate.version):
        raise ValueError(f"{root.url}: version {candidate.version} has just been removed. Run the build again to make it again.")
    return now


def settle(root: Store) -> None:
    """The sources give the latest version again: let no other one wait."""

    def after(held: HeldVersions) -> HeldVersions:
        is_waiting = held.candidate is not None and held.candidate.decision is None
        return held.model_copy(update={"candidate": None}) if is_waiting else held

    if read_held(root).candidate is not None:
        _change(root, after)


def forgive(root: Store, version: str) -> None:
    """Let a version that was rejected be like any other."""
    if version in (rejected := read_held(root)).rejected_names:
        kept = tuple(one for one in rejected.rejected if one.version != version)
        _change(root, lambda held: held.model_copy(update={"rejected": kept}))


def rename(root: Store, mapping: Mapping[str, str], moved_from: int | None) -> None:
    """Let the record name versions that replaced others, old name -> new one. A candidate waits on if it waited when ``latest``
    had the number *moved_from*: the move after that was to a successor.
    """
    pointer = read_pointer(root)

    def renamed(candidate: Candidate) -> Candidate:
        version = mapping.get(candidate.version, candidate.version)
        facts: JsonObject = {"before": mapping.get(candidate.before or "", candidate.before)}
        if version != candidate.version and is_dataset(root, version):
            totals = read_manifest(version_store(root, version))["totals"]
            facts |= {"version": version, "manifest_sha256": manifest_digest(root, version)}
            facts |= {"documents": sum(totals[split]["seq_count"] for split in splits_of(totals))}
            facts |= {"tokens": sum(totals[split]["token_count"] for split in splits_of(totals))}
        if candidate.sequence == moved_from and pointer.sequence == candidate.sequence + 1:
            facts["sequence"] = pointer.sequence
        return candidate.model_copy(update=facts)

    def after(held: HeldVersions) -> HeldVersions:
        rejected = tuple(one.model_copy(update={"version": mapping.get(one.version, one.version)}) for one in held.rejected)
        return HeldVersions(candidate=held.candidate and renamed(held.candidate), rejected=rejected)

    if read_held(root) != HeldVersions():
        _change(root, after)


def _change(root: Store, after: Callable[[HeldVersions], HeldVersions]) -> HeldVersions:
    """Compare-and-swap the record with ``after(record)``, and return the new one. Retried when another machine replaced it
    first.
    """
    with pointer_lock(root):
        while True:
            seen: Seen = look(root, HELD)
            before = _parse(root, seen.data)
            now = after(before)
            if now == before or swap(root, HELD, seen, now.as_json()):
                return now


class Decided(NamedTuple):
    """A version that a person decided of, and the pointer as it is then. ``was_decided``: it had been decided so before."""

    candidate: Candidate
    pointer: Pointer
    was_decided: bool

    @property
    def decision(self) -> Decision:
        assert self.candidate.decision is not None
        return self.candidate.decision

    @property
    def headline(self) -> str:
        """Such as ``approved 80d2fd78..., which is latest now (number 4)``."""
        before = f" ({self.decision.by} had done so {self.decision.at:%Y-%m-%d %H:%M} UTC)" if self.was_decided else ""
        if self.decision.what == "rejected":
            return f"rejected {self.candidate.version}{before}: latest stays at {self.pointer.version or 'nothing'}"
        return f"approved {self.candidate.version}{before}: it is latest now (number {self.pointer.sequence})"


def approve(root: Store, name: str | None, why: str, by: str | None = None) -> Decided:
    """Let ``latest`` name the version that waits. *name*: which one that has to be, or how it begins. Killed in between, it is
    done when it is run again, and a refresh goes on with it. ValueError where it does not wait, or is damaged.
    """
    found = _named(root, name, "approve")
    if found.decision is None or found.decision.what != "approved":
        verify(version_store(root, found.version).url)
        check_without_forgotten(root, found.version)
    if manifest_digest(root, found.version) != found.manifest_sha256:
        raise ValueError(f"{root.url}: version {found.version} is not what the gates looked at. Refresh again.")
    decided, was_decided = _decide(root, found, "approved", why, by)
    publish(root, found.version, found.sequence)
    return _recorded(root, decided, was_decided=was_decided)


def reject(root: Store, name: str | None, why: str, by: str | None = None) -> Decided:
    """Leave ``latest`` where it is: a refresh that gives the version again does not hold it again. ValueError where it does not
    wait.
    """
    found = _named(root, name, "reject")
    decided, was_decided = _decide(root, found, "rejected", why, by)
    return _recorded(root, decided, was_decided=was_decided)


def _recorded(root: Store, decided: Candidate, *, was_decided: bool) -> Decided:
    pointer = read_pointer(root)
    if not was_decided or not is_recorded(root, decided):
        record(root, decided, pointer)
    return Decided(decided, pointer, was_decided)


def _named(root: Store, name: str | None, what: str) -> Candidate:
    """The candidate of that name. ValueError where another one waits, or none."""
    pointer, found = read_pointer(root), read_held(root).candidate
    listed = f"python -m flows status {shlex.quote(root.url)} says what is there."
    if name is not None:
        check_name(name)
    if found is None or (name is not None and not found.version.startswith(name)):
        there = f"; {found.version} does" if found is not None and is_current(found, pointer) else ""
        raise ValueError(
            f"{root.url}: {f'version {name}' if name else 'no version'} {'does not wait' if name else 'waits'} for a "
            f"person{there}. {listed}"
        )
    is_done = found.decision is not None and found.decision.what == {"approve": "approved", "reject": "rejected"}[what]
    is_latest = pointer.version == found.version
    if not is_current(found, pointer) and not (is_done and (what == "reject" or is_latest)):
        if found.decision is not None:
            state = f"was {found.decision.what} by {found.decision.by} ({found.decision.at:%Y-%m-%d %H:%M} UTC)"
            remedy = f"To publish it all the same: python -m flows rollback {shlex.quote(root.url)} {found.version}"
            raise ValueError(f"{root.url}: version {found.version} {state}. {remedy if not is_latest else listed}")
        raise ValueError(
            f"{root.url}: version {found.version} waits no more: it was compared with {found.before or 'nothing'}, and latest is "
            f"{pointer.version} now. Refresh again."
        )
    return found


def _decide(
    root: Store, found: Candidate, what: Literal["approved", "rejected"], why: str, by: str | None
) -> tuple[Candidate, bool]:
    """Record a decision of a candidate, once. Return it with that, and whether it was there. ValueError for another one."""
    decision = Decision(what=what, at=datetime.now(UTC), by=by or who(), why=why)
    was_decided = False

    def after(held: HeldVersions) -> HeldVersions:
        nonlocal was_decided
        now = held.candidate
        if now is None or (now.version, now.sequence) != (found.version, found.sequence):
            raise ValueError(f"{root.url}: version {found.version} was replaced by another one just now. Look again.")
        was_decided = now.decision is not None
        if now.decision is not None:
            if now.decision.what != what:
                raise ValueError(f"{root.url}: {now.decision.by} {now.decision.what} version {found.version} just now.")
            return held
        pointer = read_pointer(root)
        # A pointer that names this version was moved by another approval, whose decision is in the record by now: the swap fails.
        if what == "approved" and pointer.sequence != found.sequence and pointer.version != found.version:
            raise ValueError(f"{root.url}: latest has just moved to {pointer.version}. Refresh again.")
        rejected = held.rejected
        if what == "rejected":
            others = (one for one in rejected if one.version != found.version)
            rejected = (*others, Rejected(version=found.version, at=decision.at))[-REJECTED_KEPT:]
        return HeldVersions(candidate=now.model_copy(update={"decision": decision}), rejected=rejected)

    decided = _change(root, after).candidate
    assert decided is not None
    return decided, was_decided


def who() -> str:
    """The user of this process, as far as the system knows: NAME@HOST."""
    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (OSError, KeyError):  # a user without a name
        return platform.node()


def is_recorded(root: Store, decided: Candidate) -> bool:
    """Whether a decision is in the history, where it is recorded last."""
    return any(one.decision == decided.decision for one in read_history(root))


def record_decision(root: Store, held: HeldVersions) -> None:
    """Record the decision of the version that was held last, if whoever made it was killed before that."""
    found = held.candidate
    if found is not None and found.decision is not None and not is_recorded(root, found):
        record(root, found, read_pointer(root))


def record(root: Store, decided: Candidate, pointer: Pointer) -> None:
    """Record a decision among the runs and, last, in the history. Done again, it is there once."""
    assert decided.decision is not None
    counts: JsonObject = dict.fromkeys(("added", "removed", "changed", "moved"))
    if decided.changes is not None:
        counts = decided.changes.model_dump(include={*counts})
    facts: JsonObject = {
        "at": datetime.now(UTC).isoformat(),
        "host": platform.node(),
        "version": decided.version,
        "latest": pointer.version,
        "sequence": pointer.sequence,
        "decision": decided.decision.model_dump(mode="json"),
        "findings": [one.model_dump(mode="json") for one in decided.findings],
    }
    put_run(root, decided.decision.at, decided.version, facts)
    totals = {"documents": decided.documents, "tokens": decided.tokens, "text_bytes_tokenized": 0, "seconds": 0.0, **counts}
    remember(root, Refreshed(at=decided.decision.at, version=decided.version, decision=decided.decision, **totals))
