"""Opening datasets, ours and others', reading sequences, and refusing what strangers made to hurt."""

import copy
import json
import os
import pickle
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

import flat_tokens
from flat_tokens import LayoutName, TokenBatch
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.writer import write_dataset
from tests.damage import change_file
from tests.examples import SOME_OR_ALL
from tests.made import write_sequences
from tests.refusal import refusal

NAMES = get_args(LayoutName)
SEQUENCES = [[1, 2], [3, 4, 5], [], [6, 7, 8]]
ENCODED = [3, 4, 7, 8, 10, 13, 14, 16]
LAYOUTS = pytest.mark.parametrize("layout", NAMES)


def write(path: Path | str, train: list[list[int]] = SEQUENCES, **settings: Any) -> None:
    write_sequences(path, train, **settings)


def sequences(split: flat_tokens.FlatTokens) -> list[list[int]]:
    """All of them; negative numbers count from the end."""
    found = [split.sequence(i).tolist() for i in range(split.seq_count)]
    assert [split.sequence(i).tolist() for i in range(-len(found), 0)] == found
    return found


@pytest.fixture
def layout() -> LayoutName:
    return "mmap"


@pytest.fixture
def root(tmp_path: Path, layout: LayoutName) -> Path:
    """A dataset of SEQUENCES in the layout of the test."""
    write(tmp_path / "dataset", layout=layout)
    return tmp_path / "dataset"


# Opening and reading


@LAYOUTS
def test_a_dataset_at_a_path(tmp_path, layout):
    write(tmp_path / "dataset", validation=[[9], [10, 2**31 - 1]], layout=layout)
    for path in (tmp_path / "dataset", str(tmp_path / "dataset"), f"{tmp_path}/dataset/", f"file://{tmp_path}/dataset"):
        dataset = flat_tokens.open(path)
        assert dataset.path == str(tmp_path / "dataset")
        assert sequences(dataset.train) == SEQUENCES
        assert sequences(dataset.validation) == [[9], [10, 2**31 - 1]]
        assert (dataset.train.token_count, dataset.train.seq_count, dataset.train.max_token_id) == (8, 4, 8)
        assert dataset.validation.max_token_id == 2**31 - 1
        assert dataset.manifest["totals"]["train"] == {"token_count": 8, "seq_count": 4, "max_token_id": 8}


def test_sequences_are_decoded_and_slices_are_not(root):
    train = flat_tokens.open(root).train
    assert train.sequence(1).tolist() == [3, 4, 5]
    assert train.sequence(1).dtype == np.uint32
    assert train[3].tolist() == train[np.int64(-1)].tolist() == [6, 7, 8]
    assert train.slice(0, 8).tolist() == ENCODED
    assert train.slice(8, 8).tolist() == []
    assert len(train) == 4


def test_what_is_not_there_is_an_index_error(root):
    dataset = flat_tokens.open(root)
    for i in (4, -5, 2**40):
        with refusal(f"{root}/train: there is no sequence {i}; there are 4", IndexError):
            dataset.train.sequence(i)
    for start, stop in [(0, 9), (-1, 3), (3, 2), (9, 9)]:
        with refusal(f"there are no tokens {start} to {stop}; there are 8", IndexError):
            dataset.train.slice(start, stop)
    assert (dataset.validation.slice(0, 0).tolist(), list(dataset.validation), len(dataset.validation)) == ([], [], 0)
    with refusal("there is no sequence -1; there are 0", IndexError):
        dataset.validation.sequence(-1)


def point(root: Path, version: str) -> None:
    (root / "latest.json").write_text(json.dumps({"version": version, "manifest_sha256": "", "sequence": 1}))


