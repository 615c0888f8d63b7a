"""Batches by step: which rows a step has follows from its number alone, so a run can go on from any step.

All samples of a run are in one line, the *stream*: epoch 0's, then epoch 1's and so on. Batch ``step`` is positions
``start + step * batch_size`` up to ``+ batch_size`` of it, across the ends of epochs. Loaders have no state: the progress
of a run is the step, or the position in the stream, which does not depend on batch size and number of hosts.

Reading ahead: a thread goes through the steps in order and has fetched what is not here, many units at once, up to a budget of
bytes that no step has read yet. Only datasets in a store with a cache are read ahead: what is on a local disk is here.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import importlib
import itertools
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, Self, SupportsIndex, TypeAlias

import numpy as np

from flat_tokens.annotations import Int64Pair, Int64s, Integers, IntPair
from flat_tokens.extras import extra
from flat_tokens.options import at_least, true_or_false, whole_number, whole_numbers
from flat_tokens.rows.orders import Order, ReferenceOrder, stream_of
from flat_tokens.rows.views import Part, SplitView
from flat_tokens.stores.cached import CachedStore, Unit

Reads: TypeAlias = Iterable[tuple[Any, Int64s]]
"""Reads of a step: views, and their rows."""
UNITS_AT_A_TIME = 8
STEPS_AHEAD = 1024
"""No more steps are looked at ahead, however little they lack: looking costs time."""


class ReadAhead:
    """Loads steps by *load*, and meanwhile fetches what the next of *steps* read. It ends with the object or with ``close()``."""

    def __init__(self, load: Callable[[int], Any], reads: Callable[[int], Reads], steps: Iterator[int], budget: int) -> None:
        self._load, self._loaded = load, SimpleQueue[int | None]()
        # The thread knows the queue, not this object: it does not keep it alive.
        arguments = (reads, steps, budget, self._loaded)
        threading.Thread(target=_look_ahead, args=arguments, name="flat-tokens-ahead", daemon=True).start()
        self.close = weakref.finalize(self, self._loaded.put, None)

    def __call__(self, step: int) -> Any:
        try:
            return self._load(step)
        finally:
            self._loaded.put(step)


def _store_of(view: Any) -> CachedStore | None:
    """The store of a view's tokens, if it has a cache."""
    store = getattr(getattr(getattr(view, "tokens", None), "encoded_tokens", None), "store", None)
    return store if isinstance(store, CachedStore) else None


def _look_ahead(reads: Callable[[int], Reads], steps: Iterator[int], budget: int, loaded: SimpleQueue[int | None]) -> None:
    """Fetch what the steps read. *loaded*: the steps that were loaded, then None."""
    ahead: dict[int, int] = {}  # step that is not loaded -> bytes that were fetched for it
    early, total = set[int](), 0  # steps that were loaded before they were looked at
    try:
        for step in steps:
            if step in early:
                early.discard(step)
                continue
            ahead[step], parts = 0, _parts(reads, step)
            while True:
                while total >= budget or len(ahead) > STEPS_AHEAD or not loaded.empty():
                    if (done := loaded.get()) is None:
                        return
                    total -= ahead.pop(done, 0)
                    early.update({done} if done > step else ())
                if step not in ahead or (found := next(parts, None)) is None:
                    break
                store, units = found
                size = store.fetch_ahead(units)
                ahead[step] += size
                total += size
    except Exception:  # noqa: BLE001 - the step meets the error itself, when it is loaded
        return


def _parts(reads: Callable[[int], Reads], step: int) -> Iterator[tuple[CachedStore, list[Unit]]]:
    """The units that a step reads, some at a time."""
    for view, rows in reads(step):
        if len(rows) and _store_of(view):
            ranges = view.token_ranges(rows)
            for array in filter(None, (view.tokens.encoded_tokens, view.tokens.loss_mask)):
                units = array.units_of(*ranges)
                for first in range(0, len(units), UNITS_AT_A_TIME):
                    yield array.store, units[first : first + UNITS_AT_A_TIME]


def checked_seed(value: SupportsIndex) -> int:
    if not 0 <= (seed := whole_number("seed", value)) < 1 << 64:
        raise ValueError(f"seed is {seed}, but it is from 0 to 2**64 - 1")
    return seed


Asked: TypeAlias = SupportsIndex | Sequence[int] | Integers
"""A number, or several: int64[n]."""


