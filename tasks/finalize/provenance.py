"""The provenance of a version, which is everything that its bytes depend on; the name made of it, and that at an output where
documents were forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import NamedTuple, TypeVar

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.download.outlines import version_read
from tasks.models import FORGOTTEN, FORMAT_SEMANTICS, Model, PinnedSource, Slice, SourceFile, digest_of
from tasks.output.forgotten import ForgottenRecord, change_record
from tasks.output.paths import VERSIONS, version_store
from tasks.output.pointer import is_dataset
from tasks.output.versions import find_version
from tasks.parts.part import ShardPart
from tasks.rows import SPLIT_KEY
from tasks.text.signatures import EDITION
from tasks.tokenize.chat import Chat
from tasks.tokenize.engines import Tokenizer


class Provenance(Model):
    """Everything that a version's bytes depend on; nothing of when, where or by whom."""

    name: str
    sources: tuple[JsonObject, ...]
    tokenizer: JsonObject
    documents: JsonObject
    split: JsonObject
    semantics: str = FORMAT_SEMANTICS


def provenance(
    config: BuildConfig,
    pinned: tuple[PinnedSource, ...],
    files: list[SourceFile],
    tokenizer: Tokenizer,
    chats: tuple[Chat | None, ...],
) -> Provenance:
    """The provenance of a version."""
    without_fast_engine = config.tokenizer.engine == "reference" and tokenizer.make_fast is not None
    steps = config.documents.opened().described
    of_source: list[list[JsonObject]] = [[] for _ in config.sources]
    for file in files:
        facts = {"name": file.name, "size": file.size, "sha256": file.sha256, "split": file.split}
        facts |= {"version": version} if (version := version_read(file)) else {}
        of_source[file.source].append({**facts, "line_ends": file.line_ends} if file.line_ends else facts)
    sources = [
        {
            **source.model_dump(exclude={"path", "hub", "table", "version", "catalog", "chat_template"}, exclude_none=True),
            **({"chat": chat.model_dump(mode="json", exclude_none=True)} if (chat := chats[i]) else {}),
            **({"steps": list(steps)} if steps else {}),  # next to the source, so that a dataset made of several keeps them
            "from": pin.origin,
            "revision": pin.revision,
            "files": of_source[i],
        }
        for i, (source, pin) in enumerate(zip(config.sources, pinned, strict=True))
    ]
    return Provenance(
        name=config.name,
        sources=tuple(sources),
        tokenizer={
            **tokenizer_facts(tokenizer),
            # It changes nothing, unless documents that it does not take are left out: then it may decide which.
            **({"engine": "reference"} if without_fast_engine and config.documents.on_bad != "error" else {}),
        },
        documents={
            **config.documents.recorded(),
            **({"signatures": EDITION} if config.documents.near_duplicates else {}),
        },
        split=config.split_facts,
    )


def tokenizer_facts(tokenizer: Tokenizer) -> JsonObject:
    """The record of a tokenizer in a manifest."""
    return {
        # A file's name, not where it is on this machine; a hub repository's name is whole, and has a revision.
        "name": tokenizer.name if tokenizer.revision else PurePath(tokenizer.name).name,
        "digest": tokenizer.digest,
        "highest_id": tokenizer.highest_id,
        "revision": tokenizer.revision,
    }


def build_id(made_of: Provenance, layout: LayoutName) -> str:
    """The version's name: a digest of everything that its bytes depend on."""
    return digest_of(made_of.model_dump(), LAYOUTS[layout].edition)[:16]


P = TypeVar("P", bound=Provenance)
LATEST = "latest"


class VersionName(NamedTuple):
    """The name of a version. ``base``: that which it has if nothing was forgotten. ``names``: all that it ever had here."""

    version: str
    base: str
    names: frozenset[str]


def without_forgotten(record: ForgottenRecord | None, made_of: P) -> P:
    """The provenance of what is made at an output: without the documents that this has forgotten, by its *record*."""
    if record is None or not (sha256 := record.forgotten.sha256):
        return made_of
    facts = {"count": len(record.forgotten.digests), "sha256": sha256}
    return made_of.model_copy(update={"documents": {**made_of.documents, FORGOTTEN: facts}})


def forgotten_digest(record: ForgottenRecord | None) -> str:
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
    version = known if known and is_dataset(root, known) else build_id(without_forgotten(record, made_of), layout)
    return VersionName(version, base, frozenset({base, version, *([known] if known else [])}))


def with_kept_version(
    config: BuildConfig,
    root: Store,
    latest: str | None,
    record: ForgottenRecord | None,
    layout: LayoutName,
    make: Callable[[BuildConfig], Provenance],
) -> tuple[BuildConfig, Provenance]:
    """The configuration with the URL of the version that ``split.keep`` names, and the provenance that *make* makes of it. If
    the *latest* version results from the version that it kept itself, nothing has changed, and that version stays the kept one.
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
    version, or if other values decided on its splits.
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
    """Note the name of a version that was made if documents are forgotten."""
    if record is not None and record.versions.get(named.base) != named.version:
        change_record(root, lambda now: now.model_copy(update={"versions": {**now.versions, named.base: named.version}}))


def note_files(root: Store, record: ForgottenRecord | None, slices: Sequence[Slice], parts: Sequence[ShardPart]) -> None:
    """Note the source files of slices with forgotten documents: a build may keep copies of them. Small files that are one slice
    are noted together.
    """
    read = zip(slices, parts, strict=True)
    held = {one.file.sha256 for slice_, part in read if part.shard.skipped.get(FORGOTTEN) for one in slice_.ranges}
    if record is not None and not held <= {*record.files}:
        change_record(root, lambda now: now.model_copy(update={"files": tuple(sorted({*now.files, *held}))}))
