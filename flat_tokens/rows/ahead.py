"""Reading ahead by the known order: what the next steps read is fetched before they are due.

A thread goes through the steps in order and has fetched what is not here, many units at once, up to a budget of bytes that no
step has read yet. Only datasets in a store with a cache are read ahead: what is on a local disk is here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeAlias

from flat_tokens.array_types import Int64s
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


def budget_of(views: Iterable[Any]) -> int:
    """Bytes that are read ahead of views; 0 where none of them is in a store with a cache."""
    return min((units.read_ahead for view in views if (store := _store_of(view)) and (units := store.units)), default=0)


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
