"""An export to a neighbour's format as a Prefect flow."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flat_tokens.formats import FORMATS
from flat_tokens.manifest import SplitName
from flat_tokens.tools.export import ExportResult, export_of
from flows.credentials import credentials
from flows.pipelines.exchange import export
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.progress import counted_stage, dataset_name, ended_run, showing_progress
from flows.watch.summaries import show_export
from tasks.locations import Location, Output

FormatName = Annotated[str, Field(json_schema_extra={"enum": list(FORMATS)})]


@flow(name="export-dataset", flow_run_name="export {dataset} to {format}", persist_result=False)
def export_dataset(
    dataset: Location,
    output: Output,
    format: FormatName,
    options: dict[str, Any] | None = None,
    split: SplitName | None = None,
    workers: Annotated[int, Field(ge=1, le=256)] | None = None,
) -> ExportResult:
    """Write a dataset in another format, file by file. Run again after any failure, it resumes after the last whole file.

    Args:
        dataset: Path or URL of an output, whose latest version is exported, or of a version.
        output: Directory or URL that the files are written to.
        format: The tool or file format that they are for.
        options: Settings of the format, such as end_of_text (docs/formats.md).
        split: This split alone; all without it.
        workers: Files at a time; the number of cores without it.
    """
    with credentials():
        name = dataset_name(dataset)
        with showing_progress(name, [f"dataset:{name}", f"format:{format}"]), PrefectTasks(workers) as runner:
            request = export_of(dataset, format, options or {}, None if split is None else (split,), counted_stage("examine"))
            result = export(request, output, runner)
        show_export(name, request, result)
    return ended_run(result, result.headline)
