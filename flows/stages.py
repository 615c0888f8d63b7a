"""The work of a build's stages as Prefect tasks, which people can watch, and the runner for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import opaque
from prefect.utilities.callables import get_call_parameters

from flat_tokens.arrays import LayoutName
from flows.order import finalize
from tasks.caching import Place, Recipe
from tasks.download import fetch_file
from tasks.finalize import Provenance
from tasks.models import Slice, Source, SourceFile, TokenShard
from tasks.shards import make_shard, write_shard
from tasks.sources import FoundFile
from tasks.split import ShardPlace, Span, SplitRule, Written, write_span


def storage_may_be_back(_: Task[..., Any], __: TaskRun, state: State[Any]) -> bool:
    """Retry what the network or a store did, never what bad input did."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError)


@task(name="download", task_run_name="download {found.name}", cache_policy=NO_CACHE, persist_result=False)
def download(found: FoundFile, sources: tuple[Source, ...], scratch: Path) -> SourceFile:
    """Bring a file here and take its content's digest. Busy servers are asked again by the fetching itself."""
    return fetch_file(found, sources, scratch)


@task(
    name="tokenize",
    task_run_name="tokenize {part.label}",
    cache_key_fn=lambda _, parameters: parameters["recipe"].key(parameters["part"]),
    persist_result=True,
    result_serializer="json",
    cache_result_in_memory=False,
)
def tokenize(part: Slice, recipe: Recipe) -> TokenShard:
    """Tokenize a slice. The key is all that its tokens depend on; what the cache finds under it is the shard's receipt."""
    return make_shard(part, recipe, _write)


def _write(draft: TokenShard, place: Place) -> TokenShard:
    return shard_write(opaque(draft), opaque(place))  # type: ignore[call-overload,no-any-return]  # it is handed what is inside


@task(
    name="shard-write",
    task_run_name="shard-write {draft.key:.12}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=[1, 5, 20],
    retry_condition_fn=storage_may_be_back,
)
def shard_write(draft: TokenShard, place: Place) -> TokenShard:
    """Store a token shard under its content's name, the receipt last."""
    return write_shard(draft, place)


@task(
    name="split",
    task_run_name="split {span.label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=[1, 5, 20],
    retry_condition_fn=storage_may_be_back,
)
def split(span: Span, rule: SplitRule, layout: LayoutName, place: Place, version: str) -> Written:
    """Write whole objects of the train or the validation arrays."""
    return write_span(span, rule, layout, place, version)


@task(name="finalize", task_run_name="finalize {version}", cache_policy=NO_CACHE, persist_result=False)
def finalize_version(
    made_of: Provenance,
    layout: LayoutName,
    spans: list[Span],
    written: list[Written],
    places: list[ShardPlace],
    place: Place,
    version: str,
    verify_level: str,
) -> str:
    """Metadata, manifest and card; the check; the commit."""
    return finalize(made_of, layout, spans, written, places, place, version, verify_level)


TASKS: dict[Callable[..., Any], Task[..., Any]] = {
    fetch_file: download,
    make_shard: tokenize,
    write_span: split,
    finalize: finalize_version,
}


class PrefectTasks:
    """Runs functions as the Prefect tasks that *tasks* has for them, on a thread for every core."""

    def __init__(self, workers: int | None, tasks: Mapping[Callable[..., Any], Task[..., Any]] = TASKS) -> None:
        workers = workers or os.cpu_count() or 1
        self.window = workers + 1
        self._tasks = tasks
        self._runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=workers)

    def start(self, function: Callable[..., Any], item: Any, *shared: Any) -> PrefectFuture[Any]:
        chosen = self._tasks[function]
        # Opaque: Prefect would look for futures in every field of every model, which costs as much as all else it does.
        parameters = get_call_parameters(chosen.fn, (item, *shared), {})
        return self._runner.submit(chosen, {name: opaque(value) for name, value in parameters.items()})

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.__exit__(kind, error, trace)
