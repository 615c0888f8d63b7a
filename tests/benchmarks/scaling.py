"""Many cores.

A build on threads of one process, and on processes of one thread each, which is what builds with more than 8 workers do. The
first table is of real builds on the cores of this machine, cl100k_base, slices of 32 MB. *Lock held*: the share of the time in
which a worker holds the interpreter's lock, by `py-spy record --gil`, where that is installed; and the same in seconds for a GB
of text. With processes it is that of the threads that wait for them.

In the second table the engine does not encode: it sleeps as long as an engine of that speed takes and gives a token for each 4
bytes, so that workers beyond the cores of this machine can be watched. It is slow, as all else has but the cores that are here.
Its text is in slices of about 1 MB, without documents above 0.1 MB: each worker has some of them. *Busy*: time in the
engine, of all the time that the workers have while slices are tokenized.

By arithmetic: encoding, reading and writing a GB takes 9 to 12 seconds of a core, so a thread that holds the lock for 1.0 s of
that, as in the first row, leaves room for some nine in a process. Processes of one thread share no lock. What is left in the
build's own process is a task for each slice of 128 MB, some 10 ms with a server, so it could hand out 10 GB/s: 64 cores take
6 GB/s, 192 cores 17 GB/s. Above some 100 cores slices should be larger (`slice_bytes`), or the machine should be two workers of a
pool.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from flat_tokens.text.rows import text_buffers
from flows.runners import processes
from tasks.tokenize import engines
from tests.benchmarks.bench import ROOT, Bench, Grid, python, spread
from tests.benchmarks.build import config_of
from tests.benchmarks.corpus import Corpus

PACKAGES = ("gigatoken", "pyarrow", "numpy")
SHARE = 0.5
REAL = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))
"""Threads of a process, and processes."""
SLEEPING = ((16, 1, 1.0), (64, 1, 0.25), (1, 16, 1.0))
"""Threads of a process, processes, and MB/s of an engine."""
SPEED = "FLAT_TOKENS_BENCHMARK_MB_PER_S"
BYTES_OF_A_TOKEN = 4

_slept, _slept_lock = [0.0], threading.Lock()


def measure(bench: Bench) -> list[Grid]:
    text = bench.share(SHARE)
    groups = {"path": str(_in_small_groups(text, bench.fresh("small-groups"))), "id_column": "id"}
    real, sleeping = [], []
    for threads, count in REAL:
        words = _words(bench, text, threads, count)
        runs = [bench.run(words, clear=[bench.scratch / "scaling"]) for _ in range(bench.times)]
        held = _lock_held(bench, words)
        took = spread([run.seconds for run in runs])
        told = ["–", "–"] if held is None else [f"{held[0]:.0%}", f"{held[1] / text.text_bytes * 1e9:.2f} s"]
        real.append([threads, count, took, spread([run.cpu for run in runs]), f"{max(r.peak for r in runs) / 1e6:.0f}", *told])
    for threads, count, speed in bench.size(SLEEPING, ((4, 1, 10.0),)):
        words = _words(bench, text, threads, count, source=groups, slice_bytes="1 MB")
        run = bench.run(words, clear=[bench.scratch / "scaling"], environment={SPEED: str(speed)})
        seconds, slept, text_bytes = map(float, run.out.split()[-3:])
        engine = slept or text_bytes / 1e6 / speed  # other processes keep their own count
        sleeping.append([threads, count, speed, f"{seconds:.1f} s", f"{engine / (seconds * threads * count):.0%}"])
    for name in ("scaling", "small-groups"):
        bench.fresh(name)
    return [
        Grid(["threads of a process", "processes", "build", "processor", "MB of the largest", "lock held", "for each GB"], real),
        Grid(["threads of a process", "processes", "MB/s of an engine", "tokenize", "busy"], sleeping, "Engines that sleep."),
    ]


def _in_small_groups(text: Corpus, directory: Path) -> Path:
    """The same documents but for large ones, as a Parquet file with row groups of about 1 MB."""
    directory.mkdir()
    path, schema = directory / "text.parquet", pa.schema({"id": pa.string(), "text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd") as groups:
        for file in text.paths:
            table = pq.read_table(file, columns=schema.names, schema=schema)
            table = table.filter(pa.compute.less(pa.compute.binary_length(table["text"]), 100_000))
            group = np.cumsum(pa.compute.binary_length(table["text"]).to_numpy()) // 1_000_000
            for begin, end in pairwise([0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(table)]):
                groups.write_table(table[begin:end])
    return path


def _words(bench: Bench, text: Corpus, threads: int, count: int, **settings: Any) -> list[str]:
    config = config_of(bench, text, bench.scratch / "scaling", workers=threads * count, **{"slice_bytes": "32 MB", **settings})
    return python("-m", "tests.benchmarks.scaling", threads, config)


WORKERS = re.compile("task_|crew_| ahead")
"""Names of the threads that work on slices: those that have tasks, those that tokenize, and those that write ahead."""


def _lock_held(bench: Bench, words: list[str]) -> tuple[float, float] | None:
    """The share of a build's time in which its workers hold the lock of its own process, and seconds; None without py-spy."""
    if (spy := shutil.which("py-spy")) is None:
        return None
    bench.fresh("scaling")
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "samples")
        command = [spy, "record", "--gil", "--threads", "--rate", "200", "--format", "raw", "--output", str(found), "--", *words]
        begin = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        seconds = time.perf_counter() - begin
        lines = [line for line in found.read_text().splitlines() if WORKERS.search(line.partition(";")[0])]
        held = sum(int(line.rpartition(" ")[2]) for line in lines) / 200
    return held / seconds, held


def _sleep(engine: engines.Engine, texts: Any) -> engines.Tokens:
    """Take the time of an engine, and give tokens that no text has."""
    _, offsets = text_buffers(texts)
    ends = (offsets - offsets[0]) // BYTES_OF_A_TOKEN
    begin = time.perf_counter()
    time.sleep(float(offsets[-1] - offsets[0]) / 1e6 / float(os.environ[SPEED]))
    with _slept_lock:
        _slept[0] += time.perf_counter() - begin
    return engines.Tokens(np.zeros(int(ends[-1]), np.uint32), ends)


def main() -> None:
    """Build: ``THREADS CONFIG``, a process for each worker where THREADS is 1 and there are more workers than that."""
    from flows.commands.build import read_config
    from flows.pipelines.build import build
    from flows.runners.threads import Threads

    threads, path = sys.argv[1:]
    config = read_config(Path(path), [])
    processes.SMALL_BYTES = 0
    processes.WORKERS_OF_A_PROCESS = 1 if threads == "1" else 1 << 20
    with Threads(config.workers) as runner:
        result = build(config, runner)
    print(result.seconds["tokenize"], _slept[0], result.text_bytes_tokenized)


if os.environ.get(SPEED):
    engines.Engine.__call__ = _sleep  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    main()
