"""Training from a store.

A simulated store has a dataset in layout `mmap`: files, of which each request is answered after 30 ms and a jitter of 10 ms on
average, one in a hundred after 2 s. What a client of HTTP or S3 computes is not in it. A consumer takes batches of 32 rows of
8,192 tokens (1 MiB), 0.3 GB/s of them: it is busy for 3.5 ms after each. Its waits are the times in `next()` above 5 ms, which is
how long Python may keep a thread waiting for others, from the batch on with which the first buffer is here. `BlockOrder(32, 64)`
has blocks of a unit and buffers of 64 MiB.

The second table has how random batches are: the variance of the mean over a batch of a number that all rows of a block share,
measured over 2 Mi rows, as a multiple of that over random rows, and the same by the formula of docs/reading/stores.md.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import flat_tokens
from flat_tokens import BlockOrder, ShuffledLoader, TokenBatch, write_dataset
from flat_tokens.stores import cached
from tests.benchmarks.bench import Bench, Grid
from tests.slow_store import SlowStore

PACKAGES = ("fsspec", "numpy")
LENGTH, BATCH = 8192, 32
BATCH_BYTES = LENGTH * BATCH * 4
BYTES_PER_SECOND = 0.3e9
NO_WAIT = 0.005
ORDER = BlockOrder(32, 64)


class Rows:
    """A view of nothing: only its number of rows counts."""

    def __len__(self) -> int:
        return 1 << 21

    def batch(self, indices: Any) -> Any:
        return {"row": indices}


def measure(bench: Bench) -> list[Grid]:
    root = bench.fresh("from-store")
    tokens = bench.size(400_000_000, 20_000_000)
    rng = np.random.default_rng(0)
    parts = (rng.integers(0, 60_000, (4000, 1000), dtype=np.uint32) for _ in range(tokens // 4_000_000))
    write_dataset(root / "dataset", (TokenBatch.from_sequences(part) for part in parts))
    rows = []
    dice = random.Random(0)
    SlowStore.reset(lambda number, path: 2.0 if dice.random() < 0.01 else 0.03 + dice.expovariate(100))
    url = f"slow://{root}"
    rows.append(["without a cache, 16 batches ahead, `shuffled`", *consumed(url, {}, "shuffled", bench.size(60, 20))])
    cache = {"cache": root / "cache", "cache_bytes": 4_000_000_000}
    rows.append(["cache, `BlockOrder`", *consumed(url, cache, ORDER)])
    rows.append(["cache, `BlockOrder`, another epoch", *consumed(url, cache, ORDER)])
    before, cached.FIRST_LATE, cached.LATE_FACTOR = (cached.FIRST_LATE, cached.LATE_FACTOR), 1e9, 1e9
    rows.append(["the same without second requests", *consumed(url, {**cache, "cache": root / "other"}, ORDER)])
    cached.FIRST_LATE, cached.LATE_FACTOR = before
    header = ["", "first batch", "first buffer", "batches", "waits", "longest", "waited in all", "GB/s"]
    return [Grid(header, rows), Grid(["block", "blocks of a buffer", "batch", "measured", "by the formula"], [*randomness()])]


def consumed(url: str, options: dict[str, Any], order: Any, most: int = 1 << 30) -> list[str]:
    """What a consumer of an epoch, or of *most* batches, waits for."""
    view = flat_tokens.open(f"{url}/dataset", **options).train.packed(LENGTH)
    loader = ShuffledLoader(view, BATCH, 1, order=order, drop_last=True)
    waits, begin = [], time.perf_counter()
    with loader.steps(0, min(most, len(loader)), prefetch=16, threads=8 if order == "shuffled" else 2) as batches:
        while True:
            asked = time.perf_counter()
            if next(batches, None) is None:
                break
            waits.append(time.perf_counter() - asked)
            due = asked + waits[-1] + BATCH_BYTES / BYTES_PER_SECOND
            time.sleep(max(due - time.perf_counter(), 0))
    seconds = time.perf_counter() - begin
    first = ORDER.buffer_blocks // 4
    later = [wait for wait in waits[first:] if wait > NO_WAIT]
    told = [f"{waits[0]:.2f} s", f"{sum(waits[:first]):.2f} s", f"{len(waits)}", f"{len(later)}"]
    return [*told, f"{max(later, default=0):.2f} s", f"{sum(later):.2f} s", f"{len(waits) * BATCH_BYTES / seconds / 1e9:.2f}"]


def randomness() -> Iterator[list[str]]:
    for block, buffer, batch in ((128, 16, 64), (128, 64, 64), (128, 64, 256), (128, 256, 256), (32, 64, 256), (32, 1024, 256)):
        per_block = np.random.default_rng(0).standard_normal(len(Rows()) // block)
        rows = ShuffledLoader(Rows(), len(Rows()), 1, order=BlockOrder(block, buffer)).indices(0)
        means = per_block[rows // block].reshape(-1, batch).mean(axis=1)
        expected = 1 + (batch - 1) * (block - 1) / (block * buffer - 1)
        yield [f"{block}", f"{buffer}", f"{batch}", f"{means.var() * batch / per_block.var():.2f}", f"{expected:.2f}"]
