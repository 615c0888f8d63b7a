"""The runner where no Prefect server watches: threads of this process, and processes for the workers of a build on one machine:
if it has many, a single interpreter's lock would keep them waiting.

The runners' threads stay: each hands an item to a process and waits for it. So tasks, order, progress and errors are those of a
build on threads.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any, Self

import fsspec

import flows.watch  # noqa: F401  its records of logs are printable, in the processes, too
from flat_tokens.stores import signing
from flows.pipelines.stages import OF_A_BUILD, Step, ThreadRunner, Work, run_step
from tasks.config import available_cores
from tasks.progress import meter
from tasks.tokenize import engines
from tasks.tokenize.pool import tokenize_pool

WORKERS_OF_A_PROCESS = 8
"""More than these get processes: the interpreter's lock is held for about a second a gigabyte of text, which is a tenth of the
time that a core takes for it.
"""

THREADS_OF_A_PROCESS = 2
"""One waits until the tokens that its process made have their turn in the version, while another keeps the process busy."""

SMALL_BYTES = 16_000_000
"""Smaller items are done by the thread itself: a process takes a second to begin."""


class Processes:
    """Processes that do large items of stages which other processes may do, one at a time each. They begin when they are needed,
    and end with this one.

    ChildProcessError if one was killed.
    """

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers = workers
        self._counts = context.SimpleQueue()
        self._records: multiprocessing.Queue[Any] = context.Queue()
        settings = (self._counts, self._records, dict(fsspec.config.conf), signing.keys(), workers + 1)
        self._pool = ProcessPoolExecutor(workers, context, _begin, settings)
        self._listening = threading.Thread(target=self._listen, name="counts", daemon=True)
        self._logs = logging.handlers.QueueListener(self._records, _Here())

    def do(self, step: Step, item: Any) -> Any:
        """Do the work of a step for an item, in one of the processes if that is possible and worth it."""
        stage = step.stage
        is_for_others = OF_A_BUILD.get(stage.name) is stage and stage.pool is not None
        if not is_for_others or stage.size(item) < SMALL_BYTES or stage.is_here(item, *step.shared):
            return run_step(step, item)
        try:
            return self._pool.submit(_work, step.stage.name, item, step.shared).result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"one of {self._workers} processes was killed, perhaps as memory ran out. Give it more, or fewer workers"
            ) from error

    def _listen(self) -> None:
        while (counts := self._counts.get()) is not None:
            meter.add(*counts)

    def __enter__(self) -> Processes:
        self._listening.start()
        self._logs.start()
        engines.share_memory(self._workers + 1)  # threads of this process tokenize what is small
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        engines.share_memory(1)
        self._counts.put(None)
        self._listening.join()
        self._logs.stop()
        self._records.close()


def threads_for(workers: int) -> int:
    """How many threads a runner needs for its workers."""
    return workers if workers <= WORKERS_OF_A_PROCESS else THREADS_OF_A_PROCESS * workers


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[Work]:
    """A function that does the work of a step for an item: in processes, for more workers than one interpreter keeps busy; else
    ``do``, and threads of this process tokenize together.
    """
    if workers <= WORKERS_OF_A_PROCESS:
        with tokenize_pool(workers):
            yield run_step
        return
    with Processes(workers) as processes:
        yield processes.do


class _Here(logging.Handler):
    """Log what a process logged, as if it had been logged here."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)


def _begin(counts: Any, records: Any, conf: dict[str, Any], keys: bytes, processes: int) -> None:
    """Make a new process ready for work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals it, too: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    fsspec.config.conf.update(conf)
    signing.use(keys)
    meter.forward(counts.put)
    for name in ("flat_tokens", "tasks"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.handlers.QueueHandler(records))
        logger.propagate = False
        logger.setLevel(logging.INFO)
    engines.share_memory(processes)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # what it has begun is swept by the next build


def _work(stage: str, item: Any, shared: tuple[Any, ...]) -> Any:
    return OF_A_BUILD[stage].function(item, *shared)


class Threads(ThreadRunner):
    """A thread for every core keeps them all busy: engines and codecs work outside the interpreter's lock. Where there are many,
    each hands its items to a process of its own.
    """

    def __init__(self, workers: int | None) -> None:
        workers = workers or available_cores()
        super().__init__(workers, threads_for(workers))
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._work = self._held.enter_context(process_pool(self._workers))
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._held.close()
