"""Source formats.

The text of the first table's smallest size in every source format, one file on one thread, beside a floor that reads the same
file and tokenizes: pyarrow for Parquet, Arrow, JSON lines and CSV, fastwarc for WARC (conversion records), `tarfile` for tar (a
`.txt` member a document), `split` for plain text; `isal` and `zstandard` unpack to a file first, as a build does. `documents` is
what a build's tokenizer gets: checked Unicode, a key for every document, the faults of single rows. `tokens` tokenizes these,
too. cl100k_base by the fast engine, which has seen the text; warm page cache, in turn, the best of the rounds.
"""

import itertools
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import zstandard
from fastwarc.warc import ArchiveIterator, WarcRecordType
from isal import igzip

from flat_tokens.text.formats import FORMATS, FileFormat, unpacked
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.models import SourceFile
from tasks.text.documents import Tally, read_documents
from tasks.tokenize.engines import Encode
from tasks.tokenize.tokenizers import load_tokenizer
from tests.benchmarks.bench import Bench, Grid, best, warm
from tests.benchmarks.build import SHARES
from tests.benchmarks.corpus import as_json_lines
from tests.slices import slices_of
from tests.sources import tar_bytes, write_rows

PACKAGES = ("pyarrow", "fastwarc", "isal", "zstandard")
SLICE_BYTES = 128_000_000
KEYS: dict[FileFormat, str | None] = {"text": None, "tar": "key"}
"""Columns of the documents' keys, where it is not `id`."""
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": igzip.open, ".zst": zstandard.open}


def write_all(lines: Path, directory: Path) -> dict[str, tuple[FileFormat, Path]]:
    """The rows of a file of JSON lines as files of every format, by name. A zero byte separates the documents of plain text."""
    rows = [json.loads(line) for line in lines.open(encoding="utf-8")]
    found: dict[str, tuple[FileFormat, Path]] = {}
    for kind in FORMATS:
        path = directory / f"text.{kind}"
        if kind == "text":
            path.write_bytes(b"\0".join(row["text"].encode() for row in rows))
        elif kind == "tar":
            members = ((f"{number:08}.txt", row["text"].encode()) for number, row in enumerate(rows))
            path.write_bytes(tar_bytes(members, tarfile.USTAR_FORMAT))
        else:
            write_rows(path, rows, 1000)
        found["parquet, zstd" if kind == "parquet" else kind] = kind, path
    found["parquet, snappy"] = "parquet", write_rows(directory / "snappy.parquet", rows, 1000, "snappy")
    for ending in OPENERS:
        found[f"jsonl{ending}"] = "jsonl", write_rows(directory / f"packed{ending[1:]}.jsonl{ending}", rows)
    lines.unlink()
    return found


def floor_of_parquet(path: Path) -> Iterator[pa.Array]:
    for batch in pq.ParquetFile(path, pre_buffer=False).iter_batches(1000, columns=["text", "id"], use_threads=False):
        yield batch.column("text")


def floor_of_arrow(path: Path) -> Iterator[pa.Array]:
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i).column("text")


def floor_of_json_lines(path: Path) -> Iterator[pa.Array]:
    with path.open("rb") as lines:
        longest = max(map(len, lines))
    options = pa.json.ReadOptions(use_threads=False, block_size=max(8 << 20, 2 * longest))
    for batch in pa.json.open_json(path, read_options=options):
        yield batch.column("text")


def floor_of_csv(path: Path) -> Iterator[pa.Array]:
    options = pa.csv.ReadOptions(use_threads=False, block_size=32 << 20)
    for batch in pa.csv.open_csv(path, options, pa.csv.ParseOptions(newlines_in_values=True)):
        yield batch.column("text")


def floor_of_text(path: Path) -> Iterator[pa.Array]:
    yield from by_thousands(path.read_bytes().split(b"\0"))


def floor_of_warc(path: Path) -> Iterator[pa.Array]:
    with path.open("rb") as file:
        records = ArchiveIterator(file, record_types=WarcRecordType.conversion)
        yield from by_thousands(record.reader.read() for record in records)


def floor_of_tar(path: Path) -> Iterator[pa.Array]:
    with tarfile.open(path) as archive:
        yield from by_thousands(file.read() for member in archive if (file := archive.extractfile(member)) is not None)


def by_thousands(texts: Iterable[bytes]) -> Iterator[pa.Array]:
    rest = iter(texts)
    while some := list(itertools.islice(rest, 1000)):
        yield pa.array(some, pa.large_string())


FLOORS: dict[FileFormat, Callable[[Path], Iterator[pa.Array]]] = {
    "parquet": floor_of_parquet,
    "arrow": floor_of_arrow,
    "jsonl": floor_of_json_lines,
    "csv": floor_of_csv,
    "text": floor_of_text,
    "warc": floor_of_warc,
    "tar": floor_of_tar,
}


def sides_of(kind: FileFormat, path: Path, encode: Encode) -> dict[str, Callable[[], None]]:
    """What is timed for a file: the floor, the documents that a build makes of it, and their tokens."""
    source = Source(path=str(path), id_column=KEYS.get(kind, "id"), document_separator="\0" if kind == "text" else None)
    digest = f"{0:064}"  # nobody looks at it here
    plain = path.with_suffix("") if path.suffix in OPENERS else path

    def unpacked_by(blocks: Iterator[bytes]) -> None:
        with plain.open("wb") as file:
            file.writelines(blocks)

    def floor() -> None:
        if plain != path:
            with OPENERS[path.suffix](path) as packed:
                unpacked_by(iter(lambda: packed.read(4 << 20), b""))
        for texts in FLOORS[kind](plain):
            encode(texts.cast(pa.large_string()))

    def documents() -> Iterator[pa.LargeStringArray]:
        if plain != path:
            with path.open("rb") as packed:
                unpacked_by(unpacked(packed, path.suffix, path.name))
        found = SourceFile(source=0, name=plain.name, location=str(plain), size=plain.stat().st_size, sha256=digest, format=kind)
        for part in slices_of(found, source, SLICE_BYTES):
            for batch in read_documents(part, source, DocumentPolicy(), Tally()):
                yield batch.texts

    def read() -> None:
        for _ in documents():
            pass

    def tokens() -> None:
        for texts in documents():
            encode(texts)

    return {"floor": floor, "documents": read, "tokens": tokens}


def measure(bench: Bench) -> list[Grid]:
    text, scratch = bench.share(SHARES[0]), bench.fresh("sources")
    scratch.mkdir()
    tokenizer, rows = load_tokenizer(TokenizerConfig(name="cl100k_base")), []
    encode = tokenizer.make_fast() if tokenizer.make_fast is not None else tokenizer.reference
    for name, (kind, path) in write_all(as_json_lines(text, scratch / "lines"), scratch).items():
        warm([path])
        sides = {side: (run, 1) for side, run in sides_of(kind, path, encode).items()}
        found = best(sides, 1 + bench.times)  # the first round is the engine's
        speeds = [f"{text.text_bytes / 1e6 / seconds:,.0f}" for seconds in found.values()]
        rows.append([name, f"{path.stat().st_size / 1e6:,.1f}", *speeds, f"{found['floor'] / found['tokens']:.0%}"])
    header = ["format", "MB of file", "floor, MB/s of text", "documents, MB/s", "tokens, MB/s", "tokens / floor"]
    return [Grid(header, rows, f"{text.text_bytes / 1e6:,.0f} MB of text in {text.documents:,} documents.")]
