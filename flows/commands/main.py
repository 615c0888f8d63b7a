"""The command line: ``python -m flows COMMAND``.

Nothing heavy is imported before a configuration has been read: a mistake in it is told at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys

from flat_tokens.tools.terminal import one_line

FAMILIES = {
    "build": ("build", "plan"),
    "refresh": ("refresh", "retokenize"),
    "versions": ("versions", "pin", "unpin", "rollback", "gc"),
    "derive": ("merge", "append", "subset", "shuffle", "relayout"),
    "exchange": ("export", "import"),
}
"""Modules of this folder, and the commands that each adds, with the functions that run them."""

EXPECTED = (ValueError, OSError, ImportError)
"""Errors of bad input, a full disk or an absent package: told in one line. Anything else is a fault of ours: a traceback."""

FOREIGN = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "httpx", "huggingface_hub", "requests", "s3fs")
"""Libraries of stores and the hub: what they raise is mostly about the network, a name or a right, and told in one line too."""


def main(arguments: list[str]) -> int:
    """Run a command; its exit status: 0 done, 1 failed, 2 not understood, 130 interrupted."""
    options = parser(arguments[0] if arguments else "").parse_args(arguments)
    log_to_terminal(logging.INFO if options.quiet else logging.WARNING)
    # A build may be stopped at any moment: what is stored is whole, and what is not is swept by the next one.
    signal.signal(signal.SIGTERM, lambda *_: _stop(143, "terminated"))
    try:
        return int(options.run(options))
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


def parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of a command; of all commands where there is none of that name. Other families are not imported: they would
    take longer than a small build.
    """
    chosen = [family for family, names in FAMILIES.items() if command in names]
    top = argparse.ArgumentParser(prog="python -m flows", description="Build flat-tokens datasets from text.")
    commands = top.add_subparsers(dest="command", required=True)
    for family in chosen or FAMILIES:
        importlib.import_module(f"flows.commands.{family}").add_commands(commands)
    return top
