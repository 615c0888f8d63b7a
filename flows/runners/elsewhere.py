"""Work for other processes: items and steps as JSON, by the types that the functions of the stages declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from pydantic import JsonValue, TypeAdapter

from flat_tokens.stores.store import Store
from flows.pipelines.stages import STAGES, Step
from tasks.config import BuildConfig
from tasks.groups import Group, GroupStep
from tasks.output.staging import Place
from tasks.shards.recipe import Recipe


@functools.cache
def _types(function: Callable[..., Any]) -> tuple[list[TypeAdapter[Any]], TypeAdapter[Any]]:
    """Type adapters of a function's parameters (the item first) and of its result."""
    hints = get_type_hints(function)
    result = hints.pop("return")
    return [TypeAdapter(hint) for hint in hints.values()], TypeAdapter(result)


def group_of(config: BuildConfig, items: Sequence[Any], steps: Sequence[Step]) -> Group:
    """Some items of a build and their steps, for another process, perhaps of another machine."""
    (item_type, *_), _ = _types(steps[0].stage.function)
    return Group(
        output=Store.at(config.output).url,
        scratch=config.scratch,
        keep_files=config.groups.keep_files,
        workers=config.workers,
        report_seconds=min(10.0, config.groups.lost_after / 4),
        steps=tuple(GroupStep(stage=step.stage.name, shared=_shared_as_json(step)) for step in steps),
        items=tuple(item_type.dump_python(item, mode="json") for item in items),
        labels=tuple(steps[0].stage.label(item) for item in items),
    )


def _shared_as_json(step: Step) -> tuple[JsonValue, ...]:
    """Shared values without the place of this attempt: the same work has the same digest, whoever hands it out."""
    types, _ = _types(step.stage.function)
    nowhere = [_placed(value, lambda place: place.model_copy(update={"staging": "", "scratch": ""})) for value in step.shared]
    return tuple(kind.dump_python(value, mode="json") for kind, value in zip(types[1:], nowhere, strict=True))


def _placed(value: Any, place_of: Callable[[Place], Place]) -> Any:
    """A shared value with another place in it, if it is a place or has one."""
    if isinstance(value, Recipe):
        return value.model_copy(update={"place": place_of(value.place)})
    return place_of(value) if isinstance(value, Place) else value


def work_of(group: Group, place: Place) -> tuple[list[Any], list[Step]]:
    """The items of a group and their steps, in which this process writes to *place*. ValueError for a stage that there is none
    of, or that is not one for other processes.
    """
    if group.stage not in STAGES or STAGES[group.stage].pool is None:
        raise ValueError(f"stage {group.stage!r} is not one that other processes work on")
    steps = [_step(step, place) for step in group.steps]
    (item_type, *_), _ = _types(steps[0].stage.function)
    return [item_type.validate_python(item) for item in group.items], steps


def _step(told: GroupStep, place: Place) -> Step:
    stage = STAGES[told.stage]
    types, _ = _types(stage.function)
    shared = [kind.validate_python(value) for kind, value in zip(types[1:], told.shared, strict=True)]
    return stage.given(*(_placed(value, lambda _: place) for value in shared))


def result_as_json(steps: Sequence[Step], result: Any) -> JsonValue:
    """The result of the last step."""
    value: JsonValue = _types(steps[-1].stage.function)[1].dump_python(result, mode="json")
    return value


def result_from_json(steps: Sequence[Step], value: JsonValue) -> Any:
    """The result of the last step, from another process. ValueError where it is none."""
    return _types(steps[-1].stage.function)[1].validate_python(value)
