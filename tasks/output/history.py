"""The history of an output's refreshes: a line of JSON for each version that one published, or that a person decided of, in
``runs/refreshes.jsonl``.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal

from flat_tokens.manifest import POINTER, history_digest
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import Store
from tasks.models import Model, Name
from tasks.output.paths import REFRESHES, RUNS
from tasks.output.pointer import look, pointer_lock, read_if_there, swap

KEPT = 1000
"""Refreshes that are remembered."""


class Decision(Model):
    """A person's decision on a version that gates held back: when, who and why."""

    what: Literal["approved", "rejected", "published anyway"]
    at: datetime
    by: str
    why: str


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
    text_bytes_tokenized: int
    seconds: float
    decision: Decision | None = None


def read_history(root: Store) -> tuple[Refreshed, ...]:
    """The refreshes so far, the last one last. ValueError, naming the record, where it holds something else."""
    return _parse(root, read_if_there(root, REFRESHES))


def remember(root: Store, refresh: Refreshed) -> None:
    """Add a refresh to the history. Other machines may do so at the same time."""
    with pointer_lock(root):
        while True:
            seen = look(root, REFRESHES)
            before = _parse(root, seen.data)
            if refresh.decision is not None and any(one.decision == refresh.decision for one in before):
                return  # a death after this line is why it comes again
            kept = (*before, refresh)[-KEPT:]
            lines = (one.model_dump_json(exclude=None if one.decision else {"decision"}) + "\n" for one in kept)
            if swap(root, REFRESHES, seen, "".join(lines).encode()):
                return


def put_run(root: Store, at: datetime, version: str, facts: dict[str, Any]) -> None:
    """Write the record of a run that ended *at* a time with a *version*. Next to it: the pointer's history."""
    with pointer_lock(root):
        if root.is_local and facts["latest"] is not None:
            facts = {**facts, "history_sha256": history_digest(read_json(root, POINTER))}
        root.put(f"{RUNS}/{at:%Y%m%dT%H%M%S%f}-{version}.json", (json.dumps(facts, indent=2) + "\n").encode())


def _parse(root: Store, data: bytes | None) -> tuple[Refreshed, ...]:
    try:
        return tuple(Refreshed.model_validate_json(line) for line in (data or b"").splitlines())
    except ValueError as error:
        remedy = "Restore it or remove it, and run again."
        raise ValueError(f"{root.path(REFRESHES)}: is not a history of refreshes. {remedy}") from error
