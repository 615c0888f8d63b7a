"""Fill in the middle: every view gives the rows of a dataset whose documents are stored so, in each epoch."""

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import (
    BlockOrder,
    FillInMiddle,
    Ledger,
    Mixture,
    ShuffledLoader,
)
from flat_tokens.vocabulary import Vocabulary, load_vocabulary
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import VIEWS, assert_same_rows
from tests.made import docs_of, masked_split, publish_docs, sequences, split_of, write_sequences
from tests.refusal import refusal

ROOT = Path(__file__).parents[3]
PRE, MID, SUF = 9001, 9002, 9003
FIM = FillInMiddle(0.7, 0.5, PRE, MID, SUF)
BYTES: dict[str, Any] = {"cuts": "characters", "tokenizer": "bytes"}
STORIES = str(ROOT / "deployments/demo/tokenizer.json")


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Tokens that tell their document and their place: 100 * d + place, from 1 on."""
    return [[100 * (d + 1) + place for place in range(length)] for d, length in enumerate(lengths)]


def counts(token: int) -> bool:
    """Whether a token of a document counts for the loss. Others, such as of ends, do not."""
    return token < PRE and token * 7 % 3 == 1


def put_back(read: list[int]) -> list[int]:
    """The document that was filled in the middle. Where the suffix comes first, the prefix is with the middle."""
    assert read[0] == PRE
    assert read.count(PRE) == read.count(SUF) == read.count(MID) == 1
    suffix, middle = read.index(SUF), read.index(MID)
    assert suffix < middle
    return read[1:suffix] + read[middle + 1 :] + read[suffix + 1 : middle]


def parts_at(separator: int | None, tokens: list[int]) -> list[list[int]]:
    places = [place for place, token in enumerate(tokens) if token == separator]
    return [tokens[low + 1 : high] for low, high in pairwise([-1, *places, len(tokens)])]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    rate=st.sampled_from([None, 0, 0.3, 1]),
    spm_rate=st.sampled_from([0, 0.5, 1]),
    epoch=st.integers(0, 3),
    ends=st.sampled_from([{}, {"bos": 9004}, {"eos": 9005}, {"bos": 9004, "eos": 9005}]),
    length=st.integers(2, 50),
    masked=st.booleans(),
    separator=st.sampled_from([None, 105]),
    data=st.data(),
)
@examples(100)
def test_rows_are_those_of_documents_that_are_stored_so(
    lengths,
    rate,
    spm_rate,
    epoch,
    ends,
    length,
    masked,
    separator,
    data,
):
    documents, by_characters = documents_of(lengths), {}
    if not masked and data.draw(st.booleans()):
        by_characters, documents = BYTES, [[100 + token % 7 for token in document] for document in documents]
    plain = masked_split([[(token, counts(token)) for token in document] for document in documents], masked=masked)
    common = {"seed": 3, "separator": separator, "fragment_rate": 0.5, **by_characters}
    fim = None if rate is None else FillInMiddle(rate, spm_rate, PRE, MID, SUF, **common)
    found = sequences(plain.packed(1, fim=fim).of_epoch(epoch).tokens)
    for document, read in zip(documents, found, strict=True):
        for stored_part, part in zip(parts_at(separator, document), parts_at(separator, read), strict=True):
            if part == stored_part:
                assert rate != 1 or len(part) < 3 or separator in document
                continue
            assert rate
            assert put_back(part) == stored_part
            assert spm_rate < 1 or part[1] == SUF
    bos, eos = ([ends[name]] if name in ends else [] for name in ("bos", "eos"))
    stored_so = []
    for read in found:
        mask = [False for _ in bos] + [counts(token) for token in read] + [bool(read) and counts(read[-1]) for _ in eos]
        stored_so.append(list(zip([*bos, *read, *eos], mask, strict=True)))
    stored = masked_split(stored_so, masked=masked)
    for kind, settings in [*VIEWS, ("packed", {"overlap": data.draw(st.integers(0, length - 1))})]:
        if kind == "packed" and stored.token_count < length:
            continue
        expected = getattr(stored, kind)(length, **settings)
        view = getattr(plain, kind)(length, **settings, **ends, fim=fim)
        assert_same_rows(pickle.loads(pickle.dumps(view.of_epoch(epoch))), expected)


def test_cuts_are_even_and_others_in_each_epoch():
    train = split_of([list(range(100, 200))] * 2000)
    view = train.documents(103, fim=FillInMiddle(0.5, 0.25, PRE, MID, SUF))
    epochs = [view.of_epoch(epoch).batch(np.arange(2000)).targets for epoch in (0, 1)]
    moved = [(rows == PRE).any(axis=1) for rows in epochs]
    assert np.array_equal(*moved), "the same documents in every epoch"
    assert 900 < moved[0].sum() < 1100
    assert not np.array_equal(*epochs)
    first = epochs[0][moved[0]]
    spm = first[:, 1] == SUF
    assert 0.2 < spm.mean() < 0.31
    sizes = 102 - np.argmax(first == MID, axis=1)[~spm]  # of the middle: the mean of |a - b| is a third
    assert 31 < sizes.mean() < 36
    assert (sizes.min() < 3, sizes.max() > 90) == (True, True)


@pytest.mark.parametrize("order", ["shuffled", BlockOrder(4, 2, 2)])
def test_a_run_goes_on_at_every_step_on_any_hosts_with_the_cuts_of_its_epoch(order):
    train = split_of(documents_of(np.random.default_rng(0).integers(0, 40, 60).tolist()))
    view = train.packed_documents(48, fim=FIM, fit="crop", eos=9005)
    whole = ShuffledLoader(view, 16, 3, epochs=3, order=order, drop_last=True)
    by_epoch = [view.of_epoch(epoch).batch(np.arange(len(view))).tokens for epoch in range(4)]
    for _, row, epoch, step, batch_row in zip(*whole.visits(np.arange(len(view))), strict=True):
        assert np.array_equal(whole[step].tokens[batch_row], by_epoch[epoch][row])
    for step in range(len(whole)):
        later = ShuffledLoader(view, 16, 3, epochs=3, order=order, start=whole.position(step), drop_last=True)
        parts = [later.shard(host, 4)[0].tokens for host in range(4)]
        assert np.array_equal(np.concatenate(parts), whole[step].tokens)


def test_mixtures_and_ledgers_have_the_cuts_of_each_epoch(tmp_path):
    train = flat_tokens.open(write_sequences(tmp_path / "d", documents_of([30, 12, 0, 25, 7, 40, 18] * 4))).train
    few = train.packed(32, fim=FIM)
    many = train.packed(32, fim=FillInMiddle(1, 0, PRE, MID, SUF, inside=[105, 306]))
    mixture = Mixture({"few": (few, 0.4), "many": (many, 0.6)}, 8, seed=5)
    for name, view in (("few", few), ("many", many)):
        visits = mixture.visits(np.arange(len(view)), before=20, source=name)
        assert visits.epoch.max() > 1
        for _, row, epoch, step, batch_row in zip(*visits, strict=True):
            assert np.array_equal(mixture[step].samples.encoded[batch_row], view.of_epoch(epoch)[row].encoded)
    Ledger.create(tmp_path / "run.json", {"few": (few, 0.4), "many": (many, 0.6)}, 8, 5)
    found = Ledger.open(tmp_path / "run.json").mixture()
    assert [*map(found.digest, range(12))] == [*map(mixture.digest, range(12))]
    other = FillInMiddle(0.7, 0.5, PRE, MID, SUF, seed=1)
    with refusal("source 'few' is not what the run has: its view"):
        Ledger.open(tmp_path / "run.json", views={"few": train.packed(32, fim=other)}).mixture()


def test_the_key_decides_wherever_the_document_is(tmp_path):
    documents = [docs_of(ids, key=1000 + d)[0] for d, ids in enumerate(documents_of([20, 30, 25, 18, 22, 33]))]
    publish_docs(tmp_path / "a", documents)
    publish_docs(tmp_path / "b", documents[::-1])
    first, second = (flat_tokens.open(tmp_path / name).train for name in "ab")
    rows, others, chosen = (
        train.documents(40, fim=FIM).of_epoch(2).batch(range(train.seq_count)).encoded.tolist()
        for train in (first, second, first.select(indices=[4, 1]))
    )
    assert (others, chosen) == (rows[::-1], [rows[4], rows[1]])


def test_no_cut_is_inside_a_character():
    """Tokens of single bytes, of text with characters of one to four bytes."""
    text = "aé漢🙂 " * 12
    ids = list(text.encode())
    vocabulary = Vocabulary.of("bytes", None, {byte: bytes([byte]) for byte in range(256)}, None)
    fim = FillInMiddle(1, 0.5, PRE, MID, SUF, inside=vocabulary.inside_characters())
    assert len(fim.inside) == 64
    view = split_of([ids] * 300).documents(len(ids) + 3, fim=fim)
    for row in view.batch(np.arange(300)).targets.tolist():
        prefix = row.index(SUF)
        for part in (row[1:prefix], row[prefix + 1 : row.index(MID)], row[row.index(MID) + 1 :]):
            bytes(part).decode()


def test_parts_of_text_are_tokenized_again_in_each_epoch_if_asked():
    """Cuts are inside words, and a document keeps its length: what its parts have more goes from the end of its suffix."""
    vocabulary = load_vocabulary(STORIES)
    assert vocabulary.encode
    train = split_of([vocabulary.encode(text).tolist() for text in ("The dog was happy.", "A dog and a cat.")])
    fim = FillInMiddle(1, 0.5, 4093, 4094, 4095, cuts="characters", tokenizer=STORIES)
    again, once = (train.documents(9, fim=replace(fim, each_epoch=each)) for each in (True, False))
    assert all(np.array_equal(once.of_epoch(epoch).batch([0, 1]).encoded, again.batch([0, 1]).encoded) for epoch in (0, 1, 2))
    rows = [row for epoch in (0, 2) for row in again.of_epoch(epoch).batch([0, 1]).targets.tolist()]
    assert [["PMS"[i - 4093] if i > 4092 else vocabulary.piece(i).decode() for i in row] for row in rows] == [
        ["P", "The", " dog", " was", "S", "M", " happ", "y", "."],
        ["P", "S", "c", "M", "A", " dog", " and", " a", " "],
        ["P", "S", "The", " dog", " was", " happ", "y", ".", "M"],
        ["P", "A", " dog", " and", "S", "at", "M", " a", " c"],
    ]
    assert train.documents(16, fim=fim).tokens.max_token_id == 4095
    with refusal("the tokenizer 'bytes' makes other tokens of the documents' text"):
        train.documents(16, fim=replace(fim, tokenizer="bytes"))


def test_fragments_between_separators_are_filled_in_each_by_itself():
    train = split_of([[1, 2, 3, 9, 4, 5, 6, 7, 9, 9, 8], [1, 2, 3, 4]] * 2)
    rows = train.documents(20, pad_id=0, fim=FillInMiddle(1, 0.5, 20, 21, 22, separator=9, fragment_rate=0.7)).batch(range(4))
    assert [row[:length] for row, length in zip(rows.targets.tolist(), rows.length, strict=True)] == [
        [1, 2, 3, 9, 20, 22, 21, 4, 5, 6, 7, 9, 9, 8],
        [20, 22, 4, 21, 1, 2, 3],
        [1, 2, 3, 9, 20, 4, 22, 21, 5, 6, 7, 9, 9, 8],
        [20, 22, 3, 4, 21, 1, 2],
    ]
    assert rows.is_seq_start[:, :7].sum(axis=1).tolist() == [1, 1, 1, 1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rate": 2}, "rate of FillInMiddle is 2, but it is a number from 0 to 1"),
    ({"spm_rate": "0.5"}, "spm_rate of FillInMiddle is '0.5'"),
    ({"middle": -1}, "middle of FillInMiddle is -1, but token ids are 0 to"),
    ({"seed": -1}, "seed of FillInMiddle is -1"),
    ({"separator": -1}, "separator of FillInMiddle is -1, but token ids are 0 to"),
    ({"cuts": "characters"}, "cuts of FillInMiddle is 'characters', and its tokenizer None"),
]


@pytest.mark.parametrize(("settings", "complaint"), WRONG)
def test_values_that_cannot_be_are_refused(settings, complaint):
    with refusal(complaint):
        FillInMiddle(**{"rate": 0.5, "spm_rate": 0.5, "prefix": 1, "middle": 2, "suffix": 3, **settings})


def test_ids_of_added_tokens_count_for_the_vocabulary():
    train = split_of([[1, 2, 3, 4]])
    tokens = train.packed(4, fim=FIM).tokens
    with refusal("max_token_id is 9003"):
        tokens.require_vocab(9003)
    assert tokens.require_vocab(9004) is tokens
    with refusal(r"fim is 0.5, but it is a FillInMiddle", TypeError):
        train.packed(4, fim=0.5)  # type: ignore[arg-type]
