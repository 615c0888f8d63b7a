"""Many small files read as one: their documents are those that each has alone, at the price of a few arrays for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flat_tokens.annotations import Int64s, UInt8s
from flat_tokens.extras import pa
from flat_tokens.text.plain import places_of
from flat_tokens.text.rows import Rows

NEWLINE = ord("\n")


def plain_texts(data: UInt8s, ends: Int64s, separator: bytes) -> tuple[pa.LargeBinaryArray, Int64s]:
    """The documents of m files of plain text, which end at *ends* in *data*: int64[m]; and how many each has: int64[m]. No copy
    if there is no separator.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    found = _separators(data, ends, separator)
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
    buffers = [None, pa.py_buffer(np.concatenate([[0], offsets]).astype(np.int64)), pa.py_buffer(kept)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets), buffers), counts


def _separators(data: UInt8s, ends: Int64s, separator: bytes) -> Int64s:
    """Where separators begin, none of which goes over the end of a file. They are counted from left to right: in "---" the first
    "--" is one.
    """
    if not separator or len(data) < len(separator):
        return np.empty(0, np.int64)
    return places_of(data, separator, lambda found: found + len(separator) <= ends[np.searchsorted(ends, found, "right")])


def line_counts(data: UInt8s, ends: Int64s) -> Int64s:
    """The lines of each file, which ends with a line's end: int64[m]."""
    return np.diff(np.searchsorted(np.flatnonzero(data == NEWLINE), ends), prepend=0)


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
