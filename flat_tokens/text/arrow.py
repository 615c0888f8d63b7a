"""Arrow files and streams: record batches, read one at a time. They are not mapped: a file that is cut off meanwhile is an error
then, and would end the process otherwise.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from flat_tokens.extras import pa
from flat_tokens.stores.reading import library_path
from flat_tokens.text.paths import column_at, fields_of, steps_of, with_paths
from flat_tokens.text.rows import (
    Outline,
    Range,
    Rows,
    SourceFormat,
    Span,
    TextFile,
    bounded,
    check_columns,
    chosen,
    cut,
    is_view,
    neighbours,
)

FILE, STREAM = b"ARROW1", b"\xff\xff\xff\xff"

RAW = b"\xff" * 8
"""The length of a buffer that is not compressed, where others may be."""


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    start = done = 0
    for done, batch in enumerate(_opened(file, part), 1):
        left = len(batch)
        for piece in cut(batch):
            left -= len(piece)
            seen = part.text_bytes * (done - left / len(batch)) / (part.stop - part.start)
            yield Rows.of_batch(file, piece, start, int(seen))
            start += len(piece)
    if part.start + done < part.stop:  # a stream may end anywhere
        raise OSError(f"it ends after {part.start + done} of {part.stop} record batches")


def _opened(file: TextFile, part: Range | None = None) -> Iterator[pa.RecordBatch]:
    """Record batches of a range, or of the file, with the columns that are read; the offsets of these are checked."""
    source, opened = _source(file)
    reader = _reader(file, source, opened, file.columns)
    is_file, (first, last) = opened is pa.ipc.open_file, (part.start, part.stop) if part else (0, None)
    some = range(reader.num_record_batches)[first:last] if is_file else ()
    for batch in map(reader.get_batch, some) if is_file else itertools.islice(reader, first, last):
        # Arrow files have no checksums: after an offset that leads astray the process would be gone.
        for column in batch.columns:
            if pa.types.is_struct(column.type):
                column.validate()
        for name in file.columns:
            _check_offsets(column_at(batch, name))
        yield chosen(batch, file.columns)
    if not is_file and part is None and source.read(1):
        raise ValueError(
            f"{file.name} has more bytes after the end of its stream, as streams have that were put together. "
            "Give each a file of its own."
        )


def _reader(file: TextFile, source: pa.NativeFile, opened: Callable[..., Any], columns: list[str]) -> Any:
    """A reader of a file that reads the columns alone that *columns* are, or are fields of."""
    schema = opened(source).schema
    check_columns(file, schema)
    source.seek(0)
    fields = fields_of(schema)
    firsts = dict.fromkeys((steps_of(fields, name) or [name])[0] for name in columns)
    included = [schema.get_field_index(name) for name in firsts]
    return opened(source, options=pa.ipc.IpcReadOptions(included_fields=included))


class _Heads(io.BufferedReader):
    """A file as Arrow reads it. The spans of a record batch are noted in ``spans``: of its metadata first, which Arrow gets, then
    of its columns, whose bytes are made up.
    """

    spans: list[Span] | None = None

    def read(self, size: int | None = -1) -> bytes:
        if self.spans is None:
            return super().read(size)
        self.spans.append((self.tell(), self.tell() + (size or 0)))
        return super().read(size) if len(self.spans) == 1 else RAW[:size].ljust(size or 0, b"\0")


def _spans(file: TextFile, columns: list[str], start: int = 0, stop: int | None = None) -> Iterator[tuple[int, list[Span]]]:
    """Rows of each record batch of a file, and the spans of its metadata and of *columns*. Without the metadata -1, and its span.
    Of a file that has none, spans as long as the columns are.
    """
    if not _has_spans(file):
        for batch in itertools.islice(_opened(file), start, stop):
            yield batch.num_rows, [(0, 0), (0, sum(batch.column(name).nbytes for name in columns))]
        return
    opened: Any = file.open()
    with opened, _Heads(opened) as heads:
        reader = _reader(file, pa.PythonFile(heads), pa.ipc.open_file, columns)
        for number in range(reader.num_record_batches)[start:stop]:
            heads.spans = []
            try:
                rows = reader.get_batch(number).num_rows
            except (pa.ArrowException, OSError):
                rows = -1
            yield rows, heads.spans


def _has_spans(file: TextFile) -> bool:
    """Whether a file has a footer, unlike a stream, and no dictionaries, which have places of their own."""
    source, opened = _source(file)
    return opened is pa.ipc.open_file and "dictionary<" not in str(opened(source).schema.types)


def _source(file: TextFile) -> tuple[pa.NativeFile, Callable[..., Any]]:
    """A file, and the function of pyarrow that opens it."""
    if file.is_local:
        with library_path(file.path) as path:
            source = pa.OSFile(path)
    else:
        source = pa.PythonFile(file.open(), "r")
    if file.content is not None:
        source = pa.BufferReader(file.content)
    is_file = source.read(len(FILE)) == FILE
    source.seek(0)
    return source, pa.ipc.open_file if is_file else pa.ipc.open_stream


def _check_offsets(values: pa.Array) -> None:
    """Refuse an array whose offsets lead outside its data. Whether its bytes are text is not checked here."""
    as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    if isinstance(values.type, pa.BaseExtensionType):
        _check_offsets(values.storage)
    elif pa.types.is_dictionary(values.type):
        _check_offsets(values.dictionary)
        pa.DictionaryArray.from_arrays(values.indices, values.dictionary, safe=True)
    elif is_view(values.type):  # what is in nulls too: a cast follows it
        buffers = [None, *values.buffers()[1:]]
        pa.Array.from_buffers(pa.binary_view(), len(values), buffers, offset=values.offset).validate(full=True)
    else:
        values.view(as_bytes.get(values.type, values.type)).validate(full=True)


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    sizes = [sum(stop - start for start, stop in spans[1:]) for _, spans in _spans(file, file.text_columns)]
    for start, stop in neighbours(sizes, range_bytes):
        yield Range(start, stop, None, sum(sizes[start:stop]))


def rows_before(file: TextFile, part: Range) -> int | None:
    counts = [rows for rows, _ in _spans(file, file.text_columns, 0, part.start)]
    return None if -1 in counts else sum(counts)


def heads(file: TextFile, part: Range | None) -> Iterator[Span]:
    """The metadata of a range's record batches, or of all."""
    if not _has_spans(file):
        raise pa.ArrowInvalid("it has dictionaries")
    for _, spans in _spans(file, file.text_columns, *((part.start, part.stop) if part else ())):
        yield spans[0]


def to_read(file: TextFile, part: Range) -> Iterator[Span]:
    """The columns of a range's record batches."""
    return (span for _, spans in _spans(file, file.columns, part.start, part.stop) for span in spans[1:])


def columns(file: TextFile) -> list[str]:
    source, opened = _source(file)
    names: list[str] = with_paths(opened(source).schema, file.columns).names
    return names


ARROW = SourceFormat(
    (".arrow", ".feather"),
    ranges,
    bounded(read),
    rows_before,
    begins=(FILE, STREAM),
    columns=columns,
    outline=Outline(FILE, to_read, heads),
)
