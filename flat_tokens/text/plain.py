"""Files of bytes with a separator after each document, cut and read at separators: plain text, and the lines of JSON lines.
Without a separator a file of plain text is one document. A line feed of a separator may be CR LF in the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, UInt8s
from flat_tokens.extras import pa
from flat_tokens.text import limits
from flat_tokens.text.rows import Range, Rows, SourceFormat, TextFile, passed_over

BOM = b"\xef\xbb\xbf"


class Separator:
    """A separator as it is searched for: from left to right, in "---" the first "--" is one. Where its line feeds may be CR LF in
    the file, a carriage return before the first byte is not searched for: `split` takes it off.
    """

    def __init__(self, data: bytes, crlf: bool = False) -> None:
        self.data = data
        within = data[1:].split(b"\n") if crlf and b"\r" not in data else [data[1:]]
        self.longest = len(data) + len(within) - 1
        pattern = re.escape(data[:1]) + rb"\r?\n".join(map(re.escape, within))
        self._pattern = re.compile(pattern) if len(within) > 1 else None

    def find(self, data: bytes | bytearray, start: int = 0) -> IntPair | None:
        """The begin and end of the first separator at *start* or later."""
        if self._pattern is None:
            at = data.find(self.data, start)
            return None if at < 0 else (at, at + len(self.data))
        found = self._pattern.search(data, start)
        return found and found.span()

    def last_end(self, data: bytearray, start: int) -> int:
        """The end of the last separator in *data*, if one begins at *start* or later, else 0."""
        if self._pattern is None:
            at, length = data.rfind(self.data, start), len(self.data)
            while at > 0 and (overlapped := data.rfind(self.data, max(at - length + 1, 0), at + length - 1)) >= 0:
                at = overlapped
            while at >= 0 and (further := data.find(self.data, at + length)) >= 0:
                at = further
            return 0 if at < 0 else at + length
        end = 0
        for found in self._pattern.finditer(data, start):
            end = found.end()
        return end


def blocks(file: TextFile, part: Range, separator: Separator | None, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole documents of a range, each with its separator at the end but perhaps the last; or, with False, the
    first bytes of a document that is longer than *limit*, which is passed over.
    """
    overlap = separator.longest - 1 if separator else 0  # a separator may have begun within this many bytes
    with file.open() as opened:
        opened.seek(part.start)
        left, pending, searched = part.stop - part.start, bytearray(), 0
        if part.start == 0:
            head = opened.read(min(len(BOM), left))
            left -= len(head)
            pending += head.removeprefix(BOM)
        while left:
            block = opened.read(min(limits.BATCH_BYTES, left))
            if not block:
                raise OSError(f"it ends {left} bytes before its length")
            left -= len(block)
            pending += block
            if separator and (end := separator.last_end(pending, searched)):
                yield bytes(memoryview(pending)[:end]), True
                del pending[:end]
            elif len(pending) > limit + overlap:
                yield bytes(memoryview(pending)[:80]), False
                left, pending = _pass_over(opened, left, separator, pending), bytearray()
            searched = max(len(pending) - overlap, 0)
        if pending:
            yield bytes(pending), True


def _pass_over(opened: BinaryIO, left: int, separator: Separator | None, pending: bytearray) -> int:
    """Move to the end of a document that is too long; the bytes left in the range after it."""
    overlap = separator.longest - 1 if separator else 0
    tail = bytes(pending[len(pending) - overlap :])
    while left:
        block = opened.read(min(limits.BATCH_BYTES, left))
        if not block:
            raise OSError(f"it ends {left} bytes before its length")
        left -= len(block)
        window = tail + block
        if separator and (found := separator.find(window)):
            after = len(window) - found[1]
            opened.seek(-after, os.SEEK_CUR)
            return left + after
        tail = window[len(window) - overlap :]
    return 0


def byte_ranges(file: TextFile, separator: Separator | None, range_bytes: int) -> Iterator[Range]:
    """Ranges of about *range_bytes* bytes that end after separators; one range if there is no separator."""
    if separator is None:
        yield Range(0, file.size, None, file.size)
        return
    with file.open() as opened:
        start = 0
        while start < file.size:
            stop = file.size
            if start + range_bytes < file.size:
                wanted = max(start, start + range_bytes - len(separator.data))
                stop = _after_separator(opened, start, wanted, separator, file.size)
            yield Range(start, stop, None, stop - start)
            start = stop


def _after_separator(opened: BinaryIO, start: int, position: int, separator: Separator, size: int) -> int:
    """The first position after a separator that begins at *position* or later, or the file's size. Documents are read from
    *start* on: of separators that overlap ("--" in "---") only the first of them is one in any case.
    """
    begin = max(start, position - separator.longest + 1)
    last_end, tail = begin, b""
    opened.seek(begin)
    while block := opened.read(limits.LOOK_BYTES):
        window = tail + block
        found = separator.find(window)
        while found:
            here, end = begin + found[0], begin + found[1]
            if here >= position and here >= last_end:
                return end
            last_end = end
            found = separator.find(window, found[0] + 1)
        tail = window[len(window) - separator.longest + 1 :]
        begin += len(window) - len(tail)
    return size


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    start = seen = 0
    separator = _separator(file)
    for block, whole in blocks(file, part, separator, file.max_bytes):
        seen += len(block)
        if whole:
            texts = split(block, file.separator, file.crlf)
            rows = Rows(texts, None, np.arange(start, start + len(texts)), start + len(texts), seen)
            rows = rows._replace(columns=file.kept({}, len(texts)))
        else:
            rows = passed_over(file, start, seen)
        yield rows
        start = rows.end


