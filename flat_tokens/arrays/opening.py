"""Opening arrays of this library and of other writers, as their metadata says that they are stored. It is read within limits."""

from __future__ import annotations

import functools
import json
import reprlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flat_tokens.annotations import AnyArray, DType, JsonObject
from flat_tokens.arrays import codecs, layouts
from flat_tokens.arrays.layouts import MAX_CHUNK_BYTES, ArraySpec, ItemType, ShardIndex
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.stores.store import Store, read_json

LIMIT = (1 << 20, "metadata")
MAX_INNER_CHUNKS = 1 << 20

COMPRESSORS: dict[int, set[str]] = {2: {"zstd", "blosc", "gzip", "zlib", "lz4"}, 3: {"zstd", "blosc", "gzip"}}
BYTE_ORDERS: dict[str, Literal["<", ">"]] = {"little": "<", "big": ">"}


def read_metadata(store: Store, node: Literal["array", "group"]) -> JsonObject:
    """The zarr metadata of an array or group, v3 or v2, with its attributes under ``attributes``. FileNotFoundError if there is
    none; ValueError if it is not metadata of such a node.
    """
    v2_key = ".zarray" if node == "array" else ".zgroup"
    for key, zarr_format in (("zarr.json", 3), (v2_key, 2)):
        try:
            metadata = read_json(store, key, *LIMIT)
        except FileNotFoundError:
            continue
        if metadata.get("zarr_format") != zarr_format or (zarr_format == 3 and metadata.get("node_type") != node):
            raise ValueError(f"{store.path(key)}: is not the metadata of a zarr {node}")
        if zarr_format == 2:
            try:
                metadata["attributes"] = read_json(store, ".zattrs", *LIMIT)
            except FileNotFoundError:
                metadata["attributes"] = {}
        if not isinstance(attributes := metadata.setdefault("attributes", {}), dict):
            raise ValueError(f"{store.path(key)}: its attributes are {reprlib.repr(attributes)}, not an object of JSON")
        return metadata
    raise FileNotFoundError(f"{store.url}: there is no zarr {node} here")


def open_array(store: Store, dtype: ItemType, *, in_order: bool = False) -> StoredArray:
    """Open the array at *store*'s root. ValueError, naming it, if it is not a plain array of that type. *in_order*: it was
    written by this library; see ``StoredArray``.
    """
    metadata = read_metadata(store, "array")
    shape, found = metadata.get("shape"), metadata.get("data_type", metadata.get("dtype"))
    if found not in (dtype, np.dtype(dtype).newbyteorder("<").str):
        raise ValueError(f"{store.url}: is of type {reprlib.repr(found)}, but the format says {dtype}")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        raise ValueError(f"{store.url}: has shape {reprlib.repr(shape)}, but the format says one dimension")
    if shape[0] > layouts.MAX_LENGTH:
        raise ValueError(f"{store.url}: has shape {reprlib.repr(shape)}; up to {layouts.MAX_LENGTH} items are read")
    try:
        spec = _matching_spec(metadata, dtype) or foreign_spec(metadata, dtype)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{store.url}: its metadata is not complete ({reprlib.repr(error)})") from error
    except ValueError as error:
        raise ValueError(f"{store.url}: {error}") from error
    return StoredArray(store, spec, shape[0], in_order=in_order)


def _matching_spec(metadata: JsonObject, dtype: ItemType) -> ArraySpec | None:
    """The specification whose metadata this is, if there is one."""
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
        same = ("chunks", "compressor", "filters", "order", "fill_value")
    check_lengths(object_length, chunk_length, np.dtype(dtype).itemsize)
    level = block_length = None
    if setting := {"zstd": "level", "blosc": "clevel"}.get(inner["name"]):
        level = inner["configuration"].get(setting, 0)
        if type(level) not in (int, float):
            raise ValueError(f"has {setting} {reprlib.repr(level)} of {inner['name']}, which is not a number")
    if inner["name"] == "blosc":
        block_length, rest = divmod(inner["configuration"].get("blocksize"), np.dtype(dtype).itemsize)
        if rest or not block_length or chunk_length % block_length:
            return None
    elif setting is None and zarr_format == 2:
        return None
    if not all(number is None or type(number) is int for number in (level, block_length)):
        return None  # 3.0 equals 3, but is not written so
    spec = ArraySpec(dtype, "", zarr_format, object_length, chunk_length, level, block_length)
    mine = _metadata_of(spec)
    return spec if all(mine[key] == metadata.get(key) for key in same) and not metadata.get("storage_transformers") else None


@functools.lru_cache(64)
def _metadata_of(spec: ArraySpec) -> JsonObject:
    """The metadata of an empty array: making it for every array that is opened would take longer than comparing it."""
    found: JsonObject = json.loads(next(iter(spec.metadata(0).values())))
    return found


