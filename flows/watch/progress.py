"""Runs in the Prefect UI while they are under way: tags to search by, log lines, progress. ``summaries`` shows their end.
None of it decides anything: if the server does not answer, the run goes on.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import PurePath
from typing import Any, TypeVar, cast

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.logging.handlers import APILogHandler
from prefect.states import Completed

from flat_tokens.checker import CheckProgress
from flat_tokens.manifest import read_manifest
from flat_tokens.reader import resolve
from flat_tokens.stores.store import Store
from flows.pipelines.publish import PublishResult
from flows.watch.api import ask, put_artifact
from flows.watch.failures import report_in_one_line
from flows.watch.outages import outages
from flows.watch.pictures import lines
from flows.watch.words import (
    AWAITING_APPROVAL,
    UNCHANGED,
    WITHOUT_PROGRESS,
    all_done,
    describe,
    log_not_shown,
    logging_errors,
    percent,
    slug,
)
from tasks.progress import Done, Progress, meter, repeating

R = TypeVar("R")

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 2.5
POINTS = 200
"""Points of a line of throughput, at most."""
HEARTBEAT_SECONDS = 30.0
"""The automations take a run for dead after some of these (deployments/automations.yaml)."""
OURS = ("flat_tokens", "flows", "tasks")
"""Packages whose log lines the server gets, too."""


@contextmanager
def showing_progress(name: str, tags: Iterable[str]) -> Iterator[None]:
    """Within a flow run: show what its tasks do until the block ends, under this name. *tags* are added to those of the run."""
    run = flow_run()
    meter.reset()
    _add_tags(tags)
    with logging_to_server(), run_heartbeats(), _progress(str(run.id), name):
        yield


def _add_tags(tags: Iterable[str]) -> None:
    with logging_errors("tags"), get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run().id)  # what the context has of its tags is as old as the run
        client.update_flow_run(run.id, tags=sorted({*run.tags, *tags}))


def ended_run(result: R, headline: str, *, is_unchanged: bool = False, name: str = "Completed") -> R:
    """The value that a flow returns: its run ends with *headline* as its state's message, and its caller gets the result.
    *is_unchanged*: nothing was published; the run is tagged so.
    """
    if is_unchanged:
        _add_tags([UNCHANGED])
    return cast("R", Completed(name=name, message=headline, data=result))


def state_of(results: Iterable[PublishResult]) -> str:
    """The name of the state in which a flow of publications ends."""
    return AWAITING_APPROVAL if any(one.held is not None for one in results) else "Completed"


def dataset_name(path_or_url: str) -> str:
    """Name of the dataset at a path: from its manifest, else from the path. Errors surface when it is read."""
    waits_are_told = logging_to_server() if FlowRunContext.get() else nullcontext()
    with suppress(Exception), waits_are_told:  # stores have errors of their own
        return str(read_manifest(resolve(Store.at(path_or_url)))["provenance"]["name"])
    return PurePath(path_or_url.rstrip("/")).name or "dataset"


def counted_stage(stage: str) -> Callable[[CheckProgress], None]:
    """Begin a stage. Return a function that reports to the meter how far it is."""
    meter.begin(stage)
    return lambda now: meter.put(stage, now.of, Done(now.byte_count, faults=now.faults))


def flow_run() -> FlowRun:
    """The flow run that this is called in."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run


