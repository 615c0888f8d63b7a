"""The assembler: spans of tokens that are written while their parts arrive are those that tasks write, or are left to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.assemble.write
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.stores.store import Store
from tasks.assemble.assembler import Assembler
from tasks.assemble.write import Span, Written, write_span
from tasks.output.leases import Workspace
from tasks.output.target import SplitRule, Target
from tasks.parts.part import ShardPart
from tests.examples import examples
from tests.refusal import refusal
from tests.tasks.assemble.test_spans import SMALL, Shard, datasets, even, spans_of, store_shards, target_of

ALL_TRAIN = SplitRule(fraction=0, seed=0)


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two objects of eight tokens, from parts that are not too small for them."""
    for name, layout in SMALL.items():
        monkeypatch.setitem(LAYOUTS, name, layout)
    monkeypatch.setattr(tasks.assemble.write, "SPAN_TOKENS", 16)
    monkeypatch.setattr(tasks.assemble.write, "SMALL_TOKENS", 1)


@pytest.fixture
def place() -> Iterator[Workspace]:
    place = Workspace(Store.at("memory://test-assembler"), "/nowhere")
    place.root.remove("")
    yield place
    place.root.remove("")


class OnRequest:
    """A span that is written when its result is asked for."""

    def __init__(self, span: Span, target: Target, assembler: Assembler) -> None:
        self.arguments = span, target, assembler

    def result(self) -> Written:
        return write_span(*self.arguments)

    def cancel(self) -> bool:
        return True


def opened(target: Target) -> Assembler:
    """An assembler that writes spans of tokens while parts arrive, and the others when it is asked for them."""
    assembler = Assembler(target)
    assembler.write_with(lambda span: OnRequest(span, target, assembler))
    assembler.open_sink({}, streams=False)
    return assembler


def assembled(parts: list[ShardPart], target: Target) -> list[tuple[Span, Written]]:
    with opened(target) as assembler:
        for part in parts:
            assembler.add(part)
        assembler.end()
        found = assembler.finish()
        return list(zip(found.spans, found.written, strict=True))


def objects_of(place: Workspace, version: str = "v") -> list[str]:
    return sorted(key for key, _ in (place.root / "versions" / version).listing())


@examples(30)
@given(
    shards=datasets(),
    fraction=st.sampled_from([0, 0.3, 1]),
    layout=st.sampled_from(sorted(SMALL)),
    span_tokens=st.sampled_from([1, 20, 1 << 26]),
    backlog=st.sampled_from([-1, 0, 2, 100]),
)
def test_what_is_written_while_parts_arrive_is_what_tasks_write(
    place: Workspace, shards: list[Shard], fraction: float, layout: LayoutName, span_tokens: int, backlog: int
) -> None:
    """However far behind a thread may be before spans are left to the tasks."""
    rule = SplitRule(fraction=fraction, seed=1)
    place.root.remove("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.assemble.write, "SPAN_TOKENS", span_tokens)
        patch.setattr(tasks.assemble.write, "BACKLOG", backlog)
        parts, target = store_shards(shards, place), target_of(place, rule, layout)
        found = assembled(parts, target_of(place, rule, layout, "assembled"))
        expected = [(span, write_span(span, target)) for span in spans_of(parts, target)]
    assert found == expected
    assert objects_of(place, "assembled") == objects_of(place)


@pytest.mark.parametrize(
    ("setting", "value", "shards", "early"),
    [
        ("BACKLOG", 100, [(4, 5), (4, 5)], range(5)),  # five objects, in spans of two, two and one, which is not full
        ("SMALL_TOKENS", 21, [(4, 5), (7, 3)], (4, 5)),  # the span that begins with the larger one
        ("BACKLOG", -1, [(4, 5)], ()),  # the thread falls behind
    ],
)
def test_tokens_are_written_without_a_task_or_left_to_the_tasks(
    place: Workspace, monkeypatch: pytest.MonkeyPatch, setting: str, value: int, shards: Any, early: Any
) -> None:
    """Those of small shards, and those that come faster than they are written, are left."""
    monkeypatch.setattr(tasks.assemble.write, setting, value)
    with opened(target_of(place, ALL_TRAIN)) as assembler:
        for part in store_shards([even(*one) for one in shards], place):
            assembler.add(part)
        assembler.end()
    assert objects_of(place) == [f"train/encoded_tokens/c/{i}" for i in early]


def test_what_could_not_be_written_while_parts_arrived_is_written_by_the_task(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.assemble.write.SpanWriter, "_tokens", full)
    target = target_of(place, ALL_TRAIN)
    found = assembled(store_shards([even(4, 5)], place), target)
    assert found == [(span, write_span(span, target)) for span, _ in found]


def test_a_build_that_fails_leaves_no_part_of_a_span(place: Workspace) -> None:
    """Its parts have not all arrived: nobody waits for them, and nothing is stored of it."""

    def build() -> None:
        with opened(target_of(place, ALL_TRAIN)) as assembler:
            for part in store_shards([even(1, 5)], place):
                assembler.add(part)
            raise ValueError("a slice is bad")

    with refusal("a slice is bad"):
        build()
    assert objects_of(place) == []


def test_a_span_that_did_not_get_its_items_fails(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts and arrays that contradict each other are a fault of ours: nothing of it may be published."""
    monkeypatch.setattr(tasks.assemble.assembler, "count_part", lambda part, target: {"train": (6, 16), "validation": (0, 0)})
    with pytest.raises(AssertionError, match="15 items arrived instead of 16"):
        assembled(store_shards([even(5, 3)], place), target_of(place, ALL_TRAIN))
