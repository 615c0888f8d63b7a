"""The whole service as ``make serve`` starts it, on a port and a database of its own, and its API as people's browsers use it."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.flows.pool import PrefectServer
from tests.prefect_database import put_empty_database
from tests.processes import family, kill, until

CHECKOUT = Path(__file__).parents[2]


@dataclass
class Service(PrefectServer):
    """A running service. *home*: its database and its output are there."""

    process: subprocess.Popen[bytes]
    port: int
    home: Path

    @property
    def secret_file(self) -> Path:
        return self.home / "prefect" / "flat-tokens-secret"

    @property
    def secret(self) -> str:
        return self.secret_file.read_text().strip()

    @property
    def environment(self) -> dict[str, str]:
        return {**environment(self.home), "PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": self.secret}

    @property
    def output(self) -> str:
        return (self.home / "output.txt").read_text()

    def names(self, kind: str) -> list[str]:
        """Names of all deployments, or automations, that there are."""
        return sorted(one["name"] for one in self.get(f"/{kind}/filter", {"limit": 200}))

    def switch(self, active: bool) -> None:
        """What the switch beside the schedule of the deployment ``fruit`` does."""
        found = self.deployment("fruit")
        (schedule,) = found["schedules"]
        self.ask("PATCH", f"/deployments/{found['id']}/schedules/{schedule['id']}", {"active": active}).raise_for_status()

    def artifacts(self, run_id: str) -> dict[str, dict[str, Any]]:
        wanted = {"artifacts": {"flow_run_id": {"any_": [run_id]}}, "limit": 200}
        return {one["key"]: one for one in self.get("/artifacts/filter", wanted)}

    def logs(self, run_id: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [run_id]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return [line["message"] for line in self.get("/logs/filter", wanted)]

    def events(self, name: str) -> list[dict[str, Any]]:
        return list(self.get("/events/filter", {"filter": {"event": {"name": [name]}}, "limit": 50})["events"])


def environment(home: Path) -> dict[str, str]:
    """No setting of the tests' own reaches the service, but for how soon events and lines of logs are written."""
    others = {name for name in os.environ if name.startswith("PREFECT_") and not name.endswith("_INTERVAL")}
    kept = {name: value for name, value in os.environ.items() if name not in others | {"PYTHONPATH"}}
    return {**kept, "PREFECT_HOME": str(home / "prefect"), "PREFECT_WORKER_QUERY_SECONDS": "1"}


def copied(terminal: int, path: Path) -> None:
    """Copy what is written to a terminal into a file, until nobody has the terminal any more."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as lines:
        while data := lines.read(1 << 16):
            file.write(data)


def start(home: Path, port: int, *arguments: str) -> Service:
    """``make serve SERVE="..."`` in a terminal of its own, once it says that it is ready. Who asks there waits for ever."""
    put_empty_database(home / "prefect/prefect.db")
    command = [sys.executable, "deployments/serve.py", "--port", str(port), *arguments]
    ours, theirs = pty.openpty()
    (home / "output.txt").write_bytes(b"")
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env=environment(home), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    threading.Thread(target=copied, args=(ours, home / "output.txt"), daemon=True).start()
    service = Service(process, port, home)

    def ready() -> bool:
        assert process.poll() is None, service.output
        assert "proceed?" not in service.output
        return "Run builds at" in service.output

    try:
        until(ready, "the service to be ready")
    except BaseException:
        end(service)
        raise
    return service


def end(service: Service) -> None:
    """Whatever became of it."""
    pids = family(service.process.pid)
    if service.process.poll() is None:
        service.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.wait(60)
    kill(*pids, *family(service.process.pid))
    service.process.wait()


@contextlib.contextmanager
def worker(service: Service, pool: str) -> Iterator[int]:
    """A worker beside those of the service, as another machine would have it; its process id."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
    process = subprocess.Popen(command, cwd=CHECKOUT, env=service.environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process.pid
    finally:
        kill(*family(process.pid))
        process.wait()
