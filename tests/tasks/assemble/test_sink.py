"""Tokens that are streamed into a version: the arrays are those of stored shards, what is not finished can be taken from, and
whoever waits for somebody that fails is told so.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens.stores.local
import tasks.assemble.write
from flat_tokens.batch import LOSS_MASK, TOKENS, TokenBatch
from flat_tokens.stores.store import Store
from tasks.assemble.assembler import Assembler
from tasks.assemble.duplicates import DuplicateFilter
from tasks.assemble.sink import VersionSink
from tasks.models import TokenShard
from tasks.output.leases import Workspace, attempt
from tasks.output.paths import UNFINISHED, shard_key
from tasks.output.target import SplitRule, Target
from tasks.parts.opening import open_shard
from tasks.parts.part import ShardPart
from tasks.parts.stored import (
    ENTRIES,
    LENGTH,
    SPLIT,
    TAILS,
    check_unfinished,
    may_stream,
    write_entries,
    write_tails,
)
from tasks.rows import DIGEST, KEY, ROW, as_rows, changed
from tasks.shards.stream import TASK, BrokenStreamError
from tests.examples import examples
from tests.refusal import refusal
from tests.tasks.assemble.test_spans import (
    ALL_TRAIN,
    SMALL,
    Document,
    OnRequest,
    Shard,
    _small_spans,  # noqa: F401  a fixture
    check_arrays,
    datasets,
    even,
    finish,
    model,
    store_shard,
    target_of,
)
from tests.tasks.test_config import config

VERSION = "v"
HALF = SplitRule(fraction=0.5, seed=1)
SLICES = 7
ONE_ROW = as_rows({KEY: np.ones(1, np.uint64)})


@pytest.fixture(autouse=True)
def _small(_small_spans: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Objects and spans of eight tokens, in two chunks."""
    monkeypatch.setattr(tasks.assemble.write, "SPAN_TOKENS", 8)


@contextlib.contextmanager
def an_attempt(at: Path) -> Iterator[Workspace]:
    with attempt(Store.at(at), at / "scratch", VERSION) as place:
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workspace]:
    with an_attempt(tmp_path / "out") as place:
        yield place


def key_of(number: int) -> str:
    return f"{number:064x}"


@contextlib.contextmanager
def opened(target: Target, shards: list[Shard] | None = None) -> Iterator[tuple[Assembler, VersionSink]]:
    """An assembler of *shards*, or of any slices, and its sink."""
    splits = [shard.all_in for shard in shards] if shards is not None else [None] * SLICES
    with Assembler(target) as assembler:
        assembler.write_with(lambda span: OnRequest(span, target, assembler))
        sink = assembler.open_sink({key_of(i): (i, split) for i, split in enumerate(splits)}, streams=True)
        assert sink is not None
        yield assembler, sink


