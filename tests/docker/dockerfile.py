"""The Dockerfile's stages, each with its instructions, as dockerfile-parse reads them; the files that a build sees."""

import json
import re
import shlex
from pathlib import Path
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

    def values(self, name: str) -> list[str]:
        """The values of its instructions of a name."""
        return [one.value for one in self.instructions if one.name == name]


def read_stages() -> list[Stage]:
    parsed = DockerfileParser(path=str(DOCKERFILE.parent), env_replace=False)
    stages = []
    for one in parsed.structure:
        if one["instruction"] == "FROM":
            _, _, name = one["value"].partition(" AS ")
            stages.append(Stage(parsed.parent_images[len(stages)], name, ()))
        elif stages and one["instruction"] != "COMMENT":
            found = Instruction(one["instruction"], " ".join(one["value"].split()))
            stages[-1] = stages[-1]._replace(instructions=(*stages[-1].instructions, found))
    return stages


def ignored(context: Path) -> list[tuple[bool, re.Pattern[str]]]:
    """The rules of .dockerignore: whether each excludes, and what."""
    rules = []
    for line in (context / ".dockerignore").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.lstrip("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            rules.append((not line.startswith("!"), re.compile(f"(?:{pattern})(?:/.*)?")))
    return rules


def context_files(context: Path) -> list[str]:
    """The files that a build sees. The last rule that fits a path decides."""
    rules = ignored(context)
    tops = [path for path in context.iterdir() if path.name not in (".git", ".venv")]
    found = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    names = sorted(path.relative_to(context).as_posix() for path in found if path.is_file())
    return [name for name in names if [excludes for excludes, rule in rules if rule.fullmatch(name)][-1:] != [True]]
