"""Refreshes.

The text in ten files with ids, as Parquet, as JSON lines, and as these in zstd. One edit follows the other, and a refresh with
default settings follows each, cl100k_base. *Tokenized* is the share of all text that the refresh tokenized. *Equal*: its
manifest, which has the digest of every object, is that of a build from nothing.
"""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.benchmarks.bench import Bench, Grid, flows, run_whole

PACKAGES = ("pyarrow", "zstandard")
FILES = 10
EDITED, SHORTER, LONGER, RENAMED, REWRITTEN, GROWN, JOINED = range(1, 8)
"""Numbers of the files that the edits change."""


class File(NamedTuple):
    """A source file: columns id and text. ``other``: written in another way, with the same rows."""

    name: str
    rows: pa.Table
    other: bool = False


Files = list[File]


def edit_row(rows: pa.Table) -> pa.Table:
    text = rows["text"].to_pylist()
    text[len(rows) // 2] += " And a line more."
    return rows.set_column(1, "text", pa.array(text, pa.large_string()))


def delete_row(rows: pa.Table) -> pa.Table:
    at = len(rows) // 2
    return pa.concat_tables([rows.slice(0, at), rows.slice(at + 1)])


def of_rows(number: int, edit: Callable[[pa.Table], pa.Table]) -> Callable[[Files], Files]:
    """The edit of the rows of one file."""
    return lambda files: replaced(files, number, rows=edit(files[number].rows))


def append(files: Files) -> Files:
    """Append a hundredth of all text: documents of the first file, each line turned round."""
    wanted, texts = sum(file.rows["text"].nbytes for file in files) // 100, list[str]()
    for text in files[0].rows["text"].to_pylist():
        if wanted > 0:
            texts.append("\n".join(line[::-1] for line in text.split("\n")))
            wanted -= len(texts[-1].encode())
    return replaced(files, GROWN, rows=pa.concat_tables([files[GROWN].rows, new_rows(texts)]))


def join(files: Files) -> Files:
    both = pa.concat_tables([files[JOINED].rows, files[JOINED + 1].rows])
    return [*replaced(files, JOINED, rows=both)[: JOINED + 1], *files[JOINED + 2 :]]


EDITS: dict[str, Callable[[Files], Files]] = {
    "a row edited": of_rows(EDITED, edit_row),
    "a row deleted": of_rows(SHORTER, delete_row),
    "a row put in at the front of a file": of_rows(
        LONGER, lambda rows: pa.concat_tables([new_rows(["a new document at the front"]), rows])
    ),
    "a file renamed": lambda files: replaced(files, RENAMED, name="renamed"),
    "a file rewritten: row groups and codec; spaces; level": lambda files: replaced(files, REWRITTEN, other=True),
    "1 % appended": append,
    "two files joined": join,
}


def replaced(files: Files, number: int, **changes: Any) -> Files:
    return [*files[:number], files[number]._replace(**changes), *files[number + 1 :]]


def new_rows(texts: list[str]) -> pa.Table:
    ids = [f"new-{number}-{len(text)}" for number, text in enumerate(texts)]
    return pa.table({"id": pa.array(ids, pa.large_string()), "text": pa.array(texts, pa.large_string())})


def as_parquet(file: File) -> bytes:
    codec, rows = ("snappy", 700) if file.other else ("zstd", 1000)
    written = io.BytesIO()
    pq.write_table(file.rows, written, compression=codec, row_group_size=rows)
    return written.getvalue()


def as_lines(file: File, *, spaces: bool) -> bytes:
    rows = file.rows.to_pylist()
    separators = (", ", ": ") if spaces else (",", ":")
    return "".join(f"{json.dumps(row, separators=separators, ensure_ascii=False)}\n" for row in rows).encode()


FORMATS: dict[str, tuple[str, Callable[[File], bytes]]] = {
    "Parquet": ("parquet", as_parquet),
    "JSON lines": ("jsonl", lambda file: as_lines(file, spaces=file.other)),
    "JSON lines, zstd": ("jsonl.zst", lambda file: zstandard.compress(as_lines(file, spaces=False), 1 if file.other else 3)),
}


def measure(bench: Bench) -> list[Grid]:
    table = pa.concat_tables(pq.read_table(path, columns=["id", "text"]) for path in bench.corpus.paths)
    table = table.cast(pa.schema([("id", pa.large_string()), ("text", pa.large_string())]))
    borders = np.linspace(0, len(table), FILES + 1).astype(int).tolist()
    begun = [
        File(f"part-{number}", table.slice(borders[number], borders[number + 1] - borders[number])) for number in range(FILES)
    ]
    rows = [row for name in list(FORMATS)[: bench.size(None, 1)] for row in refreshes(bench, name, begun)]
    return [Grid(["format", "edit", "text, MB", "tokenized, MB", "tokenized", "seconds", "equal"], rows)]


def refreshes(bench: Bench, name: str, files: Files) -> Iterator[list[str]]:
    """What each refresh of a dataset of one format tokenized."""
    root, (ending, written) = bench.fresh("refresh"), FORMATS[name]
    (root / "in").mkdir(parents=True)
    for file in files:
        (root / f"in/{file.name}.{ending}").write_bytes(written(file))
    source = {"path": str(root / "in"), "id_column": "id"}
    out, clean = (bench.config(root / place, source, name="text") for place in ("out", "clean"))
    bench.run(flows("build", out))
    for edit, change in list(EDITS.items())[: bench.size(None, 2)]:
        after = change(files)
        for file in [file for file in files if file not in after]:
            (root / f"in/{file.name}.{ending}").unlink()
        for file in [file for file in after if file not in files]:
            (root / f"in/{file.name}.{ending}").write_bytes(written(file))
        done = run_whole(flows("refresh", out))
        result, made = (json.loads(run.out) for run in (done, bench.run(flows("build", clean), root / "clean")))
        manifests = [(root / place / "latest" / "manifest.json").read_bytes() for place in ("out", "clean")]
        text, tokenized = made["text_bytes_tokenized"], result["text_bytes_tokenized"]
        equal = "yes" if manifests[0] == manifests[1] else "no"
        share = f"{100 * tokenized / text:.2f} %"
        yield [name, edit, f"{text / 1e6:,.1f}", f"{tokenized / 1e6:,.2f}", share, f"{done.seconds:.1f}", equal]
        files = after
