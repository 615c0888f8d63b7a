"""Attention within documents: masks of flex attention and bounds of segments, against a dense mask made token by token."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import VIEWS
from tests.flat_tokens.rows.test_crop import written
from tests.refusal import refusal

needs_torch = pytest.mark.needs("torch")

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any)


def dense(batch: Any) -> np.ndarray[Any, Any]:
    """Token by token: which attends to which. A document's tokens have its id; a token of padding sees itself alone."""
    if hasattr(batch, "document_ids"):
        documents = batch.document_ids.copy()
        padding = documents < 0
    else:
        documents = np.cumsum(batch.is_seq_start, axis=-1)
        padding = np.zeros(documents.shape, bool)
    rows, length = documents.shape
    attends = np.zeros((rows, length, length), bool)
    for row in range(rows):
        for query in range(length):
            for key in range(query + 1):
                same = documents[row, query] == documents[row, key] and not padding[row, query]
                attends[row, query, key] = same or query == key
    return attends


def bounds_of(batch: Any) -> list[int]:
    """Places where a token does not attend to the one before; padding of a pack counts as one segment."""
    ids = batch.document_ids if hasattr(batch, "document_ids") else np.cumsum(batch.is_seq_start, axis=-1)
    (row,) = ids
    return [0, *(k for k in range(1, len(row)) if row[k] != row[k - 1]), len(row)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """A view, three of its rows, and the same view of torch tensors."""
    name, settings = draw(st.sampled_from([*VIEWS, ("packed", {"bos": 7})]))
    length, train = draw(st.integers(2, 24)), written(draw(LENGTHS))
    if "overlap" in settings and train.token_count < length:
        settings = {}
    view = getattr(train, name)(length, **settings)
    assume(len(view))
    as_torch = {key: value for key, value in settings.items() if key != "bos"}
    return view, np.random.default_rng(0).integers(0, len(view), 3), partial(getattr(view.tokens, name), length, **as_torch)


@given(batches())
@examples(150)
def test_masks_and_bounds_are_the_dense_one(drawn):
    view, numbers, _ = drawn
    batch, row = view.batch(numbers), view[int(numbers[0])]
    expected = dense(batch)
    length = expected.shape[-1]
    assert np.array_equal(batch.mask(), expected)
    assert np.array_equal(row.mask(), expected[0])
    bounds = [bounds_of(view.batch(numbers[k : k + 1])) for k in range(3)]
    if hasattr(batch, "document_ids"):
        same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
        assert np.array_equal(batch.mask(causal_padding=True), same & np.tri(length, dtype=bool))
        assert [sizes[sizes > 0].tolist() for sizes in batch.seq_lens] == [np.diff(its).tolist() for its in bounds]
    whole = [0, *(k * length + bound for k, its in enumerate(bounds) for bound in its[1:])]
    assert batch.cu_seqlens.tolist() == whole
    assert batch.max_seqlen == max(np.diff(whole))
    most = max(map(len, bounds))
    for count in (most, most + 3, length + 1 + most):
        padded = batch.padded_cu_seqlens(count)
        assert padded.dtype == np.int32
        assert padded.tolist() == [its + [length] * (count - len(its)) for its in bounds]
        assert row.padded_cu_seqlens(count).tolist() == padded[0].tolist()
    assert batch.padded_cu_seqlens().shape == (3, length + 1)
    if most > 2:
        with refusal(f"a row has {most} bounds of segments. Take count={most}"):
            batch.padded_cu_seqlens(most - 1)


@needs_torch
@given(batches(), st.integers(1, 9))
@examples(150)
def test_masks_of_torch_are_the_dense_one(drawn, block_size):
    import torch
    from torch.nn.attention.flex_attention import create_mask

    view, numbers, as_torch = drawn
    batch, tensors, row = view.batch(numbers), as_torch(framework="torch").batch(numbers), view[int(numbers[0])]
    expected = dense(batch)
    length = expected.shape[-1]
    for one in (batch, tensors):
        assert np.array_equal(create_mask(one.mask_mod, 3, 1, length, length, device="cpu")[:, 0].numpy(), expected)
        made = one.block_mask(block_size)
        assert made.shape == (3, 1, length, length)
        assert np.array_equal(_by_blocks(made, expected, block_size), expected)
    assert np.array_equal(create_mask(row.mask_mod, 1, 1, length, length, device="cpu")[0, 0].numpy(), expected[0])
    assert tensors.padded_cu_seqlens().tolist() == batch.padded_cu_seqlens().tolist()
    assert tensors.padded_cu_seqlens().dtype == torch.int32


def _by_blocks(made: Any, expected: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """The mask that a kernel computes: all of a full block, ``mask_mod`` in a partial one, nothing in others."""
    rows, length, _ = expected.shape
    found, blocks = np.zeros_like(expected), -(-length // size)
    for row in range(rows):
        for query in range(blocks):
            its = slice(query * size, min((query + 1) * size, length))
            partial = made.kv_indices[row, 0, query, : made.kv_num_blocks[row, 0, query]].tolist()
            full = made.full_kv_indices[row, 0, query, : made.full_kv_num_blocks[row, 0, query]].tolist()
            assert not set(partial) & set(full)
            for key in partial:
                keys = slice(key * size, min((key + 1) * size, length))
                assert expected[row, its, keys].any(), "a partial block has something to compute"
                assert not expected[row, its, keys].all() or its.stop - its.start < size or key == query, "or it is a full one"
                found[row, its, keys] = expected[row, its, keys]
            for key in full:
                found[row, its, key * size : (key + 1) * size] = True
    return found


@needs_torch
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_with_the_block_mask_is_that_with_the_dense_one():
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    train = written(np.random.default_rng(0).integers(0, 200, 60).tolist())
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 256, 8)
    for view in (train.packed(256), train.packed_documents(256)):
        batch = view.batch([0, 3])
        expected = scaled_dot_product_attention(query, key, value, attn_mask=torch.as_tensor(batch.mask())[:, None])
        found = flex_attention(query, key, value, block_mask=batch.block_mask())
        assert torch.allclose(found, expected, atol=1e-5)
