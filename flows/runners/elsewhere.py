"""Work for other processes: items and steps as JSON, by the types that the functions of the stages declare."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from pydantic import JsonValue, TypeAdapter

from flat_tokens.stores.store import Store
from flows.pipelines.stages import OF_A_BUILD, Step
from tasks.config import BuildConfig
from tasks.groups import Group, GroupStep
from tasks.output.leases import Workspace


@functools.cache
def _types(function: Callable[..., Any]) -> tuple[TypeAdapter[Any], tuple[TypeAdapter[Any], ...], TypeAdapter[Any]]:
    """Type adapters for a function's item, for the arguments that all items share and for its result. A workspace is null in
    JSON, since every process has its own: so the same work has the same digest in every process.
    """
    path = function.__qualname__
    hints = get_type_hints(pkgutil.resolve_name(path) if ":" in path else function, include_extras=True)  # some are lazy
    result = TypeAdapter(hints.pop("return"))
    item, *shared = hints.values()
    return TypeAdapter(item), tuple(map(TypeAdapter, shared)), result


def group_of(config: BuildConfig, items: Sequence[Any], steps: Sequence[Step]) -> Group:
    """Some items of a build and their steps, for another process, perhaps of another machine."""
    item_type, _, _ = _types(steps[0].stage.function)
    described = []
    for step in steps:
        _, types, _ = _types(step.stage.function)
        # Without settings that were not given: a source with prompts has no text column, not even the usual one.
        values = (
            kind.dump_python(value, mode="json", exclude_unset=True) for kind, value in zip(types, step.shared, strict=False)
        )
        described.append(GroupStep(stage=step.stage.name, shared=tuple(values)))
    places = ((value.keeps, value.room) for value in steps[0].shared if isinstance(value, Workspace))
    keeps, room = next(places, (True, None))
    return Group(
        output=Store.at(config.output).url,
        scratch=config.scratch,
        keeps=keeps,
        room=room,
        workers=config.workers,
        report_seconds=min(10.0, config.groups.lost_after / 4),
        steps=tuple(described),
        items=tuple(item_type.dump_python(item, mode="json") for item in items),
        labels=tuple(steps[0].stage.label(item) for item in items),
    )


def work_of(group: Group, workspace: Workspace) -> tuple[list[Any], list[Step]]:
    """The items of a group and their steps, writing to *workspace*. ValueError for a stage that is not for other processes."""
    if group.stage not in OF_A_BUILD or OF_A_BUILD[group.stage].pool is None:
        raise ValueError(f"stage {group.stage!r} is not one that other processes work on")
    steps, context = list[Step](), {"workspace": workspace}
    for step in group.steps:
        stage = OF_A_BUILD[step.stage]
        _, types, _ = _types(stage.function)
        shared = (kind.validate_python(value, context=context) for kind, value in zip(types, step.shared, strict=False))
        steps.append(stage.given(*shared))
    item_type, _, _ = _types(steps[0].stage.function)
    return [item_type.validate_python(item) for item in group.items], steps


def result_as_json(steps: Sequence[Step], result: Any) -> JsonValue:
    """The result of the last step."""
    value: JsonValue = _types(steps[-1].stage.function)[-1].dump_python(result, mode="json")
    return value


def result_from_json(steps: Sequence[Step], value: JsonValue) -> Any:
    """The result of the last step, from another process. ValueError if it is none."""
    return _types(steps[-1].stage.function)[-1].validate_python(value)
