"""Plain text: documents between separators, or a file as one document."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flat_tokens.text.arrow_library import pa
from flat_tokens.text.blocks import blocks, byte_ranges
from flat_tokens.text.rows import Range, Rows, SourceFormat, TextFile, passed_over


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    start = seen = 0
    for block, whole in blocks(file, part, file.separator, file.max_bytes):
        seen += len(block)
        if whole:
            texts = pa.array([block], pa.large_binary())
            if file.separator:
                texts = pa.compute.split_pattern(texts, file.separator).values
                texts = texts if len(texts[-1].as_buffer()) else texts[:-1]  # behind the last separator is the next document
            rows = Rows(texts, None, np.arange(start, start + len(texts)), start + len(texts), seen)
        else:
            rows = passed_over(file, start, seen)
        yield rows
        start = rows.end


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    return byte_ranges(file, file.separator, range_bytes)


def rows_before(file: TextFile, part: Range) -> int:
    rows = 0
    for rows_read in read(file, Range(0, part.start, None, 0)):
        rows = rows_read.end
    return rows


PLAIN = SourceFormat((".txt", ".text", ".md"), ranges, read, rows_before)
