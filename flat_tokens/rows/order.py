"""The stream: all samples of a run in one line, epoch after epoch, and which row stands at each position."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from operator import index
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys, reference_permutation

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReferenceOrder:
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

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, at_least(1, field.name, getattr(self, field.name)))


class Stream(Protocol):
    """An order of the stream: the row of the view at each position."""

    epoch_length: int
    """Number of positions in an epoch: all rows of the view, or fewer."""
    granularity: int
    """A batch's size and start are multiples of this."""

    def rows(self, start: int, stop: int, first: int, last: int) -> Indices:
        """Rows ``first:last`` of the batch that is positions ``start:stop``: int64[last - first]."""
        ...


class _SequentialStream:
    granularity = 1

    def __init__(self, length: int) -> None:
        self.epoch_length = length

    def rows(self, start: int, stop: int, first: int, last: int) -> Indices:
        return (np.arange(last - first) + (start + first) % self.epoch_length) % self.epoch_length


class _ShuffledStream:
    granularity = 1

    def __init__(self, length: int, seed: int) -> None:
        self.epoch_length, self._seed = length, seed
        self._permutation = KeyedPermutation(length)

    def rows(self, start: int, stop: int, first: int, last: int) -> Indices:
        epoch, within = divmod(start + first, self.epoch_length)
        positions = np.arange(within, within + last - first, dtype=np.uint64)
        epochs: int | npt.NDArray[np.uint64] = epoch
        if within + last - first > self.epoch_length:
            later, positions = np.divmod(positions, np.uint64(self.epoch_length))
            epochs = later + np.uint64(epoch)
        return self._permutation(positions, derive_keys(self._seed, epochs)).view(np.int64)


class _ReferenceStream:
    """The reference order. Each epoch is that of the reference for a seed that no permutation before has used."""

    def __init__(self, order: ReferenceOrder, length: int, seed: int) -> None:
        self._order, self._length, self._seed = order, length, seed
        self.granularity = order.streams
        self._stream_blocks = length // order.sequences_per_read_block // order.streams
        if self._stream_blocks == 0:
            raise ValueError(
                f"the view has {length} rows, but one read block for each stream takes {order.streams} streams "
                f"* {order.sequences_per_read_block} sequences_per_read_block = "
                f"{order.streams * order.sequences_per_read_block} rows. Take fewer streams or smaller blocks."
            )
        self._stream_rows = self._stream_blocks * order.sequences_per_read_block
        self.epoch_length = self._stream_rows * order.streams
        self._minipochs = -(-self._stream_blocks // order.read_blocks_per_shuffle_buffer)
        # A step needs the buffer of every stream, or two of each where one ends, and the permutation of the blocks.
        self._permutation = lru_cache(maxsize=2 * order.streams + 2)(reference_permutation)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReferenceStream, (self._order, self._length, self._seed)

    def rows(self, start: int, stop: int, first: int, last: int) -> Indices:
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


def stream_of(order: Literal["shuffled", "sequential"] | ReferenceOrder, length: int, seed: int) -> Stream:
    if isinstance(order, ReferenceOrder):
        return _ReferenceStream(order, length, seed)
    if order == "shuffled":
        return _ShuffledStream(length, seed)
    if order == "sequential":
        return _SequentialStream(length)
    raise ValueError(f"order is {order!r}, but it is 'shuffled', 'sequential' or a ReferenceOrder")


def at_least(minimum: int, name: str, value: SupportsIndex) -> int:
    if (checked := index(value)) < minimum:
        raise ValueError(f"{name} is {checked}, but it is {minimum} or more")
    return checked


def checked_seed(value: SupportsIndex) -> int:
    if not 0 <= (seed := index(value)) < 1 << 64:
        raise ValueError(f"seed is {seed}, but it is from 0 to 2**64 - 1")
    return seed
