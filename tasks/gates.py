"""Gates before publication: conditions on a version, and on its difference from the one that ``latest`` names.

``judge`` is a pure function of the gates and of the facts of both versions. Where facts come from is in ``finalize.facts``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from flat_tokens.manifest import SplitName
from flat_tokens.options import did_you_mean
from tasks.models import Model, NonEmpty

Action = Literal["stop", "hold", "warn"]
ACTIONS: tuple[Action, ...] = get_args(Action)

SELECTORS = {
    "documents": ("source", "split"),
    "tokens": ("source", "split"),
    "text_bytes": ("source", "split"),
    "bytes_per_token": ("source", "split"),
    "largest_length": ("source", "split"),
    "median_length": ("source", "split"),
    "skipped_share": ("source", "step", "reason"),
    "duplicate_share": (),
    "near_duplicate_share": ("source",),
    "added_share": ("source", "split"),
    "removed_share": ("source", "split"),
    "changed_share": ("source", "split"),
    "moved_share": ("source", "split"),
    "split_changes": (),
    "null_share": ("column", "split"),
    "distinct": ("column", "split"),
}
"""The facts that gates look at, and the subjects of each, in addition to the whole version."""
OF_CHANGES = ("added_share", "removed_share", "changed_share", "moved_share", "split_changes")
"""Facts of a difference: there are none if ``latest`` names nothing."""
OF_COLUMNS = ("null_share", "distinct")
OF_LENGTHS = ("largest_length", "median_length")

CHANGE = re.compile(r"([+-])\s*([0-9]+(?:\.[0-9]+)?)\s*%")
SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


def parse_limit(value: Any) -> Any:
    """A number as it is, or a change such as ``-50 %`` or ``+ 10%``, in one spelling. ``5 %`` is the share 0.05."""
    if isinstance(value, str):
        if match := CHANGE.fullmatch(value.strip()):
            return f"{match[1]}{match[2]} %"
        if match := SHARE.fullmatch(value.strip()):
            return float(Fraction(match[1]) / 100)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("should be a number, a share such as 5 %, or a change such as -50 % or +10 %")
    return value


Limit = Annotated[
    int | float | str,
    BeforeValidator(parse_limit),
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[+-]?\s*[0-9.]+\s*%$"}], "examples": ["-50 %"]}
    ),
]


def known_fact(value: Any) -> Any:
    """The name of a fact. ValueError with the nearest one."""
    if isinstance(value, str) and value not in SELECTORS:
        raise ValueError(f"there is no fact {value!r}. {did_you_mean(value, SELECTORS)}")
    return value


Fact = Annotated[str, BeforeValidator(known_fact), WithJsonSchema({"type": "string", "enum": list(SELECTORS)})]


class Subject(NamedTuple):
    """The subject of a fact: a source, a split, a step, a reason, a column, or several of them; empty: of all."""

    source: str = ""
    split: str = ""
    step: str = ""
    reason: str = ""
    column: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{kind} {name}" for kind, name in self._asdict().items() if name)


class Gate(Model):
    """A condition on a version, or on its difference from the one that latest names, and what happens if it does not hold."""

    model_config = ConfigDict(title="Gate")

    of: Fact
    """The figure that is looked at, such as documents or skipped_share."""
    by: Literal["source", "split"] | None = None
    """Look at each source, or at each split, instead of all."""
    source: NonEmpty | None = None
    """Of this source alone."""
    split: SplitName | None = None
    """Of this split alone."""
    step: NonEmpty | None = None
    """skipped_share: by this step of documents.steps."""
    reason: NonEmpty | None = None
    """skipped_share: for this reason, such as too_long."""
    column: NonEmpty | None = None
    """null_share, distinct: the kept column."""
    at_least: Limit | None = None
    """A number, or a change from what latest names, such as -50 %."""
    at_most: Limit | None = None
    """The same, such as 5 % of a share, or +20 %."""
    action: Action = "stop"
    """stop: fail. hold: a person approves or rejects it. warn: publish it all the same."""

    @model_validator(mode="after")
    def makes_sense(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"a gate of {self.of} has no limit; give at_least or at_most")
        for name in (*Subject._fields, *(["by"] if self.by else [])):
            wanted = self.by if name == "by" else name
            if getattr(self, name) is not None and wanted not in SELECTORS[self.of]:
                places = SELECTORS[self.of]
                known = f"it is by {' or '.join(places)}, or of all" if places else "it is of all"
                raise ValueError(f"{self.of} is not known by {wanted}; {known}")
        if self.by and getattr(self, self.by) is not None:
            raise ValueError(f"a gate of {self.of} has by: {self.by} and a {self.by}; give one of them")
        if (self.source or self.by == "source") and (self.split or self.by == "split"):
            raise ValueError(f"{self.of} is known by source or by split, not by both")
        if self.of in OF_COLUMNS and self.column is None:
            raise ValueError(f"{self.of} is of a kept column; give its column")
        if self.step is not None and self.reason is not None and not self.reason.startswith(f"{self.step}."):
            raise ValueError(f"a reason of step {self.step!r} is named {self.step}.REASON, not {self.reason!r}")
        counted = not self.of.endswith("_share") and self.of != "bytes_per_token"
        for one in (self.at_least, self.at_most):
            if counted and isinstance(one, float) and not one.is_integer():
                raise ValueError(f"{self.of} is a count, not {one:g}. For a change write its sign, such as -50 % or +10 %")
        if self.of in OF_CHANGES and any(isinstance(one, str) for one in (self.at_least, self.at_most)):
            what = "number of documents" if counted else "share, such as 5 %,"
            raise ValueError(f"{self.of} is of a difference: give a {what} without a sign")
        low, high = self.at_least, self.at_most
        if not isinstance(low, str) and not isinstance(high, str) and low is not None and high is not None and low > high:
            raise ValueError(f"at_least {low} is above at_most {high}")
        return self

    def is_at(self, place: Subject) -> bool:
        """Whether it looks at the fact of a place."""
        wanted = Subject(**{name: getattr(self, name) or "" for name in Subject._fields})
        if self.by is None:
            return place == wanted
        return bool(getattr(place, self.by)) and place._replace(**{self.by: ""}) == wanted


LOST_SOURCES = (
    Gate(of="documents", by="source", at_least="-50 %", action="hold"),
    Gate(of="documents", by="source", at_least=1, action="hold"),
)
"""Gates of refreshes without any configuration."""


class PublishPolicy(Model):
    """Conditions that a version has to meet before latest names it."""

    model_config = ConfigDict(title="with settings")

    gates: tuple[Gate, ...] = Field((), max_length=1000)
    """Conditions: docs/versions.md."""
    defaults: bool = True
    """Refreshes are held where a source loses more than half of its documents, or has none."""

    max_split_changes: int = Field(0, ge=0, strict=True)
    """Refreshes are held where more documents than this change their split; without defaults where it is set."""

    def of_refresh(self) -> tuple[Gate, ...]:
        """The gates of a refresh."""
        of_splits = self.defaults or "max_split_changes" in self.model_fields_set
        moved = Gate(of="split_changes", at_most=self.max_split_changes, action="hold")
        return (*self.gates, *(LOST_SOURCES if self.defaults else ()), *([moved] if of_splits else []))


FactValues = dict[tuple[str, Subject], int | float | None]
Facts = Mapping[tuple[str, Subject], int | float | None]
"""Facts of a version by their names and places. None: nobody can tell."""


class Finding(Model):
    """A condition that does not hold. ``value``: None if it is unknown; ``before``: of the version that ``latest``
    names, if that matters. ``limit``: such as ``at least -50 %``.
    """

    of: Fact
    place: str
    value: int | float | None
    before: int | float | None = None
    limit: str
    action: Action

    @property
    def sentence(self) -> str:
        """Such as ``documents of source web: 40, -90.0 % from 400; wanted is at least -50 %``."""
        what = f"{self.of}{f' of {self.place}' if self.place else ''}"
        now = "is unknown" if self.value is None else value_for_people(self.of, self.value)
        change = "" if self.before is None or self.value is None else f", {change_for_people(self.value, self.before)}"
        was = "" if self.before is None or not change else f" from {value_for_people(self.of, self.before)}"
        return f"{what}: {now}{change}{was}; wanted is {self.limit}"


def value_for_people(of: str, value: float) -> str:
    """A fact's value for people."""
    if of.endswith("_share"):
        return f"{100 * value:.3g} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def change_for_people(value: float, before: float) -> str:
    """A change in per cent, for people."""
    return f"{100 * (value - before) / before:+,.1f} %" if before else "none before" if value else "as before"


