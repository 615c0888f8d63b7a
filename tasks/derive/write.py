"""Writing a dataset from pieces of others, or from buckets of a shuffled one: every stored object whole, by one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import SPLITS
from tasks.derive import shuffle as shuffling
from tasks.derive.pieces import Piece, Selection, open_piece, read_documents, taken_of
from tasks.derive.shuffle import Bucket
from tasks.models import Split
from tasks.output.staging import Place
from tasks.split.spans import Span, items_a_task
from tasks.split.write import Entries, Written, store_documents, store_tokens


class PieceSpan(Span):
    """A span whose items come from pieces and buckets."""

    parts: tuple[Piece | Bucket, ...]


def lay_out(parts: dict[Split, list[Piece | Bucket]], layout: LayoutName) -> list[PieceSpan]:
    """The spans of both splits. The parts of a split are placed one behind the other."""
    spans = []
    for split in SPLITS:
        mine = parts[split]
        for of_tokens in (True, False):
            counts = [part.token_count if of_tokens else part.seq_count for part in mine]
            ends = np.cumsum([0, *counts])
            length, step = int(ends[-1]), items_a_task(of_tokens, LAYOUTS[layout])
            # The documents' last span may have none, but it ends seq_starts.
            for start in range(0, length if of_tokens else length + 1, step):
                stop = min(start + step, length)
                # Parts that hold some of it: (part, item) -> (split, item) is ends[part] + item.
                first, last = np.searchsorted(ends[1:], start, "right"), np.searchsorted(ends[:-1], stop, "left")
                is_last = not of_tokens and stop == length and start + step > length
                spans.append(
                    PieceSpan(
                        split=split,
                        of_tokens=of_tokens,
                        start=start,
                        stop=stop,
                        last_entry=sum(part.token_count for part in mine) if is_last else None,
                        parts=tuple(part for part, count in zip(mine[first:last], counts[first:last], strict=True) if count),
                    )
                )
    return spans


def write_pieces(span: PieceSpan, selection: Selection, layout: LayoutName, place: Place, version: str) -> Written:
    """Write a span's objects below ``versions/<version>``, each once and whole."""
    if span.of_tokens:
        tokens = (some for part in span.parts for some in _tokens_of(span, part, selection, place))
        return store_tokens(span, tokens, layout, place, version)
    entries = (_entries_of(span, part, selection, place) for part in span.parts)
    return store_documents(span, entries, layout, place, version)


def _tokens_of(span: PieceSpan, part: Piece | Bucket, selection: Selection, place: Place) -> Iterator[npt.NDArray[np.uint32]]:
    """The span's tokens that come from one part, in order."""
    low, high = max(span.start - part.first_token, 0), min(span.stop - part.first_token, part.token_count)
    if isinstance(part, Bucket):
        yield from shuffling.tokens_of(part, shuffling.documents_of(part, place), low, high, place)
        return
    source = open_piece(part)
    taken = taken_of(part, selection, source, place)
    # (split, token) -> (piece, token): the first and last documents are cut at the span's borders
    ends = np.cumsum(taken.lengths)
    starts = ends - taken.lengths
    cut_low, cut_high = np.clip(low, starts, ends) - starts, np.clip(high, starts, ends) - starts
    yield from read_documents(source, taken.begins + cut_low, cut_high - cut_low)


def _entries_of(span: PieceSpan, part: Piece | Bucket, selection: Selection, place: Place) -> Entries:
    """The span's documents that come from one part."""
    if isinstance(part, Bucket):
        documents = shuffling.documents_of(part, place)
    else:
        documents = taken_of(part, selection, open_piece(part), place)
    here = slice(max(span.start - part.first_seq, 0), min(span.stop - part.first_seq, part.seq_count))
    starts = np.cumsum(documents.lengths) - documents.lengths + part.first_token
    return Entries(starts[here].astype(np.uint64), documents.key[here], documents.file[here], documents.row[here])


def place_pieces(parts: Sequence[Piece]) -> list[Piece]:
    """Place the pieces of a split one behind the other."""
    placed, seqs, tokens = [], 0, 0
    for part in parts:
        placed.append(part.model_copy(update={"first_seq": seqs, "first_token": tokens}))
        seqs += part.seq_count
        tokens += part.token_count
    return placed
