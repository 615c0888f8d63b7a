"""Arrow files and streams: record batches, read one at a time. They are not mapped: a file that is cut off meanwhile is an error
then, and would end the process otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from flat_tokens.extras import pa
from flat_tokens.stores.reading import library_path
from flat_tokens.text.paths import column_at, fields_of, steps_of
from flat_tokens.text.rows import Range, Rows, SourceFormat, TextFile, bounded, check_columns, chosen, cut, neighbours

FILE, STREAM = b"ARROW1", b"\xff\xff\xff\xff"


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    batches = _opened(file, file.columns)
    start = seen = 0
    at = part.start
    for batch in itertools.islice(batches, part.start, part.stop):
        at += 1
        for piece in cut(batch.select(file.columns)):
            seen += sum(batch.column(name).nbytes for name in file.text_columns) * len(piece) // len(batch)
            yield Rows.of_batch(file, piece, start, seen)
            start += len(piece)
    if at < part.stop:  # a stream may end anywhere
        raise OSError(f"it ends after {at} of {part.stop} record batches")


def _opened(file: TextFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Record batches of these columns, or of all if there are none; the offsets of *columns* are checked."""
    source, opened = _source(file)
    schema = opened(source).schema
    if columns:
        check_columns(file, schema)
    source.seek(0)
    fields = fields_of(schema)
    firsts = dict.fromkeys((steps_of(fields, name) or [name])[0] for name in columns)
    included = [schema.get_field_index(name) for name in firsts]
    reader = opened(source, options=pa.ipc.IpcReadOptions(included_fields=included))
    is_file = opened is pa.ipc.open_file
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        # Arrow files have no checksums: after an offset that leads astray the process would be gone.
        for name in firsts:
            if pa.types.is_struct(batch.schema.field(name).type):
                batch.column(name).validate()
        for name in columns:
            _check_offsets(column_at(batch, name))
        yield chosen(batch, columns) if columns else batch
    if not is_file and source.read(1):
        raise ValueError(
            f"{file.name} has more bytes after the end of its stream, as streams have that were put together. "
            "Give each a file of its own."
        )


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
    elif pa.types.is_string_view(values.type):  # what is in nulls too: a cast follows it
        buffers = [None, *values.buffers()[1:]]
        pa.Array.from_buffers(pa.binary_view(), len(values), buffers, offset=values.offset).validate(full=True)
    else:
        values.view(as_bytes.get(values.type, values.type)).validate(full=True)


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    sizes = [sum(batch.column(name).nbytes for name in file.text_columns) for batch in _opened(file, file.columns)]
    for start, stop in neighbours(sizes, range_bytes):
        yield Range(start, stop, None, sum(sizes[start:stop]))


def rows_before(file: TextFile, part: Range) -> int:
    return sum(batch.num_rows for batch in itertools.islice(_opened(file, []), part.start))


def columns(file: TextFile) -> list[str]:
    source, opened = _source(file)
    names: list[str] = opened(source).schema.names
    return names


ARROW = SourceFormat((".arrow", ".feather"), ranges, bounded(read), rows_before, begins=(FILE, STREAM), columns=columns)
