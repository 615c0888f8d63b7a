"""Documents whose tokens are in the unfinished version that they were made for, and nowhere else.

Such a shard has an object of its own with the entries of its documents. Its receipt says where the tokens are, a range in each
split, with a digest of each. An object of the version is below ``_cache/unfinished`` until it is complete; then it moves to its
place. Its chunks are where the whole object has them, one after another. A compressed chunk is there when it is complete:
until then, what a slice has of it is in one more object of its shard, the tails of its tokens. Documents that the version leaves
out as duplicates have their tokens in an array of the shard: another version may need them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec
from flat_tokens.arrays.opening import open_array
from flat_tokens.batch import TokenBatch
from flat_tokens.manifest import LOSS_MASK
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import BLAKE3, NO_OBJECT, Store, StoredObject
from flat_tokens.writer import ArrayWriter
from tasks.config import DocumentPolicy
from tasks.models import DIGEST, TEXT_BYTES, Split, TokenShard, UnfinishedLocation
from tasks.output.paths import shard_key, unfinished_key, version_key
from tasks.parts.documents import Documents, Runs, TokenArrays, shard_places, stored_runs
from tasks.parts.runs import runs_of_parts
from tasks.parts.stored import SHARD_LAYOUT, shard_columns

CHECKSUM_BYTES = 4
"""After each raw chunk of an object."""
ENTRIES = "entries"
"""Below a streamed shard: all keys of its documents, all rows, all lengths, and the number of each one's split; then all split
keys, where it has them; then all digests of texts and the lengths of these, where duplicates are dropped."""
COLUMNS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("key", np.dtype("<u8")),
    ("row", np.dtype("<u8")),
    ("length", np.dtype("<u8")),
    ("split", np.dtype("u1")),
)
SPLIT_KEYS = ("split_key", np.dtype("<u8"))
TEXTS = ((DIGEST, np.dtype(("<u8", 2))), (TEXT_BYTES, np.dtype("<u8")))
IN_NO_SPLIT = 255
"""In the place of a split's number, for a document that the version leaves out."""
TAILS = "tails"
"""Below a streamed shard: the tail of its tokens in each split, as uint32; then their loss masks, where it has them."""
LEFT_OUT = "left_out"
"""Below a streamed shard: the arrays of the documents that the version leaves out, raw as in any shard."""


def may_stream(root: Store, documents: DocumentPolicy, *, here: bool) -> bool:
    """Whether tokens go straight into the version, so that slices have no shards of their own. Not where

    - other machines tokenize, rather than this one (*here*);
    - the output is remote: a killed build would lose what an object has before it is complete;
    - near-duplicates are looked for: which documents stay is known when all have been read.
    """
    return here and root.is_local and documents.near_duplicates is None


class ShardEntries(NamedTuple):
    """Entries of the documents of a shard: keys, rows within the slice, lengths in tokens, each uint64[n]; the number of each
    one's split in EVERY_SPLIT or IN_NO_SPLIT, [n]; split keys, uint64[n], if it has them; where duplicates are dropped, the
    digests of texts, uint64[n, 2], and their lengths, uint64[n].
    """

    key: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    split: npt.NDArray[np.integer[Any] | np.bool_]
    split_key: npt.NDArray[np.uint64] | None = None
    digest: npt.NDArray[np.uint64] | None = None
    text_bytes: npt.NDArray[np.uint64] | None = None


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


def _columns(has_split_keys: bool, has_digests: bool) -> list[tuple[str, np.dtype[Any]]]:
    return [*COLUMNS, *([SPLIT_KEYS] if has_split_keys else []), *(TEXTS if has_digests else [])]


def write_entries(store: Store, parts: Sequence[ShardEntries]) -> StoredObject:
    """Write the entries of a streamed shard, from some at a time."""
    with store.create(ENTRIES) as entries:
        for name, dtype in _columns(
            *(any(getattr(part, name) is not None for part in parts) for name in (SPLIT_KEYS[0], DIGEST))
        ):
            for part in parts:
                entries.write(np.ascontiguousarray(getattr(part, name), dtype.base))
    return entries.stored


def read_entries(root: Store, shard: TokenShard) -> ShardEntries:
    """The entries of a streamed shard. ValueError where they are not as many as its receipt says."""
    key = f"{shard_key(shard.key)}/{ENTRIES}"
    data, begin = root.read(key), 0
    columns = _columns(shard.has_split_keys, DIGEST in shard.texts)
    if len(data) != shard.written * sum(dtype.itemsize for _, dtype in columns):
        raise ValueError(f"{root.path(key)}: has {len(data)} bytes, which are not those of {shard.written} documents")
    found: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in columns:
        found[name] = np.frombuffer(data, dtype, shard.written, begin)
        begin += shard.written * dtype.itemsize
    return ShardEntries(**found)


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
    entries, splits = read_entries(root, shard), len(location.splits)
    array = np.where(entries.split == IN_NO_SPLIT, splits, entries.split).astype(np.int8)  # a number in EVERY_SPLIT, or after it
    lengths, begins = entries.length.astype(np.int64), np.empty(len(entries.length), np.int64)
    for number in range(splits + 1):
        mine = array == number
        begins[mine] = np.cumsum(lengths[mine]) - lengths[mine]

    def arrays(split: Split) -> TokenArrays:
        tokens = _runs(unfinished_items(root, shard, split, "encoded_tokens"))
        return TokenArrays(tokens, _runs(unfinished_items(root, shard, split, LOSS_MASK)) if shard.masked else None)

    left_out = [_left_out(root, shard)] if (array == splits).any() else []
    return Documents(
        entries.key,
        array,
        begins,
        lengths,
        (*map(arrays, location.splits), *left_out),
        lambda: shard_places(entries.row, shard.file_starts),
        lambda wanted: shard_columns(root, shard, wanted),
        entries.split_key,
    )


class LeftOutWriter:
    """Writes the tokens of the documents that the version leaves out below a streamed shard's *store*, if there are any, within a
    block. *masked*: with their loss mask.
    """

    def __init__(self, store: Store, masked: bool) -> None:
        names = {"encoded_tokens": SHARD_LAYOUT.encoded_tokens, **({LOSS_MASK: SHARD_LAYOUT.loss_mask} if masked else {})}
        self._arrays = {name: ArrayWriter(store, f"{LEFT_OUT}/{name}", spec) for name, spec in names.items()}
        self._has_any = False
        self.objects: list[StoredObject] = []

    def append(self, batch: TokenBatch, those: npt.NDArray[np.bool_]) -> None:
        """Append *those* documents of a batch, bool[n]."""
        if not those.any():
            return
        self._has_any = True
        tokens = np.repeat(those, np.diff(batch.seq_starts).astype(np.int64))
        self._arrays["encoded_tokens"].append(batch.encoded_tokens[tokens])
        if LOSS_MASK in self._arrays:
            self._arrays[LOSS_MASK].append(
                np.ones(int(tokens.sum()), np.uint8) if batch.loss_mask is None else batch.loss_mask[tokens]
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for writer in self._arrays.values() if self._has_any else ():
            writer.__exit__(kind, error, trace)
            self.objects += writer.objects


def _left_out(root: Store, shard: TokenShard) -> TokenArrays:
    """The arrays of the documents that the version leaves out."""
    store = root / shard_key(shard.key) / LEFT_OUT
    mask = open_array(store / LOSS_MASK, "uint8") if shard.masked else None
    return TokenArrays(stored_runs(open_array(store / "encoded_tokens", "uint32")), None if mask is None else stored_runs(mask))


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
