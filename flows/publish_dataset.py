"""A publication on the Hugging Face hub as a Prefect flow."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from typing import Annotated, Literal

from prefect import flow
from pydantic import Field

from flows.credentials import credentials
from flows.pipelines.to_hub import HubResult, publish_to_hub
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.progress import dataset_name, ended, showing_progress
from flows.watch.summaries import show_publication
from flows.watch.words import tolerated
from tasks.config import Licence
from tasks.derive.request import HubRequest, Repository
from tasks.locations import Location, Output


@flow(name="publish-dataset", flow_run_name="publish {dataset} as {repo}", persist_result=False)
def publish_dataset(
    dataset: Location,
    repo: Repository,
    form: Literal["parquet", "zarr"] = "parquet",
    private: bool | None = None,
    licence: Licence | None = None,
    workers: Annotated[int, Field(ge=1, le=256)] | None = None,
    scratch: Output | None = None,
) -> HubResult:
    """Publish a version on the Hugging Face hub. Run again after any failure, it uploads what is missing.

    The token is that of the worker's HF_TOKEN, or of the options for hf in the block of its credentials.

    Args:
        dataset: Path or URL of an output, whose latest version is published, or of a version.
        repo: Owner and name of the repository, such as my-org/web, or buckets/my-org/web. It is made if it is not there.
        form: Parquet with lists of token ids, or the zarr of the version as it is.
        private: For whom a repository is made; one that is there stays as it is.
        licence: As the hub names licences, such as cc-by-4.0; that of the configuration without it.
        workers: Files at a time; the number of cores without it.
        scratch: Local directory for files on their way.
    """
    request = HubRequest(**locals())
    with credentials():
        name = dataset_name(request.dataset)
        with showing_progress(name, [f"dataset:{name}", "format:hub"]), PrefectTasks(request.workers) as runner:
            result = publish_to_hub(request, runner)
        with tolerated("summary"):
            show_publication(name, result)
    return ended(result, result.headline)
