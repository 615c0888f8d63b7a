"""The command line: ``flat-tokens COMMAND``, such as ``inspect``, ``stats`` or ``verify``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from flat_tokens import __version__
from flat_tokens.tools.arguments import TROUBLE, Parser, add_command, program
from flat_tokens.tools.terminal import one_line

COMMANDS = (
    *("inspect", "stats", "verify", "trace", "seen", "record"),
    *("documents", "diff", "compare", "export", "import", "completion"),
)
"""Each is a module of this folder, with SUMMARY, EXAMPLES, ``add_arguments(parser)`` and ``run(options) -> exit status``."""

STATUS = """\
exit status:
  0  all is well: shown, found, right, the same
  1  it is not: nothing found, something damaged, a difference
  2  it is unknown: bad arguments, nothing there, a package missing

Errors are one line on standard error; FLAT_TOKENS_DEBUG=1 shows where one comes from.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parser(*words[:1]).parse_args(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character is not a reason to fail
    try:
        status = int(options.run(options))
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


def parser(command: str = "-") -> Parser:
    """The parser of a command, or of all. The modules of other commands are not imported."""
    about = "Look inside tokenized datasets, of flat-tokens and of its neighbours' formats, and turn one into another."
    top, commands = program("flat-tokens", about, STATUS, __version__)
    for name in COMMANDS:
        if command not in COMMANDS and not command.startswith("-"):
            commands.add_parser(name)
        elif command == name or command not in COMMANDS:
            module = importlib.import_module(f"flat_tokens.tools.{name if name != 'import' else 'import_'}")
            added = add_command(commands, name, module.SUMMARY, module.EXAMPLES, STATUS)
            added.set_defaults(run=module.run, parser=parser)
            module.add_arguments(added)
    return top
