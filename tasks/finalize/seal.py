"""Finalizing a version, whatever it is made of: its provenance, which is everything that its bytes depend on, and the name made
of it; totals, metadata, card, manifest, check, and last the commit. And the name of a version at an output where documents were
forgotten.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from flat_tokens.annotations import JsonObject, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName, group_metadata
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.checker import bytes_to_check, check_objects, check_split
from flat_tokens.columns import columns_of
from flat_tokens.extras import pa
from flat_tokens.keys import together
from flat_tokens.manifest import BYTES_RECORD, MANIFEST, TokenBytes, manifest_bytes, read_manifest, split_attributes, splits_of
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.documents import query
from flat_tokens.tools.inspect import names_of_sets
from flat_tokens.tools.terminal import markdown
from flat_tokens.writer import commit, put_metadata
from tasks.config import BuildConfig
from tasks.download.outlines import version_read
from tasks.models import (
    ALL_SPLITS,
    FORGOTTEN,
    FORMAT_SEMANTICS,
    LEFT_OUT,
    Model,
    PinnedSource,
    SourceFile,
    Split,
    TokenShard,
    digest_of,
)
from tasks.output.forgotten import ForgottenRecord, change_record
from tasks.output.paths import DOCUMENTS, TEXTS, VERSIONS, version_store
from tasks.output.target import Target
from tasks.output.versions import find_version
from tasks.parts.part import ShardPart
from tasks.parts.stored import document_spec, known_below
from tasks.progress import meter
from tasks.rows import KEY, SPLIT_KEY, as_rows
from tasks.shards.index import IndexEntry, published_shards, write_index
from tasks.text.documents import EXAMPLES
from tasks.text.signatures import EDITION
from tasks.tokenize.chat import Chat
from tasks.tokenize.engines import Tokenizer

if TYPE_CHECKING:
    from tasks.assemble.assembler import Assembled


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
        of_source[file.source].append(_facts_of(file))
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


def _facts_of(file: SourceFile) -> JsonObject:
    facts = {"name": file.name, "size": file.size, "sha256": file.sha256, "split": file.split}
    if version := version_read(file):
        facts["version"] = version
    return {**facts, "line_ends": file.line_ends} if file.line_ends else facts


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


CARD = "README.md"


KEYS_AT_ONCE = 1 << 25


def is_published(root: Store, version: str, layout: LayoutName) -> bool:
    """Whether a version is complete: its root group's metadata is written last."""
    marker = list(group_metadata(LAYOUTS[layout].zarr_format, {}))[-1]
    return version_store(root, version).has(marker)


class VersionDraft(NamedTuple):
    """All that a version is made of, its objects of tokens and documents written. ``documents``: totals of its documents, given
    how many have the key of another. ``card``: the dataset card, given ``made_of``, the layout, the totals and the version.
    ``token_bytes``: those of its tokenizer, if they are known.
    ``shards``: those that it holds, where it is not made of them.
    """

    made_of: Provenance
    assembled: Assembled
    documents: Callable[[int], JsonObject]
    card: Callable[[Any, LayoutName, JsonObject, str], str]
    token_bytes: Callable[[], TokenBytes | None] | None = None
    shards: Sequence[TokenShard] = ()


def finalize(target: Target, draft: VersionDraft, verify_level: str) -> str:
    """Write metadata, card and manifest of a version whose arrays are written, check it, commit it. Return its name."""
    store, layout, assembled = target.store, target.layout, draft.assembled
    totals, of_texts = split_totals(assembled, target.splits), split_totals(assembled, target.every_split)
    beside = [stored for part in assembled.written for stored in part.beside]
    objects = [stored for part in assembled.written for stored in part.objects]
    known = known_below(store, objects)
    totals["documents"] = draft.documents(repeated_keys(known, layout, totals))
    for split in target.splits:
        objects += _split_metadata(target, split, totals[split])
    if LEFT_OUT in of_texts:
        beside += [*_split_metadata(target, LEFT_OUT, of_texts[LEFT_OUT]), *_texts_metadata(target, of_texts)]
    shards = [(part, counts) for part, counts in assembled.parts if isinstance(part, ShardPart)]
    entries = (
        IndexEntry(part.shard, part.file, part.first_row, tuple(counts[split][0] for split in ALL_SPLITS))
        for part, counts in shards
    )
    if published := [*draft.shards, *published_shards(target.name, entries)]:
        write_index(target.root, target.name, published, beside)
    facts = draft.made_of.model_dump()
    made_of = draft.made_of.model_copy(update=markdown(facts))
    if draft.token_bytes is not None and (found := draft.token_bytes()) is not None:
        objects.append(store.put(BYTES_RECORD, found.record()))
    objects.append(store.put(CARD, draft.card(made_of, layout, markdown(totals), target.name).encode()))
    manifest = manifest_bytes(objects, totals, layout, facts, assembled.columns)
    store.put(MANIFEST, manifest)
    check_version(store, objects, totals, verify_level)
    commit(store, LAYOUTS[target.layout])
    for repeats in (repeats for part, _ in shards for repeats in part.repeats):
        target.of_attempt(repeats.attempt).remove_object(repeats.stored.key)
    return target.name


