"""MosaicML's MDS: shards of samples that ``mosaicml-streaming`` reads, with an ``index.json`` a split.

Tokens are a column of the samples. A sample is a document, or, with ``length``, a range of all documents laid end to end.

A shard is ``uint32 n | uint32 offset[n + 1] | configuration, JSON | samples``, its offsets counted from the file's start. A
sample is the sizes of its columns of variable size (uint32 each), then the columns, by name. A column of type ``ndarray:int32``
holds, in each sample, the kind of an array and its values: one byte ``dimensions << 2 | c``, a shape of integers of ``2 ** c``
bytes, as narrow as they can be, the items. One of type ``ndarray`` has a byte before that, the type of the items, which each
sample may choose.
"""

from __future__ import annotations

import json
import posixpath
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from flat_tokens.annotations import AnyArray, Bools, DType, Int32s, Int64Pair, Int64s, JsonObject, UInt8s, UInt32s, UInt64s
from flat_tokens.formats import contract
from flat_tokens.formats.compression import LEVELS, MAX_WHOLE_BYTES, IndexedBytes, compress
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
    index_errors,
    name_in_index,
    put_indices,
    reading_index,
    split_of,
    token_ids,
)
from flat_tokens.formats.nanogpt import Stream, StreamReader, check_bounds, stream, stream_length
from flat_tokens.manifest import SplitName
from flat_tokens.rows.split import STARTS_AT_A_TIME
from flat_tokens.rows.views import running_sums
from flat_tokens.stores.store import Store, StoredObject, json_object

