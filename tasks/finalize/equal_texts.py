"""Equal texts on two sides of a split: what a build says of them in its summary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flat_tokens.annotations import UInt64s
from flat_tokens.keys import A, concatenated, mix
from flat_tokens.reader import open_split
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store
from flat_tokens.tools.diff import token_digests
from tasks.models import Split

DOCUMENTS_AT_ONCE = 1 << 20


def equal_texts_apart(store: Store, splits: tuple[Split, ...]) -> int:
    """How many documents outside train have the text of a document in another split: the same tokens, at least one. Train is
    looked at if a document has the length, the first and the last token of one outside of it.
    """
    train, *held_out = (open_split(Store.at(store.url) / split) for split in splits)  # mapped, as readers have them
    digests = [concatenated(token_digests(split)) for split in held_out]
    sketches = [concatenated(_sketches(split)) for split in held_out]
    lengths = np.unique(np.concatenate([np.diff(split.seq_starts.read(0, split.seq_count + 1)) for split in held_out]))
    elsewhere = [concatenated(_digests_of(train, lengths, np.unique(np.concatenate(sketches))))]
    count = 0
    for number, mine in enumerate(digests):
        others = [*elsewhere, *(other for k, other in enumerate(digests) if k != number)]
        is_there = np.isin(mine, np.concatenate(others)) & (sketches[number] != EMPTY)
        count += int(is_there.sum())
    return count


EMPTY = np.uint64(0)
"""The sketch of a document without tokens."""


def _sketches(split: FlatTokens, wanted: UInt64s | None = None) -> Iterator[UInt64s]:
    """64 bits of the length, the first and the last token of each document, some documents at a time; EMPTY for those that have
    not one of the *wanted* lengths.
    """
    for start in range(0, split.seq_count, DOCUMENTS_AT_ONCE):
        starts = split.seq_starts.read(start, min(start + DOCUMENTS_AT_ONCE, split.seq_count) + 1)
        lengths, found = np.diff(starts), np.full(len(starts) - 1, EMPTY)
        some = lengths > 0
        if wanted is not None:
            some &= np.isin(lengths, wanted)
        first, last = (_tokens(split, places) for places in (starts[:-1][some], starts[1:][some] - np.uint64(1)))
        # A start is marked in the lowest bit, as is the last token of a document that has no other.
        found[some] = (mix((lengths[some] * A) ^ (first >> np.uint64(1))) ^ mix(last >> np.uint64(1))) | np.uint64(1)
        yield found


def _tokens(split: FlatTokens, places: UInt64s) -> UInt64s:
    """The stored tokens at some places. Nothing around them is read."""
    found = np.empty(len(places), np.uint32)
    numbers = np.arange(len(places))
    split.encoded_tokens.gather(places.astype(np.int64), np.ones(len(places), np.int64), found, numbers)
    return found.astype(np.uint64)


def _digests_of(split: FlatTokens, lengths: UInt64s, wanted: UInt64s) -> Iterator[UInt64s]:
    """The digests of the tokens of documents with one of the *wanted* sketches, and so one of the *lengths*."""
    first = 0
    for sketches in _sketches(split, lengths):
        chosen = np.flatnonzero(np.isin(sketches, wanted) & (sketches != EMPTY)) + first
        first += len(sketches)
        if len(chosen):
            yield from token_digests(split.select(indices=chosen))
