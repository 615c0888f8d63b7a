"""The commands build and plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flat_tokens.manifest import SPLITS
from flat_tokens.tools.terminal import duration, size
from flows.commands.config_file import read_config
from flows.commands.running import add_command, add_running, watched

if TYPE_CHECKING:
    from flows.pipelines.build import BuildResult
    from flows.pipelines.plan import Plan


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    build = add_running(commands, "build", run_build, "Build a dataset version, or go on with one, and publish it.")
    plan = add_command(
        commands,
        "plan",
        run_plan,
        "Sample the sources and tell documents, tokens, bytes, slices, time and disk. Writes no dataset.",
    )
    plan.add_argument("--quiet", action="store_true", help="log lines instead of a live display")
    for command in (build, plan):
        command.add_argument("config", type=Path, metavar="CONFIG.yaml")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. --set tokenizer=gpt2")


def run_build(options: argparse.Namespace) -> int:
    config = read_config(options.config, options.set)

    # Nothing heavy is imported before the configuration has been read.
    def alone() -> BuildResult:
        from flows.pipelines.build import build
        from flows.runners.threads import threads_of

        with threads_of(config) as runner:
            return build(config, runner)

    def with_server() -> BuildResult:
        from flows.build import build_dataset

        result: BuildResult = build_dataset(config)
        return result

    result = watched(options, alone, with_server)
    print(result.model_dump_json(indent=2) if options.json else summary(result))
    return 0


def run_plan(options: argparse.Namespace) -> int:
    config = read_config(options.config, options.set)
    from flows.pipelines.plan import plan  # heavy: after the configuration has been read

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
    """Result of a dry run, for people."""
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
