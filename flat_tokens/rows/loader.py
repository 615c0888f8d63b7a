"""Batches by step: which rows of a view a step has follows from its number alone, so a run goes on wherever it stopped.

All samples of a run stand in one line, the *stream*: epoch 0's, then epoch 1's and so on. Batch ``step`` is positions
``start + step * batch_size`` up to ``+ batch_size`` of it, across the ends of epochs. No loader has a state: what counts
how far a run has come is the step, or the position in the stream, which batch size and number of hosts do not change.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from operator import index
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys, reference_permutation

Indices: TypeAlias = npt.NDArray[np.int64]
_Loaded: TypeAlias = tuple[Any, BaseException | None]

MIXTURE_BLOCK = 1 << 14
MIXTURE_CYCLE = 64


class View(Protocol):
    """What is loaded from: rows by number. The views of ``flat_tokens.views`` are such, and whatever else has these two."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Any:
        """Rows *indices* (int64[n], n may be 0) at once: a NamedTuple or dict of arrays with a leading axis n."""
        ...


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
            object.__setattr__(self, field.name, _at_least(1, field.name, getattr(self, field.name)))


class _Stream(Protocol):
    """The stream's order: which row of the view each position has."""

    epoch_length: int
    """Positions an epoch has; all rows of the view, or fewer."""
    granularity: int
    """What a batch's size and start are multiples of."""

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
    """The reference order. Epoch after epoch is what the reference gives for a seed that no permutation before has used."""

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


class _ByStep:
    """What loaders have in common: steps of *batch_size* samples from position *start* to *total*, for one host of some."""

    _step_count: int | None

    def __init__(
        self,
        view: View,
        batch_size: int,
        start: int,
        start_token: int | None,
        *,
        total: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self._row_tokens: int | None = getattr(view, "length", None)
        self.start = _at_least(0, "start", start)
        if start_token is not None:
            if self.start:
                raise ValueError(f"start is {self.start} and start_token {start_token}: give one of them")
            self.start, inside = divmod(_at_least(0, "start_token", start_token), self._tokens_of_a_row())
            if inside:
                raise ValueError(
                    f"start_token {start_token} is inside a row: with {self._row_tokens} tokens a row, rows begin at "
                    f"{start_token - inside} and {start_token - inside + self._tokens_of_a_row()}"
                )
        self.process_index, self.process_count = 0, 1
        self._total, self._step_count = total, None
        if total is not None:
            if self.start > total:
                raise ValueError(f"start is {self.start}, but there are {total} samples in all")
            left = total - self.start
            self._step_count = left // self.batch_size if drop_last else -(-left // self.batch_size)

    def __len__(self) -> int:
        """Steps from *start* on. TypeError where they are endless."""
        if self._step_count is None:
            raise TypeError("this loader is endless and has no length: take its first steps with steps(0, stop)")
        return self._step_count

    def __getitem__(self, step: SupportsIndex) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Steps:
        return self.steps()

    def steps(self, start: int = 0, stop: int | None = None, *, prefetch: int = 0, threads: int = 1) -> Steps:
        """The batches of steps ``start:stop`` in order, *stop* left out or the last one; see `Steps`."""
        return Steps(self, start, stop, prefetch, threads)

    def position(self, step: int) -> int:
        """Samples of the stream, over all hosts, that came before *step*: the *start* of a loader that goes on from there."""
        if (step := index(step)) != self._step_count:
            return self._span(step)[0]
        end = self.start + step * self.batch_size
        return end if self._total is None else min(end, self._total)

    def token_position(self, step: int) -> int:
        """The same in tokens, for views whose rows have one ``length``: the *start_token* of a loader that goes on."""
        return self.position(step) * self._tokens_of_a_row()

    def shard(self, process_index: int, process_count: int) -> Self:
        """The loader of one host of some: its batch is that host's rows of each batch, one host's behind the other's.

        ``batch_size``, steps and positions stay those of the whole. A short last batch is spread as evenly as it goes.
        ValueError where *batch_size* is not a multiple of *process_count*.
        """
        if self.process_count != 1:
            raise ValueError(f"this is already the loader of process {self.process_index} of {self.process_count}")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index}, but with {process_count} processes it is from 0 to one less")
        if self.batch_size % process_count:
            raise ValueError(f"batch_size {self.batch_size} does not divide evenly among {process_count} processes")
        part = copy.copy(self)
        part.process_index, part.process_count = index(process_index), index(process_count)
        return part

    def _span(self, step: SupportsIndex) -> tuple[int, int, int, int]:
        """A step's batch, positions ``start:stop`` of the stream, and this host's rows ``first:last`` of it."""
        step = index(step)
        if step < 0 or (self._step_count is not None and step >= self._step_count):
            there_are = "they count from 0" if self._step_count is None else f"there are {self._step_count}"
            if step >= 0 and self._total is not None:
                there_are += ", more with more epochs, and with epochs=None no end"
            raise IndexError(f"there is no step {step}; {there_are}")
        start = self.start + step * self.batch_size
        stop = start + self.batch_size if self._total is None else min(start + self.batch_size, self._total)
        rows = stop - start
        return start, stop, rows * self.process_index // self.process_count, rows * (self.process_index + 1) // self.process_count

    def _tokens_of_a_row(self) -> int:
        if self._row_tokens is None:
            raise TypeError("positions in tokens need a view whose rows have one `length`: count in samples here")
        return self._row_tokens


