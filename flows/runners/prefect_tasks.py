"""The runner that people watch: every row of the table of stages as a Prefect task, on threads of this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TagsContext
from prefect.futures import PrefectConcurrentFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import opaque

from flows.pipelines.stages import ItemUnderWay, Stage, Step, Work, run_step
from flows.runners.processes import process_pool, threads_for
from flows.runners.receipts import key_of_pack
from tasks.config import available_cores
from tasks.shards.stream import TASK

PACK_ITEMS = 100
"""A task then costs the server little next to its slices, and an error still stops the rest soon."""


def storage_may_be_back(_: Task[..., Any], __: TaskRun, state: State[Any]) -> bool:
    """Retry failures of the network or of a store, never those of bad input."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError | ChildProcessError)


RETRIES: dict[str, Any] = {"retries": 3, "retry_delay_seconds": [1, 5, 20], "retry_condition_fn": storage_may_be_back}
UNCACHED: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


@functools.cache
def task_of(stage: Stage) -> Task[..., Any]:
    """The Prefect task of a stage: it takes the items of a pack through the steps, of which the stage is the first. *work_of*
    does the work of a step for an item.
    """

    def work(items: list[Any], steps: tuple[Step, ...], label: str, work_of: Work, ways: str = "") -> list[Any]:
        first, *rest = steps
        results: list[Any] = []
        before = TASK.set(object() if len(items) > 1 else None)
        try:
            results.extend(work_of(first, item) for item in items)
        finally:  # a bad item takes none of the items before it along
            TASK.reset(before)
            if rest and results:
                following: Any = task_of(rest[0].stage)
                results = following(opaque(results), opaque(tuple(rest)), label, opaque(work_of))
        return results

    def key(_: Any, arguments: dict[str, Any]) -> str:
        assert stage.cache_key is not None
        return key_of_pack([stage.cache_key(item, *arguments["steps"][0].shared) for item in arguments["items"]])

    settings = {**UNCACHED, **(RETRIES if stage.retries else {})}
    if stage.cache_key:
        settings = {"cache_key_fn": key, "persist_result": True, "result_serializer": "json", "cache_result_in_memory": False}
    work.__qualname__ = stage.function.__qualname__  # Prefect distinguishes tasks by it
    return Task(work, name=stage.name, task_run_name=f"{stage.name} {{label}}{{ways}}", **settings)


def task_parameters(items: Sequence[Any], steps: tuple[Step, ...], work_of: Work = run_step) -> dict[str, Any]:
    """The parameters of the task that takes items through steps."""
    stage, shared = steps[0].stage, steps[0].shared
    label = stage.label(items[0]) + (f" and {len(items) - 1} more" if len(items) > 1 else "")
    # Opaque: Prefect would look for futures in every field of every model, which costs as much as all else it does.
    ways = stage.label_suffix(*shared)
    return {"items": opaque(items), "steps": opaque(steps), "label": label, "work_of": opaque(work_of), "ways": ways}


@dataclass
class Pack:
    """Items of one task: one of a usual size, or several of those that are sooner done than a task is reported."""

    steps: tuple[Step, ...]
    items: list[Any] = field(default_factory=list)
    future: PrefectConcurrentFuture[Any] | None = None

    def takes(self, item: Any, steps: tuple[Step, ...]) -> bool:
        if self.future is not None or self.steps != steps or len(self.items) >= PACK_ITEMS:
            return False
        stage = steps[0].stage
        return sum(map(stage.size, self.items)) + stage.size(item) <= stage.pack_bytes


class InPack:
    """An item of a pack that is under way, or still being put together."""

    def __init__(self, tasks: PrefectTasks, pack: Pack, number: int) -> None:
        self._tasks, self._pack, self._number = tasks, pack, number

    def result(self) -> Any:
        return self._tasks.result_of(self._pack)[self._number]

    def done(self) -> bool:
        return self._pack.future is not None and self._pack.future.wrapped_future.done()

    def cancel(self) -> bool:
        future = self._pack.future
        return future is None or future.wrapped_future.cancel()


class PrefectTasks:
    """Runs stages as Prefect tasks, on a thread for every core. Small items share a task once there are more than workers."""

    def __init__(self, workers: int | None) -> None:
        workers = workers or available_cores()
        self._workers, self._threads = workers, threads_for(workers)
        self._at_once = self._threads + 1
        self._held = contextlib.ExitStack()
        self._work: Work = run_step
        self._runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=self._threads)
        self._pack: Pack | None = None
        self._under_way: list[Future[Any]] = []

    @property
    def workers(self) -> Literal["threads", "processes", "machines"]:
        return "threads" if self._work is run_step else "processes"

    def window(self, stage: Stage) -> int:
        return self._at_once * (PACK_ITEMS if stage.pack_bytes else 1)

    def start(self, item: Any, *steps: Step) -> ItemUnderWay:
        if not steps[0].stage.pack_bytes:
            alone = Pack(steps, [item])
            alone.future = self._submit(alone)
            return InPack(self, alone, 0)
        pack = self._pack
        if pack is None or not pack.takes(item, steps):
            if pack is not None:
                self.send(pack)
            self._pack = pack = Pack(steps)
        pack.items.append(item)
        self._send_to_the_idle()
        return InPack(self, pack, len(pack.items) - 1)

    def _running(self) -> list[Future[Any]]:
        self._under_way = [future for future in self._under_way if not future.done()]
        return self._under_way

    def _send_to_the_idle(self) -> None:
        """Send the pack that is being put together, if a worker has nothing to do. Others wait until it is full."""
        if self._pack is not None and self._pack.future is None and len(self._running()) < self._threads:
            self.send(self._pack)

    def result_of(self, pack: Pack) -> list[Any]:
        """Wait for the results of a pack, and keep the workers busy meanwhile."""
        future = self.send(pack)
        while not future.wrapped_future.done():
            concurrent.futures.wait({future.wrapped_future, *self._running()}, return_when=FIRST_COMPLETED)
            self._send_to_the_idle()
        results: list[Any] = future.result()
        return results

    def send(self, pack: Pack) -> PrefectConcurrentFuture[Any]:
        """Submit a pack once. Waits while the workers have enough to do: an error in what is under way stops the rest."""
        if pack.future is None:
            while len(running := self._running()) >= self._at_once:
                concurrent.futures.wait(running, return_when=FIRST_COMPLETED)
            pack.future = self._submit(pack)
            self._under_way.append(pack.future.wrapped_future)
        return pack.future

    def _submit(self, pack: Pack) -> PrefectConcurrentFuture[Any]:
        return self._runner.submit(task_of(pack.steps[0].stage), task_parameters(pack.items, pack.steps, self._work))

    def here(self, items: Sequence[Any], step: Step) -> list[Any]:
        task: Any = task_of(step.stage)
        done: list[Any] = task(**task_parameters(items, (step,)))
        return done

    def __enter__(self) -> Self:
        self._runner.__enter__()
        # The tags are those of the run. Tasks with tags wait, in order, until the server says that no limit has them.
        self._held.enter_context(TagsContext(current_tags=set()))
        self._work = self._held.enter_context(process_pool(self._workers))
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.__exit__(*error)
        self._held.close()
