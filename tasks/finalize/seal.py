"""Finalizing a version, whatever it is made of: totals, metadata, card, manifest, check, and last the commit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flat_tokens.annotations import JsonObject, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName, group_metadata
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.checker import bytes_to_check, check_objects, check_split
from flat_tokens.columns import columns_of
from flat_tokens.extras import pa
from flat_tokens.keys import concatenated
from flat_tokens.manifest import BYTES_RECORD, MANIFEST, TokenBytes, manifest_bytes, read_manifest, split_attributes, splits_of
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.documents import query
from flat_tokens.tools.inspect import sets_by_name
from flat_tokens.tools.terminal import markdown
from flat_tokens.writer import commit, put_metadata
from tasks.finalize.provenance import Provenance
from tasks.models import LEFT_OUT, Split, TokenShard
from tasks.output.paths import DOCUMENTS, TEXTS
from tasks.output.target import Target
from tasks.parts.part import ShardPart
from tasks.parts.stored import document_spec, known_below
from tasks.progress import meter
from tasks.rows import KEY, as_rows
from tasks.shards.index import published_shards, write_index
from tasks.text.documents import EXAMPLES

if TYPE_CHECKING:
    from tasks.assemble.assembler import AssembledArrays


CARD = "README.md"


class VersionDraft(NamedTuple):
    """All that a version is made of, its objects of tokens and documents written. ``documents``: totals of its documents, given
    how many have the key of another. ``card``: the dataset card, given ``made_of``, the layout, the totals and the version.
    ``token_bytes``: those of its tokenizer, if they are known.
    ``shards``: those that it holds, if it is not made of them.
    """

    made_of: Provenance
    assembled: AssembledArrays
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
        beside += _split_metadata(target, LEFT_OUT, of_texts[LEFT_OUT])
        for split in filter(of_texts.__contains__, target.every_split):
            spec, count = document_spec(target.layout_of(split)), of_texts[split]["seq_count"]
            for name, numbers in target.texts_of(split).items():
                beside += put_metadata(target.beside, f"{TEXTS}/{split}/{name}", spec.metadata(numbers * count))
    shards = [(part, counts) for part, counts in assembled.parts if isinstance(part, ShardPart)]
    if published := [*draft.shards, *published_shards(target.name, shards)]:
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


KEYS_AT_ONCE = 1 << 25


def split_totals(assembled: AssembledArrays, splits: Sequence[Split]) -> JsonObject:
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


def _matches(made_of: Provenance, parts: Iterable[ShardPart]) -> dict[str, dict[str, int]]:
    """Counts of documents by what steps found in them; 0 for evaluation sets of which no document has anything."""
    looked_for = [name for source in made_of.sources[:1] for name in sets_by_name(source.get("steps") or ())]
    matches = _added([dict.fromkeys(looked_for, 0), *(part.shard.matches for part in parts)])
    return {"matches": matches} if matches else {}


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
    """The number of *count* keys, uint64, that repeat earlier ones. A query counts them if they are too many for memory."""
    if count <= KEYS_AT_ONCE:
        return count - len(np.unique(concatenated(keys)))

    batches = (as_rows({KEY: some}) for some in keys)
    rows = pa.RecordBatchReader.from_batches(pa.schema([(KEY, pa.uint64())]), batches)
    ((repeated,),) = query(rows, "SELECT count(*) - count(DISTINCT key) FROM documents")
    return int(repeated)


def built_totals(made_of: Provenance, parts: list[ShardPart], repeated: int) -> JsonObject:
    """Totals of the documents of a build."""
    found = _sums(parts)
    if found["read"] != found["written"] + sum(found["skipped"].values()):
        raise AssertionError(f"documents do not add up: {found}")
    found |= {"replaced": _added(part.shard.replaced for part in parts), "repeated_keys": repeated}
    names = ("read", "written", "skipped", "replaced", "repeated_keys", "text_bytes", "near_duplicates")
    totals = {**{name: found[name] for name in names if name in found}, **_matches(made_of, parts)}
    files = [file["name"] for source in made_of.sources for file in source["files"]]
    examples = dict[str, list[JsonObject]]()
    for part in parts:
        for name, of_slice in part.shard.examples.items():
            mine = examples.setdefault(name, [])
            for example in of_slice[: EXAMPLES - len(mine)]:
                # (slice, row) -> (file, row); a slice of one file has no starts
                starts, row = part.shard.file_starts[:-1], example["row"]
                number = max(int(np.searchsorted(starts, np.uint64(row), "right")) - 1, 0)
                row += (0 if number else part.first_row) - (int(starts[number]) if number else 0)
                mine.append({"file": files[part.file + number], **example, "row": row})
    totals |= {"examples": dict(sorted(examples.items()))} if examples else {}
    return {**totals, "by_source": source_totals(made_of, parts)}
