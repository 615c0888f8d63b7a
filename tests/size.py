"""Ceiling of the code: `make check` fails if product or tests have more code tokens than `[tool.flat-tokens.ceiling]` allows, or
a folder of the product more than 15 modules.

A code token is one of Python's, without comments, docstrings and layout: a denser style gains nothing. A commit that leaves
less lowers the number in pyproject.toml.
"""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = 15
"""Of a folder, at most: whoever looks for something reads this many names."""
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING"}


def code_tokens(source: str) -> int:
    """Number of code tokens. An f-string is one, as Python 3.11 takes it; newer ones divide it."""
    words = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    count = within = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        within -= kind == "FSTRING_END"
        count += not within and kind not in LAYOUT | {"FSTRING_END"} and token.start[0] not in words
        within += kind == "FSTRING_START"
    return count


def faults(root: Path = ROOT) -> list[str]:
    """A sentence for each part or folder that is above its ceiling."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    counts, rooms = Counter(), Counter()
    for path in (root / name for name in names if (root / name).exists()):
        part = "tests" if path.is_relative_to(root / "tests") else "product"
        counts[part] += code_tokens(path.read_text("utf-8"))
        rooms[path.parent] += part == "product" and path.name != "__init__.py"
    ceiling = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["flat-tokens"]["ceiling"]
    return [
        f"{part} has {counts[part]:,} code tokens; its ceiling in pyproject.toml is {most:,}. Remove as much as you add."
        for part, most in ceiling.items()
        if counts[part] > most
    ] + [
        f"{room.relative_to(root)} has {count} modules, more than {MODULES}. Merge what is one thing, or divide the folder."
        for room, count in rooms.items()
        if count > MODULES
    ]


if __name__ == "__main__":
    found = faults()
    print("\n".join(found) or "code tokens: below the ceiling")
    sys.exit(1 if found else 0)
