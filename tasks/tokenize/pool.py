"""The tokenize pool: threads of this process that take batches of documents through an engine, those of earlier slices first.

A slice that is tokenized has all of them. So slices end in the order in which they began, little of a later slice waits in
memory, and the last slice, or a single one, keeps all cores busy.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

AHEAD_BYTES = 8 << 20
"""Text for each thread that is under way, or done and not taken yet: of the first slice, and of all others together. A batch more
may begin as long as there is less.
"""

T = TypeVar("T")
R = TypeVar("R")


class _SliceBatches:
    """The batches of a slice, and what becomes of each, in their order, with the bytes of its text."""

    def __init__(
        self, batches: Iterator[Any], work: Callable[[Any], Any], size: Callable[[Any], int], lock: threading.Lock
    ) -> None:
        self.batches, self.work, self.size = batches, work, size
        self.change = threading.Condition(lock)
        self.results = deque[tuple[Future[Any], int]]()
        self.bytes = 0  # of the text of results
        self.is_read = False  # by a thread, at this moment
        self.has_ended = False


class TokenizePool:
    """So many threads, until the block ends."""

    def __init__(self, threads: int) -> None:
        self._slices: list[_SliceBatches] = []
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Notified where there is a batch more to read: one thread is enough, as it notifies the next."""
        self._is_over = False
        self._most = AHEAD_BYTES * threads
        self._threads = [threading.Thread(target=self._serve, name=f"pool_{n}", daemon=True) for n in range(threads)]

    @contextlib.contextmanager
    def results(self, batches: Iterator[T], work: Callable[[T], R], size: Callable[[T], int]) -> Iterator[Iterator[R]]:
        """A block in which the pool works on *batches*: their results, in order. One thread at a time reads the next batch. An
        error of either is raised in the place of the result. *size*: bytes of a batch's text.
        """
        one = _SliceBatches(batches, work, size, self._lock)
        with self._lock:
            self._slices.append(one)
            self._tell()
        try:
            yield self._taken(one)
        finally:
            with self._lock:
                one.has_ended = True
                self._slices.remove(one)
                self._tell()  # another one is the first now
                one.change.wait_for(lambda: not one.is_read)
            for left, _ in one.results:
                left.exception()  # it is waited for, not wanted

    def _taken(self, one: _SliceBatches) -> Iterator[Any]:
        """The results of a slice's batches, in order, as they are finished."""
        while True:
            with self._lock:
                one.change.wait_for(lambda: one.results or one.has_ended)
                if not one.results:
                    return
                first, size = one.results[0]
            result = first.result()
            with self._lock:
                one.results.popleft()
                one.bytes -= size
                self._tell()
            del first
            yield result
            del result  # or it stays while the next one is waited for

    def _tell(self) -> None:
        """Wake a thread if there is a batch for it. Of small slices most changes bring none. The caller holds the lock."""
        if next(self._with_work(), None) is not None:
            self._work.notify()

    def _serve(self) -> None:
        while (one := self._next()) is not None:
            self._serve_one(one)

    def _next(self) -> _SliceBatches | None:
        """The slice to read a batch of, once there is one; None at the end."""
        with self._lock:
            while not self._is_over:
                some = list(self._with_work())
                if some:
                    some[0].is_read = True
                    if some[1:]:
                        self._work.notify()
                    return some[0]
                self._work.wait()
            return None

    def _with_work(self) -> Iterator[_SliceBatches]:
        """The slices of which a batch more may be read."""
        behind = sum(one.bytes for one in self._slices[1:])
        for n, one in enumerate(self._slices):
            has_room = (behind if n else one.bytes) < self._most
            has_room = has_room or not one.results  # whoever waits for the next one gets it
            if has_room and not one.has_ended and not one.is_read:
                yield one

    def _serve_one(self, one: _SliceBatches) -> None:
        """Read the next batch of a slice, and do the work for it."""
        future, failed, batch, size = Future[Any](), False, _END, 0
        try:
            batch = next(one.batches, _END)
            size = 0 if batch is _END else one.size(batch)
        except BaseException as error:  # noqa: BLE001  it is raised where the result is taken
            future.set_exception(error)
            failed = True
        with self._lock:
            one.is_read = False
            one.has_ended = one.has_ended or failed or batch is _END
            if failed or batch is not _END:
                one.results.append((future, size))
                one.bytes += size
            one.change.notify()
            self._tell()
        if failed or batch is _END:
            return
        try:
            future.set_result(one.work(batch))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    def __enter__(self) -> TokenizePool:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()


_END: Any = object()
_pools: list[TokenizePool] = []
"""Those of the blocks that this process is in; the last one works."""


def _forget_after_fork() -> None:
    """Drop the parent's threads, which a child does not have."""
    _pools.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@contextlib.contextmanager
def tokenize_pool(threads: int) -> Iterator[None]:
    """A block in which slices that this process tokenizes share a pool."""
    with TokenizePool(threads) as pool:
        _pools.append(pool)
        try:
            yield
        finally:
            _pools.remove(pool)


@contextlib.contextmanager
def map_in_order(batches: Iterator[T], work: Callable[[T], R], size: Callable[[T], int]) -> Iterator[Iterator[R]]:
    """A block in which *work* is done for *batches*: the results, in order. Without a pool, this thread does it. *size*: bytes of
    a batch's text.
    """
    if not _pools:
        yield map(work, batches)
        return
    with _pools[-1].results(batches, work, size) as results:
        yield results