def _separator(file: TextFile) -> Separator | None:
    return Separator(file.separator, file.crlf) if file.separator else None


def has_separator(file: TextFile) -> bool:
    """Whether a file has its separator anywhere."""
    separator = _separator(file)
    with file.open() as opened:
        return separator is not None and _after_separator(opened, 0, 0, separator, -1) >= 0


def split(block: bytes, separator: bytes, crlf: bool = False) -> pa.LargeBinaryArray:
    """The documents of a block, each ended by a separator but perhaps the last. *crlf*: its line feeds may be CR LF."""
    data = np.frombuffer(block, np.uint8)
    if crlf and b"\n" in separator and b"\r" not in separator and b"\r\n" in block:
        return _split_crlf(data, separator)
    return plain_texts(data, np.array([len(block)]), separator)[0]


def plain_texts(data: UInt8s, ends: Int64s, separator: bytes) -> tuple[pa.LargeBinaryArray, Int64s]:
    """The documents of m files of plain text, which end at *ends* in *data*: int64[m]; and how many each has: int64[m]. No copy
    if there is no separator.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    found = _places_of(data, separator, ends) if separator else np.empty(0, np.int64)
    # A file's text after its last separator is a document, too.
    behind = np.searchsorted(found, ends)
    last = np.where(behind > 0, found[behind - 1] + len(separator), 0) if len(found) else np.zeros(len(ends), np.int64)
    has_tail = ends > np.maximum(last, starts)
    stops = np.concatenate([found, ends[has_tail]])
    order = np.argsort(stops, kind="stable")
    counts = np.diff(np.searchsorted(found, ends), prepend=0) + has_tail
    kept = data
    if len(found):
        keep = np.ones(len(data), bool)
        for k in range(len(separator)):
            keep[found + k] = False
        kept = data[keep]
    # (data, byte) -> (kept, byte)
    offsets = stops[order] - len(separator) * np.searchsorted(found, stops[order])
    return _texts(kept, offsets), counts


def _places_of(data: UInt8s, separator: bytes, ends: Int64s) -> Int64s:
    """The places where separators begin in files that end at *ends*, from left to right; none crosses an end: int64[n]."""
    found = np.flatnonzero(data[: max(len(data) - len(separator) + 1, 0)] == separator[0])
    for k in range(1, len(separator)):
        found = found[data[found + k] == separator[k]]
    found = found[found + len(separator) <= ends[np.searchsorted(ends, found, "right")]]
    if len(found) > 1 and (np.diff(found) < len(separator)).any():  # in "---" the first "--" is one
        places, behind = found.tolist(), 0
        found = np.array([at for at in places if at >= behind and (behind := at + len(separator))], np.int64)
    return found


def _split_crlf(data: UInt8s, separator: bytes) -> pa.LargeBinaryArray:
    """The documents of a block in which a line feed of the separator may be CR LF. Other carriage returns stay."""
    is_return = np.append((data[:-1] == ord("\r")) & (data[1:] == ord("\n")), False)
    there = np.flatnonzero(~is_return)  # byte of the block without these -> byte of the block
    found = _places_of(data[there], separator, np.array([len(there)]))
    keep = np.ones(len(data), bool)
    removed = np.full(len(found), len(separator))
    for k, byte in enumerate(separator):
        here = there[found + k]
        keep[here] = False
        if byte == ord("\n"):
            returns = is_return[here - 1]
            keep[here[returns] - 1] = False
            removed += returns
    stops = there[found + len(separator) - 1] + 1 if len(found) else np.zeros(0, np.int64)
    ends = stops - np.cumsum(removed)
    if len(data) > (stops[-1] if len(stops) else 0):
        ends = np.append(ends, keep.sum())
    return _texts(data[keep], ends)


def _texts(data: UInt8s, ends: Int64s) -> pa.LargeBinaryArray:
    """Texts in order that end at *ends*."""
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    if file.completion_column is not None or file.has_messages:
        raise ValueError(f"{file.name} is plain text, which has no column {file.text_column!r}. Set source.format to what it is.")
    if file.kept_here:
        raise ValueError(f"{file.name} is plain text, which has no column {file.kept_here[0]!r}. Leave source.keep_columns out.")
    if file.id_column is not None:
        raise ValueError(f"{file.name} is plain text, which has no column {file.id_column!r}. Leave source.id_column out.")
    return byte_ranges(file, _separator(file), range_bytes)


def rows_before(file: TextFile, part: Range) -> int:
    return max((rows.end for rows in read(file, Range(0, part.start, None, 0))), default=0)


PLAIN = SourceFormat((".txt", ".text", ".md"), ranges, read, rows_before)