INT32 = np.dtype("<i4")
MAX_SHARD_BYTES = 2**32
"""Offsets are 32 bits wide."""
BYTES_AT_A_TIME = 16 << 20
TYPE_BYTES = {8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""The types of integers by their byte in a sample."""


def shape_bytes(lengths: Int64s) -> Int64s:
    return np.where(lengths < 1 << 8, 1, np.where(lengths < 1 << 16, 2, 4))


class MdsLayout(NamedTuple):
    """The layout of a shard's samples: the place of the tokens among their columns, and their type."""

    sizes: tuple[int | None, ...]
    """Sizes of the columns in the order of their names; None if each sample has its own."""
    at: int
    dtype: DType | None
    """None if each sample has its own."""
    has_shape: bool
    """Whether the array's shape precedes the items."""

    @property
    def variable(self) -> list[int]:
        """The columns of variable size."""
        return [i for i, size in enumerate(self.sizes) if size is None]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a sample without its columns of variable size."""
        return 4 * len(self.variable) + sum(size for size in self.sizes if size is not None)


class Samples(NamedTuple):
    """Sample i: its bytes ``offsets[i] : offsets[i + 1]``, where in them its tokens begin, and their numbers in the shard."""

    offsets: Int64s
    begins: Int64s
    entries: UInt64s
    types: UInt8s | None
    """The byte of each sample's type, where it has one."""

    def dtype(self, i: int, layout: MdsLayout) -> DType:
        """The type of sample *i*'s tokens."""
        if layout.dtype is not None:
            return layout.dtype
        assert self.types is not None
        return np.dtype(TYPE_BYTES[int(self.types[i])])

    def alike(self, first: int, last: int) -> int:
        """The end of the samples from *first* on, up to *last*, that are of its type."""
        if self.types is None:
            return last
        other = np.flatnonzero(self.types[first:last] != self.types[first])
        return first + int(other[0]) if len(other) else last

    def lengths(self, first: int, last: int) -> Int64s:
        """Tokens of samples ``first:last``: int64[last - first]."""
        entries = self.entries[first : last + 1].astype(np.int64)
        return entries[1:] - entries[:-1]


@dataclass(frozen=True, eq=False)  # caches are for one opening of a shard: the file may change
class Shard:
    """The tokens of all samples of a shard."""

    file: IndexedBytes
    layout: MdsLayout
    sample_count: int

    @property
    def path(self) -> str:
        return self.file.path

    @cached_property
    def length(self) -> int:
        """Number of tokens in all samples."""
        return int(_samples_of(self).entries[-1])

    def entries(self, first: int, last: int) -> UInt64s:
        return _samples_of(self).entries[first : last + 1]

    def tokens(self, start: int, stop: int) -> UInt32s:
        """Tokens ``start:stop`` of the shard: uint32[stop - start]. ValueError if a sample is damaged."""
        samples = _samples_of(self)
        out, begun = np.empty(stop - start, np.uint32), start
        while start < stop:
            first = int(np.searchsorted(samples.entries, np.uint64(start), side="right")) - 1
            low = int(samples.offsets[first])
            last = int(np.searchsorted(samples.offsets, low + BYTES_AT_A_TIME, side="right")) - 1
            last = max(min(last, int(np.searchsorted(samples.entries, np.uint64(stop)))), first + 1)
            last, dtype = samples.alike(first, last), samples.dtype(first, self.layout)
            width = dtype.itemsize
            end = min(stop, int(samples.entries[last]))
            if last == first + 1:  # perhaps a very large one
                self._check_heads(samples, first, last, self.file.read(low, int(samples.begins[first])))
                begin = int(samples.begins[first]) + (start - int(samples.entries[first])) * width
                found = self.file.read(begin, begin + (end - start) * width)
            else:
                data = self.file.read(low, int(samples.offsets[last]))
                self._check_heads(samples, first, last, data)
                found = self._between(samples, first, last, data, width)[(start - int(samples.entries[first])) * width :]
            out[start - begun : end - begun] = token_ids(found[: (end - start) * width].view(dtype), self.path)
            start = end
        return out

    def _check_heads(self, samples: Samples, first: int, last: int, data: UInt8s) -> None:
        """ValueError if the sizes and shapes in samples do not fit their offsets."""
        layout, low = self.layout, samples.offsets[first]
        if layout.sizes[layout.at] is not None:
            return
        lengths, dtype, types = samples.lengths(first, last), samples.dtype(first, layout), samples.types
        shapes = shape_bytes(lengths)
        sizes = lengths * dtype.itemsize + (1 + shapes) * layout.has_shape + (types is not None)
        at = samples.offsets[first:last] - low + 4 * layout.variable.index(layout.at)
        wrong = _integers(data, at, 4) != sizes
        if layout.has_shape:
            at = samples.begins[first:last] - low - shapes
            wrong |= data[at - 1] != (1 << 2 | shapes >> 1)
            if types is not None:
                wrong |= data[at - 2] != types[first:last]
            for width in (1, 2, 4):
                these = np.flatnonzero(shapes == width)
                wrong[these] |= _integers(data, at[these], width) != lengths[these]
        if wrong.any():
            raise ValueError(
                f"{self.path}: sample {first + int(np.flatnonzero(wrong)[0])} is not one array of {dtype.name} in one "
                "dimension, as its offset says. The shard is damaged, or of another kind."
            )

    def _between(self, samples: Samples, first: int, last: int, data: UInt8s, width: int) -> UInt8s:
        """The bytes of the tokens, *width* each, among all bytes of samples ``first:last``."""
        begins = samples.begins[first:last]
        ends = begins + samples.lengths(first, last) * width
        sizes = np.empty(2 * len(begins) + 1, np.int64)
        sizes[1::2] = ends - begins
        sizes[0::2] = np.append(begins, samples.offsets[last]) - np.append(samples.offsets[first], ends)
        found: UInt8s = data[np.repeat(np.arange(len(sizes)) % 2 == 1, sizes)]
        return found


def _integers(data: UInt8s, at: Int64s, width: int) -> Int64s:
    """The integers of *width* bytes at these positions."""
    stored: UInt8s = data[at[:, None] + np.arange(width)]
    return stored.view(f"<u{width}")[:, 0].astype(np.int64)


@lru_cache(maxsize=4)
def _samples_of(shard: Shard) -> Samples:
    """The places of a shard's samples, from its offsets. ValueError if they are not in order within the shard."""
    layout, count, path, size = shard.layout, shard.sample_count, shard.path, shard.file.size
    if (ends := 4 * (count + 2)) > size:
        raise ValueError(f"{path}: has {size} bytes, which do not hold {count} samples")
    head = shard.file.read(0, ends).view("<u4")
    offsets = head[1:].astype(np.int64)
    if head[0] != count:
        raise ValueError(f"{path}: has {head[0]} samples, but the index says {count}")
    sizes = np.diff(offsets)
    if offsets[0] < ends or offsets[-1] != size or (sizes < layout.fixed_bytes).any():
        raise ValueError(f"{path}: its offsets do not run from {ends} to {size}, each leaving room for a sample")
    variable = layout.variable
    if variable == [layout.at]:
        stored = (sizes - layout.fixed_bytes)[:, None]
    else:
        stored = _read_heads(shard, offsets, offsets[:-1], 4 * len(variable)).view("<u4").astype(np.int64)
        if (wrong := np.flatnonzero(stored.sum(1) + layout.fixed_bytes != sizes)).size:
            raise ValueError(f"{path}: sample {wrong[0]} has columns of other sizes than its offset says")
    begins = offsets[:-1] + 4 * len(variable)
    for i, fixed in enumerate(layout.sizes[: layout.at + 1]):
        held = stored[:, variable.index(i)] if fixed is None else np.full(count, fixed)
        begins = begins + held * (i < layout.at)
    types: UInt8s | None = None
    if layout.dtype is not None:
        named, width = layout.dtype.name, np.full(1, layout.dtype.itemsize)
    else:
        if (wrong := np.flatnonzero(held < 1)).size:
            raise ValueError(f"{path}: sample {wrong[0]} has no byte for the type of its tokens")
        types = _read_heads(shard, offsets, begins, 1)[:, 0]
        if (wrong := np.flatnonzero(~np.isin(types, list(TYPE_BYTES)))).size:
            raise ValueError(f"{path}: sample {wrong[0]} has type {types[wrong[0]]}, but tokens have one of {list(TYPE_BYTES)}")
        # A type's byte is its bits, and one more where it is signed.
        named, width, begins, held = "integers'", types.astype(np.int64) // 8, begins + 1, held - 1
    lengths, shapes = _lengths(held, width, layout.has_shape)
    if (wrong := np.flatnonzero(lengths < 0)).size:
        raise ValueError(f"{path}: sample {wrong[0]} has {held[wrong[0]]} bytes of tokens, which are no {named} array")
    return Samples(offsets, begins + shapes, running_sums(lengths).astype(np.uint64), types)


def _lengths(held: Int64s, width: Int64s, has_shape: bool) -> Int64Pair:
    """The number of tokens, of *width* bytes, in columns of this many bytes, -1 if that is impossible, and of the bytes
    before.
    """
    shapes = np.zeros_like(held)
    if has_shape:
        shapes = 1 + np.where(held < 3 + (1 << 8) * width, 1, np.where(held < 4 + (1 << 16) * width, 2, 4))
    lengths, rest = np.divmod(held - shapes, width)
    fits = (rest == 0) & (lengths >= 0)
    if has_shape:
        fits &= 1 + shape_bytes(lengths) == shapes
    return np.where(fits, lengths, -1), shapes


def _read_heads(shard: Shard, offsets: Int64s, begins: Int64s, size: int) -> UInt8s:
    """The *size* bytes of each sample from *begins* on: uint8[n, size]. Needs one pass over the shard."""
    heads = np.empty((len(begins), size), np.uint8)
    first = 0
    while first < len(heads):
        last = max(int(np.searchsorted(offsets, offsets[first] + BYTES_AT_A_TIME, side="right")) - 1, first + 1)
        low, high = (begins[first], begins[first] + size) if last == first + 1 else (offsets[first], offsets[last])
        data = shard.file.read(int(low), int(high))
        if (wrong := np.flatnonzero(begins[first:last] + size > offsets[first + 1 : last + 1])).size:
            raise ValueError(f"{shard.path}: sample {first + wrong[0]} is shorter than its columns")
        heads[first:last] = data[(begins[first:last] - low)[:, None] + np.arange(size)]
        first = last
    return heads


HEAD_BYTES = 9
"""Of a sample: the array's size (4), dimensions (1) and shape (up to 4)."""
MAX_SAMPLES = 1 << 24
MAX_CONFIG_BYTES = 1 << 20
COLUMNS = ("tokens", "input_ids")
TYPES = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Mds(Stream):
    """How MDS shards are written and read.

    ``end_of_text``: closes every document on the way out, and is removed on the way in. ``length``: samples of this many tokens
    each, of one document after the other, as LLM Foundry packs them; on the way in the documents are rebuilt from
    ``end_of_text``. ``drop_last``: leave out what remains for the last sample of a split instead of making it shorter.
    ``column``: written ``tokens``, read ``tokens`` or ``input_ids`` if it is None. ``bytes_type``: of the tokens in a
    column of bytes, which does not say it. ``size_limit``: bytes of a shard before it is compressed, unless one sample is larger.
    ``compression``: of the files; br and snappy need pyarrow.
    """

    column: str | None = None
    length: int | None = None
    drop_last: bool = False
    size_limit: int = 1 << 26
    bytes_type: str = "int64"
    compression: Literal["none", "zstd", "gz", "br", "bz2", "snappy"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size_limit >= self.end_bytes:
            what = "the shards' offsets end" if self.compression == "none" else "shards are compressed in memory, and end"
            raise ValueError(f"size_limit is {self.size_limit}, but {what} at {self.end_bytes - 1}")
        if self.length is not None and _sample_bytes(self.length) >= MAX_SHARD_BYTES // 2:
            raise ValueError(f"length is {self.length}, but the shards' offsets end at {MAX_SHARD_BYTES - 1}")
        if self.drop_last and self.length is None:
            raise ValueError("drop_last is set, but only where there is a length can the last sample be shorter")
        if self.bytes_type not in TYPES:
            raise ValueError(f"bytes_type is {self.bytes_type!r}, but it is one of {', '.join(sorted(TYPES))}")

    @property
    def end_bytes(self) -> int:
        """A shard is smaller than this."""
        return MAX_SHARD_BYTES if self.compression == "none" else MAX_WHOLE_BYTES


# Writing


def _config(options: Mds) -> JsonObject:
    """The description of a shard, for its head and for the index."""
    codec = options.compression
    level = None if codec == "none" else LEVELS[codec]
    return {
        "column_encodings": [f"ndarray:{INT32.name}"],
        "column_names": [options.column or COLUMNS[0]],
        "column_sizes": [None],
        "compression": None if codec == "none" else codec if level is None else f"{codec}:{level}",
        "format": "mds",
        "hashes": ["sha256"],  # streaming validates it, and it is known for every stored object
        "size_limit": options.size_limit,
        "version": 2,
    }


def _sample_bytes(length: int) -> int:
    """The most bytes that a sample of this many tokens takes in a shard, including its offset."""
    return 4 + HEAD_BYTES + INT32.itemsize * length


def plan(splits: Splits, options: Mds) -> list[ExportFile]:
    """Files of samples: sequences, or ranges of ``length`` tokens. A split without any has no files."""
    head = len(_shard_head(0, options)) + 4
    files = []
    for name, split in splits.items():
        if options.length is None:
            alone = _sample_bytes(int(options.end_of_text is not None))
            ranges = contract.byte_ranges(split, options.size_limit, head, alone, options.end_bytes, "shards", MAX_SAMPLES)
        else:
            check_bounds(split, options, f"samples of {options.length} tokens keep")
            total = (stream_length(split, options) + (0 if options.drop_last else options.length - 1)) // options.length
            per_shard = min(max((options.size_limit - head) // _sample_bytes(options.length), 1), MAX_SAMPLES)
            ranges = [(start, min(start + per_shard, total)) for start in range(0, total, per_shard)]
        ending = "" if options.compression == "none" else f".{options.compression}"
        files += [ExportFile(f"{name}/shard.{i:05d}.mds{ending}", name, *one) for i, one in enumerate(ranges)]
    if not files and any(split.seq_count for split in splits.values()):
        raise ValueError(f"no split has as many as {options.length} tokens. Set a smaller length, or drop_last to false.")
    return files


def write(splits: Splits, file: ExportFile, store: Store, options: Mds) -> list[StoredObject]:
    with replace(store, digests="sha256").create(file.key) as writer:
        if options.compression == "none":
            for data in _shard_bytes(splits, file, options):
                writer.write(data)
        else:
            writer.write(compress(options.compression, b"".join(map(bytes, _shard_bytes(splits, file, options)))))
    return [writer.stored]


def _shard_bytes(splits: Splits, file: ExportFile, options: Mds) -> Iterator[bytes | AnyArray]:
    """One shard, in two passes: over the samples' lengths for the offsets, then over the tokens."""
    lengths, tokens = _contents(splits, file, options)
    head = _shard_head(file.stop - file.start, options)
    config, at = head[4:], _first_sample(file, head)
    yield head[:4]
    yield np.array([at], "<u4")
    for some in lengths():
        ends = at + np.cumsum(_stored_bytes(some))
        yield ends.astype("<u4")
        at = int(ends[-1])
    yield config
    yield from _samples(lengths(), tokens)


def _contents(splits: Splits, file: ExportFile, options: Mds) -> tuple[Callable[[], Iterator[Int64s]], Iterator[Int32s]]:
    """The lengths of a shard's samples, and their tokens."""
    split, (_, _, start, stop) = splits[file.split], file
    if options.length is None:
        documents = IndexedDocuments(split, start, stop, options.end_of_text)
        return documents.lengths, documents.tokens(INT32)
    first, last = start * options.length, min(stop * options.length, stream_length(split, options))
    return partial(_sample_lengths, last - first, options.length), stream(split, first, last, options, "after", INT32)


def _first_sample(file: ExportFile, head: bytes) -> int:
    """The place of the first sample of a shard."""
    return len(head) + 4 * (file.stop - file.start + 1)


def _stored_bytes(lengths: Int64s) -> Int64s:
    """Bytes of samples of this many tokens."""
    return 5 + shape_bytes(lengths) + INT32.itemsize * lengths


def _shard_head(count: int, options: Mds) -> bytes:
    """The bytes before and after the offsets."""
    return np.array([count], "<u4").tobytes() + json.dumps(_config(options), sort_keys=True).encode()


def _sample_lengths(total: int, length: int) -> Iterator[Int64s]:
    """Lengths of the samples of *total* tokens."""
    for start in range(0, total, STARTS_AT_A_TIME * length):
        stop = min(start + STARTS_AT_A_TIME * length, total)
        yield np.diff(np.append(np.arange(start, stop, length), stop))


def _samples(lengths: Iterator[Int64s], tokens: Iterator[Int32s]) -> Iterator[UInt8s]:
    """The bytes of samples of these lengths, in arrays about as large as those of *tokens*, which may end anywhere."""
    ahead = np.empty(0, np.int64)  # lengths of samples that have not begun
    begun = 0  # missing tokens of the one that has begun
    for some in tokens:
        while ahead.sum() + begun < len(some) and (more := next(lengths, None)) is not None:
            ahead = np.concatenate([ahead, more])
        starts = begun + np.cumsum(ahead) - ahead
        count = int(np.searchsorted(starts, len(some)))
        yield _interleaved(some, starts[:count], ahead[:count])
        begun, ahead = begun + int(ahead[:count].sum()) - len(some), ahead[count:]
    for rest in (ahead, *lengths):  # empty samples at the end
        yield _interleaved(np.empty(0, np.int32), np.zeros_like(rest), rest)


def _interleaved(tokens: Int32s, starts: Int64s, lengths: Int64s) -> UInt8s:
    """The bytes of *tokens*, with the heads of the samples of these *lengths* that begin at *starts* among them."""
    sizes = np.empty(2 * len(lengths) + 1, np.int64)
    sizes[0::2] = INT32.itemsize * np.diff(np.concatenate([[0], starts, [len(tokens)]]))
    sizes[1::2] = 5 + shape_bytes(lengths)
    is_token = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
    out = np.empty(len(is_token), np.uint8)
    out[is_token] = tokens.astype(INT32, copy=False).view(np.uint8)
    heads, used = _heads(lengths)
    places = np.cumsum(sizes)[:-1:2]
    out[(places[:, None] + np.arange(HEAD_BYTES))[used]] = heads[used]
    return out


def _heads(lengths: Int64s) -> tuple[UInt8s, Bools]:
    """The heads of samples: uint8[n, 9], and a mask of the bytes that are used: bool[n, 9]."""
    width, heads = shape_bytes(lengths), np.empty((len(lengths), HEAD_BYTES), np.uint8)
    heads[:, :4] = (1 + width + INT32.itemsize * lengths).astype("<u4")[:, None].view(np.uint8)
    heads[:, 4] = 1 << 2 | width >> 1  # one dimension; widths 1, 2 and 4 are 0, 1 and 2
    heads[:, 5:] = lengths.astype("<u4")[:, None].view(np.uint8)
    return heads, np.arange(HEAD_BYTES) < 5 + width[:, None]


def finish(splits: Splits, written: Sequence[StoredObject], store: Store, options: Mds) -> list[StoredObject]:
    """Each split's index."""

    def described(file: ExportFile, item: StoredObject) -> JsonObject:
        name = posixpath.basename(item.key)
        stored = {"basename": name, "bytes": item.size, "hashes": {"sha256": item.digest}}
        raw, packed = stored, None
        if options.compression != "none":
            # streaming checks the hashes of the compressed file alone.
            lengths, _ = _contents(splits, file, options)
            size = _first_sample(file, _shard_head(0, options)) + sum(int(_stored_bytes(some).sum()) for some in lengths())
            raw, packed = {"basename": posixpath.splitext(name)[0], "bytes": size, "hashes": {}}, stored
        return {**_config(options), "raw_data": raw, "samples": file.stop - file.start, "zip_data": packed}

    return put_indices(store, plan(splits, options), written, described, "shards", version=2)


def recognise(files: Files) -> bool:
    if len(files.keys) == 1 and posixpath.basename(files.keys[0]) != INDEX:
        return _own_config(files.store, files.keys[0]) is not None
    heads = (files.store.read_range(key, 0, 1 << 16) for key in contract.indices(files))
    return any(b'"shards"' in head and re.search(rb'"format"\s*:\s*"mds"|"shards"\s*:\s*\[\s*\]', head) for head in heads)


def open_mds(files: Files, options: Mds) -> Mapping[SplitName, Readable]:
    """The splits of a directory with an ``index.json``, or with one in each of its directories, or of a single shard."""
    found = contract.by_index(files, lambda key: _shards(files.store, key, options))
    if not found and not contract.indices(files):
        if len(files.keys) > 1 or (config := _own_config(files.store, files.keys[0])) is None:
            raise ValueError(
                f"{files.url}: has no {INDEX}, and is not an MDS shard itself. An export writes it when it is finished."
            )
        with index_errors(files.url):
            found[split_of(files.keys[0])] = [_shard(files.store, config, options)]
    end = options.end_of_text
    if options.length is not None:
        return {split: StreamReader(tuple(shards), end, "after") for split, shards in found.items()}
    readers = {split: [IndexedFile(one, one.sample_count, one.entries, end) for one in shards] for split, shards in found.items()}
    return {split: JoinedReaders(tuple(several)) for split, several in readers.items()}


def _shards(store: Store, key: str, options: Mds) -> list[Shard]:
    """The shards that an index lists. ValueError, naming it, if it is not valid."""
    with reading_index(store, key) as index:
        if index.get("version") != 2 or not isinstance(shards := index.get("shards"), list):
            raise ValueError(f"is of version {reprlib.repr(index.get('version'))}; an index of version 2 with shards is read")
        return [_shard(store / posixpath.dirname(key), shard, options) for shard in shards]


def _own_config(store: Store, key: str) -> JsonObject | None:
    """The index entry of a shard, from the shard itself. None if it is not a shard."""
    head = store.read_range(key, 0, 8)
    count, start = (int.from_bytes(head[i : i + 4], "little") for i in (0, 4))
    before = 4 * (count + 2)
    if len(head) < 8 or not before < start <= min(store.size(key), before + MAX_CONFIG_BYTES):
        return None
    try:
        config = json_object(store.read_range(key, before, start), store.path(key))
    except ValueError:
        return None
    data = {"basename": key, "bytes": store.size(key)}
    return {**config, "raw_data": data, "samples": count, "zip_data": None} if config.get("format") == "mds" else None


def _shard(store: Store, entry: Any, options: Mds) -> Shard:
    """The shard of an index's *entry*. ValueError if the entry is not valid."""
    if entry["format"] != "mds" or entry["version"] != 2:
        raise ValueError(f"lists a shard of format {reprlib.repr(entry['format'])}, version {reprlib.repr(entry['version'])}")
    layout = _layout(entry["column_names"], entry["column_encodings"], entry["column_sizes"], options)
    count, (key, size) = entry["samples"], _data(entry["raw_data"])
    if type(count) is not int or not 0 <= count <= MAX_SAMPLES:
        raise ValueError(f"lists a shard of {reprlib.repr(count)} samples; up to {MAX_SAMPLES} are read")
    if entry["zip_data"] is None or store.exists(key):
        return Shard(IndexedBytes(store, key, size), layout, count)
    codec = next((known for known in LEVELS if known == str(entry["compression"]).partition(":")[0]), None)
    if codec is None:
        raise ValueError(
            f"lists shards packed by {reprlib.repr(entry['compression'])}; {', '.join(LEVELS)} are read. Unpack them."
        )
    packed, packed_size = _data(entry["zip_data"])
    return Shard(IndexedBytes(store, packed, size, codec, packed_size), layout, count)


def _data(entry: Any) -> tuple[str, int]:
    """Key and size of a file, which is where the index does or below."""
    name, size = name_in_index(entry["basename"]), entry["bytes"]
    if type(size) is not int or not 0 <= size < MAX_SHARD_BYTES:
        raise ValueError(f"lists {name} with {reprlib.repr(size)} bytes, but shards end at {MAX_SHARD_BYTES - 1}")
    return name, size


def _layout(names: Any, encodings: Any, sizes: Any, options: Mds) -> MdsLayout:
    """The layout of a shard's samples, by its columns. ValueError if no column has tokens, or others would be lost."""
    if not len(names) == len(encodings) == len(sizes) or not all(isinstance(text, str) for text in (*names, *encodings)):
        raise ValueError("does not list its columns' names, encodings and sizes")
    if any(size is not None and (type(size) is not int or not 0 < size < MAX_SHARD_BYTES) for size in sizes):
        raise ValueError(f"lists columns of sizes {reprlib.repr(sizes)}")
    wanted = COLUMNS if options.column is None else (options.column,)
    column = next((name for name in wanted if name in names), None)
    if column is None:
        have = ", ".join(reprlib.repr(name) for name in names[:20])
        raise ValueError(f"has no column {' or '.join(map(repr, wanted))}; it has {have}. Set column.")
    if masks := sorted({"attention_mask", "completion_mask", "assistant_masks", "labels"} & set(names) - {column}):
        raise ValueError(
            f"has {' and '.join(map(repr, masks))} next to {column!r}, which would be lost. Write the dataset as Parquet, "
            "whose masks are read, or without padding and masks."
        )
    at = names.index(column)
    if encodings[at] == "bytes":
        return MdsLayout(tuple(sizes), at, np.dtype(options.bytes_type).newbyteorder("<"), False)
    if encodings[at] == "ndarray" and sizes[at] is None:
        return MdsLayout(tuple(sizes), at, None, True)
    kind, _, rest = encodings[at].partition(":")
    dtype, _, shape = rest.partition(":")
    if kind != "ndarray" or dtype not in TYPES or (shape and not re.fullmatch(r"[0-9]{1,10}", shape)):
        raise ValueError(
            f"column {column!r} is of type {reprlib.repr(encodings[at])}, but tokens are ndarrays of integers in one dimension "
            "(ndarray:int32), or bytes. Set column."
        )
    if bool(shape) != (sizes[at] is not None) or (shape and sizes[at] != int(shape) * np.dtype(dtype).itemsize):
        raise ValueError(f"column {column!r} is of type {reprlib.repr(encodings[at])}, but of size {sizes[at]}")
    return MdsLayout(tuple(sizes), at, np.dtype(dtype).newbyteorder("<"), not shape)


MDS = Format(
    name="mds",
    summary="MosaicML's MDS shards, as mosaicml-streaming reads them",
    keeps="sequences, empty ones too; with length, by the end-of-text token",
    loses="with length, the bounds of sequences where the end-of-text token is not named on the way in",
    options=Mds,
    recognise=recognise,
    open=open_mds,
    plan=plan,
    write=write,
    finish=finish,
)
