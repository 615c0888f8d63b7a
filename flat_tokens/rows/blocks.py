"""Blocks of tokens that start where sequences do, by Modalities' Megatron rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flat_tokens.rows.frameworks import Framework
from flat_tokens.rows.packed import PackedTokens, gathered
from flat_tokens.rows.starts import read_starts, walk
from flat_tokens.rows.views import SplitView, checked_length

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens


class BlocksView(SplitView):
    """Blocks of *length* tokens that start where sequences do, by Modalities' Megatron rule: one read a row.

    Sequences fill a block one after another. One that goes beyond its end opens the next block, again from its first
    token; a longer one than a block does not, and blocks then go on where the last ended. A last block that is not full
    is dropped. ``starts``: int64[n], the first token of each block, computed from ``seq_starts`` alone. ValueError for
    a length below 1.
    """

    row_type = PackedTokens

    def __init__(
        self, tokens: FlatTokens, length: int, *, fields: Sequence[str] | None = None, framework: Framework = "numpy"
    ) -> None:
        self.length = checked_length("length", length)
        self.starts = block_starts(tokens, self.length)
        super().__init__(tokens, len(self.starts), fields, framework)

    def _read(self, i: int) -> PackedTokens:
        start = int(self.starts[i])
        return PackedTokens(self.tokens.encoded_tokens.read(start, start + self.length))

    def _read_many(self, indices: npt.NDArray[np.int64]) -> PackedTokens:
        return gathered(self.tokens, self.starts[indices], self.length)


def block_starts(tokens: FlatTokens, length: int) -> npt.NDArray[np.int64]:
    """The first token of every block of *length* tokens by Modalities' Megatron rule: int64[n], increasing.

    Reads ``seq_starts`` once, some entries at a time, and no tokens. ValueError if its entries are not in order.
    """
    # A sequence counts in at most two blocks, and the tokens that count in a block are at least its length.
    found = np.empty(min(tokens.seq_count, 2 * tokens.token_count // length), np.int64)
    found_count = 0
    block, filled = 0, 0  # the open block's first token, and how many tokens sequences have put into it
    for entries in read_starts(tokens):
        # The state 2 * j + opens: sequence j has filled a block (and opens the next one, or does not). The next
        # block counts from where j starts or ends, so that every state has one successor, whatever came before it.
        count = len(entries) - 1
        counts_from = np.stack([entries[1:], entries[:-1]], axis=1).reshape(-1)
        successors = _filled_next(entries, counts_from, np.repeat(np.arange(1, count + 1), 2), length)
        first = _filled_next(entries, entries[:1] - filled, np.zeros(1, np.int64), length)
        path = walk(int(first[0]), successors)
        # A sequence that opens a block says where that starts; other blocks follow the one before.
        opens = np.concatenate([[True], path % 2 == 1])
        starts = np.concatenate([[block], counts_from[path]])
        number = np.arange(len(starts))
        opened = np.maximum.accumulate(np.where(opens, number, 0))
        starts = starts[opened] + (number - opened) * length
        found[found_count : found_count + len(path)] = starts[:-1]
        found_count += len(path)
        filled = int(entries[-1] - (counts_from[path[-1]] if len(path) else entries[0] - filled))
        block = int(starts[-1])
    found.resize(found_count, refcheck=False)
    return found


def _filled_next(
    entries: npt.NDArray[np.int64], counts_from: npt.NDArray[np.int64], not_before: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.int64]:
    """The states in which blocks become full whose tokens count from *counts_from*, by sequences from *not_before* on.

    int64[n]; ``2 * (len(entries) - 1)`` where none of these sequences fills the block.
    """
    count = len(entries) - 1
    sequence = np.maximum(np.searchsorted(entries[1:], counts_from + length), not_before)
    there = np.minimum(sequence, count - 1)
    exact = entries[there + 1] - counts_from == length
    too_long = entries[there + 1] - entries[there] > length
    return np.where(sequence < count, 2 * there + ~(exact | too_long), 2 * count)
