"""A tokenizer of one's own, as a Prefect flow."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
import logging

from prefect import flow

from flows.credentials import credentials
from flows.pipelines.train_tokenizer import TO, VocabularyResult, train_on_sources, train_on_version
from flows.runners.chosen import runner_of
from flows.watch.progress import dataset_name, ended_run, showing_progress
from flows.watch.summaries import show_vocabularies
from tasks.config import BuildConfig
from tasks.locations import Location, Output, Unsigned
from tasks.vocabularies.request import VocabularyRequest

logger = logging.getLogger(__name__)


@flow(name="train-tokenizer", persist_result=False)
def train_tokenizer(
    dataset: Location | BuildConfig,
    request: VocabularyRequest,
    to: Output = TO,
    tokenizer: Unsigned | None = None,
    trust_records: bool = False,
) -> VocabularyResult:
    """Train a tokenizer on text, and cut smaller ones from it. If they are there already, it does nothing.

    Args:
        dataset: The configuration whose sources are read, or path or URL of a dataset whose training documents are decoded.
        request: Sizes of the vocabularies, the pattern that splits text, special tokens, and the sample.
        to: A directory for each. {name} stands for the dataset's name, {size} for the number of ids.
        tokenizer: The one that decodes the dataset's tokens, if not the one in its manifest.
        trust_records: Read a tokenizer that is a file or a repository of the hub where the dataset says.
    """
    name = dataset.name if isinstance(dataset, BuildConfig) else dataset_name(dataset)
    with credentials(), showing_progress(name, [f"dataset:{name}"]):
        if isinstance(dataset, BuildConfig):
            with runner_of(dataset) as runner:
                result = train_on_sources(dataset, request, to, runner)
        else:
            result = train_on_version(dataset, request, to, tokenizer, trust_records, logger.warning)
        show_vocabularies(name, result)
    return ended_run(result, result.headline)