def in_order(item: Int64s, visits: Visits) -> tuple[Int64s, Visits]:
    """Visits of several items by item, then by step and row of the batch."""
    order = np.lexsort((visits.batch_row, visits.step, item))
    return item[order], Visits(*(field[order] for field in visits))


def digest_of(batch: Any) -> str:
    """SHA-256 of a batch's arrays, in hexadecimal."""
    sha256 = hashlib.sha256()
    _add_to(sha256, "", batch)
    return sha256.hexdigest()


def _add_to(sha256: Any, name: str, value: Any) -> None:
    named = value if isinstance(value, dict) else value._asdict() if hasattr(value, "_asdict") else None
    if named is not None:
        for field, array in named.items():
            _add_to(sha256, f"{name}.{field}", array)
        return
    array = np.asarray(value)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    sha256.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    sha256.update(array.data.cast("B") if array.size else b"")


_Loaded: TypeAlias = tuple[Any, BaseException | None]


class Visits(NamedTuple):
    """When rows are in batches: int64[n] each, in the order of what was asked for, then of steps.

    ``asked``: the row, or the document, that was asked for. ``row``: the row of the view. ``epoch``: of its source.
    ``batch_row``: its row in the batch of all hosts together.
    """

    asked: Int64s
    row: Int64s
    epoch: Int64s
    step: Int64s
    batch_row: Int64s


class View(Protocol):
    """A source of rows by number: the views of ``flat_tokens.rows``, or any other class with these two methods."""

    def __len__(self) -> int: ...

    def batch(self, indices: Int64s) -> Any:
        """Rows *indices* (int64[n], n may be 0) at once: a NamedTuple or dict of arrays with a leading axis n."""


def views_of(view: Any, epochs: Int64s) -> list[tuple[Any, Int64s]]:
    """The view as it is in each of the epochs (int64[n]), and the places of these: int64[k]. One, if all are alike."""
    different = np.unique(epochs).tolist() if getattr(view, "has_epochs", False) else []
    if not different:
        return [(view, np.arange(len(epochs)))]
    return [(view.of_epoch(epoch), np.flatnonzero(epochs == epoch)) for epoch in different]


def read_batch(parts: Sequence[Part], *, are_alike: bool) -> Any:
    """Rows of views as a batch. *are_alike*: the rows of the views can be read together."""
    if len(parts) == 1:
        return parts[0][0].batch(parts[0][1])
    if are_alike:
        return parts[0][0].together(parts)
    batches, places = [view.batch(rows) for view, rows, _ in parts], [where for _, _, where in parts]
    if isinstance(batches[0], dict):
        return {field: _placed([batch[field] for batch in batches], places) for field in batches[0]}
    return type(batches[0])(*(_placed(arrays, places) for arrays in zip(*batches, strict=True)))


def hosts_of_rows(costs: Int64s, counts: Int64s) -> Int64s:
    """The host of each row: int64[n]. Host h has ``counts[h]`` rows. Rows are dealt by falling cost, each to the host with the
    least cost so far among those with room.
    """
    host_of, room = np.empty(len(costs), np.int64), counts.tolist()
    hosts = [(0, host) for host in range(len(room)) if room[host]]
    for row in np.argsort(-costs, kind="stable").tolist():
        cost, host = heapq.heappop(hosts)
        host_of[row] = host
        room[host] -= 1
        if room[host]:
            heapq.heappush(hosts, (cost + int(costs[row]), host))
    return host_of


def _placed(arrays: Sequence[Any], places: Sequence[Int64s]) -> Any:
    """Join arrays: row i of ``arrays[k]`` becomes row ``places[k][i]``."""
    if type(arrays[0]).__module__ == "torch":
        return importlib.import_module("torch").from_numpy(_placed([array.numpy() for array in arrays], places))
    if not isinstance(arrays[0], np.ndarray):  # jax's are not written to
        return arrays[0].__array_namespace__().concatenate(arrays)[np.argsort(np.concatenate(places))]
    rows = np.empty((sum(map(len, places)), *arrays[0].shape[1:]), arrays[0].dtype)
    for array, where in zip(arrays, places, strict=True):
        rows[where] = array
    return rows


def check_view(view: object, what: str = "the view") -> None:
    """TypeError for an object that has no rows, such as a split: its views have them."""
    if not (hasattr(view, "__len__") and hasattr(view, "batch")):
        raise TypeError(f"{what} is {view!r}, but a view has len(view) and view.batch(indices), as split.packed(length) has")


