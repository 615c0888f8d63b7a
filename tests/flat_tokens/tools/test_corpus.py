"""What lies at a path: its kind, its splits, its tokenizer, and its tokens in windows."""

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens import TokenBatch
from flat_tokens.formats.contract import token_ranges
from flat_tokens.tools.corpus import open_corpus, run_of, sequence_of, vocabulary_of, windows
from tests.damage import change_file
from tests.flat_tokens.demo import shard_in
from tests.made import in_memory, write_sequences
from tests.refusal import refusal

RAGGED = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=12)


def warned(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("item", [["../../x", 1, "0" * 64], ["c/0", -1, "0" * 64], 5])
def test_a_receipt_that_names_files_elsewhere_is_refused(copy, item):
    shard = shard_in(copy)
    change_file(shard / "receipt.json", lambda receipt: receipt["objects"].append(item))
    with refusal(r"receipt\.json: is not a token shard's receipt"):
        open_corpus(shard)


def test_an_option_of_a_dataset_is_refused(demo):
    with refusal("flat-tokens has no options"):
        open_corpus(demo, options={"end_of_text": 1})


def test_versions_without_a_pointer_are_named(demo, version, tmp_path):
    unpublished = tmp_path / "unpublished"
    with refusal(rf"Name the dataset around it: {demo}", FileNotFoundError):
        open_corpus(demo / "versions")
    shutil.copytree(demo / "versions", unpublished / "versions")
    for path in (unpublished, unpublished / "versions"):
        with refusal(rf"the latest\. Name a version: {unpublished}/versions/{version.name}", FileNotFoundError):
            open_corpus(path)
    shutil.rmtree(unpublished / "versions")
    (unpublished / "_cache").mkdir()
    (unpublished / "_cache/columns.parquet").write_bytes(b"PAR1PAR1")  # kept columns of a shard
    with refusal(f"^{unpublished}: is an output at which nothing is published"):
        open_corpus(unpublished)


def test_a_split_that_is_not_there_is_refused_with_those_that_are(demo):
    with refusal("there is no split 'test'; there are train, validation"):
        open_corpus(demo).split("test")


def test_another_tokenizer_of_the_same_name_is_not_taken(tmp_path):
    provenance = {"tokenizer": {"name": "bytes", "digest": "0" * 64, "highest_id": 256}}
    write_sequences(tmp_path / "data", [[1, 2]], provenance=provenance)
    with refusal(r"'bytes' found here is not the dataset's own: its digest is .*000000000000.*--tokenizer"):
        vocabulary_of(open_corpus(tmp_path / "data"), None, None, warned)


@pytest.mark.parametrize("record", ["{", '{"config": 3}', '{"config": {"sources": [1]}}'])
def test_a_garbled_record_of_a_run_says_nothing(copy, record):
    (path,) = (copy / "runs").iterdir()
    path.write_text(record)
    assert run_of(open_corpus(copy)).source_paths == ()


def splits_of(sequences: list[list[int]], cut: int) -> list[Any]:
    """The same sequences as a flat-tokens array and without an index, in batches that end inside sequences, as other formats."""
    split = open_corpus(in_memory(sequences)).splits["train"]
    facts = {"token_count": split.token_count, "seq_count": split.seq_count}

    def batches(start: int, stop: int) -> Iterator[TokenBatch]:
        for part in token_ranges(split.entries, start, stop, cut):
            yield TokenBatch(split.slice(part.start, part.stop), part.seq_starts, 0)

    return [split, SimpleNamespace(batches=batches, **facts)]


@given(RAGGED, st.integers(1, 7), st.integers(1, 7), st.data())
def test_windows_are_the_split_and_every_start_is_in_one_of_them(sequences, size, cut, data):
    start = data.draw(st.integers(0, len(sequences)))
    stop = data.draw(st.integers(start, len(sequences)))
    tokens = [i for sequence in sequences[start:stop] for i in sequence]
    starts = np.cumsum([0, *map(len, sequences[start:stop])])[:-1].astype(int).tolist()
    for split in splits_of(sequences, cut):
        found = list(windows(split, start, stop, max_tokens=size))
        assert [int(i) for window in found for i in window.ids] == tokens
        assert [int(place) + window.first for window in found for place in window.starts] == starts
        numbers = [window.first_seq + k for window in found for k in range(len(window.starts))]
        assert numbers == list(range(start, stop))
        assert all(len(window.ids) <= size for window in found)


@given(RAGGED, st.integers(1, 7))
def test_the_sequence_of_every_token(sequences, cut):
    expected = [(i, place) for i, sequence in enumerate(sequences) for place in range(len(sequence))]
    for split in splits_of(sequences, cut):
        assert [sequence_of(split, token) for token in range(-len(expected), len(expected))] == expected * 2
        for wrong in (len(expected), -len(expected) - 1):
            with refusal(f"there is no token {wrong}; there are {len(expected)}", IndexError):
                sequence_of(split, wrong)
