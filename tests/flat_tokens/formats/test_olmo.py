"""OLMo-core's token files: their bytes, OLMo-core's own reading and writing of them, and metadata that lie."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import olmo as module
from flat_tokens.formats import open_any
from flat_tokens.formats.olmo import Olmo
from tests.examples import examples
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal


def test_the_literal_bytes_of_a_small_dataset(tmp_path: Path) -> None:
    export("olmo-core", splits_of([[1, 2], [], [3]], [[4]]), tmp_path, Olmo(end_of_text=9))
    train = tmp_path / "train/part-00000.npy"
    assert train.read_bytes() == struct.pack("<6H", 1, 2, 9, 9, 3, 9)
    assert gzip.decompress(train.with_suffix(".csv.gz").read_bytes()) == b"0,3\n3,4\n4,6\n"
    assert (tmp_path / "validation/part-00000.npy").exists()
    for path in (train, train.with_suffix(".csv.gz"), train.parent):
        opened = open_any(path, options=Olmo(end_of_text=9))
        assert opened.format == "olmo-core"
        assert sequences_in(opened.splits["train"]) == [[1, 2], [], [3]]


@given(bounds=st.lists(st.tuples(*[st.one_of(st.integers(0, 2**60), st.integers(0, 30))] * 2), max_size=20))
@examples(50)
def test_lines_are_written_as_python_writes_numbers(bounds: list[tuple[int, int]]) -> None:
    numbers = np.array(bounds, np.int64).reshape(-1, 2)
    assert module._lines(numbers[:, 0], numbers[:, 1]) == "".join(f"{a},{b}\n" for a, b in bounds).encode()


def test_many_documents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [[i % 7] * (i % 5) for i in range(5000)]
    export("olmo-core", splits_of(sequences), tmp_path, Olmo())
    monkeypatch.setattr(module, "TEXT_AT_A_TIME", 100)
    assert sequences_in(open_any(tmp_path).splits["train"], 1000) == sequences


def metadata(tmp_path: Path, text: bytes, tokens: int = 6) -> Path:
    (tmp_path / "a.npy").write_bytes(bytes(2 * tokens))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    return tmp_path


def test_dolmas_lines_have_more_columns(tmp_path: Path) -> None:
    lines = b'0,2,id-1,"a, b",1\n2,6,id-2,c4.jsonl,2\n'
    assert sequences_in(open_any(metadata(tmp_path, lines)).splits["train"]) == [[0, 0], [0] * 4]
    assert sequences_in(open_any(metadata(tmp_path, b"0,2\n2,6")).splits["train"]) == [[0, 0], [0] * 4]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"0,2\n3,6\n", "has a document from token 3 to 6"),
        (b"0,2\n1,6\n", "has a document from token 1 to 6"),
        (b"0,2\n2,1\n", "has a document from token 2 to 1"),
        (b"0,999999999999999999\n", "has a document from token 0 to 999999999999999999"),
        (b"0,2\n2,5\n", "its last document ends at token 5, but the tokens have 12 bytes"),
        (b"", "its last document ends at token 0, but the tokens have 12 bytes"),
        (b"0,2\nx,6\n", "has the line b'x,6'"),
        (b"0,2\n2,-6\n", "has the line b'2,-6'"),
        (b"0;6\n", "has the line b'0;6'"),
        (b"0,6,\xff\n\n", "has the line b''"),
        (b"1" * (3 << 20), "has a line that is not a line of two numbers"),
    ],
)
def test_metadata_that_lie_are_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    with refusal(rf"a\.csv\.gz: .*{complaint}"):
        open_any(metadata(tmp_path, text))


def test_metadata_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALWAYS_TEXT", 1000)
    with refusal(r"a\.csv\.gz: cannot be read as gzipped lines \(has more than 1768 bytes of text\)"):
        open_any(metadata(tmp_path, b"0,0\n" * 1000))


def test_damaged_metadata_are_refused(tmp_path: Path) -> None:
    metadata(tmp_path, b"0,2\n2,6\n")
    data = (tmp_path / "a.csv.gz").read_bytes()
    for wrong in (data[:-5], data + b"more", b"", data[:4] + b"\xff" * 20):
        (tmp_path / "a.csv.gz").write_bytes(wrong)
        with refusal(r"a\.csv\.gz: "):
            open_any(tmp_path)


def test_tokens_alone_and_numpys_own_files_are_others(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(bytes(20))
    with refusal(r"a\.npy: has no a\.csv\.gz next to it"):
        open_any(tmp_path, "olmo-core")
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,4\n"))
    assert open_any(tmp_path).format == "build-nanogpt"


def theirs() -> Any:
    """OLMo-core's own code: installed where this test is to run, not for it."""
    return pytest.importorskip("olmo_core.data.utils", reason="needs ai2-olmo-core and torch", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "olmo_core")
def test_olmo_core_reads_what_is_written(tmp_path: Path) -> None:
    utils = theirs()
    sequences = [[1, 2, 3], [59_999], [], [7] * 100]
    export("olmo-core", splits_of(sequences), tmp_path, Olmo(end_of_text=0))
    path = tmp_path / "train/part-00000.npy"
    bounds = [(0, 4), (4, 6), (6, 7), (7, 108)]
    assert list(utils.iter_document_indices(path, use_array_if_local=False)) == bounds
    assert [tuple(map(int, pair)) for pair in utils.iter_document_indices(path, eos_token_id=0, dtype=np.uint16)] == bounds
    read = [utils.load_array_slice(path, start, stop, np.uint16).tolist() for start, stop in bounds]
    assert read == [[*sequence, 0] for sequence in sequences]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.needs("torch", "olmo_core")
def test_the_metadata_that_olmo_core_writes_are_read(tmp_path: Path) -> None:
    utils = theirs()
    tokens = np.array([5, 6, 0, 0, 7, 8, 9, 0], np.uint32)
    tokens.tofile(tmp_path / "part-0.npy")
    utils.write_document_indices(tmp_path / "part-0.npy", dtype=np.uint32, eos_token_id=0)
    opened = open_any(tmp_path, options=Olmo(end_of_text=0))
    assert opened.format == "olmo-core"
    assert sequences_in(opened.splits["train"]) == [[5, 6], [], [7, 8, 9]]
