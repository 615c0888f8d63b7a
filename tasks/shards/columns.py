"""The kept columns of a token shard: one object, in the order of its documents."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from flat_tokens.columns import GROUP_ROWS, Columns, ColumnsWriter, Part
from flat_tokens.stores.store import ObjectWriter, Store, StoredObject
from tasks.parts.stored import COLUMNS

FORMER = "documents/columns.former"


class ShardColumns:
    """Writes the kept columns of a shard in a staging directory. What was written is rewritten where a later row shows that a
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
        if self._writer is None or self.kinds != kinds:
            self._widen(dict(kinds))
        assert self._writer is not None
        self._writer.append(batch)

    def end(self, kinds: Mapping[str, str]) -> None:
        """There are no more rows. *kinds* fit all that were read, those that were not appended among them."""
        self.kinds = dict(kinds)

    def _widen(self, kinds: dict[str, str]) -> None:
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
            written = Columns(self._store, former.kinds, (Part(FORMER, 0, count),))
            for start in range(0, count, GROUP_ROWS):
                self._writer.append(written.take(np.arange(start, min(start + GROUP_ROWS, count)), list(former.kinds)))
            self._store.remove(FORMER)
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
