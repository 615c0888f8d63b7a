"""Mixtures that change: schedules, limits of epochs, edits. No sample of a source is repeated or left out because of them. Small
runs that act as large ones: the shares and the epochs of each source are those of the large run.
"""

import itertools
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens import FillInMiddle, Ledger, Mixture, Schedule
from flat_tokens.rows import phases
from flat_tokens.rows.orders import KeyedPermutation, derive_keys
from flat_tokens.rows.phases import Edit
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import Numbers, places_of, same_arrays
from tests.made import split_of
from tests.refusal import refusal


@contextmanager
def blocks_of(samples: int, stair: int = 8) -> Iterator[None]:
    """Blocks and stairs so short that a short run has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "MIXTURE_BLOCK", samples)
        patch.setattr(phases, "MIXTURE_CYCLE", 4)
        patch.setattr(phases, "STAIR_SAMPLES", stair)
        yield


def shares(mixture: Mixture, first: int, stop: int) -> list[float]:
    """The share of each source in steps ``first:stop``."""
    counts = np.bincount(np.concatenate([mixture.indices(step)[0] for step in range(first, stop)]), minlength=len(mixture.names))
    return (counts / counts.sum()).tolist()  # type: ignore[no-any-return]


# Schedules


@pytest.mark.parametrize(("by", "factor"), [("step", 1), ("sample", 50), ("token", 100)])
def test_a_constant_schedule_changes_at_its_places_in_steps_samples_or_tokens(by, factor):
    weight = Schedule([(40 * factor, 1), (700 * factor, 3), (720 * factor, 0)], by, "constant")
    mixture = Mixture({"a": (Numbers(1000, width=2), weight), "b": (Numbers(900, width=2), 1)}, 50, 1)
    for first, stop, share in ((0, 40, 0.5), (40, 700, 0.5), (700, 720, 0.75), (720, 900, 0)):
        assert shares(mixture, first, stop)[0] == pytest.approx(share, abs=1e-3)


@given(
    points=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5)), max_size=4), kind=st.sampled_from(["linear", "constant"])
)
def test_the_samples_of_a_source_are_those_of_its_exact_share(points, kind):
    """At every place of the run, up to the order in a block, and the rounding of a cycle that a place cuts off."""
    places = itertools.accumulate(place for place, _ in points)
    weight = Schedule([(0, 1), *((place, w) for place, (_, w) in zip(places, points, strict=True))], "sample", kind)
    count = weight.points[-1][0] + 200
    with blocks_of(16, stair=1):
        mixture = Mixture({"a": (Numbers(50), weight), "b": (Numbers(40), 2)}, count, 3)
    drawn = np.cumsum(mixture.indices(0)[0] == 0)
    exact = phases.Weight(weight, Fraction(0), Fraction(1))
    weights = np.array([float(exact.at(Fraction(2 * sample + 1, 2))) for sample in range(count)])
    assert np.abs(drawn - np.cumsum(weights / (weights + 2))).max() < 4 + 2 * len(points)


def test_a_schedule_by_step_counts_the_steps_of_the_run_after_an_edit():
    weight = Schedule([(40, 1), (60, 0)], "step", "constant")
    edits = [Edit(0, 50, {0: 1, 1: 1}), Edit(20, 10, {0: weight, 1: 1})]
    mixture = Mixture.of_edits({"a": Numbers(900), "b": Numbers(900)}, [None, None], edits, 1)
    assert shares(mixture, 20, 60)[0] == pytest.approx(0.5, abs=0.01)
    assert shares(mixture, 60, 99)[0] == 0


def test_stairs_are_whole_blocks_but_for_the_last():
    weight = phases.Weight(Schedule([(100, 1), (50_000_000, 3)], "sample"), Fraction(0), Fraction(1))
    *ends, last = (end for _, end in phases._stairs(100, 50_000_000, [weight]))
    assert {(end - 100) % phases.MIXTURE_BLOCK for end in ends} == {0}
    assert (len(ends) > 9, last) == (True, 50_000_000)


def test_schedules_that_cannot_be_are_refused():
    for points, complaint in (
        ([], "places are"),
        ([(5, 1), (5, 2)], "each larger than the last"),
        ([(-1, 1)], "from 0 up"),
        ([(0, -1.0)], "numbers from 0 up"),
        ([(0, 0.0)], "not all 0"),
        ([(0, float("nan"))], "numbers from 0 up"),
        ([(0, 1), (5, "2")], r"weights are \[1, '2'\], but they are numbers"),
    ):
        with refusal(complaint, (ValueError, TypeError)):
            Schedule(points)  # type: ignore[arg-type]
    late = Schedule([(10, 0), (20, 1)], "step", "constant")
    with refusal("no source has a weight at sample 0"):
        Mixture({"a": (Numbers(5), late)}, 4)

    class Ragged(Numbers):
        def batch(self, indices: Any) -> Any:
            return {"number": indices}

    ragged = Ragged(5)
    del ragged.length
    with refusal("rows have one `length`", TypeError):
        Mixture({"a": (ragged, Schedule([(0, 1)], "token"))}, 4)


def stream(rows: int, seed: int, source: int, count: int) -> list[int]:
    """The first *count* rows of a source's own stream: one permutation after another."""
    epochs, places = np.divmod(np.arange(count, dtype=np.uint64), np.uint64(rows))
    return KeyedPermutation(rows)(places, derive_keys(seed, 1, source, epochs)).tolist()


