"""A publication on the Hugging Face hub as a Prefect flow."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from prefect import flow

from flows.credentials import credentials
from flows.pipelines.to_hub import HubResult, publish_to_hub
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.progress import dataset_name, ended_run, showing_progress
from flows.watch.summaries import show_publication
from tasks.derive.request import HubRequest


@flow(name="publish-dataset", flow_run_name="publish {request.dataset} as {request.repo}", persist_result=False)
def publish_dataset(request: HubRequest) -> HubResult:
    """Publish a version on the Hugging Face hub. Run again after any failure, it uploads what is missing.

    The token is that of the worker's HF_TOKEN, or of the options for hf in the block of its credentials.

    Args:
        request: The version, and the repository that it goes to.
    """
    with credentials():
        name = dataset_name(request.dataset)
        with showing_progress(name, [f"dataset:{name}", "format:hub"]), PrefectTasks(request.workers) as runner:
            result = publish_to_hub(request, runner)
        show_publication(name, result)
    return ended_run(result, result.headline)
