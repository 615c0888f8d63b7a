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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec
from flat_tokens.manifest import LOSS_MASK
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import BLAKE3, NO_OBJECT, Store, StoredObject
from tasks.config import DocumentPolicy
from tasks.models import Split, TokenShard, UnfinishedLocation
from tasks.output.paths import shard_key, unfinished_key, version_key
from tasks.parts.documents import Documents, Runs, TokenArrays, shard_places
from tasks.parts.runs import runs_of_parts
from tasks.parts.stored import shard_columns

CHECKSUM_BYTES = 4
"""After each raw chunk of an object."""
ENTRIES = "entries"
"""Below a streamed shard: all keys of its documents, all rows, all lengths, and the number of each one's split; then all split
keys, where it has them."""
COLUMNS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("key", np.dtype("<u8")),
    ("row", np.dtype("<u8")),
    ("length", np.dtype("<u8")),
    ("split", np.dtype("u1")),
)
SPLIT_KEYS = ("split_key", np.dtype("<u8"))
TAILS = "tails"
"""Below a streamed shard: the tail of its tokens in each split, as uint32; then their loss masks, where it has them."""


def may_stream(root: Store, documents: DocumentPolicy, *, here: bool) -> bool:
    """Whether tokens go straight into the version, so that slices have no shards of their own. Not where

    - other machines tokenize, rather than this one (*here*);
    - the output is remote: a killed build would lose what an object has before it is complete;
    - documents are compared with each other: the next build may need one that this version leaves out.
    """
    return here and root.is_local and not documents.compares


class ShardEntries(NamedTuple):
    """Entries of the documents of a shard: keys, rows within the slice, lengths in tokens, each uint64[n]; the number
    of each one's split in EVERY_SPLIT, [n]; and split keys, uint64[n], if it has them.
    """

    key: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    split: npt.NDArray[np.integer[Any] | np.bool_]
    split_key: npt.NDArray[np.uint64] | None = None


class Tail(NamedTuple):
    """Tokens in a compressed chunk that is incomplete, and so not in the version yet: encoded, uint32[n]; and their loss mask,
    uint8[n], if the dataset has one.
    """

    tokens: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.uint8] | None

    def last(self, count: int) -> Tail:
        """The last *count* of its tokens, or all."""
        first = max(len(self.tokens) - count, 0)
        return Tail(self.tokens[first:], None if self.mask is None else self.mask[first:])

    def followed_by(self, tokens: npt.NDArray[np.uint32], mask: npt.NDArray[np.uint8] | None, count: int) -> Tail:
        """The last *count* tokens, once these have followed."""
        if len(tokens) >= count:
            return Tail(tokens, mask).last(count)
        masks = None if mask is None or self.mask is None else np.concatenate([self.mask, mask])
        return Tail(np.concatenate([self.tokens, tokens]), masks).last(count)


def _columns(has_split_keys: bool) -> list[tuple[str, np.dtype[Any]]]:
    return [*COLUMNS, *([SPLIT_KEYS] if has_split_keys else [])]


def write_entries(store: Store, parts: Sequence[ShardEntries]) -> StoredObject:
    """Write the entries of a streamed shard, from some at a time."""
    with store.create(ENTRIES) as entries:
        for name, dtype in _columns(any(part.split_key is not None for part in parts)):
            for part in parts:
                entries.write(np.ascontiguousarray(getattr(part, name), dtype))
    return entries.stored


def read_entries(root: Store, shard: TokenShard) -> ShardEntries:
    """The entries of a streamed shard. ValueError where they are not as many as its receipt says."""
    key = f"{shard_key(shard.key)}/{ENTRIES}"
    data, begin = root.read(key), 0
    columns = _columns(shard.has_split_keys)
    if len(data) != shard.written * sum(dtype.itemsize for _, dtype in columns):
        raise ValueError(f"{root.path(key)}: has {len(data)} bytes, which are not those of {shard.written} documents")
    found: list[npt.NDArray[Any]] = []
    for _, dtype in columns:
        found.append(np.frombuffer(data, dtype, shard.written, begin))
        begin += shard.written * dtype.itemsize
    return ShardEntries(*found)


def write_tails(store: Store, tails: Sequence[Tail]) -> StoredObject:
    """Write the tails of a streamed shard."""
    with store.create(TAILS) as written:
        for tail in tails:
            written.write(np.ascontiguousarray(tail.tokens, "<u4"))
        for tail in tails:
            written.write(b"" if tail.mask is None else np.ascontiguousarray(tail.mask))
    return written.stored


