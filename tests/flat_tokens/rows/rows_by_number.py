"""A view without a dataset: its rows are numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Row(NamedTuple):
    number: npt.NDArray[np.int64]
    twice: npt.NDArray[np.int32]


class Numbers:
    """A view whose row i is i, and twice i, some times over."""

    def __init__(self, count: int, first: int = 0, width: int = 2) -> None:
        self._count, self._first, self.length = count, first, width

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: npt.NDArray[np.int64]) -> Row:
        assert indices.dtype == np.int64
        assert ((indices >= 0) & (indices < self._count)).all()
        numbers = indices + self._first
        return Row(numbers, np.repeat(2 * numbers, self.length).reshape(-1, self.length).astype(np.int32))
