"""Processes of the service that end: they are started again, within bounds, and nothing of them outlives the service."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from deployments import supervised as module
from deployments.supervised import RESTARTS, Process, SupervisedProcess, adopt_orphans, stop
from tests.processes import python
from tests.refusal import refusal

SLEEPS = "import time; print(flush=True); time.sleep(600)"
HAS_A_CHILD = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); time.sleep(600)"


def begin(program: str) -> Callable[[], Process]:
    def start() -> Process:
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)

    return start


def killed(one: SupervisedProcess) -> Process:
    before = one.process
    before.kill()
    before.wait()
    return before


def a_killed_process_is_started_again(sleeper: SupervisedProcess) -> None:
    assert sleeper.end() is None
    before = killed(sleeper)
    assert sleeper.end() == "was killed by signal 9 (Killed, which the system does where memory is short)"
    sleeper.start_again()
    assert sleeper.end() is None
    assert sleeper.process.pid != before.pid


def one_that_ends_again_and_again_is_given_up(sleeper: SupervisedProcess) -> None:
    for _ in range(RESTARTS):
        killed(sleeper)
        sleeper.start_again()
    killed(sleeper)
    with refusal(r"The worker 'x' was killed by signal 9 .*ended 4 times, each time within 60 s"):
        sleeper.start_again()


def one_that_ran_for_long_is_started_again_however_often(sleeper: SupervisedProcess) -> None:
    module.STEADY_SECONDS = 0.0
    for _ in range(RESTARTS + 2):
        killed(sleeper)
        sleeper.start_again()


def what_a_killed_process_started_goes_on_and_is_stopped_with_the_service(sleeper: SupervisedProcess) -> None:
    """A run goes on without its worker. Ctrl-C ends it all the same."""
    one = SupervisedProcess("worker", begin(HAS_A_CHILD))
    output = one.process.stdout
    output.readline()  # its child has begun
    group = killed(one).pid
    one.start_again()
    os.killpg(group, 0)  # the child goes on
    stop([one], keep=[sleeper])
    assert output.read() == b""  # the child has ended: nobody writes any more
    assert sleeper.end() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour",
    [
        "a_killed_process_is_started_again",
        "one_that_ends_again_and_again_is_given_up",
        "one_that_ran_for_long_is_started_again_however_often",
        "what_a_killed_process_started_goes_on_and_is_stopped_with_the_service",
    ],
)
def test_in_a_process_of_its_own(behaviour):
    """As a service is one: it takes every process whose parent has ended for its own, and stops it."""
    program = f"from tests.deployments.test_supervised import show; show({behaviour!r})"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def show(behaviour: str) -> None:
    """Show one of the behaviours in this process, which adopts orphans."""
    adopt_orphans()
    sleeper = SupervisedProcess("worker 'x'", begin(SLEEPS))
    try:
        globals()[behaviour](sleeper)
    finally:
        stop([sleeper])


@pytest.mark.parametrize(
    ("status", "words"), [(3, "ended with status 3"), (-signal.SIGTERM, "was killed by signal 15 (Terminated)")]
)
def test_how_a_process_ended(status, words):
    assert module.how_it_ended(status) == words