def _read_tail(root: Store, shard: TokenShard, split: Split, name: str) -> npt.NDArray[Any]:
    """The tail of the array *name* in a split. ValueError where there are not as many tokens as the receipt says."""
    assert shard.unfinished is not None
    counts = [shard.unfinished.of(one).tail for one in shard.unfinished.splits]
    before, size = sum(counts[: shard.unfinished.splits.index(split)]), 4 + shard.masked
    key = f"{shard_key(shard.key)}/{TAILS}"
    data = root.read(key) if any(counts) else b""
    if len(data) != sum(counts) * size:
        raise ValueError(f"{root.path(key)}: has {len(data)} bytes, which are not those of {sum(counts)} tokens")
    count = shard.unfinished.of(split).tail
    if name == LOSS_MASK:
        return np.frombuffer(data, np.uint8, count, 4 * sum(counts) + before)
    return np.frombuffer(data, "<u4", count, 4 * before)


def unfinished_documents(root: Store, shard: TokenShard, location: UnfinishedLocation) -> Documents:
    """The documents of a streamed shard."""
    entries = read_entries(root, shard)
    lengths, begins = entries.length.astype(np.int64), np.empty(len(entries.length), np.int64)
    for number in range(len(location.splits)):
        mine = entries.split == number
        begins[mine] = np.cumsum(lengths[mine]) - lengths[mine]

    def arrays(split: Split) -> TokenArrays:
        tokens = _runs(unfinished_items(root, shard, split, "encoded_tokens"))
        return TokenArrays(tokens, _runs(unfinished_items(root, shard, split, LOSS_MASK)) if shard.masked else None)

    return Documents(
        entries.key,
        entries.split.astype(np.int8),  # a number in EVERY_SPLIT
        begins,
        lengths,
        tuple(map(arrays, location.splits)),
        lambda: shard_places(entries.row, shard.file_starts),
        lambda wanted: shard_columns(root, shard, wanted),
        entries.split_key,
    )


class Items(NamedTuple):
    """Consecutive items of an array: how many there are, and how they are read."""

    length: int
    read: Callable[[], npt.NDArray[Any]]


def _runs(items: Iterable[Items]) -> Runs:
    parts = list(items)
    return partial(runs_of_parts, [part.length for part in parts], lambda i: parts[i].read())


def unfinished_items(root: Store, shard: TokenShard, split: Split, name: str) -> Iterator[Items]:
    """The items of a slice in the array *name* of a split, in order, from their mapped objects. ValueError where an object is
    missing, or ends before them.
    """
    location = shard.unfinished
    assert location is not None
    layout, tokens = LAYOUTS[location.layout], location.of(split)
    spec = layout.loss_mask if name == LOSS_MASK else layout.encoded_tokens
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


def _items(spec: ArraySpec, stored: memoryview, first: int, stop: int, label: str) -> npt.NDArray[Any]:
    """Items ``first:stop`` of a chunk. ValueError, naming its object, where it is damaged."""
    if spec.is_compressed:
        try:
            return spec.decode_chunk(stored)[first:stop]
        except ValueError as error:
            raise ValueError(f"a chunk of {label} {error}") from error
    return np.frombuffer(stored, spec.numpy_dtype, stop - first, first * spec.numpy_dtype.itemsize)


def _mapped(root: Store, location: UnfinishedLocation, split: str, name: str, n: int) -> memoryview:
    """An object of the version, whole or not. It moves to its place when it is complete, never back."""
    object_key = LAYOUTS[location.layout].encoded_tokens.object_key(n)
    whole = f"{version_key(location.version)}/{split}/{name}/{object_key}"
    for key in (unfinished_key(location.attempt, split, name, n), whole):
        try:
            with open_plain(root.path(key)) as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except NO_OBJECT:
            continue
    raise ValueError(f"object {n} of {split} of the unfinished version {location.version} is gone")


def check_unfinished(root: Store, shard: TokenShard) -> None:
    """ValueError where the tokens of a streamed shard, or their mask, are not what was written."""
    location = shard.unfinished
    assert location is not None
    for split in location.splits:
        wanted = location.of(split)
        for name, recorded in (
            ("encoded_tokens", wanted.digest),
            *([(LOSS_MASK, wanted.mask_digest)] if wanted.mask_digest else []),
        ):
            digest = blake3()
            for items in unfinished_items(root, shard, split, name):
                digest.update(items.read().view(np.uint8).data)
            if f"{BLAKE3}{digest.hexdigest()}" != recorded:
                raise ValueError(f"its tokens in {split} of the unfinished version {location.version} are not what was written")
