"""Batches by step: the same stream whatever the batch size, the hosts and the place where a run goes on."""

import gc
import itertools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import astuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import BlockOrder
from flat_tokens.annotations import Int64s
from flat_tokens.rows.loader import ShuffledLoader, Steps, digest_of
from flat_tokens.rows.mixture import Mixture
from flat_tokens.rows.orders import ReferenceOrder
from tests.elsewhere import FRAMEWORKS, in_framework
from tests.flat_tokens.rows.rows_by_number import VIEWS, Numbers, Row, orders, same_arrays
from tests.flat_tokens.rows.test_shuffle import philox_swaps
from tests.made import masked_split, split_of
from tests.refusal import refusal


def numbers(batches: Iterable[Row]) -> list[list[int]]:
    return [batch.number.tolist() for batch in batches]


# Which samples a step has


def test_orders_never_change():
    """A run that goes on with a later version of this library would otherwise see samples twice."""
    batches = numbers(ShuffledLoader(Numbers(10), 4, 0, epochs=2))
    assert batches == [[4, 3, 6, 5], [9, 0, 7, 2], [8, 1, 5, 9], [7, 1, 8, 6], [4, 0, 3, 2]]
    far = ShuffledLoader(Numbers(10**12), 3, 2**64 - 1, epochs=None).indices(10**15)
    assert far.tolist() == [910752333241, 174559511018, 31318009097]


def streams_of(batches: Iterable[Int64s], streams: int) -> Int64s:
    """What each of the order's streams gives, batch after batch: int64[streams, n]."""
    return np.concatenate([batch.reshape(streams, -1) for batch in batches], axis=1)


@given(
    length=st.integers(1, 200), share=st.integers(1, 70), epochs=st.integers(1, 4), seed=st.integers(0, 2**64 - 1), order=orders
)
def test_every_epoch_has_every_row_once_and_batches_run_on_across_epochs(length, share, epochs, seed, order):
    streams = getattr(order, "streams", 1)
    length, batch_size = max(length, streams), share * streams
    loader = ShuffledLoader(Numbers(length), batch_size, seed, epochs=epochs, order=order)
    epoch_length, batches = loader.epoch_length, [loader.indices(step) for step in range(len(loader))]
    assert loader.left_out == length - epoch_length == length % streams
    assert [*map(len, batches[:-1])] == [batch_size] * (len(batches) - 1)
    seen = streams_of(batches, streams).reshape(streams, epochs, -1).swapaxes(0, 1).reshape(epochs, epoch_length)
    for epoch in seen:
        assert len(np.unique(epoch)) == epoch_length
        assert 0 <= epoch.min() <= epoch.max() < length
        assert order != "sequential" or (np.diff(epoch) == 1).all()
    if order != "sequential" and epoch_length > 20 and order != BlockOrder(1, 1, streams):
        assert len({tuple(epoch.tolist()) for epoch in seen}) == epochs
    if epochs * epoch_length < batch_size:
        return
    dropping = ShuffledLoader(Numbers(length), batch_size, seed, epochs=epochs, order=order, drop_last=True)
    assert numbers(dropping) == [batch.tolist() for batch in batches if len(batch) == batch_size]
    assert dropping.left_out == loader.left_out + epochs * epoch_length % batch_size


def test_an_endless_loader_has_no_length():
    loader = ShuffledLoader(Numbers(10), 4, epochs=None)
    assert repr(loader) == f"<ShuffledLoader: endless steps of 4 rows of {loader.view!r}>"
    with refusal("endless", TypeError):
        len(loader)
    assert numbers(itertools.islice(loader, 20)) == [batch.number.tolist() for batch in ShuffledLoader(Numbers(10), 4, epochs=8)]
    assert loader.indices(10**12).shape == (4,)
    assert loader.left_out == 0


