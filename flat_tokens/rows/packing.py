"""Whole documents packed into rows for training.

An *index*, made from ``seq_starts`` alone, says which documents a pack is made of. A row is put together when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from flat_tokens.annotations import Int64Pair, Int64s, JsonObject
from flat_tokens.arrays.stored import gather_all
from flat_tokens.options import one_of, true_or_false, whole_number
from flat_tokens.rows.frameworks import Array, Attention, Fields, Framework, causal, namespace_of, places_along, room_for
from flat_tokens.rows.packing_index import Fit, IndexFile, OnCrop, PackSettings, Parts, TooLong, kept_index, packs_together
from flat_tokens.rows.views import IGNORED_LABEL, Coverage, Part, Row, SplitView, checked_length, ranges, running_sums

if TYPE_CHECKING:
    from flat_tokens.rows.split import FlatTokens

PADDING = -1
"""The document id of padding."""
MAX_LENGTH = 1 << 30
"""The longest pack: positions, and sums of two of them, are int32."""
PLACES_AT_A_TIME = 1 << 17
"""Operations on fewer leave other threads no time to run meanwhile; what repeats so many is still in a processor's cache."""
FEW_PLACES = 32
"""Ranges of fewer places on average are written by one operation on all places."""


class _PackedFields(NamedTuple):
    tokens: Array
    labels: Array
    input_pos: Array
    document_ids: Array
    document_range: Array


