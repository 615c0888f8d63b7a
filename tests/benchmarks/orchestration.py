"""Watching a build.

The same build of many small slices (2 kB each) on a thread a core, without a Prefect server and with that of `make serve` on the
same cores and a fresh SQLite database. Slices below 8 MB share a task as soon as there is more to do than workers, up to 100 of
them; every slice has its own receipt and is resumed by itself all the same. "Behind": how long after the build's end the server
showed all of it. Seconds of the tokenize stage, unless said otherwise. Builds in turn, three of 2,000 slices and one of 20,000;
medians (least to greatest). Each has a directory of its own, and all are deleted behind the last one: for minutes after a
deletion ext4 looks long for a place for each new file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.bench import ROOT, Bench, Grid, python, run_whole, spread

PACKAGES = ("prefect", "sqlalchemy", "pydantic")
SLICES = ((2000, 3), (20_000, 1))
"""Slices of a build, and how many times it is built."""
TICKS = os.sysconf("SC_CLK_TCK")
CATCH_UP_SECONDS = 600.0


class Built(NamedTuple):
    """A build as a process: wall time of all of it, of its tokenize stage, and its peak memory."""

    seconds: float
    tokenize: float
    peak_mb: float


def write_text(path: Path, slices: int) -> None:
    """A file whose every line is a slice of its own."""
    with path.open("w") as lines:
        for i in range(slices):
            lines.write(json.dumps({"text": f"{i} " + "one document, one slice " * 80}) + "\n")


def build(out: Path, slices: int, workers: int, api: str | None) -> Built:
    """Build from nothing. *api*: the server that watches, if any."""
    scratch = out.parent
    config = {
        "source": {"path": str(scratch / f"{slices}.jsonl")},
        "output": str(out),
        "tokenizer": "bytes",
        "slice_bytes": 1000,
        "workers": workers,
    }
    (scratch / "build.yaml").write_text(json.dumps(config))
    environment = {"PREFECT_HOME": str(scratch / "prefect"), **({"PREFECT_API_URL": api} if api else {})}
    command = python("-m", "flows", "build", scratch / "build.yaml", "--quiet", *([] if api else ["--no-server"]))
    done = run_whole(command, environment)
    (record,) = (out / "runs").glob("*.json")
    facts: dict[str, Any] = json.loads(record.read_text())
    if facts["slices"] != slices:
        raise RuntimeError(f"{facts['slices']} slices instead of {slices}")
    return Built(done.seconds, facts["seconds"]["tokenize"], done.peak / 1e6)


class Server(NamedTuple):
    """A Prefect server of our own."""

    api: str
    process: subprocess.Popen[bytes]
    home: Path

    def cpu_seconds(self) -> float:
        """Processor time of the server's process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def megabytes(self) -> float:
        """Size of its database, the log of it included."""
        return sum(path.stat().st_size for path in self.home.glob("prefect.db*")) / 1e6

    def task_runs(self, **which: Any) -> int:
        """How many of these it knows."""
        return int(self.ask("task_runs/count", {"task_runs": which} if which else {}))

    def knows_all(self) -> bool:
        """Whether it knows that the build's last task is completed, and all others."""
        completed = {"state": {"type": {"any_": ["COMPLETED"]}}}
        return bool(self.task_runs(name={"like_": "finalize"}, **completed)) and self.task_runs(**completed) == self.task_runs()

    def ask(self, what: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.api}/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def server(scratch: Path) -> Iterator[Server]:
    """A server on a fresh database, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = scratch / "prefect"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        [sys.executable, "deployments/server.py", str(port)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    made = Server(f"http://127.0.0.1:{port}/api", process, home)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                made.task_runs()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the Prefect server did not start") from None
                time.sleep(0.3)
        yield made
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Watched(NamedTuple):
    """A build alone, and one with a server, and what that has taken."""

    alone: Built
    watched: Built
    task_runs: int
    cpu_seconds: float
    database_mb: float
    seconds_behind: float


def in_turn(scratch: Path, slices: int, number: int) -> Watched:
    """Build alone, then with a server that is started for it."""
    workers = os.cpu_count() or 1
    alone = build(scratch / f"{slices}-alone-{number}", slices, workers, None)
    with server(scratch) as watching:
        before = watching.cpu_seconds()
        watched = build(scratch / f"{slices}-watched-{number}", slices, workers, watching.api)
        ended = time.perf_counter()
        while not watching.knows_all() and time.perf_counter() < ended + CATCH_UP_SECONDS:
            time.sleep(1)
        behind = time.perf_counter() - ended
        return Watched(alone, watched, watching.task_runs(), watching.cpu_seconds() - before, watching.megabytes(), behind)


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("orchestration")
    rows = []
    for slices, times in bench.size(SLICES, ((20, 1),)):
        scratch.mkdir(exist_ok=True)
        write_text(scratch / f"{slices}.jsonl", slices)
        runs = [in_turn(scratch, slices, number) for number in range(times)]
        alone, watched = ([run.alone.tokenize for run in runs], [run.watched.tokenize for run in runs])
        more = 1e3 * (statistics.median(watched) - statistics.median(alone)) / slices
        middle = {name: statistics.median(getattr(run, name) for run in runs) for name in Watched._fields[2:]}
        rows.append(
            [
                f"{slices:,}",
                f"{middle['task_runs']:,.0f}",
                spread(alone, ""),
                spread(watched, ""),
                f"{more:.1f}",
                f"{statistics.median(run.watched.seconds for run in runs):.1f}",
                f"{max(run.watched.peak_mb for run in runs):.0f}",
                f"{middle['cpu_seconds']:.0f}",
                f"{middle['database_mb']:.0f}",
                f"{middle['seconds_behind']:.0f}",
            ]
        )
    bench.fresh("orchestration")
    columns = ["slices", "task runs", "alone, s", "with a server, s", "more per slice, ms", "whole build, s", "peak memory, MB"]
    return [Grid([*columns, "server's processor, s", "database, MB", "behind, s"], rows)]
