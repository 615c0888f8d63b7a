"""A build that had nothing to do leaves with the server what its flow would leave, and takes no Prefect for it."""

import json
import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import httpx
import pytest
from prefect import __version__
from prefect.settings import PREFECT_API_URL

from flows.build import build_dataset
from flows.pipelines.build import BuildResult
from flows.watch.api import is_of_this_release
from flows.watch.summaries import record
from tasks.config import BuildConfig
from tasks.download.table import GRAIN_NS
from tests.faults.support import settings_of, write_notes
from tests.flows.asked import on_prefect_server
from tests.flows.watch.test_summaries import result_of
from tests.processes import ROOT, python

COMMAND = "import sys; from flows.commands.main import main; main(sys.argv[1:]); print('prefect' in sys.modules)"


def server(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://server/api", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("answer", "can"),
    [
        (httpx.Response(200, json=__version__), True),
        (httpx.Response(200, json="3.0.0"), False),
        (httpx.Response(200, text="<html>"), False),
        (httpx.ConnectError("refused"), False),
    ],
)
def test_a_server_of_another_release_is_left_to_prefect(answer, can):
    """And what is no server of Prefect's, and one that goes away."""
    assert is_of_this_release(server(mock.Mock(side_effect=[answer]))) is can


def test_a_run_that_the_server_refuses_is_left_to_prefect(tmp_path):
    """One that wants tokens against forged requests, for example."""
    asked = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(403)

    config = BuildConfig.model_validate(settings_of(tmp_path / "out", tmp_path / "notes.jsonl"))
    result = result_of(BuildResult, {}, seconds={}, slices=0, slices_reused=0)
    assert not record(server(refuse), config, result)
    assert asked == ["/api/flows/"]


def left_by(run: dict[str, Any], api: httpx.Client) -> dict[str, Any]:
    """What people see of a run, without times and ids."""
    found = api.post("/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}).json()
    shown = {}
    for one in found:
        # Ids, speeds and seconds differ; of the page so do the runs.
        text = re.sub(r"[\da-f]{8}-[\da-f-]{27}| at [\d.]+ MB/s|\| [\d.]+ \|\n", "", f"{one['description']}\n{one['data']}")
        shown[one["key"]] = (one["type"], re.sub(r"(Runs that published nothing|Sources last looked up): .*", "", text))
    states = api.get("/flow_run_states/", params={"flow_run_id": run["id"]}).json()
    last = max(states, key=lambda state: state["timestamp"])
    same = {key: run[key] for key in ("name", "flow_id", "parameters", "tags", "deployment_id", "state_type")}
    return {**same, "message": last["message"], "shown": shown, "has_begun": run["start_time"] is not None}


@on_prefect_server
def test_it_leaves_what_its_flow_leaves(tmp_path, monkeypatch):
    """Built by the flow, built again by the flow, and again by the command, which does not import Prefect."""
    # On a slow machine a flow also shows stages that are under way: those of which nothing is known yet, and the throughput.
    monkeypatch.setattr("flows.watch.progress.UPDATE_SECONDS", 600.0)
    notes = write_notes(tmp_path / "in/notes.jsonl", 6)
    settings = settings_of(tmp_path / "out", notes, name="nothing")
    (tmp_path / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    config, url = BuildConfig.model_validate(settings), str(PREFECT_API_URL.value())
    time.sleep(2 * GRAIN_NS / 1e9)  # a file that was written a moment ago would be read again
    for _ in range(2):
        build_dataset(config)
    with httpx.Client(base_url=url) as api:
        (flow,) = api.post("/flows/filter", json={"flows": {"name": {"any_": ["build-dataset"]}}}).json()

        def newest() -> dict[str, Any]:
            told = {"flow_runs": {"tags": {"all_": ["dataset:nothing"]}}, "sort": "START_TIME_DESC", "limit": 1}
            (run,) = api.post("/flow_runs/filter", json=told).json()
            return dict(run)

        by_the_flow = newest()
        environment = {**os.environ, "PREFECT_API_URL": url, "PYTHONPATH": str(ROOT)}
        done = python("-c", COMMAND, "build", str(tmp_path / "config.yaml"), "--json", "--quiet", env=environment)
        assert done.stdout.endswith("\nFalse\n"), done.stderr
        by_the_command = newest()
        assert by_the_command["id"] != by_the_flow["id"]
        assert by_the_command["flow_id"] == flow["id"]
        expected, found = left_by(by_the_flow, api), left_by(by_the_command, api)
    assert found == {**expected, "tags": sorted(["flat-tokens", *expected["tags"]])}  # which commands give all runs