class PackedDocuments(Attention, Row, _PackedFields):  # type: ignore[misc]
    """Consecutive documents, padded on the right; one pack or many.

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
        found = []
        for row, (first, stop) in zip(ids.reshape(-1, ids.shape[-1]), ranges.reshape(-1, 2).tolist(), strict=True):
            padding = np.count_nonzero(row == PADDING)
            documents = row[: len(row) - padding]
            if first < stop:
                lengths = np.bincount(documents - first, minlength=stop - first)
            else:
                lengths = np.diff(np.flatnonzero(np.diff(documents, prepend=PADDING, append=PADDING)))
            lengths = np.append(lengths, padding) if padding else lengths
            found.append(namespace_of(self.document_ids).asarray(lengths))
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
        return causal(self.document_ids, places_along(self.document_ids))

    def __getitem__(self, key: Any) -> Any:
        """A field by name or number. By name also those without a fixed shape: ``seq_lens``, ``cu_seqlens``, ``max_seqlen``."""
        return getattr(self, key) if key in ("seq_lens", "cu_seqlens", "max_seqlen") else super().__getitem__(key)


class PackedDocumentsView(SplitView):
    """Documents packed into rows of *length* tokens: one read of ``seq_starts`` entries a row, and one of its tokens.

    ``fit="greedy"`` takes documents in order and gives torchtune's packs. Without *split_across_pack* a pack ends before
    the document that would go beyond it; with it, a document is cut there and goes on in the next pack. Documents
    after *max_packs* packs are in none. Empty documents belong to the pack that they follow.

    ``fit="best"`` opens a pack with the longest document that is left and fills it with the longest that fit: less
    padding, and never more packs than documents in order take. Longer documents than a pack are cut into full packs and a
    rest if *split_across_pack* is set; all others stay complete. Documents of a pack are in their order, and packs are
    near it. Empty documents are in none.

    ``fit="crop"`` leaves no padding: every pack is full. Documents are taken 262,144 at a time, and those that do not fill a pack
    wait for more. A pack has the longest document that is left and fits, again and again; if none fits, the shortest one is
    cut at the pack's end. Its rest is dropped; with ``on_crop="keep"`` it is one more piece for later packs, of any length and
    cut again if need be, and only if no document of these is left does one open a pack. All other packs begin with the
    begin of a document. Packs are in the order in which they are made, long documents first: shuffle them. The documents of
    a last pack that is not full, and empty ones, are in none.

    With *pad_to*, 2 * cp for context parallelism over cp devices, each document is followed by padding up to a multiple of it:
    its places have ``document_ids`` and ``input_pos`` of the document, ``labels`` -100, and count in ``seq_lens`` and
    ``cu_seqlens``. No token before attends to them. Documents are not split then.

    A document longer than *length* that may not be split is a ValueError when the view is made; with ``too_long="cut"``
    its first *length* tokens are taken.

    The index is made from ``seq_starts`` with the view: eight bytes a pack, with *split_across_pack* sixteen, with ``fit="best"``
    and ``"crop"`` eight bytes a document more (sixteen where rests of some are in packs). *cache* keeps and maps
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
        self._plan = PackSettings(self.length, split_across_pack, max_packs, fit, too_long, pad_to, on_crop)
        file = None if cache is None else IndexFile.at(cache, tokens, self._plan)
        self._index, self._file = kept_index(tokens, self._plan, file)
        super().__init__(tokens, self._index.pack_count, fields, framework)

    def __getstate__(self) -> dict[str, Any]:
        # A mapped index is not copied to other processes: they map it, too.
        return {**self.__dict__, "_index": None} if self._file else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file:
            self._index, self._file = kept_index(self.tokens, self._plan, self._file)

    def _settings(self) -> JsonObject:
        return {"rows": "packed_documents", **self._plan._asdict(), "padding_idx": self.padding_idx}

    def _coverage(self) -> Coverage:
        return self._index.coverage(), None, len(self) * self.length

    def rows_of(self, documents: Int64s) -> Int64Pair:
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

    def token_ranges(self, indices: Int64s) -> Int64Pair:
        parts = self.parts(indices)
        return parts.starts, parts.counts

    def _read_many(self, views: Sequence[Part]) -> PackedDocuments:
        """The packs of rows of several views. ValueError if ``seq_starts`` has changed since the index was made."""
        found = [view.parts(rows) for view, rows, _ in views]
        parts, length = packs_together(found, self.length), self.length
        rows, lengths = len(parts.splits) - 1, parts.lengths.copy()
        filled = np.diff(running_sums(lengths)[parts.splits])
        if (
            int(lengths.min(initial=0)) < 0
            or int(filled.min(initial=length)) < (length if self._plan.fit == "crop" else 1)
            or int(filled.max(initial=0)) > length
            or (self._plan.pad_to == 1 and parts.counts.sum() != filled.sum())
        ):
            raise ValueError(
                f"{self.tokens.store.url}: seq_starts is not what the packing index was made of. Open the dataset again."
            )
        wanted = self._stored_fields
        tokens = labels = input_pos = document_ids = None
        if "tokens" in wanted or "labels" in wanted:
            tokens, labels = self._tokens_and_labels(views, found, parts, with_labels="labels" in wanted)
        if "document_ids" in wanted:
            document_ids = room_for((rows, length), np.int64)
        if "input_pos" in wanted:
            input_pos = room_for((rows, length), np.int32)
        _write_parts(parts, lengths, length - filled, length, document_ids, input_pos)
        written = ((tokens, self.padding_idx), (labels, IGNORED_LABEL), (document_ids, PADDING))
        _fill(np.arange(rows) * length + filled, length - filled, *written)
        if self._plan.pad_to > 1:
            _fill(parts.at + parts.counts, parts.lengths - parts.counts, *written[:2])
        fields: tuple[Any, ...] = (tokens, labels, input_pos, document_ids, parts.document_range)
        if len(views) > 1:
            order = np.argsort(np.concatenate([places for _, _, places in views]))
            fields = tuple(field if field is None else field[order] for field in fields)
        return PackedDocuments(*fields)

    def _tokens_and_labels(
        self, views: Sequence[Part], found: Sequence[Parts], parts: Parts, *, with_labels: bool
    ) -> tuple[Array, Array]:
        """``tokens`` and, if they are wanted, ``labels`` of packs, without their padding: int32[rows, length],
        int64[rows, length] or None.
        """
        shape = len(parts.splits) - 1, self.length
        encoded, labels = room_for(shape), room_for(shape, np.int64) if with_labels else None
        cuts = running_sums(np.array([len(one.at) for one in found]))
        reads = [(one.starts, one.counts, parts.at[cuts[k] : cuts[k + 1]]) for k, one in enumerate(found)]
        gather_all([view.tokens.encoded_tokens for view, _, _ in views], reads, encoded.reshape(-1))
        ids = encoded.view(np.int32)
        np.right_shift(encoded, np.uint32(1), out=encoded)
        if labels is not None:
            np.copyto(labels, ids)
            mask = np.ones(shape, np.uint8) if any(view.tokens.loss_mask is not None for view, _, _ in views) else None
            for (view, _, _), read in zip(views, reads, strict=True):
                if mask is not None and view.tokens.loss_mask is not None:
                    view.tokens.loss_mask.gather(*read[:2], mask.reshape(-1), read[2])
            if mask is not None:
                np.copyto(labels, IGNORED_LABEL, where=mask == 0)
        return ids, labels


