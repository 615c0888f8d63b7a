"""What people see of a run in the Prefect UI: tags to search by, the tasks' log lines, progress that moves, and at the end a
summary and the dataset as an asset. None of it decides anything: where the server does not answer, the run goes on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.artifacts import create_markdown_artifact
from prefect.assets import Asset, AssetProperties
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler
from prefect.tasks import MaterializingTask

from flat_tokens.reader import SPLITS
from flat_tokens.storage import Store
from flows.cli import duration, size
from flows.order import BuildResult
from tasks.models import BuildConfig, Source
from tasks.progress import Progress, meter

UPDATE_SECONDS = 2.5
STAGES = ("download", "tokenize", "split")

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def watched(config: BuildConfig) -> Iterator[None]:
    """Within a flow run: show what its tasks do until the block ends."""
    run = flow_run()
    with _tolerated("tags"), get_client(sync_client=True) as client:
        client.update_flow_run(run.id, tags=sorted({*run.tags, *tags_of(config)}))
    with logged(), _progress(run.id, config.name):
        yield


def tags_of(config: BuildConfig) -> list[str]:
    """What people find the runs of a dataset by."""
    return [f"dataset:{config.name}", f"tokenizer:{short(config.tokenizer.name)}"]


def flow_run() -> FlowRun:
    """The flow run that this is called in."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run


