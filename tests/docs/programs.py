"""Programs in the documentation: a block of Python, and the block of text that it prints."""

from __future__ import annotations

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


def printed_by(program: Program, directory: Path, environment: dict[str, str] | None = None) -> str:
    """What it prints, run as a file in *directory*; warnings of the library are errors, and nothing goes to stderr."""
    (directory / "program.py").write_text(program.source)
    # torchdata calls what torch deprecates, and torch says so.
    strict = ["-W", "ignore:'set_vital' is deprecated"] if program.frameworks else ["-W", "error"]
    done = subprocess.run(
        [sys.executable, *strict, "program.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
