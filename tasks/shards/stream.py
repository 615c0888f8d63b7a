"""The sink of a version, as a slice sees it whose tokens are streamed into it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import pyarrow as pa

from flat_tokens.annotations import UInt64s
from flat_tokens.batch import TokenBatch
from tasks.models import UnfinishedLocation
from tasks.parts.stored import Tail

TASK: ContextVar[object] = ContextVar("task", default=None)
"""A runner's task of several slices, whose results are used when it has ended. None if each slice is a task of its own."""


class BrokenStreamError(Exception):
    """The objects that a slice is streamed into have been given up: it has to be stored as a shard."""


class StreamedTokens(NamedTuple):
    """Where the tokens of a slice are in a version, and the tail of its tokens in each split."""

    location: UnfinishedLocation
    tails: tuple[Tail, ...]


class SliceStream(Protocol):
    """Takes the tokens of a slice to their places in a version."""

    def append(self, batch: TokenBatch, rows: pa.RecordBatch) -> UInt64s:
        """Take the next documents, with their rows. Return the split of each, by its number in ALL_SPLITS: uint64[n].
        BrokenStreamError if the version's objects have been given up.
        """
        ...

    def end(self) -> StreamedTokens:
        """Wait until all tokens but the tails would survive the end of this process. Return where they are."""
        ...


class Sink(Protocol):
    """Takes the tokens of slices straight into a version, in the slices' order."""

    def stream(self, key: str) -> AbstractContextManager[SliceStream | None]:
        """A block in which the slice of that key streams its tokens, once all tokens before it have arrived. None if it has to
        be stored as a shard.
        """
        ...

    def skip(self, key: str) -> None:
        """The slice of that key has tokens already: they arrive when its part is added."""
        ...

    def stop(self) -> None:
        """From now on every slice is stored as a shard: none waits for those before it."""
        ...