def _split_metadata(target: Target, split: Split, totals: dict[str, int]) -> list[StoredObject]:
    store, layout = target.home(split), target.layout_of(split)
    arrays = {
        **{f"{split}/{name}": (layout.token_array(name), totals["token_count"]) for name in target.token_arrays},
        f"{split}/seq_starts": (layout.seq_starts, totals["seq_count"] + 1),
        **{f"{DOCUMENTS}/{split}/{name}": (document_spec(layout), totals["seq_count"]) for name in target.facts},
    }
    stored = [o for name, (spec, length) in arrays.items() for o in put_metadata(store, name, spec.metadata(length))]
    attributes = split_attributes(totals["max_token_id"], target.token_arrays)
    return [*stored, *put_metadata(store, split, group_metadata(layout.zarr_format, attributes))]


def _texts_metadata(target: Target, totals: JsonObject) -> Iterator[StoredObject]:
    for split in filter(totals.__contains__, target.every_split):
        for name, numbers in target.texts_of(split).items():
            metadata = document_spec(target.layout_of(split)).metadata(numbers * totals[split]["seq_count"])
            yield from put_metadata(target.beside, f"{TEXTS}/{split}/{name}", metadata)


def check_version(store: Store, objects: list[StoredObject], totals: JsonObject, level: str) -> None:
    """Check a version before it is published. ValueError names every fault, up to ten."""
    # The marker may be there: another process that builds the same may have been faster.
    besides = {MANIFEST, BYTES_RECORD, *group_metadata(2, {}), *group_metadata(3, {})}
    seen = functools.partial(meter.add, "verify") if level == "full" else None
    if seen:
        meter.begin("verify", bytes_to_check(store))
    faults = list(check_objects(store, sorted(objects), besides, "full" if seen else "quick", 2, seen))
    known = known_below(store, objects)
    for name in splits_of(totals):
        split = open_split(known / name)
        if (split.token_count, split.seq_count) != (totals[name]["token_count"], totals[name]["seq_count"]):
            faults.append(f"{name} has {split.token_count} tokens in {split.seq_count} sequences, not {totals[name]}")
        if seen:
            faults += check_split(split, seen)
            faults += columns_of(store, read_manifest(store), name).faults()
    if faults:
        raise ValueError(f"{store.url} is not what was written; nothing was published: {'; '.join(faults[:10])}")


def split_totals(assembled: Assembled, splits: Sequence[Split]) -> JsonObject:
    """Counts of each split that has spans, from what was written of them."""
    totals: JsonObject = {}
    for split in splits:
        mine = [(at, part) for at, part in zip(assembled.spans, assembled.written, strict=True) if at.split == split]
        if not mine:
            continue
        totals[split] = {
            "token_count": max((at.stop for at, _ in mine if at.of_tokens), default=0),
            "seq_count": max(at.stop for at, _ in mine if not at.of_tokens),
            "max_token_id": max(part.max_token_id for _, part in mine),
        }
    return totals


def _sums(parts: Sequence[ShardPart]) -> JsonObject:
    """Counts of the documents of parts, of those with near-duplicates that are kept only if there are any."""
    counts = [part.counts for part in parts]
    near = sum(some.documents for part in parts for some in part.repeats if some.reason is None)
    return {
        **{name: sum(getattr(of, name) for of in counts) for name in ("read", "written", "text_bytes", "token_count")},
        "skipped": _added(of.skipped for of in counts),
        **({"near_duplicates": near} if near else {}),
    }