class ShuffledLoader(_ByStep):
    """Batches of one view: ``loader[step]`` is ``view.batch(loader.indices(step))``, and needs nothing but the step.

    *order* ``"shuffled"`` is a permutation of all rows, another in each epoch, which takes no memory; ``"sequential"``
    is rows 0, 1, 2 ...; a `ReferenceOrder` gives the batches of the reference loader. *epochs* None goes on for ever.
    *start* is how many samples of the stream a run has already had, in tokens *start_token*.

    Only the last batch of a run may have fewer than *batch_size* rows. *drop_last* drops it; None does so in the
    reference order alone, as the reference does. That order also has only whole read blocks, evenly dealt to its
    streams. ``left_out`` is how many rows of the view are in no batch.

    ValueError for an empty view, for a run too short for a single step, and, in the reference order, where *batch_size*
    or *start* are not multiples of its streams or the view is smaller than a read block a stream. Loaders can be pickled,
    survive a fork, and may be used by many threads.
    """

    def __init__(
        self,
        view: View,
        batch_size: int,
        seed: int = 0,
        *,
        epochs: int | None = 1,
        drop_last: bool | None = None,
        start: int = 0,
        start_token: int | None = None,
        order: Literal["shuffled", "sequential"] | ReferenceOrder = "shuffled",
    ) -> None:
        if len(view) == 0:
            raise ValueError("the view has no rows: there is nothing to load")
        self.view, self.seed, self.order = view, _seed(seed), order
        self.epochs = epochs if epochs is None else _at_least(1, "epochs", epochs)
        self._stream = _stream(order, len(view), self.seed)
        self.drop_last = isinstance(order, ReferenceOrder) if drop_last is None else drop_last
        total = None if self.epochs is None else self.epochs * self._stream.epoch_length
        super().__init__(view, batch_size, start, start_token, total=total, drop_last=self.drop_last)
        for name, value in (("batch_size", self.batch_size), ("start", self.start)):
            if value % self._stream.granularity:
                raise ValueError(f"{name} {value} does not divide evenly among {self._stream.granularity} streams")
        if self.drop_last and total is not None and total < self.batch_size:
            raise ValueError(
                f"there are {total} samples in all, fewer than one batch of {self.batch_size}, and drop_last leaves them out. "
                "Take smaller batches or more epochs."
            )

    def __repr__(self) -> str:
        steps = "endless steps" if self._step_count is None else f"{self._step_count:,} steps"
        return f"<ShuffledLoader: {steps} of {self.batch_size:,} rows of {self.view!r}>"

    @property
    def epoch_length(self) -> int:
        """Samples an epoch has: all rows of the view, in the reference order those of whole read blocks."""
        return self._stream.epoch_length

    @property
    def left_out(self) -> int:
        """Rows of the view that are in no epoch (in the reference order, its last ones), and samples of a dropped batch."""
        dropped = (self._total - self.start) % self.batch_size if self.drop_last and self._total is not None else 0
        return len(self.view) - self.epoch_length + dropped

    def indices(self, step: SupportsIndex) -> Indices:
        """The view's rows that a step has on this host: int64[rows]. IndexError where there is no such step."""
        return self._stream.rows(*self._span(step))

    def __getitem__(self, step: SupportsIndex) -> Any:
        """The batch of a step, as the view gives it. IndexError where there is no such step."""
        return self.view.batch(self.indices(step))


