"""Cutting files into slices, the unit of parallelism, caching and resume; and refusing files that cannot be read."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, get_args

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from tasks.config import Source
from tasks.models import FileFormat, Slice, SourceFile

EXTENSIONS: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)
COMPRESSIONS = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd"),
    ".bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
}
"""How compressed files begin."""
MAX_CUTS_OF_A_ROW_GROUP = 8
LOOK_BYTES = 1 << 20

csv.field_size_limit(1 << 40)  # whole rows are limited below


def detect_format(path: Path, name: str, wanted: FileFormat | Literal["auto"] = "auto") -> FileFormat:
    """The format of a file: what its content shows, else what is *wanted*, else what its name says.

    ValueError where these contradict each other, or where none of them tells.
    """
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        raise ValueError(f"{name} is empty (0 bytes). Remove it, or write it again.")
    found: FileFormat | None = None
    if head[:4] == b"PAR1":
        found = "parquet"
    elif head[:6] == b"ARROW1" or head[:4] == b"\xff\xff\xff\xff":
        found = "arrow"
    bare = PurePath(name)
    named = EXTENSIONS.get((bare.with_suffix("") if bare.suffix in COMPRESSIONS else bare).suffix.lower())
    claimed = named if wanted == "auto" else wanted
    if found:
        if wanted not in ("auto", found):
            raise ValueError(f"{name} is {found}, not {wanted}. Leave source.format out, or mend the file.")
        return found
    if claimed in ("parquet", "arrow"):
        raise ValueError(f"{name} is not {claimed}: it begins with {head[:8]!r}. Set source.format to what it is, or mend it.")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{name} is UTF-16, not UTF-8. Convert it first: iconv -f UTF-16 -t UTF-8 {bare.name}")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if claimed == "jsonl" and text[:1] == b"[":
        raise ValueError(f"{name} is one JSON array, not one JSON object a line. Convert it first: jq -c '.[]' {bare.name}")
    if claimed == "jsonl" and text.split(b"\n")[0].rstrip() == b"{":
        raise ValueError(f"{name} has JSON objects of several lines, not one a line. Convert it first: jq -c . {bare.name}")
    if claimed:
        return claimed
    if text[:1] == b"{":
        return "jsonl"
    raise ValueError(
        f"cannot tell the format of {name}, which begins with {head[:8]!r}. Set source.format if it is {_listed(FORMATS)}; "
        "convert it if it is something else."
    )


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def plan_slices(file: SourceFile, source: Source, slice_bytes: int) -> list[Slice]:
    """The slices of a file, in order, each of about *slice_bytes* of text.

    ValueError, naming the file and what it has, where it cannot be read or has no such column.
    """
    try:
        match file.format:
            case "parquet":
                return list(_parquet_slices(file, source, slice_bytes))
            case "arrow":
                return list(_arrow_slices(file, source, slice_bytes))
            case "csv":
                _check_csv(file, source)
                return [Slice(file=file, start=0, stop=file.size, text_bytes=file.size)]
            case "jsonl" | "text":
                if file.format == "jsonl":
                    _check_jsonl(file, source)
                return list(_byte_slices(file, source, slice_bytes))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.name} cannot be read as {file.format}: {error}") from error


def check_columns(file: SourceFile, source: Source, schema: pa.Schema) -> None:
    """Refuse a file without the text column, or with one that holds no text."""
    for setting, column in (("text_column", source.text_column), ("id_column", source.id_column)):
        if column is None:
            continue
        if column not in schema.names:
            found = ", ".join(repr(name) for name in schema.names) or "none"
            raise ValueError(f"{file.name} has no column {column!r}; it has {found}. Set source.{setting}.")
        if schema.names.count(column) > 1:
            raise ValueError(f"{file.name} has {schema.names.count(column)} columns named {column!r}; give them different names.")
        kind = schema.field(column).type
        if not (is_text(kind) or (setting == "id_column" and pa.types.is_integer(kind)) or pa.types.is_null(kind)):
            wanted = "text" if setting == "text_column" else "text or integers"
            raise ValueError(f"{file.name}: column {column!r} is {kind}, not {wanted}. Set source.{setting} to another column.")


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, or bytes that may be text."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file read in small pieces, its page checksums checked where it has them."""
    return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)


