"""Finalizing a version, whatever it is made of: metadata, card, manifest, check, and last the commit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName, group_metadata
from flat_tokens.checker import bytes_to_check, check_objects, check_split
from flat_tokens.columns import columns_of
from flat_tokens.manifest import BYTES_RECORD, MANIFEST, TokenBytes, manifest_bytes, read_manifest, split_attributes, splits_of
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.terminal import markdown
from flat_tokens.writer import commit, put_metadata
from tasks.finalize.provenance import Provenance
from tasks.finalize.totals import repeated_keys, split_totals
from tasks.models import (
    ALL_SPLITS,
    LEFT_OUT,
    Split,
    TokenShard,
)
from tasks.output.paths import DOCUMENTS, TEXTS
from tasks.output.target import Target
from tasks.parts.part import ShardPart
from tasks.parts.stored import document_spec, known_below
from tasks.progress import meter
from tasks.shards.index import IndexEntry, published_shards, write_index

if TYPE_CHECKING:
    from tasks.assemble.assembler import Assembled


CARD = "README.md"


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
