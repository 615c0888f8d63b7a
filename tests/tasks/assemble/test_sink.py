"""Tokens that go straight into a version: the arrays are those of stored shards, and what is not finished can be taken from."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.assemble.assembler
import tasks.assemble.span_writer
import tasks.assemble.spans
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.batch import TokenBatch
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.paths import UNFINISHED, shard_key
from tasks.output.staging import Place, attempt
from tasks.shards.contents import open_contents
from tasks.shards.fresh import Fresh
from tasks.parts.unfinished import ENTRIES, BrokenStreamError, Entries, check_unfinished, write_entries
from tasks.assemble.assembler import Ahead
from tasks.assemble.spans import CountedPlace, ShardPlace, ShardSpan, SplitRule, count_documents, lay_out
from tests.examples import examples
from tests.tasks.assemble.test_spans import (
    SMALL,
    Document,
    Shard,
    check_arrays,
    datasets,
    even,
    finish,
    model,
    store_shard,
)

VERSION = "v"
HALF = SplitRule(fraction=0.5, seed=1)


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects and spans of eight tokens, in two chunks."""
    for name, layout in SMALL.items():
        monkeypatch.setitem(LAYOUTS, name, layout)
    monkeypatch.setattr(tasks.assemble.spans, "SPAN_TOKENS", 8)
    monkeypatch.setattr(tasks.assemble.span_writer, "SMALL_TOKENS", 1)


@contextlib.contextmanager
def an_attempt(at: Path) -> Iterator[Place]:
    with attempt(Store.at(at), at / "scratch", VERSION) as place:
        yield place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with an_attempt(tmp_path / "out") as place:
        yield place


