"""Writing the final arrays of a version: which documents of a part go to a split, where each document is in the final arrays, and
every stored object whole, by one task. Nothing else writes them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pydantic import Field

from flat_tokens.annotations import Bools, Int64s, IntPair
from flat_tokens.arrays.layouts import Layout
from flat_tokens.batch import TOKENS, TokenArrays
from flat_tokens.columns import GROUP_ROWS, ColumnsWriter, batch_of, name_of
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import StoredObject
from flat_tokens.writer import ArrayWriter
from tasks.models import ALL_SPLITS, LEFT_OUT, HereOnly, Model, Split
from tasks.output.paths import DOCUMENTS, TEXTS, beside_key, unfinished_key
from tasks.output.target import Target
from tasks.parts.documents import Documents
from tasks.parts.input import documents_taken
from tasks.parts.opening import open_part
from tasks.parts.part import InputPart, Part, Position, ShardPart
from tasks.parts.stored import document_spec
from tasks.progress import meter
from tasks.rows import KEY, REASON, SPLIT_KEY
from tasks.shards.stream import BrokenStreamError

SplitCounts = Mapping[Split, IntPair]
"""Sequences and tokens of a part, by split."""


def chosen(part: Part, documents: Documents, split: Split, target: Target) -> Bools:
    """Which documents of a part go to a split: bool[n]."""
    if isinstance(part, InputPart):
        return documents_taken(part, target)
    if not isinstance(part, ShardPart):
        return np.ones(len(documents), bool)
    numbers = target.rule.numbers(documents.fact(SPLIT_KEY), part.all_in)
    if part.repeats or part.shard.left_out:
        numbers[documents.fact(REASON) > 0] = ALL_SPLITS.index(LEFT_OUT)
    mine: Bools = numbers == ALL_SPLITS.index(split)
    return mine


def count_part(part: Part, target: Target) -> SplitCounts:
    """Count a part's sequences and tokens of each split. Parts of inputs and buckets were counted when they were made."""
    counts = dict.fromkeys(ALL_SPLITS, (0, 0))
    if not isinstance(part, ShardPart):
        return {**counts, part.split: (part.seq_count, part.token_count)}
    seqs, tokens = part.counts.written, part.counts.token_count
    counts[LEFT_OUT] = part.shard.seq_count - seqs, part.shard.token_count - tokens
    if part.all_in is not None or (target.rule.fraction == 0 and target.rule.splits == SPLITS):
        return {**counts, part.all_in or "train": (seqs, tokens)}
    documents = open_part(part, target, KEY, SPLIT_KEY)
    for split in target.rule.splits[1:]:
        mine = chosen(part, documents, split, target)
        counts[split] = int(mine.sum()), int(documents.lengths[mine].sum())
        seqs, tokens = seqs - counts[split][0], tokens - counts[split][1]
    return {**counts, "train": (seqs, tokens)}


SPAN_TOKENS = 1 << 26
"""Tokens that one task writes, at least one stored object."""
SPAN_DOCUMENTS = 1 << 20


class Span(Model):
    """A range of the output that one task writes, as whole stored objects: items ``start:stop`` of one split's tokens, or of its
    arrays with an entry a document, which come from ``parts``.
    """

    split: Split
    of_tokens: bool
    start: int
    stop: int
    last_entry: int | None = None
    """The token count, for the one that ends seq_starts."""
    columns: dict[str, str] = Field({})
    """The kinds of the kept columns, by their names, for one of documents."""
    parts: tuple[Annotated[Part, Field(discriminator="kind")], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.split} {'tokens' if self.of_tokens else 'documents'} {self.start:,} to {self.stop:,}"


