"""Writing the final arrays of a version: every stored object whole, by one task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.columns import GROUP_ROWS, ColumnsWriter, Kinds, batch_of, merged, name_of
from flat_tokens.manifest import LOSS_MASK
from flat_tokens.stores.store import StoredObject
from flat_tokens.writer import ArrayWriter
from tasks.models import Name
from tasks.output.paths import DOCUMENTS, version_key, version_store
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.contents import Contents, open_contents
from tasks.shards.read import document_spec
from tasks.split.spans import ShardPlace, ShardSpan, Span, SplitRule, chosen, staying

DOCUMENT_ARRAYS = ("key", "file", "row")


class Entries(NamedTuple):
    """Entries of documents beside their tokens: each one's start, key, file, row: uint64[n]; and n rows of kept columns."""

    starts: npt.NDArray[np.uint64]
    key: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]
    columns: Iterable[pa.RecordBatch] = ()


MAX_ENCODED = 2**32 - 1


class Bounded(NamedTuple):
    """Encoded tokens, none of which is above ``highest``."""

    tokens: npt.NDArray[np.uint32]
    highest: int


class Written(NamedTuple):
    """The objects of a written span, and its largest token id."""

    objects: tuple[StoredObject, ...]
    max_token_id: int


def names_below_output(written: Written, rule: SplitRule, layout: LayoutName, place: Place, version: str) -> list[str]:
    """Names below the output of the objects that ``write_span`` wrote, given what it was told."""
    return [f"{version_key(version)}/{stored.key}" for stored in written.objects]


def write_span(span: ShardSpan, rule: SplitRule, layout: LayoutName, place: Place, version: Name) -> Written:
    """Write a span's objects below ``versions/<version>``, each once and whole."""
    if span.of_tokens:
        tokens = (some for at in span.places for some in _items_of(span, at, rule, place, version, "encoded_tokens"))
        masks = (some for at in span.places for some in _items_of(span, at, rule, place, version, LOSS_MASK))
        return store_tokens(span, tokens, masks, layout, place, version)
    entries = (_entries_of(span, at, rule, place, version) for at in span.places)
    kinds = dict.fromkeys(span.columns, "null")
    for at in span.places:
        kinds = merged(kinds, at.shard.columns)
    return store_documents(span, entries, layout, place, version, kinds)


