"""Runs of whole small files of one source and format, read together: in batches of about 4 MB of text, whatever each file has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, UInt8s
from flat_tokens.extras import pa
from flat_tokens.stores.local import named_errors
from flat_tokens.stores.reading import descriptor
from flat_tokens.text import limits
from flat_tokens.text.jsonl import parse_block, parse_together
from flat_tokens.text.plain import BOM, plain_texts, split
from flat_tokens.text.rows import Rows, neighbours
from tasks.config import DocumentPolicy, Source
from tasks.models import FileRange, stamp_of
from tasks.text.files import changed_meanwhile, raise_unread, rows_of, text_file

ENTRY_BYTES = 256
"""A file counts this many bytes in addition to its own, so that a batch has some thousand files at most."""


class RunRows(NamedTuple):
    """Some rows of a run, and the number of rows of each file that ends with them."""

    rows: Rows
    file_rows: Sequence[int]


Check = Callable[[Rows, FileRange], object]
"""Called with the rows of a file before they are joined with those of others."""


class RunOfFiles(NamedTuple):
    """A run of files, and how they are read."""

    ranges: Sequence[FileRange]
    source: Source
    policy: DocumentPolicy
    check: Check
    batch_bytes: int | None = None
    rows_before: int = 0

    def read(self) -> Iterator[RunRows]:
        """The rows of all files, which count from the start of the run, *rows_before* before these. ValueError, naming the file,
        if one is damaged or changes meanwhile.
        """
        most = self.batch_bytes or limits.BATCH_BYTES
        kind = self.ranges[0].file.format
        if len(self.ranges) == 1:
            return _placed([self._alone(self.ranges[0])], self.rows_before)
        if kind not in ("text", "jsonl"):
            return _in_batches(_placed(map(self._alone, self.ranges), self.rows_before), most)
        # A document that is longer than allowed is not read: no file with one is read with others.
        sizes = [part.file.size + ENTRY_BYTES for part in self.ranges]
        alike = (list(files) for _, files in groupby(zip(self.ranges, sizes, strict=True), lambda pair: pair[0].file.partitions))
        bound = min(most, self.policy.max_bytes)
        borders = ((files, *ends) for files in alike for ends in neighbours([size for _, size in files], bound))
        groups = ([part for part, _ in files[start:stop]] for files, start, stop in borders)
        together = self._texts if kind == "text" else self._lines
        parts = (together(group) if len(group) > 1 else self._alone(group[0]) for group in groups)
        return _placed(parts, self.rows_before)

    def _alone(self, part: FileRange) -> Iterator[RunRows]:
        """The rows of one file."""
        held = None
        content = None
        if part.file.format not in ("text", "jsonl") and part.file.size <= limits.BATCH_BYTES:
            data = np.empty(part.file.size + 1, np.uint8)
            content = data[: _read_into(data.data, part)].tobytes()
        for rows in rows_of(part, self.source, self.policy, self.batch_bytes, content):
            self.check(rows, part)
            if held is not None:
                yield RunRows(held, ())
            held = rows
        none = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 0, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])
        last = held or Rows(none, None, np.empty(0, np.int64), 0, 0)
        yield RunRows(last, (last.end,))

    def _texts(self, group: Sequence[FileRange]) -> Iterator[RunRows]:
        """The documents of some files of plain text."""
        data, ends = load(group)
        separator = (self.source.document_separator or "").encode()
        if separator and any(part.file.line_ends for part in group):
            blocks = (data[start:stop].tobytes() for start, stop in pairwise([0, *ends.tolist()]))
            each = [split(block, separator, part.file.line_ends is not None) for block, part in zip(blocks, group, strict=True)]
            texts, counts = pa.concat_arrays(each), np.array(list(map(len, each)))
        else:
            texts, counts = plain_texts(data, ends, separator)
        columns = text_file(group[0].file, self.source, self.policy).kept({}, len(texts))
        rows = Rows(texts, None, np.arange(len(texts)), len(texts), len(data), columns=columns)
        self.check(rows, group[0])
        yield RunRows(rows, counts.tolist())

    def _lines(self, group: Sequence[FileRange]) -> Iterator[RunRows]:
        """The rows of some files of JSON lines: parsed as one block, unless a line, or a kept column, needs a closer look."""
        data, ends = load(group, b"\n")
        counts = np.diff(np.searchsorted(np.flatnonzero(data == NEWLINE), ends), prepend=0).tolist()
        try:
            rows = parse_together(data.tobytes(), text_file(group[0].file, self.source, self.policy)) if len(data) else None
            if rows is not None:
                self.check(rows, group[0])
                yield RunRows(rows, counts)
                return
        except ValueError:
            pass  # a file of the group has it, which is found below
        blocks = (data[start:stop].tobytes() for start, stop in pairwise([0, *ends.tolist()]))
        parsed = (
            self._block(block, part, count) if block else self._alone(part)
            for block, part, count in zip(blocks, group, counts, strict=True)
        )
        yield from _in_batches(_placed(parsed), self.batch_bytes or limits.BATCH_BYTES)

    def _block(self, block: bytes, part: FileRange, count: int) -> Iterator[RunRows]:
        rows = parse_block(block, text_file(part.file, self.source, self.policy))
        self.check(rows, part)
        yield RunRows(rows, (count,))


def _placed(parts: Iterable[Iterator[RunRows]], rows_before: int = 0) -> Iterator[RunRows]:
    """Rows of parts, each of which counts from its own start, as rows that count from *rows_before* on."""
    seen_before = 0
    for part in parts:
        end = seen = 0
        for rows, counts in part:
            end, seen = rows.end, rows.seen
            yield RunRows(rows.behind(rows_before, seen_before), counts)
        rows_before, seen_before = rows_before + end, seen_before + seen


def _in_batches(parts: Iterable[RunRows], most: int) -> Iterator[RunRows]:
    """Join neighbouring rows into batches of about *most* bytes of text. Rows of different types stay separate."""
    held, counts, size = list[Rows](), list[int](), 0
    for rows, ended in parts:
        if held and (size >= most or not can_join(held[-1], rows)):
            yield RunRows(joined(held), counts)
            held, counts, size = [], [], 0
        held.append(rows)
        counts += ended
        size += rows.texts.nbytes
    if held:
        yield RunRows(joined(held), counts)


def load(group: Sequence[FileRange], ending: bytes = b"") -> tuple[UInt8s, Int64s]:
    """The bytes of some whole files, without byte order marks, and where each file ends in them: int64[m]. A file that has bytes
    and does not end with *ending* gets it. ValueError, naming the file, if one cannot be read or is not what it was.
    """
    data = np.empty(sum(part.file.size for part in group) + (len(ending) + 1) * len(group), np.uint8)
    view, at, ends = data.data, 0, list[int]()
    for part in group:
        end = at + _read_into(view[at : at + part.file.size + 1], part)
        if end - at >= len(BOM) and view[at : at + len(BOM)] == BOM:
            end -= len(BOM)
            data[at:end] = data[at + len(BOM) : end + len(BOM)].copy()
        if ending and end > at and view[end - len(ending) : end] != ending:
            view[end : end + len(ending)] = ending
            end += len(ending)
        ends.append(end)
        at = end
    return data[:at], np.array(ends, np.int64)


def _read_into(view: memoryview, part: FileRange) -> int:
    """Read a whole file to the start of a buffer that is larger by a byte; the bytes of the file."""
    file, size = part.file, 0
    try:
        with named_errors(file.location):
            opened = descriptor(file.location, os.O_NOFOLLOW)  # a location has no link
            try:
                while count := os.readv(opened, [view[size:]]):
                    size += count
                    if size == file.size:
                        break  # without another read that finds the end; the status knows of more bytes
                status = os.fstat(opened)
            finally:
                os.close(opened)
    except OSError as error:
        raise_unread(part, error)
    if size != file.size or (stamp_of(status) != file.stamp if file.stamp else status.st_size != size):
        raise ValueError(changed_meanwhile(file.name))
    return size


NEWLINE = ord("\n")


def can_join(one: Rows, other: Rows) -> bool:
    """Whether two batches have the same types, so that ``joined`` makes one of them."""
    pairs = zip((one.texts, one.ids), (other.texts, other.ids), strict=True)
    if any(a.type != b.type or pa.types.is_dictionary(a.type) for a, b in pairs if a is not None):
        return False
    return one.columns is None or (other.columns is not None and one.columns.schema == other.columns.schema)


def joined(batches: Sequence[Rows]) -> Rows:
    """Batches of the same types as one, whose rows count from the first one's start."""
    if len(batches) == 1:
        return batches[0]
    ids = [rows.ids for rows in batches if rows.ids is not None]
    columns = [rows.columns for rows in batches if rows.columns is not None]
    return Rows(
        pa.concat_arrays([rows.texts for rows in batches]),
        pa.concat_arrays(ids) if ids else None,
        np.concatenate([rows.rows for rows in batches]),
        batches[-1].end,
        batches[-1].seen,
        tuple(fault for rows in batches for fault in rows.faults),
        pa.concat_batches(columns) if columns else None,
    )
