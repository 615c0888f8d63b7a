"""Documents of a part: where their tokens are, and readers of these and of their rows. Many runs of tokens are read in blocks, a
few blocks ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import AnyArray, Bools, Int8s, Int64s, UInt64s
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TOKEN_ARRAYS, TOKENS, TokenBatch
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.paths import shard_key
from tasks.rows import FILE, KEY, REASON, ROW, SPLIT_KEY

MAX_SLICES_OF_A_BLOCK = 512
"""Above this many runs (many short documents) a boolean mask is faster than slicing."""


LONG_RUN = 1 << 17
"""Tokens of a run that is better written alone than copied together with others."""


class Reads(NamedTuple):
    """How tokens are read: in blocks of *block* tokens, *ahead* of them at a time. If less than one part in *sparse* of a block
    is wanted, each run is read alone; None: never. ``whole``: all of a block is read, so that the checksums of its inner chunks
    are checked.
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
    """The items of many runs of an array with an item a token. The runs are in order, not empty, and do not overlap. A yielded
    part is valid until the next one is asked for.
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


WINDOW_TOKENS = 1 << 21
"""Tokens that are put together at a time where they come from several splits of a version."""

REASONS = "reasons"
"""Below a token shard: the keys of the reasons for which its last documents were left out, uint64."""
Read = Callable[[str, int, int], UInt64s]
"""Reads a fact of some documents, by its name and their range."""
Runs = Callable[[Int64s, Int64s], Iterator[AnyArray]]
"""The items of runs of an array, by where each begins and ends: int64[n] each. An array is valid until the next is asked for."""


TokenRuns = Mapping[str, Runs]
"""The token arrays that documents are in, by their names."""


def stored_arrays(tokens: FlatTokens, reads: Reads | None = None) -> TokenRuns:
    """The arrays of a stored flat-tokens array."""
    how = reads or (FROM_DISK if tokens.store.is_local else FROM_STORE)
    return {name: partial(read_runs, array, reads=how) for name, array in tokens.arrays.items()}


@dataclass(frozen=True)
class Documents:
    """Documents in their order. Tokens of document i: ``begins[i]`` and ``lengths[i]`` on, of ``arrays[array[i]]``.

    ``array``: int8[n]; ``begins``, ``lengths``: int64[n]. What their rows say is read when it is asked for: ``read(name, first,
    stop)`` gives a fact of documents ``first:stop``, uint64[m] or uint64[m, numbers]; ``columns(i)`` the kept columns of
    documents i, int64[m], ascending.
    """

    array: Int8s
    begins: Int64s
    lengths: Int64s
    arrays: tuple[TokenRuns, ...]
    read: Read
    columns: Callable[[Int64s], pa.RecordBatch]

    def __len__(self) -> int:
        return len(self.lengths)

    def fact(self, name: str) -> UInt64s:
        """A fact of all of them. A document without a split key has its key for that."""
        return self.read(name, 0, len(self))

    @property
    def keys(self) -> UInt64s:
        return self.fact(KEY)

    def those(self, keep: Bools) -> Documents:
        """The documents *keep*, bool[n]."""
        if keep.all():
            return self
        numbers = np.flatnonzero(keep)

        def read(name: str, first: int, stop: int) -> UInt64s:
            some = numbers[first:stop]
            low, high = (int(some[0]), int(some[-1]) + 1) if len(some) else (0, 0)
            return self.read(name, low, high)[some - low]

        columns = lambda wanted: self.columns(numbers[wanted])  # noqa: E731
        return Documents(self.array[keep], self.begins[keep], self.lengths[keep], self.arrays, read, columns)

    def part(self, first: int, stop: int) -> Documents:
        """Documents ``first:stop``."""
        places = np.arange(len(self))
        return self.those((places >= first) & (places < stop))

    def items(self, name: str, low: int, high: int) -> Iterator[AnyArray]:
        """The items of a token array for the documents' tokens from *low* to *high*: of TOKENS the tokens themselves. An array is
        valid until the next is asked for.
        """
        runs = [arrays[name] for arrays in self.arrays if name in arrays]
        if len(runs) < len(self.arrays):
            count = min(int(self.lengths.sum()), high) - max(low, 0)
            for start in range(0, count, WINDOW_TOKENS):
                yield TOKEN_ARRAYS[name].all_absent(min(WINDOW_TOKENS, count - start))
            return
        some = self.lengths > 0
        array, begins, ends = self.array[some], self.begins[some], (self.begins + self.lengths)[some]
        # Consecutive documents make one run of tokens.
        edge = (begins[1:] != ends[:-1]) | (array[1:] != array[:-1])
        array, begins = array[np.append(True, edge)[: len(array)]], begins[np.append(True, edge)[: len(begins)]]
        ends = ends[np.append(edge, True)[: len(ends)]]
        # Cut the first and the last run at the borders.
        before = np.cumsum(ends - begins) - (ends - begins)
        begins, ends = np.maximum(begins, begins + low - before), np.minimum(ends, begins + high - before)
        some = begins < ends
        array, begins, ends = array[some], begins[some], ends[some]
        if len(array) and (array == array[0]).all():
            yield from runs[int(array[0])](begins, ends)
            return
        windows = np.cumsum(ends - begins) // WINDOW_TOKENS
        for window in np.split(np.arange(len(array)), np.flatnonzero(np.diff(windows)) + 1) if len(array) else ():
            lengths = ends[window] - begins[window]
            items = np.empty(int(lengths.sum()), TOKEN_ARRAYS[name].dtype)
            for i, of_array in enumerate(runs):
                mine = array[window] == i
                parts = [part.copy() for part in of_array(begins[window][mine], ends[window][mine])]
                items[np.repeat(mine, lengths)] = np.concatenate([*parts, items[:0]])
            yield items

    def batch(self, names: Iterable[str]) -> TokenBatch:
        """All of the documents with their token arrays *names*, in memory."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        arrays = {name: all_items(self, name) for name in names}
        return TokenBatch.of_arrays(arrays, starts.astype(np.uint64), int(arrays[TOKENS].max(initial=0)) >> 1)


