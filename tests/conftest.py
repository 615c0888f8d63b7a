"""What every test stands on: no telemetry, a Prefect home of its own, and the shared material where it is there."""

import functools
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.examples import FEW
from tests.prefect_database import put_empty_database
from tests.processes import answers, until
from tests.terminal import Terminal

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"

_home = tempfile.TemporaryDirectory(prefix="flat-tokens-tests-")
os.environ.update(
    PREFECT_HOME=f"{_home.name}/prefect",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    PREFECT_LOGGING_LEVEL="WARNING",
    # What people wait for some seconds: events and lines of logs reach the database.
    PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL="0.2",
    PREFECT_LOGGING_TO_API_BATCH_INTERVAL="0.2",
    # gcsfs reads it when it is imported: else it waits a minute for what no emulator answers.
    GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
)
os.environ.pop("PREFECT_API_URL", None)
# Else every process that a test starts compiles the modules anew: half of the time that it takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts what runs in the background with Ctrl-C ignored, and processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if (SHARED / "vocab").exists():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "vocab/tiktoken_cache"))

settings.load_profile(FEW)

gc.disable()  # until all tests are collected: what importing makes stays


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in a random order, to find those that need another")


def pytest_collection_finish() -> None:
    _try_tokenizers_here()
    _freeze()


def _try_tokenizers_here() -> None:
    """A trial in a process of its own takes two seconds. The tests of trials have it so."""
    if (tokenizers := sys.modules.get("tasks.tokenize.tokenizers")) is not None:
        from tasks.tokenize.trial import fault_of, is_from_a_file

        tokenizers.try_out = lambda config: fault_of(config) if is_from_a_file(config.name) else None


def _freeze() -> None:
    """What collecting has made stays until the end. It is left out of every later search for cycles: those of tests, of the
    libraries, and of forked processes, which would copy all that they look at.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The name of a case must not have the second of its making, which gzip writes: each process of xdist makes its own."""
    return argname if isinstance(val, bytes) and b"\x1f\x8b" in val else None


class _Together(LoadScopeScheduling):
    """Tests that share what takes long to make or to import run in one process: those of a file with fixtures for the whole
    module, all files that use the Prefect server, and all that use torch or jax. Any other test runs where there is time.

    xdist's own marker for this, xdist_group, does nothing with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget what has ended: xdist counts all that a process was ever given, once for every test."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]


def _scope(nodeid: str) -> str:
    """The name that a test shares with those of its process."""
    return _shared_scope(nodeid.partition("::")[0]) or nodeid


@functools.cache
def _shared_scope(path: str) -> str | None:
    text = (ROOT / path).read_text("utf-8")
    if "prefect_server" in text:
        return "prefect_server"
    return "torch" if '"torch"' in text or '"jax"' in text else path if 'scope="module"' in text else None


LONG = ("prefect_server", *(f"tests/{name}/" for name in ("faults", "deployments", "docker", "service", "flows/runners")))
"""Scopes of services, kills and faults: minutes for few tests. They begin first, or one process would end the run alone."""


def _longest_first(items: list[pytest.Item]) -> None:
    counts = Counter(_scope(item.nodeid) for item in items)
    items.sort(key=lambda item: (not (scope := _scope(item.nodeid)).startswith(LONG), -counts[scope]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the order is that of _longest_first
    return _Together(config, log)


SYNCED = ("test_inject.py", "test_harness.py")
"""Tests that look at what is on the disk when."""


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Written files are not synced."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in SYNCED:
            patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Variables that a command sets in this process are gone with the test."""
    with mock.patch.dict(os.environ):
        yield


FIXTURES = {
    **{name: (f"shared/{part}",) for name, part in (("corpus", "corpus"), ("reference", "reference"), ("vocabularies", "vocab"))},
    "streaming": ("torch", "streaming"),
    "litdata": ("torch", "litdata"),
    "packed_dataset": ("torch", "torchtune"),
    "compose_services": ("bin/docker-compose",),
}
"""What the fixtures of these names need, as ``@pytest.mark.needs`` says it of a test."""


def _is_here(name: str) -> bool:
    """Whether there is a module, a program next to the interpreter (``bin/NAME``), or a part of the shared material."""
    kind, _, rest = name.rpartition("/")
    if kind == "shared":
        return (SHARED / rest).exists()
    if kind == "bin":
        return shutil.which(rest, path=str(Path(sys.executable).parent)) is not None
    return find_spec(name) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose packages, programs or material are not here. Mark those that need shared material."""
    stay, go = [], []
    for item in items:
        needs = [name for mark in item.iter_markers("needs") for name in mark.args]
        needs += [name for fixture in getattr(item, "fixturenames", ()) for name in FIXTURES.get(fixture, ())]
        if any(name.startswith("shared/") for name in needs):
            item.add_marker("shared")
        (stay if all(map(_is_here, needs)) else go).append(item)
    _longest_first(stay)
    if seed := config.getoption("shuffle"):
        random.Random(seed).shuffle(stay)
    items[:] = stay
    config.hook.pytest_deselected(items=go)


@pytest.fixture(scope="session")
def corpus() -> Path:
    """169 MB of real text in eight Parquet files."""
    return SHARED / "corpus"


@pytest.fixture(scope="session")
def reference() -> Path:
    """Files written by the reference implementations."""
    return SHARED / "reference"


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """The real gpt2, r50k, cl100k and o200k vocabularies, which tiktoken finds through TIKTOKEN_CACHE_DIR."""
    return SHARED / "vocab"


@pytest.fixture(params=["disk", "memory"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new output, on a disk and in an object store."""
    return str(tmp_path / "out") if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Runs commands of ``python -m flows`` in this process, which stays as it is."""
    from flows.commands.main import main

    monkeypatch.setenv("PREFECT_HOME", "/nonexistent")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "7")  # as a command sets it that has a server
    monkeypatch.setattr("flows.commands.main.log_to_terminal", lambda: None)
    monkeypatch.setattr("flows.watch.terminal.EVERY_SECONDS", 600.0)  # no line of progress, however slow the machine is
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    return Terminal(main, capsys)


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Terminal:
    """Runs commands of ``flat-tokens`` in this process."""
    from flat_tokens.tools.cli import main

    return Terminal(main, capsys)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """The server of ``make serve`` on a fresh database, for the flows that need one. Prefect's own loses events under load."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    def run(server: SubprocessASGIServer) -> subprocess.Popen[bytes]:
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        put_empty_database(Path(settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"].partition(":///")[2]))
        environment = {**os.environ, "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0", **settings}
        process = subprocess.Popen([sys.executable, "deployments/server.py", str(server.port)], cwd=ROOT, env=environment)
        until(lambda: process.poll() is not None or answers(f"{server.api_url}/health"), "the server does not answer")
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubprocessASGIServer, "_run_uvicorn_command", run)
        with prefect_test_harness():
            yield
