"""A Delta table of 20,000 files.

A [table](../tables.md) of as many data files, each of one row of 4 kB, cl100k_base: a build, a refresh that finds nothing new,
and one after 20 files were appended. The same files as a directory, by `path`, for comparison. Wall time, processor time (user
and system), peak memory, and the most files and directories that the output had; median of the rounds.
"""

import json
import uuid
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flat_tokens.extras import extra
from tests.benchmarks.bench import Bench, Grid, flows
from tests.benchmarks.shapes import FILES, measured, texts_of

PACKAGES = ("prefect", "deltalake", "tiktoken", "gigatoken", "pyarrow")
APPENDED = 20


def measure(bench: Bench) -> list[Grid]:
    deltalake: Any = extra("deltalake", "the benchmark of tables")
    home, plain, output = (bench.fresh(name) for name in ("delta", "delta-files", "delta-output"))
    plain.mkdir()
    given = texts_of(bench)
    deltalake.write_deltalake(home, pa.table({"text": ["first"]}))
    table = deltalake.DeltaTable(home)

    def append(count: int) -> None:
        """Add files to the table by one commit, and to the directory."""
        added = []
        for text, _ in zip(given, range(count), strict=False):
            name = f"part-{uuid.uuid4()}.parquet"
            for place in (home, plain):
                pq.write_table(pa.table({"text": [text]}), place / name)
            size = (home / name).stat().st_size
            added.append(deltalake.transaction.AddAction(name, size, {}, 0, True, json.dumps({"numRecords": 1})))
        table.create_write_transaction(added, "append", table.schema())
        table.update_incremental()

    append(bench.size(FILES, 200))
    table.create_checkpoint()
    rows = []
    for source, place in (("table", home), ("path", plain)):
        here = output / source
        build, refresh = (flows(command, bench.config(here, {source: str(place)})) for command in ("build", "refresh"))
        afresh = partial(bench.fresh, f"delta-output/{source}")
        rows.append([source, *measured(bench, "build", build, here, afresh)])
        rows.append([source, *measured(bench, "`refresh`, nothing changed", refresh, here)])
        appended = f"`refresh` after {APPENDED} files were appended"
        rows.append([source, *measured(bench, appended, refresh, here, partial(append, APPENDED))])
    return [Grid(["source", "command", "s", "processor, s", "peak, MB", "files and directories"], rows)]
