"""Files as a table: what an output knows of the files of a source, in one object. A file that is known need not be read, or
fetched, to learn its digest and where it is cut.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.annotations import Int64s
from flat_tokens.columns import as_arrow, texts_as_arrow
from flat_tokens.stores.local import make_directory
from flat_tokens.stores.store import NO_OBJECT, Store, read_record
from flat_tokens.text.formats import FORMATS
from flat_tokens.text.partitions import partitions_of
from flat_tokens.text.rows import Range, text_buffers
from tasks.config import Source
from tasks.locations import absolute, local_path
from tasks.models import FORMAT_SEMANTICS, FoundFile, SourceFile, digest_of
from tasks.output.leases import entries
from tasks.output.paths import FILES
from tasks.output.pointer import pointer_lock

GRAIN_NS = 2_000_000_000
"""The coarsest clock of a file system, in nanoseconds. A file that was touched within it may be written to without a trace."""
MAGIC = b"flat-tokens files 1\n"
HALF_WRITTEN = re.compile(r"\..+\.table(\.ed25519)?\.\w+\.part")
TEXTS, NUMBERS = (
    ("name", "immutable", "content", "format", "line_ends"),
    ("size", "mtime", "ctime", "inode", "text_size", "packed"),
)
"""Columns of a table, besides digests and cuts. ``immutable``, ``content``: as the store reports them, empty if it does
not; ``size``: -1 if it does not. ``mtime``, ``ctime``, ``inode``: of a local file. ``text_size``: of the file when it is
unpacked, if it is ``packed``.
"""
CUT_NUMBERS = 5
"""Numbers of a range: where it starts and stops, its first and last row, or -1, and its bytes of text."""
SCHEMA = pa.schema(
    [
        *((name, pa.large_string()) for name in TEXTS),
        *((name, pa.int64()) for name in NUMBERS),
        ("sha256", pa.binary(32)),
        ("cuts", pa.large_list(pa.int64())),
    ]
)
PARTITIONED = SCHEMA.append(pa.field("partitions", pa.large_string()))
"""Of files with columns by their directories: the names of these, as a JSON array. Other tables do not have it."""
SLICE_BYTES = b"slice_bytes"


class CutFile(NamedTuple):
    """A file with a known content, and the ranges that it is cut into."""

    file: SourceFile
    cuts: tuple[Range, ...]


def table_key(source: Source) -> str:
    """Key of the table of a source's files: by the place of the source and how it is read."""
    if source.hub is not None:
        place: tuple[Any, ...] = ("hub", source.hub.path, source.hub.name, source.hub.split)
    elif source.table is not None:
        place = ("table", source.table if source.catalog else absolute(source.table), source.catalog)
    else:
        assert source.path is not None
        here = local_path(source.path)
        place = ("path", source.path if here is None else os.path.abspath(here))
    splits = (source.split, source.validation_split)
    return f"{FILES}/{digest_of('files', FORMAT_SEMANTICS, place, splits, source.format, source.reading())}.table"


