"""One word, one thing: the class names that two modules of the code define. `make check` fails where there are such.

`tasks` and `flows` have none. `flat_tokens` has those of ALLOWED, each with its reason.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = (("tasks", "flows"), ("flat_tokens",))
ALLOWED = {
    "Datatrove": "the neighbour's name: its format of files, and its filters as a step",
    "Steps": "public on both sides for a long time: training steps of a loader, steps of documents",
}


def defined(floor: tuple[str, ...], root: Path = ROOT) -> dict[str, list[str]]:
    """The modules that define each class name."""
    modules = defaultdict(list)
    for path in sorted(path for name in floor for path in (root / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(path.relative_to(root).as_posix())
    return modules


def faults(root: Path = ROOT) -> Iterator[str]:
    """A sentence for each name that two modules of a floor define."""
    for floor in FLOORS:
        for name, modules in sorted(defined(floor, root).items()):
            if len(set(modules)) > 1 and not (floor == ("flat_tokens",) and name in ALLOWED):
                yield f"class {name} is defined in {' and '.join(sorted(set(modules)))}. Rename one: a word means one thing."


if __name__ == "__main__":
    found = list(faults())
    print("\n".join(found) or "class names: one module each")
    sys.exit(1 if found else 0)
