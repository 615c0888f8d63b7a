"""Writers of a token shard: its tokens into a staging directory, or a stream of the version; the rows of its documents; and one
object of kept columns.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import JsonObject
from flat_tokens.batch import TOKENS, TokenBatch
from flat_tokens.columns import GROUP_ROWS, Columns, ColumnsWriter
from flat_tokens.reader import open_split
from flat_tokens.stores.store import ObjectWriter, Store, StoredObject
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.models import Slice, TokenShard
from tasks.output.leases import Workspace
from tasks.output.paths import DOCUMENTS
from tasks.parts.documents import REASONS
from tasks.parts.stored import COLUMNS, LENGTH, SHARD_LAYOUT, SPLIT, document_spec, open_facts, write_entries, write_tails
from tasks.rows import REASON, as_rows, changed, fact, kept_of
from tasks.shards.recipe import Recipe
from tasks.shards.stream import SliceStream

FORMER = "documents/columns.former"


class ShardColumns:
    """Writes the kept columns of a shard in a staging directory. What was written is rewritten if a later row shows that a
    column is of another kind, which happens twice a column at most. ``kinds``: of all rows of the slice, those that were left out
    among them, so that the kinds of a dataset do not depend on how its sources were cut.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: contextlib.ExitStack | None = None
        self._writer: ColumnsWriter | None = None
        self._object: ObjectWriter | None = None
        self.kinds: dict[str, str] = {}
        self.objects: list[StoredObject] = []

    def append(self, batch: pa.RecordBatch, kinds: Mapping[str, str]) -> None:
        """Append rows. *kinds* fit these and all before."""
        if self._writer is not None and self.kinds == kinds:
            self._writer.append(batch)
            return
        # The columns so far are rewritten with other kinds.
        kinds = dict(kinds)
        former, count = self._writer, self._writer.row_count if self._writer else 0
        self._end()
        if former is not None:
            with self._store.create(FORMER) as copy:
                for block in self._store.blocks(COLUMNS):
                    copy.write(block)
        self._open = contextlib.ExitStack()
        self._object = self._open.enter_context(self._store.create(COLUMNS))
        self._writer = self._open.enter_context(ColumnsWriter(self._object, kinds))
        if former is not None:
            written = Columns.in_one(self._store, former.kinds, FORMER, count)
            for start in range(0, count, GROUP_ROWS):
                self._writer.append(written.take(np.arange(start, min(start + GROUP_ROWS, count)), list(former.kinds)))
            self._store.remove(FORMER)
        self._writer.append(batch)
        self.kinds = kinds

    def _end(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            if self._open is not None:
                self._open.__exit__(kind, error, trace)
            return
        self._end()
        if self._object is not None:
            self.objects.append(self._object.stored)


class Batch(NamedTuple):
    """Some documents: their tokens and their rows, whose kept columns are of ``kinds``."""

    tokens: TokenBatch
    rows: pa.RecordBatch
    kinds: Mapping[str, str]


OpenStream = Callable[[], contextlib.AbstractContextManager[SliceStream | None]]


BATCH_TOKENS = 1 << 20
"""Tokens of a staged shard that are streamed at a time."""


class ShardWriter(NamedTuple):
    """The arrays of a token shard while they are written: its tokens, and the facts of its rows."""

    tokens: FlatTokensWriter
    facts: dict[str, ArrayWriter]
    columns: ShardColumns

    def append(self, batch: Batch) -> None:
        """Append documents."""
        self.tokens.append(batch.tokens)
        for name, array in self.facts.items():
            array.append(fact(batch.rows, name).reshape(-1))
        if (kept := kept_of(batch.rows)) is not None:
            self.columns.append(kept, batch.kinds)

    @property
    def stored(self) -> JsonObject:
        """The facts of the shard that its arrays tell, once they are closed."""
        beside = [*self.columns.objects, *(stored for array in self.facts.values() for stored in array.objects)]
        objects = tuple(sorted([*self.tokens.objects, *beside]))
        counts = {"token_count": self.tokens.token_count, "max_token_id": self.tokens.max_token_id}
        return {"objects": objects, "token_arrays": self.tokens.token_arrays, "columns": self.columns.kinds, **counts}


def staging_of(key: str, workspace: Workspace) -> Store:
    """The directory in which this attempt writes a shard. Its content need not survive a power loss."""
    return replace(Store.at(Path(workspace.staging) / key), durable=False)


@contextlib.contextmanager
def staging_shard(
    key: str, workspace: Workspace, facts: Iterable[str], token_arrays: Iterable[str] = (TOKENS,)
) -> Iterator[ShardWriter]:
    """Write a token shard into this attempt's staging directory, with these *facts* of its documents and these *token_arrays*.
    The block appends to it.
    """
    store, layout = staging_of(key, workspace), SHARD_LAYOUT
    with FlatTokensWriter(store, layout, token_arrays) as tokens, contextlib.ExitStack() as stack:
        spec = document_spec(layout)
        arrays = {name: stack.enter_context(ArrayWriter(store, f"{DOCUMENTS}/{name}", spec)) for name in facts}
        yield ShardWriter(tokens, arrays, stack.enter_context(ShardColumns(store)))


class StreamedShardWriter:
    """The tokens of a slice on their way into a version, and the rows of its documents with their *facts*, which go into the
    *store* of its shard, as do their *columns*.
    """

    def __init__(self, store: Store, stream: SliceStream, facts: Iterable[str], columns: ShardColumns) -> None:
        self._store, self._stream, self._facts, self.columns = store, stream, [*facts], columns
        self._parts = list[pa.RecordBatch]()
        self._token_count = self._max_token_id = 0

    def append(self, batch: Batch) -> None:
        """Append documents."""
        rows = batch.rows.select(self._facts)
        numbers = self._stream.append(batch.tokens, batch.rows)
        self._parts.append(changed(rows, as_rows({LENGTH: np.diff(batch.tokens.seq_starts), SPLIT: numbers})))
        self._token_count += batch.tokens.token_count
        self._max_token_id = max(self._max_token_id, batch.tokens.max_token_id)
        if (kept := kept_of(batch.rows)) is not None:
            self.columns.append(kept, batch.kinds)

    def end(self) -> JsonObject:
        """Write the entries, and wait for the tokens. Return where all is."""
        some = [write_entries(self._store, self._parts), *self.columns.objects]
        location, tails = self._stream.end()
        tail = [write_tails(self._store, tails)] if any(len(some[TOKENS]) for some in tails) else []
        return {"objects": tuple(sorted([*some, *tail])), "unfinished": location}

    def close(self, token_arrays: Sequence[str]) -> None:
        """Write the entries, and wait for the tokens, of a shard that has these *token_arrays*. Then ``stored`` has its facts."""
        counts = {"token_count": self._token_count, "max_token_id": self._max_token_id}
        self.stored = {**self.end(), "token_arrays": token_arrays, "columns": self.columns.kinds, **counts}


@contextlib.contextmanager
def streaming_shard(
    key: str, workspace: Workspace, stream: SliceStream, facts: Iterable[str], token_arrays: Sequence[str]
) -> Iterator[StreamedShardWriter]:
    """Write a streamed shard into this attempt's staging directory, and its tokens into the version. The block appends to it."""
    store = staging_of(key, workspace)
    with ShardColumns(store) as columns:
        writer = StreamedShardWriter(store, stream, facts, columns)
        yield writer
    writer.close(token_arrays)


def stream_staged(shard: TokenShard, workspace: Workspace, stream: SliceStream) -> TokenShard:
    """Stream the tokens of a staged shard into the version. They are removed from the staging directory, where nothing has been
    synced: what the disk has not written yet, it never writes.
    """
    store = staging_of(shard.key, workspace)
    tokens, read = open_split(store), open_facts(store, shard.facts)
    starts = tokens.seq_starts.read(0, tokens.seq_count + 1)
    # Documents of about BATCH_TOKENS together: where the batch of each begins.
    firsts = np.searchsorted(starts[:-1], np.arange(0, shard.token_count, BATCH_TOKENS))
    borders = np.unique([0, *firsts, shard.written, tokens.seq_count])
    streamed = StreamedShardWriter(store, stream, shard.facts, columns := ShardColumns(store))
    for first, stop in itertools.pairwise(borders.tolist()):
        low, high = int(starts[first]), int(starts[stop])
        arrays = {name: array.read(low, high) for name, array in tokens.arrays.items()}
        batch = TokenBatch.of_arrays(arrays, starts[first : stop + 1] - starts[first], shard.max_token_id)
        rows = as_rows({name: read(name, first, stop) for name in shard.facts})
        streamed.append(Batch(batch, rows if first < shard.written else changed(rows, as_rows({REASON: starts[first:stop]})), {}))
    columns.objects = [stored for stored in shard.objects if stored.key in (COLUMNS, REASONS)]
    made = streamed.end()
    for stored in shard.objects:
        if stored.key not in (COLUMNS, REASONS):
            store.remove(stored.key)
    return TokenShard.model_validate({**dict(shard), **made})


@contextlib.contextmanager
def writer_of(
    slice_: Slice, key: str, recipe: Recipe, workspace: Workspace, open_stream: OpenStream | None
) -> Iterator[ShardWriter | StreamedShardWriter]:
    """The writer of a slice's shard, by its *key*. What a failed attempt has left of it is removed."""
    shutil.rmtree(Path(workspace.staging) / key, ignore_errors=True)
    schema = recipe.facts(slice_), recipe.token_arrays(slice_)
    with contextlib.nullcontext() if open_stream is None else open_stream() as stream:
        written = staging_shard(key, workspace, *schema) if stream is None else streaming_shard(key, workspace, stream, *schema)
        with written as writer:
            yield writer
