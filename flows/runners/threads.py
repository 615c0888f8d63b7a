"""The runner where no Prefect server watches: threads of this process."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Literal, Self

from flows.pipelines.stages import Step, ThreadRunner, do, through
from flows.runners.processes import Processes, process_pool, threads_for
from tasks.config import available_cores


class Threads(ThreadRunner):
    """A thread for every core keeps them all busy: engines and codecs work outside the interpreter's lock. Where there are many,
    each hands its items to a process of its own.
    """

    def __init__(self, workers: int | None) -> None:
        workers = workers or available_cores()
        super().__init__(workers, threads_for(workers))
        self._held = ExitStack()
        self._processes: Processes | None = None

    @property
    def workers(self) -> Literal["threads", "processes"]:
        return "threads" if self._processes is None else "processes"

    def start(self, item: Any, *steps: Step) -> Future[Any]:
        return self._pool.submit(through, item, steps, do if self._processes is None else self._processes.do)

    def __enter__(self) -> Self:
        self._processes = self._held.enter_context(process_pool(self._workers))
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._held.close()
