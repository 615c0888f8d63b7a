"""The order of blocks: every row once an epoch, few blocks at a time, as random as its buffer, by step alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens import BlockOrder, ShuffledLoader
from tests.examples import first_fast
from tests.flat_tokens.rows.rows_by_number import Numbers
from tests.refusal import refusal

sizes = st.integers(1, 12)


def loader_of(length: int, order: BlockOrder, batch_size: int, **options: Any) -> ShuffledLoader:
    return ShuffledLoader(Numbers(length), batch_size, 3, order=order, **options)


@given(length=st.integers(1, 300), block_rows=sizes, buffer_blocks=sizes, streams=st.integers(1, 5), epochs=st.integers(1, 3))
def test_every_epoch_has_every_row_once_but_for_fewer_than_the_streams(length, block_rows, buffer_blocks, streams, epochs):
    length = max(length, streams)
    loader = loader_of(length, BlockOrder(block_rows, buffer_blocks, streams), length // streams * streams, epochs=epochs)
    rows = np.stack([loader.indices(epoch) for epoch in range(epochs)])
    assert loader.epoch_length == rows.shape[1]
    assert loader.left_out == length % streams
    for epoch in rows:
        assert len(set(epoch.tolist())) == len(epoch)
        assert 0 <= epoch.min() <= epoch.max() < length
    if loader.epoch_length > 20:
        assert len({tuple(epoch.tolist()) for epoch in rows}) == epochs or block_rows * buffer_blocks == 1


@given(length=st.integers(40, 300), block_rows=sizes, buffer_blocks=sizes, streams=st.integers(1, 4))
def test_a_stream_reads_the_blocks_of_one_buffer_at_a_time(length, block_rows, buffer_blocks, streams):
    """Its rows, buffer after buffer, are of as many blocks as a buffer has, and of one more cut in two at each end."""
    loader = loader_of(length, BlockOrder(block_rows, buffer_blocks, streams), length // streams * streams)
    mine = loader.indices(0).reshape(streams, -1)
    buffers = -(-mine.shape[1] // (block_rows * buffer_blocks))
    for stream in mine:
        for buffer in np.array_split(stream, buffers):
            assert len(np.unique(buffer // block_rows)) <= buffer_blocks + 2  # and the short block takes less than its place
        counts = np.bincount(stream // block_rows)
        assert (counts[counts > 0] >= block_rows).sum() >= len(stream) // block_rows - 3  # all but those at the ends are whole


@pytest.mark.parametrize("hosts", first_fast([1, 3, 8, 2, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16], 3, every=6))
def test_a_run_goes_on_at_every_step_with_any_number_of_hosts(hosts):
    """With another batch size, too; and hosts whose number divides the streams read blocks of their own."""
    order, streams = BlockOrder(4, 3, hosts), hosts
    whole = loader_of(211, order, 2 * streams, epochs=2)
    stream = np.concatenate([whole.indices(step).reshape(streams, -1) for step in range(len(whole))], axis=1)
    blocks = []
    for host in range(hosts):
        part = whole.shard(host, hosts)
        mine = np.concatenate([part.indices(step) for step in range(len(whole))])
        assert np.array_equal(mine, stream[host])
        blocks.append(set((mine[: len(mine) // 2] // 4).tolist()))
    assert sum(map(len, blocks)) <= 53 + 2 * hosts
    for step in range(len(whole)):
        rest = loader_of(211, order, 3 * streams, epochs=2, start=whole.position(step))
        assert np.array_equal(rest.indices(0).reshape(streams, -1), stream[:, 2 * step : 2 * step + 3])
        assert np.array_equal(rest.indices(len(rest) - 1).reshape(streams, -1)[:, -1], stream[:, -1])


def test_orders_of_blocks_never_change():
    loader = loader_of(50, BlockOrder(4, 3, 2), 10, epochs=2)
    assert [loader.indices(step).tolist() for step in (0, 9)] == [
        [3, 1, 39, 48, 38, 10, 20, 47, 11, 22],
        [21, 5, 6, 22, 27, 47, 45, 46, 42, 41],
    ]


@pytest.mark.parametrize(("block_rows", "buffer_blocks", "batch_size"), [(16, 8, 32), (16, 64, 32), (4, 512, 64), (64, 4, 128)])
def test_a_batch_is_as_random_as_the_buffer_says(block_rows, buffer_blocks, batch_size):
    """The mean over a batch of what is alike within a block varies 1 + (B - 1)(b - 1)/(M - 1) times as much as over random rows,
    for B rows of a batch from buffers of M rows with blocks of b.
    """
    length, buffer_rows = 1 << 16, block_rows * buffer_blocks
    per_block = np.random.default_rng(0).standard_normal(length // block_rows)
    run = ShuffledLoader(Numbers(length), length, 1, epochs=6, order=BlockOrder(block_rows, buffer_blocks))
    rows = np.concatenate([run.indices(epoch) for epoch in range(6)])
    means = per_block[rows // block_rows].reshape(-1, batch_size).mean(axis=1)
    found = means.var() * batch_size / per_block.var()
    expected = 1 + (batch_size - 1) * (block_rows - 1) / (buffer_rows - 1)
    assert found == pytest.approx(expected, rel=0.12)


def test_a_step_of_a_trillion_rows_takes_no_longer_than_one_of_a_thousand():
    loader = loader_of(10**12, BlockOrder(128, 2048, 64), 4096, epochs=None)
    begin = time.process_time()
    for step in (0, 10**8, 10**11):
        assert len(np.unique(loader.indices(step))) == 4096
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ((0, 1), "block_rows is 0, but it is 1 or more"),
        ((1, 0), "buffer_blocks is 0, but it is 1 or more"),
        ((1, 1, 0), "streams is 0, but it is 1 or more"),
        ((1, 1, 11), "the view has 10 rows, fewer than 11 streams"),
        ((1, 1, 4), "batch_size 2 does not divide evenly among 4 streams"),
    ],
)
def test_orders_that_cannot_be_are_refused(wrong, complaint):
    with refusal(complaint):
        loader_of(10, BlockOrder(*wrong), 2)
