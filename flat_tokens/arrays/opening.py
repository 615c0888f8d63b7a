"""Opening arrays of this library and of other writers. Metadata is read within limits."""

from __future__ import annotations

import json
import reprlib
from typing import Any, Literal

import numpy as np

from flat_tokens.arrays.foreign import check_lengths, foreign_spec
from flat_tokens.arrays.layouts import MAX_LENGTH, ArraySpec
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.stores.store import Store

MAX_METADATA_BYTES = 1 << 20


def read_metadata(store: Store, node: Literal["array", "group"]) -> dict[str, Any]:
    """The zarr metadata of an array or group, v3 or v2, with its attributes under ``attributes``.

    FileNotFoundError if there is none; ValueError if it is not metadata of such a node.
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
    """A small JSON object, in one request. FileNotFoundError if there is none; ValueError, naming it, if it is not JSON or
    not small.
    """
    (data,) = store.read_ranges([key], [0], [MAX_METADATA_BYTES + 1])
    if isinstance(data, FileNotFoundError):
        raise data
    if len(data) > MAX_METADATA_BYTES:
        raise ValueError(f"{store.path(key)}: is larger than metadata may be ({MAX_METADATA_BYTES} bytes)")
    return json_object(data, store.path(key))


def json_object(data: bytes, path: str) -> dict[str, Any]:
    """The JSON object in *data*. ValueError, naming the file at *path*, if it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return value


def open_array(store: Store, dtype: Literal["uint32", "uint64"], *, in_order: bool = False) -> StoredArray:
    """Open the array at *store*'s root. ValueError, naming it, if it is not a plain array of that type.

    *in_order*: it was written by this library; see ``StoredArray``.
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
        if inner["name"] != "zstd":
            return None
        same = ("chunks", "compressor", "filters", "order", "fill_value")
    check_lengths(object_length, chunk_length, np.dtype(dtype).itemsize)
    level = inner["configuration"].get("level") if inner["name"] == "zstd" else None
    spec = ArraySpec(dtype, "", zarr_format, object_length, chunk_length, level)
    mine = json.loads(next(iter(spec.metadata(0).values())))
    return spec if all(mine[key] == metadata.get(key) for key in same) and not metadata.get("storage_transformers") else None
