"""The build as a Prefect flow: what is done is in ``flows.pipelines.build``; here people watch it."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from prefect import flow

from flows.credentials import credentials
from flows.pipelines.build import BuildResult, build
from flows.runners.chosen import watched_runner
from flows.runners.work_pool import cancel_groups
from flows.watch.page import suspend
from flows.watch.progress import ended_run, state_of
from flows.watch.summaries import FLOW, RUN, show
from tasks.config import BuildConfig


@flow(
    name=FLOW,
    flow_run_name=RUN,
    persist_result=False,
    on_cancellation=[cancel_groups],
    on_completion=[suspend],
)
def build_dataset(config: BuildConfig, publish_anyway: str | None = None) -> BuildResult:
    """Text in, a published flat-tokens dataset out: download, tokenize, shard-write, split, finalize.

    Run again after any failure, it resumes after the last shard that was stored.

    Args:
        config: What is made of which text, and where it goes.
        publish_anyway: Why the version is published whatever its gates say. The command line gives it, no deployment does.
    """
    with credentials():
        with watched_runner(config) as runner:
            result = build(config, runner, publish_anyway)
        show(config, result)
    return ended_run(result, result.headline, is_unchanged=not result.is_new and result.held is None, name=state_of([result]))
