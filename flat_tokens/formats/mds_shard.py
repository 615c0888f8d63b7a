"""Reading one shard of MDS: the places of its samples, and their tokens.

A shard is ``uint32 n | uint32 offset[n + 1] | configuration, JSON | samples``, its offsets counted from the file's start. A
sample is the sizes of its columns of variable size (uint32 each), then the columns, by name. A column of type
``ndarray:int32`` holds, in each sample, the kind of an array and its values: one byte ``dimensions << 2 | c``, a shape
of integers of ``2 ** c`` bytes, as narrow as they can be, the items. One of type ``ndarray`` has a byte before that, the type
of the items, which each sample may choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import DType, Int64Pair, Int64s, UInt8s, UInt32s, UInt64s
from flat_tokens.formats.compression import MAX_WHOLE_BYTES, Codec, decompress
from flat_tokens.formats.indexed import token_ids
from flat_tokens.rows.views import running_sums
from flat_tokens.stores.store import Store

INT32 = np.dtype("<i4")
MAX_SHARD_BYTES = 2**32
"""Offsets are 32 bits wide."""
BYTES_AT_A_TIME = 16 << 20
TYPES = {8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""The types of integers by their byte in a sample."""


def shape_bytes(lengths: Int64s) -> Int64s:
    return np.where(lengths < 1 << 8, 1, np.where(lengths < 1 << 16, 2, 4))


class MdsLayout(NamedTuple):
    """The layout of a shard's samples: the place of the tokens among their columns, and their type."""

    sizes: tuple[int | None, ...]
    """Sizes of the columns in the order of their names; None if each sample has its own."""
    at: int
    dtype: DType | None
    """None if each sample has its own."""
    has_shape: bool
    """Whether the array's shape precedes the items."""

    @property
    def variable(self) -> list[int]:
        """The columns of variable size."""
        return [i for i, size in enumerate(self.sizes) if size is None]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a sample without its columns of variable size."""
        return 4 * len(self.variable) + sum(size for size in self.sizes if size is not None)


class Samples(NamedTuple):
    """Sample i: its bytes ``offsets[i] : offsets[i + 1]``, where in them its tokens begin, and their numbers in the shard."""

    offsets: Int64s
    begins: Int64s
    entries: UInt64s
    types: UInt8s | None
    """The byte of each sample's type, where it has one."""

    def dtype(self, i: int, layout: MdsLayout) -> DType:
        """The type of sample *i*'s tokens."""
        if layout.dtype is not None:
            return layout.dtype
        assert self.types is not None
        return np.dtype(TYPES[int(self.types[i])])

    def alike(self, first: int, last: int) -> int:
        """The end of the samples from *first* on, up to *last*, that are of its type."""
        if self.types is None:
            return last
        other = np.flatnonzero(self.types[first:last] != self.types[first])
        return first + int(other[0]) if len(other) else last

    def lengths(self, first: int, last: int) -> Int64s:
        """Tokens of samples ``first:last``: int64[last - first]."""
        entries = self.entries[first : last + 1].astype(np.int64)
        return entries[1:] - entries[:-1]


