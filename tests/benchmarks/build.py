"""A whole build, beside its yardsticks.

`published way`: a pool of processes with tiktoken's `encode_ordinary` for each document, a preallocated buffer, `np.save` of
100M-token shards. `floor`: read Parquet, tokenize with the fast engine on two threads, write the raw bytes; nothing else. Both
are in `tests/benchmarks`, written for this comparison. The text is the source and documentation files of installed packages, no
file twice; cl100k_base. Whole processes, interpreter start and imports included; warm page cache; floor and build in turn, then
the published way once; medians (least to greatest). All outputs are deleted before each run. Peak memory is that of
the largest process. Documents of 200 MB, of 10 MB without a space, and lines of 2 GB: `tests/flows/test_bounds.py`, below 2 GB.

The build does more than the floor: sha256 of sources, BLAKE3 of segments, of each slice's tokens and of objects, crc32c, the
split, and it syncs what it has written behind every slice. The last row is of twice the text, or of what there is, without the
published way. The ratio depends on the processor: on an Intel Xeon (2026-11-30, commit cf1a501, the same versions) 995 MB took
9.3 s (8.9 to 9.8), the floor 6.2 s, which is 67%, and the published way 83.2 s.
"""

import json
import statistics

from tests.benchmarks.bench import HERE, TOKENIZER, Bench, Grid, Runs, flows, python, warm
from tests.benchmarks.corpus import Corpus

PACKAGES = ("gigatoken", "tiktoken", "pyarrow", "numpy", "awkward", "prefect")
SHARES = (0.25, 0.5, 1.0)
TWICE_AT_LEAST = 1.2
"""Where there is less of it, the row would say the same as the one above it."""
SIDES = ("build", "floor", "published way")


def sides_of(bench: Bench, text: Corpus, published: bool) -> dict[str, Runs]:
    """Runs of build and floor on the same files, and of the published way, if wanted."""
    output = bench.fresh("output")
    where = (text.directory, output, TOKENIZER)
    build = flows("build", bench.config(output, text))
    warm(text.paths)
    runs = bench.in_turn({"floor": (python(HERE / "floor.py", *where), output), "build": (build, output)})
    if published:
        runs["published way"] = Runs([bench.run(python(HERE / "published_way.py", *where), output)])
    return runs


def measure(bench: Bench) -> list[Grid]:
    beside, speeds, stages = [], [], []
    texts = [bench.share(share) for share in bench.size(SHARES, SHARES[-1:])]
    if not bench.quick and bench.twice.text_bytes > TWICE_AT_LEAST * bench.corpus.text_bytes:
        texts.append(bench.twice)
    for text in texts:
        runs = sides_of(bench, text, text is not bench.twice)
        median = {name: found.median() for name, found in runs.items()}
        floors, builds = ([json.loads(run.out) for run in runs[name]] for name in ("floor", "build"))
        inner = statistics.median(one["seconds"] for one in floors)
        megabytes = floors[0]["text_bytes"] / 1e6
        size = f"{megabytes:,.0f} MB"
        beside.append(
            [
                size,
                *(runs[name].spread if name in runs else "–" for name in SIDES),
                f"{median['published way'] / median['build']:.1f} times" if "published way" in runs else "–",
                f"{median['floor'] / median['build']:.0%}",
                f"{inner / median['build']:.0%}",
            ]
        )
        speeds.append(
            [
                size,
                f"{text.documents:,}",
                f"{floors[0]['tokens']:,}",
                *(f"{megabytes / median[name]:.0f}" if name in runs else "–" for name in SIDES),
                f"{runs['build'].median('cpu'):.1f}",
                *(runs[name].megabytes if name in runs else "–" for name in SIDES),
            ]
        )
        named = {stage: statistics.median(one["seconds"][stage] for one in builds) for stage in builds[0]["seconds"]}
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
