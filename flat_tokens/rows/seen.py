"""Tokens and text of documents in some rows of a view, for all documents at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flat_tokens.annotations import Bools, Int64s
from flat_tokens.rows.views import SplitView, all_starts, overlapped, running_sums
from flat_tokens.rows.virtual import ends_of

ROWS_AT_A_TIME = 1 << 16
TOKENS_AT_A_TIME = 1 << 22


def tokens_seen(view: SplitView, rows: Bools | None = None) -> Int64s:
    """Tokens of each document of the view's split that are in *rows* (bool[rows], None for all of them): int64[seq_count].

    A token that two rows share counts twice; so do tokens that the view adds to a document. Reads ``seq_starts``, and no token.
    """
    entries = all_starts(view.tokens)
    found = np.zeros(len(entries) - 1, np.int64)
    for document, begin, end in _parts(view, entries, rows):
        np.add.at(found, document, end - begin)
    return found


def bytes_seen(view: SplitView, sizes: Int64s, rows: Bools | None = None) -> Int64s:
    """Bytes of text of the stored tokens that `tokens_seen` counts: int64[seq_count]. *sizes*: bytes of each token id.

    Reads these tokens. An id above all *sizes* has no bytes. ValueError for a view whose rows differ from epoch to epoch.
    """
    if view.has_epochs:
        raise ValueError(f"{view!r}: its rows are not the same in every epoch, so the bytes of their parts are not known")
    ends = ends_of(view.tokens)
    entries, known = all_starts(view.tokens), np.append(sizes, 0)
    found = np.zeros(len(entries) - 1, np.int64)
    for documents, begins, stops in _parts(view, entries, rows):
        # Without what the view adds to the documents
        begins = np.maximum(begins, entries[documents] + ("bos" in ends))
        lengths = np.maximum(np.minimum(stops, entries[documents + 1] - ("eos" in ends)) - begins, 0)
        at = running_sums(lengths)
        cuts = np.searchsorted(at, np.arange(0, max(int(at[-1]), 1), TOKENS_AT_A_TIME)).tolist()
        for low, high in zip(cuts, [*cuts[1:], len(lengths)], strict=True):
            tokens = np.empty(at[high] - at[low], np.uint32)
            view.tokens.encoded_tokens.gather(begins[low:high], lengths[low:high], tokens, at[low:high] - at[low])
            sums = running_sums(known[np.minimum(tokens >> np.uint32(1), len(sizes))])
            within = at[low : high + 1] - at[low]
            np.add.at(found, documents[low:high], np.diff(sums[within]))
    return found


def _parts(view: SplitView, entries: Int64s, rows: Bools | None) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Parts of documents in rows, some rows at a time: the document, and its tokens ``begin:end`` of the split, int64[n] each."""
    for first in range(0, len(view), ROWS_AT_A_TIME):
        stop = min(first + ROWS_AT_A_TIME, len(view))
        numbers = np.arange(first, stop) if rows is None else np.flatnonzero(rows[first:stop]) + first
        starts, lengths = view.token_ranges(numbers)
        of, document = overlapped(entries, starts, lengths)
        yield document, np.maximum(entries[document], starts[of]), np.minimum(entries[document + 1], (starts + lengths)[of])
