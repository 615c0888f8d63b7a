"""``forgotten/list.json``: the documents that an output has forgotten, and what is under way to forget more of them.

The record of a forgetting is written before anything else is touched, and marked as done after everything else. If the process
is killed in between, the next ``forget`` or build completes it; nothing is published before that.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import Field

from flat_tokens.forgotten import LIST, Forgotten, check_certificates, check_list, read_forgotten
from flat_tokens.stores.store import Store
from flat_tokens.tools.remains import Remains
from tasks.models import Digest, Model, Name
from tasks.output.pointer import pointer_lock, read_pointer
from tasks.output.swap import compare_and_swap, read_if_there

SALT = b"forgoten"
"""Of new lists: one for all, so that an output can take over what another one has forgotten."""
REMEMBERED = 1000
"""Requests that are listed."""


class Request(Model):
    """A request to forget documents: how they were named, and why. ``keys``: how many; ``unknown``: those of which no version has
    a document. ``same_text``: documents that are forgotten, too, because they have the text of one that was named.
    """

    id: Name
    at: datetime
    by: str
    reason: str
    named: str
    """keys, ids, where, like or source, without any of them."""
    source: str | None = None
    keys: int
    unknown: int
    same_text: int = 0


class Holder(Model):
    """A version that held forgotten documents, when the forgetting began: how many, and their tokens; its pin's note."""

    version: Name
    documents: int
    tokens: int
    state: str
    pinned: str | None = None


class PendingForgetting(Model):
    """A forgetting that was begun and has not come to its end. ``files``: the source, name and digest of each source file that
    holds the documents. ``short``: documents with too few tokens to recognise.
    """

    request: Request
    holders: tuple[Holder, ...]
    files: tuple[tuple[str, str, Digest], ...]
    short: int
    exports: tuple[str, ...] = ()
    runs: dict[str, Any] = Field({})
    """Findings of ledgers, by their paths."""


class ForgottenRecord(Model):
    """The content of ``forgotten/list.json``. ``salt`` to ``texts``: see ``flat_tokens.forgotten``. ``files``:
    digests of source files that hold such documents. ``versions``: names of versions, by the name that each has if nothing is
    forgotten. ``successors``: for each version that was replaced, the one that replaced it.
    """

    salt: str
    digests: str = ""
    windows: str = ""
    texts: str = ""
    files: tuple[Digest, ...] = ()
    versions: dict[Name, Name] = Field({})
    successors: dict[Name, Name] = Field({})
    requests: tuple[Request, ...] = Field((), max_length=REMEMBERED)
    pending: PendingForgetting | None = None

    @property
    def forgotten(self) -> Forgotten:
        return Forgotten.of(self.model_dump(include={"salt", "digests", "windows", "texts"}))

    def renamed(self, mapping: Mapping[str, str], there: list[str]) -> ForgottenRecord:
        """The record after versions were replaced, old name -> new one, of all that are *there*."""
        versions = {base: mapping.get(now, now) for base, now in self.versions.items()}
        known = {*self.versions.values(), *versions.values(), *mapping.values()}
        versions |= {name: mapping.get(name, name) for name in there if name not in known}
        successors = {former: mapping.get(now, now) for former, now in self.successors.items()}
        return self.model_copy(update={"versions": versions, "successors": {**successors, **mapping}})

    def as_json(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json")) + "\n").encode()


def new_record() -> ForgottenRecord:
    return ForgottenRecord(salt=SALT.hex())


def read_record_of(root: Store) -> ForgottenRecord | None:
    """The record of an output; None if nothing was ever forgotten. ValueError, naming it, if it is damaged, or is not the one
    that the pointer and the last certificate know.
    """
    record = _parse(root, read_if_there(root, LIST))
    known, found = read_pointer(root).forgotten, record.forgotten if record else Forgotten()
    check_list(root, known.model_dump() if known else None, found)
    if record is None or record.pending is None:
        check_certificates(root, found)
    return record


@functools.lru_cache(4)
def _list_of(root: Store, sha256: str) -> Forgotten:
    found = read_forgotten(root)
    if found.sha256 != sha256:
        raise ValueError(f"{root.path(LIST)}: has changed while documents were read. Run it again.")
    return found


def forgotten_at(root: Store, sha256: str) -> Forgotten:
    """The list of an output that has this digest; an empty one for an empty digest. ValueError if it has changed meanwhile."""
    return _list_of(replace(root, staging=None, read_once=False), sha256) if sha256 else Forgotten()


def check_without_forgotten(root: Store, version: str) -> None:
    """ValueError if a version has documents that its output has forgotten: it was put back, or comes from a copy."""
    if root.exists(LIST):
        for line in Remains(root, read_forgotten(root)).keys_of(version):
            again = f"python -m flows forget {shlex.quote(root.url)} --like {shlex.quote(root.url)} --reason TEXT"
            raise ValueError(f"{root.url}: {line}. Take them out: {again}")


def _parse(root: Store, data: bytes | None) -> ForgottenRecord | None:
    if data is None:
        return None
    try:
        return ForgottenRecord.model_validate_json(data)
    except ValueError as error:
        raise ValueError(f"{root.path(LIST)}: is not a list of forgotten documents. Restore it from a copy.") from error


def change_record(root: Store, after: Callable[[ForgottenRecord], ForgottenRecord]) -> ForgottenRecord:
    """Compare-and-swap the record with ``after(record)``, and return the new one. Retried when another machine was first."""
    with pointer_lock(root):
        return compare_and_swap(root, LIST, lambda data: _parse(root, data) or new_record(), after, ForgottenRecord.as_json)[1]
