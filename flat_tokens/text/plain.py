"""Files of bytes with a separator behind each document, cut and read at separators: plain text, and the lines of JSON lines.
Without a separator a file of plain text is one document.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from flat_tokens.extras import pa
from flat_tokens.text import limits
from flat_tokens.text.rows import Range, Rows, SourceFormat, TextFile, passed_over

BOM = b"\xef\xbb\xbf"


def blocks(file: TextFile, part: Range, separator: bytes, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole documents of a range, each with its separator at the end but perhaps the last; or, with False, the
    first bytes of a document that is longer than *limit*, which is passed over.
    """
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
            if separator and (at := _last_separator(pending, separator, searched)) >= 0:
                end = at + len(separator)
                yield bytes(memoryview(pending)[:end]), True
                del pending[:end]
            elif len(pending) > limit + max(len(separator) - 1, 0):  # its end may be a part of a separator
                yield bytes(memoryview(pending)[:80]), False
                left, pending = _pass_over(opened, left, separator, pending), bytearray()
            searched = max(len(pending) - len(separator) + 1, 0)
        if pending:
            yield bytes(pending), True


def _last_separator(data: bytearray, separator: bytes, start: int) -> int:
    """Where the last separator in *data* begins, if one begins at *start* or later, else -1. They are told from left to right:
    in "---" it is the first "--".
    """
    at = data.rfind(separator, start)
    while at > 0 and (overlapped := data.rfind(separator, max(at - len(separator) + 1, 0), at + len(separator) - 1)) >= 0:
        at = overlapped
    while at >= 0 and (further := data.find(separator, at + len(separator))) >= 0:
        at = further
    return at


def _pass_over(opened: BinaryIO, left: int, separator: bytes, pending: bytearray) -> int:
    """Move to the end of a document that is too long; the bytes left in the range behind it."""
    tail = bytes(pending[len(pending) - len(separator) + 1 :]) if separator else b""
    while left:
        block = opened.read(min(limits.BATCH_BYTES, left))
        if not block:
            raise OSError(f"it ends {left} bytes before its length")
        left -= len(block)
        window = tail + block
        if separator and (at := window.find(separator)) >= 0:
            behind = len(window) - at - len(separator)
            opened.seek(-behind, os.SEEK_CUR)
            return left + behind
        tail = window[len(window) - len(separator) + 1 :] if separator else b""
    return 0


def byte_ranges(file: TextFile, separator: bytes, range_bytes: int) -> Iterator[Range]:
    """Ranges of about *range_bytes* bytes that end behind separators; one range where there is no separator."""
    if not separator:
        yield Range(0, file.size, None, file.size)
        return
    with file.open() as opened:
        start = 0
        while start < file.size:
            stop = file.size
            if start + range_bytes < file.size:
                wanted = max(start, start + range_bytes - len(separator))
                stop = _after_separator(opened, start, wanted, separator, file.size)
            yield Range(start, stop, None, stop - start)
            start = stop


def _after_separator(opened: BinaryIO, start: int, position: int, separator: bytes, size: int) -> int:
    """The first position behind a separator that begins at *position* or later, or the file's size. Documents are read from
    *start* on: of separators that overlap ("--" in "---") only the first of them is one in any case.
    """
    begin = max(start, position - len(separator) + 1)
    before, tail = begin - len(separator), b""
    opened.seek(begin)
    while block := opened.read(limits.LOOK_BYTES):
        window = tail + block
        at = window.find(separator)
        while at >= 0:
            here = begin + at
            if here >= position and here - before >= len(separator):
                return here + len(separator)
            before = here
            at = window.find(separator, at + 1)
        tail = window[len(window) - len(separator) + 1 :]
        begin += len(window) - len(tail)
    return size


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    start = seen = 0
    for block, whole in blocks(file, part, file.separator, file.max_bytes):
        seen += len(block)
        if whole:
            texts = split(block, file.separator)
            rows = Rows(texts, None, np.arange(start, start + len(texts)), start + len(texts), seen)
        else:
            rows = passed_over(file, start, seen)
        yield rows
        start = rows.end


def split(block: bytes, separator: bytes) -> pa.LargeBinaryArray:
    """The documents of a block, each ended by a separator but perhaps the last."""
    if not separator:
        return pa.array([block], pa.large_binary())
    data = np.frombuffer(block, np.uint8)
    found = np.flatnonzero(data[: len(data) - len(separator) + 1] == separator[0])
    for k in range(1, len(separator)):
        found = found[data[found + k] == separator[k]]
    if len(found) > 1 and (np.diff(found) < len(separator)).any():  # told from left to right: in "---" the first "--" is one
        places, behind = found.tolist(), 0
        found = np.array([at for at in places if at >= behind and (behind := at + len(separator))], np.int64)
    keep = np.ones(len(data), bool)
    for k in range(len(separator)):
        keep[found + k] = False
    ends = found - len(separator) * np.arange(len(found))
    kept = data[keep]
    if len(data) > (found[-1] + len(separator) if len(found) else 0):
        ends = np.append(ends, len(kept))
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(kept)])


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    if file.completion_column is not None or file.has_messages:
        raise ValueError(f"{file.name} is plain text, which has no column {file.text_column!r}. Set source.format to what it is.")
    if file.kept_columns:
        raise ValueError(
            f"{file.name} is plain text, which has no column {file.kept_columns[0]!r}. Leave source.keep_columns out."
        )
    if file.id_column is not None:
        raise ValueError(f"{file.name} is plain text, which has no column {file.id_column!r}. Leave source.id_column out.")
    return byte_ranges(file, file.separator, range_bytes)


def rows_before(file: TextFile, part: Range) -> int:
    return max((rows.end for rows in read(file, Range(0, part.start, None, 0))), default=0)


PLAIN = SourceFormat((".txt", ".text", ".md"), ranges, read, rows_before)