class ByStep:
    """Base of the loaders: steps of *batch_size* samples from position *start* to *total*, for one of several hosts."""

    def __init__(
        self, view: View, batch_size: int, start: int, start_token: int | None, total: int | None = None, drop_last: bool = False
    ) -> None:
        self.batch_size = at_least(1, "batch_size", batch_size)
        self._row_tokens: int | None = getattr(view, "length", None)
        self.start = at_least(0, "start", start)
        if start_token is not None:
            if self.start:
                raise ValueError(f"start is {self.start} and start_token {start_token}: give one of them")
            row = self._tokens_of_a_row()
            self.start, inside = divmod(at_least(0, "start_token", start_token), row)
            if inside:
                begins = f"{start_token - inside} and {start_token - inside + row}"
                raise ValueError(f"start_token {start_token} is inside a row: with {row} tokens a row, rows begin at {begins}")
        self.view, self.process_index, self.process_count = view, 0, 1
        self._total = total
        self._step_count: int | None = None
        if total is not None:
            if self.start > total:
                raise ValueError(f"start is {self.start}, but there are {total} samples in all")
            left = total - self.start
            self._step_count = left // self.batch_size if drop_last else -(-left // self.batch_size)

    def __len__(self) -> int:
        """Steps from *start* on. TypeError if they are endless."""
        if self._step_count is None:
            raise TypeError("this loader is endless and has no length: take its first steps with steps(0, stop)")
        return self._step_count

    def __getitem__(self, step: SupportsIndex) -> Any:
        """The batch of a step, as the view gives it. IndexError if there is no such step."""
        return read_batch(self._parts(step), are_alike=isinstance(self.view, SplitView))

    def __iter__(self) -> Steps:
        return self.steps()

    def steps(self, start: int = 0, stop: int | None = None, *, prefetch: int = 0, threads: int = 1) -> Steps:
        """The batches of steps ``start:stop`` in order, without *stop* up to the last one; see `Steps`."""
        return Steps(self, start, stop, prefetch, threads)

    def map_dataset(self) -> Any:
        """A ``grain.MapDataset`` whose element i is the batch of step i on this host; without an end, ``sys.maxsize`` of them.

        ModuleNotFoundError if grain is not installed.
        """
        return extra("grain", "map_dataset()").MapDataset.source(_GrainSource(self))

    def position(self, step: int) -> int:
        """Number of samples, over all hosts, before *step*: the *start* of a loader that continues there."""
        if (step := index(step)) != self._step_count:
            return self._batch_range(step)[0]
        end = self._begins(step)
        return end if self._total is None else min(end, self._total)

    def _begins(self, step: int) -> int:
        """The position at which a step begins."""
        return self.start + step * self.batch_size

    def token_position(self, step: int) -> int:
        """The position at which a step begins, in tokens, for views whose rows have one ``length``: the *start_token* of a
        loader that continues there.
        """
        return self.position(step) * self._tokens_of_a_row()

    def steps_of(self, rows: Asked, *, before: int | None = None, source: str | None = None) -> Any:
        """The steps that have a row of the view: int64[k], increasing; for *rows*, int64[n], a list of n such arrays.

        It takes the same time for every row and epoch, however many rows and steps there are: no batch is looked at.
        *before*: of the steps before this one; an endless loader needs it, else TypeError. IndexError for a row that the view
        does not have. *source*: the name, of a mixture's source; needed if there are several.
        """
        asked = np.asarray(rows)
        item, found = in_order(*self._visits(np.atleast_1d(asked), before, source))
        return np.split(found.step, np.searchsorted(item, np.arange(1, len(asked)))) if asked.ndim else found.step

    def visits(self, rows: Asked, *, before: int | None = None, source: str | None = None) -> Visits:
        """The steps that have a row of the view, with epochs and rows of batches. They are those of all hosts, on a shard too."""
        return in_order(*self._visits(np.atleast_1d(np.asarray(rows)), before, source))[1]

    def seen(self, documents: Asked, *, before: int | None = None, source: str | None = None) -> Visits:
        """When rows with tokens of *documents*, numbers of sequences of the split, are in batches; as `visits` of these rows.

        TypeError for a view that does not tell the rows of a document (``rows_of``).
        """
        view = self._view_of(source)
        if not hasattr(view, "rows_of"):
            raise TypeError(f"{view!r} has no rows_of(documents), so it can't tell where a document is: ask for rows")
        asked = np.atleast_1d(np.asarray(documents))
        of, rows = view.rows_of(asked)
        item, found = self._visits(rows, before, source)
        return in_order(of[item], found._replace(asked=asked[of[item]]))[1]

    def reads(self, step: SupportsIndex) -> Reads:
        """The views that a step reads on this host, each with its rows."""
        return [(view, rows) for view, rows, _ in self._parts(step)]

    def _parts(self, step: SupportsIndex) -> list[Part]:
        """The same as they are in each epoch, with the places of the rows in the batch."""
        raise NotImplementedError

    def digest(self, step: SupportsIndex) -> str:
        """SHA-256, in hexadecimal, of this host's rows of a step: of the arrays that the view gives, by name, type, shape, bytes.

        It reads the step. The same tokens have the same digest in numpy, torch and jax, and wherever the dataset lies.
        """
        return digest_of(self[step])

    def versions(self) -> dict[str, int]:
        """Versions of what decides the batches, by name. A state has them and is continued with the same ones."""
        return {}

    def check_versions(self, state: Mapping[str, int]) -> None:
        """ValueError for a state with other versions. One that was written by hand may have none."""
        for name, version in self.versions().items():
            if (other := state.get(name, version)) != version:
                raise ValueError(f"the state is of {name} {other}, but this loader has {name} {version}")

    def _view_of(self, source: str | None) -> View:
        """The view of a source. ValueError if there is no such source."""
        if source is not None:
            raise ValueError(f"source is {source!r}, but this loader has one view, without a name: leave it out")
        return self.view

    def _visits(self, rows: Integers, before: int | None, source: str | None) -> tuple[Int64s, Visits]:
        """The visits of rows, in any order, and the index in *rows* of each: int64[n]. TypeError for rows that are not whole
        numbers, and of an endless loader without *before*; IndexError for one that the view does not have.
        """
        rows, count = whole_numbers("row numbers are", rows), len(self._view_of(source))
        if (outside := rows[(rows < 0) | (rows >= count)]).size:
            raise IndexError(f"there is no row {outside[0]}; there are {count}")
        known = [count for count in (before, self._step_count) if count is not None]
        if not known:
            raise TypeError("this loader is endless: say before which step, with before=N")
        asked, steps = rows.astype(np.int64), at_least(0, "before", min(known))
        epochs = self._epochs_in(steps, source)
        item, epoch = np.repeat(np.arange(len(asked)), len(epochs)), np.tile(epochs, len(asked))
        step, batch_row = self._places_of(asked[item], epoch, source)
        there = np.flatnonzero((step >= 0) & (step < steps))
        item = item[there]
        return item, Visits(asked[item], asked[item], epoch[there], step[there], batch_row[there])

    def _epochs_in(self, steps: int, source: str | None) -> Int64s:
        """The epochs that the first *steps* steps have samples of: int64[k]."""
        raise NotImplementedError

    def _places_of(self, rows: Int64s, epochs: Int64s, source: str | None) -> Int64Pair:
        """The step of each row in its epoch, -1 for none, and the row of the batch: int64[n] each."""
        raise NotImplementedError

    def shard(self, process_index: int, process_count: int) -> Self:
        """The loader of one of several hosts, which gives that host's rows of each batch. Hosts' rows follow one another.

        ``batch_size``, steps and positions stay those of the whole. A short last batch is divided as evenly as possible.
        ValueError if *batch_size* is not a multiple of *process_count*.
        """
        if self.process_count != 1:
            raise ValueError(f"this is already the loader of process {self.process_index} of {self.process_count}")
        process_index, process_count = whole_number("process_index", process_index), whole_number("process_count", process_count)
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index}, but with {process_count} processes it is from 0 to one less")
        self._check_shares(process_count)
        part = copy.copy(self)
        part.process_index, part.process_count = process_index, process_count
        return part

    def _check_shares(self, process_count: int) -> None:
        """ValueError if full batches can't be divided evenly among so many processes."""
        if self.batch_size % process_count:
            raise ValueError(f"batch_size {self.batch_size} does not divide evenly among {process_count} processes")

    def _batch_range(self, step: SupportsIndex) -> tuple[int, int, int, int]:
        """Start, stop, first, last: a batch is positions ``start:stop`` of the stream, this host has its rows ``first:last``."""
        step = index(step)
        if step < 0 or (self._step_count is not None and step >= self._step_count):
            there_are = "they count from 0" if self._step_count is None else f"there are {self._step_count}"
            if step >= 0 and self._total is not None:
                there_are += ", more with more epochs, and with epochs=None no end"
            raise IndexError(f"there is no step {step}; {there_are}")
        start, stop = self._begins(step), self._begins(step + 1)
        stop = stop if self._total is None else min(stop, self._total)
        return start, stop, *self._share(stop - start)

    def _share(self, rows: int) -> IntPair:
        """The rows of a batch of *rows* that this host has: the first one, and one past the last."""
        return rows * self.process_index // self.process_count, rows * (self.process_index + 1) // self.process_count

    def _tokens_of_a_row(self) -> int:
        if self._row_tokens is None:
            raise TypeError("positions in tokens need a view whose rows have one `length`: count in samples here")
        return self._row_tokens


