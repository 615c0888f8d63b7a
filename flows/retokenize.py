"""The same text for other tokenizers, as a Prefect flow."""

# No "from __future__ import annotations" here: a deployment loads this file by its path, under no module's name, and could
# not resolve the names of the parameters' types.
import contextlib
from collections.abc import Sequence
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.credentials import credentials
from flows.pipelines.build import BuildResult
from flows.pipelines.publish import scratch_of
from flows.pipelines.retokenize import BESIDE, plan_reruns, read_text, rerun, short_name
from flows.runners.chosen import runner_of
from flows.runners.receipts import results_from_receipts
from flows.runners.work_pool import cancel_groups
from flows.watch.progress import dataset_name, short, tags_of, watched
from flows.watch.summaries import show
from tasks.config import BuildConfig, TokenizerConfig
from tasks.locations import Location
from tasks.output.leases import sharing


def run_name() -> str:
    """Name of the run, for people."""
    given = flow_run.parameters
    return f"retokenize {getattr(given['dataset'], 'name', given['dataset'])} with {', '.join(names_of(given['tokenizers']))}"


def names_of(tokenizers: Sequence[str | TokenizerConfig]) -> list[str]:
    return [tokenizer if isinstance(tokenizer, str) else tokenizer.name for tokenizer in tokenizers]


@flow(name="retokenize-dataset", flow_run_name=run_name, persist_result=False, on_cancellation=[cancel_groups])
def retokenize_dataset(
    dataset: Location | BuildConfig,
    tokenizers: Annotated[list[str | TokenizerConfig], Field(min_length=1)],
    output: str = BESIDE,
) -> list[BuildResult]:
    """Publish the text of a dataset for each of several tokenizers, each at an output of its own, its download used again.

    Args:
        dataset: Path or URL of the dataset, or the configuration that builds it.
        tokenizers: Their names; or name, pattern, revision and engine as in a configuration.
        output: Where each is published. {output} stands for where the dataset is, {tokenizer} for a tokenizer's short name.
    """
    name = dataset.name if isinstance(dataset, BuildConfig) else dataset_name(dataset)
    tags = [f"dataset:{name}", *(f"tokenizer:{short(tokenizer)}" for tokenizer in names_of(tokenizers))]
    results = []
    with credentials(), contextlib.ExitStack() as held:
        with watched(name, tags):
            base, configs = plan_reruns(dataset, tokenizers, output)
            held.enter_context(sharing(scratch_of(configs[0])))
            runner = held.enter_context(runner_of(base.config))
            text = read_text(base, configs[0], runner)
        for config in configs:
            rerun_name = f"{config.name}-{short_name(config.tokenizer)}"
            with watched(rerun_name, tags_of(config)), results_from_receipts(config.output):
                results.append(rerun(config, text, runner))
            show(config, results[-1], rerun_name)
    return results