def keys_of(documents: list[Document]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([document.key for document in documents], np.uint64)


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
            facts = as_rows({KEY: keys_of(some), ROW: 2 * rows.astype(np.uint64)})
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
        opened(target, shards) as (assembler, sink),
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
        finish(assembler.finish().spans, target.layout, target.workspace)
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
        check_arrays(model(shards, other), layout, place)
        for number, shard in found.items():  # in objects that are whole
            check_unfinished(place.root, shard)
            check_documents(shards[number], shard, place)
        if stop == 0:
            if backlog == 100 and streamed >= set(range(len(shards))):  # else spans may have been left to tasks
                assert found.keys() == set(range(len(shards)))
            assert not Path(place.root.path(UNFINISHED)).exists()


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[tuple[Workspace, TokenShard, Path]]:
    """A streamed shard of twelve tokens in train, whose attempt has ended, and the file that has the last four of them."""
    with an_attempt(tmp_path / "out") as place:
        known = build([even(4, 3)], target_of(place, ALL_TRAIN), {}, {0}, 1)
        name = place.attempt
    with an_attempt(tmp_path / "out") as place:
        yield place, known[0], Path(place.root.path(UNFINISHED)) / name / "train-1"


def check(place: Workspace, shard: TokenShard) -> None:
    check_unfinished(place.root, shard)


def test_an_object_that_ends_early_or_is_gone_is_found(unfinished):
    place, shard, path = unfinished
    os.truncate(path, 12)
    with refusal("object 1 of train of the unfinished version v ends before token 4"):
        check(place, shard)
    os.truncate(path, 0)
    with pytest.raises(ValueError):
        check(place, shard)
    path.unlink()
    with refusal("object 1 of train of the unfinished version v is gone"):
        check(place, shard)
    os.mkfifo(path)
    with refusal("is not a plain file"):
        check(place, shard)


def test_entries_that_do_not_fit_the_receipt_are_found(unfinished):
    place, shard, _ = unfinished
    os.truncate(place.root.path(f"{shard_key(shard.key)}/{ENTRIES}"), 99)
    with refusal("has 99 bytes, which are not those of 4 documents"):
        open_shard(place.root, shard)


def test_tails_that_do_not_fit_the_receipt_are_found(place):
    target = target_of(place, ALL_TRAIN, "compact")
    with opened(target) as (_, sink):
        shard = stream(even(1, 3), 0, sink, target).shard
        os.truncate(place.root.path(f"{shard_key(shard.key)}/{TAILS}"), 8)
        with refusal("tails: has 8 bytes, which are not those of 3 tokens"):
            check(place, shard)


def test_a_slice_waits_for_those_before_it(place):
    """Until the streams stop: then it is stored as a shard."""
    got = []

    def wait(sink: VersionSink) -> None:
        with sink.stream(key_of(1)) as into:
            got.append(into is not None)

    target = target_of(place, HALF)
    with opened(target) as (assembler, sink):
        waiting = threading.Thread(target=wait, args=(sink,))
        waiting.start()
        waiting.join(0.05)
        assert got == []
        assembler.add(store_shard(even(1, 3), 0, place))
        waiting.join(60)
        assert got == [True]
    with opened(target) as (_, sink):
        waiting = threading.Thread(target=wait, args=(sink,))
        waiting.start()
        sink.stop()
        waiting.join(60)
        assert got == [True, False]


def test_a_slice_waits_for_none_of_its_own_task(place):
    """The part of that one is added when the task has ended."""
    before = TASK.set(object())
    try:
        with opened(target_of(place, HALF)) as (_, sink):
            sink.skip(key_of(0))
            with sink.stream(key_of(1)) as into:
                assert into is None
    finally:
        TASK.reset(before)


def test_a_slice_waits_for_the_one_that_its_thread_had_before(place):
    """The part of that one is added meanwhile: both are tasks of their own."""
    with opened(target_of(place, HALF)) as (assembler, sink):
        sink.skip(key_of(0))
        adding = threading.Timer(0.05, lambda: assembler.add(store_shard(even(1, 3), 0, place)))
        adding.start()
        with sink.stream(key_of(1)) as into:
            assert into is not None
        adding.join()


KEPT = {"near_duplicates": {"action": "keep"}}


@pytest.mark.parametrize(
    ("changed", "streams"),
    [
        ({}, True),
        ({"here": False}, False),
        ({"root": Store.at("memory://there")}, False),
        ({"config": config(documents={"duplicates": "drop"})}, True),
        ({"config": config(documents={"near_duplicates": {}})}, False),
        ({"config": config(documents=KEPT)}, True),
        ({"config": config(documents=KEPT, split={"by": "cluster"})}, False),
    ],
)
def test_where_tokens_go_straight_into_the_version(place, changed, streams):
    usual = {"root": place.root, "config": config(), "here": True}
    assert may_stream(**{**usual, **changed}) == streams


def test_a_slice_that_fails_takes_none_before_it_along(place):
    """Half of its tokens are in an object that the slice before it began: it is written again from that one's tokens."""
    shards, target = [even(1, 5), even(4, 5), even(1, 3)], target_of(place, ALL_TRAIN)
    with opened(target) as (assembler, sink):
        assembler.add(stream(shards[0], 0, sink, target))
        with contextlib.suppress(OSError), sink.stream(key_of(1)) as into:
            into.append(TokenBatch.from_sequences([[1, 2]]), ONE_ROW)
            raise OSError("the file's store is away")
        for number in (1, 2):  # tried again, as Prefect does
            with sink.stream(key_of(number)) as into:
                assert into is None
            assembler.add(store_shard(shards[number], number, place))
        assembler.end()
        finish(assembler.finish().spans, "mmap", place)
    check_arrays(model(shards, ALL_TRAIN), "mmap", place)


def test_a_slice_that_fails_is_no_copy_of_itself(place):
    """What was compared of it is taken back: it is compared when it is added. What was compared of it to its end stays."""
    target = target_of(place, ALL_TRAIN).model_copy(update={"texts": {DIGEST: 2}})
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


def within(seconds: float, call: Callable[[], Any]) -> list[BaseException]:
    """The errors that *call* raises, in a thread of its own that ends within so many seconds."""
    raised = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # it is what the test is about
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "somebody waits for ever"
    return raised


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("for_good", [False, True])
def test_nobody_waits_for_a_writer_that_failed(place, monkeypatch, failing, for_good):
    """One write of an object fails, and the slice has tokens for many objects after it: its thread and those of the slices behind
    it are told, and the build ends.
    """
    real, count = tasks.assemble.write.write_tokens, 0

    def write(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == failing + 1 or (for_good and count > failing):
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(tasks.assemble.write, "write_tokens", write)
    target = target_of(place, HALF)

    def slices() -> None:
        with opened(target) as (_, sink):
            later = threading.Thread(target=within, args=(30, lambda: stream(even(9, 30), 1, sink, target)), daemon=True)
            later.start()
            try:
                stream(even(40, 30), 0, sink, target)
            finally:
                sink.stop()
                later.join(30)
                assert not later.is_alive()

    (error,) = within(60, slices)
    assert isinstance(error, OSError | BrokenStreamError)


def test_many_short_documents_are_few_arrays(place, monkeypatch):
    """Half of them validation, in no order: the thread that writes gets them together, not one by one."""
    shards, lengths = [Shard([Document(key, [key % 7] * (key % 3)) for key in range(900)], None)], []
    real = tasks.assemble.write.SpanWriter.stream

    def noted(writer: Any, tokens: Any, *rest: Any) -> Any:
        lengths.append(len(tokens))
        return real(writer, tokens, *rest)

    monkeypatch.setattr(tasks.assemble.write, "SPAN_TOKENS", 1 << 10)
    monkeypatch.setattr(tasks.assemble.write.SpanWriter, "stream", noted)
    target = target_of(place, HALF)
    with opened(target, shards) as (assembler, sink):
        assembler.add(stream(shards[0], 0, sink, target, len(shards[0].documents)))
        assembler.end()
        finish(assembler.finish().spans, "mmap", place)
    check_arrays(model(shards, HALF), "mmap", place)
    assert len(lengths) == 2


def test_a_slice_after_one_that_fails_is_told_so(place):
    """Its tokens arrived after those of the other, which waited for the disk."""
    batch = TokenBatch.from_sequences([[1, 2]])

    def fail(sink: VersionSink) -> None:
        with sink.stream(key_of(0)) as first, contextlib.ExitStack() as later:
            first.append(batch, ONE_ROW)
            first.end()
            second = later.enter_context(sink.stream(key_of(1)))
            second.append(batch, ONE_ROW)
            raise OSError("No space left on device")

    with opened(target_of(place, ALL_TRAIN)) as (assembler, sink):
        with refusal("No space left", OSError):
            fail(sink)
        with pytest.raises(BrokenStreamError):
            list(assembler._writers["train"].stream(batch.arrays, 5))


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


def test_a_slice_has_ended_when_its_tokens_and_their_name_are_on_the_disk(place, monkeypatch):
    """Not before: the sync comes after the last write, that of the directory too, and the mark after both."""
    target, disk = target_of(place, ALL_TRAIN), Disk(monkeypatch)
    path = Path(place.root.path(UNFINISHED)) / place.attempt / "train-0"
    with opened(target) as (_, sink):
        slice_ = threading.Thread(target=stream_two, args=(sink, key_of(0)), daemon=True)
        slice_.start()
        slice_.join(0.2)
        assert slice_.is_alive()
        disk.ready.set()
        slice_.join(60)
        assert not slice_.is_alive()
        done = list(disk.done)
    assert [kind for kind, name in done if name == str(path)][-2:] == ["write", "sync"]
    assert ("sync", str(path.parent)) in done


def test_a_slice_that_waits_for_room_is_woken_when_the_writer_fails(place, monkeypatch):
    """The writer fails when the slice has been waiting for it: nothing else wakes that."""
    target, fails = target_of(place, ALL_TRAIN), threading.Event()

    def write(*_: Any) -> Any:
        fails.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.assemble.write, "write_tokens", write)
    with opened(target) as (assembler, sink):
        raised = []
        slice_ = threading.Thread(target=lambda: raised.extend(within(30, lambda: stream(even(40, 30), 0, sink, target))))
        slice_.start()
        writer, end = assembler._writers["train"], time.monotonic() + 60
        while writer._waiting < tasks.assemble.write.ARRAYS_WAITING:
            assert time.monotonic() < end
            time.sleep(0.01)
        slice_.join(0.1)
        fails.set()
        slice_.join(60)
    assert [type(error) for error in raised] == [BrokenStreamError]


def test_a_slice_whose_span_is_given_up_has_not_ended(place, monkeypatch):
    """Its tokens arrived while the disk was busy with those before them, and were never written."""
    target, disk = target_of(place, ALL_TRAIN), Disk(monkeypatch)
    with opened(target) as (assembler, sink):
        first = threading.Thread(target=within, args=(60, lambda: stream_two(sink, key_of(0))))
        first.start()
        with sink.stream(key_of(1)) as second:
            second.append(TokenBatch.from_sequences([[1, 2]]), ONE_ROW)
            assembler._writers["train"].break_off()
            disk.ready.set()
            with pytest.raises(BrokenStreamError):
                second.end()
        first.join(60)
