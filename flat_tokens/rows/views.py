"""Rows of one split: a fixed number of tokens each, read when they are wanted.

A row is handed out as it is stored, four bytes a token. The arrays that a model takes (inputs, targets, positions and so
on) are derived by its user: in a worker, on a device, inside ``jax.jit``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import Bools, Int32s, Int64Pair, Int64s, Integers, JsonObject, UInt32s
from flat_tokens.arrays.stored import gather_all
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.extras import extra
from flat_tokens.manifest import dataset_of, manifest_of
from flat_tokens.options import one_of, whole_number, whole_numbers
from flat_tokens.rows import frameworks
from flat_tokens.rows.documents import checked_files, fact_of, sources_of, stored_fact
from flat_tokens.rows.frameworks import Array, Attention, Fields, Framework, bits, namespace_of, places_along, room_for

if TYPE_CHECKING:
    from flat_tokens.rows.split import FlatTokens


Covered: TypeAlias = Callable[[int, Int64s], Int64s]
"""Tokens in a row of each document from number *first* on, with these bounds (int64[n + 1]): int64[n]."""
Coverage: TypeAlias = tuple[Covered, int | None, int]
"""Tokens of documents that are in a row; places of all rows that hold a token, None: as many; places of all rows."""


class SourceFill(NamedTuple):
    """Tokens of a source's documents. ``cut``: those that are in no row, of documents that are in one with others. ``dropped``:
    those of documents that are in no row.
    """

    tokens: int
    cut: int
    dropped: int


class Fill(NamedTuple):
    """Waste of a view's rows. Tokens are those of the split, with the first and end-of-text tokens that the view adds.

    ``share``: the part of the rows' places that hold a token and no padding, 0 to 1. ``cut``: tokens in no row, of documents that
    are in one with others. ``dropped``: tokens of documents that are in no row. ``sources``: the last three of each source, by
    name; empty if the dataset does not record its documents' sources.
    """

    share: float
    tokens: int
    cut: int
    dropped: int
    sources: Mapping[str, SourceFill]

    @property
    def used(self) -> float:
        """The part of the split's tokens that are in a row, 0 to 1."""
        return 1 - (self.cut + self.dropped) / self.tokens if self.tokens else 0.0


IGNORED_LABEL = -100
"""The label of what does not count, which torch's ``cross_entropy`` ignores by default."""
TOKENS_AT_A_TIME = 1 << 15
SEQUENCES_AT_A_TIME = 1 << 16


class Row:
    """A named tuple whose fields can be read like a dict's: ``row["inputs"]``, ``"inputs" in row``, ``dict(row)``.

    To frameworks it is the tuple of its stored fields: torch collates it, jax and grain take it for a tree.
    """

    __slots__ = ()
    _fields: tuple[str, ...]
    _derived: tuple[str, ...] = ()
    _on_request: tuple[str, ...] = ()
    """Fields that are not among ``keys()``, but are there when somebody asks for them."""
    _made_of: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The stored fields that others are made of, where not all of them are."""

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Every field's name: the stored ones, then the derived."""
        return cls._fields + cls._derived

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)  # type: ignore[call-overload]
        if key not in (*self.keys(), *self._on_request):
            raise KeyError(f"there is no field {key!r}; there are {', '.join(self.keys())}")
        return getattr(self, key)


class TrainingFields(Attention, Row):
    """The fields that the format derives from encoded tokens, along the last axis; any axes may be before it.

    numpy arrays, torch tensors and jax arrays or tracers give fields of their own kind, on their own device. TypeError for
    other arrays, and for tokens that are not 32 bits wide.
    """

    __slots__ = ()
    encoded: Array
    _derived: tuple[str, ...] = ("inputs", "targets", "is_seq_start", "segment_ids", "positions")

    @property
    def targets(self) -> Array:
        """The tokens: int32[..., length]. None is masked: the first of a sequence is predicted from ``inputs`` 0."""
        encoded = bits(self.encoded)
        if namespace_of(encoded) is np:
            return np.right_shift(encoded.view(np.uint32), 1, out=room_for(encoded.shape)).view(np.int32)
        return encoded >> 1 & MAX_TOKEN_ID  # the shift drags the top bit along as a sign, the mask takes it off

    @property
    def is_seq_start(self) -> Array:
        """bool[..., length]: where sequences start. Distinguishes a start from a token whose id is 0."""
        return (bits(self.encoded) & 1) != 0

    @property
    def inputs(self) -> Array:
        """int32[..., length]: the token before, 0 if there is none: at the row's first token and at starts."""
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

    def _segments(self) -> Array:
        return self.segment_ids

    @property
    def positions(self) -> Array:
        """int32[..., length]: places since the start of the sequence, or of the row if that is later."""
        places = places_along(self.encoded)
        return places - frameworks.running_max(places * self.is_seq_start)


