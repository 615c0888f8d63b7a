"""Workers and runs that are killed: a run goes on without its worker, and a run's end is told with its reason."""

from collections.abc import Iterator

import pytest

import flat_tokens
from tests.flows.pool import ROOT, Pool, pool
from tests.processes import family, kill, until

HOLD = f"""
import os, pathlib, sys, time
held = pathlib.Path(os.environ["HELD"])
if "PREFECT__FLOW_RUN_ID" in os.environ:
    sys.path.insert(0, {str(ROOT)!r})
    from tasks.progress import Meter
    begin = Meter.begin
    def hold(self, stage, *arguments, **named):
        begin(self, stage, *arguments, **named)
        if stage == held.name and not held.exists():
            held.touch()
            while held.exists():
                time.sleep(0.02)
            held.touch()
    Meter.begin = hold
"""
"""sitecustomize of runs: each waits when it begins the stage that the file HELD is named by, until the file is removed."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    home = tmp_path_factory.mktemp("killed")
    (home / "sitecustomize.py").write_text(HOLD)
    (home / "lines.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    with pool(home) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("killed", "stage"),
    [
        ("worker", "tokenize"),
        ("run", "tokenize"),
        *(pytest.param("worker", stage, marks=pytest.mark.nightly) for stage in ("download", "split", "finalize")),
    ],
)
def test_a_run_survives_its_worker_and_a_worker_says_how_its_run_ended(workers, killed, stage, tmp_path):
    held = tmp_path / stage
    worker = workers.work(f"{killed}-{stage}", "flat-tokens", PYTHONPATH=str(workers.home), HELD=str(held))
    source = {"path": str(workers.home / "lines.txt"), "document_separator": "\n"}
    config = {"name": stage, "output": str(tmp_path / "out"), "sources": [source], "tokenizer": {"name": "bytes"}}
    run = workers.start_run("build", {"config": {**config, "slice_bytes": 2000, "workers": 1}}).json()["id"]
    until(held.exists, "the stage does not begin")
    if killed == "run":
        kill(*family(int(workers.run(run)["infrastructure_pid"])))
    else:
        kill(worker.pid)
        worker.wait()
        held.unlink()
    state = workers.ended(run)["state"]
    if killed == "run":
        assert (state["type"], state["message"][:36]) == ("CRASHED", "Process exited with status code: -9.")
    else:
        assert state["type"] == "COMPLETED", state["message"]
        assert flat_tokens.verify(tmp_path / "out", "full").seq_count == 2000
    workers.stop([worker])
