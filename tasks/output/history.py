"""The history of an output's refreshes: a line of JSON for each version that one published, in ``runs/refreshes.jsonl``, and what
people decided, which is in the pointer. Nothing depends on the lines: a refresh that is killed may leave none.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import Any

from flat_tokens.manifest import POINTER, history_digest
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import Store
from tasks.output.paths import REFRESHES, RUNS
from tasks.output.pointer import pointer_lock, read_pointer
from tasks.output.record import Refreshed
from tasks.output.swap import read_if_there, swapped

KEPT = 1000
"""Refreshes that are remembered."""


def read_history(root: Store) -> tuple[Refreshed, ...]:
    """The refreshes and decisions so far, the last one last. ValueError, naming the record, where it holds something else."""
    refreshes = _parse(root, read_if_there(root, REFRESHES))
    return tuple(sorted((*refreshes, *read_pointer(root).decisions), key=lambda one: one.at))


def remember(root: Store, refresh: Refreshed) -> None:
    """Add a refresh to the history. Other machines may do so at the same time."""
    with pointer_lock(root):
        swapped(root, REFRESHES, partial(_parse, root), lambda before: (*before, refresh)[-KEPT:], _lines)


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


def _lines(refreshes: tuple[Refreshed, ...]) -> bytes:
    return "".join(one.model_dump_json(exclude={"decision"}) + "\n" for one in refreshes).encode()
