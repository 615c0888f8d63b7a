"""The runner where no Prefect server watches: threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from flows.pipelines.stages import Stage, Step, through
from tasks.config import available_cores


class Threads:
    """A thread for every core keeps them all busy: engines and codecs work outside the interpreter's lock."""

    reads_here = True

    def __init__(self, workers: int | None) -> None:
        self._workers = workers or available_cores()
        self._pool = ThreadPoolExecutor(self._workers, "task")

    def window(self, stage: Stage) -> int:
        return self._workers + 1

    def start(self, item: Any, *steps: Step) -> Future[Any]:
        return self._pool.submit(through, item, steps)

    def here(self, items: Sequence[Any], step: Step) -> list[Any]:
        return [step(item) for item in items]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
