"""Token shards whose tokens stand in the unfinished version that they were made for, and nowhere else.

Such a shard has one object of its own: the entries of its documents. Its receipt tells where the tokens are, a range in each
split, with a digest of each. An object of the version is below ``_cache/unfinished`` until it is whole; then it goes to its
place.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.batch import TokenBatch
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.local import open_plain
from flat_tokens.stores.store import BLAKE3, NO_OBJECT, Store, StoredObject
from tasks.models import TokenShard, Within
from tasks.output.paths import shard_key, unfinished_key, version_key

STREAMED: LayoutName = "mmap"
"""The layout that tokens go straight into: a part of a raw object can be read before it is whole."""
ENTRIES = "entries"
"""Below a streamed shard: of its documents all keys, all rows, all lengths, and whether each is in validation."""
COLUMNS = (("key", np.dtype("<u8")), ("row", np.dtype("<u8")), ("length", np.dtype("<u8")), ("in_validation", np.dtype("?")))


class Entries(NamedTuple):
    """Of the documents of a shard: keys, rows within the slice, lengths in tokens, each uint64[n]; and which are in validation,
    bool[n].
    """

    key: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    in_validation: npt.NDArray[np.bool_]


class BrokenStreamError(Exception):
    """Another slice has failed, whose tokens stand in the same objects: this one has to be stored apart."""


class Stream(Protocol):
    """Takes the tokens of a slice to their places in a version."""

    def append(self, batch: TokenBatch, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Take the next documents, with their keys, uint64[n]. Return which of them go to validation: bool[n]. BrokenStreamError
        where another slice has failed.
        """
        ...

    def end(self) -> Within:
        """Wait until all tokens would survive the end of this process. Return where they are."""
        ...


class Streams(Protocol):
    """Gives the stream of a slice once those before it have theirs behind them; None where the slice has to be stored apart."""

    def __call__(self) -> AbstractContextManager[Stream | None]: ...


def write_entries(store: Store, parts: Sequence[Entries]) -> StoredObject:
    """Write the entries of a streamed shard, from some at a time."""
    with store.create(ENTRIES) as entries:
        for name, dtype in COLUMNS:
            for part in parts:
                entries.write(np.ascontiguousarray(getattr(part, name), dtype))
    return entries.stored


def read_entries(root: Store, shard: TokenShard) -> Entries:
    """The entries of a streamed shard. ValueError where they are not as many as its receipt says."""
    key = f"{shard_key(shard.key)}/{ENTRIES}"
    data, begin = root.read(key), 0
    if len(data) != shard.written * sum(dtype.itemsize for _, dtype in COLUMNS):
        raise ValueError(f"{root.path(key)}: has {len(data)} bytes, which are not those of {shard.written} documents")
    found: list[npt.NDArray[Any]] = []
    for _, dtype in COLUMNS:
        found.append(np.frombuffer(data, dtype, shard.written, begin))
        begin += shard.written * dtype.itemsize
    return Entries(*found)


def tokens_within(root: Store, within: Within, split: str) -> Iterator[npt.NDArray[np.uint32]]:
    """The tokens of a slice that are in a split, in parts one behind the other, mapped from where they lie. ValueError where an
    object is missing, or ends before them.
    """
    tokens, spec = within.of(split), LAYOUTS[STREAMED].encoded_tokens
    length, chunk = spec.object_length, spec.chunk_length
    for n in range(tokens.first // length, -(-tokens.stop // length)) if tokens.count else ():
        begin, end = max(tokens.first - n * length, 0), min(tokens.stop - n * length, length)
        words = _words_of(root, within, split, n)
        if len(words) < end + (end - 1) // chunk:
            raise ValueError(f"object {n} of {split} of the unfinished version {within.version} ends before token {end:,}")
        # Item j of chunk c is word j + c of the file: a checksum follows each chunk.
        for c in range(begin // chunk, (end - 1) // chunk + 1):
            yield words[max(begin, c * chunk) + c : min(end, (c + 1) * chunk) + c]


def _words_of(root: Store, within: Within, split: str, n: int) -> npt.NDArray[np.uint32]:
    """An object of the version, whole or not. It goes to its place when it is whole, never back."""
    whole = f"{version_key(within.version)}/{split}/encoded_tokens/{LAYOUTS[STREAMED].encoded_tokens.object_key(n)}"
    for key in (unfinished_key(within.attempt, split, n), whole):
        try:
            with open_plain(root.path(key)) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, "<u4", len(mapped) // 4)
        except NO_OBJECT:
            continue
    raise ValueError(f"object {n} of {split} of the unfinished version {within.version} is gone")


def check_within(root: Store, within: Within) -> None:
    """ValueError where the tokens of a streamed shard are not what was written."""
    for split in SPLITS:
        digest = blake3()
        for part in tokens_within(root, within, split):
            digest.update(part.view(np.uint8).data)
        if f"{BLAKE3}{digest.hexdigest()}" != within.of(split).digest:
            raise ValueError(f"its tokens in {split} of the unfinished version {within.version} are not what was written")
