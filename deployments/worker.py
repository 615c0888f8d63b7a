"""``prefect worker start`` which says of an outage of the server that there is one, and no more, which asks for the next run
as soon as one has ended, and which begins groups by ``engine.py``, where it can in a process that has begun before (spare.py):
``python deployments/worker.py worker start --pool POOL``.
"""

import functools
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from prefect.cli import app
from prefect.utilities import processutils
from prefect.utilities.processutils import command_to_string
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from deployments.arguments import POOLS
from deployments.spare import ENGINE, Spares
from flows.__main__ import ARROW_MEMORY, C_MEMORY, NO_MORE_THREADS, TUNABLES
from flows.watch.outages import TOLD_ELSEWHERE, outages
from tasks.locations import unbound


def asking_behind(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A worker's *run* that asks for the next one after each. Prefect's workers ask every few seconds alone, and for as long one
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


def closing(leave: Callable[..., Awaitable[Any]], spares: Spares) -> Callable[..., Awaitable[Any]]:
    """A worker's *leave*, its ``__aexit__``, which also ends the process that waits for a group."""

    @functools.wraps(leave)
    async def leave_and_close(*arguments: Any) -> Any:
        try:
            return await leave(*arguments)
        finally:
            await spares.close()

    return leave_and_close


def directory_of(deployment: Any) -> list[str]:
    """The directory where a deployment's runs begin, as register.py gives it to Prefect; nothing if it says something else."""
    steps = (deployment and deployment.pull_steps) or ()
    settings = [step.get("prefect.deployments.steps.set_working_directory") or {} for step in steps]
    return [str(inputs["directory"]) for inputs in settings if "directory" in inputs][:1]


class BegunAtOnce(ProcessJobConfiguration):
    """The settings of a run, as a worker gets them. Where no command is set, Prefect begins a process that prepares a directory,
    imports Prefect for that, and then begins again as the run: a second more. A group needs no directory but the checkout, which
    its deployment names, and has no hooks that would run there.
    """

    def prepare_for_flow_run(
        self, flow_run: Any, deployment: Any = None, flow: Any = None, work_pool: Any = None, *more: Any, **named: Any
    ) -> None:
        if work_pool is not None and work_pool.name == POOLS["groups"]:
            self.command = command_to_string([sys.executable, str(ENGINE), *directory_of(deployment)])
        super().prepare_for_flow_run(flow_run, deployment, flow, work_pool, *more, **named)


if __name__ == "__main__":
    if sys.platform == "linux":  # its runs have memory and threads as builds on the command line do
        for name, value in {TUNABLES: C_MEMORY, **ARROW_MEMORY, **NO_MORE_THREADS}.items():
            os.environ.setdefault(name, value)
    ProcessWorker.run = asking_behind(ProcessWorker.run)  # type: ignore[method-assign, assignment]
    ProcessWorker.job_configuration = BegunAtOnce
    spares = Spares(processutils.open_process)
    processutils.open_process = spares.open
    ProcessWorker.__aexit__ = closing(ProcessWorker.__aexit__, spares)  # type: ignore[method-assign, assignment]
    if TOLD_ELSEWHERE not in os.environ and (warning := unbound()):  # make serve says it of its workers
        print(warning, file=sys.stderr, flush=True)
    outages()
    app()