def test_a_pointer_is_resolved_once(tmp_path):
    """What is open stays the version that it was, in this process and in those it is sent to."""
    write(tmp_path / "versions/old", [[1]])
    write(tmp_path / "versions/new", [[2]])
    point(tmp_path, "old")
    dataset = flat_tokens.open(tmp_path)
    assert dataset.path == str(tmp_path / "versions/old")
    sent = pickle.dumps(dataset)
    point(tmp_path, "new")
    assert sequences(dataset.train) == sequences(pickle.loads(sent).train) == [[1]]
    assert sequences(flat_tokens.open(dataset.path).train) == [[1]]
    assert sequences(flat_tokens.open(tmp_path).train) == [[2]]


def test_a_pointer_to_no_version_is_a_file_not_found_error(tmp_path):
    point(tmp_path, "gone")
    with refusal(f"{tmp_path}/versions/gone", FileNotFoundError):
        flat_tokens.open(tmp_path)


# Datasets of other writers


def test_the_reference_writers_dataset(reference):
    dataset = flat_tokens.open(reference / "seqax/synthetic_dataset.zarr")
    assert (dataset.train.token_count, dataset.train.seq_count, dataset.train.max_token_id) == (264992, 512, 1017)
    assert (dataset.validation.token_count, dataset.validation.seq_count, dataset.validation.max_token_id) == (278035, 512, 1019)
    assert dataset.train.slice(0, 8).tolist() == [3, 2, 10, 18, 14, 16, 10, 4]
    assert dataset.train.seq_starts.read(0, 4).tolist() == [0, 555, 629, 1377]
    assert dataset.train.sequence(0)[:6].tolist() == [1, 1, 5, 9, 7, 8]
    assert len(dataset.train.sequence(-1)) == 264992 - 264509


def plain(root: Path, **options: Any) -> None:
    """A dataset as somebody with zarr-python alone writes it."""
    options = {"zarr_format": 3, "chunks": 3, **options}
    of_starts = {name: options.pop(f"starts_{name}") for name in ("filters", "chunks") if f"starts_{name}" in options}
    group = zarr.create_group(root, zarr_format=options["zarr_format"])
    for name, split in (("train", SEQUENCES), ("validation", [])):
        batch = TokenBatch.from_sequences(split)
        node = group.create_group(name, attributes={"max_token_id": batch.max_token_id})
        options.pop("zarr_format", None)
        for key, data in (("encoded_tokens", batch.encoded_tokens), ("seq_starts", batch.seq_starts)):
            own = {**options, **of_starts} if key == "seq_starts" else options
            array = node.create_array(key, shape=data.shape, dtype=data.dtype, **own)
            array[:] = data


def sharded(**options: Any) -> dict[str, Any]:
    return {"chunks": 6, "serializer": ShardingCodec(chunk_shape=(2,), **options), "compressors": None}


