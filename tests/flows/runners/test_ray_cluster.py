"""Builds on a Ray cluster: the same bytes, errors that name file and row, and what is said where there is no cluster."""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.runners.ray_cluster import RayTasks
from tasks.config import BuildConfig
from tests.faults.support import build_here, receipts, settings_of, staged, version_digests, write_notes
from tests.processes import family, kill, python, until
from tests.refusal import refusal

BUILD = """
import sys
from flows.build import build_dataset
from tasks.config import BuildConfig
print(build_dataset(BuildConfig.model_validate_json(sys.argv[1])).model_dump_json())
"""

ENTER = """
import sys
from flows.runners.ray_cluster import RayTasks
from tasks.config import BuildConfig
RayTasks(BuildConfig.model_validate_json(sys.argv[1])).__enter__()
"""


def run(program: str, settings: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own: what Ray leaves in a process stays out of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return python("-c", program, json.dumps({**settings, "runner": "ray"}), env={**kept, **environment})


def test_without_its_packages_the_build_names_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = BuildConfig.model_validate({**settings_of(tmp_path / "out", tmp_path / "notes.jsonl"), "runner": "ray"})
    with refusal(re.escape("runner: ray needs prefect-ray")):
        RayTasks(config).__enter__()


@pytest.mark.slow
@pytest.mark.nightly  # a cluster takes minutes
def test_without_a_cluster_the_build_says_how_to_start_one(tmp_path):
    pytest.importorskip("prefect_ray", reason="Ray is not installed")
    done = run(ENTER, settings_of(tmp_path / "out", tmp_path / "notes.jsonl"), RAY_TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ValueError: runner: ray needs a Ray cluster that this machine is part of. Start one: ray start --head"
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of this machine alone; what makes a program find it."""
    pytest.importorskip("prefect_ray", reason="Ray is not installed")
    options = [
        "--num-cpus=2",
        "--port=0",
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--object-store-memory=100000000",
    ]
    # Names of sockets are short, and those of the tests' directories are not.
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        environment = {"RAY_TMPDIR": place}
        log = Path(place, "head.log")
        with log.open("w") as said:
            head = subprocess.Popen(
                [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options],
                env={**os.environ, **environment},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            address = until(lambda: re.search(r"--address='([^']+)'", log.read_text()), "Ray does not start")
            assert address
            yield {**environment, "RAY_ADDRESS": address[1]}
        finally:
            kill(*family(head.pid))
            head.wait()


@pytest.fixture
def api(cluster: dict[str, str], request: pytest.FixtureRequest) -> str:
    """The server's address; it is not even started where there is no Ray."""
    from prefect.settings import PREFECT_API_URL

    request.getfixturevalue("prefect_server")
    return str(PREFECT_API_URL.value())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_build_on_ray_gives_the_bytes_of_one_on_threads(cluster, api, tmp_path):
    """Of an unpacked file nothing stays, if told so."""
    notes = write_notes(tmp_path / "in/notes.jsonl", 40)
    packed = notes.with_name("more.jsonl.gz")
    packed.write_bytes(gzip.compress(notes.read_bytes().replace(b"notes", b"other")))
    settings = settings_of(tmp_path / "threads", notes.parent, slice_bytes=1000, keep_files=False)
    alone = build_here(settings)
    done = run(BUILD, {**settings, "output": str(tmp_path / "ray")}, PREFECT_API_URL=api, **cluster)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["version"] == alone.version
    assert version_digests(tmp_path / "ray", alone.version) == version_digests(tmp_path / "threads", alone.version)
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "threads")
    assert staged(tmp_path / "ray") == []
    fetched = [path for path in tmp_path.glob("*/_cache/files/*") if path.is_file() and path.suffix != ".table"]
    assert {path.name for path in fetched} <= {".lock"}
