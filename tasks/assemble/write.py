"""Writing the final arrays of a version: every stored object whole, by one task. Nothing else writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import PlainSerializer, PlainValidator

from flat_tokens.columns import GROUP_ROWS, ColumnsWriter, batch_of, name_of
from flat_tokens.manifest import LOSS_MASK
from flat_tokens.stores.store import StoredObject
from flat_tokens.writer import ArrayWriter
from tasks.assemble.choice import chosen
from tasks.assemble.spans import Span
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.documents import Documents, Int64s, UInt64s
from tasks.parts.opening import open_part
from tasks.parts.part import Part, ShardPart
from tasks.parts.stored import document_spec
from tasks.progress import meter

MAX_ENCODED = 2**32 - 1


class DocumentEntries(NamedTuple):
    """Entries of documents: where each starts in its split, its key, file, row and split key: uint64[n]; and n rows of kept
    columns.
    """

    starts: UInt64s
    key: UInt64s
    file: UInt64s
    row: UInt64s
    split_key: UInt64s
    columns: Iterable[pa.RecordBatch] = ()


class TokensAndMax(NamedTuple):
    """Encoded tokens, uint32[n], none of which is above ``highest``; and their loss mask, uint8[n], if the dataset has one."""

    tokens: npt.NDArray[np.uint32]
    highest: int
    mask: npt.NDArray[np.uint8] | None = None


Marks = list[Future[None]]


class Written(NamedTuple):
    """The objects of a written span, and its largest token id."""

    objects: tuple[StoredObject, ...]
    max_token_id: int


class SpansAhead(Protocol):
    """Spans of tokens that are written while parts arrive."""

    def take(self, span: Span) -> Written | None:
        """The objects of a span whose parts have all arrived. None where it has to be written."""
        ...


def names_below_output(written: Written, target: Target, *_: Any) -> list[str]:
    """Names below the output of the objects of a written span."""
    return [target.key(stored.key) for stored in written.objects]


HereOnly = Annotated[SpansAhead | None, PlainValidator(lambda _: None), PlainSerializer(lambda _: None, when_used="json")]
"""Known to this process alone: in JSON, and in any other process, it is nothing."""


def write_span(span: Span, target: Target, ahead: HereOnly = None) -> Written:
    """Write a span's objects, each once and whole, unless *ahead* has written them."""
    if not span.of_tokens:
        return _write_documents(span, target)
    if ahead is not None and (written := ahead.take(span)) is not None:
        return written
    tokens = (some for part in span.parts for some in tokens_of_part(span, part, target))
    written, length = write_tokens(span, tokens, target)
    check_length(span, length)
    return written


def write_tokens(
    span: Span,
    tokens: Iterable[npt.NDArray[np.uint32] | npt.NDArray[np.uint8] | TokensAndMax | Marks],
    target: Target,
    unfinished: Callable[[str, int], Path | None] = lambda name, number: None,
) -> tuple[Written, int]:
    """Write the objects of tokens from the span's start on, and those of their loss mask where the dataset has one. Return how
    many tokens there were, too.

    Arrays of uint32 are tokens, arrays of uint8 their mask. Marks are set when everything before them would survive the end of
    this process, in the *unfinished* file of its array and object.
    """
    first, largest = span.start // target.specs.encoded_tokens.object_length, 0
    store, specs = target.store / span.split, {"encoded_tokens": target.specs.encoded_tokens}
    if target.masked:
        specs[LOSS_MASK] = target.specs.loss_mask
    with contextlib.ExitStack() as stack:
        writers = {}
        for name, spec in specs.items():
            path = partial(unfinished, name)
            writer = ArrayWriter(store, name, spec, first_object=first, write_metadata=False, unfinished=path)
            writers[name] = stack.enter_context(writer)
        for some in tokens:
            if isinstance(some, list):
                for writer in writers.values():
                    writer.settle()
                for mark in some:
                    mark.set_result(None)
                continue
            if isinstance(some, np.ndarray) and some.dtype == np.uint8:
                writers[LOSS_MASK].append(some)
                continue
            part = some if isinstance(some, TokensAndMax) else TokensAndMax(cast("npt.NDArray[np.uint32]", some), MAX_ENCODED)
            if part.highest > largest:  # looking for it takes as long as a copy
                largest = max(largest, int(part.tokens.max(initial=0)))
            writers["encoded_tokens"].append(part.tokens)
            if target.masked and isinstance(some, TokensAndMax):
                writers[LOSS_MASK].append(np.ones(len(part.tokens), np.uint8) if part.mask is None else part.mask)
            meter.add("split", part.tokens.nbytes)
    lengths = {name: writer.length for name, writer in writers.items()}
    if len(set(lengths.values())) > 1:
        raise AssertionError(f"{span.label}: arrays of {lengths} items were written")
    objects = tuple(stored for name in specs for stored in _named(span.split, writers[name].objects))
    return Written(objects, largest >> 1), lengths["encoded_tokens"]


