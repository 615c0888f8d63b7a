"""Token shards with objects of their own: small flat-tokens arrays with a key and a row for every sequence.

A request of a remote store takes tens of milliseconds and costs money, however little it reads; and a shard is read three times:
counted, then read for the tokens and for the documents of two splits. So small objects that receipts list are read whole by one
request, checked, and kept for the next reader. Kept bytes are found by their digest, which was checked when they came: every
receipt with that digest means these bytes, whatever becomes of the store.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64s
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, group_metadata
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import Columns
from flat_tokens.columns import Part as ColumnsPart
from flat_tokens.manifest import split_attributes
from flat_tokens.reader import open_split
from flat_tokens.stores.store import DigestKind, Store, StoredObject, content_digest
from tasks.models import TokenShard
from tasks.output.paths import DOCUMENTS, shard_key
from tasks.parts.documents import Documents, Read, of_shard, one_array, read_fact, stored_arrays
from tasks.rows import Facts

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
    at once, and not again while they are kept. ValueError where one has changed.
    """

    known: Mapping[str, StoredObject] = field(default_factory=dict, repr=False)
    turn: int = 0
    """Threads that read the same objects take turns: the first one asks for all of them."""

    @classmethod
    def of(cls, root: Store, directory: str, objects: Iterable[StoredObject], likely: Iterable[bytes]) -> KnownStore:
        """The store at *root*, with known *objects* below *directory*; those whose digest one of *likely* has are not read."""
        for data in likely:
            _kept.keep(data)
        known = {root.path(f"{directory}/{stored.key}"): stored for stored in objects}
        turn = hash(root.path(directory)) % TURNS
        return cls(**vars(root), known=known, turn=turn)

    def read_ranges(
        self, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int | None]
    ) -> list[bytes | FileNotFoundError]:
        whole = self.fetch(keys)
        rest = [k for k, key in enumerate(keys) if key not in whole]
        asked = [keys[k] for k in rest], [starts[k] for k in rest], [stops[k] for k in rest]
        others = dict(zip(rest, super().read_ranges(*asked) if rest else [], strict=True))
        return [others[k] if k in others else _cut(whole[key], starts[k], stops[k]) for k, key in enumerate(keys)]

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
    if store.is_local:
        return store
    known = {store.path(stored.key): stored for stored in objects}
    return KnownStore(**vars(store), known=known, turn=hash(store.root) % TURNS)


def digest_all(store: Store, objects: Sequence[StoredObject]) -> Iterator[StoredObject]:
    """Size and digest of *objects* as they are now. The small ones of a remote store are read together, and kept."""
    small = {} if store.is_local else {stored.key: stored for stored in objects if _is_small(stored)}
    found = dict(zip(small, _ask(store.read_ranges, small), strict=True))
    for stored in objects:
        data = found.get(stored.key)
        whole = isinstance(data, bytes) and _kept.keep(data, stored.kind) == stored.digest
        yield stored if whole else store.now(stored)


def _cut(data: bytes | FileNotFoundError, start: int, stop: int | None) -> bytes | FileNotFoundError:
    return data[start:stop] if isinstance(data, bytes) else data


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


def _store_of(root: Store, shard: TokenShard, names: Iterable[str]) -> Store:
    """The store to read a shard from; of a remote one the small objects of the arrays and the facts *names* have been read."""
    if root.is_local:
        return root
    directory = shard_key(shard.key)
    store = KnownStore.of(root, directory, shard.objects, _metadata_of(shard))
    wanted = tuple(f"{DOCUMENTS}/{name}/" if name in shard.facts else f"{name}/" for name in names)
    store.fetch(f"{directory}/{stored.key}" for stored in shard.objects if stored.key.startswith(wanted))
    return store


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
    """The documents of a shard with objects of its own. *names*: facts and arrays that will be read."""
    store = _store_of(root, shard, ("seq_starts", *names)) / shard_key(shard.key)
    tokens = open_split(store)
    starts = tokens.seq_starts.read(0, tokens.seq_count + 1).astype(np.int64)
    lengths: Int64s = np.diff(starts)
    read = of_shard(root, open_facts(store, shard.facts), shard)
    return Documents(*one_array(lengths), (stored_arrays(tokens),), read, functools.partial(shard_columns, root, shard))


def shard_columns(root: Store, shard: TokenShard, wanted: Int64s) -> pa.RecordBatch:
    """The kept columns of documents *wanted*, int64[m], of a shard with objects of its own."""
    parts = (ColumnsPart(COLUMNS, 0, shard.seq_count),) if shard.columns and shard.seq_count else ()
    return Columns(root / shard_key(shard.key), shard.columns, parts).take(wanted, list(shard.columns))
