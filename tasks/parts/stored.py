"""Token shards with objects of their own: small flat-tokens arrays with a key and a row for every sequence.

A request of a remote store takes tens of milliseconds and costs money, however little it reads; and a shard is read three
times: counted, then read for the tokens and for the documents of two splits. So small objects that receipts list are read whole
by one request, checked, and kept for the next reader. Kept bytes are found by their digest, which was checked when they were
read: every receipt with that digest means these bytes, even if the store changes.

The tokens of other shards are in the unfinished version that they were made for, and nowhere else. Such a shard has an object
of its own with the entries of its documents. Its receipt says where the tokens are, a range in each split, with a digest of
each. An object of the version is below ``_cache/unfinished`` until it is complete; then it moves to its place. Its chunks are
where the whole object has them, one after another. A compressed chunk is there when it is complete: until then, what a slice
has of it is in one more object of its shard, the tails of its tokens.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.annotations import AnyArray, Int64s, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, group_metadata
from flat_tokens.arrays.opening import open_array
from flat_tokens.batch import TOKEN_ARRAYS, TokenArrays
from flat_tokens.columns import Columns
from flat_tokens.manifest import split_attributes
from flat_tokens.reader import open_split
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import BLAKE3, NO_OBJECT, DigestKind, Store, StoredObject, content_digest
from tasks.config import BuildConfig
from tasks.models import ALL_SPLITS, Split, TokenShard, UnfinishedLocation
from tasks.output.paths import DOCUMENTS, home_key, shard_key, unfinished_key
from tasks.output.target import layout_of
from tasks.parts.documents import Documents, Read, of_shard, read_fact, runs_of_parts, stored_arrays
from tasks.rows import Facts, fact

SHARD_LAYOUT = LAYOUTS["mmap"]._replace(encoded_tokens=replace(LAYOUTS["mmap"].encoded_tokens, chunk_length=1 << 15))
"""Raw, in smaller chunks than a dataset, so that a split that draws few documents reads little else."""

COLUMNS = "documents/columns.parquet"
"""Below a token shard: the kept columns of its documents."""
WHOLE_BYTES = 4 << 20
"""Larger objects are read in the ranges that are asked for, and are not kept."""
KEPT_BYTES = 128 << 20
"""Small objects of some hundred shards of the usual size."""
TURNS = 64


class DigestCache:
    """Bytes by their digest, the most recently used up to *limit* bytes. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size, self._lock = limit, 0, threading.Lock()
        self._data: OrderedDict[str, bytes] = OrderedDict()

    def find(self, digest: str) -> bytes | None:
        with self._lock:
            if (data := self._data.get(digest)) is not None:
                self._data.move_to_end(digest)
            return data

    def keep(self, data: bytes, kind: DigestKind = "blake3") -> str:
        """Keep *data*. Return its digest."""
        digest = content_digest(data, kind)
        with self._lock:
            if digest not in self._data:
                self._data[digest] = data
                self._size += len(data)
            self._data.move_to_end(digest)
            while self._size > self._limit:
                self._size -= len(self._data.popitem(last=False)[1])
        return digest


_kept = DigestCache(KEPT_BYTES)
_turns = [threading.Lock() for _ in range(TURNS)]


def _begin_anew() -> None:
    """Replace the locks in a forked child: it has none of the threads that hold its parent's."""
    global _kept, _turns
    _kept, _turns = DigestCache(KEPT_BYTES), [threading.Lock() for _ in range(TURNS)]


os.register_at_fork(after_in_child=_begin_anew)


