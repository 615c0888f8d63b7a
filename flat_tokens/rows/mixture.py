"""Batches of several views, mixed by weight."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex, TypeAlias

import numpy as np

from flat_tokens.annotations import Bools, Int64Pair, Int64s
from flat_tokens.options import at_least
from flat_tokens.rows.loader import ByStep, View, check_view, checked_seed, read_batch, views_of
from flat_tokens.rows.orders import KeyedPermutation, KeyedPermutations, derive_keys
from flat_tokens.rows.phases import ORDER, Edit, Schedule
from flat_tokens.rows.views import Part, SplitView

if TYPE_CHECKING:
    from flat_tokens.rows.phases import Phase


SAMPLED_ROWS = 10
"""Purposes of random numbers, in addition to those of loaders."""


class SampledView:
    """*count* rows of a view, the same for the same seed. A larger sample has the rows of a smaller one. It takes no memory."""

    def __init__(self, view: Any, count: int, seed: int, number: int) -> None:
        self.view, self._count = view, count
        self._permutation, self._key = KeyedPermutation(len(view)), derive_keys(seed, SAMPLED_ROWS, number)
        self.tokens = getattr(view, "tokens", None)
        if hasattr(view, "length"):
            self.length = view.length

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{self._count:,} rows of {self.view!r}>"

    def rows(self, indices: Int64s) -> Int64s:
        """The rows of the whole view: int64[n]."""
        return self._permutation(np.asarray(indices, np.int64), self._key)

    def batch(self, indices: Int64s) -> Any:
        return self.view.batch(self.rows(indices))

    @property
    def has_epochs(self) -> bool:
        return bool(getattr(self.view, "has_epochs", False))

    def of_epoch(self, epoch: int) -> Self:
        if not self.has_epochs:
            return self
        found = copy(self)
        found.view = self.view.of_epoch(epoch)
        return found

    def rows_of(self, documents: Int64s) -> Int64Pair:
        """The rows of the sample that have documents, as of the whole view."""
        of, rows = self.view.rows_of(documents)
        numbers = self._permutation.inverse(rows, self._key)
        there = np.flatnonzero(numbers < self._count)
        return of[there], numbers[there]

    def token_ranges(self, indices: Int64s) -> Any:
        return self.view.token_ranges(self.rows(indices))


MixedSource: TypeAlias = tuple[View, float | Schedule] | tuple[View, float | Schedule, int | None]
"""A view, its weight, and for how many epochs it is drawn: without end if that is None or missing."""
ROWS_AT_A_TIME = 1 << 20
MOST_SAMPLES = 1 << 53
"""The samples of a source with a limit of epochs are numbered in int64, together with those of all others."""


class MixedBatch(NamedTuple):
    """A batch of several sources' rows.

    ``samples``: the rows, as the sources' views give them. ``source``: int64[rows], the number in ``mixture.names`` of
    each one's source. ``index``: int64[rows], its row in that source's view.
    """

    samples: Any
    source: Int64s
    index: Int64s  # type: ignore[assignment] # a field of this name hides a tuple's method


class EpochRows(NamedTuple):
    """The rows of a source that are drawn in each of the epochs *first* to *last*: bool[rows], None for all, once each."""

    first: int
    last: int
    rows: Bools | None


class Mixture(ByStep):
    """Batches of several views, by weight: ``mixture[step]`` is a `MixedBatch` and needs nothing but the step.

    *sources* are ``{name: (view, weight)}``, or a list of ``(view, weight)``, named "0", "1" ... Weights are relative: numbers,
    or a `Schedule` of them. The stream is made of blocks of 2**14 samples, each with a permutation of its own. The sources'
    shares are those of the weights, up to one sample in a block and one in a million on the whole. Each source is a stream of
    shuffled epochs of its own, of which every row is drawn before one is drawn again, so a small one comes again sooner; see
    ``drawn``. A source ``(view, weight, epochs)`` ends after that many epochs. The others go on by their weights, and the run
    ends when none is left. With *steps* None it never ends otherwise.

    ValueError for sources that are empty or have different rows, for weights that are not positive numbers, for one so small
    that 2**20 samples would have none of it, and for *steps* that the sources' epochs do not have. TypeError, naming the source,
    for what is not a view or no weight.
    """

    def __init__(
        self,
        sources: Mapping[str, MixedSource] | Sequence[MixedSource],
        batch_size: int,
        seed: int = 0,
        *,
        steps: int | None = None,
        start: int = 0,
        start_token: int | None = None,
    ) -> None:
        given = sources if isinstance(sources, Mapping) else {str(k): source for k, source in enumerate(sources)}
        if not given:
            raise ValueError("a mixture needs at least one source")
        named = {name: source_of(name, source) for name, source in given.items()}
        views = {name: view for name, (view, _, _) in named.items()}
        check_weights({name: weight for name, (_, weight, _) in named.items()})
        epochs = [most for _, _, most in named.values()]
        weights = {k: weight for k, (_, weight, _) in enumerate(named.values())}
        edit = Edit(0, at_least(1, "batch_size", batch_size), weights)
        self._begin(views, epochs, [edit], seed, steps, start, start_token)

    @classmethod
    def of_edits(
        cls,
        views: Mapping[str, View],
        epochs: Sequence[int | None],
        edits: Sequence[Edit],
        seed: int,
        steps: int | None = None,
    ) -> Self:
        """The mixture of a run that was edited. *epochs*: the limit of each source, None without one."""
        self = cls.__new__(cls)
        self._begin(views, epochs, edits, seed, steps, 0, None)
        return self

    def _begin(
        self,
        views: Mapping[str, View],
        epochs: Sequence[int | None],
        edits: Sequence[Edit],
        seed: int,
        steps: int | None,
        start: int,
        start_token: int | None,
    ) -> None:
        """Set up the phases of a run by its *edits*, with the first step and the first sample of each."""
        from flat_tokens.rows.phases import phases_of  # only mixtures need fractions, which cost start-up time

        self.names, self.views, self.seed = tuple(views), tuple(views.values()), checked_seed(seed)
        self._edits, self._limits = list(edits), list(epochs)
        check_views(views)
        first = self.views[0]
        samples = [samples_of(name, view, most) for (name, view), most in zip(views.items(), epochs, strict=True)]
        self._phases = list(phases_of(edits, samples, getattr(first, "length", None), self.seed))
        super().__init__(first, edits[-1].batch_size, start, start_token, self._phases[-1].stop)
        self._are_alike = isinstance(first, SplitView) and all(first.is_like(view) for view in self.views)
        self._lengths = np.array([len(view) for view in self.views])
        self._permutations = KeyedPermutations(self._lengths.tolist())
        self._phase_starts = [phase.start for phase in self._phases]
        totals = [self._in_phase(phase, phase.stop) for phase in self._phases[:-1] if phase.stop is not None]
        self._drawn_before = np.cumsum([np.zeros(len(views), np.int64), *totals], axis=0)
        # The step at which each phase begins, and its first sample
        self._first_steps = [phase.first_step for phase in self._phases]
        self._first_samples = [*self._phase_starts[:-1], self._phase_starts[-1] + self.start]
        if self._total is not None:
            self._step_count = self._first_steps[-1] + -(-(self._total - self._first_samples[-1]) // self.batch_size)
        if steps is not None:
            if self._step_count is not None and steps > self._step_count:
                raise ValueError(f"steps is {steps}, but the epochs of the sources end after {self._step_count}")
            self._step_count = at_least(1, "steps", steps)

    def _begins(self, step: int) -> int:
        phase = bisect_right(self._first_steps, step) - 1
        return self._first_samples[phase] + (step - self._first_steps[phase]) * self._phases[phase].batch_size

    def indices(self, step: SupportsIndex) -> Int64Pair:
        """The samples a step has on this host: their sources and their rows in those, int64[rows] each."""
        source, rows, *_ = self._draw(step)
        return source, rows

    def _draw(self, step: SupportsIndex) -> tuple[Int64s, Int64s, Int64s, list[Part]]:
        """A step's sources, rows and epochs on this host, int64[rows] each, and its parts."""
        start, _, first, last = self._batch_range(step)
        source, place = self._phases[bisect_right(self._phase_starts, start) - 1].places(start + first, start + last)
        # place in the source's own stream -> (epoch, place in the epoch) -> row
        epochs, within = np.divmod(place, self._lengths[source])
        keys = derive_keys(self.seed, 1, source, epochs)
        rows = self._permutations(source, within, keys)
        by_source, parts = np.argsort(source, kind="stable"), list[Part]()
        edges = np.flatnonzero(np.diff(source[by_source], prepend=-1, append=-1)).tolist()
        for begin, end in pairwise(edges):
            its = by_source[begin:end]
            parts += [(view, rows[its[n]], its[n]) for view, n in views_of(self.views[source[its[0]]], epochs[its])]
        return source, rows, epochs, parts

    def _parts(self, step: SupportsIndex) -> list[Part]:
        return self._draw(step)[-1]

    def drawn(self, step: int) -> Int64s:
        """Number of samples of each source before *step*: int64[sources]. Divided by the source's rows: its epochs so far."""
        position = self.position(step)
        phase = bisect_right(self._phase_starts, position) - 1
        found: Int64s = self._drawn_before[phase] + self._in_phase(self._phases[phase], position)
        return found

    def drawn_rows(self, step: int, source: str | None = None) -> Iterator[EpochRows]:
        """The rows of a source that are drawn before *step*, an item for each run of epochs that have the same, in order.

        An epoch that is drawn in part costs a bit more than a byte a row. *source* is needed if there are several.
        """
        k = self._number_of(source)
        whole, rest = divmod(int(self.drawn(step)[k]), len(self.views[k]))
        if whole:
            yield EpochRows(0, whole - 1, None)
        if rest:
            found, keys = np.zeros(len(self.views[k]), bool), derive_keys(self.seed, 1, k, whole)
            for first in range(0, rest, ROWS_AT_A_TIME):
                places = np.arange(first, min(first + ROWS_AT_A_TIME, rest))
                found[KeyedPermutation(len(found))(places, keys)] = True
            yield EpochRows(whole, whole, found)

    def _in_phase(self, phase: Phase, position: int) -> Int64s:
        """The samples of each source that a phase has before *position*: int64[sources]."""
        found = np.zeros(len(self.names), np.int64)
        found[phase.sources] = phase.drawn(position)
        return found

    def scaled(self, *, budget: int, target: int) -> Self:
        """The small run of *budget* tokens that acts as this mixture does in a run of *target* tokens: each source has the same
        share of the batches, and its rows are repeated as often, for it has ``budget / target`` of them, chosen by the seed.

        A small run of all rows would not repeat what a large one repeats, and so say nothing of it. Schedules are compressed by
        the same factor, limits of epochs stay. It ends after *budget* tokens. ValueError for a budget above the target or below a
        batch, for a run that was edited, and for the mixture of one host.
        """
        budget, target, row = at_least(1, "budget", budget), at_least(1, "target", target), self._tokens_of_a_row()
        if budget > target:
            raise ValueError(f"budget is {budget}, but it is at most the target, {target}: a small run acts as a large one")
        if (steps := budget // (row * self.batch_size)) < 1:
            raise ValueError(f"budget is {budget}, fewer tokens than a batch of {self.batch_size} rows of {row}")
        if len(self._edits) > 1 or self.process_count > 1:
            what = "was edited: make a mixture of its last weights" if len(self._edits) > 1 else "is of one host: scale it before"
            raise ValueError(f"the mixture {what}")
        views = {
            name: SampledView(view, max((len(view) * budget + target // 2) // target, 1), self.seed, number)
            for number, (name, view) in enumerate(zip(self.names, self.views, strict=True))
        }
        edit = self._edits[0]
        weights = {
            k: weight.scaled(budget, target) if isinstance(weight, Schedule) else weight for k, weight in edit.weights.items()
        }
        whole = self.of_edits(views, self._limits, [edit._replace(weights=weights)], self.seed)
        if whole._step_count is None or whole._step_count > steps:
            whole._step_count = steps
        return whole

    def versions(self) -> dict[str, int]:
        return {"order": ORDER}

    def _number_of(self, source: str | None) -> int:
        if source is None and len(self.names) == 1:
            return 0
        if source not in self.names:
            raise ValueError(f"source is {source!r}, but it is one of {', '.join(map(repr, self.names))}")
        return self.names.index(source)

    def _view_of(self, source: str | None) -> View:
        return self.views[self._number_of(source)]

    def _epochs_in(self, steps: int, source: str | None) -> Int64s:
        k = self._number_of(source)
        return np.arange(-(-int(self.drawn(steps)[k]) // len(self.views[k])))

    def _places_of(self, rows: Int64s, epochs: Int64s, source: str | None) -> Int64Pair:
        k = self._number_of(source)
        length = len(self.views[k])
        # row -> place in the epoch -> place in the source's own stream -> position -> (step, row of the batch)
        keys = derive_keys(self.seed, 1, k, epochs)
        place = epochs * length + KeyedPermutation(length).inverse(rows, keys)
        position = np.full(len(place), -1)
        for phase in self._phases:
            np.maximum(position, phase.positions(k, place), out=position)
        part = np.searchsorted(self._first_samples, position, side="right") - 1
        sizes = np.array([phase.batch_size for phase in self._phases])[part]
        step, batch_row = np.divmod(position - np.array(self._first_samples)[part], sizes)
        step += np.array(self._first_steps)[part]
        return np.where(position >= self._first_samples[0], step, -1), batch_row

    def __getitem__(self, step: SupportsIndex) -> MixedBatch:
        """The batch of a step. IndexError if there is no such step."""
        source, rows, _, parts = self._draw(step)
        return MixedBatch(read_batch(parts or [(self.views[0], rows, rows)], are_alike=self._are_alike), source, rows)


def source_of(name: str, given: Any) -> tuple[View, float | Schedule, int | None]:
    """A source's view, weight and limit of epochs. TypeError, naming the source, for anything else."""
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 3:
        raise TypeError(f"source {name!r} is {given!r}, but a source is (view, weight) or (view, weight, epochs)")
    view, weight, *epochs = given
    return view, weight, epochs[0] if epochs else None


def is_weight(given: object) -> bool:
    """Whether a value is a number or a `Schedule`."""
    is_number = hasattr(given, "__float__") and not isinstance(given, bool | np.bool_)
    return is_number or isinstance(given, Schedule)


def checked_epochs(name: str, most: Any) -> int | None:
    """The limit of a source's epochs."""
    return None if most is None else at_least(1, f"epochs of source {name!r}", most)


def samples_of(name: str, view: View, most: Any) -> int | None:
    """The samples of a source in all its epochs. ValueError for more than can be numbered."""
    epochs = checked_epochs(name, most)
    if epochs is not None and epochs * len(view) > MOST_SAMPLES:
        raise ValueError(
            f"{epochs} epochs of source {name!r} have {epochs * len(view)} samples, more than 2**53. Without a limit it goes on "
            "in new epochs for ever."
        )
    return None if epochs is None else epochs * len(view)


def check_weights(weights: Mapping[str, float | Schedule]) -> None:
    """ValueError for weights that no mixture can have. TypeError for what is not a weight."""
    from flat_tokens.rows.phases import exactly, samples_of_a_cycle  # see above

    for name, weight in weights.items():
        if not is_weight(weight):
            raise TypeError(f"source {name!r} has weight {weight!r}, but a weight is a number or a Schedule")
    numbers = {name: weight for name, weight in weights.items() if not isinstance(weight, Schedule)}
    for name, weight in numbers.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"source {name!r} has weight {weight}, but weights are positive numbers")
    if len(numbers) < len(weights):
        return  # what others weigh changes
    counts = samples_of_a_cycle([exactly(weight) for weight in numbers.values()])
    for (name, weight), count in zip(numbers.items(), counts, strict=True):
        if count == 0:
            raise ValueError(
                f"source {name!r} has weight {weight}: of {sum(counts)} samples it would give none. Leave it out or give it more."
            )


def check_views(views: Mapping[str, View]) -> None:
    """ValueError for views that are empty, or whose rows do not fit into one batch. TypeError for what is not a view."""
    for name, view in views.items():
        check_view(view, f"source {name!r}")
    if empty := [name for name, view in views.items() if len(view) == 0]:
        raise ValueError(f"source {empty[0]!r} has no rows. Leave it out.")
    kinds = {name: _row_kind(name, view) for name, view in views.items()}
    first = next(iter(kinds))
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise ValueError(
                f"sources {first!r} and {name!r} do not fit into one batch: rows are {kinds[first]} and {kind}. "
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
