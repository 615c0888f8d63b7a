"""Rows of source files as Arrow arrays: what every reader takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt

from flat_tokens.keys import document_keys
from flat_tokens.text import limits
from flat_tokens.text.arrow_library import pa


class TextFile(NamedTuple):
    """An unpacked source file and how its text is read. ``name`` is for messages; ``path`` may be a URL."""

    path: str
    name: str
    size: int
    text_column: str
    id_column: str | None = None
    separator: bytes = b""
    max_bytes: int = 1 << 31

    @property
    def columns(self) -> list[str]:
        """The columns that are read: the text's and, if it is another one, the id's."""
        return list(dict.fromkeys(filter(None, (self.text_column, self.id_column))))

    @property
    def is_local(self) -> bool:
        return "://" not in self.path

    def open(self) -> BinaryIO:
        """The file, open for reading."""
        return open(self.path, "rb") if self.is_local else fsspec.open(self.path, "rb").open()


class Range(NamedTuple):
    """A range of a file: row groups or record batches ``start:stop``, of those the rows ``rows``; or bytes ``start:stop`` at
    ends of documents. ``text_bytes``: about how much text.
    """

    start: int
    stop: int
    rows: tuple[int, int] | None
    text_bytes: int


class Rows(NamedTuple):
    """A batch of a range as the file has it: texts and ids, text or bytes, with nulls; and the row of each, int64[n].

    Rows count from the start of the range. ``end``: rows read so far, blank lines included; ``seen``: about how many of the
    range's ``text_bytes`` these are. ``faults``: rows that cannot be parsed, as (row, reason, detail).
    """

    texts: pa.Array
    ids: pa.Array | None
    rows: npt.NDArray[np.int64]
    end: int
    seen: int
    faults: tuple[tuple[int, str, str], ...] = ()

    @classmethod
    def of_batch(cls, file: TextFile, batch: pa.RecordBatch, start: int, seen: int) -> Rows:
        """All rows of a record batch that begins at row *start*."""
        end = start + batch.num_rows
        ids = batch.column(file.id_column) if file.id_column else None
        return cls(batch.column(file.text_column), ids, np.arange(start, end), end, seen)


class Collected:
    """Rows of a batch that a reader parses one by one: texts and ids as UTF-8, and faults."""

    def __init__(self, file: TextFile) -> None:
        self._has_ids = file.id_column is not None
        self._texts: list[bytes | None] = []
        self._ids: list[bytes | None] = []
        self._rows: list[int] = []
        self.faults: list[tuple[int, str, str]] = []

    def __len__(self) -> int:
        return len(self._rows) + len(self.faults)

    def add(self, row: int, text: bytes | None, identity: bytes | None) -> None:
        self._texts.append(text)
        self._ids.append(identity)
        self._rows.append(row)

    def rows(self, end: int, seen: int) -> Rows:
        texts, ids = pa.array(self._texts, pa.large_binary()), pa.array(self._ids, pa.large_binary()) if self._has_ids else None
        return Rows(texts, ids, np.array(self._rows, np.int64), end, seen, tuple(self.faults))


def passed_over(file: TextFile, row: int, seen: int) -> Rows:
    """A document that is too long to be read."""
    collected = Collected(file)
    collected.faults.append((row, "too_long", too_long(file.max_bytes + 1, file.max_bytes)))
    return collected.rows(row + 1, seen)


def too_long(length: int, max_bytes: int) -> str:
    return f"the document has {length:,} bytes or more, above documents.max_bytes = {max_bytes:,}"


def check_columns(file: TextFile, schema: pa.Schema) -> None:
    """Refuse a file without the text column, or with one that holds no text."""
    for setting, column in (("text_column", file.text_column), ("id_column", file.id_column)):
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


def neighbours(sizes: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges ``(start, stop)`` of neighbours whose sizes add up to *most* or less, or that have a single member."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in parts whose texts and ids, written out, have BATCH_BYTES at most, or that have a single row."""
    ends = np.cumsum(sum((_lengths(column) for column in batch.columns), np.zeros(len(batch), np.int64)))
    start = 0
    while start < len(batch):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limits.BATCH_BYTES, "right")))
        yield batch.slice(start, stop - start)
        start = stop


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each text, 0 of a null: int64[n]."""
    if pa.types.is_dictionary(values.type):
        indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return _lengths(values.dictionary)[indices] if len(values.dictionary) else np.zeros(len(values), np.int64)
    if not is_text(values.type):
        return np.full(len(values), 8)
    if pa.types.is_string_view(values.type):
        return np.frombuffer(values.buffers()[1], np.int32)[4 * values.offset :: 4][: len(values)].astype(np.int64)
    return np.asarray(pa.compute.binary_length(values).fill_null(0)).astype(np.int64)


def to_large(values: pa.Array) -> pa.LargeStringArray:
    """Text or bytes of any Arrow type as large_string, nulls as they are; bytes are not checked to be UTF-8."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.large_string())
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        values = values.cast(pa.large_binary())
        return pa.Array.from_buffers(pa.large_string(), len(values), values.buffers(), offset=values.offset)
    return values.cast(pa.large_string())


def as_unicode(values: pa.Array) -> tuple[pa.LargeStringArray, list[int]]:
    """Values as text, with U+FFFD for what is not UTF-8, and the indices of the texts in which it stands."""
    texts = to_large(values)
    try:
        texts.validate(full=True)
        return texts, []
    except pa.ArrowInvalid:
        pass
    # Python objects, but only of a batch that is known to be bad.
    wrong, mended = [], []
    data = texts.cast(pa.large_binary())
    data.validate(full=True)  # not text is one thing, offsets that lead astray another
    for i, value in enumerate(data.to_pylist()):
        text = None if value is None else value.decode("utf-8", "replace")
        if text is not None and text.encode() != value:
            wrong.append(i)
        mended.append(text)
    return pa.array(mended, pa.large_string()), wrong


def ids_as_text(ids: pa.Array) -> pa.LargeStringArray:
    """Ids as text, integers by their digits."""
    return to_large(ids.cast(pa.string()) if pa.types.is_integer(ids.type) else ids)


def keys_of(texts: pa.LargeStringArray, ids: pa.Array | None) -> npt.NDArray[np.uint64]:
    """Keys of documents without nulls, uint64[n]: of their ids, or else of their texts."""
    return document_keys(*text_buffers(texts if ids is None else ids_as_text(ids)))


def text_buffers(texts: pa.LargeStringArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes and offsets of an Arrow array of texts without nulls: uint8[n], int64[m + 1]. No copy."""
    _, offsets, data = texts.buffers()
    window = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1] if offsets else np.zeros(1, np.int64)
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), window


class SourceFormat(NamedTuple):
    """A format of source files.

    ``ranges`` checks a file and cuts it into ranges of about so many bytes of text. ``read`` yields the rows of a range.
    ``rows_before`` counts the rows of the file before a range. ``holding`` yields ranges that hold all of some rows, each
    with its first row; without it the whole file is one range.
    """

    endings: tuple[str, ...]
    ranges: Callable[[TextFile, int], Iterator[Range]]
    read: Callable[[TextFile, Range], Iterator[Rows]]
    rows_before: Callable[[TextFile, Range], int]
    begins: tuple[bytes, ...] = ()
    holding: Callable[[TextFile, Any], Iterator[tuple[Range, int]]] | None = None