@dataclass(frozen=True)
class KnownStore(Store):
    """A remote store with known sizes and digests of some objects, by their paths. ``read_ranges`` reads small ones whole, all
    at once, and not again while they are kept. ValueError if one has changed.
    """

    known: Mapping[str, StoredObject] = field(default_factory=dict, repr=False)
    turn: int = 0
    """Threads that read the same objects take turns: the first one asks for all of them."""

    @classmethod
    def of(cls, store: Store, objects: Iterable[StoredObject], likely: Iterable[bytes] = ()) -> KnownStore:
        """The *store*, with known *objects* below it; those whose digest one of *likely* has are not read."""
        for data in likely:
            _kept.keep(data)
        known = {store.path(stored.key): stored for stored in objects}
        return cls(**vars(store), known=known, turn=hash(store.root) % TURNS)

    def read_ranges(
        self, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int | None]
    ) -> list[bytes | FileNotFoundError]:
        whole = self.fetch(keys)
        rest = [k for k, key in enumerate(keys) if key not in whole]
        asked = [keys[k] for k in rest], [starts[k] for k in rest], [stops[k] for k in rest]
        found = dict(zip(rest, super().read_ranges(*asked) if rest else [], strict=True))
        for k, key in enumerate(keys):
            if key in whole:
                data = whole[key]
                found[k] = data[starts[k] : stops[k]] if isinstance(data, bytes) else data
        return [found[k] for k in range(len(keys))]

    def fetch(self, keys: Iterable[str]) -> dict[str, bytes | FileNotFoundError]:
        """The contents of the known small objects among *keys*. Those that are not kept are read together."""
        wanted = {key: stored for key in keys if (stored := self.known.get(self.path(key))) is not None and _is_small(stored)}
        found: dict[str, bytes | FileNotFoundError]
        with _turns[self.turn]:
            found = {key: kept for key, stored in wanted.items() if (kept := _kept.find(stored.digest)) is not None}
            missing = {key: stored for key, stored in wanted.items() if key not in found}
            for (key, stored), data in zip(missing.items(), _ask(super().read_ranges, missing), strict=True):
                if isinstance(data, bytes) and _kept.keep(data, stored.kind) != stored.digest:
                    raise ValueError(f"{self.path(key)}: is not what was written. Run the build again: it is rebuilt.")
                found[key] = data
        return found


def known_below(store: Store, objects: Iterable[StoredObject]) -> Store:
    """The store, where the small ones of *objects* are read whole, each by one request, and checked. A local one as it is."""
    return store if store.is_local else KnownStore.of(store, objects)


def digest_all(store: Store, objects: Sequence[StoredObject]) -> Iterator[StoredObject]:
    """Size and digest of *objects* as they are now. The small ones of a remote store are read together, and kept."""
    small = {} if store.is_local else {stored.key: stored for stored in objects if _is_small(stored)}
    found = dict(zip(small, _ask(store.read_ranges, small), strict=True))
    for stored in objects:
        data = found.get(stored.key)
        whole = isinstance(data, bytes) and _kept.keep(data, stored.kind) == stored.digest
        yield stored if whole else store.now(stored)


def _is_small(stored: StoredObject) -> bool:
    return 0 < stored.size <= WHOLE_BYTES


def _ask(
    read_ranges: Callable[..., list[bytes | FileNotFoundError]], objects: Mapping[str, StoredObject]
) -> list[bytes | FileNotFoundError]:
    """Read objects, each with a byte more than it should have."""
    return read_ranges(list(objects), [0] * len(objects), [stored.size + 1 for stored in objects.values()]) if objects else []


def document_spec(layout: Layout) -> ArraySpec:
    """How the arrays next to the tokens are stored: one uint64 a document."""
    starts = layout.seq_starts
    return ArraySpec("uint64", "document", starts.zarr_format, starts.object_length, starts.chunk_length, 1)


def open_facts(store: Store, facts: Facts | None = None) -> Read:
    """The facts of documents, from the arrays next to their tokens, opened as they are asked for. *facts*: their schema; None:
    each is one number a document.
    """
    array = functools.cache(lambda name: open_array(store / f"{DOCUMENTS}/{name}", "uint64"))
    return lambda name, first, stop: read_fact(array(name), facts[name] if facts else 1, first, stop)


def _metadata_of(shard: TokenShard) -> Iterator[bytes]:
    """The metadata that this code writes for a shard."""
    layout = SHARD_LAYOUT
    for name in shard.token_arrays:
        yield from layout.token_array(name).metadata(shard.token_count).values()
    yield from layout.seq_starts.metadata(shard.seq_count + 1).values()
    for numbers in {*shard.facts.values()}:
        yield from document_spec(layout).metadata(numbers * shard.seq_count).values()
    yield from group_metadata(layout.zarr_format, split_attributes(shard.max_token_id, shard.token_arrays)).values()


def stored_documents(root: Store, shard: TokenShard, *names: str) -> Documents:
    """The documents of a shard with objects of its own. *names*: facts and arrays that will be read. Of a remote shard their
    small objects are read now.
    """
    store = root / shard_key(shard.key)
    if not root.is_local:
        store = known = KnownStore.of(store, shard.objects, _metadata_of(shard))
        wanted = tuple(f"{DOCUMENTS}/{name}/" if name in shard.facts else f"{name}/" for name in ("seq_starts", *names))
        known.fetch(stored.key for stored in shard.objects if stored.key.startswith(wanted))
    tokens = open_split(store)
    starts = tokens.seq_starts.read(0, tokens.seq_count + 1).astype(np.int64)
    read, columns = of_shard(root, open_facts(store, shard.facts), shard), functools.partial(shard_columns, root, shard)
    array = np.zeros(len(starts) - 1, np.int8)
    return Documents(array, starts[:-1], np.diff(starts), (stored_arrays(tokens),), read, columns)


