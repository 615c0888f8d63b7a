"""The history of an output's refreshes: a line of JSON for each that published a version, in ``runs/refreshes.jsonl``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import model_validator

from flat_tokens.stores.store import Store
from tasks.models import Model, Name
from tasks.output.paths import REFRESHES
from tasks.output.pointer import look, pointer_lock, swap

KEPT = 1000
"""Refreshes that are remembered."""


class Refreshed(Model):
    """A refresh that published a version. ``documents``, ``tokens``: of the version. ``added`` and so on count documents, and are
    None where they could not be told. ``text_bytes_tokenized``: 0 where all tokens were there.
    """

    at: datetime
    version: Name
    documents: int
    tokens: int
    added: int | None
    removed: int | None
    changed: int | None
    moved: int | None
    text_bytes_tokenized: int
    seconds: float

    @model_validator(mode="before")
    @classmethod
    def former_names(cls, facts: Any) -> Any:
        """Read lines of earlier releases, in which two counts have other names."""
        named = {"came": "added", "went": "removed"}
        return {named.get(name, name): fact for name, fact in facts.items()} if isinstance(facts, dict) else facts


def read_history(root: Store) -> tuple[Refreshed, ...]:
    """The refreshes so far, the last one last. ValueError, naming the record, where it holds something else."""
    return _parse(root, look(root, REFRESHES).data)


def remember(root: Store, refresh: Refreshed) -> None:
    """Add a refresh to the history. Other machines may do so at the same time."""
    with pointer_lock(root):
        while True:
            seen = look(root, REFRESHES)
            refreshes = (*_parse(root, seen.data), refresh)[-KEPT:]
            if swap(root, REFRESHES, seen, "".join(one.model_dump_json() + "\n" for one in refreshes).encode()):
                return


def _parse(root: Store, data: bytes | None) -> tuple[Refreshed, ...]:
    try:
        return tuple(Refreshed.model_validate_json(line) for line in (data or b"").splitlines())
    except ValueError as error:
        remedy = "Restore it or remove it, and run again."
        raise ValueError(f"{root.path(REFRESHES)}: is not a history of refreshes. {remedy}") from error
