"""Permutations computed index by index: each number once, no pattern left, the same for ever. The order of blocks: few blocks
at a time, by step alone.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens import BlockOrder, ReferenceOrder, ShuffledLoader
from flat_tokens.annotations import UInt64s
from flat_tokens.rows.orders import KeyedPermutation, derive_keys, reference_permutation
from tests.flat_tokens.rows.rows_by_number import Numbers
from tests.refusal import refusal


def permuted(length: int, seed: int = 0, *numbers: int) -> UInt64s:
    return KeyedPermutation(length)(np.arange(length, dtype=np.uint64), derive_keys(seed, *numbers))


# The keyed permutation


def test_orders_never_change():
    """A run that goes on with a later version of this library would otherwise see samples twice."""
    assert derive_keys(0).tolist() == [0xE5C58D33F964FBBD]
    assert derive_keys(1, 2).tolist() == [0x62ECFCDBFD5A58A6]
    assert permuted(1).tolist() == [0]
    assert permuted(10).tolist() == [5, 2, 1, 8, 4, 3, 9, 7, 0, 6]
    assert permuted(10, 0, 1).tolist() == [5, 9, 7, 1, 8, 6, 4, 0, 3, 2]
    far = KeyedPermutation(10**12 + 39)(np.array([0, 1, 2, 10**12 + 38], np.uint64), derive_keys(2**64 - 1, 3))
    assert far.tolist() == [769142450929, 317743346445, 933158284054, 374021553709]


@pytest.mark.parametrize(
    ("length", "found"),
    [
        (255, [190, 175, 121]),
        (256, [116, 127, 164]),
        (601, [7, 199, 585]),
        (2**48, [220548512795115, 117963900944000, 171858952935620]),
    ],
)
def test_each_number_goes_where_the_documented_network_sends_it(length, found):
    """Numbers from a program that follows the documentation in integers, with the more rounds of short permutations."""
    numbers, keys = np.array([0, 1, length - 1]), derive_keys(3, 1)
    places = KeyedPermutation(length)(numbers, keys)
    assert (places.dtype, places.tolist()) == (np.int64, found)
    assert KeyedPermutation(length).inverse(places, keys).tolist() == numbers.tolist()


@pytest.mark.parametrize("length", [0, -1, 2**48 + 1])
def test_lengths_that_cannot_be_permuted_are_refused(length):
    with refusal(f"permutations of 1 to {2**48} numbers, not of {length}"):
        KeyedPermutation(length)


# The reference's


def test_the_references_permutation():
    assert reference_permutation(0, 10).tolist() == [0, 4, 6, 5, 2, 1, 9, 3, 7, 8]
    assert reference_permutation(0, 10).dtype == np.int64


def philox_swaps(seed: int, n: int) -> list[int]:
    drawn = (np.random.Philox(seed).random_raw(n) % (np.arange(n, dtype=np.uint64) + np.uint64(1))).tolist()
    p = list(range(n))
    for i in range(n - 1, -1, -1):
        p[i], p[drawn[i]] = p[drawn[i]], p[i]
    return p


@pytest.mark.parametrize(("seed", "n"), [(3, 0), (2**70, 300), (3, 10_000), (3, 100_003)])
def test_it_is_what_swapping_one_by_one_gives(seed, n):
    assert reference_permutation(seed, n).tolist() == philox_swaps(seed, n)


@pytest.mark.parametrize("n", [-1, 2**32 + 1])
def test_what_does_not_fit_is_refused_before_memory_is_taken(n):
    with refusal(f"up to 2\\*\\*32 numbers at a time, not {n}"):
        reference_permutation(0, n)


sizes = st.integers(1, 12)


def loader_of(length: int, order: BlockOrder, batch_size: int, **options: Any) -> ShuffledLoader:
    return ShuffledLoader(Numbers(length), batch_size, 3, order=order, **options)


@given(length=st.integers(40, 300), block_rows=sizes, buffer_blocks=sizes, streams=st.integers(1, 4))
def test_a_stream_reads_the_blocks_of_one_buffer_at_a_time(length, block_rows, buffer_blocks, streams):
    """Its rows, buffer after buffer, are of as many blocks as a buffer has, and of one more cut in two at each end. Each of as
    many hosts has a stream of its own.
    """
    loader = loader_of(length, BlockOrder(block_rows, buffer_blocks, streams), length // streams * streams)
    buffers = -(-(length // streams) // (block_rows * buffer_blocks))
    for host in range(streams):
        stream = loader.shard(host, streams).indices(0)
        for buffer in np.array_split(stream, buffers):
            assert len(np.unique(buffer // block_rows)) <= buffer_blocks + 2  # and the short block takes less than its place
        counts = np.bincount(stream // block_rows)
        assert (counts[counts > 0] >= block_rows).sum() >= len(stream) // block_rows - 3  # all but those at the ends are whole


def test_orders_of_blocks_never_change():
    loader = loader_of(50, BlockOrder(4, 3, 2), 10, epochs=2)
    assert [loader.indices(step).tolist() for step in (0, 9)] == [
        [3, 1, 39, 48, 38, 10, 20, 47, 11, 22],
        [21, 5, 6, 22, 27, 47, 45, 46, 42, 41],
    ]


@pytest.mark.parametrize(
    ("kind", "wrong", "complaint"),
    [
        (BlockOrder, (0, 1), "block_rows is 0, but it is 1 or more"),
        (BlockOrder, (1, 0), "buffer_blocks is 0, but it is 1 or more"),
        (BlockOrder, (1, 1, 0), "streams is 0, but it is 1 or more"),
        (BlockOrder, (1, 1, 11), "the view has 10 rows, fewer than 11 streams"),
        (BlockOrder, (1, 1, 4), "batch_size 2 does not divide evenly among 4 streams"),
        (ReferenceOrder, (0, 1, 1), "streams is 0, but it is 1 or more"),
        (ReferenceOrder, (1, 0, 1), "read_blocks_per_shuffle_buffer is 0"),
        (ReferenceOrder, (1, 1, 0), "sequences_per_read_block is 0"),
    ],
)
def test_orders_that_cannot_be_are_refused(kind, wrong, complaint):
    with refusal(complaint):
        loader_of(10, kind(*wrong), 2)
