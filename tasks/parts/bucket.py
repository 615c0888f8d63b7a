"""Documents of a bucket of a shuffled split, in the order of their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.columns import Columns, joined
from flat_tokens.columns import Part as ColumnsPart
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.documents import Documents, Int64s, Places, Runs, TokenArrays
from tasks.parts.input import BLOCK_TOKENS
from tasks.parts.part import BucketPart

GATHERED_TOKENS = 1 << 17
"""Tokens put into their places at a time, few enough for the processor's cache."""
OPEN_PARTS = 1 << 14
SCATTERED_COLUMNS = f"{DOCUMENTS}/columns.parquet"
SCATTERED_ARRAYS = ("place", "key", "file", "row", "bucket")
"""The arrays of a stored part, besides its tokens: facts of its documents in the order of their places; where each bucket's
begin.
"""


def gather(tokens: npt.NDArray[Any], begins: Int64s, lengths: Int64s) -> Iterator[tuple[npt.NDArray[Any], Int64s]]:
    """Consecutive runs of *tokens*, in any order, in blocks of whole runs, each with the lengths of its runs."""
    ends = np.cumsum(lengths)
    first, done = 0, 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(ends, done + GATHERED_TOKENS, "right")))
        mine, here = lengths[first:last], begins[first:last]
        if last == first + 1:
            yield tokens[here[0] : here[0] + mine[0]], mine
        else:
            # place in the gathered block -> place in tokens: each run's begin, and on from there
            index = np.arange(int(ends[last - 1]) - done)
            index += np.repeat(here - (ends[first:last] - mine - done), mine)
            yield tokens[index], mine
        first, done = last, int(ends[last - 1])


@functools.lru_cache(OPEN_PARTS)
def _open_scattered(path: str) -> tuple[FlatTokens, dict[str, StoredArray]]:
    """Open a stored part once: the staging has a new name in each attempt, so what is stored there never changes."""
    store = Store.at(path, read_once=True)
    return open_split(store), {name: open_array(store / f"{DOCUMENTS}/{name}", "uint64") for name in SCATTERED_ARRAYS}


class _Share(NamedTuple):
    """A bucket's documents in one stored part: ``first:last``, and where each starts."""

    tokens: FlatTokens
    arrays: dict[str, StoredArray]
    first: int
    last: int
    starts: Int64s


def _shares_of(bucket: BucketPart, staging: str) -> Iterator[_Share]:
    for number in range(bucket.stored_parts):
        tokens, arrays = _open_scattered(f"{staging}/{bucket.shuffling.directory}/{number}")
        first, last = map(int, arrays["bucket"].read(bucket.number, bucket.number + 2))
        if first < last:
            yield _Share(tokens, arrays, first, last, tokens.seq_starts.read(first, last + 1).astype(np.int64))


def bucket_documents(bucket: BucketPart, target: Target) -> Documents:
    """A bucket's documents in the order of their places. Their tokens are read into memory once, when they are asked for."""
    shares = list(_shares_of(bucket, target.workspace.staging))
    none = np.empty(0, np.uint64)

    def array(name: str) -> npt.NDArray[np.uint64]:
        return np.concatenate([*(share.arrays[name].read(share.first, share.last) for share in shares), none])

    lengths = np.concatenate([*(np.diff(share.starts) for share in shares), np.empty(0, np.int64)])
    order = np.argsort(array("place"))
    begins = np.cumsum(lengths) - lengths
    file, row = (array(name)[order] for name in ("file", "row"))

    def columns(wanted: Int64s) -> pa.RecordBatch:
        kinds, found = bucket.shuffling.kinds, []
        for share in shares:
            kept = Columns(share.tokens.store, kinds, (ColumnsPart(SCATTERED_COLUMNS, 0, share.tokens.seq_count),))
            found.append(kept.take(np.arange(share.first, share.last), list(kinds)))
        return joined(found).take(pa.array(order[wanted]))

    masked = any(share.tokens.loss_mask is not None for share in shares)
    tokens = _gathered(lambda: _read(shares, bucket.token_count, lambda split: split.encoded_tokens))
    masks = _gathered(lambda: _read(shares, bucket.token_count, lambda split: split.loss_mask)) if masked else None
    return Documents(
        array("key")[order],
        np.zeros(len(order), np.int8),
        begins[order],
        lengths[order],
        (TokenArrays(tokens, masks),),
        lambda: Places(file, row),
        columns,
    )


def _gathered(read: Callable[[], npt.NDArray[Any]]) -> Runs:
    """Runs, in any order, of an array that is read when they are asked for."""

    def runs(begins: Int64s, ends: Int64s) -> Iterator[npt.NDArray[Any]]:
        return (block for block, _ in gather(read(), begins, ends - begins))

    return runs


def _read(shares: list[_Share], count: int, array_of: Callable[[FlatTokens], StoredArray | None]) -> npt.NDArray[Any]:
    """The items of all shares, in their order: dtype[count]. Those of a part without the array are ones."""
    arrays = [array_of(share.tokens) for share in shares]
    dtype = next((array.numpy_dtype for array in arrays if array is not None), np.dtype(np.uint8))
    items, at = np.ones(count, dtype), 0
    for share, array in zip(shares, arrays, strict=True):
        first, last = int(share.starts[0]), int(share.starts[-1])
        for start in range(first, last, BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, last)
            if array is not None:
                array.read(start, stop, items[at : at + stop - start])
            at += stop - start
    return items
