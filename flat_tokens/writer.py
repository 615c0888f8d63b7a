"""Writing arrays object by object, flat-tokens arrays, and small datasets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np

from flat_tokens.annotations import AnyArray, IntPair, JsonObject, UInt8s
from flat_tokens.arrays.layouts import ABSENT, LAYOUTS, ArraySpec, Layout, LayoutName, group_metadata, to_json
from flat_tokens.arrays.maps import share_work
from flat_tokens.batch import TOKENS, TokenBatch
from flat_tokens.manifest import MANIFEST, PROVENANCE, check, manifest_bytes, split_attributes
from flat_tokens.options import one_of
from flat_tokens.stores.store import ObjectWriter, PathOrUrl, Store, StoredObject

BYTES_AT_ONCE = 2 << 20
"""Of chunks that are written together."""


class ArrayWriter:
    """Writes the objects of an array in order, from object *first_object* on, in memory of a few megabytes.

    From the first object on it writes a whole array, whose length need not be known, and then its metadata.
    ``write_metadata=False`` writes some objects alone, for arrays that several writers write together. *unfinished*: the path of
    a local object until it is complete, by its number.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        spec: ArraySpec,
        *,
        first_object: int = 0,
        write_metadata: bool = True,
        unfinished: Callable[[int], Path | None] = lambda _: None,
    ) -> None:
        self._store, self._name, self._spec = store, name, spec
        self._next, self._write_metadata, self._unfinished = first_object, write_metadata, unfinished
        self._pending, self._pending_count = np.empty(spec.chunk_length, spec.numpy_dtype), 0
        self._at_once = max(BYTES_AT_ONCE // self._pending.nbytes, 1)
        self._writer: ObjectWriter | None = None
        self._index: list[IntPair] = []  # offset and size of each chunk of the open object
        self.objects: list[StoredObject] = []
        self.length = 0

    def append(self, items: AnyArray) -> None:
        """Append items of the array's dtype."""
        chunk_length, self.length = self._spec.chunk_length, self.length + len(items)
        while len(items):
            if self._writer is None:
                key = f"{self._name}/{self._spec.object_key(self._next)}"
                self._writer = self._store.create(key, self._unfinished(self._next))
                self._index, self._next = [], self._next + 1
            if not self._pending_count and len(items) >= chunk_length:
                most = min(self._at_once, self._spec.chunks_per_object - len(self._index))
                part = items[: min(len(items) // chunk_length, most) * chunk_length]
                self._emit(self._writer, part)
            else:
                part = items[: chunk_length - self._pending_count]
                self._pending[self._pending_count : self._pending_count + len(part)] = part
                self._pending_count += len(part)
                if self._pending_count == chunk_length:
                    self._emit(self._writer, self._pending)
                    self._pending_count = 0
            items = items[len(part) :]
            if len(self._index) == self._spec.chunks_per_object:
                self._end_object(self._writer)

    def settle(self) -> None:
        """Make the items so far survive a power loss and the end of this process. The unfinished file of the open object has
        each chunk at its final place. For a raw array these are all items: item i is word i + i // chunk_length. For a
        compressed one they are those of complete chunks.
        """
        rest = self._pending[: 0 if self._spec.is_compressed else self._pending_count]
        if self._writer is not None and (self._writer.size or len(rest)):
            self._writer.settle(rest)

    def _emit(self, writer: ObjectWriter, items: AnyArray) -> None:
        """Write whole chunks. Raw ones go together: each call gives the interpreter's lock away, and has to wait for it. Others
        are compressed on all processors.
        """
        chunks = np.ascontiguousarray(items).reshape(-1, self._spec.chunk_length)
        if not self._spec.is_compressed:
            data = chunks.view(np.uint8)

            def fill(rows: UInt8s, first: int) -> None:
                some = data[first : first + len(rows)]
                rows[:, -4:].view("<u4")[:, 0] = [google_crc32c.value(chunk) for chunk in some]
                rows[:, :-4] = some

            count, size = len(data), data.shape[1] + 4
            self._index += [(writer.size + i * size, size) for i in range(count)]
            writer.write_rows(count, size, fill)
            return
        encoded = [b""] * len(chunks)

        def encode(some: range) -> None:
            encoded[some.start : some.stop] = [self._spec.encode_chunk(chunks[i]) for i in some]

        share_work(encode, len(chunks))
        for one in encoded:
            self._index.append((writer.size, len(one)))
            writer.write(one)

    def _end_object(self, writer: ObjectWriter) -> None:
        self._writer = None
        with writer:  # a failure leaves nothing after
            if self._pending_count:
                self._pending[self._pending_count :] = self._spec.fill_value
                self._emit(writer, self._pending)
            if self._spec.zarr_format == 3:
                index = np.full((self._spec.chunks_per_object, 2), ABSENT, "<u8")
                index[: len(self._index)] = self._index
                writer.write(index)
                writer.write(google_crc32c.value(index).to_bytes(4, "little"))
        self.objects.append(writer.stored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            if self._writer is not None:
                self._writer.__exit__(*error)
            return
        if self._writer is not None:
            self._end_object(self._writer)
        if self._write_metadata:
            self.objects += put_metadata(self._store, self._name, self._spec.metadata(self.length))


def put_metadata(store: Store, name: str, metadata: dict[str, bytes]) -> list[StoredObject]:
    """Write the metadata objects of the array or group *name*."""
    return [store.put(f"{name}/{key}" if name else key, data) for key, data in metadata.items()]


class FlatTokensWriter:
    """Writes one flat-tokens array from its start to its end, batch by batch, in bounded memory. *token_arrays*: those that it
    has. If a batch lacks one of them, its default items are written: without a loss mask all tokens count.
    """

    def __init__(self, store: Store, layout: Layout, token_arrays: Iterable[str] = (TOKENS,)) -> None:
        self._store, self._layout = store, layout
        self._starts = ArrayWriter(store, "seq_starts", layout.seq_starts)
        self._arrays = {name: ArrayWriter(store, name, layout.token_array(name)) for name in token_arrays}
        self.seq_count = 0
        self.max_token_id = 0
        self.objects: list[StoredObject] = []

    @property
    def token_count(self) -> int:
        return self._arrays[TOKENS].length

    @property
    def token_arrays(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def append(self, batch: TokenBatch) -> None:
        # (batch, entry) -> (array, entry): starts shift by the tokens already written
        self._starts.append(batch.seq_starts[:-1] + np.uint64(self.token_count))
        if more := [name for name in batch.arrays if name not in self._arrays]:
            raise ValueError(
                f"{self._store.url}: a batch has a {more[0]}, but the ones before had none. Give each batch its own."
            )
        for name, array in self._arrays.items():
            array.append(batch.items(name))
        self.seq_count += batch.seq_count
        self.max_token_id = max(self.max_token_id, batch.max_token_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        every = ExitStack()  # a failure in one array reaches the others
        writers = [*self._arrays.values(), self._starts]
        for writer in reversed(writers):
            every.push(writer)
        if error[0] is not None:
            every.__exit__(*error)
            return
        with every:
            self._starts.append(np.array([self.token_count], np.uint64))
        self.objects = [stored for writer in writers for stored in writer.objects]
        attributes = split_attributes(self.max_token_id, self._arrays)
        self.objects += put_metadata(self._store, "", group_metadata(self._layout.zarr_format, attributes))


def write_dataset(
    path_or_url: PathOrUrl,
    train: Iterable[TokenBatch],
    validation: Iterable[TokenBatch] = (),
    *,
    test: Iterable[TokenBatch] | None = None,
    layout: LayoutName = "mmap",
    provenance: JsonObject | None = None,
) -> Store:
    """Write a dataset to an empty path or URL, the root group's metadata last. A split whose batches have a ``loss_mask`` has
    one. *test*: a third split, which the dataset has not without it.

    FileExistsError if something is there already, ValueError for a layout that there is not.
    """
    store, chosen = Store.at(path_or_url), LAYOUTS[one_of("layout", layout, LAYOUTS)]
    check(json.loads(to_json(provenance or {})), PROVENANCE, "provenance")  # or readers would refuse the manifest
    if store.exists(""):
        raise FileExistsError(f"{store.url}: exists already. A dataset is written once; choose another path.")
    objects, totals = [], {}
    for split, batches in (("train", train), ("validation", validation), *([] if test is None else [("test", test)])):
        ahead = iter(batches)
        first = list(itertools.islice(ahead, 1))
        with FlatTokensWriter(store / split, chosen, first[0].arrays if first else (TOKENS,)) as writer:
            for batch in itertools.chain(first, ahead):
                writer.append(batch)
        objects += [stored._replace(key=f"{split}/{stored.key}") for stored in writer.objects]
        totals[split] = {"token_count": writer.token_count, "seq_count": writer.seq_count, "max_token_id": writer.max_token_id}
    store.put(MANIFEST, manifest_bytes(objects, totals, layout, provenance or {}))
    commit(store, chosen)
    return store


def commit(store: Store, layout: Layout) -> None:
    """Publish the arrays at *store*: from now on readers, plain zarr ones included, see a dataset."""
    put_metadata(store, "", group_metadata(layout.zarr_format, {}))
