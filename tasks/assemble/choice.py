"""The choice: which documents of a part go to a split, and which to none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.manifest import DUPLICATE
from flat_tokens.stores.store import Store
from tasks.models import Split
from tasks.output.target import SplitRule, Target
from tasks.parts.documents import Documents
from tasks.parts.input import choose
from tasks.parts.opening import open_part
from tasks.parts.part import InputPart, Part, ShardPart


class SplitCounts(NamedTuple):
    """Sequences and tokens of a part, by split."""

    train_seqs: int
    train_tokens: int
    validation_seqs: int
    validation_tokens: int


def in_split(split: Split, all_in: Split | None, rule: SplitRule, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which documents of a slice belong to *split*: bool[n]. *all_in*: the split of all of them, where their file has one."""
    if all_in is not None:
        return np.full(len(keys), all_in == split)
    drawn = rule.draws(keys)
    return drawn if split == "validation" else ~drawn


def not_duplicate(part: ShardPart, version: Store) -> npt.NDArray[np.bool_]:
    """Which documents of a shard are not left out as copies: bool[n]. ValueError where the version's list has changed."""
    stay = np.ones(part.shard.written, bool)
    if part.copies is not None:
        stored = part.copies.stored
        data = version.read(stored.key)
        if not stored.is_of(data):
            raise ValueError(f"{version.path(stored.key)}: is not what was written. Run the build again.")
        stay[np.frombuffer(data, DUPLICATE)["document"].astype(np.int64)] = False
    return stay


def chosen(part: Part, documents: Documents, split: Split, target: Target) -> npt.NDArray[np.bool_]:
    """Which documents of a part go to a split: bool[n]."""
    if isinstance(part, InputPart):
        return choose(part, documents, target.selection, target)[0]
    if not isinstance(part, ShardPart):
        return np.ones(len(documents.keys), bool)
    mine = in_split(split, part.all_in, target.rule, documents.keys)
    return mine if part.copies is None else mine & not_duplicate(part, target.store)


def count_part(part: Part, target: Target) -> SplitCounts:
    """Count a part's sequences and tokens of each split. Parts of inputs and buckets were counted when they were made."""
    if not isinstance(part, ShardPart):
        here = (part.seq_count, part.token_count)
        return SplitCounts(*here, 0, 0) if part.split == "train" else SplitCounts(0, 0, *here)
    here = (part.counts.written, part.counts.token_count)
    if part.all_in is not None or target.rule.fraction == 0:
        return SplitCounts(0, 0, *here) if part.all_in == "validation" else SplitCounts(*here, 0, 0)
    documents = open_part(part, target)
    mine = chosen(part, documents, "validation", target)
    seqs, tokens = int(mine.sum()), int(documents.lengths[mine].sum())
    return SplitCounts(here[0] - seqs, here[1] - tokens, seqs, tokens)
