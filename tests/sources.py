"""Sources of every format with columns, and what a version of them must hold: computed here by itself, from the rows."""

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import flat_tokens
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import columns_of
from flat_tokens.keys import keys_of_bytes
from flat_tokens.manifest import EVERY_SPLIT
from flat_tokens.text.rows import SourceFormat, TextFile, to_large
from tasks.output.target import SplitRule

Rows = list[dict[str, Any]]


def as_text(value: Any) -> str:
    return "" if value is None else str(value)


def write_rows(path: Path, rows: Rows, group: int = 7, codec: str = "zstd") -> Path:
    """Rows in the format that the name says. *group*: rows of a row group, or of a batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group, compression=codec)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        write_arrow(path, table, group)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as opened:
            lines = csv.writer(opened)
            lines.writerow(rows[0])
            lines.writerows(map(as_text, row.values()) for row in rows)
    else:
        data = "".join(map(as_line, rows)).encode()
        if ".tar" in path.suffixes:
            data = as_archive(rows, group)
        elif ".warc" in path.suffixes:
            data = b"".join(map(as_record, rows))
        data = gzip.compress(data) if path.suffix == ".gz" else zstandard.compress(data) if path.suffix == ".zst" else data
        path.write_bytes(data)
    return path


def write_partitioned(directory: Path, rows: Rows, names: Sequence[str], ending: str) -> list[Rows]:
    """Rows in files below *directory*, one for each set of values of the columns *names*, which its directories give. The rows of
    each file with these, in the files' order.
    """
    found: dict[str, Rows] = {}
    for row in rows:
        values = ((name, "__HIVE_DEFAULT_PARTITION__" if row[name] is None else quote(row[name], "")) for name in names)
        found.setdefault("/".join(f"{name}={value}" for name, value in values), []).append(row)
    for place, some in found.items():
        write_rows(directory / place / f"x.{ending}", [{k: v for k, v in row.items() if k not in names} for row in some])
    return [found[place] for place in sorted(found)]


def write_arrow(place: Path | BinaryIO, table: pa.Table, group: int | None = None, *, stream: bool = False) -> None:
    """An Arrow file, or a stream, of *group* rows a batch."""
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(place, table.schema) as writer:
        writer.write_table(table, max_chunksize=group)


def arrow_bytes(table: pa.Table, *, stream: bool = False) -> bytes:
    """An Arrow file, or a stream, of two rows a batch."""
    sink = io.BytesIO()
    write_arrow(sink, table, 2, stream=stream)
    return sink.getvalue()


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    """A Parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def as_line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def as_archive(rows: Rows, group: int) -> bytes:
    """Rows as members: alternately some as lines of one, each as one of JSON, and each as one of text next to one of JSON."""
    members = []
    for number, start in enumerate(range(0, len(rows), group)):
        some = rows[start : start + group]
        if number % 3 == 0:
            members.append((f"{start:06}.jsonl", "".join(map(as_line, some)).encode()))
            continue
        for i, row in enumerate(some, start):
            if number % 3 == 2:
                members += [(f"{i:06}.jpg", b"\0"), (f"{i:06}.txt", row["text"].encode())]
                row = {name: value for name, value in row.items() if name != "text"}
            members.append((f"{i:06}.json", json.dumps(row).encode()))
    return tar_bytes(members)


