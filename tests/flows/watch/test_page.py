"""The page of a dataset: what an operator asks of it first, from storage and the server, whatever the last run came to."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from flows.watch import api
from flows.watch.page import ListedRun, bring_up_to_date, dataset_page
from tasks.output.versions import Status, Version

AT = datetime(2026, 3, 1, 4, 5, tzinfo=UTC)


def version(name: str, **settings: Any) -> Version:
    told = {"version": name, "at": AT, "until": None, "state": "former", "pinned": None, "documents": 1200, "tokens": 3_400_000}
    return Version.model_validate({**told, "tokenizer": "gpt2", "layout": "mmap", "byte_count": 6_900_000, **settings})


def run(state: str, says: str, number: int = 1) -> ListedRun:
    return ListedRun(f"refresh web {number}", f"../../runs/flow-run/{number}", AT + timedelta(days=number), 75.0, state, says)


STATUS = Status(
    output="gs://bucket/web",
    versions=(version("b2", state="latest"), version("a1", pinned="the run of May", until=AT)),
    last_refresh=AT + timedelta(hours=2),
    cache_bytes=52_000,
)


@pytest.mark.parametrize(
    ("output", "has_report", "line"),
    [
        ("/data/my web", True, "open `file:///data/my%20web/report.html` in a browser on that machine"),
        ("https://x.org/web", True, "](https://x.org/web/report.html)"),
        ("/data/my web", False, "`flat-tokens stats '/data/my web' --html '/data/my web/report.html'`"),
    ],
)
def test_the_page_leads_to_the_report_with_plots(output, has_report, line):
    assert line in dataset_page("web", STATUS.model_copy(update={"output": output}), [], "none", has_report=has_report)


def test_the_page_tells_state_schedule_failure_and_history():
    runs = [run("Completed", "version b2", 3), run("CRASHED", "the worker is gone", 2), run("FAILED", "an older fault", 1)]
    idle = [run("Completed", "nothing changed", 5), run("Completed", "nothing changed", 4)]
    text = dataset_page("web", STATUS, runs, "every day", idle)
    lines = text.splitlines()
    assert re.findall(r"!\[([^]]*)\]\(data:image/svg", text) == ["Tokens by version", "Disk"]
    assert "|" not in text  # the UI cuts off tables
    for line in (
        "# web",
        "Latest version: `b2`, made 2026-03-01 04:05 UTC: 1,200 documents, 3,400,000 tokens of `gpt2`, as mmap.",
        "- Schedule: every day",
        "- Sources last looked up: 2026-03-01 06:05 UTC",
        "- Last failure: [refresh web 2](../../runs/flow-run/2), 2026-03-03 04:05 UTC: the worker is gone",
        "- Stored: 13.8 MB in versions, 52.0 kB in `_cache`",
        "dataset = flat_tokens.open('gs://bucket/web')",
        "- `b2` (latest): 3,400,000 tokens of `gpt2` in 1,200 documents, 6.9 MB as mmap, made 2026-03-01 04:05",
        "- `a1` (former until 2026-03-01 04:05, pinned: the run of May): 3,400,000 tokens of `gpt2` in 1,200 documents, 6.9 MB "
        "as mmap, made 2026-03-01 04:05",
        "- [2026-03-04 04:05 refresh](../../runs/flow-run/3), 1:15: version b2",
        "- [2026-03-03 04:05 refresh](../../runs/flow-run/2), 1:15: Crashed: the worker is gone",
        "Runs that published nothing: 2, the last one [refresh web 5](../../runs/flow-run/5), 2026-03-06 04:05 UTC.",
    ):
        assert line in lines
    assert not any("last run failed" in line for line in lines)


def test_a_failure_of_the_last_run_comes_first():
    lines = dataset_page("web", STATUS, [run("Failed", "no space left")], "none").splitlines()
    assert lines[2] == "**The last run failed**: no space left"
    assert "- Last failure: [refresh web 1](../../runs/flow-run/1), 2026-03-02 04:05 UTC" in lines


DAILY = {"cron": "0 3 * * *", "timezone": "Europe/Paris", "day_or": True}
DEPLOYMENT = "../../deployments/deployment/7"


@pytest.mark.parametrize(
    ("schedules", "is_paused", "line"),
    [
        ([DAILY], False, f"`0 3 * * * Europe/Paris`, [next run 2026-03-10 04:05 UTC]({DEPLOYMENT})"),
        (
            [{"interval": 600.0, "timezone": "UTC"}, {"rrule": "FREQ=DAILY", "timezone": "UTC"}],
            False,
            f"`every 10:00 and FREQ=DAILY`, [next run 2026-03-10 04:05 UTC]({DEPLOYMENT})",
        ),
        ([DAILY], True, f"`0 3 * * * Europe/Paris`, [paused]({DEPLOYMENT})"),
        ([], False, "none. `make serve` with a configuration file makes one."),
    ],
)
def test_the_schedule_is_that_of_the_deployment_of_the_name(tmp_path, schedules, is_paused, line):
    """As the API tells of it; and what the page says is left under the run."""
    sent, at = {}, "2026-03-10T04:05:00Z"
    failed = {"type": "FAILED", "message": "notes.jsonl, line 1 (row 0)"}
    last = {"id": "9", "name": "refresh my web", "parameters": {}, "tags": [], "total_run_time": 75.0, "state": failed}

    def answer(request: httpx.Request) -> httpx.Response:
        sent[request.url.raw_path.decode()] = json.loads(request.content or b"null")
        if request.url.path == "/api/flow_runs/filter":
            return httpx.Response(200, json=[{**last, "start_time": at, "expected_start_time": at}])
        told = {"id": "7", "paused": is_paused, "schedules": [{"schedule": one, "active": True} for one in schedules]}
        return httpx.Response(200, json={**told, "description": "Mine.\n\n[Old](x)"})

    with httpx.Client(base_url="http://server/api", transport=httpx.MockTransport(answer)) as client:
        bring_up_to_date(client, api.Run("3", "build my web", AT), "my web", str(tmp_path), ["dataset:my web"])
    assert "/api/deployments/name/refresh-dataset/my%20web" in sent
    page = sent["/api/artifacts/"]
    assert (page["key"], page["flow_run_id"]) == ("dataset-my-web", "3")
    shown = "- [2026-03-10 04:05 refresh](../../runs/flow-run/9), 1:15: Failed: notes.jsonl, line 1 (row 0)"
    assert {f"- Schedule: {line}", shown} <= set(page["data"].splitlines())
    about = sent["/api/deployments/7"]["description"]
    assert about.startswith("Mine.\n\n[Page of the dataset](../../artifacts/artifact/7): nothing is published yet")
