"""Rows of one split: a fixed number of tokens each, read when they are wanted.

A row is handed out as it is stored, four bytes a token. The arrays that a model takes (inputs, targets, positions and so
on) are derived by its user: in a worker, on a device, inside ``jax.jit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, get_args

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.extras import extra
from flat_tokens.rows.frameworks import Array, Framework, bits, converted, namespace_of, places_along, room_for, running_max

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

TOKENS_AT_A_TIME = 1 << 15


class Row:
    """A named tuple whose fields can be read like a dict's: ``row["inputs"]``, ``"inputs" in row``, ``dict(row)``.

    To frameworks it is the tuple of its stored fields: torch collates it, jax and grain take it for a tree.
    """

    __slots__ = ()
    _fields: tuple[str, ...]

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Every field's name: the stored ones, then the derived."""
        return cls._fields

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)  # type: ignore[call-overload]
        if key not in self.keys():
            raise KeyError(f"there is no field {key!r}; there are {', '.join(self.keys())}")
        return getattr(self, key)


class TrainingFields(Row):
    """The fields that the format derives from encoded tokens, along the last axis; any axes may stand before it.

    numpy arrays, torch tensors and jax arrays or tracers give fields of their own kind, on their own device. TypeError for
    other arrays, and for tokens that are not 32 bits wide.
    """

    __slots__ = ()
    encoded: Array

    @property
    def targets(self) -> Array:
        """The tokens: int32[..., length]. None is masked: the first of a sequence is predicted from ``inputs`` 0."""
        encoded = bits(self.encoded)
        if namespace_of(encoded) is np:
            return np.right_shift(encoded.view(np.uint32), 1, out=room_for(encoded.shape)).view(np.int32)
        return encoded >> 1 & MAX_TOKEN_ID  # the shift drags the top bit along as a sign, the mask takes it off

    @property
    def is_seq_start(self) -> Array:
        """bool[..., length]: where sequences start. Tells a start from a token whose id is 0."""
        return (bits(self.encoded) & 1) != 0

    @property
    def inputs(self) -> Array:
        """int32[..., length]: the token before, 0 where there is none: at the row's first token and at starts."""
        encoded = bits(self.encoded)
        if namespace_of(encoded) is np:
            return _tokens_before(encoded.view(np.uint32))
        targets = self.targets
        previous = targets[..., :-1] * ~self.is_seq_start[..., 1:]
        return namespace_of(targets).concatenate([targets[..., :1] * 0, previous], -1)

    @property
    def segment_ids(self) -> Array:
        """int32[..., length]: the number of starts in the row up to here. 0: the rest of a sequence that began before the row."""
        namespace = namespace_of(self.encoded)
        return namespace.cumsum(self.is_seq_start, -1, dtype=namespace.int32)

    @property
    def positions(self) -> Array:
        """int32[..., length]: places since the sequence's start, or since the row's where that comes later."""
        places = places_along(self.encoded)
        return places - running_max(places * self.is_seq_start)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Every field's name: the stored ones, then the derived."""
        return (*cls._fields, "inputs", "targets", "is_seq_start", "segment_ids", "positions")


def _tokens_before(encoded: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """``inputs`` in one pass over *encoded*, in parts that stay in the processor's cache."""
    inputs = room_for(encoded.shape)
    tokens, found = np.ascontiguousarray(encoded).reshape(-1), inputs.reshape(-1)
    keep = np.empty(min(TOKENS_AT_A_TIME, len(tokens)), np.uint32)
    # found[i] = tokens[i - 1] >> 1 & keep[i], where keep is no bit at starts and all bits elsewhere
    for start in range(1, len(tokens), TOKENS_AT_A_TIME):
        stop = min(start + TOKENS_AT_A_TIME, len(tokens))
        kept, part = keep[: stop - start], found[start:stop]
        np.bitwise_and(tokens[start:stop], 1, out=kept)
        np.subtract(kept, 1, out=kept)
        np.right_shift(tokens[start - 1 : stop - 1], 1, out=part)
        np.bitwise_and(part, kept, out=part)
    inputs[..., :1] = 0  # so far the last token of the row before
    return inputs.view(np.int32)


class SplitView:
    """Base of all views: the rows of one split, by number. A view holds no tokens; rows are read when they are asked for.

    It works like a sequence: ``len(view)``, ``view[i]``, negative numbers, ``for row in view``. *fields* makes every
    row a dict of just these arrays; *framework* makes the arrays torch tensors or jax arrays.
    """

    row_type: type[Any]
    """The `Row` of its rows."""

    def __init__(self, tokens: FlatTokens, count: int, fields: Sequence[str] | None, framework: Framework) -> None:
        if fields is not None and (not fields or not set(fields) <= set(self.row_type.keys())):
            raise ValueError(f"fields is {fields!r}, but it names one or more of {', '.join(self.row_type.keys())}")
        if framework not in get_args(Framework):
            raise ValueError(f"framework is {framework!r}, but it is one of {', '.join(get_args(Framework))}")
        extra(framework, f"framework={framework!r}")
        self.tokens, self._count = tokens, count
        self.fields, self.framework = fields if fields is None else tuple(fields), framework
        self._as_read = fields is None and framework == "numpy"

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.tokens.store.url}: {self._count:,} rows>"

    def __getitem__(self, i: SupportsIndex) -> Any:
        """Row *i*. IndexError if there is none."""
        i = index(i)  # of numpy's integers too: their products overflow
        if not 0 <= i < self._count:
            if not -self._count <= i < 0:
                raise IndexError(self._no_row(i))
            i += self._count
        row = self._read(i)
        return row if self._as_read else self._handed_out(row)

    def __getitems__(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> list[Any]:
        """Rows as a list, read at once, as torch's DataLoader wants them. All are slices of one array."""
        rows = self.batch(indices)
        if isinstance(rows, dict):
            return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        return [self.row_type(*row) for row in zip(*rows, strict=True)]

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Any:
        """Rows *indices* (int64[n]), read at once and stacked: every field has the leading axis n."""
        rows = self._read_many(self._checked(indices))
        return rows if self._as_read else self._handed_out(rows)

    def _read(self, i: int) -> Any:
        """Row *i* of ``row_type``; *i* is one of the view's."""
        raise NotImplementedError

    def _read_many(self, indices: npt.NDArray[np.int64]) -> Any:
        """The rows, stacked; *indices* are of the view's."""
        raise NotImplementedError

    def _checked(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        rows = np.asarray(indices)
        if rows.size == 0:
            rows = rows.astype(np.int64)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise TypeError(f"row numbers are int64[n], but these are {rows.dtype}{list(rows.shape)}")
        if rows.size and not (-self._count <= int(rows.min()) and int(rows.max()) < self._count):
            raise IndexError(self._no_row(int(rows.min() if int(rows.max()) < self._count else rows.max())))
        rows = rows.astype(np.int64)
        return np.where(rows < 0, rows + self._count, rows)

    def _no_row(self, i: int) -> str:
        return f"{self.tokens.store.url}: there is no row {i}; there are {self._count}"

    def _handed_out(self, row: Any) -> Any:
        if self.framework != "numpy":
            row = self.row_type(*(converted(array, self.framework) for array in row))
        return row if self.fields is None else {name: row[name] for name in self.fields}


def checked_length(name: str, value: int) -> int:
    if (length := index(value)) < 1:
        raise ValueError(f"{name} is {length}, but a row has at least one token")
    return length
