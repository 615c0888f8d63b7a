"""LitData's chunks of tokens, which its ``TokensLoader`` reads: ``chunk-0-0.bin``, with an ``index.json`` a split.

A chunk is ``uint32 n | uint32 offset[n + 1] | items``, its offsets counted from the file's start. An item is one document's
tokens and nothing else. The index lists the chunks with their number of tokens, and says the type of a token. The loader lays the
documents of a chunk end to end and cuts them into blocks.
"""

from __future__ import annotations

import posixpath
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flat_tokens.annotations import DType, JsonObject, UInt32s, UInt64s
from flat_tokens.formats import contract
from flat_tokens.formats.compression import Codec, IndexedBytes
from flat_tokens.formats.contract import (
    INDEX,
    ExportFile,
    Files,
    Format,
    IndexedDocuments,
    IndexedFile,
    JoinedReaders,
    Readable,
    Splits,
    name_in_index,
    put_indices,
    reading_index,
    token_ids,
)
from flat_tokens.manifest import SplitName
from flat_tokens.options import digits
from flat_tokens.stores.store import Store, StoredObject

MAX_CHUNK_BYTES = 2**32
"""Offsets are 32 bits wide."""
INT32 = np.dtype("<i4")
TENSOR, ARRAY = "no_header_tensor", "no_header_numpy"
TYPES = {
    TENSOR: {11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"},
    ARRAY: {0: "<i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "<u1", 5: "<u2", 6: "<u4", 7: "<u8"},
}
"""The types of integers by their numbers in an index, of items that are torch's tensors and numpy's arrays."""
WRITTEN_TYPE = 16
A_TENSOR = '[1, {"type": null, "context": null, "children_spec": []}]'
"""An item that is one tensor, as the index describes it."""


@dataclass(frozen=True)
class Litdata(contract.Options):
    """How chunks for ``TokensLoader`` are written and read.

    ``end_of_text``: closes every document on the way out, and is removed from its end on the way in; None leaves the
    tokens as they are. ``size_limit``: bytes of a chunk, unless one document is larger.
    """

    end_of_text: int | None = None
    size_limit: int = 1 << 26

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size_limit >= MAX_CHUNK_BYTES:
            raise ValueError(f"size_limit is {self.size_limit}, but the chunks' offsets end at {MAX_CHUNK_BYTES - 1}")


def plan(splits: Splits, options: Litdata) -> list[ExportFile]:
    """Files of documents. The index of a split is written at last."""
    files, alone = [], 4 + INT32.itemsize * (options.end_of_text is not None)  # a document's offset and end
    for name, split in splits.items():
        ranges = contract.byte_ranges(split, options.size_limit, 8, alone, MAX_CHUNK_BYTES, "chunks")
        files += [ExportFile(f"{name}/chunk-0-{i}.bin", name, start, stop) for i, (start, stop) in enumerate(ranges)]
    return files


def write(splits: Splits, file: ExportFile, store: Store, options: Litdata) -> list[StoredObject]:
    documents = IndexedDocuments.of(splits, file, options)
    count = file.stop - file.start
    head = _head_bytes(count)
    with store.create(file.key) as writer:
        writer.write(np.array([count, head], "<u4"))
        for _, ends in documents.bounds(head, INT32.itemsize):
            writer.write(ends.astype("<u4"))
        documents.write_tokens(writer, INT32)
    return [writer.stored]


def finish(splits: Splits, written: Sequence[StoredObject], store: Store, options: Litdata) -> list[StoredObject]:
    """Each split's index."""

    def described(file: ExportFile, item: StoredObject) -> JsonObject:
        count, name = file.stop - file.start, posixpath.basename(item.key)
        tokens = (item.size - _head_bytes(count)) // INT32.itemsize
        return {"chunk_bytes": item.size, "chunk_size": count, "dim": tokens, "filename": name}

    config = {
        "chunk_bytes": options.size_limit,
        "chunk_size": None,
        "compression": None,
        "data_format": [f"{TENSOR}:{WRITTEN_TYPE}"],
        "data_spec": A_TENSOR,
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    return put_indices(store, plan(splits, options), written, described, "chunks", config=config)


def recognise(files: Files) -> bool:
    """Whether there is an index of chunks of tensors."""
    keys = contract.indices(files)
    ends = (files.store.read_range(key, max(files.store.size(key) - (1 << 16), 0), files.store.size(key)) for key in keys)
    return any(b'"data_format"' in end and b'"no_header_' in end for end in ends)


def open_chunks(files: Files, options: Litdata) -> Mapping[SplitName, Readable]:
    """The splits of a directory with an ``index.json``, or with one in each of its directories."""
    if not (found := contract.by_index(files, lambda key: _chunks(files.store, key, options))):
        raise ValueError(f"{files.url}: has no {INDEX}. An export writes it when it is finished.")
    return {split: JoinedReaders(tuple(chunks)) for split, chunks in found.items()}


def _chunks(store: Store, key: str, options: Litdata) -> list[IndexedFile]:
    """The chunks that an index lists. ValueError, naming the index, if it is not one of tokens."""
    with reading_index(store, key) as index:
        config, chunks = index["config"], index["chunks"]
        compression, loader = config["compression"], config.get("item_loader", "TokensLoader")
        if config.get("encryption"):
            raise ValueError("lists encrypted chunks. Decrypt them with LitData.")
        if compression not in (None, "zstd") or config.get("compression_level") not in (None, "chunk"):
            raise ValueError(f"lists chunks packed by {reprlib.repr(compression)}; those packed whole by zstd are read")
        if loader != "TokensLoader":
            raise ValueError(
                f"is for {reprlib.repr(loader)}; chunks for TokensLoader are read: optimize(item_loader=TokensLoader())"
            )
        if not isinstance(chunks, list):
            raise ValueError(f"has chunks that are not a list, but {reprlib.repr(chunks)}")
        dtype, directory = _token_type(config["data_format"]), store / posixpath.dirname(key)
        return [_chunk(directory, chunk, dtype, compression, options) for chunk in chunks]


def _token_type(kinds: Any) -> DType:
    """The type of the tokens. ValueError if the items are not one tensor or array of integers each."""
    kind, _, number = str(kinds[0]).partition(":") if len(kinds) == 1 else ("", "", "")
    code = digits(number)
    found = None if code is None else TYPES.get(kind, {}).get(code)
    if found is None:
        raise ValueError(f"lists items of {reprlib.repr(kinds)}, but tokens are one tensor or array of whole numbers")
    return np.dtype(found)


def _chunk(store: Store, entry: Any, dtype: DType, codec: Codec | None, options: Litdata) -> IndexedFile:
    """The chunk of an index's *entry*."""
    name, count, tokens = name_in_index(entry["filename"]), entry["chunk_size"], entry["dim"]
    are_numbers = all(type(number) is int and 0 <= number < MAX_CHUNK_BYTES for number in (count, tokens))
    if not are_numbers or (tokens and not count):
        raise ValueError(f"lists {name} with {reprlib.repr(count)} items of {reprlib.repr(tokens)} tokens")
    chunk = Chunk(IndexedBytes(store, name, _head_bytes(count) + tokens * dtype.itemsize, codec), count, tokens, dtype)
    return IndexedFile(chunk, count, chunk.entries, options.end_of_text)


def _head_bytes(count: int) -> int:
    """Bytes before the first of *count* items."""
    return 4 * (count + 2)


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tokens of a chunk of *count* items, *length* in all."""

    file: IndexedBytes
    count: int
    length: int
    dtype: DType

    @property
    def path(self) -> str:
        return self.file.path

    def entries(self, first: int, last: int) -> UInt64s:
        """``seq_starts[first : last + 1]`` of the chunk. ValueError if its offsets are not in order."""
        head, width = self._head, self.dtype.itemsize
        offsets = self.file.read(4 * (first + 1), 4 * (last + 2)).view("<u4").astype(np.int64) - head
        if (offsets[1:] < offsets[:-1]).any() or offsets[0] < 0 or offsets[-1] > self.length * width or (offsets % width).any():
            raise ValueError(f"{self.path}: items {first} to {last} are not in order, in whole tokens")
        return (offsets // width).astype(np.uint64)

    def tokens(self, start: int, stop: int) -> UInt32s:
        """Tokens ``start:stop`` of the chunk: uint32[stop - start]."""
        width = self.dtype.itemsize
        data = self.file.read(self._head + start * width, self._head + stop * width)
        return token_ids(data.view(self.dtype), self.path)

    @cached_property
    def _head(self) -> int:
        """Bytes before the first item. ValueError if the chunk is not the one of the index."""
        head, size = _head_bytes(self.count), self.file.size
        count, first = self.file.read(0, 8).view("<u4").tolist()
        last = int(self.file.read(head - 4, head).view("<u4")[0])
        if (count, first, last) != (self.count, head, size):
            raise ValueError(
                f"{self.path}: has {count} items in bytes {first} to {last}, but by the index {self.count} in {head} to {size}. "
                "The two are not of one dataset."
            )
        return head


LITDATA = Format(
    name="litdata",
    summary="LitData's chunks, as its TokensLoader reads them",
    keeps="sequences, empty ones too; ids up to 2**31 - 1",
    loses="nothing",
    options=Litdata,
    recognise=recognise,
    open=open_chunks,
    plan=plan,
    write=write,
    finish=finish,
)
