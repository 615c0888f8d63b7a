"""A whole build, beside its yardsticks.

`published way`: a pool of processes with tiktoken's `encode_ordinary` for each document, a preallocated buffer, `np.save` of
100M-token shards. `floor`: read Parquet, tokenize with the fast engine on two threads, write the raw bytes; nothing else. Both
are in `tests/benchmarks`, written for this comparison. The text is the source and documentation files of installed packages, no
file twice; cl100k_base. Whole processes, interpreter start and imports included; warm page cache; floor and build in turn, then
the published way in the first round; medians (least to greatest). All outputs are deleted before each run. Peak memory is that of
the largest process. Documents of 200 MB, of 10 MB without a space, and lines of 2 GB: `tests/flows/test_bounds.py`, below 2 GB.

The build does more than the floor: sha256 of sources, BLAKE3 of segments, of each slice's tokens and of objects, crc32c, the
split, and it syncs what it has written behind every slice. The last row is of twice the text, or of what there is, without the
published way.
"""

from __future__ import annotations

import json
import statistics
from typing import Any, NamedTuple

from tests.benchmarks.bench import HERE, TOKENIZER, Bench, Grid, Whole, flows, python, spread, warm
from tests.benchmarks.corpus import Corpus

PACKAGES = ("gigatoken", "tiktoken", "pyarrow", "numpy", "awkward", "prefect")
SHARES = (0.25, 0.5, 1.0)
TWICE_AT_LEAST = 1.2
"""Where there is less of it, the row would say the same as the one above it."""
SIDES = ("build", "floor", "published way")


class Side(NamedTuple):
    """A process and the JSON value that it printed last."""

    whole: Whole
    told: dict[str, Any]


def sides_of(bench: Bench, text: Corpus, published: bool) -> dict[str, list[Side]]:
    """Runs of build and floor on the same files, and of the published way, if wanted."""
    output = bench.fresh("output")
    where = (text.directory, output, TOKENIZER)
    commands = {
        "floor": python(HERE / "floor.py", *where),
        "build": flows("build", bench.config(output, text)),
        "published way": python(HERE / "published_way.py", *where),
    }
    runs: dict[str, list[Side]] = {name: [] for name in commands}
    warm(text.paths)
    for number in range(bench.times):
        for name, command in commands.items():
            if name != "published way" or (published and number == 0):
                whole = bench.run(command, output)
                runs[name].append(Side(whole, json.loads(whole.out)))
    bench.fresh("output")
    return runs


def measure(bench: Bench) -> list[Grid]:
    beside, speeds, stages = [], [], []
    texts = [bench.share(share) for share in bench.size(SHARES, SHARES[-1:])]
    if not bench.quick and bench.twice.text_bytes > TWICE_AT_LEAST * bench.corpus.text_bytes:
        texts.append(bench.twice)
    for text in texts:
        runs = {name: sides for name, sides in sides_of(bench, text, text is not bench.twice).items() if sides}
        seconds = {name: [side.whole.seconds for side in sides] for name, sides in runs.items()}
        median = {name: statistics.median(times) for name, times in seconds.items()}
        inner = statistics.median(side.told["seconds"] for side in runs["floor"])
        megabytes = runs["floor"][0].told["text_bytes"] / 1e6
        size = f"{megabytes:,.0f} MB"
        beside.append(
            [
                size,
                *(spread(seconds[name]) if name in runs else "–" for name in SIDES),
                f"{median['published way'] / median['build']:.1f} times" if "published way" in runs else "–",
                f"{median['floor'] / median['build']:.0%}",
                f"{inner / median['build']:.0%}",
            ]
        )
        peaks = {name: max(side.whole.peak for side in sides) for name, sides in runs.items()}
        speeds.append(
            [
                size,
                f"{text.documents:,}",
                f"{runs['floor'][0].told['tokens']:,}",
                *(f"{megabytes / median[name]:.0f}" if name in runs else "–" for name in SIDES),
                f"{statistics.median(side.whole.cpu for side in runs['build']):.1f}",
                *(f"{peaks[name] / 1e6:.0f}" if name in runs else "–" for name in SIDES),
            ]
        )
        told = [side.told["seconds"] for side in runs["build"]]
        named = {stage: statistics.median(one[stage] for one in told) for stage in told[0]}
        outside = median["build"] - sum(named.get(stage, 0.0) for stage in ("tokenize", "split"))
        stages.append([size, *(f"{named[stage]:.2f}" for stage in named), f"{outside:.2f}"])
    header = ["text", "build", "floor", "published way", "build / published way", "build / floor", "without the floor's start"]
    each = [f"{what}: {name}" for what in ("MB/s", "MB") for name in SIDES]
    columns = ["text", "documents", "tokens", *each[:3], "build's processor, s", *each[3:]]
    return [
        Grid(header, beside),
        Grid(columns, speeds, "The same runs: megabytes of text a second, and peak memory."),
        Grid(["text", *named, "outside tokenize and split"], stages, "Stages of the build, seconds, medians."),
    ]
