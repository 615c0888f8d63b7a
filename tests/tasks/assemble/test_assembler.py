"""Spans of tokens that are written while their shards come: the same objects as those that tasks write, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.assemble.span_writer
import tasks.assemble.spans
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.batch import TokenBatch
from flat_tokens.stores.store import Store
from tasks.output.paths import CACHE
from tasks.output.staging import Place
from tasks.shards.fresh import Fresh, Making
from tasks.assemble.assembler import Ahead
from tasks.assemble.spans import CountedPlace, Counts, ShardPlace, ShardSpan, SplitRule, count_documents, lay_out
from tasks.assemble.write import Written, write_span
from tests.examples import examples
from tests.tasks.assemble.test_spans import SMALL, Shard, datasets, even, store_shards

ALL_TRAIN = SplitRule(fraction=0, seed=0)


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two objects of eight tokens, from shards that are not too small for them."""
    for name, layout in SMALL.items():
        monkeypatch.setitem(LAYOUTS, name, layout)
    monkeypatch.setattr(tasks.assemble.spans, "SPAN_TOKENS", 16)
    monkeypatch.setattr(tasks.assemble.span_writer, "SMALL_TOKENS", 1)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(Store.at("memory://test-ahead"), "/nowhere")
    place.root.remove("")
    yield place
    place.root.remove("")


def counted(at: list[ShardPlace], rule: SplitRule, place: Place) -> Iterator[CountedPlace]:
    return ((one, count_documents(one, rule, place.root)) for one in at)


def keep(fresh: Fresh, shard: Shard, at: ShardPlace, place: Place, batch_size: int) -> None:
    """Keep a shard in memory as if it had just been made, in batches of so many documents."""
    making = Making(fresh)
    for first in range(0, len(shard.documents), batch_size):
        some = shard.documents[first : first + batch_size]
        keys, rows = np.array([document.key for document in some], np.uint64), 2 * np.arange(len(some), dtype=np.uint64)
        making.append(TokenBatch.from_sequences([document.tokens for document in some]), keys, rows + np.uint64(2 * first))
    making.end(place.root, at.shard)


def written_ahead(
    at: list[ShardPlace], rule: SplitRule, layout: LayoutName, place: Place, fresh: Fresh | None = None
) -> list[tuple[ShardSpan, Written]]:
    with Ahead(rule, layout, place, "ahead", fresh or Fresh()) as ahead:
        return [(span, ahead.write(span)) for span in lay_out(ahead.follow(counted(at, rule, place)), layout)]


def objects_of(place: Place, version: str) -> list[str]:
    return sorted(key for key, _ in (place.root / "versions" / version).listing())


