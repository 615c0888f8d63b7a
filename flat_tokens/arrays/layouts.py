"""Layouts: how the arrays of a dataset are divided into stored objects, and the metadata of these."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from flat_tokens.arrays.codecs import ShardIndex, check_size, inflate, without_crc32c

LayoutName = Literal["mmap", "compact", "zarr2"]

MAX_LENGTH = 1 << 48


@dataclass(frozen=True)
class ArraySpec:
    """The storage of a one-dimensional array. ``zstd_level`` None means raw items, each inner chunk with its crc32c."""

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
        """None: every chunk is stored, so a missing one is an error."""
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
        """One inner chunk: dtype[chunk_length]. ValueError if its checksum or size is wrong."""
        size = self.chunk_length * self.numpy_dtype.itemsize
        if self.zstd_level is not None:
            return np.frombuffer(inflate("zstd", stored, size), self.numpy_dtype)
        check_size(stored, size + 4)
        return np.frombuffer(without_crc32c(stored), self.numpy_dtype)


class Layout(NamedTuple):
    """The specifications of both arrays under one name."""

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
    """JSON in one fixed form: equal values give equal bytes."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
