"""Processes that tests start, and what they wait for."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
DEADLINE = 180.0

T = TypeVar("T")


def until(question: Callable[[], T | None], what: str = "it does not happen", deadline: float = DEADLINE) -> T:
    """Ask until the answer is true, and return it. TimeoutError after *deadline* seconds, saying *what* is wrong.

    Pauses grow to a quarter of a second: a server that is asked more often has no time for what is waited for.
    """
    begun = time.monotonic()
    while not (answer := question()):
        if (waited := time.monotonic() - begun) > deadline:
            raise TimeoutError(f"{what}, for {deadline:.0f} s")
        time.sleep(min(0.05 + waited / 20, 0.25))
    return answer


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a Python program in this checkout says until it ends. *options*: of ``subprocess.run``."""
    settings: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *words], **settings | options)


def in_threads(work: Callable[[Any], object], each: Iterable[Any]) -> None:
    """Call *work* with each in a thread of its own, at once, until all have ended. Their first error is raised."""
    several = [*each]
    together = threading.Barrier(len(several))

    def begin(one: Any) -> None:
        together.wait()  # else a thread that has ended would do the work of the next
        work(one)

    with ThreadPoolExecutor(len(several)) as threads:
        list(threads.map(begin, several))


@contextlib.contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Let a server on loopback answer, in a thread, until the block ends. Its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def answers(url: str) -> bool:
    """Whether something sends the page at a URL, sooner or later."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as page:
        return bool(page.status == 200)
    return False


def family(pid: int) -> list[int]:
    """A process and all that it has started, and these, as far as they live."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
