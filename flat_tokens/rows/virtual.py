"""Splits whose arrays hold no tokens: chosen documents, documents with their middle at the end, and with a first or last token.

Every view of these arrays is that of a dataset in which the tokens are stored so.

*Selected*: chosen documents that are stored side by side are one *run* of tokens. Token t of the selection, in run r, is stored
at ``sources[r] + t - begins[r]``.

*Filled in the middle*: a document of n tokens is cut at two places into prefix, middle and suffix, and has three tokens more:

- PSM: ``prefix_id`` prefix ``suffix_id`` suffix ``middle_id`` middle
- SPM: ``prefix_id`` ``suffix_id`` suffix ``middle_id`` prefix middle

The key of a document decides whether it is one of these, its key and the epoch decide the cuts. So its length is the same in
every epoch, and the rows of a view have the same documents. Cuts between characters keep that length, too: what the parts have
more, as they are tokenized again, is taken off the end of the suffix. With a separator the fragments of a document are read so,
each by itself. Here a *fragment* is one of these, a separator, or a document without any.

*With ends*: with e ends a document, document d is shifted by those of the documents before it: it begins at
``seq_starts[d] + d * e``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import AnyArray, Bools, Int64s, JsonObject, UInt8s, UInt32s, UInt64s
from flat_tokens.arrays.stored import StoredArray, take_gathered
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.options import one_of, true_or_false, whole_number, whole_numbers
from flat_tokens.rows.documents import stored_fact
from flat_tokens.rows.orders import derive_keys, extended_keys
from flat_tokens.rows.views import all_starts, overlapped, ranges, read_starts, running_sums, settings_of, spread
from flat_tokens.stores.cached import Unit
from flat_tokens.stores.store import Store

if TYPE_CHECKING:
    from flat_tokens.rows.split import FlatTokens
    from flat_tokens.vocabulary import Vocabulary


NONE: Int64s = np.empty(0, np.int64)


class TokenPieces(NamedTuple):
    """Ranges of virtual tokens. Item ``stored[k]`` and the ``counts[k]`` from there on go to ``out[places[k]:]``: int64[n] each.

    ``moved``: places of stored tokens that no longer begin a document. ``added``: places of tokens that are not stored, with
    their ``values``. ``like``: the stored token that each of them counts as for the loss, -1 for one that does not count; None
    if none does.
    """

    stored: Int64s
    counts: Int64s
    places: Int64s
    moved: Int64s = NONE
    added: Int64s = NONE
    values: AnyArray = NONE
    like: Int64s | None = None


class VirtualTokens:
    """``encoded_tokens`` made from those of *array*, which is stored or virtual. `over` the array's mask, it is their
    ``loss_mask``.

    ``settings``: the arguments of a view that have them made, for JSON, with those of *array*.
    """

    def __init__(self, array: Any, length: int, settings: JsonObject) -> None:
        self.array, self.length, self.settings = array, length, settings | getattr(array, "settings", {})
        self.store, self.numpy_dtype = array.store, array.numpy_dtype

    def over(self, array: Any) -> Self:
        """These virtual tokens, made from another array."""
        found = copy(self)
        found.array, found.store, found.numpy_dtype = array, array.store, array.numpy_dtype
        return found

    def of_epoch(self, epoch: int) -> Self:
        """These virtual tokens as they are read in an epoch."""
        return self.over(self.array.of_epoch(epoch)) if isinstance(self.array, VirtualTokens) else self

    def pieces(self, starts: Int64s, lengths: Int64s, at: Int64s) -> TokenPieces:
        """The pieces of ranges, which go to the places *at*."""
        raise NotImplementedError

    def read(self, start: int, stop: int, out: AnyArray | None = None) -> AnyArray:
        """Items ``start:stop``, written to *out* if it is given."""
        found = np.empty(stop - start, self.numpy_dtype) if out is None else out
        self.gather(np.array([start]), np.array([stop - start]), found, np.zeros(1, np.int64))
        return found

    take = take_gathered

    def gather(self, starts: Int64s, lengths: Int64s, out: AnyArray, at: Int64s) -> None:
        pieces = self.pieces(starts, lengths, at)
        self.array.gather(pieces.stored, pieces.counts, out, pieces.places)
        if self.numpy_dtype == np.uint8:  # a mask
            out[pieces.added] = 0
            if pieces.like is not None:
                some = np.flatnonzero(pieces.like >= 0)
                out[pieces.added[some]] = self.array.take(pieces.like[some])
            return
        if len(pieces.moved):
            out[pieces.moved] &= np.uint32(0xFFFFFFFE)
        if len(pieces.added):
            out[pieces.added] = pieces.values

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        pieces = self.pieces(starts, lengths, np.zeros_like(starts))
        units: list[Unit] = self.array.units_of(pieces.stored, pieces.counts)
        return units


def with_arrays(tokens: FlatTokens, encoded: VirtualTokens, starts: Any, **changed: Any) -> FlatTokens:
    """The split with virtual arrays."""
    arrays: Any = {"encoded_tokens": encoded, "seq_starts": starts}
    if tokens.loss_mask is not None:
        arrays["loss_mask"] = encoded.over(tokens.loss_mask)
    return replace(tokens, **arrays, **changed)


DENSE = 8
"""Where at least one document in this many is chosen, all entries between may be in memory; else entries are read one by one."""


def selected(tokens: FlatTokens, indices: npt.ArrayLike) -> FlatTokens:
    """The split of the documents *indices* (int64[n]), in this order. It reads their places, and no token.

    TypeError for indices that are not whole numbers, IndexError for one that is not from 0 to ``seq_count - 1``.
    """
    numbers = tokens.numbers_in(whole_numbers("indices are whole numbers,", np.asarray(indices)))
    # A selection of a selection is one of the split.
    if tokens.numbers is not None and isinstance(tokens.encoded_tokens, _SelectedTokens):
        numbers, tokens = tokens.numbers[numbers], tokens.encoded_tokens.split
    numbers.flags.writeable = False
    low, high = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)
    if len(numbers) * DENSE < high - low:
        starts, lengths = tokens.bounds(numbers)
    else:
        near = np.concatenate([NONE, *read_starts(tokens, low, high, len(numbers) * DENSE)])
        starts = near[numbers - low]
        lengths = near[numbers - low + 1] - starts
    entries = running_sums(lengths)
    some = np.flatnonzero(lengths)
    begin, end = starts[some], (starts + lengths)[some]
    # document with tokens -> whether it does not begin where the one before it ends
    first = np.flatnonzero(np.append(True, begin[1:] != end[:-1])[: len(some)])
    runs = begin[first], np.append(entries[some[first]], entries[-1])
    encoded = _SelectedTokens(tokens, *runs)
    return with_arrays(tokens, encoded, StartsInMemory(entries.view(np.uint64), tokens.seq_starts.store), numbers=numbers)


class StartsInMemory:
    """``seq_starts`` of documents that are not stored so, such as a selection's, in memory."""

    def __init__(self, entries: UInt64s, store: Store) -> None:
        self._entries, self.length, self.store = entries, len(entries), store

    def read(self, start: int, stop: int) -> UInt64s:
        return self._entries[start:stop].copy()

    def take(self, indices: Int64s) -> UInt64s:
        return self._entries[indices]

    def gather(self, starts: Int64s, lengths: Int64s, out: UInt64s, at: Int64s) -> None:
        out[ranges(at, lengths)] = self._entries[ranges(starts, lengths)]


