"""Rows of one document each, cut or padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.rows.frameworks import Array, Framework, places_along, room_for
from flat_tokens.rows.views import SplitView, TrainingFields, checked_length

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens


class _DocumentTokens(NamedTuple):
    encoded: Array
    length: Array


class DocumentTokens(TrainingFields, _DocumentTokens):  # type: ignore[misc]
    """One sequence a row, cut at the row's end or padded up to it; one row or many.

    ``encoded``: uint32[..., max_length], ``id * 2 + starts_a_sequence``; padding is the pad id, each a start.
    ``length``: int32[...], how many of them are the sequence's. The rest is derived from these.
    """

    __slots__ = ()

    @property
    def loss_mask(self) -> Array:
        """bool[..., max_length]: true on the sequence's tokens, false on padding."""
        return places_along(self.encoded) < self.length[..., None]

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Every field's name: the stored ones, then the derived."""
        return (*super().keys(), "loss_mask")


class DocumentsView(SplitView):
    """One sequence a row: cut at *max_length* tokens or padded up to it. Two reads: its place and its tokens.

    An empty sequence is a row of padding. ValueError for a max_length below 1 or a pad_id outside 0 to 2**31 - 1.
    """

    row_type = DocumentTokens

    def __init__(
        self,
        tokens: FlatTokens,
        max_length: int,
        pad_id: int = 0,
        *,
        fields: Sequence[str] | None = None,
        framework: Framework = "numpy",
    ) -> None:
        self.max_length, self.pad_id = checked_length("max_length", max_length), index(pad_id)
        if not 0 <= self.pad_id <= MAX_TOKEN_ID:
            raise ValueError(f"pad_id is {pad_id}, but token ids are 0 to {MAX_TOKEN_ID}")
        super().__init__(tokens, tokens.seq_count, fields, framework)

    def _read(self, i: int) -> DocumentTokens:
        start, stop = self.tokens.span(i)
        length = min(stop - start, self.max_length)
        encoded = self._padding(1)[0]
        self.tokens.encoded_tokens.read(start, start + length, encoded[:length])
        return DocumentTokens(encoded, np.int32(length))

    def _read_many(self, indices: npt.NDArray[np.int64]) -> DocumentTokens:
        starts, lengths = self.tokens.bounds(indices)
        lengths = np.minimum(lengths, self.max_length)
        encoded = self._padding(len(indices))
        row_starts = np.arange(len(indices)) * self.max_length
        self.tokens.encoded_tokens.gather(starts, lengths, encoded.reshape(-1), row_starts)
        return DocumentTokens(encoded, lengths.astype(np.int32))

    def _padding(self, rows: int) -> npt.NDArray[np.uint32]:
        encoded = room_for((rows, self.max_length))
        encoded.fill(self.pad_id * 2 + 1)
        return encoded
