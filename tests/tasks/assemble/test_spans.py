"""Which documents go where, and where in the final arrays each lands: against a model of lists. Spans of tokens that are written
while their parts arrive are those that tasks write, or are left to them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.assemble.write
import tasks.parts.documents
import tasks.parts.stored
from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName, group_metadata
from flat_tokens.arrays.opening import open_array
from flat_tokens.batch import LOSS_MASK, TOKENS, TokenBatch
from flat_tokens.checker import check_split
from flat_tokens.manifest import SPLITS, split_attributes
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, FlatTokensWriter, put_metadata
from tasks.assemble.assembler import Assembler
from tasks.assemble.write import Span, SpanLayout, SplitCounts, Written, count_part, write_span
from tasks.models import Split
from tasks.output.leases import Workspace
from tasks.output.paths import CACHE
from tasks.output.target import SplitRule, Target
from tasks.parts.documents import Reads
from tasks.parts.part import ShardPart
from tasks.parts.stored import document_spec
from tests.examples import examples
from tests.made import small
from tests.refusal import refusal
from tests.tasks.test_config import token_shard

KEYS = st.integers(0, 2**64 - 1)


class Document(NamedTuple):
    key: int
    tokens: list[int]


class Shard(NamedTuple):
    """Documents of one slice; *all_in* where its file belongs to one split. Row i of the slice is document i // 2: every
    other row holds none.
    """

    documents: list[Document]
    all_in: Split | None


SHARD_LAYOUT = small("mmap", 8, 4)
SMALL: dict[LayoutName, Layout] = {name: small(name, 8, 4, in_blocks=name == "compact") for name in LAYOUTS}


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two objects of eight tokens, from parts that are not too small for them."""
    for name, layout in SMALL.items():
        monkeypatch.setitem(LAYOUTS, name, layout)
    monkeypatch.setattr(tasks.assemble.write, "SPAN_TOKENS", 16)
    monkeypatch.setattr(tasks.assemble.write, "SMALL_TOKENS", 1)


@pytest.fixture
def place() -> Iterator[Workspace]:
    """A store in memory: these tests write thousands of objects."""
    place = Workspace(Store.at("memory://test-split"), "/nowhere")
    place.root.remove("")
    yield place
    place.root.remove("")


