"""The documents that sequences were made of: finding their source files again, and reading single rows of them.

A build records a file's name below its source, its size and its digest, never where it lay. Where it may be now is told by
the user, by the source's URL, or by the record of a run. Whether a row is the document is told by the document's key.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import fsspec
import numpy as np

from flat_tokens.arrays.opening import open_array
from flat_tokens.extras import extra
from flat_tokens.keys import document_keys
from flat_tokens.stores.store import Store
from flat_tokens.tools.corpus import Corpus, Source, SourceFile, run_of

BLOCK_BYTES = 4 << 20
COMPRESSIONS = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
BOM = b"\xef\xbb\xbf"
SURROGATES = re.compile("[\ud800-\udfff]")
BY_ENDING = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".csv": "csv",
    ".tsv": "csv",
}


class Row(NamedTuple):
    """A row of a source file: its text, and the key that a build gives to it."""

    text: str
    key: int


class Place(NamedTuple):
    """Where a sequence's document is from: its key, its file (None where the manifest names none) and its row, from 0."""

    key: int
    file: SourceFile | None
    row: int

    def described(self, sources: Sequence[Source]) -> dict[str, Any]:
        """The place for JSON, the key in hexadecimal: JSON's numbers end at 2**53."""
        file = self.file
        return {
            "key": f"{self.key:016x}",
            "source": sources[file.source].name if file else None,
            "file": file.name if file else None,
            "row": self.row,
        }


def places_of(corpus: Corpus, split: str, sequences: Iterable[int]) -> list[Place] | None:
    """Where sequences of a split come from; None where there is no record of that."""
    if corpus.receipt:
        return _places_of_shard(corpus, sequences)
    documents = corpus.documents(split)
    if documents is None:
        return None
    files = [file for source in corpus.sources for file in source.files]
    indices = np.array(list(sequences), np.int64)
    facts = zip(*(array.take(indices).tolist() for array in documents), strict=True)
    return [Place(key, files[number] if number < len(files) else None, row) for key, number, row in facts]


def _places_of_shard(corpus: Corpus, sequences: Iterable[int]) -> list[Place]:
    """A token shard has keys and rows; its file it knows by the digest alone, and rows count from where its part begins."""
    indices = np.array(list(sequences), np.int64)
    key, row = (open_array(corpus.store / "documents" / name, "uint64").take(indices).tolist() for name in ("key", "row"))
    return [Place(a, None, b) for a, b in zip(key, row, strict=True)]


def nameless(corpus: Corpus) -> str:
    """Why a place has no file."""
    if not corpus.receipt:
        return "the manifest names no file with this number"
    inputs = corpus.receipt["inputs"]
    digest = next(iter(inputs.get("file") or ["unknown"]))
    return (
        f"a token shard's rows count from the beginning of its part, {inputs.get('range')} of the file with sha256 {digest[:12]}"
    )


class Locator:
    """Finds source files. *given*: directories, or files, where the user says that they are."""

    def __init__(self, corpus: Corpus, given: Sequence[str] = ()) -> None:
        self._sources, self._given, self._run = corpus.sources, given, run_of(corpus)
        self._found: dict[int, str | None] = {}

    def find(self, file: SourceFile) -> str | None:
        """A path or URL where the file is, of the size that the manifest says; None where there is none."""
        if file.number not in self._found:
            self._found[file.number] = next((place for place in self._candidates(file) if _is_there(place, file)), None)
        return self._found[file.number]

    def _candidates(self, file: SourceFile) -> Iterator[str]:
        for place in self._given:
            yield from (posixpath.join(place, file.name), posixpath.join(place, posixpath.basename(file.name)))
            if posixpath.basename(place) == posixpath.basename(file.name):
                yield place
        if file.source < len(self._run.source_paths) and (path := self._run.source_paths[file.source]):
            yield posixpath.join(_base(path), file.name)
        if self._run.files is not None:
            yield from (posixpath.join(self._run.files, name) for name in (file.sha256, f"{file.sha256}.raw"))
        source = self._sources[file.source]
        if source.origin.startswith("hf://datasets/") and source.revision:
            repository = source.origin.removeprefix("hf://datasets/").partition(" ")[0]
            yield f"hf://datasets/{repository}@{source.revision}/{file.name}"
        elif "://" in source.origin:
            yield posixpath.join(_base(source.origin), file.name)


def _base(path: str) -> str:
    """The directory that a source's file names are relative to: of a glob or a file, the one that holds it."""
    path = os.path.expanduser(path.removeprefix("file://").removeprefix("local://"))
    remote = "://" in path
    if not remote and os.path.isdir(path):
        return path
    before = re.split(r"[*\[]" if path.startswith("http") else r"[*?\[]", path, maxsplit=1)[0]
    if before == path and remote and not PurePosixPath(path).suffix:
        return path
    return before.rpartition("/")[0]


