"""MDS: what is written is what MosaicML's writer writes and its reader reads, what that writes reads here."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import shutil
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import Files, open_any
from flat_tokens.formats import mds as module
from flat_tokens.formats.compression import compress
from flat_tokens.formats.mds import MDS, Mds
from flat_tokens.stores.store import Store
from tests.damage import change as change_json
from tests.examples import examples
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal

LARGEST = 2**31 - 1
EXAMPLE = [[1, 2], [], [3, 4, 5], [LARGEST], list(range(300)), []]
CONFIG = (
    b'{"column_encodings": ["ndarray:int32"], "column_names": ["tokens"], "column_sizes": [null], "compression": null, '
    b'"format": "mds", "hashes": ["sha256"], "size_limit": 67108864, "version": 2}'
)
IDS = st.one_of(st.integers(0, LARGEST - 1), st.sampled_from([0, LARGEST - 1]))
RAGGED = st.lists(st.lists(IDS, max_size=25), min_size=1, max_size=8)
_numbers = itertools.count()


def read(where: Path | str, options: Mds | None = None, max_tokens: int = 5) -> dict[str, list[list[int]]]:
    splits = MDS.open(Files.at(where), options or Mds())
    return {name: sequences_in(split, max_tokens) for name, split in splits.items()}


def index_of(path: Path) -> Any:
    return json.loads((path / "index.json").read_text())


def change(path: Path, by: Any) -> None:
    """Change the first shard's entry in an index."""
    index = index_of(path)
    change_json(index["shards"][0], by)
    (path / "index.json").write_text(json.dumps(index))


# Writing


def test_a_shard_is_its_offsets_its_configuration_and_its_samples(tmp_path: Path) -> None:
    """By hand: two samples, a size, one dimension of one byte, the ids."""
    export("mds", splits_of([[1, 2], [3]]), tmp_path, Mds())
    samples = [
        b"\x0a\0\0\0" + b"\x04\x02" + b"\x01\0\0\0\x02\0\0\0",
        b"\x06\0\0\0" + b"\x04\x01" + b"\x03\0\0\0",
    ]
    first = 4 + 3 * 4 + len(CONFIG)
    offsets = np.array([2, first, first + 14, first + 24], "<u4").tobytes()
    assert (tmp_path / "train/shard.00000.mds").read_bytes() == offsets + CONFIG + b"".join(samples)


def test_the_index_lists_the_shards(tmp_path: Path) -> None:
    written = export("mds", splits_of([[1, 2], [3]], [[4]]), tmp_path, Mds())
    assert [item.key for item in written] == [
        "train/shard.00000.mds",
        "validation/shard.00000.mds",
        "train/index.json",
        "validation/index.json",
    ]
    data = {
        "basename": "shard.00000.mds",
        "bytes": written[0].size,
        "hashes": {"sha256": hashlib.sha256((tmp_path / written[0].key).read_bytes()).hexdigest()},
    }
    shard = {**json.loads(CONFIG), "raw_data": data, "zip_data": None, "samples": 2}
    assert index_of(tmp_path / "train") == {"version": 2, "shards": [shard]}
    assert [Store.at(tmp_path).now(item) for item in written] == written


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536])
def test_a_shape_is_as_narrow_as_its_length_is(tmp_path: Path, length: int) -> None:
    sequences = [[7] * length, [8]]
    export("mds", splits_of(sequences), tmp_path, Mds())
    shard = (tmp_path / "train/shard.00000.mds").read_bytes()
    start = int.from_bytes(shard[4:8], "little")
    width = 1 if length < 256 else 2 if length < 65_536 else 4
    assert shard[start + 4] == {1: 4, 2: 5, 4: 6}[width]
    assert int.from_bytes(shard[start + 5 : start + 5 + width], "little") == length
    assert [ids.tolist() for batch in open_any(tmp_path).splits["train"].batches() for ids in batch.sequences()] == sequences


