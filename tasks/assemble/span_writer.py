"""Spans of one split's tokens, written one after another while their tokens arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from flat_tokens.batch import TOKENS, TokenArrays
from tasks.assemble.spans import Span, span_length
from tasks.assemble.write import Marks, TokenItems, Written, check_length, tokens_of_part, write_tokens
from tasks.models import Split
from tasks.output.paths import unfinished_key
from tasks.output.target import Target
from tasks.parts.part import ShardPart
from tasks.shards.stream import BrokenStreamError

BACKLOG = 2
"""Parts that wait for their split's thread when it begins one span more. A thread that is late leaves spans to the
workers.
"""
SMALL_TOKENS = 1 << 16
"""A stored part with fewer tokens takes longer to open than to copy, and there are many: a span that begins with one is left to
the workers, who have time for it at the end.
"""
ARRAYS_WAITING = 8
"""Arrays of streamed tokens that wait for their split's thread; a slice that brings more waits, too."""
MARKS_TOGETHER = 64
"""Marks that one sync settles, at most."""
END: Any = "end"
GIVE_UP: Any = "give up"


class SpanInProgress(NamedTuple):
    """A span in progress. ``items``: a queue of parts, streamed tokens, marks (futures), then END. ``written``: what was written
    of it, with its length.
    """

    items: SimpleQueue[Any]
    written: Future[tuple[Written, int]]


class SpanWriter:
    """One thread, which writes spans of one split's tokens, one after another.

    Whoever waits for it waits on something that its failure ends, too: it marks the writer as broken, which wakes those that wait
    for room, and gives up the spans after the failed one, which ends the wait for their marks.
    """

    def __init__(self, split: Split, target: Target, streams: bool) -> None:
        self.split: Split = split
        self._target, self._streams = target, streams
        self._length, self.end_of_tokens = span_length(target.layout_of(split), of_tokens=True), 0
        self._thread = ThreadPoolExecutor(1, f"{split} spans")
        self._begun: dict[int, SpanInProgress] = {}
        self._change = threading.Condition()
        self._waiting = 0  # arrays of tokens in the queues
        self._is_broken = False

    def add(self, part: ShardPart, token_count: int) -> None:
        """The next part, with the count of its tokens in the split."""
        begin, end = self.end_of_tokens, self.end_of_tokens + token_count
        self.end_of_tokens = end
        here = part.model_copy(update={"first_token": begin, "token_count": token_count})
        for start in range(begin // self._length * self._length, end, self._length):
            if begin <= start and token_count >= SMALL_TOKENS and self._backlog() <= BACKLOG:
                self._begin(start)
            if (span := self._begun.get(start)) is not None:
                span.items.put(here)
                if end >= start + self._length:
                    span.items.put(END)

    @property
    def may_stream(self) -> bool:
        """Whether the next tokens may be streamed: their span has not begun, or is in progress."""
        start = self.end_of_tokens // self._length * self._length
        span = self._begun.get(start)
        return not self._is_broken and (start == self.end_of_tokens if span is None else not span.written.done())

    def stream(self, arrays: TokenArrays, highest: int) -> Iterator[SpanInProgress]:
        """Take the next items of all token arrays, no token above *highest*. Yield the spans that they go to. The arrays must not
        change. BrokenStreamError where the spans have been given up.
        """
        first, stop = 0, len(arrays[TOKENS])
        while first < stop:
            start = self.end_of_tokens // self._length * self._length
            count = min(start + self._length - self.end_of_tokens, stop - first)
            with self._change:
                self._change.wait_for(lambda: self._is_broken or self._waiting < ARRAYS_WAITING)
                if self._is_broken:
                    raise BrokenStreamError
                self._waiting += 1
            span = self._begun.get(start) or self._begin(start)
            span.items.put(TokenItems({name: items[first : first + count] for name, items in arrays.items()}, highest))
            self.end_of_tokens += count
            if self.end_of_tokens == start + self._length:
                span.items.put(END)
            first += count
            yield span

    def _begin(self, start: int) -> SpanInProgress:
        items = SimpleQueue[Any]()
        span = self._begun[start] = SpanInProgress(items, self._thread.submit(self._write, start, items))
        if self._is_broken:
            items.put(GIVE_UP)
        return span

    def _backlog(self) -> int:
        return sum(span.items.qsize() for span in list(self._begun.values()))

    def end(self) -> None:
        """There are no more tokens."""
        for span in list(self._begun.values()):
            span.items.put(END)

    def has_begun(self, span: Span) -> bool:
        """Whether a span is written here."""
        return span.start in self._begun

    def take(self, span: Span) -> Written | None:
        """The objects of a span whose tokens have all arrived. None where it was not begun, or failed."""
        begun = self._begun.pop(span.start, None)
        if begun is None:
            return None
        try:
            written, length = begun.written.result()
        except (OSError, CancelledError):
            return None  # the span is rewritten, by a task that says what is wrong
        check_length(span, length)
        return written

    def break_off(self) -> None:
        """Give up the spans that are not whole, and write no more of them."""
        with self._change:
            self._is_broken = True
            self._change.notify_all()
        for span in list(self._begun.values()):
            span.items.put(GIVE_UP)

    def close(self) -> None:
        """Give up what has not been taken."""
        self.break_off()
        self._thread.shutdown()

    def _write(self, start: int, items: SimpleQueue[Any]) -> tuple[Written, int]:
        span = Span(split=self.split, of_tokens=True, start=start, stop=start + self._length)
        try:
            return write_tokens(span, self._tokens(span, items), self._target, self._unfinished)
        except BaseException:
            self.break_off()
            raise

    def _unfinished(self, name: str, number: int) -> Path | None:
        if not self._streams:
            return None
        return Path(self._target.root.path(unfinished_key(self._target.workspace.attempt, self.split, name, number)))

    def _tokens(self, span: Span, items: SimpleQueue[Any]) -> Iterator[TokenItems | Marks]:
        marks: Marks = []
        while (item := items.get()) is not END:
            if item is GIVE_UP:
                raise CancelledError
            if isinstance(item, ShardPart):
                yield from tokens_of_part(span, item, self._target)
            elif isinstance(item, Future):
                marks.append(item)
            else:
                yield item
                with self._change:
                    self._waiting -= 1
                    self._change.notify_all()
            # Small slices follow each other closely: one sync settles the marks of several.
            if marks and (items.empty() or len(marks) == MARKS_TOGETHER):
                yield marks
                marks = []
