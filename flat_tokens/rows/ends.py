"""Documents with a first token (BOS) or an end-of-text token (EOS) that are not stored: arrays that have them when they are read.

With e ends a document, document d is shifted by those of the documents before it: it begins at ``seq_starts[d] + d * e``.
Every view of these arrays is that of a dataset in which the tokens are stored.
"""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import AnyArray, Int64s, UInt8s, UInt64s
from flat_tokens.arrays.stored import StoredArray, read_gathered
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.options import true_or_false, whole_number
from flat_tokens.rows.views import ranges, read_starts, running_sums
from flat_tokens.stores.cached import Unit

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

ENTRIES_PER_SAMPLE = 64


def with_ends(tokens: FlatTokens, bos: int | None, eos: int | None, loss_mask: bool = False) -> FlatTokens:
    """The split with *bos* before and *eos* after each document, the empty ones too. Makes one pass over ``seq_starts``.
    With *loss_mask* it has a mask in any case: all tokens count where it has none.

    ValueError for ids outside 0 to 2**31 - 1.
    """
    if true_or_false("loss_mask", loss_mask) and tokens.loss_mask is None:
        counting: Any = _AllCount
        whole = with_ends(tokens, bos, eos)
        return replace(whole, loss_mask=counting(whole.encoded_tokens))
    if bos is None and eos is None:
        return tokens
    for name, value in (("bos", bos), ("eos", eos)):
        if value is not None and not 0 <= whole_number(name, value) <= MAX_TOKEN_ID:
            raise ValueError(f"{name} is {value}, but token ids are 0 to {MAX_TOKEN_ID}")
    starts = _EndMarkedStarts(tokens.seq_starts, (bos is not None) + (eos is not None))
    largest = max(tokens.max_token_id, *(end for end in (bos, eos) if end is not None))
    encoded = _EndMarkedTokens(tokens, starts, bos, eos)
    made: Any = {"seq_starts": starts, "encoded_tokens": encoded, "max_token_id": largest}
    if tokens.loss_mask is not None:
        made["loss_mask"] = _Mask(encoded)
    return replace(tokens, **made)


def ends_of(tokens: FlatTokens) -> dict[str, int]:
    """The ends that documents have next to what is stored: ``bos``, ``eos``, or none."""
    encoded: Any = tokens.encoded_tokens
    return dict(encoded.ends) if isinstance(encoded, _EndMarkedTokens) else {}


class _EndMarkedStarts:
    """``seq_starts`` of documents with *extra* tokens more."""

    def __init__(self, stored: StoredArray, extra: int) -> None:
        self._stored, self._extra = stored, extra
        self.length, self.store = stored.length, stored.store

    def read(self, start: int, stop: int) -> UInt64s:
        entries: UInt64s = self._stored.read(start, stop)
        return entries + np.arange(start, stop, dtype=np.uint64) * np.uint64(self._extra)

    def take(self, indices: Int64s) -> UInt64s:
        entries: UInt64s = self._stored.take(indices)
        return entries + indices.astype(np.uint64) * np.uint64(self._extra)

    def gather(self, starts: Int64s, lengths: Int64s, out: UInt64s, at: Int64s) -> None:
        self._stored.gather(starts, lengths, out, at)
        out[ranges(at, lengths)] += ranges(starts, lengths).astype(np.uint64) * np.uint64(self._extra)


