"""Writing spans of tokens ahead: while their shards come, instead of when the last one is there.

A build that has tokenized its last slice then has little left to write, and its workers tokenize meanwhile: a thread that writes
mostly waits for the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import SPLITS
from tasks.models import Split
from tasks.output.staging import Place
from tasks.shards.contents import Contents, open_contents
from tasks.shards.fresh import Fresh
from tasks.split.spans import CountedPlace, ShardPlace, ShardSpan, Span, SplitRule, span_length
from tasks.split.write import Written, check_length, put_tokens, tokens_from, write_span

BACKLOG = 2
"""Shards that wait for their split's thread where it begins one span more. A thread that falls further behind leaves spans to the
workers.
"""
SMALL_TOKENS = 1 << 16
"""A shard with fewer tokens takes longer to open than to copy, and there are many: a span that begins with one is left to the
workers, who have time for it at the end.
"""


Shard = tuple[ShardPlace, Contents | None]
"""A shard with its place in a split, and its documents where they are in memory."""


class _Coming(NamedTuple):
    """A span that is being written: its shards as they come, then "end", and what is written of it, with its length."""

    shards: SimpleQueue[Shard | Literal["end", "give up"]]
    written: Future[tuple[Written, int]]


class _Hand:
    """One thread, which writes spans of one split's tokens, one after the other."""

    def __init__(self, split: Split, rule: SplitRule, layout: LayoutName, place: Place, version: str) -> None:
        self._split, self._rule, self._layout, self._place, self._version = split, rule, layout, place, version
        self._length, self._end = span_length(LAYOUTS[layout], of_tokens=True), 0
        self._thread = ThreadPoolExecutor(1, f"{split} ahead")
        self._begun: dict[int, _Coming] = {}

    def add(self, shard: ShardPlace, token_count: int, contents: Contents | None) -> None:
        """The next shard with tokens of the split, and its documents where they are in memory."""
        begin, self._end = self._end, self._end + token_count
        here = shard.model_copy(update={"first_token": begin, "token_count": token_count})
        for start in range(begin // self._length * self._length, self._end, self._length):
            may_wait = token_count >= SMALL_TOKENS and self._backlog() <= BACKLOG
            if begin <= start and (contents is not None or may_wait):
                shards: SimpleQueue[Any] = SimpleQueue()
                self._begun[start] = _Coming(shards, self._thread.submit(self._write, start, shards))
            if (coming := self._begun.get(start)) is not None:
                coming.shards.put((here, contents))
                if self._end >= start + self._length:
                    coming.shards.put("end")

    def _backlog(self) -> int:
        return sum(coming.shards.qsize() for coming in list(self._begun.values()))

    def end(self) -> None:
        """No more shards come."""
        for coming in list(self._begun.values()):
            coming.shards.put("end")

    def take(self, span: Span) -> Written | None:
        """The objects of a span whose shards have all come. None where it was not begun, or failed."""
        coming = self._begun.pop(span.start, None)
        if coming is None:
            return None
        try:
            written, length = coming.written.result()
        except OSError:
            return None  # the span is written again, by a task that says what is wrong
        check_length(span, length)
        return written

    def close(self) -> None:
        """Give up what has not been taken."""
        for coming in list(self._begun.values()):
            coming.shards.put("give up")
        self._thread.shutdown()

    def _write(self, start: int, shards: SimpleQueue[Any]) -> tuple[Written, int]:
        span = ShardSpan(split=self._split, of_tokens=True, start=start, stop=start + self._length, places=())
        tokens = (
            some
            for at, contents in _as_they_come(shards)
            for some in tokens_from(
                contents or open_contents(self._place.root, at.shard, "encoded_tokens"),
                span,
                at,
                self._rule,
                self._place,
                self._version,
            )
        )
        return put_tokens(span, tokens, self._layout, self._place, self._version)


def _as_they_come(shards: SimpleQueue[Any]) -> Iterator[Shard]:
    while (shard := shards.get()) != "end":
        if shard == "give up":
            raise CancelledError
        yield shard


class Ahead:
    """Writes spans of tokens of both splits ahead, within a block that ends when the build needs them no more. *fresh*: where
    shards are that are still in memory.
    """

    def __init__(self, rule: SplitRule, layout: LayoutName, place: Place, version: str, fresh: Fresh) -> None:
        self._fresh = fresh
        self._shared = rule, layout, place, version
        self._hands: dict[str, _Hand] = {split: _Hand(split, *self._shared) for split in SPLITS}

    def follow(self, counted: Iterable[CountedPlace]) -> Iterator[CountedPlace]:
        """The same places, each noted before it is yielded."""
        for at, counts in counted:
            contents = self._fresh.take(at.shard)
            for hand, token_count in zip(self._hands.values(), (counts.train_tokens, counts.validation_tokens), strict=True):
                if token_count:
                    hand.add(at, token_count, contents)
            yield at, counts
        for hand in self._hands.values():
            hand.end()

    def write(self, span: ShardSpan) -> Written:
        """``write_span`` for a span whose shards have all come: it may have been written by now."""
        written = self._hands[span.split].take(span) if span.of_tokens else None
        return written or write_span(span, *self._shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hand in self._hands.values():
            hand.close()