WAYS: dict[str, dict[str, Any]] = {
    "v2 default": {"zarr_format": 2},
    "v2 delta": {
        "zarr_format": 2,
        "compressors": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE),
        "starts_filters": [numcodecs.Delta("<i8")],
    },
    "v2 delta alone": {"zarr_format": 2, "compressors": None, "starts_filters": [numcodecs.Delta("<u8", "<i8")]},
    "v2 raw": {"zarr_format": 2, "compressors": None},
    "v2 zstd": {"zarr_format": 2, "compressors": numcodecs.Zstd(level=1)},
    "v2 gzip": {"zarr_format": 2, "compressors": numcodecs.GZip()},
    "v2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    "v2 lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4()},
    "v2 nested keys": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v3 default": {},
    "v3 raw": {"compressors": None},
    "v3 gzip": {"compressors": GzipCodec()},
    "v3 blosc": {"compressors": BloscCodec(cname="zstd", shuffle="bitshuffle", typesize=4)},
    "v3 zstd with checksum": {"compressors": ZstdCodec(level=3, checksum=True)},
    "v3 crc32c": {"compressors": Crc32cCodec()},
    "v3 zstd, then crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "v3 big-endian": {"serializer": BytesCodec(endian="big")},
    "v3 keys with dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v3 keys of v2": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v3 fill value": {"fill_value": 13},
    "v3 shards": {"chunks": (2,), "shards": (4,)},
    "v3 shards of raw chunks": sharded(),
    "v3 shards, index first": sharded(index_location="start"),
    "v3 shards, index not checked": sharded(index_codecs=[BytesCodec()]),
    "v3 shards of blosc, index first": sharded(codecs=[BytesCodec(), BloscCodec(typesize=4)], index_location="start"),
    "v3 shards of big-endian zstd": sharded(codecs=[BytesCodec(endian="big"), ZstdCodec()]),
    "v3 shards like the mmap layout": sharded(codecs=[BytesCodec(), Crc32cCodec()]),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_plain_zarr_datasets_read_right(tmp_path, way):
    plain(tmp_path / "dataset", **way)
    dataset = flat_tokens.open(tmp_path / "dataset")
    assert sequences(dataset.train) == SEQUENCES
    assert sequences(dataset.validation) == []
    encoded = zarr.open_group(tmp_path / "dataset/train", mode="r")["encoded_tokens"][:]
    for start in range(9):
        for stop in range(start, 9):
            assert np.array_equal(dataset.train.slice(start, stop), encoded[start:stop])
    assert dataset.train.slice(0, 8).dtype == np.dtype("=u4")
    assert dataset.train.seq_starts.read(0, 5).tolist() == [0, 2, 5, 5, 8]
    assert flat_tokens.verify(tmp_path / "dataset", "full").token_count == 8
    assert sequences(pickle.loads(pickle.dumps(dataset)).train) == SEQUENCES


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_that_plain_zarr_leaves_out_are_its_fill_value(tmp_path, zarr_format):
    """zarr-python does not store a chunk of zeros; that is no loss."""
    plain(tmp_path / "dataset", zarr_format=zarr_format, chunks=2)
    train = zarr.open_group(tmp_path / "dataset/train", mode="r+")
    train["encoded_tokens"][2:4] = 0
    assert not (tmp_path / "dataset/train/encoded_tokens" / ("1" if zarr_format == 2 else "c/1")).exists()
    assert flat_tokens.open(tmp_path / "dataset").train.slice(0, 8).tolist() == [3, 4, 0, 0, 10, 13, 14, 16]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@SOME_OR_ALL
