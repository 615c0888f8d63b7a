"""The nanoGPT family: names, headers, where the end-of-text token stands, what is cut where, and files that lie."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import FORMATS, open_any
from flat_tokens.formats.nanogpt import NamedShards, Shards, Stream
from flat_tokens.stores.store import Store
from tests.examples import examples
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal

END = 9


def written(directory: Path) -> dict[str, list[int]]:
    """The tokens of each file, as the format's own consumers take them."""
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".npy":
            files[path.name] = np.load(path).tolist()
        else:
            skip = 1024 if path.read_bytes()[:4] == struct.pack("<i", 20240520) else 0
            files[path.name] = np.frombuffer(path.read_bytes()[skip:], "<u2").tolist()
    return files


TRAIN, VALIDATION = [[1, 2, 3], [], [4], [5, 6, 7, 8, 1, 2, 3, 4, 5]], [[7, 7], [8]]


OPENED = [9, 1, 2, 3, 9, 9, 4, 9, 5, 6, 7, 8, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "options", "train", "validation"),
    [
        ("nanogpt", Stream(END), {"train.bin": [*OPENED[1:], 9]}, {"val.bin": [7, 7, 9, 8, 9]}),
        ("build-nanogpt", NamedShards(END), {"edufineweb_train_000001.npy": OPENED}, {}),
        (
            "build-nanogpt",
            NamedShards(END, tokens_per_shard=9),
            {"edufineweb_train_000001.npy": OPENED[:9], "edufineweb_train_000002.npy": OPENED[9:]},
            {"edufineweb_val_000000.npy": [9, 7, 7, 9, 8]},
        ),
        (  # more validation than a shard moves train on
            "build-nanogpt",
            NamedShards(END, tokens_per_shard=3, name="fw"),
            {f"fw_train_{i:06}.npy": OPENED[i * 3 - 6 : i * 3 - 3] for i in range(2, 8)},
            {"fw_val_000000.npy": [9, 7, 7], "fw_val_000001.npy": [9, 8]},
        ),
        (
            "jaxformer",
            Shards(END, tokens_per_shard=9),
            {"train_0000.npy": OPENED[:9], "train_0001.npy": OPENED[9:]},
            {"test_0000.npy": [9, 7, 7, 9, 8]},
        ),
        ("llm.c", NamedShards(END, name="x"), {"x_train_000001.bin": OPENED}, {"x_val_000000.bin": [9, 7, 7, 9, 8]}),
    ],
)
def test_files_have_the_stream_cut_into_shards(tmp_path: Path, name: str, options: Stream, train: Any, validation: Any) -> None:
    """Documents are closed or opened. Shard 0 is left to validation, or shards count from 0 in each split."""
    export(name, splits_of(TRAIN, VALIDATION if validation else []), tmp_path, options)
    assert written(tmp_path) == {**train, **validation}
    for path in tmp_path.glob("*.npy"):
        assert np.load(path).dtype == (np.uint32 if name == "jaxformer" else np.uint16)
    for path in tmp_path.glob("x_val_*.bin"):
        assert path.read_bytes()[:1024] == struct.pack("<256i", 20240520, 1, 5, *[0] * 253)


def test_llmc_has_another_header_for_wide_tokens(tmp_path: Path) -> None:
    """As its data preparation writes for Llama 3."""
    export("llm.c-llama-3", splits_of(TRAIN, [[7, 7, 70_000]]), tmp_path, NamedShards(128_000, name="TinyStories"))
    data = (tmp_path / "TinyStories_val_000000.bin").read_bytes()
    assert data == struct.pack("<256i", 20240801, 7, 4, *[0] * 253) + struct.pack("<4I", 128_000, 7, 7, 70_000)
    opened = open_any(tmp_path, options=NamedShards(128_000))
    assert opened.format == "llm.c-llama-3"
    assert sequences_in(opened.splits["train"]) == TRAIN
    assert sequences_in(opened.splits["validation"]) == [[7, 7, 70_000]]
    with refusal(r"has tokens of uint32, but llm\.c has uint16"):
        open_any(tmp_path / "TinyStories_val_000000.bin", "llm.c")


@pytest.mark.parametrize("count", [1, 9, 10, 99_999, 100_000])
@pytest.mark.parametrize(("name", "dtype"), [("build-nanogpt", "<u2"), ("jaxformer", "<u4")])
def test_npy_files_are_numpys_own_byte_for_byte(tmp_path: Path, count: int, name: str, dtype: str) -> None:
    options = (NamedShards if name == "build-nanogpt" else Shards)(tokens_per_shard=10**6)
    export(name, splits_of([np.arange(count) % 1000]), tmp_path, options)
    (path,) = tmp_path.iterdir()
    theirs = io.BytesIO()
    np.save(theirs, (np.arange(count) % 1000).astype(dtype))
    assert path.read_bytes() == theirs.getvalue()


