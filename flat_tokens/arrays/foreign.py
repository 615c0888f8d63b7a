"""Arrays of other writers: how their metadata says that they are stored."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.codecs import MAX_CHUNK_BYTES, ShardIndex, blosc_part, check_size, inflate, without_crc32c

MAX_INNER_CHUNKS = 1 << 20

COMPRESSORS: dict[int, set[str]] = {2: {"zstd", "blosc", "gzip", "zlib", "lz4"}, 3: {"zstd", "blosc", "gzip"}}
BYTE_ORDERS: dict[str, Literal["<", ">"]] = {"little": "<", "big": ">"}


@dataclass(frozen=True)
class ForeignSpec:
    """The storage of another writer's array. A chunk that is not stored stands for the array's fill value."""

    numpy_dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    object_length: int
    chunk_length: int
    object_name: str
    index: ShardIndex | None
    codecs: tuple[tuple[str, int], ...]
    """The codecs of a chunk's bytes in the order of encoding, each with the size of its input."""
    delta: tuple[np.dtype[Any], np.dtype[Any]] | None
    """Types of the items and of their differences, if these are stored instead."""
    absent_value: int

    @property
    def chunks_per_object(self) -> int:
        return self.object_length // self.chunk_length

    def object_count(self, length: int) -> int:
        return -(-length // self.object_length)

    def object_key(self, i: int) -> str:
        return f"{self.object_name}{i}"

    def decode_chunk(self, stored: memoryview) -> npt.NDArray[Any]:
        """One inner chunk: dtype[chunk_length]. ValueError if its checksum or size is not right."""
        for name, size in reversed(self.codecs):
            stored = without_crc32c(stored) if name == "crc32c" else inflate(name, stored, size)
        check_size(stored, self.chunk_length * self.numpy_dtype.itemsize)
        items = np.frombuffer(stored, self.stored_dtype)
        if self.delta is None:
            return items
        sums, differences = self.delta
        return np.cumsum(items.view(differences), dtype=sums).view(self.stored_dtype)

    @property
    def decodes_parts(self) -> bool:
        """Whether a part of a chunk can be decoded without the rest: Blosc compresses in blocks."""
        return self.index is None and self.delta is None and [name for name, _ in self.codecs] == ["blosc"]

    def decode_part(self, stored: memoryview, first: int, last: int) -> npt.NDArray[Any]:
        """Items ``first:last`` of one chunk: dtype[last - first]. ValueError if its size is not right."""
        itemsize, ((_, size),) = self.numpy_dtype.itemsize, self.codecs
        begin, data = blosc_part(stored, size, first * itemsize, last * itemsize)
        return np.frombuffer(data, self.stored_dtype, last - first, first * itemsize - begin)


def foreign_spec(metadata: dict[str, Any], dtype: Literal["uint32", "uint64"]) -> ForeignSpec:
    """The specification in an array's metadata. ValueError if arrays like it are not read here, KeyError and its like if
    the metadata is not complete.
    """
    return (_foreign_spec_v3 if metadata["zarr_format"] == 3 else _foreign_spec_v2)(metadata, np.dtype(dtype))


def _foreign_spec_v2(metadata: dict[str, Any], dtype: np.dtype[Any]) -> ForeignSpec:
    (length,) = metadata["chunks"]
    check_lengths(length, length, dtype.itemsize)
    delta = _delta(metadata["filters"], dtype.itemsize) if metadata.get("filters") else None
    compressor = metadata["compressor"]
    codecs = _byte_codecs([compressor["id"]] if compressor else [], length * dtype.itemsize, COMPRESSORS[2])
    absent_value = _absent_value(metadata["fill_value"] or 0, dtype)
    return ForeignSpec(dtype, dtype.newbyteorder("<"), length, length, "", None, codecs, delta, absent_value)


def _delta(filters: list[dict[str, Any]], itemsize: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    if len(filters) != 1 or filters[0]["id"] != "delta":
        raise ValueError(f"has filters {reprlib.repr(filters)}; one delta is read here")
    types = np.dtype(filters[0]["dtype"]), np.dtype(filters[0].get("astype") or filters[0]["dtype"])
    if any(type_.kind not in "iu" or type_.itemsize != itemsize for type_ in types):
        raise ValueError(f"has differences of types {reprlib.repr(types)}")
    return types


def _foreign_spec_v3(metadata: dict[str, Any], dtype: np.dtype[Any]) -> ForeignSpec:
    if metadata["chunk_grid"]["name"] != "regular" or metadata.get("storage_transformers"):
        raise ValueError("has a chunk grid or storage transformers that are not read here")
    (object_length,) = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    codecs, index, chunk_length = metadata["codecs"], None, object_length
    if codecs[0]["name"] == "sharding_indexed":
        if len(codecs) > 1:
            raise ValueError("has a codec around its shards, which is not read here")
        sharding = codecs[0]["configuration"]
        (chunk_length,), codecs = sharding["chunk_shape"], sharding["codecs"]
        index = _shard_index(sharding)
    check_lengths(object_length, chunk_length, dtype.itemsize)
    if codecs[0]["name"] != "bytes":
        raise ValueError(f"is stored with {reprlib.repr(codecs[0]['name'])}, which is not among the codecs read here")
    stored_dtype = dtype.newbyteorder(BYTE_ORDERS[codecs[0]["configuration"]["endian"]])
    names = _byte_codecs([codec["name"] for codec in codecs[1:]], chunk_length * dtype.itemsize, COMPRESSORS[3])
    absent_value = _absent_value(metadata["fill_value"], dtype)
    return ForeignSpec(dtype, stored_dtype, object_length, chunk_length, _object_name(metadata), index, names, None, absent_value)


def _shard_index(sharding: dict[str, Any]) -> ShardIndex:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    location, codecs = sharding.get("index_location", "end"), sharding["index_codecs"]
    if location not in ("start", "end") or codecs not in ([little], [little, {"name": "crc32c"}]):
        raise ValueError("has shards with an index that is not read here")
    return ShardIndex(location, len(codecs) == 2)


def _object_name(metadata: dict[str, Any]) -> str:
    encoding = metadata["chunk_key_encoding"]
    separator = encoding.get("configuration", {}).get("separator", "/")
    if encoding["name"] == "v2":
        return ""
    if encoding["name"] != "default" or separator not in ("/", "."):
        raise ValueError("names its objects in a way that is not read here")
    return f"c{separator}"


def _byte_codecs(names: list[Any], size: int, compressors: set[str]) -> tuple[tuple[str, int], ...]:
    """Codecs from bytes to bytes, each with the size of what it encodes. That size is not known behind a compressor."""
    for name in names:
        if name != "crc32c" and (type(name) is not str or name not in compressors):
            raise ValueError(f"is stored with {reprlib.repr(name)}, which is not among the codecs read here")
    if len(set(names) - {"crc32c"}) > 1 or len(set(names)) < len(names):
        raise ValueError(f"is stored with {reprlib.repr(names)}, which are more codecs than are read here")
    return tuple((name, size + 4 * i) for i, name in enumerate(names))


def _absent_value(value: Any, dtype: np.dtype[Any]) -> int:
    if type(value) is not int or not 0 <= value <= np.iinfo(dtype).max:
        raise ValueError(f"has fill value {reprlib.repr(value)}, which is no {dtype}")
    return value


def check_lengths(object_length: Any, chunk_length: Any, itemsize: int) -> None:
    """ValueError if a chunk or a shard is larger than the limits."""
    if not all(type(n) is int and n > 0 for n in (object_length, chunk_length)) or object_length % chunk_length:
        raise ValueError(f"has chunks of {reprlib.repr(object_length)} and {reprlib.repr(chunk_length)} items, which cannot be")
    if chunk_length * itemsize > MAX_CHUNK_BYTES:
        raise ValueError(f"has chunks of {reprlib.repr(chunk_length)} items; up to {MAX_CHUNK_BYTES // itemsize} are read")
    if object_length // chunk_length > MAX_INNER_CHUNKS:
        raise ValueError(f"has {reprlib.repr(object_length // chunk_length)} chunks a shard; up to {MAX_INNER_CHUNKS} are read")
