"""Rows: what is known of documents besides their tokens, a row each, in Arrow record batches of one schema.

A *fact* is made with the tokens of a document, and never changes: one uint64 or several, under a name. Next to the facts are
the columns that are kept of the sources, one struct, since their kinds are known when all rows have been read. Writers and
readers of rows follow the schema, and name only the facts that they use themselves. ``Recipe.facts`` makes it; a shard's record
has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flat_tokens import columns
from flat_tokens.annotations import UInt64s
from flat_tokens.extras import pa

Facts = Mapping[str, int]
"""A schema: the facts by their names, and how many numbers a document has of each."""

KEY, FILE, ROW, SPLIT_KEY = "key", "file", "row", "split_key"
"""Facts of a document's place: its key, its file and its row there, and the value that decides on its split, if the key does
not. In a shard the row is that of the slice, and there is no file.
"""
TEXT_BYTES, DIGEST, SIGNATURE = "text_bytes", "digest", "signature"
"""Facts of its text: its length, its digest, and its signature, whose name goes on with how it is made."""
REASON, OF, SIMILARITY = OF_CHOICE = "reason", "of", "similarity"
"""Facts of a document in a version: a key made of the reason why it is left out, 0 for none, which a shard has too of those that
have no tokens; the key of the document that it repeats, which stays, or which names their cluster; the similarity of both in
millionths, 0 for copies.
"""
OF_VERSION = (KEY, FILE, ROW)
"""The facts that each version has of its documents."""
OF_PLACE = (*OF_VERSION, SPLIT_KEY)
KEPT = "columns"


REPAIR = "Repair one of them, or leave the column out of source.keep_columns."


@dataclass
class JoinedKinds:
    """The kinds of columns so far, *now*, and the place that made each of them what it is."""

    now: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, given: Mapping[str, str], place: str, remedy: str = REPAIR) -> None:
        """Join the kinds of one more place. ValueError, with the places and the *remedy*, if a column is of two kinds that do not
        go together.
        """
        kinds = dict(self.now)
        for name, kind in given.items():
            known = kinds.get(name, "null")
            fits = columns.common(known, kind)
            if fits is None and self.places[name] == place:
                raise ValueError(f"{place}: column {name!r} is {kind} in one place and {known} in another. {remedy}")
            if fits is None:
                raise ValueError(f"column {name!r} is {known} in {self.places[name]} and {kind} in {place}. {remedy}")
            if fits != known:
                self.places[name] = place
            kinds[name] = fits
        self.now = kinds


def as_rows(facts: Mapping[str, UInt64s], kept: pa.RecordBatch | None = None) -> pa.RecordBatch:
    """Rows of n documents, from their facts, uint64[n] or uint64[n, numbers] each, and their *kept* columns. No copy."""
    found = {name: _array_of(values) for name, values in facts.items()}
    if kept is not None and kept.num_columns:
        found[KEPT] = pa.StructArray.from_arrays(kept.columns, fields=list(kept.schema))
    return columns.batch_of(found)


def _array_of(values: UInt64s) -> pa.Array:
    flat = columns.as_arrow(values.astype(np.uint64, copy=False).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def changed(rows: pa.RecordBatch, others: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with all that *others*, rows of the same documents, say of them."""
    both = (*zip(rows.schema.names, rows.columns, strict=True), *zip(others.schema.names, others.columns, strict=True))
    return columns.batch_of(dict(both))


def fact(rows: pa.RecordBatch, name: str) -> UInt64s:
    """A fact of documents: uint64[n], or uint64[n, numbers] if each has several. No copy."""
    column = rows.column(name)
    numbers = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 1
    flat = column if numbers == 1 else column.flatten()
    values = np.frombuffer(flat.buffers()[1], np.uint64, len(flat), 8 * flat.offset) if len(flat) else np.empty(0, np.uint64)
    return values if numbers == 1 else values.reshape(-1, numbers)


def drawn_by(rows: pa.RecordBatch) -> UInt64s:
    """The values that decide on the splits of documents: uint64[n]."""
    return fact(rows, SPLIT_KEY if SPLIT_KEY in rows.schema.names else KEY)


def kept_of(rows: pa.RecordBatch) -> pa.RecordBatch | None:
    """The kept columns of documents; None if none is kept."""
    if KEPT not in rows.schema.names:
        return None
    struct = rows.column(KEPT)
    return pa.RecordBatch.from_arrays(struct.flatten(), schema=pa.schema(list(struct.type)))


def joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Rows as one batch, their kept columns of the kinds that fit. ValueError if none does."""
    if len(parts) == 1:
        return parts[0]
    kept = [some for some in map(kept_of, parts) if some is not None]
    names = [name for name in parts[0].schema.names if name != KEPT]
    facts = pa.concat_batches([part.select(names) for part in parts])
    return changed(facts, as_rows({}, columns.joined(kept))) if kept else facts
