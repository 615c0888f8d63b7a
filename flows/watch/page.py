"""The page of a dataset in the Prefect UI, the artifact ``dataset-NAME``: its versions, schedule, last refresh, last failure and
runs. Each run of the dataset brings it up to date.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import duration, one_line, size
from flat_tokens.tools.terminal import markdown as as_markdown
from flows.watch import api
from flows.watch.api import Api, ask, moment
from flows.watch.markdown import code, link, page, table
from flows.watch.words import slug, tolerated
from tasks.output.versions import Status, Version, status_of

RUNS = 12
"""Shown of a dataset's runs."""
ASKED = 100
"""Runs that the server is asked for: groups of slices have the dataset's tag, too."""
FAILED = ("FAILED", "CRASHED")
PREFECTS_WORDS = re.compile(r"Flow run encountered an exception: (\w+: )?")
"""Words of Prefect's before those of an error."""
VERSION_COLUMNS = "version | state | made (UTC) | #documents | #tokens | tokenizer | layout | size"
RUN_COLUMNS = "run (UTC) | took | ended"
"""Columns that matter most stand first: the UI cuts off the right of a table, on narrow screens all but the first columns."""


class ListedRun(NamedTuple):
    """A run that has ended. ``path``: of its page in the UI. ``says``: the message of its last state."""

    name: str
    path: str
    at: datetime
    seconds: float
    state: str
    says: str


class Schedule(NamedTuple):
    """The deployment that refreshes a dataset. ``at``: when it runs next; None where no run is planned. ``when``: how often."""

    path: str
    at: datetime | None
    is_paused: bool
    when: str = ""


@contextlib.contextmanager
def page_of(name: str, output: str, tags: Sequence[str]) -> Iterator[None]:
    """Within a flow run: bring the page of the dataset *name* up to date when the block ends, or fails. Its runs have *tags*."""
    try:
        yield
    except Exception as error:
        _of_flow_run(name, output, tags, error)
        raise
    _of_flow_run(name, output, tags, None)


def _of_flow_run(name: str, output: str, tags: Sequence[str], error: Exception | None) -> None:
    from prefect import get_client  # here: a build that has nothing to do does not wait for Prefect

    from flows.watch.progress import flow_run

    with tolerated("page of the dataset"), get_client(sync_client=True) as client:
        run = flow_run()
        bring_up_to_date(client, api.Run(str(run.id), run.name, run.start_time), name, output, tags, error)


def bring_up_to_date(
    client: Api, this: api.Run, name: str, output: str, tags: Sequence[str], error: Exception | None = None
) -> None:
    """Bring the page of the dataset *name* up to date, which ends *this* run. httpx.HTTPError where the server refuses it."""
    found, now = status_of(Store.at(output)), datetime.now(UTC)
    says = one_line(error) if error else f"version {found.latest.version}" if found.latest else ""
    began = this.began or now
    run = ListedRun(this.name, _path(this.id), began, (now - began).total_seconds(), "Failed" if error else "Completed", says)
    runs = [run, *(one for one in _ended(client, tags) if one.path != run.path)]
    text, headline = dataset_page(name, found, runs, _schedule(client, name)), _headline(found, run)
    made = api.leave(client, this, page_key(name), "markdown", text, headline)
    # The UI lists an artifact's editions under its key, by their ids: the description is all that it shows of the newest.
    link = f"[Open the page](/artifacts/artifact/{made})"
    ask(client, "PATCH", f"/artifacts/{made}", {"description": f"{headline}. {link}"})


def page_key(name: str) -> str:
    """Key of the artifact that is a dataset's page."""
    return f"dataset-{slug(name)}"


def link_to_page(name: str) -> str:
    return f"[Page of the dataset](/artifacts/key/{page_key(name)})"


def dataset_page(name: str, found: Status, runs: Sequence[ListedRun], schedule: Schedule | None) -> str:
    """The page in Markdown. *runs*: the newest first."""
    failed = next((run for run in runs if run.state.upper() in FAILED), None)
    newest, in_versions = runs[0] if runs else None, sum(one.byte_count for one in found.versions)
    return page(
        f"# {as_markdown(name)}",
        f"**The last run failed**: {as_markdown(newest.says)}" if newest and newest is failed else "",
        _latest(found),
        [
            f"- Output: {link(found.output)}",
            f"- Schedule: {_told(schedule)}",
            f"- Sources last looked up: {_time(found.last_refresh)}",
            f"- Last failure: {_failure(failed, is_told=newest is failed)}",
            f"- Stored: {size(in_versions)} in versions, {size(found.cache_bytes)} in `_cache`",
        ],
        ["```python", f"dataset = flat_tokens.open({found.output!r})", "```"] if found.latest else "",
        table(VERSION_COLUMNS, map(_version, found.versions)) if found.versions else "",
        table(RUN_COLUMNS, map(_run, runs[:RUNS])) if runs else "",
    )


