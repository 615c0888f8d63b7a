"""The commands build and plan."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from flat_tokens.manifest import SPLITS
from flat_tokens.tools.terminal import duration
from flows.commands.display import display, log_progress, size
from flows.commands.server import looked_after, prefect_server
from tasks.config import BuildConfig

if TYPE_CHECKING:
    from flows.pipelines.build import BuildResult
    from flows.pipelines.plan import Plan


if TYPE_CHECKING:
    pass


def run_build(config: BuildConfig, options: argparse.Namespace) -> int:
    server = None if options.no_server else prefect_server()
    live = not options.quiet and sys.stderr.isatty()
    if server and not options.quiet:
        # The server gets every line of the tasks all the same; the terminal is for the display.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    with display(live) if not options.quiet else log_progress():
        result = build_with_server(config) if server else build_alone(config)
    if options.json:
        print(result.model_dump_json(indent=2))
    else:
        print(summary(result))
    return 0


def build_alone(config: BuildConfig) -> BuildResult:
    from flows.pipelines.build import build
    from flows.runners.threads import threads_of

    with threads_of(config) as runner:
        return build(config, runner)


def build_with_server(config: BuildConfig) -> BuildResult:
    with looked_after():
        from flows.build import build_dataset

        result: BuildResult = build_dataset(config)
    return result


def run_plan(config: BuildConfig, options: argparse.Namespace) -> int:
    from flows.pipelines.plan import plan

    made = plan(config)
    print(made.model_dump_json(indent=2) if options.json else plan_text(made))
    return 0


def summary(result: BuildResult) -> str:
    """The final summary of a build."""
    documents = result.totals["documents"]
    lines = [
        "nothing to do: this version is published" if result.was_published else "published",
        f"  dataset    {result.path}  (number {result.sequence})",
        *(
            f"  {split:10} {result.totals[split]['token_count']:,} tokens in {result.totals[split]['seq_count']:,} sequences, "
            f"largest id {result.totals[split]['max_token_id']:,}"
            for split in ("train", "validation")
        ),
        f"  documents  {documents['read']:,} read, {documents['written']:,} written"
        + "".join(f", {count:,} skipped: {reason}" for reason, count in documents["skipped"].items())
        + "".join(f", {count:,} mended: {reason}" for reason, count in documents["replaced"].items())
        + (f", {documents['repeated_keys']:,} with the key of another" if documents["repeated_keys"] else ""),
        f"  size       {size(result.byte_count)} as {result.layout}, from {size(documents['text_bytes'])} of text",
    ]
    if not result.was_published:
        lines.append(f"  reused     {result.slices_reused} of {result.slices} slices")
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in result.seconds.items())
    lines.append(f"  seconds    {sum(result.seconds.values()):.1f} ({stages})")
    return "\n".join(lines)


def plan_text(made: Plan) -> str:
    """What a dry run found, for people."""
    about = "" if made.exact else "about "
    lines = [
        f"  version    {made.version or 'not known before every file is fetched'}"
        + (" (published: a build has nothing to do)" if made.is_published else ""),
        f"  files      {made.files:,}, {size(made.file_bytes)}",
        f"  documents  about {made.documents:,}",
        f"  tokens     about {made.tokens:,} ({made.bytes_per_token:.2f} bytes of text a token, by {made.engine} engine)",
        f"  text       {about}{size(made.text_bytes)} in {about}{made.slices:,} slices, {made.slices_stored:,} of them stored",
        f"  output     about {size(made.dataset_bytes)} as {made.layout}",
        f"  disk       about {size(made.disk_bytes)} at the output, {size(made.disk_free)} free"
        if made.disk_free is not None
        else f"  disk       about {size(made.disk_bytes)} at the output",
        f"  time       about {duration(made.seconds)} with {made.workers} workers",
    ]
    return "\n".join(lines)


def split_lines(totals: dict[str, Any]) -> list[str]:
    return [
        f"  {split:10} {totals[split]['token_count']:,} tokens in {totals[split]['seq_count']:,} sequences, "
        f"largest id {totals[split]['max_token_id']:,}"
        for split in SPLITS
    ]


def seconds_line(seconds: dict[str, float]) -> str:
    stages = ", ".join(f"{stage} {took:.1f}" for stage, took in seconds.items())
    return f"  seconds    {sum(seconds.values()):.1f} ({stages})"
