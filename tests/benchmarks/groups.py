"""Groups.

Real groups of one slice each, with a worker as `make serve` has it, which takes one at a time. The reference engine tokenizes, a
thread to a slice, so that a group has some seconds of work: "alone" is the time of a slice in a build on one thread without a
server. Seconds of the tokenize stage for each group: the first one's wait and the last one's report are part of it. What remains
is a group's start and its requests; groups should be minutes long.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.bench import Bench, Grid, python
from tests.benchmarks.build import TOKENIZER, config_of

PACKAGES = ("prefect", "sqlalchemy", "pydantic")
REAL_SHARE, REAL_SLICE = 0.5, "34 MB"


def of_real_groups(bench: Bench, scratch: Path) -> Sequence[object]:
    """A row: a build whose every slice is a group, on one worker, beside one that spreads nothing."""
    from tests.flows.pool import finished, pool

    slow = {"name": TOKENIZER, "engine": "reference"}
    text, output = bench.share(REAL_SHARE), scratch / "real"
    settings = {"slice_bytes": REAL_SLICE, "tokenizer": slow}
    config = config_of(bench, text, output, workers=1, **settings)
    alone = json.loads(bench.run(python("-m", "flows", "build", config, "--no-server", "--json", "--quiet"), clear=[output]).out)
    shutil.rmtree(output)
    home = scratch / "home-real"
    home.mkdir(parents=True)
    with pool(home) as started, (home / "worker.log").open("w") as log:
        worker = ("worker", "start", "--pool", "flat-tokens-groups", "--name", "groups", "--limit", "1")
        started.start("deployments/worker.py", *worker, stdout=log, stderr=log)
        config = config_of(bench, text, output, runner="groups", groups={"threshold": 1, "slices": 1}, **settings)
        spread_out = finished(started.build(config))
    seconds = [build["seconds"]["tokenize"] / build["slices"] for build in (alone, spread_out)]
    return [spread_out["slices"], *(f"{of_each:.1f}" for of_each in seconds), f"{seconds[1] - seconds[0]:.1f}"]


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("groups")
    row = of_real_groups(bench, scratch)
    bench.fresh("groups")
    return [Grid(["groups", "alone, s a slice", "as groups, s each", "more, s"], [row])]
