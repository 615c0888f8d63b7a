"""The commands refresh and retokenize."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flows.commands.build import summary
from flows.commands.config_file import read_config, read_yaml
from flows.commands.running import add_running, watched
from tasks.config import BuildConfig, TokenizerConfig
from tasks.faults import faults_of

if TYPE_CHECKING:
    from flows.pipelines.build import BuildResult
    from flows.pipelines.refresh import RefreshResult
    from tasks.garbage import Policy


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""

    def add_building(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = add_running(commands, name, run, about)
        command.add_argument("dataset", metavar="CONFIG_OR_DATASET", help="a configuration file, or a dataset's path or URL")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="on top of the configuration file")
        return command

    refresh = add_building("refresh", run_refresh, "Look the sources up again; publish what they give now if it is new.")
    refresh.add_argument("--keep", type=int, metavar="N", help="then keep only N versions, and pinned ones; otherwise all")
    refresh.add_argument("--days", type=float, metavar="D", help=f"with --keep: and those in use in the last D days ({DAYS:g})")

    retokenize = add_building(
        "retokenize", run_retokenize, "Publish the same text for other tokenizers, each beside the dataset, its download reused."
    )
    retokenize.add_argument(
        "--tokenizer", action="append", required=True, metavar="NAME", help="as in a configuration; may be given several times"
    )
    retokenize.add_argument(
        "--output", metavar="PATH", help="where to; {output} and {tokenizer} are replaced (default: {output}-{tokenizer})"
    )


def run_refresh(options: argparse.Namespace) -> int:
    config = config_at(options)
    policy = policy_of(options.keep, DAYS if options.days is None else options.days) if options.keep is not None else None
    if policy is None and options.days is not None:
        raise ValueError("--days says how long versions are kept that --keep does not keep: give --keep, too")

    def alone() -> RefreshResult:
        from flows.pipelines.refresh import refresh
        from flows.runners.threads import threads_of

        with threads_of(config) as runner:
            return refresh(config, runner, policy)

    def with_server() -> RefreshResult:
        from flows.refresh import refresh_dataset

        keep, days = (policy.keep_versions, policy.grace_days) if policy else (None, DAYS)
        result: RefreshResult = refresh_dataset(config, keep_versions=keep, grace_days=days)
        return result

    result = watched(options, alone, with_server)
    if options.json:
        print(result.model_dump_json(indent=2))
        return 0
    from tasks.output.changes import as_text

    print(result.headline)
    if result.outcome == "published":
        print("\n".join(as_text(result.changes)))
    for version in result.removed:
        print(f"  removed    version {version}")
    if result.build is not None:
        print(summary(result.build).partition("\n")[2])  # its first line says less than the headline
    return 0


def run_retokenize(options: argparse.Namespace) -> int:
    is_file = os.path.isfile(options.dataset)
    if options.set and not is_file:
        raise ValueError("--set changes a configuration file, but a dataset is given")
    dataset: BuildConfig | str = read_config(Path(options.dataset), options.set) if is_file else options.dataset
    tokenizers = [read_tokenizer(text) for text in options.tokenizer]

    def alone() -> list[BuildResult]:
        from flows.pipelines.publish import scratch_of
        from flows.pipelines.retokenize import BESIDE, plan_reruns, read_text, rerun
        from flows.runners.threads import threads_of
        from tasks.output.leases import sharing

        base, configs = plan_reruns(dataset, tokenizers, BESIDE if options.output is None else options.output)
        with sharing(scratch_of(configs[0])), threads_of(base.config) as runner:
            text = read_text(base, configs[0], runner)
            return [rerun(config, text, runner) for config in configs]

    def with_server() -> list[BuildResult]:
        from flows.pipelines.retokenize import BESIDE
        from flows.retokenize import retokenize_dataset

        output = BESIDE if options.output is None else options.output
        results: list[BuildResult] = retokenize_dataset(dataset, list(tokenizers), output)
        return results

    results = watched(options, alone, with_server)
    if options.json:
        print(json.dumps([result.model_dump(mode="json") for result in results], indent=2))
    else:
        print("\n".join(summary(result) for result in results))
    return 0


def config_at(options: argparse.Namespace) -> BuildConfig:
    """The configuration in a file, or that of a dataset's latest version."""
    if os.path.isfile(options.dataset):
        return read_config(Path(options.dataset), options.set)
    if options.set:
        raise ValueError("--set changes a configuration file, but a dataset is given")
    from flows.pipelines.retokenize import config_of
    from tasks.output.versions import at_dataset

    return config_of(*at_dataset(options.dataset))


def read_tokenizer(text: str) -> TokenizerConfig:
    """A tokenizer as a configuration has it: a name, or a mapping in YAML."""
    value = read_yaml(text, f"--tokenizer {text}") if text.lstrip().startswith("{") else {"name": text}
    try:
        return TokenizerConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"--tokenizer {text}: {'; '.join(faults_of(error, TokenizerConfig))}") from error


KEEP, DAYS = 3, 7.0


def policy_of(keep: int, days: float) -> Policy:
    from tasks.garbage import Policy

    if keep < 1:
        raise ValueError(f"--keep {keep}: at least one version is kept, the latest")
    if not days >= 0:
        raise ValueError(f"--days {days:g}: should be 0 or more")
    return Policy(keep_versions=keep, grace_days=days)
