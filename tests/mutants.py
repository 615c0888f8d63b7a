"""What tests are worth: ``python -m tests.mutants --record``, then ``python -m tests.mutants --count 60``. Run by hand.

A mutant is a copy of the code with one small fault: another comparison, boundary or operator, a call or a line dropped.
--record runs the tests once under coverage, which notes the tests of each line (with --cov-append, more of them). Then the tests
that reach a mutant's line run until one fails, in a fork of a process that has imported what other projects wrote. A mutant is
named by its function and its place there: tables of before and after have the same rows. Changes that git has not been told of
by ``git add`` do not count.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults.inject import Child

ROOT = Path(__file__).parents[1]
PLACES = [f"tasks/{name}" for name in ("parts", "shards", "assemble", "output", "download", "tokenize")]
PLACES += [f"flat_tokens/{name}" for name in ("rows", "arrays", "stores")]
RECORD = ROOT / ".venv/reports/coverage"
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot), (ast.And, ast.Or),
    (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv),
)  # fmt: skip
SWAPPED = {ast.Mod: ast.Mult, **dict(PAIRS), **{other: one for one, other in PAIRS}}
IMPORTED = ("pytest", "hypothesis.strategies", "xdist", "zarr", "pyarrow.parquet", "awkward", "duckdb")
ALREADY = "ignore:Module already imported so cannot be rewritten"
DROPPED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)


class Mutant(NamedTuple):
    name: str
    path: str
    node: ast.expr | ast.stmt
    text: str


def mutants_of(path: str) -> Iterator[Mutant]:
    for function in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
        if isinstance(function, ast.FunctionDef):
            found = (mutant for line in function.body for mutant in changes(line))
            for number, (node, text) in enumerate(found):
                yield Mutant(f"{path}:{function.name}:{number}", path, node, text)


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes of a function's body, each with the text that replaces it. Inner functions have mutants of their own."""
    other = copy.copy(node)
    if isinstance(node, ast.JoinedStr | ast.FunctionDef | ast.ClassDef | ast.Assert):
        return
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        other.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield node, f"({ast.unparse(other)})"
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        other.op = SWAPPED[type(node.op)]()
        yield node, f"({ast.unparse(other)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, DROPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, "pass"
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.AnnAssign) and child is node.annotation) and not isinstance(node, ast.Raise):
            yield from changes(child)


def mutated(source: str, mutant: Mutant) -> str:
    lines, node = source.encode().splitlines(keepends=True), mutant.node
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + mutant.text.encode() + after).decode()


def run(place: str, seconds: float, *arguments: str) -> tuple[int | None, list[str]]:
    """Status of pytest and the lines that it prints, in a fork of this process. No status if it took longer."""

    def work() -> int:
        import pytest

        os.setsid()
        os.chdir(place)
        os.environ["PYTHONPATH"] = place  # for the processes that tests start
        sys.path[0] = place
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        options = ["-q", "--no-header", "-p", "no:cacheprovider", f"-W{ALREADY}", f"--basetemp={place}/tmp"]
        return int(pytest.main([*options, *arguments]))

    child = Child(work, f"{place}/said")
    ended = child.ended(kill_after=seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return ended.value, ended.output.splitlines()


def tests_of(data: object, mutant: Mutant) -> list[str]:
    """Names of the tests that reach the mutant's line. First are those in the folder of the same name, a file after another."""
    measured = [file for file in data.measured_files() if file.endswith("/" + mutant.path)]
    contexts = (one for file in measured for one in data.contexts_by_lineno(file).get(mutant.node.lineno, ()))
    found = {context.rpartition("|")[0] for context in contexts}
    near = f"tests/{mutant.path.rpartition('/')[0]}/"
    return sorted(found - {""}, key=lambda test: (not test.startswith(near), hashlib.sha256(test.encode()).digest()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--record", nargs=argparse.REMAINDER, metavar="OPTION", help="record instead, with these options of pytest"
    )
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--seconds", type=int, default=120, help="for the tests of one mutant")
    options.add_argument("--most", type=int, default=150, help="tests that are tried for one mutant")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        subprocess.run(["git", "checkout-index", "--all", f"--prefix={place}/"], cwd=ROOT, check=True)
        if given.record is not None:
            record(place, given.record)
        else:
            try_all(place, given)


def record(place: str, options: list[str]) -> None:
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    os.environ["COVERAGE_FILE"] = str(RECORD)
    print("\n".join(run(place, 7200, "--cov=tasks", "--cov=flat_tokens", "--cov-context=test", "--cov-report=", *options)[1]))


def try_all(place: str, options: argparse.Namespace) -> None:
    from coverage import CoverageData

    data = CoverageData(str(RECORD))
    data.read()
    paths = [path.relative_to(ROOT).as_posix() for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    every = [mutant for path in paths for mutant in mutants_of(path)]
    every.sort(key=lambda mutant: hashlib.sha256(f"0 {mutant.name}".encode()).digest())
    there = set(run(place, 600, "--collect-only")[1])
    for name in IMPORTED:
        importlib.import_module(name)
    print("| mutant | line | instead | fate |\n|---|---:|---|---|")
    counts = dict.fromkeys(("killed", "survived", "not reached", "out of time"), 0)
    for number, mutant in enumerate(every[: options.count]):
        path = Path(place) / mutant.path
        source = path.read_text("utf-8")
        path.write_text(mutated(source, mutant), "utf-8")
        os.utime(path, (number, number))  # a compiled module is known by the time of its source
        tests = [test for test in tests_of(data, mutant) if test in there][: options.most]
        fate = "not reached"
        if tests:
            names = Path(place) / "chosen"
            names.write_text("\n".join(tests), "utf-8")
            status, lines = run(place, options.seconds, "-x", "--tb=no", f"@{names}")
            killers = [line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
            fate = {0: "survived", None: "out of time"}.get(status, f"killed by {killers[0] if killers else status}")
        path.write_text(source, "utf-8")
        counts[fate if fate in counts else "killed"] += 1
        instead = mutant.text.replace("|", "\\|")
        print(f"| {mutant.name} | {mutant.node.lineno} | `{instead}` | {fate} |", flush=True)
    print(f"\n{counts}")


if __name__ == "__main__":
    main()
