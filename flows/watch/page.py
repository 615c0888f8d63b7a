"""The page of a dataset in the Prefect UI, the artifact ``dataset-NAME``: its versions, schedule, last refresh, last failure and
runs. Each run of the dataset brings it up to date.

And the page of a version that waits for a person, the artifact ``NAME-held``: what its gates found, and the version next to the
one that ``latest`` names, in lists, tables and pictures. An event reports it to the automations.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import httpx

from flat_tokens.annotations import JsonObject
from flat_tokens.manifest import VERSIONS
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import duration, one_line, plural, short, size
from flat_tokens.tools.terminal import markdown as as_markdown
from flows.pipelines.publish import PublishResult
from flows.watch import api
from flows.watch.api import Api, ask, parse_time
from flows.watch.pictures import Bar, bars, code, link, page, table
from flows.watch.words import AWAITING_APPROVAL, UI, UNCHANGED, logging_errors, slug
from tasks.finalize.facts import Comparison
from tasks.gates import change_for_people, summary_of
from tasks.locations import local_path
from tasks.output.pointer import Candidate, RefreshRecord, read_history, read_pointer
from tasks.output.versions import Status, Version, status_of

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State


logger = logging.getLogger(__name__)

REPORT = "report.html"
RUNS = 12
"""Shown of a dataset's runs."""
ASKED, SEEN = 200, 2000
"""Runs that the server is asked for at a time, and at most: groups of slices have the dataset's tag, too."""
FAILED = ("FAILED", "CRASHED")
PREFECTS_WORDS = re.compile(r"Flow run encountered an exception: (\w+: )?")
"""Words of Prefect's before those of an error."""
DRAWN = 12
"""Versions in a picture."""


class ListedRun(NamedTuple):
    """A run that has ended. ``path``: of its page in the UI. ``says``: the message of its last state."""

    name: str
    path: str
    at: datetime
    seconds: float
    state: str
    says: str


@contextmanager
def watching(name: str, output: str, tags: Sequence[str], others: Sequence[str] = ()) -> Iterator[None]:
    """Within a flow run that publishes at *output*: show its progress, and bring the page of the dataset *name* up to date when
    the block ends, or fails. The dataset's runs have *tags*; this one has *others*, too.
    """
    from flows.watch.progress import showing_progress  # here: a build that has nothing to do does not wait for Prefect

    with showing_progress(name, [*tags, *others]):
        logger.info("Page of the dataset: the artifact %s", page_key(name))
        before = _sequence(output)
        try:
            yield
        except Exception as error:
            _of_flow_run(name, output, tags, error)
            raise
        _of_flow_run(name, output, tags, None, is_unchanged=before is not None and before == _sequence(output))


def _sequence(output: str) -> int | None:
    """The number of the pointer; None if nobody can tell."""
    with suppress(Exception):  # the run itself says what is wrong with the output
        return read_pointer(Store.at(output)).sequence
    return None


def _of_flow_run(name: str, output: str, tags: Sequence[str], error: Exception | None, *, is_unchanged: bool = False) -> None:
    from prefect import get_client  # as above

    from flows.watch.progress import flow_run

    with logging_errors("page of the dataset"), get_client(sync_client=True) as client:
        run = flow_run()
        this = api.Run(str(run.id), run.name, run.start_time)
        bring_up_to_date(client, this, name, output, tags, error, is_unchanged=is_unchanged)