class _SelectedTokens(VirtualTokens):
    """The tokens of a selection of *split*."""

    def __init__(self, split: FlatTokens, sources: Int64s, begins: Int64s) -> None:
        super().__init__(split.encoded_tokens, int(begins[-1]), {})
        self.split, self._sources, self._begins = split, sources, begins

    def pieces(self, starts: Int64s, lengths: Int64s, at: Int64s) -> TokenPieces:
        of, run = overlapped(self._begins, starts, lengths)
        begin, end = np.maximum(self._begins[run], starts[of]), np.minimum(self._begins[run + 1], (starts + lengths)[of])
        return TokenPieces(begin - self._begins[run] + self._sources[run], end - begin, at[of] + begin - starts[of])


SENTINELS = 3
MIN_TOKENS = 3
"""Documents of fewer tokens have no prefix, middle and suffix: they stay as they are."""
CHOSEN, ORDER, CUTS, FRAGMENTS = 7, 8, 9, 10
"""Purposes of random numbers, in addition to those of loaders."""
MAX_INSIDE = 4
"""A character has at most this many bytes, so that at most one token fewer in a row begins inside it."""
TOKENS_AT_A_TIME = 1 << 20
TRIED = 16
"""Fragments whose text has to give their tokens before characters are cut: one of them is enough."""


