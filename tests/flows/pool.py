"""A Prefect server and workers of a pool as processes of their own, to be stopped, killed and started again."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tests.prefect_database import put_empty_database
from tests.processes import DEADLINE, ROOT, answers, family, free_port, kill, until

ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED", "PAUSED"}

Process = subprocess.Popen[str]


class PrefectServer:
    """A server that was started, and its API as people's browsers use it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def secret(self) -> str:
        """NAME:PASSWORD, or nothing."""
        return ""

    def ask(self, method: str, path: str, body: Any = None) -> requests.Response:
        """An answer of the API. What it could not do because its database was busy is asked again."""

        def answer() -> tuple[requests.Response] | None:
            user, _, password = self.secret.partition(":")
            login = (user, password) if user else None
            given = requests.request(method, self.url + path, json=body, auth=login, timeout=60)
            return None if given.status_code >= 500 else (given,)

        return until(answer, f"{method} {path}")[0]

    def get(self, path: str, body: Any = None) -> Any:
        given = self.ask("GET" if body is None else "POST", path, body)
        given.raise_for_status()
        return given.json()

    def deployment(self, name: str) -> dict[str, Any]:
        (found,) = self.get("/deployments/filter", {"deployments": {"name": {"any_": [name]}}, "limit": 2})
        return dict(found)

    def start_run(self, deployment: str, parameters: dict[str, Any], tags: Sequence[str] = ()) -> requests.Response:
        """What the button at the end of a run form does."""
        path = f"/deployments/{self.deployment(deployment)['id']}/create_flow_run"
        return self.ask("POST", path, {"parameters": parameters, "tags": list(tags)})

    def run(self, run_id: str) -> dict[str, Any]:
        return dict(self.get(f"/flow_runs/{run_id}"))

    def ended(self, run_id: str) -> dict[str, Any]:
        """A run, once it has ended."""
        return until(lambda: run if (run := self.run(run_id))["state_type"] in ENDED else None, f"the end of run {run_id}")

    def runs(self, *tags: str) -> list[dict[str, Any]]:
        """The runs with these tags, the oldest first."""
        wanted = {"flow_runs": {"tags": {"all_": list(tags)}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 200}
        return list(self.get("/flow_runs/filter", wanted))


@dataclass
class Pool(PrefectServer):
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
            "PREFECT_API_URL": self.url,
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
        until(lambda: server.poll() is not None or answers(f"{self.url}/health"), "the server does not answer")
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
