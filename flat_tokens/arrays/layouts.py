"""Layouts: how the arrays of a dataset are divided into stored objects, and the metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from flat_tokens.annotations import AnyArray, DType, JsonObject
from flat_tokens.arrays import codecs
from flat_tokens.batch import TOKEN_ARRAYS

LayoutName = Literal["mmap", "compact", "zarr2"]
ItemType = Literal["uint8", "uint32", "uint64"]

MAX_LENGTH = 1 << 48
ABSENT = 2**64 - 1
"""Offset and length of an inner chunk that a shard's index says is not stored."""

MAX_CHUNK_BYTES = 1 << 30
"""Chunks above this are refused before anything is allocated: a few bytes of metadata can ask for petabytes."""


class ShardIndex(NamedTuple):
    """The place of a shard's index, and whether a crc32c follows it."""

    location: Literal["start", "end"] = "end"
    crc32c: bool = True


@dataclass(frozen=True)
class ArraySpec:
    """The storage of a one-dimensional array. ``zstd_level`` None means raw items, each inner chunk with its crc32c; a chunk of
    zstd is a frame, or with a ``block_length`` a Blosc buffer with a frame for every ``block_length`` items.
    """

    absent_value: ClassVar[None] = None
    """Every chunk is stored, so a missing one is an error."""
    dtype: ItemType
    dimension: str
    zarr_format: Literal[2, 3]
    object_length: int
    chunk_length: int
    zstd_level: int | None
    block_length: int | None = None

    @property
    def numpy_dtype(self) -> DType:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def fill_value(self) -> int:
        """All bits set: a chunk that went missing decodes above every possible ``max_token_id``, not to zeros."""
        return int(np.iinfo(self.numpy_dtype).max)

    @property
    def chunks_per_object(self) -> int:
        return self.object_length // self.chunk_length

    @property
    def is_compressed(self) -> bool:
        return self.zstd_level is not None

    @property
    def index(self) -> ShardIndex | None:
        return ShardIndex() if self.zarr_format == 3 else None

    def object_key(self, i: int) -> str:
        return f"c/{i}" if self.zarr_format == 3 else str(i)

    def metadata(self, length: int) -> dict[str, bytes]:
        """The metadata objects of an array of *length* items, by key."""
        blosc = {"cname": "zstd", "clevel": self.zstd_level, "blocksize": (self.block_length or 0) * self.numpy_dtype.itemsize}
        if self.zarr_format == 2:
            # Checksummed frames under the plain codec: every reader takes them, and checks them.
            zstd: JsonObject = {"id": "zstd", "level": self.zstd_level}
            array = {
                "zarr_format": 2,
                "shape": [length],
                "chunks": [self.chunk_length],
                "dtype": self.numpy_dtype.str,
                "compressor": zstd if self.block_length is None else {"id": "blosc", "shuffle": 0, **blosc},
                "fill_value": self.fill_value,
                "order": "C",
                "filters": None,
                "dimension_separator": ".",
            }
            return {".zarray": to_json(array), ".zattrs": to_json({})}
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        crc32c = {"name": "crc32c"}
        if self.block_length is None:
            zstd = {"name": "zstd", "configuration": {"level": self.zstd_level, "checksum": True}}
        else:
            zstd = {"name": "blosc", "configuration": {"typesize": 1, "shuffle": "noshuffle", **blosc}}
        sharding = {
            "chunk_shape": [self.chunk_length],
            "codecs": [little, crc32c if self.zstd_level is None else zstd],
            "index_codecs": [little, crc32c],
            "index_location": "end",
        }
        array = {
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
        return {"zarr.json": to_json(array)}

    def encode_chunk(self, items: AnyArray) -> bytes:
        assert self.zstd_level is not None
        if self.block_length is not None:
            return codecs.encode_blocks(items, self.block_length, self.zstd_level)
        return codecs.encode_frame(items, self.zstd_level)

    def chunk_size(self, stored: memoryview) -> int:
        """Bytes of the compressed chunk that is at the beginning, whatever comes after it. ValueError if it is cut off."""
        return codecs.frame_size(stored) if self.block_length is None else codecs.buffer_size(stored)

    def decode_chunk(self, stored: memoryview) -> AnyArray:
        """One inner chunk: dtype[chunk_length]. ValueError if its checksum or size is wrong."""
        size = self.chunk_length * self.numpy_dtype.itemsize
        if self.block_length is not None:
            return np.concatenate([self.decode_block(stored, n) for n in range(self.chunk_length // self.block_length)])
        if self.zstd_level is not None:
            return np.frombuffer(codecs.inflate("zstd", stored, size), self.numpy_dtype)
        codecs.check_size(stored, size + 4)
        return np.frombuffer(codecs.without_crc32c(stored), self.numpy_dtype)

    def decode_block(self, stored: memoryview, n: int) -> AnyArray:
        """Block *n* of a compressed chunk, or all of one that has no blocks: dtype[block_length]. ValueError if its checksum or
        size is wrong.
        """
        size = self.chunk_length * self.numpy_dtype.itemsize
        if self.block_length is None:
            return np.frombuffer(codecs.decode_frame(stored, size), self.numpy_dtype)
        block = codecs.decode_block(stored, n, size, self.block_length * self.numpy_dtype.itemsize)
        return np.frombuffer(block, self.numpy_dtype)


class Layout(NamedTuple):
    """The specifications of the arrays under one name. Versions of other bytes have another ``edition`` in their ids."""

    name: LayoutName
    encoded_tokens: ArraySpec
    seq_starts: ArraySpec
    edition: str = ""

    @property
    def zarr_format(self) -> Literal[2, 3]:
        return self.encoded_tokens.zarr_format

    def token_array(self, name: str) -> ArraySpec:
        """One of TOKEN_ARRAYS. It is cut at the same places as the tokens: a writer of whole token objects writes whole objects
        of it.
        """
        return replace(self.encoded_tokens, dtype=TOKEN_ARRAYS[name].dtype)


def _layout(name: LayoutName, edition: str, tokens: ArraySpec) -> Layout:
    starts = (1 << 20, 1 << 14) if tokens.zarr_format == 3 else (1 << 14, 1 << 14)
    return Layout(name, tokens, ArraySpec("uint64", "sequence", tokens.zarr_format, *starts, 3), edition)


LAYOUTS: dict[LayoutName, Layout] = {
    "mmap": _layout("mmap", "mmap", ArraySpec("uint32", "token", 3, 1 << 26, 1 << 16, None)),
    "compact": _layout("compact", "compact 2", ArraySpec("uint32", "token", 3, 1 << 26, 1 << 14, 5, 1 << 12)),
    "zarr2": _layout("zarr2", "zarr2 2", ArraySpec("uint32", "token", 2, 1 << 18, 1 << 18, 3, 1 << 15)),
}
"""``mmap``: raw shards for local disks. ``compact``: zstd, for object stores. ``zarr2``: zarr v2, for zarr 2 readers.

A block is what a random read decodes, an inner chunk what it asks an object store for. Smaller blocks compress worse, so
``compact`` makes up for it by a higher level, which takes the writer three times as long.
"""


def group_metadata(zarr_format: Literal[2, 3], attributes: JsonObject) -> dict[str, bytes]:
    """The metadata objects of a group, by key."""
    if zarr_format == 2:
        return {".zattrs": to_json(attributes), ".zgroup": to_json({"zarr_format": 2})}
    return {"zarr.json": to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})}


def to_json(value: Any, indent: int | None = 2) -> bytes:
    """JSON in one fixed form: equal values give equal bytes."""
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
