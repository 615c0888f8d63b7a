"""Kept columns: columns of the sources that a dataset has next to its tokens, in Parquet objects, in the documents' order.

Their types are few: *kinds*. A kind is null if a column has nothing but nulls. Objects of older datasets may differ in the
kinds of a column (null, int64, float64); the manifest says which one fits them all.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from flat_tokens.annotations import AnyArray, Int64s, JsonFacts
from flat_tokens.extras import pa
from flat_tokens.pages import (
    PLACE_BYTES,
    Page,
    batch_lengths,
    common_lengths,
    first_page,
    open_in_pieces,
    pages_of,
    sound_metadata,
)
from flat_tokens.stores.store import NO_OBJECT, ObjectWriter, Store

GROUP_ROWS = 1 << 14
"""Rows of a row group, all but the last: bytes do not depend on how rows came."""
BATCH_BYTES, LARGEST_BATCH, LARGEST_PAGE = 4 << 20, 1 << 27, 1 << 29
"""Bytes of values that are read at a time, about and at most, and those that a page may have."""
MAX_EXPANSION, ANY_EXPANSION = 500, 192 << 20
"""Bytes that an object may unpack to: this multiple of its own, or this number in all. Texts in dictionaries count once."""
LARGEST_TAKEN = 1 << 30
"""Bytes that the columns of documents which are read together may have."""
KINDS = ("null", "bool", "int64", "uint64", "float64", "text")
BEYOND = "int64 beyond 2**53"
"""The kind of int64 values that float64 does not have all of. It is a shard's alone: a dataset has ``in_manifest(kind)``."""
RESERVED = ("tokens", "source", "file", "row", "key", "text")
"""Names of what every document has already."""
NAME = re.compile(r"documents/(train|validation|test)/columns/(0|[1-9][0-9]{0,18})\.parquet")
"""The key of an object of a split's columns, and the document of its first row."""

REMEDY = "Write its values as text in the source, or leave the column out of source.keep_columns."

Kinds = Mapping[str, str]
"""The kind of each column by its name, in the columns' order."""


def name_of(split: str, first: int) -> str:
    """The key of the object that begins with that document."""
    return f"documents/{split}/columns/{first}.parquet"


def as_arrow(values: AnyArray) -> pa.Array:
    """Numbers or truth values, [n], as Arrow has them. ``pa.array`` would import pandas first, which takes half a second."""
    data = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(data)])


def texts_as_arrow(values: Sequence[str | bytes | None], kind: Any = None) -> pa.Array:
    """Texts, which may be UTF-8 already, and nulls as large_string, or as *kind*. No import of pandas."""
    parts = [value.encode() if isinstance(value, str) else value or b"" for value in values]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    there = np.array([value is not None for value in values], bool)
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(kind or pa.large_string(), len(values), buffers)


FLOAT64_HAS_ALL = float(1 << 53)
"""Below it, float64 has all integers."""


def in_manifest(kind: str) -> str:
    """The kind as a manifest says it: one of KINDS."""
    return "int64" if kind == BEYOND else kind


def type_of(kind: str) -> pa.DataType:
    types = {"null": pa.null, "bool": pa.bool_, "int64": pa.int64, "uint64": pa.uint64, "float64": pa.float64}
    return types.get(in_manifest(kind), pa.large_string)()


