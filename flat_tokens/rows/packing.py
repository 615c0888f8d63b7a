"""Whole documents packed into rows for training: which go together, found from ``seq_starts`` alone.

An *index* says which documents a pack is made of. It holds no tokens, is made in one pass over ``seq_starts``, and can be
kept in a file that all processes map. What a pack's row holds is put together when it is asked for.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import posixpath
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, get_args

import google_crc32c
import numpy as np
import numpy.typing as npt

from flat_tokens.rows.views import Array, Framework, Row, SplitView, checked_length, namespace_of, places_along, walk, windows
from flat_tokens.stores.store import Store

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens


Fit = Literal["greedy", "best"]
TooLong = Literal["error", "cut"]
Int64s: TypeAlias = npt.NDArray[np.int64]

IGNORED_LABEL = -100
"""The label of padding: what torch's ``cross_entropy`` ignores by default."""
PADDING = -1
"""The document id of padding."""
MAX_LENGTH = 1 << 30
"""The longest pack: positions, and sums of two of them, are int32."""
ENTRIES_PER_SAMPLE = 64
"""One entry of ``seq_starts`` in so many is kept to find a token's document: a pack's entries are then one read."""
PIECES_AT_A_TIME = 1 << 18
"""Pieces of documents that are fitted together with ``fit="best"``. Another number gives other packs."""
INDEX_VERSION = 1

log = logging.getLogger(__name__)


# What a pack holds


class _PackedDocuments(NamedTuple):
    tokens: Array
    labels: Array
    input_pos: Array
    document_ids: Array
    document_range: Array


class PackedDocuments(Row, _PackedDocuments):  # type: ignore[misc]
    """Documents one behind the other, padded on the right; one pack or many.

    ``tokens``: int32[..., length], the padding id in padding.
    ``labels``: int64[..., length], the same tokens, not shifted, -100 in padding.
    ``input_pos``: int32[..., length], the place in the document modulo *length*; in padding it goes on from the last
    token's, up to ``length - 1``.
    ``document_ids``: int64[..., length], the number of the token's sequence in the split, -1 in padding.
    ``document_range``: int64[..., 2], the pack's first document and one past its last, the empty ones, which have no
    token, among them; an empty range where a pack is no run of documents (``fit="best"``).

    These have fixed shapes, so that torch's ``default_collate``, jax and grain batch them; torch's ``cross_entropy`` wants
    int64, embeddings take int32. The rest is derived, of numpy arrays, torch tensors and jax arrays alike.
    """

    __slots__ = ()

    @property
    def seq_lens(self) -> Array:
        """Tokens of each document in the pack, 0 for an empty one, then the padding if there is any: int64[k].

        A list of them for a batch. With ``fit="best"`` empty documents are in no pack.
        """
        ids, ranges = np.asarray(self.document_ids), np.asarray(self.document_range)
        rows = zip(ids.reshape(-1, ids.shape[-1]), ranges.reshape(-1, 2).tolist(), strict=True)
        found = [namespace_of(self.document_ids).asarray(_seq_lens(row, *document_range)) for row, document_range in rows]
        return found if ids.ndim > 1 else found[0]

    @property
    def cu_seqlens(self) -> Array:
        """Where the segments of attention begin and end: int32[k + 1], 0 first, the number of tokens last.

        For kernels that take sequences of variable length. A batch counts as one row of ``n * length`` tokens, and no
        segment goes from one pack into the next. Padding is a segment of its own, so that every token is in one and no
        output stays undefined; an empty document is none.
        """
        ids, concatenate = self.document_ids, namespace_of(self.document_ids).concatenate
        begins = concatenate([ids[..., :1] == ids[..., :1], ids[..., 1:] != ids[..., :-1]], -1).reshape(-1)
        if begins.shape[0] >= 1 << 31:
            raise ValueError(f"cu_seqlens is int32, but the batch has {begins.shape[0]} tokens. Take fewer packs at a time.")
        edges = concatenate([begins, places_along(ids)[:1] == 0])  # the end of the last is an edge, too
        return places_along(edges)[edges]

    @property
    def max_seqlen(self) -> int:
        """Tokens in the longest segment of ``cu_seqlens``, be it padding."""
        edges = self.cu_seqlens
        return int((edges[1:] - edges[:-1]).max()) if len(edges) > 1 else 0

    def mask(self, *, causal_padding: bool = False) -> Array:
        """The block-causal mask: bool[..., length, length], true where a token (row) attends to another (column).

        A token attends to those of its document up to itself, one of padding to itself alone: so says torchtune's
        documentation. Its implementation takes padding for one more document: *causal_padding*.
        ``scaled_dot_product_attention`` wants an axis for the heads: ``batch.mask()[:, None]``.
        """
        ids, places = self.document_ids, places_along(self.document_ids)
        attends = (ids[..., :, None] == ids[..., None, :]) & (places[:, None] >= places[None, :])
        if causal_padding:
            return attends
        return attends & ((ids[..., :, None] != PADDING) | (places[:, None] == places[None, :]))

    def __getitem__(self, key: Any) -> Any:
        """By name or number, and by name also what has no fixed shape: ``seq_lens``, ``cu_seqlens``, ``max_seqlen``."""
        return getattr(self, key) if key in ("seq_lens", "cu_seqlens", "max_seqlen") else super().__getitem__(key)


