"""The name of a version at an output where documents were forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.finalize.provenance import Provenance, build_id
from tasks.finalize.seal import is_published
from tasks.models import FORGOTTEN
from tasks.output.forgotten import ForgottenRecord, change_record
from tasks.output.paths import VERSIONS, version_store
from tasks.output.versions import find_version
from tasks.rows import SPLIT_KEY

"""Key of the documents in a provenance: how many the list has by which they were left out, and its digest."""

P = TypeVar("P", bound=Provenance)
LATEST = "latest"


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


def keeping(
    config: BuildConfig,
    root: Store,
    latest: str | None,
    record: ForgottenRecord | None,
    layout: LayoutName,
    make: Callable[[BuildConfig], Provenance],
) -> tuple[BuildConfig, Provenance]:
    """The configuration with the URL of the version that ``split.keep`` names, and the provenance that *make* makes of it. Where
    the *latest* version is what it gives with the version that this one kept, nothing has changed: that version is kept.
    """
    if config.split.keep == LATEST and latest is not None:
        was = (read_manifest(version_store(root, latest))["provenance"].get("split") or {}).get("keep")
        same = config.keeping(version_store(root, was).url if was else None)
        if name_of(root, record, made_of := make(same), layout).version == latest:
            return same, made_of
    config = with_kept(config, root, latest)
    return config, make(config)


def with_kept(config: BuildConfig, root: Store, latest: str | None) -> BuildConfig:
    """The configuration with the URL of the version that ``split.keep`` names, if it names one. ValueError if there is no such
    version, or where other values decided on its splits.
    """
    keep = latest if config.split.keep == LATEST else config.split.keep
    if keep is None:
        return config.keeping(None)
    place, _, name = keep.rpartition(f"/{VERSIONS}/")
    there = Store.at(place) if place else root
    kept = version_store(there, find_version(there, name))
    by = (read_manifest(kept)["provenance"].get("split") or {}).get("by", "key")
    if config.split_fact == SPLIT_KEY and by != config.split.by:
        raise ValueError(
            f"split.keep: {kept.url} was split by {by}, so it has no values of {config.split.by!r}, as split.by wants. Leave "
            f"split.keep out, or set split.by: {by}."
        )
    return config.keeping(kept.url)


def note_name(root: Store, record: ForgottenRecord | None, named: VersionName) -> None:
    """Note the name of a version that was made where documents are forgotten."""
    if record is not None and record.versions.get(named.base) != named.version:
        change_record(root, lambda now: now.model_copy(update={"versions": {**now.versions, named.base: named.version}}))
