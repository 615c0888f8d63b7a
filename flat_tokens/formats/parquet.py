"""A row a sequence: Parquet files with a column of token lists, and Arrow files as ``datasets`` saves them to disk.

Both are written with int32 lists, from flat arrays: an Arrow list array *is* a flat array of values with offsets.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.layouts import to_json
from flat_tokens.arrays.opening import read_json
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.extras import extra
from flat_tokens.formats.contract import (
    BATCH_TOKENS,
    ExportFile,
    Files,
    Format,
    Readable,
    Splits,
    by_split,
    check_index,
    check_positive,
    nothing_to_finish,
    require_sequences,
    sequence_ranges,
    token_ranges,
)
from flat_tokens.manifest import SplitName
from flat_tokens.stores.store import ObjectWriter, Store, StoredObject

MAX_ROW_TOKENS = 2**31 - 1
"""A list's offsets are 32 bits wide."""
MAX_BATCH_ROWS = 1 << 20
READ_BUFFER_BYTES = 1 << 20

PARQUET_ENDINGS = (".parquet", ".pq")
ARROW_ENDINGS = (".arrow", ".ipc", ".feather")
ARROW_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"


@dataclass(frozen=True)
class Parquet:
    """How Parquet files are written and which column is read.

    ``tokens_per_file`` and ``tokens_per_row_group``: at most, unless one sequence is longer. ``zstd`` makes files less than
    half as large, and several times as slow to write as disks are.
    """

    column: str = "input_ids"
    tokens_per_file: int = 1 << 26
    tokens_per_row_group: int = 1 << 22
    compression: Literal["zstd", "none"] = "none"

    def __post_init__(self) -> None:
        _check(self.column, tokens_per_file=self.tokens_per_file, tokens_per_row_group=self.tokens_per_row_group)
        if self.compression not in ("zstd", "none"):
            raise ValueError(f"compression is {self.compression!r}, but it is 'zstd' or 'none'")


@dataclass(frozen=True)
class Arrow:
    """How Arrow files are written and which column is read.

    ``tokens_per_file`` and ``tokens_per_batch``: at most, unless one sequence is longer.
    """

    column: str = "input_ids"
    tokens_per_file: int = 1 << 27
    tokens_per_batch: int = 1 << 20

    def __post_init__(self) -> None:
        _check(self.column, tokens_per_file=self.tokens_per_file, tokens_per_batch=self.tokens_per_batch)


def _check(column: str, **counts: int) -> None:
    if not isinstance(column, str) or not column:
        raise ValueError(f"column is {column!r}, but it is a column's name")
    for name, count in counts.items():
        check_positive(name, count)
        if count > MAX_ROW_TOKENS:
            raise ValueError(f"{name} is {count}, but lists hold up to {MAX_ROW_TOKENS} tokens")


# Writing


def plan_parquet(splits: Splits, options: Parquet) -> list[ExportFile]:
    return _plan(splits, options.tokens_per_file, "{split}-{i:05d}-of-{count:05d}.parquet")


def plan_arrow(splits: Splits, options: Arrow) -> list[ExportFile]:
    return _plan(splits, options.tokens_per_file, "{split}/data-{i:05d}-of-{count:05d}.arrow")


def _plan(splits: Splits, tokens_per_file: int, key: str) -> list[ExportFile]:
    """Files of whole sequences, under names by which ``datasets`` finds splits. A split without sequences has no file."""
    require_sequences(splits)
    files = []
    for name, split in splits.items():
        cuts = sequence_ranges(split, tokens_per_file)
        for i, (start, stop) in enumerate(cuts):
            # Several sequences are never more tokens than a file's, so only one alone can be too long for a list.
            if stop == start + 1 and (length := int(np.diff(split.seq_starts.read(start, stop + 1))[0])) > MAX_ROW_TOKENS:
                raise ValueError(f"{split.store.url}: sequence {start} has {length} tokens, but a list holds {MAX_ROW_TOKENS}")
            files.append(ExportFile(key.format(split=name, i=i, count=len(cuts)), name, start, stop))
    return files


