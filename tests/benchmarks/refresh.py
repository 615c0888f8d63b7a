"""Refreshes.

The text in ten files with ids, as Parquet, as JSON lines, and as these in zstd. One edit follows the other, and a refresh with
default settings follows each, cl100k_base. *Tokenized* is the share of all text that the refresh tokenized. *Equal*: its
manifest, which has the digest of every object, is that of a build from nothing. *Moved*: documents that changed between train
and validation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from flat_tokens.arrays.opening import open_array
from flat_tokens.stores.store import Store
from tests.benchmarks.bench import Bench, Grid, python, run_whole

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


def edit_row(files: Files) -> Files:
    rows = files[EDITED].rows
    at = len(rows) // 2
    text = rows["text"].to_pylist()
    text[at] += " And a line more."
    return replaced(files, EDITED, rows.set_column(1, "text", pa.array(text, pa.large_string())))


def delete_row(files: Files) -> Files:
    rows = files[SHORTER].rows
    at = len(rows) // 2
    return replaced(files, SHORTER, pa.concat_tables([rows.slice(0, at), rows.slice(at + 1)]))


def put_in_front(files: Files) -> Files:
    return replaced(files, LONGER, pa.concat_tables([new_rows(["a new document at the front"]), files[LONGER].rows]))


def rename(files: Files) -> Files:
    return [file._replace(name="renamed") if number == RENAMED else file for number, file in enumerate(files)]


def rewrite(files: Files) -> Files:
    return [file._replace(other=True) if number == REWRITTEN else file for number, file in enumerate(files)]


def append(files: Files) -> Files:
    """Append a hundredth of all text: documents of the first file, each line turned round."""
    wanted, texts = sum(file.rows["text"].nbytes for file in files) // 100, list[str]()
    for text in files[0].rows["text"].to_pylist():
        if wanted > 0:
            texts.append("\n".join(line[::-1] for line in text.split("\n")))
            wanted -= len(texts[-1].encode())
    return replaced(files, GROWN, pa.concat_tables([files[GROWN].rows, new_rows(texts)]))


def join(files: Files) -> Files:
    both = pa.concat_tables([files[JOINED].rows, files[JOINED + 1].rows])
    return [*files[:JOINED], files[JOINED]._replace(rows=both), *files[JOINED + 2 :]]


EDITS: dict[str, Callable[[Files], Files]] = {
    "a row edited": edit_row,
    "a row deleted": delete_row,
    "a row put in at the front of a file": put_in_front,
    "a file renamed": rename,
    "a file rewritten: row groups and codec; spaces; level": rewrite,
    "1 % appended": append,
    "two files joined": join,
}


def replaced(files: Files, number: int, rows: pa.Table) -> Files:
    return [*files[:number], files[number]._replace(rows=rows), *files[number + 1 :]]


def new_rows(texts: list[str]) -> pa.Table:
    ids = [f"new-{number}-{len(text)}" for number, text in enumerate(texts)]
    return pa.table({"id": pa.array(ids, pa.large_string()), "text": pa.array(texts, pa.large_string())})


def write_parquet(file: File, directory: Path) -> None:
    codec, rows = ("snappy", 700) if file.other else ("zstd", 1000)
    pq.write_table(file.rows, directory / f"{file.name}.parquet", compression=codec, row_group_size=rows)


def lines_of(file: File, separators: tuple[str, str]) -> bytes:
    rows = (json.dumps(row, separators=separators, ensure_ascii=False) for row in file.rows.to_pylist())
    return "".join(f"{row}\n" for row in rows).encode()


def write_lines(file: File, directory: Path) -> None:
    separators = (", ", ": ") if file.other else (",", ":")
    (directory / f"{file.name}.jsonl").write_bytes(lines_of(file, separators))


def write_packed(file: File, directory: Path) -> None:
    packed = zstandard.compress(lines_of(file, (",", ":")), 1 if file.other else 3)
    (directory / f"{file.name}.jsonl.zst").write_bytes(packed)


FORMATS = {"Parquet": write_parquet, "JSON lines": write_lines, "JSON lines, zstd": write_packed}


def measure(bench: Bench) -> list[Grid]:
    table = pa.concat_tables(pq.read_table(path, columns=["id", "text"]) for path in bench.corpus.paths)
    table = table.cast(pa.schema([("id", pa.large_string()), ("text", pa.large_string())]))
    borders = np.linspace(0, len(table), FILES + 1).astype(int).tolist()
    begun = [
        File(f"part-{number}", table.slice(borders[number], borders[number + 1] - borders[number])) for number in range(FILES)
    ]
    rows = [row for name in list(FORMATS)[: bench.size(None, 1)] for row in refreshes(bench, name, begun)]
    return [Grid(["format", "edit", "text, MB", "tokenized, MB", "tokenized", "seconds", "equal", "moved"], rows)]


def refreshes(bench: Bench, name: str, files: Files) -> Iterator[list[str]]:
    """What each refresh of a dataset of one format tokenized."""
    root, write = bench.fresh("refresh"), FORMATS[name]
    (root / "in").mkdir(parents=True)
    for file in files:
        write(file, root / "in")
    config = {"name": "text", "source": {"path": str(root / "in"), "id_column": "id"}, "tokenizer": "cl100k_base"}
    (root / "config.yaml").write_text(json.dumps({"output": str(root / "out"), **config}))
    (root / "clean.yaml").write_text(json.dumps({"output": str(root / "clean"), **config}))
    run("build", root / "config.yaml")
    before = keys_of(root / "out")
    for edit, change in list(EDITS.items())[: bench.size(None, 2)]:
        after = change(files)
        for former in [file for file in files if file not in after]:
            for path in (root / "in").glob(f"{former.name}.*"):
                path.unlink()
        for file in [file for file in after if file not in files]:
            write(file, root / "in")
        result = run("refresh", root / "config.yaml")
        shutil.rmtree(root / "clean", ignore_errors=True)
        clean = run("build", root / "clean.yaml")
        manifests = [(root / place / "latest" / "manifest.json").read_bytes() for place in ("out", "clean")]
        found = keys_of(root / "out")
        moved = sum(len(np.intersect1d(before[one], found[other])) for one, other in ((0, 1), (1, 0)))
        text, tokenized = clean["text_bytes_tokenized"], result["text_bytes_tokenized"]
        equal = "yes" if manifests[0] == manifests[1] else "no"
        share = f"{100 * tokenized / text:.2f} %"
        seconds = f"{result['seconds_in_all']:.1f}"
        yield [name, edit, f"{text / 1e6:,.1f}", f"{tokenized / 1e6:,.2f}", share, seconds, equal, f"{moved}"]
        files, before = after, found
    bench.fresh("refresh")


def run(command: str, config: Path) -> dict[str, Any]:
    """The result of a command, as it tells it."""
    done = run_whole(python("-m", "flows", command, config, "--no-server", "--json"))
    told: dict[str, Any] = json.loads(done.out)
    return {**told, "seconds_in_all": done.seconds}


def keys_of(output: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The keys of the documents of train and of validation: uint64[n] each."""
    store = Store.at((output / "latest").resolve())
    train, validation = (open_array(store / f"documents/{split}/key", "uint64") for split in ("train", "validation"))
    return train.read(0, train.length), validation.read(0, validation.length)
