"""Fill in the middle: documents whose middle is moved to their end when they are read.

A document of n tokens is cut at two places into prefix, middle and suffix, and has three tokens more:

- PSM: ``prefix_id`` prefix ``suffix_id`` suffix ``middle_id`` middle
- SPM: ``prefix_id`` ``suffix_id`` suffix ``middle_id`` prefix middle

The key of a document decides whether it is one of these, its key and the epoch decide the cuts. So its length is the same in
every epoch, and the rows of a view have the same documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flat_tokens.array_types import AnyArray, Bools, Int64s, UInt64s
from flat_tokens.arrays.stored import StoredArray, read_gathered
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.options import whole_number
from flat_tokens.rows.lookup import stored_keys
from flat_tokens.rows.shuffle import derive_keys, extended_keys
from flat_tokens.rows.views import ranges, read_starts, running_sums
from flat_tokens.stores.cached import Unit

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

SENTINELS = 3
MIN_TOKENS = 3
"""Documents of fewer tokens have no prefix, middle and suffix: they stay as they are."""
CHOSEN, ORDER, CUTS = 7, 8, 9
"""Purposes of random numbers, in addition to those of loaders."""
MAX_INSIDE = 4
"""A character has at most this many bytes, so that at most one token fewer in a row begins inside it."""


@dataclass(frozen=True)
class FillInMiddle:
    """An option of views: documents are read with their middle at the end.

    *rate*: the share of the documents, of at least three tokens, that are read so. *spm_rate*: the share of these, others in each
    epoch, that begin with the suffix. *prefix*, *middle*, *suffix*: the ids of the tokens before each part. *inside*: ids of
    tokens that begin inside a character (``Vocabulary.inside_characters()``); no cut is before one of these. Cuts are drawn
    evenly of all places, two for a document, in each epoch again.

    The key of a document is that of its record, of a dataset without records its number in the split.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    inside: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} of FillInMiddle is {value!r}, but it is a number from 0 to 1")
        for name in ("prefix", "middle", "suffix"):
            if not 0 <= whole_number(name, getattr(self, name)) <= MAX_TOKEN_ID:
                raise ValueError(f"{name} of FillInMiddle is {getattr(self, name)}, but token ids are 0 to {MAX_TOKEN_ID}")
        if not 0 <= whole_number("seed", self.seed) < 1 << 64:
            raise ValueError(f"seed of FillInMiddle is {self.seed}, but it is from 0 to 2**64 - 1")
        object.__setattr__(self, "inside", tuple(sorted({whole_number("inside", number) for number in self.inside})))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "inside": list(self.inside)}


def with_middle(tokens: FlatTokens, fim: FillInMiddle | dict[str, Any] | None) -> FlatTokens:
    """The split of documents that are read so. One pass over ``seq_starts`` and the keys, 24 bytes a document in memory."""
    if fim is None:
        return tokens
    if isinstance(fim, dict):  # of a ledger
        fim = FillInMiddle(**fim)
    if not isinstance(fim, FillInMiddle):
        raise TypeError(f"fim is {fim!r}, but it is a FillInMiddle")
    starts = _MiddleStarts.of(tokens, fim)
    encoded = _MiddleTokens(tokens.encoded_tokens, tokens.encoded_tokens, starts, fim, 0)
    made: Any = {"seq_starts": starts, "encoded_tokens": encoded}
    if tokens.loss_mask is not None:
        made["loss_mask"] = _MiddleTokens(tokens.loss_mask, tokens.encoded_tokens, starts, fim, 0)
    return replace(tokens, max_token_id=max(tokens.max_token_id, fim.prefix, fim.middle, fim.suffix), **made)