@pytest.mark.parametrize("batch_tokens", [1, 3, 7, 1 << 21])
@given(sequences=RAGGED)
@examples(8)
def test_samples_are_written_the_same_in_pieces_of_any_size(batch_tokens: int, sequences: list[list[int]]) -> None:
    lengths = np.array([len(ids) for ids in sequences])
    flat = np.array([token for ids in sequences for token in ids], np.int32)
    pieces = [flat[at : at + batch_tokens] for at in range(0, len(flat), batch_tokens)]
    blocks = [lengths[at : at + 3] for at in range(0, len(lengths), 3)]
    expected = b""
    for ids in sequences:
        value = bytes([4, len(ids)]) + np.array(ids, "<i4").tobytes()
        expected += np.uint32(len(value)).tobytes() + value
    assert b"".join(piece.tobytes() for piece in module._samples(iter(blocks), iter(pieces))) == expected


@given(sequences=RAGGED, limit=st.integers(200, 600))
@examples(15)
def test_shards_end_at_the_size_limit_unless_one_sample_is_larger(sequences: list[list[int]], limit: int) -> None:
    path = f"memory://mds-{next(_numbers)}"
    for stored in export("mds", splits_of(sequences), path, Mds(size_limit=limit))[:-1]:
        (shard,) = [
            entry
            for entry in json.loads(Store.at(path).read("train/index.json"))["shards"]
            if entry["raw_data"]["basename"] in stored.key
        ]
        assert stored.size <= limit or shard["samples"] == 1


def test_packed_samples_are_the_documents_one_behind_the_other(tmp_path: Path) -> None:
    splits = splits_of([[1, 2, 3], [], [4, 5], [6]])
    export("mds", splits, tmp_path / "kept", Mds(length=4, end_of_text=0))
    assert read(tmp_path / "kept") == {"train": [[1, 2, 3, 0], [0, 4, 5, 0], [6, 0]]}
    export("mds", splits, tmp_path / "dropped", Mds(length=4, end_of_text=0, drop_last=True))
    assert read(tmp_path / "dropped") == {"train": [[1, 2, 3, 0], [0, 4, 5, 0]]}


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with refusal(r"has 2 sequences, and samples of 4 tokens keep no bounds between them\. Set end_of_text"):
        MDS.plan(splits_of([[1], [2]]), Mds(length=4))
    assert len(MDS.plan(splits_of([[1, 2, 3]]), Mds(length=2))) == 1
    with refusal("no split has as many as 9 tokens"):
        MDS.plan(splits_of([[1], [2]]), Mds(length=9, end_of_text=0, drop_last=True))
    with refusal(r"is end_of_text \(2\) inside a sequence"):
        export("mds", splits_of([[1], [2]]), tmp_path, Mds(length=9, end_of_text=2))


def test_a_sequence_larger_than_offsets_can_say_is_refused_unread(tmp_path: Path) -> None:
    class Long:  # a split of one sequence, of which the plan looks at the index alone
        store, seq_count, max_token_id, token_count = Store.at(tmp_path / "long"), 1, 1, 2**30
        seq_starts: Any = None

    Long.seq_starts = Long
    Long.read = staticmethod(lambda start, stop: np.array([0, 2**30], np.uint64)[start:stop])  # type: ignore[attr-defined]
    with refusal(r"long: sequence 0 takes \d+ bytes, but shards end at 4294967295"):
        MDS.plan({"train": Long()}, Mds())  # type: ignore[dict-item]


# MosaicML's own writer and reader


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
    pytest.importorskip("torch", reason="mosaicml-streaming needs torch")
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in STAND_INS.items():
            module = types.ModuleType(name)
            module.__dict__.update(attributes, __path__=[])
            patch.setitem(sys.modules, name, module)
        return pytest.importorskip("streaming", reason="mosaicml-streaming is not installed", exc_type=ImportError)


def written_by_mosaicml(streaming: Any, path: Path, sequences: list[Any], columns: dict[str, str], **settings: Any) -> None:
    filler = {"a": "text before", "id": 7, "z": b"bytes behind", "mask": np.ones(4, np.uint8)}
    with streaming.MDSWriter(columns=columns, out=str(path), **settings) as writer:
        for ids in sequences:
            writer.write({name: filler.get(name, ids) for name in columns})


needs_open_files = pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")


