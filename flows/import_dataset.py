"""An import from a neighbour's format as a Prefect flow."""

# No "from __future__ import annotations" here: a deployment loads this file by its path, under no module's name, and could
# not resolve the names of the parameters' types.

from prefect import flow

from flows.credentials import credentials
from flows.pipelines.import_ import ImportResult, import_files
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.progress import dataset_name, short, watched
from flows.watch.summaries import show_import
from tasks.derive.request import ImportRequest


@flow(name="import-dataset", flow_run_name="import {request.path}", persist_result=False)
def import_dataset(request: ImportRequest) -> ImportResult:
    """Publish the tokens of files in another format as a version. Run again after any failure, it goes on where it was."""
    name = request.name or dataset_name(request.path)
    tags = [f"dataset:{name}", *([f"tokenizer:{short(request.tokenizer.name)}"] if request.tokenizer else [])]
    with credentials():
        with watched(name, tags), PrefectTasks(request.workers) as runner:
            result = import_files(request, runner)
        show_import(request, result)
    return result