class FileTable:
    """The files of a source that an output knows, by their names and contents."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._texts = {name: _texts_of(rows.column(name)) for name in rows.schema.names if name in (*TEXTS, "partitions")}
        self._numbers = {name: _numbers_of(rows.column(name)).tolist() for name in NUMBERS}
        self._digests = memoryview(rows.column("sha256").buffers()[1]).hex()
        cuts = rows.column("cuts")
        each = _numbers_of(cuts.values).reshape(-1, CUT_NUMBERS).tolist()
        self._cuts = [Range(start, stop, None if first < 0 else (first, last), size) for start, stop, first, last, size in each]
        self._ends = (_numbers_of(cuts.offsets) // CUT_NUMBERS).tolist()
        self._by_name = {name: row for row, name in enumerate(self._texts["name"])}
        self._by_content = {content: row for row, content in enumerate(self._texts["content"]) if content}

    def look_up(self, found: FoundFile) -> CutFile | None:
        """The file as it is known. None if it is not known, or may have changed."""
        row = self._by_name.get(found.name)
        given = partitions_of(found.name)
        if row is None or not self._is_same(row, found):
            row = self._by_content.get(found.content) if found.content else None
            if row is None or PurePosixPath(self._texts["name"][row]).suffixes != PurePosixPath(found.name).suffixes:
                return None  # suffixes tell the format
            if given.keys() != partitions_of(self._texts["name"][row]).keys():
                return None  # others of its columns may be those of directories
        names = json.loads(self._texts["partitions"][row]) if "partitions" in self._texts else ()
        in_place = bool(found.stamp) and not self._numbers["packed"][row]
        file = SourceFile(
            source=found.source,
            name=found.name,
            size=self._numbers["text_size"][row],
            sha256=self._digests[64 * row : 64 * row + 64],
            format=self._texts["format"][row],
            location=found.uri if in_place else "",
            split=found.split,
            stamp=found.stamp if in_place else (),
            found=found,
            line_ends=self._texts["line_ends"][row] or None,
            partitions=tuple((name, given.get(name)) for name in names),
        )
        return CutFile(file, tuple(self._cuts[self._ends[row] : self._ends[row + 1]]))

    def _is_same(self, row: int, found: FoundFile) -> bool:
        numbers = self._numbers
        if numbers["size"][row] != found.size:
            return False
        if found.content:
            return bool(self._texts["content"][row] == found.content)
        if found.immutable:
            return bool(self._texts["immutable"][row] == found.immutable)
        return found.stamp == (found.size, numbers["mtime"][row], numbers["ctime"][row], numbers["inode"][row])


def _texts_of(column: pa.LargeStringArray) -> list[Any]:
    data, offsets = text_buffers(column)
    whole, ends = data.tobytes(), offsets.tolist()
    if whole.isascii():  # then a character is a byte
        text = whole.decode()
        return [text[start:stop] for start, stop in pairwise(ends)]
    return [whole[start:stop].decode() for start, stop in pairwise(ends)]


def _numbers_of(column: pa.Int64Array) -> Int64s:
    return np.frombuffer(column.buffers()[1] or b"", np.int64)[column.offset : column.offset + len(column)]


def known_files(
    found: Sequence[FoundFile], sources: tuple[Source, ...], slice_bytes: int, roots: Sequence[Store]
) -> list[CutFile | None]:
    """The files that the outputs know, in the files' order. None for a file that has to be read."""
    tables = dict[int, list[FileTable]]()
    for index in {file.source for file in found}:
        read = filter(None, (_read(root, table_key(sources[index])) for root in roots))
        # The ranges of slices of another size are others.
        tables[index] = [FileTable(rows) for rows in read if rows.schema.metadata.get(SLICE_BYTES) == b"%d" % slice_bytes]
    return [next(filter(None, (table.look_up(file) for table in tables[file.source])), None) for file in found]


def remember_files(root: Store, sources: tuple[Source, ...], slice_bytes: int, cuts: Iterable[CutFile], begun_ns: int) -> None:
    """Write the tables of sources at an output, if they are not as they should be. *begun_ns*: a time before any of the files
    that are not known by an immutable name was read.
    """
    of_source: dict[int, list[CutFile]] = {}
    for cut in cuts:
        if cut.file.found is not None and may_be_known(cut.file.found, begun_ns):
            of_source.setdefault(cut.file.source, []).append(cut)
    made = {table_key(sources[index]): _as_bytes(mine, slice_bytes) for index, mine in of_source.items()}
    for key, data in list(made.items()):
        with suppress(*NO_OBJECT, ValueError):
            if read_record(root, key) == data:
                del made[key]
    _put(root, made)


def may_be_known(found: FoundFile, begun_ns: int) -> bool:
    """Whether a change of a file after *begun_ns* shows: in its store's name for the content, or in the times of a local file,
    which are older by more than the clock's grain.
    """
    if found.immutable or found.content:
        return True
    if len(found.stamp) != 4:
        return False
    _, mtime, ctime, inode = found.stamp
    return max(mtime, ctime) < begun_ns - GRAIN_NS and max(-mtime, -ctime, inode) < 1 << 62


