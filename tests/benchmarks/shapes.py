"""Shapes of sources.

The same text as 20,000 text files of 4 kB, as 2,000 files of JSON lines or Parquet, and as one file of each, cl100k_base; and
100,000 small files. The *script* of 15 lines (`tests/benchmarks/short_script.py`) has a pool of two, tiktoken and `np.save`.
*Reading* opens and reads each file, in one thread, and does nothing with it (`tests/benchmarks/read_files.py`). Wall time,
processor time (user and system), peak memory, and the most files and directories that the output had while the build ran;
median of the rounds.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.bench import HERE, Bench, Grid, Runs, flows, greatest, python, warm
from tests.benchmarks.corpus import texts_in

PACKAGES = ("prefect", "tiktoken", "gigatoken", "numpy", "pyarrow")
FILES, FILE_BYTES = 20_000, 4_000
LARGER_FILES = 2_000
MANY_FILES = 100_000


def texts_of(bench: Bench) -> Iterator[str]:
    """The text in pieces of FILE_BYTES characters."""
    left = ""
    for text in texts_in(bench.corpus.paths):
        left += text + "\n\n"
        while len(left) >= FILE_BYTES:
            yield left[:FILE_BYTES]
            left = left[FILE_BYTES:]


def write_shapes(bench: Bench, texts: Sequence[str]) -> Path:
    """The text in each shape, below one directory."""
    home = bench.fresh("shapes")
    share = max(1, len(texts) // bench.size(LARGER_FILES, 20))
    for number, text in enumerate(texts):
        path = home / f"text/{number // 500:03d}/{number:06d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
    for name, size in (("many", share), ("one", len(texts))):
        for start in range(0, len(texts), size):
            rows = [{"text": text} for text in texts[start : start + size]]
            for kind in ("jsonl", "parquet"):
                path = home / f"{name}-{kind}/{start:06d}.{kind}"
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind == "parquet":
                    pq.write_table(pa.Table.from_pylist(rows), path)
                else:
                    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def measured(
    bench: Bench,
    name: str,
    words: Sequence[object],
    output: Path = Path("/nowhere"),
    before: Callable[[], object] = lambda: None,
) -> list[str]:
    """A row of a command: medians of the rounds, the largest peak, and the most files and directories at the output while it ran.
    *before* each round, what it needs.
    """
    runs, counts = Runs(), []
    for _ in range(bench.times):
        before()
        with greatest(lambda: sum(1 for _ in output.rglob("*")), 0.05) as most:
            runs.append(bench.run(words))
        counts += most
    shown = f"{max(counts):,.0f}" if any(counts) else ""
    return [name, f"{runs.median():.2f}", f"{runs.median('cpu'):.2f}", runs.megabytes, shown]


def measure(bench: Bench) -> list[Grid]:
    texts = [text for text, _ in zip(texts_of(bench), range(bench.size(FILES, 200)), strict=False)]
    home, output = write_shapes(bench, texts), bench.fresh("shapes-output")
    warm(path for path in home.rglob("*") if path.is_file())

    def config(source: Path) -> Path:
        return bench.config(output, {"path": str(source)})

    afresh = partial(bench.fresh, output.name)

    def edit() -> None:
        path = home / "text/000/000100.txt"
        path.write_text(path.read_text() + "One line more.\n")

    text = home / "text"
    rows = [
        measured(bench, "the script", python(HERE / "short_script.py", text, bench.scratch / "ids.npy")),
        measured(bench, f"build of {len(texts):,} text files", flows("build", config(text)), output, afresh),
        measured(bench, "the same, nothing changed", flows("build", config(text)), output),
        measured(bench, "the same, one file changed, `refresh`", flows("refresh", config(text)), output, edit),
    ]
    for name in ("many-jsonl", "one-jsonl", "many-parquet", "one-parquet"):
        directory = home / name
        count = sum(1 for _ in directory.iterdir())
        label = f"build of {count:,} {name.partition('-')[2]} file{'s' if count > 1 else ''}"
        rows.append(measured(bench, label, flows("build", config(directory)), output, afresh))
        rows.append(measured(bench, "reading the same, no more", python(HERE / "read_files.py", directory)))
    many, count = bench.fresh("shapes-many"), bench.size(MANY_FILES, 300)
    for number in range(count):
        path = many / f"{number // 1000:03d}/{number:06d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"note {number}\n")
    rows.append(measured(bench, f"`plan` of {count:,} files of 11 bytes", python("-m", "flows", "plan", config(many))))
    rows.append(measured(bench, "build of the same", flows("build", config(many)), output, afresh))
    return [Grid(["command", "s", "processor, s", "peak, MB", "files and directories"], rows)]
