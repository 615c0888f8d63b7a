"""The formats' own readers and writers: they read what is written here, and what they write is read."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.formats import open_any
from flat_tokens.formats.datatrove import Datatrove
from flat_tokens.formats.litdata import Litdata
from flat_tokens.formats.mds import Mds
from flat_tokens.formats.megatron import Megatron
from flat_tokens.formats.olmo import Olmo
from tests.flat_tokens.formats.exporting import EXAMPLE, index_of, put, read
from tests.refusal import refusal

pytestmark = pytest.mark.filterwarnings("ignore")


def theirs(module: str) -> Any:
    """A module of a neighbour's, which is installed where its tests are to run, not for them."""
    return pytest.importorskip(module, reason=f"needs {module}", exc_type=ImportError)


# MosaicML


STAND_INS: dict[str, dict[str, object]] = {
    "torchvision": {},
    "torchvision.datasets": {"VisionDataset": object},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {"to_tensor": None},
    "transformers": {},
    "transformers.feature_extraction_utils": {"BatchFeature": dict},
    "transformers.tokenization_utils_base": {"BatchEncoding": dict},
    "transformers.models": {},
    "transformers.models.auto": {},
    "transformers.models.auto.tokenization_auto": {"AutoTokenizer": None},
}
"""Packages for images and tokenizers that mosaicml-streaming imports, and that nothing here needs."""


@pytest.fixture(scope="module")
def streaming() -> Any:
    """mosaicml-streaming. The stand-ins are there while it is imported, and at no other time: others may have the real ones."""
    theirs("torch")
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update(attributes, __path__=[])
            patch.setitem(sys.modules, name, module)
        return theirs("streaming")


def written_by_mosaicml(streaming: Any, path: Path, sequences: list[Any], columns: dict[str, str], **settings: Any) -> None:
    filler = {"a": "text before", "id": 7, "z": b"bytes behind", "mask": np.ones(4, np.uint8)}
    with streaming.MDSWriter(columns=columns, out=str(path), **settings) as writer:
        for ids in sequences:
            writer.write({name: filler.get(name, ids) for name in columns})