def bring_up_to_date(
    client: Api,
    this: api.Run,
    name: str,
    output: str,
    tags: Sequence[str],
    error: Exception | None = None,
    *,
    is_unchanged: bool = False,
) -> None:
    """Bring the page of the dataset *name* up to date, which ends *this* run. *is_unchanged*: the run published nothing.
    httpx.HTTPError if the server refuses it.
    """
    found, now = status_of(Store.at(output)), datetime.now(UTC)
    says = one_line(error) if error else f"version {found.latest.version}" if found.latest else ""
    began = this.began or now
    run = ListedRun(this.name, _path(this.id), began, (now - began).total_seconds(), "Failed" if error else "Completed", says)
    runs: list[ListedRun] = []
    idle: list[ListedRun] = []
    (idle if is_unchanged and found.held is None else runs).append(run)
    for one, is_idle in _ended(client, tags):
        if len(runs) == RUNS:
            break
        if one.path != run.path:
            (idle if is_idle else runs).append(one)
    history: tuple[RefreshRecord, ...] = ()
    with logging_errors("history of refreshes"):
        history = read_history(Store.at(output))
    deployment, headline = _deployment(client, f"refresh-dataset/{quote(name, safe='')}"), _headline(found, run)
    text = dataset_page(name, found, runs, _schedule(client, deployment), idle, history, has_report=_has_report(found))
    made = api.put_artifact(client, this.id, page_key(name), "markdown", text, headline)
    if deployment:
        about, _, _ = (deployment["description"] or "").partition("\n\n")
        link = f"[Page of the dataset]({UI}/artifacts/artifact/{made})"  # below its key, its editions are listed by their ids
        ask(client, "PATCH", f"/deployments/{deployment['id']}", {"description": f"{about}\n\n{link}: {headline}."})
    if found.held is None:
        _settle(client, output, tags, headline)


