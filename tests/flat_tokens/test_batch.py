"""Sequences become encoded tokens and seq_starts, and come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens import MAX_TOKEN_ID, TokenBatch

ids = st.integers(0, MAX_TOKEN_ID)
ragged = st.lists(st.lists(ids, max_size=8), max_size=20)


def flat(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.uint32)


def starts(*entries: int) -> np.ndarray:
    return np.array(entries, np.uint64)


def test_the_worked_example_byte_for_byte() -> None:
    batch = TokenBatch.from_sequences([[1, 2], [3, 4, 5], [6, 7, 8]])
    assert batch.encoded_tokens.tobytes() == bytes.fromhex(
        "03000000 04000000 07000000 08000000 0a000000 0d000000 0e000000 10000000"
    )
    assert batch.seq_starts.tobytes() == bytes.fromhex("0000000000000000 0200000000000000 0500000000000000 0800000000000000")
    assert batch.max_token_id == 8
    assert batch.encoded_tokens.tolist() == [3, 4, 7, 8, 10, 13, 14, 16]
    assert batch.seq_starts.tolist() == [0, 2, 5, 8]


def test_the_training_view_of_the_worked_example() -> None:
    """The format's own way to inputs and targets, from the encoded tokens alone."""
    encoded = TokenBatch.from_sequences([[1, 2], [3, 4, 5], [6, 7, 8]]).encoded_tokens
    targets, is_seq_start = encoded >> 1, encoded & 1
    inputs = np.where(is_seq_start, 0, np.concatenate([[0], targets[:-1]]))
    assert inputs.tolist() == [0, 1, 0, 3, 4, 0, 6, 7]
    assert targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert np.cumsum(is_seq_start).tolist() == [1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("sequences", "encoded", "seq_starts"),
    [
        ([], [], [0]),
        ([[]], [], [0, 0]),
        ([[], [], []], [], [0, 0, 0, 0]),
        ([[], [5]], [11], [0, 0, 1]),
        ([[5], []], [11], [0, 1, 1]),
        ([[5], [], [6]], [11, 13], [0, 1, 1, 2]),
        ([[], [], [5, 6], [], [], [7], []], [11, 12, 15], [0, 0, 0, 2, 2, 2, 3, 3]),
    ],
    ids=["none at all", "one", "only empties", "start", "end", "middle", "everywhere"],
)
def test_empty_sequences_repeat_an_entry_and_mark_no_token(
    sequences: list[list[int]], encoded: list[int], seq_starts: list[int]
) -> None:
    batch = TokenBatch.from_sequences(sequences)
    assert batch.encoded_tokens.tolist() == encoded
    assert batch.encoded_tokens.dtype == np.uint32
    assert batch.seq_starts.tolist() == seq_starts
    assert batch.seq_starts.dtype == np.uint64
    assert [sequence.tolist() for sequence in batch.sequences()] == sequences
    assert (batch.token_count, batch.seq_count) == (len(encoded), len(sequences))
    assert batch.max_token_id == max((i for sequence in sequences for i in sequence), default=0)


def test_the_smallest_and_the_largest_id() -> None:
    batch = TokenBatch.from_sequences([[0], [2**31 - 1, 0, 2**31 - 1]])
    assert batch.encoded_tokens.tolist() == [1, 2**32 - 1, 0, 2**32 - 2]
    assert batch.max_token_id == 2**31 - 1
    assert batch.sequence(1).tolist() == [2**31 - 1, 0, 2**31 - 1]


@pytest.mark.parametrize("wrong", [2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)])
def test_an_id_that_does_not_fit_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        TokenBatch.from_sequences([[1], [wrong, 2]])


@pytest.mark.parametrize("wrong", [2**64, -(2**70), 1.5, np.uint64(2**63), "7", None])
def test_what_is_no_64_bit_integer_is_refused(wrong: object) -> None:
    """A fraction is not cut to an integer, text not parsed."""
    with pytest.raises(ValueError, match="token ids"):
        TokenBatch.from_sequences([[wrong]])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [2**31, 2**31 + 5, 2**32 - 1])
def test_a_flat_id_that_does_not_fit_is_refused_before_anything_is_shifted(wrong: int) -> None:
    tokens = flat(1, 2, wrong, 3)
    with pytest.raises(ValueError, match=f"token id {wrong} does not fit"):
        TokenBatch.from_flat(tokens, starts(0, 4))
    assert tokens.tolist() == [1, 2, wrong, 3]


def test_flat_tokens_are_encoded_in_place() -> None:
    tokens, seq_starts = flat(1, 2, 3), starts(0, 0, 2, 3, 3)
    batch = TokenBatch.from_flat(tokens, seq_starts)
    assert batch.encoded_tokens is tokens
    assert batch.seq_starts is seq_starts
    assert tokens.tolist() == [3, 4, 7]
    assert seq_starts.tolist() == [0, 0, 2, 3, 3]


def test_seq_starts_stay_uint64() -> None:
    """uint64 and int64 together are float64 in numpy, which loses entries above 2**53."""
    for batch in (TokenBatch.from_sequences([[1], [2]]), TokenBatch.from_flat(flat(1, 2), starts(0, 1, 2))):
        assert batch.seq_starts.dtype == np.uint64
        assert batch.encoded_tokens.dtype == np.uint32


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_arrays_of_any_integer_type_are_sequences(dtype: type) -> None:
    batch = TokenBatch.from_sequences([np.array([1, 127], dtype), [2**31 - 1], np.array([], dtype)])
    assert batch.encoded_tokens.tolist() == [3, 254, 2**32 - 1]
    assert batch.seq_starts.tolist() == [0, 2, 3, 3]


@given(ragged)
def test_what_is_encoded_comes_back(sequences: list[list[int]]) -> None:
    batch = TokenBatch.from_sequences(sequences)
    assert [sequence.tolist() for sequence in batch.sequences()] == sequences
    assert [batch.sequence(i).tolist() for i in range(batch.seq_count)] == sequences


@given(ragged)
def test_every_sentence_of_the_format_holds(sequences: list[list[int]]) -> None:
    """Against plain integers: id * 2 + 1 where the token starts a sequence, id * 2 elsewhere."""
    batch = TokenBatch.from_sequences(sequences)
    assert batch.encoded_tokens.tolist() == [
        token * 2 + (position == 0) for sequence in sequences for position, token in enumerate(sequence)
    ]
    assert batch.seq_starts.tolist() == [sum(len(s) for s in sequences[:i]) for i in range(len(sequences) + 1)]
    assert batch.max_token_id == max((token for sequence in sequences for token in sequence), default=0)


@given(ragged)
def test_flat_tokens_and_sequences_give_the_same_batch(sequences: list[list[int]]) -> None:
    expected = TokenBatch.from_sequences(sequences)
    tokens = flat(*(token for sequence in sequences for token in sequence))
    batch = TokenBatch.from_flat(tokens, expected.seq_starts)
    assert batch.encoded_tokens.tobytes() == expected.encoded_tokens.tobytes()
    assert batch.max_token_id == expected.max_token_id
