"""The zarr arrays of the format: their metadata, writing their stored objects, reading ranges of them.

An array is cut into stored objects of ``object_length`` items. In zarr v3 an object is a *shard*: inner chunks of
``chunk_length`` items one behind the other, then the index (offset and length of each, uint64), then the index's
crc32c. In zarr v2 an object is one chunk. Both are encoded here, byte for byte as zarr-python does it, because going
through zarr-python costs a build more than the tokenizer does. Arrays of other writers are read too; see ``foreign``.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from flat_tokens.foreign import ABSENT, ShardIndex, check_lengths, check_size, foreign_spec, inflate, without_crc32c
from flat_tokens.storage import ObjectWriter, Store, StoredObject
from flat_tokens.stored_array import StoredArray

LayoutName = Literal["mmap", "compact", "zarr2"]

MAX_LENGTH = 1 << 48


@dataclass(frozen=True)
class ArraySpec:
    """How a one-dimensional array is stored. ``zstd_level`` None means raw items, each inner chunk with its crc32c."""

    dtype: Literal["uint32", "uint64"]
    dimension: str
    zarr_format: Literal[2, 3]
    object_length: int
    chunk_length: int
    zstd_level: int | None

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype("<u4" if self.dtype == "uint32" else "<u8")

    @property
    def fill_value(self) -> int:
        """All bits set: a chunk that went missing decodes above every possible ``max_token_id``, not to zeros."""
        return int(np.iinfo(self.numpy_dtype).max)

    @property
    def chunks_per_object(self) -> int:
        return self.object_length // self.chunk_length

    @property
    def index(self) -> ShardIndex | None:
        return ShardIndex() if self.zarr_format == 3 else None

    @property
    def absent_value(self) -> None:
        """Every chunk is stored, so one that is not there is lost."""
        return None

    def object_count(self, length: int) -> int:
        return -(-length // self.object_length)

    def object_key(self, i: int) -> str:
        return f"c/{i}" if self.zarr_format == 3 else str(i)

    def metadata(self, length: int) -> dict[str, bytes]:
        """The metadata objects of an array of *length* items, by key."""
        if self.zarr_format == 2:
            return {".zarray": to_json(self._metadata_v2(length)), ".zattrs": to_json({})}
        return {"zarr.json": to_json(self._metadata_v3(length))}

    def _metadata_v2(self, length: int) -> dict[str, Any]:
        return {
            "zarr_format": 2,
            "shape": [length],
            "chunks": [self.chunk_length],
            "dtype": self.numpy_dtype.str,
            # Checksummed frames under the plain codec: every reader takes them, and checks them.
            "compressor": {"id": "zstd", "level": self.zstd_level},
            "fill_value": self.fill_value,
            "order": "C",
            "filters": None,
            "dimension_separator": ".",
        }

    def _metadata_v3(self, length: int) -> dict[str, Any]:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        crc32c = {"name": "crc32c"}
        zstd = {"name": "zstd", "configuration": {"level": self.zstd_level, "checksum": True}}
        sharding = {
            "chunk_shape": [self.chunk_length],
            "codecs": [little, crc32c if self.zstd_level is None else zstd],
            "index_codecs": [little, crc32c],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length],
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [self.object_length]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self.fill_value,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
            "dimension_names": [self.dimension],
            "storage_transformers": [],
        }

    def encode_chunk(self, items: npt.NDArray[Any]) -> bytes:
        return bytes(Zstd(level=self.zstd_level, checksum=True).encode(items))

    def decode_chunk(self, stored: memoryview) -> npt.NDArray[Any]:
        """One inner chunk: dtype[chunk_length]. ValueError where its checksum or size is not right."""
        size = self.chunk_length * self.numpy_dtype.itemsize
        if self.zstd_level is not None:
            return np.frombuffer(inflate("zstd", stored, size), self.numpy_dtype)
        check_size(stored, size + 4)
        return np.frombuffer(without_crc32c(stored), self.numpy_dtype)


class Layout(NamedTuple):
    """The arrays' specifications under one name."""

    name: LayoutName
    encoded_tokens: ArraySpec
    seq_starts: ArraySpec

    @property
    def zarr_format(self) -> Literal[2, 3]:
        return self.encoded_tokens.zarr_format


def _layout(name: LayoutName, zarr_format: Literal[2, 3], tokens: tuple[int, int], zstd_level: int | None) -> Layout:
    starts = (1 << 20, 1 << 14) if zarr_format == 3 else (1 << 14, 1 << 14)
    return Layout(
        name,
        ArraySpec("uint32", "token", zarr_format, *tokens, zstd_level),
        ArraySpec("uint64", "sequence", zarr_format, *starts, 3),
    )


LAYOUTS: dict[LayoutName, Layout] = {
    "mmap": _layout("mmap", 3, (1 << 26, 1 << 16), None),
    "compact": _layout("compact", 3, (1 << 26, 1 << 14), 1),
    "zarr2": _layout("zarr2", 2, (1 << 18, 1 << 18), 1),
}
"""``mmap``: raw shards for local disks. ``compact``: zstd, for object stores. ``zarr2``: zarr v2, for zarr 2 readers.

The inner chunks of ``compact`` are a quarter of the others': 2 % larger files, for random reads that decode a quarter.
"""


