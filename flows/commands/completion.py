"""The command that prints what a shell needs to complete the others."""

from __future__ import annotations

import argparse
from typing import Any

from flat_tokens.tools.completion import SHELLS, called, script
from flows.commands.running import add_command


def add_commands(commands: Any) -> None:
    """Add the command to the command line's parser; it has its function as ``run``."""
    about = 'Print a script that completes commands and options: eval "$(... completion bash)".'
    command = add_command(commands, "completion", run_completion, about)
    command.add_argument("shell", choices=SHELLS)
    command.add_argument("--command", dest="called", metavar="NAME", help="the name it is called by, such as that of an alias")


def run_completion(options: argparse.Namespace) -> None:
    from flows.commands.main import parser  # it finds this module by its name

    print(script(parser(), options.called or called("flows"), options.shell))