@pytest.mark.parametrize(("order", "steps"), [("shuffled", 4), (ReferenceOrder(2, 2, 2), 3)])
def test_there_are_no_steps_before_the_first_or_beyond_the_last(order, steps):
    loader = ShuffledLoader(Numbers(20), 6, order=order)
    assert len(loader) == steps
    for step in (-1, len(loader), 10**20):
        more = ", more with more epochs, and with epochs=None no end" if step > 0 else ""
        with refusal(f"no step {step}; there are {steps}{more}$", IndexError):
            loader[step]
    with refusal("no step -1", IndexError):
        ShuffledLoader(Numbers(20), 6, order=order, epochs=None)[-1]
    assert [len(batch.number) for batch in loader] == [len(loader[np.int64(step)].number) for step in range(len(loader))]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"batch_size": 0}, "batch_size is 0, but it is 1 or more"),
        ({"epochs": 0}, "epochs is 0, but it is 1 or more"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"start": -1}, "start is -1"),
        ({"start": 21}, "start is 21, but there are 20 samples in all"),
        ({"start": 4, "start_token": 4}, "give one of them"),
        ({"start_token": 5}, "start_token 5 is inside a row: with 2 tokens a row, rows begin at 4 and 6"),
        ({"view": Numbers(0), "epochs": None}, "the view has no rows"),
        ({"batch_size": 21, "drop_last": True}, "20 samples in all, fewer than one batch of 21"),
        ({"batch_size": 3, "order": ReferenceOrder(2, 2, 2)}, "batch_size 3 does not divide evenly among 2 streams"),
        ({"start": 3, "order": ReferenceOrder(2, 2, 2)}, "start 3 does not divide evenly among 2 streams"),
        ({"order": ReferenceOrder(2, 2, 11)}, r"20 rows, but .* 2 streams \* 11 sequences_per_read_block = 22 rows"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(wrong, complaint):
    with refusal(complaint):
        ShuffledLoader(**{"view": Numbers(20), "batch_size": 4, **wrong})


# Going on: other batch sizes, other hosts


@given(length=st.integers(24, 100), epochs=st.integers(1, 3), order=orders | st.just(ReferenceOrder(4, 2, 3)), data=st.data())
def test_a_run_that_changes_batch_size_and_hosts_sees_the_same_stream(length, epochs, order, data):
    """Stop anywhere, go on from the position with any batch size on any number of hosts: nothing twice, nothing left out. The
    hosts' rows, in their order, are the batch.
    """
    streams, start, seen = getattr(order, "streams", 1), 0, []
    settings = {"seed": 7, "epochs": epochs, "order": order, "drop_last": False}
    expected = streams_of([batch.number for batch in ShuffledLoader(Numbers(length), streams, **settings)], streams)
    while start < expected.size:
        hosts = data.draw(st.integers(1, 4))
        batch_size = hosts * streams * data.draw(st.integers(1, 10))
        loader = ShuffledLoader(Numbers(length), batch_size, start=start, **settings)
        steps = data.draw(st.integers(1, len(loader)))
        parts = [loader.shard(host, hosts) for host in range(hosts)]
        for step in range(steps):
            assert loader.position(step) == start + step * batch_size
            batches = [part[step].number for part in parts]
            sizes = [*map(len, batches)]
            assert max(sizes) - min(sizes) <= (step == len(loader) - 1)
            seen.append(np.concatenate(batches))
            assert np.array_equal(seen[-1], loader[step].number)
        start = loader.position(steps)
        assert {(len(part), part.position(steps)) for part in parts} == {(len(loader), start)}
    assert np.array_equal(streams_of(seen, streams), expected)


def test_a_run_that_is_over_goes_on_with_no_steps():
    loader = ShuffledLoader(Numbers(10), 4)
    assert loader.position(len(loader)) == 10
    assert list(ShuffledLoader(Numbers(10), 3, start=10)) == []
    assert ShuffledLoader(Numbers(10), 4, start=3, drop_last=True).left_out == 3
    with refusal("no step 4", IndexError):
        loader.position(4)


def test_positions_in_tokens():
    loader = ShuffledLoader(Numbers(100, width=16), 8, start=4)
    assert loader.token_position(3) == (4 + 3 * 8) * 16
    on = ShuffledLoader(Numbers(100, width=16), 4, start_token=loader.token_position(3))
    assert on.start == loader.position(3) == 28
    assert np.concatenate([on.indices(0), on.indices(1)]).tolist() == loader.indices(3).tolist()


def test_positions_in_tokens_need_rows_of_one_length():
    view = Numbers(100)
    del view.length
    with refusal("one `length`", TypeError):
        ShuffledLoader(view, 4).token_position(1)
    with refusal("one `length`", TypeError):
        ShuffledLoader(view, 4, start_token=4)


def test_batches_that_hosts_cannot_share_are_refused():
    loader = ShuffledLoader(Numbers(100), 10)
    with refusal("batch_size 10 does not divide evenly among 4 processes"):
        loader.shard(0, 4)
    for process_index, process_count in ((2, 2), (-1, 2), (0, 0)):
        with refusal(f"process_index is {process_index}"):
            loader.shard(process_index, process_count)
    with refusal("already the loader of process 1 of 2"):
        loader.shard(1, 2).shard(0, 5)


# The reference order


@given(
    order=st.builds(ReferenceOrder, st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
    share=st.integers(1, 8),
    length=st.integers(30, 400),
    seed=st.integers(0, 2**63),
    epochs=st.integers(1, 3),
)
def test_the_reference_order_is_what_its_buffers_give_one_by_one(order, share, length, seed, epochs):
    """With a last shuffle buffer that is short. What is rounded down is in no batch. Each permutation has the next seed."""
    streams, buffer_blocks, block_rows = astuple(order)
    loader = ShuffledLoader(Numbers(length), share * streams, seed, order=order, epochs=epochs, drop_last=False)
    blocks = np.arange(length // (streams * block_rows) * streams * block_rows).reshape(-1, block_rows)
    expected, seeds = [[] for _ in range(streams)], itertools.count(seed)
    for _ in range(epochs):
        dealt = blocks[philox_swaps(next(seeds), len(blocks))].reshape(-1, streams, block_rows)
        for first in range(0, len(dealt), buffer_blocks):
            for stream in range(streams):
                buffer = dealt[first : first + buffer_blocks, stream].reshape(-1)
                expected[stream] += buffer[philox_swaps(next(seeds), len(buffer))].tolist()
    batches = [loader.indices(step) for step in range(len(loader))]
    assert [*map(len, batches[:-1])] == [share * streams] * (len(batches) - 1)
    assert streams_of(batches, streams).tolist() == expected
    assert loader.left_out == length - blocks.size


def test_the_reference_loaders_batches(reference):
    """What the reference loader gives for its own file, as its authors' code was seen to do."""
    train = flat_tokens.open(reference / "seqax/synthetic_dataset.zarr").train
    loader = ShuffledLoader(train.packed(64), 64, 0, order=ReferenceOrder(2, 8, 16))
    assert len(loader) == 64
    assert loader.epoch_length == 258 * 16
    assert loader.left_out == 264_992 // 64 - 64 * 64
    first = loader[0]
    assert int(first.encoded.sum(dtype=np.int64)) == 119_744
    assert first.targets[:2, :6].tolist() == [[2, 1, 1, 1, 1, 2], [3, 7, 2, 4, 5, 8]]


# Mixtures


def mixture(**arguments: Any) -> Mixture:
    sources = {"web": (Numbers(1000), 6.0), "code": (Numbers(70, first=10_000), 3.0), "books": (Numbers(7, first=20_000), 1.0)}
    return Mixture(**{"sources": sources, "batch_size": 50, "seed": 3, **arguments})


def test_mixtures_never_change():
    """A run that goes on with a later version of this library would otherwise see samples twice."""
    source, index = mixture(batch_size=12).indices(0)
    assert source.tolist() == [2, 1, 0, 0, 0, 0, 1, 1, 2, 1, 2, 0]
    assert index.tolist() == [6, 0, 770, 826, 476, 185, 60, 19, 1, 17, 0, 957]
    source, index = mixture(batch_size=12).indices(10**9)
    assert source.tolist() == [0, 1, 0, 0, 2, 0, 1, 0, 1, 0, 2, 0]
    assert index.tolist() == [192, 58, 331, 970, 5, 568, 9, 441, 60, 458, 2, 45]


@given(weights=st.lists(st.floats(0.01, 100) | st.integers(1, 100), min_size=1, max_size=6), block=st.integers(0, 200))
def test_every_block_has_the_weights_parts_to_one_sample(weights, block):
    """And a cycle of blocks to half a millionth of itself, in integers, so that no machine counts another way."""
    sources = Mixture([(Numbers(50), weight) for weight in weights], 1 << 14)
    parts = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    counts = np.bincount(sources.indices(block)[0], minlength=len(weights)).tolist()
    assert sum(counts) == 1 << 14
    assert all(abs(count - part * 2**14) < 1 + Fraction(1, 64) for count, part in zip(counts, parts, strict=True))
    drawn = sources.drawn(64 * 5).tolist()
    assert sum(drawn) == 5 << 20
    assert all(abs(count - part * (5 << 20)) < 5 for count, part in zip(drawn, parts, strict=True))


def test_a_mixture_has_the_steps_it_is_given_or_is_endless():
    some = mixture(steps=7, start=100)
    assert len(some) == len(list(some)) == 7
    assert some.position(7) == 100 + 7 * 50
    with refusal("no step 7; there are 7", IndexError):
        some[7]
    with refusal("endless", TypeError):
        len(mixture())
    assert mixture()[10**9].source.shape == (50,)
    assert mixture(start_token=200).start == 100


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({}, "at least one source"),
        ({"a": (Numbers(5), 0)}, "source 'a' has weight 0, but weights are positive"),
        ({"a": (Numbers(5), float("nan"))}, "source 'a' has weight nan"),
        ({"a": (Numbers(5), float("inf"))}, "source 'a' has weight inf"),
        ({"a": (Numbers(5), 1), "b": (Numbers(0), 1)}, "source 'b' has no rows"),
        ({"a": (Numbers(5), 1e6), "b": (Numbers(5), 0.1)}, "source 'b' has weight 0.1: of 1048576 samples it would give none"),
        (
            {"a": (Numbers(5), 1), "b": (Numbers(5), 1), "c": (Numbers(5, width=3), 1)},
            r"sources 'a' and 'c' do not fit .*twice: ndarray int32\[2\].*twice: ndarray int32\[3\]",
        ),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(sources, complaint):
    with refusal(complaint):
        Mixture(sources, 4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_kind_of_view_can_be_mixed(framework):
    in_framework(framework, mixed_arrays)


def arrays(rows: Any) -> dict[str, Any]:
    return rows if isinstance(rows, dict) else rows._asdict()


MIXED: list[tuple[Any, ...]] = [
    *VIEWS,
    ("packed", {"fields": ["inputs", "targets", "is_seq_start"]}),
    ("packed", {"overlap": 1}, {}),
    ("documents", {"pad_id": 3}, {"pad_id": 4}),
    ("packed_documents", {"too_long": "cut", "pad_to": 4}),
]
"""Views, with their settings of the first source, and of the second one if they differ."""


def mixed_arrays(framework: Any) -> None:
    """A batch says of each sample where it is from, and has arrays as the views have them, of sources with and without a mask."""
    one, other = ([[(1000 * k + i, i % 3 > 0)] * (i % 7) for i in range(200)] for k in range(2))
    for is_masked, (name, *options) in itertools.product((False, True), MIXED):
        views: list[Any] = [
            getattr(tokens, name)(8, framework=framework, loss_mask=is_masked, **options[k % len(options)])
            for k, tokens in enumerate((masked_split(one, masked=False), masked_split(other, masked=is_masked)))
        ]
        mixture = Mixture([(view, 1) for view in views], 40, 1)
        batch = mixture[3]
        assert same_arrays(batch[1:], mixture.indices(3))
        assert set(batch.source.tolist()) == {0, 1}
        for row, (k, i) in enumerate(zip(batch.source.tolist(), batch.index.tolist(), strict=True)):
            expected = views[k].batch(np.array([i]))
            assert type(batch.samples) is type(expected)
            for field, array in arrays(expected).items():
                found = arrays(batch.samples)[field]
                assert (type(found), found.dtype) == (type(array), array.dtype)
                assert np.array_equal(np.asarray(found[row]), np.asarray(array[0]))


def test_views_of_different_kinds_are_not_mixed():
    one, other = split_of([[1] * 9]), split_of([[2] * 9])
    for view in (other.documents(8), other.packed(8, fields=["inputs"])):
        with refusal("sources '0' and '1' do not fit"):
            Mixture([(one.packed(8), 1), (view, 1)], 4)


def test_fields_without_a_row_for_each_sample_are_not_mixed():
    class Ragged(Numbers):
        def batch(self, indices: Int64s) -> Any:
            return {"number": indices, "ends": np.arange(len(indices) + 1)}

    class Lists(Numbers):
        def batch(self, indices: Int64s) -> Any:
            return {"number": indices, "ends": [np.arange(i) for i in indices]}

    for view in (Ragged(5), Lists(5)):
        with refusal("source '0': ends is not one entry a row"):
            Mixture([(view, 1), (view, 1)], 4)


# Iterating, ahead of the consumer or not

AHEAD = pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (3, 1), (3, 2), (2, 5)])


@AHEAD
def test_steps_come_in_order_from_any_step(prefetch, threads):
    loader = ShuffledLoader(Numbers(100), 8)
    expected = numbers(map(loader.__getitem__, range(len(loader))))
    ahead = {"prefetch": prefetch, "threads": threads}
    assert numbers(loader) == expected
    assert numbers(loader.steps(5, **ahead)) == expected[5:]
    assert numbers(loader.steps(2, 7, **ahead)) == expected[2:7]
    assert list(loader.steps(len(loader), **ahead)) == []
    endless = ShuffledLoader(Numbers(100), 8, epochs=None)
    with endless.steps(10**6, **ahead) as steps:
        assert numbers(itertools.islice(steps, 3)) == [endless[10**6 + k].number.tolist() for k in range(3)]
    assert prefetching() == []


def test_steps_that_are_not_there_are_refused():
    loader = ShuffledLoader(Numbers(20), 4)
    with refusal("no steps up to 6; there are 5", IndexError):
        loader.steps(0, 6)
    with refusal("no step 6 to begin at: these steps end at 5", IndexError):
        loader.steps(6)
    with refusal("start is -1"):
        loader.steps(-1)
    with refusal("prefetch is -1"):
        loader.steps(prefetch=-1)
    with refusal("threads is 0"):
        loader.steps(prefetch=1, threads=0)


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flat-tokens-prefetch"]


class Watched(Numbers):
    """Counts its batches, waits for leave to give them where it is told to, and fails where it is told to."""

    def __init__(self, count: int, failing: int | None = None) -> None:
        super().__init__(count)
        self.failing, self.begun, self.changed, self.leave = failing, 0, threading.Condition(), threading.Event()
        self.leave.set()

    def batch(self, indices: Int64s) -> Row:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
        assert self.leave.wait(60)
        if self.failing in indices.tolist():
            raise OSError("the disk is gone")
        return super().batch(indices)

    def wait_until_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= count, 60)


@pytest.mark.parametrize(("prefetch", "threads"), [(1, 1), (3, 1), (3, 2), (2, 5)])
def test_no_more_batches_are_loaded_ahead_than_asked_for(prefetch, threads):
    view = Watched(400)
    with ShuffledLoader(view, 4, order="sequential").steps(prefetch=prefetch, threads=threads) as steps:
        for taken in range(20):
            view.wait_until_begun(taken + prefetch)
            time.sleep(0.001)  # time for one too many
            assert view.begun == taken + prefetch
            next(steps)


@AHEAD
def test_an_error_is_raised_where_its_batch_is_due_and_asking_again_tries_again(prefetch, threads):
    view = Watched(100, failing=41)
    steps = ShuffledLoader(view, 8, order="sequential").steps(prefetch=prefetch, threads=threads)
    assert [next(steps).number[0] for _ in range(5)] == [0, 8, 16, 24, 32]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone") as raised:
            next(steps)
        assert "in batch" in "".join(traceback.format_tb(raised.tb))
        assert steps.step == 5
    assert prefetching() == []
    view.failing = None
    assert [batch.number[0] for batch in steps] == [*range(40, 100, 8)]


@pytest.mark.parametrize("is_closed", [True, False])
def test_closing_the_iterator_or_letting_it_go_ends_the_threads(is_closed):
    steps = ShuffledLoader(Numbers(1000), 8, epochs=None).steps(prefetch=4, threads=2)
    next(steps)
    threads = prefetching()
    assert len(threads) == 2
    if is_closed:
        steps.close()
        steps.close()
        assert prefetching() == list(steps) == []
    del steps
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_closing_wakes_a_consumer_that_waits():
    view = Watched(100)
    view.leave.clear()
    steps = ShuffledLoader(view, 8).steps(prefetch=2)
    view.wait_until_begun(1)
    taken = []
    consumer = threading.Thread(target=lambda: taken.extend(steps))
    consumer.start()
    closing = threading.Thread(target=steps.close)
    closing.start()
    consumer.join(60)
    assert not consumer.is_alive()
    assert taken == []
    view.leave.set()
    closing.join(60)
    assert not closing.is_alive()
    assert prefetching() == []


def test_a_state_of_another_batch_size_is_refused_with_what_to_do():
    steps = ShuffledLoader(Numbers(100), 8).steps(4)
    with refusal(r"step 4 at sample 32, but .* at sample 40.* make the loader with start=32"):
        ShuffledLoader(Numbers(100), 10).steps().load_state_dict(steps.state_dict())


# Processes


@AHEAD
def test_steps_can_be_pickled(prefetch, threads):
    """They continue with the same step, and have threads of their own when they are asked for a batch."""
    for loader in (ShuffledLoader(Numbers(100), 8), mixture(steps=13)):
        steps = loader.steps(2, 12, prefetch=prefetch, threads=threads)
        for _ in range(3):
            next(steps)
        before = len(prefetching())
        copied = pickle.loads(pickle.dumps(steps))
        assert len(prefetching()) == before
        assert copied.step == steps.step == 5
        state = steps.state_dict()
        assert state.items() >= {"step": 5, "position": loader.position(5)}.items()
        expected = [digest_of(batch) for batch in steps]
        assert expected == [*map(loader.digest, range(5, 12))]
        steps.load_state_dict(state)
        assert [digest_of(batch) for batch in steps] == [digest_of(batch) for batch in copied] == expected
    steps = ShuffledLoader(Numbers(100), 8, epochs=None).steps(prefetch=prefetch, threads=threads)
    steps.close()
    assert list(pickle.loads(pickle.dumps(steps))) == []
    assert prefetching() == []


def test_a_fork_loads_on_but_not_from_its_parents_threads():
    loader = ShuffledLoader(Numbers(100), 8)
    steps = loader.steps(prefetch=2)
    next(steps)
    expected = numbers(loader)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with refusal(r"call steps\(\) again", RuntimeError):
                next(steps)
            steps.close()
            with loader.steps(prefetch=2) as own:
                assert numbers(own) == expected
            os.write(writing, b"well")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"well"
    os.waitpid(child, 0)
    assert numbers(steps) == expected[1:]


# torch


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it, torch warns
@pytest.mark.needs("torch", "torchdata")
def test_torchdata_resumes_an_iterable_by_its_state():
    torch_data = pytest.importorskip("torch.utils.data", reason="loads through torch's DataLoader")
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="resumes through torchdata")
    view = Watched(100)

    class Endless(torch_data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Steps:
            return ShuffledLoader(view, 8, epochs=None).steps()

    source = stateful.StatefulDataLoader(Endless(), batch_size=None)
    for _ in itertools.islice(source, 40):
        pass
    state, begun = source.state_dict(), view.begun
    again = stateful.StatefulDataLoader(Endless(), batch_size=None)
    again.load_state_dict(state)
    assert next(iter(again)).number.tolist() == ShuffledLoader(view, 8, epochs=None).indices(40).tolist()
    assert view.begun <= begun + 2, "what was seen already is not loaded again"
