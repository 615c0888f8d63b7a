"""Steps: what happens to documents between their source and the tokenizer, one step after the other.

This is the table of the steps that are shipped. Others are found by name among the entry points ``flat_tokens.steps`` of
installed packages. ``contract`` says what a step is.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flat_tokens import columns as kept
from flat_tokens.annotations import Bools, Int64s, IntPair, JsonFacts, JsonObject, UInt64s
from flat_tokens.extras import pa
from flat_tokens.options import did_you_mean
from flat_tokens.steps.contract import MakeStep, Outcome, Step, TextMatch
from flat_tokens.steps.datatrove import DatatroveStep
from flat_tokens.steps.decontaminate import Decontaminate
from flat_tokens.steps.html import Html
from flat_tokens.steps.language import Language
from flat_tokens.steps.shipped import Length, Normalize, Pattern
from flat_tokens.text.rows import as_kept

__all__ = [
    "GROUP",
    "HARMLESS",
    "READ_BY_BUILDS",
    "SHIPPED",
    "Outcome",
    "ReadySteps",
    "Step",
    "Stepped",
    "TextMatch",
    "open_steps",
]

GROUP = "flat_tokens.steps"
"""Entry points of this group are steps."""
SHIPPED: Mapping[str, MakeStep] = {
    "length": Length,
    "pattern": Pattern,
    "normalize": Normalize,
    "language": Language,
    "html": Html,
    "decontaminate": Decontaminate,
    "datatrove": DatatroveStep,
}
HARMLESS = frozenset({"length", "pattern", "normalize"})
"""They run for a dataset that a stranger made: whatever their options are, they read nothing, and take time as the
text does, and a pattern as its program's size: see ``patterns``."""
READ_BY_BUILDS = frozenset({"decontaminate"})
"""They need files that a build reads for them."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
COLUMN = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
MOST_REASONS = 64
"""Of a step that does not say its ``most_reasons``. A reason is a kind of documents, not a document."""


class StepsOutcome(NamedTuple):
    """The outcome of all steps for n documents. ``keep``: bool[n], which stay. ``texts``: of these. ``spans``: which characters
    of each count, None for all of them; None if no step gives spans. ``columns``: of these, those that are kept and
    those that steps give; None if there are none. ``kinds``: of the columns that steps give, of all documents that came to them.

    ``left_out``: the numbers of those that go, by step and reason, ascending. ``changed``: how many texts each step changed, of
    those that give texts. ``failed``: documents on which a step fails, as (index, reason, detail); these are not in ``left_out``.
    ``matches``: what steps found, by their names and what it is, such as ``decontaminate.gsm8k``, in the order of the documents.
    """

    keep: Bools
    texts: pa.LargeStringArray
    spans: list[list[IntPair] | None] | None
    left_out: dict[str, Int64s]
    changed: Counter[str]
    failed: list[tuple[int, str, str]]
    columns: pa.RecordBatch | None
    kinds: dict[str, str]
    matches: list[TextMatch]

    @property
    def skipped(self) -> Counter[str]:
        """The number of documents that steps leave out, by step and reason."""
        return Counter({reason: len(numbers) for reason, numbers in self.left_out.items()})


@dataclass(frozen=True)
class ReadySteps:
    """Steps that are ready. ``described``: as manifests have them, each ``use``, ``name``, ``version``, ``options``.
    ``gives_spans``: one of them says which characters count.
    """

    described: tuple[JsonObject, ...] = ()
    _open: Mapping[str, Step] = field(default_factory=dict, repr=False)

    @property
    def gives_spans(self) -> bool:
        return any(getattr(step, "gives_spans", False) for step in self._open.values())

    @property
    def gives_columns(self) -> tuple[str, ...]:
        """The columns that steps give, which a dataset keeps."""
        return tuple(name for step in self._open.values() for name in columns_given(step))

    def __call__(self, texts: pa.LargeStringArray, keys: UInt64s, columns: pa.RecordBatch | None = None) -> StepsOutcome:
        """Take documents through all steps, which see their kept *columns*, n rows, and those that earlier steps give. ValueError
        if a step gives something else than an outcome.
        """
        beside = {} if columns is None else dict(zip(columns.schema.names, columns.columns, strict=True))
        beside, kinds = {name: values for name, values in beside.items() if name not in self.gives_columns}, dict[str, str]()
        at = np.arange(len(texts))  # of those that are still there
        spans: list[list[IntPair] | None] | None = [None] * len(texts) if self.gives_spans else None
        spans_by: str | None = None
        left_out, changed, failed = dict[str, Int64s](), Counter[str](), list[tuple[int, str, str]]()
        matches = list[TextMatch]()
        for name, step in self._open.items():
            if not len(texts):
                break
            batch = {"text": texts, "key": kept.as_arrow(keys[at]), **beside}
            run = _run(name, step, pa.RecordBatch.from_arrays(list(batch.values()), names=list(batch)))
            details = ((int(at[i]), f"step {name!r} fails on it: {why}") for i, why in sorted(run.faults.items()))
            failed += [(i, f"{name}.failed", detail) for i, detail in details]
            left_out |= {reason: at[numbers] for reason, numbers in run.left_out.items()}
            matches += [TextMatch(int(at[i]), f"{name}.{what}", example) for i, what, example in run.outcome.matches]
            stay = kept.as_arrow(run.keep)
            texts = texts if run.keep.all() else texts.filter(stay)
            given = run.outcome.columns or {}
            kinds |= {column: kept.kind_of(values) for column, values in given.items()}
            beside = {**beside, **given}
            if not run.keep.all():
                beside = {column: values.filter(stay) for column, values in beside.items()}
            if run.outcome.text is not None:
                if spans_by is not None:
                    raise ValueError(
                        f"step {name!r} gives other texts after step {spans_by!r}, which gives spans. Put it before."
                    )
                now = run.outcome.text.filter(stay)
                changed[f"{name}.changed"] += pa.compute.sum(pa.compute.not_equal(now, texts), min_count=0).as_py()
                texts = now
            if run.outcome.spans is not None:
                if spans is None:
                    raise ValueError(f"step {name!r} gives spans, but does not say so: it needs gives_spans = True.")
                if spans_by is not None:
                    raise ValueError(f"step {name!r} gives spans, and so does step {spans_by!r}. Leave one of them out.")
                spans, spans_by = _pairs(name, run.outcome.spans), name
            spans = spans and [of for of, stays in zip(spans, run.keep, strict=True) if stays]
            at = at[run.keep]
        keep = np.zeros(len(keys), bool)
        keep[at] = True
        beside |= {column: pa.nulls(len(texts)) for column in self.gives_columns if column not in beside}
        kinds = {column: kinds.get(column, "null") for column in self.gives_columns}
        return StepsOutcome(
            keep, texts, spans, left_out, changed, failed, kept.batch_of(beside) if beside else None, kinds, matches
        )


def columns_given(step: Step) -> tuple[str, ...]:
    """The columns that a step says it gives."""
    return tuple(getattr(step, "gives_columns", ()))


class _StepOutcome(NamedTuple):
    """Outcome of one step for a batch, its arrays as long as the batch; documents of ``faults`` do not stay."""

    outcome: Outcome
    keep: Bools
    left_out: dict[str, Int64s]
    faults: dict[int, str]


def _run(name: str, step: Step, batch: pa.RecordBatch) -> _StepOutcome:
    """Run a step on a batch. If it fails, it runs on each document alone, to find those at fault."""
    faults: dict[int, str] = {}
    try:
        given = step(batch)
    except (OSError, MemoryError):
        raise  # no document is at fault
    except Exception as error:
        faults = {i: why for i in range(len(batch)) if (why := _fault(step, batch.slice(i, 1))) is not None}
        if not faults:
            raise ValueError(f"step {name!r} fails on {len(batch)} documents together, on none alone: {_told(error)}") from error
        sound = np.array([i for i in range(len(batch)) if i not in faults], np.int64)
        rest = _run(name, step, batch.take(pa.array(sound)))
        if rest.faults:
            raise ValueError(f"step {name!r} fails on documents on which it did not fail before: {_told(error)}") from error
        return _spread(rest, sound, batch, faults)
    outcome, keep = _checked(name, given, batch)
    outcome = outcome._replace(columns=_columns_of(name, step, outcome, len(batch)))
    return _StepOutcome(outcome, keep, _reasons(name, step, outcome, keep), faults)


def _fault(step: Step, one: pa.RecordBatch) -> str | None:
    try:
        step(one)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # whatever a step raises, it is reported with the document
        return _told(error)
    return None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _spread(run: _StepOutcome, sound: Int64s, batch: pa.RecordBatch, faults: dict[int, str]) -> _StepOutcome:
    """The outcome for the *sound* documents of a batch as one of the whole batch."""
    keep, places = np.zeros(len(batch), bool), np.full(len(batch), -1)
    keep[sound], places[sound] = run.keep, np.arange(len(sound))
    where = pa.array(places, pa.int64(), mask=places < 0)
    text, spans = (None if values is None else values.take(where) for values in (run.outcome.text, run.outcome.spans))
    columns = run.outcome.columns and {name: values.take(where) for name, values in run.outcome.columns.items()}
    matches = [match._replace(document=int(sound[match.document])) for match in run.outcome.matches]
    left_out = {reason: sound[numbers] for reason, numbers in run.left_out.items()}
    return _StepOutcome(Outcome(text=text, spans=spans, columns=columns, matches=matches), keep, left_out, faults)


def _checked(name: str, outcome: Any, batch: pa.RecordBatch) -> tuple[Outcome, Bools]:
    """An outcome with large strings, and which documents stay. ValueError if it is none for the batch."""
    count = len(batch)
    if not isinstance(outcome, Outcome):
        raise ValueError(f"step {name!r} gives {type(outcome).__name__}, not an Outcome")
    arrays = {name: values for name, values in outcome._asdict().items() if name not in ("columns", "matches")}
    arrays = {name: one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for name, one in arrays.items()}
    outcome = outcome._replace(**arrays)
    for what, values in arrays.items():
        if values is not None and not isinstance(values, str) and len(values) != count:
            raise ValueError(f"step {name!r} gives {len(values)} of {what} for {count} documents")
    keep = np.ones(count, bool) if outcome.keep is None else np.asarray(outcome.keep)
    if keep.dtype != bool:
        raise ValueError(f"step {name!r} gives {keep.dtype} for keep, not booleans without nulls")
    if outcome.text is None:
        return outcome, keep
    text = outcome.text.cast(pa.large_string())
    text.validate(full=True)
    if text.filter(pa.array(keep)).null_count:
        raise ValueError(f"step {name!r} gives null for the text of a document that stays")
    return outcome._replace(text=text), keep


def _columns_of(name: str, step: Step, outcome: Outcome, count: int) -> dict[str, pa.Array]:
    """The columns of an outcome, each of a kind that a dataset keeps. ValueError if they are not those that the step names."""
    given, wanted = dict(outcome.columns or {}), columns_given(step)
    if {*given} != {*wanted}:
        names = ", ".join(map(repr, given)) or "none"
        raise ValueError(
            f"step {name!r} gives the columns {names}, but its gives_columns names {', '.join(map(repr, wanted)) or 'none'}"
        )
    found = {}
    for column in wanted:
        values = given[column]
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        if len(values) != count:
            raise ValueError(f"step {name!r} gives {len(values)} values of column {column!r} for {count} documents")
        try:
            found[column] = as_kept(values, column, f"step {name!r}")
        except ValueError as error:
            raise ValueError(
                f"step {name!r} gives column {column!r} of type {values.type}; columns are text, numbers, truth values, dates "
                "and times"
            ) from error
    return found


def _reasons(name: str, step: Step, outcome: Outcome, keep: Bools) -> dict[str, Int64s]:
    """The numbers of the documents that go, by step and reason."""
    gone = np.flatnonzero(~keep)
    if not len(gone):
        return {}
    if outcome.reason is None or isinstance(outcome.reason, str):
        return {f"{name}.{outcome.reason or 'dropped'}": gone}
    reasons = outcome.reason.filter(kept.as_arrow(~keep)).cast(pa.string()).dictionary_encode(null_encoding="encode")
    names, which = reasons.dictionary.to_pylist(), np.frombuffer(reasons.indices.buffers()[1], np.int32, len(gone))
    if len(names) > getattr(step, "most_reasons", MOST_REASONS):
        raise ValueError(f"step {name!r} gives {len(names)} reasons; a reason is a kind of documents, of which there are few")
    found = dict[str, Int64s]()
    for number, reason in enumerate(names):
        called = f"{name}.{reason or 'dropped'}"  # null and the empty text
        found[called] = np.sort(np.append(found.get(called, gone[:0]), gone[which == number]))
    return found


def _pairs(name: str, spans: pa.Array) -> list[list[IntPair] | None]:
    found: list[list[IntPair] | None] = []
    for of in spans.to_pylist():
        pairs = None if of is None else [(int(start), int(stop)) for start, stop in of]
        if pairs and min(min(pair) for pair in pairs) < 0:
            raise ValueError(f"step {name!r} gives a span that begins before the text")
        found.append(pairs)
    return found


def open_steps(steps: Sequence[JsonFacts]) -> ReadySteps:
    """Steps of which each has ``use`` and perhaps ``name``, ``options`` and ``version``.

    ValueError for a step that is not there, for options that it does not take, and if it is of another version.
    """
    try:
        steps_json = json.dumps([dict(step) for step in steps], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options of steps are texts, numbers, true, false, lists and mappings of them ({error})") from error
    return _opened(steps_json)


@functools.lru_cache(32)
def _opened(steps_json: str) -> ReadySteps:
    """The steps of a JSON list. ValueError for a name, a version or columns that do not fit."""
    described, opened = list[JsonObject](), dict[str, Step]()
    names = Counter[str]()
    for step in json.loads(steps_json):
        use, options, version = step["use"], step.get("options") or {}, step.get("version")
        made, installed = _made(use, options)
        names[use] += 1
        name = step.get("name") or (use if names[use] == 1 else f"{use}-{names[use]}")
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of a step; take letters, digits, dashes and underscores")
        if name in opened:
            raise ValueError(f"{name!r} is the name of two steps; give one of them another")
        if version not in (None, installed):
            raise ValueError(f"step {use!r} is of version {installed} here, and was of version {version}")
        given, taken = columns_given(made), [column for before in opened.values() for column in columns_given(before)]
        for number, column in enumerate(given):
            if not isinstance(column, str) or not COLUMN.fullmatch(column):
                raise ValueError(f"step {name!r} gives a column {column!r}, which is not a name")
            if column in kept.RESERVED:
                raise ValueError(
                    f"step {name!r} gives a column {column!r}, which every document has already. Give it another name"
                )
            if column in (*given[:number], *taken):
                raise ValueError(f"the column {column!r} is given twice, by step {name!r} the second time. Give it another name")
        options = getattr(made, "described_as", options)
        described.append({"use": use, "name": name, "version": installed, "options": options})
        opened[name] = made
    return ReadySteps(tuple(described), opened)


def _made(use: str, options: JsonFacts) -> tuple[Step, str]:
    """The step of that name with its options, and its version. ValueError, with the nearest one, for an option that the step does
    not have, and for one that it needs.
    """
    make, package = (SHIPPED[use], "") if use in SHIPPED else _installed(use)
    parameters = inspect.signature(make).parameters
    takes_others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in options:
        if name not in parameters and not takes_others:
            raise ValueError(f"step {use!r} has no option {name!r}. {did_you_mean(name, list(parameters))}")
    for name, one in parameters.items():
        if one.default is one.empty and one.kind is one.KEYWORD_ONLY and name not in options:
            raise ValueError(f"step {use!r} needs the option {name!r}")
    try:
        step = make(**options)
    except (TypeError, ValueError, ModuleNotFoundError) as error:
        raise ValueError(f"step {use!r}: {error}") from error
    return step, str(getattr(step, "version", package))


def _installed(use: str) -> tuple[MakeStep, str]:
    """The maker of a step of an installed package, and that package. ValueError if there is none, or several."""
    entries = tuple(importlib.metadata.entry_points(group=GROUP))
    found = {f"{entry.dist.name} {entry.dist.version}": entry for entry in entries if entry.name == use and entry.dist}
    if not found:
        known = [*SHIPPED, *sorted({entry.name for entry in entries})]
        raise ValueError(f"there is no step {use!r}. {did_you_mean(use, known)} Others are in packages that are not installed.")
    if len(found) > 1:
        raise ValueError(f"several packages have a step {use!r}: {', '.join(found)}. Remove all but one.")
    ((package, entry),) = found.items()
    try:
        return entry.load(), package
    except ImportError as error:
        raise ValueError(f"step {use!r} of {package} cannot be imported: {error}. Install what it needs.") from error