@contextlib.contextmanager
def _tolerated(what: str) -> Iterator[None]:
    """Whatever goes wrong with what is only shown is a log line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the client, the network and the server have errors of their own
        _tell(what, error)


def _tell(what: str, error: Exception) -> None:
    logger.warning("The %s could not be shown: %s", what, error)


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Send the log lines of our own modules to the server, too: those of tasks as theirs, of other threads as the run's."""
    handler, flow_run_id = APILogHandler(), flow_run().id

    def belongs(record: logging.LogRecord) -> bool:
        # Threads that a task started know of no run; the handler would drop what they say.
        if FlowRunContext.get() is None:
            record.flow_run_id = flow_run_id
        return True

    handler.addFilter(belongs)
    loggers = [logging.getLogger(name) for name in ("flows", "tasks")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(min(one.level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)


@contextlib.contextmanager
def _progress(flow_run_id: UUID, name: str) -> Iterator[None]:
    """Show each stage as a progress artifact, brought up to date every few seconds from a thread of its own."""
    over = threading.Event()
    shown = _Shown(flow_run_id, name)

    def follow() -> None:
        silent = False
        while not over.wait(UPDATE_SECONDS):
            try:
                shown.update()
                silent = False
            except Exception as error:  # noqa: BLE001  as above
                if not silent:
                    _tell("progress", error)
                silent = True

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
        over.set()
        thread.join(10 * UPDATE_SECONDS)
        with _tolerated("progress"):
            shown.finish()
    finally:
        over.set()


class _Shown:
    """The progress artifacts of a run: one for each stage that has begun, however short it was."""

    def __init__(self, flow_run_id: UUID, name: str) -> None:
        self._flow_run_id, self._name = flow_run_id, name
        self._ids: dict[str, UUID] = {}
        self._ended: set[tuple[str, int]] = set()

    def update(self) -> None:
        *ended, now = meter.stages()
        for one in ended:
            self._end(one)
        if now.stage in STAGES:
            self._put(now.stage, percent(now), describe(now))

    def finish(self) -> None:
        for one in meter.stages():
            self._end(one)

    def _end(self, one: Progress) -> None:
        if one.stage in STAGES and (one.stage, one.done.bytes) not in self._ended:
            self._put(one.stage, 100.0, f"Done: {what_was_done(one) or 'there was nothing to do'}")
            self._ended.add((one.stage, one.done.bytes))

    def _put(self, stage: str, share: float, description: str) -> None:
        with get_client(sync_client=True) as client:
            if stage in self._ids:
                client.update_artifact(self._ids[stage], ArtifactUpdate(data=share, description=description))
                return
            made = ArtifactCreate(
                type="progress",
                key=slug(f"{self._name}-{stage}"),
                description=description,
                data=share,
                flow_run_id=self._flow_run_id,
            )
            self._ids[stage] = client.create_artifact(made).id


def percent(now: Progress) -> float:
    """How much of a stage is done; 0 where nobody knows how much there is."""
    return round(100 * min(now.done.bytes / now.total, 1.0), 1) if now.total else 0.0


def describe(now: Progress) -> str:
    """Such as ``45%, 0:12 left: 12,345 documents, 6,789,012 tokens, 2.1 GB at 211.0 MB/s``: the card that it stands on shows
    how it begins.
    """
    left = f", {duration(now.left)} left" if now.left is not None else ""
    return f"**{percent(now):.0f}%**{left}: {what_was_done(now) or 'begun'}"


def what_was_done(now: Progress) -> str:
    """Such as ``12,345 documents, 6,789,012 tokens, 2.1 GB at 211.0 MB/s``; nothing where it was nothing."""
    done, parts = now.done, []
    if done.documents:
        parts += [f"{done.documents:,} documents", f"{done.tokens:,} tokens"]
    if done.bytes:
        parts.append(f"{size(done.bytes)} at {now.rate / 1e6:,.1f} MB/s")
    return ", ".join(parts)


def show(config: BuildConfig, result: BuildResult) -> None:
    """Leave a summary of a build, and the dataset as an asset that was made of its sources."""
    with _tolerated("summary"):
        create_markdown_artifact(
            key=slug(f"{config.name}-summary"),
            markdown=summary(config, result),
            description=f"{_documents(result):,} documents, {_tokens(result):,} tokens: {result.path}",
        )
    with _tolerated("asset"):
        _materialize(config, result)


def _materialize(config: BuildConfig, result: BuildResult) -> None:
    root = Store.at(config.output)
    dataset = Asset(
        key=asset_key(root.url),
        properties=AssetProperties(
            name=config.name,
            url=result.path if result.path.startswith(("http://", "https://")) else None,
            description=f"Tokens of {', '.join(source.name for source in config.sources)} by {short(config.tokenizer.name)}",
        ),
    )
    facts = {
        "version": result.version,
        "path": result.path,
        "layout": result.layout,
        "tokenizer": short(config.tokenizer.name),
        "documents": _documents(result),
        "tokens": _tokens(result),
        "bytes": result.byte_count,
    }

    def publish(version: str) -> str:
        dataset.add_metadata(facts)
        return version

    task = MaterializingTask(
        publish,
        assets=[dataset],
        asset_deps=[
            Asset(key=asset_key(origin(source)), properties=AssetProperties(name=source.name)) for source in config.sources
        ],
        name="publish",
        task_run_name="publish {version}",
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    task(result.version)


def origin(source: Source) -> str:
    """Where a source is, as a URL or path."""
    if source.hub is not None:
        name = f"/{source.hub.name}" if source.hub.name else ""
        return f"hf://datasets/{source.hub.path}{name}/{source.hub.split}"
    assert source.path is not None
    return Store.at(source.path).url if "://" not in source.path else source.path


def asset_key(location: str) -> str:
    """A path or URL as the name of an asset, which may not hold all that a path may."""
    url = location if "://" in location else f"file://{location}"
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{re.sub(r'[^A-Za-z0-9/@:._*=+,~-]+', '-', rest)}"[:512]


def link(location: str) -> str:
    """A place in Markdown: a link where a browser can follow it, else the place itself."""
    scheme, _, path = location.partition("://")
    match scheme:
        case "http" | "https":
            return f"[{location}]({location})"
        case "hf" if repository := re.match(r"datasets/[^/@]+/[^/@]+", path):
            return f"[{location}](https://huggingface.co/{repository[0]})"
        case "gs" | "gcs":
            return f"[{location}](https://console.cloud.google.com/storage/browser/{path})"
        case "s3" | "s3a":
            bucket, _, prefix = path.partition("/")
            return f"[{location}](https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={prefix.rstrip('/')}/)"
    return f"`{location}`"


def summary(config: BuildConfig, result: BuildResult) -> str:
    """A build in Markdown: what was made, of what, document by document reckoned up."""
    totals, documents = result.totals, result.totals["documents"]
    state = "was published already" if result.was_published else f"published, number {result.sequence}"
    rows = [*documents.get("by_source", ())]
    if len(rows) > 1:
        whole = {name: sum(row[name] for row in rows) for name in ("read", "written", "text_bytes", "token_count")}
        rows.append({"name": "**all**", **whole, "skipped": documents["skipped"]})
    lines = [
        f"# {config.name}",
        "",
        f"Version `{result.version}` {state}: {link(result.path)}, {size(result.byte_count)} as {result.layout}, "
        f"tokenizer `{short(config.tokenizer.name)}`. Its card and manifest lie there: `README.md`, `manifest.json`.",
        "",
        "| split | sequences | tokens | largest id |",
        "|---|---:|---:|---:|",
        *(
            f"| {split} | {totals[split]['seq_count']:,} | {totals[split]['token_count']:,} | {totals[split]['max_token_id']:,} |"
            for split in SPLITS
        ),
        "",
        "| source | documents read | written | skipped | tokens | text | bytes per token |",
        "|---|---:|---:|---|---:|---:|---:|",
        *(_row(row) for row in rows),
        "",
        *(f"- {source.name}: {_link_to(source)}" for source in config.sources),
        "",
    ]
    if documents.get("replaced"):
        lines += [f"Mended: {_counts(documents['replaced'])}.", ""]
    if documents.get("repeated_keys"):
        lines += [f"{documents['repeated_keys']:,} documents have the key of another.", ""]
    if not result.was_published:
        lines += [f"{result.slices_reused:,} of {result.slices:,} slices were taken from earlier builds.", ""]
    lines += [
        "| stage | seconds |",
        "|---|---:|",
        *(f"| {stage} | {seconds:,.1f} |" for stage, seconds in result.seconds.items()),
    ]
    return "\n".join(lines) + "\n"


def _link_to(source: Source) -> str:
    if source.hub is None:
        return link(origin(source))
    return f"[{' '.join(filter(None, (source.hub.path, source.hub.name, source.hub.split)))}]" + (
        f"(https://huggingface.co/datasets/{source.hub.path})"
    )


def _row(row: dict[str, Any]) -> str:
    ratio = f"{row['text_bytes'] / row['token_count']:.2f}" if row["token_count"] else "–"
    return (
        f"| {row['name']} | {row['read']:,} | {row['written']:,} | {_counts(row['skipped']) or '0'} | {row['token_count']:,} "
        f"| {size(row['text_bytes'])} | {ratio} |"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def _documents(result: BuildResult) -> int:
    return sum(int(result.totals[split]["seq_count"]) for split in SPLITS)


def _tokens(result: BuildResult) -> int:
    return sum(int(result.totals[split]["token_count"]) for split in SPLITS)


def short(tokenizer: str) -> str:
    """A tokenizer's name for people: a file's without its directories."""
    return PurePath(tokenizer).name if tokenizer.endswith((".json", ".tiktoken")) else tokenizer


def slug(text: str) -> str:
    """Text as an artifact's key: lowercase letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
