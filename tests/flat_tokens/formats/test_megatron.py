"""Megatron-LM: the index as specified, every token type, its own reader and builder, and indexes that lie."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.formats import open_any
from flat_tokens.formats.megatron import DTYPES, Megatron
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal


def index(
    lengths: list[int], pointers: list[int], documents: list[int], code: int = 4, *, version: int = 1, modes: bytes = b""
) -> bytes:
    arrays = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8")]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    return header + b"".join(array.tobytes() for array in arrays) + modes


def test_the_literal_bytes_of_a_small_dataset(tmp_path: Path) -> None:
    export("megatron", splits_of([[1, 2], [], [3]]), tmp_path, Megatron(end_of_text=9))
    assert (tmp_path / "train.bin").read_bytes() == struct.pack("<6H", 1, 2, 9, 9, 3, 9)
    assert (tmp_path / "train.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4) + struct.pack("<3i3q4q", 3, 1, 2, 0, 6, 8, 0, 1, 2, 3)
    )
    opened = open_any(tmp_path / "train", options=Megatron(end_of_text=9))  # the prefix, as Megatron names a dataset
    assert opened.format == "megatron"
    assert sequences_in(opened.splits["train"]) == [[1, 2], [], [3]]


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("name", ["data.bin", "data.idx", "data", ""])
def test_every_token_type_is_read_by_any_of_its_names(tmp_path: Path, code: int, name: str) -> None:
    dtype = np.dtype(DTYPES[code])
    (tmp_path / "data.bin").write_bytes(np.array([1, 127, 0, 5], dtype).tobytes())
    (tmp_path / "data.idx").write_bytes(index([1, 0, 3], [0, dtype.itemsize, dtype.itemsize], [0, 1, 2, 3], code))
    opened = open_any(tmp_path / name)
    assert opened.format == "megatron"
    assert sequences_in(opened.splits["train"]) == [[1], [], [127, 0, 5]]


@pytest.mark.parametrize(
    ("code", "value", "complaint"),
    [
        (2, -1, "holds -1 to -1"),
        (5, 2**31, "holds 2147483648 to 2147483648"),
        (6, 0.5, r"holds 0\.5, which is not a token id"),
        (7, float("nan"), "holds nan to nan"),
        (7, float("inf"), "holds inf to inf"),
    ],
)
def test_what_is_no_token_id_is_refused(tmp_path: Path, code: int, value: float, complaint: str) -> None:
    (tmp_path / "data.bin").write_bytes(np.array([value], DTYPES[code]).tobytes())
    (tmp_path / "data.idx").write_bytes(index([1], [0], [0, 1], code))
    with refusal(rf"data\.bin: {complaint}"):
        open_any(tmp_path / "data").splits["train"].sequence(0)


def test_documents_of_several_sequences_are_joined_or_not(tmp_path: Path) -> None:
    """Also a document without sequences, and modes behind the index, as multimodal datasets have them."""
    (tmp_path / "data.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    (tmp_path / "data.idx").write_bytes(index([1, 2, 0, 3], [0, 4, 12, 12], [0, 2, 2, 4], modes=bytes(4)))
    assert sequences_in(open_any(tmp_path / "data").splits["train"]) == [[0, 1, 2], [], [3, 4, 5]]
    opened = open_any(tmp_path / "data", options=Megatron(sequence="sequence"))
    assert sequences_in(opened.splits["train"]) == [[0], [1, 2], [], [3, 4, 5]]


def test_many_documents_of_many_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than are looked at together."""
    monkeypatch.setattr("flat_tokens.formats.megatron.STARTS_AT_A_TIME", 5)
    lengths = [i % 4 for i in range(50)]
    starts = np.cumsum([0, *lengths]).tolist()
    documents = [0, 3, 3, 4, 17, 30, 31, 49, 50]
    (tmp_path / "data.bin").write_bytes(np.arange(starts[-1], dtype="<i4").tobytes())
    (tmp_path / "data.idx").write_bytes(index(lengths, [4 * start for start in starts[:-1]], documents))
    expected = [list(range(starts[a], starts[b])) for a, b in itertools.pairwise(documents)]
    assert sequences_in(open_any(tmp_path / "data").splits["train"]) == expected


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (index([2, 3], [0, 8], [0, 1, 2], version=2), "has version 2"),
        (index([2, 3], [0, 8], [0, 1, 2], code=9), "token type 9"),
        (index([2, 3], [0, 8], [0, 1, 2])[:-1], "entries take 82"),
        (index([2, 3], [0, 8], [0, 1, 2]) + b"x", "entries take 82"),
        (index([2, 3], [0, 8], [])[:34], "0 document entries"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2**64 - 1, 2**64 - 1), "18446744073709551615 sequences"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 4), "is truncated"),
        (index([2, 4], [0, 8], [0, 1, 2]), "sequences are bytes 0 to 24, but .* has 20"),
        (index([2, 3], [4, 8], [0, 1, 2]), "sequences are bytes 4 to 20"),
        (index([2, 3], [0, 8], [0, 1]), "documents are of sequences 0 to 1"),
        (index([2, 3], [0, 8], [1, 1, 2]), "documents are of sequences 1 to 2"),
    ],
)
def test_an_index_that_lies_is_refused_when_it_is_opened(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(20))
    (tmp_path / "data.idx").write_bytes(data)
    with refusal(rf"data\.idx: .*{complaint}"):
        open_any(tmp_path / "data.idx")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (index([2, 2, 3], [0, 4, 8], [0, 1, 2, 3]), "sequence 0 has 2 tokens of 4 bytes from byte 0"),  # overlaps
        (index([1, 2, 3], [0, 4, 8], [0, 1, 2, 3]), "sequence 1 has 2 tokens"),
        (index([2, -1, 3], [0, 8, 8], [0, 1, 2, 3]), "sequence 1 has -1 tokens"),
        (index([2, 0, 3], [0, 6, 8], [0, 1, 2, 3]), "sequence 0 has 2 tokens"),
        (index([2**31 - 1, 0, 3], [0, 8, 8], [0, 1, 2, 3]), "sequence 0 has 2147483647 tokens"),
        (index([2, 0, 3], [0, 2**63 - 1, 8], [0, 1, 2, 3]), "sequence 0 has 2 tokens"),
        (index([2, 0, 3], [0, -(2**63), 8], [0, 1, 2, 3]), "sequence 0 has 2 tokens"),
        (index([2, 0, 3], [0, 8, 8], [0, 3, 1, 3]), "documents 0 to 3 do not begin at increasing ones"),
        (index([2, 0, 3], [0, 8, 8], [0, -1, 2, 3]), "documents 0 to 3"),
        (index([2, 0, 3], [0, 8, 8], [0, 2**62, 2, 3]), "documents 0 to 3"),
    ],
)
def test_an_index_that_lies_inside_is_refused_when_it_is_read(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(20))
    (tmp_path / "data.idx").write_bytes(data)
    opened = open_any(tmp_path / "data.idx").splits["train"]
    with refusal(rf"data\.idx: .*{complaint}"):
        list(opened.batches())


