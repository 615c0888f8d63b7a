"""What watching a build costs: the same build of many small slices without a Prefect server and with one.

    python tests/benchmarks/orchestration.py --scratch $BENCH [--slices 2000 5000 20000] [--workers N]

Every build is a whole process; the server is one of its own, on a fresh database. Prints a Markdown table: seconds of the
tokenize stage, what a slice costs more with a server, the processor time and the database that the server needed, and how long
after the build's end the server showed all of its task runs as completed.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
CATCH_UP_SECONDS = 600.0
BUILD = """
import re, sys
from flows.commands.main import main
status = main(sys.argv[1:])
print("peak kB:", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(status)
"""


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


def build(scratch: Path, slices: int, workers: int, api: str | None) -> Built:
    """Build from nothing. *api*: the server that watches, if any."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    config = {
        "source": {"path": str(scratch / f"{slices}.jsonl")},
        "output": str(out),
        "tokenizer": "bytes",
        "slice_bytes": 1000,
        "workers": workers,
    }
    (scratch / "build.yaml").write_text(json.dumps(config))
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"PREFECT_API_URL": api} if api else {}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "build", str(scratch / "build.yaml"), *([] if api else ["--no-server"])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout}{done.stderr}")
    (record,) = (out / "runs").glob("*.json")
    facts: dict[str, Any] = json.loads(record.read_text())
    if facts["slices"] != slices:
        raise SystemExit(f"{facts['slices']} slices instead of {slices}")
    peak = re.search(r"peak kB: (\d+)", done.stderr)
    assert peak
    return Built(seconds, facts["seconds"]["tokenize"], int(peak[1]) / 1e3)


class Server(NamedTuple):
    """A Prefect server of our own."""

    api: str
    process: "subprocess.Popen[bytes]"
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
    home.mkdir()
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
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
                    raise SystemExit("the Prefect server did not start") from None
                time.sleep(0.3)
        yield made
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--slices", type=int, nargs="+", default=[2000, 5000, 20000])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    scratch = args.scratch / "orchestration"
    scratch.mkdir(parents=True)
    os.environ["PREFECT_HOME"] = str(scratch / "prefect")
    print(
        "| slices | task runs | tokenize alone, s | with a server, s | more per slice, ms | whole build, s | peak memory, MB "
        "| server's processor, s | database, MB | behind, s |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for slices in args.slices:
        write_text(scratch / f"{slices}.jsonl", slices)
        plain = build(scratch, slices, args.workers, None)
        with server(scratch) as watching:
            before = watching.cpu_seconds()
            watched = build(scratch, slices, args.workers, watching.api)
            ended = time.perf_counter()
            while not watching.knows_all() and time.perf_counter() < ended + CATCH_UP_SECONDS:
                time.sleep(1)
            behind = time.perf_counter() - ended
            print(
                f"| {slices:,} | {watching.task_runs():,} | {plain.tokenize:.1f} | {watched.tokenize:.1f} "
                f"| {1e3 * (watched.tokenize - plain.tokenize) / slices:.1f} | {watched.seconds:.1f} | {watched.peak_mb:.0f} "
                f"| {watching.cpu_seconds() - before:.0f} | {watching.megabytes():.0f} | {behind:.0f} |",
                flush=True,
            )
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
