"""Small batches, and mixtures of many datasets.

The tokens are made up, as those of the table of reading. Batches of 8 rows that were not read before, the best of the passes; and
mixtures of copies of a small dataset, from the first `open` to the first batch, and what a batch takes of a processor then.
"""

from tests.benchmarks.bench import Bench, Grid
from tests.benchmarks.reading import PACKAGES, TOKENS, make, mixtures, small_batches

__all__ = ["PACKAGES", "measure"]


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("reading")
    make(scratch, bench.size(TOKENS, 2_000_000))
    return [small_batches(scratch, bench.times), mixtures(bench, scratch)]
