"""What every format does. A row of ROWS is a format: what is written with which options, its bytes by its specification, and the
files that it refuses.
"""

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens.formats import FORMATS, Files, open_any
from flat_tokens.formats.datatrove import Datatrove
from flat_tokens.formats.litdata import Litdata
from flat_tokens.formats.mds import Mds
from flat_tokens.formats.megatron import DTYPES, Megatron
from flat_tokens.formats.modalities import Modalities
from flat_tokens.formats.nanogpt import NamedShards, Shards, Stream
from flat_tokens.formats.olmo import Olmo
from flat_tokens.formats.parquet import Arrow, Parquet
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from flat_tokens.tools.export import export_of, import_dataset, write
from tests.damage import change, change_file
from tests.examples import examples
from tests.flat_tokens.formats.exporting import EXAMPLE, LARGEST, Sequences, export, sequences_in, splits_of
from tests.refusal import refusal

UNRECOGNISED = ("nanogpt", "build-nanogpt", "llm.c")
"""Formats that are named to be opened, as one has no recognisable content, and two have files of one."""


class Row(NamedTuple):
    """A format."""

    small: Any
    """Options by which a dataset of some tokens has several parts, where the format has such."""
    exports: list[tuple[Any, int]]
    """Options, and the largest id that they allow."""
    literals: Sequence[tuple[Any, list[Sequences], dict[str, Any]]] = ()
    """Options, sequences by split, and the files: their bytes, what they unpack to, or the value of JSON."""
    places: tuple[str, ...] = ()
    """Other places than the directory at which the files of train are found."""
    lies: Sequence[tuple[dict[str, bytes], str]] = ()
    """Files, and what is said of the last one when it is opened."""
    lies_inside: Sequence[tuple[dict[str, bytes], str]] = ()
    """Of which it is said when it is read."""
    index: Sequence[Any] = ()
    """Changes of the index of train, which it is refused for when it is opened."""
    index_of_others: Sequence[Any] = ()
    """Changes by which the index is not that of its files, which is said of the first of them when it is read."""
    widths: Sequence[tuple[int, int]] = ()
    """Sizes of the vocabulary, and the bytes of a token."""
    refused: Sequence[tuple[Sequences, dict[str, Any], str]] = ()
    """Sequences, options, and what is said of them."""
    too_long: str | None = None
    """What is said of a sequence of 2**31 tokens, before they are read."""
    others: Sequence[tuple[dict[str, bytes], Any, Sequences]] = ()
    """Files as others write them, options, and the sequences in them."""
    again: Sequence[tuple[Sequences, Any, Any, Sequences]] = ()
    """Sequences that are written by options, and what is read by others."""
    wrong: Sequence[dict[str, object]] = ()
    """Options that are refused."""


END = 9
STREAM = [[1, 2, 3], [], [4], [5, 6, 7, 8, 1, 2, 3, 4, 5]]
OPENED = [9, 1, 2, 3, 9, 9, 4, 9, 5, 6, 7, 8, 1, 2, 3, 4, 5]
SHORT: list[Sequences] = [[[1, 2], [], [3]], [[4]]]