def _failure(run: ListedRun | None, is_told: bool) -> str:
    if run is None:
        return "none is known"
    return f"{_link_to(run)}, {_time(run.at)}{'' if is_told else f': {as_markdown(run.says)}'}"


def _latest(found: Status) -> str:
    if (latest := found.latest) is None:
        return "Nothing is published yet."
    counts = f"{latest.documents:,} documents, {latest.tokens:,} tokens of {code(latest.tokenizer)}"
    return f"Latest version: {code(latest.version)}, made {_time(latest.at)}: {counts}, as {latest.layout}."


def _version(one: Version) -> Sequence[str | int]:
    pinned = "" if one.pinned is None else f"pinned: {as_markdown(one.pinned)}" if one.pinned else "pinned"
    state = ", ".join(filter(None, (one.state_for_people, pinned)))
    made = f"{one.at:%Y-%m-%d %H:%M}" if one.at else ""
    return (code(one.version), state, made, one.documents, one.tokens, code(one.tokenizer), one.layout, size(one.byte_count))


def _run(run: ListedRun) -> Sequence[str]:
    what = run.name.partition(" ")[0]  # the rest of it is the same in all of them
    says = [as_markdown(run.says)] if run.says else []
    state = [] if run.state.upper() == "COMPLETED" and says else [run.state.capitalize()]
    return (f"[{run.at:%Y-%m-%d %H:%M} {as_markdown(what)}]({run.path})", duration(run.seconds), ": ".join([*state, *says]))


def _link_to(run: ListedRun) -> str:
    return f"[{as_markdown(run.name)}]({run.path})"


def _told(schedule: Schedule | None) -> str:
    if schedule is None:
        return "none. `make serve` with a configuration file makes one."
    when = f"{code(schedule.when)}, " if schedule.when else ""
    if schedule.is_paused:
        return f"{when}[paused]({schedule.path})"
    return f"{when}[{f'next run {_time(schedule.at)}' if schedule.at else 'no run is planned'}]({schedule.path})"


def _time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC" if at else "not known"


def _headline(found: Status, run: ListedRun) -> str:
    latest = f"version {found.latest.version}, {found.latest.tokens:,} tokens" if found.latest else "nothing is published yet"
    return str(as_markdown(f"{latest}; the last run {'failed' if run.state == 'Failed' else 'succeeded'}"))


def _path(run_id: str) -> str:
    """Of the page of a run, on whatever host the UI is."""
    return f"/runs/flow-run/{run_id}"


def _ended(client: Api, tags: Sequence[str]) -> Iterator[ListedRun]:
    """The runs with these tags that have ended, as far as the server keeps them; the newest first."""
    some = {"tags": {"all_": [*tags]}, "end_time": {"is_null_": False}}
    for run in ask(client, "POST", "/flow_runs/filter", {"flow_runs": some, "sort": "START_TIME_DESC", "limit": ASKED}):
        state, began = run["state"], moment(run["start_time"])
        if "group" not in run["parameters"] and state is not None and began is not None:
            says = PREFECTS_WORDS.sub("", state["message"] or "")
            yield ListedRun(run["name"], _path(run["id"]), began, run["total_run_time"], state["type"], says)


def _schedule(client: Api, name: str) -> Schedule | None:
    """The schedule of the deployment that refreshes a dataset, which has its name; None without one."""
    try:
        deployment = ask(client, "GET", f"/deployments/name/refresh-dataset/{quote(name, safe='')}")
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.NOT_FOUND:
            raise
        return None
    schedules = deployment["schedules"]
    if not schedules:
        return None
    planned = {"deployment_id": {"any_": [deployment["id"]]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    runs = ask(client, "POST", "/flow_runs/filter", {"flow_runs": planned, "sort": "EXPECTED_START_TIME_ASC", "limit": 1})
    is_paused = deployment["paused"] or not any(one["active"] for one in schedules)
    when = " and ".join(_when(one["schedule"]) for one in schedules)
    at = moment(runs[0]["expected_start_time"]) if runs else None
    return Schedule(f"/deployments/deployment/{deployment['id']}", at, is_paused, when)


def _when(schedule: dict[str, Any]) -> str:
    """Such as ``0 3 * * * Europe/Paris`` or ``every 0:10``."""
    match schedule:
        case {"cron": cron}:
            return " ".join(filter(None, (cron, schedule.get("timezone"))))
        case {"interval": seconds}:
            return f"every {duration(seconds)}"
        case {"rrule": rule}:
            return str(rule)
        case _:
            return ""
