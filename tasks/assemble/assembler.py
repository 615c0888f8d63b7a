"""The assembler: takes the parts of a version in order, and has every span of its final arrays written as soon as it is complete.

A build that has tokenized its last slice then has little left to write, and its workers tokenize meanwhile: a thread that writes
mostly waits for the disk. Its sink takes the tokens of slices into the version while they are tokenized, in the slices' order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.annotations import UInt64s
from flat_tokens.arrays.layouts import ArraySpec
from flat_tokens.batch import TOKEN_ARRAYS, TOKENS, TokenArrays, TokenBatch
from flat_tokens.columns import in_manifest
from flat_tokens.stores.local import remove_empty
from flat_tokens.stores.store import BLAKE3
from tasks.assemble.duplicates import DuplicateFilter, SliceFilter
from tasks.assemble.write import Span, SpanInProgress, SpanLayout, SpanWriter, SplitCounts, WrittenSpan, count_part
from tasks.models import ALL_SPLITS, LEFT_OUT, Split, TokenRange, UnfinishedLocation
from tasks.output.paths import UNFINISHED
from tasks.output.target import Target
from tasks.parts.documents import runs_of_parts
from tasks.parts.part import Part, ShardPart
from tasks.parts.stored import Tail, last_of
from tasks.rows import REASON, JoinedKinds, drawn_by
from tasks.shards.stream import TASK, BrokenStreamError, StreamedTokens


class OpenSpan(Protocol):
    """A span in progress."""

    def result(self) -> WrittenSpan: ...

    def cancel(self) -> bool: ...


CountedPart = tuple[Part, SplitCounts]
T = TypeVar("T", bound=Part)


class AssembledArrays(NamedTuple):
    """The spans of a version's arrays, what was written of each, its parts with their counts, the kinds of its columns."""

    spans: list[Span]
    written: list[WrittenSpan]
    parts: list[CountedPart]
    columns: dict[str, str]


