"""Merge, subset, shuffle and relayout as Prefect flows: what is done is in ``flows.pipelines.derive``; here people watch it."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.manifest import SplitName
from flows.credentials import credentials
from flows.pipelines.derive import DerivedResult, derive
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.page import page_of
from flows.watch.progress import dataset_name, ended, showing_progress
from flows.watch.summaries import show_derived
from tasks.derive.request import DeriveRequest, Merge, Relayout, Shuffle, Subset
from tasks.locations import Location, Output

Workers = Annotated[int, Field(ge=1, le=256)] | None
Level = Literal["quick", "full"]


def run(operation: Merge | Subset | Shuffle | Relayout, inputs: list[str], output: str, *settings: Any) -> DerivedResult:
    given = dict(zip(("name", "layout", "workers", "scratch", "verify_level"), settings, strict=True))
    request = DeriveRequest(operation=operation, inputs=tuple(inputs), output=output, **given)
    with credentials():
        inputs = [dataset_name(path) for path in request.inputs]
        name = request.name or inputs[0]
        tags = [f"dataset:{one}" for one in (name, *inputs)]
        with showing_progress(name, tags), page_of(name, output, tags[:1]), PrefectTasks(request.workers) as runner:
            result = derive(request, runner)
        show_derived(request, result)
    return ended(result, result.headline)


@flow(name="merge-datasets", flow_run_name="merge into {output}", persist_result=False)
def merge_datasets(
    datasets: Annotated[list[Location], Field(min_length=1)],
    output: Output,
    name: str | None = None,
    layout: Literal["auto"] | LayoutName = "auto",
    allow_different_tokenizers: bool = False,
    workers: Workers = None,
    scratch: Output | None = None,
    verify_level: Level = "quick",
) -> DerivedResult:
    """Publish the documents of several datasets, in order: train with train, validation with validation.

    datasets: outputs of builds (their latest versions), versions, or plain zarr. output: where the version is published; the
    first dataset's own place to append the others to it.
    """
    operation = Merge(allow_different_tokenizers=allow_different_tokenizers)
    return run(operation, datasets, output, name, layout, workers, scratch, verify_level)


@flow(name="subset-dataset", flow_run_name="subset of {dataset} into {output}", persist_result=False)
def subset_dataset(
    dataset: Location,
    output: Output,
    filters: Subset,
    name: str | None = None,
    layout: Literal["auto"] | LayoutName = "auto",
    workers: Workers = None,
    scratch: Output | None = None,
    verify_level: Level = "quick",
) -> DerivedResult:
    """Publish the documents of a dataset that all filters let through: by source, length, list, sample."""
    return run(filters, [dataset], output, name, layout, workers, scratch, verify_level)


@flow(name="shuffle-dataset", flow_run_name="shuffle {dataset} into {output}", persist_result=False)
def shuffle_dataset(
    dataset: Location,
    output: Output,
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0,
    split: SplitName | None = None,
    name: str | None = None,
    layout: Literal["auto"] | LayoutName = "auto",
    workers: Workers = None,
    scratch: Output | None = None,
    verify_level: Level = "quick",
) -> DerivedResult:
    """Publish the documents of a dataset in an order that the seed decides. It takes as much disk again while it runs.

    split: shuffle this one alone.
    """
    return run(Shuffle(seed=seed, split=split), [dataset], output, name, layout, workers, scratch, verify_level)


@flow(name="relayout-dataset", flow_run_name="relayout {dataset} as {layout} into {output}", persist_result=False)
def relayout_dataset(
    dataset: Location,
    output: Output,
    layout: LayoutName,
    name: str | None = None,
    workers: Workers = None,
    scratch: Output | None = None,
    verify_level: Level = "quick",
) -> DerivedResult:
    """Publish a dataset in another layout: mmap for local disks, compact for object stores, zarr2 for readers of zarr v2."""
    return run(Relayout(), [dataset], output, name, layout, workers, scratch, verify_level)
