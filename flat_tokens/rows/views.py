"""Rows for training over one split: a fixed number of tokens each, read where and when they are wanted.

A row is handed out as it is stored, four bytes a token. What a model takes (inputs, targets, positions and so on) is
computed from that by whoever uses it: in a worker, on a device, inside ``jax.jit``.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, SupportsIndex, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.extras import extra

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens


Array: TypeAlias = Any
"""A numpy array, torch tensor or jax array (or tracer): what the framework asked for, or whatever it was made into."""
Framework = Literal["numpy", "torch", "jax"]
SEQUENCES_AT_A_TIME = 1 << 16
PIECE_TOKENS = 1 << 15
REUSED_TOKENS = range(1 << 18, (1 << 24) + 1)
"""How many tokens arrays have whose memory is used again: 1 to 64 MiB. Smaller ones the allocator keeps by itself."""
REUSED_ARRAYS = 4
"""How much of that is held while nobody uses it."""


class Row:
    """A named tuple whose fields go by their names as well: ``row["inputs"]``, ``"inputs" in row``, ``dict(row)``.

    Frameworks take it for the tuple of what is stored: torch collates it, jax and grain know it as a tree.
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


class _TrainingFields(Row):
    """What the format derives from the encoded tokens, along the last axis, whatever the axes before it.

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
            return np.right_shift(encoded.view(np.uint32), 1, out=_room(encoded.shape)).view(np.int32)
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
        """int32[..., length]: how many starts the row has up to here. 0: the end of a sequence begun before the row."""
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


class _PackedTokens(NamedTuple):
    encoded: Array


class PackedTokens(_TrainingFields, _PackedTokens):  # type: ignore[misc]
    """Tokens that follow one another in the dataset, whatever sequences they belong to; one row or many.

    ``encoded``: uint32[..., length], ``id * 2 + starts_a_sequence``. The rest is derived from it.
    """

    __slots__ = ()


class _DocumentTokens(NamedTuple):
    encoded: Array
    length: Array


class DocumentTokens(_TrainingFields, _DocumentTokens):  # type: ignore[misc]
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


def _tokens_before(encoded: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """`inputs` in one pass over *encoded*, in pieces that stay in the processor's cache."""
    inputs = _room(encoded.shape)
    tokens, found = np.ascontiguousarray(encoded).reshape(-1), inputs.reshape(-1)
    keep = np.empty(min(PIECE_TOKENS, len(tokens)), np.uint32)
    # found[i] = tokens[i - 1] >> 1 & keep[i], where keep is no bit at starts and all bits elsewhere
    for start in range(1, len(tokens), PIECE_TOKENS):
        stop = min(start + PIECE_TOKENS, len(tokens))
        kept, piece = keep[: stop - start], found[start:stop]
        np.bitwise_and(tokens[start:stop], 1, out=kept)
        np.subtract(kept, 1, out=kept)
        np.right_shift(tokens[start - 1 : stop - 1], 1, out=piece)
        np.bitwise_and(piece, kept, out=piece)
    inputs[..., :1] = 0  # so far the last token of the row before
    return inputs.view(np.int32)


class SplitView:
    """Rows of one split, by number: what the views have in common. It holds no tokens, but reads those that are asked for.

    Takes what a sequence takes: ``len(view)``, ``view[i]``, negative numbers, ``for row in view``. *fields* makes every
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
        """Row *i*. IndexError where there is none."""
        i = index(i)  # of numpy's integers too: their products overflow
        if not 0 <= i < self._count:
            if not -self._count <= i < 0:
                raise IndexError(self._no_row(i))
            i += self._count
        row = self._read(i)
        return row if self._as_read else self._handed_out(row)

    def __getitems__(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> list[Any]:
        """Rows as a list, read at once: what torch's DataLoader asks for. Each is a view of one array of them all."""
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


