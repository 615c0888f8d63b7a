"""Modalities: the reference's own files, files that it merges, ends of documents, and indexes that are large or lie."""

import json
import os
import pickle
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import open_any
from flat_tokens.formats.modalities import Modalities, open_pbin
from flat_tokens.stores.store import Store
from tests.examples import examples
from tests.flat_tokens.formats.exporting import export, put, read, sequences_in, splits_of
from tests.refusal import refusal

GPT2_END = 50_256
REFERENCES = ["lorem_ipsum", "lorem_ipsum_long"]


@pytest.mark.parametrize("name", REFERENCES)
def test_texts_through_gpt2_are_the_references_packed_data(reference, vocabularies, tmp_path, name):
    """From lines of JSON to a .pbin that is equal byte for byte, and back."""
    tiktoken = pytest.importorskip("tiktoken", reason="tokenizes with gpt2")
    lines = (reference / "modalities" / f"{name}.jsonl").read_bytes().splitlines()
    sequences = tiktoken.get_encoding("gpt2").encode_ordinary_batch([json.loads(line)["text"] for line in lines])
    options = Modalities(end_of_text=GPT2_END, vocabulary_size=GPT2_END + 1)
    put(tmp_path, options, sequences)
    theirs = reference / "modalities" / f"{name}.pbin"
    assert (tmp_path / "train.pbin").read_bytes() == theirs.read_bytes()
    assert open_any(theirs).format == "modalities"
    assert read(theirs, options, 1000) == {"train": sequences}


@examples(40)
@given(sequences=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=9))
def test_unless_present_closes_just_the_documents_that_do_not_end_so(sequences):
    """Ids of the end-of-text token anywhere: at ends, inside, alone, before empty sequences."""
    splits, end = splits_of(sequences), 2
    export("modalities", splits, "memory://unless", Modalities(end_of_text=end))
    closed = [sequence if sequence[-1:] == [end] else [*sequence, end] for sequence in sequences]
    assert read("memory://unless", Modalities(), 3)["train"] == closed
    removed = read("memory://unless", Modalities(end_of_text=end), 3)["train"]
    assert removed == [sequence[:-1] for sequence in closed]
    export("modalities", splits, "memory://always", Modalities(end_of_text=end, closing="always"))
    assert read("memory://always", Modalities(end_of_text=end), 3)["train"] == sequences


# Files that lie.


def pbin(index: bytes, tokens: bytes = bytes(20)) -> bytes:
    return struct.pack("<QI", len(tokens), 4) + tokens + index


@pytest.mark.parametrize(
    ("pairs", "options", "words"),
    [
        ([(0, 8), (0, 16)], Modalities(ignore_offsets=True), "a document of 16 bytes"),
        ([(0, 0)] * 1000 + [(0, 20)], Modalities(max_index_bytes=1000), r"max_index_bytes is 1000\. Set it higher"),
    ],
)
def test_an_index_that_the_options_do_not_allow_is_refused(tmp_path, pairs, options, words):
    """Without offsets, too, the lengths are those of all tokens."""
    (tmp_path / "train.pbin").write_bytes(pbin(pickle.dumps(pairs)))
    with refusal(words):
        open_any(tmp_path / "train.pbin", options=options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "modalities")
def test_what_modalities_itself_merges_is_read(tmp_path):
    theirs = pytest.importorskip("modalities.dataloader.create_packed_data", reason="needs modalities", exc_type=ImportError)
    parts = [[[1], [2, 3]], [[4, 5, 6, 7, 8, 9, 10]], [[11, 12], [13]]]
    for i, documents in enumerate(parts):
        put(tmp_path / str(i), Modalities(vocabulary_size=300), documents)
    files = [theirs.EmbeddedStreamData(tmp_path / str(i) / "train.pbin") for i in range(len(parts))]
    theirs.join_embedded_stream_data(files, tmp_path / "merged.pbin", chunk_size=7)
    assert sequences_in(open_any(tmp_path / "merged.pbin").splits["train"]) == [ids for part in parts for ids in part]


def test_an_index_takes_memory_by_its_size(tmp_path):
    """The densest index there is, of empty documents in five bytes each, is held in less than twice its size."""
    index = b"\x80\x02](" + b"K\0K\0\x86" * 500_000 + b"e."
    (tmp_path / "dense.pbin").write_bytes(pbin(index, b""))
    tracemalloc.start()
    count, peak = open_any(tmp_path).splits["train"].seq_count, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (count, peak < 2 * len(index) + (12 << 20)) == (500_000, True)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path):
    (tmp_path / "train.pbin").write_bytes(pbin(pickle.dumps([(0, 12), (12, 8)])))
    opened = open_pbin(Store.at(tmp_path), "train.pbin", Modalities())
    os.truncate(tmp_path / "train.pbin", 20)
    with refusal(r"train\.pbin: ends before item 5"):
        opened.sequence(1)
