"""Orders of rows: the row at each position of a loader's stream, and the position of each row. All of it is computed.

The *keyed* permutation of ``range(n)`` is a Feistel network: number x is the pair ``(x // b, x % b)`` of ``range(a)``
and ``range(b)``, and rounds r = 0, 1, 2 ... add to one half, alternately, a hash of the other:

    left = (left + hash(right + key + r * A) * a) mod a,  then  right = (right + hash(left + key + (r + 1) * A) * b) mod b

where ``A`` and ``mix`` are those of ``flat_tokens.keys``, all sums are modulo 2**64, and hash is the topmost 39 bits of
``mix``, taken as a fraction. Numbers from n to a * b go through the network again until they fall into ``range(n)``:
``a`` and ``b`` are about the square root of n, chosen so that there are hardly any.

The *reference* permutation is the one of the reference loader: swaps in a row, drawn from Philox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, Literal, TypeAlias

import numpy as np

from flat_tokens.annotations import Int64Pair, Int64s, UInt64s
from flat_tokens.keys import A, B, mix
from flat_tokens.options import at_least

MAX_LENGTH = 1 << 48
"""The longest keyed permutation: halves of 25 bits are multiplied by hashes of 39."""
ROUNDS = 8
SMALL_ROUNDS, SMALL_LENGTH = 24, 256
"""Functions of few values mix slowly: below 16 rounds a chi-square test distinguishes the orders of six numbers from random
ones.
"""

HASH_BITS = np.uint64(39)
DROPPED_BITS = np.uint64(64 - 39)
INDICES_AT_A_TIME = 1 << 13
"""The temporaries of this many numbers stay in the processor's second-level cache."""

Sides: TypeAlias = UInt64s
"""``a``, ``b`` and ``n`` of a network: uint64[3, 1], or uint64[3, n], those of each number."""


def derive_keys(seed: int, *numbers: int | Int64s | UInt64s) -> UInt64s:
    """Independent keys for a seed and any numbers after it: uint64[n], or uint64[1]."""
    return extended_keys(mix(np.array([seed], np.uint64) + A), *numbers)


def extended_keys(keys: UInt64s, *numbers: int | Int64s | UInt64s) -> UInt64s:
    """The keys for the same seed and numbers, and these after them."""
    for number in numbers:
        keys = mix(keys + np.atleast_1d(np.asarray(number, np.uint64)) * B + A)
    return keys