class LabelledFields(TrainingFields):
    """The fields of rows with a ``loss_mask``: also ``labels``, on request."""

    __slots__ = ()
    _on_request = ("labels",)

    @property
    def labels(self) -> Array:
        """int64[..., length]: ``targets``, -100 where ``loss_mask`` is false. int32 in jax."""
        namespace, row = namespace_of(self.encoded), cast("Any", self)
        labels = namespace.where(row.loss_mask, self.targets, IGNORED_LABEL)
        if namespace is np:
            return labels.astype(np.int64)
        return labels.long() if namespace.__name__ == "torch" else labels


def _tokens_before(encoded: UInt32s) -> Int32s:
    """``inputs`` in one pass over *encoded*, in parts that stay in the processor's cache."""
    inputs = room_for(encoded.shape)
    tokens, found = np.ascontiguousarray(encoded).reshape(-1), inputs.reshape(-1)
    keep = np.empty(min(TOKENS_AT_A_TIME, len(tokens)), np.uint32)
    # found[i] = tokens[i - 1] >> 1 & keep[i], where keep has no bit set at starts and all bits elsewhere
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

    def __init__(self, tokens: FlatTokens, count: int, fields: Fields, framework: Framework) -> None:
        known = {*self.row_type.keys(), *self.row_type._on_request}
        if fields is not None and (not fields or not set(fields) <= known):
            raise ValueError(f"fields is {fields!r}, but it names one or more of {', '.join(self.row_type.keys())}")
        one_of("framework", framework, get_args(Framework))
        extra(framework, f"framework={framework!r}")
        self.tokens, self._count = tokens, count
        self.fields, self.framework = fields if fields is None else tuple(fields), framework
        self._as_read = fields is None and framework == "numpy"
        made_of = self.row_type._made_of
        self._stored_fields = {stored for name in fields or self.row_type._fields for stored in made_of.get(name, (name,))}
        """The stored fields that rows are made of: a view may leave the others out of what it reads, as None."""

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.tokens.store.url}: {self._count:,} rows>"

    def __iter__(self) -> Iterator[Any]:
        """All rows in order, one read each."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: SupportsIndex) -> Any:
        """Row *i*. IndexError if there is none."""
        i = index(i)  # of numpy's integers too: their products overflow
        if not 0 <= i < self._count:
            if not -self._count <= i < 0:
                raise IndexError(self._no_row(i))
            i += self._count
        row = self._read(i)
        return row if self._as_read else self._handed_out(row)

    def __getitems__(self, indices: Sequence[int] | Integers) -> list[Any]:
        """Rows as a list, read at once, as torch's DataLoader wants them. All are slices of one array."""
        rows = self.batch(indices)
        if isinstance(rows, dict):
            return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        return [self.row_type(*row) for row in zip(*rows, strict=True)]

    def batch(self, indices: Sequence[int] | Integers) -> Any:
        """Rows *indices* (int64[n]), read at once and stacked: every field has the leading axis n."""
        return self.together([(self, self._checked(indices), np.arange(len(indices)))])

    def together(self, parts: Sequence[Part]) -> Any:
        """Rows of several views that are alike, read at once and stacked."""
        rows = self._read_many(parts)
        return rows if self._as_read else self._handed_out(rows)

    def is_like(self, other: object) -> bool:
        """Whether rows of both are read `together`."""
        return (
            isinstance(other, SplitView)
            and (self.row_type, self.fields, self.framework) == (other.row_type, other.fields, other.framework)
            and self._settings() == other._settings()
        )

    def described(self) -> JsonObject:
        """The method of the split that makes this view, as ``rows``, and its arguments, for JSON; of a selection also a digest of
        the numbers of its documents.
        """
        handed_out = {"fields": (self.fields, None), "framework": (self.framework, "numpy")}
        made = settings_of(self.tokens)
        if (numbers := self.tokens.numbers) is not None:
            made |= {"selection": hashlib.sha256(numbers.astype("<i8", copy=False).data).hexdigest()}
        return self._settings() | made | {name: value for name, (value, default) in handed_out.items() if value != default}

    def _settings(self) -> JsonObject:
        raise NotImplementedError

    @property
    def has_epochs(self) -> bool:
        """Whether rows are not the same in every epoch: those that are filled in the middle."""
        return "fim" in getattr(self.tokens.encoded_tokens, "settings", ())

    def of_epoch(self, epoch: int) -> Self:
        """The view whose rows are those of an epoch, from 0 on; the same view if ``has_epochs`` is false. It costs nothing."""
        if not self.has_epochs:
            return self
        arrays: dict[str, Any] = {"encoded_tokens": self.tokens.encoded_tokens, "loss_mask": self.tokens.loss_mask}
        changed = {name: array.of_epoch(epoch) for name, array in arrays.items() if hasattr(array, "of_epoch")}
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, tokens=replace(self.tokens, **changed))
        return view

    def rows_of(self, documents: Int64s) -> Int64Pair:
        """The rows with tokens of *documents*, numbers of sequences of the split (int64[n]): int64[k], which of the documents,
        in order, and int64[k], the row. A document without a token is in no row.
        """
        starts, lengths = self.tokens.bounds(documents)
        first, stop = (np.clip(bound, 0, self._count) for bound in self._rows_between(starts, starts + lengths))
        counts = np.where(lengths > 0, stop - first, 0)
        return spread(first, counts)

    def _rows_between(self, starts: Int64s, stops: Int64s) -> Int64Pair:
        """The first row with one of the tokens ``starts:stops``, and one past the last, if there were more: int64[n] each."""
        raise NotImplementedError

    @property
    def fill(self) -> Fill:
        """How much of the rows is padding, and how many tokens are in none. Made in one pass over ``seq_starts``; it reads no
        token.
        """
        covered, filled, places = self._coverage()
        made_of, files = sources_of(manifest_of(dataset_of(self.tokens.store))), None
        of_file = np.repeat(np.arange(len(made_of)), [len(its) for _, its in made_of])  # file -> source
        with contextlib.suppress(FileNotFoundError):
            files = stored_fact(self.tokens, "file")
        names = [name for name, _ in made_of if files is not None]
        # (source, or one for all) -> tokens, cut, dropped
        sums, used, first = np.zeros((len(names) + 1, 3), np.int64), 0, 0
        for entries in read_starts(self.tokens):
            sizes, kept = np.diff(entries), covered(first, entries)
            lost, stop = sizes - kept, first + len(sizes)
            counts = np.stack([sizes, np.where(kept > 0, lost, 0), np.where(kept > 0, 0, lost)], axis=1)
            sums[-1] += counts.sum(axis=0)
            if files is not None and names:
                np.add.at(sums, of_file[checked_files(fact_of(self.tokens, files, first, stop), len(of_file))], counts)
            used, first = used + int(kept.sum()), stop
        share = (used if filled is None else filled) / places if places else 0.0
        *of_sources, whole = (SourceFill(*its) for its in sums.tolist())
        return Fill(share, *whole, dict(zip(names, of_sources, strict=True)))

    def _coverage(self) -> Coverage:
        raise NotImplementedError

    def _read(self, i: int) -> Any:
        """Row *i* of ``row_type``; *i* is one of the view's."""
        rows = self._read_many([(self, np.array([i]), np.zeros(1, np.int64))])
        return self.row_type(*(field if field is None else field[0] for field in rows))

    def _read_many(self, parts: Sequence[Part]) -> Any:
        """Rows of views that are alike, stacked; their numbers are of the views'."""
        raise NotImplementedError

    def token_ranges(self, indices: Int64s) -> Int64Pair:
        """The tokens that rows *indices* are read of: starts and lengths of ranges, int64[n] each."""
        raise NotImplementedError

    def _checked(self, indices: Sequence[int] | Integers) -> Int64s:
        rows = whole_numbers("row numbers are", np.asarray(indices))
        if rows.size and not (-self._count <= int(rows.min()) and int(rows.max()) < self._count):
            raise IndexError(self._no_row(int(rows.min() if int(rows.max()) < self._count else rows.max())))
        rows = rows.astype(np.int64)
        return np.where(rows < 0, rows + self._count, rows)

    def _no_row(self, i: int) -> str:
        return f"{self.tokens.store.url}: there is no row {i}; there are {self._count}"

    def _handed_out(self, row: Any) -> Any:
        if self.framework != "numpy":
            row = self.row_type(*(array if array is None else frameworks.converted(array, self.framework) for array in row))
        return row if self.fields is None else {name: row[name] for name in self.fields}