def in_json(value: Any) -> Any:
    """A value of a column as JSON has it: numbers that are not finite are texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def kind_of(values: pa.Array) -> str:
    """The kind of values that a reader gives."""
    kind = next(kind for kind in KINDS if values.type == type_of(kind))
    return BEYOND if kind == "int64" and _not_in_float64(values) is not None else kind


def _not_in_float64(values: pa.Int64Array) -> int | None:
    """The first of the integers that float64 does not have; None if it has them all."""
    data = values.buffers()[1]
    integers = np.frombuffer(data, np.int64)[values.offset : values.offset + len(values)] if data else np.empty(0, np.int64)
    found = np.abs(integers.astype(np.float64)) >= FLOAT64_HAS_ALL
    if not found.any():
        return None
    beyond = np.flatnonzero(found & ~np.asarray(values.is_null()))
    return next((value for value in integers[beyond].tolist() if float(value) != value), None)


def common(one: str, other: str) -> str | None:
    """The kind that holds values of two; None if there is none."""
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    return {frozenset(("int64", "float64")): "float64", frozenset(("int64", BEYOND)): BEYOND}.get(frozenset((one, other)))


def as_kind(values: pa.Array, kind: str, name: str) -> pa.Array:
    """Values as another kind. ValueError if it has no such value: float64 has not all integers above 2**53."""
    if kind == "null" and values.null_count == len(values):
        return pa.nulls(len(values))
    if kind == "float64" and values.type == pa.int64():
        if (beyond := _not_in_float64(values)) is not None:
            raise ValueError(f"column {name!r} cannot be float64: Integer value {beyond} is none of it. {REMEDY}")
        return values.cast(pa.float64(), safe=False)
    try:
        return values.cast(type_of(kind))
    except pa.ArrowException as error:
        raise ValueError(f"column {name!r} cannot be {kind}: {error}") from error


def batch_of(columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def with_kinds(batch: pa.RecordBatch, kinds: Kinds) -> pa.RecordBatch:
    """The columns *kinds* of a batch, as these; one that it has not is null."""
    there = set(batch.schema.names)
    found = {
        name: as_kind(batch.column(name) if name in there else pa.nulls(len(batch)), kind, name) for name, kind in kinds.items()
    }
    return batch_of(found)


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches with the same columns. Each column gets the common kind. ValueError if a column has none."""
    if len(batches) == 1:
        return batches[0]
    kinds = {name: kind_of(batches[0].column(name)) for name in batches[0].schema.names}
    for batch in batches[1:]:
        kinds = merged(kinds, {name: kind_of(batch.column(name)) for name in kinds})
    return pa.concat_batches([with_kinds(batch, kinds) for batch in batches])


def merged(kinds: Kinds, others: Kinds) -> dict[str, str]:
    """The kinds of the columns *kinds* that fit *others*, too. ValueError, naming the column, if none does."""
    found: dict[str, str] = {}
    for name, kind in kinds.items():
        other = others.get(name, "null")
        fits = common(kind, other)
        if fits is None:
            raise ValueError(f"column {name!r} is {kind} in one place and {other} in another")
        found[name] = fits
    return found


class ColumnsWriter:
    """Writes rows of columns into one Parquet object, a row group at a time."""

    def __init__(self, sink: ObjectWriter, kinds: Kinds) -> None:
        self.kinds, self._held, self.row_count = dict(kinds), list[Any](), 0
        self._held_rows = 0
        schema = pa.schema([(name, type_of(kind)) for name, kind in kinds.items()])
        settings = {"compression": "zstd", "compression_level": 3, "write_page_checksum": True, "store_schema": False}
        self._writer = pa.parquet.ParquetWriter(pa.PythonFile(ObjectFile(sink), "w"), schema, **settings)

    def append(self, batch: pa.RecordBatch) -> None:
        """Append rows. A column that they have not is null."""
        self._held.append(with_kinds(batch, self.kinds))
        self._held_rows += len(batch)
        self.row_count += len(batch)
        if self._held_rows >= GROUP_ROWS:
            self._write(GROUP_ROWS)

    def _write(self, least: int) -> None:
        """Write what is held in row groups, as long as there are *least* rows."""
        held = pa.Table.from_batches(self._held) if self._held else None
        start = 0
        while held is not None and len(held) - start >= max(least, 1):
            # One chunk a column: where pages end follows from the values alone.
            self._writer.write_table(held.slice(start, GROUP_ROWS).combine_chunks(), row_group_size=GROUP_ROWS)
            start += GROUP_ROWS
        rest = [] if held is None or start >= len(held) else held.slice(start).to_batches()
        self._held, self._held_rows = rest, sum(map(len, rest))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write(1)
        self._writer.close()


class ObjectFile(io.RawIOBase):
    """An object as a file that pyarrow can write to. The ``with`` block that began the object ends it, not ``close``."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._writer.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._writer.size


class _StoredFile(io.RawIOBase):
    """An object of a store as a file that can be read. ``size``: its bytes."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key, self.size, self._at = store, key, store.size(key), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size < 0 else min(self._at + size, self.size)
        data = self._store.read_range(self._key, self._at, stop) if self._at < stop else b""
        self._at += len(data)
        return data


class Part(NamedTuple):
    """An object of columns, and the documents ``first:stop`` of its rows."""

    key: str
    first: int
    stop: int