def tar_bytes(members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT, **facts: Any) -> bytes:
    """An archive of members with these names and contents. *facts*: of each in its header."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            archive.addfile(info, io.BytesIO(data))
    return written.getvalue()


def as_record(row: dict[str, Any]) -> bytes:
    """A row as a record of WET: its id, text and url."""
    text: bytes = row["text"].encode()
    headers = {
        "WARC-Type": "conversion",
        "WARC-Record-ID": row["id"],
        "WARC-Target-URI": row.get("url"),
        "Content-Length": len(text),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value is not None)
    return b"WARC/1.0\r\n" + lines.encode() + b"\r\n" + text + b"\r\n\r\n"


class Held(NamedTuple):
    """A document of a version: its file and row, its tokens, which of them count, and its columns."""

    file: int
    row: int
    ids: list[int]
    mask: list[int] | None
    columns: dict[str, Any]

    @property
    def text(self) -> str:
        """What its byte tokens spell."""
        return bytes(value - 1 for value in self.ids).decode()


def held(path: str | Path) -> dict[str, list[Held]]:
    """The documents of a version by split, when ``verify`` has found nothing wrong with it."""
    flat_tokens.verify(path, "full")
    dataset = flat_tokens.open(path)
    found: dict[str, list[Held]] = {}
    for name, split in dataset.splits.items():
        count = split.seq_count
        arrays = (open_array(dataset.store / f"documents/{name}/{of}", "uint64") for of in ("file", "row"))
        numbers = [array.read(0, count).tolist() for array in arrays]
        columns = columns_of(dataset.store, dataset.manifest, name)
        values = columns.take(np.arange(count), list(columns.kinds)).to_pylist() if columns.kinds else [{}] * count
        ids = [split.sequence(i).tolist() for i in range(count)]
        masks = [split.mask(*split.span(i)).tolist() if split.loss_mask else None for i in range(count)]
        found[name] = [Held(*of) for of in zip(*numbers, ids, masks, values, strict=True)]
    return found


def by_place(path: str | Path) -> dict[tuple[int, int], tuple[str, Held]]:
    """The split and the document of each file and row of a version."""
    return {(one.file, one.row): (split, one) for split, docs in held(path).items() for one in docs}


def expected(
    files: Sequence[Rows],
    *,
    fraction: float,
    test: float = 0,
    seed: int = 0,
    by: str = "id",
    prompt: str | None = None,
    columns: Sequence[str] = (),
    least_bytes: int = 0,
    once: bool = False,
) -> dict[str, list[Held]]:
    """The documents of byte tokens that rows with ``id`` and ``text`` make. *prompt*: the column that comes before the text and
    does not count. *least_bytes*: shorter texts are left out. *once*: so is whatever repeats an earlier document. *by*: the
    column that decides on the split.
    """
    rule = SplitRule(fraction=fraction, test_fraction=test, seed=seed)
    found: dict[str, list[Held]] = {name: [] for name in rule.splits}
    seen = set()
    for file, rows in enumerate(files):
        for number, row in enumerate(rows):
            before, text = (row[prompt] if prompt else "").encode(), row["text"].encode()
            if len(before + text) < least_bytes or (once and (before, text) in seen):
                continue
            seen.add((before, text))
            ids = [value + 1 for value in before + text]
            mask = [0] * len(before) + [1] * len(text) if prompt else None
            split = EVERY_SPLIT[rule.numbers(keys_of_bytes([row[by].encode()]))[0]]
            found[split].append(Held(file, number, ids, mask, {name: row[name] for name in columns}))
    return found


def documents_of(
    kind: SourceFormat,
    path: Path,
    data: bytes,
    columns: Sequence[str] = (),
    identity: str | None = None,
    *,
    text: str = "text",
    range_bytes: int = 1 << 30,
    **more: Any,
) -> list[tuple[Any, ...]]:
    """Row, text, id and columns of each document of a file, or the fault of a row."""
    path.write_bytes(data)
    file = TextFile(str(path), path.name, len(data), text, identity, kept_columns=tuple(columns), **more)
    found: list[tuple[Any, ...]] = []
    before = 0
    for part in kind.ranges(file, range_bytes):
        assert kind.rows_before(file, part) == before
        end = 0
        for rows in kind.read(file, part):
            ids = [None] * len(rows.texts) if rows.ids is None else to_large(rows.ids).to_pylist()
            kept = [] if rows.columns is None else [column.to_pylist() for column in rows.columns.columns]
            texts = to_large(rows.texts).cast(pa.large_binary()).to_pylist()
            texts = [None if text is None else text.decode("utf-8", "replace") for text in texts]
            found += zip((rows.rows + before).tolist(), texts, ids, *kept, strict=True)
            found += [(row + before, *fault) for row, *fault in rows.faults]
            end = rows.end
        before += end
    return sorted(found, key=lambda one: one[0])