def visits_one_by_one(batches: list[Any], source: int, asked: Iterable[int]) -> list[tuple[int, int, int]]:
    """The step and the row of the batch of each visit, by looking at every batch."""
    return [
        (row, step, place)
        for row in asked
        for step, (sources, index) in enumerate(batches)
        for place in np.flatnonzero((sources == source) & (index == row)).tolist()
    ]


@given(data=st.data(), block=st.sampled_from([16, 1 << 14]), batch_size=st.integers(1, 900))
@examples(40)
def test_a_source_gives_its_own_stream_whatever_the_others_are(data, block, batch_size):
    """Of 1 to 7 sources of 3 to 50,000 rows, from any step: the n-th sample of a source is the n-th of its stream. The inverse
    finds each sample, and no other.
    """
    rows = data.draw(st.lists(st.integers(3, 300) | st.integers(3, 50_000), min_size=1, max_size=7))
    weight = st.floats(1e-3 if block > 16 else 0.2, 1) | st.just(Schedule([(0, 0.5), (40, 0.01)]))
    with blocks_of(block):
        start = data.draw(st.sampled_from([0, 1, 40_000]))
        mixture = Mixture([(Numbers(n), data.draw(weight)) for n in rows], batch_size, 3, start=start)
    batches = [mixture.indices(step) for step in range(min(2 * (1 << 14) // batch_size + 1, 200))]
    source, row = (np.concatenate(field) for field in zip(*batches, strict=True))
    for k, n in enumerate(rows):
        first, theirs = int(mixture.drawn(0)[k]), row[source == k].tolist()
        assert theirs == stream(n, 3, k, first + len(theirs))[first:]
        asked = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
        found = mixture.visits(asked, source=str(k), before=len(batches))
        assert places_of(found) == visits_one_by_one(batches, k, asked)
        nth = first + np.cumsum(source == k) - 1
        assert found.epoch.tolist() == (nth[found.step * batch_size + found.batch_row] // n).tolist()


# Limits of epochs


def test_a_limit_that_no_run_reaches_is_refused_at_once():
    assert len(Mixture([(Numbers(8), 3, 1 << 50)], 8)) == 1 << 50
    with refusal(r"epochs of source '0' have \d+ samples, more than 2\*\*53. Without a limit it goes on"):
        Mixture([(Numbers(9), 3, 1 << 60)], 8)
    with refusal("epochs of the sources end after"):
        Mixture([(Numbers(5), 1, 2)], 7, steps=3)


def test_the_others_go_on_by_their_weights():
    mixture = Mixture({"a": (Numbers(1000), 2, 1), "b": (Numbers(700), 1), "c": (Numbers(700), 1)}, 50, 1)
    assert shares(mixture, 500, 2000) == [0, pytest.approx(0.5, abs=1e-3), pytest.approx(0.5, abs=1e-3)]
    assert mixture.drawn(2000)[0] == 1000


# Edits


def history(data: st.DataObject, hosts: int) -> tuple[list[int], list[int], list[Edit]]:
    """Rows of sources, limits of epochs, and edits; the last one has all sources."""
    count = data.draw(st.integers(1, 5))
    rows = [data.draw(st.integers(1, 50)) for _ in range(count)]
    epochs = [data.draw(st.integers(3, 9)) for _ in range(count)]
    edits, step = [], 0
    weight = st.sampled_from([1, 0.25, 3, Schedule([(2, 1), (30, 4)]), Schedule([(5, 2), (9, 1)], "step", "constant")])
    for _ in range(data.draw(st.integers(1, 5))):
        some = [k for k in range(count) if data.draw(st.booleans())] or [0]
        edits.append(Edit(step, hosts * data.draw(st.integers(1, 4)), {k: data.draw(weight) for k in some}))
        mixture = Mixture.of_edits({str(k): Numbers(n) for k, n in enumerate(rows)}, epochs, edits, 3)
        step += min(data.draw(st.integers(0, 12)), len(mixture) - step)
    edits.append(Edit(step, hosts * data.draw(st.integers(1, 4)), dict.fromkeys(range(count), 1)))
    return rows, epochs, edits


@given(data=st.data(), block=st.sampled_from([16, 50, 1 << 14]), hosts=st.integers(1, 16))
@examples(50)
def test_no_history_of_edits_repeats_or_leaves_out_a_sample(data, block, hosts):
    with blocks_of(block):
        rows, epochs, edits = history(data, hosts)
        views = {str(k): Numbers(n) for k, n in enumerate(rows)}
        mixture = Mixture.of_edits(views, epochs, edits, 3)
        earlier = [Mixture.of_edits(views, epochs, edits[: k + 1], 3) for k in range(len(edits))]
    batches = [mixture.indices(step) for step in range(len(mixture))]
    # All sources are in the last edit, so that each comes to its end: every row has been seen as often as it has epochs.
    seen = Counter((int(k), int(row)) for batch in batches for k, row in zip(*batch, strict=True))
    assert seen == {(k, row): epochs[k] for k in range(len(rows)) for row in range(rows[k])}
    assert mixture.position(len(mixture)) == seen.total()
    for k, n in enumerate(rows):  # each source's rows come in its own order, whatever the history
        theirs = np.concatenate([row[source == k] for source, row in batches]).tolist()
        assert theirs == stream(n, 3, k, len(theirs))
    # The account at every step is what was drawn.
    drawn = np.zeros(len(rows), np.int64)
    for step, (source, _) in enumerate(batches):
        assert mixture.drawn(step).tolist() == drawn.tolist()
        drawn += np.bincount(source, minlength=len(rows))
    assert mixture.drawn(len(mixture)).tolist() == drawn.tolist()
    # No edit changes a batch before it.
    for number, edit in enumerate(edits[1:]):
        for step in range(edit.step):
            assert same_arrays(earlier[number].indices(step), batches[step])
    # The hosts' rows are the batch, and only sources of the edit are in it.
    parts = [mixture.shard(host, hosts) for host in range(hosts)]
    for step in {0, len(mixture) // 2, len(mixture) - 1}:
        assert np.concatenate([part.indices(step)[1] for part in parts]).tolist() == batches[step][1].tolist()
        edit = [edit for edit in edits if edit.step <= step][-1]
        assert set(batches[step][0].tolist()) <= set(edit.weights)
        assert len(batches[step][0]) <= edit.batch_size
    # A resume at any step goes on with the same batches.
    step = data.draw(st.integers(0, len(mixture)))
    again = pickle.loads(pickle.dumps(mixture)).steps()
    again.load_state_dict({"step": step, "position": sum(len(source) for source, _ in batches[:step])})
    assert [batch.index.tolist() for batch in again] == [row.tolist() for _, row in batches[step:]]
    # The inverse finds each visit.
    for k, name in enumerate(mixture.names):
        found = mixture.visits(np.arange(rows[k]), source=name)
        expected = visits_one_by_one(batches, k, range(rows[k]))
        assert places_of(found) == expected
        assert Counter(zip(found.row.tolist(), found.epoch.tolist(), strict=True)).keys() == {
            (row, epoch) for row in range(rows[k]) for epoch in range(epochs[k])
        }
        before = mixture.visits(np.arange(rows[k]), source=name, before=step)
        assert sorted(zip(before.row, before.step, strict=True)) == sorted((r, s) for r, s, _ in expected if s < step)


def test_the_inverse_of_a_mixture_takes_no_pass_over_its_samples():
    """It takes a part of a block for each."""
    changing, asked = Schedule([(0, 1), (10**7, 3)]), 200
    mixture = Mixture({"a": (Numbers(10**12), changing), "b": (Numbers(1000), 1, 10**6)}, 4096, 1)
    rows = np.random.default_rng(0).integers(0, 10**12, asked)
    found = mixture.visits(rows, source="a", before=10**9)
    assert len(found.step) > asked
    for k in (0, asked // 2, len(found.step) - 1):
        source, index = mixture.indices(found.step[k])
        assert (source[found.batch_row[k]], index[found.batch_row[k]]) == (0, found.row[k])


def test_an_inverse_of_several_sources_needs_the_sources_name():
    mixture = Mixture({"a": (Numbers(10), 1), "b": (Numbers(10), 1)}, 4)
    with refusal("source is None, but it is one of 'a', 'b'"):
        mixture.steps_of(3, before=5)
    with refusal("source is 'c'"):
        mixture.seen(3, before=5, source="c")


def test_an_edit_behind_the_end_is_refused():
    with refusal("an edit from step 9 on, but the run ends before step 2"):
        Mixture.of_edits({"a": Numbers(10)}, [1], [Edit(0, 5, {0: 1}), Edit(9, 5, {0: 1})], 0)


def test_epochs_and_shares_are_those_of_the_large_run():
    steps, factor = 60, 7
    counts = np.array([3000, 50, 3])
    large = Mixture({str(k): (Numbers(count, 10_000 * k), 9 - 4 * k) for k, count in enumerate(counts.tolist())}, 32, 2)
    small = large.scaled(budget=steps * 32 * 2, target=steps * factor * 32 * 2)
    assert len(small) == steps
    assert [len(view) for view in small.views] == [429, 7, 1]
    drawn, expected = small.drawn(steps), large.drawn(steps * factor) / factor
    # Within a block of 2**14 samples the sources are in a random order, so that a part of it has about their shares.
    assert (abs(drawn - expected) <= 7 * np.sqrt(expected) + 2).all()
    source, numbers = (np.concatenate(of) for of in zip(*((b.source, b.samples.number) for b in small.steps()), strict=True))
    for k, view in enumerate(small.views):
        times = np.bincount(numbers[source == k] - 10_000 * k, minlength=counts[k])
        assert (len(times), times.sum(), times.max()) == (counts[k], drawn[k], -(-drawn[k] // len(view)))
        assert (times > 0).sum() == len(view)


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


def test_documents_are_seen_in_the_rows_of_the_sample():
    view = split_of([[d + 1] * 9 for d in range(200)]).packed(12, fim=FillInMiddle(0.5, 0.5, 901, 902, 903))
    small = Mixture({"a": (view, 1)}, 8, 3).scaled(budget=12 * 8 * 20, target=12 * 8 * 60)
    assert len(small.views[0]) == len(view) // 3
    found = small.seen(np.arange(200))
    seen = {*places_of(found)}
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
