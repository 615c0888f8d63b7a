"""Totals: documents and tokens of a version, by split and by source."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from tasks.finalize.provenance import Provenance
from tasks.models import TokenShard
from tasks.output.paths import DOCUMENTS
from tasks.shards.read import document_spec
from tasks.split.spans import ShardPlace, Span
from tasks.split.write import Written

KEYS_AT_ONCE = 1 << 25


def split_totals(spans: Sequence[Span], written: Sequence[Written]) -> dict[str, Any]:
    """Counts of each split, from its written spans."""
    totals: dict[str, Any] = {}
    for split in SPLITS:
        mine = [(at, part) for at, part in zip(spans, written, strict=True) if at.split == split]
        totals[split] = {
            "token_count": max((at.stop for at, _ in mine if at.of_tokens), default=0),
            "seq_count": max(at.stop for at, _ in mine if not at.of_tokens),
            "max_token_id": max(part.max_token_id for _, part in mine),
        }
    return totals


def document_totals(places: list[ShardPlace], repeated: int) -> dict[str, Any]:
    shards = [at.shard for at in places]
    skipped, replaced = _added(shard.skipped for shard in shards), _added(shard.replaced for shard in shards)
    read, written = sum(shard.read for shard in shards), sum(shard.written for shard in shards)
    if read != written + sum(skipped.values()):
        raise AssertionError(f"documents read {read}, written {written}, skipped {skipped}")
    return {
        "read": read,
        "written": written,
        "skipped": skipped,
        "replaced": replaced,
        "repeated_keys": repeated,
        "text_bytes": sum(shard.text_bytes for shard in shards),
    }


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums of counts by their names, in the names' order."""
    sums: Counter[str] = Counter()
    for some in counts:
        sums.update(some)
    return dict(sorted(sums.items()))


def source_totals(made_of: Provenance, places: list[ShardPlace]) -> list[dict[str, Any]]:
    """Documents, text and tokens of each source, in the order of the sources."""
    of_file = [i for i, source in enumerate(made_of.sources) for _ in source["files"]]
    shards: list[list[TokenShard]] = [[] for _ in made_of.sources]
    for at in places:
        shards[of_file[at.file]].append(at.shard)
    return [
        {
            "name": source["name"],
            **{name: sum(getattr(shard, name) for shard in mine) for name in ("read", "written", "text_bytes", "token_count")},
            "skipped": _added(shard.skipped for shard in mine),
        }
        for source, mine in zip(made_of.sources, shards, strict=True)
    ]


def repeated_keys(store: Store, layout: LayoutName, totals: dict[str, Any], staging: Path) -> int:
    """Count the documents whose key an earlier document has: equal ids, or, without ids, equal texts. The version's own arrays
    are read, as they have larger and fewer objects than the shards.
    """
    spec = document_spec(LAYOUTS[layout])
    columns = [StoredArray(store / f"{DOCUMENTS}/{split}/key", spec, totals[split]["seq_count"]) for split in SPLITS]

    keys = (
        column.read(start, min(start + spec.object_length, column.length))
        for column in columns
        for start in range(0, column.length, spec.object_length)
    )
    return count_repeated(keys, sum(column.length for column in columns), staging)


def count_repeated(keys: Iterable[npt.NDArray[np.uint64]], count: int, staging: Path) -> int:
    """How many of *count* keys, uint64, repeat earlier ones. Too many for memory are first divided into files in *staging*, so
    that equal keys are in one file.
    """
    parts = -(-count // KEYS_AT_ONCE)
    if parts <= 1:
        return _repeated(np.concatenate([*keys, np.empty(0, np.uint64)]))
    with tempfile.TemporaryDirectory(dir=staging, prefix="keys-") as directory, contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(Path(directory, str(part)), "w+b")) for part in range(parts)]
        for some in keys:
            part_of = some % np.uint64(parts)
            order = np.argsort(part_of, kind="stable")
            bounds = np.searchsorted(part_of[order], np.arange(parts + 1, dtype=np.uint64)).tolist()
            for file, (start, stop) in zip(files, pairwise(bounds), strict=True):
                file.write(some[order[start:stop]].tobytes())
        return sum(_repeated(_all_of(file)) for file in files)


def _repeated(keys: npt.NDArray[np.uint64]) -> int:
    return len(keys) - len(np.unique(keys))


def _all_of(file: BinaryIO) -> npt.NDArray[np.uint64]:
    file.seek(0)
    return np.frombuffer(file.read(), np.uint64)
