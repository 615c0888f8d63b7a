"""Reading the documents of a slice: Arrow batches of text with a key and a row each, bad ones by the policy."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from flat_tokens.keys import document_keys
from tasks.config import DocumentPolicy, Source
from tasks.models import Slice, SourceFile
from tasks.text.pages import Page, batch_lengths, common_lengths, pages_of
from tasks.text.slices import csv_rows, is_text, open_arrow, open_parquet
from tasks.tokenize.engines import text_buffers

BATCH_BYTES = 4 << 20
"""Text read at a time: enough for the engines, small enough that its buffers are used again and again."""

BATCH_ROWS = 1 << 16

LARGEST_BATCH = 1 << 27
"""Bytes that rows read at a time may come to where a file says little of how much its pages stand for."""

LARGEST_PAGE = 1 << 29
"""Bytes that a page of a Parquet file may always have, and always twice those of a document."""

MAX_BRACKETS = 1000
"""JSON lines with more brackets go through the parser that survives deep nesting."""

LONGEST_LINE = 8 << 20
"""A line of JSON or row of CSV may always have this length, and always twice that of a document."""

BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")
NULL_BESIDE_OBJECT = re.compile(rb"\}[ \t\r]*null")

codecs.register_error("lone-surrogate", lambda error: ("\ud800", error.end))  # type: ignore[attr-defined]


class Documents(NamedTuple):
    """Texts without nulls, all of them Unicode; key uint64[n] and row uint64[n] (within the slice) of each."""

    texts: pa.LargeStringArray
    keys: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]


@dataclass
class Tally:
    """What became of a slice's rows. ``seen``: of the slice's ``text_bytes``, about how many have been read."""

    rows: int = 0
    seen: int = 0
    read: int = 0
    written: int = 0
    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)


class Raw(NamedTuple):
    """A batch as its file has it: texts (and ids) with nulls, as text or bytes; the row of each within the slice; and the
    documents that could not even be parsed: (row, reason, detail).
    """

    texts: pa.Array
    ids: pa.Array | None
    rows: npt.NDArray[np.int64]
    faults: tuple[tuple[int, str, str], ...] = ()


def read_documents(part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Iterator[Documents]:
    """The documents of a slice in batches of about 8 MB of text, in order; *tally* counts along.

    ValueError names file and row of a bad document where the policy says so, and a file that changes meanwhile.
    """
    check_unchanged(part.file)
    readers = {"parquet": _parquet, "arrow": _arrow, "csv": _csv, "jsonl": _jsonl, "text": _text}
    try:
        for raw in readers[part.file.format](part, source, policy, tally):
            yield _clean(raw, part, source, policy, tally)
    except (pa.ArrowException, OSError) as error:
        check_unchanged(part.file)
        raise ValueError(f"{part.label} cannot be read to its end: {error}") from error
    check_unchanged(part.file)
    if tally.read != tally.written + tally.skipped.total():
        raise AssertionError(f"{part.label}: read {tally.read}, written {tally.written}, skipped {tally.skipped}")


def stamp(path: str) -> tuple[int, ...]:
    """What changes when a file is written to: size, modification, change (which cannot be set back), inode."""
    status = os.stat(path)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def check_unchanged(file: SourceFile) -> None:
    try:
        changed = bool(file.stamp) and stamp(file.location) != file.stamp
    except FileNotFoundError:
        changed = True
    if changed:
        raise ValueError(f"{file.name} changed while the build read it. Run the build again when the file is complete.")


def _clean(raw: Raw, part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Documents:
    """Apply the policy: what is left is text."""
    tally.read += len(raw.texts) + len(raw.faults)
    bad = list(raw.faults)
    keep = np.ones(len(raw.texts), bool)
    for values, reason, detail in ((raw.texts, "null", "the text is null"), (raw.ids, "null_id", "the id is null")):
        if values is not None and values.null_count:
            nulls = np.asarray(values.is_null()) & keep
            bad += [(int(row), reason, detail) for row in raw.rows[nulls]]
            keep &= ~nulls
    texts, replaced, invalid = _as_unicode(raw.texts, keep, policy.on_bad == "replace")
    tally.replaced["invalid_unicode"] += len(replaced)
    bad += [(int(raw.rows[i]), "invalid_unicode", "the text is not valid UTF-8") for i in invalid]
    keep[invalid] = False
    lengths = np.diff(text_buffers(texts)[1])
    long = np.flatnonzero((lengths > policy.max_bytes) & keep)
    bad += [(int(raw.rows[i]), "too_long", _too_long(int(lengths[i]), policy)) for i in long]
    keep[long] = False
    if bad:
        if policy.on_bad == "error":
            raise bad_document(part, source, *min(bad))
        tally.skipped.update(reason for _, reason, _ in bad)
    if policy.empty == "skip":
        empty = (lengths == 0) & keep
        tally.skipped["empty"] += int(empty.sum())
        keep &= ~empty
    ids, rows = raw.ids, raw.rows
    if not keep.all():
        mask = pa.array(keep)
        texts, rows = texts.filter(mask), rows[keep]
        ids = None if ids is None else ids.filter(mask)
    tally.written += len(texts)
    data, offsets = text_buffers(texts)
    tally.text_bytes += int(offsets[-1] - offsets[0])
    keys = document_keys(data, offsets) if ids is None else document_keys(*text_buffers(_as_bytes(ids)))
    return Documents(texts, keys, rows.astype(np.uint64))


def _too_long(length: int, policy: DocumentPolicy) -> str:
    return f"the document has {length:,} bytes or more, above documents.max_bytes = {policy.max_bytes:,}"


def bad_document(part: Slice, source: Source, row: int, reason: str, detail: str) -> ValueError:
    """The error for a bad document; its row counts from the start of the file."""
    return ValueError(
        f"{part.file.name}, row {first_row(part, source) + row}: {detail} [{reason}]. "
        "Mend it, or set documents.on_bad to 'skip' or 'replace'."
    )


def first_row(part: Slice, source: Source) -> int:
    """Rows of the file before the slice, counted only where somebody asks."""
    if part.file.format == "parquet":
        with open_parquet(part.file.location) as parquet:
            before: int = sum(parquet.metadata.row_group(i).num_rows for i in range(part.start))
        return before + (part.rows[0] if part.rows else 0)
    if part.file.format == "arrow":
        _, batches = open_arrow(part.file.location, [])
        return sum(batch.num_rows for _, batch in zip(range(part.start), batches, strict=False))
    tally = Tally()
    if part.file.format == "jsonl":
        with open(part.file.location, "rb") as file:
            for start in range(0, part.start, BATCH_BYTES):
                tally.rows += file.read(min(BATCH_BYTES, part.start - start)).count(b"\n")
    elif part.file.format == "text":
        for _ in _text(part.model_copy(update={"start": 0, "stop": part.start}), source, DocumentPolicy(), tally):
            pass
    return tally.rows


def _as_bytes(values: pa.Array) -> pa.LargeStringArray:
    """Ids as text: integers by their digits."""
    return _to_large(values.cast(pa.string()) if pa.types.is_integer(values.type) else values)


def _to_large(values: pa.Array) -> pa.LargeStringArray:
    """Text or bytes of any Arrow type as large_string, nulls as they are; bytes are taken on trust, not checked."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.large_string())
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        values = values.cast(pa.large_binary())
        return pa.Array.from_buffers(pa.large_string(), len(values), values.buffers(), offset=values.offset)
    return values.cast(pa.large_string())