def suspend(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    """After *flow*: suspend its run if a version waits for a person, in place of an earlier one: people see it. Its process
    has ended, and it has no slot. If it is resumed, it runs again.
    """
    from prefect import get_client  # as above

    if state.name == AWAITING_APPROVAL:
        with logging_errors("state"), get_client(sync_client=True) as client:
            output = flow_run.parameters.get("config", {}).get("output")
            tags = [tag for tag in client.read_flow_run(flow_run.id).tags if tag.startswith("dataset:")]
            _settle(client, output, tags, f"{flow_run.name} waits for the same")
            waits = {"type": "PAUSED", "name": "Suspended", "message": state.message, "state_details": {"pause_reschedule": True}}
            ask(client, "POST", f"/flow_runs/{flow_run.id}/set_state", {"state": waits, "force": True})


def _settle(client: Api, output: str | None, tags: Sequence[str], message: str) -> None:
    """End runs that are suspended for a version of this output."""
    some = {"tags": {"all_": [*tags]}, "state": {"type": {"any_": ["PAUSED"]}}}
    for run in ask(client, "POST", "/flow_runs/filter", {"flow_runs": some, "limit": ASKED}):
        if output and run["parameters"].get("config", {}).get("output") == output:
            api.complete(client, run["id"], message)


def page_key(name: str) -> str:
    """Key of the artifact that is a dataset's page."""
    return f"dataset-{slug(name)}"


def link_to_page(name: str) -> str:
    return f"[Page of the dataset]({UI}/artifacts/key/{page_key(name)})"


def dataset_page(
    name: str,
    found: Status,
    runs: Sequence[ListedRun],
    schedule: str,
    idle: Sequence[ListedRun] = (),
    history: Sequence[RefreshRecord] = (),
    *,
    has_report: bool = False,
) -> str:
    """The page in Markdown. *runs*: the newest first. *schedule*: when it is refreshed. *idle*: runs that published nothing.
    *has_report*: a report with plots is there. It has lists, not tables: the UI cuts off the right of a table on narrow screens.
    """
    failed = next((run for run in runs if run.state.upper() in FAILED), None)
    newest, in_versions = runs[0] if runs else None, sum(one.byte_count for one in found.versions)
    failure = f"{_link_to(failed)}, {_time(failed.at)}" if failed else "none is known"
    failure += f": {as_markdown(failed.says)}" if failed and newest is not failed else ""
    return page(
        f"# {as_markdown(name)}",
        f"**The last run failed**: {as_markdown(newest.says)}" if newest and newest is failed else "",
        _waiting(name, found.held) if found.held is not None else "",
        _latest(found),
        [
            f"- Output: {link(found.output)}",
            f"- Schedule: {schedule}",
            f"- Sources last looked up: {_time(found.last_refresh)}",
            f"- Last failure: {failure}",
            f"- Stored: {size(in_versions)} in versions, {size(found.cache_bytes)} in `_cache`",
        ],
        ["```python", f"dataset = flat_tokens.open({found.output!r})", "```"] if found.latest else "",
        _report(found.output, is_there=has_report) if found.latest else "",
        tokens_by_version(found, history),
        disk(found),
        ["## Versions", "", *map(_version, found.versions)] if found.versions else "",
        ["## Runs", "", *map(_run, runs[:RUNS])] if runs else "",
        f"Runs that published nothing: {len(idle):,}{'' if len(runs) < RUNS else ' or more'}, the last one {_link_to(idle[0])}, "
        f"{_time(idle[0].at)}."
        if idle
        else "",
    )


def _waiting(name: str, held: Candidate) -> str:
    """A version that waits for a person, and the page that says why."""
    see = f"See [what it is like, and how to decide]({UI}/artifacts/key/{held_key(name)})"
    findings = as_markdown(summary_of(held.findings))
    return f"**Version {code(held.version)} waits for a person**, since {_time(held.at)}: {findings}. {see}."


def _has_report(found: Status) -> bool:
    """Whether a report with plots is at a place that a browser can open. If a store cannot be asked, there is none to show."""
    with suppress(Exception):  # stores have errors of their own
        return found.latest is not None and Store.at(found.output).exists(REPORT)
    return False


def _report(output: str, *, is_there: bool) -> str:
    """A link to the report with plots, or the command that writes it. The UI makes no links to files of a machine."""
    place = f"{output.rstrip('/')}/{REPORT}"
    if is_there and (local := local_path(place)) is not None:
        address = Path(local).absolute().as_uri()
        return f"Report with plots (lengths, sources, vocabulary): open {code(address)} in a browser on that machine"
    if is_there:
        return f"Report with plots (lengths, sources, vocabulary): {link(place)}"
    command = code(f"flat-tokens stats {shlex.quote(output)} --html {shlex.quote(place)}")
    return f"A report with plots (lengths, sources, vocabulary) is written by {command}"


def tokens_by_version(found: Status, history: Sequence[RefreshRecord]) -> str:
    """A picture of the tokens of the newest versions, each with the documents that its refresh added and removed."""
    changes = {one.version: one for one in history}
    rows = []
    for version in _by_time(found)[-DRAWN:]:
        of = changes.get(version.version)
        counts = ((of.added, "+"), (of.removed, "−")) if of else ()
        changed = " ".join(f"{sign}{count:,}" for count, sign in counts if count)
        splits = f", {of.split_changes:,} changed their split" if of and of.split_changes else ""
        name = f"{version.version[:8]}{f', {version.at:%Y-%m-%d}' if version.at else ''}"
        rows.append(Bar(name, version.tokens, f"{short(version.tokens)}{f' ({changed} documents)' if changed else ''}{splits}"))
    return bars("Tokens by version", rows)


def disk(found: Status) -> str:
    """A picture of the bytes of the newest versions, and of the rest of an output."""
    rows = [Bar(one.version[:8], one.byte_count, size(one.byte_count)) for one in _by_time(found)[-DRAWN:]]
    return bars("Disk", [*rows, Bar("_cache", found.cache_bytes, size(found.cache_bytes))]) if rows else ""


def _by_time(found: Status) -> list[Version]:
    return sorted(found.versions, key=lambda one: one.at or datetime.min.replace(tzinfo=UTC))


def _latest(found: Status) -> str:
    if (latest := found.latest) is None:
        return "Nothing is published yet."
    counts = f"{plural(latest.documents, 'document')}, {latest.tokens:,} tokens of {code(latest.tokenizer)}"
    return f"Latest version: {code(latest.version)}, made {_time(latest.at)}: {counts}, as {latest.layout}."


def _version(one: Version) -> str:
    made = f", made {one.at:%Y-%m-%d %H:%M}" if one.at else ""
    counts = f"{one.tokens:,} tokens of {code(one.tokenizer)} in {plural(one.documents, 'document')}"
    marks = f" ({as_markdown(one.marks)})" if one.marks else ""
    return f"- {code(one.version)}{marks}: {counts}, {size(one.byte_count)} as {one.layout}{made}"


def _run(run: ListedRun) -> str:
    what = run.name.partition(" ")[0]  # the rest of it is the same in all of them
    says = [as_markdown(run.says)] if run.says else []
    state = [] if run.state.upper() == "COMPLETED" and says else [run.state.capitalize()]
    return f"- [{run.at:%Y-%m-%d %H:%M} {as_markdown(what)}]({run.path}), {duration(run.seconds)}: {': '.join([*state, *says])}"


def _link_to(run: ListedRun) -> str:
    return f"[{as_markdown(run.name)}]({run.path})"


def _time(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC" if at else "not known"


def _headline(found: Status, run: ListedRun) -> str:
    latest = (
        f"version {found.latest.version}, {plural(found.latest.tokens, 'token')}" if found.latest else "nothing is published yet"
    )
    waits = f"; version {found.held.version[:8]} waits for a person" if found.held else ""
    return str(as_markdown(f"{latest}{waits}; the last run {'failed' if run.state == 'Failed' else 'succeeded'}"))


def _path(run_id: str) -> str:
    """Path of a run's page, in the UI that people are in."""
    return f"{UI}/runs/flow-run/{run_id}"


def _ended(client: Api, tags: Sequence[str]) -> Iterator[tuple[ListedRun, bool]]:
    """The runs with these tags that have ended, as far as the server keeps them, the newest first, each with whether it published
    nothing.
    """
    some = {"tags": {"all_": [*tags]}, "end_time": {"is_null_": False}}
    for offset in range(0, SEEN, ASKED):
        body = {"flow_runs": some, "sort": "START_TIME_DESC", "limit": ASKED, "offset": offset}
        found = ask(client, "POST", "/flow_runs/filter", body)
        for run in found:
            state, began = run["state"], parse_time(run["start_time"])
            if "group" not in run["parameters"] and state is not None and began is not None:
                says = PREFECTS_WORDS.sub("", state["message"] or "")
                listed = ListedRun(run["name"], _path(run["id"]), began, run["total_run_time"], state["type"], says)
                yield listed, UNCHANGED in run["tags"]
        if len(found) < ASKED:
            return


def _deployment(client: Api, path: str) -> JsonObject | None:
    """A deployment by its flow and name; None without one."""
    try:
        return dict(ask(client, "GET", f"/deployments/name/{path}"))
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.NOT_FOUND:
            raise
        return None


def _schedule(client: Api, deployment: JsonObject | None) -> str:
    """How often and when next a dataset is refreshed, by its deployment."""
    if deployment is None or not (schedules := deployment["schedules"]):
        return "none. `make serve` with a configuration file makes one."
    often = " and ".join(_when(one["schedule"]) for one in schedules)
    when, path = f"{code(often)}, " if often else "", f"{UI}/deployments/deployment/{deployment['id']}"
    if deployment["paused"] or not any(one["active"] for one in schedules):
        return f"{when}[paused]({path})"
    planned = {"deployment_id": {"any_": [deployment["id"]]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    runs = ask(client, "POST", "/flow_runs/filter", {"flow_runs": planned, "sort": "EXPECTED_START_TIME_ASC", "limit": 1})
    at = parse_time(runs[0]["expected_start_time"]) if runs else None
    return f"{when}[{f'next run {_time(at)}' if at else 'no run is planned'}]({path})"


def _when(schedule: JsonObject) -> str:
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


HELD_EVENT = "flat-tokens.version.held"
"""The event of a run whose version waits for a person (deployments/automations.yaml)."""
ROWS_DRAWN = 8
"""Sources, and reasons, in a picture."""


def show_held(name: str, output: str, result: PublishResult) -> None:
    """Within a flow run: leave the page of the version that its result says is held, and tell the automations."""
    from prefect import get_client  # here: what is below is used without Prefect, too
    from prefect.artifacts import create_markdown_artifact
    from prefect.events import emit_event

    from flows.watch.progress import of_run

    if result.held is None or result.comparison is None:
        return
    with logging_errors("page of the version that is held"):
        with get_client(sync_client=True) as client:
            parameters = quote(json.dumps({"output": output, "version": result.held.version}))
            forms = [
                f"[{what.capitalize()} it]({UI}/deployments/deployment/{deployment['id']}/run?parameters={parameters})"
                for what in ("approve", "reject")
                if (deployment := _deployment(client, f"{what}-version/{what}"))
            ]
        text = held_page(name, output, result.held, result.comparison, forms)
        create_markdown_artifact(key=held_key(name), markdown=text, description=as_markdown(result.headline))
    with logging_errors("notification"):
        says = {"version": result.version, "headline": result.headline, "page": f"artifacts/key/{held_key(name)}"}
        emit_event(HELD_EVENT, **of_run(), payload=says)


def held_key(name: str) -> str:
    """Key of the artifact that is the page of a dataset's held version."""
    return f"{slug(name)}-held"


def held_page(name: str, output: str, held: Candidate, compared: Comparison, forms: Sequence[str]) -> str:
    """The page in Markdown. *forms*: links that decide. Tables have few columns: the UI cuts off the right of wide ones."""
    where = link(f"{output.rstrip('/')}/{VERSIONS}/{held.version}")
    beside = f"Latest is {code(held.before)}" if held.before else "Nothing is published yet"
    return page(
        f"# {as_markdown(name)}: a version waits for a person",
        f"Version {code(held.version)} at {where}: {plural(held.documents, 'document')}, "
        f"{plural(held.tokens, 'token')}. {beside}, and stays so "
        f"until somebody decides. {link_to_page(name)}.",
        ["## What the gates found", "", *(f"- {as_markdown(one.sentence)}" for one in held.findings)],
        ["## Decide", "", " or ".join(forms)] if forms else "## Decide",
        ["```", *held.ways(output), "```"],
        "## Next to the latest version",
        *(_sources(compared, what) for what in ("documents", "tokens", "text_bytes")),
        "Grey is the latest version, blue the one that waits." if compared.before else "",
        _in_pairs("Documents by source", _largest((one.name, one.documents) for one in compared.sources)),
        _in_pairs("Tokens by source", _largest((one.name, one.tokens) for one in compared.sources)),
        _in_pairs("Documents left out, by reason", _largest(compared.skipped.items())),
        _in_pairs(
            "Documents by length in tokens",
            [
                (f"{one.first:,} to {one.last:,}" if one.last > one.first else f"{one.first:,}", *one.documents)
                for one in compared.lengths
            ],
        ),
        _changes(compared),
    )


def _sources(compared: Comparison, what: str) -> list[str]:
    """A table of a count of each source."""
    rows: list[Sequence[str | int]] = []
    for one in compared.sources:
        before, now = getattr(one, what)
        amounts = ("–" if value is None else size(value) if what == "text_bytes" else f"{value:,}" for value in (before, now))
        rows.append((as_markdown(one.name), *amounts, _change(before, now)))
    return table(f"{what.replace('text_bytes', 'text')} of | #latest | #waits | #change", rows)


def _change(before: int | None, now: int | None) -> str:
    if before is None or now is None:
        return "new" if now is not None else "gone"
    return change_for_people(now, before) if now != before else "same"


def _largest(counts: Iterable[tuple[str, tuple[int | None, int | None]]]) -> list[tuple[str, int, int]]:
    """The rows of a picture with the largest counts: names, each with its count before and now, 0 if there is none."""
    rows = [(name, before or 0, now or 0) for name, (before, now) in counts]
    return sorted(rows, key=lambda row: -max(row[1:]))[:ROWS_DRAWN]


def _in_pairs(title: str, rows: Sequence[tuple[str, int, int]]) -> str:
    """A picture of two bars for each row: of the latest version, and of the one that waits."""
    return bars(title, [Bar(name, now, f"{short(before)} → {short(now)}", before) for name, before, now in rows])


def _changes(compared: Comparison) -> list[str] | str:
    if compared.before is None:
        return ""
    if compared.documents is None:
        return "What became of documents is unknown."
    rows: list[Sequence[Any]] = []
    for one in (*compared.documents.by_source, compared.documents.total):
        for kind in ("added", "removed", "changed", "moved"):
            if count := getattr(one, kind):
                rows.append((f"{as_markdown(one.name)}, {kind}", count))
    rows += ((f"changed their split, {one.before} → {one.after}", one.documents) for one in compared.documents.of_splits)
    return ["## What became of documents", "", *table("documents | #count", rows)] if rows else ""
