"""A build on a Ray cluster that is there: slices and spans are tasks of it, on whichever machine has room."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefect import task

from flows.credentials import credentials
from flows.pipelines.build import Started, scratch_of
from flows.runners.prefect_tasks import AGAIN, PrefectTasks
from flows.runners.work_pool import group_of
from tasks.config import BuildConfig
from tasks.groups import Group, Slices, Spans, check_tokenizer
from tasks.models import TokenShard
from tasks.output.staging import Place, attempt
from tasks.progress import meter
from tasks.shards.write import make_shard, write_shard
from tasks.split.write import Written, write_span

CHECKOUT = Path(__file__).parents[1]
PACKAGES = ("flat_tokens", "tasks", "flows")
FORWARDED = (
    "PREFECT_API_URL",
    "PREFECT_API_AUTH_STRING",
    "FLAT_TOKENS_CREDENTIALS",
    "FLAT_TOKENS_INPUT_ROOTS",
    "FLAT_TOKENS_OUTPUT_ROOTS",
    "TIKTOKEN_CACHE_DIR",
    "DO_NOT_TRACK",
)


@task(
    name="tokenize",
    task_run_name="tokenize {label}",
    **AGAIN,
)
def tokenize_there(label: str, told: str) -> TokenShard:
    """Tokenize a slice wherever this runs, and store it; what is stored already is not made again. *told*: the group as JSON,
    in which Prefect looks for no futures.
    """
    group = Group.model_validate_json(told)
    work = group.work
    assert isinstance(work, Slices)
    (part,) = work.slices
    with credentials(), attempt(group.output, scratch_of(group), group.digest[:16]) as place:
        check_tokenizer(work.recipe)
        return make_shard(part, work.recipe.model_copy(update={"place": group.place(place)}), write_shard)


@task(
    name="split",
    task_run_name="split {label}",
    **AGAIN,
)
def split_there(label: str, told: str) -> Written:
    """Write whole objects of the final arrays wherever this runs. *told*: the group as JSON."""
    group = Group.model_validate_json(told)
    work = group.work
    assert isinstance(work, Spans)
    (span,) = work.spans
    with credentials(), attempt(group.output, scratch_of(group), group.digest[:16]) as place:
        return write_span(span, work.rule, work.layout, Place(output=group.output, staging=place.staging), work.version)


class _There:
    """A task on the cluster; what it has done counts when it is done."""

    def __init__(self, future: Any, group: Group) -> None:
        self._future, self._group = future, group

    def result(self) -> Any:
        result = self._future.result()
        (item,) = self._group.items
        if isinstance(result, TokenShard):
            meter.add("tokenize", self._group.work.slices[0].text_bytes, result.read, result.token_count)  # type: ignore[union-attr]
        elif item.of_tokens:  # type: ignore[union-attr]
            meter.add("split", 4 * (item.stop - item.start))  # type: ignore[union-attr]
        return result


class RayTasks:
    """Runs slices and spans on the Ray cluster of this machine, all else as tasks of this run.

    ValueError where there is no cluster, or no prefect-ray.
    """

    tokenizes_here = False

    def __init__(self, config: BuildConfig) -> None:
        self._config = config
        self._tasks = PrefectTasks(config.workers)
        self.window = self._tasks.window

    def start(self, function: Callable[..., Any], item: Any, *shared: Any) -> Started:
        if function not in (make_shard, write_span):
            return self._tasks.start(function, item, *shared)
        group = group_of(self._config, function, [item], *shared)
        there: Any = tokenize_there if function is make_shard else split_there
        return _There(self._ray.submit(there, {"label": group.label, "told": group.model_dump_json()}), group)

    def __enter__(self) -> Self:
        try:
            self._module: Any = importlib.import_module("ray")
            runner: Any = importlib.import_module("prefect_ray").RayTaskRunner
        except ImportError as error:
            raise ValueError(
                f"runner: ray needs prefect-ray ({error}). Install it: pip install prefect-ray, or set runner to threads."
            ) from error
        modules = [str(CHECKOUT / name) for name in PACKAGES]
        variables = {name: os.environ[name] for name in FORWARDED if name in os.environ}
        try:
            self._module.init(
                address="auto",
                namespace="prefect",
                log_to_driver=False,
                runtime_env={"py_modules": modules, "env_vars": variables},
            )
        except ConnectionError as error:
            raise ValueError(
                "runner: ray needs a Ray cluster that this machine is part of. Start one: ray start --head"
            ) from error
        self.window = 2 * int(self._module.cluster_resources().get("CPU", 1))
        self._ray: Any = runner(address="auto")
        self._ray.__enter__()
        self._tasks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tasks.__exit__(kind, error, trace)
        self._ray.__exit__(kind, error, trace)
        self._module.shutdown()