Part: TypeAlias = tuple[Any, Int64s, Int64s]
"""A view, rows of it, and their places in a batch: int64[n] each."""


def checked_length(name: str, value: int) -> int:
    if (length := whole_number(name, value)) < 1:
        raise ValueError(f"{name} is {length}, but a row has at least one token")
    return length


class PackedTokens(TrainingFields, NamedTuple("_PackedTokens", [("encoded", Array)])):  # type: ignore[misc]
    """Neighbouring tokens of a dataset, of any sequences; one row or many.

    ``encoded``: uint32[..., length], ``id * 2 + starts_a_sequence``. The rest is derived from it.
    """

    __slots__ = ()


class MaskedTokens(LabelledFields, NamedTuple("_MaskedTokens", [("encoded", Array), ("loss_mask", Array)])):  # type: ignore[misc]
    """`PackedTokens` of a dataset with a loss mask.

    ``loss_mask``: bool[..., length], true where the target counts: ``targets[i]`` is token i of the row.
    """

    __slots__ = ()


def _read_into(encoded: UInt32s, parts: Sequence[Part], ranges: Sequence[Int64Pair]) -> Iterator[Bools]:
    """Read the *ranges* of the rows of views into the rows of *encoded*. Yields their loss mask, if there is one."""
    reads = [(*bounds, places * encoded.shape[1]) for bounds, (_, _, places) in zip(ranges, parts, strict=True)]
    gather_all([view.tokens.encoded_tokens for view, _, _ in parts], reads, encoded.reshape(-1))
    if parts[0][0].tokens.loss_mask is not None:
        mask = np.zeros(encoded.shape, np.uint8)
        gather_all([view.tokens.loss_mask for view, _, _ in parts], reads, mask.reshape(-1))
        yield mask != 0


