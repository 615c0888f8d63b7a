"""Documents that are chosen, by number, key or expression: rows of a selection, against those of a dataset that is written from
the selected documents; keys, against looking at every key; expressions, by literals.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import BucketedLoader, FlatTokens, Ledger
from flat_tokens.rows.where import parse
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import VIEWS, assert_same_rows
from tests.made import docs_of, masked_split, publish_docs, split_of, write_sequences
from tests.refusal import refusal

Document = list[tuple[int, bool]]
"""Token ids, each with whether it counts."""

some_documents = st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=8), min_size=1, max_size=12)
DOCUMENTS: list[Document] = [[(5, True), (6, True), (7, True)], [], [(8, True)], [(9, True), (10, True)], [(11, True)]]


def test_a_selection_is_a_split_of_its_documents():
    """In the order of the indices; one that is named twice is there twice."""
    train = masked_split(DOCUMENTS, masked=False)
    mine = np.array([3, 0, 1, 3])
    chosen = train.select(indices=mine)
    mine[:] = 2
    assert [chosen.sequence(i).tolist() for i in range(-1, 4)] == [[9, 10], [9, 10], [5, 6, 7], [], [9, 10]]
    assert (chosen.seq_count, chosen.token_count, chosen.max_token_id) == (4, 7, 11)
    assert chosen.numbers.tolist() == [3, 0, 1, 3]
    assert chosen.slice(1, 6).tolist() == [20, 11, 12, 14, 19]
    assert chosen.span(3) == (5, 7)
    assert [starts.tolist() for starts in chosen.bounds(np.array([0, 2, 3]))] == [[0, 5, 5], [2, 0, 2]]
    assert [batch.encoded_tokens.tolist() for batch in chosen.batches(max_tokens=5)] == [[19, 20, 11, 12, 14], [19, 20]]
    assert repr(chosen) == f"FlatTokens({train.store.url!r}: 4 selected sequences, 7 tokens)"
    assert train.numbers is None
    again = chosen.select(indices=np.array([2, 0], np.uint16))
    assert again.numbers.tolist() == [1, 3]
    assert again.packed(2)[0].targets.tolist() == [9, 10]
    with refusal("read-only"):
        again.numbers[0] = 1


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


@given(
    some_documents,
    st.data(),
    st.sampled_from(["mmap", "compact", "zarr2"]),
    st.booleans(),
    st.sampled_from([{}, {"eos": 2}, {"bos": 1, "eos": 2}]),
)
@examples(60)
def test_rows_are_those_of_a_dataset_of_the_documents(monkeypatch, all_of_them, data, layout, masked, ends):
    """Of every view."""
    indices = data.draw(st.lists(st.integers(0, len(all_of_them) - 1), max_size=16))
    length = data.draw(st.integers(1, 9))
    monkeypatch.setattr("flat_tokens.rows.virtual.DENSE", data.draw(st.sampled_from([0, 8])))
    chosen = masked_split(all_of_them, layout, masked).select(indices=indices)
    written = masked_split([all_of_them[i] for i in indices], layout, masked)
    for kind, settings in VIEWS:
        if "overlap" not in settings:
            assert_same_rows(*(getattr(split, kind)(length, **settings, **ends) for split in (chosen, written)))


def test_batches_by_length_are_of_the_selection():
    train = masked_split([[(10 * i + j, True) for j in range(i % 4 + 1)] for i in range(1, 40)], masked=False)
    indices = np.arange(38, -1, -2)
    splits = train.select(indices=indices), split_of([train.sequence(i) for i in indices])
    found, expected = (BucketedLoader(one, [2, 4], 8, seed=5) for one in splits)
    assert [*map(found.digest, range(len(found)))] == [*map(expected.digest, range(len(expected)))]
    assert found.seen(3).step.tolist() == expected.seen(3).step.tolist()


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


LARGE = 2**64 - 1


def published(root: Path, keys: list[int]) -> FlatTokens:
    publish_docs(root, [docs_of([number], key=key)[0] for number, key in enumerate(keys)])
    return flat_tokens.open(root).train


@given(
    keys=st.lists(st.integers(0, 30) | st.just(LARGE), min_size=1, max_size=40),
    asked=st.lists(st.integers(0, 31) | st.just(LARGE), max_size=12),
    picks=st.none() | st.lists(st.integers(0, 39), max_size=20),
    at_a_time=st.integers(1, 9),
)
@examples(60)
def test_numbers_are_those_of_the_first_document_with_the_key(monkeypatch, tmp_path_factory, keys, asked, picks, at_a_time):
    train = published(tmp_path_factory.mktemp("keys") / "d", keys)
    if picks is not None:
        keys = [keys[pick % len(keys)] for pick in picks]
        train = train.select(indices=np.array([pick % train.seq_count for pick in picks], np.int64))
    monkeypatch.setattr("flat_tokens.rows.documents.KEYS_AT_A_TIME", at_a_time)
    assert train.by_keys(asked).tolist() == [keys.index(key) if key in keys else -1 for key in asked]
    assert train.by_keys(np.array(asked, np.uint64)).tolist() == train.by_keys([f"{key:016x}" for key in asked]).tolist()


def test_one_document_is_found_by_its_key(tmp_path):
    train = published(tmp_path / "d", [5, LARGE, 7])
    assert train.by_key(7) == 2
    assert train[train.by_key("ffffffffffffffff")].tolist() == [1]
    with refusal("there is no document with key 0000000000000006", KeyError):
        train.by_key(6)
    for wrong in ("7", "FFFFFFFFFFFFFFFF", -1, 2**64):
        with refusal("a key is"):
            train.by_key(wrong)
    with refusal(r"keys are uint64\[n\], or a list of them, but these are int64\[2\]", TypeError):
        train.by_keys(np.arange(2))
    with pytest.raises(FileNotFoundError):
        split_of([[1]]).by_key(1)


ROWS: dict[str, list[Any]] = {
    "tokens": [0, 5, 100, 9007199254740993, None],
    "score": [0.5, None, 0.25, -1.5, 3.0],
    "source": ["web", "wiki", None, "it's", "web_2"],
    "odd name": ["a", "b", "c", "d", "e"],
    "good": [True, False, None, True, False],
    "hash": [1 << 63, None, 18446744073709551615, 7, 0],
}


def column(name: str) -> Any:
    if name not in ROWS:
        raise ValueError(f"there is no column {name!r}")
    return pa.array(ROWS[name], pa.uint64() if name == "hash" else None)


def chosen(text: str) -> list[int]:
    found = parse(text).holds(column)
    assert found.dtype == bool
    return [i for i, holds in enumerate(found.tolist()) if holds]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("tokens>=5 AND tokens <= 100", [1, 2]),
        ("source in ('web', 'it''s')", [0, 3]),
        ("source not in ('web')", [1, 3, 4]),
        ("source like 'we_' or source not like 'w%'", [0, 3]),
        (r"source like 'web\_%'", [4]),
        ("score == -1.5 or score > 1e0", [3, 4]),
        ("\"odd name\" <> 'a' and good = true", [3]),
        ("good != TRUE", [1, 4]),
        ("hash = 18446744073709551615 or hash > tokens and hash < 1e19", [0, 2]),
        ("tokens < 9223372036854775808 and tokens > 1.5 or score >= 9007199254740993", [1, 2, 3]),
        ("tokens = 0 or tokens = 5 and score is null", [0, 1]),
        ("(tokens = 0 or tokens = 5) and score is null", [1]),
        (" not not\n tokens = 5 ", [1]),
        ("tokens between 5 and 100", [1, 2]),
        ("tokens not between 5 and 100", [0, 3]),
        ("tokens is not null and score < .5", [2, 3]),
        ("tokens > score", [2, 3]),
        ("score > 1 or good = false", [1, 4]),
        ("not (good = true and score > 1)", [0, 1, 2, 3, 4]),
    ],
)
def test_an_expression_chooses_the_rows_for_which_it_is_true(text, rows):
    """What is null is neither true nor false, as in SQL."""
    assert chosen(text) == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "character 1 is the end, but a column's name was expected"),
        ("tokens >", "character 9 is the end, but a value"),
        ("tokens > 5 5", "character 12 is '5', but 'and', 'or' or the end was expected"),
        ("doc.n > 5", 'character 4 is .* double quotes: "a.b"'),
        ("5 < tokens", "character 1 is '5', but a column's name"),
        ("tokens = null", "character 10 is 'null', but a value"),
        ("source = web'", 'character 13 is "\'", but a name, a value'),
        ("source like tokens", "character 13 is 'tokens', but a text in single quotes"),
        ("tokens > 5abc", "character 10 is '5'"),
        ("(abs(tokens) > 5", "character 5 is '\\(', but a comparison"),
        ("(tokens in (5)", "character 15 is the end, but '\\)' was expected"),
        ("tokens > " + "9" * 39, "character 10 is '9', but a name, a value"),
        ("not (" * 26 + "tokens = 1", "more than 50 deep"),
        ("tokens = 1 or " * 1000 + "tokens = 1", "14,010 characters, but at most 10,000"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place(text, told):
    with refusal(told):
        parse(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing = 5", "there is no column 'nothing'"),
        ("source > 5", "compares unlike values: source is a text. .* All columns of CSV are text"),
        ("good = 5 and source between 1 and 2", "good is true or false, source is a text"),
        ("score like '1%'", "score is a number"),
    ],
)
def test_columns_that_there_are_not_or_of_another_type_are_refused(text, told):
    with refusal(f"^where .*{told}"):
        chosen(text)


def test_many_alternatives_are_no_deep_expression():
    assert chosen(" or ".join(f"tokens = {i}" for i in range(600))) == [0, 1, 2]


@pytest.mark.parametrize("text", ["source = '\ud800'", "a\udfff = 1", "\udc80", "source in ('x', '\ud83d')"])
def test_half_of_a_surrogate_pair_is_refused(text):
    with refusal("is not Unicode"):
        parse(text)
