"""Datasets made of datasets, and of files in another format, as Prefect flows, which people watch: `flows.pipelines` does it."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from prefect import flow

from flows.credentials import credentials
from flows.pipelines.derive import DerivedResult, derive
from flows.pipelines.exchange import ImportResult, import_files
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.page import watching
from flows.watch.progress import dataset_name, ended_run
from flows.watch.summaries import show_derived, show_import
from flows.watch.words import short
from tasks.derive.request import DeriveRequest, ImportRequest


@flow(name="derive-dataset", flow_run_name="{request.operation.operation} into {request.output}", persist_result=False)
def derive_dataset(request: DeriveRequest) -> DerivedResult:
    """Publish the documents of datasets: merged, filtered, in another order or in another layout."""
    with credentials():
        inputs = [dataset_name(path) for path in request.inputs]
        name = request.name or inputs[0]
        tag, *others = (f"dataset:{one}" for one in (name, *inputs))
        with watching(name, request.output, [tag], others), PrefectTasks(request.workers) as runner:
            result = derive(request, runner)
        show_derived(request, result)
    return ended_run(result, result.headline)


@flow(name="import-dataset", flow_run_name="import {request.path}", persist_result=False)
def import_dataset(request: ImportRequest) -> ImportResult:
    """Publish the tokens of files in another format as a version. Run again after any failure, it resumes."""
    name = request.name or dataset_name(request.path)
    others = [f"tokenizer:{short(request.tokenizer.name)}"] if request.tokenizer else []
    with credentials():
        with watching(name, request.output, [f"dataset:{name}"], others), PrefectTasks(request.workers) as runner:
            result = import_files(request, runner)
        show_import(request, result)
    return ended_run(result, result.headline)