class TokenRows(SplitView):
    """Rows of *length* neighbouring tokens each."""

    row_type: type[Any] = PackedTokens
    """`MaskedTokens` where the dataset has a loss mask."""

    def __init__(self, tokens: FlatTokens, length: int, count: int, fields: Fields, framework: Framework) -> None:
        self.length = length
        if tokens.loss_mask is not None:
            self.row_type = MaskedTokens
        super().__init__(tokens, count, fields, framework)

    def _starts_of(self, rows: Any) -> Any:
        """The first token of a row, or of each of several."""
        raise NotImplementedError

    def _read(self, i: int) -> Any:
        if self.tokens.loss_mask is not None:
            return super()._read(i)
        start = int(self._starts_of(i))
        # Half the time of PackedTokens(...), which would be the dearest call here.
        return tuple.__new__(PackedTokens, (self.tokens.encoded_tokens.read(start, start + self.length),))

    def _read_many(self, parts: Sequence[Part]) -> Any:
        encoded = room_for((sum(len(places) for _, _, places in parts), self.length))
        return self.row_type(encoded, *_read_into(encoded, parts, [view.token_ranges(rows) for view, rows, _ in parts]))

    def token_ranges(self, indices: Int64s) -> Int64Pair:
        return self._starts_of(indices), np.full(len(indices), self.length)


