"""The commands that make datasets of datasets, merge, append, subset, shuffle, relayout, and other formats: export, import."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flat_tokens.formats import FORMATS
from flat_tokens.reader import check_where
from flat_tokens.stores.local import real_path
from flat_tokens.stores.store import Store
from flat_tokens.tools.cli import WRITING_ONLY, add_option_flags, existing_place, existing_prefix, given_options
from flat_tokens.tools.export import add_target, described, export_of, lines, lost_bounds
from flat_tokens.tools.terminal import plural, show
from flows.commands.build import published_text, read_tokenizer, seconds_line
from flows.commands.running import add_command, add_fields, checked_request, given_fields, run_request, run_with_progress

if TYPE_CHECKING:
    from tasks.models import Model

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


OUTPUT = "\nOUTPUT  where the version is published"
DATASET = "\nDATASET  an output, a version of it, or plain zarr"
SEVERAL = "\ndatasets=DATASET...  an output, a version of it, or plain zarr"
APPEND = f"""{SEVERAL}
--to=output OUTPUT!  the output whose latest version comes first"""
IMPORT = f"""
PATH  a file, a directory, or the prefix that several files share{OUTPUT}
--format FORMAT  where the content does not tell it
--tokenizer NAME  whose tokens they are, for the record; as in a configuration"""


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    from tasks.derive.request import HubRequest, ImportRequest, Merge, PublishSettings, Shuffle, Subset

    def add(name: str, run: Callable[[Namespace], None], about: str, listed: str, **kinds: Any) -> ArgumentParser:
        places = {"dataset": existing_place, "datasets": existing_place}
        return add_command(commands, name, run, about, listed, reports=True, **places, **kinds)

    about = "publish the documents of several datasets, in order"
    merge = add("merge", run_operation, about, SEVERAL + OUTPUT)
    append = add("append", run_append, "publish a new version of a dataset with the documents of others after its own", APPEND)
    for command in (merge, append):
        add_fields(command, Merge)
        add_fields(command, PublishSettings)
    for name, model, about in (
        ("subset", Subset, "publish the documents of a dataset that all filters let through"),
        ("shuffle", Shuffle, "publish the documents of a dataset in an order that a seed decides"),
        ("relayout", PublishSettings, "publish a dataset in another layout"),
    ):
        command = add(name, run_operation, about, DATASET + OUTPUT)
        for kind in dict.fromkeys((model, PublishSettings)):
            add_fields(command, kind, sources="source", key_list="keys", id_list="ids")

    place = "\noutput=OUT  an empty directory, or one where this export was begun"
    export = add("export", run_export, "write a dataset in another format", DATASET + place)
    add_fields(export, PublishSettings, "workers")
    add_target(export)

    imported = add(
        "import", run_import, "publish the tokens of files in another format", IMPORT, path=existing_prefix, format=FORMATS
    )
    add_fields(imported, PublishSettings)
    add_fields(imported, ImportRequest, "validation_fraction", "split_seed")
    add_option_flags(imported, except_for=WRITING_ONLY)

    publish = add("publish", run_publish, "publish a version on the Hugging Face hub", "DATASET  an output, or a version of it")
    target = "the repository, or a bucket by buckets/ORG/NAME; made if it is not there"
    publish.add_argument("--to", nargs=2, required=True, metavar=("hub", "ORG/NAME"), help=target)
    add_fields(publish, HubRequest)


def run_append(options: Namespace) -> None:
    check_output_of_append(options.output, options.datasets)
    run_derive(options, "merge", [options.output, *options.datasets])


def check_output_of_append(to: str, datasets: list[str]) -> None:
    """ValueError, with the command that does instead, if *to* is not an output with a latest version."""
    from flat_tokens.manifest import POINTER
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


def run_operation(options: Namespace) -> None:
    run_derive(options, options.command, getattr(options, "datasets", None) or [options.dataset])


def run_derive(options: Namespace, operation: str, inputs: list[str]) -> None:
    """Run an operation and print its result."""
    from tasks.derive.request import DeriveRequest, Merge, Relayout, Shuffle, Subset

    kinds: dict[str, type[Model]] = {"merge": Merge, "subset": Subset, "shuffle": Shuffle, "relayout": Relayout}
    settings = {"operation": operation, **given_fields(options, kinds[operation])}
    request = checked_request(DeriveRequest, {**given_fields(options, DeriveRequest), "operation": settings, "inputs": inputs})
    if operation == "subset" and options.where:
        check_where(Store.at(request.inputs[0]), options.where)

    from flows.pipelines.derive import derive

    result = run_request(options, request, derive, "flows.derive:derive_dataset")
    documents = result.totals["documents"]
    skipped = [f"{count:,} {REASONS[reason]}" for reason, count in documents["skipped"].items()]
    not_found = [f"  not found  {result.not_found:,} of the list belong to no document"] if result.not_found else []
    counts = [f"{documents['written']:,} of {documents['read']:,}", *skipped]
    show(options, result.model_dump(mode="json"), published_text(result, "published", counts, particular=not_found))


def run_export(options: Namespace) -> None:
    from tasks.locations import plain_location, readable, writable

    splits = None if options.split is None else (options.split,)
    dataset, output = readable(plain_location(options.dataset)), writable(plain_location(options.output))
    request = export_of(dataset, options.to, given_options(options), splits)

    from flows.pipelines.exchange import export
    from flows.runners.processes import Threads

    settings = (dataset, output, options.to, given_options(options), options.split, options.workers)
    pipeline = partial(export, request, output)
    result = run_with_progress(options, Threads(options.workers), pipeline, "flows.export:export_dataset", *settings)
    show(options, described(result), lines(result))


def run_publish(options: Namespace) -> None:
    from tasks.derive.request import HubRequest

    where, repo = options.to
    if where != "hub":
        raise ValueError(f"--to {where} {repo}: datasets are published on the hub: --to hub ORG/NAME")
    request = checked_request(HubRequest, {"repo": repo, **given_fields(options, HubRequest)})
    from flows.pipelines.to_hub import publish_to_hub

    result = run_request(options, request, publish_to_hub, "flows.publish_dataset:publish_dataset")
    show(options, result.model_dump(mode="json"), [result.headline, *([seconds_line(result.seconds)] if result.seconds else [])])


def run_import(options: Namespace) -> None:
    from tasks.derive.request import ImportRequest

    settings = {**given_fields(options, ImportRequest), "options": given_options(options)}
    if options.tokenizer:
        settings["tokenizer"] = read_tokenizer(options.tokenizer)
    request = checked_request(ImportRequest, settings)

    from flows.pipelines.exchange import import_files

    result = run_request(options, request, import_files, "flows.derive:import_dataset")
    reused = [f"  reused     {result.parts_reused:,} of {plural(result.parts, 'part')}"] if result.parts_reused else []
    lines = published_text(result, f"imported from {result.format}", (), particular=reused)
    show(options, result.model_dump(mode="json"), lines)
    if hint := lost_bounds(result.format, request.options):
        print(f"import: {hint}", file=sys.stderr)
