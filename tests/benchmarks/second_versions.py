"""Bytes of a second version on the hub.

Documents of source and documentation, cl100k_base, exported to Parquet as `publish` does; then the same text with a change, built
into the same output and exported again. MB of the second version's files, and MB of those that a store of chunks which has the
first version does not have yet: new chunks as the hub's client finds them (hf_xet, on a local store). Beside them the same rows
written by pyarrow's own defaults, whose pages do not end where the content says.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flat_tokens.extras import extra
from tests.benchmarks.bench import Bench, Grid, flows, python
from tests.benchmarks.corpus import texts_in

PACKAGES = ("hf_xet", "pyarrow")
EVERY = 1000
CHANGES: dict[str, Callable[[list[str]], list[str]]] = {
    "nothing": lambda texts: texts,
    "a hundredth of the documents is appended": lambda texts: texts + [f"appended: {text}" for text in texts[::100]],
    "a hundredth of the documents is removed, in one place": lambda texts: (
        texts[: len(texts) // 2] + texts[len(texts) * 51 // 100 :]
    ),
    f"one document of {EVERY:,} is changed": lambda texts: changed(texts, EVERY),
    "one document of 100 is changed": lambda texts: changed(texts, 100),
}


def changed(texts: list[str], every: int) -> list[str]:
    return [f"changed: {text}" if number % every == 0 else text for number, text in enumerate(texts)]


def new_bytes(files: Iterable[Path], store: Path) -> int:
    """Bytes of files that a store of chunks did not have. It has them afterwards."""
    hf_xet: Any = extra("hf_xet", "the benchmark of second versions")
    commit = hf_xet.XetSession().new_upload_commit(endpoint=f"local://{store}")
    for file in files:
        commit.start_upload_file(str(file))
    return int(commit.wait_to_finish().dedup_metrics.new_bytes)


def measure(bench: Bench) -> list[Grid]:
    texts, rows = [*texts_in(bench.share(bench.size(0.2, 1.0)).paths)], []
    for name, change in CHANGES.items():
        here = bench.fresh("second-versions")
        here.mkdir()
        build = flows("build", bench.config(here / "out", {"path": str(here / "text.parquet")}))
        for number, version in enumerate((texts, change(texts))):
            pq.write_table(pa.table({"text": version}), here / "text.parquet")
            bench.run(build)
            bench.run(python("-m", "flat_tokens", "export", here / "out", here / f"{number}", "--to", "parquet"))
            files = sorted((here / f"{number}").rglob("*.parquet"))
            (plain := here / f"plain-{number}").mkdir()
            for file in files:
                pq.write_table(pq.read_table(file), plain / file.name)
            sent = [new_bytes(some, here / store) for some, store in ((files, "a"), (sorted(plain.iterdir()), "b"))]
        rows.append([name, *(f"{size / 1e6:.1f}" for size in (sum(file.stat().st_size for file in files), *sent))])
    return [Grid(["change", "second version, MB", "new, MB", "new by pyarrow's defaults, MB"], rows)]
