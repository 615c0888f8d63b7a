"""Keys of sequences that have no identity but their tokens."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens import TokenBatch, document_keys
from flat_tokens.keys import token_keys


def keys_of(batches: list[TokenBatch]) -> list[int]:
    return [key for keys in token_keys(batches) for key in keys.tolist()]


def naive(sequences: list[list[int]]) -> list[int]:
    """The keys of the ids' bytes, one sequence after the other."""
    keys = []
    for ids in sequences:
        data = np.frombuffer(np.array(ids, "<u4").tobytes(), np.uint8)
        keys.append(int(document_keys(data, np.array([0, len(data)]))[0]))
    return keys


def cut(sequences: list[list[int]], at: list[int]) -> list[TokenBatch]:
    """All sequences in batches that end at these tokens, as ``Readable.batches`` cuts them."""
    whole = TokenBatch.from_sequences(sequences)
    starts = whole.seq_starts.astype(np.int64)
    edges = [0, *sorted(min(a, whole.token_count) for a in at), whole.token_count]
    batches, begun = [], 0
    for low, high in itertools.pairwise(edges):
        # A sequence begins in the batch of its first token; those behind the last token in the last batch.
        last = len(starts) - 1 if high == whole.token_count and low == edges[-2] else int(np.searchsorted(starts[:-1], high))
        last = max(last, begun)
        mine = np.append(starts[begun:last], high) - low
        batches.append(TokenBatch(whole.encoded_tokens[low:high], mine.astype(np.uint64), whole.max_token_id))
        begun = last
    return batches


def test_of_no_batches_there_are_no_keys():
    assert keys_of([]) == []


@example([[], [1, 2], [1, 2], [1, 2, 0]], [])
@given(
    sequences=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=12), max_size=8),
    at=st.lists(st.integers(0, 60), max_size=6),
)
def test_keys_do_not_depend_on_where_batches_are_cut(sequences, at):
    assert keys_of(cut(sequences, at)) == naive(sequences)


def test_a_long_sequence_in_many_batches():
    """Longer than what is hashed at a time."""
    ids = np.random.default_rng(1).integers(0, 50257, 200_001).tolist()
    assert keys_of(cut([[5], ids, [7]], [70_000, 70_001, 190_000])) == naive([[5], ids, [7]])