def _seq_lens(document_ids: Int64s, first: int, stop: int) -> Int64s:
    padding = np.count_nonzero(document_ids == PADDING)
    documents = document_ids[: len(document_ids) - padding]
    if first < stop:
        lengths = np.bincount(documents - first, minlength=stop - first)
    else:
        lengths = np.diff(np.flatnonzero(np.diff(documents, prepend=PADDING, append=PADDING)))
    return np.append(lengths, padding) if padding else lengths


class Parts(NamedTuple):
    """What some packs are made of: parts ``splits[r]:splits[r + 1]`` are row r's, in order.

    ``splits``: int64[rows + 1]. ``documents``, ``offsets``, ``lengths``: int64[parts], where a part begins in its document.
    ``document_range``: int64[rows, 2]. ``starts``, ``counts``, ``at``: int64[reads], the tokens to read, and their places
    in all rows one behind the other.
    """

    splits: Int64s
    documents: Int64s
    offsets: Int64s
    lengths: Int64s
    document_range: Int64s
    starts: Int64s
    counts: Int64s
    at: Int64s


def _filled_rows(tokens: FlatTokens, parts: Parts, length: int, padding_idx: int) -> PackedDocuments:
    """Read and lay out the rows."""
    splits, rows = parts.splits, len(parts.splits) - 1
    filled = np.diff(_sums(parts.lengths)[splits])
    if (parts.lengths < 0).any() or (filled < 1).any() or (filled > length).any() or filled.sum() != parts.counts.sum():
        raise ValueError(f"{tokens.store.url}: seq_starts is not what the packing index was made of. Open the dataset again.")
    encoded = np.empty((rows, length), np.uint32)
    tokens.encoded_tokens.gather(parts.starts, parts.counts, encoded.reshape(-1), parts.at)
    encoded >>= np.uint32(1)
    ids = encoded.view(np.int32)

    # Padding is one more part of each row: part p of row r -> p + r; the padding of row r -> splits[r + 1] + r
    row_numbers = np.arange(rows)
    part_rows = np.repeat(row_numbers, np.diff(splits))
    part_at, padding_at = np.arange(len(part_rows)) + part_rows, splits[1:] + row_numbers
    with_tokens = np.maximum.accumulate(np.where(parts.lengths > 0, np.arange(len(part_rows)), 0))
    last = with_tokens[splits[1:] - 1]
    documents, offsets, lengths = np.empty((3, len(part_rows) + rows), np.int64)
    documents[part_at], documents[padding_at] = parts.documents, PADDING
    offsets[part_at], offsets[padding_at] = parts.offsets % length, (parts.offsets + parts.lengths - 1)[last] % length + 1
    lengths[part_at], lengths[padding_at] = parts.lengths, length - filled

    document_ids = np.repeat(documents, lengths).reshape(rows, length)
    # place in the row -> place in the document
    begins = _sums(lengths)[:-1] - np.repeat(row_numbers, np.diff(splits) + 1) * length
    input_pos = np.repeat((offsets - begins).astype(np.int32), lengths).reshape(rows, length)
    input_pos += np.arange(length, dtype=np.int32)
    if (offsets + lengths > length).any():
        beyond = np.where(document_ids == PADDING, np.int32(length - 1), input_pos - np.int32(length))
        np.copyto(input_pos, beyond, where=input_pos >= length)
    labels = ids.astype(np.int64)
    if (filled < length).any():
        padding = document_ids == PADDING
        ids[padding], labels[padding] = padding_idx, IGNORED_LABEL
    return PackedDocuments(ids, labels, input_pos, document_ids, parts.document_range)


