"""The worker of ``make serve``: between two runs it does not wait for its next look at the pool, and begins groups at once."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import anyio
import pytest
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.utilities.processutils import command_from_string

from deployments.worker import ENGINE, BegunAtOnce, asking_behind, closing


@dataclass
class Worker:
    """A worker with one place: it takes the next run when it is asked to, if the place is free."""

    waiting: list[str]
    done: list[str] = field(default_factory=list)
    is_free: bool = True
    _runs_task_group: Any = None

    async def get_and_submit_flow_runs(self) -> None:
        if not self.waiting:
            raise ConnectionError("the server does not answer")
        if self.is_free:
            self.is_free = False
            self._runs_task_group.start_soon(self.submit, self.waiting.pop(0))

    async def submit(self, name: str) -> None:
        try:
            await self.run(name)
        except ValueError:
            self.done.append("failed")
        finally:
            self.is_free = True

    async def _run(self, name: str) -> None:
        await anyio.lowlevel.checkpoint()
        if name == "bad":
            raise ValueError(name)
        self.done.append(name)

    run = asking_behind(_run)


async def work(worker: Worker) -> None:
    async with anyio.create_task_group() as worker._runs_task_group:
        await worker.get_and_submit_flow_runs()  # the only look of its own


@pytest.mark.parametrize("names", [["a"], ["a", "bad", "b", "c"]])
def test_the_next_run_is_taken_as_soon_as_one_has_ended(names: list[str]) -> None:
    """Whether it failed or not; and a server that is away ends nothing."""
    worker = Worker(list(names))
    asyncio.run(work(worker))
    assert worker.done == ["failed" if name == "bad" else name for name in names]


def test_a_worker_that_ends_is_left_alone() -> None:
    worker = Worker(["a"])
    asyncio.run(work(worker))
    asyncio.run(worker.run("late"))
    assert worker.done == ["a", "late"]


def deployment(*steps: dict[str, Any]) -> DeploymentResponse:
    return DeploymentResponse(flow_id=uuid4(), name="group", pull_steps=list(steps), work_pool_name="p", id=uuid4())


HERE = {"prefect.deployments.steps.set_working_directory": {"directory": "/checkout"}}


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (deployment(HERE), ["/checkout"]),
        (deployment({"git_clone": {"repository": "r"}}, HERE), ["/checkout"]),
        (deployment({"git_clone": {"repository": "r"}}), []),
        (None, []),
    ],
)
def test_a_group_begins_as_its_own_process_in_the_checkout_of_its_deployment(
    of: DeploymentResponse | None, words: list[str]
) -> None:
    run = BegunAtOnce()
    pool = WorkPool(name="flat-tokens-groups", type="process")
    run.prepare_for_flow_run(FlowRun(flow_id=uuid4()), of, work_pool=pool, worker_name="w")
    assert run._command_configured
    assert command_from_string(run.command or "") == [sys.executable, str(ENGINE), *words]
    assert ENGINE.is_file()


def test_a_build_begins_as_prefect_wants_it() -> None:
    """It has a hook, which Prefect runs where it has prepared the run."""
    run = BegunAtOnce()
    pool = WorkPool(name="flat-tokens", type="process")
    run.prepare_for_flow_run(FlowRun(flow_id=uuid4()), deployment(HERE), work_pool=pool, worker_name="w")
    assert not run._command_configured


def test_a_worker_that_ends_ends_the_process_that_waits() -> None:
    """Also when it ends with an error of its own."""
    closed: list[str] = []

    class Waiting:
        async def close(self) -> None:
            closed.append("waiting")

    async def leave(*_: object) -> None:
        closed.append("worker")
        raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(closing(leave, Waiting())(None, None, None))  # type: ignore[arg-type]
    assert closed == ["worker", "waiting"]
