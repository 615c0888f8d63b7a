"""Every command of docker/compose.yaml with its environment, order and health checks, as a process of this machine: a build that
is started through the API is spread over the workers and finishes, also if a worker is killed. Host names become loopback, ports
free ones. PostgreSQL and Redis are this machine's. The image is made and tried by docker/try.sh.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import flat_tokens
from tests.docker.compose import ROOT, SECRETS, Service, read_services
from tests.docker.dockerfile import Stage, context_files, read_stages
from tests.flows.pool import ENDED
from tests.processes import free_port, until

DEADLINE = 300.0
GRACE = 120.0
NOBODY = 65534

# Debian keeps these off the PATH.
_PLACES = os.pathsep.join([os.environ.get("PATH", ""), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])


def program(name: str) -> str:
    found = shutil.which(name, path=_PLACES)
    if found is None:
        pytest.skip(f"needs {name}: PostgreSQL's server and client, and redis-server with redis-cli")
    return found


@dataclass
class Stack:
    """The services of the compose file, as processes whose containers' root is ``root``."""

    root: Path
    services: dict[str, Service]
    stage: Stage
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.ports['server']}/api"

    def here(self, text: str, service: str) -> str:
        """A word of a command or a setting, as it is on this machine."""
        ports = {"postgres": "5432", "redis": "6379", "server": "4200"}
        for name, port in ports.items():
            text = re.sub(rf"\b{name}:{port}\b", f"127.0.0.1:{self.ports[name]}", text)
            text = re.sub(rf"(?<=127\.0\.0\.1:){port}\b", str(self.ports[name]), text)
            text = str(self.ports[name]) if text == port else text
        text = re.sub(r"(?<=127\.0\.0\.1:)8080\b", str(self.ports.get(f"{service} health", 0)), text)
        text = "127.0.0.1" if text == "0.0.0.0" else text
        return re.sub(r"(?:^|(?<=,))/(data|scratch|tmp|opt/flat-tokens)(?=[/,]|$)", f"{self.root}/\\1", text)

    def environment(self, name: str) -> dict[str, str]:
        """The image's settings and the service's own; nothing of this process's, but where programs are."""
        ours = "build" in self.services[name] or self.services[name]["image"].startswith("flat-tokens:")
        image = dict(word.split("=", 1) for one in self.stage.instructions if one.name == "ENV" for word in one.words if ours)
        settings = {**image, **{key: str(value) for key, value in self.services[name]["environment"].items()}}
        hosts = {key: "127.0.0.1" if value in self.ports else value for key, value in settings.items()}
        mapped = {key: self.here(value, name) for key, value in hosts.items()}
        added = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), _PLACES]), "STACK": str(self.root)}
        if f"{name} health" in self.ports:  # in containers each has a port 8080
            added |= {"PREFECT_WORKER_WEBSERVER_PORT": str(self.ports[f"{name} health"])}
        if name == "postgres":
            added |= {"PGHOST": "127.0.0.1", "PGPORT": str(self.ports["postgres"])}
        return {**mapped, **added}

    def up(self) -> None:
        """Start all services in order, each when what it depends on is as it should be."""
        self.ports = {name: free_port() for name in ("postgres", "redis", "server")}
        self.ports |= {f"{name} health": free_port() for name in self.services if "--with-healthcheck" in self.command(name)}
        for name, service in self.services.items():
            for other, needed in service.get("depends_on", {}).items():
                self.wait(other, needed["condition"])
            self.start(name)

    def command(self, name: str) -> list[str]:
        return [str(word).replace("$$", "$") for word in self.services[name]["command"]]  # as compose hands them on

    def start(self, name: str) -> None:
        command, environment, keywords = [self.here(word, name) for word in self.command(name)], self.environment(name), {}
        if name == "postgres":
            command += make_database(self.root / "postgres", environment, self.ports["postgres"])
            keywords = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        elif name == "redis":
            (self.root / "redis").mkdir()
            command += ["--port", str(self.ports["redis"]), "--bind", "127.0.0.1", "--dir", str(self.root / "redis")]
        if name in ("postgres", "redis"):
            command[0] = program(command[0])
        else:
            command[0] = str(Path(sys.executable).parent / command[0])
        with (self.root / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                env=environment,
                cwd=self.root / "opt" / "flat-tokens",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **keywords,  # type: ignore[arg-type]
            )

    def check(self, name: str) -> list[str]:
        """What the engine would run to see whether a service is healthy."""
        own = self.services[name].get("healthcheck", {}).get("test")
        if own:
            assert own[0] == "CMD"
            port = ["-p", str(self.ports["redis"])] if own[1] == "redis-cli" else []
            return [program(own[1]), *port, *own[2:]]
        (image,) = self.stage.values("HEALTHCHECK")
        words = json.loads(image[image.index("[") :])
        return [sys.executable, *words[1:]]

    def wait(self, name: str, condition: str) -> None:
        latest = time.monotonic() + DEADLINE
        process = self.running[name]
        if condition == "service_completed_successfully":
            assert process.wait(DEADLINE) == 0, self.log(name)
            return
        assert condition == "service_healthy"
        while subprocess.run(self.check(name), env=self.environment(name), capture_output=True, check=False).returncode:
            assert process.poll() is None, f"{name} has ended:\n{self.log(name)}"
            assert time.monotonic() < latest, f"{name} does not become healthy:\n{self.log(name)}"
            time.sleep(0.25)

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text("utf-8", "replace")

    def stop(self, name: str) -> int:
        """As ``docker stop`` does: the image's signal, time to end, then death: a worker of Prefect's may wait for a run. The
        exit status.
        """
        process = self.running[name]
        if process.poll() is None:
            process.terminate()
        try:
            return process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def down(self) -> None:
        """Nothing of the stack is left, whatever became of it."""
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        mark = f"STACK={self.root}".encode()
        for process_directory in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process_directory / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process_directory.name), signal.SIGKILL)
            except OSError:
                continue