def test_damaged_plain_datasets_are_refused_or_read_as_zarr_reads_them(tmp_path, way, is_whole):
    """Without checksums flipped bits are data, here as there. What cannot be decoded is a ValueError that names the file."""
    plain(tmp_path / "dataset", **way)
    path = next(p for p in (tmp_path / "dataset/train/encoded_tokens").rglob("*") if p.is_file() and p.name in ("0", "c.0"))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    variants = [whole[:size] for size in range(0, len(whole), 3 if is_whole else max(len(whole) // 6, 1))]
    for position in rng.integers(0, len(whole), 60 if is_whole else 10).tolist():
        variants.append(whole[:position] + bytes([whole[position] ^ 1 << rng.integers(8)]) + whole[position + 1 :])
    for variant in variants:
        path.write_bytes(variant)
        train, complaint = flat_tokens.open(tmp_path / "dataset").train, ""
        try:
            read = train.slice(0, 8)
        except ValueError as error:
            complaint = str(error)
        if complaint:
            assert str(path) in complaint
        else:
            assert np.array_equal(read, zarr.open_array(tmp_path / "dataset/train/encoded_tokens", mode="r")[:])


# Datasets made to hurt


@pytest.fixture
def small_memory() -> Iterator[None]:
    """Nothing in the block takes more than 32 MB, whatever a file says of itself."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def sharding(metadata: dict[str, Any]) -> dict[str, Any]:
    return metadata["codecs"][0]["configuration"]


V3: dict[str, Any] = {
    "float items": {"data_type": "float32", "fill_value": 0},
    "signed items": {"data_type": "int32"},
    "text": {"data_type": "string", "codecs": [{"name": "vlen-utf8"}]},
    "a type that is no text": {"data_type": {"name": ["uint32"]}},
    "two dimensions": {"shape": [4, 2]},
    "no dimension": {"shape": []},
    "a negative shape": {"shape": [-1]},
    "a boolean shape": {"shape": [True]},
    "a shape that is no list": {"shape": {"0": 8}},
    "no shape": lambda m: m.pop("shape"),
    "a huge shape": {"shape": [2**62]},
    "a shape beyond 64 bits": {"shape": [10**30]},
    "no codecs": {"codecs": []},
    "a codec that is text": {"codecs": ["bytes"]},
    "a codec named by a list": {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": []}]},
    "an unknown codec": lambda m: sharding(m)["codecs"].append({"name": "numcodecs.pickle"}),
    "an unknown codec around shards": lambda m: m["codecs"].append({"name": "evil"}),
    "an unknown index codec": lambda m: sharding(m)["index_codecs"].append({"name": "zstd"}),
    "an index in the middle": lambda m: sharding(m).update(index_location="middle"),
    "a shard within a shard": lambda m: sharding(m).update(codecs=[copy.deepcopy(m["codecs"][0])]),
    "twenty thousand checksums": lambda m: sharding(m).update(codecs=[sharding(m)["codecs"][0], *[{"name": "crc32c"}] * 20_000]),
    "compressed twice": lambda m: sharding(m)["codecs"].extend([{"name": "gzip"}, {"name": "zstd"}]),
    "a level that is no number": lambda m: sharding(m)["codecs"][-1]["configuration"].update(clevel=None),
    "a codec without configuration": lambda m: m["codecs"][0].pop("configuration"),
    "an unknown byte order": lambda m: sharding(m)["codecs"][0].update(configuration={"endian": "middle"}),
    "a huge inner chunk": lambda m: (
        sharding(m).update(chunk_shape=[2**40]),
        m["chunk_grid"]["configuration"].update(chunk_shape=[2**40]),
    ),
    "tiny inner chunks": lambda m: (
        sharding(m).update(chunk_shape=[1]),
        m["chunk_grid"]["configuration"].update(chunk_shape=[2**40]),
    ),
    "a huge chunk without shards": lambda m: (
        m["chunk_grid"]["configuration"].update(chunk_shape=[2**50]),
        m.update(codecs=[{"name": "bytes", "configuration": {"endian": "little"}}]),
    ),
    "chunks of nothing": lambda m: sharding(m).update(chunk_shape=[0]),
    "chunks in two dimensions": lambda m: sharding(m).update(chunk_shape=[65536, 2]),
    "shards that are no multiple of chunks": lambda m: sharding(m).update(chunk_shape=[65535]),
    "another chunk grid": {"chunk_grid": {"name": "rectangular"}},
    "another chunk key encoding": {"chunk_key_encoding": {"name": "../.."}},
    "a separator that climbs": {"chunk_key_encoding": {"configuration": {"separator": "/../"}}},
    "a storage transformer": {"storage_transformers": [{"name": "evil"}]},
    "a fill value that is text": {"fill_value": "AAAA"},
    "a fill value that does not fit": {"fill_value": 2**70},
    "a group's metadata": {"node_type": "group"},
    "another format": {"zarr_format": 4},
}
V2: dict[str, Any] = {
    "objects": {"dtype": "|O", "filters": [{"id": "vlen-utf8"}]},
    "big-endian items": {"dtype": ">u4"},
    "a huge shape": {"shape": [2**62]},
    "a huge chunk": {"chunks": [2**50]},
    "chunks in two dimensions": {"chunks": [4, 4]},
    "no chunks": lambda m: m.pop("chunks"),
    "a pickle filter": {"filters": [{"id": "pickle"}]},
    "filters that are text": {"filters": "delta"},
    "a thousand deltas": {"filters": [{"id": "delta", "dtype": "<u4"}] * 1000},
    "differences of objects": {"filters": [{"id": "delta", "dtype": "<u4", "astype": "O"}]},
    "differences of no type": {"filters": [{"id": "delta", "dtype": "nonsense"}]},
    "wide differences": {"filters": [{"id": "delta", "dtype": "<u8"}]},
    "an unknown compressor": {"compressor": {"id": "pickle"}},
    "a compressor that is text": {"compressor": "zstd"},
    "a compressor named by a list": {"compressor": {"id": ["zstd"]}},
    "a level that is no number": {"compressor": {"id": "zstd", "level": "3"}},
    "a compressor without a level": {"compressor": {"id": "zstd"}, "fill_value": "x"},
    "no compressor": lambda m: m.pop("compressor"),
}


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(
    ("layout", "by"),
    [pytest.param("compact", by, id=f"v3 {name}") for name, by in V3.items()]
    + [pytest.param("zarr2", by, id=f"v2 {name}") for name, by in V2.items()],
)
def test_hostile_metadata_is_refused_by_the_arrays_name(root, layout, by):
    array = root / "train/encoded_tokens"
    change_file(array / (".zarray" if layout == "zarr2" else "zarr.json"), by)
    with pytest.raises(ValueError, match=str(array)) as raised:
        flat_tokens.open(root)
    assert len(str(raised.value)) < 600


@pytest.mark.usefixtures("small_memory")
@LAYOUTS
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"text"',
        "NaN",
        "\0",
        '{"a":' * 200_000,
        "[" * 200_000,
        '{"shape": [1' + "0" * 5000 + "]}",
    ],
    ids=["empty", "open", "list", "null", "number", "text", "nan", "nul", "deep objects", "deep lists", "long number"],
)
def test_metadata_that_is_no_metadata_is_refused_by_name(root, layout, text):
    array = ".zarray" if layout == "zarr2" else "zarr.json"
    group = ".zattrs" if layout == "zarr2" else "zarr.json"
    for path in (f"train/seq_starts/{array}", f"train/{group}", array.replace("array", "group")):
        good = (root / path).read_bytes()
        (root / path).write_text(text)
        with refusal(str(root / path)):
            flat_tokens.open(root)
        (root / path).write_bytes(good)


@pytest.mark.usefixtures("small_memory")
@LAYOUTS
def test_metadata_of_two_megabytes_is_refused_unread(root, layout):
    path = root / "train/encoded_tokens" / (".zarray" if layout == "zarr2" else "zarr.json")
    for size in (2 << 20, 1 << 40):
        os.truncate(path, size)
        with refusal(f"{path}: is larger than metadata may be"):
            flat_tokens.open(root)


@pytest.mark.parametrize("wrong", [None, -1, 8.0, True, "8", 2**31, [8], float("nan")])
@pytest.mark.parametrize("layout", ["mmap", "zarr2"])
def test_a_wrong_max_token_id_is_refused(root, layout, wrong):
    path = root / "train" / (".zattrs" if layout == "zarr2" else "zarr.json")
    change_file(path, {"max_token_id": wrong} if layout == "zarr2" else {"attributes": {"max_token_id": wrong}})
    with refusal(f"{root}/train: max_token_id is .*, but the format says 0 to 2147483647"):
        flat_tokens.open(root)


@pytest.mark.parametrize("wrong", [None, "true", "missing"])
def test_a_damaged_attribute_does_not_hide_a_loss_mask(tmp_path, wrong):
    batch = TokenBatch.from_sequences(SEQUENCES)._replace(loss_mask=np.ones(8, np.uint8))
    write_dataset(tmp_path / "dataset", [batch])

    def damage(metadata: Any) -> None:
        metadata["attributes"].update(loss_mask=wrong)
        if wrong == "missing":
            del metadata["attributes"]["loss_mask"]

    change_file(tmp_path / "dataset/train/zarr.json", damage)
    with refusal(f"{tmp_path}/dataset/train: loss_mask is .*, but where there is one it is true"):
        flat_tokens.open(tmp_path / "dataset")


@pytest.mark.parametrize("wrong", [-1, None, "max_token_id"])
@pytest.mark.parametrize("node", ["", "train", "train/encoded_tokens"])
def test_attributes_that_are_no_object_are_refused(root, node, wrong):
    path = root / node / "zarr.json"
    change_file(path, {"attributes": wrong})
    complaint = f"{path}: its attributes are {wrong!r}, not an object of JSON"
    for reading in (flat_tokens.open, flat_tokens.verify, open_corpus):
        with refusal(re.escape(complaint)):
            reading(str(root))


def test_a_split_whose_attributes_were_removed_is_gone_not_wrong(tmp_path):
    """A version that is removed loses its files one by one."""
    write(tmp_path / "dataset", layout="zarr2")
    (tmp_path / "dataset/train/.zattrs").unlink()
    with refusal(f"{tmp_path}/dataset/train/.zattrs", FileNotFoundError):
        flat_tokens.open(tmp_path / "dataset")


def rewrite_starts(root: Path, entries: list[int]) -> None:
    """Sound objects, checksums and all, with other entries."""
    shutil.rmtree(root / "train/seq_starts")
    node = zarr.open_group(root / "train", mode="r+")
    node.create_array("seq_starts", shape=(len(entries),), dtype="uint64", chunks=(4,))[:] = np.array(entries, np.uint64)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([], "is empty, but it ends with the token count"),
        ([0, 2, 5, 7], "ends at 7, but encoded_tokens has 8 tokens"),
        ([0, 2, 5, 9], "ends at 9, but encoded_tokens has 8 tokens"),
        ([8], "begins with 8 instead of 0"),
        ([1, 2, 5, 8], "begins with 1 instead of 0"),
    ],
)
def test_seq_starts_that_cannot_be_are_refused(root, entries, complaint):
    rewrite_starts(root, entries)
    with refusal(f"{root}/train/seq_starts: {complaint}"):
        flat_tokens.open(root)


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(("start", "stop"), [(5, 2), (2, 9), (2, 2**40), (2**63, 8), (2**64 - 1, 8), (3, 2**64 - 1)])
def test_seq_starts_that_decrease_or_exceed_are_refused_where_they_are_read(root, start, stop):
    """Opening does not read them all: the sequence says so, and verify does."""
    rewrite_starts(root, [0, start, stop, 8, 8])
    train = flat_tokens.open(root).train
    with refusal(f"train: seq_starts says that sequence 1 is tokens {start} to {stop}, but there are 8"):
        train.sequence(1)
    assert train.slice(0, 8).tolist() == ENCODED
    with refusal("train/seq_starts decreases"):
        flat_tokens.verify(root, "full")


ZEROS = np.zeros(64 << 20, np.uint8)
CLAIM = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"  # one empty block; it says a terabyte
BOMBS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "v2 zstd": ({"zarr_format": 2, "compressors": numcodecs.Zstd(level=1)}, lambda: numcodecs.Zstd(1).encode(ZEROS)),
    "v2 zstd, claimed": ({"zarr_format": 2, "compressors": numcodecs.Zstd(level=1)}, lambda: CLAIM),
    "v2 blosc": ({"zarr_format": 2, "compressors": numcodecs.Blosc()}, lambda: numcodecs.Blosc().encode(ZEROS)),
    "v2 gzip": ({"zarr_format": 2, "compressors": numcodecs.GZip()}, lambda: numcodecs.GZip(1).encode(ZEROS)),
    "v2 zlib": ({"zarr_format": 2, "compressors": numcodecs.Zlib()}, lambda: numcodecs.Zlib(1).encode(ZEROS)),
    "v2 lz4": ({"zarr_format": 2, "compressors": numcodecs.LZ4()}, lambda: numcodecs.LZ4().encode(ZEROS)),
    "v2 lz4, claimed": ({"zarr_format": 2, "compressors": numcodecs.LZ4()}, lambda: b"\xff\xff\xff\x7f" + bytes(20)),
    "v2 lz4, short": ({"zarr_format": 2, "compressors": numcodecs.LZ4()}, lambda: numcodecs.LZ4().encode(ZEROS[:8])),
    "v3 zstd": ({}, lambda: numcodecs.Zstd(1).encode(ZEROS)),
    "v3 zstd, short": ({}, lambda: numcodecs.Zstd(1).encode(ZEROS[:8])),
}


@pytest.mark.parametrize(("way", "bomb"), BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("array", ["encoded_tokens", "seq_starts"])
def test_a_decompression_bomb_is_refused(tmp_path, way, bomb, array):
    """A chunk is inflated to its own size and no further; nothing of what it says of itself is believed."""
    plain(tmp_path / "dataset", starts_chunks=100_000, **{"chunks": 100_000, **way})
    path = next(p for p in (tmp_path / "dataset/train" / array).rglob("0") if p.is_file())
    path.write_bytes(bomb())
    tracemalloc.start()
    with refusal(f"{path}: "):
        flat_tokens.open(tmp_path / "dataset").train.slice(0, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("frame", [CLAIM, numcodecs.Zstd(1).encode(ZEROS)], ids=["claimed", "inflated"])
@pytest.mark.parametrize("layout", ["compact", "zarr2"])
def test_a_decompression_bomb_in_our_layouts_is_refused(root, layout, frame):
    import google_crc32c

    index = np.full((4096, 2), 2**64 - 1, "<u8")
    index[0] = 0, len(frame)
    shard = frame + index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    path = root / "train/encoded_tokens" / ("0" if layout == "zarr2" else "c/0")
    path.write_bytes(frame if layout == "zarr2" else shard)
    with refusal(f"{path}: inner chunk 0 does not decompress"):
        flat_tokens.open(root).train.sequence(0)


@pytest.mark.usefixtures("small_memory")
@LAYOUTS
def test_an_object_far_larger_than_its_chunk_is_refused_unread(root, layout):
    path = root / "train/encoded_tokens" / ("0" if layout == "zarr2" else "c/0")
    with path.open("r+b") as sparse:
        sparse.truncate(1 << 40)
    with refusal(f"{path}: "):
        flat_tokens.open(root).train.sequence(0)


@LAYOUTS
def test_a_shape_without_the_tokens_is_refused_by_the_arrays_name(root, layout):
    """Metadata and seq_starts may agree on 2**46 tokens; asking for them does not take the machine down."""
    rewrite_starts(root, [0, 2**46])
    array = root / "train/encoded_tokens"
    change_file(array / (".zarray" if layout == "zarr2" else "zarr.json"), {"shape": [2**46]})
    train = flat_tokens.open(root).train
    with refusal(f"{array}: items 0 to {2**46} do not fit into memory", MemoryError):
        train.sequence(0)
    with refusal(str(array), FileNotFoundError):
        train.slice(2**40, 2**40 + 1)


@pytest.mark.parametrize(
    "pointer",
    ["../x", "..", ".", "", "/etc", "a/b", "a/../../x", "x\0y", 3, ["a"], {"a": 1}, True],
)
def test_a_pointer_that_names_no_version_is_refused(tmp_path, pointer):
    write(tmp_path / "x")
    write(tmp_path / "output/versions/a")
    (tmp_path / "output/latest.json").write_text(json.dumps({"version": pointer}))
    with refusal(f"{tmp_path}/output/latest.json: .* is not the name of a version"):
        flat_tokens.open(tmp_path / "output")


@pytest.mark.parametrize(
    "junk", [b"", b"junk", b"[]", b'"a"', b"null", b"\xff\xfe", b"{" * 100_000, b'{"a":' * 100_000, b" " * (2 << 20)]
)
def test_a_pointer_of_junk_is_refused(tmp_path, junk):
    write(tmp_path / "versions/a")
    (tmp_path / "latest.json").write_bytes(junk)
    for attempt in (flat_tokens.open, flat_tokens.verify):
        with refusal(f"{tmp_path}/latest.json: "):
            attempt(tmp_path)