class _MiddleStarts:
    """``seq_starts`` of the documents, in memory, and what decides their cuts."""

    def __init__(self, stored: StoredArray, entries: Int64s, before: Int64s, keys: UInt64s, seed: int) -> None:
        self.stored, self.store, self.length = stored, stored.store, len(entries)
        self.entries, self.before, self.keys = entries, before, keys
        self.roots = np.stack([derive_keys(seed, CUTS, 0), derive_keys(seed, CUTS, 1), derive_keys(seed, ORDER)])
        """The beginning of the random numbers of all documents: uint64[3, 1], of two cuts and of the order."""

    @classmethod
    def of(cls, tokens: FlatTokens, fim: FillInMiddle) -> _MiddleStarts:
        keys = _keys_of(tokens)
        entries = np.concatenate([np.zeros(1, np.int64), *(part[1:] for part in read_starts(tokens))])
        drawn = (derive_keys(fim.seed, CHOSEN, keys) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        is_moved = (drawn < fim.rate) & (np.diff(entries) >= MIN_TOKENS)
        before = running_sums(is_moved.view(np.uint8))
        return cls(tokens.seq_starts, entries + SENTINELS * before, before, keys, fim.seed)

    def read(self, start: int, stop: int) -> UInt64s:
        return self.entries[start:stop].astype(np.uint64)

    def take(self, indices: Int64s) -> UInt64s:
        return self.entries[indices].astype(np.uint64)

    def gather(self, starts: Int64s, lengths: Int64s, out: UInt64s, at: Int64s) -> None:
        out[ranges(at, lengths)] = self.entries[ranges(starts, lengths)]


class _MiddleTokens:
    """``encoded_tokens`` of the documents as they are read in an epoch, or their ``loss_mask``, in which the added tokens are 0.

    *array*: what is read. *tokens*: the stored tokens, which cuts must not part within a character.
    """

    def __init__(self, array: StoredArray, tokens: StoredArray, starts: _MiddleStarts, fim: FillInMiddle, epoch: int) -> None:
        self._array, self._tokens, self._starts, self.fim, self._epoch = array, tokens, starts, fim, epoch
        self.length, self.store, self.numpy_dtype = int(starts.entries[-1]), array.store, array.numpy_dtype

    def of_epoch(self, epoch: int) -> _MiddleTokens:
        return _MiddleTokens(self._array, self._tokens, self._starts, self.fim, epoch)

    read = read_gathered

    def take(self, indices: Int64s) -> AnyArray:
        found = np.empty(len(indices), self.numpy_dtype)
        self.gather(indices, np.ones(len(indices), np.int64), found, np.arange(len(indices)))
        return found

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        _, stored, counts, _, _ = self._parts(starts, lengths, np.zeros(len(starts), np.int64))
        return self._array.units_of(stored, counts)

    def gather(self, starts: Int64s, lengths: Int64s, out: AnyArray, at: Int64s) -> None:
        places, stored, counts, moved, sentinels = self._parts(starts, lengths, at)
        self._array.gather(stored, counts, out, places)
        if self._array is not self._tokens:
            for where in sentinels:
                out[where] = 0
            return
        out[moved] &= np.uint32(0xFFFFFFFE)  # a document's first token is no longer its start
        prefix, suffix, middle = sentinels
        out[prefix] = self.fim.prefix * 2 + 1
        out[suffix], out[middle] = self.fim.suffix * 2, self.fim.middle * 2

    def _parts(
        self, starts: Int64s, lengths: Int64s, at: Int64s
    ) -> tuple[Int64s, Int64s, Int64s, Int64s, tuple[Int64s, Int64s, Int64s]]:
        """Ranges as parts of what is stored: the place in *out*, the stored range's start and length of each; and the places of
        first tokens that are moved, and of each of the three added tokens.
        """
        entries, before = self._starts.entries, self._starts.before
        # range -> its documents
        first = np.searchsorted(entries, starts, side="right") - 1
        counts = np.where(lengths > 0, np.searchsorted(entries, starts + lengths) - first, 0)
        of, document = np.repeat(np.arange(len(starts)), counts), ranges(first, counts)
        begin, moved_before = entries[document], before[document]
        is_moved = before[document + 1] > moved_before
        stored = begin - SENTINELS * moved_before
        sizes = entries[document + 1] - begin - SENTINELS * is_moved
        low, high, suffix_first = self._cuts(document, sizes, stored, is_moved)
        # A document is read as what is before its middle, or nothing where the suffix is first; the suffix; the rest up to it:
        # the place of each in the document as it is read, its place in the stored one, its length.
        before_suffix, suffix = np.where(suffix_first, 0, low), sizes - high
        where = np.stack([is_moved, before_suffix + 2 * is_moved, before_suffix + suffix + SENTINELS * is_moved])
        source = np.stack([np.zeros_like(low), high, before_suffix])
        size = np.stack([before_suffix, suffix, high - before_suffix])
        start = starts[of] - begin
        stop, shift = start + lengths[of], at[of] - start  # place in the document -> place in out
        clipped = np.maximum(where, start)
        count = np.minimum(where + size, stop) - clipped
        some = np.flatnonzero(count > 0)
        parts = ((clipped + shift).reshape(-1)[some], (stored + source + clipped - where).reshape(-1)[some])
        # the document's first token, and the three that are added
        first_token = np.where(before_suffix > 0, 1, np.where(high > 0, where[2], where[1]))
        places = np.stack([first_token, np.zeros_like(low), before_suffix + 1, before_suffix + suffix + 2])
        there = is_moved & (places >= start) & (places < stop)
        moved, *sentinels = (place[its] for place, its in zip(places + shift, there, strict=True))
        return (*parts, count.reshape(-1)[some], moved, (sentinels[0], sentinels[1], sentinels[2]))

    def _cuts(self, document: Int64s, sizes: Int64s, stored: Int64s, is_moved: Bools) -> tuple[Int64s, Int64s, Bools]:
        """Where the middle of each document begins and ends, and whether its suffix comes first. A document that is read as it
        is stored is all prefix.
        """
        drawn = extended_keys(self._starts.roots, self._starts.keys[document], self._epoch)  # two cuts, and an order
        # a place from 0 to n, both included
        places = _scaled(drawn[:2] >> np.uint64(33), sizes + 1)
        cuts = np.where(is_moved, np.stack([np.minimum(*places), np.maximum(*places)]), sizes)
        if self.fim.inside:
            cuts = self._between_characters(cuts, sizes, stored, is_moved)
        order = (drawn[2] >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return cuts[0], cuts[1], is_moved & (order < self.fim.spm_rate)

    def _between_characters(self, cuts: Int64s, sizes: Int64s, stored: Int64s, is_moved: Bools) -> Int64s:
        """The cuts, each before the nearest token up to it that begins a character."""
        inside, moving = np.array(self.fim.inside, np.int64), np.flatnonzero(is_moved)
        for cut in cuts:
            open_ones = moving[(cut[moving] > 0) & (cut[moving] < sizes[moving])]
            for _ in range(MAX_INSIDE - 1):
                ids = (self._tokens.take(stored[open_ones] + cut[open_ones]) >> np.uint32(1)).astype(np.int64)
                open_ones = open_ones[np.isin(ids, inside)]
                cut[open_ones] -= 1
                open_ones = open_ones[cut[open_ones] > 0]
                if not open_ones.size:
                    break
        return cuts


def _scaled(bits: UInt64s, counts: Int64s) -> Int64s:
    """Numbers of 31 bits -> numbers below *counts*, evenly: int64[n]."""
    wanted = counts.view(np.uint64)
    high, low = wanted >> np.uint64(31), wanted & np.uint64((1 << 31) - 1)
    return (high * bits + (low * bits >> np.uint64(31))).view(np.int64)


def _keys_of(tokens: FlatTokens) -> UInt64s:
    """The key of each document, of a dataset without records its number in the split: uint64[seq_count]."""
    try:
        stored = stored_keys(tokens)
    except FileNotFoundError:
        numbers = np.arange(tokens.seq_count) if tokens.numbers is None else tokens.numbers
        return numbers.astype(np.uint64)
    keys: UInt64s = stored.read(0, stored.length) if tokens.numbers is None else stored.take(tokens.numbers)
    if len(keys) != tokens.seq_count:
        raise ValueError(
            f"{tokens.store.url}: has {len(keys)} keys of {tokens.seq_count} documents. Run flat_tokens.verify on it."
        )
    return keys
