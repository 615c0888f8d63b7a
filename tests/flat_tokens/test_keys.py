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


def test_keys_never_change() -> None:
    """Datasets are split by them: another key would move documents between train and validation."""
    assert keys([b"", b"hello", b"The quick brown fox jumps over the lazy dog", "Grüße, 世界!\0".encode()]) == [
        0,
        0x57E3044A96BDE0E8,
        0x253AE40F8B18FA91,
        0xC0F1E31582E0844A,
    ]


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_keys_are_the_documented_formula(texts: list[bytes]) -> None:
    assert keys(texts) == [reference_key(text) for text in texts]


@pytest.mark.parametrize("length", range(101))
def test_every_length_to_a_hundred(length: int) -> None:
    text = np.random.default_rng(length).bytes(length)
    assert keys([text]) == keys([text, b"x"])[:1] == keys([b"x", text])[1:] == [reference_key(text)]


@given(texts=st.lists(st.binary(max_size=100), max_size=20), block=st.sampled_from([8, 16, 24, 64]))
def test_keys_do_not_depend_on_where_blocks_end(texts: list[bytes], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_tokens.keys, "BLOCK_BYTES", block)
        assert keys(texts) == [reference_key(text) for text in texts]


@pytest.mark.parametrize("before", [b"", b"x", b"x" * 15, b"x" * 16])
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 1000])
def test_texts_about_as_long_as_a_block(monkeypatch: pytest.MonkeyPatch, length: int, before: bytes) -> None:
    monkeypatch.setattr(flat_tokens.keys, "BLOCK_BYTES", 16)
    texts = [before, np.random.default_rng(length).bytes(length), b"", b"after", b""]
    assert keys(texts) == [reference_key(text) for text in texts]


def test_texts_about_as_long_as_the_real_block() -> None:
    block = flat_tokens.keys.BLOCK_BYTES
    rng = np.random.default_rng(0)
    texts = [rng.bytes(length) for length in (3, block - 1, block, block + 1, 0, 5, 2 * block + 13, block - 8, 8, 1)]
    assert keys(texts) == [reference_key(text) for text in texts]


@given(data=st.data(), texts=st.lists(st.binary(max_size=30), max_size=20))
def test_keys_do_not_depend_on_how_texts_are_batched(data: st.DataObject, texts: list[bytes]) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=4)))
    pieces = [texts[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(texts)], strict=True)]
    assert [key for piece in pieces for key in keys(piece)] == keys(texts)


@given(
    texts=st.lists(st.binary(max_size=30), min_size=1, max_size=10), before=st.binary(max_size=20), after=st.binary(max_size=20)
)
def test_offsets_need_not_begin_at_zero(texts: list[bytes], before: bytes, after: bytes) -> None:
    """A slice of an Arrow column shares the buffers of the whole."""
    data = np.frombuffer(before + b"".join(texts) + after, np.uint8)
    offsets = np.cumsum([len(before), *map(len, texts)], dtype=np.int64)
    assert document_keys(data, offsets).tolist() == keys(texts)


def test_no_documents_have_no_keys() -> None:
    assert document_keys(np.empty(0, np.uint8), np.zeros(1, np.int64)).tolist() == []


def test_the_input_is_not_changed() -> None:
    data = np.frombuffer(b"read-only bytes", np.uint8)
    document_keys(data, np.array([0, 9, 15]))
    assert data.tobytes() == b"read-only bytes"


def test_zero_bytes_at_the_end_count() -> None:
    """The last word is filled up with zeros, but the length is part of the key."""
    assert len(set(keys([b"", b"\0", b"\0" * 7, b"\0" * 8, b"\0" * 9, b"a", b"a\0"]))) == 7


def test_equal_texts_have_equal_keys_and_word_order_counts() -> None:
    same, again, swapped = keys([b"abcdefghijklmnop", b"abcdefghijklmnop", b"ijklmnopabcdefgh"])
    assert same == again != swapped
