"""Writing spans of tokens ahead: while their shards come, instead of when the last one is there.

A build that has tokenized its last slice then has little left to write, and its workers tokenize meanwhile: a thread that writes
mostly waits for the disk. Tokens of a large slice come while it is tokenized, one slice behind the other, and are stored nowhere
else: they stand in their object, which is not whole yet, as ``tasks.shards.streamed`` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.batch import TokenBatch
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.local import remove_empty
from flat_tokens.stores.store import BLAKE3
from tasks.models import Split, TokenRange, Within
from tasks.output.paths import UNFINISHED, unfinished_key
from tasks.output.staging import Place
from tasks.shards.contents import Contents, open_contents
from tasks.shards.fresh import Fresh
from tasks.shards.runs import runs_in_memory
from tasks.shards.streamed import STREAMED, BrokenStreamError, Stream
from tasks.split.spans import CountedPlace, ShardPlace, ShardSpan, Span, SplitRule, chosen, span_length
from tasks.split.write import Bounded, Written, check_length, put_tokens, tokens_from, write_span

BACKLOG = 2
"""Shards that wait for their split's thread where it begins one span more. A thread that falls further behind leaves spans to the
workers.
"""
SMALL_TOKENS = 1 << 16
"""A shard with fewer tokens takes longer to open than to copy, and there are many: a span that begins with one is left to the
workers, who have time for it at the end.
"""
TURN_SECONDS = 30.0
"""A large slice whose turn does not come for so long is stored apart: whatever it holds, nobody waits for it for ever."""
RUNS_WAITING = 8
"""Parts of streamed tokens that wait for their split's thread; who brings more waits, too."""
END: Any = "end"
GIVE_UP: Any = "give up"

Shard = tuple[ShardPlace, Contents | None]
"""A shard with its place in a split, and its documents where they are in memory."""


class _Coming(NamedTuple):
    """A span that is being written. ``items``: its shards and streamed tokens as they come, futures that are set when all before
    them is safe, then END; ``written``: what is written of it, with its length.
    """

    items: SimpleQueue[Any]
    written: Future[tuple[Written, int]]


class _Hand:
    """One thread, which writes spans of one split's tokens, one after the other."""

    def __init__(self, split: Split, rule: SplitRule, layout: LayoutName, place: Place, version: str, streams: bool) -> None:
        self.split = split
        self._rule, self._layout, self._place, self._version, self._streams = rule, layout, place, version, streams
        self._length, self.end_of_tokens = span_length(LAYOUTS[layout], of_tokens=True), 0
        self._thread = ThreadPoolExecutor(1, f"{split} ahead")
        self._begun: dict[int, _Coming] = {}
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

    def stream(self, tokens: npt.NDArray[np.uint32], highest: int) -> Iterator[_Coming]:
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

    def _begin(self, start: int) -> _Coming:
        items = SimpleQueue[Any]()
        coming = self._begun[start] = _Coming(items, self._thread.submit(self._write, start, items))
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
        return Path(self._place.root.path(unfinished_key(attempt_of(self._place), self.split, number)))

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


def attempt_of(place: Place) -> str:
    """The name of an attempt, which no other one has."""
    return Path(place.staging).name


class _Side:
    """The tokens of a slice that go to one split, while they come."""

    def __init__(self, hand: _Hand) -> None:
        self._hand, self._first, self._count = hand, hand.end_of_tokens, 0
        self._digest = blake3()
        self._spans: dict[int, _Coming] = {}

    def append(self, tokens: npt.NDArray[np.uint32], highest: int) -> None:
        self._digest.update(tokens.view(np.uint8).data)
        self._count += len(tokens)
        for coming in self._hand.stream(tokens, highest):
            self._spans[id(coming)] = coming

    def begin_to_settle(self) -> list[tuple[Future[None], _Coming]]:
        marks = [(Future[None](), coming) for coming in self._spans.values()]
        for mark, coming in marks:
            coming.items.put(mark)  # behind the END of a span that is whole, it is never reached
        return marks

    @property
    def told(self) -> TokenRange:
        return TokenRange(first=self._first, count=self._count, digest=f"{BLAKE3}{self._digest.hexdigest()}")