class PackedView(TokenRows):
    """All tokens in the order they are stored, cut every *length* tokens: one read a row.

    Row i is tokens ``i * (length - overlap)`` to ``+ length``. Without overlap these are the format's packed sequences,
    ``token_count // length`` of them; with an overlap of one token, the last target of a row is the first of the next
    (Modalities' ``reuse_last_target``). The tokens of a last, shorter row are in no row. ValueError for a length below
    1, for an overlap that is not in ``0 <= overlap < length``, and, with an overlap, for fewer tokens than a row.
    """

    def __init__(
        self, tokens: FlatTokens, length: int, *, overlap: int = 0, fields: Fields = None, framework: Framework = "numpy"
    ) -> None:
        self.length, self.overlap = checked_length("length", length), whole_number("overlap", overlap)
        if not 0 <= self.overlap < self.length:
            raise ValueError(f"overlap is {overlap}, but it is from 0 to {self.length - 1} where length is {length}")
        count = tokens.token_count
        if self.overlap and count < self.length:
            raise ValueError(f"{tokens.store.url}: {count} tokens are fewer than one row of {length}. Take shorter rows.")
        self._stride = self.length - self.overlap
        super().__init__(tokens, self.length, max((count - self.length) // self._stride + 1, 0), fields, framework)

    def _starts_of(self, rows: Any) -> Any:
        return rows * self._stride

    def _settings(self) -> JsonObject:
        return {"rows": "packed", "length": self.length, "overlap": self.overlap}

    def _coverage(self) -> Coverage:
        end, places = (self._count - 1) * self._stride + self.length if self._count else 0, self._count * self.length
        return lambda first, entries: np.diff(np.minimum(entries, end)), places, places

    def _rows_between(self, starts: Int64s, stops: Int64s) -> Int64Pair:
        return (starts - self.length) // self._stride + 1, (stops - 1) // self._stride + 1


class DocumentTokens(LabelledFields, NamedTuple("_DocumentTokens", [("encoded", Array), ("length", Array)])):  # type: ignore[misc]
    """One sequence a row, cut at the row's end or padded up to it; one row or many.

    ``encoded``: uint32[..., max_length], ``id * 2 + starts_a_sequence``; padding is the pad id, each a start.
    ``length``: int32[...], how many of them are the sequence's. The rest is derived from these.
    """

    __slots__ = ()
    _derived = (*TrainingFields._derived, "loss_mask")

    @property
    def loss_mask(self) -> Array:
        """bool[..., max_length]: true on the sequence's tokens, false on padding."""
        return places_along(self.encoded) < self.length[..., None]


class _MaskedDocument(NamedTuple):
    encoded: Array
    length: Array
    loss_mask: Array


class MaskedDocumentTokens(LabelledFields, _MaskedDocument):  # type: ignore[misc]
    """`DocumentTokens` of a dataset with a loss mask.

    ``loss_mask``: bool[..., max_length], true on the sequence's tokens that count, false on the others and on padding.
    """

    __slots__ = ()


class DocumentsView(SplitView):
    """One sequence a row: cut at *max_length* tokens or padded up to it. Two reads: its place and its tokens.

    An empty sequence is a row of padding. ValueError for a max_length below 1 or a pad_id outside 0 to 2**31 - 1.
    """

    row_type: type[Any] = DocumentTokens
    """`MaskedDocumentTokens` where the dataset has a loss mask."""

    def __init__(
        self, tokens: FlatTokens, max_length: int, pad_id: int = 0, *, fields: Fields = None, framework: Framework = "numpy"
    ) -> None:
        self.max_length, self.pad_id = checked_length("max_length", max_length), whole_number("pad_id", pad_id)
        if not 0 <= self.pad_id <= MAX_TOKEN_ID:
            raise ValueError(f"pad_id is {pad_id}, but token ids are 0 to {MAX_TOKEN_ID}")
        if tokens.loss_mask is not None:
            self.row_type = MaskedDocumentTokens
        super().__init__(tokens, tokens.seq_count, fields, framework)

    def _read(self, i: int) -> Any:
        if self.tokens.loss_mask is not None:
            return super()._read(i)
        start, stop = self.tokens.span(i)
        length = min(stop - start, self.max_length)
        encoded = self._padding(1)[0]
        self.tokens.encoded_tokens.read(start, start + length, encoded[:length])
        return DocumentTokens(encoded, np.int32(length))

    def token_ranges(self, indices: Int64s) -> Int64Pair:
        starts, lengths = self.tokens.bounds(indices)
        return starts, np.minimum(lengths, self.max_length)

    def _read_many(self, parts: Sequence[Part]) -> Any:
        ranges = [view.token_ranges(rows) for view, rows, _ in parts]
        lengths = np.empty(sum(len(places) for _, _, places in parts), np.int32)
        for (_, counts), (_, _, places) in zip(ranges, parts, strict=True):
            lengths[places] = counts
        encoded = self._padding(len(lengths))
        return self.row_type(encoded, lengths, *_read_into(encoded, parts, ranges))

    def _settings(self) -> JsonObject:
        return {"rows": "documents", "max_length": self.max_length, "pad_id": self.pad_id}

    def _coverage(self) -> Coverage:
        return lambda first, entries: np.minimum(np.diff(entries), self.max_length), None, self._count * self.max_length

    def rows_of(self, documents: Int64s) -> Int64Pair:
        """Row i is document i, an empty one's too: int64[n], int64[n]."""
        self.tokens.bounds(documents)
        return np.arange(len(documents)), documents.astype(np.int64)

    def _padding(self, rows: int) -> UInt32s:
        encoded = room_for((rows, self.max_length))
        encoded.fill(self.pad_id * 2 + 1)
        return encoded


class BlocksView(TokenRows):
    """Blocks of *length* tokens by Modalities' Megatron rule: one read a row.

    Sequences fill a block one after another. One that goes beyond its end opens the next block, again from its first token.
    One that is longer than a block fills this one, whatever its length: the next block begins where this one ends, but counts
    the sequences after the long one. When one of these opens a block, the tokens between are in none; see ``fill``. A last
    block that is not full is dropped.

    ``starts``: int64[n], the first token of each block, computed from ``seq_starts`` alone. ValueError for a length below 1.
    """

    def __init__(self, tokens: FlatTokens, length: int, *, fields: Fields = None, framework: Framework = "numpy") -> None:
        self.length = checked_length("length", length)
        self.starts = block_starts(tokens, self.length)
        super().__init__(tokens, self.length, len(self.starts), fields, framework)

    def _starts_of(self, rows: Any) -> Any:
        return self.starts[rows]

    def _settings(self) -> JsonObject:
        return {"rows": "blocks", "length": self.length}

    def _coverage(self) -> Coverage:
        before = running_sums(np.minimum(np.diff(self.starts), self.length))  # tokens in the blocks before each one

        def covered(first: int, entries: Int64s) -> Int64s:
            block = np.searchsorted(self.starts, entries, side="right") - 1
            inside = np.minimum(entries - self.starts[block], self.length)
            return np.diff(np.where(block < 0, 0, before[block] + inside))

        places = self._count * self.length
        return covered if places else lambda first, entries: np.zeros(len(entries) - 1, np.int64), places, places

    def _rows_between(self, starts: Int64s, stops: Int64s) -> Int64Pair:
        return np.searchsorted(self.starts, starts - self.length, side="right"), np.searchsorted(self.starts, stops)


def block_starts(tokens: FlatTokens, length: int) -> Int64s:
    """The first token of every block of *length* tokens by Modalities' Megatron rule: int64[n], increasing. Reads ``seq_starts``
    once, some entries at a time, and no tokens. ValueError if its entries are not in order.
    """
    # A sequence counts in at most two blocks, and the tokens that count in a block are at least its length.
    found = np.empty(min(tokens.seq_count, 2 * tokens.token_count // length), np.int64)
    found_count = 0
    block, filled = 0, 0  # the open block's first token, and how many tokens sequences have put into it
    for entries in read_starts(tokens):
        # The state 2 * j + opens: sequence j has filled a block (and opens the next one, or does not). The next
        # block counts from where j starts or ends, so that every state has one successor, whatever came before it.
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
    # Not resized: newer numpy copies where it resizes. The pages after were never written to, so they take no memory.
    return found[:found_count]


def _filled_next(entries: Int64s, counts_from: Int64s, not_before: Int64s, length: int) -> Int64s:
    """The states in which blocks become full whose tokens count from *counts_from*, by sequences from *not_before* on: int64[n],
    ``2 * (len(entries) - 1)`` if none of these sequences fills the block.
    """
    count = len(entries) - 1
    sequence = np.maximum(np.searchsorted(entries[1:], counts_from + length), not_before)
    there = np.minimum(sequence, count - 1)
    exact = entries[there + 1] - counts_from == length
    too_long = entries[there + 1] - entries[there] > length
    return np.where(sequence < count, 2 * there + ~(exact | too_long), 2 * count)


def walk(state: int, successors: Int64s) -> Int64s:
    """The states from *state* on, up to the first that has no successor in the array."""
    path = []
    successor = successors.data
    while state < len(successor):
        path.append(state)
        state = successor[state]
    return np.array(path, np.int64)


def read_starts(tokens: FlatTokens, start: int = 0, stop: int | None = None, at_a_time: int | None = None) -> Iterator[Int64s]:
    """Checked entries of sequences ``start:stop``, *at_a_time*: int64[n + 1], whose last entry is the next array's first."""
    stop, at_a_time = tokens.seq_count if stop is None else stop, at_a_time or SEQUENCES_AT_A_TIME
    for first in range(start, stop, at_a_time):
        yield tokens.entries(first, min(first + at_a_time, stop)).astype(np.int64)


def end_to_end(lengths: Iterable[Int64s]) -> Iterator[Int64s]:
    """Arrays of lengths -> arrays of starts, int64[n + 1] as `read_starts` gives them, of documents laid end to end."""
    base = 0
    for window in lengths:
        positions = running_sums(window) + base
        yield positions
        base = int(positions[-1])


def document_bounds(tokens: FlatTokens, first: Int64s, stop: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Starts and lengths of the documents in ranges ``first[r]:stop[r]``, and where each range ends among them: int64[n],
    int64[n], int64[ranges + 1]. One read. ValueError if the entries are not in order.
    """
    at = running_sums(stop - first + 1)
    entries = np.empty(at[-1], np.uint64)
    tokens.seq_starts.gather(first, stop - first + 1, entries, at[:-1])
    within = np.ones(len(entries), bool)
    within[at[1:] - 1] = False  # a range's last entry is where its last document ends
    is_first = np.flatnonzero(within)
    starts, ends = entries[is_first], entries[is_first + 1]
    if ((starts > ends) | (ends > np.uint64(tokens.token_count))).any():
        raise ValueError(f"{tokens.store.url}: seq_starts is not in order. The dataset is damaged: run flat_tokens.verify on it.")
    return starts.astype(np.int64), (ends - starts).astype(np.int64), at - np.arange(len(at))


def running_sums(counts: npt.NDArray[np.integer | np.bool_]) -> Int64s:
    """Sums of the counts before each one, then of all: int64[n + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def spread(first: Int64s, counts: Int64s) -> Int64Pair:
    """The numbers of `ranges`, each after the number of its range: int64[n] each."""
    return np.repeat(np.arange(len(counts)), counts), ranges(first, counts)


def overlapped(entries: Int64s, starts: Int64s, lengths: Int64s) -> Int64Pair:
    """The documents between *entries* that have a token in ranges: int64[n], which range, and int64[n], the document."""
    first = np.searchsorted(entries, starts, side="right") - 1
    return spread(first, np.where(lengths > 0, np.searchsorted(entries, starts + lengths) - first, 0))


def settings_of(tokens: FlatTokens) -> JsonObject:
    """The arguments of a view that its split is made by, such as ``eos`` and ``fim``; see rows/virtual.py, made of views."""
    found: JsonObject = getattr(tokens.encoded_tokens, "settings", {}) | getattr(tokens.loss_mask, "settings", {})
    return found


def all_starts(tokens: FlatTokens) -> Int64s:
    """The checked entries of all sequences: int64[seq_count + 1], in memory."""
    return np.concatenate([np.zeros(1, np.int64), *(part[1:] for part in read_starts(tokens))])


def ranges(first: Int64s, counts: Int64s) -> Int64s:
    """``first[r]``, ``first[r] + 1``, ... of every range r, ``counts[r]`` numbers each."""
    return np.arange(counts.sum()) + np.repeat(first - running_sums(counts)[:-1], counts)