def judge(gates: Sequence[Gate], now: Facts, before: Facts | None) -> list[Finding]:
    """The conditions that do not hold, of a version with the facts *now*; *before*: of the version that ``latest`` names, None
    if it names nothing. Facts that the version before does not tell are not compared.
    """
    found = []
    for gate, ((of, place), value), side in itertools.product(gates, now.items(), ("at_least", "at_most")):
        if of != gate.of or not gate.is_at(place):
            continue
        given, former = getattr(gate, side), (before or {}).get((of, place))
        is_change = isinstance(given, str)
        if given is None or (is_change and former is None):
            continue
        bound = given
        if is_change and former is not None:  # -50 % of what was there, exactly
            bound = Fraction(former) * (1 + Fraction(given.removesuffix("%").strip()) / 100)
        if value is not None and (value >= bound if side == "at_least" else value <= bound):
            continue
        limit = f"{side.replace('_', ' ')} {given if is_change else value_for_people(of, given)}"
        compared = former if is_change else None
        found.append(Finding(of=of, place=str(place), value=value, before=compared, limit=limit, action=gate.action))
    return found


def strictest_action(findings: Iterable[Finding]) -> Action | None:
    """The effect on a version: the strictest that any finding asks for. None if all holds."""
    actions = {one.action for one in findings}
    return next((action for action in ACTIONS if action in actions), None)


def summary_of(findings: Iterable[Finding], action: Action | None = None) -> str:
    """The sentences of findings, of one *action* alone if that is wanted."""
    return "; ".join(dict.fromkeys(one.sentence for one in findings if action in (None, one.action)))