class _EndMarkedTokens:
    """``encoded_tokens`` of documents with a first token, an end-of-text token, or both."""

    numpy_dtype: npt.DTypeLike = np.uint32

    def __init__(self, tokens: FlatTokens, starts: _EndMarkedStarts, bos: int | None, eos: int | None) -> None:
        self._tokens, self._starts, self._array = tokens, starts, tokens.encoded_tokens
        self.ends = {name: index(end) for name, end in (("bos", bos), ("eos", eos)) if end is not None}
        self.length, self.store = tokens.token_count + tokens.seq_count * len(self.ends), tokens.encoded_tokens.store
        self.fim = getattr(tokens.encoded_tokens, "fim", None)
        samples, first = [np.empty(0, np.int64)], 0
        for entries in read_starts(tokens):
            shifted = entries + np.arange(first, first + len(entries)) * len(self.ends)
            samples.append(shifted[-first % ENTRIES_PER_SAMPLE : -1 : ENTRIES_PER_SAMPLE])
            first += len(entries) - 1
        self._samples = np.concatenate(samples)

    def of_epoch(self, epoch: int) -> Self:
        """The same of documents that are filled in the middle, as they are read in an epoch."""
        array: Any = self._array
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__, _array=array.of_epoch(epoch))
        return found

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        """As of stored tokens, and of up to so many around the ranges as lie between two samples."""
        samples, added = (
            np.searchsorted(self._samples, [starts, starts + lengths], side="right") - 1,
            ENTRIES_PER_SAMPLE * len(self.ends),
        )
        low = np.maximum(starts - (samples[0] + 1) * added, 0)
        high = np.minimum(starts + lengths - np.maximum(samples[1], 0) * added, self._tokens.token_count)
        return self._array.units_of(low, high - low)

    read = read_gathered

    def gather(self, starts: Int64s, lengths: Int64s, out: AnyArray, at: Int64s) -> None:
        """As of stored tokens: one read of entries a range, and one of tokens."""
        stops, laid = starts + lengths, running_sums(lengths)
        # range -> its documents, from a sample before it to one after it
        first = np.maximum(np.searchsorted(self._samples, starts, side="right") - 1, 0) * ENTRIES_PER_SAMPLE
        last = np.minimum(np.searchsorted(self._samples, stops) * ENTRIES_PER_SAMPLE, self._starts.length - 1)
        counts = np.where(lengths > 0, last - first + 1, 0)
        entries, splits = np.empty(counts.sum(), np.uint64), running_sums(counts)
        self._starts.gather(first, counts, entries, splits[:-1])
        inner = np.ones(len(entries), bool)
        inner[splits[1:][counts > 0] - 1] = False  # a range's last entry is where its last document ends
        at_begin = np.flatnonzero(inner)
        begin, end = entries[at_begin].astype(np.int64), entries[at_begin + 1].astype(np.int64)
        of, number = np.repeat(np.arange(len(starts)), np.maximum(counts - 1, 0)), ranges(first, np.maximum(counts - 1, 0))
        start, stop = starts[of], stops[of]
        shift = laid[of] - start  # place in the split -> place in all ranges laid end to end
        laid_out, is_stored = np.empty(laid[-1], self.numpy_dtype), np.ones(laid[-1], bool)
        for name, places in (("bos", begin), ("eos", end - 1)):
            if name in self.ends:
                here = np.flatnonzero((places >= start) & (places < stop))
                laid_out[(places + shift)[here]] = self._end(name, begin[here], end[here], number[here])
                is_stored[(places + shift)[here]] = False
        # document -> its stored tokens in the range: those of a range stand together
        low = np.maximum(begin + ("bos" in self.ends), start)
        held = np.maximum(np.minimum(end - ("eos" in self.ends), stop) - low, 0)
        holding = np.flatnonzero(held)
        if holding.size:
            _, firsts = np.unique(of[holding], return_index=True)
            reads = np.add.reduceat(held[holding], firsts)
            stored_at = (low - number * len(self.ends) - ("bos" in self.ends))[holding[firsts]]
            laid_out[is_stored] = self._stored(stored_at, reads)
        for place, begun, ended in zip(at.tolist(), laid[:-1].tolist(), laid[1:].tolist(), strict=True):
            out[place : place + ended - begun] = laid_out[begun:ended]

    def _end(self, name: str, begin: Int64s, end: Int64s, number: Int64s) -> AnyArray:
        """The entries of one end of documents *number*, which are ``begin:end`` with their ends: dtype[n]."""
        return 2 * self.ends[name] + ((begin == end - 1) if name == "eos" else np.ones(len(begin), bool))

    def _stored(self, starts: Int64s, lengths: Int64s) -> AnyArray:
        """The entries of stored tokens, one range after the other."""
        tokens = np.empty(lengths.sum(), np.uint32)
        self._array.gather(starts, lengths, tokens, running_sums(lengths)[:-1])
        if "bos" in self.ends:
            tokens &= np.uint32(0xFFFFFFFE)  # the first token of a document is no longer its start
        return tokens


class _AllCount:
    """``loss_mask`` of tokens that have none: all count."""

    described: ClassVar[dict[str, bool]] = {"loss_mask": True}

    def __init__(self, tokens: StoredArray) -> None:
        self.length, self.store = tokens.length, tokens.store

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        return []

    def read(self, start: int, stop: int) -> UInt8s:
        return np.ones(stop - start, np.uint8)

    def gather(self, starts: Int64s, lengths: Int64s, out: UInt8s, at: Int64s) -> None:
        out[ranges(at, lengths)] = 1


class _Mask(_EndMarkedTokens):
    """``loss_mask`` of the same documents: no first token counts; an end-of-text token counts as the token before it does, and
    that of an empty document does not.
    """

    numpy_dtype = np.uint8

    def __init__(self, tokens: _EndMarkedTokens) -> None:
        self.__dict__.update(tokens.__dict__)
        assert self._tokens.loss_mask is not None
        self._array, self.store = self._tokens.loss_mask, self._tokens.loss_mask.store

    def _end(self, name: str, begin: Int64s, end: Int64s, number: Int64s) -> AnyArray:
        found = np.zeros(len(begin), np.uint8)
        if name == "eos":
            some = np.flatnonzero(end - begin > len(self.ends))
            # document, with its ends -> its last stored token
            found[some] = self._array.take((end - (number + 1) * len(self.ends) - 1)[some])
        return found

    def _stored(self, starts: Int64s, lengths: Int64s) -> AnyArray:
        mask = np.empty(lengths.sum(), np.uint8)
        self._array.gather(starts, lengths, mask, running_sums(lengths)[:-1])
        return mask
