"""Bytes per token.

The smallest text of the first table in each layout, cl100k_base, with everything that a version holds beside the tokens. MB/s of
text are of a whole build, from nothing to a published version.
"""

import json
from pathlib import Path

from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.manifest import SPLITS
from tests.benchmarks.bench import Bench, Grid, bytes_below, flows, warm
from tests.benchmarks.build import SHARES

PACKAGES = ("numcodecs", "zarr", "google-crc32c")


def measure(bench: Bench) -> list[Grid]:
    text = bench.share(SHARES[0])
    warm(text.paths)
    rows = []
    for layout in list(LAYOUTS)[: bench.size(None, 1)]:
        output = bench.fresh("layout")
        done = bench.run(flows("build", bench.config(output, text, layout=layout)), output)
        told = json.loads(done.out)
        tokens = sum(told["totals"][split]["token_count"] for split in SPLITS)
        size = bytes_below(Path(told["path"]))
        speed = text.text_bytes / 1e6 / done.seconds
        rows.append([f"`{layout}`", f"{tokens:,}", f"{size / 1e6:,.0f}", f"{size / tokens:.2f}", f"{speed:.0f}"])
    return [Grid(["layout", "tokens", "MB", "bytes per token", "MB/s of text"], rows)]
