"""Random reads of stored arrays, without zarr-python: from mapped files, from compressed chunks, from object stores.

If a local file holds the items uncompressed (layout ``mmap``), a read is a copy out of the page cache: 2,048 tokens take
about as long as from ``np.memmap``. Elsewhere only the bytes that hold the wanted items are read, those of many reads at
once, and a few decoded chunks are kept. Reads of a whole inner chunk check its crc32c or its zstd checksum; reads of a
part of a raw chunk cannot: ``verify`` does.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.codecs import ABSENT
from flat_tokens.arrays.foreign import ForeignSpec
from flat_tokens.stores.store import Store

if TYPE_CHECKING:
    from flat_tokens.arrays.layouts import ArraySpec


MAPPED_FILES = 256
"""Files kept mapped, each with a descriptor. The usual limit is 1,024."""
DECODED_BYTES = 16 << 20
"""Decoded chunks kept by an array: enough for the entries of two million sequences."""
INDEXES = 1024
"""Indexes of shards kept, of 16 KiB each in the layouts written here."""
READ_AHEAD_WORDS = 8 << 20
"""Words of a mapped file fetched ahead of a read of many chunks: the next read most likely begins where it ends."""
READ_BYTES = 16 << 20
"""Larger reads are done in steps of this many bytes."""
MERGED_GAP = 1 << 16
"""Ranges of one object that are closer than this are read by one request: a request costs more than these bytes."""
MERGED_BYTES = (4 << 20) + 4096
"""The most that one request reads, so that large reads use several streams: 4 MiB of items, and their checksums."""

WAITED_SECONDS = 30e-6
SECONDS_AN_ITEM = 4e-9
"""A copy that takes longer than this, and this much an item, has waited for the disk: memory is ten times as fast."""
READS_ASKED_FIRST = 1024
"""This many reads after such a copy ask the system for all their pages before they touch the first. Asking costs a
microsecond, so it isn't always done; from a cold cache a read is one request of the disk instead of three.
"""


class ItemRange(NamedTuple):
    """Items ``first:last`` of object *i*, which go to ``out[at:]``."""

    i: int
    first: int
    last: int
    at: int


class ByteRange(NamedTuple):
    """The bytes of an inner chunk, or of the wanted part of a raw one, in its object."""

    offset: int
    size: int


class Recent(collections.OrderedDict[Any, Any]):
    """A cache of the *limit* values that were used last. Threads may share it."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit, self._lock = limit, threading.Lock()

    def find(self, key: Any) -> Any:
        with self._lock:
            if (value := self.get(key)) is not None:
                self.move_to_end(key)
            return value

    def keep(self, key: Any, value: Any) -> Any:
        with self._lock:
            self[key] = value
            while len(self) > self._limit:
                self.popitem(last=False)
        return value


