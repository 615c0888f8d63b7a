"""The reserve of a version whose documents were compared: what later versions need of its slices, and it has not itself.

These are the documents that it left out, as another version may not, and what is known of the texts of all documents: the
lengths, and digests or signatures. A reserve is next to its version, and goes with it. The version's index has the digests of its
objects, and says where each slice has its share.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.columns import Columns, ColumnsWriter, batch_of
from flat_tokens.columns import Part as ColumnsPart
from flat_tokens.manifest import CLUSTER
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.models import Name, PublishedLocation
from tasks.output.paths import DOCUMENTS, reserve_key
from tasks.output.target import Target
from tasks.parts.documents import Documents
from tasks.parts.stored import COLUMNS, SHARD_LAYOUT, document_spec
from tasks.rows import OF_VERSION

LEFT_OUT, TEXTS = "left_out", "texts"
"""Below a reserve: a flat-tokens array with entries of its documents, and arrays of what is known of texts."""
LAYOUT = SHARD_LAYOUT._replace(encoded_tokens=replace(SHARD_LAYOUT.encoded_tokens, zstd_level=1))
"""Compressed: it is read at most once a build, and stays as long as its version."""
BATCH_TOKENS = 1 << 20
VERSIONS_OPEN = 4


class Reserved(NamedTuple):
    """The share of a slice: the run of its documents that the version left out, ``(first, count)``, and the number of its first
    text. None: the version has no reserve.
    """

    left_out: tuple[int, int] = (0, 0)
    first_text: int | None = None


NOTHING_RESERVED = Reserved()


class ReserveWriter:
    """Writes the reserve of a version, slice by slice, within a block. *texts*: the facts of texts. *columns*: the kinds of the
    version's columns.
    """

    def __init__(self, target: Target, texts: Iterable[str], columns: Mapping[str, str]) -> None:
        store = target.root / reserve_key(target.name)
        self.texts = (*texts,)
        self._columns = {name: kind for name, kind in columns.items() if name != CLUSTER}  # that one is not kept of sources
        self._tokens, spec = FlatTokensWriter(store / LEFT_OUT, LAYOUT, target.token_arrays), document_spec(LAYOUT)
        self._entries = {name: ArrayWriter(store / LEFT_OUT, f"{DOCUMENTS}/{name}", spec) for name in target.facts}
        self._texts = {name: ArrayWriter(store, f"{TEXTS}/{name}", spec) for name in self.texts}
        self._kept = (store / LEFT_OUT).create(COLUMNS) if self._columns else None
        self._rows: ColumnsWriter | None = None
        self._open, self._count = contextlib.ExitStack(), 0
        self.objects: list[StoredObject] = []

    def append(self, documents: Documents, left_out: npt.NDArray[np.bool_], *, has_columns: bool) -> Reserved:
        """Append what is known of the texts of a slice, and those documents that the version has *left_out*, bool[n], with their
        kept columns: nulls unless it *has_columns*. Return its share.
        """
        first, first_text = self._tokens.seq_count, self._count
        self._count += len(left_out)
        for name, writer in self._texts.items():
            writer.append(documents.fact(name).reshape(-1))
        numbers = np.flatnonzero(left_out)
        edges = np.flatnonzero(np.diff(np.cumsum(documents.lengths[numbers]) // BATCH_TOKENS)) + 1
        for some in np.split(numbers, edges) if len(numbers) else ():
            self._append_documents(documents, some)
            if self._rows is not None:
                self._rows.append(documents.columns(some) if has_columns else batch_of(self._nulls(len(some))))
        return Reserved((first, len(numbers)), first_text)

    def _append_documents(self, documents: Documents, some: npt.NDArray[np.int64]) -> None:
        those = np.zeros(len(documents), bool)
        those[some] = True
        part = documents.those(those)
        self._tokens.append(part.batch(self._tokens.token_arrays))
        for name, writer in self._entries.items():
            writer.append(part.fact(name))

    def _nulls(self, count: int) -> dict[str, pa.Array]:
        return {name: pa.nulls(count) for name in self._columns}

    def __enter__(self) -> Self:
        self._open.enter_context(self._tokens)
        for writer in (*self._entries.values(), *self._texts.values()):
            self._open.enter_context(writer)
        if self._kept is not None:
            self._open.enter_context(self._kept)
            self._rows = self._open.enter_context(ColumnsWriter(self._kept, self._columns))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)
        if kind is None:
            stored = [*self._tokens.objects, *(one for writer in self._entries.values() for one in writer.objects)]
            stored += [self._kept.stored] if self._kept is not None else []
            self.objects = [one._replace(key=f"{LEFT_OUT}/{one.key}") for one in stored]
            self.objects += [one for writer in self._texts.values() for one in writer.objects]


class LeftOut(NamedTuple):
    """The documents that a version left out: their tokens, and arrays with an entry a document."""

    tokens: FlatTokens
    key: StoredArray
    file: StoredArray
    row: StoredArray


@functools.lru_cache(VERSIONS_OPEN)
def open_left_out(root: Store, version: Name) -> LeftOut:
    """Open the documents that a version left out."""
    store = root / reserve_key(version) / LEFT_OUT
    return LeftOut(open_split(store), *(left_out_array(root, version, name) for name in OF_VERSION))


def left_out_array(root: Store, version: Name, name: str) -> StoredArray:
    """A fact of each of them."""
    return open_array(root / reserve_key(version) / LEFT_OUT / f"{DOCUMENTS}/{name}", "uint64")


def left_out_columns(root: Store, version: Name, kinds: Mapping[str, str]) -> Columns:
    """Their kept columns, of *kinds*."""
    count = open_left_out(root, version).tokens.seq_count
    return Columns(root / reserve_key(version) / LEFT_OUT, kinds, (ColumnsPart(COLUMNS, 0, count),) if count else ())


def reserved_texts(root: Store, location: PublishedLocation, name: str) -> tuple[StoredArray, int]:
    """The array *name* of what is known of texts in a version's reserve, and the number of the slice's first text."""
    assert location.first_text is not None
    return _open_texts(replace(root, staging=None, read_once=False), location.version, name), location.first_text


@functools.lru_cache(VERSIONS_OPEN)
def _open_texts(root: Store, version: Name, name: str) -> StoredArray:
    """Open the array *name* of a reserve. Its chunks are kept, as several slices share one."""
    return open_array(root / reserve_key(version) / f"{TEXTS}/{name}", "uint64")