def forget_file(root: Store, source: Source, name: str) -> None:
    """Remove a file from the table of its source: it is another one than the table says."""
    key = table_key(source)
    if (rows := _read(root, key)) is not None:
        kept = [number for number, one in enumerate(_texts_of(rows.column("name"))) if one != name]
        _put(root, {key: _stored(rows.take(_numbers(kept)))})


def _put(root: Store, tables: dict[str, bytes]) -> None:
    """Write tables by their keys, one process of this machine at a time. Leftovers of killed processes are removed."""
    if not tables:
        return
    if root.is_local:
        make_directory(Path(root.root))
    with pointer_lock(root):
        for name in filter(HALF_WRITTEN.fullmatch, entries(root.root, FILES)) if root.is_local else ():
            root.remove(f"{FILES}/{name}")
        unsynced = replace(root, durable=False)  # a table that a lost power leaves in halves is not the one that its digest names
        for key, data in tables.items():
            unsynced.put(key, data)


def _as_bytes(cuts: Sequence[CutFile], slice_bytes: int) -> bytes:
    """The files of a source as the bytes of a table, a row each."""
    texts, numbers, digests, flat, ends = [], [], [], list[int](), [0]
    for file, ranges in cuts:
        found = file.found
        assert found is not None
        mtime, ctime, inode = found.stamp[1:] or (0, 0, 0)
        texts.append((found.name, found.immutable or "", found.content or "", file.format, file.line_ends or ""))
        size = -1 if found.size is None else found.size
        numbers.append((size, mtime, ctime, inode, file.size, file.location != found.uri))
        digests.append(file.sha256)
        for start, stop, rows, text_bytes in ranges:
            flat += (start, stop, *(rows or (-1, -1)), text_bytes)
        ends.append(len(flat))
    arrays = [
        *(texts_as_arrow(values) for values in zip(*texts, strict=True)),
        *(_numbers(values) for values in zip(*numbers, strict=True)),
        pa.Array.from_buffers(pa.binary(32), len(cuts), [None, pa.py_buffer(bytes.fromhex("".join(digests)))]),
        pa.LargeListArray.from_arrays(_numbers(ends), _numbers(flat)),
    ]
    schema = SCHEMA
    if any(file.partitions for file, _ in cuts):
        schema = PARTITIONED
        arrays.append(texts_as_arrow([json.dumps([name for name, _ in file.partitions]) for file, _ in cuts]))
    return _stored(pa.RecordBatch.from_arrays(arrays, schema=schema.with_metadata({SLICE_BYTES: b"%d" % slice_bytes})))


def _numbers(values: Sequence[int]) -> pa.Int64Array:
    return as_arrow(np.array(values, np.int64))


def _stored(rows: pa.RecordBatch) -> bytes:
    """A table as its object has it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(rows)
    body = sink.getvalue().to_pybytes()
    return b"".join((MAGIC, blake3(body).digest(), body))


def _read(root: Store, key: str) -> pa.RecordBatch | None:
    """The rows of a table; None if it is not there, or damaged."""
    try:
        data = read_record(root, key)
        body = data[len(MAGIC) + 32 :]
        if not data.startswith(MAGIC) or blake3(body).digest() != data[len(MAGIC) : len(MAGIC) + 32]:
            return None
        try:
            table = pa.ipc.open_stream(body).read_all()
        except OSError:  # Arrow's word for a stream that is damaged
            return None
        table.validate(full=True)
        (rows,) = table.combine_chunks().to_batches()
        if rows.schema not in (SCHEMA, PARTITIONED):
            return None
        # Everything has a value, cuts have all their numbers, and formats are known.
        cuts = rows.column("cuts")
        is_known = set(_texts_of(rows.column("format"))) <= FORMATS.keys()
        is_known &= set(_texts_of(rows.column("line_ends"))) <= {"", "crlf"}
        has_nulls = any(column.null_count for column in (*rows.columns, cuts.values))
        return rows if is_known and not has_nulls and not (np.diff(_numbers_of(cuts.offsets)) % CUT_NUMBERS).any() else None
    except (*NO_OBJECT, ValueError, pa.ArrowException):
        return None
