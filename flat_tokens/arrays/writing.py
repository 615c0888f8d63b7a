"""Writing arrays object by object, with their metadata."""

from __future__ import annotations

from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.codecs import ABSENT
from flat_tokens.arrays.layouts import ArraySpec
from flat_tokens.stores.store import ObjectWriter, Store, StoredObject


class ObjectEncoder:
    """Encodes the items of one stored object, in order, into *writer*. ``close()`` ends the object."""

    def __init__(self, spec: ArraySpec, writer: ObjectWriter) -> None:
        self._spec, self._writer = spec, writer
        self._pending = np.empty(spec.chunk_length, spec.numpy_dtype)
        self._pending_count = 0
        self._index: list[tuple[int, int]] = []
        self._offset = 0
        self.length = 0

    def append(self, items: npt.NDArray[Any]) -> None:
        """Append items of the array's dtype; together at most ``object_length``."""
        chunk_length, self.length = self._spec.chunk_length, self.length + len(items)
        while len(items):
            if self._pending_count == 0 and len(items) >= chunk_length:
                self._emit(items[:chunk_length])
                items = items[chunk_length:]
                continue
            part = items[: chunk_length - self._pending_count]
            self._pending[self._pending_count : self._pending_count + len(part)] = part
            self._pending_count += len(part)
            items = items[len(part) :]
            if self._pending_count == chunk_length:
                self._emit(self._pending)
                self._pending_count = 0

    def close(self) -> None:
        if self._pending_count:
            self._pending[self._pending_count :] = self._spec.fill_value
            self._emit(self._pending)
        if self._spec.zarr_format == 3:
            index = np.full((self._spec.chunks_per_object, 2), ABSENT, "<u8")
            index[: len(self._index)] = self._index
            self._writer.write(index)
            self._writer.write(google_crc32c.value(index).to_bytes(4, "little"))

    def _emit(self, chunk: npt.NDArray[Any]) -> None:
        if self._spec.zstd_level is None:
            chunk = np.ascontiguousarray(chunk)
            self._writer.write(chunk)
            self._writer.write(google_crc32c.value(chunk).to_bytes(4, "little"))
            size = chunk.nbytes + 4
        else:
            encoded = self._spec.encode_chunk(chunk)
            self._writer.write(encoded)
            size = len(encoded)
        self._index.append((self._offset, size))
        self._offset += size


class ArrayWriter:
    """Writes the objects of an array in order, from object *first_object* on, in memory of one chunk.

    From the first object on it writes a whole array, whose length need not be known, and then its metadata.
    ``write_metadata=False`` writes some objects alone, for arrays that several writers write together.
    """

    def __init__(self, store: Store, name: str, spec: ArraySpec, *, first_object: int = 0, write_metadata: bool = True) -> None:
        self._store, self._name, self._spec = store, name, spec
        self._next, self._write_metadata = first_object, write_metadata
        self._writer: ObjectWriter | None = None
        self._encoder: ObjectEncoder | None = None
        self.objects: list[StoredObject] = []
        self.length = 0

    def append(self, items: npt.NDArray[Any]) -> None:
        while len(items):
            if self._encoder is None:
                self._writer = self._store.create(f"{self._name}/{self._spec.object_key(self._next)}")
                self._encoder = ObjectEncoder(self._spec, self._writer)
                self._next += 1
            part = items[: self._spec.object_length - self._encoder.length]
            self._encoder.append(part)
            self.length += len(part)
            items = items[len(part) :]
            if self._encoder.length == self._spec.object_length:
                self._end_object()

    def _end_object(self) -> None:
        encoder, writer, self._encoder, self._writer = self._encoder, self._writer, None, None
        assert encoder is not None
        assert writer is not None
        with writer:  # a failure leaves nothing behind
            encoder.close()
        self.objects.append(writer.stored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if kind is not None:
            if self._writer is not None:
                self._writer.__exit__(kind, error, traceback)
            return
        if self._encoder is not None:
            self._end_object()
        if self._write_metadata:
            self.objects += put_metadata(self._store, self._name, self._spec.metadata(self.length))


def put_metadata(store: Store, name: str, metadata: dict[str, bytes]) -> list[StoredObject]:
    """Write the metadata objects of the array or group *name*."""
    return [store.put(f"{name}/{key}" if name else key, data) for key, data in metadata.items()]