def write_parquet(splits: Splits, file: ExportFile, store: Store, options: Parquet) -> list[StoredObject]:
    """One file, with a row group for each batch of sequences."""
    pyarrow, parquet = extra("pyarrow", "writing Parquet files"), extra("pyarrow.parquet", "writing Parquet files")
    settings: dict[str, Any] = {
        "compression": options.compression,
        "use_dictionary": False,  # a vocabulary has more entries than a dictionary page is good for
        "write_statistics": False,
        "write_page_checksum": True,
    }
    schema = _schema(pyarrow, options.column)
    with store.create(file.key) as writing, parquet.ParquetWriter(_Sink(writing), schema, **settings) as writer:
        for batch in splits[file.split].batches(file.start, file.stop, max_tokens=options.tokens_per_row_group):
            writer.write_batch(_record_batch(pyarrow, batch, schema))
    return [writing.stored]


def write_arrow(splits: Splits, file: ExportFile, store: Store, options: Arrow) -> list[StoredObject]:
    """One file, a stream of record batches."""
    pyarrow, ipc = extra("pyarrow", "writing Arrow files"), extra("pyarrow.ipc", "writing Arrow files")
    schema = _schema(pyarrow, options.column)
    with store.create(file.key) as writing, ipc.new_stream(_Sink(writing), schema) as writer:
        for batch in splits[file.split].batches(file.start, file.stop, max_tokens=options.tokens_per_batch):
            writer.write_batch(_record_batch(pyarrow, batch, schema))
    return [writing.stored]


def finish_arrow(splits: Splits, written: Sequence[StoredObject], store: Store, options: Arrow) -> list[StoredObject]:
    """The files that ``datasets.load_from_disk`` finds the others by. The list of splits comes last."""
    objects, names = [], [name for name in splits if any(posixpath.dirname(item.key) == name for item in written)]
    for name in names:
        files = [item for item in written if posixpath.dirname(item.key) == name]
        fingerprint = hashlib.sha256("".join(item.sha256 for item in files).encode()).hexdigest()[:16]
        state: dict[str, Any] = {
            "_data_files": [{"filename": posixpath.basename(item.key)} for item in files],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": name,
        }
        # Releases spell features differently; without features, all of them take the schema's.
        objects.append(store.put(f"{name}/dataset_info.json", to_json({"features": None})))
        objects.append(store.put(f"{name}/state.json", to_json(state)))
    objects.append(store.put("dataset_dict.json", to_json({"splits": names})))
    return objects


def _schema(pyarrow: Any, column: str) -> Any:
    return pyarrow.schema([(column, pyarrow.list_(pyarrow.int32()))])


def _record_batch(pyarrow: Any, batch: TokenBatch, schema: Any) -> Any:
    tokens = (batch.encoded_tokens >> np.uint32(1)).view(np.int32)  # ids end at 2**31 - 1
    lists = pyarrow.ListArray.from_arrays(batch.seq_starts.astype(np.int32), tokens, type=schema.field(0).type)
    return pyarrow.record_batch([lists], schema=schema)


class _Sink:
    """An object as a file that pyarrow can write to."""

    closed = False

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer, self._size = writer, 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._writer.write(data)
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...

    def close(self) -> None:
        """Nothing: the ``with`` block that began the object ends it."""


# Reading


class RowFile(Protocol):
    """A file with a column of lists, read as Arrow arrays."""

    @property
    def path(self) -> str: ...

    @property
    def row_count(self) -> int: ...

    def arrays(self, start: int, stop: int, max_tokens: int) -> Iterator[tuple[int, Any]]:
        """(first row, list array) of ranges that cover rows ``start:stop``, each of about *max_tokens* if possible."""
        ...


