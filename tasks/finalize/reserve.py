"""Writing the reserve of a version whose documents were compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flat_tokens.stores.store import StoredObject
from tasks.assemble.choice import not_duplicate
from tasks.output.target import Target
from tasks.parts.opening import open_shard
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
    texts = dict.fromkeys(name for part in parts for name in part.shard.of_texts)
    if not texts:
        return Reserve([NOTHING_RESERVED] * len(parts), [])
    shares = dict[str, Reserved]()
    with ReserveWriter(target, texts, columns) as writer:
        for part in parts:
            shard = part.shard
            if shard.key not in shares:
                documents, left_out = open_shard(target.root, shard, *shard.facts), ~not_duplicate(part, target.store)
                shares[shard.key] = writer.append(documents, left_out, has_columns=bool(shard.columns))
    return Reserve([shares[part.shard.key] for part in parts], writer.objects)
