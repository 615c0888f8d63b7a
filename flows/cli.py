"""The command line: ``python -m flows build|plan CONFIG.yaml [--set key=value ...]``; more commands are in ``commands``.

Nothing heavy is imported before a configuration has been read: a mistake in it is told at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from flat_tokens.terminal import duration
from tasks.models import BuildConfig, faults_of

if TYPE_CHECKING:
    from flows.order import BuildResult
    from flows.plan import Plan
    from tasks.progress import Progress

EXPECTED = (ValueError, OSError, ImportError)
"""What bad input, a full disk or an absent package raise: told in one line. Anything else is a fault of ours: a traceback."""

FOREIGN = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "httpx", "huggingface_hub", "requests", "s3fs")
"""Libraries of stores and the hub: what they raise is mostly about the network, a name or a right, and told in one line too."""


def main(arguments: list[str]) -> int:
    """Run a command; its exit status: 0 done, 1 failed, 2 not understood, 130 interrupted."""
    options = parser().parse_args(arguments)
    log_to_terminal(logging.INFO if options.quiet else logging.WARNING)
    # A build may be stopped at any moment: what is stored is whole, and what is not is swept by the next one.
    signal.signal(signal.SIGTERM, lambda *_: _stop(143, "terminated"))
    try:
        if "run" in options:
            return int(options.run(options))
        config = read_config(options.config, options.set)
        return {"build": run_build, "plan": run_plan}[options.command](config, options)
    except KeyboardInterrupt:
        _stop(130, "interrupted")
    except BrokenPipeError:
        return 1
    except MemoryError:
        print(f"{options.command} failed: out of memory. Give it more, or fewer workers.", file=sys.stderr)
    except Exception as error:
        if not isinstance(error, EXPECTED) and not type(error).__module__.startswith(FOREIGN):
            raise
        print(f"{options.command} failed: {one_line(error)}", file=sys.stderr)
    return 1


def _stop(status: int, why: str) -> None:
    print(f"{why}: run the same command again to go on behind the last stored shard", file=sys.stderr, flush=True)
    os._exit(status)


def log_to_terminal(level: int) -> None:
    """Our own log lines on standard error, and of others only what is critical: they log what they raise. Prefect has handlers
    of its own, so the root logger stays as it is.
    """
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.CRITICAL)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(level)  # of the loggers, a server may be told more
    for name in ("flat_tokens", "flows", "tasks"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m flows", description="Build flat-tokens datasets from text.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, about in (
        ("build", "Build a dataset version, or go on with one, and publish it."),
        ("plan", "Sample the sources and tell documents, tokens, bytes, slices, time and disk. Writes no dataset."),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("config", type=Path, metavar="CONFIG.yaml")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. --set tokenizer=gpt2")
        command.add_argument("--quiet", action="store_true", help="log lines instead of a live display")
        command.add_argument("--json", action="store_true", help="the result as JSON on standard output")
        if name == "build":
            command.add_argument("--no-server", action="store_true", help="do not report to a Prefect server")
    from flows import commands as lifecycle  # which imports this module, as the next one does
    from flows import dataset_commands

    lifecycle.add_commands(commands)
    dataset_commands.add_commands(commands)
    return top


class ConfigLoader(yaml.SafeLoader):
    """YAML in which no key stands twice in a mapping: the last of them would win without a word."""

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
    try:
        return BuildConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(faults_of(error, BuildConfig, 'source' in value))}") from error


def set_at(value: Any, path: list[str], new: Any) -> None:
    """Set ``value[path[0]][path[1]]...``; numbers are places in a list, a name alone becomes a mapping where need be."""
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
            if value.get(here) is None:
                value[here] = {}
            value = value[here]
        if not isinstance(value, dict | list):
            raise ValueError(f"--set {whole}: {here!r} has no settings within")
        if isinstance(value, dict) and following.isdecimal():
            raise ValueError(f"--set {whole}: {here!r} is not a list, so it has no item {following!r}")
    if isinstance(value, list):
        value[_place(whole, value, path[-1])] = new
    else:
        value[path[-1]] = new


def _place(whole: str, items: list[Any], text: str) -> int:
    if not text.isdecimal() or int(text) >= len(items):
        raise ValueError(f"--set {whole}: there is no item {text!r}; there are {len(items)}, counted from 0")
    return int(text)


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
    from flows.order import build
    from flows.threads import threads_of

    with threads_of(config) as runner:
        return build(config, runner)


def build_with_server(config: BuildConfig) -> BuildResult:
    with looked_after():
        from flows.build import build_dataset

        result: BuildResult = build_dataset(config)
    return result


@contextlib.contextmanager
def looked_after() -> Iterator[None]:
    """Runs of the block are known to the automations by tag and heartbeat, as those of deployments are."""
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")
    from prefect import tags  # reads its settings when it is imported

    with tags("flat-tokens"):
        yield


def prefect_server() -> str | None:
    """The URL of the Prefect server that this machine is set up for, or None: then nothing of Prefect is even imported.

    ValueError where one is set up and does not answer: a run that nobody can watch is hardly what was meant.
    """
    url = os.environ.get("PREFECT_API_URL") or _profile_setting("PREFECT_API_URL")
    if not url:
        return None
    # Where it goes away later, a run waits for it, up to four minutes: as with the deployments, see prefect.yaml.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "7")
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it is no http URL")
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5):  # noqa: S310  http or https, see above
            return url
    except urllib.error.HTTPError:
        return url  # it answers; whether it lets us in, Prefect will tell
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the Prefect server at PREFECT_API_URL={url} does not answer ({one_line(error)}). Start it with "
            "'prefect server start', or build without it: --no-server."
        ) from error


def _profile_setting(name: str) -> str | None:
    """A setting of Prefect's active profile, read from its file."""
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    try:
        profiles = tomllib.loads(Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).read_text())
        active = os.environ.get("PREFECT_PROFILE", profiles.get("active"))
        value = profiles.get("profiles", {}).get(active, {}).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return str(value) if value else None


