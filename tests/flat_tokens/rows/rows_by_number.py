"""A view without a dataset: its rows are numbers; and what tests compare of batches."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from flat_tokens import BlockOrder, Visits

VIEWS: list[tuple[str, dict[str, Any]]] = [
    ("packed", {}),
    ("packed", {"overlap": 1}),
    ("documents", {}),
    ("blocks", {}),
    ("packed_documents", {"too_long": "cut"}),
    ("packed_documents", {"too_long": "cut", "max_packs": 3}),
    ("packed_documents", {"split_across_pack": True}),
    ("packed_documents", {"split_across_pack": True, "max_packs": 3}),
    ("packed_documents", {"too_long": "cut", "fit": "best"}),
    ("packed_documents", {"split_across_pack": True, "fit": "best", "max_packs": 3}),
    ("packed_documents", {"fit": "crop"}),
    ("packed_documents", {"fit": "crop", "on_crop": "keep", "max_packs": 4}),
]
"""Views of every kind, for rows of any length."""
small = st.integers(1, 12)
orders = st.sampled_from(["shuffled", "sequential"]) | st.builds(BlockOrder, small, small, st.integers(1, 5))
PACKS: list[dict[str, Any]] = [{}, {"split_across_pack": True}, {"fit": "best"}, {"too_long": "cut"}]
"""Packs of documents none of which is longer."""


def places_of(visits: Visits) -> list[tuple[int, int, int]]:
    """What was asked for, the step and the row of the batch of each visit."""
    return list(zip(visits.asked.tolist(), visits.step.tolist(), visits.batch_row.tolist(), strict=True))


def same_arrays(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Whether two rows or batches have equal arrays."""
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def assert_same_rows(found: Any, expected: Any) -> None:
    """Two views have the same rows, one by one and together, of the same documents, and leave the same tokens out."""
    assert len(found) == len(expected)
    assert found.fill[:4] == expected.fill[:4]
    rows = np.arange(len(found))
    batch, other = found.batch(rows), expected.batch(rows)
    assert type(batch) is type(other)
    for name in (*type(other)._fields, *type(other)._derived):
        assert np.array_equal(batch[name], other[name]), name
    for i in rows[:: max(len(rows) // 4, 1)].tolist():
        assert same_arrays(found[i], expected[i])
    every = np.arange(expected.tokens.seq_count)
    assert same_arrays(found.rows_of(every), expected.rows_of(every))


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
