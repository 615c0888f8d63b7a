"""``flat-tokens completion``: the script by which bash, zsh or fish completes a command line, made from its own parser."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import PurePath

from flat_tokens.extras import extra

SUMMARY = "print a script that completes commands and options in bash, zsh or fish"
EXAMPLES = """\
examples:
  eval "$(flat-tokens completion bash)"          in ~/.bashrc
  eval "$(flat-tokens completion zsh)"           in ~/.zshrc, after compinit
  flat-tokens completion fish | source           in ~/.config/fish/config.fish
"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell whose script is printed")


def run(options: argparse.Namespace) -> int:
    print(script(options.top, called("flat-tokens"), options.shell))
    return 0


def called(otherwise: str) -> str:
    """The name that this program was called by, if it was an installed command."""
    name = PurePath(sys.argv[0]).name
    return otherwise if name.endswith(".py") or not re.fullmatch(r"[\w.-]+", name) else name


def script(parser: argparse.ArgumentParser, name: str, shell: str) -> str:
    """The script by which *shell* completes the command *name*, which *parser* reads. Otherwise it completes files."""
    parser.prog = name
    return str(extra("shtab", "completion").complete(parser, shell))
