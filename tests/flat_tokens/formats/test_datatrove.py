"""datatrove: the bytes of its files, its own readers and writer, and indexes that lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.formats import open_any
from flat_tokens.formats.datatrove import Datatrove
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal


def test_the_literal_bytes_of_a_small_dataset(tmp_path: Path) -> None:
    export("datatrove", splits_of([[1, 2], [], [3]], [[4]]), tmp_path, Datatrove(end_of_text=9, tokenizer="gpt2"))
    train = tmp_path / "train/00000_train.ds"
    assert train.read_bytes() == struct.pack("<6H", 1, 2, 9, 9, 3, 9)
    assert train.with_suffix(".ds.index").read_bytes() == struct.pack("<3Q", 3, 4, 6)
    assert train.with_suffix(".ds.metadata").read_text() == "gpt2|2\n6\n6.00 T"
    assert (tmp_path / "validation/00000_validation.ds").exists()
    for path in (train, train.with_suffix(".ds.index"), train.with_suffix(".ds.metadata"), train.parent):
        opened = open_any(path, options=Datatrove(end_of_text=9))
        assert opened.format == "datatrove"
        assert sequences_in(opened.splits["train"]) == [[1, 2], [], [3]]


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (struct.pack("<2Q", 2, 4), "ends with document end 4, in 16 bytes, but the tokens have 20"),
        (struct.pack("<2Q", 2, 10)[:-1], "ends with document end 2560, in 15 bytes"),
        (struct.pack("<Q", 2**64 - 1), "ends with document end 18446744073709551615"),
        (b"", "ends with document end 0, in 0 bytes"),
    ],
)
def test_an_index_that_lies_is_refused_when_it_is_opened(tmp_path: Path, index: bytes, complaint: str) -> None:
    (tmp_path / "a.ds").write_bytes(bytes(20))
    (tmp_path / "a.ds.index").write_bytes(index)
    with refusal(rf"a\.ds\.index: {complaint}"):
        open_any(tmp_path, "datatrove")
    with refusal("is in none of the formats"):
        open_any(tmp_path)


@pytest.mark.parametrize("ends", [[4, 2, 10], [11, 10], [2**64 - 1, 10]])
def test_an_index_that_lies_inside_is_refused_when_it_is_read(tmp_path: Path, ends: list[int]) -> None:
    (tmp_path / "a.ds").write_bytes(bytes(20))
    (tmp_path / "a.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    with refusal(r"a\.ds\.index: its documents 0 to \d do not end in order"):
        list(open_any(tmp_path).splits["train"].batches())


def test_the_metadata_says_the_width_where_a_cut_index_could_mean_another(tmp_path: Path) -> None:
    """Half of the tokens of two bytes would be all of them in four."""
    export("datatrove", splits_of([[1, 2], [3, 4]]), tmp_path, Datatrove())
    index = tmp_path / "train/00000_train.ds.index"
    index.write_bytes(index.read_bytes()[:8])
    with refusal("ends with document end 2, in 8 bytes, but the tokens have 8"):
        open_any(tmp_path, "datatrove")


@pytest.mark.parametrize("name", ["a|b", "a\nb", 3])
def test_a_tokenizers_name_fits_a_line(name: Any) -> None:
    with refusal("tokenizer is"):
        Datatrove(tokenizer=name)


def theirs(module: str) -> Any:
    """datatrove's own code: installed where this test is to run, not for it."""
    return pytest.importorskip(f"datatrove.{module}", reason="needs datatrove and torch", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "datatrove")
def test_datatroves_own_readers_read_what_is_written(tmp_path: Path, size: int) -> None:
    """The merger, which takes files apart by their indexes, and the dataset that a trainer reads."""
    merger, dataset = theirs("pipeline.tokens.merger"), theirs("utils.dataset")
    pytest.importorskip("torch")
    sequences = [[1, 2, 3], [59_999], [7] * 100]
    export("datatrove", splits_of(sequences), tmp_path, Datatrove(end_of_text=0, vocabulary_size=size, tokenizer="any"))
    merger.DocumentTokenizerMerger(str(tmp_path / "train"), str(tmp_path / "merged"), "all", shuffle=False, progress=False).run()
    merged = tmp_path / "merged/000_all.ds"
    for ending in ("", ".index", ".metadata"):
        ours = tmp_path / "train" / f"00000_train.ds{ending}"
        assert merged.with_name(f"{merged.name}{ending}").read_bytes() == ours.read_bytes()
    width = 2 if size == 60_000 else 4
    rows = dataset.DatatroveFolderDataset(str(tmp_path / "train"), 5, token_size=width, return_positions=True)
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 0, 59_999, 0]
    assert rows[0]["positions"].tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "datatrove")
def test_what_datatroves_own_writer_writes_is_read(tmp_path: Path, size: int) -> None:
    tokenizer = theirs("pipeline.tokens.tokenizer")
    sequences = [[1, 2, 3], [59_999], np.arange(1000).tolist()]
    file = tokenizer.TokenizedFile(str(tmp_path), "00000_unshuffled.ds", token_size=size, save_final_metadata=True)
    for sequence in sequences:
        file.write([*sequence, 0], None)
    file.close()
    opened = open_any(tmp_path, options=Datatrove(end_of_text=0))
    assert opened.format == "datatrove"
    assert sequences_in(opened.splits["train"], 100) == sequences
