"""Random reads of stored arrays, without zarr-python: from mapped files, from compressed chunks, from object stores.

If a local file holds the items uncompressed (layout ``mmap``), a read is a copy out of the page cache: 2,048 tokens take
about as long as from ``np.memmap``. Compressed items are decoded in blocks, those of many reads on all processors at once, each
block with its checksum. From elsewhere only the bytes that hold the wanted items are read, those of many reads at once, and a
few decoded chunks are kept. Reads of a whole raw chunk check its crc32c; reads of a part of it cannot: ``verify`` does.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import operator
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import google_crc32c
import numpy as np

from flat_tokens.annotations import AnyArray, Int64Pair, Int64s, IntPair, UInt32s, UInt64s
from flat_tokens.arrays.blocks import copy_parts
from flat_tokens.arrays.layouts import ABSENT, ArraySpec
from flat_tokens.arrays.maps import MappedFile, Maps, Recent, clock, map_file, maps_of_a_read
from flat_tokens.stores.cached import CachedStore, Unit
from flat_tokens.stores.store import Store

if TYPE_CHECKING:
    from flat_tokens.arrays.opening import ForeignSpec

DECODED_BYTES = 16 << 20
"""Decoded chunks kept by an array: enough for the entries of two million sequences. A smaller one keeps all that was read."""
LONG_RANGE = 64
"""Ranges of fewer items on average are copied by one operation on an index of all items."""
INDEXES = 1024
"""Indexes of shards kept, of 16 KiB each in the layouts written here."""
READ_AHEAD_WORDS = 8 << 20
"""Words of a mapped file fetched ahead of a read of many chunks: the next read most likely begins where it ends."""
FEW_RANGES = 16
"""The places of more ranges are computed by operations on whole arrays, which take a while to begin."""
FEW_READS = 64
"""So many ranges of few blocks are read one by one, which is less work than to look at their blocks together."""
FEW_WORDS = 2048
"""Copies of fewer words are of memory views, in half of numpy's time. For more, numpy lets other threads run meanwhile."""
MANY_RANGES = 256
"""So many ranges of a file are copied in windows, by few operations during which other threads run."""
WINDOWS = (128, 16, 1)
"""Words of a window. A range has windows of the first size that it has room for; its last one overlaps the one before it."""
RANGES_AT_A_TIME = 1 << 12
"""So many are copied in windows at a time, which bounds the memory that this takes."""
READ_BYTES = 16 << 20
"""Larger reads are done in steps of this many bytes."""
MERGED_GAP = 1 << 16
"""Ranges of one object that are closer than this are read by one request: a request costs more than these bytes."""
MERGED_BYTES, CHECKSUM_BYTES = 4 << 20, 4096
"""The most that one request reads of an array that is read at random, so that large reads use several streams, and their
checksums. Of an array that is read once, READ_BYTES.
"""

WAITED_SECONDS = 30e-6
SECONDS_AN_ITEM = 4e-9
"""A copy that takes longer than this, and this much an item, has waited for the disk: memory is ten times as fast."""
READS_ASKED_FIRST = 1024
"""This many reads after such a copy ask the system for all their pages before they touch the first. Asking costs a
microsecond, so it isn't always done; from a cold cache a read is one request of the disk instead of three.
"""


FileRanges: TypeAlias = list[list[int]] | Int64s


class ItemRange(NamedTuple):
    """Items ``first:last`` of object *i*, which go to ``out[at:]``."""

    i: int
    first: int
    last: int
    at: int


class ByteRange(NamedTuple):
    """The bytes of an inner chunk, or of the wanted part of a raw one, in object *i*."""

    i: int
    offset: int
    size: int


class Copies(NamedTuple):
    """Ranges of a mapped file, ``content``: the first word of each, the number of words, and its place in what is read. Of many
    ranges these are int64[3, n], of fewer three lists.
    """

    content: UInt32s
    ranges: FileRanges


class SmallArray(NamedTuple):
    """Items of an array of compressed blocks that is kept as a whole: those of block n are there if ``has[n]`` is 1."""

    items: AnyArray
    has: bytearray


def take_gathered(array: Any, indices: Int64s) -> AnyArray:
    """The items at *indices* of an array that gathers ranges: dtype[n]. The method ``take`` of its class."""
    found, places = np.empty(len(indices), array.numpy_dtype), np.arange(len(indices))
    array.gather(indices, np.ones_like(places), found, places)
    return found


def gather_all(arrays: Sequence[Any], reads: Sequence[tuple[Int64s, Int64s, Int64s]], out: AnyArray) -> None:
    """Ranges of each of *arrays*, stored or virtual, go to *out*: starts, lengths and places, int64[n] each, as of `gather`."""
    mapped = [array for array in arrays if isinstance(array, StoredArray) and array._is_mapped]
    if 1 < len(arrays) == len(mapped) and len({(array._object_length, array._chunk_length) for array in mapped}) == 1:
        # The arrays are laid end to end, each with room for as many files as the longest has.
        room = _files_of(arrays) * arrays[0]._object_length
        starts, lengths, at = (np.concatenate(parts) for parts in zip(*reads, strict=True))
        starts = starts + np.repeat(np.arange(len(arrays)) * room, [len(those) for those, _, _ in reads])
        _gather_mapped(arrays, starts, lengths, out, at)
        return
    for array, (starts, lengths, at) in zip(arrays, reads, strict=True):
        array.gather(starts, lengths, out, at)