# Which documents go together


class Plan(NamedTuple):
    """What an index depends on, the dataset aside."""

    length: int
    split_across_pack: bool
    max_packs: int | None
    fit: Fit
    too_long: TooLong


@dataclass(frozen=True)
class DocumentRuns:
    """Greedy packs of whole documents: pack k is documents ``firsts[k]:firsts[k + 1]``."""

    tokens: FlatTokens
    plan: Plan
    firsts: Int64s

    @classmethod
    def make(cls, tokens: FlatTokens, plan: Plan) -> Self:
        starts = windows(tokens)
        if plan.too_long == "cut":
            starts = _end_to_end(np.minimum(np.diff(entries), plan.length) for entries in starts)
        return cls(tokens, plan, first_documents(starts, plan.length, plan.max_packs, tokens.store.url))

    @property
    def arrays(self) -> tuple[Int64s, ...]:
        return (self.firsts,)

    @property
    def pack_count(self) -> int:
        return len(self.firsts) - 1

    def parts(self, packs: Int64s) -> Parts:
        document_range = np.stack([self.firsts[packs], self.firsts[packs + 1]], axis=1)
        starts, lengths, splits = _documents(self.tokens, *document_range.T)
        lengths = np.minimum(lengths, self.plan.length) if self.plan.too_long == "cut" else lengths
        # A document that is cut has its pack to itself, so that a pack's tokens always stand together.
        return Parts(
            splits,
            _ranges(document_range[:, 0], np.diff(splits)),
            np.zeros(len(lengths), np.int64),
            lengths,
            document_range,
            starts[splits[:-1]],
            np.diff(_sums(lengths)[splits]),
            np.arange(len(packs)) * self.plan.length,
        )