def span_length(layout: Layout, *, of_tokens: bool) -> int:
    """Items of a span that is not the last of its array: whole objects."""
    length = (layout.encoded_tokens if of_tokens else layout.seq_starts).object_length
    return length * max(1, (SPAN_TOKENS if of_tokens else SPAN_DOCUMENTS) // length)


class SpanLayout:
    """Lays out the spans of all splits, by prefix sums over the parts' counts. Each is returned as soon as its last part is
    known, so that objects can be written while later slices are still tokenized. Where the dataset keeps columns, spans of
    documents are returned last: the kind of a column is known with the last part, and all objects have the same kinds, however
    the sources were cut into parts.
    """

    def __init__(self, target: Target) -> None:
        self._keeps_columns, self._has_texts = bool(target.columns), bool(target.texts)
        self._waiting: list[Span] = []
        self._lines: dict[Split, tuple[_ArraySpans, _ArraySpans]] = {
            split: (_ArraySpans(split, True, target), _ArraySpans(split, False, target)) for split in target.every_split
        }

    def add(self, part: Part, counts: SplitCounts) -> Iterator[Span]:
        """The spans that end within the next part."""
        for split, (tokens, documents) in self._lines.items():
            seq_count, token_count = counts[split]
            position = Position(first_seq=documents.end, seq_count=seq_count, first_token=tokens.end, token_count=token_count)
            here = part.model_copy(update=dict(position))
            yield from tokens.add(here)
            if self._keeps_columns:
                self._waiting += documents.add(here)
            else:
                yield from documents.add(here)

    def rest(self, kinds: Mapping[str, str]) -> Iterator[Span]:
        """The last spans, when there are no more parts. *kinds*: of the kept columns."""
        for split, (tokens, documents) in self._lines.items():
            if split == LEFT_OUT and not documents.end and not self._has_texts:
                continue  # nothing is left out, and nothing is next to the version
            yield from tokens.rest(tokens.end)
            self._waiting += documents.rest(tokens.end)
        for span in self._waiting:
            yield span.model_copy(update={"columns": dict(kinds)})


class _ArraySpans:
    """The items of one array, cut into spans. (part, item) -> (split, item): parts are consecutive."""

    def __init__(self, split: Split, of_tokens: bool, target: Target) -> None:
        self.end = 0
        self._split: Split = split
        self._of_tokens = of_tokens
        # One task writes the rows of what is left out: their columns are one object.
        is_one = split == LEFT_OUT and not of_tokens
        self._step = sys.maxsize if is_one else span_length(target.layout_of(split), of_tokens=of_tokens)
        self._start = 0
        self._open: list[Part] = []

    def add(self, part: Part) -> Iterator[Span]:
        if part.token_count if self._of_tokens else part.seq_count:
            self._open.append(part)
            self.end = self._end_of(part)
        while self.end >= self._start + self._step:
            yield self._span(self._start + self._step, None)

    def rest(self, token_count: int) -> Iterator[Span]:
        """The last span, if items are left. There is always one of documents, as it ends seq_starts."""
        if not self._of_tokens or self.end > self._start:
            yield self._span(self.end, None if self._of_tokens else token_count)

    def _span(self, stop: int, last_entry: int | None) -> Span:
        span = Span(
            split=self._split,
            of_tokens=self._of_tokens,
            start=self._start,
            stop=stop,
            last_entry=last_entry,
            parts=tuple(self._open),
        )
        self._start = stop
        self._open = [part for part in self._open if self._end_of(part) > stop]
        return span

    def _end_of(self, part: Part) -> int:
        return part.first_token + part.token_count if self._of_tokens else part.first_seq + part.seq_count


MAX_ENCODED = 2**32 - 1


class TokenItems(NamedTuple):
    """TokenItems of some token arrays, none of their tokens above ``highest``."""

    arrays: TokenArrays
    highest: int = MAX_ENCODED


Marks = list[Future[None]]


class WrittenSpan(NamedTuple):
    """The objects of a written span, its largest token id, and its objects next to the version."""

    objects: tuple[StoredObject, ...]
    max_token_id: int
    beside: tuple[StoredObject, ...] = ()

    @classmethod
    def of(
        cls, split: Split, objects: tuple[StoredObject, ...], max_token_id: int = 0, beside: tuple[StoredObject, ...] = ()
    ) -> WrittenSpan:
        """The *objects* of a split, and others that are next to the version."""
        return cls((), max_token_id, (*objects, *beside)) if split == LEFT_OUT else cls(objects, max_token_id, beside)


class SpansAhead(Protocol):
    """Spans of tokens that are written while parts arrive."""

    def take(self, span: Span) -> WrittenSpan | None:
        """The objects of a span whose parts have all arrived. None if it has to be written."""
        ...


def names_below_output(written: WrittenSpan, target: Target, *_: Any) -> list[str]:
    """Names below the output of the objects of a written span."""
    beside = beside_key(target.name)
    return [*(target.key(stored.key) for stored in written.objects), *(f"{beside}/{stored.key}" for stored in written.beside)]


def write_span(span: Span, target: Target, ahead: HereOnly[SpansAhead] = None) -> WrittenSpan:
    """Write a span's objects, each once and whole, unless *ahead* has written them."""
    if not span.of_tokens:
        return _write_documents(span, target)
    if ahead is not None and (written := ahead.take(span)) is not None:
        return written
    items = (some for part in span.parts for some in tokens_of_part(span, part, target))
    written, length = write_tokens(span, items, target)
    check_length(span, length)
    return written


def write_tokens(
    span: Span,
    items: Iterable[TokenItems | Marks],
    target: Target,
    unfinished: Callable[[str, int], Path | None] = lambda name, number: None,
) -> tuple[WrittenSpan, int]:
    """Write the objects of all token arrays from the span's start on. Return how many tokens there were, too. *items*: of one
    array or of several at a time.

    Marks are set when everything before them would survive the end of this process, in the *unfinished* file of its array and
    object.
    """
    layout, largest = target.layout_of(span.split), 0
    first, store = span.start // layout.encoded_tokens.object_length, target.home(span.split)
    specs = {name: layout.token_array(name) for name in target.token_arrays}
    with contextlib.ExitStack() as stack:
        writers = {}
        for name, spec in specs.items():
            path = partial(unfinished, name)
            name_below = f"{span.split}/{name}"
            writer = ArrayWriter(store, name_below, spec, first_object=first, write_metadata=False, unfinished=path)
            writers[name] = stack.enter_context(writer)
        for some in items:
            if isinstance(some, list):
                for writer in writers.values():
                    writer.settle()
                for mark in some:
                    mark.set_result(None)
                continue
            for name, values in some.arrays.items():
                if name == TOKENS:
                    if some.highest > largest:  # looking for it takes as long as a copy
                        largest = max(largest, int(values.max(initial=0)))
                    meter.add("split", values.nbytes)
                writers[name].append(values)
    lengths = {name: writer.length for name, writer in writers.items()}
    if len(set(lengths.values())) > 1:
        raise AssertionError(f"{span.label}: arrays of {lengths} items were written")
    objects = tuple(stored for writer in writers.values() for stored in writer.objects)
    return WrittenSpan.of(span.split, objects, largest >> 1), lengths[TOKENS]


def _write_documents(span: Span, target: Target) -> WrittenSpan:
    """Write the objects of a span of documents: seq_starts; their facts, which are not arrays of the format; and one object of
    the columns that the dataset keeps.
    """
    split, store, layout = span.split, target.home(span.split), target.layout_of(span.split)
    first = span.start // layout.seq_starts.object_length
    starts = ArrayWriter(store, f"{split}/seq_starts", layout.seq_starts, first_object=first, write_metadata=False)
    array = partial(ArrayWriter, spec=document_spec(layout), write_metadata=False)
    facts = {name: array(store, f"{DOCUMENTS}/{split}/{name}", first_object=first) for name in target.facts}
    texts = {
        name: array(target.beside, f"{TEXTS}/{split}/{name}", first_object=numbers * first)
        for name, numbers in target.texts_of(split).items()
    }
    kept_object = store.create(name_of(split, span.start)) if span.columns and span.start < span.stop else None
    with contextlib.ExitStack() as stack:
        for writer in (starts, *facts.values(), *texts.values()):
            stack.enter_context(writer)
        kept = None
        if kept_object is not None:
            kept = stack.enter_context(ColumnsWriter(stack.enter_context(kept_object), span.columns))
        for part in span.parts:
            documents = open_part(part, target, *facts, *texts)
            numbers = np.flatnonzero(chosen(part, documents, split, target))
            lengths = documents.lengths[numbers].astype(np.uint64)
            # (split, document) -> (part, document)
            here = slice(max(span.start - part.first_seq, 0), min(span.stop - part.first_seq, len(numbers)))
            starts.append((np.cumsum(lengths) - lengths + np.uint64(part.first_token))[here])
            for name, writer in {**facts, **texts}.items():
                writer.append(documents.fact(name)[numbers[here]].reshape(-1))
            if kept is not None:
                for batch in _columns_of(part, documents, numbers[here], target):
                    kept.append(batch)
        check_length(span, starts.length)
        if kept is not None:
            check_length(span, kept.row_count)
        if span.last_entry is not None:
            starts.append(np.array([span.last_entry], np.uint64))
    objects = [stored for writer in (starts, *facts.values()) for stored in writer.objects]
    objects += [] if kept_object is None else [kept_object.stored]
    beside = tuple(stored for writer in texts.values() for stored in writer.objects)
    return WrittenSpan.of(split, tuple(objects), beside=beside)


def check_length(span: Span, length: int) -> None:
    """AssertionError if a span has not got all of its items."""
    if length != span.stop - span.start:
        raise AssertionError(f"{span.label}: {length} items arrived instead of {span.stop - span.start}")


def tokens_of_part(span: Span, part: Part, target: Target) -> Iterator[TokenItems]:
    """The items of the span that come from one part, in order, of one token array after the other."""
    documents = open_part(part, target, KEY, SPLIT_KEY, *target.token_arrays)
    documents = documents.those(chosen(part, documents, span.split, target))
    # (split, token) -> (part, token)
    low, high = max(span.start - part.first_token, 0), span.stop - part.first_token
    for name in target.token_arrays:
        for items in documents.items(name, low, high):
            yield TokenItems({name: items})


def _columns_of(part: Part, documents: Documents, numbers: Int64s, target: Target) -> Iterator[pa.RecordBatch]:
    """The kept columns of documents *numbers*, some rows at a time. A source that keeps none has nulls."""
    has_columns = not isinstance(part, ShardPart) or part.shard.columns or part.repeats
    # Where a row group of the part ends, or each would be read twice.
    ends = np.flatnonzero(np.diff(numbers // GROUP_ROWS)) + 1
    for some in np.split(numbers, ends) if len(numbers) else ():
        yield documents.columns(some) if has_columns else batch_of({name: pa.nulls(len(some)) for name in target.columns})


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
    written: Future[tuple[WrittenSpan, int]]


class SpanWriter:
    """One thread, which writes spans of one split's tokens, one after another.

    Its failure ends every wait for it: it marks the writer as broken, which wakes the threads that wait for room, and gives up
    the spans after the failed one, which ends the waits for their marks.
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
            is_large = begin <= start and token_count >= SMALL_TOKENS
            if is_large and sum(span.items.qsize() for span in list(self._begun.values())) <= BACKLOG:
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
        change. BrokenStreamError if the spans have been given up.
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

    def end(self) -> None:
        """There are no more tokens."""
        for span in list(self._begun.values()):
            span.items.put(END)

    def has_begun(self, span: Span) -> bool:
        """Whether a span is written here."""
        return span.start in self._begun

    def take(self, span: Span) -> WrittenSpan | None:
        """The objects of a span whose tokens have all arrived. None if it was not begun, or failed."""
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

    def _write(self, start: int, items: SimpleQueue[Any]) -> tuple[WrittenSpan, int]:
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
        """The items of a span as they arrive, in order, and the marks that a sync settles."""
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
