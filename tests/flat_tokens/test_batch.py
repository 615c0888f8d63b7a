"""Sequences become encoded tokens and seq_starts, and come back."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens import MAX_TOKEN_ID, TokenBatch
from tests.refusal import refusal

ids = st.integers(0, MAX_TOKEN_ID)
ragged = st.lists(st.lists(ids, max_size=8), max_size=20)


def flat(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def starts(*entries: int) -> np.ndarray:
    return np.array(entries, np.uint64)


def test_the_worked_example_byte_for_byte():
    batch = TokenBatch.from_sequences([[1, 2], [3, 4, 5], [6, 7, 8]])
    assert batch.encoded_tokens.tobytes() == bytes.fromhex(
        "03000000 04000000 07000000 08000000 0a000000 0d000000 0e000000 10000000"
    )
    assert batch.seq_starts.tobytes() == bytes.fromhex("0000000000000000 0200000000000000 0500000000000000 0800000000000000")


TOO_LARGE = [2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1, 2**64]


@pytest.mark.parametrize("wrong", [*TOO_LARGE, -1, -(2**31), -(2**63), -(2**70), 1.5, np.uint64(2**63), "7", None])
def test_what_is_no_token_id_is_refused(wrong):
    """A fraction is not cut to an integer, text not parsed."""
    for sequence in ([wrong], [wrong, 2]):
        with refusal("token ids"):
            TokenBatch.from_sequences([[1], sequence])


@pytest.mark.parametrize("wrong", [2**31, 2**31 + 5, 2**32 - 1])
def test_a_flat_id_that_does_not_fit_is_refused_before_anything_is_shifted(wrong):
    tokens = flat(1, 2, wrong, 3)
    with refusal(f"token id {wrong} does not fit"):
        TokenBatch.from_flat(tokens, starts(0, 4))
    assert tokens.tolist() == [1, 2, wrong, 3]


def test_flat_tokens_are_encoded_in_place():
    tokens, seq_starts = flat(1, 2, 3), starts(0, 0, 2, 3, 3)
    batch = TokenBatch.from_flat(tokens, seq_starts)
    assert batch.encoded_tokens is tokens
    assert batch.seq_starts is seq_starts
    assert tokens.tolist() == [3, 4, 7]
    assert seq_starts.tolist() == [0, 0, 2, 3, 3]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_arrays_of_any_integer_type_are_sequences(dtype):
    batch = TokenBatch.from_sequences([np.array([1, 127], dtype), [2**31 - 1], np.array([], dtype)])
    assert batch.encoded_tokens.tolist() == [3, 254, 2**32 - 1]


@example([[], [], [0], [], [MAX_TOKEN_ID, 0, MAX_TOKEN_ID], []])
@given(ragged)
def test_every_sentence_of_the_format_holds(sequences):
    """Against plain integers: id * 2 + 1 where the token starts a sequence, id * 2 elsewhere."""
    batch = TokenBatch.from_sequences(sequences)
    assert batch.encoded_tokens.tolist() == [
        token * 2 + (position == 0) for sequence in sequences for position, token in enumerate(sequence)
    ]
    assert (batch.encoded_tokens.dtype, batch.seq_starts.dtype) == (np.uint32, np.uint64)
    assert (batch.token_count, batch.seq_count) == (sum(map(len, sequences)), len(sequences))
    assert batch.seq_starts.tolist() == [sum(len(s) for s in sequences[:i]) for i in range(len(sequences) + 1)]
    assert batch.max_token_id == max((token for sequence in sequences for token in sequence), default=0)
    assert [sequence.tolist() for sequence in batch.sequences()] == sequences
    assert [batch.sequence(i).tolist() for i in range(batch.seq_count)] == sequences
    tokens = flat(*(token for sequence in sequences for token in sequence))
    same = TokenBatch.from_flat(tokens, batch.seq_starts)
    assert same.encoded_tokens.tobytes() == batch.encoded_tokens.tobytes()
    assert same.max_token_id == batch.max_token_id
