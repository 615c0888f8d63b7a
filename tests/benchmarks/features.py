"""Features of builds.

One Parquet source, a quarter of the text in slices of 32 MB, cl100k_base, with what a build may have besides. Wall time and
processor time (user and system), median of the rounds. *Written* is the bytes that the build's processes wrote for a byte of the
version.
"""

from __future__ import annotations

import json
import shutil
import statistics
from typing import Any

from tests.benchmarks.bench import HERE, Bench, Grid, bytes_below, python
from tests.benchmarks.build import TOKENIZER

PACKAGES = ("prefect", "tiktoken", "gigatoken", "numpy", "pyarrow")

FEATURES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("two threads", {}, {"workers": 2}),
    ("nine processes", {}, {"workers": 9}),
    ("kept columns", {"keep_columns": ["id"]}, {}),
    ("`duplicates: drop`", {}, {"documents": {"duplicates": "drop"}}),
    ("`near_duplicates`", {}, {"documents": {"near_duplicates": {}}}),
    ("`compact`", {}, {"layout": "compact"}),
    ("`zarr2`", {}, {"layout": "zarr2"}),
    ("loss mask", {"prompt_column": "id", "completion_column": "text"}, {}),
)
"""A name, settings of the source, settings of the build."""


def measure(bench: Bench) -> list[Grid]:
    corpus, output, rows = bench.share(0.25), bench.fresh("features-output"), []
    for name, source, settings in FEATURES:
        path = bench.scratch / "features.yaml"
        told = {"output": str(output), "source": {"path": f"{corpus.directory}/*.parquet", **source}, "tokenizer": TOKENIZER}
        path.write_text(json.dumps({**told, "slice_bytes": bench.size(32_000_000, 1_000_000), **settings}))
        found = []
        for _ in range(bench.times):
            shutil.rmtree(output, ignore_errors=True)
            written = bench.run(python(HERE / "written_bytes.py", "-m", "flows", "build", path, "--no-server", "--quiet"))
            one = json.loads(written.out.splitlines()[-1])
            found.append((one["seconds"], one["cpu"], one["written"] / bytes_below(output / "versions")))
        rows.append([name, *(f"{statistics.median(figures):.2f}" for figures in zip(*found, strict=True))])
    bench.fresh("features-output")
    return [Grid(["one Parquet source", "s", "processor, s", "written / version"], rows)]
