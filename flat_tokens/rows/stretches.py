"""The numbers of samples of each source that follow from the weights of a mixture.

Weights become *stretches*: samples in which the shares of the sources stay the same. A stretch is made of blocks, and a block has
a whole number of samples of each source, in an order of its own. All of it is computed in integers and fractions, so that no
machine rounds another way.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from flat_tokens.array_types import Int64s
from flat_tokens.rows.schedule import Schedule

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
        """A weight of a run whose step *first_step* begins at *position*. TypeError for tokens where rows have no one length."""
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

    def changes(self) -> list[int]:
        """The samples at which another piece of the schedule begins."""
        return [math.ceil(self.zero + place * self.per) for place, _ in self.schedule.points]

    def is_even(self, start: int, stop: int | None) -> bool:
        """Whether the weight is the same from *start* to *stop*, which no change is between."""
        if stop is None or self.schedule.kind == "constant":
            return True
        last = Fraction(stop) - Fraction(1, 1 << 20)
        return self.at(Fraction(start)) == self.at(last)


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

    They end where no source that has a weight has samples left. ValueError if none has a weight although all have samples.
    """
    changes = sorted({change for weight in weights for change in weight.changes() if change > start})
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
    """Ranges of samples in which weights are taken as constant."""
    if stop is None or all(weight.is_even(start, stop) for weight in weights):
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
    """As many whole blocks as there are samples for; else a shorter block, up to *end* or to the end of a source."""
    room = MIXTURE_BLOCK if end is None else min(end - position, MIXTURE_BLOCK)
    if room == MIXTURE_BLOCK:
        quotas = block_quotas(active)
        whole = WeightRun.of(position, None, quotas, drawn)
        fits = [] if end is None else [(end - position) // MIXTURE_BLOCK]
        fits += [_blocks_for(whole.before[:, k], n) for k, n in enumerate(remaining) if n is not None and whole.before[-1, k]]
        if not fits or min(fits):
            debts[:] = [0] * len(debts)
            return WeightRun.of(position, min(fits), quotas, drawn) if fits else whole
    total, limited = sum(active), zip(active, remaining, strict=True)
    ends = [math.ceil(n * total / weight) for weight, n in limited if n is not None and weight]
    quota = _single(active, min([room, *ends]), debts)
    capped = [k if n is None else min(k, n) for k, n in zip(quota, remaining, strict=True)]
    return WeightRun.of(position, 1, np.array([capped], np.int64), drawn)


def _blocks_for(before: Int64s, count: int) -> int:
    """How many blocks have no more than *count* samples of a source."""
    cycles, rest = divmod(count, int(before[-1]))
    return cycles * (len(before) - 1) + int(np.searchsorted(before, rest, side="right")) - 1


def _single(active: Sequence[Fraction | int], length: int, debts: list[int]) -> list[int]:
    """The samples of each source in one block of *length*; what they lack of the exact share is owed to the next block."""
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