@dataclass(frozen=True, eq=False)  # caches are for one opening of a shard: the file may change
class Shard:
    """The tokens of all samples of a shard."""

    store: Store
    key: str
    layout: MdsLayout
    sample_count: int
    size: int
    """In bytes, unpacked."""
    packed: tuple[Codec, str, int] | None
    """Codec, key and size of the packed shard."""

    @property
    def path(self) -> str:
        return self.store.path(self.packed[1] if self.packed else self.key)

    @cached_property
    def length(self) -> int:
        """Number of tokens in all samples."""
        return int(_samples_of(self).entries[-1])

    def entries(self, first: int, last: int) -> UInt64s:
        return _samples_of(self).entries[first : last + 1]

    def tokens(self, start: int, stop: int) -> UInt32s:
        """Tokens ``start:stop`` of the shard: uint32[stop - start]. ValueError if a sample is damaged."""
        samples = _samples_of(self)
        out, begun = np.empty(stop - start, np.uint32), start
        while start < stop:
            first = int(np.searchsorted(samples.entries, np.uint64(start), side="right")) - 1
            low = int(samples.offsets[first])
            last = int(np.searchsorted(samples.offsets, low + BYTES_AT_A_TIME, side="right")) - 1
            last = max(min(last, int(np.searchsorted(samples.entries, np.uint64(stop)))), first + 1)
            last, dtype = samples.alike(first, last), samples.dtype(first, self.layout)
            width = dtype.itemsize
            end = min(stop, int(samples.entries[last]))
            if last == first + 1:  # perhaps a very large one
                self._check_heads(samples, first, last, self.read(low, int(samples.begins[first])))
                begin = int(samples.begins[first]) + (start - int(samples.entries[first])) * width
                found = self.read(begin, begin + (end - start) * width)
            else:
                data = self.read(low, int(samples.offsets[last]))
                self._check_heads(samples, first, last, data)
                found = self._between(samples, first, last, data, width)[(start - int(samples.entries[first])) * width :]
            out[start - begun : end - begun] = token_ids(found[: (end - start) * width].view(dtype), self.path)
            start = end
        return out

    def _check_heads(self, samples: Samples, first: int, last: int, data: UInt8s) -> None:
        """ValueError if the sizes and shapes in samples do not fit their offsets."""
        layout, low = self.layout, samples.offsets[first]
        if layout.sizes[layout.at] is not None:
            return
        lengths, dtype, types = samples.lengths(first, last), samples.dtype(first, layout), samples.types
        shapes = shape_bytes(lengths)
        sizes = lengths * dtype.itemsize + (1 + shapes) * layout.has_shape + (types is not None)
        at = samples.offsets[first:last] - low + 4 * layout.variable.index(layout.at)
        wrong = _integers(data, at, 4) != sizes
        if layout.has_shape:
            at = samples.begins[first:last] - low - shapes
            wrong |= data[at - 1] != (1 << 2 | shapes >> 1)
            if types is not None:
                wrong |= data[at - 2] != types[first:last]
            for width in (1, 2, 4):
                these = np.flatnonzero(shapes == width)
                wrong[these] |= _integers(data, at[these], width) != lengths[these]
        if wrong.any():
            raise ValueError(
                f"{self.path}: sample {first + int(np.flatnonzero(wrong)[0])} is not one array of {dtype.name} in one "
                "dimension, as its offset says. The shard is damaged, or of another kind."
            )

    def _between(self, samples: Samples, first: int, last: int, data: UInt8s, width: int) -> UInt8s:
        """The bytes of the tokens, *width* each, among all bytes of samples ``first:last``."""
        begins = samples.begins[first:last]
        ends = begins + samples.lengths(first, last) * width
        sizes = np.empty(2 * len(begins) + 1, np.int64)
        sizes[1::2] = ends - begins
        sizes[0::2] = np.append(begins, samples.offsets[last]) - np.append(samples.offsets[first], ends)
        found: UInt8s = data[np.repeat(np.arange(len(sizes)) % 2 == 1, sizes)]
        return found

    def read(self, start: int, stop: int) -> UInt8s:
        """Bytes ``start:stop`` of the shard, unpacked."""
        if self.packed is not None:
            return _unpacked(self)[start:stop]
        data = self.store.read_range(self.key, start, stop)
        if len(data) != stop - start:
            raise ValueError(f"{self.path}: ends before byte {stop}. The file is truncated: fetch or write it again.")
        return np.frombuffer(data, np.uint8)


def _integers(data: UInt8s, at: Int64s, width: int) -> Int64s:
    """The integers of *width* bytes at these positions."""
    stored: UInt8s = data[at[:, None] + np.arange(width)]
    return stored.view(f"<u{width}")[:, 0].astype(np.int64)