def keys_of(documents: list[Document]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([document.key for document in documents], np.uint64)


def stream(shard: Shard, number: int, ahead: Ahead, place: Place, batch_size: int = 2) -> ShardPlace:
    """Give the tokens of a shard as a slice does that is tokenized, some documents at a time, and store its entries. Where the
    thread that writes has left the span to tasks, the shard is stored.
    """
    facts = store_shard(shard, number, Place(Store.at("memory://beside"), ""))
    parts = []
    with ahead.stream(number, shard.all_in) as into:
        if into is None:
            return store_shard(shard, number, place)
        for first in range(0, len(shard.documents), batch_size):
            some = shard.documents[first : first + batch_size]
            batch, rows = TokenBatch.from_sequences([document.tokens for document in some]), np.arange(len(some)) + first
            in_validation = into.append(batch, keys_of(some))
            parts.append(Entries(keys_of(some), 2 * rows.astype(np.uint64), np.diff(batch.seq_starts), in_validation))
        objects = (write_entries(place.root / shard_key(facts.shard.key), parts),)
        streamed = facts.shard.model_copy(update={"objects": objects, "within": into.end()})
    return facts.model_copy(update={"shard": streamed})


def build(
    shards: list[Shard],
    rule: SplitRule,
    place: Place,
    known: dict[int, TokenShard],
    streamed: set[int],
    stop: int | None = None,
    version: str = VERSION,
) -> dict[int, TokenShard]:
    """Write all spans, or take the first *stop* shards and fail. Some are *known*, others *streamed*, the rest is stored. Return
    those that were streamed.
    """
    found: dict[int, TokenShard] = {}
    with Ahead(rule, "mmap", place, version, Fresh()) as ahead:

        def places() -> Iterator[CountedPlace]:
            for number, shard in enumerate(shards[:stop]):
                if number in known:
                    at = ShardPlace(shard=known[number], file=number // 2, first_row=100 * (number % 2), all_in=shard.all_in)
                elif number in streamed:
                    at = stream(shard, number, ahead, place)
                    if at.shard.within is not None:
                        found[number] = at.shard
                else:
                    at = store_shard(shard, number, place)
                yield at, count_documents(at, rule, place.root)
            if stop is not None:
                raise KeyboardInterrupt

        spans: list[ShardSpan] = []
        with contextlib.suppress(KeyboardInterrupt):
            spans.extend(lay_out(ahead.follow(places()), "mmap"))
        if stop is None:
            for span in spans:
                ahead.write(span)
            finish(spans, "mmap", place)
    return found


@examples(40)
@given(datasets(), st.sets(st.integers(0, 5)), st.sampled_from([0, 0.3, 1]))
def test_the_arrays_are_those_of_stored_shards(
    tmp_path_factory: pytest.TempPathFactory, shards: list[Shard], streamed: set[int], fraction: float
) -> None:
    """Whichever slices are streamed. Nothing of them is left behind."""
    rule = SplitRule(fraction=fraction, seed=1)
    with an_attempt(tmp_path_factory.mktemp("whole") / "out") as place:
        found = build(shards, rule, place, {}, streamed)
        if streamed >= set(range(len(shards))):  # else spans may have been left to tasks
            assert found.keys() == set(range(len(shards)))
        check_arrays(model(shards, rule), "mmap", place)
        for number, shard in found.items():
            check_unfinished(place.root, shard.within)  # in objects that are whole
            check_documents(shards[number], shard, place)
        assert not Path(place.root.path(UNFINISHED)).exists()


def check_documents(shard: Shard, stored: TokenShard, place: Place) -> None:
    contents = open_contents(place.root, stored)
    assert contents.keys.tolist() == [document.key for document in shard.documents]
    assert contents.rows().tolist() == [2 * i for i in range(len(shard.documents))]
    every = np.ones(len(shard.documents), bool)
    tokens = np.concatenate([*contents.tokens(every, 0, int(contents.lengths.sum())), np.empty(0, np.uint32)])
    expected = TokenBatch.from_sequences([document.tokens for document in shard.documents])
    assert tokens.tolist() == expected.encoded_tokens.tolist()
    assert contents.lengths.tolist() == np.diff(expected.seq_starts).tolist()


@examples(40)
@given(datasets(), st.sets(st.integers(0, 5)), st.sampled_from([0, 0.3, 1]), st.sampled_from([0, 0.3, 1]), st.integers(0, 6))
def test_what_is_not_finished_can_be_taken_from(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[Shard],
    streamed: set[int],
    fraction: float,
    other_fraction: float,
    stop: int,
) -> None:
    """By an attempt at the same version, which goes on from there, or at one with another split."""
    rule, other = SplitRule(fraction=fraction, seed=1), SplitRule(fraction=other_fraction, seed=1)
    at = tmp_path_factory.mktemp("unfinished") / "out"
    with an_attempt(at) as place:
        known = build(shards, rule, place, {}, streamed, stop, VERSION if rule == other else "another")
    with an_attempt(at) as place:
        for number, shard in known.items():
            check_unfinished(place.root, shard.within)
            check_documents(shards[number], shard, place)
        build(shards, other, place, known, streamed)
        check_arrays(model(shards, other), "mmap", place)


def test_tokens_of_a_slice_survive_before_their_object_is_whole(place: Place) -> None:
    """Five tokens of an object of eight: a chunk of four with its checksum, and the one behind it."""
    with Ahead(SplitRule(fraction=0, seed=0), "mmap", place, VERSION, Fresh()) as ahead:
        at = stream(even(1, 5), 0, ahead, place)
        assert at.shard.within is not None
        assert (at.shard.within.train.first, at.shard.within.train.count) == (0, 5)
        path = Path(place.root.path(UNFINISHED)) / place.attempt / "train-0"
        words = np.fromfile(path, "<u4")
        expected = TokenBatch.from_sequences([document.tokens for document in even(1, 5).documents]).encoded_tokens
        assert [*words[:4], *words[5:6]] == expected.tolist()
        assert not Path(place.root.path(f"versions/{VERSION}/train/encoded_tokens/c/0")).exists()


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[tuple[Place, TokenShard, Path]]:
    """A streamed shard of twelve tokens in train, whose attempt has ended, and the file that has the last four of them."""
    with an_attempt(tmp_path / "out") as place:
        known = build([even(4, 3)], SplitRule(fraction=0, seed=0), place, {}, {0}, 1)
        name = place.attempt
    with an_attempt(tmp_path / "out") as place:
        yield place, known[0], Path(place.root.path(UNFINISHED)) / name / "train-1"


def test_damage_is_found(unfinished: tuple[Place, TokenShard, Path]) -> None:
    """Of a bit, in an object that is whole or in one that is not."""
    place, shard, path = unfinished
    whole = Path(place.root.path(f"versions/{VERSION}/train/encoded_tokens/c/0"))
    check_unfinished(place.root, shard.within)
    for damaged in (path, whole):
        data = damaged.read_bytes()
        damaged.write_bytes(bytes([data[0] ^ 4]) + data[1:])
        with pytest.raises(ValueError, match="its tokens in train of the unfinished version v are not what was written"):
            check_unfinished(place.root, shard.within)
        damaged.write_bytes(data)
    check_unfinished(place.root, shard.within)


def test_an_object_that_ends_early_or_is_gone_is_found(unfinished: tuple[Place, TokenShard, Path]) -> None:
    place, shard, path = unfinished
    os.truncate(path, 12)
    with pytest.raises(ValueError, match="object 1 of train of the unfinished version v ends before token 4"):
        check_unfinished(place.root, shard.within)
    os.truncate(path, 0)
    with pytest.raises(ValueError):
        check_unfinished(place.root, shard.within)
    path.unlink()
    with pytest.raises(ValueError, match="object 1 of train of the unfinished version v is gone"):
        check_unfinished(place.root, shard.within)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a plain file"):
        check_unfinished(place.root, shard.within)


def test_entries_that_do_not_fit_the_receipt_are_found(unfinished: tuple[Place, TokenShard, Path]) -> None:
    place, shard, _ = unfinished
    os.truncate(place.root.path(f"{shard_key(shard.key)}/{ENTRIES}"), 99)
    with pytest.raises(ValueError, match="has 99 bytes, which are not those of 4 documents"):
        open_contents(place.root, shard)


def test_a_slice_waits_for_those_before_it(place: Place) -> None:
    """Until the streams stop: then it is stored apart, as is one whose turn does not come."""
    got: list[bool] = []

    def wait(ahead: Ahead) -> None:
        with ahead.stream(1, None) as into:
            got.append(into is not None)

    with Ahead(HALF, "mmap", place, VERSION, Fresh()) as ahead:
        waiting = threading.Thread(target=wait, args=(ahead,))
        waiting.start()
        waiting.join(0.05)
        assert got == []
        at = store_shard(even(1, 3), 0, place)
        places = iter([(at, count_documents(at, HALF, place.root))])
        assert list(ahead.follow(places)) != []
        waiting.join(60)
        assert got == [True]
    with Ahead(HALF, "mmap", place, VERSION, Fresh()) as ahead:
        waiting = threading.Thread(target=wait, args=(ahead,))
        waiting.start()
        ahead.stop_streams()
        waiting.join(60)
        assert got == [True, False]


def test_a_turn_that_does_not_come_is_not_waited_for_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.assemble.assembler, "TURN_SECONDS", 0.01)
    with Ahead(HALF, "mmap", place, VERSION, Fresh()) as ahead, ahead.stream(1, None) as into:
        assert into is None


@pytest.mark.parametrize("layout", ["compact", "zarr2"])
def test_compressed_layouts_have_no_streams(place: Place, layout: str) -> None:
    """A part of an object of theirs cannot be read."""
    with Ahead(HALF, layout, place, VERSION, Fresh()) as ahead, ahead.stream(0, None) as into:  # type: ignore[arg-type]
        assert into is None


def test_a_slice_that_fails_takes_none_before_it_along(place: Place) -> None:
    """Half of its tokens stand in an object that the slice before it began: it is written again from that one's tokens."""
    shards, rule = [even(1, 5), even(4, 5), even(1, 3)], SplitRule(fraction=0, seed=0)

    def places(ahead: Ahead) -> Iterator[CountedPlace]:
        first = stream(shards[0], 0, ahead, place)
        yield first, count_documents(first, rule, place.root)
        with contextlib.suppress(OSError), ahead.stream(1, None) as into:
            assert into is not None
            into.append(TokenBatch.from_sequences([[1, 2]]), np.ones(1, np.uint64))
            raise OSError("the file's store is away")
        for number in (1, 2):  # tried again, as Prefect does
            with ahead.stream(number, None) as into:
                assert into is None
            at = store_shard(shards[number], number, place)
            yield at, count_documents(at, rule, place.root)

    with Ahead(rule, "mmap", place, VERSION, Fresh()) as ahead:
        spans = list(lay_out(ahead.follow(places(ahead)), "mmap"))
        for span in spans:
            ahead.write(span)
    finish(spans, "mmap", place)
    check_arrays(model(shards, rule), "mmap", place)


def test_a_disk_that_fails_is_told_to_the_slice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are nowhere else."""
    with Ahead(SplitRule(fraction=0, seed=0), "mmap", place, VERSION, Fresh()) as ahead:
        shutil.rmtree(place.root.root)
        Path(place.root.root).write_text("a file where the output was")
        with pytest.raises(OSError, match="Not a directory"):
            stream(even(4, 5), 0, ahead, place)
        Path(place.root.root).unlink()


def test_many_short_documents_are_few_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them validation, in no order: the thread that writes gets them together, not one by one."""
    documents = [Document(key, [key % 7] * (key % 3)) for key in range(3000)]
    parts: list[int] = []
    real = tasks.assemble.span_writer.SpanWriter.stream

    def noted(writer: Any, tokens: Any, highest: int) -> Any:
        parts.append(len(tokens))
        return real(writer, tokens, highest)

    monkeypatch.setattr(tasks.assemble.spans, "SPAN_TOKENS", 1 << 12)
    monkeypatch.setattr(tasks.assemble.span_writer.SpanWriter, "stream", noted)
    shards = [Shard(documents, None)]
    with Ahead(HALF, "mmap", place, VERSION, Fresh()) as ahead:

        def places() -> Iterator[CountedPlace]:
            at = stream(shards[0], 0, ahead, place, len(documents))
            yield at, count_documents(at, HALF, place.root)

        spans = list(lay_out(ahead.follow(places()), "mmap"))
        for span in spans:
            ahead.write(span)
    finish(spans, "mmap", place)
    check_arrays(model(shards, HALF), "mmap", place)
    assert len(parts) == 2


def test_a_slice_behind_one_that_fails_is_told_so(place: Place) -> None:
    """Its tokens came behind those of the other, which waited for the disk."""
    batch, key = TokenBatch.from_sequences([[1, 2]]), np.ones(1, np.uint64)

    def fail(ahead: Ahead) -> None:
        with ahead.stream(0, "train") as first, contextlib.ExitStack() as behind:
            assert first is not None
            first.append(batch, key)
            first.end()
            second = behind.enter_context(ahead.stream(1, "train"))
            assert second is not None
            second.append(batch, key)
            raise OSError("No space left on device")

    with Ahead(HALF, "mmap", place, VERSION, Fresh()) as ahead:
        with pytest.raises(OSError, match="No space left"):
            fail(ahead)
        writer = ahead._writers["train"]
        with pytest.raises(BrokenStreamError):
            list(writer.stream(batch.encoded_tokens, 5))
