"""New shards in memory: the same documents as where they are stored, or none where there is no room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.batch import TokenBatch
from flat_tokens.stores.store import Store
from tasks.config import Source
from tasks.output.staging import Place, attempt
from tasks.shards.contents import Contents, open_contents
from tasks.shards.fresh import Fresh, Making
from tasks.shards.runs import runs_in_memory
from tasks.shards.write import store_shard, tokenize_and_keep
from tests.examples import examples
from tests.tasks.shards.test_shards import prepared

FORTY_BYTES = TokenBatch.from_sequences([[1] * 10])
ONE = np.ones(1, np.uint64)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with attempt(Store.at(tmp_path / "out"), tmp_path, "build") as place:
        yield place


def documents(contents: Contents) -> list[list[int]]:
    """Tokens of each document, each read alone."""
    ends, every = np.cumsum(contents.lengths), np.ones(len(contents.lengths), bool)
    starts = (ends - contents.lengths).tolist()
    read = (contents.tokens(every, start, end) for start, end in zip(starts, ends.tolist(), strict=True))
    return [np.concatenate([*parts, np.empty(0, np.uint32)]).tolist() for parts in read]


def test_a_new_shard_in_memory_is_the_one_that_is_stored(tmp_path: Path, place: Place) -> None:
    """Empty documents and rows without one included."""
    (tmp_path / "in").mkdir()
    lines = ['{"text": "one"}', "", '{"text": ""}', '{"text": "three words here"}']
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    (part,), recipe = prepared(Source(path=str(tmp_path / "in")), place, 1 << 20, empty="keep")
    fresh = Fresh(4 * part.text_bytes)
    shard = store_shard(tokenize_and_keep(fresh, part, recipe, place), place)
    stored, found = open_contents(place.root, shard, "documents/row"), fresh.open(place.root, shard)
    assert found is fresh.take(shard)
    assert (found.keys.tolist(), found.rows().tolist()) == (stored.keys.tolist(), stored.rows().tolist())
    assert documents(found) == documents(stored)
    assert [len(tokens) for tokens in documents(found)] == [3, 0, 16]
    assert fresh.take(shard) is None
    assert fresh.open(place.root, shard) is not found  # where it is stored


def test_a_shard_without_room_is_not_kept_and_takes_none(tmp_path: Path, place: Place) -> None:
    """Not the part of it that had room, either."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "ten tokens"}\n')
    (part,), recipe = prepared(Source(path=str(tmp_path / "in")), place, 1 << 20)
    fresh = Fresh(40)
    making = Making(fresh)
    making.append(FORTY_BYTES, ONE, ONE)
    shard = store_shard(tokenize_and_keep(fresh, part, recipe, place), place)
    making.append(FORTY_BYTES, ONE, ONE)
    making.end(place.root, shard)
    assert fresh.take(shard) is None


def test_a_large_slice_is_not_kept(tmp_path: Path, place: Place) -> None:
    """One alone would fill the memory that others need."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "ten tokens"}\n')
    (part,), recipe = prepared(Source(path=str(tmp_path / "in")), place, 1 << 20)
    fresh = Fresh(4 * part.text_bytes - 1)
    assert fresh.take(store_shard(tokenize_and_keep(fresh, part, recipe, place), place)) is None


def test_room_is_free_again_when_nobody_has_the_tokens() -> None:
    fresh = Fresh(40)
    tokens = np.zeros(10, np.uint32)
    assert fresh.has_room(tokens)
    assert not fresh.has_room(np.zeros(1, np.uint32))
    del tokens
    assert fresh.has_room(np.zeros(10, np.uint32))


@examples(200)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5), st.data())
def test_runs_in_memory_are_those_of_the_parts_joined(parts: list[list[int]], data: st.DataObject) -> None:
    joined = [item for part in parts for item in part]
    borders = sorted(data.draw(st.sets(st.integers(0, len(joined)))))
    begins, ends = borders[: len(borders) // 2 * 2 : 2], borders[1::2]
    runs = runs_in_memory([np.array(part, np.uint32) for part in parts], np.array(begins, np.int64), np.array(ends, np.int64))
    expected = [item for begin, end in zip(begins, ends, strict=True) for item in joined[begin:end]]
    assert np.concatenate([*runs, np.empty(0, np.uint32)]).tolist() == expected