def _is_there(place: str, file: SourceFile) -> bool:
    try:
        store = Store.at(posixpath.dirname(place) or ".")
        key = posixpath.basename(place)
        # Of a packed file, the manifest has the size of what is in it.
        return store.size(key) == file.size or compression(store.read_range(key, 0, 4)) is not None
    except Exception:  # noqa: BLE001  # whatever a store's driver raises where nothing is to be had: it is not reachable
        return False


def compression(head: bytes) -> str | None:
    """How a file that begins with *head* is packed."""
    return next((name for name, magic in COMPRESSIONS.items() if head.startswith(magic)), None)


def read_rows(place: str, file: SourceFile, source: Source, rows: Iterable[int]) -> dict[int, Row]:
    """Rows of a file of a source, counted from 0 as builds count them. Rows that the file doesn't have, or that are no text,
    are left out.

    ValueError where the file is not of its format; ModuleNotFoundError where a package is needed that is not installed.
    """
    wanted = sorted(set(rows))
    settings = source.settings
    with fsspec.open(place, "rb") as stored:
        opened, head = stored, stored.read(4096)
        if (packed := compression(head)) is not None:
            stored.seek(0)
            head = _unpacked(stored, packed).read(4096)
        stored.seek(0)
        kind = _kind(head, file.name, str(settings.get("format", "auto")))
        if packed is not None:
            opened = _unpacked(stored, packed)
        try:
            return dict(READERS[kind](opened, file, settings, wanted))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # of whatever library reads the format
            raise ValueError(f"{place}: cannot be read as {kind}: {error}") from error


def _unpacked(file: IO[bytes], packed: str) -> Any:
    if packed == "gzip":
        return gzip.GzipFile(fileobj=file)
    zstandard = extra("zstandard", "reading .zst files")
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


