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


def keys(texts: list[bytes], before: bytes = b"", after: bytes = b"") -> list[int]:
    offsets = np.cumsum([len(before), *map(len, texts)], dtype=np.int64)
    found = document_keys(np.frombuffer(before + b"".join(texts) + after, np.uint8), offsets)
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


some = st.binary(max_size=20)
blocks = st.sampled_from([8, 16, 24, 64])


@given(texts=st.lists(st.binary(max_size=100), max_size=20), block=blocks, before=some, after=some)
def test_keys_do_not_depend_on_where_blocks_end(texts, block, before, after):
    """They are the documented formula, of a slice of an Arrow column too, which shares the buffers of the whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_tokens.keys, "BLOCK_BYTES", block)
        assert keys(texts, before, after) == [reference_key(text) for text in texts]


# Of sequences that have no identity but their tokens


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


@example([[], [1, 2], [1, 2], [1, 2, 0]], [], 8)
@given(
    sequences=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=12), max_size=8),
    at=st.lists(st.integers(0, 60), max_size=6),
    block=blocks,
)
def test_keys_do_not_depend_on_where_batches_are_cut(sequences, at, block):
    """They are those of the ids' bytes."""
    assert list(token_keys([])) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_tokens.keys, "BLOCK_BYTES", block)
        found = [key for keys in token_keys(cut(sequences, at)) for key in keys.tolist()]
    assert found == keys([np.array(ids, "<u4").tobytes() for ids in sequences])
