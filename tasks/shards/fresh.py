"""Shards that this process has just made, while their tokens are in memory: these need not be read back and checked."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import TokenBatch
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.shards.contents import Contents, InMemory, columns_of_shard, open_contents

FRESH_BYTES = 64 << 20
SHARDS_AT_A_TIME = 4
NONE = np.empty(0, np.uint64)


class Fresh:
    """The documents of new shards, whose tokens take *limit* bytes at most. A shard for which there is no room is not kept."""

    def __init__(self, limit: int = FRESH_BYTES) -> None:
        self._limit, self._left, self._lock = limit, limit, threading.Lock()
        self._gone = deque[int]()
        self._contents: dict[str, Contents] = {}

    def open(self, root: Store, shard: TokenShard) -> Contents:
        """The documents of a shard: from memory, else from where it is stored."""
        return self._contents.get(shard.key) or open_contents(root, shard)

    def take(self, shard: TokenShard) -> Contents | None:
        """The documents of a shard from memory, where they are kept no longer. None where they are not in memory."""
        return self._contents.pop(shard.key, None)

    def put(self, shard: TokenShard, contents: Contents) -> None:
        """Keep the documents of a shard."""
        self._contents[shard.key] = contents

    def takes(self, text_bytes: int) -> bool:
        """Whether shards of slices with so much text are kept: some of them must fit at a time. A byte of text makes about a byte
        of tokens.
        """
        return SHARDS_AT_A_TIME * text_bytes <= self._limit

    def has_room(self, tokens: npt.NDArray[np.uint32]) -> bool:
        """Count the bytes of an array for as long as it is in memory, if there is room for them."""
        with self._lock:
            while self._gone:
                self._left += self._gone.popleft()
            if tokens.nbytes > self._left:
                return False
            self._left -= tokens.nbytes
        # An array may go at any moment, even within the lock's block: its end takes no lock.
        weakref.finalize(tokens, self._gone.append, tokens.nbytes).atexit = False
        return True


class Making:
    """The documents of a shard while it is made: all of them, or none where there was no room for some."""

    def __init__(self, fresh: Fresh) -> None:
        self._fresh, self._fits = fresh, True
        self._batches = list[TokenBatch]()
        self._keys, self._rows = [NONE], [NONE]

    def append(self, batch: TokenBatch, keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint64]) -> None:
        """The next documents, with their keys and rows: uint64[n], uint64[n]."""
        self._fits = self._fits and self._fresh.has_room(batch.encoded_tokens)
        if self._fits:
            self._batches.append(batch)
            self._keys.append(keys)
            self._rows.append(rows)
        else:
            self._batches.clear()

    def end(self, root: Store, shard: TokenShard) -> None:
        """The shard is whole."""
        if not self._fits:
            return
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        lengths = np.concatenate([NONE, *(np.diff(batch.seq_starts) for batch in self._batches)]).astype(np.int64)
        tokens = InMemory([batch.encoded_tokens for batch in self._batches])
        columns = functools.partial(columns_of_shard, root, shard)
        one_array, begins = np.zeros(len(keys), np.int8), np.cumsum(lengths) - lengths
        self._fresh.put(shard, Contents(keys, one_array, begins, lengths, (tokens,), lambda: rows, columns))
