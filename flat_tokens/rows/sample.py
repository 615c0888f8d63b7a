"""Some rows of a view, chosen at random, as a view."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from flat_tokens.array_types import Int64s
from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys

ROWS = 10
"""Purposes of random numbers, in addition to those of loaders."""


class SampledView:
    """*count* rows of a view, the same for the same seed. A larger sample has the rows of a smaller one. It takes no memory."""

    def __init__(self, view: Any, count: int, seed: int, number: int) -> None:
        self.view, self._count = view, count
        self._permutation, self._key = KeyedPermutation(len(view)), derive_keys(seed, ROWS, number)
        self.tokens = getattr(view, "tokens", None)
        if hasattr(view, "length"):
            self.length = view.length

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{self._count:,} rows of {self.view!r}>"

    def rows(self, indices: Int64s) -> Int64s:
        """The rows of the whole view: int64[n]."""
        return self._permutation(np.asarray(indices, np.int64).view(np.uint64), self._key).view(np.int64)

    def batch(self, indices: Int64s) -> Any:
        return self.view.batch(self.rows(indices))

    @property
    def has_epochs(self) -> bool:
        return bool(getattr(self.view, "has_epochs", False))

    def of_epoch(self, epoch: int) -> Self:
        if not self.has_epochs:
            return self
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, view=self.view.of_epoch(epoch))
        return other

    def rows_of(self, documents: Int64s) -> tuple[Int64s, Int64s]:
        """As of the whole view, of the rows that are in the sample."""
        of, rows = self.view.rows_of(documents)
        numbers = self._permutation.inverse(rows.view(np.uint64), self._key).view(np.int64)
        there = np.flatnonzero(numbers < self._count)
        return of[there], numbers[there]

    def token_ranges(self, indices: Int64s) -> Any:
        return self.view.token_ranges(self.rows(indices))