def test_a_shard_is_byte_for_byte_what_mosaicml_writes(tmp_path, streaming):
    sequences = [ids for ids in EXAMPLE if ids] + [[1] * 70_000]  # their writer takes no empty arrays
    put(tmp_path / "ours", Mds(), sequences)
    arrays = [np.array(ids, np.int32) for ids in sequences]
    written_by_mosaicml(streaming, tmp_path / "theirs", arrays, {"tokens": "ndarray:int32"}, hashes=["sha256"])
    for name in ("shard.00000.mds", "index.json"):
        assert (tmp_path / "ours/train" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize(
    ("limit", "codec"), [(1 << 26, "none"), *((300, codec) for codec in ("none", "zstd", "gz", "br", "bz2", "snappy"))]
)
def test_mosaicml_reads_what_is_written(tmp_path, streaming, limit, codec):
    put(tmp_path, Mds(size_limit=limit, compression=codec), EXAMPLE, [[9]])
    if codec == "none":
        local = streaming.LocalDataset(str(tmp_path), split="train")
        assert [local[i]["tokens"].tolist() for i in range(len(local))] == EXAMPLE
        assert local[0]["tokens"].dtype == np.int32
        assert streaming.LocalDataset(str(tmp_path), split="validation")[0]["tokens"].tolist() == [9]
    streamed = streaming.StreamingDataset(
        remote=str(tmp_path), local=str(tmp_path / "cache"), split="train", batch_size=1, validate_hash="sha256"
    )
    assert [sample["tokens"].tolist() for sample in streamed] == EXAMPLE


def test_mosaicml_reads_packed_samples(tmp_path, streaming):
    put(tmp_path, Mds(length=300, end_of_text=0, drop_last=True, size_limit=5000), [list(range(1, 1000))] * 3)
    local = streaming.LocalDataset(str(tmp_path), split="train")
    assert np.array_equal(np.stack([local[i]["tokens"] for i in range(10)]).ravel(), [*range(1, 1000), 0] * 3)


@pytest.mark.parametrize(
    ("columns", "compression"),
    [
        ({"tokens": "ndarray:int32"}, "bz2"),
        ({"input_ids": "ndarray:uint16"}, "zstd:7"),
        ({"tokens": "ndarray:int64", "a": "str", "id": "int", "z": "bytes"}, "gz:1"),
        ({"tokens": "ndarray:uint8", "mask": "ndarray:uint8:4", "id": "int"}, "br:4"),
        ({"tokens": "ndarray", "a": "str", "z": "bytes"}, None),
        ({"tokens": "ndarray", "a": "str", "z": "bytes"}, "snappy"),
    ],
)
def test_what_mosaicml_writes_is_read(tmp_path, streaming, columns, compression):
    sequences = [[i % 256] * (i % 300 + 1) for i in range(0, 400, 7)]
    arrays = [np.array(ids, columns.get("tokens", "ndarray:uint16").partition(":")[2] or "int16") for ids in sequences]
    settings = {"compression": compression, "hashes": ["sha1", "xxh64"], "size_limit": 9000}
    written_by_mosaicml(streaming, tmp_path, arrays, columns, **settings)
    assert open_any(tmp_path).format == "mds"
    assert read(tmp_path, Mds(), 1000) == {"train": sequences}


@pytest.mark.parametrize("columns", [{"tokens": "ndarray"}, {"tokens": "ndarray", "a": "str", "id": "int"}], ids=len)
def test_samples_that_choose_their_type_are_read(tmp_path, streaming, columns, monkeypatch):
    """All types of integers, in turns and in runs; also where a shard is read in pieces."""
    types = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
    sequences = [[i % 128] * (i % 300 + 1) for i in range(0, 1200, 7)] + [[5] * 70_000]
    arrays = [np.array(ids, types[(i // 3 if i < 90 else i) % 8]) for i, ids in enumerate(sequences)]
    written_by_mosaicml(streaming, tmp_path, arrays, columns)
    assert read(tmp_path, Mds(), 1000) == {"train": sequences}
    monkeypatch.setattr("flat_tokens.formats.mds.BYTES_AT_A_TIME", 5000)
    assert read(tmp_path, Mds(), 1000) == {"train": sequences}


def test_samples_of_a_type_that_is_no_integer_are_refused(tmp_path, streaming):
    arrays = [np.arange(1, 3, dtype=np.int32), np.ones(3, np.float32)]
    written_by_mosaicml(streaming, tmp_path, arrays, {"tokens": "ndarray"})
    with refusal(r"shard.00000.mds: sample 1 has type 34, but tokens have one of \[8, 9, 16, 17, 32"):
        read(tmp_path, Mds())


def test_packed_samples_of_mosaicml_give_back_the_documents(tmp_path, streaming):
    """As LLM Foundry packs: fixed lengths, or bytes of 64-bit integers."""
    flat = np.array([1, 2, 0, 3, 0, 0, 4, 5, 6, 0, 7, 8])
    pieces = flat.reshape(3, 4)
    documents = {"train": [[1, 2], [3], [], [4, 5, 6], [7, 8]]}
    written_by_mosaicml(streaming, tmp_path / "static", [*pieces.astype(np.int32)], {"tokens": "ndarray:int32:4"})
    assert read(tmp_path / "static", Mds()) == {"train": pieces.tolist()}
    assert read(tmp_path / "static", Mds(length=4, end_of_text=0)) == documents
    written_by_mosaicml(streaming, tmp_path / "bytes", [ids.tobytes() for ids in pieces], {"tokens": "bytes"}, size_limit=250)
    assert len(index_of(tmp_path / "bytes")["shards"]) > 1
    assert read(tmp_path / "bytes", Mds(length=4, end_of_text=0)) == documents
    assert read(tmp_path / "bytes", Mds(length=4))["train"] == [flat.tolist()]
    assert read(tmp_path / "bytes", Mds(bytes_type="uint16"))["train"][0][:6] == [1, 0, 0, 0, 2, 0]


def test_merged_indices_are_read_once(tmp_path, streaming):
    for i in range(3):
        written_by_mosaicml(streaming, tmp_path / str(i), [np.array([i, i])], {"tokens": "ndarray:int64"})
    theirs("streaming.base.util").merge_index(str(tmp_path), keep_local=True)
    assert index_of(tmp_path)["shards"][1]["raw_data"]["basename"] == "1/shard.00000.mds"
    assert read(tmp_path, Mds()) == {"train": [[0, 0], [1, 1], [2, 2]]}


# LitData


@pytest.fixture(scope="module")
def litdata() -> Any:
    return theirs("litdata")


@pytest.mark.parametrize("limit", [400, 1 << 26])
def test_litdata_reads_what_is_written(tmp_path, litdata, limit, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    documents = [[100 * i + k for k in range(i % 37)] for i in range(60)]
    put(tmp_path / "d", Litdata(end_of_text=0, size_limit=limit), documents)
    rows = litdata.StreamingDataset(str(tmp_path / "d/train"), item_loader=litdata.TokensLoader(block_size=7))
    flat, expected, first = [token for document in documents for token in [*document, 0]], [], 0
    for chunk in index_of(tmp_path / "d/train")["chunks"]:  # a row of 7 tokens, and what is left of each chunk is left out
        tokens = flat[first : first + chunk["dim"]]
        expected += [tokens[at : at + 7] for at in range(0, len(tokens) - 6, 7)]
        first += chunk["dim"]
    assert first == len(flat)
    assert [rows[i].tolist() for i in range(len(rows))] == expected


@pytest.mark.parametrize("kind", ["int32", "int64", "int16", "uint16"])
@pytest.mark.parametrize("items", ["torch", "numpy"])
@pytest.mark.parametrize("compression", [{}, {"compression": "zstd", "compression_level": "chunk"}], ids=len)
def test_what_litdata_writes_is_read(tmp_path, litdata, kind, items, compression):
    documents = [[i] * (i % 9 + 1) for i in range(100)]
    loader, writers = litdata.TokensLoader(), theirs("litdata.streaming.writer")
    writer = writers.BinaryWriter(str(tmp_path), chunk_bytes=400, item_loader=loader, **compression)
    for i, document in enumerate(documents):
        array = np.array(document, kind)
        writer[i] = theirs("torch").from_numpy(array) if items == "torch" else array
    writer.done()
    writer.merge()
    assert open_any(tmp_path).format == "litdata"
    assert read(tmp_path, Litdata(), 100) == {"train": documents}


# datatrove


@pytest.mark.slow
@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.needs("torch", "datatrove")
def test_datatroves_own_merger_writes_the_same_files(tmp_path, size):
    """It takes them apart by their indexes."""
    merger = theirs("datatrove.pipeline.tokens.merger")
    sequences = [[1, 2, 3], [59_999], [7] * 100]
    put(tmp_path, Datatrove(end_of_text=0, vocabulary_size=size, tokenizer="any"), sequences)
    merger.DocumentTokenizerMerger(str(tmp_path / "train"), str(tmp_path / "merged"), "all", shuffle=False, progress=False).run()
    merged = tmp_path / "merged/000_all.ds"
    for ending in ("", ".index", ".metadata"):
        ours = tmp_path / "train" / f"00000_train.ds{ending}"
        assert merged.with_name(f"{merged.name}{ending}").read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.needs("torch", "datatrove")
def test_what_datatroves_own_writer_writes_is_read(tmp_path, size):
    tokenizer = theirs("datatrove.pipeline.tokens.tokenizer")
    sequences = [[1, 2, 3], [59_999], np.arange(1000).tolist()]
    file = tokenizer.TokenizedFile(str(tmp_path), "00000_unshuffled.ds", token_size=size, save_final_metadata=True)
    for sequence in sequences:
        file.write([*sequence, 0], None)
    file.close()
    assert open_any(tmp_path).format == "datatrove"
    assert read(tmp_path, Datatrove(end_of_text=0), 100) == {"train": sequences}


# Megatron-LM


@pytest.mark.slow
@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.needs("torch", "megatron.core")
def test_megatrons_own_reader_reads_what_is_written(tmp_path, size):
    indexed_dataset = theirs("megatron.core.datasets.indexed_dataset")
    sequences = [[1, 2, 3], [59_999], [], list(range(100))]
    put(tmp_path, Megatron(end_of_text=0, vocabulary_size=size), sequences)
    dataset = indexed_dataset.IndexedDataset(str(tmp_path / "train"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[*sequence, 0] for sequence in sequences]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert dataset.index.dtype == indexed_dataset.DType.optimal_dtype(size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [60_000, 70_000])
@pytest.mark.needs("torch", "megatron.core")
def test_what_megatrons_own_builder_writes_is_read_and_written_again_byte_for_byte(tmp_path, size):
    indexed_dataset, torch = theirs("megatron.core.datasets.indexed_dataset"), theirs("torch")
    dtype = indexed_dataset.DType.optimal_dtype(size)
    documents = [[1, 2, 3], [4, 5, 6], [59_999]]
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "train.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "train.idx"))
    assert read(tmp_path / "train", Megatron()) == {"train": documents}
    put(tmp_path / "ours", Megatron(vocabulary_size=size), documents)
    for name in ("train.bin", "train.idx"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / name).read_bytes()


# OLMo-core


@pytest.mark.needs("torch", "olmo_core")
def test_olmo_core_reads_what_is_written(tmp_path):
    utils = theirs("olmo_core.data.utils")
    sequences = [[1, 2, 3], [59_999], [], [7] * 100]
    put(tmp_path, Olmo(end_of_text=0), sequences)
    path = tmp_path / "train/part-00000.npy"
    bounds = [(0, 4), (4, 6), (6, 7), (7, 108)]
    assert list(utils.iter_document_indices(path, use_array_if_local=False)) == bounds
    assert [tuple(map(int, pair)) for pair in utils.iter_document_indices(path, eos_token_id=0, dtype=np.uint16)] == bounds
    slices = [utils.load_array_slice(path, start, stop, np.uint16).tolist() for start, stop in bounds]
    assert slices == [[*sequence, 0] for sequence in sequences]


@pytest.mark.needs("torch", "olmo_core")
def test_the_metadata_that_olmo_core_writes_are_read(tmp_path):
    tokens = np.array([5, 6, 0, 0, 7, 8, 9, 0], np.uint32)
    tokens.tofile(tmp_path / "part-0.npy")
    theirs("olmo_core.data.utils").write_document_indices(tmp_path / "part-0.npy", dtype=np.uint32, eos_token_id=0)
    assert open_any(tmp_path).format == "olmo-core"
    assert read(tmp_path, Olmo(end_of_text=0)) == {"train": [[5, 6], [], [7, 8, 9]]}