class StoredArray:
    """A one-dimensional array of *length* items, read in ranges. Only its caches hold items, up to their limits.

    *in_order*: the writer is known to store the inner chunks of raw shards in order, so that no index is needed to find
    them in an object store.
    """

    def __init__(self, store: Store, spec: ArraySpec | ForeignSpec, length: int, *, in_order: bool = False) -> None:
        self.store, self._spec, self.length = store, spec, length
        self.numpy_dtype = spec.numpy_dtype
        self._in_order = in_order
        self._object_length, self._chunk_length = spec.object_length, spec.chunk_length
        self._chunk_bytes = spec.chunk_length * self.numpy_dtype.itemsize
        # Raw inner chunks, each with its crc32c: item j of chunk c is word j + c of the file.
        raw = not isinstance(spec, ForeignSpec) and spec.zstd_level is None and spec.dtype == "uint32"
        self._is_raw, self._is_mapped = raw, raw and store.is_local and not store.read_once
        self._ask_first = 0
        """This many of the next reads tell the system what they want before they copy it."""
        self._waits = 0
        self._words: dict[int, npt.NDArray[np.uint32] | None] = {}
        self._files = Recent(MAPPED_FILES)
        self._decoded = Recent(max(1, DECODED_BYTES // self._chunk_bytes))
        self._indexes = Recent(INDEXES)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.store, self._spec, self.length, self._in_order)

    def read(self, start: int, stop: int, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Items ``start:stop``, with ``0 <= start <= stop <= length``; written to *out* if it is given."""
        i = start // self._object_length
        first = start - i * self._object_length
        chunk = first // self._chunk_length
        if first + stop - start < (chunk + 1) * self._chunk_length:  # within one chunk, as nearly all random reads are
            part = None
            if (words := self._words.get(i)) is not None:
                # A read of all items of its chunk is checked below.
                if stop < self.length or first > chunk * self._chunk_length:
                    part = words[first + chunk : first + chunk + stop - start]
                    if self._ask_first:
                        self._ask_first -= 1
                        _ask_for(words, first + chunk, stop - start)
            elif (items := self._decoded.find((i, chunk))) is not None:
                part = items[first - chunk * self._chunk_length :][: stop - start]
            if part is not None:
                if out is None:
                    out = np.empty(stop - start, self.numpy_dtype)
                begin = perf_counter()
                out[:] = part
                self._note(perf_counter() - begin, stop - start, 1)
                return out
        if out is None:
            try:
                out = np.empty(stop - start, self.numpy_dtype)
            except MemoryError as error:
                raise MemoryError(f"{self.store.url}: items {start} to {stop} do not fit into memory") from error
        step = max(READ_BYTES // self._chunk_bytes, 1) * self._chunk_length
        at = start
        while at < stop:  # in steps that end where chunks do
            end = min((at // step + 1) * step, stop)
            self._read_ranges(self._by_object(at, end, at - start), out)
            at = end
        return out

    def take(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The items at *indices*: dtype[n]. Each inner chunk is read once, those of an object store all at once."""
        out = np.empty(len(indices), self.numpy_dtype)
        order = np.argsort(indices, kind="stable")
        chunks = indices[order] // self._chunk_length  # chunks, counted through all objects
        firsts = np.flatnonzero(np.diff(chunks, prepend=-1))
        groups = {
            divmod(int(chunks[first]), self._spec.chunks_per_object): order[first:last]
            for first, last in itertools.pairwise([*firsts.tolist(), len(order)])
        }
        for (i, c), items in self._chunks(list(groups), keep=True):
            where = groups[i, c]
            out[where] = items[indices[where] - (i * self._object_length + c * self._chunk_length)]
        return out

    def gather(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any], at: npt.NDArray[np.int64]
    ) -> None:
        """Many ranges at once: items ``starts[k]`` and the ``lengths[k]`` from there on go to ``out[at[k]:]``.

        *out* is one-dimensional and contiguous; each range lies within the array. From an object store everything is
        read at once: about one round trip, and one more if indexes of shards are not known yet.
        """
        rest: list[ItemRange] = []
        copies: list[tuple[npt.NDArray[np.uint32], int, int, int]] = []  # words, first, count, place
        object_length, chunk_length = self._object_length, self._chunk_length
        for start, length, place in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
            if self._is_mapped:
                i = start // object_length
                if (words := self._words.get(i)) is None and length and i not in self._words:
                    words = self._map_words(i)
                first = start - i * object_length
                chunk = first // chunk_length
                if words is not None and first + length <= (chunk + 1) * chunk_length:
                    copies.append((words, first + chunk, length, place))
                    continue
            rest += self._by_object(start, start + length, place)
        if copies:
            if self._ask_first:
                self._ask_first = max(self._ask_first - len(copies), 0)
                for words, first, count, _ in copies:
                    _ask_for(words, first, count)
            begin = perf_counter()
            for words, first, count, place in copies:
                out[place : place + count] = words[first : first + count]
            self._note(perf_counter() - begin, sum(count for _, _, count, _ in copies), len(copies))
        if rest:
            self._read_ranges(rest, out)

    def _note(self, seconds: float, items: int, reads: int) -> None:
        """Note how long copies out of mapped files took. After several in a row that waited for the disk, the next reads ask
        for their pages first. A single slow copy has more likely waited for a processor.
        """
        if seconds > reads * WAITED_SECONDS + items * SECONDS_AN_ITEM:
            self._waits += min(reads, 3)
            if self._waits >= 3:
                self._ask_first, self._waits = READS_ASKED_FIRST, 0
        elif self._waits:
            self._waits -= 1

    def _by_object(self, start: int, stop: int, at: int) -> list[ItemRange]:
        """Items ``start:stop`` as ranges of objects; item ``start`` goes to ``out[at]``."""
        ranges = []
        while start < stop:
            i = start // self._object_length
            base = i * self._object_length  # position in the array -> position in the object
            last = min(stop - base, self._object_length)
            ranges.append(ItemRange(i, start - base, last, at))
            at += base + last - start
            start = base + last
        return ranges

    def _read_ranges(self, ranges: list[ItemRange], out: npt.NDArray[Any]) -> None:
        if self._is_mapped:
            ranges = [one for one in ranges if not self._read_mapped(one, out)]
        elif self._is_raw and self._in_order and not self.store.is_local:
            self._read_raw(ranges, out)
            return
        by_chunk: dict[tuple[int, int], list[ItemRange]] = {}
        for one in ranges:
            for c in range(one.first // self._chunk_length, -(-one.last // self._chunk_length)):
                low, high = max(one.first, c * self._chunk_length), min(one.last, (c + 1) * self._chunk_length)
                by_chunk.setdefault((one.i, c), []).append(ItemRange(c, low, high, one.at + low - one.first))
        if isinstance(self._spec, ForeignSpec) and self._spec.decodes_parts:
            self._read_parts(by_chunk, out)
            return
        wanted = sum(one.last - one.first for one in ranges)
        for (i, c), items in self._chunks(list(by_chunk), keep=wanted < len(by_chunk) * self._chunk_length):
            base = c * self._chunk_length  # position in the object -> position in the chunk
            for _, first, last, at in by_chunk[i, c]:
                out[at : at + last - first] = items[first - base : last - base]

    def _read_parts(self, by_chunk: dict[tuple[int, int], list[ItemRange]], out: npt.NDArray[Any]) -> None:
        """Decode only the wanted parts of chunks."""
        for (i, c), stored in self._stored_chunks(sorted(by_chunk)):
            for _, first, last, at in by_chunk[i, c]:
                base = c * self._chunk_length
                with self._naming(i, c):
                    out[at : at + last - first] = (
                        self._absent(i, c)[: last - first]
                        if stored is None
                        else cast(ForeignSpec, self._spec).decode_part(stored, first - base, last - base)
                    )

    def _chunks(self, wanted: Sequence[tuple[int, int]], *, keep: bool) -> Iterator[tuple[tuple[int, int], npt.NDArray[Any]]]:
        """((object, chunk), its items: dtype[chunk_length]) for each wanted chunk, in any order."""
        missing = []
        for where in wanted:
            if (items := self._decoded.find(where)) is not None:
                yield where, items
            else:
                missing.append(where)
        for (i, c), stored in self._stored_chunks(sorted(missing)):
            with self._naming(i, c):
                items = self._absent(i, c) if stored is None else self._spec.decode_chunk(stored)
            if keep and not self.store.read_once:
                self._decoded.keep((i, c), items)
            yield (i, c), items

    @contextlib.contextmanager
    def _naming(self, i: int, c: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise self._damaged(i, f"inner chunk {c} {error}") from error

    # Raw shards: mapped, or read in place

    def _read_mapped(self, one: ItemRange, out: npt.NDArray[Any]) -> bool:
        """Copy a range out of a mapped shard. False if the shard cannot be mapped."""
        words = self._words.get(one.i)
        if words is None and one.i not in self._words:
            words = self._map_words(one.i)
        if words is None:
            return False
        # A read of many chunks is one of a whole file, most likely: the system fetches ahead, and need not keep it mapped.
        begin, count = self._word(one.first), one.last - one.first
        if count > self._chunk_length:
            _ask_for(words, begin, min(count + READ_AHEAD_WORDS, len(words) - begin))
        first, at = one.first, one.at
        while first < one.last:
            c = first // self._chunk_length
            last = min((c + 1) * self._chunk_length, one.last)
            if first == c * self._chunk_length and (last - first == self._chunk_length or self._is_end(one.i, last)):
                chunk = words[first + c : first + c + self._chunk_length + 1]
                if google_crc32c.value(chunk[:-1]) != int(chunk[-1]):
                    raise self._damaged(one.i, f"inner chunk {c} does not match its crc32c")
            out[at : at + last - first] = words[first + c : last + c]
            at += last - first
            first = last
        if count > self._chunk_length:
            _ask_for(words, begin, count, mmap.MADV_DONTNEED)
        return True

    def _is_end(self, i: int, last: int) -> bool:
        return i * self._object_length + last == self.length

    def _map_words(self, i: int) -> npt.NDArray[np.uint32] | None:
        """A raw shard's chunks as words: uint32[chunks * (chunk_length + 1)]; None if they are not in order."""
        words = None
        index = self._index(i)
        stored = min(-(-(self.length - i * self._object_length) // self._chunk_length), self._spec.chunks_per_object)
        size = self._chunk_bytes + 4
        if np.array_equal(index[:stored, 0], np.arange(0, stored * size, size)) and (index[:stored, 1] == size).all():
            data = self._open_map(i)
            if len(data) < stored * size:
                raise self._damaged(i, f"has {len(data)} bytes, too few for its {stored} chunks")
            words = np.frombuffer(data, "<u4", stored * size // 4)
        while len(self._words) >= MAPPED_FILES:
            with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # other threads forget some too
                del self._words[next(iter(self._words))]
        self._words[i] = words
        return words

    def _open_map(self, i: int) -> mmap.mmap:
        """A local object's file, mapped. Reads are scattered, so the system reads nothing ahead."""
        fd = os.open(self.store.path(self._spec.object_key(i)), os.O_RDONLY)
        try:
            data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:  # an empty file
            raise self._damaged(i, "is empty") from error
        finally:
            os.close(fd)
        if hasattr(data, "madvise"):
            data.madvise(mmap.MADV_RANDOM)
        return data

    def _read_raw(self, ranges: list[ItemRange], out: npt.NDArray[Any]) -> None:
        """Read ranges of raw shards in an object store, whose chunks are in order: only their bytes, all at once."""
        stored = []
        for one in ranges:
            begin, end = self._word(one.first) * 4, (self._word(one.last - 1) + 1) * 4
            stored.append((one.i, ByteRange(begin, end - begin)))
        for one, data in zip(ranges, self._fetch(stored), strict=True):
            base, first, at = self._word(one.first), one.first, one.at
            words = np.frombuffer(data, "<u4")
            while first < one.last:
                c = first // self._chunk_length
                last = min((c + 1) * self._chunk_length, one.last)
                part = words[first + c - base : last + c - base]
                if last - first == self._chunk_length and last < one.last:  # a whole chunk, and its crc32c was read too
                    crc = int(words[last + c - base])
                    if google_crc32c.value(part) != crc:
                        raise self._damaged(one.i, f"inner chunk {c} does not match its crc32c")
                out[at : at + last - first] = part
                at += last - first
                first = last

    def _word(self, item: int) -> int:
        """Position in the object's items -> position in its words: a crc32c follows each chunk."""
        return item + item // self._chunk_length

    # Encoded chunks

    def _stored_chunks(self, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], memoryview | None]]:
        """((object, chunk), its stored bytes, or None if it is not stored) for each wanted chunk."""
        if not wanted:
            return
        if self._spec.index is None:
            yield from self._whole_objects(wanted)
            return
        self._fetch_indexes(sorted({i for i, _ in wanted}))
        ranges, present = [], []
        for i, c in wanted:
            try:
                index = self._index(i)
            except FileNotFoundError:
                if self._spec.absent_value is None:
                    raise
                yield (i, c), None
                continue
            offset, size = int(index[c, 0]), int(index[c, 1])
            if offset == ABSENT:
                yield (i, c), None
                continue
            if size > 2 * self._chunk_bytes + 4096:
                raise self._damaged(i, "is far larger than its chunks")
            ranges.append((i, ByteRange(offset, size)))
            present.append((i, c))
        if self.store.is_local and self._adjoin(ranges):
            yield from self._borrowed(ranges, present)
            return
        yield from zip(present, self._fetch(ranges), strict=True)

    def _adjoin(self, ranges: list[tuple[int, ByteRange]]) -> bool:
        """Whether the ranges follow one another in one object."""
        return all(
            here == there and first.offset + first.size == second.offset
            for (here, first), (there, second) in itertools.pairwise(ranges)
        ) and bool(ranges)

    def _borrowed(
        self, ranges: list[tuple[int, ByteRange]], present: list[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], memoryview]]:
        i, begin, end = ranges[0][0], ranges[0][1].offset, ranges[-1][1].offset + ranges[-1][1].size
        with self.store.borrow_range(self._spec.object_key(i), begin, end) as data:
            if len(data) < end - begin:
                raise self._damaged(i, "is cut off")
            for where, (_, byte_range) in zip(present, ranges, strict=True):
                yield where, data[byte_range.offset - begin : byte_range.offset - begin + byte_range.size]

    def _whole_objects(self, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], memoryview | None]]:
        """Objects that are one chunk each. No more than the largest possible chunk is read."""
        limit = 2 * self._chunk_bytes + 4096
        if self.store.is_local and isinstance(self._spec, ForeignSpec) and self._spec.decodes_parts:
            found: list[memoryview | FileNotFoundError | None] = []
            for i, _ in wanted:
                try:
                    data = self._files.find(i) or self._files.keep(i, self._open_map(i))
                    found.append(memoryview(data))
                except FileNotFoundError as error:
                    found.append(error)
        else:
            keys = [self._spec.object_key(i) for i, _ in wanted]
            found = [
                part if isinstance(part, FileNotFoundError) else memoryview(part)
                for part in self.store.read_ranges(keys, [0] * len(keys), [limit + 1] * len(keys))
            ]
        for (i, c), data in zip(wanted, found, strict=True):
            if isinstance(data, FileNotFoundError):
                if self._spec.absent_value is None:
                    raise data
                yield (i, c), None
                continue
            if data is not None and len(data) > limit:
                raise self._damaged(i, "is far larger than its chunks")
            yield (i, c), data

    def _absent(self, i: int, c: int) -> npt.NDArray[Any]:
        if self._spec.absent_value is None:
            raise ValueError("is not stored")
        return np.broadcast_to(np.array(self._spec.absent_value, self.numpy_dtype), self._chunk_length)

    # Bytes and indexes

    def _fetch(self, ranges: list[tuple[int, ByteRange]]) -> list[memoryview]:
        """The bytes of many ranges. Ranges close to each other are read together."""
        order = sorted(range(len(ranges)), key=lambda k: (ranges[k][0], ranges[k][1]))
        requests: list[tuple[int, int, int]] = []  # object, first byte, byte behind the last
        place: list[int] = [0] * len(ranges)
        for k in order:
            i, (offset, size) = ranges[k]
            here, begin, end = requests[-1] if requests else (-1, 0, 0)
            if here == i and offset <= end + MERGED_GAP and (offset + size <= begin + MERGED_BYTES or offset + size <= end):
                requests[-1] = (i, begin, max(end, offset + size))
            else:
                requests.append((i, offset, offset + size))
            place[k] = len(requests) - 1
        keys = [self._spec.object_key(i) for i, _, _ in requests]
        found = self.store.read_ranges(keys, [begin for _, begin, _ in requests], [end for _, _, end in requests])
        parts = []
        for k, (i, (offset, size)) in enumerate(ranges):
            data, begin = found[place[k]], requests[place[k]][1]
            if isinstance(data, FileNotFoundError):
                raise data
            part = memoryview(data)[offset - begin : offset - begin + size]
            if len(part) != size:
                raise self._damaged(i, "is cut off")
            parts.append(part)
        return parts

    def _fetch_indexes(self, objects: list[int]) -> None:
        """Read the indexes of several shards at once. One that is missing is read again when it is needed."""
        unknown = [i for i in objects if self._indexes.find(i) is None]
        if self.store.is_local or len(unknown) < 2:
            return
        begin, end = self._index_range()
        keys = [self._spec.object_key(i) for i in unknown]
        for i, data in zip(unknown, self.store.read_ranges(keys, [begin] * len(keys), [end] * len(keys)), strict=True):
            if not isinstance(data, FileNotFoundError):
                self._indexes.keep(i, self._parsed_index(i, data))

    def _index(self, i: int) -> npt.NDArray[np.uint64]:
        """Offset and length of each inner chunk of shard *i*: uint64[chunks_per_object, 2]."""
        if (index := self._indexes.find(i)) is None:
            begin, end = self._index_range()
            (data,) = self.store.read_ranges([self._spec.object_key(i)], [begin], [end])
            if isinstance(data, FileNotFoundError):
                raise data
            index = self._indexes.keep(i, self._parsed_index(i, data))
        return index  # type: ignore[no-any-return]

    def _index_range(self) -> tuple[int, int | None]:
        assert self._spec.index is not None
        length = self._index_bytes()
        return (0, length) if self._spec.index.location == "start" else (-length, None)

    def _index_bytes(self) -> int:
        assert self._spec.index is not None
        return self._spec.chunks_per_object * 16 + 4 * self._spec.index.crc32c

    def _parsed_index(self, i: int, stored: bytes) -> npt.NDArray[np.uint64]:
        assert self._spec.index is not None
        location, checked = self._spec.index
        count, length = self._spec.chunks_per_object, self._index_bytes()
        # Some stand-ins for object stores send the whole object instead of its last bytes.
        stored = stored[:length] if location == "start" else stored[max(len(stored) - length, 0) :]
        damaged = self._damaged(i, "the shard's index is damaged")
        if len(stored) != length or (checked and google_crc32c.value(stored[:-4]) != int.from_bytes(stored[-4:], "little")):
            raise damaged
        index = np.frombuffer(stored, "<u8", count * 2).reshape(count, 2)
        offsets, lengths = index[index[:, 0] != ABSENT].T
        # In floats: offset + length of a hostile index overflows 64 bits. Ranges beyond the object come back cut off.
        if (offsets.astype(np.float64) + lengths > 1 << 60).any():
            raise damaged
        return index

    def _damaged(self, i: int, what: str) -> ValueError:
        path = self.store.path(self._spec.object_key(i))
        return ValueError(f"{path}: {what}. The file is damaged: remove it and build again.")


def _ask_for(words: npt.NDArray[np.uint32], first: int, count: int, advice: int = mmap.MADV_WILLNEED) -> None:
    """Tell the system, without waiting, that words ``first:first + count`` of a mapped file are wanted, or, with another
    *advice*, that they are no longer: they stay in the page cache.
    """
    begin = first * 4 // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # advice that cannot be taken
        cast(mmap.mmap, cast(memoryview, words.base).obj).madvise(advice, begin, (first + count) * 4 - begin)


def _restore(store: Store, spec: ArraySpec | ForeignSpec, length: int, in_order: bool) -> StoredArray:
    return StoredArray(store, spec, length, in_order=in_order)
