"""MDS and LitData: where shards end, and shards that are packed."""

from functools import partial

import pytest

from flat_tokens.formats import open_any
from flat_tokens.formats.compression import compress
from flat_tokens.formats.litdata import Litdata
from flat_tokens.formats.mds import Mds
from tests.damage import change_file
from tests.flat_tokens.formats.exporting import EXAMPLE, export, index_of, put, read, splits_of
from tests.refusal import refusal

CODECS = ["zstd", "gz", "br", "bz2", "snappy"]


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("litdata", Litdata(size_limit=60), [8 + 2 * 4 + 28, 8 + 4 + 400, 8 + 5 * 4 + 32]),
        ("mds", Mds(size_limit=270), [240, 602, 244, 222]),
    ],
)
def test_shards_end_at_the_size_limit_unless_one_document_is_larger(tmp_path, name, options, sizes):
    documents = [[1] * n for n in (3, 4, 100, 2, 0, 0, 1, 5)]
    assert [item.size for item in export(name, splits_of(documents), tmp_path, options)[:-1]] == sizes
    assert read(tmp_path, options) == {"train": documents}


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_shards_have_its_name_and_are_read(tmp_path, codec):
    put(tmp_path, Mds(size_limit=900, compression=codec), EXAMPLE)
    shards = index_of(tmp_path / "train")["shards"]
    assert [shard["zip_data"]["basename"] for shard in shards] == [f"shard.{i:05d}.mds.{codec}" for i in range(len(shards))]
    assert read(tmp_path, Mds()) == {"train": EXAMPLE}


@pytest.mark.parametrize("packer", CODECS)
def test_packed_shards_are_unpacked_to_their_size_and_no_further(tmp_path, packer):
    pack = partial(compress, packer)
    put(tmp_path, Mds(), EXAMPLE)
    shard, folder = tmp_path / "train/shard.00000.mds", tmp_path / "train"
    plain = shard.read_bytes()
    shard.unlink()

    def store(data: bytes, size: dict[str, int]) -> None:
        (folder / "packed").write_bytes(data)
        zipped = {"compression": packer, "zip_data": {"basename": "packed", "bytes": len(data)}}
        change_file(folder / "index.json", {"shards": {0: {**zipped, "raw_data": size}}})

    store(pack(plain), {})
    assert read(tmp_path, Mds()) == {"train": EXAMPLE}
    for data in (pack(bytes(50 << 20)), pack(plain)[:-9], b"junk", pack(plain) + b"more"):
        store(data, {})
        with refusal(f"{folder / 'packed'}: "):
            read(tmp_path, Mds())
    for claimed in (2**31, 9):
        store(pack(plain), {"bytes": claimed})
        with refusal(f"{folder / 'packed'}: "):
            read(tmp_path, Mds())


def test_an_index_without_end_is_not_read(tmp_path):
    with (tmp_path / "index.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with refusal(f"{tmp_path}/index.json: is larger than an index may be"):
        read(tmp_path, Mds())
    with refusal("is in none of the formats"):
        open_any(tmp_path)


def test_a_shard_alone_is_read_by_what_it_says_itself(tmp_path):
    put(tmp_path, Mds(), EXAMPLE)
    assert read(tmp_path / "train/shard.00000.mds", Mds()) == {"train": EXAMPLE}


def test_packed_chunks_are_read(tmp_path):
    put(tmp_path, Litdata(), EXAMPLE)
    chunk, packed = tmp_path / "train/chunk-0-0.bin", tmp_path / "train/chunk-0-0.zstd.bin"
    packed.write_bytes(compress("zstd", chunk.read_bytes()))
    chunk.unlink()
    change_file(tmp_path / "train/index.json", {"chunks": {0: {"filename": packed.name}}, "config": {"compression": "zstd"}})
    assert read(tmp_path, Litdata()) == {"train": EXAMPLE}
    packed.write_bytes(compress("zstd", bytes(50 << 20)))
    with refusal(r"chunk-0-0.zstd.bin: does not decompress to 1256 bytes"):
        read(tmp_path, Litdata())
