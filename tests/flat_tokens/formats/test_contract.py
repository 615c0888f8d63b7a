"""What the formats share: cutting into parts and batches, naming splits, finding files, opening anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import Files, open_any
from flat_tokens.formats.contract import sequence_ranges, split_of
from flat_tokens.formats.megatron import Megatron
from flat_tokens.formats.modalities import Modalities
from flat_tokens.rows.split import ahead
from tests.examples import examples
from tests.flat_tokens.formats.exporting import put, sequences_in, splits_of
from tests.made import write_sequences
from tests.refusal import refusal

RAGGED = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=12), max_size=15)


@examples(50)
@given(sequences=RAGGED, max_tokens=st.one_of(st.none(), st.integers(1, 30)))
def test_runs_of_whole_sequences_cover_all_and_are_as_long_as_may_be(sequences, max_tokens):
    split = splits_of(sequences)["train"]
    ranges = sequence_ranges(split, max_tokens)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(len(sequences)))
    if max_tokens is None:
        assert len(ranges) == bool(sequences)
        return
    for start, stop in ranges:
        tokens = sum(map(len, sequences[start:stop]))
        assert stop == start + 1 or tokens <= max_tokens
        assert stop == len(sequences) or tokens + len(sequences[stop]) > max_tokens


@pytest.mark.parametrize(
    ("key", "split"),
    [
        ("edufineweb_val_000000.npy", "validation"),
        ("edufineweb_train_000001.npy", "train"),
        ("test_0000.npy", "validation"),
        ("validation/shard.00000.mds", "validation"),
        ("evaluated_values.bin", "train"),
    ],
)
def test_a_files_words_name_its_split(key, split):
    assert split_of(key) == split


def test_files_are_found_by_directory_by_name_and_by_prefix(tmp_path):
    for name in ("a.bin", "a.idx", "b.bin", ".hidden", "deeper/c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert Files.at(tmp_path).keys == ("a.bin", "a.idx", "b.bin", "deeper/c.bin")
    assert Files.at(tmp_path / "b.bin").keys == ("b.bin",)
    assert Files.at(tmp_path / "a").keys == ("a.bin", "a.idx")
    with refusal("nothing", FileNotFoundError):
        Files.at(tmp_path / "nothing")


def test_what_is_in_several_formats_is_refused_until_one_is_named(tmp_path):
    put(tmp_path, Modalities(), [[1]])
    put(tmp_path, Megatron(), [[2]])
    with refusal(r"is in several formats \(modalities, megatron\)\. Name one of its files, or the"):
        open_any(tmp_path)
    assert sequences_in(open_any(tmp_path, "megatron").splits["train"]) == [[2]]
    assert sequences_in(open_any(tmp_path / "train.pbin").splits["train"]) == [[1]]
    with pytest.raises(FileNotFoundError):
        open_any(tmp_path, "flat-tokens")


def test_a_damaged_dataset_is_not_taken_for_another_format(tmp_path):
    """The error is the reader's own, about the dataset, not that nothing was recognised."""
    write_sequences(tmp_path / "d", [[1, 2], [3]])
    (tmp_path / "d/train/zarr.json").unlink()
    with refusal("train: there is no zarr group here", FileNotFoundError):
        open_any(tmp_path / "d")


def test_working_ahead_never_has_more_than_it_may():
    made = []
    stream = ahead(made.append(i) or i for i in range(100))
    for i in range(10):
        assert next(stream) == i
        assert len(made) <= i + 1 + 2
    stream.close()
    assert len(made) <= 12