def document_totals(parts: Sequence[ShardPart], repeated: int) -> JsonObject:
    found = _sums(parts)
    if found["read"] != found["written"] + sum(found["skipped"].values()):
        raise AssertionError(f"documents do not add up: {found}")
    found |= {"replaced": _added(part.shard.replaced for part in parts), "repeated_keys": repeated}
    names = ("read", "written", "skipped", "replaced", "repeated_keys", "text_bytes", "near_duplicates")
    return {name: found[name] for name in names if name in found}


def match_totals(made_of: Provenance, parts: Sequence[ShardPart]) -> JsonObject:
    """Documents in which steps found something, and examples; nothing where no step looks for anything."""
    names = [file["name"] for source in made_of.sources for file in source["files"]]
    examples = dict[str, list[JsonObject]]()
    for part in parts:
        for name, of_slice in part.shard.examples.items():
            mine = examples.setdefault(name, [])
            mine += [_in_file(part, example, names) for example in of_slice[: EXAMPLES - len(mine)]]
    return {**_matches(made_of, parts), **({"examples": dict(sorted(examples.items()))} if examples else {})}


def _matches(made_of: Provenance, parts: Iterable[ShardPart]) -> dict[str, dict[str, int]]:
    """Counts of documents by what steps found in them; 0 for evaluation sets of which no document has anything."""
    looked_for = [name for source in made_of.sources[:1] for name in names_of_sets(source.get("steps") or ())]
    matches = _added([dict.fromkeys(looked_for, 0), *(part.shard.matches for part in parts)])
    return {"matches": matches} if matches else {}


def _in_file(part: ShardPart, example: JsonObject, file_names: Sequence[str]) -> JsonObject:
    """An example of a slice, by its file and its row there."""
    starts = part.shard.file_starts[:-1]  # none where the slice is of one file
    number = max(int(np.searchsorted(starts, np.uint64(example["row"]), "right")) - 1, 0)
    row = example["row"] - (int(starts[number]) if number else 0) + (0 if number else part.first_row)
    return {"file": file_names[part.file + number], **example, "row": row}


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums of counts by their names, in the names' order."""
    sums: Counter[str] = Counter()
    for some in counts:
        sums.update(some)
    return dict(sorted(sums.items()))


def source_totals(made_of: Provenance, parts: Sequence[ShardPart]) -> list[JsonObject]:
    """Documents, text and tokens of each source, in the order of the sources."""
    of_file = [i for i, source in enumerate(made_of.sources) for _ in source["files"]]
    parts_of: list[list[ShardPart]] = [[] for _ in made_of.sources]
    for part in parts:
        parts_of[of_file[part.file]].append(part)
    named = zip(made_of.sources, parts_of, strict=True)
    return [{"name": source["name"], **_sums(mine), **_matches(made_of, mine)} for source, mine in named]


def repeated_keys(store: Store, layout: LayoutName, totals: JsonObject) -> int:
    """Count the documents whose key an earlier document has: equal ids, or, without ids, equal texts. The version's own arrays
    are read, as they have larger and fewer objects than the shards.
    """
    spec = document_spec(LAYOUTS[layout])
    columns = [StoredArray(store / f"{DOCUMENTS}/{split}/key", spec, totals[split]["seq_count"]) for split in splits_of(totals)]
    keys = (
        column.read(start, min(start + spec.object_length, column.length))
        for column in columns
        for start in range(0, column.length, spec.object_length)
    )
    return count_repeated(keys, sum(column.length for column in columns))


def count_repeated(keys: Iterable[UInt64s], count: int) -> int:
    """How many of *count* keys, uint64, repeat earlier ones. Too many for memory are counted by a query."""
    if count <= KEYS_AT_ONCE:
        return count - len(np.unique(together(keys)))

    batches = (as_rows({KEY: some}) for some in keys)
    rows = pa.RecordBatchReader.from_batches(pa.schema([(KEY, pa.uint64())]), batches)
    ((repeated,),) = query(rows, "SELECT count(*) - count(DISTINCT key) FROM documents")
    return int(repeated)


def built_totals(made_of: Provenance, parts: list[ShardPart], repeated: int) -> JsonObject:
    """Totals of the documents of a build."""
    totals = {**document_totals(parts, repeated), **match_totals(made_of, parts)}
    return {**totals, "by_source": source_totals(made_of, parts)}


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