class Footer(io.FileIO):
    """A file of which no more is read once it is ``sealed``: an _Unread tells that somebody would have read on."""

    sealed = False

    def read(self, size: int | None = -1, /) -> bytes | None:  # type: ignore[override]
        if self.sealed:
            raise _Unread
        return super().read(-1 if size is None else size)


class _Unread(Exception):  # noqa: N818  nothing is wrong
    pass


def check_row_groups(parquet: pq.ParquetFile, footer: Footer, columns: list[str]) -> None:
    """Refuse what a damaged footer says of the chunks of columns, before somebody asks for one of them: the library raises an
    error in that case when it is about to read them all, but ends the process when it is asked.
    """
    footer.sealed = True
    with contextlib.suppress(_Unread):
        next(parquet.iter_batches(1, list(range(parquet.metadata.num_row_groups)), columns, use_threads=False), None)


def _parquet_slices(file: SourceFile, source: Source, slice_bytes: int) -> Iterator[Slice]:
    with Footer(file.location) as footer, pq.ParquetFile(footer, pre_buffer=True) as parquet:
        metadata = parquet.metadata
        check_columns(file, source, parquet.schema_arrow)
        check_row_groups(parquet, footer, source.columns)
        leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(source.text_column)
        sizes = [metadata.row_group(i).column(leaf).total_uncompressed_size for i in range(metadata.num_row_groups)]
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if sum(rows) != metadata.num_rows:
            raise OSError(f"its row groups have {sum(rows)} rows, but it says {metadata.num_rows}")
    for start, stop in _group(sizes, slice_bytes):
        size = sum(sizes[start:stop])
        cuts = min(-(-size // slice_bytes), MAX_CUTS_OF_A_ROW_GROUP, rows[start]) if stop == start + 1 else 1
        if cuts <= 1:
            yield Slice(file=file, start=start, stop=stop, text_bytes=size)
            continue
        # Every slice of a row group decodes what stands before it, so a giant one is cut a few times only.
        for cut in range(cuts):
            part = (rows[start] * cut // cuts, rows[start] * (cut + 1) // cuts)
            yield Slice(file=file, start=start, stop=stop, rows=part, text_bytes=size // cuts)


def _group(sizes: list[int], slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbours ``(start, stop)`` that together come to about *slice_bytes*; a single one may be larger."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > slice_bytes:
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def open_arrow(path: str, columns: Iterable[str]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and record batches of an Arrow file or stream, mapped into memory, not copied; *columns* lead nowhere else."""
    source = pa.memory_map(path)
    if source.read(6) == b"ARROW1":
        source.seek(0)
        file = pa.ipc.open_file(source)
        schema, batches = file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        schema, batches = stream.schema, iter(stream)
    return schema, (_checked(batch, columns) for batch in batches)


def _checked(batch: pa.RecordBatch, columns: Iterable[str]) -> pa.RecordBatch:
    # Arrow files have no checksums: after an offset that leads astray the process would be gone.
    for column in columns:
        _check_offsets(batch.column(column))
    return batch


def _check_offsets(values: pa.Array) -> None:
    """Refuse an array that refers to what it does not have. Whether its bytes are text is not asked here."""
    as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    if pa.types.is_dictionary(values.type):
        _check_offsets(values.dictionary)
        pa.DictionaryArray.from_arrays(values.indices, values.dictionary, safe=True)
    else:
        values.view(as_bytes.get(values.type, values.type)).validate(full=True)


def _arrow_slices(file: SourceFile, source: Source, slice_bytes: int) -> Iterator[Slice]:
    schema, batches = open_arrow(file.location, source.columns)
    check_columns(file, source, schema)
    sizes = [batch.column(source.text_column).nbytes for batch in batches]
    for start, stop in _group(sizes, slice_bytes):
        yield Slice(file=file, start=start, stop=stop, text_bytes=sum(sizes[start:stop]))


def csv_rows(file: SourceFile, limit: int) -> Iterator[list[str] | str]:
    """The rows of a CSV file, its header first, blank lines left out; in place of one that is none, what is wrong with it.
    Bytes that are not UTF-8 become surrogates. ValueError where a quote is not closed, or not within *limit* characters.
    """
    length, number, ended = 0, -1, False

    def where() -> str:
        return f"row {number}" if number >= 0 else "header"

    def lines() -> Iterator[str]:
        nonlocal length, ended
        while line := text.readline(limit + 1):
            length += len(line)
            if length > limit:
                raise ValueError(
                    f"{file.name}, {where()}: goes on for more than {limit:,} characters. Close its quotes, or raise "
                    "documents.max_bytes."
                )
            yield line
        ended = True

    with open(file.location, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.reader(lines(), delimiter="\t" if ".tsv" in PurePath(file.name).suffixes else ",", strict=True)
        while True:
            try:
                row: list[str] | str = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if ended:
                    raise ValueError(f"{file.name}, {where()}: a quote is not closed before the file ends. Mend it.") from error
                row = f"the row is not CSV ({error})"
            if row:
                yield row
                number += 1
            length = 0


def _check_csv(file: SourceFile, source: Source) -> None:
    header = next(csv_rows(file, LOOK_BYTES), [])
    if isinstance(header, str):
        raise ValueError(f"{file.name}: the first row, which names the columns, is damaged: {header}")
    check_columns(file, source, pa.schema([(name.encode(errors="replace"), pa.string()) for name in header]))


def _check_jsonl(file: SourceFile, source: Source) -> None:
    """The keys of the first lines; lines that are no JSON objects are left to the document policy."""
    keys: dict[str, None] = {}
    with open(file.location, "rb") as lines:
        head = lines.read(LOOK_BYTES).removeprefix(b"\xef\xbb\xbf")
        whole = head if file.size <= LOOK_BYTES else head[: head.rfind(b"\n") + 1]
    for line in whole.splitlines()[:1000]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            keys.update(dict.fromkeys(value))
    if keys:
        check_columns(file, source, pa.schema([(key, pa.string()) for key in keys]))


def _byte_slices(file: SourceFile, source: Source, slice_bytes: int) -> Iterator[Slice]:
    separator = b"\n" if file.format == "jsonl" else (source.document_separator or "").encode()
    if not separator:
        yield Slice(file=file, start=0, stop=file.size, text_bytes=file.size)
        return
    with open(file.location, "rb") as data:
        start = 0
        while start < file.size:
            stop = file.size
            if start + slice_bytes < file.size:
                wanted = max(start, start + slice_bytes - len(separator))
                stop = _after_separator(data, start, wanted, separator, file.size)
            yield Slice(file=file, start=start, stop=stop, text_bytes=stop - start)
            start = stop


def _after_separator(data: BinaryIO, start: int, position: int, separator: bytes, size: int) -> int:
    """The first position behind a separator that begins at *position* or later, or the file's size. Documents are read from
    *start* on: of separators that overlap ("--" in "---") only the first of them is one in any case.
    """
    begin = max(start, position - len(separator) + 1)
    before, tail = begin - len(separator), b""
    data.seek(begin)
    while block := data.read(LOOK_BYTES):
        window = tail + block
        at = window.find(separator)
        while at >= 0:
            here = begin + at
            if here >= position and here - before >= len(separator):
                return here + len(separator)
            before = here
            at = window.find(separator, at + 1)
        tail = window[len(window) - len(separator) + 1 :]
        begin += len(window) - len(tail)
    return size
