"""The work of a build's stages as Prefect tasks, which people can watch, and the runner for them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectConcurrentFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import opaque
from prefect.utilities.callables import get_call_parameters

from flat_tokens.arrays.layouts import LayoutName
from flows.pipelines.build import finalize
from flows.runners.receipts import KEY_SEPARATOR
from tasks.config import Source
from tasks.cores import available_cores
from tasks.download.cut import CutFile, cut_file
from tasks.finalize.provenance import Provenance
from tasks.models import FoundFile, Slice, TokenShard
from tasks.output.staging import Place
from tasks.shards.recipe import Recipe
from tasks.shards.write import make_shard, write_shard
from tasks.split.rule import SplitRule
from tasks.split.spans import ShardPlace, Span
from tasks.split.write import Written, write_span


def storage_may_be_back(_: Task[..., Any], __: TaskRun, state: State[Any]) -> bool:
    """Retry what the network or a store did, never what bad input did."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError)


AGAIN: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 3,
    "retry_delay_seconds": [1, 5, 20],
    "retry_condition_fn": storage_may_be_back,
}
"""Settings of a task whose work is done again when the network or a store failed, never when the input is bad."""


@task(name="download", task_run_name="download {found.name}", cache_policy=NO_CACHE, persist_result=False)
def download(found: FoundFile, sources: tuple[Source, ...], slice_bytes: int, place: Place) -> CutFile:
    """Bring a file here, take its content's digest, cut it into slices. Busy servers are asked again by the fetching itself."""
    return cut_file(found, sources, slice_bytes, place)


PACK_BYTES = 8_000_000
PACK_SLICES = 28
"""Prefect takes cache keys of up to 2,000 characters; that of a slice has 64."""


class Pack(NamedTuple):
    """Slices of one task: one of a usual size, or several of those that are sooner tokenized than a task is told of."""

    parts: tuple[Slice, ...]

    @property
    def label(self) -> str:
        return self.parts[0].label + (f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else "")

    def key(self, recipe: Recipe) -> str:
        return KEY_SEPARATOR.join(recipe.key(part) for part in self.parts)


@task(
    name="tokenize",
    task_run_name="tokenize {pack.label}",
    cache_key_fn=lambda _, parameters: parameters["pack"].key(parameters["recipe"]),
    persist_result=True,
    result_serializer="json",
    cache_result_in_memory=False,
)
def tokenize(pack: Pack, recipe: Recipe) -> list[TokenShard]:
    """Tokenize slices. The key is all that their tokens depend on; what the cache finds under it are the shards' receipts."""
    drafts: list[TokenShard] = []

    def put_off(draft: TokenShard, _: Place) -> TokenShard:
        drafts.append(draft)
        return draft

    try:
        return [make_shard(part, recipe, put_off) for part in pack.parts]
    finally:  # a bad document takes none of the slices before its own along
        if drafts:
            shard_write(opaque(drafts), opaque(recipe.place), pack.label)  # type: ignore[call-overload]  # gets what is inside


@task(
    name="shard-write",
    task_run_name="shard-write {label}",
    **AGAIN,
)
def shard_write(drafts: list[TokenShard], place: Place, label: str) -> None:
    """Store token shards under their contents' names, the receipts last. *label* is for people."""
    for draft in drafts:
        write_shard(draft, place)


@task(
    name="split",
    task_run_name="split {span.label}",
    **AGAIN,
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
    cut_file: download,
    make_shard: tokenize,
    write_span: split,
    finalize: finalize_version,
}


class Submitted(NamedTuple):
    """A task that runs, or waits for a thread."""

    future: PrefectConcurrentFuture[Any]

    def result(self) -> Any:
        return self.future.result()

    def cancel(self) -> bool:
        """Give it up if it has not begun; whether it was given up."""
        return self.future.wrapped_future.cancel()


class Packed:
    """A slice within a pack that is being tokenized, or still being put together."""

    def __init__(self, tasks: PrefectTasks, packing: Packing, place: int) -> None:
        self._tasks, self._packing, self._place = tasks, packing, place

    def result(self) -> TokenShard:
        shards: list[TokenShard] = self._tasks.send(self._packing).result()
        return shards[self._place]

    def cancel(self) -> bool:
        """Give it up if its pack has not begun; whether it was given up."""
        future = self._packing.future
        return future is None or future.wrapped_future.cancel()


@dataclass
class Packing:
    """A pack being put together, until it is sent."""

    shared: tuple[Any, ...] = ()
    parts: list[Slice] = field(default_factory=list)
    future: PrefectConcurrentFuture[Any] | None = None

    def takes(self, part: Slice, shared: tuple[Any, ...]) -> bool:
        size = sum(one.text_bytes for one in self.parts) + part.text_bytes
        return self.future is None and self.shared == shared and len(self.parts) < PACK_SLICES and size <= PACK_BYTES


class PrefectTasks:
    """Runs functions as the Prefect tasks that *tasks* has for them, on a thread for every core.

    A task costs the server 30 to 50 ms of a core, so small slices share one, as soon as there is
    more to do than workers.
    """

    tokenizes_here = True

    def __init__(self, workers: int | None, tasks: Mapping[Callable[..., Any], Task[..., Any]] = TASKS) -> None:
        workers = workers or available_cores()
        self._at_once = workers + 1
        self.window = self._at_once * PACK_SLICES if make_shard in tasks else self._at_once
        self._tasks = tasks
        self._runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=workers)
        self._packing: Packing | None = None
        self._under_way: list[PrefectConcurrentFuture[Any]] = []

    def start(self, function: Callable[..., Any], item: Any, *shared: Any) -> Submitted | Packed:
        if function is not make_shard:
            return Submitted(self._submit(function, item, *shared))
        packing = self._packing
        if packing is None or not packing.takes(item, shared):
            if packing is not None:
                self.send(packing)
            self._packing = packing = Packing(shared)
        packing.parts.append(item)
        if self._has_room():
            self.send(packing)
        return Packed(self, packing, len(packing.parts) - 1)

    def _has_room(self) -> bool:
        self._under_way = [future for future in self._under_way if not future.wrapped_future.done()]
        return len(self._under_way) < self._at_once

    def send(self, packing: Packing) -> PrefectConcurrentFuture[Any]:
        """Have a pack tokenized, unless it was sent before. Waits while the workers have enough to do: an error in what is
        under way stops the rest.
        """
        if packing.future is None:
            while not self._has_room():
                concurrent.futures.wait([future.wrapped_future for future in self._under_way], return_when=FIRST_COMPLETED)
            packing.future = self._submit(make_shard, Pack(tuple(packing.parts)), *packing.shared)
            self._under_way.append(packing.future)
        return packing.future

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> PrefectConcurrentFuture[Any]:
        chosen = self._tasks[function]
        # Opaque: Prefect would look for futures in every field of every model, which costs as much as all else it does.
        parameters = get_call_parameters(chosen.fn, arguments, {})
        return self._runner.submit(chosen, {name: opaque(value) for name, value in parameters.items()})

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runner.__exit__(kind, error, trace)
