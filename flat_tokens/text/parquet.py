"""Parquet files: row groups, read in batches whose size the headers of their pages tell."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import BinaryIO, TypeAlias

from flat_tokens.extras import pa
from flat_tokens.pages import Page, batch_lengths, common_lengths, first_page, open_in_pieces, pages_of, sound_metadata
from flat_tokens.stores.reading import library_path
from flat_tokens.text import limits
from flat_tokens.text.paths import with_paths
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
    neighbours,
)

MAX_CUTS_OF_A_ROW_GROUP = 8


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    with _opened(file) as parquet:
        columns = _pages_of_columns(parquet, file, part)
        largest = max((page.most_bytes for pages in columns for page in pages), default=0)
        groups = range(part.start, part.stop)
        first, last = part.rows or (0, sum(parquet.metadata.row_group(i).num_rows for i in groups))
        start = 0
        with room_for_pages(largest):
            batches = _batches(parquet, list(groups), file.columns, first, last, columns, file.batch_bytes or limits.BATCH_BYTES)
            for batch in batches if file.batch_bytes else _even(batches):
                seen = part.text_bytes * (start + len(batch)) // (last - first)
                yield Rows.of_batch(file, batch, start, seen)
                start += len(batch)


@contextlib.contextmanager
def _opened(file: TextFile) -> Iterator[pa.parquet.ParquetFile]:
    """A file read in small pieces, its page checksums checked if it has them."""
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(library_path(file.path) if file.is_local else file.open())
        if file.content is not None:
            opened = pa.BufferReader(file.content)
        state, known = _footer_of(file)
        parquet = stack.enter_context(open_in_pieces(opened, metadata=known))
        if known is None:
            _keep_footer(file, state, parquet.metadata)
        yield parquet


def _batches(
    parquet: pa.parquet.ParquetFile,
    groups: list[int],
    names: list[str],
    first: int,
    last: int,
    columns: list[list[Page]],
    batch_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Batches of rows *first* to *last*, each small enough for memory."""
    at = 0  # rows of the row groups -> rows of the range
    batches: Iterator[pa.RecordBatch] | None = None
    most = (batch_bytes, limits.LARGEST_BATCH, limits.BATCH_ROWS)
    for length in common_lengths([batch_lengths(pages, *most) for pages in columns]):
        if batches is None:
            batches = parquet.iter_batches(length, groups, names, use_threads=False)
        parquet.reader.set_batch_size(length)
        end = min(at + length, last)
        # A batch ends where another dictionary begins, in a file whose columns have them by their type.
        while at < end and (batch := next(batches, None)) is not None:
            low, high = max(first - at, 0), min(last - at, len(batch))
            at += len(batch)
            if low < high:
                yield chosen(batch.slice(low, high - low), names)
    if at < last:
        raise OSError(f"it ends after {at} of {last} rows")


def _pages_of_columns(parquet: pa.parquet.ParquetFile, file: TextFile, part: Range) -> list[list[Page]]:
    """The pages of each column of a range. ValueError if one is larger than any document makes it."""
    metadata = parquet.metadata
    # A column that has the path of a field for its name counts, as it does when its values are read.
    order = sorted(range(metadata.num_columns), key=lambda i: metadata.schema.column(i).path == metadata.schema.column(i).name)
    leaf = {metadata.schema.column(i).path: i for i in order}
    limit = max(limits.LARGEST_PAGE, 2 * file.max_bytes)
    columns: list[list[Page]] = []
    with file.open() as opened:
        for name in file.columns:
            groups = [metadata.row_group(i) for i in range(part.start, part.stop)]
            if name not in leaf:  # a column of lists, whose pages do not end where rows do
                sizes = _sizes(metadata, name)[part.start : part.stop]
                columns.append(
                    [Page(one.num_rows, size, size, for_each_row=False) for one, size in zip(groups, sizes, strict=True)]
                )
                continue
            try:
                columns.append([page for one in groups for page in _pages(opened, one.column(leaf[name]), one.num_rows, limit)])
            except ValueError as error:
                raise ValueError(f"{file.name}: column {name!r} cannot be read: {error}.") from error
    return columns


def _pages(opened: BinaryIO, chunk: pa.parquet.ColumnChunkMetaData, rows: int, limit: int) -> Iterator[Page]:
    """The pages of a column chunk. What their headers say bounds memory, so ones that cannot be read are an error."""
    pages = pages_of(opened, first_page(chunk), rows, limit, ", or raise documents.max_bytes")
    return pages if "BYTE_ARRAY" in chunk.physical_type else (Page(page.rows, 0, 8, for_each_row=True) for page in pages)


def _leaves(metadata: pa.parquet.FileMetaData, name: str) -> list[int]:
    """The numbers of a column, or of all that is nested in it."""
    return [i for i in range(metadata.num_columns) if f"{metadata.schema.column(i).path}.".startswith(f"{name}.")]


def _sizes(metadata: pa.parquet.FileMetaData, name: str) -> list[int]:
    """Bytes of a column in each row group, uncompressed, with all that is nested in it."""
    # A row group may lack columns that nobody reads: it is not asked for those.
    leaves = _leaves(metadata, name)
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return [sum(group.column(i).total_uncompressed_size for i in leaves) for group in groups]


_page_bytes, _pages_change = 0, threading.Condition()


