"""Attention within documents: masks of flex attention and bounds of segments, against a dense mask made token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.flat_tokens.rows.test_crop import written
from tests.refusal import refusal

needs_torch = pytest.mark.needs("torch")
needs_jax = pytest.mark.needs("jax")

VIEWS: list[tuple[str, dict[str, Any]]] = [
    ("packed", {}),
    ("packed", {"bos": 7}),
    ("blocks", {}),
    ("documents", {}),
    ("packed_documents", {"too_long": "cut"}),
    ("packed_documents", {"split_across_pack": True}),
    ("packed_documents", {"fit": "best", "split_across_pack": True}),
    ("packed_documents", {"fit": "crop"}),
    ("packed_documents", {"fit": "crop", "on_crop": "keep"}),
]


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


def bounds_of(attends: np.ndarray[Any, Any], batch: Any) -> list[int]:
    """Places where a token does not attend to the one before; padding of a pack counts as one segment."""
    ids = batch.document_ids if hasattr(batch, "document_ids") else np.cumsum(batch.is_seq_start, axis=-1)
    (row,) = ids
    return [0, *(k for k in range(1, len(row)) if row[k] != row[k - 1]), len(row)]


@needs_torch
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any),
    length=st.integers(2, 24),
    block_size=st.integers(1, 9),
    kind=st.integers(0, len(VIEWS) - 1),
)
@examples(150)
def test_masks_are_the_dense_one(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, block_size: int, kind: int
) -> None:
    import torch
    from torch.nn.attention.flex_attention import create_mask

    name, settings = VIEWS[kind]
    view = getattr(written(tmp_path_factory.mktemp("attention") / "d", lengths), name)(length, **settings)
    if not len(view):
        return
    numbers = np.random.default_rng(0).integers(0, len(view), 3)
    batch = view.batch(numbers)
    expected = dense(batch)
    assert np.array_equal(batch.mask(), expected)
    as_torch = getattr(view.tokens, name)(
        length, **{key: value for key, value in settings.items() if key != "bos"}, framework="torch"
    )
    for one in (batch, as_torch.batch(numbers)):
        assert np.array_equal(create_mask(one.mask_mod, 3, 1, length, length, device="cpu")[:, 0].numpy(), expected)
        made = one.block_mask(block_size)
        assert made.shape == (3, 1, length, length)
        assert np.array_equal(_by_blocks(made, expected, block_size), expected)
    row = view[int(numbers[0])]
    assert np.array_equal(row.mask(), expected[0])
    assert np.array_equal(create_mask(row.mask_mod, 1, 1, length, length, device="cpu")[0, 0].numpy(), expected[0])
    bounds = [bounds_of(expected[k : k + 1], view.batch(numbers[k : k + 1])) for k in range(3)]
    whole = [0, *(k * length + bound for k, its in enumerate(bounds) for bound in its[1:])]
    assert batch.cu_seqlens.tolist() == whole
    assert batch.max_seqlen == max(np.diff(whole))
    most = max(map(len, bounds))
    for count in {most, most + 3, length + 1, length + 5}:
        if count < most:
            continue
        padded = batch.padded_cu_seqlens(count)
        assert padded.dtype == np.int32
        assert padded.tolist() == [its + [length] * (count - len(its)) for its in bounds]
        assert row.padded_cu_seqlens(count).tolist() == padded[0].tolist()
        assert as_torch.batch(numbers).padded_cu_seqlens(count).tolist() == padded.tolist()
        assert as_torch.batch(numbers).padded_cu_seqlens(count).dtype == torch.int32
    assert batch.padded_cu_seqlens().shape == (3, length + 1)
    if most > 2:
        with refusal(f"a row has {most} bounds of segments. Take count={most}"):
            batch.padded_cu_seqlens(most - 1)


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
def test_attention_with_the_block_mask_is_that_with_the_dense_one(tmp_path: Path) -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    train = written(tmp_path / "d", np.random.default_rng(0).integers(0, 200, 60).tolist())
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 256, 8)
    for view in (train.packed(256), train.blocks(256), train.packed_documents(256), train.packed_documents(256, fit="crop")):
        batch = view.batch([0, 3])
        expected = scaled_dot_product_attention(query, key, value, attn_mask=torch.as_tensor(batch.mask())[:, None])
        found = flex_attention(query, key, value, block_mask=batch.block_mask())
        assert torch.allclose(found, expected, atol=1e-5)
        theirs = create_block_mask(batch.mask_mod, 2, None, 256, 256, device="cpu")
        assert torch.equal(batch.block_mask().to_dense(), theirs.to_dense())


@pytest.mark.slow
@needs_jax
def test_bounds_of_jax_arrays_are_those_of_numpy(tmp_path: Path) -> None:
    train = written(tmp_path / "d", [5, 3, 0, 9, 2, 7])
    for name, settings in VIEWS:
        expected = getattr(train, name)(8, **settings).batch([1, 0])
        found = getattr(train, name)(8, **settings, framework="jax").batch([1, 0])
        assert found.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
        assert found.padded_cu_seqlens(9).tolist() == expected.padded_cu_seqlens(9).tolist()
        assert np.array_equal(found.mask(), expected.mask())
