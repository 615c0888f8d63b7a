"""Small runs that act as large ones: the shares and the epochs of each source are those of the large run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import FillInMiddle, Ledger, Mixture, Schedule
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import Numbers
from tests.made import write_sequences
from tests.refusal import refusal


@given(
    rows=st.lists(st.integers(50, 3000), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    factor=st.integers(1, 12),
    seed=st.integers(0, 5),
)
@examples(100)
def test_epochs_and_shares_are_those_of_the_large_run(rows, weights, factor, seed):
    steps = 60
    sources = {str(k): (Numbers(count, 10_000 * k), weights[k]) for k, count in enumerate(rows)}
    large = Mixture(sources, 32, seed)
    small = large.scaled(budget=steps * 32 * 2, target=steps * factor * 32 * 2)
    assert len(small) == steps
    drawn = small.drawn(steps)
    counts = np.array([len(view) for view in small.views])
    assert (abs(counts * factor - rows) <= factor / 2 + 1e-9).all() or (counts == 1).any()
    # Within a block of 2**14 samples the sources are in a random order, so that a part of it has about their shares.
    expected = large.drawn(steps * factor) / factor
    assert (abs(drawn - expected) <= 7 * np.sqrt(expected) + 2).all()
    found = [small[step] for step in range(steps)]
    for k, count in enumerate(counts):
        numbers = np.concatenate([batch.samples.number[batch.source == k] for batch in found]) - 10_000 * k
        times = np.bincount(numbers, minlength=rows[k])
        assert len(numbers) == drawn[k]
        assert times.max() <= -(-drawn[k] // count)
        assert (times > 0).sum() == min(drawn[k], count)
    later = Mixture.scaled(large, budget=steps * 32 * 2, target=steps * factor * 32 * 2)
    assert later.digest(7) == small.digest(7)
    parts = [small.shard(host, 4)[9].samples.number for host in range(4)]
    assert np.array_equal(np.concatenate(parts), small[9].samples.number)


def test_a_larger_budget_has_the_rows_of_a_smaller_one():
    mixture = Mixture({"a": (Numbers(500), 1)}, 8, 3)
    small, larger = (mixture.scaled(budget=budget, target=10_000) for budget in (1000, 2500))
    assert (len(small.views[0]), len(larger.views[0])) == (50, 125)
    assert set(small.views[0].rows(np.arange(50))) <= set(larger.views[0].rows(np.arange(125)))


def test_schedules_and_limits_are_compressed():
    assert list(Schedule([(0, 1), (15, 2), (1000, 3)]).scaled(1, 10).points) == [(0, 1), (2, 2), (100, 3)]
    sources = {"a": (Numbers(1000), Schedule([(0, 1), (1000, 3)])), "b": (Numbers(600), 1, 2)}
    small = Mixture(sources, 16, 0).scaled(budget=100 * 32, target=1000 * 32)
    large = Mixture(sources, 16, 0)
    assert abs(small.drawn(50) * 10 - large.drawn(500)).max() <= 110  # stairs of a schedule are 1,024 samples or more
    assert small.drawn(len(small))[1] <= 120
    ended = Mixture({"b": (Numbers(600), 1, 2)}, 16, 0).scaled(budget=1000 * 32, target=10_000 * 32)
    assert len(ended) == -(-60 * 2 // 16)


def test_documents_are_seen_in_the_rows_of_the_sample(tmp_path):
    view = flat_tokens.open(write_sequences(tmp_path / "d", [[d + 1] * 9 for d in range(200)])).train.packed(
        12, fim=FillInMiddle(0.5, 0.5, 901, 902, 903)
    )
    small = Mixture({"a": (view, 1)}, 8, 3).scaled(budget=12 * 8 * 20, target=12 * 8 * 60)
    assert len(small.views[0]) == len(view) // 3
    found = small.seen(np.arange(200))
    seen = {(document, step, row) for document, step, row in zip(found.asked, found.step, found.batch_row, strict=True)}
    looked = {
        (token - 1, step, row)
        for step in range(len(small))
        for row, tokens in enumerate(small[step].samples.targets.tolist())
        for token in tokens
        if token < 900
    }
    assert looked <= seen
    assert {step for _, step, _ in seen} <= set(range(20))


def test_runs_that_cannot_be_scaled_are_refused(tmp_path):
    mixture = Mixture({"a": (Numbers(500), 1)}, 8, 3)
    with refusal("budget is 200, but it is at most the target, 100"):
        mixture.scaled(budget=200, target=100)
    with refusal("budget is 15, fewer tokens than a batch of 8 rows of 2"):
        mixture.scaled(budget=15, target=100)
    with refusal("the mixture is of one host: scale it before"):
        mixture.shard(0, 2).scaled(budget=50, target=100)
    ledger = Ledger.create(tmp_path / "run.json", {"a": (Numbers(500), 1), "b": (Numbers(500), 1)}, 8)
    ledger.edit(4, {"a": 1})
    with refusal("the mixture was edited"):
        ledger.mixture().scaled(budget=50, target=100)
