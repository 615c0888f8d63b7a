"""Near-duplicates.

`documents.near_duplicates` on text with planted copies, 1 to 30 % of whose words are other ones, here and there or in one
passage, next to datatrove's MinHash with its own settings, 14 buckets of 8 hashes, on the same files. The truth is a naive
program's: the exact sets of runs of five words of all pairs, from a similarity of 0.8 on. *recall*, *precision*: of links: a
cluster of n documents has n - 1. datatrove compares nothing but buckets, so it has pairs well below the threshold, too; a build
decides by an estimate that is off by 0.025 in a long text, and takes what is less than that below the threshold. `find` is what a
build does for it: reading, signatures, clusters. Whole processes with one thread, alternately; medians.

Below, clusters of made-up signatures, one in ten a near copy. Peak memory is with the file of signatures, 256 bytes each, as far
as the system keeps it in memory.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.documents import table_of
from tests.benchmarks.bench import HERE, SHARED, Bench, Grid, Whole, flows, python
from tests.benchmarks.corpus import texts_in
from tests.benchmarks.planted import planted, right_links, shingles_of, similar_pairs

PACKAGES = ("numpy", "pyarrow")
THRESHOLD, COPIES, FILES = 0.8, 0.1, 8
NEAR = {"near_duplicates": {"threshold": THRESHOLD}}
ALONE = {"tokenizer": "bytes", "workers": 1, "validation_fraction": 0}
FIND = """
import glob, json, sys, numpy as np, pyarrow as pa, pyarrow.parquet as pq
from tasks.assemble.duplicates import clusters
from tasks.text.signatures import signatures
found = []
for path in sorted(glob.glob(sys.argv[1] + "/*.parquet")):
    for batch in pq.ParquetFile(path).iter_batches(1000, columns=["text"]):
        found.append(signatures(batch["text"].cast(pa.large_string()), bytes(32), 5))
print(json.dumps(clusters(np.concatenate(found), float(sys.argv[2])).tolist()))
"""
MADE_UP = """
import sys, numpy as np
from tasks.assemble.duplicates import clusters
count, path, rng = int(sys.argv[1]), sys.argv[2], np.random.default_rng(0)
with open(path, "wb") as file:
    for start in range(0, count, 100_000):
        some = rng.integers(0, 1 << 63, (100_000, 32), np.uint64) & np.uint64(0x7F7F7F7F7F7F7F7F)
        some[1::10] = some[::10]
        some[1::10, :4] = some[2::10, :4]
        file.write(some.data)
labels = clusters(np.memmap(path, np.uint64, "r").reshape(-1, 32), 0.8)
print(int((labels != np.arange(count)).sum()))
"""


def measure(bench: Bench) -> list[Grid]:
    paths = sorted((SHARED / "corpus").glob("*.parquet")) or bench.share(0.1).paths
    texts = [*itertools.islice(texts_in(paths), bench.size(None, 1500))]
    texts = planted(texts, round(COPIES * len(texts)))
    directory = _written(bench, texts)
    truth = similar_pairs(shingles_of(texts), THRESHOLD)
    output, plain, theirs = (bench.fresh(f"near-{name}") for name in ("output", "plain", "theirs"))
    source = {"path": str(directory), "id_column": "id"}
    commands: dict[str, tuple[Sequence[object], Path]] = {
        "find": (python("-c", FIND, directory, THRESHOLD), output),
        "build with it": (flows("build", bench.config(output, source, documents=NEAR, **ALONE)), output),
        "build without": (flows("build", bench.config(plain, source, **ALONE)), plain),
    }
    rows = []
    try:
        peer = HERE / "peer_programs" / "near_duplicates_with_datatrove.py"
        commands["datatrove"] = [bench.peer("datatrove"), peer, directory, theirs, 1], theirs
    except RuntimeError as error:
        rows.append(["datatrove", str(error), *["–"] * 4])
    shares = {"build without": ["–", "–"]}

    def judge(name: str, run: Whole) -> None:
        if name not in shares:
            links = right_links(_clusters(name, run, output, theirs, directory), truth)
            shares[name] = [f"{share:.3f}" for share in links]

    for name, found in bench.in_turn(commands, judge).items():
        rows.append([name, found.spread, f"{found.median('cpu'):.1f}", found.megabytes, *shares[name]])
    about = f"{len(texts):,} documents, {sum(len(text.encode()) for text in texts) / 1e6:,.0f} MB, {len(truth):,} pairs."
    return [Grid(["", "s", "processor, s", "peak memory, MB", "recall", "precision"], rows, about), _memory(bench)]


def _memory(bench: Bench) -> Grid:
    rows = []
    for count in bench.size((1_000_000, 10_000_000), (100_000,)):
        path = bench.fresh("near-signatures")
        run = bench.run(python("-c", MADE_UP, count, path))
        path.unlink()
        rows.append([f"{count:,}", f"{int(run.out):,}", f"{run.seconds:.0f}", f"{run.cpu:.0f}", f"{run.peak / 1e6:,.0f}"])
    return Grid(["documents", "near copies", "s", "processor, s", "peak memory, MB"], rows)


def _written(bench: Bench, texts: Sequence[str]) -> Path:
    directory = bench.fresh("near-text")
    directory.mkdir()
    length = -(-len(texts) // FILES)
    for i in range(FILES):
        part = texts[i * length : (i + 1) * length]
        table = pa.table({"id": [f"{i}-{row}" for row in range(len(part))], "text": part})
        pq.write_table(table, directory / f"{i:03d}.parquet", row_group_size=1000)
    return directory


def _clusters(name: str, run: Whole, output: Path, theirs: Path, directory: Path) -> list[list[int]]:
    """The clusters that a program found, by the numbers of their documents."""
    counts = [pq.ParquetFile(path).metadata.num_rows for path in sorted(directory.glob("*.parquet"))]
    firsts, found = np.cumsum([0, *counts]).tolist(), dict[object, set[int]]()
    if name == "find":
        for number, first in enumerate(json.loads(run.out)):
            found.setdefault(first, set()).add(number)
    elif name == "datatrove":
        for i, first in enumerate(firsts[:-1]):
            path = theirs / "clusters" / f"{i:06d}.clusters"
            for document, cluster in np.fromfile(path, "<u4").reshape(-1, 2).tolist() if path.exists() else ():
                found.setdefault(cluster, set()).add(first + document)
    else:
        files = [file.name for source in open_corpus(str(output)).sources for file in source.files]
        first_of = dict(zip(files, firsts, strict=False))
        rows = table_of(open_corpus(output)).read().read_all().to_pylist()
        place = {row["key"]: first_of[row["file"]] + row["row"] for row in rows}
        for row in (row for row in rows if row["of"] is not None):
            found.setdefault(place[row["of"]], {place[row["of"]]}).add(place[row["key"]])
    return [sorted(mine) for mine in found.values() if len(mine) > 1]
