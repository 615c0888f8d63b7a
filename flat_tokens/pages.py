"""Pages of a Parquet file: their headers tell how large they may get, before any of them is decoded.

A small page can hold any amount of text: it is compressed, and its values may be places in a dictionary, or repeat a part of
the value before. So a reader's memory must not depend on averages that the file states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from flat_tokens.annotations import IntPair
from flat_tokens.extras import pa
from flat_tokens.options import varint

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
PLAIN, DICTIONARIES, DELTA_LENGTHS = 0, (2, 8), 6
"""Encodings: values in order, places in the dictionary, lengths and then the values."""

PLACE_BYTES = 4
"""Bytes of a place in a dictionary once it is read."""
HEADER_BYTES = (1 << 9, 1 << 16, 1 << 24)
"""A page header is short, unless it holds long values as statistics."""


class SupportsRead(Protocol):
    """A file that can be read anywhere."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def read(self, size: int = -1, /) -> bytes: ...


class _Footer:
    """An open file that seems to have ended once it is ``sealed``. ``was_asked``: something tried to read it then."""

    def __init__(self, file: SupportsRead) -> None:
        self._file, self.sealed, self.was_asked = file, False, False

    def read(self, size: int = -1) -> bytes:
        # No exception: the library would write its traceback first, which takes longer than all else.
        self.was_asked = self.was_asked or self.sealed
        return b"" if self.sealed else self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def sound_metadata(
    file: SupportsRead,
    columns_of: Callable[[pa.Schema], Sequence[str]],
    known: pa.parquet.FileMetaData | None = None,
) -> tuple[Sequence[str], pa.parquet.FileMetaData]:
    """The columns that a file's schema gives, which may refuse it, and its metadata; *known*: the same, read before. It is
    refused if it is damaged before a column chunk's is asked for: the library raises an error when it is about to read all
    chunks, but ends the process when it is asked for one.
    """
    footer = _Footer(file)
    with pa.parquet.ParquetFile(footer, metadata=known, pre_buffer=True) as parquet:
        columns = columns_of(parquet.schema_arrow)
        footer.sealed = True
        try:
            next(parquet.iter_batches(1, list(range(parquet.num_row_groups)), columns, use_threads=False), None)
        except (OSError, pa.ArrowException):
            if not footer.was_asked:
                raise
        return columns, parquet.metadata


def open_in_pieces(source: Any, **settings: Any) -> pa.parquet.ParquetFile:
    """A file whose column chunks, which may be larger than memory, are read as they are decoded, with checksums."""
    return pa.parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True, **settings)


def first_page(chunk: pa.parquet.ColumnChunkMetaData) -> int:
    """The place of a column chunk's first page in the file."""
    return min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)


class Page(NamedTuple):
    """A page: its rows (0 for a dictionary), about how many bytes of values they have, and how many at most. The most is for
    all rows if the values are in the page, and for one row (``for_each_row``) if they refer to other places.
    """

    rows: int
    about_bytes: int
    most_bytes: int
    for_each_row: bool


def pages_of(
    file: SupportsRead, start: int, rows: int, limit: int = 1 << 31, remedy: str = "", *, dictionaries: bool = False
) -> Iterator[Page]:
    """The pages of a column chunk of *rows* values that begins at *start*. ValueError if one of them is damaged, or has more
    than *limit* bytes, which *remedy* raises. *dictionaries*: places in a dictionary are read as such, not as what is there.
    """
    dictionary = (0, 1)  # bytes, entries
    seen = 0
    while seen < rows:
        header, length = _page_header(file, start)
        kind, size, stored = (_number(header, field) for field in (1, 2, 3))
        start += length + stored
        if (largest := max(size, stored)) > limit:
            raise ValueError(
                f"a page of it has {largest:,} bytes when it is unpacked; {limit:,} are allowed. Write the file with smaller "
                f"pages{remedy}"
            )
        if kind == DICTIONARY:
            dictionary = (size, max(_number(header.get(7), 1), 1))
            yield Page(0, 0, size, for_each_row=False)
        elif kind in (DATA, DATA_V2):
            of_data = header.get(5 if kind == DATA else 8)
            count, encoding = _number(of_data, 1), _number(of_data, 2 if kind == DATA else 4)
            seen += count
            if seen > rows:
                raise ValueError(f"its pages have {seen} rows or more, not {rows}")
            if encoding in DICTIONARIES:
                entry_bytes, entries = (PLACE_BYTES, 1) if dictionaries else dictionary
                yield Page(count, count * entry_bytes // entries, entry_bytes, for_each_row=True)
            else:
                yield Page(count, size, size, for_each_row=encoding not in (PLAIN, DELTA_LENGTHS))
        elif kind != INDEX:
            raise ValueError(f"a page of it is of kind {kind}")


def batch_lengths(pages: Iterable[Page], about_bytes: int, most_bytes: int, most_rows: int) -> Iterator[int]:
    """Row counts of consecutive batches of about *about_bytes*. No batch has more than *most_bytes*, unless a single row or the
    values of a single page have.
    """
    rows = about = most = 0
    for page in pages:
        if not page.rows:
            continue
        parts = max(-(-page.about_bytes // about_bytes), -(-page.rows // most_rows), 1)
        step = -(-page.rows // parts)
        if page.for_each_row:
            step = max(1, min(step, most_bytes // max(page.most_bytes, 1)))
        for first in range(0, page.rows, step):
            count = min(step, page.rows - first)
            here = page.about_bytes * count // page.rows
            at_most = page.most_bytes * (count if page.for_each_row else 1)
            if rows and (about + here > about_bytes or most + at_most > most_bytes or rows + count > most_rows):
                yield rows
                rows = about = most = 0
            rows, about, most = rows + count, about + here, most + at_most
    if rows:
        yield rows


def common_lengths(columns: list[Iterator[int]]) -> Iterator[int]:
    """Rows to read at a time of several columns, so that no batch goes over the end of another one in any of them."""
    left = [next(lengths, 0) for lengths in columns]
    while length := min(left):
        yield length
        left = [rest - length or next(lengths, 0) for rest, lengths in zip(left, columns, strict=True)]


def _number(struct: Any, field: int) -> int:
    value = struct.get(field) if isinstance(struct, dict) else None
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("a page header of it is damaged")
    return value


def _page_header(file: SupportsRead, start: int) -> tuple[dict[int, Any], int]:
    """The header of the page at *start*, and its length."""
    for size in HEADER_BYTES:
        file.seek(start)
        data = file.read(size)
        try:
            return _struct(data, 0)
        except (IndexError, ValueError):  # it may go on, or is damaged
            if len(data) < size:
                break
    raise ValueError("a page header of it is damaged")


# Thrift's compact protocol, as far as a page header needs it: values by the numbers of their fields.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY = range(1, 9)
_STRUCT = 12
_DEEPEST = 8


def _struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The struct at *at*, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("it is nested too deep")
    found: dict[int, Any] = {}
    field = 0
    while kind := data[at] & 15:
        delta = data[at] >> 4
        at += 1
        if delta:
            field += delta
        else:
            field, at = _zigzag(data, at)
        found[field], at = _value(data, at, kind, depth)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of Thrift's compact protocol at byte *at*, and the byte after it. Texts are passed over: None."""
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in (_I16, _I32, _I64):
        return _zigzag(data, at)
    if kind == _BINARY:
        length, at = varint(data, at)
        data[at + length - 1]  # IndexError where it goes on
        return None, at + length
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind == _BYTE:
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    raise ValueError(f"kind {kind}")  # lists, sets and maps are in none


def _zigzag(data: bytes, at: int) -> IntPair:
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at
