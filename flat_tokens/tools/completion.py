"""``flat-tokens completion``: the script by which bash, zsh or fish completes a command line, made from its own parser."""

from __future__ import annotations

import argparse

from flat_tokens.extras import extra
from flat_tokens.tools import terminal
from flat_tokens.tools.arguments import add_listed

SUMMARY = "print a script that completes commands and options in bash, zsh or fish"
EXAMPLES = """\
examples:
  eval "$(flat-tokens completion bash)"          in ~/.bashrc
  eval "$(flat-tokens completion zsh)"           in ~/.zshrc, after compinit
  flat-tokens completion fish | source           in ~/.config/fish/config.fish
"""


ARGUMENTS = """
shell={bash,zsh,fish}  the shell that completes command lines
--command=called NAME  the name it is called by, such as that of an alias
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_listed(parser, ARGUMENTS)


def run(options: argparse.Namespace) -> int:
    complete = options.parser()
    complete.prog = options.called or complete.prog
    script = str(extra("shtab", "completion").complete(complete, options.shell))
    terminal.show(options, {"script": script}, script.splitlines())
    return 0
