"""The options of all formats as flags of a command: ``end_of_text`` is ``--end-of-text``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flat_tokens.formats import FORMATS

DESTINATION = "format_option_"

WRITING_ONLY = (
    *("tokens_per_file", "tokens_per_shard", "tokens_per_row_group", "tokens_per_batch", "size_limit", "drop_last"),
    *("compression", "name", "tokenizer", "closing", "generation", "vocabulary_size", "inner_end_of_text"),
)
"""Options of formats that have no effect on reading."""
READING_ONLY = ("sequence", "ignore_offsets", "max_index_bytes", "bytes_type")
"""Options of formats that have no effect on writing."""


def add_option_flags(parser: argparse.ArgumentParser, except_for: Collection[str] = ()) -> None:
    """Add a flag for each option of any format, except those that the command does not use."""
    owners: dict[str, list[str]] = {}
    for name, entry in FORMATS.items():
        for field in fields(entry.options):
            if field.name not in except_for:
                owners.setdefault(field.name, []).append(name)
    group = parser.add_argument_group("options of the formats")
    for option, formats in owners.items():
        kind = FORMATS[formats[0]].options
        flag = {"action": "store_true", "default": None} if _type_of(kind, option) is bool else _typed(kind, option)
        about = f"{', '.join(formats)}: {description(kind, option)}".replace("%", "%%")
        group.add_argument(f"--{option.replace('_', '-')}", dest=f"{DESTINATION}{option}", help=about, **flag)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The formats' options on the command line."""
    named = {name: value for name, value in vars(options).items() if name.startswith(DESTINATION) and value is not None}
    return {name.removeprefix(DESTINATION): value for name, value in named.items()}


def description(kind: type[Any], option: str) -> str:
    """The description of an option, in the docstring of an options class or of its bases."""
    for owner in kind.__mro__:
        said = " ".join((owner.__doc__ or "").split())
        found = re.search(rf"``{option}``: (.*?)(?= ``\w+``: |$)", said)
        if found:
            return found[1].replace("``", "").rstrip(".")
    return option.replace("_", " ")


def _type_of(kind: type[Any], option: str) -> Any:
    """An option's type, without None."""
    hint = get_type_hints(kind)[option]
    several = [part for part in get_args(hint) if part is not type(None)]
    return several[0] if get_origin(hint) is not Literal and several else hint


def _typed(kind: type[Any], option: str) -> dict[str, Any]:
    of = _type_of(kind, option)
    if get_origin(of) is Literal:
        choices = get_args(of)
        return {"choices": choices, "type": type(choices[0])}
    return {"type": whole, "metavar": "N"} if of is int else {"metavar": "TEXT"}


def whole(text: str) -> int:
    """A whole number, whose digits may be grouped: ``1_000`` or ``1,000``."""
    try:
        return int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