def _write_parts(parts: Parts, lengths: Int64s, padding: Int64s, length: int, document_ids: Array, input_pos: Array) -> None:
    """Write the document and the position of each place, if they are wanted. The *padding* of a row goes on from its last
    document that has a token. *lengths* are changed.
    """
    documents, offsets, last = parts.documents, parts.offsets, parts.splits[1:] - 1
    if not lengths.all():
        last = np.maximum.accumulate(np.where(lengths > 0, np.arange(len(lengths)), 0))[last]
    if offsets.any():
        offsets = offsets % length
        if (again := np.flatnonzero(offsets + lengths > length)).size:  # they go on from 0: they are two parts
            rest = (offsets + lengths - length)[again]
            lengths[again] -= rest
            added = ((documents, documents[again]), (offsets, 0), (lengths, rest))
            documents, offsets, lengths = (np.insert(values, again + 1, more) for values, more in added)
            last = last + np.searchsorted(again, last, side="right")
    lengths[last] += padding
    is_beyond = bool((offsets[last] + lengths[last] > length).any())
    if len(documents) and int(documents.max()) < 1 << 31:
        documents = documents.astype(np.int32)  # half of the bytes on the way
    begins, size = running_sums(lengths), len(padding) * length
    step = max(PLACES_AT_A_TIME // length, 1) * length
    places = np.arange(min(size, step), dtype=np.int32)
    for first in range(0, size, step):
        stop, some = min(first + step, size), slice(None)
        if size > step:
            some = slice(*np.searchsorted(begins, [first, stop]).tolist())
        counts = lengths[some]
        if document_ids is not None:
            document_ids.reshape(-1)[first:stop] = np.repeat(documents[some], counts)
        if input_pos is not None:
            shifts = (offsets[some] - begins[:-1][some] + first).astype(np.int32)  # place in these rows -> position
            positions = input_pos.reshape(-1)[first:stop]
            np.add(np.repeat(shifts, counts), places[: stop - first], out=positions)
            if is_beyond:
                np.minimum(positions, length - 1, out=positions)


def _fill(starts: Int64s, counts: Int64s, *written: tuple[Array, int]) -> None:
    """Write a value into ranges of each array, whose rows are laid end to end. None is not written to."""
    if not (total := int(counts.sum())):
        return
    places = ranges(starts, counts) if total < np.count_nonzero(counts) * FEW_PLACES else None
    for out, value in written:
        if out is None:
            continue
        if places is not None:
            out.reshape(-1)[places] = value
            continue
        # Views of memory: numpy would let go of the interpreter's lock for each, and wait for it.
        flat, values = out.reshape(-1).data, np.full(int(counts.max()), value, out.dtype).data
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            flat[start : start + count] = values[:count]
