"""Dockerfiles, read: instructions in order, with continued lines joined and comments left out."""

from __future__ import annotations

import json
import re
import shlex
from typing import NamedTuple


class Instruction(NamedTuple):
    """Such as ``Instruction("RUN", "python -m venv /opt/venv")``."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """The value's words: those of the JSON form, or those that a shell would see."""
        return json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)


class Stage(NamedTuple):
    """What stands between one FROM and the next."""

    base: str
    name: str
    instructions: tuple[Instruction, ...]


def read_instructions(text: str) -> list[Instruction]:
    """All instructions, in order. ValueError for what is none."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        name, _, value = line.strip().partition(" ")
        if not name.isupper():
            raise ValueError(f"no instruction: {line}")
        found.append(Instruction(name, value.strip()))
    return found


def read_stages(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Arguments that stand before the first FROM, with their values; and the stages, their bases resolved."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for instruction in read_instructions(text):
        if instruction.name == "FROM":
            base, *alias = instruction.words
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
            stages.append(Stage(base, alias[1] if alias else "", ()))
        elif stages:
            stages[-1] = stages[-1]._replace(instructions=(*stages[-1].instructions, instruction))
        elif instruction.name == "ARG":
            name, _, value = instruction.value.partition("=")
            arguments[name] = value
        else:
            raise ValueError(f"{instruction.name} before the first FROM")
    return arguments, stages
