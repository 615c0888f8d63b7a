"""A store whose objects are read in units of about a mebibyte, which are kept in memory and on a local disk.

The objects are those of a manifest, so the content under a name never changes. An object that is one unit is checked against
its digest when it is fetched, one of raw chunks against the crc32c of each chunk. What is compressed is checked when it is
decoded, as ever. A request that takes far longer than the last ones is made once more, and the first answer counts.
"""

from __future__ import annotations

import collections
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np

from flat_tokens.stores.disk_cache import DiskCache
from flat_tokens.stores.store import Store, StoredObject

UNIT_BYTES = 1 << 20
READ_AHEAD_BYTES = 256 << 20
MEMORY_BYTES = 64 << 20
"""Units kept in memory, at least; at most twice the bytes that are read ahead."""
THREADS = 64
"""Requests at a time."""
LATE_FACTOR, SOONEST_LATE, FIRST_LATE = 4.0, 0.05, 1.0
"""A request is late after this many times the median of the last ones, never sooner than after this many seconds, and after so
many while there were too few.
"""
ENOUGH_REQUESTS = 8
ASKED_AGAIN = 0.1
"""The share of the requests that is made once more, at most: a store that is slow as a whole has enough to do."""


class Unit(NamedTuple):
    """Bytes ``start:stop`` of an object, whose *key* is below the dataset's root."""

    key: str
    start: int
    stop: int


class Fetch:
    """A unit on its way: ``found`` has its bytes, ``is_settled`` is set when they have been handed to the disk, too."""

    def __init__(self, unit: Unit, chunks: Chunks) -> None:
        self.unit, self.chunks, self.attempts, self.is_due = unit, chunks, 0, False
        self.found: Future[bytes] = Future()
        self.is_settled = threading.Event()


class Chunks(NamedTuple):
    """The raw chunks of an object: each of *size* bytes, the last 4 a crc32c; ``behind`` bytes follow the last one. 0: none."""

    size: int = 0
    behind: int = 0

    @property
    def unit_bytes(self) -> int:
        """The bytes of a unit: units begin and end where chunks do."""
        if not 0 < self.size <= 4 * UNIT_BYTES:
            return UNIT_BYTES
        return max(round(UNIT_BYTES / self.size), 1) * self.size