@dataclass(frozen=True)
class FillInMiddle:
    """An option of views: documents are read with their middle at the end.

    *rate*: the share of the documents, of at least three tokens, that are read so. *spm_rate*: the share of these, others in each
    epoch, that begin with the suffix. *prefix*, *middle*, *suffix*: the ids of the tokens before each part. *inside*: ids of
    tokens that begin inside a character (``Vocabulary.inside_characters()``); no cut is before one of these. Cuts are drawn
    evenly of all places, two for a document, in each epoch again; without *each_epoch* every epoch has those of the first.

    With *cuts* ``"characters"`` the text of a document is cut, as by Megatron-LM and in the paper, and its parts are tokenized
    again by the *tokenizer* of the dataset, a name as builds take it. The tokens that the parts have more are taken off the end
    of the suffix. A document is cut between its tokens if that would leave nothing of its suffix, or its tokens are not those of
    its text.

    With a *separator*, the id of a token, a document that has it is cut into fragments. A share of *fragment_rate* of the
    fragments of those documents that are chosen is read with the middle at the end, each by itself.

    The key of a document is that of its record, of a dataset without records its number in the split.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    inside: Sequence[int] = ()
    seed: int = 0
    cuts: Literal["tokens", "characters"] = "tokens"
    tokenizer: str | None = None
    separator: int | None = None
    fragment_rate: float = 1
    each_epoch: bool = True

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} of FillInMiddle is {value!r}, but it is a number from 0 to 1")
        for name in ("prefix", "middle", "suffix", *(["separator"] if self.separator is not None else [])):
            if not 0 <= whole_number(name, getattr(self, name)) <= MAX_TOKEN_ID:
                raise ValueError(f"{name} of FillInMiddle is {getattr(self, name)}, but token ids are 0 to {MAX_TOKEN_ID}")
        if not 0 <= whole_number("seed", self.seed) < 1 << 64:
            raise ValueError(f"seed of FillInMiddle is {self.seed}, but it is from 0 to 2**64 - 1")
        if (one_of("cuts", self.cuts, ("tokens", "characters")) == "characters") == (self.tokenizer is None):
            raise ValueError(
                f"cuts of FillInMiddle is {self.cuts!r}, and its tokenizer {self.tokenizer!r}. Cuts between characters need the "
                "dataset's tokenizer, others need none."
            )
        true_or_false("each_epoch", self.each_epoch)
        object.__setattr__(self, "inside", tuple(sorted({whole_number("inside", number) for number in self.inside})))


def with_middle(tokens: FlatTokens, fim: FillInMiddle | JsonObject | None) -> FlatTokens:
    """The split of documents that are read so. One pass over ``seq_starts`` and the keys, 25 bytes a document in memory."""
    if fim is None:
        return tokens
    if isinstance(fim, dict):  # of a ledger
        fim = FillInMiddle(**fim)
    if not isinstance(fim, FillInMiddle):
        raise TypeError(f"fim is {fim!r}, but it is a FillInMiddle")
    if fim.cuts == "characters" and tokens.loss_mask is not None:
        raise ValueError(
            f"{tokens.store.url}: has a loss mask, which says nothing of tokens that are made of parts of its documents. "
            "Cut between tokens."
        )
    fragments = _Fragments.of(tokens, fim)
    encoded = _MiddleTokens(tokens, fragments, fim)
    others = () if fim.tokenizer is None else (_vocabulary(fim.tokenizer).size - 1,)
    largest = max(tokens.max_token_id, fim.prefix, fim.middle, fim.suffix, *others)
    entries, opens = fragments.entries, fragments.opens
    starts = entries if opens.all() else np.append(entries[:-1][opens], entries[-1])
    return with_arrays(tokens, encoded, StartsInMemory(starts.view(np.uint64), tokens.seq_starts.store), max_token_id=largest)


class _Fragments(NamedTuple):
    """The fragments, and the facts that decide their cuts: the place where each begins as it is read, and the number of earlier
    ones with their middle at the end, int64[n + 1] each; their keys, and which of them begin a document; the seeds of all
    random numbers, uint64[3, 1]: of two cuts and of the order.
    """

    entries: Int64s
    before: Int64s
    keys: UInt64s
    opens: Bools
    roots: UInt64s

    @classmethod
    def of(cls, tokens: FlatTokens, fim: FillInMiddle) -> _Fragments:
        keys = _keys_of(tokens)
        entries = all_starts(tokens)
        is_moved, opens = _fraction(derive_keys(fim.seed, CHOSEN, keys)) < fim.rate, np.ones(len(keys), bool)
        if fim.separator is not None:
            found = [NONE]  # one pass over the tokens
            for first in range(0, tokens.token_count, TOKENS_AT_A_TIME):
                part = tokens.encoded_tokens.read(first, min(first + TOKENS_AT_A_TIME, tokens.token_count)) >> np.uint32(1)
                found.append(np.flatnonzero(part == fim.separator) + first)
            places = np.concatenate(found)
            added = np.setdiff1d(np.concatenate([places, places + 1]), entries)  # starts that are not those of documents
            firsts = np.arange(len(entries)) + np.searchsorted(added, entries)  # fragment of each document
            entries = np.sort(np.concatenate([entries, added]))
            of, number = spread(np.zeros(len(keys), np.int64), np.diff(firsts))
            is_alone = np.diff(firsts)[of] == 1
            opens = number == 0
            keys = np.where(opens, keys[of], extended_keys(keys[of], number))
            is_moved = is_moved[of] & (is_alone | (_fraction(derive_keys(fim.seed, FRAGMENTS, keys)) < fim.fragment_rate))
        is_moved &= np.diff(entries) >= MIN_TOKENS
        before = running_sums(is_moved.view(np.uint8))
        roots = np.stack([derive_keys(fim.seed, CUTS, 0), derive_keys(fim.seed, CUTS, 1), derive_keys(fim.seed, ORDER)])
        return cls(entries + SENTINELS * before, before, keys, opens, roots)


class _MiddleTokens(VirtualTokens):
    """The tokens of documents that are filled in the middle, as in one epoch. No added token counts for the loss. ValueError if
    characters are cut, and no text of the first fragments that are cut has the stored tokens.
    """

    def __init__(self, tokens: FlatTokens, fragments: _Fragments, fim: FillInMiddle) -> None:
        super().__init__(tokens.encoded_tokens, int(fragments.entries[-1]), {"fim": asdict(fim)})
        self._tokens, self._all, self._fim, self._epoch = tokens.encoded_tokens, fragments, fim, 0
        tried = np.flatnonzero(np.diff(fragments.before))[: TRIED if fim.cuts == "characters" else 0]
        if len(tried) and all(self._text(number)[0] is None for number in tried):
            raise ValueError(
                f"{self.store.url}: the tokenizer {fim.tokenizer!r} makes other tokens of the documents' text than those "
                "that are stored. Name the tokenizer that the dataset was made with, or cut between tokens."
            )

    def of_epoch(self, epoch: int) -> Self:
        found = copy(self)
        found._epoch = epoch if self._fim.each_epoch else 0
        return found

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        if self._fim.cuts == "characters":  # whole fragments
            _, fragment = overlapped(self._all.entries, starts, lengths)
            starts = self._all.entries[fragment]
            lengths = self._all.entries[fragment + 1] - starts
        return super().units_of(starts, lengths)

    def pieces(self, starts: Int64s, lengths: Int64s, at: Int64s) -> TokenPieces:
        (entries, before, _, opens, _), fim = self._all, self._fim
        of, fragment = overlapped(entries, starts, lengths)
        begin, moved_before = entries[fragment], before[fragment]
        is_moved = before[fragment + 1] > moved_before
        stored = begin - SENTINELS * moved_before
        sizes = entries[fragment + 1] - begin - SENTINELS * is_moved
        low, high, suffix_first = self._cuts(fragment, sizes, stored, is_moved)
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
        # the document's first token, and the three that are added
        first_token = np.where(before_suffix > 0, 1, np.where(high > 0, where[2], where[1]))
        places = np.stack([first_token, np.zeros_like(low), before_suffix + 1, before_suffix + suffix + 2])
        there = np.flatnonzero(is_moved & (places >= start) & (places < stop))
        kind = there // len(of)
        which, moved = there - kind * len(of), int(np.searchsorted(kind, 1))
        places = (places + shift).reshape(-1)[there]
        values = np.array([0, fim.prefix, fim.suffix, fim.middle])[kind] * 2 + (opens[fragment[which]] & (kind == 1))
        added = [(places[moved:], values[moved:])]
        if fim.cuts == "characters":
            made = {number: self._of_characters(number) for number in set(fragment[is_moved].tolist())}
            for k in np.flatnonzero(is_moved).tolist():
                if (read := made[int(fragment[k])]) is not None:
                    within = np.arange(max(start[k], 0), min(stop[k], len(read)))
                    added.append((within + shift[k], read[within]))
        found, count, clipped = (array.reshape(-1)[some] for array in (stored + source + clipped - where, count, clipped + shift))
        return TokenPieces(found, count, clipped, places[:moved], *map(np.concatenate, zip(*added, strict=True)))

    def _text(self, fragment: int) -> tuple[str | None, int]:
        """The text of a stored fragment and the number of its tokens; None if the tokens are not those of its text."""
        entries, before = self._all.entries, self._all.before
        count = int(entries[fragment + 1] - entries[fragment]) - SENTINELS
        first, (decode, encode) = int(entries[fragment]) - SENTINELS * int(before[fragment]), _codec(str(self._fim.tokenizer))
        ids = self._tokens.read(first, first + count) >> np.uint32(1)
        text = decode(ids)[0].decode(errors="replace")
        # Some tokenizers put a space before a text.
        texts = (given for given in (text, text.removeprefix(" ")) if np.array_equal(encode(given), ids))
        return next(texts, None), count

    def _of_characters(self, fragment: int) -> UInt32s | None:
        """The encoded tokens of a fragment whose text is cut; None if it is cut between tokens."""
        text, count = self._text(fragment)
        if text is None:
            return None
        drawn = extended_keys(self._all.roots, self._all.keys[fragment], self._epoch)[:, 0]
        low, high = np.sort(_scaled(drawn[:2] >> np.uint64(33), np.full(2, len(text) + 1))).tolist()
        prefix, middle, suffix = map(_codec(str(self._fim.tokenizer))[1], (text[:low], text[low:high], text[high:]))
        more = len(prefix) + len(middle) + len(suffix) - count
        if not 0 <= more < max(len(suffix), 1):
            return None
        suffix = suffix[: len(suffix) - more]
        parts = [prefix, [self._fim.suffix], suffix, [self._fim.middle], middle]
        if _fraction(drawn[2:])[0] < self._fim.spm_rate:
            parts = [[self._fim.suffix], suffix, [self._fim.middle], prefix, middle]
        found = np.concatenate([[self._fim.prefix], *parts]).astype(np.uint32) * np.uint32(2)
        found[0] += self._all.opens[fragment]
        return found

    def _cuts(self, document: Int64s, sizes: Int64s, stored: Int64s, is_moved: Bools) -> tuple[Int64s, Int64s, Bools]:
        """The begin and end of each document's middle, and whether its suffix is first. A document that is read as it is stored
        is all prefix.
        """
        drawn = extended_keys(self._all.roots, self._all.keys[document], self._epoch)  # two cuts, and an order
        # a place from 0 to n, both included
        places = _scaled(drawn[:2] >> np.uint64(33), sizes + 1)
        cuts = np.where(is_moved, np.stack([np.minimum(*places), np.maximum(*places)]), sizes)
        inside, moving = np.array(self._fim.inside, np.int64), np.flatnonzero(is_moved)
        for cut in cuts if len(inside) else ():  # each before the nearest token up to it that begins a character
            open_ones = moving[(cut[moving] > 0) & (cut[moving] < sizes[moving])]
            for _ in range(MAX_INSIDE - 1):
                ids = (self._tokens.take(stored[open_ones] + cut[open_ones]) >> np.uint32(1)).astype(np.int64)
                open_ones = open_ones[np.isin(ids, inside)]
                cut[open_ones] -= 1
                open_ones = open_ones[cut[open_ones] > 0]
                if not open_ones.size:
                    break
        return cuts[0], cuts[1], is_moved & (_fraction(drawn[2]) < self._fim.spm_rate)


@cache
def _vocabulary(name: str) -> Vocabulary:
    from flat_tokens.vocabulary import load_vocabulary  # with the modules that it imports, for start-up time

    return load_vocabulary(name)


def _codec(name: str) -> tuple[Callable[..., tuple[bytes, Any]], Callable[[str], UInt32s]]:
    """How a tokenizer decodes ids, and encodes text."""
    vocabulary = _vocabulary(name)
    if vocabulary.encode is None:
        raise ValueError(f"{name}: has no pattern, so that it encodes no text. Name a tokenizer that has one.")
    return vocabulary.decode, vocabulary.encode


def _fraction(drawn: UInt64s) -> AnyArray:
    """Random bits as numbers from 0 to 1."""
    return (drawn >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _scaled(bits: UInt64s, counts: Int64s) -> Int64s:
    """Numbers of 31 bits -> numbers below *counts*, evenly: int64[n]."""
    wanted = counts.view(np.uint64)
    high, low = wanted >> np.uint64(31), wanted & np.uint64((1 << 31) - 1)
    return (high * bits + (low * bits >> np.uint64(31))).view(np.int64)


def _keys_of(tokens: FlatTokens) -> UInt64s:
    """The key of each document, of a dataset without records its number in the split: uint64[seq_count]."""
    try:
        stored = stored_fact(tokens, "key")
    except FileNotFoundError:
        numbers = np.arange(tokens.seq_count) if tokens.numbers is None else tokens.numbers
        return numbers.astype(np.uint64)
    keys: UInt64s = stored.read(0, stored.length) if tokens.numbers is None else stored.take(tokens.numbers)
    if len(keys) != tokens.seq_count:
        raise ValueError(
            f"{tokens.store.url}: has {len(keys)} keys of {tokens.seq_count} documents. Run flat_tokens.verify on it."
        )
    return keys


ENTRIES_PER_SAMPLE = 64


def with_ends(tokens: FlatTokens, bos: int | None, eos: int | None, loss_mask: bool = False) -> FlatTokens:
    """The split with *bos* before and *eos* after each document, the empty ones too. Makes one pass over ``seq_starts``.
    With *loss_mask* it has a mask in any case: all tokens count if it has none.

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
    ends = {name: index(end) for name, end in (("bos", bos), ("eos", eos)) if end is not None}
    starts = _EndMarkedStarts(tokens.seq_starts, len(ends))
    return with_arrays(
        tokens, _EndMarkedTokens(tokens, starts, ends), starts, max_token_id=max(tokens.max_token_id, *ends.values())
    )


