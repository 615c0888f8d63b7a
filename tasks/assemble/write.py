"""Writing the final arrays of a version: every stored object whole, by one task. Nothing else writes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pydantic import PlainSerializer, PlainValidator

from flat_tokens.annotations import Int64s, UInt64s
from flat_tokens.batch import TOKENS, TokenArrays
from flat_tokens.columns import GROUP_ROWS, ColumnsWriter, batch_of, name_of
from flat_tokens.stores.store import StoredObject
from flat_tokens.writer import ArrayWriter
from tasks.assemble.choice import chosen
from tasks.assemble.spans import Span, span_length
from tasks.models import LEFT_OUT, Split
from tasks.output.paths import DOCUMENTS, TEXTS, beside_key, unfinished_key
from tasks.output.target import Target
from tasks.parts.documents import Documents
from tasks.parts.opening import open_part
from tasks.parts.part import Part, ShardPart
from tasks.parts.stored import document_spec
from tasks.progress import meter
from tasks.rows import KEY, SPLIT_KEY
from tasks.shards.stream import BrokenStreamError

MAX_ENCODED = 2**32 - 1


class DocumentEntries(NamedTuple):
    """Entries of documents: where each starts in its split, and its facts by their names: uint64[n] or uint64[n, numbers]
    each; and n rows of kept columns.
    """

    starts: UInt64s
    facts: dict[str, UInt64s]
    columns: Iterable[pa.RecordBatch] = ()


class TokenItems(NamedTuple):
    """TokenItems of some token arrays, none of their tokens above ``highest``."""

    arrays: TokenArrays
    highest: int = MAX_ENCODED


Marks = list[Future[None]]


class Written(NamedTuple):
    """The objects of a written span, its largest token id, and its objects next to the version."""

    objects: tuple[StoredObject, ...]
    max_token_id: int
    beside: tuple[StoredObject, ...] = ()

    @classmethod
    def of(
        cls, split: Split, objects: tuple[StoredObject, ...], max_token_id: int = 0, beside: tuple[StoredObject, ...] = ()
    ) -> Written:
        """The *objects* of a split, and others that are next to the version."""
        return cls((), max_token_id, (*objects, *beside)) if split == LEFT_OUT else cls(objects, max_token_id, beside)


class SpansAhead(Protocol):
    """Spans of tokens that are written while parts arrive."""

    def take(self, span: Span) -> Written | None:
        """The objects of a span whose parts have all arrived. None where it has to be written."""
        ...


def names_below_output(written: Written, target: Target, *_: Any) -> list[str]:
    """Names below the output of the objects of a written span."""
    beside = beside_key(target.name)
    return [*(target.key(stored.key) for stored in written.objects), *(f"{beside}/{stored.key}" for stored in written.beside)]


HereOnly = Annotated[SpansAhead | None, PlainValidator(lambda _: None), PlainSerializer(lambda _: None, when_used="json")]
"""Known to this process alone: in JSON, and in any other process, it is nothing."""


def write_span(span: Span, target: Target, ahead: HereOnly = None) -> Written:
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
) -> tuple[Written, int]:
    """Write the objects of all token arrays from the span's start on. Return how many tokens there were, too. *items*: of one
    array or of several at a time.

    Marks are set when everything before them would survive the end of this process, in the *unfinished* file of its array and
    object.
    """
    layout, largest = target.layout_of(span.split), 0
    first, store = span.start // layout.encoded_tokens.object_length, target.home(span.split) / span.split
    specs = {name: layout.token_array(name) for name in target.token_arrays}
    with contextlib.ExitStack() as stack:
        writers = {}
        for name, spec in specs.items():
            path = partial(unfinished, name)
            writer = ArrayWriter(store, name, spec, first_object=first, write_metadata=False, unfinished=path)
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
    objects = tuple(stored for name in specs for stored in _named(span.split, writers[name].objects))
    return Written.of(span.split, objects, largest >> 1), lengths[TOKENS]


def _write_documents(span: Span, target: Target) -> Written:
    """Write the objects of a span of documents: seq_starts; their facts, which are not arrays of the format; and one object of
    the columns that the dataset keeps.
    """
    split, store = span.split, target.home(span.split)
    spec, of_documents = target.layout_of(split).seq_starts, document_spec(target.layout_of(split))
    first = span.start // spec.object_length
    starts = ArrayWriter(store / split, "seq_starts", spec, first_object=first, write_metadata=False)
    facts, texts = store / f"{DOCUMENTS}/{split}", target.beside / f"{TEXTS}/{split}"
    arrays = {
        **{name: ArrayWriter(facts, name, of_documents, first_object=first, write_metadata=False) for name in target.facts},
        **{
            name: ArrayWriter(texts, name, of_documents, first_object=numbers * first, write_metadata=False)
            for name, numbers in target.texts_of(split).items()
        },
    }
    kept_object = store.create(name_of(split, span.start)) if span.columns and span.start < span.stop else None
    with contextlib.ExitStack() as stack:
        for writer in (starts, *arrays.values()):
            stack.enter_context(writer)
        kept = None
        if kept_object is not None:
            kept = stack.enter_context(ColumnsWriter(stack.enter_context(kept_object), span.columns))
        for some in (_entries_of(span, part, target) for part in span.parts):
            starts.append(some.starts)
            for name, array in arrays.items():
                array.append(some.facts[name].reshape(-1))
            if kept is not None:
                for batch in some.columns:
                    kept.append(batch)
        check_length(span, starts.length)
        if kept is not None:
            check_length(span, kept.row_count)
        if span.last_entry is not None:
            starts.append(np.array([span.last_entry], np.uint64))
    entries = [stored for name in target.facts for stored in arrays[name].objects]
    objects = (*_named(split, starts.objects), *_named(f"{DOCUMENTS}/{split}", entries))
    beside = _named(f"{TEXTS}/{split}", [stored for name in target.texts_of(split) for stored in arrays[name].objects])
    return Written.of(split, (*objects, *([] if kept_object is None else [kept_object.stored])), beside=beside)


def check_length(span: Span, length: int) -> None:
    """AssertionError where a span has not got all of its items."""
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


def _entries_of(span: Span, part: Part, target: Target) -> DocumentEntries:
    """The span's documents that come from one part."""
    facts = (*target.facts, *target.texts_of(span.split))
    documents = open_part(part, target, *facts)
    numbers = np.flatnonzero(chosen(part, documents, span.split, target))
    lengths = documents.lengths[numbers].astype(np.uint64)
    starts = np.cumsum(lengths) - lengths + np.uint64(part.first_token)
    # (split, document) -> (part, document)
    here = slice(max(span.start - part.first_seq, 0), min(span.stop - part.first_seq, len(numbers)))
    numbers = numbers[here]
    columns = _columns_of(part, documents, numbers, target)
    return DocumentEntries(starts[here], {name: documents.fact(name)[numbers] for name in facts}, columns)


def _columns_of(part: Part, documents: Documents, numbers: Int64s, target: Target) -> Iterator[pa.RecordBatch]:
    """The kept columns of documents *numbers*, some rows at a time. A source that keeps none has nulls."""
    if not target.columns:
        return
    has_columns = not isinstance(part, ShardPart) or part.shard.columns or part.repeats
    # Where a row group of the part ends, or each would be read twice.
    ends = np.flatnonzero(np.diff(numbers // GROUP_ROWS)) + 1
    for some in np.split(numbers, ends) if len(numbers) else ():
        yield documents.columns(some) if has_columns else batch_of({name: pa.nulls(len(some)) for name in target.columns})


def _named(prefix: str, objects: list[StoredObject]) -> tuple[StoredObject, ...]:
    return tuple(stored._replace(key=f"{prefix}/{stored.key}") for stored in objects)


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
