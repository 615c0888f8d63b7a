"""Compressions of source files: how compressed files begin, and how they are unpacked."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from flat_tokens.extras import extra

BLOCK_BYTES = 4 << 20
PACKED_BYTES = 1 << 10
"""Compressed bytes unpacked at a time by zstd: few, for each may stand for 32 kB."""


def _read(opener: Callable[[BinaryIO], Any], file: BinaryIO) -> Iterator[bytes]:
    with opener(file) as unpacked:
        yield from iter(lambda: unpacked.read(BLOCK_BYTES), b"")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    zstandard = extra("zstandard", "reading .zst files")
    decompressor: Any = None
    while data := file.read(PACKED_BYTES):
        while data:
            if decompressor is None:
                decompressor = zstandard.ZstdDecompressor().decompressobj()
            try:
                yield decompressor.decompress(data)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            data = b""
            if decompressor.eof:
                data, decompressor = decompressor.unused_data, None
    if decompressor is not None:
        raise EOFError("the file ends within a compressed frame")


class Compression(NamedTuple):
    """A compression: how its files begin, and the function that yields their unpacked bytes."""

    begins: re.Pattern[bytes]
    unpack: Callable[[BinaryIO], Iterator[bytes]]


COMPRESSIONS = {
    ".gz": Compression(re.compile(rb"\x1f\x8b"), partial(_read, gzip.open)),
    ".zst": Compression(re.compile(rb"\x28\xb5\x2f\xfd"), _unzstd),
    ".bz2": Compression(re.compile(rb"BZh[1-9]1AY&SY"), partial(_read, bz2.open)),
    ".xz": Compression(re.compile(rb"\xfd7zXZ\x00"), partial(_read, lzma.open)),
}
"""Compressions by the ending of their files."""


def compression_of(head: bytes) -> str | None:
    """The ending of the compression whose files begin like *head*; None where the file is not compressed."""
    return next((ending for ending, compression in COMPRESSIONS.items() if compression.begins.match(head)), None)


def unpacked(file: BinaryIO, ending: str, name: str) -> Iterator[bytes]:
    """The unpacked bytes of a compressed file, in blocks. ValueError, with *name* and the place, where it is damaged."""
    try:
        yield from COMPRESSIONS[ending].unpack(file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the file
        raise ValueError(f"{name} is damaged at byte {file.tell()} or before: {error}") from error