def parts_of(keys: Iterable[str], split: str, seq_count: int) -> tuple[Part, ...]:
    """The objects among *keys* that have the columns of a split, in order."""
    named = ((key, NAME.fullmatch(key)) for key in keys)
    firsts = sorted(int(found[2]) for _, found in named if found and found[1] == split)
    return tuple(Part(name_of(split, first), first, stop) for first, stop in pairwise([*firsts, seq_count]))


class _OpenObject:
    """An object of columns, open for reading, and how much of it has been unpacked."""

    def __init__(self, path: str, parquet: Any, metadata: Any, stored: _StoredFile) -> None:
        self.path, self.parquet, self.metadata, self._stored = path, parquet, metadata, stored
        self._left = max(MAX_EXPANSION * stored.size, ANY_EXPANSION)

    def batches(self, group: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Batches of a row group's rows, each small enough for memory. ValueError if they unpack to too much."""
        found = self.metadata.row_group(group)
        leaves = {self.metadata.schema.column(i).path: found.column(i) for i in range(self.metadata.num_columns)}
        if nested := [name for name in names if name not in leaves]:
            raise ValueError(f"{self.path}: column {nested[0]!r} has columns within it: run flat_tokens.verify")
        lengths = (
            batch_lengths(self._pages(leaves[name], found.num_rows), BATCH_BYTES, LARGEST_BATCH, GROUP_ROWS) for name in names
        )
        batches = None
        for length in common_lengths(list(lengths)) if names else ():
            if batches is None:
                batches = self.parquet.iter_batches(length, [group], list(names), use_threads=False)
            self.parquet.reader.set_batch_size(length)
            if (batch := next(batches, None)) is None:
                raise ValueError(f"{self.path}: row group {group} ends early: run flat_tokens.verify")
            batch.validate(full=True)  # places in a dictionary may be outside of it
            yield batch

    def _pages(self, chunk: Any, rows: int) -> Iterator[Page]:
        """The pages of a column chunk. Places in a dictionary are read as such, so their texts are there once."""
        is_text = chunk.physical_type == "BYTE_ARRAY"
        try:
            for page in pages_of(self._stored, first_page(chunk), rows, LARGEST_PAGE, dictionaries=True):
                if not is_text:
                    yield Page(page.rows, 8 * page.rows, 8, for_each_row=True)
                    continue
                if page.most_bytes != PLACE_BYTES:
                    self._unpacked(page.most_bytes * (page.rows if page.for_each_row else 1))
                yield page
        except ValueError as error:
            raise ValueError(f"{self.path}: cannot be read ({error}): run flat_tokens.verify") from error

    def _unpacked(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError(f"{self._stored.size:,} bytes of it stand for {ANY_EXPANSION:,} bytes or more")


def _plain_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the values of rows, each text as often as it occurs."""
    total = 0
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            lengths = pa.compute.binary_length(column.dictionary).take(column.indices)
            total += int(pa.compute.sum(lengths.cast(pa.int64())).as_py() or 0) + 8 * len(column)
        else:
            total += column.nbytes
    return total


@dataclass(frozen=True)
class Columns:
    """Columns of documents, which are in the parts of a store in order."""

    store: Store
    kinds: Kinds
    parts: tuple[Part, ...]

    @classmethod
    def in_one(cls, store: Store, kinds: Kinds, key: str, count: int) -> Columns:
        """The columns of *count* documents, which are all in the object *key*, if there are any."""
        return cls(store, kinds, (Part(key, 0, count),) if kinds and count else ())

    def take(self, numbers: Int64s, names: Sequence[str]) -> pa.RecordBatch:
        """Columns *names* of documents *numbers*: int64[n], in any order. ValueError if an object is not what it should be."""
        kinds = {name: self.kinds[name] for name in names}
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        found = [with_kinds(pa.RecordBatch.from_arrays([], names=[]), kinds)]
        firsts = np.array([part.first for part in self.parts], np.int64)
        if len(numbers) and (not self.parts or ascending[0] < firsts[0] or ascending[-1] >= self.parts[-1].stop):
            raise ValueError(f"{self.store.url}: has no columns of document {ascending[0]}: run flat_tokens.verify")
        edges = np.searchsorted(ascending, np.append(firsts, np.iinfo(np.int64).max)).tolist()
        left = LARGEST_TAKEN
        for part, (low, high) in zip(self.parts, pairwise(edges), strict=True):
            if low < high:
                for batch in self._of_part(part, ascending[low:high] - part.first, names):
                    left -= _plain_bytes(batch)
                    if left < 0:
                        raise ValueError(
                            f"{self.store.path(part.key)}: columns of {len(numbers):,} documents have {LARGEST_TAKEN:,} "
                            "bytes or more, which are not read at once. Read fewer documents, or leave the columns out."
                        )
                    found.append(with_kinds(batch, kinds))
        rows = pa.Table.from_batches(found).combine_chunks()
        if (order[1:] < order[:-1]).any():
            back = np.empty(len(order), np.int64)
            back[order] = np.arange(len(order))
            rows = rows.take(pa.array(back)).combine_chunks()
        batches: list[pa.RecordBatch] = rows.to_batches()
        return batches[0] if batches else found[0]

    def _of_part(self, part: Part, rows: Int64s, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some rows of a part, ascending, a few at a time. Texts may be dictionaries."""
        with self._opened(part) as opened:
            if missing := [name for name in names if name not in opened.parquet.schema_arrow.names]:
                raise ValueError(f"{self.store.path(part.key)}: has no column {missing[0]!r}: run flat_tokens.verify")
            counts = [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]
            ends = np.cumsum(counts)
            for group in np.unique(np.searchsorted(ends, rows, "right")).tolist():
                at = int(ends[group]) - counts[group]
                for batch in opened.batches(group, names):
                    low, high = np.searchsorted(rows, (at, at + len(batch)))
                    wanted, at = rows[low:high] - at, at + len(batch)
                    if not len(wanted):
                        continue
                    some = batch.select(list(names))
                    yield some if len(wanted) == len(batch) and (np.diff(wanted) == 1).all() else some.take(pa.array(wanted))

    @contextlib.contextmanager
    def _opened(self, part: Part) -> Iterator[_OpenObject]:
        """Open a part and check that it has a row for each document. ValueError if it has not, or if it cannot be read in the
        block.
        """
        path = self.store.path(part.key)
        try:
            stored = _StoredFile(self.store, part.key)
            _, metadata = sound_metadata(stored, lambda schema: schema.names)
            leaves = {metadata.schema.column(i).path for i in range(metadata.num_columns)}
            texts = [name for name, kind in self.kinds.items() if kind == "text" and name in leaves]
            # A text that many rows have stays one text.
            with open_in_pieces(pa.PythonFile(stored, "r"), metadata=metadata, read_dictionary=texts) as parquet:
                groups = map(metadata.row_group, range(metadata.num_row_groups))
                if (count := sum(group.num_rows for group in groups)) != part.stop - part.first:
                    raise ValueError(f"{path} has {count} rows instead of {part.stop - part.first}")
                yield _OpenObject(path, parquet, metadata, _StoredFile(self.store, part.key))
        except (pa.ArrowException, UnicodeDecodeError, OSError, KeyError) as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, NO_OBJECT):
                raise  # the disk, not the object
            raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())}): run flat_tokens.verify") from error

    def faults(self) -> Iterator[str]:
        """The faults of the parts: rows that are missing or too many, columns of another kind, values that are damaged."""
        for part in self.parts:
            try:
                with self._opened(part) as opened:
                    names = opened.parquet.schema_arrow.names
                    if names != list(self.kinds):
                        yield f"{part.key} has the columns {names} instead of {list(self.kinds)}"
                    for group in range(opened.metadata.num_row_groups):
                        for batch in opened.batches(group, names):
                            for name, kind in self.kinds.items() if names == list(self.kinds) else ():
                                column = batch.column(name)
                                as_kind(column.dictionary if pa.types.is_dictionary(column.type) else column, kind, name)
            except ValueError as error:
                yield str(error)


def columns_left_out(store: Store, manifest: JsonFacts, count: int) -> Columns:
    """The columns that a dataset keeps of *count* documents that it left out, at *store*."""
    kinds = manifest.get("columns") or {}
    return Columns.in_one(store, kinds, name_of("left_out", 0), count)


def columns_of(store: Store, manifest: JsonFacts, split: str) -> Columns:
    """The kept columns of a split's documents; without columns if the manifest names none."""
    kinds = manifest.get("columns") or {}
    if wrong := [name for name, kind in kinds.items() if kind not in KINDS]:
        raise ValueError(f"{store.url}: column {wrong[0]!r} is of a kind that is not known here: {kinds[wrong[0]]!r}")
    keys = (stored["key"] for stored in manifest.get("objects") or ())
    seq_count = manifest["totals"][split]["seq_count"] if kinds else 0
    return Columns(store, kinds, parts_of(keys, split, seq_count) if kinds else ())
