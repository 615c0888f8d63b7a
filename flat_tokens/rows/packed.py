"""Rows of a fixed number of tokens, cut from the stored order."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.rows.frameworks import Array, Framework, room_for
from flat_tokens.rows.views import SplitView, TrainingFields, checked_length

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens


class _PackedTokens(NamedTuple):
    encoded: Array


class PackedTokens(TrainingFields, _PackedTokens):  # type: ignore[misc]
    """Neighbouring tokens of a dataset, of any sequences; one row or many.

    ``encoded``: uint32[..., length], ``id * 2 + starts_a_sequence``. The rest is derived from it.
    """

    __slots__ = ()


class PackedView(SplitView):
    """All tokens in the order they are stored, cut every *length* tokens: one read a row.

    Row i is tokens ``i * (length - overlap)`` to ``+ length``. Without overlap these are the format's packed sequences,
    ``token_count // length`` of them; with an overlap of one token, the last target of a row is the first of the next
    (Modalities' ``reuse_last_target``). The tokens of a last, shorter row are in no row. ValueError for a length below
    1, for an overlap that is not in ``0 <= overlap < length``, and, with an overlap, for fewer tokens than a row.
    """

    row_type = PackedTokens

    def __init__(
        self,
        tokens: FlatTokens,
        length: int,
        *,
        overlap: int = 0,
        fields: Sequence[str] | None = None,
        framework: Framework = "numpy",
    ) -> None:
        self.length, self.overlap = checked_length("length", length), index(overlap)
        if not 0 <= self.overlap < self.length:
            raise ValueError(f"overlap is {overlap}, but it is from 0 to {self.length - 1} where length is {length}")
        if self.overlap and tokens.token_count < self.length:
            raise ValueError(
                f"{tokens.store.url}: {tokens.token_count} tokens are fewer than one row of {length}. Take a shorter."
            )
        self._stride = self.length - self.overlap
        super().__init__(tokens, max((tokens.token_count - self.length) // self._stride + 1, 0), fields, framework)

    def _read(self, i: int) -> PackedTokens:
        start = i * self._stride
        # Half the time of PackedTokens(...), which would be the dearest call here.
        return tuple.__new__(PackedTokens, (self.tokens.encoded_tokens.read(start, start + self.length),))

    def _read_many(self, indices: npt.NDArray[np.int64]) -> PackedTokens:
        return gathered(self.tokens, indices * self._stride, self.length)


def gathered(tokens: FlatTokens, starts: npt.NDArray[np.int64], length: int) -> PackedTokens:
    """*length* tokens from each of *starts* on, in one read."""
    encoded = room_for((len(starts), length))
    tokens.encoded_tokens.gather(starts, np.full(len(starts), length), encoded.reshape(-1), np.arange(len(starts)) * length)
    return PackedTokens(encoded)
