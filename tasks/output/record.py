"""The content of ``latest.json``, the record of an output: its latest version, those that were, the one that waits, pins, and
what people decided. Readers need its first three facts alone.

A candidate is a whole version that a gate holds back. It waits as long as ``latest`` stays where it was when the gates looked at
it: every move ends that. An approval is such a move, which notes the decision, too.
"""

from __future__ import annotations

import getpass
import json
import platform
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from flat_tokens.manifest import OF_PEOPLE, pointer_digest
from tasks.gates import Finding, Gate
from tasks.models import Digest, Model, Name
from tasks.output.changes import DocumentChangeCounts

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
    """A person's decision on a version that gates held back: when, who and why. ``findings``: those of the gates."""

    what: Literal["approved", "rejected", "published anyway"]
    at: datetime
    by: str
    why: str
    findings: tuple[Finding, ...] = ()


class Refreshed(Model):
    """A refresh that published a version, or a decision of one that was held. ``documents``, ``tokens``: of the version.
    ``added`` and so on count documents, and are None where they are unknown. ``text_bytes_tokenized``: 0 where all tokens
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
    ``changes``: of documents, None where they are unknown.
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

    def decided(self, what: Literal["approved", "rejected", "published anyway"], why: str, by: str | None = None) -> Refreshed:
        """The record of a decision of it."""
        decision = Decision(what=what, at=datetime.now(UTC), by=by or who(), why=why, findings=self.findings)
        counts = dict.fromkeys(("added", "removed", "changed", "moved"))
        if self.changes is not None:
            counts = self.changes.model_dump(include={*counts})
        totals = {"documents": self.documents, "tokens": self.tokens}
        return Refreshed(at=decision.at, version=self.version, decision=decision, **totals, **counts)


def who() -> str:
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
    decisions: tuple[Refreshed, ...] = ()

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

    def noting(self, decided: Refreshed) -> Pointer:
        """The same, with one more decision."""
        return self.model_copy(update={"decisions": (*self.decisions, decided)[-DECISIONS_KEPT:]})


def _without(version: str, several: tuple[Former, ...]) -> tuple[Former, ...]:
    return tuple(one for one in several if one.version != version)