def _kind(head: bytes, name: str, wanted: str) -> str:
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:6] == b"ARROW1" or head[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    bare = PurePosixPath(name)
    named = BY_ENDING.get((bare.with_suffix("") if bare.suffix in (".gz", ".zst") else bare).suffix.lower())
    if wanted in READERS or named:
        return wanted if wanted in READERS else str(named)
    if head.removeprefix(BOM).lstrip()[:1] == b"{":
        return "jsonl"
    raise ValueError(f"{name}: its format is not known")


def _row(text: Any, identity: Any, settings: Mapping[str, Any]) -> Row | None:
    """A row as a build takes it; None where it has no text. *text* and *identity* are strings, bytes or integers."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not isinstance(text, str):
        return None
    text = SURROGATES.sub("\ufffd", text)
    if settings.get("id_column"):
        if identity is None or isinstance(identity, bool | float):
            return None
        of_key = identity if isinstance(identity, bytes) else SURROGATES.sub("\ufffd", str(identity)).encode()
    else:
        of_key = text.encode()
    return Row(text, int(document_keys(np.frombuffer(of_key, np.uint8), np.array([0, len(of_key)]))[0]))


def _columns(settings: Mapping[str, Any]) -> tuple[str, str | None]:
    identity = settings.get("id_column")
    return str(settings.get("text_column", "text")), None if identity is None else str(identity)


def _from_batches(
    batches: Iterable[Any], first: int, settings: Mapping[str, Any], wanted: Sequence[int]
) -> Iterator[tuple[int, Row]]:
    """Rows of Arrow record batches that begin with row *first*."""
    text, identity = _columns(settings)
    for batch in batches:
        for row in wanted[int(np.searchsorted(wanted, first)) : int(np.searchsorted(wanted, first + batch.num_rows))]:
            at = row - first
            found = _row(
                batch.column(text)[at].as_py(), None if identity is None else batch.column(identity)[at].as_py(), settings
            )
            if found is not None:
                yield row, found
        first += batch.num_rows


def _parquet(
    opened: IO[bytes], file: SourceFile, settings: Mapping[str, Any], wanted: Sequence[int]
) -> Iterator[tuple[int, Row]]:
    parquet = extra("pyarrow.parquet", "reading Parquet files").ParquetFile(opened, pre_buffer=False)
    columns = [name for name in dict.fromkeys(_columns(settings)) if name is not None]
    if missing := [name for name in columns if name not in parquet.schema_arrow.names]:
        raise ValueError(f"{file.name} has no column {missing[0]!r}; it has {', '.join(parquet.schema_arrow.names)}")
    first = 0
    for group in range(parquet.num_row_groups):
        count = parquet.metadata.row_group(group).num_rows
        here = [row for row in wanted if first <= row < first + count]
        if here:
            batches = parquet.iter_batches(1024, [group], columns, use_threads=False)
            yield from _from_batches(_until(batches, first, here[-1]), first, settings, here)
        first += count


def _until(batches: Iterable[Any], first: int, last: int) -> Iterator[Any]:
    """Batches up to the one that holds row *last*."""
    for batch in batches:
        yield batch
        first += batch.num_rows
        if first > last:
            return


def _arrow(opened: IO[bytes], file: SourceFile, settings: Mapping[str, Any], wanted: Sequence[int]) -> Iterator[tuple[int, Row]]:
    ipc = extra("pyarrow.ipc", "reading Arrow files")
    if opened.read(6) == b"ARROW1":
        reader = ipc.open_file(opened)
        batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        opened.seek(0)
        batches = ipc.open_stream(opened)
    yield from _from_batches(_until(batches, 0, wanted[-1] if wanted else -1), 0, settings, wanted)


def _jsonl(opened: IO[bytes], file: SourceFile, settings: Mapping[str, Any], wanted: Sequence[int]) -> Iterator[tuple[int, Row]]:
    text, identity = _columns(settings)
    for row, line in _pieces(opened, b"\n", wanted):
        try:
            value = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found = _row(value.get(text), None if identity is None else value.get(identity), settings)
            if found is not None:
                yield row, found


def _text(opened: IO[bytes], file: SourceFile, settings: Mapping[str, Any], wanted: Sequence[int]) -> Iterator[tuple[int, Row]]:
    separator = str(settings.get("document_separator") or "").encode()
    pieces = _pieces(opened, separator, wanted) if separator else [(0, opened.read().removeprefix(BOM))] if 0 in wanted else []
    for row, piece in pieces:
        found = _row(piece, None, settings)
        if found is not None:
            yield row, found


def _pieces(opened: IO[bytes], separator: bytes, wanted: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """What stands between separators, by number, and nothing else of the file in memory but a block."""
    remaining = list(reversed(wanted))
    pending, number = b"", 0
    block = opened.read(BLOCK_BYTES).removeprefix(BOM)
    while remaining and (block or pending):
        following = opened.read(BLOCK_BYTES)
        data = pending + block
        count = data.count(separator)
        if number + count <= remaining[-1] and following:  # none of them is wanted: only the last one goes on
            start = data.rfind(separator) + len(separator) if count else 0
            # Of a piece that nobody wants, what could be a part of a separator is enough.
            pending = data[start:] if number + count == remaining[-1] else data[max(start, len(data) - len(separator) + 1) :]
            number += count
        else:
            pieces = data.split(separator)
            pending = pieces.pop() if following else b""
            if not following and not pieces[-1]:
                pieces.pop()  # behind the last separator is no document
            while remaining and remaining[-1] < number + len(pieces):
                yield remaining[-1], pieces[remaining.pop() - number]
            number += len(pieces)
        block = following


def _csv(opened: IO[bytes], file: SourceFile, settings: Mapping[str, Any], wanted: Sequence[int]) -> Iterator[tuple[int, Row]]:
    limit = csv.field_size_limit(1 << 40)
    lines = io.TextIOWrapper(opened, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        delimiter = "\t" if ".tsv" in PurePosixPath(file.name).suffixes else ","
        rows = (row for row in csv.reader(lines, delimiter=delimiter) if row)
        header = next(rows, [])
        text, identity = _columns(settings)
        if text not in header or (identity is not None and identity not in header):
            raise ValueError(f"{file.name} has the columns {', '.join(header)}, not {text!r}")
        chosen = set(wanted)
        for number, row in enumerate(rows):
            if number in chosen and len(row) == len(header):
                values = dict(zip(header, (value.encode("utf-8", "surrogateescape") for value in row), strict=True))
                found = _row(values[text], None if identity is None else values[identity], settings)
                if found is not None:
                    yield number, found
            if not wanted or number >= wanted[-1]:
                return
    finally:
        lines.detach()  # the file is somebody else's to close
        csv.field_size_limit(limit)


READERS: dict[str, Callable[[IO[bytes], SourceFile, Mapping[str, Any], Sequence[int]], Iterator[tuple[int, Row]]]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _jsonl,
    "text": _text,
    "csv": _csv,
}


def digest_is(place: str, sha256: str) -> bool:
    """Whether a file has the content with this digest; a build's own copies are named after it."""
    name = posixpath.basename(place)
    return name.partition(".")[0] == sha256 or Store.at(posixpath.dirname(place) or ".").digest(name).sha256 == sha256
