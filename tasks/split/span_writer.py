"""Spans of one split's tokens, written one after the other while their tokens come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from tasks.models import Split
from tasks.output.paths import unfinished_key
from tasks.output.staging import Place
from tasks.shards.contents import Contents, open_contents
from tasks.shards.streamed import BrokenStreamError
from tasks.split.spans import ShardPlace, ShardSpan, Span, SplitRule, span_length
from tasks.split.write import Bounded, Written, check_length, put_tokens, tokens_from

BACKLOG = 2
"""Shards that wait for their split's thread where it begins one span more. A thread that falls further behind leaves spans to the
workers.
"""
SMALL_TOKENS = 1 << 16
"""A shard with fewer tokens takes longer to open than to copy, and there are many: a span that begins with one is left to the
workers, who have time for it at the end.
"""
RUNS_WAITING = 8
"""Parts of streamed tokens that wait for their split's thread; who brings more waits, too."""
END: Any = "end"
GIVE_UP: Any = "give up"


class Coming(NamedTuple):
    """A span that is being written. ``items``: its shards and streamed tokens as they come, futures that are set when all before
    them is safe, then END; ``written``: what is written of it, with its length.
    """

    items: SimpleQueue[Any]
    written: Future[tuple[Written, int]]


class SpanWriter:
    """One thread, which writes spans of one split's tokens, one after the other."""

    def __init__(self, split: Split, rule: SplitRule, layout: LayoutName, place: Place, version: str, streams: bool) -> None:
        self.split = split
        self._rule, self._layout, self._place, self._version, self._streams = rule, layout, place, version, streams
        self._length, self.end_of_tokens = span_length(LAYOUTS[layout], of_tokens=True), 0
        self._thread = ThreadPoolExecutor(1, f"{split} ahead")
        self._begun: dict[int, Coming] = {}
        self._room = threading.Semaphore(RUNS_WAITING)
        self._is_broken = False

    def add(self, shard: ShardPlace, token_count: int, contents: Contents | None) -> None:
        """The next shard with tokens of the split, and its documents where they are in memory."""
        begin, end = self.end_of_tokens, self.end_of_tokens + token_count
        self.end_of_tokens = end
        here = shard.model_copy(update={"first_token": begin, "token_count": token_count})
        for start in range(begin // self._length * self._length, end, self._length):
            may_wait = token_count >= SMALL_TOKENS and self._backlog() <= BACKLOG
            if begin <= start and (contents is not None or may_wait):
                self._begin(start)
            if (coming := self._begun.get(start)) is not None:
                coming.items.put((here, contents))
                if end >= start + self._length:
                    coming.items.put(END)

    @property
    def may_stream(self) -> bool:
        """Whether the next tokens may come run by run: their span has not begun, or is being written."""
        start = self.end_of_tokens // self._length * self._length
        coming = self._begun.get(start)
        return not self._is_broken and (start == self.end_of_tokens if coming is None else not coming.written.done())

    def stream(self, tokens: npt.NDArray[np.uint32], highest: int) -> Iterator[Coming]:
        """Take the next tokens, none above *highest*. Yield the spans that they go to. The array is not to be changed.
        BrokenStreamError where the spans have been given up.
        """
        while len(tokens):
            if self._is_broken:
                raise BrokenStreamError
            start = self.end_of_tokens // self._length * self._length
            coming = self._begun.get(start) or self._begin(start)
            part = tokens[: start + self._length - self.end_of_tokens]
            while not self._room.acquire(timeout=1.0):
                if coming.written.done():
                    break  # it has failed: whoever waits for the span is told why
            coming.items.put(Bounded(part, highest))
            self.end_of_tokens += len(part)
            if self.end_of_tokens == start + self._length:
                coming.items.put(END)
            tokens = tokens[len(part) :]
            yield coming

    def _begin(self, start: int) -> Coming:
        items = SimpleQueue[Any]()
        coming = self._begun[start] = Coming(items, self._thread.submit(self._write, start, items))
        if self._is_broken:
            items.put(GIVE_UP)
        return coming

    def _backlog(self) -> int:
        return sum(coming.items.qsize() for coming in list(self._begun.values()))

    def end(self) -> None:
        """No more tokens come."""
        for coming in list(self._begun.values()):
            coming.items.put(END)

    def take(self, span: Span) -> Written | None:
        """The objects of a span whose tokens have all come. None where it was not begun, or failed."""
        coming = self._begun.pop(span.start, None)
        if coming is None:
            return None
        try:
            written, length = coming.written.result()
        except (OSError, CancelledError):
            return None  # the span is written again, by a task that says what is wrong
        check_length(span, length)
        return written

    def break_off(self) -> None:
        """Give up the spans that are not whole, and write no more of them."""
        self._is_broken = True
        for coming in list(self._begun.values()):
            coming.items.put(GIVE_UP)

    def close(self) -> None:
        """Give up what has not been taken."""
        self.break_off()
        self._thread.shutdown()

    def _write(self, start: int, items: SimpleQueue[Any]) -> tuple[Written, int]:
        span = ShardSpan(split=self.split, of_tokens=True, start=start, stop=start + self._length, places=())
        where = self._unfinished if self._streams else lambda _: None
        return put_tokens(span, self._tokens(span, items), self._layout, self._place, self._version, where)

    def _unfinished(self, number: int) -> Path:
        return Path(self._place.root.path(unfinished_key(self._place.attempt, self.split, number)))

    def _tokens(self, span: ShardSpan, items: SimpleQueue[Any]) -> Iterator[npt.NDArray[np.uint32] | Bounded | Future[None]]:
        while (item := items.get()) is not END:
            if item is GIVE_UP:
                raise CancelledError
            if isinstance(item, Future):
                yield item
            elif isinstance(item, Bounded):
                yield item
                self._room.release()
            else:
                at, contents = item
                contents = contents or open_contents(self._place.root, at.shard, "encoded_tokens")
                yield from tokens_from(contents, span, at, self._rule, self._place, self._version)