@dataclass(frozen=True)
class KeyedPermutation:
    """Permutations of ``range(length)``, one for each key. They take no memory: the place of a number is computed.

    ValueError for a length that is not from 1 to 2**48.
    """

    length: int

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise ValueError(f"there are permutations of 1 to {MAX_LENGTH} numbers, not of {self.length}")

    @cached_property
    def sides(self) -> Sides:
        root = isqrt(self.length - 1) + 1
        root += root % 2  # an even side: with two odd ones, every permutation would be an even one
        a = np.arange(root, root + min(root // 4, 1024) + 1, 2)
        best = int(a[np.argmin(-self.length % a)])
        return np.array([[best], [-(-self.length // best)], [self.length]], np.uint64)

    def __call__(self, indices: Int64s, keys: UInt64s) -> Int64s:
        """The place of each of *indices* in the permutation: int64[n]. *keys*: uint64[1] for all, or uint64[n]."""
        return _walked(indices, keys, self.sides)

    def inverse(self, places: Int64s, keys: UInt64s) -> Int64s:
        """The index of each of *places*: ``inverse(permutation(indices, keys), keys)`` is *indices*. It costs the same."""
        return _walked(places, keys, self.sides, is_back=True)


class KeyedPermutations:
    """Keyed permutations of several lengths, computed together."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._sides = np.concatenate([KeyedPermutation(length).sides for length in lengths], axis=1)

    def __call__(self, which: Int64s, indices: Int64s, keys: UInt64s) -> Int64s:
        """The place of each of *indices* in permutation *which* of these, with its key: int64[n]."""
        found, sides = np.empty(len(indices), np.int64), self._sides[:, which]
        is_small = sides[2] < SMALL_LENGTH
        for some in (np.flatnonzero(~is_small), np.flatnonzero(is_small)):  # which take another number of rounds
            if some.size:
                found[some] = _walked(indices[some], keys[some], sides[:, some])
        return found


def _walked(numbers: Int64s, keys: UInt64s, sides: Sides, is_back: bool = False) -> Int64s:
    """The *numbers* through the network, or back, once more while they fall outside of their ranges: int64[n]."""
    rounds = np.arange(SMALL_ROUNDS if sides[2, 0] < SMALL_LENGTH else ROUNDS, dtype=np.uint64)[:, np.newaxis] * A
    unsigned, permuted = numbers.view(np.uint64), np.empty(len(numbers), np.uint64)
    for start in range(0, len(numbers), INDICES_AT_A_TIME):
        part = slice(start, start + INDICES_AT_A_TIME)
        theirs, its = (array if array.shape[-1] == 1 else array[..., part] for array in (keys, sides))
        places = _network(unsigned[part], theirs, its, rounds, is_back)
        while (outside := np.flatnonzero(places >= its[2])).size:
            some, these = (array if array.shape[-1] == 1 else array[..., outside] for array in (theirs, its))
            places[outside] = _network(places[outside], some, these, rounds, is_back)
        permuted[part] = places
    return permuted.view(np.int64)


def _network(x: UInt64s, keys: UInt64s, sides: Sides, rounds: UInt64s, is_back: bool) -> UInt64s:
    """The Feistel network of a keyed permutation, or its inverse: uint64[n]."""
    a, b, _ = sides
    left = x // b
    right = x - left * b
    side, other = (b, a) if is_back else (a, b)  # back from the last round: their number is even
    for r in rounds[::-1] if is_back else rounds:
        hashed = mix((left if is_back else right) + (keys + r))
        hashed >>= DROPPED_BITS
        hashed *= side
        hashed >>= HASH_BITS
        if is_back:
            hashed = right - hashed
            # Above 2**63 where it wrapped around: there side must be added.
            left, right = np.minimum(hashed, hashed + side), left
        else:
            hashed += left
            # Below 2 * side: if side must not be subtracted, the difference wraps around to a huge number.
            left, right = right, np.minimum(hashed, hashed - side)
        side, other = other, side
    joined: UInt64s = left * b + right
    return joined


def reference_permutation(seed: int, n: int) -> Int64s:
    """The reference loader's permutation of ``range(n)``: int64[n].

    With ``r = Philox(seed).random_raw(n) % (arange(n) + 1)`` and ``p = arange(n)``, swap ``p[i]`` and ``p[r[i]]`` for i
    from n - 1 down to 0. Not swap by swap, but with the same result: the last swap that wrote to a place decides
    its number. ValueError for n above 2**32.
    """
    if not 0 <= n <= 1 << 32:
        raise ValueError(f"the reference order permutes up to 2**32 numbers at a time, not {n}")
    times = np.arange(n, dtype=np.uint64)
    drawn = np.random.Philox(seed).random_raw(n) % (times + np.uint64(1))
    # Swap i, at time i, moves what place i holds to place r[i] <= i. Sorted by (place, time): the writes to each place.
    writes = drawn << np.uint64(32) | times
    writes.sort()
    place, time = (writes >> np.uint64(32)).astype(np.int64), (writes & np.uint64(0xFFFFFFFF)).astype(np.int64)
    place_of, again = drawn.astype(np.int64), np.empty(max(n - 1, 0), np.bool_)
    np.equal(place[1:], place[:-1], out=again)
    # Time runs down, so the write before time i to the same place is the next larger time.
    before = np.full(n, -1)
    before[time[:-1][again]] = time[1:][again]
    # source[x]: the swap whose number is in place x when swap x comes to it: the last one that wrote there, or none.
    source = np.arange(n)
    first = np.ones(n, np.bool_)
    first[1:] = ~again
    source[place[first]] = time[first]
    own = np.flatnonzero(place_of == np.arange(n))
    source[own] = np.where(before[own] >= 0, before[own], own)
    # Swap t wrote the number of place t: follow the sources up to a place without writes, which holds its own number.
    while not np.array_equal(held := source[source], source):
        source = held
    permuted = np.where(before >= 0, held[before], place_of)
    permuted[own] = held[own]
    return permuted


Permuted: TypeAlias = Callable[[KeyedPermutation, Int64s, UInt64s], Int64s]
"""A permutation, or its inverse."""


class _CountSettings:
    """Settings of an order, which are all counts, of at least one."""

    def __post_init__(self) -> None:
        order: Any = self
        for field in fields(order):
            object.__setattr__(self, field.name, at_least(1, field.name, getattr(self, field.name)))


@dataclass(frozen=True)
class ReferenceOrder(_CountSettings):
    """The order of the reference loader, seqax's: read in blocks of consecutive rows, shuffled within buffers.

    Each of *streams* gives an equal part of every batch. It reads the blocks of *sequences_per_read_block* rows that a
    permutation of all blocks deals it, *read_blocks_per_shuffle_buffer* at a time, and permutes the rows of those.

    Rows at the view's end that do not fill a read block for every stream are in no epoch, and by default a last batch
    that is not full is dropped: at most ``streams * sequences_per_read_block - 1`` and ``batch_size - 1`` rows, which
    ``ShuffledLoader.left_out`` counts. Epochs after the first are those of the reference for other seeds.
    """

    streams: int
    read_blocks_per_shuffle_buffer: int
    sequences_per_read_block: int


@dataclass(frozen=True)
class BlockOrder(_CountSettings):
    """An order in which neighbouring rows come together, as random as its buffer: for datasets in a store.

    In each epoch the blocks of *block_rows* consecutive rows are in a random order. Laid in order so, all rows are
    cut into *streams* equal parts, each of which gives an equal part of every batch. A part is cut into buffers of up to
    *buffer_blocks* blocks' rows, and the rows of a buffer are in a random order. So a stream reads the blocks of one buffer at
    a time; hosts whose number divides *streams* read different blocks. It is computed for the rows of a step, and takes no
    memory.

    ``len(view) % streams`` rows, others in each epoch, are in no batch of it.
    """

    block_rows: int
    buffer_blocks: int
    streams: int = 1


class _WholeStream:
    """All rows, in each epoch in a permutation of its own; without a seed as they are."""

    granularity = 1

    def __init__(self, length: int, seed: int | None) -> None:
        self.epoch_length, self._seed, self._permutation = length, seed, KeyedPermutation(length)

    def rows(self, start: int, stop: int, first: int, last: int) -> Int64s:
        epochs: int | Int64s
        epochs, within = divmod(start + first, self.epoch_length)
        places = np.arange(within, within + last - first)
        if within + last - first > self.epoch_length:
            later, places = np.divmod(places, self.epoch_length)
            epochs = epochs + later
        return places if self._seed is None else self._permutation(places, derive_keys(self._seed, epochs))

    def places(self, rows: Int64s, epochs: Int64s) -> Int64Pair:
        if self._seed is not None:
            rows = self._permutation.inverse(rows, derive_keys(self._seed, epochs))
        return np.zeros_like(rows), epochs * self.epoch_length + rows


class _ReferenceStream:
    """The reference order. Each epoch is that of the reference for a seed that no permutation before has used."""

    def __init__(self, order: ReferenceOrder, length: int, seed: int) -> None:
        self._order, self._length, self._seed = order, length, seed
        self.granularity = order.streams
        self._stream_blocks = length // order.sequences_per_read_block // order.streams
        if self._stream_blocks == 0:
            streams, rows = order.streams, order.sequences_per_read_block
            raise ValueError(
                f"the view has {length} rows, but one read block for each stream takes {streams} streams * {rows} "
                f"sequences_per_read_block = {streams * rows} rows. Take fewer streams or smaller blocks."
            )
        self._stream_rows = self._stream_blocks * order.sequences_per_read_block
        self.epoch_length = self._stream_rows * order.streams
        self._minipochs = -(-self._stream_blocks // order.read_blocks_per_shuffle_buffer)
        # A step needs the buffer of every stream, or two of each where one ends, and the permutation of the blocks.
        self._permutation = lru_cache(maxsize=2 * order.streams + 2)(reference_permutation)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReferenceStream, (self._order, self._length, self._seed)

    def rows(self, start: int, stop: int, first: int, last: int) -> Int64s:
        streams, block_rows = self._order.streams, self._order.sequences_per_read_block
        buffer_blocks = self._order.read_blocks_per_shuffle_buffer
        share = (stop - start) // streams
        # row of the batch -> (stream, position in the stream), for the streams that have a part in the rows
        begin, end = first // share, -(-last // share)
        found = np.empty((end - begin, share), np.int64)
        at = 0
        while at < share:
            # position in the stream -> (epoch, minipoch, row of the buffer)
            epoch, in_epoch = divmod(start // streams + at, self._stream_rows)
            minipoch, row = divmod(in_epoch, buffer_blocks * block_rows)
            first_block = minipoch * buffer_blocks
            buffer_rows = min(buffer_blocks, self._stream_blocks - first_block) * block_rows
            count = min(buffer_rows - row, share - at)
            seed = self._seed + epoch * (1 + streams * self._minipochs)
            part = found[:, at : at + count]
            for stream in range(begin, end):
                part[stream - begin] = self._permutation(seed + 1 + minipoch * streams + stream, buffer_rows)[row : row + count]
            # row of the buffer -> (read block of the buffer, row of the block) -> row of the view
            block, within = np.divmod(part, block_rows)
            blocks = self._permutation(seed, self._stream_blocks * streams)
            part[:] = blocks[(first_block + block) * streams + np.arange(begin, end)[:, np.newaxis]] * block_rows + within
            at += count
        return found.reshape(-1)[first - begin * share : last - begin * share]

    def places(self, rows: Int64s, epochs: Int64s) -> Int64Pair:
        streams, block_rows = self._order.streams, self._order.sequences_per_read_block
        buffer_blocks = self._order.read_blocks_per_shuffle_buffer
        stream, place = np.zeros_like(rows), np.full_like(rows, -1)
        for epoch in np.unique(epochs[rows < self.epoch_length]).tolist():
            here = np.flatnonzero((epochs == epoch) & (rows < self.epoch_length))
            seed = self._seed + epoch * (1 + streams * self._minipochs)
            # row of the view -> (read block, row of the block) -> (minipoch, stream, row of the buffer)
            block, within = np.divmod(rows[here], block_rows)
            dealt, stream[here] = np.divmod(np.argsort(self._permutation(seed, self._stream_blocks * streams))[block], streams)
            minipoch, in_buffer = np.divmod(dealt, buffer_blocks)
            buffer_row, buffer = in_buffer * block_rows + within, minipoch * streams + stream[here]
            for number in np.unique(buffer).tolist():
                those, first_block = np.flatnonzero(buffer == number), number // streams * buffer_blocks
                buffer_rows = min(buffer_blocks, self._stream_blocks - first_block) * block_rows
                order = np.argsort(self._permutation(seed + 1 + number, buffer_rows))
                place[here[those]] = epoch * self._stream_rows + first_block * block_rows + order[buffer_row[those]]
        return stream, place


class _BlockStream:
    """The order of blocks. Each epoch has a permutation of the blocks, each buffer one of its rows."""

    def __init__(self, order: BlockOrder, length: int, seed: int) -> None:
        if length < order.streams:
            raise ValueError(f"the view has {length} rows, fewer than {order.streams} streams. Take fewer streams.")
        self._seed, self.granularity, self._block_rows = seed, order.streams, min(order.block_rows, length)
        self._stream_rows = length // order.streams
        self.epoch_length = self._stream_rows * order.streams
        self._permutation = KeyedPermutation(-(-length // self._block_rows))
        self._short_by = -length % self._block_rows
        # Buffers of two sizes, which differ by a row; the larger ones first.
        self._buffers = -(-self._stream_rows // (self._block_rows * order.buffer_blocks))
        self._buffer_rows, self._larger = divmod(self._stream_rows, self._buffers)
        self._in_buffer = tuple(KeyedPermutation(self._buffer_rows + more) for more in (0, 1))

    def rows(self, start: int, stop: int, first: int, last: int) -> Int64s:
        # row of the batch -> (stream, place in the stream) -> (epoch, place in the epoch's part of the stream)
        stream, at = np.divmod(np.arange(first, last), (stop - start) // self.granularity)
        epoch, place = np.divmod(at + start // self.granularity, self._stream_rows)
        # -> place in another order of the buffer -> place in all rows, block after block -> (slot, row of the block) -> row
        begins, within = self._shuffled(stream, epoch, place, KeyedPermutation.__call__)
        line = stream * self._stream_rows + begins + within
        keys, end_of_short = self._blocks_of(epoch)
        slot, row = np.divmod(line + np.where(line >= end_of_short, self._short_by, 0), self._block_rows)
        return self._permutation(slot, keys) * self._block_rows + row

    def places(self, rows: Int64s, epochs: Int64s) -> Int64Pair:
        keys, end_of_short = self._blocks_of(epochs)
        block, row = np.divmod(rows, self._block_rows)
        line = self._permutation.inverse(block, keys) * self._block_rows + row
        line -= np.where(line >= end_of_short + self._short_by, self._short_by, 0)
        is_there = line < self.epoch_length
        stream, place = np.divmod(np.where(is_there, line, 0), self._stream_rows)
        begins, within = self._shuffled(stream, epochs, place, KeyedPermutation.inverse)
        return stream, np.where(is_there, epochs * self._stream_rows + begins + within, -1)

    def _blocks_of(self, epochs: Int64s) -> tuple[UInt64s, Int64s]:
        """The key of each epoch's permutation of blocks, and where the block that is short ends in it: uint64[n], int64[n]."""
        different, which = np.unique(epochs, return_inverse=True)
        keys = derive_keys(self._seed, 5, different)
        short = np.full(len(different), self._permutation.length - 1)
        ends = (self._permutation.inverse(short, keys) + 1) * self._block_rows - self._short_by
        return keys[which], ends[which]

    def _shuffled(self, stream: Int64s, epoch: Int64s, place: Int64s, permuted: Permuted) -> Int64Pair:
        """Places in an epoch's part of a stream -> where their buffer begins, and their places in its permutation."""
        in_larger = self._larger * (self._buffer_rows + 1)
        is_larger = place < in_larger
        size = self._buffer_rows + is_larger
        buffer = np.where(is_larger, place, place - in_larger) // size + np.where(is_larger, 0, self._larger)
        begins = buffer * self._buffer_rows + np.minimum(buffer, self._larger)
        keys = derive_keys(self._seed, 6, epoch, stream, buffer)
        within = place - begins
        for permutation, those in zip(self._in_buffer, (np.flatnonzero(~is_larger), np.flatnonzero(is_larger)), strict=True):
            if those.size:
                within[those] = permuted(permutation, within[those], keys[those])
        return begins, within


Order: TypeAlias = Literal["shuffled", "sequential"] | ReferenceOrder | BlockOrder
Stream: TypeAlias = _WholeStream | _ReferenceStream | _BlockStream
"""The row of the view at each position. ``epoch_length``: positions in an epoch, those of all rows, or fewer. ``granularity``: a
batch's size and start are multiples of it, for each is dealt in equal shares to that many streams. ``rows(start, stop, first,
last)``: int64[last - first], the rows ``first:last`` of the batch that is positions ``start:stop``. ``places(rows, epochs)`` is
the inverse: int64[n] each, the stream that has a row in an epoch, and the place in it; -1 for a row that is in no epoch.
"""


def stream_of(order: Order, length: int, seed: int) -> Stream:
    if isinstance(order, BlockOrder):
        return _BlockStream(order, length, seed)
    if isinstance(order, ReferenceOrder):
        return _ReferenceStream(order, length, seed)
    if isinstance(order, str) and order in ("shuffled", "sequential"):
        return _WholeStream(length, seed if order == "shuffled" else None)
    raise ValueError(f"order is {order!r}, but it is 'shuffled', 'sequential', a ReferenceOrder or a BlockOrder")
