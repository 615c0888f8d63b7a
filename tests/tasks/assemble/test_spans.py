"""Which documents go where, and where in the final arrays each lands: against a model of lists. Spans of tokens that are written
while their parts arrive are those that tasks write, or are left to them. Tokens that are streamed into a version: the arrays are
those of stored shards, what is not finished can be taken from, and whoever waits for somebody that fails is told so.
"""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens.stores.local
import tasks.assemble.write
import tasks.parts.documents
import tasks.parts.stored
from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.arrays.opening import open_array
from flat_tokens.batch import LOSS_MASK, TOKENS, TokenBatch
from flat_tokens.checker import check_split
from flat_tokens.manifest import SPLITS
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.assemble.assembler import AssembledArrays, Assembler, VersionSink
from tasks.assemble.duplicates import DuplicateFilter
from tasks.assemble.write import Span, SpanLayout, WrittenSpan, count_part, write_span
from tasks.finalize.seal import _split_metadata, split_totals
from tasks.models import Split, TokenShard
from tasks.output.leases import Workspace, attempt
from tasks.output.paths import CACHE, UNFINISHED, shard_key
from tasks.output.target import SplitRule, Target
from tasks.parts.documents import Reads
from tasks.parts.opening import open_shard
from tasks.parts.part import ShardPart
from tasks.parts.stored import (
    ENTRIES,
    LENGTH,
    SPLIT,
    TAILS,
    check_unfinished,
    document_spec,
    may_stream,
    write_entries,
    write_tails,
)
from tasks.rows import DIGEST, KEY, ROW, as_rows, changed
from tasks.shards.stream import TASK, BrokenStreamError
from tests.examples import examples
from tests.made import small
from tests.processes import until
from tests.refusal import refusal
from tests.tasks.test_config import config, token_shard

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


def finish(assembled: AssembledArrays, target: Target) -> None:
    """The metadata, so that the arrays can be read."""
    for split, totals in split_totals(assembled, SPLITS).items():
        _split_metadata(target, split, totals)


