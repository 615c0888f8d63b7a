"""Opening below a root.

A build of 2,000 small files with `FLAT_TOKENS_INPUT_ROOTS` and `FLAT_TOKENS_OUTPUT_ROOTS` set, and without: rounds of both, the
order changing with each, with a new output each time. Processor time (user and system) of whole processes, interpreter start and
imports included, as other processes change it less than wall time: the least and the median. `roots / none` is the median of the
rounds' quotients, with their quartiles. The second table opens the same files in one process, the least of 20 times over all of
them, and counts what a build opens within the roots: so many openings are that share of the least build.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.bench import ROOT, Bench, Grid, python, run_whole

PACKAGES = ("numpy", "prefect")
FILES, ROUNDS = 2000, 16
COUNT = """
import sys
from flat_tokens.stores import reading
count, real = 0, reading._opened_within
def counted(*args):
    global count
    count += 1
    return real(*args)
reading._opened_within = counted
from flows.commands.main import main
status = main(sys.argv[1:])
print(count)
sys.exit(status)
"""
OPEN = """
import os, sys, time
from flat_tokens.stores.reading import open_plain
paths = [entry.path for entry in sorted(os.scandir(sys.argv[1]), key=lambda entry: entry.name)]
def once():
    begin = time.process_time()
    for path in paths:
        open_plain(path).close()
    return time.process_time() - begin
print(min(once() for _ in range(20)))
"""


def write_files(directory: Path, count: int) -> Path:
    """Write *count* texts of some hundred bytes."""
    directory.mkdir(parents=True)
    for i in range(count):
        (directory / f"{i:05}.txt").write_text(f"Text {i}: " + "salt wind over the harbour " * (5 + i % 20))
    return directory


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("opening")
    text, output = write_files(scratch / "text", bench.size(FILES, 50)), scratch / "out"
    settings = scratch / "dataset.yaml"
    settings.write_text(
        f"output: {output}\nsource:\n  path: {text}/*.txt\ntokenizer: bytes\nvalidation_fraction: 0.1\nworkers: 1\n"
    )
    bounds = {"FLAT_TOKENS_INPUT_ROOTS": str(text), "FLAT_TOKENS_OUTPUT_ROOTS": str(output)}
    environments = {"roots": bounds, "none": dict.fromkeys(bounds, "")}

    words = ("build", "--quiet", "--no-server", settings)

    def build(name: str) -> float:
        return bench.run(python("-m", "flows", *words), [output], environments[name]).cpu

    rounds: list[dict[str, float]] = []
    build("none")
    for i in range(bench.size(ROUNDS, 1)):
        order = list(environments) if i % 2 else list(environments)[::-1]
        rounds.append({name: build(name) for name in order})
    opened = {
        name: float(run_whole(python("-c", OPEN, text), {**of, "PYTHONPATH": str(ROOT)}).out) for name, of in environments.items()
    }
    openings = int(bench.run(python("-c", COUNT, *words), [output], bounds).out.split()[-1])
    bench.fresh("opening")
    return [_of_builds(rounds), _of_files(opened, bench.size(FILES, 50), openings, rounds)]


def _of_builds(rounds: Sequence[dict[str, float]]) -> Grid:
    quotients = [one["roots"] / one["none"] for one in rounds]
    low, _, high = statistics.quantiles(quotients, n=4) if len(quotients) > 1 else quotients * 3
    seconds = {name: [one[name] for one in rounds] for name in ("none", "roots")}
    found = [f"{min(of):.2f} ({statistics.median(of):.2f})" for of in seconds.values()]
    quotient = f"{statistics.median(quotients):.3f} ({low:.3f} to {high:.3f})"
    return Grid(["rounds", "no roots, processor s", "roots, processor s", "roots / none"], [[f"{len(rounds)}", *found, quotient]])


def _of_files(opened: dict[str, float], count: int, openings: int, rounds: Sequence[dict[str, float]]) -> Grid:
    each = {name: seconds / count for name, seconds in opened.items()}
    share = openings * (each["roots"] - each["none"]) / min(one["none"] for one in rounds)
    row = [f"{count:,}", *(f"{each[name] * 1e6:.1f}" for name in ("none", "roots")), f"{openings:,}", f"{share:.2%}"]
    return Grid(["files", "no roots, µs a file", "roots, µs a file", "a build's openings", "more, of the build"], [row])
