"""An import from a neighbour's format as a Prefect flow."""

# No "from __future__ import annotations" here: a deployment loads this file by its path, under no module's name, and could
# not resolve the names of the parameters' types.
from collections.abc import Callable, Mapping
from typing import Any

from prefect import Task, flow

from flows.credentials import credentials
from flows.derive import as_task
from flows.pipelines.exchange import ImportResult, conclude_import, import_files
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.progress import dataset_name, short, watched
from flows.watch.summaries import show_import
from tasks.derive.imports import digest_file, import_part
from tasks.derive.request import ImportRequest
from tasks.split.write import write_span

TASKS: Mapping[Callable[..., Any], Task[..., Any]] = {
    digest_file: as_task(digest_file, "digest", "digest {key}"),
    import_part: as_task(import_part, "import", "import {part.label}"),
    write_span: as_task(write_span, "split", "split {span.label}"),
    conclude_import: as_task(conclude_import, "finalize", "finalize {version}"),
}


@flow(name="import-dataset", flow_run_name="import {request.path}", persist_result=False)
def import_dataset(request: ImportRequest) -> ImportResult:
    """Publish the tokens of files in another format as a version. Run again after any failure, it goes on where it was."""
    name = request.name or dataset_name(request.path)
    tags = [f"dataset:{name}", *([f"tokenizer:{short(request.tokenizer.name)}"] if request.tokenizer else [])]
    with credentials():
        with watched(name, tags), PrefectTasks(request.workers, TASKS) as runner:
            result = import_files(request, runner)
        show_import(request, result)
    return result
