"""The same text for other tokenizers, as a Prefect flow."""

# No "from __future__ import annotations" here: a deployment loads this file by its path, under no module's name, and could
# not resolve the names of the parameters' types.
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.credentials import credentials
from flows.groups import cancel_groups
from flows.order import BuildResult, scratch_of
from flows.receipts import results_from_receipts
from flows.reruns import BESIDE, base_of, read_text, rerun, reruns_of
from flows.runners import runner_of
from flows.watching import show, watched
from tasks.leases import sharing
from tasks.models import BuildConfig, Location, TokenizerConfig


def run_name() -> str:
    """What people find a run by."""
    given = flow_run.parameters
    names = [getattr(tokenizer, "name", tokenizer) for tokenizer in given["tokenizers"]]
    return f"retokenize {getattr(given['dataset'], 'name', given['dataset'])} with {', '.join(names)}"


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
    with credentials():
        base = base_of(dataset)
        configs = reruns_of(base, tokenizers, output)
        results = []
        with sharing(scratch_of(configs[0])), runner_of(base.config) as runner:
            text = read_text(base, configs[0], runner)
            for config in configs:
                with watched(config), results_from_receipts(config.output):
                    results.append(rerun(config, text, runner))
                show(config, results[-1])
        return results