@dataclass(frozen=True)
class TokenSlices:
    """Greedy packs that split documents: pack k is tokens ``k * length`` to ``+ length``.

    ``samples``: every 64th entry of ``seq_starts``, between two of which the entries of a pack are found.
    """

    tokens: FlatTokens
    plan: Plan
    samples: Int64s

    @classmethod
    def make(cls, tokens: FlatTokens, plan: Plan) -> Self:
        samples, first = [np.empty(0, np.int64)], 0
        for entries in windows(tokens):
            samples.append(entries[-first % ENTRIES_PER_SAMPLE : -1 : ENTRIES_PER_SAMPLE])
            first += len(entries) - 1
        return cls(tokens, plan, np.concatenate(samples))

    @property
    def arrays(self) -> tuple[Int64s, ...]:
        return (self.samples,)

    @property
    def pack_count(self) -> int:
        count = -(-self.tokens.token_count // self.plan.length)
        return count if self.plan.max_packs is None else min(count, self.plan.max_packs)

    def parts(self, packs: Int64s) -> Parts:
        begins, ends = packs * self.plan.length, (packs + 1) * self.plan.length
        # The documents from the last sample up to the pack's first token, to the first sample behind its last one
        first = np.searchsorted(self.samples, begins, side="right") - 1
        first[packs == 0] = 0  # with the empty documents before the first token
        stop = np.searchsorted(self.samples, ends, side="right") * ENTRIES_PER_SAMPLE
        first, stop = first * ENTRIES_PER_SAMPLE, np.minimum(stop, self.tokens.seq_count)
        starts, lengths, splits = _documents(self.tokens, first, stop)
        begin, end = np.repeat(begins, np.diff(splits)), np.repeat(ends, np.diff(splits))
        part_starts = np.maximum(starts, begin)
        part_lengths = np.minimum(starts + lengths, end) - part_starts
        # An empty document where two packs meet belongs to the first of them.
        empty_here = (lengths == 0) & (starts <= end) & ((starts > begin) | (begin == 0))
        here = np.flatnonzero((part_lengths > 0) | empty_here)
        documents, splits = _ranges(first, np.diff(splits))[here], np.searchsorted(here, splits)
        if (np.diff(splits) == 0).any():
            raise ValueError(f"{self.tokens.store.url}: seq_starts has no documents for some tokens. Run flat_tokens.verify.")
        return Parts(
            splits,
            documents,
            (part_starts - starts)[here],
            part_lengths[here],
            np.stack([documents[splits[:-1]], documents[splits[1:] - 1] + 1], axis=1),
            begins,
            np.minimum(ends, self.tokens.token_count) - begins,
            np.arange(len(packs)) * self.plan.length,
        )


@dataclass(frozen=True)
class ChosenPieces:
    """Packs of chosen documents: pack k is those numbered ``documents[firsts[k]:firsts[k + 1]]``.

    ``pieces`` has the pieces' numbers where longer documents are cut, piece j from token ``j * length`` on; else it is empty.
    """

    tokens: FlatTokens
    plan: Plan
    firsts: Int64s
    documents: Int64s
    pieces: Int64s

    @classmethod
    def make(cls, tokens: FlatTokens, plan: Plan) -> Self:
        firsts, (documents, numbers), padding = best_packs(_pieces(tokens, plan), plan.length)
        if padding >= plan.length:  # in their order, documents may take fewer packs
            starts = _end_to_end(pieces[2] for pieces in _pieces(tokens, plan))
            in_order = first_documents(starts, plan.length, None, tokens.store.url)
            if len(in_order) < len(firsts):
                firsts, (documents, numbers) = in_order, np.concatenate([pieces[:2] for pieces in _pieces(tokens, plan)], axis=1)
        if plan.max_packs is not None:
            firsts = firsts[: plan.max_packs + 1]
            documents, numbers = documents[: firsts[-1]], numbers[: firsts[-1]]
        return cls(tokens, plan, firsts, documents, numbers if numbers.any() else numbers[:0])

    @property
    def arrays(self) -> tuple[Int64s, ...]:
        return self.firsts, self.documents, self.pieces

    @property
    def pack_count(self) -> int:
        return len(self.firsts) - 1

    def parts(self, packs: Int64s) -> Parts:
        first, counts = self.firsts[packs], self.firsts[packs + 1] - self.firsts[packs]
        chosen, splits = _ranges(first, counts), _sums(counts)
        documents = self.documents[chosen]
        starts, lengths = self.tokens.bounds(documents)
        offsets = self.pieces[chosen] * self.plan.length if len(self.pieces) else np.zeros(len(documents), np.int64)
        lengths = np.minimum(lengths - offsets, self.plan.length)
        # place in all parts -> place in all rows
        sums, row_starts = _sums(lengths), np.arange(len(packs)) * self.plan.length
        at = sums[:-1] + np.repeat(row_starts - sums[splits[:-1]], counts)
        no_range = np.zeros((len(packs), 2), np.int64)
        return Parts(splits, documents, offsets, lengths, no_range, starts + offsets, lengths, at)


PackingIndex: TypeAlias = DocumentRuns | TokenSlices | ChosenPieces


def first_documents(starts: Iterable[Int64s], length: int, max_packs: int | None, name: str) -> Int64s:
    """The first document of every pack of whole documents in order, and one past the last pack's: int64[packs + 1].

    *starts*: where documents start, in windows, int64[n + 1] with the next one's first entry last.
    ValueError for a document longer than *length*; one behind *max_packs* packs is not looked at.
    """
    firsts, pack_count, document_count, token_count = [np.zeros(1, np.int64)], 0, 0, 0
    limit = length  # where the open pack is full
    for entries in starts:
        count = len(entries) - 1
        # document -> the first one that is too much for a pack opened by it; count, where that is in a later window
        successors = np.searchsorted(entries, entries[:-1] + length, side="right") - 1
        too_long = successors == np.arange(count)
        successors[too_long] = count
        path = walk(int(np.searchsorted(entries, limit, side="right")) - 1, successors)
        path = path if max_packs is None else path[: max_packs - pack_count]
        opens = np.concatenate([[0], path]) if document_count == 0 else path
        if count and (wrong := opens[too_long[opens]]).size:
            raise ValueError(_too_long(name, document_count + int(wrong[0]), int(np.diff(entries)[wrong[0]]), length))
        firsts.append(path + document_count)
        pack_count += len(path)
        limit = int(entries[path[-1]]) + length if len(path) else limit
        document_count, token_count = document_count + count, int(entries[-1])
        if pack_count == max_packs:
            return np.concatenate(firsts)
    if token_count:
        firsts.append(np.array([document_count]))
    return np.concatenate(firsts)


def best_packs(pieces: Iterable[Int64s], length: int) -> tuple[Int64s, Int64s, int]:
    """Packs with little padding. *pieces*, in windows: int64[3, n], their documents, numbers in these, and lengths.

    Returns ``firsts``, int64[packs + 1], the documents and numbers of pieces, int64[2, n], of which pack k has
    ``firsts[k]:firsts[k + 1]``, and how many tokens of padding there are. Pieces are taken 262,144 at a time, so that
    memory is bounded and a pack's documents are near each other; those in the pack that is filled least wait for more.
    """
    counts, packed, padding = [np.zeros(0, np.int64)], [np.zeros((2, 0), np.int64)], 0
    waiting = np.zeros((3, 0), np.int64)
    for fresh in _equal_windows(pieces, PIECES_AT_A_TIME):
        pool = np.concatenate([waiting, fresh], axis=1)
        firsts, order = best_fit(pool[2], length)
        pool = pool[:, order]
        filled = np.add.reduceat(pool[2], firsts[:-1])
        least = int(filled.argmin())
        first, stop = firsts[least : least + 2].tolist()
        waiting = pool[:, first:stop]
        counts += [np.diff(firsts[: least + 1]), np.diff(firsts[least + 1 :])]
        packed += [pool[:2, :first], pool[:2, stop:]]
        padding += int((length - filled).sum() - (length - filled[least]))
    if waiting.size:
        counts.append(np.array([waiting.shape[1]]))
        packed.append(waiting[:2])
        padding += length - int(waiting[2].sum())
    return _sums(np.concatenate(counts)), np.concatenate(packed, axis=1), padding


def _equal_windows(pieces: Iterable[Int64s], size: int) -> Iterator[Int64s]:
    """The columns of int64[3, n] windows, *size* at a time: packs must not depend on how much is read at once."""
    rest = np.zeros((3, 0), np.int64)
    for window in pieces:
        rest = np.concatenate([rest, window], axis=1)
        while rest.shape[1] >= size:
            yield rest[:, :size]
            rest = rest[:, size:]
    if rest.size:
        yield rest


def best_fit(lengths: Int64s, length: int) -> tuple[Int64s, Int64s]:
    """Fill packs with the longest pieces that fit, one pack after another.

    *lengths*: int64[n], each 1 to *length*. The packs as (``firsts``: int64[packs + 1], ``order``: int64[n]): pack k holds
    pieces ``order[firsts[k]:firsts[k + 1]]``. Packs are in the order of their first pieces, and so are a pack's pieces.
    """
    by_length = np.argsort(lengths.astype(np.min_scalar_type(length)), kind="stable")  # two bytes sort in linear time
    ascending = lengths[by_length]
    groups = np.flatnonzero(np.diff(ascending, prepend=0))
    sizes, counts = ascending[groups].tolist(), np.diff(groups, append=len(lengths)).tolist()
    used, pack_count = groups.tolist(), 0
    fills = []
    for filling, repeats in _fillings(sizes, counts, length):
        for group, each in filling:
            fills.append((used[group], pack_count, each, each * repeats))
            used[group] += each * repeats
        pack_count += repeats
    # fill -> its pieces: those from start on in ascending order, each of them to a pack, from pack on
    start, pack, per_pack, total = np.array(sorted(fills), np.int64).reshape(-1, 4).T
    place = np.arange(len(lengths)) - np.repeat(start, total)
    pack_of = np.empty(len(lengths), np.int64)
    pack_of[by_length] = np.repeat(pack, total) + place // np.repeat(per_pack, total)

    first_pieces = np.empty(pack_count, np.int64)
    first_pieces[pack_of[::-1]] = np.arange(len(lengths))[::-1]  # of equal places the last assignment stays: the first piece
    ranks = np.empty(pack_count, np.int64)
    ranks[np.argsort(first_pieces)] = np.arange(pack_count)
    pack_of = ranks[pack_of]
    return _sums(np.bincount(pack_of, minlength=pack_count)), np.argsort(pack_of, kind="stable")


def _fillings(sizes: list[int], counts: list[int], length: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """How packs are filled: ([(size's number, pieces of it in each pack)], how many packs like that).

    *sizes* ascend. Equal fillings follow one another, as long as there are pieces for them, so they are found at once.
    """
    sizes, left = [0, *sizes], [0, *counts]
    lower = list(range(len(sizes)))  # number -> itself while pieces of that size are left, then a lower one; 0: none are

    def with_pieces(number: int) -> int:
        while lower[number] != number:
            lower[number] = lower[lower[number]]
            number = lower[number]
        return number

    while number := with_pieces(len(sizes) - 1):
        filling, room = [], length
        while number:
            each = min(left[number], room // sizes[number])
            filling.append((number - 1, each))
            room -= each * sizes[number]
            number = with_pieces(min(number, bisect_right(sizes, room)) - 1)
        repeats = min(left[group + 1] // each for group, each in filling)
        for group, each in filling:
            left[group + 1] -= each * repeats
            if not left[group + 1]:
                lower[group + 1] = group
        yield filling, repeats


def _pieces(tokens: FlatTokens, plan: Plan) -> Iterator[Int64s]:
    """What is to be packed, in windows: int64[3, n], the document, number in it and length of every piece."""
    document_count = 0
    for entries in windows(tokens):
        sizes = np.diff(entries)
        if not plan.split_across_pack:
            if plan.too_long == "error" and (wrong := np.flatnonzero(sizes > plan.length)).size:
                raise ValueError(_too_long(tokens.store.url, document_count + int(wrong[0]), int(sizes[wrong[0]]), plan.length))
            sizes = np.minimum(sizes, plan.length)
        counts = -(-sizes // plan.length)
        documents, numbers = np.repeat(np.arange(len(sizes)), counts), _ranges(np.zeros(len(sizes), np.int64), counts)
        lengths = np.minimum(sizes[documents] - numbers * plan.length, plan.length)
        yield np.stack([documents + document_count, numbers, lengths])
        document_count += len(sizes)


def _end_to_end(lengths: Iterable[Int64s]) -> Iterator[Int64s]:
    """Windows of lengths -> windows of where those start that have them, each with the next one's first entry last."""
    base = 0
    for window in lengths:
        positions = _sums(window) + base
        yield positions
        base = int(positions[-1])


def _too_long(name: str, document: int, size: int, length: int) -> str:
    return (
        f"{name}: document {document} has {size} tokens, but a pack has {length}. "
        "Take longer packs, split_across_pack=True, or too_long='cut'."
    )


def _documents(tokens: FlatTokens, first: Int64s, stop: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Where the documents of runs ``first[r]:stop[r]`` start and how long they are, and where runs end: one read.

    int64[n], int64[n], int64[runs + 1]. ValueError where the entries are not in order.
    """
    at = _sums(stop - first + 1)
    entries = np.empty(at[-1], np.uint64)
    tokens.seq_starts.gather(first, stop - first + 1, entries, at[:-1])
    within = np.ones(len(entries), bool)
    within[at[1:] - 1] = False  # a run's last entry is where its last document ends
    is_first = np.flatnonzero(within)
    starts, ends = entries[is_first], entries[is_first + 1]
    if ((starts > ends) | (ends > np.uint64(tokens.token_count))).any():
        raise ValueError(f"{tokens.store.url}: seq_starts is not in order. The dataset is damaged: run flat_tokens.verify on it.")
    return starts.astype(np.int64), (ends - starts).astype(np.int64), at - np.arange(len(at))


def _sums(counts: npt.NDArray[np.integer]) -> Int64s:
    """Sums of the counts before each, and of all: int64[n + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def _ranges(first: Int64s, counts: Int64s) -> Int64s:
    """``first[r]``, ``first[r] + 1``, ... of every range r, ``counts[r]`` numbers each."""
    return np.arange(counts.sum()) + np.repeat(first - _sums(counts)[:-1], counts)


# Keeping the index


def index_type(plan: Plan) -> type[PackingIndex]:
    if plan.fit == "best":
        return ChosenPieces
    return TokenSlices if plan.split_across_pack else DocumentRuns


class IndexFile(NamedTuple):
    """Where an index is kept: one ``.npy`` of int64 that begins with ``key``, a digest of all that the index depends on."""

    directory: str
    name: str
    key: bytes

    @classmethod
    def at(cls, cache: str | os.PathLike[str], tokens: FlatTokens, plan: Plan) -> Self:
        """The file in the directory *cache*, or beside the dataset. ValueError where that is not a local path."""
        if cache == "beside":
            store = replace(tokens.store, root=posixpath.dirname(tokens.store.root) + ".packing")
        else:
            store = Store.at(cache)
        if not store.is_local:
            raise ValueError(f"{store.url}: a packing index is mapped, so it is kept on a local disk. Set cache to a directory.")
        depends_on = {
            "version": INDEX_VERSION,
            "seq_starts": _identity(tokens),
            "token_count": tokens.token_count,
            "seq_count": tokens.seq_count,
            **plan._asdict(),
        }
        key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).digest()
        return cls(store.root, f"{plan.fit}-{plan.length}-{key.hex()[:32]}.npy", key)

    def load(self) -> list[Int64s] | None:
        """The index's arrays, mapped; None where there is no such file, or not all of it, or one of something else."""
        try:
            stored = np.asarray(np.lib.format.open_memmap(posixpath.join(self.directory, self.name), mode="r"))
        except (OSError, ValueError, OverflowError):
            return None
        key = np.frombuffer(self.key, "<i8")
        if stored.dtype != np.dtype("<i8") or stored.ndim != 1 or not np.array_equal(stored[: len(key)], key):
            return None
        # key, crc32c of all that follows, number of arrays, their lengths, the arrays one behind the other
        checksum, rest = stored[len(key) : len(key) + 1], stored[len(key) + 1 :]
        if not len(rest) or google_crc32c.value(rest) != checksum[0]:
            return None
        splits = _sums(rest[1 : 1 + rest[0]]) + 1 + rest[0]
        return [rest[first:stop] for first, stop in pairwise(splits)]

    def save(self, arrays: Sequence[Int64s]) -> None:
        """Write the file, which appears whole or not at all. OSError where that can't be done."""
        parts = [np.array([len(arrays), *map(len, arrays)], np.int64), *arrays]
        checksum = 0
        for part in parts:
            checksum = google_crc32c.extend(checksum, np.ascontiguousarray(part))
        parts = [np.frombuffer(self.key, "<i8"), np.array([checksum]), *parts]
        header = io.BytesIO()
        shape = (sum(map(len, parts)),)
        np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
        with Store.at(self.directory).create(self.name) as writer:
            writer.write(header.getvalue())
            for part in parts:
                writer.write(np.ascontiguousarray(part, "<i8"))


def _identity(tokens: FlatTokens) -> str:
    """A digest of what ``seq_starts`` holds: by its objects' digests if the dataset's manifest has them, else of itself."""
    from flat_tokens.manifest import read_manifest

    dataset = replace(tokens.store, root=posixpath.dirname(tokens.store.root))
    prefix = f"{posixpath.basename(tokens.store.root)}/seq_starts/"
    try:
        objects = read_manifest(dataset)["objects"]
    except (OSError, ValueError):  # another writer's dataset
        objects = []
    if listed := sorted([item["key"], item["sha256"]] for item in objects if item["key"].startswith(prefix)):
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    sha256 = hashlib.sha256()
    for entries in windows(tokens):
        sha256.update(entries.astype("<i8", copy=False).data)
    return sha256.hexdigest()


def kept_index(tokens: FlatTokens, plan: Plan, file: IndexFile | None) -> tuple[PackingIndex, bool]:
    """The index, and if it is mapped from *file*, in which it is then kept. Without a file it is made in memory.

    Who else makes the same index at the same time writes the same bytes.
    """
    kind = index_type(plan)
    if file is None:
        return kind.make(tokens, plan), False
    if (arrays := file.load()) is not None:
        return kind(tokens, plan, *arrays), True
    made = kind.make(tokens, plan)
    try:
        file.save(made.arrays)
    except OSError as error:
        log.warning("The packing index is made anew each time, because it can't be kept: %s", error)
        return made, False
    arrays = file.load()
    return (made, False) if arrays is None else (kind(tokens, plan, *arrays), True)


class PackedDocumentsView(SplitView):
    """Documents packed into rows of *length* tokens: one read of ``seq_starts`` entries a row, and one of its tokens.

    ``fit="greedy"`` takes documents in order and gives torchtune's packs. Without *split_across_pack* a pack ends before
    the document that would go beyond it; with it, a document is cut there and goes on in the next pack. What is left
    behind *max_packs* packs is in none. Empty documents belong to the pack that they follow.

    ``fit="best"`` opens a pack with the longest document that is left and fills it with the longest that fit: less
    padding, and never more packs than documents in order take. Longer documents than a pack are cut into full packs and a
    rest where *split_across_pack* is set; all others stay whole. Documents of a pack are in their order, and packs are
    near it. Empty documents are in none.

    A document longer than *length* that may not be split is a ValueError when the view is made; with ``too_long="cut"``
    its first *length* tokens are taken.

    The index is made from ``seq_starts`` when the view is: eight bytes a pack, with *split_across_pack* an eighth of a
    byte a document, with ``fit="best"`` eight bytes a document more (sixteen where some are cut). *cache* keeps and maps
    it: a local directory, or "beside" for the dataset's own path with ``.packing`` behind it. It is known by the content
    of ``seq_starts``, not by the dataset's path. Where it can't be written, and without *cache*, it is in memory.
    """

    row_type = PackedDocuments

    def __init__(
        self,
        tokens: FlatTokens,
        length: int,
        *,
        split_across_pack: bool = False,
        max_packs: int | None = None,
        padding_idx: int = 0,
        fit: Fit = "greedy",
        too_long: TooLong = "error",
        cache: str | os.PathLike[str] | None = None,
        fields: Sequence[str] | None = None,
        framework: Framework = "numpy",
    ) -> None:
        self.length, self.padding_idx = checked_length("length", length), index(padding_idx)
        max_packs = None if max_packs is None else index(max_packs)
        if self.length > MAX_LENGTH:
            raise ValueError(f"length is {length}, but packs have up to {MAX_LENGTH} tokens")
        if not -(1 << 31) <= self.padding_idx < 1 << 31:
            raise ValueError(f"padding_idx is {padding_idx}, but tokens are int32")
        if max_packs is not None and max_packs < 0:
            raise ValueError(f"max_packs is {max_packs}, but there are 0 packs or more")
        for name, value, known in (("fit", fit, Fit), ("too_long", too_long, TooLong)):
            if value not in get_args(known):
                raise ValueError(f"{name} is {value!r}, but it is one of {', '.join(get_args(known))}")
        self._plan = Plan(self.length, bool(split_across_pack), max_packs, fit, too_long)
        self._file = None if cache is None else IndexFile.at(cache, tokens, self._plan)
        self._index, self._is_mapped = kept_index(tokens, self._plan, self._file)
        super().__init__(tokens, self._index.pack_count, fields, framework)

    def __getstate__(self) -> dict[str, Any]:
        # A mapped index is not copied to other processes: they map it, too.
        return {**self.__dict__, "_index": None} if self._is_mapped else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._is_mapped:
            self._index, self._is_mapped = kept_index(self.tokens, self._plan, self._file)

    def _read(self, i: int) -> PackedDocuments:
        return PackedDocuments(*(field[0] for field in self._read_many(np.array([i]))))

    def _read_many(self, indices: Int64s) -> PackedDocuments:
        return _filled_rows(self.tokens, self._index.parts(indices), self.length, self.padding_idx)
