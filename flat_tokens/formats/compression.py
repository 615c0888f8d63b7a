"""Files that are compressed as a whole, as neighbours have them. None is decompressed beyond the size that is known for it."""

from __future__ import annotations

import bz2
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import zstandard

from flat_tokens.annotations import UInt8s
from flat_tokens.arrays.codecs import inflate
from flat_tokens.extras import pa
from flat_tokens.options import varint
from flat_tokens.stores.store import Store

Codec = Literal["zstd", "gz", "br", "bz2", "snappy"]
LEVELS: dict[Codec, int | None] = {"zstd": 3, "gz": 6, "br": 5, "bz2": 9, "snappy": None}
"""The level at which each is written; snappy has none."""
MAX_WHOLE_BYTES = 1 << 30
"""Such a file is held in memory: a larger one is neither read nor written."""


def compress(codec: Codec, data: bytes) -> bytes:
    """*data* in one frame: the same bytes at any time."""
    level = LEVELS[codec]
    match codec:
        case "zstd":
            return zstandard.ZstdCompressor(level=level or 0).compress(data)
        case "gz":
            packer = zlib.compressobj(level or 0, zlib.DEFLATED, 31)  # without a time in its header
            return packer.compress(data) + packer.flush()
        case "bz2":
            return bz2.compress(data, level or 0)
        case "br":
            packed: bytes = pa.Codec("brotli", compression_level=level).compress(data, asbytes=True)
        case "snappy":
            packed = pa.Codec("snappy").compress(data, asbytes=True)
    return packed


def decompress(codec: Codec, stored: bytes, size: int) -> memoryview:
    """*stored*, decompressed to exactly *size* bytes. ValueError if it is damaged, or of another size."""
    try:
        match codec:
            case "zstd" | "gz":
                return inflate({"zstd": "zstd", "gz": "gzip"}[codec], memoryview(stored), size)
            case "bz2":
                unpacker = bz2.BZ2Decompressor()
                data = unpacker.decompress(stored, size + 1)
                is_whole = unpacker.eof and not unpacker.unused_data
            case "br":
                with pa.CompressedInputStream(pa.BufferReader(stored), "brotli") as stream:
                    data = stream.read(size + 1)
                is_whole = True
            case "snappy":
                # pyarrow leaves the rest of its output untouched where a file is shorter.
                if (claimed := varint(stored, 0)[0]) != size:
                    raise ValueError(f"it says {claimed}")
                data = pa.Codec("snappy").decompress(stored, size, asbytes=True)
                is_whole = True
        if len(data) != size or not is_whole:
            raise ValueError("it is of another size")
        return memoryview(data)
    except (OSError, EOFError, ValueError) as error:
        if str(error).startswith("does not decompress"):
            raise
        raise ValueError(f"does not decompress to {size} bytes ({error})") from error


@dataclass(frozen=True, eq=False)  # what is kept is of one opening of a file: it may change
class IndexedBytes:
    """The bytes of a file that has *size* of them by its index, read in ranges. *codec*: it is packed by that as a whole, into
    *packed_size* bytes if the index says how many.
    """

    store: Store
    key: str
    size: int
    codec: Codec | None = None
    packed_size: int | None = None

    @property
    def path(self) -> str:
        return self.store.path(self.key)

    def read(self, start: int, stop: int) -> UInt8s:
        """Bytes ``start:stop``, unpacked: uint8[stop - start]. ValueError if the file is not the one of its index."""
        size = self.stored_size
        packed = self.codec is not None
        data = _unpacked(self)[start:stop] if packed else self.store.read_range(self.key, start, min(stop, size))
        if len(data) != stop - start:
            raise ValueError(f"{self.path}: ends before byte {stop}. The file is truncated: fetch or write it again.")
        return np.frombuffer(data, np.uint8)

    @cached_property
    def stored_size(self) -> int:
        size, expected = self.store.size(self.key), self.size if self.codec is None else self.packed_size
        if expected not in (None, size):
            raise ValueError(f"{self.path}: has {size} bytes, but the index says {expected}. Fetch or write it again.")
        return size


@lru_cache(maxsize=1)
def _unpacked(file: IndexedBytes) -> memoryview:
    assert file.codec is not None
    if max(file.size, file.stored_size) > MAX_WHOLE_BYTES:
        raise ValueError(f"{file.path}: is larger than packed files may be ({MAX_WHOLE_BYTES} bytes). Unpack it.")
    try:
        return decompress(file.codec, file.store.read(file.key), file.size)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
