"""Make a large corpus out of the small one: real text, repeated, no two documents alike byte for byte."""

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

DEFAULT_CORPUS = Path(__file__).resolve().parents[2] / ".." / "shared" / "corpus"
FILE_TEXT_BYTES = 512_000_000
FILE_PATTERN = "repeated-*.parquet"


@dataclass(frozen=True)
class RowGroup:
    """One row group of the original corpus, in memory."""

    table: pa.Table
    text_bytes: int


@dataclass(frozen=True)
class Part:
    """One row group to write: an original one, marked with the number of its repetition."""

    source: RowGroup
    repetition: int

    @property
    def documents(self) -> int:
        return self.source.table.num_rows

    @property
    def text_bytes(self) -> int:
        return self.source.text_bytes + self.documents * len(text_prefix(self.repetition))


@dataclass(frozen=True)
class Totals:
    """What the repeated corpus holds; the marker file is this as JSON."""

    files: int
    documents: int
    text_bytes: int
    parquet_bytes: int


def text_prefix(repetition: int) -> str:
    return f"{repetition} "


def read_row_groups(corpus_dir: Path) -> list[RowGroup]:
    """Every row group of the original files, in the order of their names."""
    paths = sorted(corpus_dir.glob("*.parquet"))
    if not paths:
        raise FileNotFoundError(f"{corpus_dir}: no Parquet files. Name the corpus with --corpus.")
    groups = []
    for path in paths:
        file = pq.ParquetFile(path)
        for index in range(file.num_row_groups):
            table = file.read_row_group(index, columns=["text", "id"])
            groups.append(RowGroup(table, pc.sum(pc.binary_length(table["text"])).as_py()))
    return groups


def plan_parts(groups: list[RowGroup], text_bytes: int) -> Iterator[Part]:
    """The original row groups over and over, until they hold at least `text_bytes` of text."""
    planned = repetition = 0
    while planned < text_bytes:
        for group in groups:
            part = Part(group, repetition)
            planned += part.text_bytes
            yield part
            if planned >= text_bytes:
                return
        repetition += 1


def plan_files(parts: Iterator[Part]) -> list[list[Part]]:
    """Consecutive parts, cut into files of about `FILE_TEXT_BYTES` of text."""
    files: list[list[Part]] = []
    room = 0
    for part in parts:
        if room <= 0:
            files.append([])
            room = FILE_TEXT_BYTES
        files[-1].append(part)
        room -= part.text_bytes
    return files


def marked(part: Part) -> pa.Table:
    """The part's rows with text "7 ..." and id "...-7" in repetition 7, so that no content-addressed cache helps."""
    text, ids = part.source.table["text"], part.source.table["id"]
    return pa.table(
        {
            "text": pc.binary_join_element_wise(text_prefix(part.repetition), text, ""),
            "id": pc.binary_join_element_wise(ids, f"-{part.repetition}", ""),
        }
    )


def write_file(path: Path, parts: list[Part]) -> int:
    """Write one Parquet file, a row group per part; return its size. The same parts give the same bytes."""
    schema = pa.schema({"text": pa.string(), "id": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in parts:
            writer.write_table(marked(part))
    return path.stat().st_size


def is_done(marker: Path, files: int, documents: int, text_bytes: int) -> bool:
    """Whether the directory holds exactly the planned corpus, by its marker and the sizes of its files."""
    if not marker.exists():
        return False
    sizes = [path.stat().st_size for path in marker.parent.glob(FILE_PATTERN)]
    return json.loads(marker.read_text()) == asdict(Totals(files, documents, text_bytes, sum(sizes)))


def repeat_corpus(corpus_dir: Path, out_dir: Path, gigabytes: float) -> Totals:
    """Write at least `gigabytes` (1e9 bytes) of text below `out_dir`, unless it is there already; return the totals."""
    files = plan_files(plan_parts(read_row_groups(corpus_dir), round(gigabytes * 1e9)))
    documents = sum(part.documents for parts in files for part in parts)
    text_bytes = sum(part.text_bytes for parts in files for part in parts)
    marker = out_dir / "done.json"
    if not is_done(marker, len(files), documents, text_bytes):
        out_dir.mkdir(parents=True, exist_ok=True)
        for stale in [marker, *out_dir.glob(FILE_PATTERN)]:
            stale.unlink(missing_ok=True)
        paths = [out_dir / f"repeated-{index:05d}.parquet" for index in range(len(files))]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            parquet_bytes = sum(threads.map(write_file, paths, files))
        marker.write_text(json.dumps(asdict(Totals(len(files), documents, text_bytes, parquet_bytes))))
    return Totals(**json.loads(marker.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=DEFAULT_CORPUS, help="the original Parquet files")
    parser.add_argument("--output", type=Path, required=True, help="directory for the repeated corpus")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="text to write, in 1e9 bytes")
    args = parser.parse_args()
    print(json.dumps(asdict(repeat_corpus(args.corpus, args.output, args.gigabytes))))


if __name__ == "__main__":
    main()
