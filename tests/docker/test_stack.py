"""Every command of docker/compose.yaml with its environment, order and health checks, as a process of this machine, or in a
container of the image that docker/try.sh makes: a build that is started through the API is spread over the workers and finishes,
also if a worker is killed. Host names become loopback, ports free ones. PostgreSQL and Redis are this machine's.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import flat_tokens
from tests.docker.compose import ROOT, SECRETS, Service, read_services
from tests.docker.dockerfile import Stage, context_files, read_stages
from tests.flows.pool import ENDED
from tests.processes import family, free_port, until

DEADLINE = 300.0
GRACE = 120.0
NOBODY, TOKENS = 65534, 10001

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
    container: list[str] = field(default_factory=list)
    """The words before a command of ours that is to run in a container; else it runs in a copy of the image's files."""

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
        own = "data|scratch" if self.container else "data|scratch|tmp|opt/flat-tokens"
        return re.sub(rf"(?:^|(?<=,))/({own})(?=[/,]|$)", f"{self.root}/\\1", text)

    def environment(self, name: str) -> dict[str, str]:
        """The image's settings and the service's own; nothing of this process's, but where programs are."""
        ours = "build" in self.services[name] or self.services[name]["image"].startswith("flat-tokens:")
        image = dict(word.split("=", 1) for one in self.stage.instructions if one.name == "ENV" for word in one.words if ours)
        settings = {**image, **{key: str(value) for key, value in self.services[name]["environment"].items()}}
        hosts = {key: "127.0.0.1" if value in self.ports else value for key, value in settings.items()}
        mapped = {key: self.here(value, name) for key, value in hosts.items()}
        added = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), _PLACES]), "STACK": str(self.root)}
        if f"{name} health" in self.ports:
            # Containers have a port 8080 each.
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
        elif self.container:
            settings = {key: value for key, value in environment.items() if key != "PATH"}
            command = [
                *self.container[:-1],
                *(f"--env={key}={value}" for key, value in settings.items()),
                self.container[-1],
                "--",
                *command,
            ]
            environment = dict(os.environ, STACK=str(self.root))
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

    def own_process(self, name: str) -> int:
        """The process of a service; in a container it is below those of the engine."""
        pids = family(self.running[name].pid)
        return next(pid for pid in pids if b"buildah" not in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0])

    def stop(self, name: str) -> int:
        """As ``docker stop`` does: the image's signal, time to end, then death: a worker of Prefect's may wait for a run. The
        exit status.
        """
        process = self.running[name]
        if process.poll() is None:
            os.kill(self.own_process(name), signal.SIGTERM)
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
    import asyncpg

    directory.mkdir()
    password = directory.with_suffix(".password")
    password.write_text(environment["POSTGRES_PASSWORD"], "utf-8")
    as_nobody = {}
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        os.chown(directory, NOBODY, NOBODY)
        os.chown(password, NOBODY, NOBODY)
    data, user = str(directory / "data"), environment["POSTGRES_USER"]
    made = [program("initdb"), "--pgdata", data, "--username", user, "--pwfile", str(password)]
    made += ["--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
    subprocess.run(made, check=True, capture_output=True, cwd=directory, **as_nobody)
    told = ["-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", str(directory)]
    control = [program("pg_ctl"), "--pgdata", data, "--wait", "--silent", "--log", str(directory / "first.log")]
    subprocess.run(
        [*control, "start", "--options", f"-p {port} -c listen_addresses=127.0.0.1 -k {directory}"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=directory,
        **as_nobody,
    )

    async def create() -> None:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=port, user=user, password=environment["POSTGRES_PASSWORD"], database="postgres"
        )
        await connection.execute(f'CREATE DATABASE "{environment["POSTGRES_DB"]}"')
        await connection.close()

    try:
        asyncio.run(create())
    finally:
        subprocess.run([*control, "stop"], check=True, stdout=subprocess.DEVNULL, cwd=directory, **as_nobody)
    return told


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A container of the image that docker/try.sh makes and tries."""
    scratch = tmp_path_factory.mktemp("image")
    tried = subprocess.run([ROOT / "docker/try.sh", scratch], capture_output=True, text=True, timeout=1800, check=False)
    if tried.returncode == 77:
        pytest.skip(f"docker/try.sh {tried.stderr.strip()}")
    assert tried.returncode == 0, tried.stderr[-5000:]
    buildah = ["buildah", "--root", str(scratch / "images"), "--runroot", str(scratch / "run")]
    made = subprocess.run([*buildah, "from", "flat-tokens:try"], capture_output=True, text=True, check=True).stdout.strip()
    yield [*buildah, "run", "--isolation=chroot", f"--user={TOKENS}:{TOKENS}", made]
    subprocess.run([*buildah, "rm", made], capture_output=True, check=True)


@contextlib.contextmanager
def started(container: list[str] | None) -> Iterator[Stack]:
    """A stack of processes, or of what *container* runs."""
    pytest.importorskip("prefect_redis", reason="several processes of a server need prefect-redis, which is not installed")
    for name in ("postgres", "initdb", "pg_ctl", "pg_isready", "redis-server", "redis-cli"):
        program(name)
    # Not below pytest's directory: another user has to reach it.
    with tempfile.TemporaryDirectory(prefix="flat-tokens-stack-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        root.chmod(0o755)
        stage = read_stages()[-1]
        for name in context_files(ROOT):
            (root / "opt/flat-tokens" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / "opt/flat-tokens" / name)
        for name in ("data", "scratch", "tmp"):
            (root / name).mkdir()
        made = Stack(root, read_services(SECRETS), stage)
        if container:
            *command, of = container
            made.container = [*command, f"--volume={root}:{root}", of]
            for name in ("data", "scratch"):
                os.chown(root / name, TOKENS, TOKENS)
        try:
            made.up()
            for name in ("builds", "groups"):
                made.wait(name, "service_healthy")
            yield made
        finally:
            made.down()


@pytest.fixture(scope="module", params=["processes", "containers"])
def stacks(request: pytest.FixtureRequest) -> Iterator[Callable[[], Stack]]:
    """The stack, started again after the test that stops it."""
    container = request.getfixturevalue("container") if request.param == "containers" else None
    made = []
    with contextlib.ExitStack() as held:

        def running() -> Stack:
            if not made or made[-1].running["server"].poll() is not None:
                made.append(held.enter_context(started(container)))
            return made[-1]

        yield running


@pytest.fixture
def stack(stacks: Callable[[], Stack]) -> Stack:
    return stacks()


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{stack.api}/", auth=("admin", "swordfish"), timeout=30) as made:
        yield made


def test_one_needs_the_auth_string(stack):
    """Health is for everyone; nothing else is."""
    with httpx.Client(base_url=f"{stack.api}/", timeout=30) as stranger:
        assert stranger.get("health").status_code == 200
        assert stranger.get("ready").status_code == 200
        assert stranger.post("deployments/filter", json={}).status_code == 401
        assert stranger.post("deployments/filter", json={}, auth=("admin", "guess")).status_code == 401
        assert stranger.get("admin/version").status_code == 401


RUNNING = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "COMPLETED"]}}}, "limit": 1}


def test_a_build_that_the_api_is_asked_for_is_made_by_the_workers(stack, client):
    """Spread over the pool of groups; what became of it reaches the database by way of Redis."""
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
    os.kill(stack.own_process("groups"), signal.SIGKILL)  # its run goes on
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
