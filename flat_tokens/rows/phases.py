"""The exact account of a mixture: the sample of a source at each position, and the position of each sample.

A run is made of *phases*, from one edit to the next. Each source has a stream of its own, one epoch after another, whose places
are drawn once each, from the first to the last: the n-th sample of a source has place n.

The weights of a phase become *stretches*: samples in which the shares of the sources stay the same. A stretch is made of blocks,
and a block has a whole number of samples of each source, in an order of its own. All of it is computed in integers and fractions,
so that no machine rounds another way.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple, Self, get_args

import numpy as np

from flat_tokens.annotations import Int32s, Int64Pair, Int64s, JsonObject
from flat_tokens.arrays.maps import Recent, share_work
from flat_tokens.options import one_of, whole_number
from flat_tokens.rows.orders import KeyedPermutation, Permuted, derive_keys
from flat_tokens.rows.views import running_sums, spread

Unit = Literal["sample", "step", "token"]
Kind = Literal["linear", "constant"]
ORDER = 2
"""The order of a source's samples in a mixture, as ledgers and states record it: one epoch after another."""


@dataclass(frozen=True)
class Schedule:
    """A weight that changes during a run: ``Schedule([(0, 0.9), (100_000, 0.5)])``.

    *points* are pairs of a place in the run and the weight there, places increasing. *by* is the unit of the places: "step",
    "sample" (over all hosts) or "token" (for rows of one length); they count from the run's beginning. Between two points a
    weight of the *kind* "linear" goes evenly from one to the other, in up to 1,024 stairs of 1,024 samples or more; a
    "constant" one stays the earlier point's. Before the first point it is the first weight, after the last the last.

    ValueError for no points, places that do not increase, and weights that are not 0 or more, or all 0.
    """

    points: Sequence[tuple[int, float]]
    by: Unit = "step"
    kind: Kind = "linear"

    def __post_init__(self) -> None:
        points = tuple((whole_number("a schedule's place", place), weight) for place, weight in self.points)
        object.__setattr__(self, "points", points)
        one_of("by", self.by, get_args(Unit))
        one_of("kind", self.kind, get_args(Kind))
        places = [place for place, _ in points]
        if not places or places[0] < 0 or any(later <= place for place, later in pairwise(places)):
            raise ValueError(f"a schedule's places are {places}, but there are one or more, from 0 up, each larger than the last")
        weights = [weight for _, weight in points]
        if not all(hasattr(weight, "__float__") for weight in weights):
            raise TypeError(f"a schedule's weights are {weights}, but they are numbers")
        if not all(weight >= 0 and math.isfinite(weight) for weight in weights) or not any(weights):
            raise ValueError(f"a schedule's weights are {weights}, but they are numbers from 0 up, and not all 0")

    def scaled(self, budget: int, target: int) -> Schedule:
        """The schedule of a run that is ``budget / target`` as long. Of points that fall together the last stays."""
        points = {(place * budget + target // 2) // target: weight for place, weight in self.points}
        return Schedule(list(points.items()), self.by, self.kind)

    def as_json(self) -> JsonObject:
        return {"points": [list(point) for point in self.points], "by": self.by, "kind": self.kind}


class Edit(NamedTuple):
    """From *step* on, batches of *batch_size* samples of the sources in *weights*, by their numbers."""

    step: int
    batch_size: int
    weights: Mapping[int, float | Schedule]


MIXTURE_BLOCK = 1 << 14
MIXTURE_CYCLE = 64
STAIRS = 1024
"""A linear change is made in at most this many stairs."""
STAIR_SAMPLES = 1024
"""A stair has this many samples, or more."""
SHARE_BITS = 40


class Weight(NamedTuple):
    """A schedule whose place u is sample ``zero + u * per``."""

    schedule: Schedule
    zero: Fraction
    per: Fraction

    @classmethod
    def of(cls, weight: float | Schedule, first_step: int, position: int, batch_size: int, row_tokens: int | None) -> Self:
        """A weight of a run whose step *first_step* begins at *position*. TypeError for tokens if rows have no one length."""
        if not isinstance(weight, Schedule):
            return cls(Schedule([(0, weight)], "sample", "constant"), Fraction(0), Fraction(1))
        if weight.by == "step":
            return cls(weight, Fraction(position - first_step * batch_size), Fraction(batch_size))
        if weight.by == "token" and row_tokens is None:
            raise TypeError("a schedule by token needs views whose rows have one `length`: give it by sample or step")
        return cls(weight, Fraction(0), Fraction(1, (row_tokens or 1) if weight.by == "token" else 1))

    def at(self, sample: Fraction) -> Fraction:
        """The weight at a sample, exactly."""
        points, place = self.schedule.points, (sample - self.zero) / self.per
        after = bisect_right([at for at, _ in points], place)
        before, following = points[max(after - 1, 0)], points[min(after, len(points) - 1)]
        weight, next_weight = exactly(before[1]), exactly(following[1])
        if self.schedule.kind == "constant" or before == following:
            return weight
        return weight + (next_weight - weight) * (place - before[0]) / (following[0] - before[0])


class WeightRun(NamedTuple):
    """Samples from position *start* on, before *stop* if there is an end, in blocks of *block*.

    ``firsts``: int64[cycle, sources + 1], the first slot of each source in the blocks, which repeat. ``before``: int64[cycle + 1,
    sources], the samples of each source in the blocks of the cycle before one. ``drawn``: int64[sources], the samples of each
    source in the phase before the stretch.
    """

    start: int
    stop: int | None
    block: int
    firsts: Int64s
    before: Int64s
    drawn: Int64s

    @classmethod
    def of(cls, start: int, blocks: int | None, quotas: Int64s, drawn: Int64s) -> Self:
        """*blocks* blocks with the samples *quotas*, int64[cycle, sources], of each source."""
        block = int(quotas[0].sum())
        stop = None if blocks is None else start + blocks * block
        firsts = np.pad(quotas.cumsum(axis=1), ((0, 0), (1, 0)))
        return cls(start, stop, block, firsts, np.pad(quotas.cumsum(axis=0), ((1, 0), (0, 0))), drawn)

    def drawn_in(self, blocks: int) -> Int64s:
        """The samples of each source in the stretch's first blocks: int64[sources]."""
        cycles, rest = divmod(blocks, len(self.firsts))
        found: Int64s = cycles * self.before[-1] + self.before[rest]
        return found


def stretches(start: int, weights: Sequence[Weight], left: Sequence[int | None]) -> Iterator[WeightRun]:
    """The stretches of sources with these weights from sample *start* on, of which *left* samples are left (None: endless).

    They end if no source that has a weight has samples left. ValueError if none has a weight although all have samples.
    """
    # The samples at which another piece of a schedule begins
    begins = {math.ceil(weight.zero + place * weight.per) for weight in weights for place, _ in weight.schedule.points}
    changes = sorted(change for change in begins if change > start)
    remaining, drawn, debts = list(left), np.zeros(len(weights), np.int64), [0] * len(weights)
    for first, stop in pairwise([start, *changes, None]):
        assert first is not None
        for position, end in _stairs(first, stop, weights):
            middle = Fraction(position if end is None else position + end, 1 if end is None else 2)
            exact = [weight.at(middle) for weight in weights]
            if not any(exact):
                raise ValueError(f"no source has a weight at sample {position}. Leave no gap between the schedules.")
            while end is None or position < end:
                active = [0 if count == 0 else weight for weight, count in zip(exact, remaining, strict=True)]
                if not any(active):
                    return
                made = _next_stretch(position, end, active, remaining, drawn, debts)
                yield made
                if made.stop is None:
                    return
                counts = made.drawn_in((made.stop - made.start) // made.block)
                drawn = drawn + counts
                remaining = [None if n is None else n - k for n, k in zip(remaining, counts.tolist(), strict=True)]
                position = made.stop


def _stairs(start: int, stop: int | None, weights: Sequence[Weight]) -> Iterator[tuple[int, int | None]]:
    """Ranges of samples in which weights are taken as constant. No schedule changes its piece between *start* and *stop*."""
    if stop is None or all(
        weight.schedule.kind == "constant" or weight.at(Fraction(start)) == weight.at(stop - Fraction(1, 1 << 20))
        for weight in weights
    ):
        yield start, stop
        return
    count = min(max((stop - start) // STAIR_SAMPLES, 1), STAIRS)
    ends = [start + (stop - start) * k // count for k in range(count + 1)]
    if ends[1] - start > MIXTURE_BLOCK:  # whole blocks, but for the last stair
        ends[:-1] = [end - (end - start) % MIXTURE_BLOCK for end in ends[:-1]]
    yield from pairwise(ends)


def _next_stretch(
    position: int,
    end: int | None,
    active: Sequence[Fraction | int],
    remaining: Sequence[int | None],
    drawn: Int64s,
    debts: list[int],
) -> WeightRun:
    """The next stretch: all complete blocks for which there are samples, or else a shorter block, up to *end* or to the end of
    a source.
    """
    room = MIXTURE_BLOCK if end is None else min(end - position, MIXTURE_BLOCK)
    if room == MIXTURE_BLOCK:
        quotas = block_quotas(active)
        whole = WeightRun.of(position, None, quotas, drawn)
        fits = [] if end is None else [(end - position) // MIXTURE_BLOCK]
        for n, before in zip(remaining, whole.before.T, strict=True):
            if n is not None and before[-1]:  # the blocks that have no more samples of the source
                cycles, rest = divmod(n, int(before[-1]))
                fits.append(cycles * len(quotas) + int(np.searchsorted(before, rest, side="right")) - 1)
        if not fits or min(fits):
            debts[:] = [0] * len(debts)
            return WeightRun.of(position, min(fits), quotas, drawn) if fits else whole
    total, limited = sum(active), zip(active, remaining, strict=True)
    ends = [math.ceil(n * total / weight) for weight, n in limited if n is not None and weight]
    quota = _block_quota(active, min([room, *ends]), debts)
    capped = [k if n is None else min(k, n) for k, n in zip(quota, remaining, strict=True)]
    return WeightRun.of(position, 1, np.array([capped], np.int64), drawn)


def _block_quota(active: Sequence[Fraction | int], length: int, debts: list[int]) -> list[int]:
    """The samples of each source in one block of *length*. The difference from the exact share is carried to the next block."""
    shares = apportioned(active, 1 << SHARE_BITS)
    owed = [share * length + debt if share else 0 for share, debt in zip(shares, debts, strict=True)]
    counts = [max(share >> SHARE_BITS, 0) for share in owed]
    while (rest := length - sum(counts)) != 0:
        lacks = [share - (count << SHARE_BITS) for share, count in zip(owed, counts, strict=True)]
        if rest > 0:
            counts[max((k for k in range(len(lacks)) if shares[k]), key=lambda k: (lacks[k], -k))] += 1
        else:
            counts[min((k for k in range(len(lacks)) if counts[k]), key=lambda k: (lacks[k], k))] -= 1
    debts[:] = [share - (count << SHARE_BITS) if share else 0 for share, count in zip(owed, counts, strict=True)]
    return counts


def block_quotas(weights: Sequence[Fraction | int]) -> Int64s:
    """Number of samples of each source in the blocks of a cycle: int64[cycle, sources]."""
    cycle = np.array(samples_of_a_cycle(weights))
    # The remainder of a division by the blocks is dealt to them alternately: all blocks get the same number of samples.
    share, rest = np.divmod(cycle, MIXTURE_CYCLE)
    quotas = np.tile(share, (MIXTURE_CYCLE, 1))
    owner = np.repeat(np.arange(len(cycle)), rest)
    np.add.at(quotas, (np.arange(len(owner)) % MIXTURE_CYCLE, owner), 1)
    return quotas


def samples_of_a_cycle(weights: Sequence[Fraction | int]) -> list[int]:
    """The samples of each source in a whole cycle."""
    return apportioned(weights, MIXTURE_BLOCK * MIXTURE_CYCLE)


def apportioned(weights: Sequence[Fraction | int], length: int) -> list[int]:
    """*length* divided by weight. The largest remainders are rounded up, the earlier source's first."""
    # In integers, which are faster than fractions: both sides times the common denominator
    scale = math.lcm(*(weight.denominator for weight in weights))
    parts = [weight.numerator * (scale // weight.denominator) for weight in weights]
    whole = sum(parts)
    counts, lacks = zip(*(divmod(part * length, whole) for part in parts), strict=True)
    first = sorted(range(len(parts)), key=lambda k: -lacks[k])[: length - sum(counts)]
    return [count + (k in first) for k, count in enumerate(counts)]


def exactly(weight: float) -> Fraction:
    """The value of a floating-point number."""
    return Fraction(float(weight))


BLOCKS_KEPT = 8
"""Blocks that a mixture keeps, of up to 128 KiB each: steps that follow one another are of one block or two."""
SLOTS_AT_A_TIME = 1 << 16


def _windows(block: int, counts: Int64s, first: Int64s, last: Int64s) -> Int64Pair:
    """Positions of blocks that almost surely hold the samples *first* to *last* of a source with *counts* samples in each: begin
    and length, int64[n] each. They begin where the block does or end there, whichever is nearer.
    """
    # A sample's place is off by half a block over the root of their number, at most: that is a standard error.
    margin = 2 * block / np.sqrt(counts)
    low, high = ((ranks * block / counts + margin).astype(np.int64) for ranks in (last + 1, counts - first))
    length = np.minimum(np.minimum(low, high), block)
    return np.where(low <= high, 0, block - length), length


def _chunks(sizes: Int64s) -> list[slice]:
    """Consecutive items of about SLOTS_AT_A_TIME together, one at least."""
    ends, found, first = np.cumsum(sizes), list[slice](), 0
    while first < len(sizes):
        begun = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, begun + SLOTS_AT_A_TIME, side="right")), first + 1)
        found.append(slice(first, last))
        first = last
    return found


class Phase:
    """Positions *start* to *stop* (None: endless) of a run, steps of *batch_size* samples from *first_step* on.

    ``sources``: int64[m], the numbers of its sources. What follows counts them from 0 to m - 1. *drawn*: how many samples of each
    source of the run were drawn before. *recent*: the blocks that were
    computed last, of all phases.
    """

    def __init__(
        self,
        number: int,
        edit: Edit,
        start: int,
        stop: int | None,
        made: list[WeightRun],
        drawn: Int64s,
        seed: int,
        recent: Recent,
    ) -> None:
        self.first_step, self.batch_size, self.start, self.stop = edit.step, edit.batch_size, start, stop
        self.sources = np.array(list(edit.weights), np.int64)
        self._number, self._stretches, self._seed, self._recent = number, made, seed, recent
        self._starts = [stretch.start for stretch in made]
        self._permutations = {stretch.block: KeyedPermutation(stretch.block) for stretch in made}
        # the n-th sample of a source in the phase -> its place: n + shift
        self._shifts = np.array(drawn[self.sources], np.int64)

    def places(self, start: int, stop: int) -> Int64Pair:
        """Positions ``start:stop`` of the phase -> source and place in the source's own stream: int64[n] each."""
        source, nth = self._drawn_at(start, stop)
        return self.sources[source], nth + self._shifts[source]

    def positions(self, source: int, places: Int64s) -> Int64s:
        """The inverse, for places in the stream of one source: int64[n], -1 if the phase does not draw a place."""
        found = np.full(len(places), -1)
        if not self._stretches or not (own := np.flatnonzero(self.sources == source)).size:
            return found
        k = int(own[0])
        nth = places - self._shifts[k]
        firsts = np.array([stretch.drawn[k] for stretch in self._stretches])
        stretch_of = np.searchsorted(firsts, nth, side="right") - 1
        for number in np.unique(stretch_of[nth >= 0]).tolist():
            stretch, those = self._stretches[number], np.flatnonzero((stretch_of == number) & (nth >= 0))
            per_cycle = int(stretch.before[-1, k])
            if not per_cycle:
                continue
            # n-th sample -> (cycle, block of the cycle, sample of the block) -> position
            cycle, in_cycle = np.divmod(nth[those] - stretch.drawn[k], per_cycle)
            block = np.searchsorted(stretch.before[:, k], in_cycle, side="right") - 1
            rank = in_cycle - stretch.before[block, k]
            block += cycle * len(stretch.firsts)
            in_order, within = np.argsort(block, kind="stable"), np.empty(len(block), np.int64)
            within[in_order] = self._within_in_turn(number, k, rank[in_order], block[in_order])
            position = stretch.start + block * stretch.block + within
            end = min((end for end in (stretch.stop, self.stop) if end is not None), default=None)
            found[those] = position if end is None else np.where(position < end, position, -1)
        return found

    def _within_in_turn(self, number: int, k: int, rank: Int64s, block: Int64s, by_slots: bool = False) -> Int64s:
        """The places of samples *rank* of source *k* in blocks *block* of a stretch: int64[n]. The blocks do not decrease. If a
        source has few samples in a block, or with *by_slots*, the places of all its samples are computed. Otherwise the sources
        of the block's positions are computed, from its nearer end up to the sample.
        """
        if len(self.sources) == 1:
            return rank
        stretch, (different, begins) = self._stretches[number], np.unique(block, return_index=True)
        firsts = stretch.firsts[different % len(stretch.firsts)]
        first, counts = firsts[:, k], firsts[:, k + 1] - firsts[:, k]
        by_slots = by_slots or int(counts.max()) < stretch.block // 4
        lowest, highest = np.minimum.reduceat(rank, begins), np.maximum.reduceat(rank, begins)
        begin, length = (first, counts) if by_slots else _windows(stretch.block, counts, lowest, highest)
        found, begins, chunks = np.full(len(rank), -1), np.append(begins, len(block)), _chunks(length)

        def work(numbers: range) -> None:
            for chunk in chunks[numbers.start : numbers.stop]:
                size = chunk.stop - chunk.start
                of, looked_at = spread(begin[chunk], length[chunk])
                if by_slots:
                    positions = self._permuted(KeyedPermutation.inverse, number, looked_at, different[chunk], of)
                    places = np.sort(positions + of * stretch.block) % stretch.block
                    at, before = running_sums(counts[chunk]), np.zeros(size, np.int64)
                else:
                    slots = self._permuted(KeyedPermutation.__call__, number, looked_at, different[chunk], of) - first[chunk][of]
                    there = np.flatnonzero((slots >= 0) & (slots < counts[chunk][of]))
                    places, at = looked_at[there], np.searchsorted(there, running_sums(length[chunk]))
                    before = np.where(begin[chunk] > 0, counts[chunk] - np.diff(at), 0)
                # the item's sample, counted from the first one that was found in its block -> its place among those of the chunk
                asked = slice(begins[chunk.start], begins[chunk.stop])
                of = np.repeat(np.arange(size), np.diff(begins[chunk.start : chunk.stop + 1]))
                nth = at[of] + rank[asked] - before[of]
                is_found = (nth >= at[of]) & (nth < at[of + 1])
                found[asked][is_found] = places[nth[is_found]]

        share_work(work, len(chunks))
        if (missed := np.flatnonzero(found < 0)).size:
            found[missed] = self._within_in_turn(number, k, rank[missed], block[missed], by_slots=True)
        return found

    def drawn(self, position: int) -> Int64s:
        """Number of samples of each source of the phase before *position*: int64[m]."""
        if not self._stretches:
            return np.zeros(len(self.sources), np.int64)
        stretch = self._stretches[self._stretch_at(position)]
        blocks, within = divmod(position - stretch.start, stretch.block)
        if position == stretch.stop:
            return stretch.drawn + stretch.drawn_in(blocks)
        source, _ = self._drawn_at(position - within, position)
        return stretch.drawn + stretch.drawn_in(blocks) + np.bincount(source, minlength=len(self.sources))

    def _stretch_at(self, position: int) -> int:
        return max(bisect_right(self._starts, position) - 1, 0)

    def _drawn_at(self, start: int, stop: int) -> Int64Pair:
        """Positions ``start:stop`` -> source, and how many samples of it the phase has before: int64[n] each."""
        source, nth = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        position = start
        while position < stop:
            number = self._stretch_at(position)
            stretch = self._stretches[number]
            block, within = divmod(position - stretch.start, stretch.block)
            cycle, block_in_cycle = divmod(block, len(stretch.firsts))
            count = min(stretch.block - within, stop - position)
            part, in_block = slice(position - start, position - start + count), slice(within, within + count)
            begins = stretch.drawn + cycle * stretch.before[-1] + stretch.before[block_in_cycle]
            sources, ranks = self._dealt(number, block)
            source[part] = sources[in_block]
            nth[part] = ranks[in_block] + begins[source[part]]
            position += count
        return source, nth

    def _permuted(self, way: Permuted, number: int, numbers: Int64s, block: Int64s, of: Int64s | None = None) -> Int64s:
        """The slots of positions in blocks ``block[of]`` of a stretch, or the inverse: int64[n]. A source's slots are
        consecutive.
        """
        numbered = (0,) if self._number == number == 0 else (2, self._number, number)
        keys = derive_keys(self._seed, *numbered, block)
        permutation = self._permutations[self._stretches[number].block]
        return way(permutation, numbers, keys if of is None else keys[of])

    def _dealt(self, number: int, block: int) -> tuple[Int32s, Int32s]:
        """The samples of a block of a stretch, in their order: the number of each one's source, int32[block], and the number of
        samples of that source before it in the block, int32[block].
        """
        if (found := self._recent.find((self._number, number, block))) is None:
            stretch = self._stretches[number]
            firsts = stretch.firsts[block % len(stretch.firsts)]
            positions = np.arange(stretch.block)
            source, rank = np.zeros(stretch.block, np.int32), positions.astype(np.int32)
            if len(self.sources) > 1:
                slots = self._permuted(KeyedPermutation.__call__, number, positions, np.array([block]))
                source = (np.searchsorted(firsts, slots, side="right") - 1).astype(np.int32)
                # In order of source and position, the samples are numbered as the slots are. Of 16 bits, it is a radix sort.
                in_order = np.argsort(source.astype(np.uint16 if len(self.sources) <= 1 << 16 else np.uint32), kind="stable")
                rank[in_order] = positions - np.repeat(firsts[:-1], np.diff(firsts))
            found = self._recent.keep((self._number, number, block), (source, rank))
        return found  # type: ignore[no-any-return] # a cache of anything


def phases_of(
    edits: Sequence[Edit],
    samples: Sequence[int | None],
    row_tokens: int | None,
    seed: int,
) -> Iterator[Phase]:
    """The phases of a run, one for each edit. *samples*: how many each source has in all its epochs, None without end.

    ValueError for an edit after the run's end, or weights that leave nothing to draw.
    """
    drawn, start, recent = np.zeros(len(samples), np.int64), 0, Recent(BLOCKS_KEPT)
    for number, edit in enumerate(edits):
        following = edits[number + 1] if number + 1 < len(edits) else None
        stop = None if following is None else start + (following.step - edit.step) * edit.batch_size
        weights = [Weight.of(weight, edit.step, start, edit.batch_size, row_tokens) for weight in edit.weights.values()]
        left = [None if (all_ := samples[k]) is None else all_ - int(drawn[k]) for k in edit.weights]
        made: list[WeightRun] = []
        for stretch in stretches(start, weights, left):
            if stop is not None and stretch.start >= stop:
                break
            made.append(stretch)
        end = made[-1].stop if made else start
        if following is not None and stop is not None and end is not None and end < stop:
            if stop - end >= edit.batch_size:
                last = edit.step + -(-(end - start) // edit.batch_size)
                raise ValueError(f"there is an edit from step {following.step} on, but the run ends before step {last}")
            stop = end
        phase = Phase(number, edit, start, end if stop is None else stop, made, drawn, seed, recent)
        yield phase
        if phase.stop is not None:
            np.add.at(drawn, phase.sources, phase.drawn(phase.stop))
            start = phase.stop
