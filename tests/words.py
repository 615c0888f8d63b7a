"""Plain English: `make check` fails where a docstring, a message or a page has a turn of phrase that readers stumble over.

TURNS has a pattern for each, and what to write instead. A line that needs the word ends with a comment: ``# plain: why`` in code,
``<!-- plain: why -->`` on a page.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("flat_tokens", "tasks", "flows", "deployments", "service", "docker")
THING = r"(?!more\b|longer\b|less\b|other\b|such\b|need\b|room\b|way\b|place\b)[a-z`*]"
TURNS = {
    r"\b(?:go|goes|going|went|gone) on (?:behind|after)\b": "resumes after",
    r"\bbehind\b": "after",
    r"\bbeside\b": "next to; in addition to; compared with",
    r"\bone after the other\b|\bone behind\b": "in order; consecutive",
    r"\bin turns?\b": "alternately; one at a time",
    r"\b(?:stands?|stood|standing) (?:in|at|on|beneath|below|above|there|before|under|where|with)\b": "is in, is stored at",
    r"\b(?:lie|lies|lay|lain) (?:in|at|on|below|beneath|there|within|here|outside|where|next)\b": "is in, is stored at",
    r"\b(?:is|are|was|were|be|been|being) told\b|\btold (?:by|of|with|where|when|as|before|once|apart)\b": "is reported; says",
    r"\btells\b": "says, reports",
    r"\bmend(?:s|ed|ing)?\b": "repair, fix",
    r"\banew\b": "again; rebuilt, rewritten",
    r"\b(?:made|built|written|stored) again\b": "rebuilt, rewritten; a second time",
    r"\b(?:kept|stored|stands|put|counted|written|looked at) apart\b": "separately",
    r"\bat hand\b": "available on this machine",
    r"\b(?:stay|stays|left|leaves|they are|it is|all is) whole\b": "complete",
    rf"(?<![Tt]here )\b(?:is|are|was|were) no {THING}": "is not a",
    r"\bwhere there (?:is|are|was|were) no(?:ne)?\b": "if there is no(ne)",
    r"\bso many (?:bytes|tokens|seconds|times|rows|documents|items|characters|slices|steps|of)\b": "this many, with the unit",
    r"\bfor so long\b": "this long: the number of seconds",
    r"\bsuch as pass\b": "transient",
    r"\bthe same,? but\b": "restate it in one sentence",
    r"\bwithout a word\b": "silently",
    r"\bha(?:s|ve) (?:its|their) say\b": "applies",
    r"\b(?:may|can|could|might) do without\b": "does not need",
    r"\bsomebody else\b": "another process, another machine",
    r"\bthe (?:former|latter)(?: one)?\b(?! version)": "the previous version; its name",
    r"\b(?:None|[A-Z]\w+Error) where\b": "if",
    r"\ba faulty one\b": "the damaged file, the invalid row",
}
"""Patterns, and what to write instead."""
OPENINGS = {
    r"(?:What|Who|Whoever|Whatever) (?!is the\b)[a-z*]": "the thing by its name: the reader, the result, the caller",
    r"Of (?!course\b)[^.,;:]{3,60}, ": "Y of X",
}
"""The same for the first words of a docstring."""
COMMENT = re.compile(r"#.*\bplain: \S|<!-- plain: \S")


def said(path: Path) -> Iterator[tuple[int, str, bool]]:
    """What a file says to people: line, text, and whether it is the beginning of a docstring."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        code = False
        for number, line in enumerate(source.splitlines(), 1):
            code ^= line.startswith("```")
            if not code:
                yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|\]\[[^\]]*\]|^\[[^\]]*\]: .*", "``", line), False
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value, True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, re.sub(r"``[^`]*``", "``", line), False


def faults(paths: list[Path]) -> Iterator[str]:
    """A line for each turn of phrase."""
    for path in paths:
        lines = path.read_text("utf-8").splitlines()
        for number, text, opens in sorted(set(said(path))):
            if COMMENT.search(lines[min(number, len(lines)) - 1]):
                continue
            where = f"{path.relative_to(ROOT)}:{number}"
            if opens:
                found = [(re.match(pattern, text), instead) for pattern, instead in OPENINGS.items()]
            else:
                found = [(re.search(pattern, text, re.IGNORECASE), instead) for pattern, instead in TURNS.items()]
            yield from (f"{where}: {match[0].strip()!r}. Write: {instead}." for match, instead in found if match)


def pages() -> list[Path]:
    """All that people read, but for the tables that programs write."""
    measured = ROOT / "docs/measured"
    written = [page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if measured not in page.parents]
    return sorted([*written, *(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))])


if __name__ == "__main__":
    found = list(faults(pages()))
    print("\n".join(found) or f"plain English: {len(TURNS) + len(OPENINGS)} turns of phrase are nowhere")
    sys.exit(1 if found else 0)
