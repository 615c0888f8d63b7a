"""Reading runs of tokens: many of them, in blocks, a few blocks ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import AnyArray, Int64s
from flat_tokens.arrays.stored import StoredArray

MAX_SLICES_OF_A_BLOCK = 512
"""Above this many runs (many short documents) a boolean mask is faster than slicing."""


LONG_RUN = 1 << 17
"""Tokens of a run that is better written alone than copied together with others."""


class Reads(NamedTuple):
    """How tokens are read: in blocks of *block* tokens, *ahead* of them at a time. Where less than one part in *sparse* of a
    block is wanted, each run is read alone; None: never. ``whole``: all of a block is read, so that the checksums of its inner
    chunks are checked.
    """

    block: int
    sparse: int | None
    whole: bool = False
    ahead: int = 3


FROM_DISK = Reads(1 << 18, 8, ahead=2)
FROM_STORE = Reads(1 << 22, None, ahead=2)
"""A request of an object store takes as long as reading some megabytes, and costs the same for sixteen."""


class _Block(NamedTuple):
    """Tokens ``begin:end`` of a shard that are read at once, and the runs ``first:last`` that are in them."""

    begin: int
    end: int
    first: int
    last: int


def _blocks(begins: Int64s, ends: Int64s, reads: Reads, length: int) -> Iterator[_Block]:
    """The blocks to read for many runs. Where a block holds little of them, each run is a block."""
    starts = np.arange(int(begins[0]) // reads.block * reads.block, int(ends[-1]), reads.block)
    firsts = np.searchsorted(ends, starts, "right")
    lasts = np.searchsorted(begins, starts + reads.block, "left")
    for start, first, last in zip(starts.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        if first == last:
            continue
        low, high = np.maximum(begins[first:last], start), np.minimum(ends[first:last], start + reads.block)
        if reads.whole:
            yield _Block(start, min(start + reads.block, length), first, last)
        elif reads.sparse is not None and (high - low).sum() * reads.sparse < high[-1] - low[0]:
            yield from map(_Block, low.tolist(), high.tolist(), range(first, last), range(first + 1, last + 1))
        else:
            yield _Block(int(low[0]), int(high[-1]), first, last)


def read_runs(source: StoredArray, begins: Int64s, ends: Int64s, reads: Reads) -> Iterator[AnyArray]:
    """The items of many runs of an array with one a token, in order, which are not empty and do not overlap. A part is valid
    until the next one comes.
    """
    if not len(begins):
        return
    buffers = deque(np.empty((reads.ahead + 1, reads.block), source.numpy_dtype))
    source.read_indexes(int(begins[0]), int(ends[-1]))
    with ThreadPoolExecutor(reads.ahead) as readers:
        under_way: deque[tuple[_Block, Future[AnyArray]]] = deque()
        for block in _blocks(begins, ends, reads, source.length):
            out = buffers[0][: block.end - block.begin]
            buffers.rotate(-1)  # a buffer is used again when all the others have been
            under_way.append((block, readers.submit(source.read, block.begin, block.end, out)))
            if len(under_way) == reads.ahead:
                block, reading = under_way.popleft()
                yield from _of_block(block, reading.result(), begins, ends)
        while under_way:
            block, reading = under_way.popleft()
            yield from _of_block(block, reading.result(), begins, ends)


def runs_in_memory(parts: Sequence[AnyArray], begins: Int64s, ends: Int64s) -> Iterator[AnyArray]:
    """The items of the same runs where they are in memory, in parts in order."""
    return runs_of_parts([*map(len, parts)], parts.__getitem__, begins, ends)


def runs_of_parts(
    counts: Sequence[int],
    part: Callable[[int], AnyArray],
    begins: Int64s,
    ends: Int64s,
) -> Iterator[AnyArray]:
    """The items of the same runs, of consecutive parts of *counts* items. *part* gives one by its number, when it is needed."""
    borders = np.cumsum([0, *counts])
    firsts = np.searchsorted(ends, borders[:-1], "right").tolist()
    lasts = np.searchsorted(begins, borders[1:], "left").tolist()
    for i, (begin, end, first, last) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), firsts, lasts, strict=True)):
        if first < last:
            yield from _of_block(_Block(begin, end, first, last), part(i), begins, ends)


def _of_block(block: _Block, tokens: AnyArray, begins: Int64s, ends: Int64s) -> Iterator[AnyArray]:
    """The items of a block that belong to its runs."""
    low = np.maximum(begins[block.first : block.last], block.begin) - block.begin
    high = np.minimum(ends[block.first : block.last], block.end) - block.begin
    if len(low) <= MAX_SLICES_OF_A_BLOCK:
        parts = [tokens[i:j] for i, j in zip(low.tolist(), high.tolist(), strict=True)]
        if len(parts) * LONG_RUN <= len(tokens):
            yield from parts
        else:
            yield np.concatenate(parts)
        return
    edge = np.zeros(len(tokens) + 1, np.int8)
    edge[low] += 1
    edge[high] -= 1
    yield tokens[np.cumsum(edge[:-1], dtype=np.int8).view(bool)]
