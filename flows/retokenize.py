"""The same text for other tokenizers, as a Prefect flow."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
import contextlib
from collections.abc import Sequence
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flat_tokens.stores.store import Store
from flows.credentials import credentials
from flows.pipelines.build import BuildResult
from flows.pipelines.retokenize import BESIDE, reruns, short_name
from flows.runners.chosen import runner_of
from flows.runners.receipts import results_from_receipts
from flows.runners.work_pool import cancel_groups
from flows.watch.page import suspend, watching
from flows.watch.progress import dataset_name, ended_run, showing_progress, state_of
from flows.watch.summaries import show
from flows.watch.words import short, tags_of
from tasks.config import BuildConfig, TokenizerConfig
from tasks.locations import Location, Unsigned


def run_name() -> str:
    """Name of the run, for people."""
    given = flow_run.parameters
    return f"retokenize {getattr(given['dataset'], 'name', given['dataset'])} with {', '.join(names_of(given['tokenizers']))}"


def names_of(tokenizers: Sequence[str | TokenizerConfig]) -> list[str]:
    return [tokenizer if isinstance(tokenizer, str) else tokenizer.name for tokenizer in tokenizers]


@flow(
    name="retokenize-dataset",
    flow_run_name=run_name,
    persist_result=False,
    on_cancellation=[cancel_groups],
    on_completion=[suspend],
)
def retokenize_dataset(
    dataset: Location | BuildConfig,
    tokenizers: Annotated[list[Unsigned | TokenizerConfig], Field(min_length=1)],
    output: Unsigned = BESIDE,
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
        with showing_progress(name, tags):
            configs, rerun = held.enter_context(reruns(dataset, tokenizers, output, runner_of))
        for config in configs:
            rerun_name = f"{config.name}-{short_name(config.tokenizer)}"
            with watching(rerun_name, config.output, tags_of(config)), results_from_receipts(Store.at(config.output)):
                results.append(rerun(config))
            show(config, results[-1], rerun_name)
    return ended_run(results, "; ".join(f"{one.path}: {one.headline}" for one in results), name=state_of(results))
