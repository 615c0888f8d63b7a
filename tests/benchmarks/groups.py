"""Groups.

Real groups of one slice each, with a worker as `make serve` has it, which takes one at a time. The reference engine tokenizes, a
thread to a slice, so that a group has some seconds of work: "alone" is the time of a slice in a build on one thread without a
server. Seconds of the tokenize stage for each group: the first one's wait and the last one's report are part of it. What remains
is a group's start and its requests; groups should be minutes long.
"""

import json
import shutil

from tests.benchmarks.bench import TOKENIZER, Bench, Grid, flows
from tests.flows.pool import finished, pool

PACKAGES = ("prefect", "sqlalchemy", "pydantic")
REAL_SHARE, REAL_SLICE = 0.5, "34 MB"


def measure(bench: Bench) -> list[Grid]:
    """A build whose every slice is a group, on one worker, beside one that spreads nothing."""
    scratch = bench.fresh("groups")
    text, output, home = bench.share(REAL_SHARE), scratch / "real", scratch / "home"
    settings = {"slice_bytes": REAL_SLICE, "tokenizer": {"name": TOKENIZER, "engine": "reference"}}
    alone = json.loads(bench.run(flows("build", bench.config(output, text, workers=1, **settings)), output).out)
    shutil.rmtree(output)
    home.mkdir(parents=True)
    with pool(home) as started:
        started.work("groups")
        config = bench.config(output, text, runner="groups", groups={"threshold": 1, "slices": 1}, **settings)
        spread_out = finished(started.build(config))
    seconds = [build["seconds"]["tokenize"] / build["slices"] for build in (alone, spread_out)]
    row = [spread_out["slices"], *(f"{of_each:.1f}" for of_each in seconds), f"{seconds[1] - seconds[0]:.1f}"]
    return [Grid(["groups", "alone, s a slice", "as groups, s each", "more, s"], [row])]