@examples(30)
@given(
    shards=datasets(),
    fraction=st.sampled_from([0, 0.3, 1]),
    layout=st.sampled_from(sorted(SMALL)),
    span_tokens=st.sampled_from([1, 20, 1 << 26]),
    backlog=st.sampled_from([-1, 0, 2, 100]),
    in_memory=st.sets(st.integers(0, 8)),
    batch_size=st.integers(1, 3),
)
def test_what_is_written_ahead_is_what_tasks_write(
    place: Place,
    shards: list[Shard],
    fraction: float,
    layout: LayoutName,
    span_tokens: int,
    backlog: int,
    in_memory: set[int],
    batch_size: int,
) -> None:
    """However far behind a thread may fall before spans are left to the tasks, and whichever shards are still in memory."""
    rule = SplitRule(fraction=fraction, seed=1)
    place.root.remove("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.assemble.spans, "SPAN_TOKENS", span_tokens)
        patch.setattr(tasks.assemble.span_writer, "BACKLOG", backlog)
        at = store_shards(shards, place)
        fresh = Fresh()
        for i in in_memory & set(range(len(at))):
            keep(fresh, shards[i], at[i], place, batch_size)
        found = written_ahead(at, rule, layout, place, fresh)
        expected = [(span, write_span(span, rule, layout, place, "v")) for span in lay_out(counted(at, rule, place), layout)]
    assert found == expected
    assert objects_of(place, "ahead") == objects_of(place, "v")


def test_tokens_are_written_without_a_task(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a last span, which is not full, too: 40 tokens are five objects, in spans of two, two and one."""
    monkeypatch.setattr(tasks.assemble.span_writer, "BACKLOG", 100)
    at = store_shards([even(4, 5), even(4, 5)], place)
    with Ahead(ALL_TRAIN, "mmap", place, "v", Fresh()) as ahead:
        for _ in ahead.follow(counted(at, ALL_TRAIN, place)):
            pass
    assert objects_of(place, "v") == [f"train/encoded_tokens/c/{i}" for i in range(5)]


def test_a_thread_that_falls_behind_leaves_spans_to_the_tasks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.assemble.span_writer, "BACKLOG", -1)
    at = store_shards([even(4, 5)], place)
    with Ahead(ALL_TRAIN, "mmap", place, "v", Fresh()) as ahead:
        spans = list(lay_out(ahead.follow(counted(at, ALL_TRAIN, place)), "mmap"))
        assert objects_of(place, "v") == []
        for span in spans:
            ahead.write(span)
    tokens = [name for name in objects_of(place, "v") if "encoded_tokens" in name]
    assert tokens == [f"train/encoded_tokens/c/{i}" for i in range(3)]


def test_a_shard_in_memory_is_written_without_reading_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is, and however far behind the thread."""
    monkeypatch.setattr(tasks.assemble.span_writer, "SMALL_TOKENS", 100)
    monkeypatch.setattr(tasks.assemble.span_writer, "BACKLOG", -1)
    shards, fresh = [even(4, 5), even(4, 5)], Fresh()
    at = store_shards(shards, place)
    for shard, one in zip(shards, at, strict=True):
        keep(fresh, shard, one, place, 2)
        place.root.remove(f"{CACHE}/{one.shard.key}")
    with Ahead(ALL_TRAIN, "mmap", place, "v", fresh) as ahead:
        list(lay_out(ahead.follow((one, count_documents(one, ALL_TRAIN, place.root, "v", fresh.open)) for one in at), "mmap"))
    assert objects_of(place, "v") == [f"train/encoded_tokens/c/{i}" for i in range(5)]
    assert [fresh.take(one.shard) for one in at] == [None, None]


def test_spans_of_small_shards_are_left_to_the_tasks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.assemble.span_writer, "SMALL_TOKENS", 21)
    at = store_shards([even(4, 5), even(7, 3)], place)
    with Ahead(ALL_TRAIN, "mmap", place, "v", Fresh()) as ahead:
        list(lay_out(ahead.follow(counted(at, ALL_TRAIN, place)), "mmap"))
    assert objects_of(place, "v") == [f"train/encoded_tokens/c/{i}" for i in (4, 5)]  # the span that begins with the larger one


def test_what_could_not_be_written_ahead_is_written_by_the_task(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.assemble.span_writer, "put_tokens", full)
    at = store_shards([even(4, 5)], place)
    found = written_ahead(at, ALL_TRAIN, "mmap", place)
    assert found == [(span, write_span(span, ALL_TRAIN, "mmap", place, "v")) for span, _ in found]


def test_a_build_that_fails_leaves_no_part_of_a_span(place: Place) -> None:
    """Its shards have not all come: nobody waits for them, and nothing is stored of it."""

    def slices() -> Iterator[CountedPlace]:
        yield from counted(store_shards([even(1, 5)], place), ALL_TRAIN, place)
        raise ValueError("a slice is bad")

    def build() -> None:
        with Ahead(ALL_TRAIN, "mmap", place, "v", Fresh()) as ahead:
            list(lay_out(ahead.follow(slices()), "mmap"))

    with pytest.raises(ValueError, match="a slice is bad"):
        build()
    assert objects_of(place, "v") == []


def test_a_span_that_did_not_get_its_items_fails(place: Place) -> None:
    """Receipts and arrays that contradict each other are a fault of ours: nothing of it may be published."""
    (at,) = store_shards([even(5, 3)], place)
    with Ahead(ALL_TRAIN, "mmap", place, "v", Fresh()) as ahead:
        spans = list(lay_out(ahead.follow([(at, Counts(6, 16, 0, 0))]), "mmap"))
        (tokens,) = [span for span in spans if span.of_tokens]
        with pytest.raises(AssertionError, match="15 items came instead of 16"):
            ahead.write(tokens)