class BlocksView(SplitView):
    """Blocks of *length* tokens that start where sequences do, by Modalities' Megatron rule: one read a row.

    Sequences fill a block one after another. One that goes beyond its end opens the next block, again from its first
    token; a longer one than a block does not, and blocks then go on where the last ended. A last block that is not full
    is not there. ``starts``: int64[n], the first token of each; computed here, from ``seq_starts`` alone. ValueError for
    a length below 1.
    """

    row_type = PackedTokens

    def __init__(
        self, tokens: FlatTokens, length: int, *, fields: Sequence[str] | None = None, framework: Framework = "numpy"
    ) -> None:
        self.length = checked_length("length", length)
        self.starts = block_starts(tokens, self.length)
        super().__init__(tokens, len(self.starts), fields, framework)

    def _read(self, i: int) -> PackedTokens:
        start = int(self.starts[i])
        return PackedTokens(self.tokens.encoded_tokens.read(start, start + self.length))

    def _read_many(self, indices: npt.NDArray[np.int64]) -> PackedTokens:
        return gathered(self.tokens, self.starts[indices], self.length)


class DocumentsView(SplitView):
    """One sequence a row: cut at *max_length* tokens or padded up to it. Two reads: where it is, its tokens.

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
        encoded = _room((rows, self.max_length))
        encoded.fill(self.pad_id * 2 + 1)
        return encoded


def checked_length(name: str, value: int) -> int:
    if (length := index(value)) < 1:
        raise ValueError(f"{name} is {length}, but a row has at least one token")
    return length


def gathered(tokens: FlatTokens, starts: npt.NDArray[np.int64], length: int) -> PackedTokens:
    """The *length* tokens from each of *starts* on, in one read."""
    encoded = _room((len(starts), length))
    tokens.encoded_tokens.gather(starts, np.full(len(starts), length), encoded.reshape(-1), np.arange(len(starts)) * length)
    return PackedTokens(encoded)


def _room(shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """uint32[shape], not set, from a multiple of 64 bytes on: jax takes only such arrays over without a copy."""
    count = math.prod(shape)
    room = _reused(count + 16) if count in REUSED_TOKENS else np.empty(count + 16, np.uint32)
    skipped = -room.ctypes.data % 64 // 4
    return room[skipped : skipped + count].reshape(shape)


class _Lent:
    """Memory below a large array. It is left for the next one when the array is gone, and all that was cut from it."""

    __slots__ = ("__array_interface__", "_memory")
    left: ClassVar[deque[npt.NDArray[np.uint32]]] = deque(maxlen=REUSED_ARRAYS)

    def __init__(self, memory: npt.NDArray[np.uint32]) -> None:
        self._memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self) -> None:
        self.left.append(self._memory)


def _reused(count: int) -> npt.NDArray[np.uint32]:
    """uint32[count], not set. The pages of fresh memory would cost several times what is computed in them."""
    try:
        memory = _Lent.left.pop()
    except IndexError:
        memory = np.empty(count, np.uint32)
    lent: Any = _Lent(memory if len(memory) == count else np.empty(count, np.uint32))
    return np.asarray(lent)


# Modalities' Megatron rule


def block_starts(tokens: FlatTokens, length: int) -> npt.NDArray[np.int64]:
    """The first token of every block of *length* tokens by Modalities' Megatron rule: int64[n], increasing.

    Reads ``seq_starts`` once, in windows, and no tokens. ValueError where its entries are not in order.
    """
    # A sequence is counted in at most two blocks, and what is counted in a block is at least its length.
    found = np.empty(min(tokens.seq_count, 2 * tokens.token_count // length), np.int64)
    found_count = 0
    block, filled = 0, 0  # the open block's first token, and how many tokens sequences have put into it
    for entries in windows(tokens):
        # The state 2 * j + opens: sequence j has filled a block (and opens the next one, or does not). What the next
        # block holds counts from where j starts or ends, so that every state has one successor, whatever came before it.
        count = len(entries) - 1
        counts_from = np.stack([entries[1:], entries[:-1]], axis=1).reshape(-1)
        successors = _filled_next(entries, counts_from, np.repeat(np.arange(1, count + 1), 2), length)
        first = _filled_next(entries, entries[:1] - filled, np.zeros(1, np.int64), length)
        path = walk(int(first[0]), successors)
        # A sequence that opens a block says where that starts; other blocks follow the one before.
        opens = np.concatenate([[True], path % 2 == 1])
        starts = np.concatenate([[block], counts_from[path]])
        number = np.arange(len(starts))
        opened = np.maximum.accumulate(np.where(opens, number, 0))
        starts = starts[opened] + (number - opened) * length
        found[found_count : found_count + len(path)] = starts[:-1]
        found_count += len(path)
        filled = int(entries[-1] - (counts_from[path[-1]] if len(path) else entries[0] - filled))
        block = int(starts[-1])
    found.resize(found_count, refcheck=False)
    return found


def _filled_next(
    entries: npt.NDArray[np.int64], counts_from: npt.NDArray[np.int64], not_before: npt.NDArray[np.int64], length: int
) -> npt.NDArray[np.int64]:
    """The states in which blocks are filled whose tokens count from *counts_from*, by sequences from *not_before* on.

    int64[n]; ``2 * (len(entries) - 1)`` where no sequence of the window does it.
    """
    count = len(entries) - 1
    sequence = np.maximum(np.searchsorted(entries[1:], counts_from + length), not_before)
    there = np.minimum(sequence, count - 1)
    exact = entries[there + 1] - counts_from == length
    too_long = entries[there + 1] - entries[there] > length
    return np.where(sequence < count, 2 * there + ~(exact | too_long), 2 * count)


def walk(state: int, successors: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The states from *state* on, up to the first that has no successor here."""
    path = []
    successor = successors.data
    while state < len(successor):
        path.append(state)
        state = successor[state]
    return np.array(path, np.int64)


