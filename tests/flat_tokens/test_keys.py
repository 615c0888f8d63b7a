"""Document keys are the documented formula, however documents are put together."""

import numpy as np
import pytest
from hypothesis import given
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


@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_keys_do_not_depend_on_where_batches_are_cut(monkeypatch, size, block):
    """They are those of the ids' bytes. Batches end at any token, as those of ``Readable.batches`` may."""
    monkeypatch.setattr(flat_tokens.keys, "BLOCK_BYTES", block)
    sequences = [[], [1, 2], [1, 2], [1, 2, 0], [*range(2**31 - 30, 2**31)], [], [7], []]
    encoded, starts = TokenBatch.from_sequences(sequences)[:2]
    batches = []
    for low in range(0, len(encoded), size):
        high = min(low + size, len(encoded))
        # A sequence begins in the batch of its first token; those after the last token in the last batch.
        mine = starts[:-1][(starts[:-1] >= low) & ((starts[:-1] < high) | (high == len(encoded)))]
        batches.append(TokenBatch(encoded[low:high], np.append(mine, np.uint64(high)) - np.uint64(low), 2**31 - 1))
    found = [key for keys in token_keys(batches) for key in keys.tolist()]
    assert found == keys([np.array(ids, "<u4").tobytes() for ids in sequences])
    assert list(token_keys([])) == []