def megatron_core() -> Any:
    """Megatron-LM's own code, which takes torch along: installed where this test is to run, not for it."""
    reason = "needs megatron-core, torch and packaging: pip install megatron-core --no-deps torch packaging"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason, exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "megatron.core")
def test_megatrons_own_reader_reads_what_is_written(tmp_path: Path, size: int) -> None:
    indexed_dataset = megatron_core()
    sequences = [[1, 2, 3], [59_999], [], list(range(100))]
    export("megatron", splits_of(sequences), tmp_path, Megatron(end_of_text=0, vocabulary_size=size))
    theirs = indexed_dataset.IndexedDataset(str(tmp_path / "train"))
    assert [theirs[i].tolist() for i in range(len(theirs))] == [[*sequence, 0] for sequence in sequences]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert theirs.index.dtype == indexed_dataset.DType.optimal_dtype(size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "megatron.core")
def test_what_megatrons_own_builder_writes_is_read_and_written_again_byte_for_byte(tmp_path: Path, size: int) -> None:
    indexed_dataset, torch = megatron_core(), pytest.importorskip("torch")
    dtype = indexed_dataset.DType.optimal_dtype(size)
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    documents = [[[1, 2], [3]], [[4, 5, 6]], [[59_999]]]
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    opened = open_any(tmp_path / "theirs").splits["train"]
    joined = [[token for sequence in document for token in sequence] for document in documents]
    assert sequences_in(opened) == joined
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "whole.bin"), dtype=dtype)
    for sequence in joined:
        builder.add_document(torch.tensor(sequence), [len(sequence)])
    builder.finalize(str(tmp_path / "whole.idx"))
    export("megatron", splits_of(joined), tmp_path / "ours", Megatron(vocabulary_size=size))
    for ending in ("bin", "idx"):
        assert (tmp_path / "ours" / f"train.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()