@contextlib.contextmanager
def room_for_pages(size: int) -> Iterator[None]:
    """A block in which a thread holds pages of *size* bytes, of LARGEST_PAGE for all threads. One that wants more than is left
    waits for the others, at last until it is alone.
    """
    global _page_bytes
    with _pages_change:
        _pages_change.wait_for(lambda: _page_bytes == 0 or _page_bytes + size <= limits.LARGEST_PAGE)
        _page_bytes += size
    try:
        yield
    finally:
        with _pages_change:
            _page_bytes -= size
            _pages_change.notify_all()


def _even(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of about BATCH_BYTES with the same rows: small batches are joined, large ones cut."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        batch_size = batch.nbytes
        is_cut = batch_size > 2 * limits.BATCH_BYTES or any(map(pa.types.is_dictionary, batch.schema.types))
        if is_cut or size + batch_size > limits.BATCH_BYTES or sum(map(len, held)) + len(batch) > limits.BATCH_ROWS:
            yield from _joined(held)
            held, size = [], 0
        if is_cut:
            yield from cut(batch)
        else:
            held.append(batch)
            size += batch_size
    yield from _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if batches:
        yield batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _metadata(file: TextFile) -> pa.parquet.FileMetaData:
    """The metadata of a file that has the columns and whose footer is sound."""

    def checked(schema: pa.Schema) -> list[str]:
        check_columns(file, schema)
        return file.columns

    with file.open() as opened:
        state, known = _footer_of(file)
        try:
            _, metadata = sound_metadata(opened, checked, known)
        except OSError as error:
            if "decrypt" not in str(error):
                raise
            columns = ", ".join(map(repr, file.columns))
            raise ValueError(
                f"{file.name}: a column of {columns} is encrypted, and there are no keys here. Write it without encryption first."
            ) from error
        if known is None:
            _keep_footer(file, state, metadata)
        return metadata


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    metadata = _metadata(file)
    sizes = [sum(sizes) for sizes in zip(*(_sizes(metadata, name) for name in file.text_columns), strict=True)]
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if sum(rows) != metadata.num_rows:
        raise OSError(f"its row groups have {sum(rows)} rows, but it says {metadata.num_rows}")
    for start, stop in neighbours(sizes, range_bytes):
        size = sum(sizes[start:stop])
        cuts = min(-(-size // range_bytes), MAX_CUTS_OF_A_ROW_GROUP, rows[start]) if stop == start + 1 else 1
        if cuts <= 1:
            yield Range(start, stop, None, size)
            continue
        # Every range of a row group decodes what is before it, so a giant one is cut a few times only.
        for i in range(cuts):
            yield Range(start, stop, (rows[start] * i // cuts, rows[start] * (i + 1) // cuts), size // cuts)


def chunks_of(file: TextFile, part: Range) -> Iterator[Span]:
    """The column chunks of a range."""
    metadata = _metadata(file)
    leaves = [i for name in file.columns for i in _leaves(metadata, name)]
    for chunk in (metadata.row_group(group).column(i) for group in range(part.start, part.stop) for i in leaves):
        yield first_page(chunk), first_page(chunk) + chunk.total_compressed_size


def rows_before(file: TextFile, part: Range) -> int:
    with _opened(file) as parquet:
        before: int = sum(parquet.metadata.row_group(i).num_rows for i in range(part.start))
    return before + (part.rows[0] if part.rows else 0)


def holding(file: TextFile, rows: Sequence[int]) -> Iterator[tuple[Range, int]]:
    """The row groups that hold any of *rows*."""
    metadata, first = _metadata(file), 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        if any(first <= row < first + count for row in rows):
            yield Range(group, group + 1, None, 0), first
        first += count


def columns(file: TextFile) -> list[str]:
    with _opened(file) as parquet:
        return list(with_paths(parquet.schema_arrow, file.columns).names)


PARQUET = SourceFormat(
    (".parquet",),
    ranges,
    bounded(read),
    rows_before,
    begins=(b"PAR1",),
    holding=holding,
    columns=columns,
    outline=Outline(b"PAR1", chunks_of),
)


KEPT_BYTES = 8 << 20
"""Bytes of the footers that are kept, as files have them; the latest one is kept whatever its size."""

FileState: TypeAlias = "tuple[str, int, int, int, int] | None"
_footers: OrderedDict[FileState, pa.parquet.FileMetaData] = OrderedDict()
"""The footers of the files on this machine that were opened last. Threads share them."""
_lock = threading.Lock()


def _footer_of(file: TextFile) -> tuple[FileState, pa.parquet.FileMetaData | None]:
    """The state of a file now, and its footer. None if that has to be read."""
    state = _state_of(file)
    with _lock:
        if state not in _footers:
            return state, None
        _footers.move_to_end(state)
        return state, _footers[state]


def _keep_footer(file: TextFile, state: FileState, footer: pa.parquet.FileMetaData) -> None:
    """Keep the footer that was read of a file after it had been in that state, if it still is."""
    if state is None or _state_of(file) != state:
        return
    with _lock:
        _footers[state] = footer
        _footers.move_to_end(state)
        while len(_footers) > 1 and sum(one.serialized_size for one in _footers.values()) > KEPT_BYTES:
            _footers.popitem(last=False)


def _state_of(file: TextFile) -> FileState:
    """The path of a file on this machine, and what changes when it is written to; None for another one."""
    if not file.is_local:
        return None
    status = os.stat(file.path)
    return (file.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
