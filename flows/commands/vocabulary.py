"""The command that fetches a tokenizer for machines without a network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flat_tokens.tools.terminal import show, size
from flows.commands.running import add_command


def add_commands(commands: Any) -> None:
    """Add the command to the command line's parser, with its function as ``run``."""
    about = "Write the file of a published tokenizer, for machines without a network."
    command = add_command(commands, "vocabulary", run_vocabulary, about)
    command.add_argument("name", metavar="NAME", help="an encoding of tiktoken, such as cl100k_base, or a hub repository")
    command.add_argument("--to", required=True, type=Path, metavar="FILE", help="such as cl100k_base.tiktoken or tokenizer.json")
    command.add_argument("--revision", help="of the hub repository")


def run_vocabulary(options: argparse.Namespace) -> None:
    """Run the command."""
    from flat_tokens.stores.store import Store
    from flat_tokens.vocabulary import definition_file

    ending = ".json" if "/" in options.name else ".tiktoken"
    if options.to.suffix != ending:
        raise ValueError(f"--to {options.to}: the name of this file has to end with {ending}, by which builds know what it is")
    data, setting = definition_file(options.name, options.revision)
    path = options.to.absolute()
    Store.at(str(path.parent)).put(path.name, data)
    wanted = setting.format(path)
    show(
        options,
        {"path": str(path), "bytes": len(data), "tokenizer": wanted},
        [f"wrote {path}, {size(len(data))}", f"tokenizer: {wanted}"],
    )
