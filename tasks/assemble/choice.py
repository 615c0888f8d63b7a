"""The choice: which documents of a part go to a split, and which are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import Bools, UInt64s
from flat_tokens.manifest import SPLITS
from tasks.models import ALL_SPLITS, LEFT_OUT, Split
from tasks.output.target import SplitRule, Target
from tasks.parts.documents import Documents
from tasks.parts.input import choose
from tasks.parts.opening import open_part
from tasks.parts.part import InputPart, Part, ShardPart
from tasks.rows import KEY, REASON, SPLIT_KEY


class SplitCounts(NamedTuple):
    """Sequences and tokens of a part, by split."""

    train_seqs: int
    train_tokens: int
    validation_seqs: int
    validation_tokens: int
    test_seqs: int = 0
    test_tokens: int = 0
    left_out_seqs: int = 0
    left_out_tokens: int = 0

    def of(self, split: Split) -> tuple[int, int]:
        """Sequences and tokens of a split."""
        first = 2 * ALL_SPLITS.index(split)
        return self[first], self[first + 1]

    @classmethod
    def all_in(cls, split: Split, seqs: int, tokens: int) -> SplitCounts:
        """The counts of a part that is in one split."""
        return cls.by_split({split: (seqs, tokens)})

    @classmethod
    def by_split(cls, counts: Mapping[Split, tuple[int, int]]) -> SplitCounts:
        """Sequences and tokens by split; none in the others."""
        return cls(*(count for split in ALL_SPLITS for count in counts.get(split, (0, 0))))


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
    if part.repeats:
        numbers[documents.fact(REASON) > 0] = ALL_SPLITS.index(LEFT_OUT)
    mine: Bools = numbers == ALL_SPLITS.index(split)
    return mine


def count_part(part: Part, target: Target) -> SplitCounts:
    """Count a part's sequences and tokens of each split. Parts of inputs and buckets were counted when they were made."""
    if not isinstance(part, ShardPart):
        return SplitCounts.all_in(part.split, part.seq_count, part.token_count)
    seqs, tokens = part.counts.written, part.counts.token_count
    left_out: dict[Split, tuple[int, int]] = {LEFT_OUT: (part.shard.written - seqs, part.shard.token_count - tokens)}
    if part.all_in is not None or (target.rule.fraction == 0 and target.rule.splits == SPLITS):
        return SplitCounts.by_split({part.all_in or "train": (seqs, tokens), **left_out})
    documents = open_part(part, target, KEY, SPLIT_KEY)
    held_out: dict[Split, tuple[int, int]] = {}
    for split in target.rule.splits[1:]:
        mine = chosen(part, documents, split, target)
        held_out[split] = int(mine.sum()), int(documents.lengths[mine].sum())
        seqs, tokens = seqs - held_out[split][0], tokens - held_out[split][1]
    return SplitCounts.by_split({"train": (seqs, tokens), **held_out, **left_out})
