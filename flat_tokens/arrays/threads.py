"""Caches that threads share, and work that is shared out among them."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ITEMS_A_THREAD = 8
"""Less work is done where it is asked for."""


class Recent(collections.OrderedDict[Any, Any]):
    """A cache of the *limit* values that were used last. Threads may share it; it is pickled and copied empty."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self._lock = limit, threading.Lock()
        _caches.add(self)

    def __hash__(self) -> int:  # type: ignore[override] # not by its items: a set of all caches holds it
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self.limit,)

    def find(self, key: Any) -> Any:
        with self._lock:
            if (value := self.get(key)) is not None:
                self.move_to_end(key)
            return value

    def keep(self, key: Any, value: Any) -> Any:
        with self._lock:
            self[key] = value
            while len(self) > self.limit:
                self.popitem(last=False)
        return value

    def unlock(self) -> None:
        """Replace the lock: in a forked child, the thread that may hold it is not there."""
        self._lock = threading.Lock()


_caches: weakref.WeakSet[Recent] = weakref.WeakSet()
_decoders: list[ThreadPoolExecutor] = []


def _begin_anew_after_fork() -> None:
    _decoders.clear()
    for cache in list(_caches):
        cache.unlock()


os.register_at_fork(after_in_child=_begin_anew_after_fork)


def share(work: Callable[[range], None], count: int) -> None:
    """Do *work* on parts of ``range(count)``, on all processors where it is worth while."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = min(count // ITEMS_A_THREAD, processors)
    if parts < 2:
        work(range(count))
        return
    if not _decoders:
        _decoders.append(ThreadPoolExecutor(processors, "flat-tokens-decode"))
    bounds = [count * k // parts for k in range(parts + 1)]
    others = [_decoders[0].submit(work, range(*pair)) for pair in itertools.pairwise(bounds[1:])]
    work(range(bounds[1]))
    for other in others:
        other.result()
