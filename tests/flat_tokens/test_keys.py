"""Document keys are the documented formula, however documents are put together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens.keys
from flat_tokens import document_keys

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


def test_texts_about_as_long_as_the_real_block():
    block = flat_tokens.keys.BLOCK_BYTES
    rng = np.random.default_rng(0)
    texts = [rng.bytes(length) for length in (3, block - 1, block, block + 1, 0, 5, 2 * block + 13, block - 8, 8, 1)]
    assert keys(texts) == [reference_key(text) for text in texts]


@given(
    texts=st.lists(st.binary(max_size=30), min_size=1, max_size=10), before=st.binary(max_size=20), after=st.binary(max_size=20)
)
def test_offsets_need_not_begin_at_zero(texts, before, after):
    """A slice of an Arrow column shares the buffers of the whole."""
    data = np.frombuffer(before + b"".join(texts) + after, np.uint8)
    offsets = np.cumsum([len(before), *map(len, texts)], dtype=np.int64)
    assert document_keys(data, offsets).tolist() == keys(texts)


def test_the_input_is_not_changed():
    data = np.frombuffer(b"read-only bytes", np.uint8)
    document_keys(data, np.array([0, 9, 15]))
    assert data.tobytes() == b"read-only bytes"