@dataclass(frozen=True)
class Rows:
    """The rows of a file as a `Readable`. A row is read as a whole, so that memory is bounded by the longest one."""

    file: RowFile

    @property
    def seq_count(self) -> int:
        return self.file.row_count

    @cached_property
    def token_count(self) -> int:
        """Counted in one pass over the file, once."""
        return sum(batch.token_count for batch in self.batches())

    def sequence(self, i: int) -> npt.NDArray[np.uint32]:
        """Row *i*, decoded: uint32[length]. Reads its row group up to there."""
        check_index(i, self.seq_count, self.file.path)
        row = i % self.seq_count
        return np.concatenate([batch.encoded_tokens for batch in self.batches(row, row + 1)]) >> np.uint32(1)

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        stop = self.seq_count if stop is None else stop
        if not 0 <= start <= stop <= self.seq_count:
            raise IndexError(f"{self.file.path}: there are no sequences {start} to {stop}; there are {self.seq_count}")
        done = start
        for first, array in self.file.arrays(start, stop, max_tokens):
            low, high = max(start - first, 0), min(stop - first, len(array))
            if low < high:
                yield from _batches(array.slice(low, high - low), self.file.path, first + low, max_tokens)
                done = first + high
        if done != stop:
            raise ValueError(f"{self.file.path}: says that it has {self.seq_count} rows, but ends before row {stop}")


def _batches(array: Any, path: str, first: int, max_tokens: int) -> Iterator[TokenBatch]:
    """A list array's rows, whose numbers begin with *first*, in ranges of at most *max_tokens*."""
    tokens, entries = _flat(array, path, first)
    for part in token_ranges(lambda i, j: entries[i : j + 1], 0, len(array), max_tokens):
        yield TokenBatch.from_flat(tokens[part.start : part.stop], part.seq_starts)


