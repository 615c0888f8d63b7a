"""Writing spans of tokens ahead: while their shards come, instead of when the last one is there.

A build that has tokenized its last slice then has little left to write, and its workers tokenize meanwhile: a thread that writes
mostly waits for the disk. Tokens of a large slice come while it is tokenized, one slice behind the other, and are stored nowhere
else: they stand in their object, which is not whole yet, as ``tasks.shards.streamed`` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.local import remove_empty
from tasks.models import Split, Within
from tasks.output.paths import UNFINISHED
from tasks.output.staging import Place
from tasks.shards.fresh import Fresh
from tasks.shards.streamed import STREAMED, Stream
from tasks.split.span_writer import SpanWriter
from tasks.split.spans import CountedPlace, ShardSpan, SplitRule
from tasks.split.stream import SplitStream
from tasks.split.write import Written, write_span

TURN_SECONDS = 30.0
"""A large slice whose turn does not come for so long is stored apart: whatever it holds, nobody waits for it for ever."""


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
        self._writers: dict[Split, SpanWriter] = {split: SpanWriter(split, *self._shared, self._streams) for split in SPLITS}
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
            may_stream = comes and self._streams and all(writer.may_stream for writer in self._writers.values())
        if not may_stream:
            yield None
            return
        rule, _, place, version = self._shared
        stream = SplitStream(self._writers, rule, all_in, place, version, functools.partial(self._pass_on, number + 1))
        try:
            yield stream
        except BaseException:
            # Tokens of half a slice stand in spans that other slices share.
            self.stop_streams()
            for writer in self._writers.values():
                writer.break_off()
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
            for writer, token_count in zip(self._writers.values(), (counts.train_tokens, counts.validation_tokens), strict=True):
                if within is not None:
                    if within.of(writer.split).count != token_count:
                        raise AssertionError(f"{writer.split}: {within} came, {token_count} tokens were counted")
                elif token_count:
                    writer.add(at, token_count, contents)
            with self._turn:
                self._placed += 1
                self._turn.notify_all()
            yield at, counts
        for writer in self._writers.values():
            writer.end()

    def write(self, span: ShardSpan) -> Written:
        """``write_span`` for a span whose shards have all come: it may have been written by now."""
        written = self._writers[span.split].take(span) if span.of_tokens else None
        return written or write_span(span, *self._shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for writer in self._writers.values():
            writer.close()
        _, _, place, _ = self._shared
        if place.root.is_local:
            remove_empty(place.root.root, f"{UNFINISHED}/{place.attempt}", UNFINISHED)
