"""Document keys are the documented formula, however documents are put together."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flat_tokens.keys
from flat_tokens import TokenBatch, document_keys
from flat_tokens.keys import token_keys

# As documented, in integers.
A = 0x9E3779B97F4A7C15
B = 0xC2B2AE3D27D4EB4F
C = 0xD6E8FEB86659FD93
D = 0xFF51AFD7ED558CCD
MODULUS = 2**64


def mix(x: int) -> int:
    y = x * C % MODULUS
    return (y ^ (y >> 32)) * D % MODULUS


def reference_key(text: bytes) -> int:
    words = [int.from_bytes(text[i : i + 8], "little") for i in range(0, len(text), 8)]
    total = sum(mix(word ^ ((j + 1) * B % MODULUS)) for j, word in enumerate(words))
    return mix((len(text) * A + total) % MODULUS)


def keys(texts: list[bytes]) -> list[int]:
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    found = document_keys(np.frombuffer(b"".join(texts), np.uint8), offsets)
    assert found.dtype == np.uint64
    assert len(found) == len(texts)
    return found.tolist()  # type: ignore[no-any-return]


def test_keys_never_change():
    """Datasets are split by them: another key would move documents between train and validation."""
    assert keys([b"", b"hello", b"The quick brown fox jumps over the lazy dog", "Grüße, 世界!\0".encode()]) == [
        0,
        0x57E3044A96BDE0E8,
        0x253AE40F8B18FA91,
        0xC0F1E31582E0844A,
    ]


@given(texts=st.lists(st.binary(max_size=100), max_size=20), block=st.sampled_from([8, 16, 24, 64]))
def test_keys_do_not_depend_on_where_blocks_end(texts, block):
    """They are the documented formula."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_tokens.keys, "BLOCK_BYTES", block)
        assert keys(texts) == [reference_key(text) for text in texts]


@given(
    texts=st.lists(st.binary(max_size=30), min_size=1, max_size=10), before=st.binary(max_size=20), after=st.binary(max_size=20)
)
def test_offsets_need_not_begin_at_zero(texts, before, after):
    """A slice of an Arrow column shares the buffers of the whole."""
    data = np.frombuffer(before + b"".join(texts) + after, np.uint8)
    offsets = np.cumsum([len(before), *map(len, texts)], dtype=np.int64)
    assert document_keys(data, offsets).tolist() == keys(texts)


# Of sequences that have no identity but their tokens


def keys_of(batches: list[TokenBatch]) -> list[int]:
    return [key for keys in token_keys(batches) for key in keys.tolist()]


def naive(sequences: list[list[int]]) -> list[int]:
    """The keys of the ids' bytes."""
    return keys([np.array(ids, "<u4").tobytes() for ids in sequences])


def cut(sequences: list[list[int]], at: list[int]) -> list[TokenBatch]:
    """All sequences in batches that end at these tokens, as ``Readable.batches`` cuts them."""
    whole = TokenBatch.from_sequences(sequences)
    starts = whole.seq_starts[:-1].tolist()
    edges = [0, *sorted(min(a, whole.token_count) for a in at), whole.token_count]
    batches = []
    for low, high in itertools.pairwise(edges):
        # A sequence begins in the batch of its first token; those behind the last token in the last batch.
        is_last = len(batches) == len(edges) - 2
        mine = [start - low for start in starts if low <= start < high or (is_last and start == high)]
        batches.append(TokenBatch(whole.encoded_tokens[low:high], np.array([*mine, high - low], np.uint64), whole.max_token_id))
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
