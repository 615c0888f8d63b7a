"""Print the service's part of a lock, with its hashes: ``service_lock.py requirements.lock > service.lock``.

uv notes below each requirement which others asked for it. The requirements of the library and of the dependency group "service"
are kept, direct and indirect ones. Linters, type checkers and test tools stay out of the image.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WANTED = {"flat-tokens (pyproject.toml)", "flat-tokens (pyproject.toml:service)"}

# A requirement is a line "name[extras]==version ; marker \" with indented hashes and comments below it.
_NAME = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==")
_ASKED_BY = re.compile(r"^ +#(?: via +| {3,})(\S.*)$")


def read_lock(text: str) -> list[tuple[str, str, set[str]]]:
    """For each requirement: its name, its lines, and the names of the requirements that asked for it."""
    requirements: list[tuple[str, list[str], set[str]]] = []
    for line in text.splitlines():
        if named := _NAME.match(line):
            requirements.append((named[1].lower(), [line], set()))
        elif line.startswith(" ") and requirements:
            requirements[-1][1].append(line)
            if asked := _ASKED_BY.match(line):
                requirements[-1][2].add(re.sub(r"\[.*\]$", "", asked[1].strip()))
        elif line and not line.startswith("#"):
            raise ValueError(f"{line!r} is not a pinned requirement. Make the lock again: make lock.")
    return [(name, "\n".join(lines), asked) for name, lines, asked in requirements]


def service_lock(text: str) -> str:
    """The requirements of the service, as they follow each other in the lock. ValueError if one has no hash or nothing asked
    for it.
    """
    requirements = read_lock(text)
    for name, lines, asked in requirements:
        if "--hash=sha256:" not in lines or not asked:
            raise ValueError(f"{name} has no hash, or nothing asked for it. Make the lock again: make lock.")
    wanted = set(WANTED)
    while more := {name for name, _, asked in requirements if asked & wanted} - wanted:
        wanted |= more
    if "prefect" not in wanted:
        raise ValueError(f"nothing in the lock was asked for by {' or '.join(sorted(WANTED))}. Make the lock again: make lock.")
    return "".join(f"{lines}\n" for name, lines, _ in requirements if name in wanted)


def main(arguments: list[str]) -> int:
    """Write the service's part of a lock to standard output. Return the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: service_lock.py requirements.lock > service.lock\n")
        return 0 if arguments in (["--help"], ["-h"]) else 2
    try:
        sys.stdout.write(service_lock(Path(arguments[0]).read_text("utf-8")))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{arguments[0]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