def windows(tokens: FlatTokens) -> Iterator[npt.NDArray[np.int64]]:
    """All of ``seq_starts``, checked, some sequences at a time: int64[n + 1], the last entry is the next one's first."""
    for start in range(0, tokens.seq_count, SEQUENCES_AT_A_TIME):
        entries = tokens.seq_starts.read(start, min(start + SEQUENCES_AT_A_TIME, tokens.seq_count) + 1)
        wrong = np.flatnonzero((entries[1:] < entries[:-1]) | (entries[1:] > np.uint64(tokens.token_count)))
        if wrong.size:
            raise ValueError(
                f"{tokens.store.url}: seq_starts goes from {entries[wrong[0]]} to {entries[wrong[0] + 1]} at {start + wrong[0]}, "
                f"but there are {tokens.token_count} tokens. The dataset is damaged: run flat_tokens.verify on it."
            )
        yield entries.astype(np.int64)


# numpy, torch and jax: what they name differently


def namespace_of(array: Array) -> Any:
    """numpy, torch or jax.numpy: whose array it is."""
    if (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        return torch
    try:
        return array.__array_namespace__()
    except AttributeError:
        raise TypeError(f"encoded tokens are an array of numpy, torch or jax, but this is a {type(array).__name__}") from None


def bits(encoded: Array) -> Array:
    """uint32 as int32, bit for bit: torch computes with hardly any unsigned type."""
    namespace = namespace_of(encoded)
    if encoded.dtype.itemsize != 4:
        raise TypeError(f"encoded tokens are uint32, or its bits as int32, but these are {encoded.dtype}")
    return encoded.view(namespace.int32)


def places_along(array: Array) -> Array:
    """0, 1, 2 ... along the last axis: int32[length]."""
    namespace = namespace_of(array)
    device = {"device": array.device} if namespace.__name__ == "torch" else {}
    return namespace.arange(array.shape[-1], dtype=namespace.int32, **device)


def running_max(array: Array) -> Array:
    """The largest so far along the last axis."""
    namespace = namespace_of(array)
    if namespace is np:
        return np.maximum.accumulate(array, axis=-1)
    if namespace.__name__ == "torch":
        return namespace.cummax(array, -1).values
    return extra("jax", "a jax array").lax.cummax(array, axis=array.ndim - 1)


def converted(array: npt.NDArray[Any], framework: Framework) -> Array:
    """The array as one of *framework*'s, in the same memory where that is possible."""
    if framework == "torch":
        return extra("torch", "framework='torch'").as_tensor(array)
    return extra("jax", "framework='jax'").device_put(array)
