"""LitData's chunks of tokens: their bytes, what LitData itself reads and writes, and indexes that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.formats import Files, open_any
from flat_tokens.formats.compression import compress
from flat_tokens.formats.litdata import LITDATA, Litdata
from tests.damage import change as change_json
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal

LARGEST = 2**31 - 1
EXAMPLE = [[1, 2], [], [3, 4, 5], [LARGEST], list(range(300)), []]


def read(where: Path | str, options: Litdata | None = None, max_tokens: int = 5) -> dict[str, list[list[int]]]:
    splits = LITDATA.open(Files.at(where), options or Litdata())
    return {name: sequences_in(split, max_tokens) for name, split in splits.items()}


def change(path: Path, by: Any) -> None:
    """Change an index."""
    index = json.loads((path / "index.json").read_text())
    change_json(index, by)
    (path / "index.json").write_text(json.dumps(index))


def test_a_chunk_is_its_offsets_and_its_documents(tmp_path: Path) -> None:
    """By hand: two documents, closed by 9, behind their number and three offsets."""
    written = export("litdata", splits_of([[1, 2], [3]], [[4]]), tmp_path, Litdata(end_of_text=9))
    data = np.array([2, 16, 28, 36, 1, 2, 9, 3, 9], "<u4").tobytes()
    assert (tmp_path / "train/chunk-0-0.bin").read_bytes() == data
    assert [item.key for item in written] == [
        "train/chunk-0-0.bin",
        "validation/chunk-0-0.bin",
        "train/index.json",
        "validation/index.json",
    ]
    assert json.loads((tmp_path / "train/index.json").read_text()) == {
        "chunks": [{"chunk_bytes": 36, "chunk_size": 2, "dim": 5, "filename": "chunk-0-0.bin"}],
        "config": {
            "chunk_bytes": 1 << 26,
            "chunk_size": None,
            "compression": None,
            "data_format": ["no_header_tensor:16"],
            "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
            "encryption": None,
            "item_loader": "TokensLoader",
        },
    }


def test_chunks_end_at_the_size_limit_unless_one_document_is_larger(tmp_path: Path) -> None:
    written = export("litdata", splits_of([[1] * n for n in (3, 4, 100, 2, 0, 0, 1, 5)]), tmp_path, Litdata(size_limit=60))
    sizes = {item.key: item.size for item in written if item.key.endswith(".bin")}
    assert list(sizes.values()) == [8 + 2 * 4 + 28, 8 + 4 + 400, 8 + 5 * 4 + 32]
    assert read(tmp_path)["train"] == [[1] * n for n in (3, 4, 100, 2, 0, 0, 1, 5)]


def test_an_index_without_chunks_is_an_empty_split(tmp_path: Path) -> None:
    export("litdata", splits_of(EXAMPLE), tmp_path, Litdata())
    change(tmp_path / "train", lambda index: index["chunks"].clear())
    assert open_any(tmp_path).format == "litdata"
    assert read(tmp_path) == {"train": []}


def test_packed_chunks_are_read(tmp_path: Path) -> None:
    export("litdata", splits_of(EXAMPLE), tmp_path, Litdata())
    chunk = tmp_path / "train/chunk-0-0.bin"
    (tmp_path / "train/chunk-0-0.zstd.bin").write_bytes(compress("zstd", chunk.read_bytes()))
    chunk.unlink()
    change(tmp_path / "train", {"chunks": {0: {"filename": "chunk-0-0.zstd.bin"}}})
    change(tmp_path / "train", {"config": {"compression": "zstd"}})
    assert read(tmp_path) == {"train": EXAMPLE}
    (tmp_path / "train/chunk-0-0.zstd.bin").write_bytes(compress("zstd", bytes(50 << 20)))
    with refusal(r"chunk-0-0.zstd.bin: does not decompress to 1256 bytes"):
        read(tmp_path)


@pytest.mark.parametrize(
    "by",
    [
        {"chunks": {0: {"filename": "../secret.bin"}}},
        {"chunks": {0: {"filename": 3}}},
        {"chunks": {0: {"chunk_size": -1}}},
        {"chunks": {0: {"chunk_size": True}}},
        {"chunks": {0: {"dim": "3"}}},
        {"chunks": {0: {"dim": 2**40}}},
        lambda index: index["chunks"][0].pop("dim"),
        {"chunks": {0: {"chunk_size": 0}}},
        {"chunks": None},
        {"chunks": {}},
        {"config": {"data_format": ["no_header_tensor:1"]}},
        {"config": {"data_format": ["no_header_tensor:x"]}},
        {"config": {"data_format": ["int", "str"]}},
        {"config": {"data_format": ["no_header_numpy:8"]}},
        {"config": {"item_loader": "PyTreeLoader"}},
        {"config": {"compression": "zstd", "compression_level": "batch"}},
        {"chunks": {0: {"dim": None}}},
        {"config": {"compression": "lz4"}},
        {"config": {"encryption": {"algorithm": "fernet"}}},
        lambda index: index.pop("config"),
        lambda index: index.clear(),
    ],
)
def test_a_lying_index_is_refused_by_name(tmp_path: Path, by: Any) -> None:
    export("litdata", splits_of(EXAMPLE), tmp_path / "d", Litdata())
    change(tmp_path / "d/train", by)
    with pytest.raises(ValueError, match=f"{tmp_path}/d/train/index.json: ") as raised:
        LITDATA.open(Files.at(tmp_path / "d"), Litdata())
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "by",
    [
        {"chunks": {0: {"chunk_size": 5}}},
        {"chunks": {0: {"dim": 300}}},
        {"config": {"data_format": ["no_header_tensor:17"]}},
        {"chunks": {0: {"chunk_size": 4, "dim": 308}}},  # as many bytes together
    ],
)
def test_an_index_that_is_not_its_chunks_is_refused_by_the_chunks_name(tmp_path: Path, by: Any) -> None:
    export("litdata", splits_of(EXAMPLE), tmp_path, Litdata())
    change(tmp_path / "train", by)
    with refusal(f"{tmp_path}/train/chunk-0-0.bin: "):
        read(tmp_path)


def test_a_chunk_cut_off_or_changed_is_refused_by_name(tmp_path: Path) -> None:
    export("litdata", splits_of(EXAMPLE), tmp_path, Litdata())
    chunk = tmp_path / "train/chunk-0-0.bin"
    whole = chunk.read_bytes()
    for data in (whole[:-1], whole[:20], b"", whole[:8] + whole[12:] + bytes(4), whole[:12] + b"\xff" * 4 + whole[16:]):
        chunk.write_bytes(data)
        with refusal(str(chunk)):
            read(tmp_path)


def test_other_indexes_are_not_recognised(tmp_path: Path) -> None:
    for content in ("{}", '{"chunks": []}', '{"chunks": [], "config": {"data_format": ["int"]}}', ""):
        (tmp_path / "index.json").write_text(content)
        assert not LITDATA.recognise(Files.at(tmp_path))


# LitData's own writer and reader


@pytest.fixture(scope="module")
def litdata() -> Any:
    return pytest.importorskip("litdata", reason="litdata is not installed", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [400, 1 << 26])
def test_litdata_reads_what_is_written(tmp_path: Path, litdata: Any, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    documents = [[100 * i + k for k in range(i % 37)] for i in range(60)]
    export("litdata", splits_of(documents, [[9, 8]]), tmp_path / "d", Litdata(end_of_text=0, size_limit=limit))
    rows = litdata.StreamingDataset(str(tmp_path / "d/train"), item_loader=litdata.TokensLoader(block_size=7))
    expected, chunks = [], json.loads((tmp_path / "d/train/index.json").read_text())["chunks"]
    flat, first = [token for document in documents for token in [*document, 0]], 0
    for chunk in chunks:  # a row of 7 tokens, and what is left of each chunk is left out
        tokens = flat[first : first + chunk["dim"]]
        expected += [tokens[at : at + 7] for at in range(0, len(tokens) - 6, 7)]
        first += chunk["dim"]
    assert first == len(flat)
    assert [rows[i].tolist() for i in range(len(rows))] == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int32", "int64", "int16", "uint16"])
@pytest.mark.parametrize("items", ["torch", "numpy"])
@pytest.mark.parametrize("compression", [{}, {"compression": "zstd", "compression_level": "chunk"}], ids=len)
def test_what_litdata_writes_is_read(tmp_path: Path, litdata: Any, kind: str, items: str, compression: dict[str, str]) -> None:
    torch = pytest.importorskip("torch")
    from litdata.streaming.writer import BinaryWriter

    documents = [[i] * (i % 9 + 1) for i in range(100)]
    writer = BinaryWriter(str(tmp_path), chunk_bytes=400, item_loader=litdata.TokensLoader(), **compression)
    for i, document in enumerate(documents):
        array = np.array(document, kind)
        writer[i] = torch.from_numpy(array) if items == "torch" else array
    writer.done()
    writer.merge()
    assert open_any(tmp_path).format == "litdata"
    assert read(tmp_path, max_tokens=100) == {"train": documents}