def store_shard(shard: Shard, number: int, place: Workspace) -> ShardPart:
    key = f"{number:064x}"
    store = place.root / CACHE / key
    batch = TokenBatch.from_sequences([document.tokens for document in shard.documents])
    with FlatTokensWriter(store, SHARD_LAYOUT) as writer:
        writer.append(batch)
    objects = writer.objects
    columns = {"key": [document.key for document in shard.documents], "row": range(0, 2 * len(shard.documents), 2)}
    for name, values in columns.items():
        with ArrayWriter(store, f"documents/{name}", document_spec(SHARD_LAYOUT)) as column:
            column.append(np.array(list(values), np.uint64))
        objects += column.objects
    count = len(shard.documents)
    facts = {"rows": 2 * count, "read": count, "written": count, "token_count": batch.token_count}
    stored = token_shard(key=key, objects=tuple(objects), max_token_id=batch.max_token_id, **facts)
    return ShardPart(shard=stored, file=number // 2, first_row=100 * (number % 2), all_in=shard.all_in)


def store_shards(shards: list[Shard], place: Workspace) -> list[ShardPart]:
    return [store_shard(shard, number, place) for number, shard in enumerate(shards)]


class Row(NamedTuple):
    """A document of the model, and where it comes from."""

    tokens: list[int]
    key: int
    file: int
    row: int


def model(shards: list[Shard], rule: SplitRule) -> dict[Split, list[Row]]:
    """Which documents each split has, in order, one by one."""
    rows = {"train": [], "validation": []}
    for number, shard in enumerate(shards):
        for i, document in enumerate(shard.documents):
            drawn = "validation" if rule.numbers(np.array([document.key], np.uint64))[0] else "train"
            rows[shard.all_in or drawn].append(Row(document.tokens, document.key, number // 2, 100 * (number % 2) + 2 * i))
    return rows


def target_of(place: Workspace, rule: SplitRule, layout: LayoutName = "mmap", name: str = "v", *, masked: bool = False) -> Target:
    return Target(workspace=place, name=name, layout=layout, rule=rule, token_arrays=(TOKENS, LOSS_MASK)[: 1 + masked])


def laid_out(counted: Iterable[tuple[ShardPart, SplitCounts]], target: Target) -> list[Span]:
    layout = SpanLayout(target)
    return [*(span for part, counts in counted for span in layout.add(part, counts)), *layout.rest({})]


def spans_of(parts: list[ShardPart], target: Target) -> list[Span]:
    return laid_out(((part, count_part(part, target)) for part in parts), target)


def write_all(spans: list[Span], target: Target) -> list[Written]:
    """Write the spans, in another order than theirs."""
    order = list(range(len(spans)))
    random.Random(7).shuffle(order)
    written = {i: write_span(spans[i], target) for i in order}
    return [written[i] for i in range(len(spans))]


def end_of(spans: list[Span], split: Split, of_tokens: bool) -> int:
    return max((span.stop for span in spans if span.split == split and span.of_tokens == of_tokens), default=0)


def finish(spans: list[Span], layout: LayoutName, place: Workspace) -> None:
    """The metadata, so that the arrays can be read."""
    spec, store = LAYOUTS[layout], place.root / "versions" / "v"
    for split in SPLITS:
        tokens, seqs = end_of(spans, split, True), end_of(spans, split, False)
        put_metadata(store, f"{split}/encoded_tokens", spec.encoded_tokens.metadata(tokens))
        put_metadata(store, f"{split}/seq_starts", spec.seq_starts.metadata(seqs + 1))
        for name in ("key", "file", "row"):
            put_metadata(store, f"documents/{split}/{name}", document_spec(spec).metadata(seqs))
        masks = [LOSS_MASK] if store.exists(f"{split}/{LOSS_MASK}") else []
        for name in masks:
            put_metadata(store, f"{split}/{name}", spec.token_array(name).metadata(tokens))
        put_metadata(store, split, group_metadata(spec.zarr_format, split_attributes(2**31 - 1, masks)))


def expected_objects(rows: dict[Split, list[Row]], layout: Layout) -> set[str]:
    """Names of all stored objects: as many as hold the items, the last entry of seq_starts included."""
    names = set()
    for split in SPLITS:
        tokens = sum(len(row.tokens) for row in rows[split])
        lengths = {
            f"{split}/encoded_tokens": (layout.encoded_tokens, tokens),
            f"{split}/seq_starts": (layout.seq_starts, len(rows[split]) + 1),
            **{f"documents/{split}/{name}": (document_spec(layout), len(rows[split])) for name in ("key", "file", "row")},
        }
        for name, (spec, length) in lengths.items():
            names |= {f"{name}/{spec.object_key(i)}" for i in range(-(-length // spec.object_length))}
    return names


def check_arrays(rows: dict[Split, list[Row]], layout: LayoutName, place: Workspace) -> None:
    store = place.root / "versions" / "v"
    for split in SPLITS:
        here = open_split(store / split)
        assert list(check_split(here)) == []
        assert [here.sequence(i).tolist() for i in range(here.seq_count)] == [row.tokens for row in rows[split]]
        for name in ("key", "file", "row"):
            column = open_array(store / f"documents/{split}/{name}", "uint64")
            assert column.read(0, column.length).tolist() == [getattr(row, name) for row in rows[split]]


@st.composite
def datasets(draw: st.DrawFn) -> list[Shard]:
    document = st.builds(Document, KEYS, st.lists(st.integers(0, 2**31 - 1), max_size=draw(st.sampled_from([0, 2, 20]))))
    shard = st.builds(
        Shard, st.lists(document, max_size=draw(st.sampled_from([1, 5, 12]))), st.sampled_from([None, None, None, *SPLITS])
    )
    return draw(st.lists(shard, max_size=6))


SIZES = st.fixed_dictionaries(
    {
        "tasks.assemble.write.SPAN_TOKENS": st.sampled_from([1, 8, 20, 1 << 26]),
        "tasks.assemble.write.SPAN_DOCUMENTS": st.sampled_from([1, 4, 9, 1 << 20]),
        "tasks.parts.documents.FROM_STORE": st.tuples(
            st.sampled_from([1, 3, 8, 1 << 10]), st.sampled_from([None, 2, 8, 1 << 20])
        ).map(lambda of: Reads(*of)),
        "tasks.parts.documents.MAX_SLICES_OF_A_BLOCK": st.sampled_from([0, 1, 8]),
        "tasks.parts.stored.WHOLE_BYTES": st.sampled_from([0, 60, 1 << 20]),
    }
)


@examples(30)
@given(datasets(), st.sampled_from([0, 0.3, 0.5, 1]), st.integers(0, 2**63 - 1), st.sampled_from(sorted(SMALL)), SIZES)
def test_spans_put_together_are_exactly_the_chosen_documents_in_order(place, shards, fraction, seed, layout, sizes):
    """Whatever the shards, the spans' and blocks' sizes, what is read whole, and the order in which spans are written: every
    object is written once, and all of them together are what a list would hold.
    """
    rule = SplitRule(fraction=fraction, seed=seed)
    place.root.remove("")
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(name, size)
        target = target_of(place, rule, layout)
        spans = spans_of(store_shards(shards, place), target)
        written = write_all(spans, target)
    rows = model(shards, rule)

    named = [stored.key for part in written for stored in part.objects]
    assert len(named) == len(set(named))
    assert set(named) == expected_objects(rows, SMALL[layout])
    store = place.root / "versions" / "v"
    assert {stored for part in written for stored in part.objects} == {store.digest(key) for key in dict(store.listing())}
    for split in SPLITS:
        largest = [part.max_token_id for span, part in zip(spans, written, strict=True) if span.split == split]
        assert max(largest) == max(itertools.chain.from_iterable(row.tokens for row in rows[split]), default=0)
    finish(spans, layout, place)
    check_arrays(rows, layout, place)


def even(count: int, length: int) -> Shard:
    return Shard([Document(key, [key % 1000] * length) for key in range(count)], None)


def test_the_arrays_beside_seq_starts_are_cut_where_it_is():
    """One span writes the same run of objects of all four."""
    for layout in LAYOUTS.values():
        assert document_spec(layout).object_length == layout.seq_starts.object_length


@given(
    counts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=8),
    span_tokens=st.sampled_from([1, 16, 40]),
    span_documents=st.sampled_from([1, 8, 12]),
)
def test_a_span_comes_with_the_last_shard_that_it_takes_from(counts, span_tokens, span_documents):
    """It names no other ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.assemble.write, "SPAN_TOKENS", span_tokens)
        patch.setattr(tasks.assemble.write, "SPAN_DOCUMENTS", span_documents)
        lines = SpanLayout(target_of(Workspace(Store.at("memory://nowhere"), ""), SplitRule(fraction=0, seed=0)))
        for number, one in enumerate(counts):
            part = ShardPart(shard=token_shard(), file=number, first_row=0, all_in=None)
            for span in lines.add(part, {"train": one, "validation": (0, 0)}):
                ends = [
                    (at.first_token, at.first_token + at.token_count)
                    if span.of_tokens
                    else (at.first_seq, at.first_seq + at.seq_count)
                    for at in span.parts
                ]
                assert all(start < span.stop and stop > span.start for start, stop in ends)
                assert span.parts[-1].file == number


@given(st.lists(KEYS, max_size=50), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**63 - 1))
def test_a_larger_fraction_keeps_what_a_smaller_one_chose(keys, one, other, seed):
    array = np.array(keys, np.uint64)
    fewer, more = (SplitRule(fraction=fraction, seed=seed).numbers(array) for fraction in sorted((one, other)))
    assert not (fewer & ~more).any()


def test_membership_is_the_same_in_every_version():
    """Literals, computed with Python's own integers: who changes them moves documents between the splits of every dataset."""
    keys = np.arange(12, dtype=np.uint64)
    assert np.flatnonzero(SplitRule(fraction=0.5, seed=0).numbers(keys)).tolist() == [4, 5, 9, 11]
    assert np.flatnonzero(SplitRule(fraction=0.5, seed=1).numbers(keys)).tolist() == [1, 3, 4, 5, 6, 8, 10, 11]


ALL_TRAIN = SplitRule(fraction=0, seed=0)


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


@pytest.mark.parametrize(
    ("setting", "value", "shards", "early"),
    [
        ("BACKLOG", 100, [(4, 5), (4, 5)], range(5)),  # five objects, in spans of two, two and one, which is not full
        ("SMALL_TOKENS", 21, [(4, 5), (7, 3)], (4, 5)),  # the span that begins with the larger one
        ("BACKLOG", -1, [(4, 5)], ()),  # the thread falls behind
    ],
)
def test_tokens_are_written_without_a_task_or_left_to_the_tasks(place, monkeypatch, setting, value, shards, early):
    """Those of small shards, and those that come faster than they are written, are left."""
    monkeypatch.setattr(tasks.assemble.write, setting, value)
    with opened(target_of(place, ALL_TRAIN)) as assembler:
        for part in store_shards([even(*one) for one in shards], place):
            assembler.add(part)
        assembler.end()
    assert objects_of(place) == [f"train/encoded_tokens/c/{i}" for i in early]


def test_what_could_not_be_written_while_parts_arrived_is_written_by_the_task(place, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.assemble.write.SpanWriter, "_tokens", full)
    target = target_of(place, ALL_TRAIN)
    found = assembled(store_shards([even(4, 5)], place), target)
    assert found == [(span, write_span(span, target)) for span, _ in found]


def test_a_build_that_fails_leaves_no_part_of_a_span(place):
    """Its parts have not all arrived: nobody waits for them, and nothing is stored of it."""

    def build() -> None:
        with opened(target_of(place, ALL_TRAIN)) as assembler:
            for part in store_shards([even(1, 5)], place):
                assembler.add(part)
            raise ValueError("a slice is bad")

    with refusal("a slice is bad"):
        build()
    assert objects_of(place) == []


def test_a_span_that_did_not_get_its_items_fails(place, monkeypatch):
    """Receipts and arrays that contradict each other are a fault of ours: nothing of it may be published."""
    monkeypatch.setattr(tasks.assemble.assembler, "count_part", lambda part, target: {"train": (6, 16), "validation": (0, 0)})
    with pytest.raises(AssertionError, match="15 items arrived instead of 16"):
        assembled(store_shards([even(5, 3)], place), target_of(place, ALL_TRAIN))
