"""Blocks of compressed chunks, decoded many at a time by one call, which costs the interpreter little. The first bytes of
chunks and frames show whether this library wrote them. ``ArraySpec.decode_block`` decodes all others one by one, and those of a
call that fails, and says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zstandard

from flat_tokens.annotations import AnyArray, Int64s
from flat_tokens.arrays.codecs import BEGINS, EMPTY_FRAME, HEADER, of_thread
from flat_tokens.arrays.layouts import ArraySpec
from flat_tokens.arrays.maps import share_work

CHECKED_TOGETHER, DECODED_TOGETHER = 128, 16
"""Blocks whose frames are looked up together, and decoded by a call: 16 of 16 KiB stay in a processor's own cache."""
CAN_DECODE_MANY = "multi_decompress_to_buffer" in zstandard.backend_features


def copy_parts(
    spec: ArraySpec,
    stored: Sequence[memoryview],
    parts: Int64s,
    out: AnyArray,
    decode_one: Callable[[int, int], AnyArray],
) -> None:
    """Copy parts of blocks, on all processors: int64[n, 5] of chunk (an index of *stored*), block of the chunk, first, last and
    place, in the order of blocks. Items ``first:last`` of the block go to ``out[place:]``. *decode_one* decodes a block by the
    first two.
    """
    of_block = np.cumsum(np.diff(parts[:, :2], axis=0, prepend=-1).any(axis=1)) - 1
    bounds = np.searchsorted(of_block, np.arange(of_block[-1] + 2 if len(parts) else 1)).tolist()
    blocks, dtype = parts[bounds[:-1], :2], spec.numpy_dtype
    where, rows = blocks.tolist(), np.column_stack([of_block, parts[:, 2:]]).tolist()

    def work(part: range) -> None:
        for start in range(part.start, part.stop, CHECKED_TOGETHER):
            stop = min(start + CHECKED_TOGETHER, part.stop)
            frames = usual_frames(spec, [stored[slot] for slot, _ in where[start:stop]], blocks[start:stop, 1])
            for k in range(start, stop, DECODED_TOGETHER):
                end = min(k + DECODED_TOGETHER, stop)
                if frames and (decoded := decode_frames(frames[k - start : end - start], spec)):
                    items = [np.frombuffer(one, dtype) for one in decoded]
                else:
                    items = [decode_one(slot, n) for slot, n in where[k:end]]
                for i, first, last, place in rows[bounds[k] : bounds[end]]:
                    out[place : place + last - first] = items[i - k][first:last]

    share_work(work, len(where))


def usual_frames(spec: ArraySpec, stored: list[memoryview], blocks: Int64s) -> list[memoryview] | None:
    """The frames of block ``blocks[k]`` of each chunk ``stored[k]``; None unless all chunks and frames begin as they are written
    here.
    """
    itemsize = spec.numpy_dtype.itemsize
    if spec.block_length is None:
        wanted = frame_head(spec.chunk_length * itemsize)
        return stored if all(frame[: len(wanted)] == wanted for frame in stored) else None
    size, block_size = spec.chunk_length * itemsize, spec.block_length * itemsize
    count = size // block_size
    head_size = HEADER.size + 4 * count
    sizes = np.array([len(one) for one in stored], np.int64)
    if sizes.min() < head_size:
        return None
    # what codecs.decode_block checks of a block
    heads = np.frombuffer(b"".join([one[:head_size] for one in stored]), "<u4").reshape(-1, head_size // 4).astype(np.int64)
    k, offsets = np.arange(len(stored)), heads[:, HEADER.size // 4 :]
    begins, ends = offsets[k, blocks], np.where(blocks == count - 1, sizes, offsets[k, np.minimum(blocks + 1, count - 1)])
    lengths, wanted = ends - begins - 4, frame_head(block_size)
    is_usual = (heads[:, :3] == [int.from_bytes(BEGINS, "little"), size, block_size]).all() and (heads[:, 3] == sizes).all()
    is_padded = (lengths == block_size) | (lengths == block_size + len(EMPTY_FRAME))
    if not is_usual or (begins <= 0).any() or (lengths <= len(wanted)).any() or (ends > sizes).any() or is_padded.any():
        return None
    places = list(zip(stored, (begins + 4).tolist(), ends.tolist(), strict=True))
    found = b"".join([one[begin - 4 : begin + len(wanted)] for one, begin, _ in places])
    if found != b"".join([length + wanted for length in lengths.astype("<i4")[:, None].view("V4").ravel().tolist()]):
        return None
    return [one[begin:end] for one, begin, end in places]


@functools.cache
def frame_head(size: int) -> bytes:
    """How a zstd frame of *size* bytes begins that is written here: a single segment, which says its size and has a checksum."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(size))
    return frame[: zstandard.frame_header_size(frame)]


def decode_frames(frames: list[memoryview], spec: ArraySpec) -> Any:
    """The decoded blocks, a buffer each; None if they cannot be decoded together."""
    if not CAN_DECODE_MANY:
        return None
    size = (spec.block_length or spec.chunk_length) * spec.numpy_dtype.itemsize
    try:
        sizes = np.full(len(frames), size, np.uint64)
        return of_thread.decompressor.multi_decompress_to_buffer(frames, decompressed_sizes=sizes, threads=1)
    except zstandard.ZstdError:
        return None  # one of them is damaged, which is an error when each is looked at, by its place
