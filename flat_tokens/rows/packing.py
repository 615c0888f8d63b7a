"""Whole documents packed into rows for training.

An *index*, made from ``seq_starts`` alone, says which documents a pack is made of. A row is put together when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from flat_tokens.array_types import Int64s
from flat_tokens.options import one_of, true_or_false, whole_number
from flat_tokens.rows.frameworks import Array, Attention, Fields, Framework, namespace_of, places_along, room_for
from flat_tokens.rows.packing_index import Fit, IndexFile, OnCrop, Parts, Plan, TooLong, kept_index
from flat_tokens.rows.views import IGNORED_LABEL, Covered, Row, SplitView, checked_length, ranges, running_sums

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

PADDING = -1
"""The document id of padding."""
MAX_LENGTH = 1 << 30
"""The longest pack: positions, and sums of two of them, are int32."""
PLACES_AT_A_TIME = 1 << 17
"""Operations on fewer leave other threads no time to run meanwhile; what repeats so many is still in a processor's cache."""
FEW_PLACES = 32
"""Ranges of fewer places on average are written by one operation on all places."""


class _PackedDocuments(NamedTuple):
    tokens: Array
    labels: Array
    input_pos: Array
    document_ids: Array
    document_range: Array


class PackedDocuments(Attention, Row, _PackedDocuments):  # type: ignore[misc]
    """Documents one after another, padded on the right; one pack or many.

    ``tokens``: int32[..., length], the padding id in padding.
    ``labels``: int64[..., length], the same tokens, not shifted, -100 in padding and where the loss mask of the dataset, if it
    has one, is 0.
    ``input_pos``: int32[..., length], the place in the document modulo *length*; in padding it goes on from the last
    token's, up to ``length - 1``.
    ``document_ids``: int64[..., length], the number of the token's sequence in the split, -1 in padding.
    ``document_range``: int64[..., 2], the pack's first document and one past its last, the empty ones, which have no
    token, among them; an empty range where its documents do not follow one another (``fit="best"`` and ``"crop"``).

    These have fixed shapes, so that torch's ``default_collate``, jax and grain batch them; torch's ``cross_entropy`` wants
    int64, embeddings take int32. The rest is derived, of numpy arrays, torch tensors and jax arrays alike.
    """

    __slots__ = ()
    _on_request = ("loss_mask",)
    _made_of = MappingProxyType({"loss_mask": ("labels",)})
    _padding_segment = PADDING

    @property
    def loss_mask(self) -> Array:
        """bool[..., length]: true on the tokens that count for the loss, of a dataset without a mask on all, false on padding."""
        return self.labels != IGNORED_LABEL

    @property
    def seq_lens(self) -> Array:
        """Tokens of each document in the pack, 0 for an empty one, then the padding if there is any: int64[k].

        A list of them for a batch. With ``fit="best"`` and ``"crop"`` empty documents are in no pack.
        """
        ids, ranges = np.asarray(self.document_ids), np.asarray(self.document_range)
        rows = zip(ids.reshape(-1, ids.shape[-1]), ranges.reshape(-1, 2).tolist(), strict=True)
        found = [namespace_of(self.document_ids).asarray(_seq_lens(row, *document_range)) for row, document_range in rows]
        return found if ids.ndim > 1 else found[0]

    def _segments(self) -> Array:
        return self.document_ids

    def mask(self, *, causal_padding: bool = False) -> Array:
        """The block-causal mask: bool[..., length, length], true where a token (row) attends to another (column).

        A token attends to those of its document up to itself, padding to itself alone, as torchtune documents it. With
        *causal_padding* padding is one more document, as torchtune implements it.
        ``scaled_dot_product_attention`` wants an axis for the heads: ``batch.mask()[:, None]``.
        """
        if not true_or_false("causal_padding", causal_padding):
            return super().mask()
        ids, places = self.document_ids, places_along(self.document_ids)
        return (ids[..., :, None] == ids[..., None, :]) & (places[:, None] >= places[None, :])

    def __getitem__(self, key: Any) -> Any:
        """A field by name or number. By name also those without a fixed shape: ``seq_lens``, ``cu_seqlens``, ``max_seqlen``."""
        return getattr(self, key) if key in ("seq_lens", "cu_seqlens", "max_seqlen") else super().__getitem__(key)


