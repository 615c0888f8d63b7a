"""The name of a version at an output where documents were forgotten."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.stores.store import Store
from tasks.finalize.provenance import Provenance, build_id
from tasks.finalize.seal import is_published
from tasks.output.forgotten import ForgottenRecord, change_record

FORGOTTEN = "forgotten"
"""Key of the documents in a provenance: how many the list has by which they were left out, and its digest."""

P = TypeVar("P", bound=Provenance)


class VersionName(NamedTuple):
    """The name of a version. ``base``: that which it has if nothing was forgotten. ``names``: all that it ever had here."""

    version: str
    base: str
    names: frozenset[str]


def leaving_out(record: ForgottenRecord | None, made_of: P) -> P:
    """The provenance of what is made at an output: without the documents that this has forgotten, by its *record*."""
    if record is None or not (sha256 := record.forgotten.sha256):
        return made_of
    facts = {"count": len(record.forgotten.digests), "sha256": sha256}
    return made_of.model_copy(update={"documents": {**made_of.documents, FORGOTTEN: facts}})


def list_left_out(record: ForgottenRecord | None) -> str:
    """The digest of an output's list of forgotten documents. Empty if nothing was forgotten."""
    return record.forgotten.sha256 if record else ""


def name_of(root: Store, record: ForgottenRecord | None, made_of: Provenance, layout: LayoutName) -> VersionName:
    """The name of the version that *made_of* gives at an output with a *record* of forgotten documents. That which is there
    already, without the forgotten documents, is the same version, whatever was forgotten since.
    """
    plain = {key: value for key, value in made_of.documents.items() if key != FORGOTTEN}
    base = build_id(made_of.model_copy(update={"documents": plain}), layout)
    if record is None:
        return VersionName(base, base, frozenset({base}))
    known = record.versions.get(base)
    version = known if known and is_published(root, known, layout) else build_id(leaving_out(record, made_of), layout)
    return VersionName(version, base, frozenset({base, version, *([known] if known else [])}))


def note_name(root: Store, record: ForgottenRecord | None, named: VersionName) -> None:
    """Note the name of a version that was made where documents are forgotten."""
    if record is not None and record.versions.get(named.base) != named.version:
        change_record(root, lambda now: now.model_copy(update={"versions": {**now.versions, named.base: named.version}}))
