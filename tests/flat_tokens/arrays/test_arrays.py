"""The arrays as stored: byte for byte what zarr-python writes, readable by it, and never silently wrong."""

import errno
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from flat_tokens.arrays.codecs import frame_size
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, LayoutName, group_metadata
from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TokenBatch
from flat_tokens.stores.store import Store, content_digest
from flat_tokens.writer import ArrayWriter, FlatTokensWriter, put_metadata
from tests import made
from tests.examples import examples, first_fast
from tests.refusal import refusal

NAMES = get_args(LayoutName)
ARRAYS = [(name, array) for name in NAMES for array in ("encoded_tokens", "seq_starts")]
CHUNK, OBJECT = 4, 12


def spec_of(name: LayoutName, array: str) -> ArraySpec:
    return getattr(LAYOUTS[name], array)


def small(name: LayoutName, array: str = "encoded_tokens") -> ArraySpec:
    """The layout's own specification, but of objects small enough to try everything with them."""
    spec = spec_of(name, array)
    chunk = OBJECT if spec.zarr_format == 2 else CHUNK
    return replace(spec, object_length=OBJECT, chunk_length=chunk, block_length=spec.block_length and 2)


def items_of(spec: ArraySpec, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, spec.fill_value, count, spec.numpy_dtype, endpoint=True)


def write(root: Path, spec: ArraySpec, items: np.ndarray, name: str = "array") -> StoredArray:
    store = Store.at(root)
    with ArrayWriter(store, name, spec) as writer:
        writer.append(items)
    written = {f"{name}/{key}": content_digest(data) for key, data in files(root / name).items()}
    assert {stored.key: stored.digest for stored in writer.objects} == written
    return open_array(store / name, spec.dtype)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def zarrs_own(root: Path, spec: ArraySpec, length: int) -> zarr.Array[Any]:
    """An array that zarr-python makes from the same parameters, in its own words."""
    level, block_size = spec.zstd_level, (spec.block_length or 0) * spec.numpy_dtype.itemsize
    compressor = Crc32cCodec()
    if spec.zarr_format == 2:
        compressor = numcodecs.Blosc("zstd", level, 0, block_size) if block_size else numcodecs.Zstd(level, checksum=True)
        storage = {"chunks": (spec.chunk_length,), "compressors": compressor}
    else:
        if block_size:
            compressor = BloscCodec(typesize=1, cname="zstd", clevel=level, shuffle="noshuffle", blocksize=block_size)
        elif level is not None:
            compressor = ZstdCodec(level=level, checksum=True)
        storage = {
            "chunks": (spec.chunk_length,),
            "shards": (spec.object_length,),
            "compressors": compressor,
            "dimension_names": [spec.dimension],
        }
    return zarr.create_array(
        root,
        shape=(length,),
        dtype=spec.dtype,
        filters=None,
        fill_value=spec.fill_value,
        zarr_format=spec.zarr_format,
        config={"write_empty_chunks": True},
        **storage,
    )


# What is stored


def test_a_raw_shard_byte_for_byte(tmp_path):
    """Chunks with their crc32c one behind the other, the last filled up with ones; then the index and its crc32c."""
    spec = replace(LAYOUTS["mmap"].encoded_tokens, object_length=6, chunk_length=2)
    write(tmp_path, spec, np.array([3, 4, 7], np.uint32))
    assert (tmp_path / "array/c/0").read_bytes().hex(" ", -4) == " ".join(
        [
            *("03000000", "04000000", "10044e2c"),
            *("07000000", "ffffffff", "b603e9c1"),
            *("00000000 00000000", "0c000000 00000000"),
            *("0c000000 00000000", "0c000000 00000000"),
            *("ffffffff ffffffff", "ffffffff ffffffff"),
            "98510b32",
        ]
    )


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_metadata_is_what_zarr_writes_for_the_same_parameters(tmp_path, name, array):
    spec = spec_of(name, array)
    zarrs_own(tmp_path, spec, 1_000_000)
    mine = {key: json.loads(data) for key, data in spec.metadata(1_000_000).items()}
    own = {key: json.loads(data) for key, data in files(tmp_path).items()}
    if spec.zarr_format == 2 and spec.block_length is None:
        # Readers of zarr 2 do not know the field; zstd frames say themselves that they are checksummed.
        assert own[".zarray"]["compressor"].pop("checksum") is True
    assert mine == own


