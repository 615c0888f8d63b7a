"""Reading ``seq_starts``: all of it, or the entries of some documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

SEQUENCES_AT_A_TIME = 1 << 16


def walk(state: int, successors: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The states from *state* on, up to the first that has no successor in the array."""
    path = []
    successor = successors.data
    while state < len(successor):
        path.append(state)
        state = successor[state]
    return np.array(path, np.int64)


def read_starts(tokens: FlatTokens) -> Iterator[npt.NDArray[np.int64]]:
    """All of ``seq_starts``, checked, some sequences at a time: int64[n + 1]; the last entry is the first of the next array."""
    for start in range(0, tokens.seq_count, SEQUENCES_AT_A_TIME):
        entries = tokens.seq_starts.read(start, min(start + SEQUENCES_AT_A_TIME, tokens.seq_count) + 1)
        wrong = np.flatnonzero((entries[1:] < entries[:-1]) | (entries[1:] > np.uint64(tokens.token_count)))
        if wrong.size:
            raise ValueError(
                f"{tokens.store.url}: seq_starts goes from {entries[wrong[0]]} to {entries[wrong[0] + 1]} at {start + wrong[0]}, "
                f"but there are {tokens.token_count} tokens. The dataset is damaged: run flat_tokens.verify on it."
            )
        yield entries.astype(np.int64)


Int64s: TypeAlias = npt.NDArray[np.int64]


def end_to_end(lengths: Iterable[Int64s]) -> Iterator[Int64s]:
    """Arrays of lengths -> arrays of starts, int64[n + 1] as `read_starts` gives them, of documents laid end to end."""
    base = 0
    for window in lengths:
        positions = running_sums(window) + base
        yield positions
        base = int(positions[-1])


def document_bounds(tokens: FlatTokens, first: Int64s, stop: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Starts and lengths of the documents in ranges ``first[r]:stop[r]``, and where each range ends among them: one read.

    int64[n], int64[n], int64[ranges + 1]. ValueError if the entries are not in order.
    """
    at = running_sums(stop - first + 1)
    entries = np.empty(at[-1], np.uint64)
    tokens.seq_starts.gather(first, stop - first + 1, entries, at[:-1])
    within = np.ones(len(entries), bool)
    within[at[1:] - 1] = False  # a range's last entry is where its last document ends
    is_first = np.flatnonzero(within)
    starts, ends = entries[is_first], entries[is_first + 1]
    if ((starts > ends) | (ends > np.uint64(tokens.token_count))).any():
        raise ValueError(f"{tokens.store.url}: seq_starts is not in order. The dataset is damaged: run flat_tokens.verify on it.")
    return starts.astype(np.int64), (ends - starts).astype(np.int64), at - np.arange(len(at))


def running_sums(counts: npt.NDArray[np.integer]) -> Int64s:
    """Sums of the counts before each one, then of all: int64[n + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def ranges(first: Int64s, counts: Int64s) -> Int64s:
    """``first[r]``, ``first[r] + 1``, ... of every range r, ``counts[r]`` numbers each."""
    return np.arange(counts.sum()) + np.repeat(first - running_sums(counts)[:-1], counts)