@dataclass(frozen=True)
class ForeignSpec:
    """The storage of another writer's array. A chunk that is not stored stands for the array's fill value."""

    numpy_dtype: DType
    stored_dtype: DType
    object_length: int
    chunk_length: int
    object_name: str
    index: ShardIndex | None
    codecs: tuple[tuple[str, int], ...]
    """The codecs of a chunk's bytes in the order of encoding, each with the size of its input."""
    delta: tuple[DType, DType] | None
    """Types of the items and of their differences, if these are stored instead."""
    absent_value: int

    @property
    def chunks_per_object(self) -> int:
        return self.object_length // self.chunk_length

    def object_key(self, i: int) -> str:
        return f"{self.object_name}{i}"

    def decode_chunk(self, stored: memoryview) -> AnyArray:
        """One inner chunk: dtype[chunk_length]. ValueError if its checksum or size is not right."""
        for name, size in reversed(self.codecs):
            stored = codecs.without_crc32c(stored) if name == "crc32c" else codecs.inflate(name, stored, size)
        codecs.check_size(stored, self.chunk_length * self.numpy_dtype.itemsize)
        items = np.frombuffer(stored, self.stored_dtype)
        if self.delta is None:
            return items
        sums, differences = self.delta
        return np.cumsum(items.view(differences), dtype=sums).view(self.stored_dtype)

    @property
    def decodes_parts(self) -> bool:
        """Whether a part of a chunk can be decoded without the rest: Blosc compresses in blocks."""
        return self.index is None and self.delta is None and [name for name, _ in self.codecs] == ["blosc"]

    def decode_part(self, stored: memoryview, first: int, last: int) -> AnyArray:
        """Items ``first:last`` of one chunk: dtype[last - first]. ValueError if its size is not right."""
        itemsize, ((_, size),) = self.numpy_dtype.itemsize, self.codecs
        begin, data = codecs.blosc_part(stored, size, first * itemsize, last * itemsize)
        return np.frombuffer(data, self.stored_dtype, last - first, first * itemsize - begin)


def foreign_spec(metadata: JsonObject, dtype: ItemType) -> ForeignSpec:
    """The specification in an array's metadata. ValueError if arrays like it are not read here, KeyError and its like if
    the metadata is not complete.
    """
    items = np.dtype(dtype)
    if metadata["zarr_format"] == 3:
        return _foreign_spec_v3(metadata, items)
    (length,) = metadata["chunks"]
    check_lengths(length, length, items.itemsize)
    delta = None
    if filters := metadata.get("filters"):
        if len(filters) != 1 or filters[0]["id"] != "delta":
            raise ValueError(f"has filters {reprlib.repr(filters)}; one delta is read here")
        delta = np.dtype(filters[0]["dtype"]), np.dtype(filters[0].get("astype") or filters[0]["dtype"])
        if any(type_.kind not in "iu" or type_.itemsize != items.itemsize for type_ in delta):
            raise ValueError(f"has differences of types {reprlib.repr(delta)}")
    compressor = metadata["compressor"]
    codecs = _byte_codecs([compressor["id"]] if compressor else [], length * items.itemsize, COMPRESSORS[2])
    absent_value = _absent_value(metadata["fill_value"] or 0, items)
    return ForeignSpec(items, items.newbyteorder("<"), length, length, "", None, codecs, delta, absent_value)


def _foreign_spec_v3(metadata: JsonObject, dtype: DType) -> ForeignSpec:
    """The layout of a zarr v3 array of another writer. ValueError if it has something that is not read here."""
    if metadata["chunk_grid"]["name"] != "regular" or metadata.get("storage_transformers"):
        raise ValueError("has a chunk grid or storage transformers that are not read here")
    (object_length,) = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    codecs, index, chunk_length = metadata["codecs"], None, object_length
    if codecs[0]["name"] == "sharding_indexed":
        if len(codecs) > 1:
            raise ValueError("has a codec around its shards, which is not read here")
        sharding = codecs[0]["configuration"]
        (chunk_length,), codecs = sharding["chunk_shape"], sharding["codecs"]
        location, of_index = sharding.get("index_location", "end"), sharding["index_codecs"]
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        if location not in ("start", "end") or of_index not in ([little], [little, {"name": "crc32c"}]):
            raise ValueError("has shards with an index that is not read here")
        index = ShardIndex(location, len(of_index) == 2)
    check_lengths(object_length, chunk_length, dtype.itemsize)
    if codecs[0]["name"] != "bytes":
        raise ValueError(f"is stored with {reprlib.repr(codecs[0]['name'])}, which is not among the codecs read here")
    stored_dtype = dtype.newbyteorder(BYTE_ORDERS[codecs[0]["configuration"]["endian"]])
    names = _byte_codecs([codec["name"] for codec in codecs[1:]], chunk_length * dtype.itemsize, COMPRESSORS[3])
    absent_value = _absent_value(metadata["fill_value"], dtype)
    encoding = metadata["chunk_key_encoding"]
    separator = encoding.get("configuration", {}).get("separator", "/")
    if encoding["name"] != "v2" and (encoding["name"] != "default" or separator not in ("/", ".")):
        raise ValueError("names its objects in a way that is not read here")
    name = "" if encoding["name"] == "v2" else f"c{separator}"
    return ForeignSpec(dtype, stored_dtype, object_length, chunk_length, name, index, names, None, absent_value)


def _byte_codecs(names: list[Any], size: int, compressors: set[str]) -> tuple[tuple[str, int], ...]:
    """Codecs from bytes to bytes, each with the size of what it encodes. That size is not known after a compressor."""
    for name in names:
        if name != "crc32c" and (type(name) is not str or name not in compressors):
            raise ValueError(f"is stored with {reprlib.repr(name)}, which is not among the codecs read here")
    if len(set(names) - {"crc32c"}) > 1 or len(set(names)) < len(names):
        raise ValueError(f"is stored with {reprlib.repr(names)}, which are more codecs than are read here")
    return tuple((name, size + 4 * i) for i, name in enumerate(names))


def _absent_value(value: Any, dtype: DType) -> int:
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
