"""Writing a dataset from pieces of others, or from buckets of a shuffled one: every stored object whole, by one task."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.columns import GROUP_ROWS, Kinds
from flat_tokens.manifest import LOSS_MASK, SPLITS
from tasks.derive import shuffle as shuffling
from tasks.derive.pieces import BLOCK_TOKENS, Piece, Selection, Taken, columns_of, open_piece, read_documents, taken_of
from tasks.derive.shuffle import Bucket
from tasks.models import Split
from tasks.output.staging import Place
from tasks.split.spans import Line, Span
from tasks.split.write import Entries, Written, store_documents, store_tokens


class PieceSpan(Span):
    """A span whose items come from pieces and buckets."""

    places: tuple[Piece | Bucket, ...]
    kinds: dict[str, str] = Field({}, description="Of the columns that the dataset keeps")


def lay_out(
    parts: dict[Split, list[Piece | Bucket]], layout: LayoutName, masked: bool = False, kinds: Kinds | None = None
) -> list[PieceSpan]:
    """The spans of both splits. The parts of a split are placed one behind the other. *masked*: the dataset has a loss mask.
    *kinds*: of the columns that it keeps.
    """
    spans: list[PieceSpan] = []
    kind = functools.partial(PieceSpan, masked=masked, columns=tuple(kinds or ()), kinds=dict(kinds or {}))
    for split in SPLITS:
        for of_tokens in (True, False):
            line = Line(kind, split, of_tokens, LAYOUTS[layout])
            for part in parts[split]:
                spans += line.add(part)
            spans += line.rest(sum(part.token_count for part in parts[split]))
    return spans


def write_pieces(span: PieceSpan, selection: Selection, layout: LayoutName, place: Place, version: str) -> Written:
    """Write a span's objects below ``versions/<version>``, each once and whole."""
    if span.of_tokens:
        tokens = (some for part in span.places for some in _items_of(span, part, selection, place, "encoded_tokens"))
        masks = (some for part in span.places for some in _items_of(span, part, selection, place, LOSS_MASK))
        return store_tokens(span, tokens, masks, layout, place, version)
    entries = (_entries_of(span, part, selection, place) for part in span.places)
    return store_documents(span, entries, layout, place, version, span.kinds)


def _items_of(span: PieceSpan, part: Piece | Bucket, selection: Selection, place: Place, name: str) -> Iterator[npt.NDArray[Any]]:
    """The span's tokens that come from one part, in order, or, by the array's *name*, their loss mask. All tokens of an input
    without a mask count: in a merge with one that has a mask they count as they did before.
    """
    low, high = max(span.start - part.first_token, 0), min(span.stop - part.first_token, part.token_count)
    if isinstance(part, Bucket):
        yield from shuffling.items_of(part, shuffling.documents_of(part, place), low, high, place, name)
        return
    source = open_piece(part)
    array = getattr(source, name)
    if array is None:
        yield from (np.ones(min(BLOCK_TOKENS, high - start), np.uint8) for start in range(low, high, BLOCK_TOKENS))
        return
    taken = taken_of(part, selection, source, place)
    # (split, token) -> (piece, token): the first and last documents are cut at the span's borders
    ends = np.cumsum(taken.lengths)
    starts = ends - taken.lengths
    cut_low, cut_high = np.clip(low, starts, ends) - starts, np.clip(high, starts, ends) - starts
    yield from read_documents(array, taken.begins + cut_low, cut_high - cut_low)


def _entries_of(span: PieceSpan, part: Piece | Bucket, selection: Selection, place: Place) -> Entries:
    """The span's documents that come from one part."""
    if isinstance(part, Bucket):
        documents = shuffling.documents_of(part, place)
    else:
        documents = taken_of(part, selection, open_piece(part), place)
    here = slice(max(span.start - part.first_seq, 0), min(span.stop - part.first_seq, part.seq_count))
    starts = np.cumsum(documents.lengths) - documents.lengths + part.first_token
    columns = _columns_of(span, part, documents, here, place) if span.kinds else ()
    return Entries(starts[here].astype(np.uint64), documents.key[here], documents.file[here], documents.row[here], columns)


def _columns_of(span: PieceSpan, part: Piece | Bucket, documents: Taken, here: slice, place: Place) -> Iterator[pa.RecordBatch]:
    """The kept columns of the documents *here* of one part, some rows at a time."""
    if isinstance(part, Bucket):
        yield shuffling.columns_in(part, documents, place).slice(here.start, here.stop - here.start)
        return
    numbers = documents.numbers[here]
    for start in range(0, len(numbers), GROUP_ROWS):
        yield columns_of(part, numbers[start : start + GROUP_ROWS], span.kinds)


def place_pieces(parts: Sequence[Piece]) -> list[Piece]:
    """Place the pieces of a split one behind the other."""
    placed, seqs, tokens = [], 0, 0
    for part in parts:
        placed.append(part.model_copy(update={"first_seq": seqs, "first_token": tokens}))
        seqs += part.seq_count
        tokens += part.token_count
    return placed
