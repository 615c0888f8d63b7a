"""Plain text: documents between separators, or a file as one document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from flat_tokens.extras import Later
from flat_tokens.text.blocks import blocks, byte_ranges
from flat_tokens.text.rows import Range, Rows, SourceFormat, TextFile, too_long

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    # Optional and slow to import: at first use.
    pa, pc = Later("pyarrow", "reading text files"), Later("pyarrow.compute", "reading text files")


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    start = seen = 0
    for block, whole in blocks(file, part, file.separator, file.max_bytes):
        seen += len(block)
        if whole:
            texts = pa.array([block], pa.large_binary())
            if file.separator:
                texts = pc.split_pattern(texts, file.separator).values
                texts = texts if len(texts[-1].as_buffer()) else texts[:-1]  # behind the last separator is the next document
            rows = Rows(texts, None, np.arange(start, start + len(texts)), start + len(texts), seen)
        else:
            fault = (start, "too_long", too_long(file.max_bytes + 1, file.max_bytes))
            rows = Rows.of_lists(file, [], [], [], [fault], end=start + 1, seen=seen)
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
