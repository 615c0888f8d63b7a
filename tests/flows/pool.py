"""A Prefect server and workers of a pool as processes of their own, to be stopped, killed and started again."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.prefect_database import put_empty_database
from tests.processes import DEADLINE, answers, family, free_port, kill, until

ROOT = Path(__file__).parents[2]
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

Process = subprocess.Popen[str]


@dataclass
class Pool:
    """A server on loopback with the deployments of this checkout, and whoever works for it."""

    home: Path
    port: int
    running: list[Process] = field(default_factory=list)

    @property
    def server(self) -> Process:
        """The one that was started last."""
        return next(process for process in reversed(self.running) if "deployments/server.py" in list(process.args))  # type: ignore[arg-type]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
        }

    def start(self, *command: str, more: Mapping[str, str] = {}, **options: Any) -> Process:
        """A Python program with the settings of this server and *more*, in a session of its own."""
        environment = {**self.environment, **more}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, text=True, start_new_session=True, **options
        )
        self.running.append(process)
        return process

    def serve(self) -> None:
        """The server, once it answers."""
        with (self.home / "server.log").open("a") as log:
            server = self.start(
                "deployments/server.py",
                "server",
                "start",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                stdout=log,
                stderr=log,
            )
        url = f"http://127.0.0.1:{self.port}/api/health"
        until(lambda: server.poll() is not None or answers(url), "the server does not answer")
        assert server.poll() is None, (self.home / "server.log").read_text()[-5000:]

    def work(self, name: str, pool: str = "flat-tokens-groups", **more: str) -> Process:
        """A worker, which takes a run at a time, with *more* settings."""
        command = ("deployments/worker.py", "worker", "start", "--pool", pool, "--name", name, "--limit", "1")
        with (self.home / f"worker-{name}.log").open("a") as log:
            return self.start(*command, more=more, stdout=log, stderr=log)

    def build(self, config: Path, *arguments: str) -> Process:
        """The build as a command, which reports to the server."""
        return self.start(
            "-m", "flows", "build", str(config), "--json", "--quiet", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def runs(self, *tags: str) -> list[dict[str, Any]]:
        """The newest flow runs with these tags."""
        some = {"sort": "EXPECTED_START_TIME_DESC", "limit": 200, "flow_runs": {"tags": {"all_": list(tags)}}}
        return list(self.ask("POST", "/flow_runs/filter", some))

    def run_deployment(self, name: str, parameters: dict[str, Any]) -> str:
        """Start a run as the form of the UI does; its id."""
        deployment = self.ask("GET", f"/deployments/name/{name}")
        return str(self.ask("POST", f"/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})["id"])

    def ended(self, run: str) -> dict[str, Any]:
        """A run, when it has ended."""

        def end() -> dict[str, Any] | None:
            found = self.ask("GET", f"/flow_runs/{run}")
            return found if found["state"]["type"] in ENDED else None

        return until(end, f"run {run} does not end") or {}

    def stop(self, processes: Sequence[Process]) -> None:
        for process in processes:
            kill(*family(process.pid))
        for process in processes:
            process.communicate(timeout=60)
            self.running.remove(process)


@contextlib.contextmanager
def pool(home: Path) -> Iterator[Pool]:
    """A server of its own with the deployments of this checkout; at the end nothing that was started lives."""
    made = Pool(home, free_port())
    put_empty_database(home / "prefect.db")
    try:
        made.serve()
        done = made.start("deployments/register.py", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = done.communicate(timeout=DEADLINE)
        assert done.returncode == 0, said
        yield made
    finally:
        made.stop(list(made.running))


def finished(build: Process) -> dict[str, Any]:
    """What a build came to that must not fail."""
    out, err = build.communicate(timeout=DEADLINE)
    assert build.returncode == 0, err
    return dict(json.loads(out))