def store_tokens(
    at: Span,
    tokens: Iterable[npt.NDArray[np.uint32]],
    masks: Iterable[npt.NDArray[np.uint8]],
    layout: LayoutName,
    place: Place,
    version: str,
) -> Written:
    """Write the objects of a span of tokens, from arrays of them one behind the other, and those of their loss mask, if the
    dataset has one: they hold as many tokens.
    """
    written, length = put_tokens(at, tokens, layout, place, version)
    check_length(at, length)
    if not at.masked:
        return written
    spec, store = LAYOUTS[layout].loss_mask, version_store(place.root, version) / at.split
    with ArrayWriter(store, LOSS_MASK, spec, first_object=at.start // spec.object_length, write_metadata=False) as writer:
        for mask in masks:
            writer.append(mask)
    check_length(at, writer.length)
    return written._replace(objects=written.objects + _named(at.split, writer.objects))


def put_tokens(
    at: Span,
    tokens: Iterable[npt.NDArray[np.uint32] | Bounded | Future[None]],
    layout: LayoutName,
    place: Place,
    version: str,
    unfinished: Callable[[int], Path | None] = lambda _: None,
) -> tuple[Written, int]:
    """Write the objects of tokens from the span's start on. Return how many came, too. A future among them is set when those
    before it would survive the end of this process, in the *unfinished* file of their object.
    """
    spec, largest = LAYOUTS[layout].encoded_tokens, 0
    store, first = version_store(place.root, version) / at.split, at.start // spec.object_length
    with ArrayWriter(store, "encoded_tokens", spec, first_object=first, write_metadata=False, unfinished=unfinished) as writer:
        for some in tokens:
            if isinstance(some, Future):
                writer.settle()
                some.set_result(None)
                continue
            part = some if isinstance(some, Bounded) else Bounded(some, MAX_ENCODED)
            if part.highest > largest:  # looking for it takes as long as a copy
                largest = max(largest, int(part.tokens.max(initial=0)))
            writer.append(part.tokens)
            meter.add("split", part.tokens.nbytes)
    return Written(_named(at.split, writer.objects), largest >> 1), writer.length


def store_documents(
    at: Span, entries: Iterable[Entries], layout: LayoutName, place: Place, version: str, kinds: Kinds | None = None
) -> Written:
    """Write the objects of a span of documents: seq_starts, and key, file and row beside the arrays of the format. *kinds*: those
    of the columns that the dataset keeps, in these documents, which are one object more.
    """
    spec, beside = LAYOUTS[layout].seq_starts, document_spec(LAYOUTS[layout])
    store = version_store(place.root, version)
    first = at.start // spec.object_length
    starts = ArrayWriter(store / at.split, "seq_starts", spec, first_object=first, write_metadata=False)
    columns = {
        name: ArrayWriter(store / f"{DOCUMENTS}/{at.split}", name, beside, first_object=first, write_metadata=False)
        for name in DOCUMENT_ARRAYS
    }
    kept_object = store.create(name_of(at.split, at.start)) if kinds and at.start < at.stop else None
    with contextlib.ExitStack() as held:
        for writer in (starts, *columns.values()):
            held.enter_context(writer)
        kept = None
        if kept_object is not None:
            kept = held.enter_context(ColumnsWriter(held.enter_context(kept_object), kinds or {}))
        for some in entries:
            starts.append(some.starts)
            for name, column in columns.items():
                column.append(getattr(some, name))
            if kept is not None:
                for batch in some.columns:
                    kept.append(batch)
        check_length(at, starts.length)
        if kept is not None:
            check_length(at, kept.row_count)
        if at.last_entry is not None:
            starts.append(np.array([at.last_entry], np.uint64))
    beside_objects = [stored for column in columns.values() for stored in column.objects]
    objects = (*_named(at.split, starts.objects), *_named(f"{DOCUMENTS}/{at.split}", beside_objects))
    return Written((*objects, *([] if kept_object is None else [kept_object.stored])), 0)


def check_length(at: Span, length: int) -> None:
    """AssertionError where a span has not got all of its items."""
    if length != at.stop - at.start:
        raise AssertionError(f"{at.label}: {length} items came instead of {at.stop - at.start}")


def _items_of(span: Span, at: ShardPlace, rule: SplitRule, place: Place, version: str, name: str) -> Iterator[npt.NDArray[Any]]:
    """The span's tokens that come from one shard, in order, or their loss mask, by the *name* of the array."""
    contents = open_contents(place.root, at.shard, name)
    return tokens_from(contents, span, at, rule, place, version, masks=name == LOSS_MASK)


def tokens_from(
    contents: Contents, span: Span, at: ShardPlace, rule: SplitRule, place: Place, version: str, *, masks: bool = False
) -> Iterator[npt.NDArray[Any]]:
    """The span's tokens that come from a shard with these contents, in order, or their loss mask."""
    keep = _chosen_at(span, at, rule, place, version, contents)
    read = contents.masks if masks else contents.tokens
    # (split, token) -> (shard, token of those kept)
    return read(keep, span.start - at.first_token, span.stop - at.first_token)


def _entries_of(span: Span, at: ShardPlace, rule: SplitRule, place: Place, version: str) -> Entries:
    """The span's documents that come from one shard."""
    contents = open_contents(place.root, at.shard, f"{DOCUMENTS}/row")
    keep = np.flatnonzero(_chosen_at(span, at, rule, place, version, contents))
    lengths = contents.lengths[keep].astype(np.uint64)
    ends = np.cumsum(lengths) + np.uint64(at.first_token)
    here = slice(max(span.start - at.first_seq, 0), min(span.stop - at.first_seq, len(keep)))
    rows = contents.rows()[keep][here]
    file, row = at.files_and_rows(rows)
    columns = _columns_of(span, at, contents, keep[here])
    return Entries((ends - lengths)[here], contents.keys[keep][here], file, row, columns)


def _columns_of(span: Span, at: ShardPlace, contents: Contents, documents: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """The kept columns of a shard's documents, some rows at a time. A source that keeps none has nulls."""
    if not span.columns:
        return
    # Where a row group of the shard ends, or each would be read twice.
    ends = np.flatnonzero(np.diff(documents // GROUP_ROWS)) + 1
    for some in np.split(documents, ends) if len(documents) else ():
        nothing = {name: pa.nulls(len(some)) for name in span.columns}
        yield contents.columns(some) if at.shard.columns else batch_of(nothing)


def _chosen_at(
    span: Span, at: ShardPlace, rule: SplitRule, place: Place, version: str, contents: Contents
) -> npt.NDArray[np.bool_]:
    """Which documents of a shard belong to the span's split: bool[n]."""
    mine = chosen(span.split, at.all_in, rule, contents.keys)
    return mine if at.copies is None else mine & staying(at, version_store(place.root, version))


def _named(prefix: str, objects: list[StoredObject]) -> tuple[StoredObject, ...]:
    return tuple(stored._replace(key=f"{prefix}/{stored.key}") for stored in objects)