def check_arrays(rows: dict[Split, list[Row]], place: Workspace) -> None:
    store = place.root / "versions" / "v"
    for split in SPLITS:
        here = open_split(store / split)
        assert list(check_split(here)) == []
        assert here.max_token_id == max((max(row.tokens, default=0) for row in rows[split]), default=0)
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
    object is written once, and all of them together are what a list would hold. A span comes with the last shard that it takes
    from, and names no other ones than it takes from.
    """
    rule = SplitRule(fraction=fraction, seed=seed)
    place.root.remove("")
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(name, size)
        target = target_of(place, rule, layout)
        lines, parts = SpanLayout(target), store_shards(shards, place)
        spans = []
        for part in parts:
            ended = list(lines.add(part, count_part(part, target)))
            assert all((last := span.parts[-1]).file == part.file and last.first_row == part.first_row for span in ended)
            spans += ended
        spans += lines.rest({})
        for span in spans:
            for one in span.parts:
                start, count = (one.first_token, one.token_count) if span.of_tokens else (one.first_seq, one.seq_count)
                assert start < span.stop
                assert start + count > span.start
        order = random.Random(7).sample(range(len(spans)), len(spans))
        written = [span for _, span in sorted({i: write_span(spans[i], target) for i in order}.items())]
    rows = model(shards, rule)

    store = place.root / "versions" / "v"
    assert sorted(one for part in written for one in part.objects) == sorted(store.digest(key) for key, _ in store.listing())
    finish(AssembledArrays(spans, written, [], {}), target)
    check_arrays(rows, place)


def even(count: int, length: int) -> Shard:
    return Shard([Document(key, [key % 1000] * length) for key in range(count)], None)


ALL_TRAIN = SplitRule(fraction=0, seed=0)


class OnRequest:
    """A span that is written when its result is asked for."""

    def __init__(self, span: Span, target: Target, assembler: Assembler) -> None:
        self.arguments = span, target, assembler

    def result(self) -> WrittenSpan:
        return write_span(*self.arguments)

    def cancel(self) -> bool:
        return True


def assembled(parts: list[ShardPart], target: Target) -> list[tuple[Span, WrittenSpan]]:
    with opened_sink(target, streams=False) as (assembler, _):
        for part in parts:
            assembler.add(part)
        assembler.end()
        found = assembler.finish()
        return list(zip(found.spans, found.written, strict=True))


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
    with opened_sink(target_of(place, ALL_TRAIN), streams=False) as (assembler, _):
        for part in store_shards([even(*one) for one in shards], place):
            assembler.add(part)
        assembler.end()
    assert stored_in(place) == [f"train/encoded_tokens/c/{i}" for i in early]


def test_what_could_not_be_written_while_parts_arrived_is_written_by_the_task(place, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.assemble.write.SpanWriter, "_tokens", full)
    target = target_of(place, ALL_TRAIN)
    found = assembled(store_shards([even(4, 5)], place), target)
    assert found == [(span, write_span(span, target)) for span, _ in found]


def test_a_span_that_did_not_get_its_items_fails(place, monkeypatch):
    """Receipts and arrays that contradict each other are a fault of ours: nothing of it may be published."""
    monkeypatch.setattr(tasks.assemble.assembler, "count_part", lambda part, target: {"train": (6, 16), "validation": (0, 0)})
    with pytest.raises(AssertionError, match="15 items arrived instead of 16"):
        assembled(store_shards([even(5, 3)], place), target_of(place, ALL_TRAIN))


def stored_in(place: Workspace) -> list[str]:
    return sorted(key for key, _ in (place.root / "versions/v").listing())


VERSION = "v"
HALF = SplitRule(fraction=0.5, seed=1)
SLICES = 7
ONE_ROW = as_rows({KEY: np.ones(1, np.uint64)})


@contextlib.contextmanager
def an_attempt(at: Path) -> Iterator[Workspace]:
    """An attempt on a disk. Spans have eight tokens, in two chunks."""
    with pytest.MonkeyPatch.context() as patch, attempt(Store.at(at), at / "scratch", VERSION) as place:
        patch.setattr(tasks.assemble.write, "SPAN_TOKENS", 8)
        yield place


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Workspace]:
    with an_attempt(tmp_path / "out") as place:
        yield place


def key_of(number: int) -> str:
    return f"{number:064x}"


@contextlib.contextmanager
def opened_sink(
    target: Target, shards: list[Shard] | None = None, *, streams: bool = True
) -> Iterator[tuple[Assembler, VersionSink]]:
    """An assembler of *shards*, or of any slices, and its sink. Spans of tokens are written while parts arrive, the others when
    their results are asked for.
    """
    splits = [shard.all_in for shard in shards] if shards is not None else [None] * SLICES
    with Assembler(target) as assembler:
        assembler.write_with(lambda span: OnRequest(span, target, assembler))
        sink = assembler.open_sink({key_of(i): (i, split) for i, split in enumerate(splits)}, streams=streams)
        assert sink is not None
        yield assembler, sink


def mask_of(batch: TokenBatch) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Every third token does not count."""
    return (batch.encoded_tokens % 3 != 0).astype(np.uint8)


def stream(shard: Shard, number: int, sink: VersionSink, target: Target, batch_size: int = 2) -> ShardPart:
    """Stream the tokens of a shard as a slice does that is tokenized, some documents at a time, and store its entries. Where the
    thread that writes has left the span to tasks, the shard is stored.
    """
    place = target.workspace
    part = store_shard(shard, number, Workspace(Store.at("memory://other"), ""))
    entries = []
    with sink.stream(key_of(number)) as into:
        if into is None:
            return store_shard(shard, number, place)
        for first in range(0, len(shard.documents), batch_size):
            some = shard.documents[first : first + batch_size]
            batch, rows = TokenBatch.from_sequences([document.tokens for document in some]), np.arange(len(some)) + first
            if LOSS_MASK in target.token_arrays:
                batch = batch._replace(loss_mask=mask_of(batch))
            keys = np.array([document.key for document in some], np.uint64)
            facts = as_rows({KEY: keys, ROW: 2 * rows.astype(np.uint64)})
            beside = {LENGTH: np.diff(batch.seq_starts), SPLIT: into.append(batch, facts)}
            entries.append(changed(facts, as_rows(beside)))
        store, streamed = place.root / shard_key(part.shard.key), into.end()
        objects = write_entries(store, entries), write_tails(store, streamed.tails)
        facts = {"objects": objects, "unfinished": streamed.location, "token_arrays": target.token_arrays}
    return part.model_copy(update={"shard": part.shard.model_copy(update=facts)})


