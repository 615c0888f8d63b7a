"""A build that had nothing to do, as a run in the Prefect UI: what a flow would leave there, without Prefect."""

from __future__ import annotations

import httpx

from flat_tokens.tools.terminal import markdown as as_markdown
from flows.pipelines.build import BuildResult
from flows.watch import api
from flows.watch.api import Api
from flows.watch.page import bring_up_to_date
from flows.watch.summaries import counts_of, summary
from flows.watch.words import TAG, UNCHANGED, WITHOUT_PROGRESS, all_done, slug, tags_of, tolerated
from tasks.config import BuildConfig
from tasks.progress import meter

FLOW = "build-dataset"
RUN = "build {config.name} with {config.tokenizer.name}"


def can_record(client: Api) -> bool:
    """Whether the server takes what ``record`` says."""
    try:
        return api.is_of_this_release(client)
    except (httpx.HTTPError, ValueError):
        return False


def record(client: Api, config: BuildConfig, result: BuildResult) -> bool:
    """Record a build as a run that has ended well. False, and nothing is recorded, where the server refuses the run."""
    tags, parameters = tags_of(config), {"config": config.model_dump(mode="json"), "publish_anyway": None}
    try:
        run = api.begun(
            client, FLOW, RUN.format(config=config), parameters, sorted([TAG, *tags, *([] if result.is_new else [UNCHANGED])])
        )
    except httpx.HTTPError:
        return False
    with tolerated("progress"):
        for one in meter.stages():
            if one.stage not in WITHOUT_PROGRESS and one.total:
                api.leave(client, run, slug(f"{config.name}-{one.stage}"), "progress", 100.0, f"Done: {all_done(one)}")
    with tolerated("page of the dataset"):
        bring_up_to_date(client, run, config.name, config.output, tags, is_unchanged=not result.is_new)
    with tolerated("summary"):
        text, description = summary(config, result, config.name), as_markdown(counts_of(result))
        api.leave(client, run, slug(f"{config.name}-summary"), "markdown", text, description)
    with tolerated("end"):
        api.complete(client, run.id, result.headline)
    return True