def _write_documents(span: Span, target: Target) -> Written:
    """Write the objects of a span of documents: seq_starts; key, file and row, which are not arrays of the format; and one object
    of the columns that the dataset keeps.
    """
    spec, of_documents, store = target.specs.seq_starts, document_spec(target.specs), target.store
    first = span.start // spec.object_length
    starts = ArrayWriter(store / span.split, "seq_starts", spec, first_object=first, write_metadata=False)
    arrays = {
        name: ArrayWriter(store / f"{DOCUMENTS}/{span.split}", name, of_documents, first_object=first, write_metadata=False)
        for name in target.document_arrays
    }
    kept_object = store.create(name_of(span.split, span.start)) if span.columns and span.start < span.stop else None
    with contextlib.ExitStack() as stack:
        for writer in (starts, *arrays.values()):
            stack.enter_context(writer)
        kept = None
        if kept_object is not None:
            kept = stack.enter_context(ColumnsWriter(stack.enter_context(kept_object), span.columns))
        for some in (_entries_of(span, part, target) for part in span.parts):
            starts.append(some.starts)
            for name, array in arrays.items():
                array.append(getattr(some, name))
            if kept is not None:
                for batch in some.columns:
                    kept.append(batch)
        check_length(span, starts.length)
        if kept is not None:
            check_length(span, kept.row_count)
        if span.last_entry is not None:
            starts.append(np.array([span.last_entry], np.uint64))
    entries = [stored for array in arrays.values() for stored in array.objects]
    objects = (*_named(span.split, starts.objects), *_named(f"{DOCUMENTS}/{span.split}", entries))
    return Written((*objects, *([] if kept_object is None else [kept_object.stored])), 0)


def check_length(span: Span, length: int) -> None:
    """AssertionError where a span has not got all of its items."""
    if length != span.stop - span.start:
        raise AssertionError(f"{span.label}: {length} items arrived instead of {span.stop - span.start}")


def tokens_of_part(span: Span, part: Part, target: Target) -> Iterator[npt.NDArray[Any]]:
    """The span's tokens that come from one part, in order, then their loss mask where the dataset has one."""
    documents = open_part(part, target, "encoded_tokens", *([LOSS_MASK] if target.masked else []))
    documents = documents.those(chosen(part, documents, span.split, target))
    # (split, token) -> (part, token)
    low, high = max(span.start - part.first_token, 0), span.stop - part.first_token
    yield from documents.tokens(low, high)
    if target.masked:
        yield from documents.masks(low, high)


def _entries_of(span: Span, part: Part, target: Target) -> DocumentEntries:
    """The span's documents that come from one part."""
    documents = open_part(part, target, f"{DOCUMENTS}/row")
    numbers = np.flatnonzero(chosen(part, documents, span.split, target))
    lengths = documents.lengths[numbers].astype(np.uint64)
    starts = np.cumsum(lengths) - lengths + np.uint64(part.first_token)
    # (split, document) -> (part, document)
    here = slice(max(span.start - part.first_seq, 0), min(span.stop - part.first_seq, len(numbers)))
    numbers, places = numbers[here], documents.places()
    columns = _columns_of(part, documents, numbers, target)
    split_keys = documents.drawn_by[numbers]
    return DocumentEntries(starts[here], documents.keys[numbers], places.file[numbers], places.row[numbers], split_keys, columns)


def _columns_of(part: Part, documents: Documents, numbers: Int64s, target: Target) -> Iterator[pa.RecordBatch]:
    """The kept columns of documents *numbers*, some rows at a time. A source that keeps none has nulls."""
    if not target.columns:
        return
    has_columns = not isinstance(part, ShardPart) or part.shard.columns or part.near is not None
    # Where a row group of the part ends, or each would be read twice.
    ends = np.flatnonzero(np.diff(numbers // GROUP_ROWS)) + 1
    for some in np.split(numbers, ends) if len(numbers) else ():
        yield documents.columns(some) if has_columns else batch_of({name: pa.nulls(len(some)) for name in target.columns})


def _named(prefix: str, objects: list[StoredObject]) -> tuple[StoredObject, ...]:
    return tuple(stored._replace(key=f"{prefix}/{stored.key}") for stored in objects)
