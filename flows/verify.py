"""The check of a dataset as a Prefect flow."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from typing import Any, Literal

from prefect import flow

import flat_tokens
from flat_tokens import DamagedError
from flat_tokens.tools.terminal import plural, size
from flows.credentials import credentials
from flows.watch.progress import counted_stage, dataset_name, ended_run, showing_progress
from flows.watch.summaries import show_check
from tasks.locations import Location
from tasks.progress import meter


@flow(name="verify-dataset", flow_run_name="verify {dataset}", persist_result=False)
def verify_dataset(dataset: Location, level: Literal["quick", "full"] = "quick") -> dict[str, Any]:
    """Check a dataset against its manifest. The run fails, naming every fault, if anything is not what it says.

    Args:
        dataset: Path or URL of an output, whose latest version is checked, or of a version.
        level: quick compares names and sizes; full checks every byte and every sentence of the format.
    """
    with credentials():
        name = dataset_name(dataset)
        with showing_progress(name, [f"dataset:{name}"]):
            try:
                found = flat_tokens.verify(dataset, level, watch=counted_stage("verify"))
            except DamagedError as damaged:
                show_check(name, level, damaged, meter.read())
                raise
            show_check(name, level, found, meter.read())
    return ended_run(found._asdict(), f"right ({level}): {plural(found.object_count, 'object')}, {size(found.byte_count)}")
