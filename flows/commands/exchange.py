"""The commands export and import."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from flat_tokens.formats import FORMATS
from flat_tokens.manifest import SPLITS
from flat_tokens.tools.export import add_target, export_of
from flat_tokens.tools.flags import WRITING_ONLY, add_option_flags, given_options
from flat_tokens.tools.import_ import lost_bounds
from flat_tokens.tools.terminal import size
from flows.commands.build import seconds_line, split_lines
from flows.commands.refresh import read_tokenizer
from flows.commands.running import add_layout, add_on_request, add_publishing, checked, publishing, watched

if TYPE_CHECKING:
    from flows.pipelines.export import ExportResult
    from flows.pipelines.import_ import ImportResult


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    export = add_on_request(commands, "export", run_export, "Write a dataset in another format.")
    export.add_argument("dataset", metavar="DATASET")
    export.add_argument("output", metavar="OUT", help="an empty directory, or one where this export was begun")
    add_target(export)

    imported = add_publishing(commands, "import", run_import, "Publish the tokens of files in another format.")
    imported.add_argument("path", metavar="PATH", help="a file, a directory, or the prefix that several files share")
    imported.add_argument("output", metavar="OUTPUT")
    add_layout(imported, "mmap on local disks, compact elsewhere")
    imported.add_argument("--format", choices=FORMATS, metavar="FORMAT", help="where the content does not tell it")
    imported.add_argument("--tokenizer", metavar="NAME", help="whose tokens they are, for the record; as in a configuration")
    imported.add_argument("--validation-fraction", type=float, metavar="F", help="drawn by key, instead of the files' own splits")
    imported.add_argument("--split-seed", type=int, default=0, metavar="N")
    add_option_flags(imported, except_for=WRITING_ONLY)


def run_export(options: argparse.Namespace) -> int:
    from tasks.locations import plain_location

    splits = SPLITS if options.split is None else (options.split,)
    dataset, output = plain_location(options.dataset), plain_location(options.output)
    request = export_of(dataset, options.to, given_options(options), splits)

    def alone() -> ExportResult:
        from flows.pipelines.export import export
        from flows.runners.threads import Threads

        with Threads(options.workers) as runner:
            return export(request, output, runner)

    def with_server() -> ExportResult:
        from flows.export import export_dataset

        result: ExportResult = export_dataset(dataset, output, options.to, given_options(options), options.split, options.workers)
        return result

    result = watched(options, alone, with_server)
    print(result.model_dump_json(indent=2) if options.json else exported_text(result))
    return 0


def exported_text(result: ExportResult) -> str:
    """Result of an export, for people."""
    files = f"{size(result.byte_count)} in {len(result.objects):,} files"
    if result.was_done:
        return f"nothing to do: {result.path} is this export, {files}"
    reused = f"\n  reused     {result.reused:,} of {result.parts:,} parts" if result.reused else ""
    return f"exported to {result.path}\n  {result.format:10} {files}{reused}\n{seconds_line(result.seconds)}"


def run_import(options: argparse.Namespace) -> int:
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
        layout=options.layout or "auto",
        **publishing(options),
    )

    def alone() -> ImportResult:
        from flows.pipelines.import_ import import_files
        from flows.runners.threads import Threads

        with Threads(request.workers) as runner:
            return import_files(request, runner)

    def with_server() -> ImportResult:
        from flows.import_dataset import import_dataset

        result: ImportResult = import_dataset(request)
        return result

    result = watched(options, alone, with_server)
    print(result.model_dump_json(indent=2) if options.json else imported_text(result))
    if hint := lost_bounds(result.format, request.options):
        print(f"import: {hint}", file=sys.stderr)
    return 0


def imported_text(result: ImportResult) -> str:
    """Result of an import, for people."""
    lines = [
        "nothing to do: this version is published" if result.was_published else f"imported from {result.format}",
        f"  dataset    {result.path}  (number {result.sequence})",
        *split_lines(result.totals),
        f"  size       {size(result.byte_count)} as {result.layout}",
    ]
    if result.parts_reused:
        lines.append(f"  reused     {result.parts_reused:,} of {result.parts:,} parts")
    return "\n".join([*lines, seconds_line(result.seconds)])
