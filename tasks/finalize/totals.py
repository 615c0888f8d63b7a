"""Totals of the documents of a version, as its manifest has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flat_tokens.annotations import JsonObject, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.extras import pa
from flat_tokens.keys import together
from flat_tokens.manifest import splits_of
from flat_tokens.stores.store import Store
from flat_tokens.tools.documents import query
from flat_tokens.tools.inspect import names_of_sets
from tasks.finalize.provenance import Provenance
from tasks.models import (
    Split,
)
from tasks.output.paths import DOCUMENTS
from tasks.parts.part import ShardPart
from tasks.parts.stored import document_spec
from tasks.rows import KEY, as_rows
from tasks.text.documents import EXAMPLES

if TYPE_CHECKING:
    from tasks.assemble.assembler import Assembled


KEYS_AT_ONCE = 1 << 25


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
