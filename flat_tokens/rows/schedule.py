"""Weights that change during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from flat_tokens.options import one_of, whole_number

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

    def as_json(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points], "by": self.by, "kind": self.kind}


class Edit(NamedTuple):
    """From *step* on, batches of *batch_size* samples of the sources in *weights*, by their numbers."""

    step: int
    batch_size: int
    weights: Mapping[int, float | Schedule]
