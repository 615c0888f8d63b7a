"""Writing the reserve of a version whose documents were compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flat_tokens.manifest import CLUSTER
from flat_tokens.stores.store import StoredObject
from tasks.assemble.choice import not_duplicate
from tasks.models import TEXT_BYTES
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.opening import open_shard, read_texts
from tasks.parts.part import ShardPart
from tasks.parts.reserve import NOTHING_RESERVED, Reserved, ReserveWriter


class Reserve(NamedTuple):
    """The share of each part, in the parts' order, and the objects of the reserve."""

    shares: list[Reserved]
    objects: list[StoredObject]


def write_reserve(target: Target, parts: Sequence[ShardPart], columns: Mapping[str, str]) -> Reserve:
    """Write the reserve of a version that is made of *parts*, with kept *columns* of these kinds. Slices of the same key have one
    share. A version without compared documents has no reserve.
    """
    texts = dict.fromkeys(name for part in parts for name in part.shard.texts)
    if not texts:
        return Reserve([NOTHING_RESERVED] * len(parts), [])
    names, shares = (TEXT_BYTES, *texts), dict[str, Reserved]()
    kinds = {name: kind for name, kind in columns.items() if name != CLUSTER}
    settings: dict[str, Any] = {"masked": target.masked, "has_split_keys": target.has_split_keys, "columns": kinds}
    with ReserveWriter(target.root, target.name, names, **settings) as writer:
        for part in parts:
            shard = part.shard
            if shard.key not in shares:
                documents = open_shard(target.root, shard, f"{DOCUMENTS}/row")
                known = {name: read_texts(target.root, shard, name) for name in names}
                left_out = ~not_duplicate(part, target.store)
                shares[shard.key] = writer.append(documents, left_out, known, has_columns=bool(shard.columns))
    return Reserve([shares[part.shard.key] for part in parts], writer.objects)
