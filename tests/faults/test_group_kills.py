"""Workers, groups, builds and the server itself are killed; what was finished is not made again, and the bytes are the same."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.output.leases import build_lease
from tests.faults.commands import receipts
from tests.faults.support import build_here, settings_of, staged, version_digests, write_notes
from tests.flows.pool import Pool, Process, finished, pool
from tests.processes import family, kill, until

pytestmark = pytest.mark.slow

Receipts = dict[str, int]
"""When each finished slice was finished."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("pool")) as started:
        yield started


@pytest.fixture
def workers(service: Pool) -> Iterator[dict[str, Process]]:
    """Workers for groups, as on two machines."""
    started = {name: service.work(name) for name in ("a", "b")}
    yield started
    service.stop([process for process in started.values() if process in service.running])


def told(tmp_path: Path, name: str, count: int = 72, **settings: Any) -> dict[str, Any]:
    """A build of *count* notes, by default some 14 slices in 4 groups."""
    notes = write_notes(tmp_path / "in" / f"{name}.jsonl", count)
    groups = {"threshold": 2, "slices": 4, "lost_after": 8}
    made = settings_of(tmp_path / "out", notes, name=name, slice_bytes=1000, runner="groups", groups=groups, **settings)
    (tmp_path / "build.yaml").write_text(json.dumps(made))
    return made


@pytest.fixture(autouse=True)
def _shards_stay(tmp_path: Path) -> Iterator[None]:
    """As long as somebody else uses the output, its builds leave their shards, which tell what was made once and again."""
    (tmp_path / "out").mkdir()
    with build_lease(Store.at(tmp_path / "out"), tmp_path / "out/_cache"):
        yield


def wait_for_more(tmp_path: Path, build: Process, seen: Receipts) -> Receipts:
    """The receipts when there are more than those, while a build is under way."""

    def more() -> Receipts:
        assert build.poll() is None, build.communicate()
        now = receipts(tmp_path)
        return now if len(now) > len(seen) else {}

    return until(more, "nothing is tokenized")


def as_on_threads(tmp_path: Path, version: str) -> bool:
    settings = json.loads((tmp_path / "build.yaml").read_text())
    alone = build_here({**settings, "output": str(tmp_path / "alone"), "runner": "threads"})
    same = version_digests(tmp_path / "alone", alone.version) == version_digests(tmp_path / "out", version)
    return same and version == alone.version


def test_a_run_a_worker_and_both_together_are_killed(service, workers, tmp_path):
    """The run alone, the worker alone, whose run lives on, and a worker with its run, while another one takes over."""
    told(tmp_path, "killed")
    build = service.build(tmp_path / "build.yaml")
    seen = {}

    for name, disturb in (("a", "run"), ("b", "worker"), ("a", "both")):
        seen = wait_for_more(tmp_path, build, seen)
        worker = workers[name]
        running = until(lambda worker=worker: family(worker.pid)[1:], "a worker has nothing to do")  # type: ignore[misc]
        if disturb == "run":
            kill(*running)
            continue
        kill(worker.pid, *(running if disturb == "both" else ()))
        workers[f"{name}, again"] = service.work(f"{name}-again")
    result = finished(build)

    assert {path: at for path, at in receipts(tmp_path).items() if path in seen} == seen
    assert as_on_threads(tmp_path, result["version"])
    assert not (tmp_path / "out/_groups").exists()


def test_a_build_that_is_killed_goes_on_with_the_groups_that_are_under_way(service, workers, tmp_path):
    """Run again as a command, terminated, and then run as a deployment."""
    settings = told(tmp_path, "orphans")
    seen = {}
    for how in (signal.SIGKILL, signal.SIGTERM):
        build = service.build(tmp_path / "build.yaml")
        now = wait_for_more(tmp_path, build, seen)
        build.send_signal(how)
        assert build.wait(120) in (-how, 143)
        assert {path: now[path] for path in seen} == seen
        seen = now
    workers["builds"] = service.work("builds", "flat-tokens")
    config = BuildConfig.model_validate(settings).model_dump(mode="json", exclude_unset=True)
    run = service.ended(service.start_run("build", {"config": config}).json()["id"])

    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert {path: at for path, at in receipts(tmp_path).items() if path in seen} == seen
    version = json.loads((tmp_path / "out/latest.json").read_bytes())["version"]
    assert as_on_threads(tmp_path, version)
    groups = [run["parameters"]["group"] for run in service.runs("dataset:orphans") if "group" in run["parameters"]]
    assert len(set(groups)) == len(groups)  # adopted, not begun again
    assert not (tmp_path / "out/_groups").exists()
    assert staged(tmp_path / "out") == []


AWAY_SECONDS = 10.0


@pytest.mark.usefixtures("workers")
def test_the_server_dies_and_comes_back(service, tmp_path):
    """Builds on groups and on threads both end well. Run again, they tokenize nothing."""
    settings = told(tmp_path, "away", 60)
    threads = {**settings, "output": str(tmp_path / "threads"), "runner": "threads"}
    (tmp_path / "threads.yaml").write_text(json.dumps(threads))
    spread = service.build(tmp_path / "build.yaml")
    wait_for_more(tmp_path, spread, {})
    alone = service.build(tmp_path / "threads.yaml")
    until(lambda: list((tmp_path / "threads/_cache").glob("*/receipt.json")), "nothing is tokenized on threads")
    service.stop([service.server])
    time.sleep(AWAY_SECONDS)
    service.serve()
    results = [finished(spread), finished(alone)]

    assert results[0]["version"] == results[1]["version"]
    assert version_digests(tmp_path / "threads", results[0]["version"]) == version_digests(
        tmp_path / "out", results[0]["version"]
    )
    made = receipts(tmp_path)
    assert finished(service.build(tmp_path / "build.yaml"))["was_published"]
    assert receipts(tmp_path) == made