def shard_columns(root: Store, shard: TokenShard, wanted: Int64s) -> pa.RecordBatch:
    """The kept columns of documents *wanted*, int64[m], of a shard with objects of its own."""
    kept = Columns.in_one(root / shard_key(shard.key), shard.columns, COLUMNS, shard.seq_count)
    return kept.take(wanted, list(shard.columns))


CHECKSUM_BYTES = 4
"""After each raw chunk of an object."""
ENTRIES = "entries"
"""Below a streamed shard: the rows of its documents, one fact after another by their names, with two more: their lengths in
tokens, and the number of each one's split in ALL_SPLITS. All are uint64.
"""
LENGTH, SPLIT = "length", "split"
TAILS = "tails"
"""Below a streamed shard: of each of its token arrays the tail in each split."""


def may_stream(root: Store, config: BuildConfig) -> bool:
    """Whether tokens go straight into the version, if this machine tokenizes, so that slices have no shards of their own. Not if

    - the output is remote: a killed build would lose what an object has before it is complete;
    - near-duplicates are left out, or go to one split: where documents go is known when all have been read.
    """
    return root.is_local and not config.waits_for_clusters


Tail = TokenArrays
"""Tokens in a compressed chunk that is incomplete, and so not in the version yet: the items of their token arrays."""


def last_of(arrays: TokenArrays, count: int) -> Tail:
    """The last *count* items of token arrays, or all."""
    return {name: items[max(len(items) - count, 0) :] for name, items in arrays.items()}


def write_entries(store: Store, parts: Sequence[pa.RecordBatch]) -> StoredObject:
    """Write the rows of a streamed shard, from some at a time."""
    with store.create(ENTRIES) as entries:
        for name in sorted(parts[0].schema.names) if parts else ():
            for part in parts:
                if part.num_rows:  # numpy has no view of the bytes of no rows
                    entries.write(np.ascontiguousarray(fact(part, name), "<u8"))
    return entries.stored


def read_entries(root: Store, shard: TokenShard) -> dict[str, UInt64s]:
    """The rows of a streamed shard: uint64[n] or uint64[n, numbers] by fact. ValueError if they are not as many as its receipt
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
    """The tail of the array *name* in a split. ValueError if there are not as many tokens as the receipt says."""
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

    arrays = ({name: partial(_runs, root, shard, split, name) for name in shard.token_arrays} for split in location.splits)
    read = of_shard(root, lambda name, first, stop: entries[name][first:stop], shard)
    columns = partial(shard_columns, root, shard)
    return Documents(array.astype(np.int8), begins, lengths, (*arrays,), read, columns)


class Items(NamedTuple):
    """Consecutive items of an array: how many there are, and how they are read."""

    length: int
    read: Callable[[], AnyArray]


def _runs(root: Store, shard: TokenShard, split: Split, name: str, begins: Int64s, ends: Int64s) -> Iterator[AnyArray]:
    """The tokens of runs. Only now are their objects mapped: to count documents, none is."""
    parts = list(unfinished_items(root, shard, split, name))
    return runs_of_parts([part.length for part in parts], lambda i: parts[i].read(), begins, ends)


def unfinished_items(root: Store, shard: TokenShard, split: Split, name: str) -> Iterator[Items]:
    """The items of a slice in the array *name* of a split, in order, from their mapped objects. ValueError if an object is
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
    """The place of each of the first *count* chunks of an object, and the end of the last one, which has items up to *end*. A
    compressed chunk states its own length. ValueError if the object is shorter.
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
    """Items ``first:stop`` of a chunk. ValueError, naming its object, if it is damaged."""
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
    """ValueError if the token arrays of a streamed shard are not what was written."""
    location = shard.unfinished
    assert location is not None
    for split in location.splits:
        for name in shard.token_arrays:
            digest = blake3()
            for items in unfinished_items(root, shard, split, name):
                digest.update(items.read().view(np.uint8).data)
            if f"{BLAKE3}{digest.hexdigest()}" != location.of(split).digests.get(name):
                raise ValueError(f"its {name} in {split} of the unfinished version {location.version} are not what was written")
