"""Codecs of chunks.

A chunk is never decompressed beyond the size that the array's metadata says: zarr-python believes the size that a chunk says of
itself, which may come from a stranger.

Chunks in blocks are Blosc 1 buffers of checksummed zstd frames, so that a part of a chunk is decoded, and checked, alone.
A buffer is a header of 16 bytes (version, version of the codec, flags, size of an item; then as uint32 the decompressed size,
the size of a block and the size of the buffer), the offset of each block as int32, then the blocks, in any order. A block is its
stored size as int32, then a frame; one that has the size of the block itself is the block as it is. Readers of Blosc take these
buffers as any others, and zstd checks the checksums for them.
"""

from __future__ import annotations

import struct
import threading
import zlib
from typing import Any, cast

import google_crc32c
import numpy as np
import zstandard

from flat_tokens.annotations import AnyArray
from flat_tokens.extras import LazyModule

numcodecs: Any = LazyModule("numcodecs", "a compressed chunk")  # takes as long as numpy, and raw tokens do without it

HEADER = struct.Struct("<4B3I")
BEGINS = (2, 1, 0x90, 1)
"""Blosc 1, zstd's first version; zstd, blocks that are one stream each; items of one byte, which no flag can shuffle."""
RUN_OF_A_BYTE = 1
"""Type of a block of zstd, which has that byte."""
INT32, TWO_INT32 = struct.Struct("<i"), struct.Struct("<2i")
EMPTY_FRAME = b"\x50\x2a\x4d\x18" + bytes(4)
"""A frame that zstd skips."""


class _OfThread(threading.local):
    """A decompressor for each thread, made at its first use."""

    def __init__(self) -> None:
        self.decompressor: Any = zstandard.ZstdDecompressor()


of_thread = _OfThread()


def encode_frame(items: AnyArray, level: int) -> bytes:
    """A frame of zstd with its checksum."""
    return bytes(numcodecs.zstd.Zstd(level=level, checksum=True).encode(items))


def encode_blocks(items: AnyArray, block_length: int, level: int) -> bytes:
    """A buffer of whole blocks, in order."""
    blocks = list[bytes]()
    for start in range(0, len(items), block_length):
        block = items[start : start + block_length]
        frame = encode_frame(block, level)
        blocks.append(frame + EMPTY_FRAME if len(frame) == block.nbytes else frame)  # or it would be taken for the block
    ends = HEADER.size + 4 * len(blocks) + np.cumsum([4 + len(block) for block in blocks])
    offsets = np.concatenate([[HEADER.size + 4 * len(blocks)], ends[:-1]]).astype("<i4")
    header = HEADER.pack(*BEGINS, items.nbytes, items[:block_length].nbytes, int(ends[-1]))
    return b"".join([header, offsets.tobytes(), *(part for block in blocks for part in (INT32.pack(len(block)), block))])


def buffer_size(stored: memoryview) -> int:
    """The size that a buffer says of itself, whatever comes after it. ValueError if it is cut off."""
    if len(stored) < HEADER.size or not HEADER.size <= (size := HEADER.unpack_from(stored)[-1]) <= len(stored):
        raise ValueError("it is cut off")
    return int(size)


def frame_size(stored: memoryview) -> int:
    """The size of the zstd frame at the beginning, by its blocks, whatever comes after it. ValueError if it is cut off.
    RFC 8878, section 3.1.1.
    """
    try:
        at, is_last = zstandard.frame_header_size(stored), 0
    except zstandard.ZstdError as error:
        raise ValueError("it is cut off") from error
    while not is_last and at + 3 <= len(stored):
        block = int.from_bytes(stored[at : at + 3], "little")
        is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == RUN_OF_A_BYTE else size)
    at += 4 * (stored[4] >> 2 & 1)  # a checksum
    if not is_last or at > len(stored):
        raise ValueError("it is cut off")
    return at


def decode_block(stored: memoryview, n: int, size: int, block_size: int) -> Any:
    """Block *n* of a buffer of *size* decompressed bytes: a buffer of *block_size* bytes. ValueError if it is damaged."""
    try:
        header = HEADER.unpack_from(stored)
        if header == (*BEGINS, size, block_size, len(stored)):
            # Blocks in order, in order: what Blosc itself does not check.
            at, is_last = HEADER.size + 4 * n, n == size // block_size - 1
            begin, end = (*INT32.unpack_from(stored, at), len(stored)) if is_last else TWO_INT32.unpack_from(stored, at)
            if 0 < begin < end <= len(stored) and block_size != end - begin - 4 == INT32.unpack_from(stored, begin)[0]:
                return decode_frame(stored[begin + 4 : end], block_size)
    except struct.error as error:
        raise ValueError(f"does not decompress to {size} bytes (it is cut off)") from error
    if header[:2] != BEGINS[:2] or header[2] & ~0x12 != 0x80:  # blocks may be split, and stored as they are
        raise ValueError(f"does not decompress to {size} bytes (it is not a buffer of zstd's frames)")
    begin, decoded = blosc_part(stored, size, n * block_size, (n + 1) * block_size)
    return decoded[n * block_size - begin :][:block_size]


def decode_frame(frame: memoryview, size: int) -> bytes:
    """The *size* bytes of a zstd frame, checked if it has a checksum. ValueError if it is damaged or of another size."""
    try:
        if (claimed := zstandard.frame_content_size(frame)) != size:
            raise ValueError(f"it says {claimed}")
        if len(frame) == size + len(EMPTY_FRAME) and frame[size:] == EMPTY_FRAME:
            frame = frame[:size]
        return cast(bytes, of_thread.decompressor.decompress(frame, allow_extra_data=False))
    except (zstandard.ZstdError, ValueError) as error:
        raise ValueError(f"does not decompress to {size} bytes ({error})") from error


def blosc_part(stored: memoryview, size: int, start: int, stop: int) -> tuple[int, memoryview]:
    """The blocks of any Blosc 1 buffer of *size* decompressed bytes that hold bytes ``start:stop``: (first byte, bytes). Some of
    the blocks under a header of their own are a buffer too, which the library decodes.
    """
    if (claimed := claimed_size("blosc", stored)) != size:
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
        if (claimed := claimed_size(codec, stored)) not in (size, None):
            raise ValueError(f"it says {claimed}")
        out = np.empty(size, np.uint8).data
        numcodecs.get_codec({"id": codec}).decode(stored, out)
        return out
    except (RuntimeError, ValueError, zlib.error) as error:
        raise ValueError(f"does not decompress to {size} bytes ({error})") from error


def claimed_size(codec: str, stored: memoryview) -> int | None:
    """The decompressed size that a compressed chunk says; None if a zstd frame does not say it."""
    if codec == "lz4":
        return int.from_bytes(stored[:4], "little")
    if codec == "blosc":
        if len(stored) < 16 or int.from_bytes(stored[12:16], "little") != len(stored):
            raise ValueError("it is cut off")
        return int.from_bytes(stored[4:8], "little")
    try:
        found: int = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        raise ValueError("it is not a zstd frame") from error
    return None if found < 0 else found
