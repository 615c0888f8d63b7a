"""The page of the tables: a section a table, each with the day, the commit and the machine of its measurement."""

import re
from collections.abc import Mapping, Sequence

from tests.benchmarks.bench import Grid

INTRODUCTION = """# Measured tables

`.venv/bin/python -m tests.benchmarks` measures every table of this page and writes the page. Below each title stand the command
that gives the table, the day, the commit, the machine, the versions, and the load: the one-minute average before and its greatest
value during the measurement, which itself is part of the latter, and how many cores' worth of time processes took that had
nothing to do with it. Compare rows of one table; machines drift. How to run it: `tests/benchmarks/README.md`.
"""
TITLE = re.compile("^(?=## )", re.MULTILINE)


def title_of(about: str) -> str:
    """The title of a section: the first line of its module's docstring."""
    return about.partition("\n")[0].rstrip(".")


def rendered(about: str, command: str, stamp: str, grids: Sequence[Grid]) -> str:
    """A section in Markdown. *about*: its title, and prose from the second line on. *stamp*: when and on what it was measured."""
    prose = about.partition("\n")[2].strip()
    parts = [f"## {title_of(about)}", prose, f"```\n{command}\n```", stamp]
    return "\n\n".join(part for part in (*parts, *map(grid, grids)) if part) + "\n"


def grid(found: Grid) -> str:
    """A table in Markdown, numbers to the right."""
    number = [all(re.match(r"[\d.,]+( |$|%)|–", str(row[i])) for row in found.rows) for i in range(len(found.header))]
    lines = [[*found.header], ["---:" if right else "---" for right in number], *found.rows]
    above = f"{found.above}\n\n" if found.above else ""
    return above + "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def sections_of(text: str) -> dict[str, str]:
    """A page's sections by their titles."""
    parts = TITLE.split(text)[1:]
    return {part[3:].partition("\n")[0]: f"{part.strip()}\n" for part in parts}


def page(titles: Sequence[str], measured: Mapping[str, str], before: str) -> str:
    """The page with sections in the order of *titles*: those that were measured now, else those of the page *before*, if it has
    them. Its introduction stays, too.
    """
    sections = {**sections_of(before), **measured}
    introduction = TITLE.split(before)[0].strip() or INTRODUCTION.strip()
    return "\n".join([f"{introduction}\n", *(sections[title] for title in titles if title in sections)])
