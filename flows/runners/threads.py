"""The runner where no Prefect server watches: threads of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self

from flows.pipelines.stages import Stage, Step, do, through
from flows.runners.processes import Processes, process_pool, threads_for
from tasks.config import available_cores

ITEMS_OF_A_WORKER = 4
"""Results are taken in order: after an item that takes long, workers would soon have done all that was handed out."""


class Threads:
    """A thread for every core keeps them all busy: engines and codecs work outside the interpreter's lock. Where there are many,
    each hands its items to a process of its own.
    """

    def __init__(self, workers: int | None) -> None:
        self._workers = workers or available_cores()
        self._pool = ThreadPoolExecutor(threads_for(self._workers), "task")
        self._held = contextlib.ExitStack()
        self._processes: Processes | None = None

    @property
    def workers(self) -> Literal["threads", "processes"]:
        return "threads" if self._processes is None else "processes"

    def window(self, stage: Stage) -> int:
        return ITEMS_OF_A_WORKER * self._workers

    def start(self, item: Any, *steps: Step) -> Future[Any]:
        return self._pool.submit(through, item, steps, do if self._processes is None else self._processes.do)

    def here(self, items: Sequence[Any], step: Step) -> list[Any]:
        return [do(step, item) for item in items]

    def __enter__(self) -> Self:
        self._processes = self._held.enter_context(process_pool(self._workers))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._held.close()
