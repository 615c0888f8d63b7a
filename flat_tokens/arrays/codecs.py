"""Codecs of chunks. A chunk is never decompressed beyond the size that the array's metadata says.

zarr-python believes the size that a chunk says of itself, which may come from a stranger.
"""

from __future__ import annotations

import zlib
from typing import Literal, NamedTuple

import google_crc32c
import numpy as np
from numcodecs.blosc import Blosc
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd

ABSENT = 2**64 - 1
"""Offset and length of an inner chunk that a shard's index says is not stored."""

MAX_CHUNK_BYTES = 1 << 30
"""Chunks above this are refused before anything is allocated: a few bytes of metadata can ask for petabytes."""


class ShardIndex(NamedTuple):
    """The place of a shard's index, and whether a crc32c follows it."""

    location: Literal["start", "end"] = "end"
    crc32c: bool = True


def blosc_part(stored: memoryview, size: int, start: int, stop: int) -> tuple[int, memoryview]:
    """The blocks of a Blosc 1 buffer of *size* decompressed bytes that hold bytes ``start:stop``: (first byte, bytes).

    A buffer is a header of 16 bytes (flags at 2, decompressed size at 4, size of a block at 8, compressed size at 12), the
    offset of each block as int32, then the blocks, in any order. Some of the blocks under a header of their own are a
    buffer too, which the library decodes.
    """
    if (claimed := _claimed_size("blosc", stored)) != size:
        raise ValueError(f"does not decompress to {size} bytes (it says {claimed})")
    block_size = int.from_bytes(stored[8:12], "little")
    if stored[2] & 0x02 or not 0 < block_size < size:  # stored as it is, or one block
        return 0, inflate("blosc", stored, size)
    count = -(-size // block_size)
    body = 16 + 4 * count
    if len(stored) < body:
        raise ValueError(f"does not decompress to {size} bytes (it is cut off)")
    offsets = np.frombuffer(stored, "<i4", count, 16).astype(np.int64)
    if offsets.min() < body or offsets.max() >= len(stored):
        raise ValueError(f"does not decompress to {size} bytes (its blocks stand outside of it)")
    ends = np.append(np.sort(offsets), len(stored))
    first, last = start // block_size, -(-stop // block_size)
    wanted = [stored[offset : ends[np.searchsorted(ends, offset, side="right")]] for offset in offsets[first:last].tolist()]
    starts = 16 + 4 * len(wanted) + np.cumsum([0, *map(len, wanted)])
    part_size = min(last * block_size, size) - first * block_size
    header = bytes(stored[:4]) + np.array([part_size, block_size, starts[-1], *starts[:-1]], "<i4").tobytes()
    return first * block_size, inflate("blosc", memoryview(b"".join([header, *wanted])), part_size)


def check_size(stored: memoryview, size: int) -> None:
    if len(stored) != size:
        raise ValueError(f"has {len(stored)} bytes instead of {size}")


def without_crc32c(stored: memoryview) -> memoryview:
    """The bytes before their crc32c."""
    if google_crc32c.value(np.frombuffer(stored[:-4], np.uint8)) != int.from_bytes(stored[-4:], "little"):
        raise ValueError("does not match its crc32c")
    return stored[:-4]


def inflate(codec: str, stored: memoryview, size: int) -> memoryview:
    """*stored*, decompressed to exactly *size* bytes. The size that it says itself is not trusted."""
    try:
        if codec in ("gzip", "zlib"):
            inflater = zlib.decompressobj(31 if codec == "gzip" else 15)
            data = inflater.decompress(stored, size + 1)
            if len(data) != size or not inflater.eof or inflater.unused_data:
                raise ValueError("it is of another size")
            return memoryview(data)
        # numcodecs leaves the rest of its output untouched where a chunk is shorter.
        if (claimed := _claimed_size(codec, stored)) not in (size, None):
            raise ValueError(f"it says {claimed}")
        out = np.empty(size, np.uint8).data
        {"zstd": Zstd, "blosc": Blosc, "lz4": LZ4}[codec]().decode(stored, out)
        return out
    except (RuntimeError, ValueError, zlib.error) as error:
        raise ValueError(f"does not decompress to {size} bytes ({error})") from error


def _claimed_size(codec: str, stored: memoryview) -> int | None:
    """The decompressed size that a compressed chunk says; None if a zstd frame does not say it."""
    if codec == "lz4":
        return int.from_bytes(stored[:4], "little")
    if codec == "blosc":
        if len(stored) < 16 or int.from_bytes(stored[12:16], "little") != len(stored):
            raise ValueError("it is cut off")
        return int.from_bytes(stored[4:8], "little")
    if len(stored) < 6 or bytes(stored[:4]) != b"\x28\xb5\x2f\xfd":
        raise ValueError("it is not a zstd frame")
    single_segment, width = stored[4] >> 5 & 1, (0, 2, 4, 8)[stored[4] >> 6]
    start = 6 - single_segment + (0, 1, 2, 4)[stored[4] & 3]
    if width == 0:
        return stored[start] if single_segment else None
    return int.from_bytes(stored[start : start + width], "little") + (256 if width == 2 else 0)
