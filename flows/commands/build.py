"""The commands that build of text, build, plan, refresh, retokenize, and the configuration files that they read: YAML."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flat_tokens.stores.local import kind_of
from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS
from flat_tokens.tools.cli import existing_place
from flat_tokens.tools.terminal import duration, line, plural, show, size
from flows.commands.running import add_command, checked_request, login_without_prefect, prefect_server, run_with_progress

if TYPE_CHECKING:
    from flows.pipelines.build import BuildResult
    from flows.pipelines.plan import Plan
    from flows.pipelines.publish import PublishResult
    from tasks.config import BuildConfig, TokenizerConfig
    from tasks.garbage import Policy
    from tasks.output.pointer import Candidate

KEEP, DAYS = 3, 7.0
NEAR = 0.02
"""A figure that is off by such a share at most is reported as one number, else as two between which it lies."""


ANYWAY = """
--publish-anyway REASON  publish the version whatever its gates say; the reason is recorded"""
CONFIG = """
config=CONFIG.yaml  a configuration file
--set KEY=VALUE...  e.g. --set tokenizer=gpt2"""
DATASET = """
dataset=CONFIG_OR_DATASET  a configuration file, or a dataset's path or URL
--set KEY=VALUE...  on top of the configuration file
--trust-records  read what a dataset's own record names: its sources, its tokenizer"""
REFRESH = f"""{DATASET}{ANYWAY}
--keep N  then keep only N versions, and pinned ones; otherwise all
--days D  with --keep: and those in use in the last D days ({DAYS:g})"""
RETOKENIZE = f"""{DATASET}
--tokenizer NAME...!  as in a configuration; may be given several times
--output PATH  where to; {{output}} and {{tokenizer}} are replaced (default: {{output}}-{{tokenizer}})"""


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    about = "build a dataset version, or go on with one, and publish it"
    add_command(commands, "build", run_build, about, ANYWAY + CONFIG, reports=True, config=existing_place, set=str)
    about = "sample the sources and tell documents, tokens, bytes, slices, time and disk; no dataset is written"
    add_command(commands, "plan", run_plan, about, CONFIG, config=existing_place, set=str)
    about, kinds = "look the sources up again; publish what they give now if it is new", {"dataset": existing_place, "set": str}
    add_command(commands, "refresh", run_refresh, about, REFRESH, reports=True, keep=int, days=float, **kinds)
    about = "publish the same text for other tokenizers, each next to the dataset, its download reused"
    add_command(commands, "retokenize", run_retokenize, about, RETOKENIZE, reports=True, **kinds)


def run_build(options: Namespace) -> None:
    config = checked_config(options.config, options.set)
    from flows.pipelines.build import build  # heavy: after the configuration has been read
    from flows.runners.chosen import runner_without_server

    anyway, here = options.publish_anyway, runner_without_server(config)
    result = (nothing_to_do(options, config) if anyway is None else None) or run_with_progress(
        options, here, partial(build, config, publish_anyway=anyway), "flows.build:build_dataset", config, anyway
    )
    show(options, result.model_dump(mode="json"), summary(result))


def nothing_to_do(options: Namespace, config: BuildConfig) -> BuildResult | None:
    """The result of a build that has nothing to do, recorded with the Prefect server that is set up. None if there is or may be
    something to do, or if only Prefect can report to the server: then ``run_with_progress`` does it.
    """
    from tasks.locations import CREDENTIALS  # help and mistakes need neither pydantic nor stores

    server = None if options.no_server else prefect_server()
    login = login_without_prefect()
    if server is None or login is None or os.environ.get(CREDENTIALS):
        return None
    from flows.pipelines.build import result_if_up_to_date  # heavy: after the configuration has been read
    from flows.runners.processes import Threads
    from flows.watch.api import client_of, is_of_this_release
    from flows.watch.summaries import record

    with client_of(server, login) as client:
        if not is_of_this_release(client):
            return None
        try:
            with Threads(config.workers) as threads:
                result = result_if_up_to_date(config, threads)
        except Exception:  # noqa: BLE001  the flow meets it again, where people see it
            return None
        return result if result is not None and record(client, config, result) else None


def run_plan(options: Namespace) -> None:
    config = checked_config(options.config, options.set)
    from flows.pipelines.plan import plan  # heavy: after the configuration has been read

    made = plan(config)
    show(options, made.model_dump(mode="json"), plan_text(made))