def ends_of(tokens: FlatTokens) -> dict[str, int]:
    """The ends that a view adds to the stored documents: ``bos``, ``eos``, or none."""
    return {name: end for name, end in settings_of(tokens).items() if name in ("bos", "eos")}


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


class _EndMarkedTokens(VirtualTokens):
    """The tokens of documents with a first token, an end-of-text token, or both.

    No first token counts for the loss; an end-of-text token counts as the token before it does, and that of an empty document
    does not.
    """

    def __init__(self, tokens: FlatTokens, starts: _EndMarkedStarts, ends: dict[str, int]) -> None:
        super().__init__(tokens.encoded_tokens, tokens.token_count + tokens.seq_count * len(ends), ends)
        self._starts, self._ends = starts, ends
        samples, first = [NONE], 0
        for entries in read_starts(tokens):
            shifted = entries + np.arange(first, first + len(entries)) * len(ends)
            samples.append(shifted[-first % ENTRIES_PER_SAMPLE : -1 : ENTRIES_PER_SAMPLE])
            first += len(entries) - 1
        self._samples = np.concatenate(samples)

    def pieces(self, starts: Int64s, lengths: Int64s, at: Int64s) -> TokenPieces:
        """A piece of each document in a range. One read of entries a range."""
        has_bos, has_eos, stops = "bos" in self._ends, "eos" in self._ends, starts + lengths
        # range -> its documents, from a sample before it to one after it
        first = np.maximum(np.searchsorted(self._samples, starts, side="right") - 1, 0) * ENTRIES_PER_SAMPLE
        last = np.minimum(np.searchsorted(self._samples, stops) * ENTRIES_PER_SAMPLE, self._starts.length - 1)
        counts = np.where(lengths > 0, last - first + 1, 0)
        entries, splits = np.empty(counts.sum(), np.uint64), running_sums(counts)
        self._starts.gather(first, counts, entries, splits[:-1])
        of, number = spread(first, np.maximum(counts - 1, 0))
        inner = splits[of] + number - first[of]
        begin, end = entries[inner].astype(np.int64), entries[inner + 1].astype(np.int64)
        some = np.flatnonzero((begin < stops[of]) & (end > starts[of]))
        of, number, begin, end = of[some], number[some], begin[some], end[some]
        start, stop, shift = starts[of], stops[of], at[of] - starts[of]  # place in the split -> place in out
        low = np.maximum(begin + has_bos, start)
        counts = np.minimum(end - has_eos, stop) - low
        stored = low - number * len(self._ends) - has_bos
        some = np.flatnonzero(counts > 0)
        added = []
        for name, places in (("bos", begin), ("eos", end - 1)):
            if name in self._ends:
                here = np.flatnonzero((places >= start) & (places < stop))
                is_start = (places == begin)[here]
                # document -> its last stored token, if it has one
                has_last = (name == "eos") & (end - begin > len(self._ends))
                like = np.where(has_last, end - (number + 1) * len(self._ends) - 1, -1)[here]
                added.append(((places + shift)[here], 2 * self._ends[name] + is_start, like))
        moved = (low + shift)[some][(low == begin + 1)[some]] if has_bos else NONE
        return TokenPieces(stored[some], counts[some], (low + shift)[some], moved, *map(np.concatenate, zip(*added, strict=True)))


class _AllCount:
    """``loss_mask`` of tokens that have none: all count."""

    settings: ClassVar[dict[str, bool]] = {"loss_mask": True}

    def __init__(self, tokens: StoredArray) -> None:
        self.length, self.store = tokens.length, tokens.store

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        return []

    def read(self, start: int, stop: int) -> UInt8s:
        return np.ones(stop - start, np.uint8)

    def gather(self, starts: Int64s, lengths: Int64s, out: UInt8s, at: Int64s) -> None:
        out[ranges(at, lengths)] = 1