def build(
    shards: list[Shard],
    target: Target,
    known: dict[int, TokenShard],
    streamed: set[int],
    stop: int | None = None,
    backlog: int = 100,
) -> dict[int, TokenShard]:
    """Write all spans, or take the first *stop* shards and fail. Some are *known*, others *streamed*, the rest is stored. Return
    those that were streamed.
    """
    found = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.suppress(KeyboardInterrupt),
        opened_sink(target, shards) as (assembler, sink),
    ):
        patch.setattr(tasks.assemble.write, "BACKLOG", backlog)
        for number, shard in enumerate(shards[:stop]):
            if number in known:
                file, row = number // 2, 100 * (number % 2)
                part = ShardPart(shard=known[number], file=file, first_row=row, all_in=shard.all_in)
            elif number in streamed:
                part = stream(shard, number, sink, target)
                if part.shard.unfinished is not None:
                    found[number] = part.shard
            else:
                part = store_shard(shard, number, target.workspace)
            assembler.add(part)
        if stop is not None:
            raise KeyboardInterrupt
        assembler.end()
        finish(assembler.finish(), target)
    return found


def check_documents(shard: Shard, stored: TokenShard, place: Workspace) -> None:
    documents = open_shard(place.root, stored)
    assert documents.keys.tolist() == [document.key for document in shard.documents]
    assert documents.fact(ROW).tolist() == [2 * i for i in range(len(shard.documents))]
    total = int(documents.lengths.sum())
    tokens = np.concatenate([*documents.items(TOKENS, 0, total), np.empty(0, np.uint32)])
    expected = TokenBatch.from_sequences([document.tokens for document in shard.documents])
    assert tokens.tolist() == expected.encoded_tokens.tolist()
    assert documents.lengths.tolist() == np.diff(expected.seq_starts).tolist()
    if LOSS_MASK in stored.token_arrays:
        masks = np.concatenate([*documents.items(LOSS_MASK, 0, total), np.empty(0, np.uint8)])
        assert masks.tolist() == mask_of(expected).tolist()


@examples(80)
@given(
    datasets(),
    st.sets(st.integers(0, 5)),
    st.sampled_from([0, 0.3, 1]),
    st.sampled_from([0, 0.3, 1]),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from(sorted(SMALL)),
    st.sampled_from([-1, 0, 2, 100]),
)
def test_what_is_not_finished_can_be_taken_from_and_the_arrays_are_those_of_stored_shards(
    tmp_path_factory,
    shards,
    streamed,
    fraction,
    other_fraction,
    stop,
    masked,
    layout,
    backlog,
):
    """By an attempt at the same version, which goes on from there, or at one with another split; with a loss mask, too.
    Whichever slices are streamed, and however far behind a thread may be before spans are left to the tasks. Nothing is left.
    """
    rule, other = SplitRule(fraction=fraction, seed=1), SplitRule(fraction=other_fraction, seed=1)
    at = tmp_path_factory.mktemp("unfinished") / "out"
    with an_attempt(at) as place:
        former = target_of(place, rule, layout, VERSION if rule == other else "another", masked=masked)
        known = build(shards, former, {}, streamed, stop, backlog)
    with an_attempt(at) as place:
        for number, shard in known.items():
            check_unfinished(place.root, shard)
            check_documents(shards[number], shard, place)
        found = build(shards, target_of(place, other, layout, masked=masked), known, streamed, None, backlog)
        check_arrays(model(shards, other), place)
        for number, shard in found.items():  # in objects that are whole
            check_unfinished(place.root, shard)
            check_documents(shards[number], shard, place)
        if stop == 0:
            if backlog == 100 and streamed >= set(range(len(shards))):  # else spans may have been left to tasks
                assert found.keys() == set(range(len(shards)))
            assert not Path(place.root.path(UNFINISHED)).exists()