def make_database(directory: Path, environment: dict[str, str], port: int) -> list[str]:
    """What the image of PostgreSQL does on its first start; what its server is told besides."""
    directory.mkdir()
    password = directory.with_suffix(".password")
    password.write_text(environment["POSTGRES_PASSWORD"], "utf-8")
    as_nobody = {}
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        os.chown(directory, NOBODY, NOBODY)
        os.chown(password, NOBODY, NOBODY)
    data = str(directory / "data")
    made = [program("initdb"), "--pgdata", data, "--username", environment["POSTGRES_USER"], "--pwfile", str(password)]
    made += ["--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
    create = f'CREATE DATABASE "{environment["POSTGRES_DB"]}"\n'.encode()
    for command, told in ((made, b""), ([program("postgres"), "--single", "-D", data, "postgres"], create)):
        subprocess.run(command, input=told, check=True, capture_output=True, cwd=directory, **as_nobody)
    return ["-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", str(directory)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    pytest.importorskip("prefect_redis", reason="several processes of a server need prefect-redis, which is not installed")
    for name in ("postgres", "initdb", "pg_isready", "redis-server", "redis-cli"):
        program(name)
    # Not below pytest's directory: another user has to reach it.
    with tempfile.TemporaryDirectory(prefix="flat-tokens-stack-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        root.chmod(0o755)
        for name in context_files(ROOT):
            (root / "opt/flat-tokens" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / "opt/flat-tokens" / name)
        for name in ("data", "scratch", "tmp"):
            (root / name).mkdir()
        made = Stack(root, read_services(SECRETS), read_stages()[-1])
        try:
            made.up()
            for name in ("builds", "groups"):
                made.wait(name, "service_healthy")
            yield made
        finally:
            made.down()


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{stack.api}/", auth=("admin", "swordfish"), timeout=30) as made:
        yield made


def test_the_image_is_made_and_works(tmp_path):
    tried = subprocess.run([ROOT / "docker/try.sh", tmp_path], capture_output=True, text=True, timeout=1800, check=False)
    if tried.returncode == 77:
        pytest.skip(f"docker/try.sh {tried.stderr.strip()}")
    assert tried.returncode == 0, tried.stderr[-5000:]


RUNNING = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "COMPLETED"]}}}, "limit": 1}


def test_a_build_that_the_api_is_asked_for_is_made_by_the_workers(stack, client):
    """Spread over the pool of groups; what became of it reaches the database by way of Redis. Strangers see the health alone."""
    for path, auth, status in (("health", None, 200), ("admin/version", None, 401), ("admin/version", ("admin", "guess"), 401)):
        assert httpx.get(f"{stack.api}/{path}", auth=auth).status_code == status
    texts = [f"text number {number} of the stack's test " * 20 for number in range(200)]
    source = stack.root / "data" / "texts.jsonl"
    source.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)), "utf-8")
    output = stack.root / "data" / "out" / "stack"
    config = {
        "name": "stack",
        "output": str(output),
        "sources": [{"path": str(source), "id_column": "id"}],
        "tokenizer": {"name": "bytes"},
        "slice_bytes": 20_000,
        "runner": "groups",
        "groups": {"threshold": 2, "slices": 4},
    }
    deployment = client.get("deployments/name/build-dataset/build").json()
    answer = client.post(f"deployments/{deployment['id']}/create_flow_run", json={"parameters": {"config": config}})
    assert answer.status_code == 201, answer.text
    groups = {"flows": {"name": {"any_": ["tokenize-group"]}}, "sort": "ID_DESC"}
    until(lambda: client.post("flow_runs/filter", json={**groups, **RUNNING}).json(), "no group begins", DEADLINE)
    stack.running["groups"].kill()  # its run goes on
    stack.running["groups"].wait()
    stack.start("groups")  # as the engine does

    def ended() -> Any:
        found = client.get(f"flow_runs/{answer.json()['id']}").json()
        return found if found["state"]["type"] in ENDED else None

    run = until(ended, "the build does not end", DEADLINE)
    assert run["state"]["type"] == "COMPLETED", (run["state"], stack.log("builds"), stack.log("groups"))

    dataset = flat_tokens.open(str(output))
    assert dataset.train.seq_count + dataset.validation.seq_count == len(texts)
    states = [one["state"]["type"] for one in client.post("flow_runs/filter", json={**groups, "limit": 200}).json()]
    assert states == ["COMPLETED"] * len(states)
    assert len(states) > 1

    # The server's processes take events in, the services write them to the database: between them is Redis alone.
    wanted = {
        "filter": {
            "occurred": {"since": run["created"], "until": "2100-01-01T00:00:00Z"},
            "event": {"name": ["prefect.flow-run.Completed"]},
            "resource": {"id": [f"prefect.flow-run.{run['id']}"]},
        }
    }
    seen = until(lambda: client.post("events/filter", json=wanted).json()["events"], "the services write no event", DEADLINE)
    assert len(seen) == 1


def test_every_service_ends_when_it_is_asked_to(stack):
    """Clients before the server, the server before what it stands on. Until then, everyone was reached."""
    refused = {name: stack.log(name) for name in stack.services if "ConnectionRefusedError" in stack.log(name)}
    assert not refused
    for name in reversed(list(stack.services)):
        stack.stop(name)
        assert stack.running[name].returncode is not None
    assert [stack.running[name].returncode for name in ("migrate", "register", "postgres", "redis")] == [0] * 4


pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # making an image takes minutes