def integers(kind: str, *numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def llmc(tokens: bytes, *beginning: int) -> bytes:
    return integers("i", *beginning, *[0] * (256 - len(beginning))) + tokens


def npy(*tokens: int, dtype: str = "<u2", version: Any = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.array(tokens, dtype), version)
    return file.getvalue()


def npy_of(descr: str, shape: tuple[int, ...], data: bytes = bytes(8)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def pbin(index: Any, length: int = 20, width: int = 4, tokens: bytes = bytes(20)) -> dict[str, bytes]:
    pickled = index if isinstance(index, bytes) else pickle.dumps(index)
    return {"liar.pbin": struct.pack("<QI", length, width) + tokens + pickled}


def idx(
    lengths: Sequence[int] = (2, 3),
    pointers: Sequence[int] = (0, 8),
    documents: Sequence[int] = (0, 1, 2),
    code: int = 4,
    version: int = 1,
    tokens: bytes = bytes(20),
) -> dict[str, bytes]:
    arrays = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8")]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    return {"data.bin": tokens, "data.idx": header + b"".join(array.tobytes() for array in arrays)}


def changed_idx(stop: int | None, more: bytes = b"") -> dict[str, bytes]:
    files = idx()
    return {**files, "data.idx": files["data.idx"][:stop] + more}


def no_token_id(code: int, value: float) -> dict[str, bytes]:
    return dict(reversed(idx([1], [0], [0, 1], code, tokens=np.array([value], DTYPES[code]).tobytes()).items()))


SEVERAL = idx([1, 2, 0, 3], [0, 4, 12, 12], [0, 2, 2, 4], tokens=integers("i", *range(6)))
SEVERAL["data.idx"] += bytes(4)
"""Documents of several sequences, one without, and modes behind the index, as multimodal datasets have them."""
LENGTHS, DOCUMENTS = [i % 4 for i in range(50)], [0, 3, 3, 4, 17, 30, 31, 49, 50]
STARTS = list(itertools.accumulate(LENGTHS, initial=0))
MANY = idx(LENGTHS, [4 * start for start in STARTS[:-1]], DOCUMENTS, tokens=integers("i", *range(STARTS[-1])))


def ds(index: bytes) -> dict[str, bytes]:
    return {"a.ds": bytes(20), "a.ds.index": index}


def dolma(text: bytes) -> dict[str, bytes]:
    return packed(gzip.compress(text))


def packed(data: bytes) -> dict[str, bytes]:
    return {"a.npy": bytes(12), "a.csv.gz": data}


INDEX = {8: [(8, 12), (20, 8)], 12: [(12, 12), (24, 8)], 0: [(0, 12), (12, 8)]}
GENERATIONS = [
    struct.pack(">Q5I", 20, 1, 2, 9, 3, 9) + pickle.dumps(INDEX[8], 4),
    struct.pack(">QI5I", 20, 4, 1, 2, 9, 3, 9) + pickle.dumps(INDEX[12], 4),
    struct.pack("<QI5I", 20, 4, 1, 2, 9, 3, 9) + pickle.dumps(INDEX[12], 4),
    struct.pack("<QI5I", 20, 4, 1, 2, 9, 3, 9) + pickle.dumps(INDEX[0], 4),
]
"""Two documents, [1, 2] and [3], each closed by 9, as the table of the layouts in the module says it."""
MDS_COLUMNS = (
    b'{"column_encodings": ["ndarray:int32"], "column_names": ["tokens"], "column_sizes": [null], "compression": null, '
    b'"format": "mds", "hashes": ["sha256"], "size_limit": 67108864, "version": 2}'
)


def mds(*samples: bytes) -> bytes:
    ends = list(itertools.accumulate(map(len, samples), initial=4 * (len(samples) + 2) + len(MDS_COLUMNS)))
    return integers("I", len(samples), *ends) + MDS_COLUMNS + b"".join(samples)


def mds_files(*samples: bytes) -> dict[str, Any]:
    shard = mds(*samples)
    data = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {"sha256": hashlib.sha256(shard).hexdigest()}}
    entry = {**json.loads(MDS_COLUMNS), "raw_data": data, "zip_data": None, "samples": len(samples)}
    return {"train/shard.00000.mds": shard, "train/index.json": {"version": 2, "shards": [entry]}}


def litdata_index(chunk_size: int, dim: int, chunk_bytes: int) -> dict[str, Any]:
    chunk = {"chunk_bytes": chunk_bytes, "chunk_size": chunk_size, "dim": dim, "filename": "chunk-0-0.bin"}
    config = {
        "chunk_bytes": 1 << 26,
        "chunk_size": None,
        "compression": None,
        "data_format": ["no_header_tensor:16"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    return {"chunks": [chunk], "config": config}


TOO_LARGE: list[tuple[Sequences, dict[str, Any], str]] = [
    ([[65_536]], {"end_of_text": 0}, r"max_token_id is 65536, but .* uint16 holds ids up to 65535"),
    ([[1]], {"end_of_text": 70_000}, "end_of_text is 70000, but it is a token id from 0 to 65535"),
]
PACKED = [[1, 2, 3], [], [4, 5], [6]]
WIDTHS = [(65_536, 2), (65_537, 4)]
TOO_LONG_A_LIST = "sequence 0 has 2147483648 tokens, but a list holds 2147483647"
LISTS_OF_FILES = [
    {"_data_files": [{"filename": "../../secret"}]},
    {"_data_files": [{"filename": "/etc/passwd"}]},
    {"_data_files": [{"filename": "missing.arrow"}]},
    {"_data_files": [{}]},
    {"_data_files": "data-00000-of-00001.arrow"},
    {"_indices_data_files": [{"filename": "indices.arrow"}]},
]
ROWS = {
    "modalities": Row(
        Modalities(),
        [
            (Modalities(), LARGEST),
            (Modalities(end_of_text=0, closing="always", tokens_per_file=9), LARGEST),
            *((Modalities(end_of_text=255 + g, closing="always", generation=g), 254) for g in (0, 1, 2, 3)),
        ],
        [
            (Modalities(END, generation=g, vocabulary_size=70_000), [[[1, 2], [3]]], {"train.pbin": GENERATIONS[g]})
            for g in (0, 1, 2, 3)
        ],
        ("train.pbin",),
        [
            *(
                (pbin(index), words)
                for index, words in [
                    ([(0, 12), (8, 12)], "index .*a document of 12 bytes at offset 8"),  # overlaps
                    ([(0, 12), (16, 4)], "a document of 4 bytes at offset 16"),  # leaves a gap
                    ([(0, 12), (12, 12)], "a document of 12 bytes at offset 12"),  # ends behind the tokens
                    ([(0, 12)], "ends after 12 bytes of tokens, but there are 20"),
                    ([], "ends after 0 bytes of tokens, but there are 20"),
                    ([(0, 10), (10, 10)], "a document of 10 bytes"),  # half a token
                    ([(0, 24), (24, -4)], "a document of 24 bytes"),
                    ([(4, 16)], "begins with offset 4"),
                    ([(0, 2**62), (2**62, 2**62), (-(2**63), 2**62)], "a document of 4611686018427387904 bytes"),
                    ([(0, 8), (-16, 12)], "a document of"),  # 24 too low after one file
                    ([(0, 8), (20, 12)], "a document of"),  # 12 too high
                    ([(0, 8), (2, 12)], "a document of"),
                    ([(0, 8), (-4, 8), (16, 4)], "a document of"),  # right again after two files, which no merger makes
                ]
            ),
            (pbin([(0, 8), (0, 12)]), "set ignore_offsets to go by the lengths alone"),
            (pbin(pickle.dumps([(0, 20), os.mkdir])), "its index has opcode .* nothing in it was run"),
            *((pbin([(0, 20)], length), "") for length in (0, 4, 19, 21, 2**31, 2**63, 2**64 - 1)),
            *((pbin([(0, 20)], width=width), "") for width in (0, 3, 8, 2**32 - 1)),
        ],
        [(pbin([(0, 20)], tokens=integers("I", 2**31, *[0] * 4)), "holds 0 to 2147483648")],
        widths=[(256, 1), (257, 2), *WIDTHS],
        refused=[([[3]], {"end_of_text": 256, "vocabulary_size": 256}, "max_token_id or end_of_text is 256")],
        others=[
            (pbin(pickle.dumps([(0, 8), (0, 12)], 2)), Modalities(ignore_offsets=True), [[0] * 2, [0] * 3]),
            *(  # merged by Modalities, which takes 12 off the offsets behind each file
                (pbin(pairs, tokens=integers("I", 1, 2, 3, 4, 5)), Modalities(), found)
                for pairs, found in [([(0, 4), (-8, 8), (-12, 4), (-20, 0), (-8, 4)], [[1], [2, 3], [4], [], [5]])]
            ),
        ],
        wrong=[{"end_of_text": -1}, {"closing": "never"}, {"generation": 4}, {"tokens_per_file": 0}],
    ),
    "megatron": Row(
        Megatron(),
        [(Megatron(end_of_text=7, tokens_per_file=9), LARGEST), (Megatron(end_of_text=65_498), 65_497)],
        [
            (
                Megatron(END),
                SHORT[:1],
                {
                    "train.bin": integers("H", 1, 2, 9, 9, 3, 9),
                    "train.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQ3i3q4q", 1, 8, 3, 4, 3, 1, 2, 0, 6, 8, 0, 1, 2, 3),
                },
            )
        ],
        ("train", "train.bin", "train.idx"),
        [
            (idx(version=2), "has version 2"),
            (idx(code=9), "token type 9"),
            (changed_idx(-1), "entries take 82"),
            (changed_idx(None, b"x"), "entries take 82"),
            (changed_idx(26, bytes(8)), "0 document entries"),
            (changed_idx(18), "is truncated"),
            (idx([2, 4]), "sequences are bytes 0 to 24, but .* has 20"),
            (idx(pointers=[4, 8]), "sequences are bytes 4 to 20"),
            (idx(documents=[0, 1]), "documents are of sequences 0 to 1"),
            (idx(documents=[1, 1, 2]), "documents are of sequences 1 to 2"),
        ],
        [
            *(
                (idx(lengths, pointers, [0, 1, 2, 3]), words)
                for lengths, pointers, words in [
                    ([2, 2, 3], [0, 4, 8], "sequence 0 has 2 tokens of 4 bytes from byte 0"),  # overlaps
                    ([2, -1, 3], [0, 8, 8], "sequence 1 has -1 tokens"),
                    ([2**31 - 1, 0, 3], [0, 8, 8], "sequence 0 has 2147483647 tokens"),
                    ([2, 0, 3], [0, 2**63 - 1, 8], "sequence 0 has 2 tokens"),
                ]
            ),
            *(
                (idx([2, 0, 3], [0, 8, 8], [0, *wrong, 3]), "documents 0 to 3 do not begin at increasing ones")
                for wrong in ([3, 1], [-1, 2])
            ),
            (no_token_id(2, -1), "holds -1 to -1"),
            (no_token_id(5, 2**31), "holds 2147483648 to 2147483648"),
            (no_token_id(6, 0.5), r"holds 0\.5, which is not a token id"),
            (no_token_id(7, float("nan")), "holds nan to nan"),
        ],
        widths=[(65_499, 2), (65_500, 4), (2**31, 4)],
        others=[
            *(
                (
                    idx([1, 0, 3], [0, size, size], [0, 1, 2, 3], code, tokens=np.array([1, 127, 0, 5], kind).tobytes()),
                    Megatron(),
                    [[1], [], [127, 0, 5]],
                )
                for code, kind in DTYPES.items()
                for size in [np.dtype(kind).itemsize]
            ),
            (SEVERAL, Megatron(sequence="sequence"), [[0], [1, 2], [], [3, 4, 5]]),
            (MANY, Megatron(), [list(range(STARTS[a], STARTS[b])) for a, b in itertools.pairwise(DOCUMENTS)]),
        ],
    ),
    "nanogpt": Row(
        Stream(end_of_text=99),
        [(Stream(end_of_text=65_535), 65_534)],
        [
            (
                Stream(END),
                [STREAM, [[7, 7], [8]]],
                {"train.bin": integers("H", *OPENED[1:], 9), "val.bin": integers("H", 7, 7, 9, 8, 9)},
            )
        ],
        lies=[({"liar": b"123"}, "has 3 bytes, but tokens of two bytes each")],
        refused=[
            *TOO_LARGE,
            ([[1], [2]], {}, r"has 2 sequences, and nanogpt keeps no bounds .* Set end_of_text"),
            ([[1], [2, 9, 3]], {"end_of_text": END}, r"token 2 is end_of_text \(9\) inside a sequence"),
        ],
        others=[
            ({"train.bin": integers("H", 9, 9, 1, 9, 3)}, Stream(END), [[], [], [1], [3]]),  # the last document was not closed
            ({"train.bin": b""}, Stream(END), []),
        ],
        again=[
            ([[1, 2]], Stream(), Stream(), [[1, 2]]),
            ([[1], [2, 9, 3]], Stream(END, inner_end_of_text="keep"), Stream(), [[1, 9, 2, 9, 3, 9]]),
        ],
        wrong=[{"end_of_text": 2**31}, {"end_of_text": True}, {"inner_end_of_text": "drop"}],
    ),
    "build-nanogpt": Row(
        NamedShards(end_of_text=99, tokens_per_shard=50),
        [(NamedShards(end_of_text=65_535, tokens_per_shard=1), 65_534)],
        [
            (
                NamedShards(END, tokens_per_shard=9),
                [STREAM, [[7, 7], [8]]],
                {
                    "edufineweb_train_000001.npy": npy(*OPENED[:9]),
                    "edufineweb_train_000002.npy": npy(*OPENED[9:]),
                    "edufineweb_val_000000.npy": npy(9, 7, 7, 9, 8),
                },
            ),
            (  # more validation than a shard moves train on
                NamedShards(END, tokens_per_shard=3, name="fw"),
                [STREAM, [[7, 7], [8]]],
                {f"fw_train_{i:06}.npy": npy(*OPENED[i * 3 - 6 : i * 3 - 3]) for i in range(2, 8)}
                | {"fw_val_000000.npy": npy(9, 7, 7), "fw_val_000001.npy": npy(9, 8)},
            ),
            *(
                (NamedShards(tokens_per_shard=10**6), [[range(n)]], {"edufineweb_train_000001.npy": npy(*range(n))})
                for n in (1, 9, 10, 9_999, 10_000)
            ),
        ],
        lies=[({"liar": npy_of("<u4", (2,))}, "tokens of uint32, but build")],
        others=[
            ({"train.npy": npy(1, 2, 9, 9, 3, 9)}, NamedShards(END), [[1, 2], [], [3], []]),  # shards of others begin inside one
            ({"train.npy": npy()}, NamedShards(END), []),
            *(({"train.npy": npy(9, 1, 2, version=(v, 0))}, NamedShards(END), [[1, 2]]) for v in (1, 2, 3)),
        ],
        wrong=[{"name": "a/b"}, {"name": "fineweb_test"}],
    ),
    "jaxformer": Row(
        Shards(end_of_text=99, tokens_per_shard=50),
        [(Shards(end_of_text=LARGEST, tokens_per_shard=7), LARGEST - 1)],
        [
            (
                Shards(END, tokens_per_shard=9),
                [STREAM, [[7, 7], [8]]],
                {
                    "train_0000.npy": npy(*OPENED[:9], dtype="<u4"),
                    "train_0001.npy": npy(*OPENED[9:], dtype="<u4"),
                    "test_0000.npy": npy(9, 7, 7, 9, 8, dtype="<u4"),
                },
            )
        ],
        lies=[
            *(
                ({"liar": data}, words)
                for data, words in [
                    (npy_of("<u4", (3,)), "its header says 140"),
                    (npy_of("<u4", (1, 2)), "tokens are in one dimension"),
                    (npy_of("<f4", (2,)), "but tokens are .* of uint16 or uint32"),
                    (npy_of("<u2", (4,)), "tokens of uint16, but jaxformer"),
                    (b"\x93NUMPY\x01\x00\xff\xff{{", "its header is b'{{'"),
                    (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 4000, "its header is"),
                    (b"\x93NUMPY\x09\x00\x00\x00\x00\x00", "is not a .npy file"),
                    (b"", "is not a .npy file"),
                ]
            ),
        ],
        others=[({"train.npy": npy(9, 1, 2, dtype=">u4")}, Shards(END), [[1, 2]])],
        wrong=[{"tokens_per_shard": 0}, {"tokens_per_shard": 2**31}],
    ),
    "llm.c": Row(
        NamedShards(end_of_text=99),
        [(NamedShards(end_of_text=65_535, tokens_per_shard=7, name="fineweb"), 65_534)],
        [
            (
                NamedShards(END, name="x"),
                [STREAM, [[7, 7], [8]]],
                {
                    "x_train_000001.bin": llmc(integers("H", *OPENED), 20240520, 1, 17),
                    "x_val_000000.bin": llmc(integers("H", 9, 7, 7, 9, 8), 20240520, 1, 5),
                },
            )
        ],
        lies=[
            *(
                ({"liar": data}, words)
                for data, words in [
                    (llmc(bytes(2), 20240520, 2, 1), "begins with 20240520, 2, 1"),
                    (llmc(b"", 20240520, 1, -1), "begins with 20240520, 1, -1"),
                    (integers("i", 20240520, 1, 0), "has 12 bytes, but its header says 1024"),
                    (llmc(bytes(4), 20240801, 1, 1), "begins with 20240801, 1, 1, but .* 20240801, 7 "),
                    (llmc(bytes(4), 20240801, 7, 1), r"has tokens of uint32, but llm\.c has uint16"),
                    (b"", "begins with 0, 0, 0"),
                ]
            ),
        ],
    ),
    "llm.c-llama-3": Row(
        NamedShards(end_of_text=99),
        [(NamedShards(end_of_text=LARGEST, tokens_per_shard=7), LARGEST - 1)],
        [
            (  # another header for wide tokens, as its data preparation writes for Llama 3
                NamedShards(128_000, name="TinyStories"),
                [[[7, 7, 70_000]]],
                {"TinyStories_train_000001.bin": llmc(integers("I", 128_000, 7, 7, 70_000), 20240801, 7, 4)},
            )
        ],
        lies=[({"liar": llmc(bytes(4), 20240801, 7, 2)}, "1028 bytes, but its header says 1032")],
    ),
    "datatrove": Row(
        Datatrove(),
        [(Datatrove(end_of_text=7, tokens_per_file=9), LARGEST)],
        [
            (
                Datatrove(END, tokenizer="gpt2"),
                SHORT,
                {
                    "train/00000_train.ds": integers("H", 1, 2, 9, 9, 3, 9),
                    "train/00000_train.ds.index": integers("Q", 3, 4, 6),
                    "train/00000_train.ds.metadata": b"gpt2|2\n6\n6.00 T",
                    "validation/00000_validation.ds": integers("H", 4, 9),
                    "validation/00000_validation.ds.index": integers("Q", 2),
                    "validation/00000_validation.ds.metadata": b"gpt2|2\n2\n2.00 T",
                },
            )
        ],
        ("train", *(f"train/00000_train.ds{ending}" for ending in ("", ".index", ".metadata"))),
        [
            (ds(integers("Q", 2, 4)), "ends with document end 4, in 16 bytes, but the tokens have 20"),
            (ds(integers("Q", 2, 10)[:-1]), "ends with document end 2560, in 15 bytes"),
            (ds(b""), "ends with document end 0, in 0 bytes"),
            # Half of the tokens of two bytes would be all of them in four: the metadata say which.
            (
                {"a.ds.metadata": b"gpt2|2\n4\n4.00 T", "a.ds": bytes(8), "a.ds.index": integers("Q", 2)},
                "ends with document end 2, in 8 bytes, but the tokens have 8",
            ),
        ],
        [
            (ds(integers("Q", *ends)), r"its documents 0 to \d do not end in order")
            for ends in ((4, 2, 10), (11, 10), (2**64 - 1, 10))
        ],
        widths=WIDTHS,
        wrong=[{"tokenizer": "a|b"}, {"tokenizer": "a\nb"}, {"tokenizer": 3}],
    ),
    "olmo-core": Row(
        Olmo(),
        [(Olmo(end_of_text=7, tokens_per_file=9), LARGEST)],
        [
            (
                Olmo(END),
                SHORT,
                {
                    "train/part-00000.npy": integers("H", 1, 2, 9, 9, 3, 9),
                    "train/part-00000.csv.gz": b"0,3\n3,4\n4,6\n",
                    "validation/part-00000.npy": integers("H", 4, 9),
                    "validation/part-00000.csv.gz": b"0,2\n",
                },
            )
        ],
        ("train", "train/part-00000.npy", "train/part-00000.csv.gz"),
        [
            *(
                (dolma(text), words)
                for text, words in [
                    (b"0,2\n3,6\n", "has a document from token 3 to 6"),
                    (b"0,2\n2,1\n", "has a document from token 2 to 1"),
                    (b"0,2\n2,5\n", "its last document ends at token 5, but the tokens have 12 bytes"),
                    (b"", "its last document ends at token 0, but the tokens have 12 bytes"),
                    (b"0,2\nx,6\n", "has the line b'x,6'"),
                    (b"0,2\n2,-6\n", "has the line b'2,-6'"),
                    (b"0,6,\xff\n\n", "has the line b''"),
                    (b"1" * (3 << 20), "has a line that is not a line of two numbers"),
                ]
            ),
            (packed(gzip.compress(b"0,2\n2,6\n")[:-5]), ""),
            (packed(gzip.compress(b"0,2\n2,6\n") + b"more"), ""),
            (packed(b""), ""),
            ({"a.npy": bytes(20)}, r"has no a\.csv\.gz next to it"),
        ],
        widths=WIDTHS,
        others=[(dolma(text), Olmo(), [[0, 0], [0] * 4]) for text in (b'0,2,id-1,"a, b",1\n2,6,id-2,c4.jsonl,2\n', b"0,2\n2,6")],
    ),
    "mds": Row(
        Mds(size_limit=400),
        [
            (Mds(size_limit=300), LARGEST),
            (Mds(size_limit=1), LARGEST),
            (Mds(end_of_text=LARGEST, size_limit=300, column="input_ids"), LARGEST - 1),
            (Mds(end_of_text=LARGEST, length=4, size_limit=300, compression="zstd"), LARGEST - 1),
            (Mds(end_of_text=LARGEST, length=1, size_limit=1), LARGEST - 1),
        ],
        [
            (  # two samples: a size, one dimension of one byte, the ids
                Mds(),
                [[[1, 2], [3]]],
                mds_files(b"\x0a\0\0\0\x04\x02\x01\0\0\0\x02\0\0\0", b"\x06\0\0\0\x04\x01\x03\0\0\0"),
            ),
            *(
                (Mds(), [[[7] * n]], mds_files(integers("I", 4 * n + len(shape)) + shape + integers("I", 7) * n))
                for n, shape in (
                    (0, b"\x04\0"),
                    (255, b"\x04\xff"),
                    (256, b"\x05\0\1"),
                    (65_535, b"\x05\xff\xff"),
                    (65_536, b"\x06\0\0\1\0"),
                )
            ),
        ],
        ("train", "train/index.json", "train/shard.00000.mds"),
        [
            ({"index.json": text.encode()}, "")
            for text in ("", "{", "[]", "null", "[" * 200_000, '{"version": 2}', '{"version": 2, "shards": 3}', '{"version": 1}')
        ],
        [({"shard": mds(b"\x06\0\0\0\x04\x01" + integers("i", wrong))}, f"holds {wrong} ") for wrong in (-1, -(2**31))],
        [
            *(
                {"raw_data": {"basename": name}}
                for name in ("../secret", "/etc/passwd", "a/../../secret", "..\\secret", "a\0b", "", 3)
            ),
            {
                "zip_data": {"basename": "../secret", "bytes": 3},
                "compression": "zstd",
                "raw_data": {"basename": "no", "bytes": 3},
            },
            *({"raw_data": {"bytes": size}} for size in (-1, 2**40, "3")),
            lambda shard: shard["raw_data"].pop("bytes"),
            {"raw_data": None},
            *({"samples": count} for count in (-1, 2**40, True)),
            {"format": "csv"},
            {"version": 1},
            *({"column_names": names} for names in ([], ["text"], None)),
            {"column_encodings": ["ndarray:int32:2,2"], "column_sizes": [16]},
            *(
                {"column_encodings": [kind]}
                for kind in ("pkl", "ndarray:float32", "ndarray:int32:99999999999999", "ndarray:int32:4")
            ),
            *({"column_sizes": sizes} for sizes in ([8], [-8], [None, None])),
            {"column_names": ["attention_mask", "tokens"], "column_encodings": ["ndarray:int32"] * 2, "column_sizes": [None] * 2},
        ],
        [
            *({"samples": count} for count in (5, 7, 1 << 24)),
            {"raw_data": {"bytes": 1000}},
            *({"column_encodings": [kind]} for kind in ("ndarray:int64", "ndarray:uint8", "bytes")),
            {"column_encodings": ["ndarray:int32:2"], "column_sizes": [8]},
            {"column_names": ["other", "tokens"], "column_encodings": ["str", "ndarray:int32"], "column_sizes": [None, None]},
        ],
        refused=[
            (
                [[1], [2]],
                {"length": 4},
                r"has 2 sequences, and samples of 4 tokens keep no bounds between them\. Set end_of_text",
            ),
            ([[1], [2]], {"length": 9, "end_of_text": 0, "drop_last": True}, "no split has as many as 9 tokens"),
        ],
        too_long=r"sequence 0 takes \d+ bytes, but shards end at 4294967295",
        again=[
            ([[1, 2, 3]], Mds(length=2), Mds(), [[1, 2], [3]]),
            *(
                (PACKED, Mds(length=4, end_of_text=0, drop_last=n == 2), Mds(), [[1, 2, 3, 0], [0, 4, 5, 0], [6, 0]][:n])
                for n in (3, 2)
            ),
        ],
        wrong=[
            {"length": 0},
            {"length": 2**30},
            {"size_limit": 0},
            {"size_limit": 2**32},
            {"size_limit": 2**30, "compression": "gz"},
            {"compression": "lzma"},
            {"end_of_text": -1},
            {"end_of_text": 2**31},
            {"drop_last": True},
            {"bytes_type": "float32"},
            {"column": ""},
        ],
    ),
    "litdata": Row(
        Litdata(size_limit=200),
        [
            (Litdata(), LARGEST),
            (Litdata(size_limit=1), LARGEST),
            (Litdata(end_of_text=LARGEST, size_limit=60), LARGEST - 1),
        ],
        [
            (
                Litdata(END),
                [[[1, 2], [3]], [[4]]],
                {
                    "train/chunk-0-0.bin": integers("I", 2, 16, 28, 36, 1, 2, 9, 3, 9),
                    "train/index.json": litdata_index(2, 5, 36),
                    "validation/chunk-0-0.bin": integers("I", 1, 12, 20, 4, 9),
                    "validation/index.json": litdata_index(1, 2, 20),
                },
            )
        ],
        ("train",),
        lies_inside=[
            (
                {
                    "index.json": json.dumps(litdata_index(2, 5, 36)).encode(),
                    "chunk-0-0.bin": integers("I", 2, *offsets, 1, 2, 9, 3, 9),
                },
                "",
            )
            for offsets in ((28, 36, 0), (16, 2**32 - 1, 36))
        ],
        index=[
            *(
                {"chunks": {0: chunk}}
                for chunk in (
                    {"filename": "../secret"},
                    {"filename": 3},
                    {"chunk_size": -1},
                    {"chunk_size": True},
                    {"dim": 2**40},
                    {"chunk_size": 0},
                )
            ),
            *(
                {"config": config}
                for config in (
                    {"data_format": ["no_header_tensor:1"]},
                    {"data_format": ["int", "str"]},
                    {"data_format": ["no_header_numpy:8"]},
                    {"item_loader": "PyTreeLoader"},
                    {"compression": "zstd", "compression_level": "batch"},
                    {"compression": "lz4"},
                    {"encryption": {"algorithm": "fernet"}},
                )
            ),
            lambda index: index["chunks"][0].pop("dim"),
            {"chunks": {}},
            lambda index: index.pop("config"),
        ],
        index_of_others=[
            {"chunks": {0: {"chunk_size": 5}}},
            {"config": {"data_format": ["no_header_tensor:17"]}},
            {"chunks": {0: {"chunk_size": 4, "dim": 308}}},  # as many bytes together
        ],
    ),
    "parquet": Row(
        Parquet(tokens_per_row_group=20),
        [
            (Parquet("ids"), LARGEST),
            (Parquet(tokens_per_file=7, tokens_per_row_group=3, compression="none"), LARGEST),
        ],
        too_long=TOO_LONG_A_LIST,
        wrong=[{"column": ""}, {"tokens_per_file": 0}, {"tokens_per_row_group": 2**31}, {"compression": "brotli"}],
    ),
    "arrow": Row(
        Arrow(tokens_per_batch=20),
        [(Arrow("ids"), LARGEST), (Arrow(tokens_per_file=7, tokens_per_batch=3), LARGEST)],
        index=LISTS_OF_FILES,
        too_long=TOO_LONG_A_LIST,
        wrong=[{"tokens_per_batch": -1}, {"tokens_per_file": 2**31}],
    ),
}
SEQUENCES = [[1, 2], [], [3, 4, 5], [70], [6] * 40, [], list(range(1, 60))]
_numbers = itertools.count()


def test_every_format_has_a_row_and_describes_itself():
    assert set(ROWS) == set(FORMATS)
    for name, entry in FORMATS.items():
        assert name == entry.name
        assert all((entry.summary, entry.keeps, entry.loses))
        assert entry.options(**dataclasses.asdict(entry.options())) == entry.options()


def each(*fields: str) -> list[Any]:
    """The cases that rows have of a kind, each with its format; of several kinds, with the kind, too."""
    return [
        pytest.param(name, *fields[1:] and [field], *(case if isinstance(case, tuple) else [case]), id=f"{name}-{field}-{i}")
        for name, row in ROWS.items()
        for field in fields
        for i, case in enumerate(getattr(row, field))
    ]


def ragged(largest: int) -> st.SearchStrategy[list[list[int]]]:
    """Sequences of random lengths, empty and long ones among them, with the smallest and the largest ids."""
    ids = st.one_of(st.integers(0, largest), st.sampled_from([0, 1, largest]))
    return st.lists(st.lists(ids, max_size=25), max_size=8)


def in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Everything is written and read in small pieces."""
    for name, size in {
        "contract.BATCH_TOKENS": 5,
        "contract.STARTS_AT_A_TIME": 3,
        "mds.BYTES_AT_A_TIME": 64,
        "mds.STARTS_AT_A_TIME": 3,
        "megatron.STARTS_AT_A_TIME": 3,
        "modalities.INDEX_BLOCK_BYTES": 9,
        "nanogpt.BATCH_TOKENS": 5,
        "olmo.LINES_AT_A_TIME": 3,
        "olmo.TEXT_AT_A_TIME": 24,
    }.items():
        patch.setattr(f"flat_tokens.formats.{name}", size)


@pytest.mark.parametrize(("name", "options", "largest"), each("exports"))
@examples(20)
@given(data=st.data())
def test_a_round_trip_gives_the_same_sequences(name, options, largest, data):
    """Empty ones, one token, the largest ids, and documents longer than a shard or a batch; read in pieces or not."""
    train, validation = data.draw(ragged(largest)), data.draw(ragged(largest))
    if not train and not validation:
        train = [[1]]
    path = f"memory://round-trip-{next(_numbers)}"
    export(name, splits_of(train, validation), path, options)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            in_pieces(patch)
        opened = open_any(path, name if name in UNRECOGNISED else None, options)
        assert opened.format == name
        assert {split: sequences_in(readable) for split, readable in opened.splits.items()} == {
            split: sequences for split, sequences in (("train", train), ("validation", validation)) if sequences
        }


@pytest.mark.parametrize(("name", "options", "largest"), each("exports"))
def test_what_was_written_is_listed_and_written_again_it_is_the_same(tmp_path, monkeypatch, name, options, largest):
    """Also in pieces."""
    splits = splits_of([[1, 2], [], [3, 4, 5], [largest], list(range(40)), *[[i] for i in range(9)], []], [[7]])
    objects = export(name, splits, tmp_path / "a", options)
    in_pieces(monkeypatch)
    assert export(name, splits, tmp_path / "b", options) == objects
    for root in ("a", "b"):
        assert {key for key, _ in Store.at(tmp_path / root).listing()} == {item.key for item in objects}
        assert [Store.at(tmp_path / root).now(item) for item in objects] == objects


def content(path: Path) -> Any:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else json.loads(data) if path.suffix == ".json" else data


@pytest.mark.parametrize(("name", "options", "splits", "files"), each("literals"))
def test_files_have_the_bytes_of_the_format_s_specification(tmp_path, name, options, splits, files):
    """The splits are found in the directory, and train by the names of its files."""
    export(name, splits_of(*splits), tmp_path, options)
    assert {path.relative_to(tmp_path).as_posix(): content(path) for path in tmp_path.rglob("*.*")} == files
    for place in ("", *ROWS[name].places):
        opened = open_any(tmp_path / place, name if name in UNRECOGNISED else None, options)
        assert opened.format == name
        assert [ids.tolist() for ids in map(opened.splits["train"].sequence, range(len(splits[0])))] == list(map(list, splits[0]))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("megatron", "datatrove", "olmo-core", "litdata")])
def test_a_file_alone_is_known_by_its_content(tmp_path, name):
    """Whatever it is called; but for one of tokens alone."""
    written = export(name, splits_of(SEQUENCES), tmp_path / "out", ROWS[name].small)
    (tmp_path / "out" / written[0].key).rename(tmp_path / "0001")
    if name == "nanogpt":
        with refusal("is in none of the formats that are known by their content"):
            open_any(tmp_path / "0001")
    else:
        assert open_any(tmp_path / "0001").format == name


@pytest.mark.parametrize(("name", "size", "width"), each("widths"))
def test_the_vocabulary_decides_the_width(tmp_path, name, size, width):
    options = FORMATS[name].options(vocabulary_size=size)
    sizes = [export(name, splits_of([[1] * n]), tmp_path / str(n), options)[0].size for n in (3, 4)]
    assert sizes[1] - sizes[0] == width
    assert sequences_in(open_any(tmp_path / "3", name).splits["train"]) == [[1] * 3]


def read_or_refusal(path: Path, name: str) -> list[list[int]] | str:
    try:
        return sequences_in(open_any(path, name, ROWS[name].small).splits["train"], 100)
    except (ValueError, FileNotFoundError, MemoryError) as error:
        return str(error)


def damaged(chooser: random.Random, whole: bytes) -> Iterator[tuple[bytes, bool]]:
    """Cuts of a file, and changes of some of its bytes; and whether it is a cut."""
    for size in [*range(0, len(whole), 1 + len(whole) // 20), len(whole) - 1]:
        yield whole[:size], True
    for _ in range(20):
        content = bytearray(whole)
        for _ in range(chooser.choice([1, 1, 3])):
            content[chooser.randrange(len(content))] = chooser.choice([0, 1, 127, 128, 255, chooser.randrange(256)])
        yield bytes(content), False


@pytest.mark.parametrize("name", ROWS)
def test_a_damaged_file_is_refused_by_name_or_gives_token_ids(tmp_path, name):
    """There is no other error. Streams may end after any of their batches or tokens. Indexes are damaged, too."""
    chooser = random.Random(name)
    for item in export(name, splits_of(SEQUENCES), tmp_path, ROWS[name].small):
        path = tmp_path / item.key
        whole = path.read_bytes()
        for content, is_cut in damaged(chooser, whole):
            path.write_bytes(content)
            found = read_or_refusal(tmp_path, name)
            if isinstance(found, str):
                assert str(tmp_path) in found
                continue
            tokens = [token for ids in found for token in ids]
            assert all(0 <= token < 2**31 for token in tokens)
            if is_cut and ".metadata" not in item.key:
                assert name in ("arrow", "nanogpt")
                assert [token for ids in SEQUENCES for token in ids][: len(tokens)] == tokens
        path.write_bytes(whole)
    assert read_or_refusal(tmp_path, name) == SEQUENCES


@pytest.mark.parametrize(("name", "field", "files", "complaint"), each("lies", "lies_inside"))
def test_a_file_that_lies_is_refused(tmp_path, name, field, files, complaint):
    """When it is opened, or when it is read and only then."""
    for key, data in files.items():
        (tmp_path / key).write_bytes(data)
    opened = open_any(tmp_path, name) if field == "lies_inside" else None
    with refusal(rf"{key}: .*{complaint}"):
        list((opened or open_any(tmp_path, name)).splits["train"].batches())


@pytest.mark.parametrize(("name", "field", "by"), each("index", "index_of_others"))
def test_an_index_that_lies_is_refused(tmp_path, name, field, by):
    """In a few words, by its name when it is opened, or by that of the file that it is not of when that is read."""
    first, *_ = [
        tmp_path / "d/out" / item.key for item in export(name, splits_of(EXAMPLE), tmp_path / "d/out", FORMATS[name].options())
    ]
    for secret in ("d/secret", "d/out/secret"):
        (tmp_path / secret).write_bytes(first.read_bytes())
    index = first.with_name("state.json" if name == "arrow" else "index.json")
    change_file(index, lambda value: change(value["shards"][0] if name == "mds" else value, by))
    if field == "index":
        with refusal(rf"(?s)\A{index}: .{{0,500}}\Z"):
            open_any(tmp_path / "d/out", name)
    else:
        with refusal(f"{first}: "):
            sequences_in(open_any(tmp_path / "d/out", name).splits["train"])


@pytest.mark.parametrize(
    ("name", "missing", "complaint"),
    [
        ("mds", "train/index.json", r"has no index.json, and is not an MDS shard itself\."),
        ("litdata", "train/index.json", r"has no index.json. An export writes it when it is finished."),
        ("datatrove", "train/00000_train.ds.index", r"00000_train\.ds: has no train/00000_train\.ds\.index next to it"),
    ],
)
def test_a_missing_file_is_named(tmp_path, name, missing, complaint):
    export(name, splits_of(SEQUENCES), tmp_path, ROWS[name].small)
    (tmp_path / missing).unlink()
    assert FORMATS[name].recognise(Files.at(tmp_path)) is False
    with refusal(complaint):
        sequences_in(open_any(tmp_path, name).splits["train"])


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("mds", "litdata")])
def test_a_directory_without_a_file_of_the_format_is_refused(tmp_path, name):
    for other in ("a.txt", "b.txt"):
        (tmp_path / other).write_text("abc")
    with refusal(f"{tmp_path}: none of its 2 files is a "):
        open_any(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        *(("mds", text, False) for text in ("no JSON", '{"shards": [{"format": "csv"}], "version": 2}')),
        ("mds", '{"version": 2, "shards": []}', True),
        ("mds", '{"shards":[{"format":"mds"}]}', True),
        *(("litdata", text, False) for text in ('{"chunks": []}', '{"chunks": [], "config": {"data_format": ["int"]}}')),
        ("litdata", json.dumps({**litdata_index(0, 0, 0), "chunks": []}), True),
    ],
)
def test_an_index_is_recognised_by_its_content(tmp_path, name, text, known):
    (tmp_path / "index.json").write_text(text)
    assert FORMATS[name].recognise(Files.at(tmp_path)) is known


@pytest.mark.parametrize(("name", "sequences", "options", "complaint"), each("refused"))
def test_what_a_format_cannot_hold_is_refused_before_a_file_is_there(tmp_path, name, sequences, options, complaint):
    with refusal(complaint):
        export(name, splits_of([], sequences), tmp_path / "out", FORMATS[name].options(**options))
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.too_long])
def test_a_sequence_that_is_too_long_is_refused_unread(name):
    class Long:  # a split of one sequence, of which the plan looks at the index alone
        store, seq_count, max_token_id, token_count = Store.at("memory://long"), 1, 1, 2**31
        seq_starts: Any = None

        @staticmethod
        def read(start: int, stop: int) -> Any:
            return np.array([0, 2**31], np.uint64)[start:stop]

    Long.seq_starts = Long
    with refusal(f"long: {ROWS[name].too_long}"):
        FORMATS[name].plan({"train": Long()}, ROWS[name].small)  # type: ignore[dict-item]


@pytest.mark.parametrize(("name", "files", "options", "sequences"), each("others"))
def test_files_of_others_are_read(
    tmp_path,
    monkeypatch,
    name,
    files,
    options,
    sequences,
):
    """In batches and pieces of any size."""
    for key, data in files.items():
        (tmp_path / key).write_bytes(data)
    for max_tokens in (1, 2, 3, 100):
        opened = open_any(tmp_path, name if name in UNRECOGNISED else None, options)
        assert opened.format == name
        assert sequences_in(opened.splits["train"], max_tokens) == sequences
        in_pieces(monkeypatch)


@pytest.mark.parametrize(("name", "sequences", "options", "others", "found"), each("again"))
def test_what_is_read_by_other_options(tmp_path, name, sequences, options, others, found):
    export(name, splits_of(sequences), tmp_path, options)
    assert sequences_in(open_any(tmp_path, name, others).splits["train"]) == found


@pytest.mark.parametrize(("name", "values"), each("wrong"))
def test_wrong_options_are_named(name, values):
    with refusal(f"{next(iter(values))} is "):
        FORMATS[name].options(**values)


@pytest.mark.parametrize("name", FORMATS)
def test_a_dataset_without_documents_comes_back(name, tmp_path, tool):
    """The record of the export says that there is nothing, and in which format. So does it where one split is asked for."""
    flat_tokens.write_dataset(tmp_path / "made", [])
    for splits in (SPLITS, ("train",)):
        out = tmp_path / f"{len(splits)}"
        write(export_of(tmp_path / "made", name, {}, splits), str(out))
        opened = open_any(out)
        assert opened.format == name
        assert {split: (readable.seq_count, readable.token_count) for split, readable in opened.splits.items()} == dict.fromkeys(
            splits, (0, 0)
        )
        for format in (None, name):
            dataset = import_dataset(out, tmp_path / f"{len(splits)} {format}", format)
            assert (dataset.train.seq_count, dataset.validation.seq_count) == (0, 0)
            assert dataset.manifest["provenance"]["imported"]["format"] == name
        tool.out("stats", out)
        tool.out("verify", out, "--full")


def test_what_is_no_record_of_an_empty_export_is_passed_over(tmp_path):
    for content in ("{", "{}", "[]", '{"parts": 0}', '{"parts": 0, "format": "none", "splits": []}', '{"parts": 1}'):
        (tmp_path / ".export").mkdir(exist_ok=True)
        (tmp_path / ".export/export.json").write_text(content)
        with refusal("in none of the formats that are known by their content"):
            open_any(tmp_path)