def group_metadata(zarr_format: Literal[2, 3], attributes: dict[str, Any]) -> dict[str, bytes]:
    """The metadata objects of a group, by key."""
    if zarr_format == 2:
        return {".zattrs": to_json(attributes), ".zgroup": to_json({"zarr_format": 2})}
    return {"zarr.json": to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})}


def to_json(value: Any) -> bytes:
    """JSON in one fixed form, so that equal values are equal bytes."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


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

    Starting at the first object it writes a whole array, of a length that need not be known, and its metadata behind it.
    ``write_metadata=False`` writes a run of objects alone, for arrays that several writers put together.
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
        with writer:  # what fails here leaves nothing behind
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


MAX_METADATA_BYTES = 1 << 20


def read_metadata(store: Store, node: Literal["array", "group"]) -> dict[str, Any]:
    """The zarr metadata of an array or group, v3 or v2, with its attributes under ``attributes``.

    FileNotFoundError where there is none; ValueError where it is not metadata of such a node.
    """
    v2_key = ".zarray" if node == "array" else ".zgroup"
    for key, zarr_format in (("zarr.json", 3), (v2_key, 2)):
        try:
            metadata = read_json(store, key)
        except FileNotFoundError:
            continue
        if metadata.get("zarr_format") != zarr_format or (zarr_format == 3 and metadata.get("node_type") != node):
            raise ValueError(f"{store.path(key)}: is not the metadata of a zarr {node}")
        if zarr_format == 2:
            try:
                metadata["attributes"] = read_json(store, ".zattrs")
            except FileNotFoundError:
                metadata["attributes"] = {}
        metadata.setdefault("attributes", {})
        return metadata
    raise FileNotFoundError(f"{store.url}: there is no zarr {node} here")


def read_json(store: Store, key: str) -> dict[str, Any]:
    """A small JSON object, in one request. FileNotFoundError where there is none; ValueError, naming it, where it is not
    JSON or not small.
    """
    (data,) = store.read_ranges([key], [0], [MAX_METADATA_BYTES + 1])
    if isinstance(data, FileNotFoundError):
        raise data
    if len(data) > MAX_METADATA_BYTES:
        raise ValueError(f"{store.path(key)}: is larger than metadata may be ({MAX_METADATA_BYTES} bytes)")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{store.path(key)}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{store.path(key)}: is not a JSON object")
    return value


def open_array(store: Store, dtype: Literal["uint32", "uint64"], *, in_order: bool = False) -> StoredArray:
    """Open the array at *store*'s root. ValueError, naming it, where it is not a plain array of that type.

    *in_order*: it was written here; see ``StoredArray``.
    """
    metadata = read_metadata(store, "array")
    shape, found = metadata.get("shape"), metadata.get("data_type", metadata.get("dtype"))
    if found not in (dtype, np.dtype(dtype).newbyteorder("<").str):
        raise ValueError(f"{store.url}: is of type {reprlib.repr(found)}, but the format says {dtype}")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        raise ValueError(f"{store.url}: has shape {reprlib.repr(shape)}, but the format says one dimension")
    if shape[0] > MAX_LENGTH:
        raise ValueError(f"{store.url}: has shape {reprlib.repr(shape)}; up to {MAX_LENGTH} items are read")
    try:
        spec = _matching_spec(metadata, dtype) or foreign_spec(metadata, dtype)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{store.url}: its metadata is not complete ({reprlib.repr(error)})") from error
    except ValueError as error:
        raise ValueError(f"{store.url}: {error}") from error
    return StoredArray(store, spec, shape[0], in_order=in_order)


def _matching_spec(metadata: dict[str, Any], dtype: Literal["uint32", "uint64"]) -> ArraySpec | None:
    """The specification that would have written this metadata, if there is one."""
    zarr_format = metadata["zarr_format"]
    if zarr_format == 3:
        object_length, codec = metadata["chunk_grid"]["configuration"]["chunk_shape"][0], metadata["codecs"][0]
        if codec["name"] != "sharding_indexed":
            return None
        chunk_length, inner = codec["configuration"]["chunk_shape"][0], codec["configuration"]["codecs"][-1]
        same: tuple[str, ...] = ("chunk_grid", "chunk_key_encoding", "codecs", "fill_value")
    else:
        chunk_length = object_length = metadata["chunks"][0]
        inner = {"name": (metadata.get("compressor") or {}).get("id"), "configuration": metadata["compressor"]}
        if inner["name"] != "zstd":
            return None
        same = ("chunks", "compressor", "filters", "order", "fill_value")
    check_lengths(object_length, chunk_length, np.dtype(dtype).itemsize)
    level = inner["configuration"].get("level") if inner["name"] == "zstd" else None
    spec = ArraySpec(dtype, "", zarr_format, object_length, chunk_length, level)
    mine = json.loads(next(iter(spec.metadata(0).values())))
    return spec if all(mine[key] == metadata.get(key) for key in same) and not metadata.get("storage_transformers") else None