@examples(60)
@given(
    sequences=st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=12),
    size=st.integers(1, 40),
    batch=st.integers(1, 10),
)
@pytest.mark.parametrize("name", ["build-nanogpt", "nanogpt"])
def test_any_shard_is_its_piece_of_the_stream(name: str, sequences: list[list[int]], size: int, batch: int) -> None:
    """Whatever is cut where, in shards and in the batches they are made of: the naive stream, sliced."""
    if name == "nanogpt":
        options = Stream(END)
        expected = [token for sequence in sequences for token in [*sequence, END]]
        size = len(expected)
    else:
        options = NamedShards(END, tokens_per_shard=size)
        expected = [token for sequence in sequences for token in [END, *sequence]]
    splits, store = splits_of(sequences), Store.at("memory://pieces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flat_tokens.formats.nanogpt.BATCH_TOKENS", batch)
        patch.setattr("flat_tokens.formats.nanogpt.MARKS_AT_A_TIME", 3)
        parts = FORMATS[name].plan(splits, options)
        assert [(part.start, part.stop) for part in parts] == [
            (at, min(at + size, len(expected))) for at in range(0, len(expected), size)
        ]
        for part in parts:
            (stored,) = FORMATS[name].write(splits, part, store, options)
            data = store.read(stored.key)[128 if name == "build-nanogpt" else 0 :]
            assert np.frombuffer(data, "<u2").tolist() == list(expected[part.start : part.stop])


def test_a_large_document_over_many_shards_comes_back_whole(tmp_path: Path) -> None:
    sequences = [[], list(range(50_000)) * 40, [1], list(range(700_000))]
    options = Shards(2**31 - 1, tokens_per_shard=900_000)
    export("jaxformer", splits_of(sequences), tmp_path, options)
    assert len(list(tmp_path.iterdir())) == 4
    opened = open_any(tmp_path, options=options).splits["train"]
    assert [opened.sequence(i).tolist() for i in range(4)] == sequences
    assert max(batch.token_count for batch in opened.batches()) <= 1 << 19


def test_sequences_are_not_run_into_one_another_unasked() -> None:
    with refusal(r"has 2 sequences, and nanogpt keeps no bounds .* Set end_of_text"):
        export("nanogpt", splits_of([[1], [2]]), "memory://refused", Stream())
    export("nanogpt", splits_of([[1, 2]]), "memory://one-run", Stream())
    assert sequences_in(open_any("memory://one-run", "nanogpt").splits["train"]) == [[1, 2]]


def test_a_sequence_that_holds_the_end_of_text_token_is_refused_or_kept(tmp_path: Path) -> None:
    splits = splits_of([[1], [2, 9, 3]])
    with refusal(r"token 2 is end_of_text \(9\) inside a sequence"):
        export("nanogpt", splits, tmp_path, Stream(END))
    assert list(tmp_path.iterdir()) == []
    export("nanogpt", splits, tmp_path, Stream(END, inner_end_of_text="keep"))
    assert written(tmp_path)["train.bin"] == [1, 9, 2, 9, 3, 9]


@pytest.mark.parametrize("options", [Stream(), Stream(END)])
def test_without_the_end_of_text_token_a_split_is_one_run(tmp_path: Path, options: Stream) -> None:
    export("nanogpt", splits_of([[1], [2, 3]], [[4]]), tmp_path, Stream(END))
    opened = open_any(tmp_path, "nanogpt", options)
    expected = [[1], [2, 3]] if options.end_of_text else [[1, 9, 2, 3, 9]]
    assert sequences_in(opened.splits["train"]) == expected


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("build-nanogpt", [1, 2, 9, 3], [[1, 2], [3]]),  # as where another's shards begin inside a document
        ("build-nanogpt", [9, 9, 3, 9], [[], [3], []]),
        ("build-nanogpt", [], []),
        ("nanogpt", [1, 2, 9, 3], [[1, 2], [3]]),  # as where the last document was not closed
        ("nanogpt", [9, 9, 3, 9], [[], [], [3]]),
        ("nanogpt", [], []),
    ],
)
def test_streams_of_others_lose_no_token(tmp_path: Path, name: str, tokens: list[int], expected: list[list[int]]) -> None:
    options = NamedShards(END) if name == "build-nanogpt" else Stream(END)
    if name == "build-nanogpt":
        np.save(tmp_path / "edufineweb_train_000001.npy", np.array(tokens, "<u2"))
    else:
        (tmp_path / "train.bin").write_bytes(np.array(tokens, "<u2").tobytes())
    readable = open_any(tmp_path, name, options).splits["train"]
    for max_tokens in (1, 2, 3, 10):
        assert sequences_in(readable, max_tokens) == expected


