"""Iterating over the batches of a loader, with threads that load ahead."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from operator import index
from queue import SimpleQueue
from typing import Any, Protocol, Self, SupportsIndex, TypeAlias

from flat_tokens.rows.order import Indices, at_least

_Loaded: TypeAlias = tuple[Any, BaseException | None]


class View(Protocol):
    """A source of rows by number: the views of ``flat_tokens.rows``, or any other class with these two methods."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Any:
        """Rows *indices* (int64[n], n may be 0) at once: a NamedTuple or dict of arrays with a leading axis n."""
        ...


class ByStep:
    """Base of the loaders: steps of *batch_size* samples from position *start* to *total*, for one of several hosts."""

    _step_count: int | None

    def __init__(
        self,
        view: View,
        batch_size: int,
        start: int,
        start_token: int | None,
        *,
        total: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.batch_size = at_least(1, "batch_size", batch_size)
        self._row_tokens: int | None = getattr(view, "length", None)
        self.start = at_least(0, "start", start)
        if start_token is not None:
            if self.start:
                raise ValueError(f"start is {self.start} and start_token {start_token}: give one of them")
            self.start, inside = divmod(at_least(0, "start_token", start_token), self._tokens_of_a_row())
            if inside:
                raise ValueError(
                    f"start_token {start_token} is inside a row: with {self._row_tokens} tokens a row, rows begin at "
                    f"{start_token - inside} and {start_token - inside + self._tokens_of_a_row()}"
                )
        self.process_index, self.process_count = 0, 1
        self._total, self._step_count = total, None
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
        raise NotImplementedError

    def __iter__(self) -> Steps:
        return self.steps()

    def steps(self, start: int = 0, stop: int | None = None, *, prefetch: int = 0, threads: int = 1) -> Steps:
        """The batches of steps ``start:stop`` in order, without *stop* up to the last one; see `Steps`."""
        return Steps(self, start, stop, prefetch, threads)

    def position(self, step: int) -> int:
        """Number of samples, over all hosts, before *step*: the *start* of a loader that continues there."""
        if (step := index(step)) != self._step_count:
            return self._batch_range(step)[0]
        end = self.start + step * self.batch_size
        return end if self._total is None else min(end, self._total)

    def token_position(self, step: int) -> int:
        """The same in tokens, for views whose rows have one ``length``: the *start_token* of a loader that continues there."""
        return self.position(step) * self._tokens_of_a_row()

    def shard(self, process_index: int, process_count: int) -> Self:
        """The loader of one of several hosts, which gives that host's rows of each batch. Hosts' rows follow one another.

        ``batch_size``, steps and positions stay those of the whole. A short last batch is divided as evenly as possible.
        ValueError if *batch_size* is not a multiple of *process_count*.
        """
        if self.process_count != 1:
            raise ValueError(f"this is already the loader of process {self.process_index} of {self.process_count}")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index}, but with {process_count} processes it is from 0 to one less")
        if self.batch_size % process_count:
            raise ValueError(f"batch_size {self.batch_size} does not divide evenly among {process_count} processes")
        part = copy.copy(self)
        part.process_index, part.process_count = index(process_index), index(process_count)
        return part

    def _batch_range(self, step: SupportsIndex) -> tuple[int, int, int, int]:
        """Start, stop, first, last: a batch is positions ``start:stop`` of the stream, this host has its rows ``first:last``."""
        step = index(step)
        if step < 0 or (self._step_count is not None and step >= self._step_count):
            there_are = "they count from 0" if self._step_count is None else f"there are {self._step_count}"
            if step >= 0 and self._total is not None:
                there_are += ", more with more epochs, and with epochs=None no end"
            raise IndexError(f"there is no step {step}; {there_are}")
        start = self.start + step * self.batch_size
        stop = start + self.batch_size if self._total is None else min(start + self.batch_size, self._total)
        rows = stop - start
        return start, stop, rows * self.process_index // self.process_count, rows * (self.process_index + 1) // self.process_count

    def _tokens_of_a_row(self) -> int:
        if self._row_tokens is None:
            raise TypeError("positions in tokens need a view whose rows have one `length`: count in samples here")
        return self._row_tokens


class Steps:
    """Batches of a loader in order. ``step`` is the number of the next one.

    With *prefetch*, *threads* background threads load up to that many batches ahead. They end with the iterator: at its
    last batch, with ``close()`` or a ``with`` block, or when it is garbage. An error is raised where its batch is due;
    asking again tries again.

    ``state_dict()`` returns the progress and ``load_state_dict()`` continues from it, as torchdata's StatefulDataLoader
    wants it. IndexError for steps that the loader does not have.
    """

    def __init__(self, loader: ByStep, start: int = 0, stop: int | None = None, prefetch: int = 0, threads: int = 1) -> None:
        self._loader, self._prefetch, self._threads = loader, at_least(0, "prefetch", prefetch), at_least(1, "threads", threads)
        there_are = loader._step_count
        self._stop = there_are if stop is None else index(stop)
        if there_are is not None and self._stop is not None and self._stop > there_are:
            raise IndexError(f"there are no steps up to {stop}; there are {there_are}")
        self._ahead: _Ahead | None = None
        self._closed = False
        self._changing = threading.Lock()  # one thread may close what another iterates over
        self._go_to(start)

    def _go_to(self, step: int) -> None:
        if self._stop is not None and step > self._stop:
            raise IndexError(f"there is no step {step} to begin at: these steps end at {self._stop}")
        self.close()
        self.step, self._closed = at_least(0, "start", step), False
        if self._prefetch:
            self._running()

    def _running(self) -> _Ahead:
        """The buffer of the threads, which are started if they do not run."""
        with self._changing:
            if self._closed:
                raise StopIteration
            if self._ahead is None:
                self._ahead = _Ahead(self._loader.__getitem__, self.step, self._stop, self._prefetch, self._threads)
                # The threads know the buffer, not this iterator: they do not keep it alive.
                self._stop_ahead = weakref.finalize(self, self._ahead.stop)
            return self._ahead

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._closed or self.step == self._stop:
            self.close()
            raise StopIteration
        if not self._prefetch:
            batch = self._loader[self.step]
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """The number of the next step, and its position in the stream."""
        return {"step": self.step, "position": self._loader.position(self.step)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state. ValueError if it is of a loader whose step is somewhere else in the stream."""
        step, position = state["step"], state["position"]
        if (here := self._loader.position(step)) != position:
            raise ValueError(
                f"the state is of step {step} at sample {position}, but in this loader that step is at sample {here}. "
                f"With another batch size or start, make the loader with start={position} and begin at step 0."
            )
        self._go_to(step)


class _Ahead:
    """Steps loaded by threads, in order, at most *depth* loading or waiting to be taken.

    Threads share nothing but simple queues, which a finalizer may fill whatever it interrupts.
    """

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
            raise RuntimeError("these batches are loaded by threads of the process that was forked: call steps() anew here")
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