@examples(50)
@given(st.binary(max_size=300) | st.integers(0, 300_000).map(bytes), st.integers(-1, 9), st.booleans(), st.binary(max_size=9))
def test_the_size_of_a_frame_is_found_whatever_comes_after_it(data, level, says_size, after):
    """Of several blocks, and of runs of a byte."""
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=says_size, write_checksum=says_size)
    frame = compressor.compress(data)
    assert frame_size(memoryview(frame + after)) == len(frame)
    for cut in {0, 4, len(frame) // 2, len(frame) - 1}:
        with refusal("it is cut off"):
            frame_size(memoryview(frame[:cut]))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_group_metadata_is_what_zarr_writes(tmp_path, zarr_format):
    zarr.create_group(tmp_path, zarr_format=zarr_format, attributes={"max_token_id": 8})
    mine, own = group_metadata(zarr_format, {"max_token_id": 8}), files(tmp_path)
    assert {key: json.loads(data) for key, data in mine.items()} == {key: json.loads(data) for key, data in own.items()}


LENGTHS = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, OBJECT - 1, OBJECT, OBJECT + 1, 2 * OBJECT, 2 * OBJECT + CHUNK + 1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_zarr_reads_arrays_of_every_length_whose_bytes_are_its_own(tmp_path, name, array, length):
    """Whole objects, partial ones, and none at all: every file but the metadata's wording is the same. Chunks of one value and
    of the fill value are stored, too.
    """
    spec = small(name, array)
    items = items_of(spec, length)
    items[-spec.chunk_length :] = 0
    items[-2 * spec.chunk_length : -spec.chunk_length] = spec.fill_value
    array, out = write(tmp_path, spec, items, "mine"), np.full(length + 2, 7, spec.numpy_dtype)
    for start, stop in itertools.combinations_with_replacement(range(length + 1), 2):
        assert np.array_equal(array.read(start, stop), items[start:stop])
    array.read(0, length, out[1:-1])
    assert out.tolist() == [7, *items.tolist(), 7]
    read = zarr.open_array(tmp_path / "mine", mode="r")
    assert (read.shape, read.dtype, read.fill_value) == (
        (length,),
        np.dtype(spec.dtype),
        2 ** (8 * spec.numpy_dtype.itemsize) - 1,
    )
    assert np.array_equal(read[:], items)
    if spec.block_length is not None:
        return  # Blosc itself would write blocks without checksums
    own = zarrs_own(tmp_path / "own", spec, length)
    if length:
        own[:] = items
    mine = files(tmp_path / "mine")
    assert mine.keys() == files(tmp_path / "own").keys()
    assert len(mine) == -(-length // spec.object_length) + (2 if spec.zarr_format == 2 else 1)
    for key, data in files(tmp_path / "own").items():
        if not key.endswith((".json", ".zarray", ".zattrs")):
            assert mine[key] == data


@pytest.mark.parametrize("name", NAMES)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), length=st.integers(0, 40))
@examples(40)
def test_stored_bytes_do_not_depend_on_how_items_arrive(tmp_path_factory, name, cuts, length):
    """Nor on whether one writer writes all objects, or each has its own."""
    spec, store = small(name), Store.at(root := tmp_path_factory.mktemp("arrays"))
    items = items_of(spec, length)
    write(root, spec, items, "whole")
    with ArrayWriter(store, "cut", spec) as writer:
        for part in np.split(items, sorted(min(cut, length) for cut in cuts)):
            writer.append(part)
    for first in reversed(range(-(-length // OBJECT))):
        with ArrayWriter(store, "parts", spec, first_object=first, write_metadata=False) as writer:
            writer.append(items[first * OBJECT : (first + 1) * OBJECT])
    put_metadata(store, "parts", spec.metadata(length))
    assert files(root / "cut") == files(root / "parts") == files(root / "whole")


def test_a_frame_of_its_blocks_size_is_told_from_the_block():
    """Blosc takes a block of its own size for one that is not compressed. So such a frame has an empty one behind it."""
    spec = replace(LAYOUTS["zarr2"].encoded_tokens, object_length=64, chunk_length=64, block_length=64)
    sizes = []
    for zeros in range(40):
        items = items_of(spec, 64)
        items.view(np.uint8)[256 - zeros :] = 0
        stored = spec.encode_chunk(items)
        sizes.append(len(stored) - 24)
        assert numcodecs.Blosc().decode(stored) == items.tobytes()
        assert np.array_equal(spec.decode_chunk(memoryview(stored)), items)
    assert max(sizes) > 256 > min(sizes)
    assert 256 not in sizes
    assert 264 in sizes


# Damage: named, or without effect, never silent


def damaged_reads(tmp_path: Path, spec: ArraySpec, length: int, variants: Any) -> tuple[int, int]:
    """Read an array with each variant of its first object; how many were refused and how many harmless."""
    items = items_of(spec, length)
    write(tmp_path, spec, items)
    path = tmp_path / "array" / spec.object_key(0)
    refused = harmless = 0
    for variant in variants(path.read_bytes()):
        path.write_bytes(variant)
        try:
            assert np.array_equal(open_array(Store.at(tmp_path / "array"), spec.dtype).read(0, length), items)
            harmless += 1
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
            refused += 1
    return refused, harmless


def bit_flips(whole: bytes, every: int) -> Any:
    for number in range(0, 8 * len(whole), every):
        position, bit = divmod(number, 8)
        yield whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :]


@pytest.mark.parametrize(
    "of", first_fast([(OBJECT, 7), (CHUNK + 1, 1), (OBJECT, 1)], every=2), ids=["some bits", "padded", "full"]
)
@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_no_flipped_bit_is_read_as_data(tmp_path, name, array, of):
    """Bits of an object, its padding and its index too; slowly all of them."""
    length, every = of
    refused, harmless = damaged_reads(tmp_path, small(name, array), length, partial(bit_flips, every=every))
    if small(name, array).zstd_level is None:
        assert harmless == 0
    else:  # a zstd frame's header has a few bits that mean nothing, and blocks of padding are not read
        assert harmless < (refused + harmless) / (2 if small(name, array).block_length and length < OBJECT else 50)


@pytest.mark.parametrize("length", first_fast([OBJECT, CHUNK + 1]), ids=["full", "padded"])
@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_no_object_that_is_cut_or_has_something_behind_it_is_read_as_data(tmp_path, name, array, length):
    def others(whole: bytes) -> Iterator[bytes]:
        yield from (whole[:size] for size in range(len(whole)))
        yield from (whole + tail for tail in (b"\0", b"\xff" * 4, bytes(100), bytes(100_000)))

    refused, harmless = damaged_reads(tmp_path, small(name, array), length, others)
    assert refused > 4
    assert harmless == 0


def change_index(path: Path, chunk: int, entry: Any) -> None:
    """Change what a shard's index says of a chunk, checksum and all."""
    whole, size = path.read_bytes(), OBJECT // CHUNK * 16
    index = np.frombuffer(whole[-size - 4 : -4], "<u8").reshape(-1, 2).copy()
    index[chunk] = entry
    path.write_bytes(whole[: -size - 4] + index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little"))


@pytest.mark.parametrize("name", ["mmap", "compact"])
def test_a_missing_inner_chunk_is_named(tmp_path, name):
    """Zarr reads the fill value there, which is above every max_token_id; here it is an error at once."""
    spec = small(name)
    items = items_of(spec, OBJECT)
    write(tmp_path, spec, items)
    path = tmp_path / "array/c/0"
    change_index(path, 1, 2**64 - 1)
    assert zarr.open_array(tmp_path / "array", mode="r")[CHUNK : 2 * CHUNK].tolist() == [0xFFFFFFFF] * CHUNK
    array = open_array(Store.at(tmp_path / "array"), "uint32")
    assert np.array_equal(array.read(0, CHUNK), items[:CHUNK])
    for start, stop in [(CHUNK, CHUNK + 1), (0, OBJECT)]:
        with refusal(f"{path}: inner chunk 1 is not stored"):
            array.read(start, stop)


@pytest.mark.parametrize("entry", [(0, 10**6), (10**6, 20), (2**63, 2**63), (2**64 - 2, 20), (0, 0), (5, 20), (0, 19), (0, 21)])
@pytest.mark.parametrize("name", ["mmap", "compact"])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, name, entry):
    spec = small(name)
    write(tmp_path, spec, items_of(spec, OBJECT))
    path = tmp_path / "array/c/0"
    change_index(path, 0, entry)
    with refusal(str(path)):
        open_array(Store.at(tmp_path / "array"), "uint32").read(0, CHUNK)


@pytest.mark.parametrize(("name", "array"), [pair for pair in ARRAYS if spec_of(*pair).zstd_level is not None])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_sound_chunk_of_another_length_is_refused(tmp_path, name, array, count):
    """Checksums are right all through; what a shorter chunk does not fill must not come from old memory."""
    spec = replace(small(name, array), object_length=4, chunk_length=4)
    write(tmp_path, spec, items_of(spec, 4))
    path = tmp_path / "array" / spec.object_key(0)
    items = items_of(spec, count)
    frame = numcodecs.Blosc("zstd", 5, 0).encode(items) if spec.block_length else spec.encode_chunk(items)
    index = np.array([0, len(frame)], "<u8").tobytes() if spec.zarr_format == 3 else b""
    path.write_bytes(frame + index + (google_crc32c.value(index).to_bytes(4, "little") if index else b""))
    with refusal(f"{path}: inner chunk 0 does not decompress to {4 * spec.numpy_dtype.itemsize} bytes"):
        open_array(Store.at(tmp_path / "array"), spec.dtype).read(0, 1)


# Writing that fails


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_in_the_block_leaves_no_partial_object(tmp_path, name):
    spec = small(name)
    with refusal("plug", InterruptedError), ArrayWriter(Store.at(tmp_path), "array", spec) as writer:
        writer.append(items_of(spec, 2 * OBJECT + 1))
        raise InterruptedError("somebody pulled the plug")
    assert list(files(tmp_path)) == [f"array/{spec.object_key(0)}", f"array/{spec.object_key(1)}"]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_surfaces_and_leaves_no_partial_object(tmp_path, monkeypatch, name):
    """At whichever write it happens: what has a name is whole, and nothing has any other name."""

    def written(where: str) -> dict[str, bytes]:
        with FlatTokensWriter(Store.at(tmp_path / where), made.small(name, 24, 4)) as writer:
            writer.append(TokenBatch.from_sequences([[5] * n for n in (40, 0, 30, 1, 9)]))
        return files(tmp_path / where)

    good, real = written("good"), os.write
    for successes in range(len(good)):
        left = [successes]

        def full(fd: int, data: Any, left: list[int] = left) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data)

        with monkeypatch.context() as patch, refusal("No space left on device", OSError):
            patch.setattr(os, "write", full)
            written(str(successes))
        assert files(tmp_path / str(successes)).items() < good.items()
