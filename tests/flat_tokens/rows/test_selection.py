"""Rows of a selection, against those of a dataset that is written from the selected documents."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import BucketedLoader, Ledger, Mixture, ShuffledLoader
from flat_tokens.rows import virtual
from tests.examples import examples
from tests.made import masked_split, write_sequences
from tests.refusal import refusal

Document = list[tuple[int, bool]]
"""Token ids, each with whether it counts."""

documents = st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=8), min_size=1, max_size=12)
DOCUMENTS: list[Document] = [[(5, True), (6, True), (7, True)], [], [(8, True)], [(9, True), (10, True)], [(11, True)]]


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    for name in (*type(expected)._fields, *type(expected)._derived):
        assert np.array_equal(found[name], expected[name]), name


def test_a_selection_is_a_split_of_its_documents():
    """In the order of the indices; one that is named twice is there twice."""
    train = masked_split(DOCUMENTS, masked=False)
    chosen = train.select(indices=[3, 0, 1, 3])
    assert [chosen.sequence(i).tolist() for i in range(-1, 4)] == [[9, 10], [9, 10], [5, 6, 7], [], [9, 10]]
    assert (chosen.seq_count, chosen.token_count, chosen.max_token_id) == (4, 7, 11)
    assert chosen.numbers.tolist() == [3, 0, 1, 3]
    assert chosen.slice(1, 6).tolist() == [20, 11, 12, 14, 19]
    assert chosen.span(3) == (5, 7)
    assert [starts.tolist() for starts in chosen.bounds(np.array([0, 2, 3]))] == [[0, 5, 5], [2, 0, 2]]
    assert [batch.encoded_tokens.tolist() for batch in chosen.batches(max_tokens=5)] == [[19, 20, 11, 12, 14], [19, 20]]
    assert repr(chosen) == f"FlatTokens({train.store.url!r}: 4 selected sequences, 7 tokens)"
    assert train.numbers is None


def test_a_selection_of_a_selection_is_one_of_the_split():
    chosen = masked_split(DOCUMENTS, masked=False).select(indices=np.array([4, 3, 0], np.uint16)).select(indices=[2, 0])
    assert chosen.numbers.tolist() == [0, 4]
    assert chosen.packed(4)[0].targets.tolist() == [5, 6, 7, 11]


def test_nothing_selected_is_an_empty_split():
    chosen = masked_split(DOCUMENTS, masked=False).select(indices=[])
    assert (chosen.seq_count, chosen.token_count) == (0, 0)
    assert [len(view) for view in (chosen.packed(2), chosen.documents(2), chosen.blocks(2), chosen.packed_documents(2))] == [
        0
    ] * 4
    assert masked_split(DOCUMENTS, masked=False).select(indices=[1]).packed(1, eos=3)[0].targets.tolist() == [3]


def test_wrong_indices_are_refused():
    train = masked_split(DOCUMENTS, masked=False)
    for indices in ([5], [-1, 0]):
        with refusal(f"there is no sequence {indices[0]}; there are 5", IndexError):
            train.select(indices=indices)
    with refusal(r"these are bool\[5\]: of a mask, take numpy.flatnonzero", TypeError):
        train.select(indices=[True] * 5)
    for wrong in ([0.5], [[1]], 3):
        with refusal("indices are whole numbers", TypeError):
            train.select(indices=wrong)


def test_the_callers_indices_may_change_later():
    mine = np.array([0, 2])
    chosen = masked_split(DOCUMENTS, masked=False).select(indices=mine)
    mine[:] = 3
    assert chosen.numbers.tolist() == [0, 2]
    with refusal("read-only"):
        chosen.numbers[0] = 1


@given(
    documents,
    st.data(),
    st.sampled_from(["mmap", "compact", "zarr2"]),
    st.booleans(),
    st.sampled_from([{}, {"eos": 2}, {"bos": 1, "eos": 2}]),
)
@examples(60)
def test_rows_are_those_of_a_dataset_of_the_documents(all_of_them, data, layout, masked, ends):
    """Of every view, one by one and together."""
    indices = data.draw(st.lists(st.integers(0, len(all_of_them) - 1), max_size=16))
    length = data.draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual, "DENSE", data.draw(st.sampled_from([0, 8])))
        chosen = masked_split(all_of_them, layout, masked).select(indices=indices)
    written = masked_split([all_of_them[i] for i in indices], layout, masked)
    for rows in ("packed", "documents", "blocks"):
        found, expected = (getattr(split, rows)(length, **ends) for split in (chosen, written))
        assert len(found) == len(expected)
        same(found.batch(range(len(found))), expected.batch(range(len(expected))))
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    for options in ({"too_long": "cut"}, {"split_across_pack": True}, {"fit": "best", "too_long": "cut"}):
        found, expected = (split.packed_documents(length, **options, **ends) for split in (chosen, written))
        assert len(found) == len(expected)
        same(found.batch(range(len(found))), expected.batch(range(len(expected))))
        if indices:
            asked = np.arange(len(indices))
            assert [rows.tolist() for rows in found.rows_of(asked)] == [rows.tolist() for rows in expected.rows_of(asked)]


def test_loaders_and_mixtures_take_selections():
    train = masked_split([[(10 * i + j, True) for j in range(i % 4 + 1)] for i in range(1, 40)], masked=False)
    indices = np.arange(38, -1, -2)
    chosen, written = (
        train.select(indices=indices),
        masked_split([[(int(t), True) for t in train.sequence(i)] for i in indices], masked=False),
    )
    for split in (chosen, pickle.loads(pickle.dumps(chosen))):
        loaders = [ShuffledLoader(one.packed(8), 2, seed=3) for one in (split, written)]
        assert [loaders[0].digest(step) for step in range(len(loaders[0]))] == [
            loaders[1].digest(i) for i in range(len(loaders[1]))
        ]
    mixtures = [Mixture({"a": (one.documents(4), 3), "b": (train.documents(4), 1)}, 8, seed=1) for one in (chosen, written)]
    assert [mixtures[0].digest(step) for step in range(5)] == [mixtures[1].digest(step) for step in range(5)]
    buckets = [BucketedLoader(one, [2, 4], 8, seed=5) for one in (chosen, written)]
    assert [buckets[0].digest(step) for step in range(len(buckets[0]))] == [buckets[1].digest(i) for i in range(len(buckets[1]))]
    assert buckets[0].seen(3).step.tolist() == buckets[1].seen(3).step.tolist()


def test_each_selection_has_a_packing_index_of_its_own(tmp_path):
    """Though it is of a dataset whose manifest has a digest of all entries, and has as many documents and tokens."""
    train = flat_tokens.open(write_sequences(tmp_path / "made", [[1], [2, 3], [4, 5], [6]])).train
    packs = [train.select(indices=indices).packed_documents(3, cache=tmp_path / "kept") for indices in ([0, 1, 2], [1, 0, 2])]
    assert [pack.batch([0, 1]).tokens.tolist() for pack in packs] == [[[1, 2, 3], [4, 5, 0]], [[2, 3, 1], [4, 5, 0]]]
    assert train.select(indices=[1, 2, 3]).packed_documents(3, cache=tmp_path / "kept").batch([0, 1]).tokens.tolist() == [
        [2, 3, 0],
        [4, 5, 6],
    ]


def test_a_run_goes_on_with_the_same_selection_alone(tmp_path):
    train = flat_tokens.open(write_sequences(tmp_path / "made", [[1, 2], [3, 4], [5, 6], [7, 8]])).train
    path = tmp_path / "run.json"
    chosen = train.select(indices=[0, 2])
    Ledger.create(path, {"text": (chosen.packed(2), 1)}, 1)
    assert Ledger.open(path, views={"text": train.select(indices=[0, 2]).packed(2)}).mixture(steps=2).seed == 0
    with refusal("source 'text' is of selected documents"):
        Ledger.open(path).mixture()
    with refusal("source 'text' is not what the run has"):
        Ledger.open(path, views={"text": train.select(indices=[0, 3]).packed(2)}).mixture()