def test_objects_and_entries_that_do_not_fit_the_receipt_are_found(tmp_path):
    """A streamed shard of twelve tokens in train, whose attempt has ended; a file has the last four of them."""
    with an_attempt(tmp_path / "out") as place:
        shard = build([even(4, 3)], target_of(place, ALL_TRAIN), {}, {0}, 1)[0]
        path = Path(place.root.path(UNFINISHED)) / place.attempt / "train-1"
    with an_attempt(tmp_path / "out") as place:
        for happens, words in (
            (lambda: os.truncate(path, 12), "object 1 of train of the unfinished version v ends before token 4"),
            (lambda: os.truncate(path, 0), "empty file"),
            (path.unlink, "object 1 of train of the unfinished version v is gone"),
            (lambda: os.mkfifo(path), "is not a plain file"),
        ):
            happens()
            with refusal(words):
                check_unfinished(place.root, shard)
        os.truncate(place.root.path(f"{shard_key(shard.key)}/{ENTRIES}"), 99)
        with refusal("has 99 bytes, which are not those of 4 documents"):
            open_shard(place.root, shard)


def test_tails_that_do_not_fit_the_receipt_are_found(on_disk):
    target = target_of(on_disk, ALL_TRAIN, "compact")
    with opened_sink(target) as (_, sink):
        shard = stream(even(1, 3), 0, sink, target).shard
        os.truncate(on_disk.root.path(f"{shard_key(shard.key)}/{TAILS}"), 8)
        with refusal("tails: has 8 bytes, which are not those of 3 tokens"):
            check_unfinished(on_disk.root, shard)