def _as_unicode(values: pa.Array, keep: npt.NDArray[np.bool_], replace: bool) -> tuple[pa.LargeStringArray, list[int], list[int]]:
    """Values as text, which rows had something replaced, and which rows are not Unicode (both empty as a rule)."""
    texts = _to_large(values)
    try:
        texts.validate(full=True)
        return texts, [], []
    except pa.ArrowInvalid:
        pass
    # Python objects, but only of a batch that is known to be bad.
    wrong, mended = [], []
    data = texts.cast(pa.large_binary())
    data.validate(full=True)  # not text is one thing, offsets that lead astray another
    for i, value in enumerate(data.to_pylist()):
        text = None if value is None else value.decode("utf-8", "replace")
        if keep[i] and text is not None and text.encode() != value:
            wrong.append(i)
        mended.append(text)
    return pa.array(mended, pa.large_string()), wrong if replace else [], [] if replace else wrong


def _parquet(part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Iterator[Raw]:
    with open_parquet(part.file.location) as parquet:
        columns = _pages_of_columns(parquet, part, source, policy)
        largest = max((page.most_bytes for pages in columns for page in pages), default=0)
        with _room_for_pages.taken(largest):
            for batch in _even(_rows_of(parquet, part, source, columns, tally)):
                yield _from_batch(batch, source, tally)


def _rows_of(
    parquet: pq.ParquetFile, part: Slice, source: Source, columns: list[list[Page]], tally: Tally
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, as many at a time as are sure to fit in memory."""
    groups = list(range(part.start, part.stop))
    first, last = part.rows or (0, sum(parquet.metadata.row_group(i).num_rows for i in groups))
    at = 0  # rows of the row groups -> rows of the slice
    batches: Iterator[pa.RecordBatch] | None = None
    for length in common_lengths([batch_lengths(pages, BATCH_BYTES, LARGEST_BATCH, BATCH_ROWS) for pages in columns]):
        if batches is None:
            batches = parquet.iter_batches(length, groups, source.columns, use_threads=False)
        parquet.reader.set_batch_size(length)
        batch = next(batches, None)
        if batch is None:
            break
        low, high = max(first - at, 0), min(last - at, len(batch))
        at += len(batch)
        if low < high:
            tally.seen = part.text_bytes * (min(at, last) - first) // (last - first)
            yield batch.slice(low, high - low)
        if at >= last:
            return
    if at < last:
        raise OSError(f"it ends after {at} of {last} rows")


def _pages_of_columns(parquet: pq.ParquetFile, part: Slice, source: Source, policy: DocumentPolicy) -> list[list[Page]]:
    """The pages of each column of a slice. ValueError where one is larger than any document makes it."""
    metadata = parquet.metadata
    leaf = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    limit = max(LARGEST_PAGE, 2 * policy.max_bytes)
    columns: list[list[Page]] = []
    with open(part.file.location, "rb") as file:
        for name in source.columns:
            chunks = [metadata.row_group(i).column(leaf[name]) for i in range(part.start, part.stop)]
            rows = [metadata.row_group(i).num_rows for i in range(part.start, part.stop)]
            columns.append([page for chunk, count in zip(chunks, rows, strict=True) for page in _pages(file, chunk, count)])
            if (largest := max((page.most_bytes for page in columns[-1]), default=0)) > limit:
                raise ValueError(
                    f"{part.file.name}: a page of column {name!r} has {largest:,} bytes when it is unpacked; {limit:,} are "
                    "allowed. Write the file with smaller pages, or raise documents.max_bytes."
                )
    return columns


def _pages(file: BinaryIO, chunk: pq.ColumnChunkMetaData, rows: int) -> list[Page]:
    """The pages of a column chunk."""
    if chunk.physical_type != "BYTE_ARRAY":
        return [Page(rows, 0, 8, for_each_row=True)]
    try:
        return list(pages_of(file, min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))), rows))
    except ValueError:
        # Whether it can be read at all others will tell: no value is held to be longer than all of them.
        size = chunk.total_uncompressed_size
        return [Page(rows, size, size, for_each_row=True)]


class Room:
    """Memory that threads share: who wants more than is left waits until others are done, and is alone at last."""

    def __init__(self, size: int) -> None:
        self._size, self._taken = size, 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0 or self._taken + size <= self._size)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


_room_for_pages = Room(LARGEST_PAGE)


def _even(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about BATCH_BYTES: small ones are joined, large ones cut."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.nbytes > 2 * BATCH_BYTES or any(pa.types.is_dictionary(column.type) for column in batch.columns):
            yield from _joined(held)
            held, size = [], 0
            yield from _cut(batch)
            continue
        held.append(batch)
        size += batch.nbytes
        if size >= BATCH_BYTES // 2 or sum(map(len, held)) >= BATCH_ROWS:
            yield from _joined(held)
            held, size = [], 0
    yield from _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if batches:
        yield batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in parts whose texts and ids come to BATCH_BYTES, each once it is written out, or that have a single row."""
    ends = np.cumsum(sum((_lengths(column) for column in batch.columns), np.zeros(len(batch), np.int64)))
    start = 0
    while start < len(batch):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        yield batch.slice(start, stop - start)
        start = stop


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each text, of a null none: int64[n]."""
    if pa.types.is_dictionary(values.type):
        indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return _lengths(values.dictionary)[indices] if len(values.dictionary) else np.zeros(len(values), np.int64)
    if not is_text(values.type):
        return np.full(len(values), 8)
    if pa.types.is_string_view(values.type):
        return np.frombuffer(values.buffers()[1], np.int32)[4 * values.offset :: 4][: len(values)].astype(np.int64)
    return np.asarray(pc.binary_length(values).fill_null(0)).astype(np.int64)


def _arrow(part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Iterator[Raw]:
    _, batches = open_arrow(part.file.location, source.columns)
    for batch in itertools.islice(batches, part.start, part.stop):
        for piece in _cut(batch.select(source.columns)):
            tally.seen += batch.column(source.text_column).nbytes * len(piece) // len(batch)
            yield _from_batch(piece, source, tally)


def _csv(part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Iterator[Raw]:
    found = csv_rows(part.file, longest_line(policy))
    header = next(found)
    text_at, id_at = header.index(source.text_column), header.index(source.id_column) if source.id_column else None
    texts: list[bytes | None] = []
    ids: list[bytes | None] = []
    rows: list[int] = []
    faults: list[tuple[int, str, str]] = []
    size = 0
    for row in found:
        if isinstance(row, str):
            faults.append((tally.rows, "malformed", row))
        elif len(row) != len(header):
            faults.append((tally.rows, "malformed", f"the row has {len(row)} columns instead of {len(header)}"))
        else:
            texts.append(row[text_at].encode("utf-8", "surrogateescape"))
            ids.append(None if id_at is None else row[id_at].encode("utf-8", "surrogateescape"))
            rows.append(tally.rows)
            size += len(row[text_at])
        tally.rows += 1
        tally.seen += len(row) if isinstance(row, str) else sum(map(len, row)) + len(row)  # what stands between them too
        if size >= BATCH_BYTES or len(rows) + len(faults) >= BATCH_ROWS:
            yield _from_lists(source, texts, ids, rows, faults)
            texts, ids, rows, faults, size = [], [], [], [], 0
    if rows or faults:
        yield _from_lists(source, texts, ids, rows, faults)


def longest_line(policy: DocumentPolicy) -> int:
    """Bytes of a line that is still looked into: it has more than the document."""
    return max(2 * policy.max_bytes, LONGEST_LINE)


def _from_batch(batch: pa.RecordBatch, source: Source, tally: Tally) -> Raw:
    rows = np.arange(tally.rows, tally.rows + batch.num_rows)
    tally.rows += batch.num_rows
    return Raw(batch.column(source.text_column), batch.column(source.id_column) if source.id_column else None, rows)


def _from_lists(
    source: Source, texts: list[bytes | None], ids: list[bytes | None], rows: list[int], faults: list[tuple[int, str, str]]
) -> Raw:
    id_array = pa.array(ids, pa.large_binary()) if source.id_column else None
    return Raw(pa.array(texts, pa.large_binary()), id_array, np.array(rows, np.int64), tuple(faults))


def _blocks(part: Slice, separator: bytes, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole documents of the slice, each with its separator at the end but perhaps the last; or, with False, the
    first bytes of a document that is longer than *limit*, which is passed over.
    """
    with open(part.file.location, "rb") as file:
        file.seek(part.start)
        left, pending, searched = part.stop - part.start, bytearray(), 0
        if part.start == 0:
            head = file.read(min(len(BOM), left))
            left -= len(head)
            pending += head.removeprefix(BOM)
        while left:
            block = file.read(min(BATCH_BYTES, left))
            if not block:
                raise OSError(f"it ends {left} bytes before its length")
            left -= len(block)
            pending += block
            if separator and (at := _last_separator(pending, separator, searched)) >= 0:
                end = at + len(separator)
                yield bytes(memoryview(pending)[:end]), True
                del pending[:end]
            elif len(pending) > limit + max(len(separator) - 1, 0):  # its end may be a part of a separator
                yield bytes(memoryview(pending)[:80]), False
                left, pending = _pass_over(file, left, separator, pending), bytearray()
            searched = max(len(pending) - len(separator) + 1, 0)
        if pending:
            yield bytes(pending), True


def _last_separator(data: bytearray, separator: bytes, start: int) -> int:
    """Where the last separator in *data* begins, if one begins at *start* or later, else -1. They are told from left to right:
    in "---" it is the first "--".
    """
    at = data.rfind(separator, start)
    while at > 0 and (overlapped := data.rfind(separator, max(at - len(separator) + 1, 0), at + len(separator) - 1)) >= 0:
        at = overlapped
    while at >= 0 and (further := data.find(separator, at + len(separator))) >= 0:
        at = further
    return at


def _pass_over(file: BinaryIO, left: int, separator: bytes, pending: bytearray) -> int:
    """Move to the end of a document that is too long; the bytes left in the slice behind it."""
    tail = bytes(pending[len(pending) - len(separator) + 1 :]) if separator else b""
    while left:
        block = file.read(min(BATCH_BYTES, left))
        if not block:
            raise OSError(f"it ends {left} bytes before its length")
        left -= len(block)
        window = tail + block
        if separator and (at := window.find(separator)) >= 0:
            behind = len(window) - at - len(separator)
            file.seek(-behind, os.SEEK_CUR)
            return left + behind
        tail = window[len(window) - len(separator) + 1 :] if separator else b""
    return 0


def _text(part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Iterator[Raw]:
    separator = (source.document_separator or "").encode()
    for block, whole in _blocks(part, separator, policy.max_bytes):
        tally.seen += len(block)
        if not whole:
            yield _passed_over(source, policy, tally)
            continue
        texts = pa.array([block], pa.large_binary())
        if separator:
            texts = pc.split_pattern(texts, separator).values
            texts = texts if len(texts[-1].as_buffer()) else texts[:-1]  # behind the last separator is the next document
        rows = np.arange(tally.rows, tally.rows + len(texts))
        tally.rows += len(texts)
        yield Raw(texts, None, rows)


def _passed_over(source: Source, policy: DocumentPolicy, tally: Tally) -> Raw:
    empty = pa.array([], pa.large_string())
    tally.rows += 1
    fault = (tally.rows - 1, "too_long", _too_long(policy.max_bytes + 1, policy))
    return Raw(empty, empty if source.id_column else None, np.empty(0, np.int64), (fault,))


def _jsonl(part: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> Iterator[Raw]:
    id_type, limit = pa.string(), longest_line(policy)
    for block, whole in _blocks(part, b"\n", limit):
        tally.seen += len(block)
        if not whole:
            yield _passed_over(source, policy, tally)
            continue
        raw, id_type = _parse_fast(block, source, limit, tally, id_type)
        yield raw if raw is not None else _parse_lines(block, source, policy, tally)


def _parse_fast(block: bytes, source: Source, limit: int, tally: Tally, id_type: pa.DataType) -> tuple[Raw | None, pa.DataType]:
    """Lines of a block through Arrow's parser; None where a line is not what it takes, so that somebody looks closer."""
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() > limit or not _one_object_a_line(block, data, starts, ends) or _deeply_nested(data, starts):
        return None, id_type
    has_own_id = source.id_column not in (None, source.text_column)
    for kind in (id_type, pa.int64() if id_type == pa.string() else pa.string()) if has_own_id else (id_type,):
        fields = {source.text_column: pa.string(), **({source.id_column: kind} if has_own_id else {})}
        try:
            table = pa.json.read_json(
                pa.BufferReader(block),
                pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
                pa.json.ParseOptions(pa.schema(fields), newlines_in_values=False, unexpected_field_behavior="ignore"),
            )
            columns = {name: table.column(name).combine_chunks() for name in fields}
            for column in columns.values():
                column.validate(full=True)
        except pa.ArrowException:
            continue
        if table.num_rows != len(ends):  # several objects on a line
            return None, id_type
        rows = np.arange(tally.rows, tally.rows + len(ends))
        tally.rows += len(ends)
        return Raw(columns[source.text_column], columns[source.id_column] if source.id_column else None, rows), kind
    return None, id_type


def _one_object_a_line(
    block: bytes, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> bool:
    """Whether no line begins, ends or goes on with anything but an object. Arrow's parser does not see lines: it would take
    blank ones and values that run over them, and a null between objects ends the process.
    """
    last = ends - 1
    last = last - (data[last] == ord("\r"))
    whole = (data[starts] == ord("{")).all() and (data[last] == ord("}")).all()
    return bool(whole) and not (b"null" in block and NULL_BESIDE_OBJECT.search(block))


def _deeply_nested(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> bool:
    """Whether a line has so many brackets that it could exhaust the stack of Arrow's parser."""
    brackets = (data | 0x20) == ord("{")  # '[' and '{' differ in this bit
    if np.count_nonzero(brackets) <= MAX_BRACKETS:
        return False
    return bool(np.add.reduceat(brackets, starts, dtype=np.int64).max() > MAX_BRACKETS)


def _parse_lines(block: bytes, source: Source, policy: DocumentPolicy, tally: Tally) -> Raw:
    """Lines of a block one by one: what is wrong with which. Blank lines are no documents, but they are rows."""
    texts: list[bytes | None] = []
    ids: list[bytes | None] = []
    limit = longest_line(policy)
    rows: list[int] = []
    faults: list[tuple[int, str, str]] = []
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for row, line in enumerate(lines, tally.rows):
        if not line.strip():
            continue
        if len(line) > limit:
            faults.append((row, "too_long", _too_long(policy.max_bytes + 1, policy)))
            continue
        text, identity, fault = _parse_line(line, source)
        if fault is not None:
            faults.append((row, *fault))
            continue
        texts.append(text)
        ids.append(identity)
        rows.append(row)
    tally.rows += len(lines)
    return _from_lists(source, texts, ids, rows, faults)


def _parse_line(line: bytes, source: Source) -> tuple[bytes | None, bytes | None, tuple[str, str] | None]:
    """Text and id of one line, or what is wrong with it: (reason, detail)."""
    try:
        value = json.loads(line.decode("utf-8", "lone-surrogate"))
    except RecursionError:
        return None, None, ("malformed", "the line is JSON nested too deep")
    except ValueError as error:
        return None, None, ("malformed", f"the line is not JSON ({error})")
    if not isinstance(value, dict):
        return None, None, ("wrong_type", f"the line is a JSON {_json_type(value)}, not an object")
    text = value.get(source.text_column)
    if text is not None and not isinstance(text, str):
        return None, None, ("wrong_type", f"{source.text_column!r} is a JSON {_json_type(text)}, not a string")
    identity = value.get(source.id_column) if source.id_column else None
    if isinstance(identity, bool | float | dict | list):
        return None, None, ("wrong_type", f"{source.id_column!r} is a JSON {_json_type(identity)}, not a string or an integer")
    if isinstance(identity, str) and SURROGATE.search(identity):
        return None, None, ("invalid_unicode", f"{source.id_column!r} is not valid UTF-8")
    return None if text is None else _to_bytes(text), None if identity is None else str(identity).encode(), None


def _to_bytes(text: str) -> bytes:
    """UTF-8 of a string, in which each lone surrogate becomes a byte that no UTF-8 has, to be seen later."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return SURROGATE.sub("\udcff", text).encode("utf-8", "surrogateescape")


def _json_type(value: Any) -> str:
    names: Iterable[tuple[type, str]] = ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object" if value is not None else "null")