def _seq_lens(document_ids: Int64s, first: int, stop: int) -> Int64s:
    padding = np.count_nonzero(document_ids == PADDING)
    documents = document_ids[: len(document_ids) - padding]
    if first < stop:
        lengths = np.bincount(documents - first, minlength=stop - first)
    else:
        lengths = np.diff(np.flatnonzero(np.diff(documents, prepend=PADDING, append=PADDING)))
    return np.append(lengths, padding) if padding else lengths


class PackedDocumentsView(SplitView):
    """Documents packed into rows of *length* tokens: one read of ``seq_starts`` entries a row, and one of its tokens.

    ``fit="greedy"`` takes documents in order and gives torchtune's packs. Without *split_across_pack* a pack ends before
    the document that would go beyond it; with it, a document is cut there and goes on in the next pack. Documents
    after *max_packs* packs are in none. Empty documents belong to the pack that they follow.

    ``fit="best"`` opens a pack with the longest document that is left and fills it with the longest that fit: less
    padding, and never more packs than documents in order take. Longer documents than a pack are cut into full packs and a
    rest where *split_across_pack* is set; all others stay complete. Documents of a pack are in their order, and packs are
    near it. Empty documents are in none.

    ``fit="crop"`` leaves no padding: every pack is full. Documents are taken 262,144 at a time, and those that do not fill a pack
    wait for more. A pack has the longest document that is left and fits, again and again; where none fits, the shortest one is
    cut at the pack's end. Its rest is dropped; with ``on_crop="keep"`` it is one more piece for later packs, of any length and
    cut again if need be, and only where no document of these is left does one open a pack. All other packs begin with the
    begin of a document. Packs are in the order in which they are made, long documents first: shuffle them. The documents of
    a last pack that is not full, and empty ones, are in none.

    With *pad_to*, 2 * cp for context parallelism over cp devices, each document is followed by padding up to a multiple of it:
    its places have ``document_ids`` and ``input_pos`` of the document, ``labels`` -100, and count in ``seq_lens`` and
    ``cu_seqlens``. No token before attends to them. Documents are not split then.

    A document longer than *length* that may not be split is a ValueError when the view is made; with ``too_long="cut"``
    its first *length* tokens are taken.

    The index is made from ``seq_starts`` with the view: eight bytes a pack, with *split_across_pack* an eighth of a
    byte a document, with ``fit="best"`` and ``"crop"`` eight bytes a document more
    (sixteen where rests of some are in packs). *cache* keeps and maps
    it: a local directory, or ``"beside"`` for the dataset's own path with ``.packing`` appended. Its key is the content of
    ``seq_starts``, not the dataset's path. Where it can't be written, and without *cache*, it is in memory.
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
        pad_to: int = 1,
        on_crop: OnCrop = "drop",
        cache: str | os.PathLike[str] | None = None,
        fields: Fields = None,
        framework: Framework = "numpy",
    ) -> None:
        self.length, self.padding_idx = checked_length("length", length), whole_number("padding_idx", padding_idx)
        max_packs = None if max_packs is None else whole_number("max_packs", max_packs)
        if self.length > MAX_LENGTH:
            raise ValueError(f"length is {length}, but packs have up to {MAX_LENGTH} tokens")
        if not -(1 << 31) <= self.padding_idx < 1 << 31:
            raise ValueError(f"padding_idx is {padding_idx}, but tokens are int32")
        if max_packs is not None and max_packs < 0:
            raise ValueError(f"max_packs is {max_packs}, but there are 0 packs or more")
        one_of("fit", fit, get_args(Fit))
        one_of("too_long", too_long, get_args(TooLong))
        one_of("on_crop", on_crop, get_args(OnCrop))
        split_across_pack = true_or_false("split_across_pack", split_across_pack)
        if (pad_to := whole_number("pad_to", pad_to)) < 1 or self.length % pad_to:
            raise ValueError(f"pad_to is {pad_to}, but it is 1 or more, and packs of {length} are a multiple of it")
        if pad_to > 1 and split_across_pack:
            raise ValueError(f"pad_to is {pad_to}, which pads whole documents: leave out split_across_pack")
        if fit == "crop" and (split_across_pack or too_long != "error" or pad_to > 1):
            raise ValueError(
                "fit='crop' cuts documents itself and leaves no padding: leave out split_across_pack, too_long and pad_to"
            )
        if fit != "crop" and on_crop != "drop":
            raise ValueError(f"on_crop is {on_crop!r}, but fit={fit!r} crops nothing. Set fit='crop'.")
        self._plan = Plan(self.length, split_across_pack, max_packs, fit, too_long, pad_to, on_crop)
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

    def _settings(self) -> dict[str, Any]:
        return {"rows": "packed_documents", **self._plan.described(), "padding_idx": self.padding_idx}

    def _coverage(self) -> tuple[Covered, int | None, int]:
        return self._index.coverage(), None, len(self) * self.length

    def rows_of(self, documents: Int64s) -> tuple[Int64s, Int64s]:
        """The packs with tokens of *documents*: int64[k], which of the documents, in order, and int64[k], the pack."""
        _, lengths = self.tokens.bounds(documents)
        of, packs = self._index.packs_of(documents)
        there = np.flatnonzero((lengths[of] > 0) & (packs < len(self)))
        return of[there], packs[there]

    def parts(self, packs: Int64s) -> Parts:
        """The documents in *packs* (int64[n]): one read of entries, and no token."""
        return self._index.parts(packs)

    def attention_costs(self, packs: Int64s) -> Int64s:
        """The sum of the squared lengths of each pack's documents, and of its padding, which is one more: int64[n]. One read of
        entries, and no token.
        """
        parts = self.parts(packs)
        sums = running_sums(parts.lengths)[parts.splits]
        squared = running_sums(parts.lengths**2)[parts.splits]
        costs: Int64s = np.diff(squared) + (self.length - np.diff(sums)) ** 2
        return costs

    def token_ranges(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        parts = self.parts(indices)
        return parts.starts, parts.counts

    def _read_many(self, indices: Int64s) -> PackedDocuments:
        parts, length = self.parts(indices), self.length
        splits, rows = parts.splits, len(indices)
        filled = np.diff(running_sums(parts.lengths)[splits])
        if (
            (parts.lengths < 0).any()
            or (filled < 1).any()
            or (filled > length).any()
            or (filled != length).any() * (self._plan.fit == "crop")
            or (parts.counts.sum() != filled.sum() and self._plan.pad_to == 1)
        ):
            raise ValueError(
                f"{self.tokens.store.url}: seq_starts is not what the packing index was made of. Open the dataset again."
            )
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
        wanted = self._stored_fields
        tokens = labels = input_pos = document_ids = None
        if "tokens" in wanted or "labels" in wanted:
            tokens, labels = self._tokens_and_labels(parts, filled, with_labels="labels" in wanted)
        if "document_ids" in wanted:
            document_ids = room_for((rows, length), np.int64)
            _repeat(documents, lengths, document_ids)
        if "input_pos" in wanted:
            input_pos = room_for((rows, length), np.int32)
            _count_on(offsets, lengths, length, input_pos)
            beyond = np.maximum(offsets[padding_at] - filled, 0)
            _fill(input_pos, (row_numbers + 1) * length - beyond, beyond, length - 1)
        return PackedDocuments(tokens, labels, input_pos, document_ids, parts.document_range)

    def _tokens_and_labels(self, parts: Parts, filled: Int64s, *, with_labels: bool) -> tuple[Array, Array]:
        """``tokens`` and, where they are wanted, ``labels`` of packs: int32[rows, length], int64[rows, length] or None."""
        shape = rows, length = len(filled), self.length
        encoded, labels = room_for(shape), room_for(shape, np.int64) if with_labels else None
        self.tokens.encoded_tokens.gather(parts.starts, parts.counts, encoded.reshape(-1), parts.at)
        ids = encoded.view(np.int32)
        padding = [(np.arange(rows) * length + filled, length - filled)]
        if self._plan.pad_to > 1:
            padding.append((parts.at + parts.counts, parts.lengths - parts.counts))
        np.right_shift(encoded, np.uint32(1), out=encoded)
        if labels is not None:
            np.copyto(labels, ids)
            if self.tokens.loss_mask is not None:
                mask = np.ones(shape, np.uint8)
                self.tokens.loss_mask.gather(parts.starts, parts.counts, mask.reshape(-1), parts.at)
                np.copyto(labels, IGNORED_LABEL, where=mask == 0)
        for starts, counts in padding:
            _fill(ids, starts, counts, self.padding_idx)
            if labels is not None:
                _fill(labels, starts, counts, IGNORED_LABEL)
        return ids, labels


def _repeat(values: Int64s, counts: Int64s, out: Array) -> None:
    """Each value, as many times as its count says, in order: to all of *out*, whose rows begin with a value."""
    flat = out.reshape(-1)
    if len(values) and int(values.max()) < 1 << 31:
        values = values.astype(np.int32)  # half of the bytes on the way
    for some, first, stop in _parts_of_rows(counts, out.shape):
        flat[first:stop] = np.repeat(values[some], counts[some])


def _count_on(offsets: Int64s, counts: Int64s, length: int, out: Array) -> None:
    """Numbers from each offset on, as many as its count says, and again from 0 on after ``length - 1``: to all of *out*."""
    begins, flat = running_sums(counts)[:-1], out.reshape(-1)
    shifts = offsets - begins  # place in out -> number
    if (again := np.flatnonzero(offsets + counts > length)).size:
        rest = (offsets + counts - length)[again]
        counts = counts.copy()
        counts[again] -= rest
        counts, shifts = np.insert(counts, again + 1, rest), np.insert(shifts, again + 1, shifts[again] - length)
    places = np.arange(min(out.size, _rows_at_a_time(length) * length), dtype=np.int32)
    for some, first, stop in _parts_of_rows(counts, out.shape):
        np.add(np.repeat((shifts[some] + first).astype(np.int32), counts[some]), places[: stop - first], out=flat[first:stop])


def _rows_at_a_time(length: int) -> int:
    return max(PLACES_AT_A_TIME // length, 1)


def _parts_of_rows(counts: Int64s, shape: tuple[int, int]) -> Iterator[tuple[slice, int, int]]:
    """The parts that make up some rows, and the places of these rows, laid end to end. Parts have so many places as *counts*
    say, and none is in two rows.
    """
    rows, length = shape
    edges = [*range(0, rows, _rows_at_a_time(length)), rows]
    places = (np.array(edges) * length).tolist()
    parts = np.searchsorted(running_sums(counts), places).tolist()
    for k in range(len(edges) - 1):
        yield slice(parts[k], parts[k + 1]), places[k], places[k + 1]


def _fill(out: Array, starts: Int64s, counts: Int64s, value: int) -> None:
    """Write a value into ranges of rows laid end to end."""
    total = int(counts.sum())
    if total < np.count_nonzero(counts) * FEW_PLACES:
        out.reshape(-1)[ranges(starts, counts)] = value
    elif total:
        # Views of memory: numpy would let go of the interpreter's lock for each, and wait for it.
        flat, values = out.reshape(-1).data, np.full(int(counts.max()), value, out.dtype).data
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            flat[start : start + count] = values[:count]
