"""``flat-tokens completion``: what bash, zsh and fish need to complete a command line, made from its own parser."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

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
    print(script(options.top, called("flat-tokens"), options.shell), end="")
    return 0


def called(otherwise: str) -> str:
    """The name that this program was called by, if it was an installed command."""
    name = PurePath(sys.argv[0]).name
    return otherwise if name.endswith(".py") or not re.fullmatch(r"[\w.-]+", name) else name


class Option(NamedTuple):
    """A flag, what it is for, whether it takes a value, and the values to choose from, if they are known."""

    flag: str
    about: str
    takes_value: bool
    choices: tuple[str, ...]


class Command(NamedTuple):
    """A command, what it is for, its options, and the words that its arguments are chosen from, if they are known."""

    name: str
    about: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """The commands of a parser; the first one, without a name, has what is before them."""
    (below,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    abouts = {choice.dest: choice.help or "" for choice in below._choices_actions}
    named = [_command(name, abouts.get(name, ""), one) for name, one in below.choices.items()]
    return [_command("", "", parser)._replace(choices=tuple(below.choices)), *named]


def _command(name: str, about: str, parser: argparse.ArgumentParser) -> Command:
    options: list[Option] = []
    words: list[str] = []
    for action in parser._actions:
        choices = tuple(map(str, action.choices)) if isinstance(action.choices, list | tuple | dict | range) else ()
        about_it = (action.help or "").replace("%%", "%")
        options += [Option(flag, about_it, action.nargs != 0, choices) for flag in action.option_strings]
        words += [] if action.option_strings or isinstance(action, argparse._SubParsersAction) else choices
    return Command(name, about, tuple(options), tuple(words))


def script(parser: argparse.ArgumentParser, name: str, shell: str) -> str:
    """The script by which *shell* completes the command *name*, which *parser* reads. Where it knows no words: files."""
    commands = commands_of(parser)
    return "\n".join(_fish(name, commands) if shell == "fish" else _bash(name, commands, shell)) + "\n"


def _bash(name: str, commands: list[Command], shell: str) -> Iterator[str]:
    """For bash, and for zsh, which completes by bash's functions."""
    function = "_" + re.sub(r"\W", "_", name)
    if shell == "zsh":
        yield "autoload -U +X bashcompinit && bashcompinit"
    yield f"{function}() {{"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" options="" words="" i'
    yield "  for ((i = 1; i < COMP_CWORD; i++)); do"
    yield '    case "${COMP_WORDS[i]}" in -*) ;; *) command="${COMP_WORDS[i]}"; break ;; esac'
    yield "  done"
    yield '  case "$command" in'
    for command in commands:
        flags = " ".join(option.flag for option in command.options)
        yield f"    {shlex.quote(command.name)}) options={shlex.quote(flags)} words={shlex.quote(' '.join(command.choices))}"
        yield '      case "$before" in'
        for option in command.options:
            if option.takes_value:
                yield f"        {option.flag}) options='' words={shlex.quote(' '.join(option.choices))} ;;"
        yield "      esac ;;"
    yield "  esac"
    yield '  case "$word" in -*) words="$options" ;; esac'
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield f"complete -o default -F {function} {name}"


def _fish(name: str, commands: list[Command]) -> Iterator[str]:
    for command in commands:
        seen = f"__fish_seen_subcommand_from {command.name}" if command.name else "__fish_use_subcommand"
        where = f"complete -c {name} -n '{seen}'"
        for option in command.options:
            kind = "-l" if option.flag.startswith("--") else "-s"
            values = "" if not option.takes_value else f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r"
            yield f"{where} {kind} {option.flag.lstrip('-')}{values} -d {_quoted(option.about)}"
        if command.name:
            for word in command.choices:
                yield f"{where} -a {word}"
    for command in commands[1:]:
        yield f"complete -c {name} -f -n __fish_use_subcommand -a {command.name} -d {_quoted(command.about)}"


def _quoted(text: str) -> str:
    """A text within fish's single quotes, in which only they and backslashes are escaped."""
    return "'" + " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'") + "'"