@lru_cache(maxsize=4)
def _samples_of(shard: Shard) -> Samples:
    """The places of a shard's samples, from its offsets. ValueError if they are not in order within the shard."""
    layout, count, path = shard.layout, shard.sample_count, shard.path
    if shard.packed is None and (size := shard.store.size(shard.key)) != shard.size:
        raise ValueError(f"{path}: has {size} bytes, but the index says {shard.size}. Fetch or write it again.")
    if (ends := 4 * (count + 2)) > shard.size:
        raise ValueError(f"{path}: has {shard.size} bytes, which do not hold {count} samples")
    head = shard.read(0, ends).view("<u4")
    offsets = head[1:].astype(np.int64)
    if head[0] != count:
        raise ValueError(f"{path}: has {head[0]} samples, but the index says {count}")
    sizes = np.diff(offsets)
    if offsets[0] < ends or offsets[-1] != shard.size or (sizes < layout.fixed_bytes).any():
        raise ValueError(f"{path}: its offsets do not run from {ends} to {shard.size}, each leaving room for a sample")
    variable = layout.variable
    if variable == [layout.at]:
        stored = (sizes - layout.fixed_bytes)[:, None]
    else:
        stored = _heads(shard, offsets, offsets[:-1], 4 * len(variable)).view("<u4").astype(np.int64)
        if (wrong := np.flatnonzero(stored.sum(1) + layout.fixed_bytes != sizes)).size:
            raise ValueError(f"{path}: sample {wrong[0]} has columns of other sizes than its offset says")
    begins = offsets[:-1] + 4 * len(variable)
    for i, fixed in enumerate(layout.sizes[: layout.at + 1]):
        held = stored[:, variable.index(i)] if fixed is None else np.full(count, fixed)
        begins = begins + held * (i < layout.at)
    types: UInt8s | None = None
    if layout.dtype is not None:
        named, width = layout.dtype.name, np.full(1, layout.dtype.itemsize)
    else:
        if (wrong := np.flatnonzero(held < 1)).size:
            raise ValueError(f"{path}: sample {wrong[0]} has no byte for the type of its tokens")
        types = _heads(shard, offsets, begins, 1)[:, 0]
        if (wrong := np.flatnonzero(~np.isin(types, list(TYPES)))).size:
            raise ValueError(f"{path}: sample {wrong[0]} has type {types[wrong[0]]}, but tokens have one of {list(TYPES)}")
        # A type's byte is its bits, and one more where it is signed.
        named, width, begins, held = "integers'", types.astype(np.int64) // 8, begins + 1, held - 1
    lengths, shapes = _lengths(held, width, layout.has_shape)
    if (wrong := np.flatnonzero(lengths < 0)).size:
        raise ValueError(f"{path}: sample {wrong[0]} has {held[wrong[0]]} bytes of tokens, which are no {named} array")
    return Samples(offsets, begins + shapes, running_sums(lengths).astype(np.uint64), types)


def _lengths(held: Int64s, width: Int64s, has_shape: bool) -> Int64Pair:
    """The number of tokens, of *width* bytes, in columns of this many bytes, -1 if that is impossible, and of the bytes
    before.
    """
    shapes = np.zeros_like(held)
    if has_shape:
        shapes = 1 + np.where(held < 3 + (1 << 8) * width, 1, np.where(held < 4 + (1 << 16) * width, 2, 4))
    lengths, rest = np.divmod(held - shapes, width)
    fits = (rest == 0) & (lengths >= 0)
    if has_shape:
        fits &= 1 + shape_bytes(lengths) == shapes
    return np.where(fits, lengths, -1), shapes


def _heads(shard: Shard, offsets: Int64s, begins: Int64s, size: int) -> UInt8s:
    """The *size* bytes of each sample from *begins* on: uint8[n, size]. Needs one pass over the shard."""
    heads = np.empty((len(begins), size), np.uint8)
    first = 0
    while first < len(heads):
        last = max(int(np.searchsorted(offsets, offsets[first] + BYTES_AT_A_TIME, side="right")) - 1, first + 1)
        low, high = (begins[first], begins[first] + size) if last == first + 1 else (offsets[first], offsets[last])
        data = shard.read(int(low), int(high))
        if (wrong := np.flatnonzero(begins[first:last] + size > offsets[first + 1 : last + 1])).size:
            raise ValueError(f"{shard.path}: sample {first + wrong[0]} is shorter than its columns")
        heads[first:last] = data[(begins[first:last] - low)[:, None] + np.arange(size)]
        first = last
    return heads


@lru_cache(maxsize=1)
def _unpacked(shard: Shard) -> UInt8s:
    assert shard.packed is not None
    codec, key, expected = shard.packed
    if max(shard.size, expected) > MAX_WHOLE_BYTES:
        raise ValueError(f"{shard.path}: is larger than packed shards may be ({MAX_WHOLE_BYTES} bytes). Unpack it.")
    if (size := shard.store.size(key)) != expected:
        raise ValueError(f"{shard.path}: has {size} bytes, but the index says {expected}. Fetch or write it again.")
    try:
        return np.frombuffer(decompress(codec, shard.store.read(key), shard.size), np.uint8)
    except ValueError as error:
        raise ValueError(f"{shard.path}: {error}") from error