def test_the_formats_are_known_by_their_content(tmp_path: Path) -> None:
    for name, options in (
        ("build-nanogpt", NamedShards(END)),
        ("jaxformer", Shards(END)),
        ("llm.c", NamedShards(END)),
        ("llm.c-llama-3", NamedShards(END)),
        ("nanogpt", Stream(END)),
    ):
        export(name, splits_of(TRAIN), tmp_path / name, options)
        for path in (tmp_path / name).iterdir():
            path.rename(path.with_name("0001"))  # no ending tells
            if name == "nanogpt":
                with refusal("is in none of the formats that are known by their content"):
                    open_any(tmp_path / name / "0001")
            else:
                assert open_any(tmp_path / name / "0001").format == name


def npy(header: dict[str, object], data: bytes) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


@pytest.mark.parametrize(
    ("name", "data", "complaint"),
    [
        ("llm.c", struct.pack("<256i", 20240520, 2, 1, *[0] * 253) + bytes(2), "begins with 20240520, 2, 1"),
        ("llm.c", struct.pack("<256i", 20240520, 1, -1, *[0] * 253), "begins with 20240520, 1, -1"),
        ("llm.c", struct.pack("<256i", 20240520, 1, 2**31 - 1, *[0] * 253) + bytes(2), "has 1026 bytes, but its header says"),
        ("llm.c", struct.pack("<3i", 20240520, 1, 0), "has 12 bytes, but its header says 1024"),
        ("llm.c", struct.pack("<256i", 20240801, 1, 1, *[0] * 253) + bytes(4), "begins with 20240801, 1, 1, but .* 20240801, 7 "),
        ("llm.c-llama-3", struct.pack("<256i", 20240801, 7, 2, *[0] * 253) + bytes(4), "1028 bytes, but its header says 1032"),
        ("llm.c", b"", "begins with 0, 0, 0"),
        ("jaxformer", npy({"descr": "<u4", "fortran_order": False, "shape": (3,)}, bytes(8)), "its header says 140"),
        ("jaxformer", npy({"descr": "<u4", "fortran_order": False, "shape": (10**15,)}, bytes(8)), "its header says"),
        ("jaxformer", npy({"descr": "<u4", "fortran_order": False, "shape": (1, 2)}, bytes(8)), "tokens are in one dimension"),
        (
            "jaxformer",
            npy({"descr": "<f4", "fortran_order": False, "shape": (2,)}, bytes(8)),
            "but tokens are .* of uint16 or uint32",
        ),
        ("jaxformer", npy({"descr": "|O", "fortran_order": False, "shape": (2,)}, b"cposix\nsystem\n"), "of uint16 or uint32"),
        ("jaxformer", npy({"descr": "<u2", "fortran_order": False, "shape": (4,)}, bytes(8)), "tokens of uint16, but jaxformer"),
        ("jaxformer", b"\x93NUMPY\x01\x00\xff\xff{{", "its header is b'{{'"),
        ("jaxformer", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 4000, "its header is"),
        ("jaxformer", b"\x93NUMPY\x09\x00\x00\x00\x00\x00", "is not a .npy file"),
        ("jaxformer", b"\x93NUMPY", "is not a .npy file"),
        ("jaxformer", b"", "is not a .npy file"),
        ("build-nanogpt", npy({"descr": "<u4", "fortran_order": False, "shape": (2,)}, bytes(8)), "tokens of uint32, but build"),
        ("nanogpt", b"123", "has 3 bytes, but tokens of two bytes each"),
    ],
)
def test_files_that_lie_are_refused_by_name(tmp_path: Path, name: str, data: bytes, complaint: str) -> None:
    (tmp_path / "liar").write_bytes(data)
    with refusal(rf"liar: .*{complaint}"):
        open_any(tmp_path / "liar", name)


@pytest.mark.parametrize(
    ("version", "dtype", "options"), [*(((v, 0), "<u2", NamedShards(END)) for v in (1, 2, 3)), ((1, 0), ">u4", Shards(END))]
)
def test_every_version_of_npy_and_order_of_bytes_is_read(
    tmp_path: Path, version: tuple[int, int], dtype: str, options: Stream
) -> None:
    with (tmp_path / "train.npy").open("wb") as file:
        np.lib.format.write_array(file, np.array([9, 1, 2], dtype), version)
    assert sequences_in(open_any(tmp_path / "train.npy", options=options).splits["train"]) == [[1, 2]]