def in_background(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """The result of a thread that nobody waits for at the end."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # it is what the test is about
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_slice_waits_for_those_before_it(on_disk):
    def wait(sink: VersionSink) -> bool:
        with sink.stream(key_of(1)) as into:
            return into is not None

    with opened_sink(target_of(on_disk, HALF)) as (assembler, sink):
        waiting = in_background(wait, sink)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        assembler.add(store_shard(even(1, 3), 0, on_disk))
        assert waiting.result(60)


@pytest.mark.parametrize("task", [None, object()])
def test_a_slice_waits_for_one_before_it_that_its_thread_had_but_not_for_one_of_its_own_task(on_disk, task):
    """The part of that one is added meanwhile; that of one of the same task when the task has ended."""
    before = TASK.set(task)
    with opened_sink(target_of(on_disk, HALF)) as (assembler, sink):
        sink.skip(key_of(0))
        adding = threading.Timer(0.05, lambda: assembler.add(store_shard(even(1, 3), 0, on_disk)))
        adding.start()
        with sink.stream(key_of(1)) as into:
            assert (into is None) == (task is not None)
        adding.join()
    TASK.reset(before)


KEPT = {"near_duplicates": {"action": "keep"}}


@pytest.mark.parametrize(
    ("changed", "streams"),
    [
        ({"root": Store.at("memory://there")}, False),
        ({"config": config(documents={"duplicates": "drop"})}, True),
        ({"config": config(documents={"near_duplicates": {}})}, False),
        ({"config": config(documents=KEPT)}, True),
        ({"config": config(documents=KEPT, split={"by": "cluster"})}, False),
    ],
)
def test_where_tokens_go_straight_into_the_version(on_disk, changed, streams):
    usual = {"root": on_disk.root, "config": config()}
    assert may_stream(**{**usual, **changed}) == streams


def test_a_slice_that_fails_takes_none_before_it_along(on_disk):
    """Half of its tokens are in an object that the slice before it began: it is written again from that one's tokens."""
    shards, target = [even(1, 5), even(4, 5), even(1, 3)], target_of(on_disk, ALL_TRAIN)
    with opened_sink(target) as (assembler, sink):
        assembler.add(stream(shards[0], 0, sink, target))
        with contextlib.suppress(OSError), sink.stream(key_of(1)) as into:
            into.append(TokenBatch.from_sequences([[1, 2]]), ONE_ROW)
            raise OSError("the file's store is away")
        for number in (1, 2):  # tried again, as Prefect does
            with sink.stream(key_of(number)) as into:
                assert into is None
            assembler.add(store_shard(shards[number], number, on_disk))
        assembler.end()
        finish(assembler.finish(), target)
    check_arrays(model(shards, ALL_TRAIN), on_disk)


def test_a_slice_that_fails_is_no_copy_of_itself(on_disk):
    """What was compared of it is taken back: it is compared when it is added. What was compared of it to its end stays."""
    target = target_of(on_disk, ALL_TRAIN).model_copy(update={"texts": {DIGEST: 2}})
    duplicates = DuplicateFilter(target)
    digests, numbers = np.arange(6, dtype=np.uint64).reshape(3, 2), np.arange(3, dtype=np.uint64)
    rows = as_rows({KEY: numbers, ROW: numbers, DIGEST: digests})
    with Assembler(duplicates.target) as assembler:
        sink = assembler.open_sink({key_of(i): (i, None) for i in range(3)}, streams=True, duplicates=duplicates)
        with sink.stream(key_of(0)) as into:
            batch = TokenBatch.from_sequences([[1], [2], [1]])
            copied = changed(rows, as_rows({DIGEST: digests[[0, 1, 0]]}))
            assert into.append(batch, copied).tolist() == [0, 0, 3]
            into.end()
        with contextlib.suppress(OSError), sink.stream(key_of(1)) as into:
            assert into.append(batch, rows).tolist() == [3, 3, 0]
            raise OSError("the file's store is away")
    assert duplicates.seen.add(digests, numbers).copies.tolist() == [0, 1]
    assert [some.copies.tolist() for some in duplicates.streamed[0]] == [[2]]
    assert list(duplicates.streamed) == [0]


class Disk:
    """Notes writes and syncs of files as they happen. A sync of a file waits until ``ready`` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []
        self.ready = threading.Event()
        self._write = flat_tokens.stores.local._write_all
        patch.setattr(flat_tokens.stores.local, "_write_all", self.write)
        patch.setattr(os, "fsync", self.sync)

    def write(self, descriptor: int, *rest: Any) -> None:
        self._write(descriptor, *rest)
        self.done.append(("write", os.readlink(f"/proc/self/fd/{descriptor}")))

    def sync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not os.path.isdir(path):
            self.ready.wait(60)
        self.done.append(("sync", path))


def stream_two(sink: VersionSink, key: str) -> None:
    """Stream the tokens of a slice that has two, without entries: so that nothing but the tokens waits for the disk."""
    with sink.stream(key) as into:
        into.append(TokenBatch.from_sequences([[1, 2]]), ONE_ROW)
        into.end()


def test_a_slice_has_ended_when_its_tokens_and_their_name_are_on_the_disk(on_disk, monkeypatch):
    """Not before: the sync comes after the last write, that of the directory too, and the mark after both."""
    target, disk = target_of(on_disk, ALL_TRAIN), Disk(monkeypatch)
    path = Path(on_disk.root.path(UNFINISHED)) / on_disk.attempt / "train-0"
    with opened_sink(target) as (_, sink):
        slice_ = in_background(stream_two, sink, key_of(0))
        with pytest.raises(TimeoutError):
            slice_.result(0.2)
        disk.ready.set()
        slice_.result(60)
        done = list(disk.done)
    assert [kind for kind, name in done if name == str(path)][-2:] == ["write", "sync"]
    assert ("sync", str(path.parent)) in done


def test_a_slice_that_waits_for_room_is_woken_when_the_writer_fails(on_disk, monkeypatch):
    """The writer fails when the slice has been waiting for it: nothing else wakes that."""
    target, fails = target_of(on_disk, ALL_TRAIN), threading.Event()

    def write(*_: Any) -> Any:
        fails.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.assemble.write, "write_tokens", write)
    with opened_sink(target) as (assembler, sink):
        slice_ = in_background(stream, even(40, 30), 0, sink, target)
        until(lambda: assembler._writers["train"]._waiting == tasks.assemble.write.ARRAYS_WAITING)
        with pytest.raises(TimeoutError):
            slice_.result(0.1)
        fails.set()
        with pytest.raises(BrokenStreamError):
            slice_.result(60)


def test_a_slice_whose_span_is_given_up_has_not_ended(on_disk, monkeypatch):
    """Its tokens arrived while the disk was busy with those before them, and were never written."""
    target, disk = target_of(on_disk, ALL_TRAIN), Disk(monkeypatch)
    with opened_sink(target) as (assembler, sink):
        first = in_background(stream_two, sink, key_of(0))
        with sink.stream(key_of(1)) as second:
            second.append(TokenBatch.from_sequences([[1, 2]]), ONE_ROW)
            assembler._writers["train"].break_off()
            disk.ready.set()
            with pytest.raises(BrokenStreamError):
                second.end()
        first.exception(60)