def _stream(order: Literal["shuffled", "sequential"] | ReferenceOrder, length: int, seed: int) -> _Stream:
    if isinstance(order, ReferenceOrder):
        return _ReferenceStream(order, length, seed)
    if order == "shuffled":
        return _ShuffledStream(length, seed)
    if order == "sequential":
        return _SequentialStream(length)
    raise ValueError(f"order is {order!r}, but it is 'shuffled', 'sequential' or a ReferenceOrder")


class MixedBatch(NamedTuple):
    """A batch of several sources' rows.

    ``samples``: the rows, as the sources' views give them. ``source``: int64[rows], which of ``mixture.names`` each is
    from. ``index``: int64[rows], its row in that source's view.
    """

    samples: Any
    source: Indices
    index: Indices  # type: ignore[assignment] # a field of this name hides a tuple's method


class Mixture(_ByStep):
    """Batches of several views, by weight: ``mixture[step]`` is a `MixedBatch` and needs nothing but the step.

    *sources* are ``{name: (view, weight)}``, or a list of ``(view, weight)``, named "0", "1" ... Weights are relative.
    The stream goes in blocks of 2**14 samples, a permutation of its own in each; the sources' parts of it are those of
    the weights, up to one sample in a block and to one in a million on the whole. Each source is a stream of shuffled
    epochs of its own, so a small one comes again sooner; see ``drawn``. *steps* None goes on for ever.

    ValueError for sources that are empty or differ in what their rows are, for weights that are not positive numbers,
    and for one so small that 2**20 samples would have none of it.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[View, float]] | Sequence[tuple[View, float]],
        batch_size: int,
        seed: int = 0,
        *,
        steps: int | None = None,
        start: int = 0,
        start_token: int | None = None,
    ) -> None:
        named = sources if isinstance(sources, Mapping) else {str(k): source for k, source in enumerate(sources)}
        if not named:
            raise ValueError("a mixture needs at least one source")
        self.names, self.seed = tuple(named), _seed(seed)
        self.views = tuple(view for view, _ in named.values())
        for name, view in zip(self.names, self.views, strict=True):
            if len(view) == 0:
                raise ValueError(f"source {name!r} has no rows. Leave it out.")
        self._quotas = _quotas({name: weight for name, (_, weight) in named.items()})
        _check_alike(self.names, self.views)
        self._permutations = tuple(KeyedPermutation(len(view)) for view in self.views)
        self._block_permutation = KeyedPermutation(MIXTURE_BLOCK)
        super().__init__(self.views[0], batch_size, start, start_token)
        if steps is not None:
            self._step_count = _at_least(1, "steps", steps)

    @cached_property
    def _cuts(self) -> Indices:
        """int64[cycle, sources + 1]: where each source's slots begin in a block."""
        return np.concatenate([np.zeros((MIXTURE_CYCLE, 1), np.int64), self._quotas.cumsum(axis=1)], axis=1)

    @cached_property
    def _before(self) -> Indices:
        """int64[cycle + 1, sources]: how many samples of each source the cycle's blocks before one have."""
        return np.concatenate([np.zeros((1, len(self.names)), np.int64), self._quotas.cumsum(axis=0)])

    def indices(self, step: SupportsIndex) -> tuple[Indices, Indices]:
        """The samples a step has on this host: their sources and their rows in those, int64[rows] each."""
        source, rows, _ = self._draw(step)
        return source, rows

    def _draw(self, step: SupportsIndex) -> tuple[Indices, Indices, dict[int, Indices]]:
        """A step's sources and rows, and where in the batch each source's are."""
        start, _, first, last = self._span(step)
        source, place = self._places(start + first, start + last)
        rows = np.empty(len(source), np.int64)
        where = {k: np.flatnonzero(source == k) for k in np.flatnonzero(np.bincount(source)).tolist()}
        for k, theirs in where.items():
            # place in the source's own stream -> (epoch, place in the epoch) -> row
            epochs, within = np.divmod(place[theirs], np.uint64(len(self.views[k])))
            keys = derive_keys(self.seed, 1, k, epochs if epochs.min() != epochs.max() else epochs[:1])
            rows[theirs] = self._permutations[k](within, keys).view(np.int64)
        return source, rows, where

    def drawn(self, step: int) -> Indices:
        """How many samples of each source came before *step*: int64[sources]. Divided by its rows: its epochs so far."""
        position = self.position(step)
        block, within = divmod(position, MIXTURE_BLOCK)
        cycle, block_in_cycle = divmod(block, MIXTURE_CYCLE)
        source, _ = self._places(position - within, position)
        blocks_before: Indices = cycle * self._before[-1] + self._before[block_in_cycle]
        return blocks_before + np.bincount(source, minlength=len(self.names))

    def _places(self, start: int, stop: int) -> tuple[Indices, npt.NDArray[np.uint64]]:
        """Positions ``start:stop`` -> source and place in the source's own stream: int64[n], uint64[n]."""
        source, place = np.empty(stop - start, np.int64), np.empty(stop - start, np.uint64)
        position = start
        while position < stop:
            block, within = divmod(position, MIXTURE_BLOCK)
            cycle, block_in_cycle = divmod(block, MIXTURE_CYCLE)
            count = min(MIXTURE_BLOCK - within, stop - position)
            part = slice(position - start, position - start + count)
            shuffled = self._block_permutation(
                np.arange(within, within + count, dtype=np.uint64), derive_keys(self.seed, 0, block)
            )
            slots, cuts = shuffled.view(np.int64), self._cuts[block_in_cycle]
            source[part] = k = np.searchsorted(cuts, slots, side="right") - 1
            place[part] = cycle * self._before[-1, k] + self._before[block_in_cycle, k] + slots - cuts[k]
            position += count
        return source, place

    def __getitem__(self, step: SupportsIndex) -> MixedBatch:
        """The batch of a step. IndexError where there is no such step."""
        source, rows, where = self._draw(step)
        parts = [self.views[k].batch(rows[theirs]) for k, theirs in where.items()]
        return MixedBatch(_together(parts, list(where.values())), source, rows)


