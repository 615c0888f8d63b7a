"""Hosts with equal costs of attention: the same rows of each step, dealt to the hosts by the squares of documents' lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import BlockOrder, FillInMiddle, FlatTokens, ShuffledLoader
from flat_tokens.rows.loader import dealt
from tests.examples import NIGHTLY, examples
from tests.flat_tokens.rows.rows_by_number import Numbers
from tests.made import write_sequences


@pytest.fixture
def train(tmp_path: Path) -> FlatTokens:
    lengths = np.random.default_rng(0).lognormal(2.5, 1.2, 250).astype(int) + 1
    return flat_tokens.open(
        write_sequences(tmp_path / "d", [[d + 1] * min(size, 64) for d, size in enumerate(lengths.tolist())])
    ).train


@given(costs=st.lists(st.integers(0, 1000), max_size=40), hosts=st.integers(1, 9))
@examples(200)
def test_the_dearest_row_goes_to_the_host_with_the_least_cost(costs, hosts):
    counts = np.diff(np.arange(hosts + 1) * len(costs) // hosts)
    sums, given_rows, expected = [0] * hosts, [0] * hosts, {}
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        host = min((host for host in range(hosts) if given_rows[host] < counts[host]), key=lambda host: (sums[host], host))
        expected[row] = host
        sums[host] += costs[row]
        given_rows[host] += 1
    assert dealt(np.array(costs, np.int64), counts).tolist() == [expected[row] for row in range(len(costs))]


@pytest.mark.parametrize("settings", [{}, {"fit": "best"}, {"fit": "crop"}, {"split_across_pack": True}, {"pad_to": 4}], ids=str)
def test_costs_are_the_squares_of_the_segments(train, settings):
    view = train.packed_documents(64, **settings)
    rows = np.arange(len(view))[::-1]
    expected = [int((np.diff(view[row].cu_seqlens).astype(int) ** 2).sum()) for row in rows.tolist()]
    assert view.attention_costs(rows).tolist() == expected


@pytest.mark.parametrize(("order", "drop_last"), [("shuffled", True), (BlockOrder(8, 4, 2), False)], ids=str)
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=NIGHTLY)], ids=["some", "all"])
def test_hosts_share_the_same_rows_of_every_step(train, order, drop_last, is_whole):
    view = train.packed_documents(64, fim=FillInMiddle(0.5, 0.5, 901, 902, 903), too_long="cut")
    settings = {"epochs": 2, "order": order, "drop_last": drop_last}
    plain, balanced = (ShuffledLoader(view, 16, 3, balance=balance, **settings) for balance in (False, True))
    worse = better = 0.0
    for step in range(len(plain)):
        batch = plain[step].tokens.tolist()
        assert balanced[step].tokens.tolist() == batch
        for hosts in (1, 2, 4, 8, 16) if is_whole else ((4, 1, 4, 2, 4, 8, 4, 16)[step % 8],):
            parts = [balanced.shard(host, hosts) for host in range(hosts)]
            later = ShuffledLoader(view, 16, 3, balance=True, start=plain.position(step), **settings)
            rows = [part.indices(step).tolist() for part in parts]
            assert rows == [later.shard(host, hosts).indices(0).tolist() for host in range(hosts)]
            assert [len(its) for its in rows] == [len(plain.shard(host, hosts).indices(step)) for host in range(hosts)]
            assert sorted(row for its in rows for row in its) == sorted(plain.indices(step).tolist())
            if hosts == 4:
                assert sorted(row for part in parts for row in part[step].tokens.tolist()) == sorted(batch)
                worse += max(view.attention_costs(plain.shard(host, hosts).indices(step)).sum() for host in range(hosts))
                better += max(view.attention_costs(part.indices(step)).sum() for part in parts)
    assert better < worse
    visits = balanced.shard(0, 2).visits(np.arange(len(view)))
    assert all(plain.indices(step)[row] == of for step, row, of in zip(visits.step, visits.batch_row, visits.row, strict=True))


def test_views_without_documents_are_refused(train):
    for view in (train.packed(64), Numbers(8)):
        with pytest.raises(TypeError, match="balance is for packed_documents"):
            ShuffledLoader(view, 2, balance=True)
