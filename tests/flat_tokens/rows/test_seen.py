"""The inverse of the order: the steps of rows and documents, against looking at every batch; digests of steps."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens import BlockOrder, ReferenceOrder, ShuffledLoader
from tests.elsewhere import FRAMEWORKS, in_framework
from tests.flat_tokens.rows.rows_by_number import VIEWS, Numbers, orders, places_of
from tests.flat_tokens.rows.test_crop import written
from tests.made import split_of
from tests.refusal import refusal


def visits_one_by_one(loader: ShuffledLoader, rows: int) -> list[list[tuple[int, int]]]:
    """The (step, row of the batch) of each row of the view, by looking at every batch."""
    found = [[] for _ in range(rows)]
    for step in range(len(loader)):
        for batch_row, row in enumerate(loader.indices(step).tolist()):
            found[row].append((step, batch_row))
    return found


references = st.builds(ReferenceOrder, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))


@given(data=st.data(), rows=st.integers(1, 120), epochs=st.integers(1, 3), order=orders | references)
def test_the_steps_of_rows_are_what_looking_at_every_batch_finds(data, rows, epochs, order):
    streams = getattr(order, "streams", 1)
    rows = max(rows, streams * getattr(order, "sequences_per_read_block", 1) * 3)
    epoch = ShuffledLoader(Numbers(rows), streams, order=order).epoch_length
    batch_size = streams * data.draw(st.integers(1, epoch // streams))
    start = streams * data.draw(st.integers(0, (epochs * epoch - batch_size) // streams))
    drop_last = data.draw(st.booleans()) and epochs * epoch - start >= batch_size
    loader = ShuffledLoader(Numbers(rows), batch_size, 5, order=order, epochs=epochs, start=start, drop_last=drop_last)
    expected = visits_one_by_one(loader, rows)
    found = loader.visits(np.arange(rows))
    assert places_of(found) == [(row, *place) for row, places in enumerate(expected) for place in places]
    position = found.step * batch_size + start
    assert ((found.epoch == position // epoch) | (found.epoch == (position + batch_size - 1) // epoch)).all()
    before = data.draw(st.integers(0, len(loader) + 2))
    assert [steps.tolist() for steps in loader.steps_of(np.arange(rows), before=before)] == [
        [step for step, _ in places if step < before] for places in expected
    ]


@pytest.mark.parametrize("order", ["shuffled", BlockOrder(128, 1024, 16)])
def test_the_steps_of_many_rows_of_a_trillion_take_no_pass_over_the_rows(order):
    count = 200_000
    loader = ShuffledLoader(Numbers(10**12), 4096, 1, epochs=2, order=order)
    rows = np.random.default_rng(0).integers(0, 10**12, count)
    found = loader.visits(rows)
    assert len(found.step) == 2 * count
    for k in (0, 77_777, 2 * count - 1):
        assert loader.indices(found.step[k])[found.batch_row[k]] == found.row[k] == rows[k // 2]


def test_an_endless_loader_is_asked_for_the_steps_before_one():
    loader = ShuffledLoader(Numbers(10), 4, epochs=None)
    with refusal(r"endless: say before which step, with before=N", TypeError):
        loader.steps_of(3)
    assert [step for step in range(50) if 3 in loader.indices(step)] == loader.steps_of(3, before=50).tolist()
    for wrong, kind in ((10, IndexError), (-1, IndexError), (0.5, TypeError)):
        with pytest.raises(kind, match="row"):
            loader.steps_of(wrong, before=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "settings"), [*VIEWS, ("packed", {"overlap": 5})], ids=str)
def test_documents_are_seen_in_the_rows_that_hold_their_tokens(kind, settings):
    view = getattr(written(np.random.default_rng(3).integers(0, 10, 120).tolist()), kind)(7, **settings)
    batch = view.batch(np.arange(len(view)))
    rows = (batch.tokens if hasattr(batch, "tokens") else batch.targets).tolist()
    loader = ShuffledLoader(view, 16, 2, epochs=2)
    found, visited = loader.seen(np.arange(120)), visits_one_by_one(loader, len(view))
    for document in range(120):
        holding = [row for row, ids in enumerate(rows) if document + 1 in ids or (kind == "documents" and row == document)]
        expected = sorted((step, place, row) for row in holding for step, place in visited[row])
        mine = np.flatnonzero(found.asked == document)
        assert list(zip(*(f[mine].tolist() for f in (found.step, found.batch_row, found.row)), strict=True)) == expected
        if document % 40 == 7:
            assert loader.seen(document, before=3).step.tolist() == [step for step, _, _ in expected if step < 3]
    with refusal("there is no sequence 120", IndexError):
        loader.seen(120)


def test_a_view_that_does_not_know_documents_says_so():
    with refusal(r"has no rows_of\(documents\)", TypeError):
        ShuffledLoader(Numbers(5), 2).seen(0)


# Digests


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_changed_token_changes_the_digest_of_its_step_alone(framework):
    in_framework(framework, digests_of_a_changed_token)


def digests_of_a_changed_token(framework: Any) -> None:
    tokens = np.arange(2000) % 97
    changed = tokens + (np.arange(2000) == 1234)
    loader, *others = (
        ShuffledLoader(split_of(ids.reshape(-1, 50)).packed(16, framework=kind), 8, 1)
        for ids, kind in ((tokens, framework), (tokens, "numpy"), (changed, framework))
    )
    one, same, other = ([*map(each.digest, range(len(loader)))] for each in (loader, *others))
    assert one == same
    assert len({*one}) == len(one)
    assert [step for step in range(len(loader)) if one[step] != other[step]] == loader.steps_of(1234 // 16).tolist()
    assert loader.shard(1, 2).digest(0) != one[0]