class _Stream:
    """The tokens of a slice on their way into both splits. *pass_on* is called when all have come."""

    def __init__(
        self,
        hands: dict[Split, _Hand],
        rule: SplitRule,
        all_in: Split | None,
        place: Place,
        version: str,
        pass_on: Callable[[], object],
    ) -> None:
        self._rule, self._all_in, self._place, self._version, self._pass_on = rule, all_in, place, version, pass_on
        self._train, self._validation = _Side(hands["train"]), _Side(hands["validation"])
        self.within: Within | None = None

    def append(self, batch: TokenBatch, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Take the next documents, with their keys, uint64[n]. Return which of them go to validation: bool[n]."""
        in_validation = chosen("validation", self._all_in, self._rule, keys)
        # Documents side by side that go to one split are one run of tokens.
        borders = np.flatnonzero(in_validation[1:] != in_validation[:-1]) + 1
        starts = np.concatenate([[0], borders, [len(keys)]])
        begins, ends = (batch.seq_starts[at].astype(np.int64) for at in (starts[:-1], starts[1:]))
        for side, first in ((self._train, 0), (self._validation, 1)):
            mine = slice(first ^ int(len(keys) > 0 and in_validation[0]), None, 2)
            some = begins[mine] < ends[mine]
            for part in runs_in_memory([batch.encoded_tokens], begins[mine][some], ends[mine][some]):
                side.append(part, 2 * batch.max_token_id + 1)
        return in_validation

    def end(self) -> Within:
        """Wait until all tokens would survive the end of this process. Return where they are."""
        marks = [*self._train.begin_to_settle(), *self._validation.begin_to_settle()]
        self._pass_on()
        for mark, coming in marks:
            either: list[Future[Any]] = [mark, coming.written]
            wait(either, return_when=FIRST_COMPLETED)
            if coming.written.done():
                with contextlib.suppress(CancelledError):
                    coming.written.result()
                    continue
                raise BrokenStreamError
        attempt = attempt_of(self._place)
        within = Within(version=self._version, attempt=attempt, train=self._train.told, validation=self._validation.told)
        self.within = within
        return within


class Ahead:
    """Writes spans of tokens of both splits ahead, within a block that ends when the build needs them no more. *fresh*: where
    shards are that are still in memory. *streams*: tokens of large slices may come while these are tokenized.
    """

    def __init__(
        self, rule: SplitRule, layout: LayoutName, place: Place, version: str, fresh: Fresh, streams: bool = True
    ) -> None:
        self._fresh = fresh
        self._streams = streams and place.root.is_local and layout == STREAMED
        self._shared = rule, layout, place, version
        self._hands: dict[Split, _Hand] = {split: _Hand(split, *self._shared, self._streams) for split in SPLITS}
        self._turn = threading.Condition()
        self._placed = self._next = 0
        self._streamed: dict[int, Within] = {}

    @contextlib.contextmanager
    def stream(self, number: int, all_in: Split | None) -> Iterator[Stream | None]:
        """A block in which the slice of place *number* gives its tokens, once those of all places before it have come. None where
        it has to be stored apart.
        """
        with self._turn:
            comes = self._turn.wait_for(lambda: not self._streams or number in (self._placed, self._next), TURN_SECONDS)
            may_stream = comes and self._streams and all(hand.may_stream for hand in self._hands.values())
        if not may_stream:
            yield None
            return
        rule, _, place, version = self._shared
        stream = _Stream(self._hands, rule, all_in, place, version, functools.partial(self._pass_on, number + 1))
        try:
            yield stream
        except BaseException:
            # Tokens of half a slice stand in spans that other slices share.
            self.stop_streams()
            for hand in self._hands.values():
                hand.break_off()
            raise
        if stream.within is not None:
            self._streamed[number] = stream.within

    def _pass_on(self, number: int) -> None:
        """All tokens before those of place *number* have come. Whether they are safe, the slice before it waits to see."""
        with self._turn:
            self._next = number
            self._turn.notify_all()

    def stop_streams(self) -> None:
        """From now on every slice is stored apart: none waits for those before it, which may not come."""
        with self._turn:
            self._streams = False
            self._turn.notify_all()

    def follow(self, counted: Iterable[CountedPlace]) -> Iterator[CountedPlace]:
        """The same places, each noted before it is yielded."""
        for number, (at, counts) in enumerate(counted):
            contents = self._fresh.take(at.shard)
            within = self._streamed.pop(number, None)
            for hand, token_count in zip(self._hands.values(), (counts.train_tokens, counts.validation_tokens), strict=True):
                if within is not None:
                    if within.of(hand.split).count != token_count:
                        raise AssertionError(f"{hand.split}: {within} came, {token_count} tokens were counted")
                elif token_count:
                    hand.add(at, token_count, contents)
            with self._turn:
                self._placed += 1
                self._turn.notify_all()
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
        _, _, place, _ = self._shared
        if place.root.is_local:
            remove_empty(place.root.root, f"{UNFINISHED}/{attempt_of(place)}", UNFINISHED)
