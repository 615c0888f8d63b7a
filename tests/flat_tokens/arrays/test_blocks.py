"""Many blocks at once give what each gives alone, and whichever is damaged is named."""

from dataclasses import replace

import numcodecs
import numpy as np
import pytest
from numcodecs.zstd import Zstd

from flat_tokens.arrays import blocks, codecs
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec
from tests.flat_tokens.arrays.test_arrays import write
from tests.flat_tokens.arrays.test_maps import gathered
from tests.refusal import refusal

SPEC = replace(LAYOUTS["compact"].encoded_tokens, object_length=1024, chunk_length=256, block_length=64)
COUNT = 20_000
SPECS = {
    "blocks": SPEC,
    "blocks of bytes": replace(SPEC, dtype="uint8"),
    "a chunk an object": replace(LAYOUTS["zarr2"].encoded_tokens, object_length=256, chunk_length=256, block_length=64),
    "frames": replace(LAYOUTS["compact"].seq_starts, object_length=1024, chunk_length=256),
}


def mixed_items(spec: ArraySpec) -> np.ndarray:
    """Items that compress, with some that do not, and with frames of every size from one to the other."""
    rng = np.random.default_rng(0)
    items = rng.integers(0, spec.fill_value, COUNT, spec.numpy_dtype, endpoint=True)
    items[::3] = 7
    items[: COUNT // 2] = 7
    for zeros in range(60):
        items[COUNT // 2 + 64 * zeros :][:zeros] = 0
    return items


@pytest.mark.parametrize("length", [1, 32, 64, 200])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_many_ranges_equal_the_array_and_none_are_nothing(tmp_path, monkeypatch, spec, length):
    """Also without a call for many blocks, which zstandard's backend for PyPy has not."""
    items = mixed_items(spec)
    starts = np.random.default_rng(1).integers(0, COUNT - length, 500)
    array = write(tmp_path, spec, items)
    for can_decode_many in (True, False):
        monkeypatch.setattr(blocks, "CAN_DECODE_MANY", can_decode_many)
        for some in (starts, starts[:0]):
            assert np.array_equal(gathered(array, some, length), items[some[:, None] + np.arange(length)])
        array._decoded.clear()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 4096, 65_791, 65_792, 1 << 17])
def test_the_head_of_a_frame_is_what_zstd_writes(size):
    for level in (1, 5, 19):
        head = blocks.frame_head(size)
        assert Zstd(level=level, checksum=True).encode(bytes(size))[: len(head)] == head


@pytest.mark.parametrize("where", ["header", "offsets", "length", "frame", "checksum"])
def test_a_damaged_block_among_many_is_named(tmp_path, where):
    """Its shard and chunk, as if it had been read alone; ranges without it are read."""
    items = np.arange(COUNT, dtype=np.uint32) // 10
    array = write(tmp_path, SPEC, items)
    path = tmp_path / "array" / SPEC.object_key(3)
    stored = bytearray(path.read_bytes())
    chunk = stored.index(bytes(codecs.BEGINS), 1)  # inner chunk 1
    begin, end = np.frombuffer(stored, "<i4", 2, chunk + 16).tolist()  # of its first block
    place = {"header": 4, "offsets": 17, "length": begin, "frame": begin + 14, "checksum": end - 1}[where]
    stored[chunk + place] ^= 0x10
    path.write_bytes(stored)
    starts = np.arange(0, COUNT - 64, 64)
    with refusal(r"array/c/3: inner chunk 1 .*damaged: remove it"):
        gathered(array, starts, 64)
    elsewhere = starts[(starts < 3 * 1024) | (starts >= 4 * 1024)]
    assert np.array_equal(gathered(array, elsewhere, 64), items[elsewhere[:, None] + np.arange(64)])


def test_blocks_that_blosc_wrote_itself_are_read(tmp_path):
    """In another order, and without checksums."""
    spec, items = LAYOUTS["zarr2"].encoded_tokens, np.arange(1 << 18, dtype=np.uint32) // 10
    array = write(tmp_path, spec, items)
    own = numcodecs.Blosc("zstd", 3, numcodecs.Blosc.NOSHUFFLE, (spec.block_length or 0) * 4).encode(items)
    (tmp_path / "array" / spec.object_key(0)).write_bytes(own)
    starts = np.arange(0, (1 << 18) - 64, 64)
    assert np.array_equal(gathered(array, starts, 64), items[starts[:, None] + np.arange(64)])
