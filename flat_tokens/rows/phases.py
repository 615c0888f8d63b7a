"""The exact account of a mixture: which sample of which source stands at each position, and where each sample stands.

A run is made of *phases*, from one edit to the next. Each source has a stream of its own, epoch behind epoch, whose places are
drawn once each: a phase begins with the places that the phase before had dealt to an open block but not drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.rows.orders import Indices
from flat_tokens.rows.schedule import Edit
from flat_tokens.rows.shuffle import KeyedPermutation, derive_keys
from flat_tokens.rows.stretches import Stretch, Weight, stretches


class Stock(NamedTuple):
    """The rest of a source's stream: the places *skipped* (int64[n], in the order in which they come next), then all from
    *rest* on.
    """

    skipped: Indices
    rest: int


class Phase:
    """Positions *start* to *stop* (None: endless) of a run, steps of *batch_size* samples from *first_step* on.

    ``sources``: int64[m], the numbers of its sources. What follows counts them from 0 to m - 1.
    """

    def __init__(
        self, number: int, edit: Edit, start: int, stop: int | None, made: list[Stretch], stocks: Mapping[int, Stock], seed: int
    ) -> None:
        self.first_step, self.batch_size, self.start, self.stop = edit.step, edit.batch_size, start, stop
        self.sources = np.array(list(edit.weights), np.int64)
        self._number, self._stretches, self._seed = number, made, seed
        self._starts = [stretch.start for stretch in made]
        self._permutations = {stretch.block: KeyedPermutation(stretch.block) for stretch in made}
        own = [stocks[k] for k in self.sources.tolist()]
        self._skipped = np.concatenate([np.empty(0, np.int64), *(stock.skipped for stock in own)])
        self._skipped_counts = np.array([len(stock.skipped) for stock in own], np.int64)
        self._skipped_at = np.cumsum(self._skipped_counts) - self._skipped_counts
        # the n-th sample of a source in the phase -> its place: n + shift, behind what was skipped
        self._shifts = np.array([stock.rest for stock in own], np.int64) - self._skipped_counts

    def places(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Positions ``start:stop`` of the phase -> source and place in the source's own stream: int64[n] each."""
        source, nth = self._drawn_at(start, stop)
        return self.sources[source], self._places_of(source, nth)

    def positions(self, source: int, places: Indices) -> Indices:
        """The inverse, for places in the stream of one source: int64[n], -1 where the phase does not draw a place."""
        found = np.full(len(places), -1)
        if not self._stretches or not (own := np.flatnonzero(self.sources == source)).size:
            return found
        k = int(own[0])
        nth = places - self._shifts[k]
        if count := int(self._skipped_counts[k]):
            skipped = self._skipped[self._skipped_at[k] : self._skipped_at[k] + count]
            order = np.argsort(skipped)
            at = np.minimum(np.searchsorted(skipped, places, sorter=order), count - 1)
            nth = np.where(skipped[order[at]] == places, order[at], np.where(nth < count, -1, nth))
        firsts = np.array([stretch.drawn[k] for stretch in self._stretches])
        stretch_of = np.searchsorted(firsts, nth, side="right") - 1
        for number in np.unique(stretch_of[nth >= 0]).tolist():
            stretch, those = self._stretches[number], np.flatnonzero((stretch_of == number) & (nth >= 0))
            per_cycle = int(stretch.before[-1, k])
            if not per_cycle:
                continue
            # n-th sample -> (cycle, block of the cycle, slot of the block) -> position
            cycle, in_cycle = np.divmod(nth[those] - stretch.drawn[k], per_cycle)
            block = np.searchsorted(stretch.before[:, k], in_cycle, side="right") - 1
            slot = in_cycle - stretch.before[block, k] + stretch.firsts[block, k]
            block += cycle * len(stretch.firsts)
            keys = self._keys(number, block.view(np.uint64))
            within = self._permutations[stretch.block].inverse(slot.view(np.uint64), keys).view(np.int64)
            position = stretch.start + block * stretch.block + within
            end = min((end for end in (stretch.stop, self.stop) if end is not None), default=None)
            found[those] = position if end is None else np.where(position < end, position, -1)
        return found

    def drawn(self, position: int) -> Indices:
        """Number of samples of each source of the phase before *position*: int64[m]."""
        if not self._stretches:
            return np.zeros(len(self.sources), np.int64)
        stretch = self._stretches[self._stretch_at(position)]
        blocks, within = divmod(position - stretch.start, stretch.block)
        if position == stretch.stop:
            return stretch.drawn + stretch.drawn_in(blocks)
        source, _ = self._drawn_at(position - within, position)
        return stretch.drawn + stretch.drawn_in(blocks) + np.bincount(source, minlength=len(self.sources))

    def stocks(self, position: int) -> dict[int, Stock]:
        """The rest of each of the phase's sources when it ends before *position*."""
        dealt, open_block = self.drawn(position), np.empty(0, np.int64)
        if self._stretches and position != (stretch := self._stretches[self._stretch_at(position)]).stop:
            blocks, within = divmod(position - stretch.start, stretch.block)
            if within:
                dealt = stretch.drawn + stretch.drawn_in(blocks + 1)
                open_block, nth = self._drawn_at(position, position - within + stretch.block)
                open_places = self._places_of(open_block, nth)
        found = {}
        for k, source in enumerate(self.sources.tolist()):
            first, count = int(self._skipped_at[k]), int(self._skipped_counts[k])
            later = self._skipped[first + min(int(dealt[k]), count) : first + count]
            before = open_places[open_block == k] if open_block.size else open_block
            found[source] = Stock(np.concatenate([before, later]), int(self._shifts[k]) + max(int(dealt[k]), count))
        return found

    def _stretch_at(self, position: int) -> int:
        return max(bisect_right(self._starts, position) - 1, 0)

    def _keys(self, stretch: int, block: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        if self._number == stretch == 0:
            return derive_keys(self._seed, 0, block)
        return derive_keys(self._seed, 2, self._number, stretch, block)

    def _drawn_at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Positions ``start:stop`` -> source, and how many samples of it the phase has before: int64[n] each."""
        source, nth = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        position = start
        while position < stop:
            number = self._stretch_at(position)
            stretch = self._stretches[number]
            block, within = divmod(position - stretch.start, stretch.block)
            cycle, block_in_cycle = divmod(block, len(stretch.firsts))
            count = min(stretch.block - within, stop - position)
            part = slice(position - start, position - start + count)
            numbers = np.arange(within, within + count, dtype=np.uint64)
            slots = self._permutations[stretch.block](numbers, self._keys(number, block)).view(np.int64)
            firsts = stretch.firsts[block_in_cycle]
            source[part] = k = np.searchsorted(firsts, slots, side="right") - 1
            begins = stretch.drawn + cycle * stretch.before[-1] + stretch.before[block_in_cycle] - firsts[:-1]
            nth[part] = begins[k] + slots
            position += count
        return source, nth

    def _places_of(self, source: Indices, nth: Indices) -> Indices:
        places: Indices = nth + self._shifts[source]
        if len(self._skipped):
            skipped = np.flatnonzero(nth < self._skipped_counts[source])
            places[skipped] = self._skipped[self._skipped_at[source[skipped]] + nth[skipped]]
        return places


def phases_of(
    edits: Sequence[Edit], samples: Sequence[int | None], row_tokens: int | None, seed: int, first: int = 0
) -> Iterator[Phase]:
    """The phases of a run, one for each edit. *samples*: how many each source has in all its epochs, None without end.

    ValueError for an edit behind the run's end, or weights that leave nothing to draw.
    """
    stocks = {k: Stock(np.empty(0, np.int64), 0) for k in range(len(samples))}
    drawn, start = np.zeros(len(samples), np.int64), first
    for number, edit in enumerate(edits):
        following = edits[number + 1] if number + 1 < len(edits) else None
        stop = None if following is None else start + (following.step - edit.step) * edit.batch_size
        weights = [Weight.of(weight, edit.step, start, edit.batch_size, row_tokens) for weight in edit.weights.values()]
        left = [None if (all_ := samples[k]) is None else all_ - int(drawn[k]) for k in edit.weights]
        made: list[Stretch] = []
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
        phase = Phase(number, edit, start, end if stop is None else stop, made, stocks, seed)
        yield phase
        if phase.stop is not None:
            stocks |= phase.stocks(phase.stop)
            np.add.at(drawn, phase.sources, phase.drawn(phase.stop))
            start = phase.stop
