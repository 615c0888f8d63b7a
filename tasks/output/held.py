"""Decisions of the version that a gate holds: a person approves or rejects it, once."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from flat_tokens.annotations import JsonObject
from flat_tokens.checker import verify
from flat_tokens.manifest import check_name
from flat_tokens.stores.store import Store
from tasks.output.forgotten import check_without_forgotten
from tasks.output.history import put_run
from tasks.output.paths import version_store
from tasks.output.pointer import change, is_dataset, manifest_digest, moved_to, read_pointer
from tasks.output.record import Candidate, Decision, Pointer, Refreshed


def hold(root: Store, candidate: Candidate, since: int) -> Candidate:
    """Let a version wait for a person, in place of whatever waited before, unless it was rejected meanwhile. ValueError where
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

    change(root, after)
    if not is_dataset(root, candidate.version):
        raise ValueError(f"{root.url}: version {candidate.version} has just been removed. Run the build again to make it again.")
    return candidate


class Decided(NamedTuple):
    """A decision of a version, and the pointer as it is then. ``was_decided``: it had been decided so before."""

    made: Refreshed
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


def approve(root: Store, name: str | None, why: str, by: str | None = None) -> Decided:
    """Let ``latest`` name the version that waits. *name*: which one that has to be, or how it begins. ValueError where it is
    damaged, or does not wait.
    """
    found = _waiting(read_pointer(root), name)
    if found is not None:
        verify(version_store(root, found.version).url)
        check_without_forgotten(root, found.version)

    def moved(pointer: Pointer, candidate: Candidate) -> Pointer:
        if manifest_digest(root, candidate.version) != candidate.manifest_sha256:
            raise ValueError(f"{root.url}: version {candidate.version} is not what the gates looked at. Refresh again.")
        return moved_to(root, pointer, candidate.version, candidate.manifest_sha256)

    return _decide(root, found, name, "approved", why, by, moved)


def reject(root: Store, name: str | None, why: str, by: str | None = None) -> Decided:
    """Leave ``latest`` where it is: a refresh that gives the version again does not hold it again. ValueError where it does not
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
) -> Decided:
    """Note a decision of the candidate that was *found*, in the change *after* that it makes. ValueError where another one
    waits, or none, and nobody has decided so before.
    """
    made = found.decided(what, why, by) if found is not None else None
    before: Refreshed | None = None

    def noted(pointer: Pointer) -> Pointer:
        nonlocal before
        if found is not None and made is not None and pointer.candidate == found:
            return after(pointer, found).noting(made)
        before = _decided_before(root, pointer, found.version if found else name, what)
        return pointer

    pointer = change(root, noted)
    if before is not None:
        return Decided(before, pointer, was_decided=True)
    assert made is not None
    decided = Decided(made, pointer, was_decided=False)
    decision = decided.decision.model_dump(mode="json")
    facts: JsonObject = {
        "at": datetime.now(UTC).isoformat(),
        "host": platform.node(),
        "version": made.version,
        "latest": pointer.version,
        "sequence": pointer.sequence,
        "findings": decision.pop("findings"),
        "decision": decision,
    }
    put_run(root, made.at, made.version, facts)
    return decided


def _decided_before(root: Store, pointer: Pointer, name: str | None, what: str) -> Refreshed:
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
