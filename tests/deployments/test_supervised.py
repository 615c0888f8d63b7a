"""Processes of the service that end: they are started again, within bounds, and nothing of them outlives the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from deployments import supervised as module
from deployments.supervised import RESTARTS, Process, Supervised, stop

SLEEPS = "import time; print(flush=True); time.sleep(600)"
HAS_A_CHILD = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); time.sleep(600)"


def begin(program: str) -> Callable[[], Process]:
    def start() -> Process:
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)

    return start


@pytest.fixture
def sleeper() -> Iterator[Supervised]:
    one = Supervised("worker 'x'", begin(SLEEPS))
    yield one
    stop([one])
    assert one.process.stdout is not None
    one.process.stdout.close()


def killed(one: Supervised) -> Process:
    before = one.process
    before.kill()
    before.wait()
    assert before.stdout is not None
    before.stdout.close()
    return before


def test_a_killed_process_is_started_again(sleeper: Supervised) -> None:
    assert sleeper.end() is None
    before = killed(sleeper)
    assert sleeper.end() == "was killed by signal 9 (Killed, which the system does where memory is short)"
    sleeper.start_again()
    assert sleeper.end() is None
    assert sleeper.process.pid != before.pid


def test_one_that_ends_again_and_again_is_given_up(sleeper: Supervised) -> None:
    for _ in range(RESTARTS):
        killed(sleeper)
        sleeper.start_again()
    killed(sleeper)
    with pytest.raises(ValueError, match=r"The worker 'x' was killed by signal 9 .*ended 4 times, each time within 60 s"):
        sleeper.start_again()


def test_one_that_ran_for_long_is_started_again_however_often(sleeper: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEADY_SECONDS", 0.0)
    for _ in range(RESTARTS + 2):
        killed(sleeper)
        sleeper.start_again()


def test_what_a_killed_process_started_goes_on_and_is_stopped_with_the_service() -> None:
    """A run goes on without its worker. Ctrl-C ends it all the same."""
    one = Supervised("worker", begin(HAS_A_CHILD))
    assert one.process.stdout is not None
    one.process.stdout.readline()  # its child has begun
    output = one.process.stdout
    group = one.process.pid
    one.process.kill()
    one.process.wait()
    one.start_again()
    os.killpg(group, 0)
    again = one.process.stdout
    stop([one])
    assert output.read() == b""  # the child has ended: nobody writes any more
    for file in (output, again):
        assert file is not None
        file.close()


@pytest.mark.parametrize(
    ("status", "words"), [(3, "ended with status 3"), (-signal.SIGTERM, "was killed by signal 15 (Terminated)")]
)
def test_how_a_process_ended(status: int, words: str) -> None:
    assert module.how_it_ended(status) == words
