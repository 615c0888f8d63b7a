"""One word, one thing: the class names that two modules of the code define. `make check` fails if there are such.

The case of letters and leading underscores do not count.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("flat_tokens", "tasks", "flows", "deployments")


def defined(root: Path = ROOT) -> dict[str, set[str]]:
    """The modules that define each class name."""
    modules = defaultdict(set)
    for path in (path for name in FLOORS for path in (root / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name.strip("_").lower()].add(path.relative_to(root).as_posix())
    return modules


def faults(root: Path = ROOT) -> Iterator[str]:
    """A sentence for each name that two modules define."""
    for name, modules in sorted(defined(root).items()):
        if len(modules) > 1:
            yield f"class {name} is defined in {' and '.join(sorted(modules))}. Rename one: a word means one thing."


if __name__ == "__main__":
    found = list(faults())
    print("\n".join(found) or "class names: one module each")
    sys.exit(1 if found else 0)