def _quotas(weights: dict[str, float]) -> Indices:
    """How many samples of each source a block has, for the blocks of a cycle: int64[cycle, sources]."""
    for name, weight in weights.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"source {name!r} has weight {weight}, but weights are positive numbers")
    length = MIXTURE_BLOCK * MIXTURE_CYCLE
    # In fractions, so that no machine rounds another way.
    parts = [Fraction(float(weight)) for weight in weights.values()]
    exact = [part * length / sum(parts) for part in parts]
    cycle = np.array([math.floor(quota) for quota in exact])
    # The largest remainders are rounded up, the earlier source's first.
    by_remainder = sorted(range(len(exact)), key=lambda k: math.floor(exact[k]) - exact[k])
    cycle[by_remainder[: length - cycle.sum()]] += 1
    for name, weight, quota in zip(weights, weights.values(), cycle, strict=True):
        if quota == 0:
            raise ValueError(
                f"source {name!r} has weight {weight}: of {length} samples it would give none. Leave it out or give it more."
            )
    # What does not divide evenly by the blocks is dealt to them in turn, so that all blocks get the same number of samples.
    share, rest = np.divmod(cycle, MIXTURE_CYCLE)
    quotas = np.tile(share, (MIXTURE_CYCLE, 1))
    owner = np.repeat(np.arange(len(cycle)), rest)
    np.add.at(quotas, (np.arange(len(owner)) % MIXTURE_CYCLE, owner), 1)
    return quotas


