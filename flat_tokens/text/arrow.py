"""Arrow files and streams: record batches, mapped into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flat_tokens.text.arrow_library import pa
from flat_tokens.text.rows import Range, Rows, SourceFormat, TextFile, check_columns, cut, neighbours

FILE, STREAM = b"ARROW1", b"\xff\xff\xff\xff"


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    _, batches = _opened(file, file.columns)
    start = seen = 0
    for batch in itertools.islice(batches, part.start, part.stop):
        for piece in cut(batch.select(file.columns)):
            seen += batch.column(file.text_column).nbytes * len(piece) // len(batch)
            yield Rows.of_batch(file, piece, start, seen)
            start += len(piece)


def _opened(file: TextFile, columns: list[str]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and record batches, mapped into memory, not copied; the offsets of *columns* are checked."""
    source = pa.memory_map(file.path) if file.is_local else pa.PythonFile(file.open(), "r")
    is_file = source.read(len(FILE)) == FILE
    source.seek(0)
    if is_file:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        reader = pa.ipc.open_stream(source)
        batches = iter(reader)
    return reader.schema, (_checked(batch, columns) for batch in batches)


def _checked(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    # Arrow files have no checksums: after an offset that leads astray the process would be gone.
    for column in columns:
        _check_offsets(batch.column(column))
    return batch


def _check_offsets(values: pa.Array) -> None:
    """Refuse an array whose offsets lead outside its data. Whether its bytes are text is not checked here."""
    as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    if pa.types.is_dictionary(values.type):
        _check_offsets(values.dictionary)
        pa.DictionaryArray.from_arrays(values.indices, values.dictionary, safe=True)
    else:
        values.view(as_bytes.get(values.type, values.type)).validate(full=True)


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    schema, batches = _opened(file, file.columns)
    check_columns(file, schema)
    sizes = [batch.column(file.text_column).nbytes for batch in batches]
    for start, stop in neighbours(sizes, range_bytes):
        yield Range(start, stop, None, sum(sizes[start:stop]))


def rows_before(file: TextFile, part: Range) -> int:
    return sum(batch.num_rows for batch in itertools.islice(_opened(file, [])[1], part.start))


ARROW = SourceFormat((".arrow", ".feather"), ranges, read, rows_before, begins=(FILE, STREAM))