def run_plan(config: BuildConfig, options: argparse.Namespace) -> int:
    from flows.plan import plan

    made = plan(config)
    print(made.model_dump_json(indent=2) if options.json else plan_text(made))
    return 0


@contextlib.contextmanager
def display(live: bool) -> Iterator[None]:
    """Show progress on a terminal while the block runs."""
    if not live:
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from tasks.progress import meter

    with Live(
        get_renderable=lambda: Text(progress_line(meter.read())),
        console=Console(stderr=True),
        refresh_per_second=8,
        transient=True,
    ):
        yield


@contextlib.contextmanager
def log_progress(every: float = 10.0) -> Iterator[None]:
    """Log progress now and then while the block runs."""
    from tasks.progress import meter

    done = threading.Event()

    def log() -> None:
        while not done.wait(every):
            logging.getLogger("flows").info(progress_line(meter.read()))

    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def progress_line(now: Progress) -> str:
    """Such as ``tokenize  45%  12,345 documents  6,789,012 tokens  211 MB/s  0:12 left``."""
    done, parts = now.done, [f"{now.stage:9}"]
    if now.total:
        parts.append(f"{min(done.bytes / now.total, 1):4.0%}")
    parts += progress_counts(now)
    if done.bytes and now.seconds > 0.2:
        parts.append(f"{now.rate / 1e6:,.0f} MB/s")
        if now.left is not None:
            parts.append(f"{duration(now.left)} left")
    else:
        parts.append(duration(now.seconds))
    return "  ".join(parts)


def progress_counts(now: Progress) -> list[str]:
    """What a stage has counted beside bytes, as far as it counts such things."""
    done = now.done
    counts = [(done.documents, "documents"), (done.tokens, "tokens"), (done.faults, "fault" if done.faults == 1 else "faults")]
    return [f"{count:,} {noun}" for count, noun in counts if count]


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


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