class Assembler:
    """Assembles a version from parts, within a block. *files*: names of the files of the sources, for errors."""

    def __init__(self, target: Target, files: Sequence[str] = ()) -> None:
        self._target = target
        self._write: Callable[[Span], OpenSpan] | None = None
        self._kinds, self._files = JoinedKinds(target.columns), files
        self._layout = SpanLayout(target)
        self._spans: list[Span] = []
        self._writing: list[OpenSpan] = []
        self._parts: list[CountedPart] = []
        self._counts: list[SplitCounts] = []  # of parts whose tokens have been taken
        self._writers: dict[Split, SpanWriter] = {}
        self._sink: VersionSink | None = None

    def write_with(self, write: Callable[[Span], OpenSpan]) -> None:
        """Have the spans written by *write*, which starts the writing of one on a worker."""
        self._write = write

    def open_sink(
        self,
        order: Mapping[str, tuple[int, Split | None]],
        *,
        streams: bool,
        copies: bool = True,
        duplicates: DuplicateFilter | None = None,
    ) -> VersionSink | None:
        """The sink of the slices that this machine tokenizes, in this *order*. From now on spans of tokens are written by
        threads of this process while parts arrive. *streams*: the slices need no shards of their own. *copies*: these threads
        copy the tokens of stored parts, too; if they do not, and nothing is streamed, there is no sink. *duplicates*: the
        filter that leaves documents out of the streams.
        """
        if not (streams or copies):
            return None
        self._writers = {split: SpanWriter(split, self._target, streams) for split in self._target.every_split}
        self._sink = VersionSink(self._writers, self._target, order, duplicates)
        if not streams:
            self._sink.stop()
        return self._sink

    def place(self, part: T) -> T:
        """Take the tokens of the next part. It is added later, when nothing of its tokens has changed. Return the part."""
        if isinstance(part, ShardPart) and part.shard.columns:
            self._kinds.add(part.shard.columns, self._files[part.file])
        counts = count_part(part, self._target)
        self._counts.append(counts)
        if self._sink is not None and isinstance(part, ShardPart):
            self._sink.add(part, {split: counts[split][1] for split in self._target.every_split})
        return part

    def add(self, part: Part) -> None:
        """The next part. Spans that end within it are handed out."""
        if len(self._counts) == len(self._parts):
            self.place(part)
        counts = self._counts[len(self._parts)]
        self._parts.append((part, counts))
        for span in self._layout.add(part, counts):
            self._hand_out(span)

    def end(self) -> list[CountedPart]:
        """There are no more parts: hand out the last spans. Return the parts with their counts."""
        for writer in self._writers.values():
            writer.end()
        for span in self._layout.rest(self.columns):
            self._hand_out(span)
        return self._parts

    def finish(self) -> AssembledArrays:
        """Wait until all spans are written."""
        return AssembledArrays(self._spans, [one.result() for one in self._writing], self._parts, self.columns)

    @property
    def columns(self) -> dict[str, str]:
        """The kind of each column, as the dataset has it."""
        return {name: in_manifest(kind) for name, kind in self._kinds.now.items()}

    def _hand_out(self, span: Span) -> None:
        self._spans.append(span)
        assert self._write is not None
        self._writing.append(self._write(span))

    def has_begun(self, span: Span) -> bool:
        """Whether a thread of this process writes the tokens of a span, or has written them."""
        writer = self._writers.get(span.split)
        return span.of_tokens and writer is not None and writer.has_begun(span)

    def take(self, span: Span) -> WrittenSpan | None:
        """The objects of a span of tokens that was written while its parts arrived. None if it has to be written."""
        writer = self._writers.get(span.split)
        return None if writer is None else writer.take(span)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In another process there is none: it writes the spans that it is given."""
        return type(None), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sink is not None:
            self._sink.stop()
        for writer in self._writers.values():
            writer.close()
        if kind is not None:
            # All are given up before any is waited for: a thread that ends one would begin the next meanwhile.
            for one in [one for one in self._writing if not one.cancel()]:
                with contextlib.suppress(Exception):  # the first error is the one that is raised
                    one.result()
        if self._writers and self._target.root.is_local:
            remove_empty(self._target.root.root, f"{UNFINISHED}/{self._target.workspace.attempt}", UNFINISHED)


class VersionSink:
    """Gives each slice its stream, once all tokens before it have arrived. *order*: the number of each slice, and the split of
    all its documents or None, by the slice's key. *duplicates*: what leaves documents out.

    A slice that waits for its turn waits for one that is being tokenized, or whose part is about to be added. If those are
    stopped, ``stop`` is called: then nothing is streamed any more, and every slice is stored as a shard. A part of a TASK is
    added when the task has ended: a slice of the same task does not wait for that.
    """

    def __init__(
        self,
        writers: Mapping[Split, SpanWriter],
        target: Target,
        order: Mapping[str, tuple[int, Split | None]],
        duplicates: DuplicateFilter | None = None,
    ) -> None:
        self._writers, self._target, self._order, self._duplicates = writers, target, order, duplicates
        self._change = threading.Condition()
        self._added = self._next = 0
        self._stopped = False
        self._streamed: dict[int, UnfinishedLocation] = {}
        self._firsts = {number for number, _ in order.values()}
        self._tasks: dict[int, object] = {}
        self._stored: set[int] = set()
        """Slices that are not streamed: like those that are equal to earlier ones, their tokens arrive when they are added."""

    @contextlib.contextmanager
    def stream(self, key: str) -> Iterator[VersionStream | None]:
        """A block in which a slice streams its tokens. None if it has to be stored as a shard."""
        number, all_in = self._order[key]
        if number in self._stored:
            yield None
            return
        with self._change:
            self._tasks[number] = TASK.get()
            self._change.wait_for(lambda: self._stopped or self._is_next(number) or self._waits_for_itself(number))
            streams = not self._stopped and self._is_next(number)
            if not (streams and all(writer.may_stream for writer in self._writers.values())):
                self._stored.add(number)
                self._change.notify_all()
        if number in self._stored:
            yield None
            return
        compared = None if self._duplicates is None else SliceFilter(self._duplicates, number)
        stream = VersionStream(self._writers, self._target, all_in, compared, lambda: self._pass_on(number + 1))
        try:
            yield stream
        except BaseException:
            # Tokens of half a slice are in spans that other slices share.
            self.stop()
            for writer in self._writers.values():
                writer.break_off()
            if compared is not None and not stream.is_passed_on:
                compared.take_back()
            raise
        if stream.location is not None:
            self._streamed[number] = stream.location

    def skip(self, key: str) -> None:
        """The slice of that key has tokens already: they arrive when its part is added."""
        with self._change:
            number, _ = self._order[key]
            self._tasks[number] = TASK.get()
            self._stored.add(number)
            self._change.notify_all()

    def _is_next(self, number: int) -> bool:
        return number in (self._added, self._next)

    def _waits_for_itself(self, number: int) -> bool:
        """Whether a part before slice *number* has to be added, which happens after the task that works on both."""
        task = TASK.get()
        is_one_task = task is not None and any(self._tasks.get(before) is task for before in range(self._added, number))
        first = max(self._added, self._next)
        return is_one_task and any(before in self._stored or before not in self._firsts for before in range(first, number))

    def _pass_on(self, number: int) -> None:
        """Let slice *number* start: all earlier tokens have arrived. They may not be synced yet."""
        with self._change:
            self._next = number
            self._change.notify_all()

    def add(self, part: ShardPart, token_counts: Mapping[Split, int]) -> None:
        """The next part, in the order of the slices: its tokens follow those before it, unless they were streamed."""
        location = self._streamed.pop(self._added, None)
        for split, count in token_counts.items():
            if location is None:
                if count:
                    self._writers[split].add(part, count)
            elif location.of(split).count != count:
                raise AssertionError(f"{split}: {location} was streamed, {count} tokens were counted")
        with self._change:
            self._added += 1
            self._change.notify_all()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Another process has none: it stores shards."""
        return type(None), ()

    def stop(self) -> None:
        """From now on every slice is stored as a shard: none waits for those before it."""
        with self._change:
            self._stopped = True
            self._change.notify_all()


