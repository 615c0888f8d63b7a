"""The command line: ``python -m flows build|plan CONFIG.yaml [--set key=value ...]``; more commands are in ``commands``.

Nothing heavy is imported before a configuration has been read: a mistake in it is told at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from flows.commands.build import run_build, run_plan
from flows.commands.config_file import read_config
from flows.commands.errors import EXPECTED, FOREIGN, one_line


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
    from flows.commands import derive, versions  # which import this module

    versions.add_commands(commands)
    derive.add_commands(commands)
    return top
