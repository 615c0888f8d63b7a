"""Programs in the documentation: a block of Python, and the block of text that it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "torchdata", "jax", "grain")


class Program(NamedTuple):
    """A block of Python and the block of text behind it."""

    heading: str
    source: str
    printed: str

    @property
    def frameworks(self) -> list[str]:
        return [name for name in FRAMEWORKS if re.search(rf"^(import|from) {name}\b", self.source, re.MULTILINE)]


LINES = r"((?:(?!```).*\n)*)"


def programs(text: str) -> list[Program]:
    """Programs of a page. A block of Python without a block of text right behind it is none."""
    found = re.finditer(rf"^```python\n{LINES}```\n\n```text\n{LINES}```\n", text, re.MULTILINE)
    return [Program(re.findall(r"^## (.*)", text[: match.start()], re.MULTILINE)[-1], *match.groups()) for match in found]


def printed_by(program: Program, directory: Path, **environment: str) -> str:
    """What it prints, run as a file in *directory*; warnings of the library are errors, and nothing goes to stderr."""
    (directory / "program.py").write_text(program.source)
    # torchdata calls what torch deprecates, and torch says so.
    strict = ["-W", "ignore:'set_vital' is deprecated"] if program.frameworks else ["-W", "error"]
    out, errors = run([*strict, "program.py"], directory, **environment)
    assert errors == ""
    return out


def run(words: list[str], directory: Path, **environment: str) -> tuple[str, str]:
    """What the interpreter prints with these words, and its errors, when it has succeeded."""
    path = os.pathsep.join(filter(None, (str(ROOT), environment.pop("more", ""), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr
