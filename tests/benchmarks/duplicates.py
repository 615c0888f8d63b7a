"""Duplicates.

`documents.duplicates: drop`: a process that meets the digests of so many texts, each text in ten a copy, in portions of 50,000.
Peak memory is with the interpreter and numpy; a build does this beside its other work.
"""

from tests.benchmarks.bench import Bench, Grid, python

PACKAGES = ("numpy", "blake3")
MEET = """
import sys, numpy as np
from tasks.assemble.duplicates import FirstTexts
rng, seen, copies = np.random.default_rng(0), FirstTexts(), 0
for number in range(int(sys.argv[1]) // 50_000):
    digests = rng.integers(0, 1 << 63, (50_000, 2)).astype(np.uint64)
    digests[::10] = digests[1]
    copies += len(seen.add(digests, np.arange(50_000, dtype=np.uint64)).copies)
print(copies)
"""


def measure(bench: Bench) -> list[Grid]:
    rows = []
    for count in bench.size((1_000_000, 10_000_000), (100_000,)):
        runs = bench.runs(python("-c", MEET, count))
        rows.append([f"{count:,}", f"{int(runs[0].out):,}", f"{runs.median():.1f}", runs.megabytes])
    return [Grid(["texts", "copies", "s", "peak memory, MB"], rows)]