def run_refresh(options: Namespace) -> None:
    dataset = dataset_at(options)
    policy = policy_of(options.keep, DAYS if options.days is None else options.days) if options.keep is not None else None
    if policy is None and options.days is not None:
        raise ValueError("--days says how long versions are kept that --keep does not keep: give --keep, too")

    from flows.pipelines.refresh import refresh
    from flows.runners.chosen import runner_without_server
    from tasks.config import BuildConfig
    from tasks.output.changes import as_text

    config = dataset if isinstance(dataset, BuildConfig) else trusted_config(options, dataset)
    settings = {"keep_versions": policy.keep_versions, "grace_days": policy.grace_days} if policy else {}
    pipeline = partial(refresh, config, policy=policy, publish_anyway=options.publish_anyway)
    flow, anyway = "flows.refresh:refresh_dataset", {"publish_anyway": options.publish_anyway}
    result = run_with_progress(options, runner_without_server(config), pipeline, flow, config, **settings, **anyway)
    lines = [result.headline, *(as_text(result.changes) if result.outcome in ("published", "held", "still held") else [])]
    lines += [f"  removed    version {version}" for version in result.removed]
    lines += summary(result.build)[1:] if result.build else []  # its first line says less than the headline
    show(options, result.model_dump(mode="json"), lines)


def run_retokenize(options: Namespace) -> None:
    dataset = dataset_at(options)
    tokenizers = [read_tokenizer(text) for text in options.tokenizer]
    from flows.pipelines.retokenize import BESIDE, reruns
    from flows.runners.chosen import runner_without_server

    if isinstance(dataset, str):
        trusted_config(options, dataset)
    settings = (dataset, tokenizers, BESIDE if options.output is None else options.output)

    def rerun_all(_: None) -> list[BuildResult]:
        with reruns(*settings, runner_without_server) as (configs, rerun):
            return list(map(rerun, configs))

    results = run_with_progress(options, contextlib.nullcontext(), rerun_all, "flows.retokenize:retokenize_dataset", *settings)
    lines = [line for result in results for line in summary(result)]
    show(options, [result.model_dump(mode="json") for result in results], lines)


def dataset_at(options: Namespace) -> BuildConfig | str:
    """The configuration in a file, or the place of a dataset."""
    if kind_of(options.dataset) == "file":
        return checked_config(options.dataset, options.set)
    if options.set:
        raise ValueError("--set changes a configuration file, but a dataset is given")
    return str(options.dataset)


def trusted_config(options: Namespace, dataset: str) -> BuildConfig:
    """The settings in a dataset's own record (``origins/``), and what they read on standard error. ValueError unless roots bind
    that, or the user consents to it.
    """
    from flows.pipelines.retokenize import config_of
    from tasks.output.versions import at_dataset

    config = config_of(*at_dataset(dataset))
    places = {one.called: one.place for one in config.sources}
    for what, place in {**places, "tokenizer": config.tokenizer.name, "scratch": config.scratch}.items():
        if place:
            print(line(f"{options.command}: the record of {dataset} names {what}: {place}"), file=sys.stderr)
    roots = (INPUT_ROOTS, OUTPUT_ROOTS) if config.scratch else (INPUT_ROOTS,)  # the models check what is below them
    if not options.trust_records and not all(map(os.environ.get, roots)):
        raise ValueError(
            f"{dataset}: what its own record names is read if you trust who made it: --trust-records. Or give a configuration "
            f"file, or set {' and '.join(roots)}."
        )
    return config


DEEPEST_YAML = 100
"""Brackets within brackets; a configuration has four."""


class ConfigLoader(yaml.SafeLoader):
    """YAML in which no key stands twice in a mapping: the last of them would win silently. A value that does not fit its
    tag, such as ``!!bool x``, is an error with its line.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.constructor.ConstructorError(None, None, f"a value does not fit {tag}", node.start_mark) from error

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803  the name in SafeLoader
        if self.flow_level >= DEEPEST_YAML:  # what is left would take the square of its length
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(f"the key {key.value!r} is in line {lines[key.value]} and again in line {line}; remove one")
            lines[key.value] = line
        return node


def read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. ValueError says what is wrong with *what*, and in which line."""
    try:
        return yaml.load(text, ConfigLoader)  # noqa: S506  a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{what} is not YAML: {error.problem or error.context}{where}") from error
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deep") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is not YAML: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def checked_config(path: str, settings: list[str]) -> BuildConfig:
    """Read a configuration, and check what needs no work: local paths and the tokenizer's name."""
    config = read_config(Path(path), settings)
    from tasks.download.sources import check_here

    check_here(config)
    return config