class _SplitSink:
    """The tokens of a slice that go to one split, while they arrive."""

    def __init__(self, writer: SpanWriter, spec: ArraySpec, token_arrays: Sequence[str]) -> None:
        self._writer, self._spec, self._first, self._count = writer, spec, writer.end_of_tokens, 0
        self._last: Tail = {name: TOKEN_ARRAYS[name].all_absent(0) for name in token_arrays}  # at most a chunk
        self._digests = {name: blake3() for name in token_arrays}
        self.spans: dict[int, SpanInProgress] = {}

    def append(self, arrays: TokenArrays, highest: int) -> None:
        for name, digest in self._digests.items():
            digest.update(arrays[name].view(np.uint8).data)
        self._count += len(arrays[TOKENS])
        if self._spec.is_compressed:
            count, together = self._spec.chunk_length, arrays
            if len(arrays[TOKENS]) < count:
                together = {name: np.concatenate([items, arrays[name]]) for name, items in self._last.items()}
            self._last = last_of(together, count)
        for span in self._writer.stream(arrays, highest):
            self.spans[id(span)] = span

    @property
    def _tail_length(self) -> int:
        """Tokens of the slice in an incomplete compressed chunk."""
        return min((self._first + self._count) % self._spec.chunk_length, self._count) if self._spec.is_compressed else 0

    @property
    def tail(self) -> Tail:
        return last_of(self._last, self._tail_length)

    @property
    def range(self) -> TokenRange:
        digests = {name: f"{BLAKE3}{digest.hexdigest()}" for name, digest in self._digests.items()}
        return TokenRange(first=self._first, count=self._count, digests=digests, tail=self._tail_length)


class VersionStream:
    """The tokens of one slice on their way into all splits: *compared* says which documents are left out. *pass_on* is called
    when all have arrived.
    """

    def __init__(
        self,
        writers: Mapping[Split, SpanWriter],
        target: Target,
        all_in: Split | None,
        compared: SliceFilter | None,
        pass_on: Callable[[], object],
    ) -> None:
        self._target, self._all_in, self._compared, self._pass_on = target, all_in, compared, pass_on
        self._sinks: dict[Split, _SplitSink] = {
            split: _SplitSink(writers[split], target.layout_of(split).encoded_tokens, target.token_arrays)
            for split in target.every_split
        }
        self.location: UnfinishedLocation | None = None
        self.is_passed_on = False

    def append(self, batch: TokenBatch, rows: pa.RecordBatch) -> UInt64s:
        """Take the next documents, with their rows. Return the split of each, by its number in ALL_SPLITS: uint64[n]."""
        numbers = self._target.rule.numbers(drawn_by(rows), self._all_in).astype(np.uint64)
        if REASON in rows.schema.names:
            numbers[:] = ALL_SPLITS.index(LEFT_OUT)
        elif self._compared is not None:
            numbers[self._compared.find(rows)] = ALL_SPLITS.index(LEFT_OUT)
        # Consecutive documents that go to one split are one run of tokens.
        borders = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        starts = np.concatenate([[0], borders, [len(rows)]])
        begins, ends = (batch.seq_starts[at].astype(np.int64) for at in (starts[:-1], starts[1:]))
        of_run = numbers[starts[:-1]] if len(numbers) else np.zeros(1, np.uint64)
        arrays = {name: batch.items(name) for name in self._target.token_arrays}
        for split, sink in self._sinks.items():
            some = (of_run == ALL_SPLITS.index(split)) & (begins < ends)
            runs = begins[some], ends[some]
            for items in zip(
                *(runs_of_parts([len(array)], [array].__getitem__, *runs) for array in arrays.values()), strict=True
            ):
                sink.append(dict(zip(arrays, items, strict=True)), 2 * batch.max_token_id + 1)
        return numbers

    def end(self) -> StreamedTokens:
        """Wait until all tokens but the tails would survive the end of this process. Return where they are."""
        marks = [(Future[None](), span) for sink in self._sinks.values() for span in sink.spans.values()]
        for mark, span in marks:
            span.items.put(mark)  # after the END of a span that is whole, it is never reached
        self.is_passed_on = True
        self._pass_on()
        for mark, span in marks:
            either: list[Future[Any]] = [mark, span.written]
            wait(either, return_when=FIRST_COMPLETED)
            if span.written.done():
                with contextlib.suppress(CancelledError):
                    span.written.result()
                    continue
                raise BrokenStreamError
        ranges = {split: sink.range for split, sink in self._sinks.items()}
        target = self._target
        where = {"version": target.name, "attempt": target.workspace.attempt, "layout": target.layout}
        self.location = UnfinishedLocation.model_validate({**where, **ranges})
        return StreamedTokens(self.location, tuple(sink.tail for sink in self._sinks.values()))
