"""A process that waits for a group is the group's, if it would have begun in the same way. Otherwise nothing is changed by it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from anyio.abc import Process
from prefect.utilities.processutils import open_process

from deployments import spare as module
from deployments.spare import Spares
from tests.processes import until

CHECKOUT = Path(__file__).parents[2]
ECHO = """
import json, os, sys
waits = sys.argv[2:] == ["spare"]
environment, directory = dict(os.environ), os.getcwd()
if waits:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    told = json.loads(line)
    environment.update(told["environment"])
    directory = told["directory"]
print(json.dumps({"waits": waits, "environment": environment, "directory": directory}))
"""


class Begun(NamedTuple):
    """A process of a run, as it says itself."""

    has_waited: bool
    environment: dict[str, str]
    directory: str


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of engine.py that says how it was begun."""
    path = tmp_path / "engine.py"
    path.write_text(ECHO)
    monkeypatch.setattr(module, "ENGINE", path)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "checkout" / "flows").mkdir(parents=True)
    (tmp_path / "checkout" / "flows" / "groups.py").write_text("")
    return tmp_path / "checkout"


class Opened:
    """Prefect's way to begin a process, which keeps all processes that it began."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    @asynccontextmanager
    async def __call__(self, command: list[str], **options: Any) -> AsyncIterator[Process]:
        async with open_process(command, **options) as process:
            self.processes.append(process)
            yield process


async def begin(spares: Spares, command: list[str], run: str, directory: Path, **environment: str) -> Begun:
    """A group's process, from begin to end."""
    told = {"PATH": os.environ["PATH"], "PREFECT__FLOW_RUN_ID": run, **environment}
    async with spares.open(command, env=told, cwd=directory, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        out = b"".join([part async for part in process.stdout])
        assert await process.wait() == 0
    return Begun(*json.loads(out).values())


def run(work: Callable[[Spares], Any]) -> tuple[Any, list[Process]]:
    """What *work* gives, and all processes that there have been. None of them lives."""

    async def whole() -> Any:
        usual = Opened()
        spares = Spares(usual)
        try:
            return await work(spares), usual.processes
        finally:
            await spares.close()
            assert all(process.returncode is not None for process in usual.processes)

    return asyncio.run(whole())  # type: ignore[no-any-return]


def test_a_group_has_the_process_that_waits_with_its_own_environment_and_directory(
    engine: Path, checkout: Path, tmp_path: Path
) -> None:
    async def work(spares: Spares) -> list[Begun]:
        command = [sys.executable, str(engine), str(checkout)]
        return [await begin(spares, command, name, tmp_path / name, SAME="1") for name in names]

    names = ["a", "b", "c"]
    for name in names:
        (tmp_path / name).mkdir()
    begun, processes = run(work)
    assert [each.has_waited for each in begun] == [False, True, True]
    assert [each.environment["PREFECT__FLOW_RUN_ID"] for each in begun] == names
    assert [each.directory for each in begun] == [str(tmp_path / name) for name in names]
    assert len(processes) == 4  # the last one has waited for nothing


@pytest.mark.parametrize("changed", ["environment", "code", "killed"])
def test_a_group_begins_by_itself_where_the_process_that_waits_is_another_one(
    engine: Path, checkout: Path, tmp_path: Path, changed: str
) -> None:
    """Begun with other settings, with code that has been changed since, or dead."""

    async def work(spares: Spares) -> list[Begun]:
        command = [sys.executable, str(engine), str(checkout)]
        first = await begin(spares, command, "a", tmp_path, SETTING="1")
        if changed == "code":
            os.utime(checkout / "flows" / "groups.py", ns=(0, time.time_ns() + 10**9))
        if changed == "killed":
            assert spares.waiting is not None
            spares.waiting.process.kill()
            await spares.waiting.process.wait()
        setting = "2" if changed == "environment" else "1"
        return [first, *[await begin(spares, command, name, tmp_path, SETTING=setting) for name in ("b", "c")]]

    begun, _ = run(work)
    assert [each.has_waited for each in begun] == [False, False, True]
    assert [each.environment["SETTING"] for each in begun] == ["1", *(["2", "2"] if changed == "environment" else ["1", "1"])]


def test_other_commands_have_nothing_that_waits(engine: Path, tmp_path: Path) -> None:
    async def work(spares: Spares) -> list[Begun]:
        return [await begin(spares, [sys.executable, str(engine), *more], "a", tmp_path) for more in ([], ["x", "y"])]

    begun, processes = run(work)
    assert not any(each.has_waited for each in begun)
    assert len(processes) == 2


def test_a_process_that_nobody_needs_ends(engine: Path, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)

    async def work(spares: Spares) -> bool:
        begun = await begin(spares, [sys.executable, str(engine), str(checkout)], "a", tmp_path)
        while any(process.returncode is None for process in spares.usual.processes):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        assert spares.waiting is None
        return begun.has_waited

    has_waited, processes = run(work)
    assert has_waited is False
    assert len(processes) == 2


def ignores(pid: int, number: int) -> bool:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """The real engine.py, before there is a run."""
    command = [sys.executable, str(CHECKOUT / "deployments" / "engine.py"), str(CHECKOUT), "spare"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT__", "PREFECT_LOGGING"))}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


@pytest.mark.slow
def test_the_real_one_ends_in_silence_when_its_worker_has_ended(waiting: subprocess.Popen[bytes]) -> None:
    assert waiting.communicate(timeout=100) == (b"", b"")
    assert waiting.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="signals that are ignored are read from /proc")
def test_the_real_one_becomes_the_run_that_it_is_told(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Prefect's engine looks for the run's id in the environment before all else. Ctrl-C is for the worker until then."""
    until(lambda: ignores(waiting.pid, signal.SIGINT), "Ctrl-C would end it")
    waiting.send_signal(signal.SIGINT)
    told = {"environment": {"PREFECT__FLOW_RUN_ID": "no id"}, "directory": str(tmp_path)}
    _, err = waiting.communicate(json.dumps(told).encode() + b"\n", timeout=100)
    assert waiting.returncode == 1
    assert b"Invalid flow run id" in err
    assert b"badly formed hexadecimal UUID string" in err
