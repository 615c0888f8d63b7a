"""The Dockerfile's stages, each with its instructions, as dockerfile-parse reads them."""

from __future__ import annotations

import json
import shlex
from typing import NamedTuple

from dockerfile_parse import DockerfileParser

from tests.docker.compose import DOCKERFILE


class Instruction(NamedTuple):
    """Such as ``Instruction("RUN", "python -m venv /opt/venv")``."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """The value's words: those of the JSON form, or those that a shell would see."""
        return json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)


class Stage(NamedTuple):
    """The instructions between one FROM and the next. *base*: the image's name, with tag and digest."""

    base: str
    name: str
    instructions: tuple[Instruction, ...]


def read_stages() -> list[Stage]:
    parsed = DockerfileParser(path=str(DOCKERFILE.parent), env_replace=False)
    stages: list[Stage] = []
    for one in parsed.structure:
        if one["instruction"] == "FROM":
            _, _, name = one["value"].partition(" AS ")
            stages.append(Stage(parsed.parent_images[len(stages)], name, ()))
        elif stages and one["instruction"] != "COMMENT":
            found = Instruction(one["instruction"], " ".join(one["value"].split()))
            stages[-1] = stages[-1]._replace(instructions=(*stages[-1].instructions, found))
    return stages
