"""``prefect worker start`` which says of an outage of the server that there is one, and no more, and which asks for the next run
as soon as one has ended: ``python deployments/worker.py worker start --pool POOL``.
"""

import functools
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from prefect.cli import app
from prefect.workers.process import ProcessWorker

from flows.watch.outages import outages


def asking_behind(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A worker's *run* that asks for the next one behind each. Prefect's workers ask every few seconds alone, and for as long one
    would have nothing to do between two groups of slices.
    """

    async def ask(worker: Any) -> None:
        with suppress(Exception):  # the worker will ask again by itself, and say what is wrong
            await worker.get_and_submit_flow_runs()

    @functools.wraps(run)
    async def run_and_ask(worker: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return await run(worker, *arguments, **named)
        finally:
            # It begins when this run has given its place back.
            with suppress(RuntimeError):  # the worker ends
                worker._runs_task_group.start_soon(ask, worker)

    return run_and_ask


if __name__ == "__main__":
    # Its runs have memory in large pages, as builds on the command line do (flows/__main__.py).
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    ProcessWorker.run = asking_behind(ProcessWorker.run)  # type: ignore[method-assign]
    outages()
    app()