def all_items(documents: Documents, name: str) -> AnyArray:
    """All items of a token array: dtype[token_count]. ValueError if there are not as many as the documents have tokens."""
    count = int(documents.lengths.sum())
    items, at = np.empty(count, TOKEN_ARRAYS[name].dtype), 0
    for block in documents.items(name, 0, count):
        items[at : at + len(block)] = block
        at += len(block)
    if at != count:
        raise ValueError(f"there are {at} items of {name} where {count} were expected")
    return items


def of_shard(root: Store, read: Read, shard: TokenShard) -> Read:
    """The facts of a shard's documents, where *read* gives those that it has. (slice, row) -> (file, row)"""

    def of(name: str, first: int, stop: int) -> UInt64s:
        if name == REASON:
            left_out = root.read(f"{shard_key(shard.key)}/{REASONS}") if shard.left_out else b""
            return np.append(np.zeros(shard.written, np.uint64), np.frombuffer(left_out, "<u8"))[first:stop]
        if name not in (FILE, ROW):
            return read(KEY if name == SPLIT_KEY and name not in shard.facts else name, first, stop)
        file, row = places_of(read(ROW, first, stop), shard.file_starts)
        return file if name == FILE else row

    return of


def read_fact(array: StoredArray, numbers: int, first: int, stop: int) -> UInt64s:
    """A fact of documents ``first:stop`` from an array that has so many *numbers* of each: uint64[m] or uint64[m, numbers]."""
    found = array.read(numbers * first, numbers * stop)
    return found if numbers == 1 else found.reshape(-1, numbers)


def places_of(rows: UInt64s, file_starts: UInt64s) -> tuple[UInt64s, UInt64s]:
    """The files of rows of a slice, relative to its first one, and their rows there: uint64[n] each."""
    file = np.searchsorted(file_starts, rows, "right") - 1 if len(file_starts) > 1 else np.zeros(len(rows), np.int64)
    return file.astype(np.uint64), rows - file_starts[file]
