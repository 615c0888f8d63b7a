"""Processes that are started again when they end, unless they end again and again soon after their start."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

RESTARTS = 3
"""In a row, of a process that ends within STEADY_SECONDS of its start."""
STEADY_SECONDS = 60.0
STOP_SECONDS = 30.0

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)

Process = subprocess.Popen[bytes]


@dataclass
class SupervisedProcess:
    """A process that *begin* starts, in a session of its own."""

    name: str
    begin: Callable[[], Process]
    process: Process = field(init=False)
    _since: float = field(init=False)
    _early_ends: int = 0

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.process, self._since = self.begin(), time.monotonic()

    def end(self) -> str | None:
        """How the process ended, as the end of a sentence. None while it runs."""
        status = self.process.poll()
        return None if status is None else how_it_ended(status)

    def start_again(self) -> None:
        """Start the process that has ended. ValueError if it has ended too often, too soon."""
        self._early_ends = self._early_ends + 1 if time.monotonic() < self._since + STEADY_SECONDS else 0
        if self._early_ends > RESTARTS:
            raise ValueError(
                f"The {self.name} {self.end()}. It has ended {RESTARTS + 1} times, each time within {STEADY_SECONDS:.0f} s of "
                "its start: everything is stopped. What it printed above says why."
            )
        self._start()


def how_it_ended(status: int) -> str:
    """Words for the end of a process with *status*, which is negative after a signal."""
    if status >= 0:
        return f"ended with status {status}"
    why = ", which the system does where memory is short" if status == -signal.SIGKILL else ""
    return f"was killed by signal {-status} ({signal.strsignal(-status)}{why})"


def stop_with_parent() -> None:
    """Let Linux interrupt this process when its parent is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def adopt_orphans() -> None:
    """Let Linux make this process the parent of runs whose worker ends before they do."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def orphans(supervised: Collection[SupervisedProcess]) -> dict[int, bool]:
    """Processes that were adopted, each with whether it still runs. One that has ended is listed once."""
    known = {one.process.pid for one in supervised}
    adopted = {}
    with suppress(FileNotFoundError):  # another system than Linux
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            if pid not in known:
                adopted[pid] = os.waitpid(pid, os.WNOHANG)[0] == 0
    return adopted


def stop(supervised: Collection[SupervisedProcess], keep: Collection[SupervisedProcess] = ()) -> None:
    """Interrupt the processes, and those that were adopted, but not those to *keep*. Kill what still runs STOP_SECONDS later."""
    everything = (*supervised, *keep)
    running = [one.process for one in supervised if one.process.poll() is None]
    for pid in (*(process.pid for process in running), *_still_running(everything)):
        os.kill(pid, signal.SIGINT)
    until = time.monotonic() + STOP_SECONDS
    for process in running:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    while (left := _still_running(everything)) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def _still_running(supervised: Collection[SupervisedProcess]) -> list[int]:
    return [pid for pid, runs in orphans(supervised).items() if runs]
