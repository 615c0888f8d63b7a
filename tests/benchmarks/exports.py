"""Exports.

205 million tokens with ids below 50,000 to every format: whole processes, interpreter start included, the best of the rounds,
beside the speed at which the same disk took random bytes in the same run, written and synced as exports write theirs. 16-bit
formats write half as many bytes for the same tokens. The tokens are made up, as those of the table of reading.
"""

import os
import time
from pathlib import Path

from flat_tokens import write_dataset
from flat_tokens.formats import FORMATS
from flat_tokens.stores.store import Store
from tests.benchmarks.bench import Bench, Grid, bytes_below, python
from tests.benchmarks.reading import documents

PACKAGES = ("numpy", "pyarrow", "zarr")
TOKENS = 205_000_000
HIGHEST_ID = 49_999
END_OF_TEXT = {"modalities", "nanogpt", "build-nanogpt", "jaxformer", "llm.c", "llm.c-llama-3", "datatrove"}


def disk(scratch: Path, megabytes: int = 1000) -> float:
    """Seconds a MB to write random bytes as exports write theirs, synced."""
    block = os.urandom(4 << 20)
    begin = time.perf_counter()
    with Store.at(scratch).create("disk.bin") as writer:
        for _ in range(megabytes // 4):
            writer.write(block)
    seconds = time.perf_counter() - begin
    (scratch / "disk.bin").unlink()
    return (megabytes << 20) / 1e6 / seconds


def measure(bench: Bench) -> list[Grid]:
    dataset, output = bench.fresh("exports"), bench.fresh("exported")
    write_dataset(dataset, documents(bench.size(TOKENS, 200_000), HIGHEST_ID))
    speed = max(disk(bench.scratch, bench.size(1000, 20)) for _ in range(bench.times))
    rows = []
    for name in list(FORMATS)[:: bench.size(1, 4)]:
        command = python("-m", "flat_tokens", "export", dataset, output, "--to", name)
        if name in END_OF_TEXT:
            command += ["--end-of-text", "50256" if name != "llm.c-llama-3" else "128001"]
        best = min(bench.runs(command, output), key=lambda run: run.seconds)
        size = bytes_below(output)
        rows.append(
            [name, f"{size / 1e6:,.0f}", f"{best.seconds:.2f}", f"{size / 1e6 / best.seconds:.0f}", f"{best.peak / 1e6:.0f}"]
        )
    return [Grid(["format", "MB of output", "s", "MB/s", "peak memory MB"], rows, f"The disk: {speed:,.0f} MB/s.")]
