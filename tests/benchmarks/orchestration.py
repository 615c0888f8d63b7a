"""Watching a build.

The same build of many small slices (2 kB each) on a thread a core, without a Prefect server and with that of `make serve` on the
same cores and a fresh SQLite database. Slices below 8 MB share a task as soon as there is more to do than workers, up to 100 of
them; every slice has its own receipt and is resumed by itself all the same. "Behind": how long after the build's end the server
showed all of it. Seconds of the tokenize stage, unless said otherwise. Builds in turn, three of 2,000 slices and one of 20,000;
medians (least to greatest). Each has a directory of its own, and all are deleted behind the last one: for minutes after a
deletion ext4 looks long for a place for each new file.
"""

import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Bench, Grid, Runs, Whole, python, run_whole, spread
from tests.flows.pool import Pool, pool

PACKAGES = ("prefect", "sqlalchemy", "pydantic")
SLICES = ((2000, 3), (20_000, 1))
"""Slices of a build, and how many times it is built."""
CATCH_UP_SECONDS = 600.0


def processor_seconds(pid: int) -> float:
    """Seconds of processors that a process has taken so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def build(bench: Bench, out: Path, slices: int, settings: Mapping[str, str]) -> tuple[Whole, float]:
    """Build from nothing; also the seconds of the tokenize stage. *settings*: how the server that watches is reached, if any."""
    source = {"path": str(out.parent / f"{slices}.jsonl")}
    config = bench.config(out, source, tokenizer="bytes", slice_bytes=1000, workers=os.cpu_count())
    words = python("-m", "flows", "build", config, "--quiet", *([] if settings else ["--no-server"]))
    done = run_whole(words, {"PREFECT_HOME": str(out.parent / "prefect"), **settings})
    (record,) = (out / "runs").glob("*.json")
    facts = json.loads(record.read_text())
    if facts["slices"] != slices:
        raise RuntimeError(f"{facts['slices']} slices instead of {slices}")
    return done, float(facts["seconds"]["tokenize"])


@contextlib.contextmanager
def server(home: Path) -> Iterator[tuple[Pool, dict[str, str]]]:
    """A server on a fresh database, and the settings of a build that reports to it."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with pool(home) as watching:
        yield watching, {name: watching.environment[name] for name in ("PREFECT_HOME", "PREFECT_API_URL")}


def task_runs(server: Pool, **which: Any) -> int:
    """How many of these the server knows."""
    return int(server.get("/task_runs/count", {"task_runs": which} if which else {}))


def knows_all(server: Pool) -> bool:
    """Whether the server knows that the build's last task is completed, and all others."""
    completed = {"state": {"type": {"any_": ["COMPLETED"]}}}
    last = task_runs(server, name={"like_": "finalize"}, **completed)
    return bool(last) and task_runs(server, **completed) == task_runs(server)


def in_turn(bench: Bench, scratch: Path, slices: int, number: int) -> tuple[float, float, Whole, int, float, float, float]:
    """Build alone, then with a server that is started for it. Seconds of the tokenize stage alone and with the server, the latter
    build, its task runs, the server's processor seconds, MB of its database, and for how many seconds it was behind.
    """
    _, alone = build(bench, scratch / f"{slices}-alone-{number}", slices, {})
    with server(scratch / "prefect") as (watching, settings):
        before = processor_seconds(watching.server.pid)
        whole, watched = build(bench, scratch / f"{slices}-watched-{number}", slices, settings)
        ended = time.perf_counter()
        while not knows_all(watching) and time.perf_counter() < ended + CATCH_UP_SECONDS:
            time.sleep(1)
        behind = time.perf_counter() - ended
        used = processor_seconds(watching.server.pid) - before
        database = sum(path.stat().st_size for path in watching.home.glob("prefect.db*")) / 1e6  # the log of it included
        return alone, watched, whole, task_runs(watching), used, database, behind


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("orchestration")
    rows = []
    for slices, times in bench.size(SLICES, ((20, 1),)):
        scratch.mkdir(exist_ok=True)
        lines = (json.dumps({"text": f"{i} " + "one document, one slice " * 80}) for i in range(slices))
        (scratch / f"{slices}.jsonl").write_text("".join(f"{line}\n" for line in lines))  # each of them a slice
        alone, watched, wholes, *taken = zip(*(in_turn(bench, scratch, slices, number) for number in range(times)), strict=True)
        more = 1e3 * (statistics.median(watched) - statistics.median(alone)) / slices
        task_runs, *others = map(statistics.median, taken)
        figures = spread(alone, ""), spread(watched, ""), f"{more:.1f}", f"{Runs(wholes).median():.1f}", Runs(wholes).megabytes
        rows.append([f"{slices:,}", f"{task_runs:,.0f}", *figures, *(f"{other:.0f}" for other in others)])
    columns = ["slices", "task runs", "alone, s", "with a server, s", "more per slice, ms", "whole build, s", "peak memory, MB"]
    return [Grid([*columns, "server's processor, s", "database, MB", "behind, s"], rows)]