@dataclass(frozen=True)
class CachedStore(Store):
    """A remote store with `Units` of the objects below the root of a dataset. What is no such object is read as ever."""

    units: Units | None = field(default=None, repr=False, compare=False)
    chunks: Chunks = field(default=Chunks(), repr=False, compare=False)

    @classmethod
    def over(cls, store: Store, objects: Sequence[StoredObject], disk: DiskCache, read_ahead: int) -> Self:
        units = Units(store, {stored.key: stored for stored in objects}, disk, read_ahead)
        return cls(**{item.name: getattr(store, item.name) for item in fields(store)}, units=units)

    def in_chunks(self, size: int, behind: int) -> Self:
        """The store of an array whose objects are raw chunks of *size* bytes, and ``behind`` more."""
        return replace(self, chunks=Chunks(size, behind))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes ``start:stop`` of an object."""
        (found,) = self.read_ranges([key], [start], [stop])
        if isinstance(found, FileNotFoundError):
            raise found
        return found

    def read_ranges(
        self, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int | None]
    ) -> list[bytes | FileNotFoundError]:
        """As of other stores, from the units."""
        assert self.units is not None
        parts: list[tuple[Unit, int, int]] = []
        of: list[int] = []
        known = {key: self._stored(key) for key in dict.fromkeys(keys)}
        made: dict[tuple[str, int], Unit] = {}
        size = self.chunks.unit_bytes
        for k, (key, start, stop) in enumerate(zip(keys, starts, stops, strict=True)):
            if (stored := known[key]) is None:
                return super().read_ranges(keys, starts, stops)
            start, stop = (max(stored.size + start, 0), stored.size) if stop is None else (start, min(stop, stored.size))
            while start < stop:
                number = start // size
                if (unit := made.get((key, number))) is None:
                    unit = made[key, number] = Unit(stored.key, number * size, min((number + 1) * size, stored.size))
                parts.append((unit, start - unit.start, min(stop, unit.stop) - unit.start))
                of.append(k)
                start = unit.stop
        answers: list[Any] = [b""] * len(keys)
        for k, part in zip(of, self.units.read(parts, self.chunks), strict=True):
            answers[k] = part if isinstance(part, FileNotFoundError) or not answers[k] else answers[k] + part
        return answers

    def units_of(self, places: Sequence[tuple[str, int, int]]) -> list[Unit]:
        """The units with bytes ``start:stop`` of objects, (key, start, stop), in order, each once."""
        size, known = self.chunks.unit_bytes, {key: self._stored(key) for key, _, _ in places}
        numbers = {
            (key, number): stored
            for key, start, stop in places
            if (stored := known[key]) is not None
            for number in range(start // size, -(-min(stop, stored.size) // size))
        }
        return [Unit(stored.key, n * size, min((n + 1) * size, stored.size)) for (_, n), stored in numbers.items()]

    def fetch_ahead(self, units: Sequence[Unit]) -> int:
        """Fetch units that will be read soon, without waiting for them. Returns the bytes that were not here."""
        assert self.units is not None
        return self.units.fetch_ahead(units, self.chunks)

    def _stored(self, key: str) -> StoredObject | None:
        assert self.units is not None
        return self.units.objects.get(self.path(key)[len(self.units.origin.root.rstrip("/")) + 1 :])


_units_here: weakref.WeakSet[Units] = weakref.WeakSet()


class Units:
    """The units of a dataset's *objects* in this process, each of which is asked for once. Threads may share it."""

    def __init__(self, origin: Store, objects: Mapping[str, StoredObject], disk: DiskCache, read_ahead: int) -> None:
        self.origin, self.objects, self.disk, self.read_ahead = origin, objects, disk, read_ahead
        self._most_bytes = max(2 * read_ahead, MEMORY_BYTES)
        self._begin_anew()
        _units_here.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Units, (self.origin, self.objects, self.disk, self.read_ahead)

    def _begin_anew(self) -> None:
        """Forget everything: the child of a fork has neither its parent's threads nor what they were about to fetch."""
        self._lock = threading.Lock()
        self._memory: collections.OrderedDict[Unit, bytes] = collections.OrderedDict()
        self._memory_bytes = 0
        self._unkept_units: dict[Unit, bytes] = {}
        self._coming: dict[Unit, Fetch] = {}
        self._asked_ahead: dict[Unit, None] = {}
        self._due: collections.deque[Fetch] = collections.deque()
        self._ahead: collections.deque[Fetch] = collections.deque()
        # Threads share only simple queues, which finalizers may always fill: None ends one.
        self._tickets: SimpleQueue[Any] = SimpleQueue()
        self._begun: SimpleQueue[Any] = SimpleQueue()
        self._unkept: SimpleQueue[Any] = SimpleQueue()
        self._unkept_bytes = 0
        self._threads = self._at_work = 0
        self._seconds: collections.deque[float] = collections.deque(maxlen=64)
        self.requests = self.asked_again = 0
        weakref.finalize(self, _end, self._tickets, self._begun, self._unkept)

    def read(self, parts: Sequence[tuple[Unit, int, int]], chunks: Chunks) -> list[bytes | FileNotFoundError]:
        """Bytes ``start:stop`` of each unit, counted from the unit's first."""
        found: list[Any] = [None] * len(parts)
        by_unit: dict[Unit, list[int]] = {}
        for n, part in enumerate(parts):
            by_unit.setdefault(part[0], []).append(n)
        fetches: list[tuple[Fetch, bool, list[int]]] = []
        for unit, places in by_unit.items():
            self.disk.note_use(self._name(unit))
            if (data := self._remembered(unit)) is not None:
                for n in places:
                    found[n] = data[parts[n][1] : parts[n][2]]
            elif unit in self._coming or None in (on_disk := [self.disk.find(self._name(unit), *parts[n][1:]) for n in places]):
                fetches.append((*self._begin(unit, chunks, self._due), places))
            else:
                for n, part_data in zip(places, on_disk, strict=True):
                    found[n] = part_data
        for fetch, is_own, places in fetches:
            try:
                if not is_own and fetch.found.exception():  # it was asked for before: ask now
                    fetch, is_own = self._begin(fetch.unit, chunks, self._due)
                data = fetch.found.result()
                if is_own:  # whoever reads next, in this process or another, finds it
                    fetch.is_settled.wait()
                for n in places:
                    found[n] = data[parts[n][1] : parts[n][2]]
            except FileNotFoundError as error:
                for n in places:
                    found[n] = error
        return found

    def fetch_ahead(self, units: Sequence[Unit], chunks: Chunks) -> int:
        """Fetch units that are neither in memory nor on the disk, in this order, after those that a reader waits for. A unit on
        the disk is loaded into memory if it is asked for twice in a short time; otherwise its rows are read from the disk.
        Returns the bytes to be fetched.
        """
        size = 0
        for unit in units:
            self.disk.note_use(self._name(unit))
            if self._remembered(unit) is None and unit not in self._coming:
                is_new, self._asked_ahead[unit] = unit not in self._asked_ahead, None
                if is_new and self.disk.has(self._name(unit)):
                    while len(self._asked_ahead) * UNIT_BYTES > self._most_bytes:
                        self._asked_ahead.pop(next(iter(self._asked_ahead)), None)
                    continue
                self._begin(unit, chunks, self._ahead)
                size += unit.stop - unit.start
        return size

    def _remembered(self, unit: Unit) -> bytes | None:
        with self._lock:
            if (data := self._memory.get(unit)) is not None:
                self._memory.move_to_end(unit)
                return data
            return self._unkept_units.get(unit)  # a slow disk has not got it yet

    def _begin(self, unit: Unit, chunks: Chunks, line: collections.deque[Fetch]) -> tuple[Fetch, bool]:
        """The fetch of a unit; a new one, at the end of *line*, if there is none. And whether it is new."""
        with self._lock:
            fetch = self._coming.get(unit)
            if fetch is None and (data := self._memory.get(unit)) is not None:  # it has just come
                fetch = Fetch(unit, chunks)
                fetch.found.set_result(data)
                fetch.is_settled.set()
                return fetch, True
            is_new = fetch is None
            if fetch is None:
                fetch = self._coming[unit] = Fetch(unit, chunks)
            if is_new or (line is self._due and not fetch.is_due and not fetch.attempts):  # it may wait in the other line
                fetch.is_due = line is self._due
                self._ask(fetch, line)
        return fetch, is_new

    def _ask(self, fetch: Fetch, line: collections.deque[Fetch]) -> None:
        line.append(fetch)
        self._tickets.put(self)
        # A request that is late holds its thread: who makes it once more is another one.
        if self._threads - self._at_work < len(self._due) + len(self._ahead) and self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=_work, args=(self._tickets,), name="flat-tokens-fetch", daemon=True).start()
            if self._threads == 1:
                threading.Thread(target=_watch, args=(self._begun,), name="flat-tokens-late", daemon=True).start()
                threading.Thread(target=_keep, args=(self._unkept,), name="flat-tokens-keep", daemon=True).start()

    def work(self) -> None:
        """Fetch the first unit in line."""
        with self._lock:
            line = self._due or self._ahead
            if not line or (fetch := line.popleft()).found.done() or (line is self._ahead and fetch.is_due):
                return
            fetch.attempts += 1
            self._at_work += 1
            is_first = fetch.attempts == 1
        try:
            data = self.disk.find(self._name(fetch.unit), 0, fetch.unit.stop - fetch.unit.start) if is_first else None
            is_new = data is None
            if data is None:
                data = self._asked(fetch)
        except BaseException as error:  # noqa: BLE001 - raised where the unit is wanted
            self._end(fetch, None, error)
            return
        if self._end(fetch, data, None):
            if is_new and self._unkept_bytes < self._most_bytes:
                with self._lock:
                    self._unkept_bytes += len(data)
                    self._unkept_units[fetch.unit] = data
                self._unkept.put((self, fetch, data))
            else:  # it is on the disk, or the disk is late
                fetch.is_settled.set()

    def keep(self, fetch: Fetch, data: bytes) -> None:
        """Hand a unit to the disk."""
        try:
            self.disk.add(self._name(fetch.unit), data)
        finally:
            with self._lock:
                self._unkept_bytes -= len(data)
                self._unkept_units.pop(fetch.unit, None)
            fetch.is_settled.set()

    def _end(self, fetch: Fetch, data: bytes | None, error: BaseException | None) -> bool:
        """Whether this attempt is the one that counts."""
        with self._lock:
            fetch.attempts -= 1
            self._at_work -= 1
            # Another attempt has ended well, or may still.
            if self._coming.get(fetch.unit) is not fetch or (error is not None and fetch.attempts > 0):
                return False
            del self._coming[fetch.unit]
            if data is not None:
                self._memory[fetch.unit] = data
                self._memory_bytes += len(data)
                while self._memory_bytes > self._most_bytes:
                    self._memory_bytes -= len(self._memory.popitem(last=False)[1])
        if data is None:
            fetch.found.set_exception(error)
            return False
        fetch.found.set_result(data)
        return True

    def _asked(self, fetch: Fetch) -> bytes:
        """The bytes of a unit from the store. ValueError if they do not have its digest or checksums."""
        begin = time.monotonic()
        self.requests += 1
        self._begun.put((begin, fetch, self))
        unit, chunks = fetch.unit, fetch.chunks
        (data,) = self.origin.read_ranges([unit.key], [unit.start], [unit.stop])
        if isinstance(data, FileNotFoundError):
            raise data
        self._seconds.append(time.monotonic() - begin)
        stored, wrong = self.objects[unit.key], ""
        if len(data) != unit.stop - unit.start:
            wrong = "is cut off"
        elif len(data) == stored.size:
            if not stored.is_of(data):
                wrong = "does not have the digest that the manifest says"
        elif chunks.size and unit.start % chunks.size == 0:
            view = np.frombuffer(data, np.uint8)
            for first in range(0, min(len(data), stored.size - chunks.behind - unit.start) - chunks.size + 1, chunks.size):
                end = first + chunks.size - 4
                if google_crc32c.value(view[first:end]) != int.from_bytes(data[end : end + 4], "little"):
                    wrong = f"inner chunk {(unit.start + first) // chunks.size} does not match its crc32c"
        if wrong:
            path = self.origin.path(unit.key)
            raise ValueError(f"{path}: {wrong}. The file is damaged: remove it and build again.")
        return data

    def late_after(self) -> float:
        """Seconds after which a request is late."""
        if len(self._seconds) < ENOUGH_REQUESTS:
            return FIRST_LATE
        seconds = sorted(self._seconds.copy())
        return max(LATE_FACTOR * seconds[len(seconds) // 2], SOONEST_LATE)

    def ask_again(self, fetch: Fetch) -> None:
        """Make a late request once more."""
        with self._lock:
            if not fetch.found.done() and self.asked_again < ASKED_AGAIN * self.requests + ENOUGH_REQUESTS:
                self.asked_again += 1
                self._ask(fetch, self._due)

    def _name(self, unit: Unit) -> str:
        return f"{self.objects[unit.key].hexadecimal[:32]}-{unit.start:x}-{unit.stop:x}"


def _work(tickets: SimpleQueue[Units | None]) -> None:
    while (units := tickets.get()) is not None:
        units.work()
        del units  # the next one may be long in coming


def _watch(begun: SimpleQueue[tuple[float, Fetch, Units] | None]) -> None:
    """Ask again for what is late. Requests are late in the order in which they began."""
    while (item := begun.get()) is not None:
        begin, fetch, units = item
        while not fetch.found.done() and (left := begin + units.late_after() - time.monotonic()) > 0:
            time.sleep(min(left, SOONEST_LATE))
        units.ask_again(fetch)
        del item, fetch, units


def _keep(unkept: SimpleQueue[tuple[Units, Fetch, bytes] | None]) -> None:
    """Write to the disk, for which no request waits."""
    while (item := unkept.get()) is not None:
        units, fetch, data = item
        units.keep(fetch, data)
        del item, units, fetch, data


def _end(tickets: SimpleQueue[Any], begun: SimpleQueue[Any], unkept: SimpleQueue[Any]) -> None:
    for _ in range(THREADS):
        tickets.put(None)
    begun.put(None)
    unkept.put(None)


def _begin_anew_after_fork() -> None:
    for units in list(_units_here):
        units._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_after_fork)
