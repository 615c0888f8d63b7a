"""Builds spread over the workers of a pool, each a process of its own: same bytes, errors that reach the parent, no leftovers."""

import contextlib
import functools
import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.stores.reading import INPUT_ROOTS
from tasks.config import BuildConfig
from tests.faults.support import build_here, receipts, settings_of, staged, version_digests, write_notes
from tests.flows.pool import ENDED, Pool, finished, pool
from tests.processes import free_port, serving, until

pytestmark = pytest.mark.slow

SPREAD: dict[str, Any] = {"runner": "groups", "groups": {"threshold": 2, "slices": 4}}

SMALL_SPANS = """
import sys
import flows.pipelines.stages
import tasks.assemble.write
from flows.commands.main import main
flows.pipelines.stages.SPANS_IN_A_GROUP = 3
tasks.assemble.write.SPAN_TOKENS = tasks.assemble.write.SPAN_DOCUMENTS = 1
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def port() -> int:
    """Of the server of files, which the workers may read."""
    return free_port()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Pool]:
    """Two workers for groups, as on two machines, and one for builds."""
    with pytest.MonkeyPatch.context() as patch, pool(tmp_path_factory.mktemp("pool")) as started:
        patch.setenv(INPUT_ROOTS, f"{tmp_path_factory.getbasetemp()},http://127.0.0.1:{port}/")
        started.work("a")
        started.work("b")
        started.work("builds", "flat-tokens")
        yield started


def config_of(path: Path, settings: dict[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(settings))
    return path


def groups_of(workers: Pool, name: str) -> list[dict[str, Any]]:
    """The runs of the groups of a dataset's builds."""
    return [run for run in workers.runs(f"dataset:{name}") if "group" in run["parameters"]]


def test_a_build_in_groups_gives_the_bytes_and_the_name_of_one_on_threads(workers, tmp_path):
    """Slices and final objects are both spread; nothing is left of the groups."""
    notes = write_notes(tmp_path / "in/notes.jsonl", 36)
    told = settings_of(tmp_path / "threads", notes, slice_bytes=1000, layout="zarr2", name="spread")
    alone = build_here(told)
    assert alone.slices > 4
    spread = config_of(tmp_path / "spread.yaml", {**told, **SPREAD, "output": str(tmp_path / "groups")})
    build = workers.start(
        "-c", SMALL_SPANS, "build", str(spread), "--json", "--quiet", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    result = finished(build)

    assert result["version"] == alone.version
    assert version_digests(tmp_path / "groups", alone.version) == version_digests(tmp_path / "threads", alone.version)
    kinds = Counter(run["name"].split()[0] for run in groups_of(workers, "spread"))
    assert kinds["tokenize"] == -(-alone.slices // 4)
    assert kinds["write"] > 1
    assert not (tmp_path / "groups/_groups").exists()


class Listing(SimpleHTTPRequestHandler):
    """A directory over HTTP, whose files have a strong ETag each."""

    def log_message(self, *_: Any) -> None:
        pass

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
            self.send_header("ETag", f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"')
        super().end_headers()


@contextlib.contextmanager
def served(directory: Path, port: int) -> Iterator[None]:
    """A directory on a server on loopback."""
    with serving(ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Listing, directory=str(directory)))):
        yield


def test_files_from_elsewhere_are_fetched_by_the_workers_and_not_by_the_build(workers, port, tmp_path):
    """But for the first one, of which the build takes a sample. If told so, nothing that is fetched stays."""
    for number in range(4):
        write_notes(tmp_path / "in" / f"{number}.jsonl", 8 + number)
    size = (tmp_path / "in/3.jsonl").stat().st_size
    with served(tmp_path / "in", port):
        source = {"path": f"http://127.0.0.1:{port}/*.jsonl", "id_column": "id"}
        told = {**settings_of(tmp_path / "threads", slice_bytes=1000, name="far"), "sources": [source]}
        alone = build_here(told)
        groups = {**SPREAD["groups"], "fetch_bytes": size}
        far = {**told, "runner": "groups", "keep_files": False, "groups": groups, "output": str(tmp_path / "groups")}
        result = finished(workers.build(config_of(tmp_path / "far.yaml", far)))

    assert version_digests(tmp_path / "groups", result["version"]) == version_digests(tmp_path / "threads", alone.version)
    kinds = Counter(run["name"].split()[0] for run in groups_of(workers, "far"))
    assert kinds["fetch"] >= 2
    fetched = {name: list((tmp_path / name / "_cache/files").glob("*.raw")) for name in ("threads", "groups")}
    assert {name: len(files) for name, files in fetched.items()} == {"threads": 4, "groups": 0}
    assert staged(tmp_path / "groups") == []


def test_bad_input_is_told_with_file_and_row_and_not_tried_again(workers, tmp_path):
    path = write_notes(tmp_path / "in/notes.jsonl", 40)
    lines = path.read_text().splitlines()
    lines[27] = json.dumps({"id": "bad", "text": 5})
    path.write_text("\n".join(lines) + "\n")
    told = {**settings_of(tmp_path / "out", path, slice_bytes=1000), **SPREAD, "name": "bad"}
    build = workers.build(config_of(tmp_path / "bad.yaml", told))
    _, err = build.communicate(timeout=180)

    assert build.returncode == 1
    assert "notes.jsonl, line 28 (row 27)" in err
    runs = groups_of(workers, "bad")
    assert len({run["parameters"]["group"] for run in runs}) == len(runs)
    until(lambda: all(run["state_type"] in ENDED for run in groups_of(workers, "bad")), "the groups do not end")
    (failed,) = (run for run in groups_of(workers, "bad") if run["state_type"] == "FAILED")
    assert "notes.jsonl, line 28 (row 27)" in failed["state"]["message"]


def test_a_cancelled_build_cancels_its_groups_and_goes_on_when_it_is_run_again(workers, tmp_path):
    notes = write_notes(tmp_path / "in/notes.jsonl", 40)
    told = {**settings_of(tmp_path / "out", notes, slice_bytes=1000), **SPREAD, "name": "cancelled"}
    config = BuildConfig.model_validate(told).model_dump(mode="json", exclude_unset=True)
    workers.ask("PATCH", "/work_pools/flat-tokens-groups", {"is_paused": True})
    try:
        parent = workers.start_run("build", {"config": config}).json()["id"]
        until(lambda: len(groups_of(workers, "cancelled")) > 1, "no groups are begun")
        workers.ask("POST", f"/flow_runs/{parent}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        assert workers.ended(parent)["state"]["type"] == "CANCELLED"
        until(lambda: {run["state_type"] for run in groups_of(workers, "cancelled")} == {"CANCELLED"}, "groups stay")
    finally:
        workers.ask("PATCH", "/work_pools/flat-tokens-groups", {"is_paused": False})

    again = finished(workers.build(config_of(tmp_path / "again.yaml", told)))
    alone = build_here({**told, "output": str(tmp_path / "alone"), "runner": "threads"})
    assert version_digests(tmp_path / "out", again["version"]) == version_digests(tmp_path / "alone", alone.version)
    assert receipts(tmp_path / "out") == receipts(tmp_path / "alone")