def _files_of(arrays: Sequence[StoredArray]) -> int:
    return max(array.length for array in arrays) // arrays[0]._object_length + 1


def _gather_mapped(arrays: Sequence[StoredArray], starts: Int64s, lengths: Int64s, out: AnyArray, at: Int64s) -> None:
    """`gather` of mapped arrays, laid end to end."""
    rest: list[int] = []
    copies: list[Copies] = []
    one, files, opened, now = arrays[0], _files_of(arrays), 0, clock.now
    for file, ranges, numbers in one._by_file(starts, lengths, at, rest):
        array, i = arrays[file // files], file % files
        if (mapped := array._words.get(i)) is None:
            if opened and opened >= maps_of_a_read():  # no more descriptors than that: let go of the files that were read
                one._copy(copies, out)
                copies, opened = [], 0
            if (mapped := array._map_words(i)) is None:
                rest += numbers.tolist()
                continue
            opened, now = opened + 1, clock.now
        mapped.used = now
        copies.append(Copies(mapped.content, ranges))
    one._copy(copies, out)
    for k in rest:
        number, start = divmod(int(starts[k]), files * one._object_length)
        array = arrays[number]
        array._read_ranges(array._by_object(start, start + int(lengths[k]), int(at[k])), out)


class StoredArray:
    """A one-dimensional array of *length* items, read in ranges. Only its caches hold items, up to their limits.

    *in_order*: the writer is known to store the inner chunks of raw shards in order, so that no index is needed to find
    them in an object store.
    """

    def __init__(self, store: Store, spec: ArraySpec | ForeignSpec, length: int, in_order: bool = False) -> None:
        self._spec, self.length = spec, length
        self.numpy_dtype = spec.numpy_dtype
        self._in_order = in_order
        self._object_length, self._chunk_length = spec.object_length, spec.chunk_length
        self._chunk_bytes = spec.chunk_length * self.numpy_dtype.itemsize
        self._most_bytes = 2 * self._chunk_bytes + 4096  # of a stored chunk
        # Raw inner chunks, each with its crc32c: item j of chunk c is word j + c of the file.
        raw = isinstance(spec, ArraySpec) and spec.zstd_level is None and spec.dtype == "uint32"
        if is_cached := isinstance(store, CachedStore):
            store = store.in_chunks(self._chunk_bytes + 4, spec.chunks_per_object * 16 + 4) if raw and in_order else store
        self.store, self._merged_gap = store, 0 if is_cached else MERGED_GAP
        self._merged_bytes = (READ_BYTES if store.read_once else MERGED_BYTES) + CHECKSUM_BYTES
        self._is_raw, self._is_mapped = raw, raw and store.is_local and not store.read_once
        self._in_parts = None if isinstance(spec, ArraySpec) or not spec.decodes_parts else spec
        """The specification, if a part of a chunk can be decoded without the rest."""
        self._in_blocks = spec if isinstance(spec, ArraySpec) and spec.zstd_level is not None and not store.read_once else None
        """The specification, if compressed blocks are decoded alone. What is read once is read in whole chunks."""
        self._block_length = (self._in_blocks and self._in_blocks.block_length) or spec.chunk_length
        self._is_small = self._in_blocks is not None and length * self.numpy_dtype.itemsize <= DECODED_BYTES
        self._waits = self._ask_first = 0
        """``_ask_first``: this many of the next reads tell the system what they want before they copy it."""
        self._words, self._files = Maps(), Maps()
        """Mapped files: of raw shards in order their words, uint32[n]; of all others the file, or its bytes."""
        self._in_order_shards, self._other_shards = set[int](), set[int]()
        """Raw shards whose chunks are in order, as far as anybody looked, and those whose are not."""
        self._decoded = Recent(max(1, DECODED_BYTES // (self._block_length * self.numpy_dtype.itemsize)))
        self._fetched = Recent(max(1, DECODED_BYTES // self._chunk_bytes))
        """Compressed chunks of an object store: of one that is read in order, every block is asked for."""
        self._indexes = Recent(INDEXES)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredArray, (self.store, self._spec, self.length, self._in_order)

    def read(self, start: int, stop: int, out: AnyArray | None = None) -> AnyArray:
        """Items ``start:stop``, with ``0 <= start <= stop <= length``; written to *out* if it is given."""
        if self._in_blocks is not None and start < stop <= (start // self._block_length + 2) * self._block_length:
            return self._read_blocks(start, stop, np.empty(stop - start, self.numpy_dtype) if out is None else out)
        i = start // self._object_length
        first = start - i * self._object_length
        chunk = first // self._chunk_length
        if first + stop - start < (chunk + 1) * self._chunk_length:  # within one chunk, as nearly all random reads are
            part = None
            if (mapped := self._words.get(i)) is not None:
                # A read of all items of its chunk is checked below.
                if stop < self.length or first > chunk * self._chunk_length:
                    words, mapped.used = mapped.content, clock.now
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
            if self._in_blocks is None:
                self._read_ranges(self._by_object(at, end, at - start), out)
            else:
                self._ask_first = max(self._ask_first, (end - at) // self._chunk_length + 2)
                self._gather_blocks(np.array([at]), np.array([end]), out, np.array([at - start]))
            at = end
        return out

    def take(self, indices: Int64s) -> AnyArray:
        """The items at *indices*: dtype[n]. Each inner chunk is read once, those of an object store all at once."""
        if self._is_small:
            found: AnyArray = self._small_array(indices, indices + 1)[indices]
            return found
        if self._is_mapped:
            return take_gathered(self, indices)
        out = np.empty(len(indices), self.numpy_dtype)
        chunks = indices // self._chunk_length  # counted through all objects
        order = np.argsort(chunks.astype(np.min_scalar_type(self.length // self._chunk_length)), kind="stable")
        chunks = chunks[order]  # two bytes are sorted in linear time
        firsts = np.flatnonzero(np.diff(chunks, prepend=-1))
        groups = {
            divmod(int(chunks[first]), self._spec.chunks_per_object): order[first:last]
            for first, last in itertools.pairwise([*firsts.tolist(), len(order)])
        }
        for (i, c), items in self._chunks(list(groups), keep=True):
            where = groups[i, c]
            out[where] = items[indices[where] - (i * self._object_length + c * self._chunk_length)]
        return out

    def gather(self, starts: Int64s, lengths: Int64s, out: AnyArray, at: Int64s) -> None:
        """Many ranges at once: items ``starts[k]`` and the ``lengths[k]`` from there on go to ``out[at[k]:]``.

        *out* is one-dimensional and contiguous; each range is within the array. From an object store everything is
        read at once: about one round trip, and one more if indexes of shards are not known yet.
        """
        if self._in_blocks is not None:
            if self._is_small:
                _copy_ranges(self._small_array(starts, starts + lengths), starts, lengths, out, at)
            elif self.store.is_local and len(starts) <= FEW_READS and int(lengths.sum()) <= FEW_RANGES * self._block_length:
                for start, length, place in np.stack([starts, lengths, at])[:, lengths > 0].T.tolist():
                    self.read(start, start + length, out[place : place + length])
            else:
                self._gather_blocks(starts, starts + lengths, out, at)
            return
        if not self._is_mapped:
            ranges = zip(starts.tolist(), (starts + lengths).tolist(), at.tolist(), strict=True)
            self._read_ranges([one for start, stop, place in ranges for one in self._by_object(start, stop, place)], out)
            return
        _gather_mapped([self], starts, lengths, out, at)

    def _by_file(self, starts: Int64s, lengths: Int64s, at: Int64s, rest: list[int]) -> Iterator[tuple[int, FileRanges, Int64s]]:
        """Ranges of each object that are within one chunk: the object, the ranges of its file, and their numbers. The numbers of
        all others that are not empty are added to *rest*.
        """
        object_length, chunk_length = self._object_length, self._chunk_length
        if len(starts) <= FEW_RANGES:
            for k, (start, length, place) in enumerate(zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True)):
                i, first = divmod(start, object_length)
                chunk = first // chunk_length
                if first + length > (chunk + 1) * chunk_length:
                    rest.append(k)
                elif length:
                    yield i, [[first + chunk], [length], [place]], np.array([k])
            return
        objects = starts // object_length  # numpy's divmod takes several times as long
        firsts = starts - objects * object_length
        chunks = firsts // chunk_length
        within = firsts + lengths <= (chunks + 1) * chunk_length
        rest += np.flatnonzero(~within).tolist()
        numbers = np.flatnonzero(within & (lengths > 0))
        numbers = numbers[np.argsort(objects[numbers], kind="stable")]
        found = np.stack([firsts + chunks, lengths, at])[:, numbers]
        edges = np.flatnonzero(np.diff(objects[numbers], prepend=-1, append=-1)).tolist()
        for first, stop in itertools.pairwise(edges):
            ranges, its = found[:, first:stop], numbers[first:stop]
            yield int(objects[its[0]]), ranges if len(its) >= MANY_RANGES else ranges.tolist(), its

    def _copy(self, copies: list[Copies], out: AnyArray) -> None:
        """Copy words of mapped files to their places in *out*."""
        if not copies:
            return
        reads = sum(len(ranges[1]) for _, ranges in copies)
        if self._ask_first:
            self._ask_first = max(self._ask_first - reads, 0)
            for content, (words, counts, _) in copies:
                for first, count in zip(words, counts, strict=True):
                    _ask_for(content, int(first), int(count))
        is_alike = out.dtype == copies[0].content.dtype
        items = sum(sum(ranges[1]) if isinstance(ranges, list) else int(ranges[1].sum()) for _, ranges in copies)
        begin = perf_counter()
        for content, ranges in copies:
            if isinstance(ranges, list):
                _copy_each(content, ranges, out, FEW_WORDS if is_alike else 0)
                continue
            is_short = ranges[1] < (FEW_WORDS if is_alike else 0)
            _copy_each(content, ranges[:, ~is_short].tolist(), out, 0)
            short = ranges[:, is_short]
            for some in range(0, short.shape[1], RANGES_AT_A_TIME):
                _copy_windows(content, short[:, some : some + RANGES_AT_A_TIME], out)
        self._note(perf_counter() - begin, items, reads)

    def read_indexes(self, start: int, stop: int) -> None:
        """Read the indexes of the shards that have items ``start:stop``, at once, as far as an object store has them: of threads
        that read parts of the same shard, each would ask for its index.
        """
        if self._spec.index is not None and not self.store.is_local and not (self._is_raw and self._in_order):
            self._fetch_indexes(list(range(start // self._object_length, -(-stop // self._object_length))))

    def units_of(self, starts: Int64s, lengths: Int64s) -> list[Unit]:
        """The units of a store with a cache that a `gather` of these ranges reads; it reads indexes of shards, if needed."""
        assert isinstance(self.store, CachedStore)
        chunks = np.unique(_cells(starts, starts + lengths, self._chunk_length)[1])
        wanted, size = [divmod(chunk, self._spec.chunks_per_object) for chunk in chunks.tolist()], self._chunk_bytes + 4
        if self._is_raw and self._in_order:
            parts = [ByteRange(i, c * size, size) for i, c in wanted]
        elif self._spec.index is None:
            parts = [ByteRange(i, 0, 2 * size) for i, _ in wanted]
        else:
            indexes = self._fetch_indexes(sorted({i for i, _ in wanted}))
            parts = [ByteRange(i, *index[c].tolist()) for i, c in wanted if (index := indexes[i]) is not None]
        return self.store.units_of([(self._spec.object_key(i), at, at + n) for i, at, n in parts if at != ABSENT])

    def _note(self, seconds: float, items: int, reads: int) -> None:
        """Slow copies in a row have waited for the disk, a single one more likely for a processor: the next reads ask first."""
        if seconds > reads * WAITED_SECONDS + items * SECONDS_AN_ITEM:
            self._waits += min(reads, 3)
            if self._waits >= 3:
                self._ask_first, self._waits = READS_ASKED_FIRST, 0
        elif self._waits:
            self._waits -= 1

    def _by_object(self, start: int, stop: int, at: int) -> list[ItemRange]:
        """Items ``start:stop`` as ranges of objects; item ``start`` goes to ``out[at]``."""
        length = self._object_length  # position in the array -> position in the object: less i * length
        return [ItemRange(i, first - i * length, last - i * length, at) for i, first, last, at in _cut(start, stop, at, length)]

    def _read_ranges(self, ranges: list[ItemRange], out: AnyArray) -> None:
        if self._is_mapped:
            ranges = [one for one in ranges if not self._read_mapped(one, out)]
        elif self._is_raw and self._in_order and not self.store.is_local:
            self._read_raw(ranges, out)
            return
        by_chunk: dict[IntPair, list[ItemRange]] = {}
        for one in ranges:
            for part in self._by_chunk(one):
                by_chunk.setdefault((one.i, part.i), []).append(part)
        # position in the object -> position in the chunk: less c * self._chunk_length
        if self._in_parts is not None:
            for (i, c), stored in self._stored_chunks(sorted(by_chunk)):
                base = c * self._chunk_length
                for _, first, last, at in by_chunk[i, c]:
                    with self._naming(i, c):
                        if stored is None:
                            out[at : at + last - first] = self._absent()[: last - first]
                        else:
                            out[at : at + last - first] = self._in_parts.decode_part(stored, first - base, last - base)
            return
        wanted = sum(one.last - one.first for one in ranges)
        for (i, c), items in self._chunks(list(by_chunk), keep=wanted < len(by_chunk) * self._chunk_length):
            base = c * self._chunk_length
            for _, first, last, at in by_chunk[i, c]:
                out[at : at + last - first] = items[first - base : last - base]

    def _by_chunk(self, one: ItemRange) -> Iterator[ItemRange]:
        """A range of an object as ranges of its chunks, each with the chunk's number instead of the object's."""
        return _cut(one.first, one.last, one.at, self._chunk_length)

    def _chunks(self, wanted: Sequence[IntPair], *, keep: bool) -> Iterator[tuple[IntPair, AnyArray]]:
        """((object, chunk), its items: dtype[chunk_length]) for each wanted chunk, in any order."""
        missing = []
        for where in wanted:
            if (items := self._decoded.find(where)) is not None:
                yield where, items
            else:
                missing.append(where)
        for (i, c), stored in self._stored_chunks(sorted(missing)):
            with self._naming(i, c):
                items = self._absent() if stored is None else self._spec.decode_chunk(stored)
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

    def _read_mapped(self, one: ItemRange, out: AnyArray) -> bool:
        """Copy a range out of a mapped shard. False if the shard cannot be mapped."""
        if (mapped := self._words.get(one.i) or self._map_words(one.i)) is None:
            return False
        words, mapped.used = mapped.content, clock.now
        # A read of many chunks is one of a whole file, most likely: the system fetches ahead, and need not keep it mapped.
        begin, count = self._word(one.first), one.last - one.first
        if count > self._chunk_length:
            _ask_for(words, begin, min(count + READ_AHEAD_WORDS, len(words) - begin))
        end_of_array = self.length - one.i * self._object_length
        for c, first, last, at in self._by_chunk(one):
            if first == c * self._chunk_length and (last - first == self._chunk_length or last == end_of_array):
                chunk = words[first + c : first + c + self._chunk_length + 1]
                self._check(one.i, c, chunk[:-1], chunk[-1])
            out[at : at + last - first] = words[first + c : last + c]
        if count > self._chunk_length:
            _ask_for(words, begin, count, mmap.MADV_DONTNEED)
        return True

    def _check(self, i: int, c: int, items: UInt32s, crc32c: np.uint32) -> None:
        if google_crc32c.value(items) != int(crc32c):
            raise self._damaged(i, f"inner chunk {c} does not match its crc32c")

    def _map_words(self, i: int) -> MappedFile | None:
        """A raw shard's chunks as words: uint32[chunks * (chunk_length + 1)]; None if they are not in order."""
        if i in self._other_shards:
            return None
        stored = min(-(-(self.length - i * self._object_length) // self._chunk_length), self._spec.chunks_per_object)
        size = self._chunk_bytes + 4
        if i not in self._in_order_shards:
            index = self._fetch_indexes([i])[i]
            assert index is not None
            is_in_order = (
                np.array_equal(index[:stored, 0], np.arange(0, stored * size, size)) and (index[:stored, 1] == size).all()
            )
            (self._in_order_shards if is_in_order else self._other_shards).add(i)
            if not is_in_order:
                return None
        data = self._open_map(i)
        if len(data) < stored * size:
            raise self._damaged(i, f"has {len(data)} bytes, too few for its {stored} chunks")
        return self._words.keep(i, np.frombuffer(data, "<u4", stored * size // 4))

    def _open_map(self, i: int) -> mmap.mmap:
        """A local object's file, mapped."""
        return map_file(self.store.path(self._spec.object_key(i)), lambda what: self._damaged(i, what))

    def _read_raw(self, ranges: list[ItemRange], out: AnyArray) -> None:
        """Read ranges of raw shards in an object store, whose chunks are in order: only their bytes, all at once."""
        bounds = [(self._word(one.first), self._word(one.last - 1) + 1) for one in ranges]
        stored = [ByteRange(one.i, begin * 4, (end - begin) * 4) for one, (begin, end) in zip(ranges, bounds, strict=True)]
        for one, data in zip(ranges, self._fetch(stored), strict=True):
            base, words = self._word(one.first), np.frombuffer(data, "<u4")
            for c, first, last, at in self._by_chunk(one):
                part = words[first + c - base : last + c - base]
                if last - first == self._chunk_length and last < one.last:  # a whole chunk, and its crc32c was read too
                    self._check(one.i, c, part, words[last + c - base])
                out[at : at + last - first] = part

    def _word(self, item: int) -> int:
        """Position in the object's items -> position in its words: a crc32c follows each chunk."""
        return item + item // self._chunk_length

    # Compressed blocks

    def _read_blocks(self, start: int, stop: int, out: AnyArray) -> AnyArray:
        """Items of a block or two, which are kept: the next read is often of the same."""
        at, length, small = start, self._block_length, self._small() if self._is_small else None
        while at < stop:
            block = at // length
            end = min((block + 1) * length, stop)
            if small is not None and small.has[block]:
                items = small.items[block * length : (block + 1) * length]
            elif small is not None or (items := self._decoded.find(block)) is None:
                chunk, n = divmod(block, self._chunk_length // length)
                begin, where = perf_counter(), divmod(chunk, self._spec.chunks_per_object)
                (stored,) = self._compressed([where]) if not self.store.is_local else self._mapped_chunks(where[0], where[1:])
                items = self._decode_block(where, n, stored)
                if small is None:
                    self._decoded.keep(block, items)
                else:
                    small.items[block * length : (block + 1) * length] = items[: self.length - block * length]
                    small.has[block] = 1
                self._note(perf_counter() - begin, length, 1)
            out[at - start : end - start] = items[at - block * length : end - block * length]
            at = end
        return out

    def _small(self) -> SmallArray:
        """The items of an array that is small enough to be kept as a whole, as far as they were read."""
        if (found := self._decoded.find(SmallArray)) is None:
            blocks = -(-self.length // self._block_length)
            found = self._decoded.keep(SmallArray, SmallArray(np.empty(self.length, self.numpy_dtype), bytearray(blocks)))
        return cast(SmallArray, found)

    def _small_array(self, starts: Int64s, stops: Int64s) -> AnyArray:
        """All items of a small array, of which those of ``starts[k]:stops[k]`` are decoded: dtype[length]."""
        small, length = self._small(), self._block_length
        if 0 in small.has:
            is_wanted = np.zeros(len(small.has), bool)
            is_wanted[_cells(starts, stops, length)[1]] = True
            missing = np.flatnonzero(is_wanted & (np.frombuffer(small.has, np.uint8) == 0))
            first, stop = missing * length, np.minimum(missing * length + length, self.length)
            if self.store.is_local and len(missing) <= FEW_RANGES:
                for start, end in zip(first.tolist(), stop.tolist(), strict=True):
                    self._read_blocks(start, end, small.items[start:end])
            else:
                self._gather_blocks(first, stop, small.items, first)
                for block in missing.tolist():
                    small.has[block] = 1
        return small.items

    def _gather_blocks(self, starts: Int64s, stops: Int64s, out: AnyArray, at: Int64s) -> None:
        """Items ``starts[k]:stops[k]`` go to ``out[at[k]:]``. Each block is decoded once, all processors together."""
        length = self._block_length
        k, blocks = _cells(starts, stops, length)
        order = np.argsort(blocks, kind="stable")
        k, blocks = k[order], blocks[order]
        # range of the array -> (block, range within the block, place)
        begins, ends = np.maximum(starts[k], blocks * length), np.minimum(stops[k], (blocks + 1) * length)
        parts = np.stack([blocks, begins - blocks * length, ends - blocks * length, at[k] + begins - starts[k]], axis=1)
        numbers, most = np.cumsum(np.diff(blocks // (self._object_length // length), prepend=-1) != 0) - 1, maps_of_a_read()
        for first in range(0, int(numbers[-1]) + 1 if len(numbers) else 0, most):
            self._decode_parts(parts[slice(*np.searchsorted(numbers, [first, first + most]))], out)

    def _decode_parts(self, parts: Int64s, out: AnyArray) -> None:
        """Parts of blocks, in order: int64[n, 4] of block, first, last, place; items ``first:last`` go to ``out[place:]``."""
        chunks, within = np.divmod(parts[:, 0], self._chunk_length // self._block_length)
        is_new = np.diff(chunks, prepend=-1) != 0
        wanted = [divmod(chunk, self._spec.chunks_per_object) for chunk in chunks[is_new].tolist()]
        begin = perf_counter()
        stored = self._compressed(wanted)
        rows = np.column_stack([np.cumsum(is_new) - 1, within, parts[:, 1:]])
        assert self._in_blocks is not None
        copy_parts(self._in_blocks, stored, rows, out, lambda slot, n: self._decode_block(wanted[slot], n, stored[slot]))
        self._note(perf_counter() - begin, len(rows) * self._block_length, len(rows))

    def _decode_block(self, where: IntPair, n: int, stored: memoryview) -> AnyArray:
        """Block *n* of (object, chunk): dtype[block_length]."""
        assert self._in_blocks is not None
        with self._naming(*where):
            return self._in_blocks.decode_block(stored, n)

    def _compressed(self, wanted: Sequence[IntPair]) -> list[memoryview]:
        """The stored bytes of each (object, chunk)."""
        if self.store.is_local:
            of_files = itertools.groupby(wanted, key=operator.itemgetter(0))
            return [chunk for i, chunks in of_files for chunk in self._mapped_chunks(i, [c for _, c in chunks])]
        found = {where: self._fetched.find(where) for where in wanted}
        for (i, c), data in self._stored_chunks(missing := [where for where in wanted if found[where] is None]):
            if data is None:
                raise self._damaged(i, f"inner chunk {c} is not stored")
            found[i, c] = data
            if len(missing) <= self._fetched.limit:  # a copy: requests are merged, and one part would keep the whole
                self._fetched.keep((i, c), memoryview(bytes(data)))
        return [found[where] for where in wanted]

    def _mapped_chunks(self, i: int, chunks: Sequence[int]) -> Iterator[memoryview]:
        """The stored bytes of some chunks of a local file."""
        mapped = self._files.get(i) or self._files.keep(i, memoryview(self._open_map(i)))
        mapped.used, data = clock.now, cast(memoryview, mapped.content)
        ranges = [[0, len(data)]] * len(chunks)
        if self._spec.index is not None:
            if (index := self._indexes.find(i)) is None:
                index = self._fetch_indexes([i])[i]
            ranges = index[chunks].tolist() if len(chunks) > 4 else [index[c].tolist() for c in chunks]
        for c, (offset, size) in zip(chunks, ranges, strict=True):
            if offset == ABSENT:
                raise self._damaged(i, f"inner chunk {c} is not stored")
            if size > self._most_bytes:
                raise self._damaged(i, "is far larger than its chunks")
            if offset + size > len(data):
                raise self._damaged(i, "is cut off")
            if self._ask_first:
                self._ask_first -= 1
                _advise(data.obj, offset, offset + size)
            yield data[offset : offset + size]

    # Encoded chunks

    def _stored_chunks(self, wanted: Sequence[IntPair]) -> Iterator[tuple[IntPair, memoryview | None]]:
        """((object, chunk), its stored bytes, or None if it is not stored) for each wanted chunk."""
        if not wanted:
            return
        if self._spec.index is None:
            yield from self._whole_objects(wanted)
            return
        indexes = self._fetch_indexes(sorted({i for i, _ in wanted}))
        ranges, present = [], []
        for i, c in wanted:
            index = indexes[i]
            offset, size = (ABSENT, 0) if index is None else index[c].tolist()
            if offset == ABSENT:
                yield (i, c), None
                continue
            if size > self._most_bytes:
                raise self._damaged(i, "is far larger than its chunks")
            ranges.append(ByteRange(i, offset, size))
            present.append((i, c))
        adjoin = all(one.i == two.i and one.offset + one.size == two.offset for one, two in itertools.pairwise(ranges))
        if not (self.store.is_local and ranges and adjoin):
            yield from zip(present, self._fetch(ranges), strict=True)
            return
        i, begin, end = ranges[0].i, ranges[0].offset, ranges[-1].offset + ranges[-1].size
        with self.store.borrow_range(self._spec.object_key(i), begin, end) as data:
            if len(data) < end - begin:
                raise self._damaged(i, "is cut off")
            for where, (_, offset, size) in zip(present, ranges, strict=True):
                yield where, data[offset - begin : offset - begin + size]

    def _whole_objects(self, wanted: Sequence[IntPair]) -> Iterator[tuple[IntPair, memoryview | None]]:
        """Objects that are one chunk each. No more than the largest possible chunk is read."""
        if self.store.is_local and self._in_parts is not None:
            found: Iterable[Any] = (self._mapped_object(i) for i, _ in wanted)  # one at a time: each holds a descriptor
        else:
            keys = [self._spec.object_key(i) for i, _ in wanted]
            found = self.store.read_ranges(keys, [0] * len(keys), [self._most_bytes + 1] * len(keys))
        for (i, c), data in zip(wanted, map(self._unless_absent, found), strict=True):
            if data is not None and len(data) > self._most_bytes:
                raise self._damaged(i, "is far larger than its chunks")
            yield (i, c), None if data is None else memoryview(data)

    def _mapped_object(self, i: int) -> Any:
        """The object's file, mapped, or its FileNotFoundError."""
        try:
            mapped = self._files.get(i) or self._files.keep(i, self._open_map(i))
        except FileNotFoundError as error:
            return error
        mapped.used = clock.now
        return mapped.content

    def _unless_absent(self, data: Any) -> Any:
        """The bytes that were read of an object. None if there is no object, in an array in which a missing object means the
        fill value.
        """
        if not isinstance(data, FileNotFoundError):
            return data
        if self._spec.absent_value is None:
            raise data
        return None

    def _absent(self) -> AnyArray:
        if self._spec.absent_value is None:
            raise ValueError("is not stored")
        return np.broadcast_to(np.array(self._spec.absent_value, self.numpy_dtype), self._chunk_length)

    # Bytes and indexes

    def _fetch(self, ranges: list[ByteRange]) -> list[memoryview]:
        """The bytes of many ranges. Ranges close to each other are read together."""
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        requests: list[tuple[int, int, int]] = []  # object, first byte, byte after the last
        place: list[int] = [0] * len(ranges)
        for k in order:
            i, offset, size = ranges[k]
            here, begin, end = requests[-1] if requests else (-1, 0, 0)
            is_near = here == i and offset <= end + self._merged_gap
            if is_near and (offset + size <= begin + self._merged_bytes or offset + size <= end):
                requests[-1] = (i, begin, max(end, offset + size))
            else:
                requests.append((i, offset, offset + size))
            place[k] = len(requests) - 1
        keys = [self._spec.object_key(i) for i, _, _ in requests]
        found = self.store.read_ranges(keys, [begin for _, begin, _ in requests], [end for _, _, end in requests])
        parts = []
        for k, (i, offset, size) in enumerate(ranges):
            data, begin = found[place[k]], requests[place[k]][1]
            if isinstance(data, FileNotFoundError):
                raise data
            part = memoryview(data)[offset - begin : offset - begin + size]
            if len(part) != size:
                raise self._damaged(i, "is cut off")
            parts.append(part)
        return parts

    def _fetch_indexes(self, objects: list[int]) -> dict[int, UInt64s | None]:
        """Offset and length of each inner chunk of some shards: uint64[chunks_per_object, 2], or None if a shard is not
        stored. Those that are not known are read at once.
        """
        indexes = {i: self._indexes.find(i) for i in objects}
        if not (unknown := [i for i in objects if indexes[i] is None]):
            return indexes
        assert self._spec.index is not None
        location, checked = self._spec.index
        length = self._spec.chunks_per_object * 16 + 4 * checked
        begin, end = (0, length) if location == "start" else (-length, None)
        keys = [self._spec.object_key(i) for i in unknown]
        for i, data in zip(unknown, self.store.read_ranges(keys, [begin] * len(keys), [end] * len(keys)), strict=True):
            if (stored := self._unless_absent(data)) is not None:
                # Some stand-ins for object stores send the whole object instead of its last bytes.
                stored = stored[:length] if location == "start" else stored[-length:]
                crc32c = int.from_bytes(stored[-4:], "little")
                if len(stored) != length or (checked and google_crc32c.value(stored[:-4]) != crc32c):
                    raise self._damaged(i, "the shard's index is damaged")
                index = np.frombuffer(stored, "<u8", length // 16 * 2).reshape(-1, 2)
                offsets, lengths = index[index[:, 0] != ABSENT].T
                # In floats: offset + length of a hostile index overflows 64 bits. Ranges beyond the object come back cut off.
                if (offsets.astype(np.float64) + lengths > 1 << 60).any():
                    raise self._damaged(i, "the shard's index is damaged")
                indexes[i] = self._indexes.keep(i, index)
        return indexes

    def _damaged(self, i: int, what: str) -> ValueError:
        path = self.store.path(self._spec.object_key(i))
        return ValueError(f"{path}: {what}. The file is damaged: remove it and build again.")


def _cut(first: int, stop: int, at: int, length: int) -> Iterator[ItemRange]:
    """Items ``first:stop``, which go to ``out[at:]``, in parts that end at multiples of *length*, by which they are numbered."""
    while first < stop:
        i = first // length
        last = min((i + 1) * length, stop)
        yield ItemRange(i, first, last, at)
        at += last - first
        first = last


def _cells(starts: Int64s, stops: Int64s, length: int) -> Int64Pair:
    """The chunks or blocks of *length* items that have one of the items ``starts[k]:stops[k]``: int64[n], the number k of the
    range, and int64[n], that of the chunk.
    """
    firsts = starts // length
    counts = np.where(stops > starts, (stops - 1) // length - firsts + 1, 0)
    k = np.repeat(np.arange(len(starts)), counts)
    return k, np.arange(len(k)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)


def _copy_ranges(
    items: AnyArray,
    starts: Int64s,
    lengths: Int64s,
    out: AnyArray,
    at: Int64s,
) -> None:
    """Items ``starts[k]`` and the ``lengths[k]`` from there on go to ``out[at[k]:]``."""
    ends = np.cumsum(lengths)
    count = int(ends[-1]) if len(ends) else 0
    if count < len(starts) * LONG_RANGE:
        places, before = np.arange(count), ends - lengths
        out[places + np.repeat(at - before, lengths)] = items[places + np.repeat(starts - before, lengths)]
        return
    for start, length, place in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
        out[place : place + length] = items[start : start + length]


def _copy_each(content: UInt32s, ranges: list[list[int]], out: AnyArray, few: int) -> None:
    """Copy ranges of a mapped file one by one. A range of fewer words than *few* is copied as memory."""
    stored, target = content.view(np.uint32).data, out.view(np.uint32).data
    for first, count, place in zip(*ranges, strict=True):
        if count < few:
            target[place : place + count] = stored[first : first + count]
        else:
            out[place : place + count] = content[first : first + count]


def _copy_windows(content: UInt32s, ranges: Int64s, out: AnyArray) -> None:
    """Copy ranges of a mapped file, int64[3, n], to *out*, which has items of the same type.

    An array that has a window from each word on, as one item, is indexed: one operation copies all windows.
    """
    most = FEW_WORDS
    for size in WINDOWS:
        first, count, place = ranges[:, (ranges[1] >= size) & (ranges[1] < most)]
        most = size
        if not len(first):
            continue
        windows = -(-count // size)
        within = np.arange(int(windows.sum())) - np.repeat(np.cumsum(windows) - windows, windows)
        within = np.minimum(within * size, np.repeat(count - size, windows))
        stored, target = (_windows(words, size) for words in (content, out))
        target[within + np.repeat(place, windows)] = stored[within + np.repeat(first, windows)]


def _windows(words: AnyArray, size: int) -> AnyArray:
    """Item i: words ``i:i + size``. It is a view of the same memory."""
    return np.ndarray((len(words) - size + 1,), f"V{4 * size}", words, strides=(4,)) if size > 1 else words


def _ask_for(words: UInt32s, first: int, count: int, advice: int = mmap.MADV_WILLNEED) -> None:
    """Tell the system, without waiting, that words ``first:first + count`` of a mapped file are wanted, or, with another
    *advice*, that they are no longer: they stay in the page cache.
    """
    _advise(cast(memoryview, words.base).obj, first * 4, (first + count) * 4, advice)


def _advise(mapped: object, begin: int, end: int, advice: int = mmap.MADV_WILLNEED) -> None:
    page = begin // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # advice that cannot be taken
        cast(mmap.mmap, mapped).madvise(advice, page, end - page)
