"""The command line: ``flat-tokens COMMAND``, such as ``inspect``, ``stats`` or ``verify``.

Every command is a module of its own with ``add_arguments(parser)`` and ``run(options) -> exit status``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from flat_tokens import __version__
from flat_tokens.tools import compare, completion, diff, duplicates, export, import_, inspect, record, seen, stats, trace, verify
from flat_tokens.tools.arguments import TROUBLE
from flat_tokens.tools.terminal import one_line

COMMANDS: dict[str, ModuleType] = {
    "inspect": inspect,
    "stats": stats,
    "verify": verify,
    "trace": trace,
    "seen": seen,
    "record": record,
    "duplicates": duplicates,
    "diff": diff,
    "compare": compare,
    "export": export,
    "import": import_,
    "completion": completion,
}

STATUS = """\
exit status:
  0  all is well: shown, found, right, the same
  1  it is not: nothing found, something damaged, a difference
  2  it is unknown: bad arguments, nothing there, a package missing

Errors are one line on standard error; FLAT_TOKENS_DEBUG=1 shows where one comes from.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character is not a reason to fail
    try:
        status = int(COMMANDS[options.command].run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has closed the pipe. Nothing may fail again when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # drivers of stores raise errors of their own
        if os.environ.get("FLAT_TOKENS_DEBUG"):
            raise
        print(f"flat-tokens {options.command}: {_said(error)}", file=sys.stderr)
        return TROUBLE


def _said(error: BaseException) -> str:
    """An error in one line: with its type's name, unless its message is enough."""
    name, message = type(error).__name__, one_line(error)
    enough = isinstance(error, OSError | ValueError | LookupError | MemoryError | ImportError) and not isinstance(error, KeyError)
    return message if enough or message == name else f"{name}: {message}"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="flat-tokens",
        description="Look inside tokenized datasets, of flat-tokens and of its neighbours' formats, and turn one into another.",
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"flat-tokens {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}.",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(top=top)
        module.add_arguments(command)
    return top
