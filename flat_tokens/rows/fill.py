"""How full the rows of a view are, and which tokens of the split are in none of them."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from flat_tokens.array_types import Int64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.manifest import dataset_of, manifest_of

if TYPE_CHECKING:
    from flat_tokens.reader import FlatTokens

Covered: TypeAlias = Callable[[int, Int64s], Int64s]
"""Tokens in a row of each document from number *first* on, with these bounds (int64[n + 1]): int64[n]."""


class SourceFill(NamedTuple):
    """Tokens of a source's documents. ``cut``: those that are in no row, of documents that are in one with others. ``dropped``:
    those of documents that are in no row.
    """

    tokens: int
    cut: int
    dropped: int


class Fill(NamedTuple):
    """Waste of a view's rows. Tokens are those of the split, with the first and end-of-text tokens that the view adds.

    ``share``: the part of the rows' places that hold a token and no padding, 0 to 1. ``cut``: tokens in no row, of documents that
    are in one with others. ``dropped``: tokens of documents that are in no row. ``sources``: the last three of each source, by
    name; empty where the dataset does not record its documents' sources.
    """

    share: float
    tokens: int
    cut: int
    dropped: int
    sources: Mapping[str, SourceFill]

    @property
    def used(self) -> float:
        """The part of the split's tokens that are in a row, 0 to 1."""
        return 1 - (self.cut + self.dropped) / self.tokens if self.tokens else 0.0


def fill_of(tokens: FlatTokens, starts: Iterable[Int64s], covered: Covered, filled: int | None, places: int) -> Fill:
    """The `Fill` of rows with *places* places, *filled* of which hold tokens; None: as many as tokens are in rows. *starts*: the
    bounds of all documents, some at a time. Reads no token.
    """
    names, sources = _sources(tokens)
    # (source, or one for all) -> tokens, cut, dropped
    sums, used, first = np.zeros((len(names) + 1, 3), np.int64), 0, 0
    for entries in starts:
        sizes, kept = np.diff(entries), covered(first, entries)
        lost = sizes - kept
        counts = np.stack([sizes, np.where(kept > 0, lost, 0), np.where(kept > 0, 0, lost)], axis=1)
        sums[-1] += counts.sum(axis=0)
        if names:
            np.add.at(sums, sources(first, len(sizes)), counts)
        used, first = used + int(kept.sum()), first + len(sizes)
    share = (used if filled is None else filled) / places if places else 0.0
    whole = SourceFill(*sums[-1].tolist())
    return Fill(
        share, whole.tokens, whole.cut, whole.dropped, {name: SourceFill(*sums[k].tolist()) for k, name in enumerate(names)}
    )


def _sources(tokens: FlatTokens) -> tuple[list[str], Callable[[int, int], Int64s]]:
    """The names of the sources, and the number of each document's: int64[n] of *n* documents from *first* on."""
    dataset, split = dataset_of(tokens.store), posixpath.basename(tokens.store.root)
    made_of = manifest_of(dataset).get("provenance", {}).get("sources") or ()
    try:
        files = open_array(dataset / f"documents/{split}/file", "uint64") if made_of else None
    except FileNotFoundError:
        files = None
    if files is None:
        return [], lambda first, n: np.empty(0, np.int64)
    of_file = np.repeat(np.arange(len(made_of)), [len(source["files"]) for source in made_of])

    def numbers(first: int, n: int) -> Int64s:
        its = files.read(first, first + n) if tokens.numbers is None else files.take(tokens.numbers[first : first + n])
        if len(its) and int(its.max()) >= len(of_file):
            raise ValueError(
                f"a document is of file {its.max()}, but the manifest has {len(of_file)} files: run flat_tokens.verify"
            )
        return of_file[its.astype(np.int64)]

    return [source["name"] for source in made_of], numbers