@needs_open_files
def test_a_shard_is_byte_for_byte_what_mosaicml_writes(tmp_path: Path, streaming: Any) -> None:
    sequences = [ids for ids in EXAMPLE if ids] + [[1] * 70_000]  # their writer takes no empty arrays
    export("mds", splits_of(sequences), tmp_path / "ours", Mds())
    arrays = [np.array(ids, np.int32) for ids in sequences]
    written_by_mosaicml(streaming, tmp_path / "theirs", arrays, {"tokens": "ndarray:int32"}, hashes=["sha256"])
    for name in ("shard.00000.mds", "index.json"):
        assert (tmp_path / "ours/train" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@needs_open_files
@pytest.mark.parametrize("limit", [300, 1 << 26])
def test_mosaicml_reads_what_is_written(tmp_path: Path, streaming: Any, limit: int) -> None:
    export("mds", splits_of(EXAMPLE, [[9]]), tmp_path, Mds(size_limit=limit))
    local = streaming.LocalDataset(str(tmp_path), split="train")
    assert len(local) == len(EXAMPLE)
    assert [local[i]["tokens"].tolist() for i in range(len(local))] == EXAMPLE
    assert local[0]["tokens"].dtype == np.int32
    streamed = streaming.StreamingDataset(
        remote=str(tmp_path), local=str(tmp_path / "cache"), split="train", batch_size=1, validate_hash="sha256"
    )
    assert [sample["tokens"].tolist() for sample in streamed] == EXAMPLE
    assert streaming.LocalDataset(str(tmp_path), split="validation")[0]["tokens"].tolist() == [9]


@needs_open_files
def test_mosaicml_reads_packed_samples(tmp_path: Path, streaming: Any) -> None:
    export(
        "mds", splits_of([list(range(1, 1000))] * 3), tmp_path, Mds(length=300, end_of_text=0, drop_last=True, size_limit=5000)
    )
    local = streaming.LocalDataset(str(tmp_path), split="train")
    assert np.array_equal(np.stack([local[i]["tokens"] for i in range(10)]).ravel(), [*range(1, 1000), 0] * 3)


@needs_open_files
@pytest.mark.parametrize(
    ("columns", "compression"),
    [
        ({"tokens": "ndarray:int32"}, None),
        ({"tokens": "ndarray:int32"}, "zstd"),
        ({"input_ids": "ndarray:uint16"}, "zstd:7"),
        ({"tokens": "ndarray:int64", "a": "str", "id": "int", "z": "bytes"}, None),
        ({"tokens": "ndarray:int64", "a": "str", "id": "int", "z": "bytes"}, "gz:1"),
        ({"tokens": "ndarray:uint8", "mask": "ndarray:uint8:4", "id": "int"}, "br:4"),
        ({"tokens": "ndarray:uint8", "mask": "ndarray:uint8:4", "id": "int"}, "bz2"),
        ({"tokens": "ndarray", "a": "str", "z": "bytes"}, None),
        ({"tokens": "ndarray", "a": "str", "z": "bytes"}, "snappy"),
    ],
    ids=lambda of: " ".join(of) if isinstance(of, dict) else None,
)
def test_what_mosaicml_writes_is_read(tmp_path: Path, streaming: Any, columns: dict[str, str], compression: str | None) -> None:
    sequences = [[i % 256] * (i % 300 + 1) for i in range(0, 400, 7)]
    arrays = [np.array(ids, columns.get("tokens", "ndarray:uint16").partition(":")[2] or "int16") for ids in sequences]
    settings = {"compression": compression, "hashes": ["sha1", "xxh64"], "size_limit": 9000}
    written_by_mosaicml(streaming, tmp_path, arrays, columns, **settings)
    assert MDS.recognise(Files.at(tmp_path))
    assert read(tmp_path, max_tokens=1000) == {"train": sequences}


@needs_open_files
@pytest.mark.parametrize("columns", [{"tokens": "ndarray"}, {"tokens": "ndarray", "a": "str", "id": "int"}], ids=len)
def test_samples_that_choose_their_type_are_read(
    tmp_path: Path, streaming: Any, columns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All types of integers, in turns and in runs; also where a shard is read in pieces."""
    types = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
    sequences = [[i % 128] * (i % 300 + 1) for i in range(0, 1200, 7)] + [[5] * 70_000]
    arrays = [np.array(ids, types[(i // 3 if i < 90 else i) % 8]) for i, ids in enumerate(sequences)]
    written_by_mosaicml(streaming, tmp_path, arrays, columns)
    assert read(tmp_path, max_tokens=1000) == {"train": sequences}
    monkeypatch.setattr("flat_tokens.formats.mds.BYTES_AT_A_TIME", 5000)
    assert read(tmp_path, max_tokens=1000) == {"train": sequences}


@needs_open_files
def test_samples_of_a_type_that_is_no_integer_are_refused(tmp_path: Path, streaming: Any) -> None:
    arrays = [np.arange(1, 3, dtype=np.int32), np.ones(3, np.float32)]
    written_by_mosaicml(streaming, tmp_path, arrays, {"tokens": "ndarray"})
    with refusal(r"shard.00000.mds: sample 1 has type 34, but tokens have one of \[8, 9, 16, 17, 32"):
        read(tmp_path)


CODECS = ["zstd", "gz", "br", "bz2", "snappy"]


@needs_open_files
@pytest.mark.parametrize("codec", CODECS)
def test_mosaicml_reads_compressed_shards(tmp_path: Path, streaming: Any, codec: Any) -> None:
    export("mds", splits_of(EXAMPLE, [[9]]), tmp_path, Mds(size_limit=300, compression=codec))
    assert not list(tmp_path.rglob("*.mds"))
    streamed = streaming.StreamingDataset(
        remote=str(tmp_path), local=str(tmp_path / "cache"), split="train", batch_size=1, validate_hash="sha256"
    )
    assert [sample["tokens"].tolist() for sample in streamed] == EXAMPLE


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_shards_are_the_others_when_they_are_unpacked(tmp_path: Path, codec: Any) -> None:
    for options in (Mds(size_limit=900), Mds(length=7, end_of_text=LARGEST - 1, size_limit=600)):
        packed = replace(options, compression=codec)
        for name, chosen in (("plain", options), ("packed", packed)):
            export("mds", splits_of(EXAMPLE, [[9]]), tmp_path / name, chosen)
        assert open_any(tmp_path / "packed").format == "mds"
        for split in ("train", "validation"):
            shards = index_of(tmp_path / "packed" / split)["shards"]
            sizes = [shard["raw_data"]["bytes"] for shard in shards]
            names = [f"shard.{i:05d}.mds.{codec}" for i in range(len(shards))]
            assert [shard["zip_data"]["basename"] for shard in shards] == names
            # The head of a compressed shard names its codec, so it is longer than the other's.
            assert {shard["compression"].partition(":")[0] for shard in shards} == {codec}
            assert all(size > 200 for size in sizes)
        assert read(tmp_path / "packed", packed) == read(tmp_path / "plain", options)
        shutil.rmtree(tmp_path / "plain")
        shutil.rmtree(tmp_path / "packed")


@needs_open_files
def test_packed_samples_of_mosaicml_give_back_the_documents(tmp_path: Path, streaming: Any) -> None:
    """As LLM Foundry packs: fixed lengths, or bytes of 64-bit integers."""
    flat = np.array([1, 2, 0, 3, 0, 0, 4, 5, 6, 0, 7, 8])
    pieces = flat.reshape(3, 4)
    documents = {"train": [[1, 2], [3], [], [4, 5, 6], [7, 8]]}
    written_by_mosaicml(streaming, tmp_path / "static", [*pieces.astype(np.int32)], {"tokens": "ndarray:int32:4"})
    assert read(tmp_path / "static") == {"train": pieces.tolist()}
    assert read(tmp_path / "static", Mds(length=4, end_of_text=0)) == documents
    written_by_mosaicml(streaming, tmp_path / "bytes", [ids.tobytes() for ids in pieces], {"tokens": "bytes"}, size_limit=250)
    assert len(index_of(tmp_path / "bytes")["shards"]) > 1
    assert read(tmp_path / "bytes", Mds(length=4, end_of_text=0)) == documents
    assert read(tmp_path / "bytes", Mds(length=4))["train"] == [flat.tolist()]
    assert read(tmp_path / "bytes", Mds(bytes_type="uint16"))["train"][0] == [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]


@needs_open_files
def test_merged_indices_are_read_once(tmp_path: Path, streaming: Any) -> None:
    for i in range(3):
        written_by_mosaicml(streaming, tmp_path / str(i), [np.array([i, i])], {"tokens": "ndarray:int64"})
    from streaming.base.util import merge_index

    merge_index(str(tmp_path), keep_local=True)
    assert index_of(tmp_path)["shards"][1]["raw_data"]["basename"] == "1/shard.00000.mds"
    assert read(tmp_path) == {"train": [[0, 0], [1, 1], [2, 2]]}


# Reading


def test_a_shard_alone_is_read_by_what_it_says_itself(tmp_path: Path) -> None:
    export("mds", splits_of(EXAMPLE, [[1]]), tmp_path, Mds())
    (tmp_path / "train/shard.00000.mds").rename(tmp_path / "nameless")
    assert open_any(tmp_path / "nameless").format == "mds"
    assert read(tmp_path / "nameless") == {"train": EXAMPLE}
    assert read(tmp_path / "validation") == {"validation": [[1]]}
    assert read(tmp_path / "validation/index.json")


def test_recognised_by_content(tmp_path: Path) -> None:
    for content in ("{}", "[]", "no JSON", '{"shards": [{"format": "csv"}], "version": 2}', '{"format": "mds"}', ""):
        (tmp_path / "index.json").write_text(content)
        assert not MDS.recognise(Files.at(tmp_path))
    for content in ('{"version": 2, "shards": []}', '{"shards":[{"format":"mds"}]}'):
        (tmp_path / "index.json").write_text(content)
        assert MDS.recognise(Files.at(tmp_path))
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    assert read(tmp_path) == {"train": []}


def test_a_large_sample_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flat_tokens.formats.mds.BYTES_AT_A_TIME", 64)
    sequences = [[1, 2], list(range(5000)), [], [3] * 20, *([i] for i in range(40))]
    export("mds", splits_of(sequences), tmp_path, Mds())
    assert read(tmp_path, max_tokens=7) == {"train": sequences}
    assert read(tmp_path, max_tokens=10_000) == {"train": sequences}


@pytest.mark.parametrize("packer", CODECS)
def test_packed_shards_are_unpacked_to_their_size_and_no_further(tmp_path: Path, packer: Any) -> None:
    theirs = {"zstd": lambda data: bytes(numcodecs.Zstd(3).encode(data)), "gz": gzip.compress}
    pack = theirs.get(packer, partial(compress, packer))
    export("mds", splits_of(EXAMPLE), tmp_path, Mds())
    shard, folder = tmp_path / "train/shard.00000.mds", tmp_path / "train"
    plain = shard.read_bytes()
    shard.unlink()

    def store(data: bytes, claimed: int) -> None:
        (folder / "packed").write_bytes(data)
        size = {"bytes": claimed} if claimed else {}
        zipped = {"compression": packer, "zip_data": {"basename": "packed", "bytes": len(data)}}
        change(folder, {**zipped, "raw_data": size})

    store(pack(plain), 0)
    assert read(tmp_path) == {"train": EXAMPLE}
    for data, claimed in (
        (pack(bytes(50 << 20)), 0),
        (pack(plain)[:-9], 0),
        (b"junk", 0),
        (pack(plain), 2**31),
        (pack(plain), 9),
        (pack(plain) + b"more", 0),
    ):
        store(data, claimed)
        with refusal(f"{folder / 'packed'}: "):
            read(tmp_path)


# Hostile files


@pytest.mark.parametrize(
    "by",
    [
        {"raw_data": {"basename": "../secret.mds"}},
        {"raw_data": {"basename": "/etc/passwd"}},
        {"raw_data": {"basename": "a/../../secret.mds"}},
        {"raw_data": {"basename": "..\\secret.mds"}},
        {"raw_data": {"basename": "a\0b"}},
        {"raw_data": {"basename": ""}},
        {"raw_data": {"basename": 3}},
        {
            "zip_data": {"basename": "../secret.mds", "bytes": 3},
            "compression": "zstd",
            "raw_data": {"basename": "no", "bytes": 3},
        },
        {"raw_data": {"bytes": -1}},
        {"raw_data": {"bytes": 2**40}},
        {"raw_data": {"bytes": "3"}},
        lambda s: s["raw_data"].pop("bytes"),
        {"raw_data": None},
        {"samples": -1},
        {"samples": 2**40},
        {"samples": True},
        {"format": "csv"},
        {"version": 1},
        {"column_names": []},
        {"column_names": ["text"]},
        {"column_names": None},
        {"column_names": [["tokens"]]},
        {"column_encodings": ["pkl"]},
        {"column_encodings": ["ndarray:float32"]},
        {"column_encodings": ["ndarray:int32:2,2"], "column_sizes": [16]},
        {"column_encodings": ["ndarray:int32:99999999999999"]},
        {"column_encodings": ["ndarray:int32:4"]},
        {"column_sizes": [8]},
        {"column_sizes": [-8]},
        {"column_sizes": [None, None]},
        {"column_names": ["attention_mask", "tokens"], "column_encodings": ["ndarray:int32"] * 2, "column_sizes": [None] * 2},
        lambda s: s.clear(),
    ],
)
def test_a_lying_index_is_refused_by_name(tmp_path: Path, by: Any) -> None:
    export("mds", splits_of(EXAMPLE), tmp_path / "d", Mds())
    (tmp_path / "secret.mds").write_bytes((tmp_path / "d/train/shard.00000.mds").read_bytes())
    change(tmp_path / "d/train", by)
    with pytest.raises(ValueError, match=f"{tmp_path}/d/train/index.json: ") as raised:
        MDS.open(Files.at(tmp_path / "d"), Mds())
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    "by",
    [
        {"samples": 5},
        {"samples": 7},
        {"samples": 1 << 24},
        {"raw_data": {"bytes": 1000}},
        {"column_encodings": ["ndarray:int64"]},
        {"column_encodings": ["ndarray:uint8"]},
        {"column_encodings": ["bytes"]},
        {"column_encodings": ["ndarray:int32:2"], "column_sizes": [8]},
        {"column_names": ["other", "tokens"], "column_encodings": ["str", "ndarray:int32"], "column_sizes": [None, None]},
        {"column_names": ["other", "tokens"], "column_encodings": ["int", "ndarray:int32"], "column_sizes": [8, None]},
    ],
)
def test_an_index_that_is_not_its_shards_is_refused_by_the_shards_name(tmp_path: Path, by: Any) -> None:
    export("mds", splits_of(EXAMPLE), tmp_path, Mds())
    change(tmp_path / "train", by)
    with refusal(f"{tmp_path}/train/shard.00000.mds: "):
        read(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 200_000, '{"version": 2}', '{"version": 2, "shards": 3}', '{"version": 1}']
)
def test_an_index_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with refusal(f"{tmp_path}/index.json: "):
        read(tmp_path)
    with (tmp_path / "index.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with refusal(f"{tmp_path}/index.json: is larger than an index may be"):
        read(tmp_path)
    assert not MDS.recognise(Files.at(tmp_path))


def test_a_shard_cut_off_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    export("mds", splits_of(EXAMPLE), tmp_path, Mds())
    shard = tmp_path / "train/shard.00000.mds"
    whole = shard.read_bytes()
    for size in range(0, len(whole), 41):
        shard.write_bytes(whole[:size])
        change(tmp_path / "train", {"raw_data": {"bytes": len(whole)}})
        with refusal(str(shard)):
            read(tmp_path)
        change(tmp_path / "train", {"raw_data": {"bytes": size}})  # the index lies, too
        with refusal(str(shard)):
            read(tmp_path)
        if size:
            with refusal(str(shard)):
                read(shard)


@pytest.mark.parametrize("wrong", [-1, -(2**31)])
def test_what_is_no_token_id_is_refused_by_name(tmp_path: Path, wrong: int) -> None:
    export("mds", splits_of([[1, 2], [77]]), tmp_path, Mds())
    shard = tmp_path / "train/shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-4] + np.array(wrong, "<i4").tobytes())
    with refusal(f"{shard}: holds {wrong} "):
        read(tmp_path)
