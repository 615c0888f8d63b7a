"""The commands that make datasets of datasets: merge, append, subset, shuffle, relayout."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import TYPE_CHECKING, Any

from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.manifest import SPLITS
from flat_tokens.tools.terminal import size
from flows.commands.build import seconds_line, split_lines
from flows.commands.running import add_layout, add_publishing, checked, publishing, watched

if TYPE_CHECKING:
    from flows.pipelines.derive import DerivedResult
    from tasks.derive.request import DeriveRequest


REASONS = {
    "split": "in the split that is dropped",
    "source": "of other sources",
    "too_short": "too short",
    "too_long": "too long",
    "not_listed": "not in the list",
    "not_sampled": "not in the sample",
}


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    merge = add_publishing(commands, "merge", run_merge, "Publish the documents of several datasets, one behind the other.")
    merge.add_argument("datasets", metavar="DATASET", nargs="+", help="an output, a version of it, or plain zarr; at last OUTPUT")
    append = add_publishing(
        commands, "append", run_append, "Publish a new version of a dataset with the documents of others behind its own."
    )
    append.add_argument("datasets", metavar="DATASET", nargs="+")
    append.add_argument("--to", required=True, metavar="OUTPUT", help="the output whose latest version they are appended to")
    for command in (merge, append):
        add_layout(command, "the first dataset's")
        command.add_argument(
            "--allow-different-tokenizers", action="store_true", help="also where it is not recorded that they are the same"
        )

    subset = add_publishing(commands, "subset", run_subset, "Publish the documents of a dataset that all filters let through.")
    subset.add_argument("dataset", metavar="DATASET")
    subset.add_argument("output", metavar="OUTPUT")
    add_layout(subset, "the dataset's")
    subset.add_argument(
        "--source", dest="sources", action="append", metavar="NAME", help="of this source; may be given several times"
    )
    subset.add_argument("--min-tokens", type=int, metavar="N")
    subset.add_argument("--max-tokens", type=int, metavar="N")
    subset.add_argument(
        "--keys", dest="key_list", metavar="FILE", help="whose keys are in this file: 16 hexadecimal digits a line, or .npy"
    )
    subset.add_argument("--ids", dest="id_list", metavar="FILE", help="whose ids are in this file, one a line")
    subset.add_argument("--fraction", type=float, metavar="F", help="a sample; a smaller fraction is within a larger one")
    subset.add_argument("--count", type=int, metavar="N", help="a sample of so many documents of each split")
    subset.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws another sample")
    subset.add_argument("--split", choices=SPLITS, help="filter this split alone; the other one stays as it is")
    subset.add_argument("--drop", choices=SPLITS, help="leave this split empty")

    shuffle = add_publishing(
        commands, "shuffle", run_shuffle, "Publish the documents of a dataset in an order that a seed decides."
    )
    shuffle.add_argument("dataset", metavar="DATASET")
    shuffle.add_argument("output", metavar="OUTPUT")
    add_layout(shuffle, "the dataset's")
    shuffle.add_argument("--seed", type=int, default=0, metavar="N")
    shuffle.add_argument("--split", choices=SPLITS, help="shuffle this split alone")

    relayout = add_publishing(commands, "relayout", run_relayout, "Publish a dataset in another layout.")
    relayout.add_argument("dataset", metavar="DATASET")
    relayout.add_argument("output", metavar="OUTPUT")
    relayout.add_argument("--layout", choices=LAYOUTS, required=True, help="how the version is stored")


def run_merge(options: argparse.Namespace) -> int:
    *datasets, output = options.datasets
    if not datasets:
        raise ValueError("name the datasets and, at last, the output: merge DATASET [DATASET ...] OUTPUT")
    return derive(options, "merge", datasets, output, allow_different_tokenizers=options.allow_different_tokenizers)


def run_append(options: argparse.Namespace) -> int:
    check_output_of_append(options.to, options.datasets)
    datasets = [options.to, *options.datasets]
    return derive(options, "merge", datasets, options.to, allow_different_tokenizers=options.allow_different_tokenizers)


def check_output_of_append(to: str, datasets: list[str]) -> None:
    """ValueError, with the command that does instead, where *to* is no output with a latest version."""
    from flat_tokens.manifest import POINTER
    from flat_tokens.stores.store import Store
    from tasks.locations import plain_location
    from tasks.output.paths import VERSIONS
    from tasks.output.pointer import MARKERS

    root = Store.at(plain_location(to))
    if root.exists(POINTER):
        return
    merge = f"python -m flows merge {shlex.join([to, *datasets])} OUTPUT"
    within = Store.at(os.path.realpath(root.root)) if root.is_local else root
    output, _, _ = within.url.rpartition(f"/{VERSIONS}/")
    if output and Store.at(output).exists(POINTER):
        raise ValueError(f"{to} is one version, which never changes. Append to the output that it belongs to: --to {output}")
    if any(root.exists(marker) for marker in MARKERS):
        raise ValueError(
            f"{to} is a dataset by itself: it has no {POINTER}, so it is no output that gets new versions, and a dataset never "
            f"changes. Publish both as a new one: {merge}"
        )
    raise ValueError(
        f"{to} has no {POINTER}: nothing was published there that could be appended to. Publish the first version: "
        f"python -m flows merge {shlex.join([*datasets, to])}"
    )


def run_subset(options: argparse.Namespace) -> int:
    names = ("sources", "min_tokens", "max_tokens", "key_list", "id_list", "fraction", "count", "seed", "split", "drop")
    return derive(options, "subset", [options.dataset], options.output, **{name: getattr(options, name) for name in names})


def run_shuffle(options: argparse.Namespace) -> int:
    return derive(options, "shuffle", [options.dataset], options.output, seed=options.seed, split=options.split)


def run_relayout(options: argparse.Namespace) -> int:
    return derive(options, "relayout", [options.dataset], options.output)


def derive(options: argparse.Namespace, operation: str, inputs: list[str], output: str, **settings: Any) -> int:
    """Run an operation and print its result."""
    from tasks.derive.request import DeriveRequest

    request = checked(
        DeriveRequest,
        operation={"operation": operation, **settings},
        inputs=inputs,
        output=output,
        layout=options.layout or "auto",
        **publishing(options),
    )

    def alone() -> DerivedResult:
        from flows.pipelines.derive import derive
        from flows.runners.threads import Threads

        with Threads(request.workers) as runner:
            return derive(request, runner)

    result = watched(options, alone, lambda: as_flow(request))
    print(result.model_dump_json(indent=2) if options.json else derived_text(result))
    return 0


def as_flow(request: DeriveRequest) -> DerivedResult:
    """Run an operation as the Prefect flow that there is for it."""
    from flows.derive import merge_datasets, relayout_dataset, shuffle_dataset, subset_dataset
    from tasks.derive.request import Merge, Shuffle, Subset

    told: dict[str, Any] = request.model_dump(include={"output", "name", "layout", "workers", "scratch", "verify_level"})
    operation, first = request.operation, request.inputs[0]
    if isinstance(operation, Merge):
        merged: DerivedResult = merge_datasets(
            list(request.inputs), allow_different_tokenizers=operation.allow_different_tokenizers, **told
        )
        return merged
    if isinstance(operation, Subset):
        chosen: DerivedResult = subset_dataset(first, filters=operation, **told)
        return chosen
    if isinstance(operation, Shuffle):
        shuffled: DerivedResult = shuffle_dataset(first, seed=operation.seed, split=operation.split, **told)
        return shuffled
    relaid: DerivedResult = relayout_dataset(first, **told)
    return relaid


def derived_text(result: DerivedResult) -> str:
    """Result of an operation, for people."""
    documents = result.totals["documents"]
    lines = [
        "nothing to do: this version is published" if result.was_published else "published",
        f"  dataset    {result.path}  (number {result.sequence})",
        *split_lines(result.totals),
        f"  documents  {documents['written']:,} of {documents['read']:,}"
        + "".join(f", {count:,} {REASONS[reason]}" for reason, count in documents["skipped"].items())
        + (f", {documents['repeated_keys']:,} with the key of another" if documents["repeated_keys"] else ""),
        f"  size       {size(result.byte_count)} as {result.layout}",
    ]
    if result.not_found:
        lines.append(f"  not found  {result.not_found:,} of the list are no document's")
    return "\n".join([*lines, seconds_line(result.seconds)])