class _GrainSource:
    """The batches of a loader as a source of grain's, which want a length."""

    def __init__(self, loader: ByStep) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return sys.maxsize if self._loader._step_count is None else self._loader._step_count

    def __getitem__(self, step: SupportsIndex) -> Any:
        return self._loader[step]

    def __repr__(self) -> str:
        return repr(self._loader)


class Steps(Iterator[Any]):
    """Batches of a loader in order. ``step`` is the number of the next one.

    With *prefetch*, *threads* background threads load up to that many batches ahead. They end with the iterator: at its
    last batch, with ``close()`` or a ``with`` block, or when it is garbage. An error is raised where its batch is due;
    asking again tries again. Of datasets in a store with a cache, a thread fetches what the steps after them read. Pickled, it
    continues with the same step elsewhere.

    ``state_dict()`` returns the progress and ``load_state_dict()`` continues from it, as torchdata's StatefulDataLoader
    wants it. IndexError for steps that the loader does not have.
    """

    def __init__(self, loader: ByStep, start: int = 0, stop: int | None = None, prefetch: int = 0, threads: int = 1) -> None:
        self._loader, self._prefetch, self._threads = loader, at_least(0, "prefetch", prefetch), at_least(1, "threads", threads)
        there_are = loader._step_count
        self._stop = there_are if stop is None else whole_number("stop", stop)
        if there_are is not None and self._stop is not None and self._stop > there_are:
            raise IndexError(f"there are no steps up to {stop}; there are {there_are}")
        self._ahead: _Prefetcher | None = None
        self._load: Callable[[int], Any] = loader.__getitem__
        self._closed = False
        self._changing = threading.Lock()  # one thread may close what another iterates over
        self._go_to(start)

    def __reduce__(self) -> tuple[Any, ...]:
        return _resumed, (self._loader, self.step, self._stop, self._prefetch, self._threads, self._closed)

    def _go_to(self, step: int) -> None:
        if self._stop is not None and step > self._stop:
            raise IndexError(f"there is no step {step} to begin at: these steps end at {self._stop}")
        self.close()
        self.step, self._closed = at_least(0, "start", step), False
        stores = map(_store_of, getattr(self._loader, "views", (self._loader.view,)))
        if budget := min((units.read_ahead for store in stores if store and (units := store.units)), default=0):
            steps = itertools.count(step) if self._stop is None else iter(range(step, self._stop))
            self._load = ReadAhead(self._loader.__getitem__, self._loader.reads, steps, budget)
        if self._prefetch:
            self._running()

    def _running(self) -> _Prefetcher:
        """The buffer of the threads, which are started if they do not run."""
        with self._changing:
            if self._closed:
                raise StopIteration
            if self._ahead is None:
                self._ahead = _Prefetcher(self._load, self.step, self._stop, self._prefetch, self._threads)
                # The threads know the buffer, not this iterator: they do not keep it alive.
                self._stop_ahead = weakref.finalize(self, self._ahead.stop)
            return self._ahead

    def __next__(self) -> Any:
        if self._closed or self.step == self._stop:
            self.close()
            raise StopIteration
        if not self._prefetch:
            batch = self._load(self.step)
        else:
            try:
                batch = self._running().take()
            except BaseException:
                self._end_ahead()
                raise
        self.step += 1
        return batch

    def close(self) -> None:
        """End the iteration and its threads."""
        self._end_ahead(closed=True)

    def _end_ahead(self, *, closed: bool = False) -> None:
        with self._changing:
            self._closed = self._closed or closed
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._stop_ahead()
            ahead.join()
        if closed and isinstance(self._load, ReadAhead):
            self._load.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """The number of the next step, and its position in the stream; of a mixture also its order."""
        return {"step": self.step, "position": self._loader.position(self.step), **self._loader.versions()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state. ValueError if it is of a loader whose step is somewhere else in the stream, or of a mixture in
        another order.
        """
        step, position = state["step"], state["position"]
        self._loader.check_versions(state)
        if (here := self._loader.position(step)) != position:
            raise ValueError(
                f"the state is of step {step} at sample {position}, but in this loader that step is at sample {here}. "
                f"With another batch size or start, make the loader with start={position} and begin at step 0."
            )
        self._go_to(step)


def _resumed(loader: ByStep, step: int, stop: int | None, prefetch: int, threads: int, closed: bool) -> Steps:
    """Continue an iterator of steps in another process, from the same step on, with threads of its own."""
    steps = Steps(loader, step, stop, 0, threads)
    steps._prefetch = prefetch
    if closed:
        steps.close()
    return steps


class _Prefetcher:
    """At most *depth* steps loading or loaded, in order. Threads share only simple queues, which finalizers may always fill."""

    def __init__(self, load: Callable[[int], Any], start: int, stop: int | None, depth: int, threads: int) -> None:
        self._load, self._process, self._stopped = load, os.getpid(), False
        self._steps = itertools.count(start) if stop is None else iter(range(start, stop))
        self._todo: SimpleQueue[tuple[int, SimpleQueue[_Loaded | None]] | None] = SimpleQueue()
        self._due: deque[SimpleQueue[_Loaded | None]] = deque()
        self._threads = [
            threading.Thread(target=self._work, name="flat-tokens-prefetch", daemon=True) for _ in range(min(threads, depth))
        ]
        for _ in range(depth):
            self._begin_next()
        for thread in self._threads:
            thread.start()

    def _begin_next(self) -> None:
        if (step := next(self._steps, None)) is None:
            self._end_threads()
        else:
            self._due.append(SimpleQueue())
            self._todo.put((step, self._due[-1]))

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._todo.put(None)

    def _work(self) -> None:
        while (task := self._todo.get()) is not None and not self._stopped:
            step, due = task
            try:
                due.put((self._load(step), None))
            except BaseException as error:  # noqa: BLE001 - raised where the batch is taken
                due.put((None, error))
            del task, due  # the next task may be long in coming, and the batch is large

    def take(self) -> Any:
        if os.getpid() != self._process:
            raise RuntimeError("these batches are loaded by threads of the process that was forked: call steps() again here")
        if self._stopped or (loaded := self._due[0].get()) is None:
            raise StopIteration
        self._due.popleft()
        self._begin_next()
        batch, error = loaded
        if error is not None:
            try:
                raise error
            finally:
                del error, loaded  # or its traceback and this frame would keep each other alive
        return batch

    def stop(self) -> None:
        self._stopped = True
        self._end_threads()
        for due in list(self._due):
            due.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


class ShuffledLoader(ByStep):
    """Batches of one view: ``loader[step]`` is ``view.batch(loader.indices(step))``, and needs nothing but the step.

    *order* ``"shuffled"`` is a permutation of all rows, another in each epoch, which takes no memory; ``"sequential"``
    is rows 0, 1, 2 ...; a `ReferenceOrder` gives the batches of the reference loader; a `BlockOrder` has neighbouring
    rows together, for datasets in a store. With *epochs* None it never ends.
    *start* is the number of samples that a run has already had, *start_token* the same in tokens.

    With *balance* the rows of a step are dealt to the hosts so that their attention costs about the same, by the sums of squared
    lengths of documents. A step has the same rows as without it, and each host as many. It is for packed documents.

    Only the last batch of a run may have fewer than *batch_size* rows. *drop_last* drops it; None does so in the
    reference order alone, as the reference does. That order also has only whole read blocks, evenly dealt to its
    streams. ``left_out`` is how many rows of the view are in no batch.

    ValueError for an empty view, for a run too short for a single step, and, in an order of streams, where *batch_size*
    or *start* are not multiples of them or the view is smaller than a read block or a row a stream. Loaders can be pickled,
    survive a fork, and may be used by many threads.
    """

    def __init__(
        self,
        view: View,
        batch_size: int,
        seed: int = 0,
        *,
        epochs: int | None = 1,
        drop_last: bool | None = None,
        start: int = 0,
        start_token: int | None = None,
        order: Order = "shuffled",
        balance: bool = False,
    ) -> None:
        check_view(view)
        self.balance = true_or_false("balance", balance)
        if self.balance and not hasattr(view, "attention_costs"):
            raise TypeError(f"{view!r} does not tell its rows' costs of attention: balance is for packed_documents")
        if len(view) == 0:
            raise ValueError("the view has no rows: there is nothing to load")
        self.seed, self.order = checked_seed(seed), order
        self.epochs = epochs if epochs is None else at_least(1, "epochs", epochs)
        self._stream = stream_of(order, len(view), self.seed)
        is_reference = isinstance(order, ReferenceOrder)
        self.drop_last = is_reference if drop_last is None else true_or_false("drop_last", drop_last)
        total = None if self.epochs is None else self.epochs * self._stream.epoch_length
        super().__init__(view, batch_size, start, start_token, total=total, drop_last=self.drop_last)
        for name, value in (("batch_size", self.batch_size), ("start", self.start)):
            if value % self._stream.granularity:
                raise ValueError(f"{name} {value} does not divide evenly among {self._stream.granularity} streams")
        if self.drop_last and total is not None and total < self.batch_size:
            raise ValueError(
                f"there are {total} samples in all, fewer than one batch of {self.batch_size}, and drop_last leaves them out. "
                "Take smaller batches or more epochs."
            )

    def __repr__(self) -> str:
        steps = "endless steps" if self._step_count is None else f"{self._step_count:,} steps"
        return f"<ShuffledLoader: {steps} of {self.batch_size:,} rows of {self.view!r}>"

    @property
    def epoch_length(self) -> int:
        """Number of samples in an epoch: all rows of the view, but for those that do not fill the streams of an order."""
        return self._stream.epoch_length

    @property
    def left_out(self) -> int:
        """Rows of the view that are in no epoch (in the reference order, its last ones), and samples of a dropped batch."""
        dropped = (self._total - self.start) % self.batch_size if self.drop_last and self._total is not None else 0
        return len(self.view) - self.epoch_length + dropped

    def indices(self, step: SupportsIndex) -> Int64s:
        """The rows of the view in a step on this host: int64[rows]. IndexError if there is no such step."""
        return self._draw(step)[0]

    def _draw(self, step: SupportsIndex) -> Int64Pair:
        """The rows of a step on this host, and their epochs: int64[rows] each."""
        start, stop, first, last = self._batch_range(step)
        is_dealt = self.balance and self.process_count > 1
        if is_dealt:
            first, last = 0, stop - start
        rows, streams = self._stream.rows(start, stop, first, last), self._stream.granularity
        # row of the batch -> place in its stream's share of the batch -> place in the stream -> epoch
        place = np.arange(first, last) % max((stop - start) // streams, 1)
        epochs = (start // streams + place) // (self.epoch_length // streams)
        if is_dealt:
            view: Any = self.view
            bounds = np.arange(self.process_count + 1) * (stop - start) // self.process_count
            here = hosts_of_rows(view.attention_costs(rows), np.diff(bounds)) == self.process_index
            rows, epochs = rows[here], epochs[here]
        return rows, epochs

    def _parts(self, step: SupportsIndex) -> list[Part]:
        rows, epochs = self._draw(step)
        return [(view, rows[where], where) for view, where in views_of(self.view, epochs)]

    def _epochs_in(self, steps: int, source: str | None) -> Int64s:
        return np.arange(self.start // self.epoch_length, -(-self.position(steps) // self.epoch_length))

    def _places_of(self, rows: Int64s, epochs: Int64s, source: str | None) -> Int64Pair:
        streams = self._stream.granularity
        stream, place = self._stream.places(rows, epochs)
        # place in the stream -> (step, place in the stream's share of the batch) -> row of the batch
        share = self.batch_size // streams
        step, within = np.divmod(place - self.start // streams, share)
        is_short = (step + 1) * self.batch_size + self.start > (self._total or math.inf)
        shares = np.where(is_short, ((self._total or 0) - self.start) // streams % share, share)
        return np.where(place >= 0, step, -1), stream * shares + within
