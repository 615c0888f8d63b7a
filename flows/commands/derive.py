"""The commands that make datasets of datasets, merge, append, subset, shuffle, relayout, and other formats: export, import."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.formats import FORMATS
from flat_tokens.manifest import EVERY_SPLIT
from flat_tokens.stores.local import real_path
from flat_tokens.tools.arguments import WRITING_ONLY, add_option_flags, given_options
from flat_tokens.tools.export import add_target, export_of
from flat_tokens.tools.import_ import lost_bounds
from flat_tokens.tools.terminal import show, size
from flows.commands.build import published_text, read_tokenizer, seconds_line
from flows.commands.running import ON_REQUEST, PUBLISHING, add_command, add_layout, checked, publishing, run_with_progress

if TYPE_CHECKING:
    from pydantic import BaseModel

REASONS = {
    "split": "in the split that is dropped",
    "forgotten": "forgotten",
    "source": "of other sources",
    "too_short": "too short",
    "too_long": "too long",
    "where": "for which --where is not true",
    "not_listed": "not in the list",
    "not_sampled": "not in the sample",
}


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    add = partial(add_command, commands, options=PUBLISHING)
    merge = add("merge", run_merge, "Publish the documents of several datasets, in order.")
    append = add("append", run_append, "Publish a new version of a dataset with the documents of others after its own.")
    subset = add("subset", run_alone, "Publish the documents of a dataset that all filters let through.")
    shuffle = add("shuffle", run_alone, "Publish the documents of a dataset in an order that a seed decides.")
    relayout = add("relayout", run_alone, "Publish a dataset in another layout.")

    merge.add_argument("datasets", metavar="DATASET", nargs="+", help="an output, a version of it, or plain zarr; at last OUTPUT")
    append.add_argument("datasets", metavar="DATASET", nargs="+")
    append.add_argument("--to", required=True, metavar="OUTPUT", help="the output whose latest version they are appended to")
    for command in (merge, append):
        add_layout(command, "the first dataset's")
        consent = "also where it is not recorded that they are the same"
        command.add_argument("--allow-different-tokenizers", action="store_true", help=consent)
    for command in (subset, shuffle, relayout):
        command.add_argument("dataset", metavar="DATASET")
        command.add_argument("output", metavar="OUTPUT")
    for command in (subset, shuffle):
        add_layout(command, "the dataset's")

    source = "of this source; may be given several times"
    subset.add_argument("--source", dest="sources", action="append", metavar="NAME", help=source)
    subset.add_argument("--min-tokens", type=int, metavar="N")
    subset.add_argument("--max-tokens", type=int, metavar="N")
    where = "for which it is true: an expression of tokens, source, file, row, key; see docs/tools.md"
    subset.add_argument("--where", metavar="EXPRESSION", help=where)
    keys = "whose keys are in this file: 16 hexadecimal digits a line, or .npy"
    subset.add_argument("--keys", dest="key_list", metavar="FILE", help=keys)
    subset.add_argument("--ids", dest="id_list", metavar="FILE", help="whose ids are in this file, one a line")
    subset.add_argument("--fraction", type=float, metavar="F", help="a sample; a smaller fraction is within a larger one")
    subset.add_argument("--count", type=int, metavar="N", help="a sample of this many documents of each split")
    subset.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws another sample")
    subset.add_argument("--split", choices=EVERY_SPLIT, help="filter this split alone; the others stay as they are")
    subset.add_argument("--drop", choices=EVERY_SPLIT, help="leave this split empty")

    shuffle.add_argument("--seed", type=int, default=0, metavar="N")
    shuffle.add_argument("--split", choices=EVERY_SPLIT, help="shuffle this split alone")

    relayout.add_argument("--layout", choices=LAYOUTS, required=True, help="how the version is stored")

    export = add_command(commands, "export", run_export, "Write a dataset in another format.", ON_REQUEST)
    export.add_argument("dataset", metavar="DATASET")
    export.add_argument("output", metavar="OUT", help="an empty directory, or one where this export was begun")
    add_target(export)

    imported = add("import", run_import, "Publish the tokens of files in another format.")
    imported.add_argument("path", metavar="PATH", help="a file, a directory, or the prefix that several files share")
    imported.add_argument("output", metavar="OUTPUT")
    add_layout(imported, "mmap on local disks, compact elsewhere")
    imported.add_argument("--format", choices=FORMATS, metavar="FORMAT", help="where the content does not tell it")
    imported.add_argument("--tokenizer", metavar="NAME", help="whose tokens they are, for the record; as in a configuration")
    imported.add_argument("--validation-fraction", type=float, metavar="F", help="drawn by key, instead of the files' own splits")
    imported.add_argument("--split-seed", type=int, default=0, metavar="N")
    add_option_flags(imported, except_for=WRITING_ONLY)

    publish = add_command(commands, "publish", run_publish, "Publish a version on the Hugging Face hub.", ON_REQUEST)
    publish.add_argument("dataset", metavar="DATASET")
    publish.add_argument(
        "--to", nargs=2, required=True, metavar=("hub", "ORG/NAME"), help="the repository; made if it is not there"
    )
    publish.add_argument(
        "--form", choices=("parquet", "zarr"), default="parquet", help="token ids in lists, or the version as it is"
    )
    publish.add_argument("--private", action=argparse.BooleanOptionalAction, help="for whom the repository is made")
    publish.add_argument("--licence", metavar="ID", help="such as cc-by-4.0 (default: the configuration's)")
    publish.add_argument("--scratch", metavar="DIR", help="for files on their way")


def run_merge(options: argparse.Namespace) -> None:
    *datasets, output = options.datasets
    if not datasets:
        raise ValueError("name the datasets and, at last, the output: merge DATASET [DATASET ...] OUTPUT")
    run_request(options, "merge", datasets, output)


def run_append(options: argparse.Namespace) -> None:
    check_output_of_append(options.to, options.datasets)
    run_request(options, "merge", [options.to, *options.datasets], options.to)


def check_output_of_append(to: str, datasets: list[str]) -> None:
    """ValueError, with the command that does instead, where *to* is not an output with a latest version."""
    from flat_tokens.manifest import POINTER
    from flat_tokens.stores.store import Store
    from tasks.locations import plain_location
    from tasks.output.paths import VERSIONS
    from tasks.output.pointer import MARKERS

    root = Store.at(plain_location(to))
    if root.exists(POINTER):
        return
    merge = f"python -m flows merge {shlex.join([to, *datasets])} OUTPUT"
    within = Store.at(real_path(root.root)) if root.is_local else root
    output, _, _ = within.url.rpartition(f"/{VERSIONS}/")
    if output and Store.at(output).exists(POINTER):
        raise ValueError(f"{to} is one version, which never changes. Append to the output that it belongs to: --to {output}")
    if any(root.exists(marker) for marker in MARKERS):
        raise ValueError(
            f"{to} is a dataset by itself: it has no {POINTER}, so no new versions go there, and a dataset never "
            f"changes. Publish both as a new one: {merge}"
        )
    raise ValueError(
        f"{to} has no {POINTER}: nothing was published there that could be appended to. Publish the first version: "
        f"python -m flows merge {shlex.join([*datasets, to])}"
    )


def run_alone(options: argparse.Namespace) -> None:
    """Run an operation on one dataset."""
    run_request(options, options.command, [options.dataset], options.output)


def run_request(options: argparse.Namespace, operation: str, inputs: list[str], output: str) -> None:
    """Run an operation and print its result."""
    from tasks.derive.request import DeriveRequest, Merge, Relayout, Shuffle, Subset

    kinds: dict[str, type[BaseModel]] = {"merge": Merge, "subset": Subset, "shuffle": Shuffle, "relayout": Relayout}
    given = {name: value for name, value in vars(options).items() if name in kinds[operation].model_fields}
    settings = {"operation": operation, **given}
    request = checked(DeriveRequest, operation=settings, inputs=inputs, output=output, **publishing(options))

    from flows.pipelines.derive import derive
    from flows.runners.threads import Threads

    flow = "flows.derive:merge_datasets" if operation == "merge" else f"flows.derive:{operation}_dataset"
    parameters: dict[str, Any] = request.model_dump(include={"output", "name", "layout", "workers", "scratch", "verify_level"})
    parameters |= {"datasets": list(request.inputs)} if operation == "merge" else {"dataset": request.inputs[0]}
    parameters |= {"filters": request.operation} if operation == "subset" else request.operation.model_dump(exclude={"operation"})
    result = run_with_progress(options, Threads(request.workers), partial(derive, request), flow, **parameters)
    documents = result.totals["documents"]
    skipped = [f"{count:,} {REASONS[reason]}" for reason, count in documents["skipped"].items()]
    not_found = [f"  not found  {result.not_found:,} of the list belong to no document"] if result.not_found else []
    counts = [f"{documents['written']:,} of {documents['read']:,}", *skipped]
    show(options, result.model_dump(mode="json"), published_text(result, "published", counts, particular=not_found))


def run_export(options: argparse.Namespace) -> None:
    from tasks.locations import plain_location, readable, writable

    splits = None if options.split is None else (options.split,)
    dataset, output = readable(plain_location(options.dataset)), writable(plain_location(options.output))
    request = export_of(dataset, options.to, given_options(options), splits)

    from flows.pipelines.export import export
    from flows.runners.threads import Threads

    settings = (dataset, output, options.to, given_options(options), options.split, options.workers)
    pipeline = partial(export, request, output)
    result = run_with_progress(options, Threads(options.workers), pipeline, "flows.export:export_dataset", *settings)
    files = f"{size(result.byte_count)} in {len(result.objects):,} files"
    if result.was_done:
        lines = [f"nothing to do: {result.path} is this export, {files}"]
    else:
        reused = [f"  reused     {result.reused:,} of {result.parts:,} parts"] if result.reused else []
        lines = [f"exported to {result.path}", f"  {result.format:10} {files}", *reused, seconds_line(result.seconds)]
    if result.loses_loss_mask:
        lines.append(f"The loss mask is not exported: {result.format} has no place for it. All tokens count there.")
    show(options, result.model_dump(mode="json"), lines)


def run_publish(options: argparse.Namespace) -> None:
    from flows.pipelines.to_hub import HubRequest, publish_to_hub
    from flows.runners.threads import Threads

    where, repo = options.to
    if where != "hub":
        raise ValueError(f"--to {where} {repo}: datasets are published on the hub: --to hub ORG/NAME")
    given = {name: getattr(options, name) for name in ("dataset", "form", "private", "licence", "workers", "scratch")}
    request = checked(HubRequest, repo=repo, **given)
    pipeline = partial(publish_to_hub, request)
    result = run_with_progress(
        options, Threads(request.workers), pipeline, "flows.publish_dataset:publish_dataset", **request.model_dump()
    )
    show(options, result.model_dump(mode="json"), [result.headline, *([seconds_line(result.seconds)] if result.seconds else [])])


def run_import(options: argparse.Namespace) -> None:
    from tasks.derive.request import ImportRequest

    request = checked(
        ImportRequest,
        path=options.path,
        output=options.output,
        format=options.format,
        options=given_options(options),
        tokenizer=read_tokenizer(options.tokenizer) if options.tokenizer else None,
        validation_fraction=options.validation_fraction,
        split_seed=options.split_seed,
        **publishing(options),
    )

    from flows.pipelines.import_ import import_files
    from flows.runners.threads import Threads

    flow = "flows.import_dataset:import_dataset"
    result = run_with_progress(options, Threads(request.workers), partial(import_files, request), flow, request)
    reused = [f"  reused     {result.parts_reused:,} of {result.parts:,} parts"] if result.parts_reused else []
    lines = published_text(result, f"imported from {result.format}", (), particular=reused)
    show(options, result.model_dump(mode="json"), lines)
    if hint := lost_bounds(result.format, request.options):
        print(f"import: {hint}", file=sys.stderr)