def _flat(array: Any, path: str, first: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """A list array's ids (uint32[n], a copy) and where its rows start and the last one ends among them (uint64[rows + 1]).

    ValueError, naming the row, if one is null or holds a number that is no token id.
    """
    with _refused_by_name(path, "lists"):
        array.validate(full=True)  # nothing has checked the offsets, which may come from a stranger
    if array.null_count:
        nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        raise ValueError(f"{path}: row {first + nulls[0]} is null. Leave such rows out, or make them empty lists.")
    if hasattr(array.type, "list_size"):
        entries = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
    else:
        entries = array.offsets.to_numpy().astype(np.int64)
        entries -= entries[0]
    values = array.flatten()

    def row(wrong: npt.NDArray[np.bool_]) -> int:
        return first + int(np.searchsorted(entries, np.flatnonzero(wrong)[0], side="right")) - 1

    if values.null_count:
        raise ValueError(f"{path}: row {row(values.is_null().to_numpy(zero_copy_only=False))} has a null among its token ids")
    ids = values.to_numpy()
    if len(ids) and (ids.min() < 0 or ids.max() > MAX_TOKEN_ID):
        wrong = (ids < 0) | (ids > MAX_TOKEN_ID)
        raise ValueError(f"{path}: row {row(wrong)} holds {ids[wrong][0]}, but token ids are 0 to {MAX_TOKEN_ID}")
    return ids.astype(np.uint32), entries.astype(np.uint64)


def recognise_parquet(files: Files) -> bool:
    return any(files.store.read_range(key, 0, 4) == b"PAR1" for key in _keys(files, PARQUET_ENDINGS))


def open_parquet(files: Files, options: Parquet) -> dict[SplitName, Readable]:
    """Every Parquet file below a directory, or one file: its rows are sequences."""
    return by_split(_keys(files, PARQUET_ENDINGS), lambda key: Rows(ParquetRows.at(files.store, key, options.column)))


def recognise_arrow(files: Files) -> bool:
    return any(_is_arrow(files.store, key) for key in _keys(files, ARROW_ENDINGS))


def open_arrow(files: Files, options: Arrow) -> dict[SplitName, Readable]:
    """A directory that ``datasets`` saved, or other Arrow files: their rows are sequences."""
    return by_split(_arrow_keys(files), lambda key: Rows(ArrowRows.at(files.store, key, options.column)))


def _keys(files: Files, endings: tuple[str, ...]) -> list[str]:
    """The files with one of *endings*, or a single file whatever its name."""
    return [key for key in files.keys if len(files.keys) == 1 or key.lower().endswith(endings)]


def _arrow_keys(files: Files) -> list[str]:
    """The Arrow files. In a directory that ``datasets`` saved, only those of its list: its caches lie there too."""
    saved = {posixpath.dirname(key): key for key in files.keys if posixpath.basename(key) == "state.json"}
    keys = [key for key in _keys(files, ARROW_ENDINGS) if posixpath.dirname(key) not in saved]
    for directory, key in saved.items():
        state, path = read_json(files.store, key), files.store.path(key)
        listed = state.get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise ValueError(f"{path}: has no list of data files")
        if state.get("_indices_data_files"):
            raise ValueError(f"{path}: has rows in another order than its data files. Save it with a newer release of datasets.")
        for item in listed:
            name = item.get("filename")
            if not isinstance(name, str) or (found := posixpath.join(directory, name)) not in files.keys:
                raise ValueError(f"{path}: lists {reprlib.repr(name)}, which is not among the files beside it")
            keys.append(found)
    return keys


@dataclass(frozen=True)
class ParquetRows:
    """The rows of a Parquet file. ``groups``: the number of rows in each row group, from the footer."""

    store: Store
    key: str
    column: str
    groups: tuple[int, ...]

    @classmethod
    def at(cls, store: Store, key: str, column: str) -> ParquetRows:
        """Open a file by its footer. ValueError if it is not Parquet, or has no such column of token ids."""
        with _opened_parquet(store, key) as file:
            _check_column(file.schema_arrow, column, store.path(key))
            groups = tuple(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
        if any(rows < 0 for rows in groups):
            raise ValueError(f"{store.path(key)}: has a row group of less than no rows")
        return cls(store, key, column, groups)

    @property
    def path(self) -> str:
        return self.store.path(self.key)

    @property
    def row_count(self) -> int:
        return sum(self.groups)

    def arrays(self, start: int, stop: int, max_tokens: int) -> Iterator[tuple[int, Any]]:
        first = 0
        with _opened_parquet(self.store, self.key) as file:
            for group, rows in enumerate(self.groups):
                if first < stop and first + rows > start:
                    at = first
                    for batch in self._read(file, group, self._rows_at_a_time(file, group, max_tokens)):
                        yield at, batch.column(self.column)
                        at += len(batch)
                        if at >= stop:
                            return
                    if at != first + rows:
                        raise ValueError(f"{self.path}: row group {group} has {at - first} rows, but the file says {rows}")
                first += rows

    def _rows_at_a_time(self, file: Any, group: int, max_tokens: int) -> int:
        """The number of rows of a group that are about *max_tokens* tokens; at least one."""
        rows = self.groups[group]
        if rows == 1:
            return 1
        # Wrong metadata of a chunk ends the process when it is asked for; the reader, which refuses it, goes first.
        next(self._read(file, group, 1), None)
        leaf = next(i for i, column in enumerate(file.schema) if column.path.startswith(f"{self.column}."))
        tokens: int = file.metadata.row_group(group).column(leaf).num_values
        return min(max(max_tokens * rows // max(tokens, 1), 1), MAX_BATCH_ROWS)

    def _read(self, file: Any, group: int, rows_at_a_time: int) -> Iterator[Any]:
        batches: Iterator[Any] = file.iter_batches(rows_at_a_time, [group], [self.column], use_threads=False)
        return batches


@dataclass(frozen=True)
class ArrowRows:
    """The rows of an Arrow file or stream."""

    store: Store
    key: str
    column: str

    @classmethod
    def at(cls, store: Store, key: str, column: str) -> ArrowRows:
        """Open a file by its schema. ValueError if it is not Arrow, or has no such column of token ids."""
        rows = cls(store, key, column)
        with rows._opened() as (schema, _):
            _check_column(schema, column, rows.path)
        return rows

    @property
    def path(self) -> str:
        return self.store.path(self.key)

    @cached_property
    def row_count(self) -> int:
        """Counted in one pass over the batches' headers, once."""
        with self._opened(mapped=True) as (_, batches):
            return sum(len(batch) for batch in batches)

    def arrays(self, start: int, stop: int, max_tokens: int) -> Iterator[tuple[int, Any]]:
        # A single row is read through a map, which reads only the pages it touches; all rows in large reads.
        first = 0
        with self._opened(mapped=stop - start == 1) as (_, batches):
            for batch in batches:
                if first + len(batch) > start:
                    yield first, batch.column(self.column)
                first += len(batch)
                if first >= stop:
                    return

    @contextlib.contextmanager
    def _opened(self, mapped: bool = False) -> Iterator[tuple[Any, Iterator[Any]]]:
        """The schema, and the record batches in order."""
        ipc = extra("pyarrow.ipc", "reading Arrow files")
        with _refused_by_name(self.path, "Arrow"), _source(self.store, self.key, mapped) as source:
            if source.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
                source.seek(0)
                with ipc.open_file(source) as file:
                    yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
            else:
                source.seek(0)
                with ipc.open_stream(source) as stream:
                    yield stream.schema, iter(stream)


@contextlib.contextmanager
def _opened_parquet(store: Store, key: str) -> Iterator[Any]:
    parquet = extra("pyarrow.parquet", "reading Parquet files")
    with (
        _refused_by_name(store.path(key), "Parquet"),
        _source(store, key) as source,
        # Column chunks may be far larger than memory: they are read as they are decoded.
        parquet.ParquetFile(source, pre_buffer=False, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True) as file,
    ):
        yield file


def _source(store: Store, key: str, mapped: bool = False) -> Any:
    if not store.is_local:
        return store.fs.open(store.path(key), "rb")
    pyarrow = extra("pyarrow", "reading Parquet and Arrow files")
    return pyarrow.memory_map(store.path(key)) if mapped else pyarrow.OSFile(store.path(key))


@contextlib.contextmanager
def _refused_by_name(path: str, kind: str) -> Iterator[None]:
    """Turn pyarrow's errors about a file into ValueError with the file's name. The system's own errors pass."""
    pyarrow = extra("pyarrow", f"reading {kind} files")
    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: cannot be read as {kind} ({str(error)[:300]})") from error


def _check_column(schema: Any, column: str, path: str) -> None:
    """ValueError if there is no column of that name, or it does not hold lists of integers."""
    indices = schema.get_all_field_indices(column)
    if len(indices) != 1:
        names = ", ".join(reprlib.repr(name) for name in schema.names[:20])
        found = "several columns" if indices else "no column"
        raise ValueError(f"{path} has {found} {column!r}; it has {names}. Set column.")
    kind = schema.field(indices[0]).type
    types = extra("pyarrow.types", "reading Parquet and Arrow files")
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not types.is_integer(kind.value_type):
        raise ValueError(f"{path}: column {column!r} is of type {reprlib.repr(str(kind))}, but token ids are lists of integers")


def _is_arrow(store: Store, key: str) -> bool:
    head = store.read_range(key, 0, 8)
    # A stream begins with a mark and the length of its schema, which is padded to eight bytes.
    return head.startswith(ARROW_MAGIC) or (
        len(head) == 8 and head.startswith(STREAM_MAGIC) and head[4] % 8 == 0 and any(head[4:])
    )


PARQUET = Format(
    name="parquet",
    summary="Parquet files with a column of token lists, as datasets, TRL and others read",
    keeps="sequences, empty ones too",
    loses="nothing",
    options=Parquet,
    recognise=recognise_parquet,
    open=open_parquet,
    plan=plan_parquet,
    write=write_parquet,
    finish=nothing_to_finish,
)
ARROW = Format(
    name="arrow",
    summary="Arrow files in a directory that datasets.load_from_disk reads",
    keeps="sequences, empty ones too",
    loses="nothing",
    options=Arrow,
    recognise=recognise_arrow,
    open=open_arrow,
    plan=plan_arrow,
    write=write_arrow,
    finish=finish_arrow,
)
