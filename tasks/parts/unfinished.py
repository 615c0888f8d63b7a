"""Documents whose tokens are in the unfinished version that they were made for, and nowhere else.

Such a shard has one object of its own: the entries of its documents. Its receipt says where the tokens are, a range in each
split, with a digest of each. An object of the version is below ``_cache/unfinished`` until it is complete; then it moves to its
place.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import LOSS_MASK
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import BLAKE3, NO_OBJECT, Store, StoredObject
from tasks.config import DocumentPolicy
from tasks.models import Split, TokenShard, UnfinishedLocation
from tasks.output.paths import shard_key, unfinished_key, version_key
from tasks.parts.documents import Documents, TokenArrays, shard_places
from tasks.parts.runs import runs_in_memory
from tasks.parts.stored import shard_columns

STREAMED: LayoutName = "mmap"
"""The layout that tokens are streamed into: a part of a raw object can be read before it is complete."""
CHECKSUM_BYTES = 4
"""After each chunk of an object."""
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


def may_stream(root: Store, layout: LayoutName, documents: DocumentPolicy, *, here: bool) -> bool:
    """Whether tokens go straight into the version, so that slices have no shards of their own. Not where

    - other machines tokenize, rather than this one (*here*);
    - the output is remote, or the layout compresses its objects: a killed build would lose what an object has before it is
    complete;
    - documents are compared with each other: the next build may need one that this version leaves out.
    """
    return here and root.is_local and layout == STREAMED and not documents.compares


class ShardEntries(NamedTuple):
    """Entries of the documents of a shard: keys, rows within the slice, lengths in tokens, each uint64[n]; the number
    of each one's split in EVERY_SPLIT, [n]; and split keys, uint64[n], if it has them.
    """

    key: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    split: npt.NDArray[np.integer[Any] | np.bool_]
    split_key: npt.NDArray[np.uint64] | None = None


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


def unfinished_documents(root: Store, shard: TokenShard, location: UnfinishedLocation) -> Documents:
    """The documents of a streamed shard."""
    entries = read_entries(root, shard)
    lengths, begins = entries.length.astype(np.int64), np.empty(len(entries.length), np.int64)
    for number in range(len(location.splits)):
        mine = entries.split == number
        begins[mine] = np.cumsum(lengths[mine]) - lengths[mine]

    def arrays(split: Split) -> TokenArrays:
        tokens = partial(runs_in_memory, list(unfinished_items(root, location, split, "encoded_tokens")))
        masks = list(unfinished_items(root, location, split, LOSS_MASK)) if shard.masked else None
        return TokenArrays(tokens, masks if masks is None else partial(runs_in_memory, masks))

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


def unfinished_items(root: Store, location: UnfinishedLocation, split: Split, name: str) -> Iterator[npt.NDArray[Any]]:
    """The items of a slice in the array *name* of a split, as consecutive arrays, mapped from their objects. ValueError where an
    object is missing, or ends before them.
    """
    tokens, layout = location.of(split), LAYOUTS[STREAMED]
    spec = layout.loss_mask if name == LOSS_MASK else layout.encoded_tokens
    length, chunk, size = spec.object_length, spec.chunk_length, spec.numpy_dtype.itemsize
    for n in range(tokens.first // length, -(-tokens.stop // length)) if tokens.count else ():
        begin, end = max(tokens.first - n * length, 0), min(tokens.stop - n * length, length)
        data = _mapped(root, location, split, name, n)
        if len(data) < end * size + CHECKSUM_BYTES * ((end - 1) // chunk):
            raise ValueError(f"object {n} of {split} of the unfinished version {location.version} ends before token {end:,}")
        for c in range(begin // chunk, (end - 1) // chunk + 1):
            first, stop = max(begin, c * chunk), min(end, (c + 1) * chunk)
            # Item j of chunk c begins at byte j * size + c * CHECKSUM_BYTES of the file.
            yield np.frombuffer(data, spec.numpy_dtype, stop - first, first * size + c * CHECKSUM_BYTES)


def _mapped(root: Store, location: UnfinishedLocation, split: str, name: str, n: int) -> memoryview:
    """An object of the version, whole or not. It moves to its place when it is complete, never back."""
    whole = f"{version_key(location.version)}/{split}/{name}/{LAYOUTS[STREAMED].encoded_tokens.object_key(n)}"
    for key in (unfinished_key(location.attempt, split, name, n), whole):
        try:
            with open_plain(root.path(key)) as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except NO_OBJECT:
            continue
    raise ValueError(f"object {n} of {split} of the unfinished version {location.version} is gone")


def check_unfinished(root: Store, location: UnfinishedLocation) -> None:
    """ValueError where the tokens of a streamed shard, or their mask, are not what was written."""
    for split in location.splits:
        wanted = location.of(split)
        for name, recorded in (
            ("encoded_tokens", wanted.digest),
            *([(LOSS_MASK, wanted.mask_digest)] if wanted.mask_digest else []),
        ):
            digest = blake3()
            for part in unfinished_items(root, location, split, name):
                digest.update(part.view(np.uint8).data)
            if f"{BLAKE3}{digest.hexdigest()}" != recorded:
                raise ValueError(f"its tokens in {split} of the unfinished version {location.version} are not what was written")