def of_run() -> dict[str, Any]:
    """The subject of events about this flow run, with its tags."""
    run = flow_run()
    tags = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in run.tags]
    return {"resource": {"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name}, "related": tags}


@contextmanager
def logging_to_server() -> Iterator[None]:
    """Send our log lines to the server, too, each once: those of tasks as theirs, those of other threads as the run's. Of an
    outage of the server there is one line.
    """
    outages()
    report_in_one_line()
    handler, flow_run_id = APILogHandler(), flow_run().id

    def belongs(record: logging.LogRecord) -> bool:
        # Threads that a task started know of no run; the handler would drop what they say.
        if FlowRunContext.get() is None:
            record.flow_run_id = flow_run_id
        return True

    handler.addFilter(belongs)
    loggers = [one for one in map(logging.getLogger, OURS) if not any(isinstance(known, APILogHandler) for known in one.handlers)]
    levels = {one: one.level for one in loggers}
    for one, level in levels.items():
        one.addHandler(handler)
        one.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        for one, level in levels.items():
            one.removeHandler(handler)
            one.setLevel(level)


@contextmanager
def run_heartbeats() -> Iterator[None]:
    """Tell the automations every half minute that the run is alive, and at the end of the block that no heartbeat need follow.
    Prefect's own heartbeats keep a run from ending for up to a second. Its own event of a run's end may come too late for them:
    after its start, and that up to 15 minutes late, if a schedule made the run (no event reports that).
    """
    about = of_run()
    beat = partial(emit_event, "prefect.flow-run.heartbeat", **about)
    beat()
    try:
        # The thread knows the settings and the run of this one.
        with repeating(HEARTBEAT_SECONDS, partial(contextvars.copy_context().run, beat), "heartbeat"):
            yield
    finally:
        emit_event("flat-tokens.run.ended", **about, follows=beat())  # so the server takes the two in this order


@contextmanager
def _progress(flow_run_id: str, name: str) -> Iterator[None]:
    """Show each stage as a progress artifact, brought up to date every few seconds from a thread of its own."""
    silent = False

    def follow() -> None:
        nonlocal silent
        if outages().is_on():
            return
        try:
            shown.update()
            silent = False
        except Exception as error:  # noqa: BLE001  as above
            if not silent:
                log_not_shown("progress", error)
            silent = True

    with ExitStack() as held:
        # One client for all that is shown, once there is something: making one takes 20 ms of a processor.
        shown = _ProgressArtifacts(cache(lambda: held.enter_context(get_client(sync_client=True))), flow_run_id, name)
        try:
            with repeating(UPDATE_SECONDS, follow, "progress", patience=10 * UPDATE_SECONDS):
                yield
        except BaseException as error:  # a cancellation is a signal, which is no Exception
            with logging_errors("progress"):
                shown.update("Failed" if isinstance(error, Exception) else "Stopped")
            raise
        with logging_errors("progress"):
            shown.finish()


class _ProgressArtifacts:
    """The progress artifacts of a run: one for each stage of which something is known, however short it was."""

    def __init__(self, client: Callable[[], SyncPrefectClient], flow_run_id: str, name: str) -> None:
        self._client, self._flow_run_id, self._name = client, flow_run_id, name
        self._ids: dict[str, str] = {}
        self._last: dict[str, Progress] = {}
        self._ended: set[tuple[str, int]] = set()
        self._begun = time.monotonic()
        self._rates: dict[str, list[tuple[float, float]]] = {}

    def update(self, over: str | None = None) -> None:
        """*over*: how the run has ended, so that a stage of which nothing is known never will be."""
        *ended, now = self._stages()
        self._end(ended)
        if now.work:  # bytes a second of the stage that is under way
            self._rates.setdefault(now.stage, []).append((time.monotonic() - self._begun, now.rate if now.recent != 0 else 0.0))
        if self._is_known(now) if over else now.stage not in WITHOUT_PROGRESS:
            self._put(now, percent(now), describe(now, over))
            if over:
                logger.info("%s, %s: %s", self._name, now.stage, describe(now, over).replace("**", ""))

    def finish(self) -> None:
        self._end(self._stages())
        series = [(stage, points[:: -(-len(points) // POINTS)]) for stage, points in self._rates.items()]
        if picture := lines(f"{self._name}: throughput", series):
            about = f"{self._name}: throughput of the run, by stage"
            self._create("throughput", "markdown", picture, about)

    def _stages(self) -> list[Progress]:
        """The stages of the meter, after earlier ones that it no longer has: a run may do several things in order."""
        stages = meter.stages()
        known = {one.stage for one in stages}
        return [*(last for stage, last in self._last.items() if stage not in known), *stages]

    def _end(self, stages: list[Progress]) -> None:
        for one in stages:
            if self._is_known(one) and (one.stage, one.done.bytes) not in self._ended:
                done = all_done(one)
                self._put(one, 100.0, f"Done: {done}")
                self._ended.add((one.stage, one.done.bytes))
                logger.info("%s, %s: %s", self._name, one.stage, done)

    def _is_known(self, one: Progress) -> bool:
        return one.stage not in WITHOUT_PROGRESS and bool(one.stage in self._ids or one.total or one.done.bytes)

    def _put(self, one: Progress, share: float, description: str) -> None:
        if one.stage in self._ids:
            ask(self._client(), "PATCH", f"/artifacts/{self._ids[one.stage]}", {"data": share, "description": description})
        else:
            self._ids[one.stage] = self._create(one.stage, "progress", share, description)
        self._last[one.stage] = one

    def _create(self, of: str, kind: str, data: str | float, description: str) -> str:
        return put_artifact(self._client(), self._flow_run_id, slug(f"{self._name}-{of}"), kind, data, description)