def _check_alike(names: Sequence[str], views: Sequence[View]) -> None:
    kinds = [_row_kind(name, view) for name, view in zip(names, views, strict=True)]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"sources {names[0]!r} and {name!r} do not fit into one batch: rows are {kinds[0]} and {kind}. "
                "Give all sources the same kind of view, with the same settings."
            )


def _row_kind(name: str, view: View) -> str:
    rows = view.batch(np.empty(0, np.int64))
    named = rows if isinstance(rows, dict) else rows._asdict()
    for field, array in named.items():
        if getattr(array, "shape", ())[:1] != (0,):
            raise ValueError(f"source {name!r}: {field} is not one entry a row, so it cannot be mixed. Leave out the field.")
    arrays = (f"{field}: {type(array).__name__} {array.dtype}{list(array.shape[1:])}" for field, array in named.items())
    return f"{type(rows).__name__}({', '.join(arrays)})"


def _together(parts: Sequence[Any], places: Sequence[Indices]) -> Any:
    """The rows of several batches in one: row i of ``parts[k]`` becomes row ``places[k][i]``."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], dict):
        return {field: _placed([part[field] for part in parts], places) for field in parts[0]}
    return type(parts[0])(*(_placed(arrays, places) for arrays in zip(*parts, strict=True)))


def _placed(arrays: Sequence[Any], places: Sequence[Indices]) -> Any:
    if type(arrays[0]).__module__ == "torch":
        return importlib.import_module("torch").from_numpy(_placed([array.numpy() for array in arrays], places))
    if not isinstance(arrays[0], np.ndarray):  # jax's are not written to
        return arrays[0].__array_namespace__().concatenate(arrays)[np.argsort(np.concatenate(places))]
    rows = np.empty((sum(map(len, places)), *arrays[0].shape[1:]), arrays[0].dtype)
    for array, where in zip(arrays, places, strict=True):
        rows[where] = array
    return rows


class Steps:
    """Batches of a loader in order. ``step`` is the next one's.

    With *prefetch*, *threads* background threads load ahead, into at most that many batches that nobody has taken. They
    end with the iterator: at its last batch, with ``close()`` or a ``with`` block, or when nobody holds it any more. An
    error is raised where its batch is due; asking again tries again.

    ``state_dict()`` says how far it has come and ``load_state_dict()`` goes on from there, as torchdata's
    StatefulDataLoader wants it. IndexError for steps that the loader does not have.
    """

    def __init__(self, loader: _ByStep, start: int = 0, stop: int | None = None, prefetch: int = 0, threads: int = 1) -> None:
        self._loader, self._prefetch, self._threads = loader, _at_least(0, "prefetch", prefetch), _at_least(1, "threads", threads)
        there_are = loader._step_count
        self._stop = there_are if stop is None else index(stop)
        if there_are is not None and self._stop is not None and self._stop > there_are:
            raise IndexError(f"there are no steps up to {stop}; there are {there_are}")
        self._ahead: _Ahead | None = None
        self._closed = False
        self._changing = threading.Lock()  # one thread may close what another iterates over
        self._go_to(start)

    def _go_to(self, step: int) -> None:
        if self._stop is not None and step > self._stop:
            raise IndexError(f"there is no step {step} to begin at: these steps end at {self._stop}")
        self.close()
        self.step, self._closed = _at_least(0, "start", step), False
        if self._prefetch:
            self._running()

    def _running(self) -> _Ahead:
        """The threads' buffer, begun anew where there is none."""
        with self._changing:
            if self._closed:
                raise StopIteration
            if self._ahead is None:
                self._ahead = _Ahead(self._loader.__getitem__, self.step, self._stop, self._prefetch, self._threads)
                # The threads know the buffer, not this iterator: they do not keep it alive.
                self._stop_ahead = weakref.finalize(self, self._ahead.stop)
            return self._ahead

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._closed or self.step == self._stop:
            self.close()
            raise StopIteration
        if not self._prefetch:
            batch = self._loader[self.step]
        else:
            try:
                batch = self._running().take()
            except BaseException:
                self._end_ahead()
                raise
        self.step += 1
        return batch

    def close(self) -> None:
        """End: no batch comes any more, and no thread is left."""
        self._end_ahead(closed=True)

    def _end_ahead(self, *, closed: bool = False) -> None:
        with self._changing:
            self._closed = self._closed or closed
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._stop_ahead()
            ahead.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """The next step, and its position in the stream."""
        return {"step": self.step, "position": self._loader.position(self.step)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state. ValueError where it is another loader's, whose step is somewhere else in the stream."""
        step, position = state["step"], state["position"]
        if (here := self._loader.position(step)) != position:
            raise ValueError(
                f"the state is of step {step} at sample {position}, but in this loader that step is at sample {here}. "
                f"With another batch size or start, make the loader with start={position} and begin at step 0."
            )
        self._go_to(step)


class _Ahead:
    """Steps loaded by threads, in order, at most *depth* loading or waiting to be taken.

    Simple queues are all that threads share: they can be filled within a finalizer, whatever it interrupts.
    """

    def __init__(self, load: Callable[[int], Any], start: int, stop: int | None, depth: int, threads: int) -> None:
        self._load, self._process, self._stopped = load, os.getpid(), False
        self._steps = itertools.count(start) if stop is None else iter(range(start, stop))
        self._orders: SimpleQueue[tuple[int, SimpleQueue[_Loaded | None]] | None] = SimpleQueue()
        self._due: deque[SimpleQueue[_Loaded | None]] = deque()
        self._threads = [
            threading.Thread(target=self._work, name="flat-tokens-prefetch", daemon=True) for _ in range(min(threads, depth))
        ]
        for _ in range(depth):
            self._order_next()
        for thread in self._threads:
            thread.start()

    def _order_next(self) -> None:
        if (step := next(self._steps, None)) is None:
            self._send_home()
        else:
            self._due.append(SimpleQueue())
            self._orders.put((step, self._due[-1]))

    def _send_home(self) -> None:
        for _ in self._threads:
            self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._stopped:
            step, due = order
            try:
                due.put((self._load(step), None))
            except BaseException as error:  # noqa: BLE001 - raised where the batch is taken
                due.put((None, error))
            del order, due  # the next order may be long in coming, and the batch is large

    def take(self) -> Any:
        if os.getpid() != self._process:
            raise RuntimeError("these batches are loaded by threads of the process that was forked: call steps() anew here")
        if self._stopped or (loaded := self._due[0].get()) is None:
            raise StopIteration
        self._due.popleft()
        self._order_next()
        batch, error = loaded
        if error is not None:
            try:
                raise error
            finally:
                del error, loaded  # or its traceback and this frame would keep each other alive
        return batch

    def stop(self) -> None:
        self._stopped = True
        self._send_home()
        for due in list(self._due):
            due.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def _at_least(minimum: int, name: str, value: SupportsIndex) -> int:
    if (checked := index(value)) < minimum:
        raise ValueError(f"{name} is {checked}, but it is {minimum} or more")
    return checked


def _seed(value: SupportsIndex) -> int:
    if not 0 <= (seed := index(value)) < 1 << 64:
        raise ValueError(f"seed is {seed}, but it is from 0 to 2**64 - 1")
    return seed
