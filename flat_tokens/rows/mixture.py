"""Batches of several views, mixed by weight."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from flat_tokens.rows.order import Indices, at_least, checked_seed
from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys
from flat_tokens.rows.steps import ByStep, View

MIXTURE_BLOCK = 1 << 14
MIXTURE_CYCLE = 64


class MixedBatch(NamedTuple):
    """A batch of several sources' rows.

    ``samples``: the rows, as the sources' views give them. ``source``: int64[rows], the number in ``mixture.names`` of
    each one's source. ``index``: int64[rows], its row in that source's view.
    """

    samples: Any
    source: Indices
    index: Indices  # type: ignore[assignment] # a field of this name hides a tuple's method


class Mixture(ByStep):
    """Batches of several views, by weight: ``mixture[step]`` is a `MixedBatch` and needs nothing but the step.

    *sources* are ``{name: (view, weight)}``, or a list of ``(view, weight)``, named "0", "1" ... Weights are relative.
    The stream is made of blocks of 2**14 samples, each with a permutation of its own. The sources' shares are those of
    the weights, up to one sample in a block and one in a million on the whole. Each source is a stream of shuffled
    epochs of its own, so a small one comes again sooner; see ``drawn``. With *steps* None it never ends.

    ValueError for sources that are empty or have different rows, for weights that are not positive numbers,
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
        self.names, self.seed = tuple(named), checked_seed(seed)
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
            self._step_count = at_least(1, "steps", steps)

    @cached_property
    def _firsts(self) -> Indices:
        """int64[cycle, sources + 1]: the first slot of each source in a block."""
        return np.concatenate([np.zeros((MIXTURE_CYCLE, 1), np.int64), self._quotas.cumsum(axis=1)], axis=1)

    @cached_property
    def _before(self) -> Indices:
        """int64[cycle + 1, sources]: the number of samples of each source in the blocks of the cycle before one."""
        return np.concatenate([np.zeros((1, len(self.names)), np.int64), self._quotas.cumsum(axis=0)])

    def indices(self, step: SupportsIndex) -> tuple[Indices, Indices]:
        """The samples a step has on this host: their sources and their rows in those, int64[rows] each."""
        source, rows, _ = self._draw(step)
        return source, rows

    def _draw(self, step: SupportsIndex) -> tuple[Indices, Indices, dict[int, Indices]]:
        """A step's sources and rows, and where in the batch each source's are."""
        start, _, first, last = self._batch_range(step)
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
        """Number of samples of each source before *step*: int64[sources]. Divided by the source's rows: its epochs so far."""
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
            slots, firsts = shuffled.view(np.int64), self._firsts[block_in_cycle]
            source[part] = k = np.searchsorted(firsts, slots, side="right") - 1
            place[part] = cycle * self._before[-1, k] + self._before[block_in_cycle, k] + slots - firsts[k]
            position += count
        return source, place

    def __getitem__(self, step: SupportsIndex) -> MixedBatch:
        """The batch of a step. IndexError if there is no such step."""
        source, rows, where = self._draw(step)
        parts = [self.views[k].batch(rows[theirs]) for k, theirs in where.items()]
        return MixedBatch(_together(parts, list(where.values())), source, rows)


def _quotas(weights: dict[str, float]) -> Indices:
    """Number of samples of each source in the blocks of a cycle: int64[cycle, sources]."""
    from fractions import Fraction  # only mixtures need it; it costs start-up time

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
    # The remainder of a division by the blocks is dealt to them in turn: all blocks get the same number of samples.
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
    """Join batches: row i of ``parts[k]`` becomes row ``places[k][i]``."""
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
