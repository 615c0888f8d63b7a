"""Documents whose tokens are in the unfinished version that they were made for, and nowhere else.

Such a shard has an object of its own with the entries of its documents. Its receipt says where the tokens are, a range in each
split, with a digest of each. An object of the version is below ``_cache/unfinished`` until it is complete; then it moves to its
place. Its chunks are where the whole object has them, one after another. A compressed chunk is there when it is complete:
until then, what a slice has of it is in one more object of its shard, the tails of its tokens.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.annotations import AnyArray, UInt64s
from flat_tokens.arrays.layouts import ArraySpec
from flat_tokens.batch import TOKEN_ARRAYS, TOKENS, TokenArrays
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import BLAKE3, NO_OBJECT, Store, StoredObject
from tasks.config import DocumentPolicy
from tasks.models import ALL_SPLITS, Split, TokenShard, UnfinishedLocation
from tasks.output.paths import home_key, shard_key, unfinished_key
from tasks.output.target import layout_of
from tasks.parts.documents import Documents, Runs, TokenRuns, of_shard, runs_of_parts
from tasks.parts.stored import shard_columns
from tasks.rows import fact

CHECKSUM_BYTES = 4
"""After each raw chunk of an object."""
ENTRIES = "entries"
"""Below a streamed shard: the rows of its documents, one fact after another by their names, with two more: their lengths in
tokens, and the number of each one's split in ALL_SPLITS. All are uint64.
"""
LENGTH, SPLIT = "length", "split"
TAILS = "tails"
"""Below a streamed shard: of each of its token arrays the tail in each split."""


def may_stream(root: Store, documents: DocumentPolicy, *, here: bool) -> bool:
    """Whether tokens go straight into the version, so that slices have no shards of their own. Not where

    - other machines tokenize, rather than this one (*here*);
    - the output is remote: a killed build would lose what an object has before it is complete;
    - near-duplicates are looked for: which documents stay is known when all have been read.
    """
    return here and root.is_local and documents.near_duplicates is None


Tail = TokenArrays
"""Tokens in a compressed chunk that is incomplete, and so not in the version yet: the items of their token arrays."""


def last_of(arrays: TokenArrays, count: int) -> Tail:
    """The last *count* items of token arrays, or all."""
    return {name: items[max(len(items) - count, 0) :] for name, items in arrays.items()}


def followed_by(tail: Tail, arrays: TokenArrays, count: int) -> Tail:
    """The last *count* items, once more items have followed."""
    if len(arrays[TOKENS]) >= count:
        return last_of(arrays, count)
    return last_of({name: np.concatenate([items, arrays[name]]) for name, items in tail.items()}, count)


def write_entries(store: Store, parts: Sequence[pa.RecordBatch]) -> StoredObject:
    """Write the rows of a streamed shard, from some at a time."""
    with store.create(ENTRIES) as entries:
        for name in sorted(parts[0].schema.names) if parts else ():
            for part in parts:
                if part.num_rows:  # numpy has no view of the bytes of no rows
                    entries.write(np.ascontiguousarray(fact(part, name), "<u8"))
    return entries.stored


def read_entries(root: Store, shard: TokenShard) -> dict[str, UInt64s]:
    """The rows of a streamed shard: uint64[n] or uint64[n, numbers] by fact. ValueError where they are not as many as its receipt
    says.
    """
    key, facts = f"{shard_key(shard.key)}/{ENTRIES}", {**shard.facts, LENGTH: 1, SPLIT: 1}
    data, begin = np.frombuffer(root.read(key), np.uint8), 0
    if len(data) != 8 * shard.seq_count * sum(facts.values()):
        raise ValueError(f"{root.path(key)}: has {len(data)} bytes, which are not those of {shard.seq_count} documents")
    found = {}
    for name, numbers in sorted(facts.items()):
        values = data.view("<u8")[begin : begin + numbers * shard.seq_count]
        found[name] = values if numbers == 1 else values.reshape(-1, numbers)
        begin += len(values)
    return found


def write_tails(store: Store, tails: Sequence[Tail]) -> StoredObject:
    """Write the tails of a streamed shard."""
    with store.create(TAILS) as written:
        for name in tails[0]:
            for tail in tails:
                written.write(np.ascontiguousarray(tail[name]))
    return written.stored


def _read_tail(root: Store, shard: TokenShard, split: Split, name: str) -> AnyArray:
    """The tail of the array *name* in a split. ValueError where there are not as many tokens as the receipt says."""
    assert shard.unfinished is not None
    counts = [shard.unfinished.of(one).tail for one in shard.unfinished.splits]
    at, names = sum(counts[: shard.unfinished.splits.index(split)]), shard.token_arrays
    sizes = {of: np.dtype(TOKEN_ARRAYS[of].dtype).itemsize for of in names}
    key = f"{shard_key(shard.key)}/{TAILS}"
    data = root.read(key) if any(counts) else b""
    if len(data) != sum(counts) * sum(sizes.values()):
        raise ValueError(f"{root.path(key)}: has {len(data)} bytes, which are not those of {sum(counts)} tokens")
    before = sum(counts) * sum(sizes[of] for of in names[: names.index(name)])
    count = shard.unfinished.of(split).tail
    return np.frombuffer(data, TOKEN_ARRAYS[name].dtype, count, before + at * sizes[name])


def unfinished_documents(root: Store, shard: TokenShard, location: UnfinishedLocation) -> Documents:
    """The documents of a streamed shard."""
    entries = read_entries(root, shard)
    lengths, (begins, array) = entries[LENGTH].astype(np.int64), np.zeros((2, shard.seq_count), np.int64)
    for number, split in enumerate(location.splits):
        mine = entries[SPLIT] == ALL_SPLITS.index(split)
        begins[mine], array[mine] = np.cumsum(lengths[mine]) - lengths[mine], number

    def arrays(split: Split) -> TokenRuns:
        return {name: _runs(unfinished_items(root, shard, split, name)) for name in shard.token_arrays}

    read = of_shard(root, lambda name, first, stop: entries[name][first:stop], shard)
    columns = partial(shard_columns, root, shard)
    return Documents(array.astype(np.int8), begins, lengths, (*map(arrays, location.splits),), read, columns)


class Items(NamedTuple):
    """Consecutive items of an array: how many there are, and how they are read."""

    length: int
    read: Callable[[], AnyArray]


def _runs(items: Iterable[Items]) -> Runs:
    parts = list(items)
    return partial(runs_of_parts, [part.length for part in parts], lambda i: parts[i].read())


def unfinished_items(root: Store, shard: TokenShard, split: Split, name: str) -> Iterator[Items]:
    """The items of a slice in the array *name* of a split, in order, from their mapped objects. ValueError where an object is
    missing, or ends before them.
    """
    location = shard.unfinished
    assert location is not None
    layout, tokens = layout_of(location.layout, split), location.of(split)
    spec = layout.token_array(name)
    length, chunk, stop = spec.object_length, spec.chunk_length, tokens.stop - tokens.tail
    for n in range(tokens.first // length, -(-stop // length)) if tokens.first < stop else ():
        begin, end = max(tokens.first - n * length, 0), min(stop - n * length, length)
        label, data = (
            f"object {n} of {split} of the unfinished version {location.version}",
            _mapped(root, location, split, name, n),
        )
        try:
            bounds = _chunk_bounds(spec, data, -(-end // chunk), end)
        except ValueError as error:
            raise ValueError(f"{label} ends before token {end:,}") from error
        for c in range(begin // chunk, -(-end // chunk)):
            first, last = max(begin - c * chunk, 0), min(end - c * chunk, chunk)
            yield Items(last - first, partial(_items, spec, data[bounds[c] : bounds[c + 1]], first, last, label))
    if tokens.tail:
        yield Items(tokens.tail, lambda: _read_tail(root, shard, split, name))


def _chunk_bounds(spec: ArraySpec, data: memoryview, count: int, end: int) -> list[int]:
    """Where each of the first *count* chunks of an object begins, and where the last one ends; that one has items up to *end*. A
    compressed chunk says how long it is. ValueError where the object is shorter.
    """
    if spec.is_compressed:
        bounds = [0]
        for _ in range(count):
            bounds.append(bounds[-1] + spec.chunk_size(data[bounds[-1] :]))
        return bounds
    # Item j of chunk c begins at byte j * size + c * CHECKSUM_BYTES of the file.
    size = spec.numpy_dtype.itemsize
    stop = end * size + CHECKSUM_BYTES * (count - 1)
    if len(data) < stop:
        raise ValueError("it is cut off")
    return [*range(0, stop, spec.chunk_length * size + CHECKSUM_BYTES), stop]


def _items(spec: ArraySpec, stored: memoryview, first: int, stop: int, label: str) -> AnyArray:
    """Items ``first:stop`` of a chunk. ValueError, naming its object, where it is damaged."""
    if spec.is_compressed:
        try:
            return spec.decode_chunk(stored)[first:stop]
        except ValueError as error:
            raise ValueError(f"a chunk of {label} {error}") from error
    return np.frombuffer(stored, spec.numpy_dtype, stop - first, first * spec.numpy_dtype.itemsize)


def _mapped(root: Store, location: UnfinishedLocation, split: Split, name: str, n: int) -> memoryview:
    """An object of the version, whole or not. It moves to its place when it is complete, never back."""
    object_key = layout_of(location.layout, split).encoded_tokens.object_key(n)
    whole = f"{home_key(location.version, split)}/{split}/{name}/{object_key}"
    for key in (unfinished_key(location.attempt, split, name, n), whole):
        try:
            with open_plain(root.path(key)) as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except NO_OBJECT:
            continue
    raise ValueError(f"object {n} of {split} of the unfinished version {location.version} is gone")


def check_unfinished(root: Store, shard: TokenShard) -> None:
    """ValueError where the token arrays of a streamed shard are not what was written."""
    location = shard.unfinished
    assert location is not None
    for split in location.splits:
        for name in shard.token_arrays:
            digest = blake3()
            for items in unfinished_items(root, shard, split, name):
                digest.update(items.read().view(np.uint8).data)
            if f"{BLAKE3}{digest.hexdigest()}" != location.of(split).digests.get(name):
                raise ValueError(f"its {name} in {split} of the unfinished version {location.version} are not what was written")
