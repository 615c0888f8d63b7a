"""Limits that bound the memory of reading. Readers look them up here at each use, so that tests can set them."""

BATCH_BYTES = 4 << 20
"""Text read at a time: enough for the engines, small enough that its buffers are used again and again."""

BATCH_ROWS = 1 << 16

LARGEST_BATCH = 1 << 27
"""Bytes of rows that are read together where a file says little about the size of its pages' values."""

LARGEST_PAGE = 1 << 29
"""Bytes that a page of a Parquet file may always have; a page may also have twice the bytes of a document."""

LONGEST_LINE = 8 << 20
"""Bytes that a line of JSON or a row of CSV may always have; it may also have twice the bytes of a document."""

MAX_EXPANSION = 500
"""Bytes that a byte of a file may stand for, where the source does not say otherwise. Text has 3 to 20."""

ANY_EXPANSION = 192 << 20
"""Bytes that any file may stand for, however small it is."""

ANY_WINDOW = 1 << 27
"""Bytes of text that any zstd file may refer back to. Those with --long need more."""

LONGEST_WINDOW = 1 << 31
"""The longest window of zstd: that of --long=31."""

LOOK_BYTES = 1 << 20
"""Bytes that planning reads of a file at a time."""


def longest_line(max_bytes: int) -> int:
    """Bytes of the longest line that is parsed: a line has more than the document, which may have *max_bytes*."""
    return max(2 * max_bytes, LONGEST_LINE)


def check_expansion(unpacked: int, stored: int, most: int, name: str) -> None:
    """ValueError if *stored* bytes of a file stand for more than *most* times as many, and for many at all."""
    if unpacked > max(most * stored, ANY_EXPANSION):
        raise ValueError(
            f"{name}: {stored:,} bytes of it stand for {unpacked:,} bytes or more; source.max_expansion allows {most:,} times as "
            f"many. Raise it if the file is to be trusted."
        )
