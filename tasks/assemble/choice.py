"""The choice: which documents of a part go to a split, and which are left out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import Bools, IntPair, UInt64s
from flat_tokens.manifest import SPLITS
from tasks.models import ALL_SPLITS, LEFT_OUT, Split
from tasks.output.target import SplitRule, Target
from tasks.parts.documents import Documents
from tasks.parts.input import choose
from tasks.parts.opening import open_part
from tasks.parts.part import InputPart, Part, ShardPart
from tasks.rows import KEY, REASON, SPLIT_KEY

SplitCounts = Mapping[Split, IntPair]
"""Sequences and tokens of a part, by split."""


def split_numbers(all_in: Split | None, rule: SplitRule, split_keys: UInt64s) -> npt.NDArray[np.int8]:
    """The split of each document of a slice, by its number in ALL_SPLITS: int8[n]. *all_in*: the split of all of them, where
    their file has one.
    """
    if all_in is not None:
        return np.full(len(split_keys), ALL_SPLITS.index(all_in), np.int8)
    return rule.numbers(split_keys)


def chosen(part: Part, documents: Documents, split: Split, target: Target) -> Bools:
    """Which documents of a part go to a split: bool[n]."""
    if isinstance(part, InputPart):
        return choose(part, documents, target.selection, target)[0]
    if not isinstance(part, ShardPart):
        return np.ones(len(documents), bool)
    numbers = split_numbers(part.all_in, target.rule, documents.fact(SPLIT_KEY))
    if part.repeats or part.shard.left_out:
        numbers[documents.fact(REASON) > 0] = ALL_SPLITS.index(LEFT_OUT)
    mine: Bools = numbers == ALL_SPLITS.index(split)
    return mine


def count_part(part: Part, target: Target) -> SplitCounts:
    """Count a part's sequences and tokens of each split. Parts of inputs and buckets were counted when they were made."""
    counts = dict.fromkeys(ALL_SPLITS, (0, 0))
    if not isinstance(part, ShardPart):
        return {**counts, part.split: (part.seq_count, part.token_count)}
    seqs, tokens = part.counts.written, part.counts.token_count
    counts[LEFT_OUT] = part.shard.seq_count - seqs, part.shard.token_count - tokens
    if part.all_in is not None or (target.rule.fraction == 0 and target.rule.splits == SPLITS):
        return {**counts, part.all_in or "train": (seqs, tokens)}
    documents = open_part(part, target, KEY, SPLIT_KEY)
    for split in target.rule.splits[1:]:
        mine = chosen(part, documents, split, target)
        counts[split] = int(mine.sum()), int(documents.lengths[mine].sum())
        seqs, tokens = seqs - counts[split][0], tokens - counts[split][1]
    return {**counts, "train": (seqs, tokens)}