def read_config(path: Path, settings: list[str]) -> BuildConfig:
    """The configuration in a YAML file with settings from the command line on top. ValueError says all that is wrong."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    value = read_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a mapping of settings")
    for setting in settings:
        key, equals, new = setting.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise ValueError(f"--set {key}: write KEY=VALUE, such as --set tokenizer=gpt2 or --set source.text_column=body")
        set_at(value, names, read_yaml(new, f"--set {key}: the value"))
    from pydantic import ValidationError

    from tasks.config import BuildConfig
    from tasks.faults import faults_of

    try:
        return BuildConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(faults_of(error, BuildConfig, 'source' in value))}") from error


def set_at(value: Any, path: list[str], new: Any) -> None:
    """Set ``value[path[0]][path[1]]...``; numbers are places in a list, a name alone becomes a mapping if need be."""
    if path[0] == "sources" and "source" in value:
        value["sources"] = [value.pop("source")]
    whole = ".".join(path)
    for here, following in itertools.pairwise(path):
        if isinstance(value, list):
            value = value[_place(whole, value, here)]
        elif here == "source" and "source" not in value and len(value.get("sources") or []) == 1:
            value = value["sources"][0]
        else:
            if here == "tokenizer" and isinstance(value.get(here), str):
                value[here] = {"name": value[here]}
            elif value.get(here) is None:
                value[here] = {}
            value = value[here]
        if not isinstance(value, dict | list):
            raise ValueError(f"--set {whole}: {here!r} has no settings within")
        if isinstance(value, dict) and following.isdecimal():
            raise ValueError(f"--set {whole}: {here!r} is not a list, so it has no item {following!r}")
    value[_place(whole, value, path[-1]) if isinstance(value, list) else path[-1]] = new


def _place(whole: str, items: list[Any], text: str) -> int:
    if not text.isdecimal() or int(text) >= len(items):
        raise ValueError(f"--set {whole}: there is no item {text!r}; there are {len(items)}, counted from 0")
    return int(text)


def read_tokenizer(text: str) -> TokenizerConfig:
    """A tokenizer as a configuration has it: a name, or a mapping in YAML."""
    value = read_yaml(text, f"--tokenizer {text}") if text.lstrip().startswith("{") else {"name": text}
    from tasks.config import TokenizerConfig
    from tasks.download.sources import check_tokenizer

    config = checked_request(TokenizerConfig, value, f"--tokenizer {text}: ")
    check_tokenizer(config.name)
    return config


def policy_of(keep: int, days: float) -> Policy:
    from tasks.garbage import Policy

    if keep < 1:
        raise ValueError(f"--keep {keep}: at least one version is kept, the latest")
    if not days >= 0:
        raise ValueError(f"--days {days:g}: should be 0 or more")
    return Policy(keep_versions=keep, grace_days=days)


def summary(result: BuildResult) -> list[str]:
    """The final summary of a build."""
    from flat_tokens.tools.inspect import set_reports  # the modules of all formats: a mistake is reported before they are needed

    documents = result.totals["documents"]
    counts = [f"{documents['read']:,} read", f"{documents['written']:,} written"]
    counts += [f"{count:,} skipped: {reason}" for reason, count in documents["skipped"].items()]
    counts += [f"{count:,} repaired: {reason}" for reason, count in documents["replaced"].items()]
    particular = [f"  evaluation {one.sentence}" for one in set_reports((), documents)]
    if apart := result.equal_texts_apart:
        particular.append(
            f"  leaks      {plural(apart, 'document')} outside train with a text that another split has; split.by text avoids it"
        )
    if not result.was_published:
        particular.append(f"  reused     {result.slices_reused} of {plural(result.slices, 'slice')}")
    return published_text(result, "published", counts, f", from {size(documents['text_bytes'])} of text", particular=particular)


def published_text(
    result: PublishResult, done: str, documents: Sequence[str], of_text: str = "", *, particular: Sequence[str]
) -> list[str]:
    """Result of a publication, for people. *documents*: counts, if they are known. *particular*: lines of its kind alone."""
    repeated = result.totals["documents"].get("repeated_keys")
    counts = [*documents, *([f"{repeated:,} with the key of another"] if repeated else [])]
    before = f" from {result.moved_from}" if result.moved_from else ""
    if result.held is not None:
        done = "held: latest stays where it is until a person decides"
    elif not result.is_new:
        done = "nothing to do: this version is published"
    elif result.was_published:
        done = f"made before: latest is moved to {result.version}{before}"
    lines = [
        done,
        *(why_held(result.held, result.path) if result.held else ()),
        f"  dataset    {result.path}  (number {result.sequence})",
        *(f"  {split:10} {counts}" for split, counts in result.split_counts.items()),
        f"  documents  {', '.join(counts)}" if documents else "",
        f"  size       {size(result.byte_count)} as {result.layout}{of_text}",
        *particular,
        seconds_line(result.seconds),
    ]
    return list(filter(None, lines))


def why_held(held: Candidate, output: str) -> list[str]:
    """The findings of gates, and the ways to decide."""
    return [*(f"  gate       {one.sentence}" for one in held.findings), *(f"  decide     {one}" for one in held.ways(output))]


def plan_text(made: Plan) -> list[str]:
    """Result of a dry run, for people."""
    about = "" if made.exact else "about "
    tokens = _between(made.tokens_low, made.tokens, made.tokens_high, "{:,}".format)
    stored = _between(made.dataset_bytes_low, made.dataset_bytes, made.dataset_bytes_high, size)
    free = "" if made.disk_free is None else f", {size(made.disk_free)} free"
    files = "all fetched files" if made.scratch_bytes is None else f"at most {size(made.scratch_bytes)} of fetched files"
    losses = []
    for loss in made.losses:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in loss.reasons.items())
        found = f" and finds {', '.join(f'{name} in {count:,}' for name, count in loss.found.items())}" if loss.found else ""
        losses.append(f"{loss.step} leaves out {loss.documents:,}, {loss.share:.2%}{f' ({reasons})' if reasons else ''}{found}")
    kept = "which are kept" if made.keeps_files else "which are removed when their slices are settled"
    return [
        f"  version    {made.version or 'not known before every file has been read'}"
        + (" (published: a build has nothing to do)" if made.is_published else ""),
        *(f"  source     {name}: {revision}" for name, revision in made.pinned.items()),
        f"  files      {made.files:,}, {size(made.file_bytes)}",
        f"  documents  about {made.documents:,}",
        *(
            [f"  steps      of {plural(made.sampled_documents, 'document')} that were read, {'; '.join(losses)}"]
            if losses
            else []
        ),
        f"  tokens     {tokens} ({made.bytes_per_token:.2f} bytes of text a token, by {made.engine} engine)",
        f"  text       {about}{size(made.text_bytes)} in {about}{plural(made.slices, 'slice')}, {made.slices_stored:,} stored",
        f"  output     {stored} as {made.layout}",
        f"  disk       about {size(made.disk_bytes)} at the output{free}",
        "  scratch    nothing: no file is fetched or unpacked" if made.scratch_bytes == 0 else f"  scratch    {files}, {kept}",
        *(
            f"  server     {one} sends no ranges or no strong ETags: its files are fetched as a whole"
            for one in made.whole_files_of
        ),
        f"  time       about {duration(made.seconds)} with {plural(made.workers, 'worker')}",
        *(f"  gate       {WOULD[one.action]}: {one.sentence}" for one in made.findings),
        *([f"  gate       a sample does not tell {', '.join(made.untold)}"] if made.untold else []),
        *([f"  warning    {made.warning}"] if made.warning else []),
    ]


WOULD = {"stop": "would stop it", "hold": "would hold it", "warn": "would warn"}
"""Words for the effect of a gate on a planned version."""


def _between(low: int, value: int, high: int, text: Callable[[int], str]) -> str:
    """A number that is estimated: about, if it is off by 2 % at most, else between which."""
    return f"about {text(value)}" if high - value <= NEAR * value else f"{text(low)} to {text(high)}, perhaps {text(value)}"


def seconds_line(seconds: dict[str, float]) -> str:
    stages = ", ".join(f"{stage} {took:.1f}" for stage, took in seconds.items())
    return f"  seconds    {sum(seconds.values()):.1f} ({stages})"
