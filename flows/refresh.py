"""The refresh as a Prefect flow, for a schedule: the content of the sources is published if it has changed."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
import logging
from typing import Annotated

from prefect import flow
from pydantic import Field

from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import markdown as as_plain
from flat_tokens.tools.terminal import plural, size
from flows.credentials import credentials
from flows.pipelines.refresh import RefreshResult, refresh
from flows.runners.chosen import watched_runner
from flows.runners.work_pool import cancel_groups
from flows.watch.page import link_to_page, suspend
from flows.watch.pictures import code, link, page
from flows.watch.progress import ended_run, state_of
from flows.watch.summaries import leave, show
from flows.watch.words import logging_errors
from tasks.config import BuildConfig
from tasks.garbage import Policy
from tasks.output.changes import as_markdown
from tasks.output.pointer import RefreshRecord, read_history

SHOWN = 100
"""Refreshes in the list of the history."""

logger = logging.getLogger("flows.refresh")  # a deployment loads this file under another name


@flow(
    name="refresh-dataset",
    flow_run_name="refresh {config.name} with {config.tokenizer.name}",
    persist_result=False,
    on_cancellation=[cancel_groups],
    on_completion=[suspend],
)
def refresh_dataset(
    config: BuildConfig,
    keep_versions: Annotated[int, Field(ge=1)] | None = None,
    grace_days: Annotated[float, Field(ge=0)] = 7.0,
    publish_anyway: str | None = None,
) -> RefreshResult:
    """Look the sources up again; if something was added, removed or changed, publish a new version that tokenizes only that.

    Args:
        config: The configuration that the dataset is built with.
        keep_versions: How many versions are kept, the latest one among them. Older ones that are neither pinned nor in their
            days of grace are removed at the end. Without it, all are kept.
        grace_days: Days for which a version that was in use is kept all the same.
        publish_anyway: Why the version is published whatever its gates say. The command line gives it, no deployment does.
    """
    policy = Policy(keep_versions=keep_versions, grace_days=grace_days) if keep_versions else None
    with credentials():
        with watched_runner(config) as runner:
            result = refresh(config, runner, policy, publish_anyway)
            logger.info(result.headline)
        with logging_errors("changes"):
            leave(f"{config.name}-refresh", changed(config, result), result.headline)
        with logging_errors("history"):
            refreshes = read_history(Store.at(config.output))
            leave(f"{config.name}-refreshes", history(config, refreshes), f"refreshes: {len(refreshes):,}")
        if result.build is not None:
            show(config, result.build)
    published = [result.build] if result.build else []
    headline = f"{result.headline}. {result.build.headline}" if result.build and not result.build.held else result.headline
    is_unchanged = result.outcome in ("unchanged", "withdrawn", "rejected")
    return ended_run(result, headline, is_unchanged=is_unchanged, name=state_of(published))


def changed(config: BuildConfig, result: RefreshResult) -> str:
    """Markdown of a refresh's changes."""
    removed = f"\nRemoved: {', '.join(f'`{version}`' for version in result.removed)}.\n" if result.removed else ""
    tokenized = f"Text tokenized: {size(result.text_bytes_tokenized)}.\n\n"
    return (
        f"# {config.name}\n\nVersion `{result.version or 'none'}` at {link(result.path)}: {result.outcome}. "
        f"{link_to_page(config.name)}.\n\n"
        f"{tokenized}{as_markdown(result.changes)}{removed}"
    )


def history(config: BuildConfig, refreshes: tuple[RefreshRecord, ...]) -> str:
    """Markdown of the refreshes so far, the newest first."""
    more = f"And {len(refreshes) - SHOWN:,} before." if len(refreshes) > SHOWN else ""
    listed = [_of_refresh(one) for one in refreshes[: -SHOWN - 1 : -1]]
    return page(f"# Refreshes of {config.name}", link_to_page(config.name) + ".", listed, more)


def _of_refresh(one: RefreshRecord) -> str:
    """A line of a list. A table of so many columns would be cut off on the right."""
    kinds = {"added": one.added, "removed": one.removed, "changed": one.changed, "moved": one.moved}
    counts = ", ".join(f"{'unknown' if count is None else f'{count:,}'} {kind}" for kind, count in kinds.items())
    what = f"{size(one.text_bytes_tokenized)} of text tokenized in {one.seconds:,.1f} s"
    if one.decision is not None:
        what = f"{one.decision.what} by {as_plain(one.decision.by)}: {as_plain(one.decision.why)}"
    of = f"{plural(one.documents, 'document')} ({counts}), {plural(one.tokens, 'token')}"
    return f"- {one.at:%Y-%m-%d %H:%M} UTC, {code(one.version)}: {of}; {what}"
