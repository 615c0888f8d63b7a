"""Megatron-LM's indexed dataset: tokens in a ``.bin``, and a ``.idx`` of its sequences and documents.

The index is ``MMIDIDX``, two zero bytes, version (u64, 1), token type (u8), number of sequences (u64), number of documents
and one (u64), then the sequences' lengths in tokens (i32), their positions in bytes (i64), and which sequences begin a
document (i64, and the number of sequences at last). Multimodal ones go on with a mode for each sequence (i8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flat_tokens.annotations import UInt64s
from flat_tokens.formats import contract
from flat_tokens.formats.contract import ExportFile, Format, IndexedDocuments, IndexedFile, Splits, StoredItems
from flat_tokens.rows.split import STARTS_AT_A_TIME
from flat_tokens.stores.store import Store, StoredObject

HEADER = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SMALL_VOCABULARY = 65_500
MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True)
class Megatron(contract.DocumentOptions):
    """How indexed datasets are written and read.

    ``end_of_text``: closes every document on the way out, as ``--append-eod`` does, and is removed from its end on the way
    in; None leaves the tokens as they are. ``vocabulary_size``: below 65,500 tokens have two bytes, else four; without it,
    the highest id there is decides. ``tokens_per_file``: several files of about this many tokens a split.
    ``sequence``: what becomes a sequence on the way in; a document of a foreign dataset may have several sequences.
    """

    sequence: Literal["document", "sequence"] = "document"


def token_type(splits: Splits, options: Megatron) -> int:
    """The code of the tokens' type in the index."""
    return 8 if options.size(splits) < SMALL_VOCABULARY else 4


def plan(splits: Splits, options: Megatron) -> list[ExportFile]:
    token_type(splits, options)
    return contract.plan_files(splits, options.tokens_per_file, "{split}{number}.bin")


def write(splits: Splits, file: ExportFile, store: Store, options: Megatron) -> list[StoredObject]:
    """The tokens, then their index, which makes them a dataset."""
    code = token_type(splits, options)
    dtype = np.dtype(DTYPES[code])
    documents = IndexedDocuments.of(splits, file, options)
    if documents.token_count > MAX_LENGTH:  # perhaps in one document
        first = file.start
        for lengths in documents.lengths():
            if len(lengths) and (longest := lengths.max()) > MAX_LENGTH:
                where = f"{documents.split.store.url}: sequence {first + int(lengths.argmax())}"
                raise ValueError(f"{where} has {longest} tokens, but the format holds up to {MAX_LENGTH}")
            first += len(lengths)
    with store.create(file.key) as tokens_writer:
        documents.write_tokens(tokens_writer, dtype)
    count = file.stop - file.start
    with store.create(f"{file.key.removesuffix('.bin')}.idx") as writer:
        writer.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        for lengths in documents.lengths():
            writer.write(lengths.astype("<i4"))
        for starts, _ in documents.bounds(0, dtype.itemsize):
            writer.write(starts.astype("<i8"))
        for start in range(0, count + 1, STARTS_AT_A_TIME):
            writer.write(np.arange(start, min(start + STARTS_AT_A_TIME, count + 1), dtype="<i8"))
    return [tokens_writer.stored, writer.stored]


@dataclass(frozen=True)
class MegatronIndex:
    """The arrays of an index, read in ranges, and its tokens."""

    tokens: StoredItems
    lengths: StoredItems
    pointers: StoredItems
    documents: StoredItems

    def sequence_starts(self, first: int, last: int) -> UInt64s:
        """Starts of the sequences, in tokens, then the end of the last one: uint64[last - first + 1]. Checked."""
        lengths = self.lengths.read(first, last).astype(np.int64)
        pointers = self.pointers.read(first, min(last + 1, self.pointers.length))
        size = self.tokens.dtype.itemsize
        begins = pointers[: last - first]
        end = self.tokens.length * size if last == self.pointers.length else int(pointers[-1])
        ends = begins + lengths * size
        # Checked in this order so that an overflow does not matter: bounds first, then ends.
        wrong = (lengths < 0) | (begins < 0) | (begins > self.tokens.length * size) | (begins % size != 0)
        wrong |= ends != np.append(begins, end)[1:]
        if wrong.any():
            k = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{self.lengths.path}: sequence {first + k} has {lengths[k]} tokens of {size} bytes from byte {begins[k]}, but "
                f"sequences are in order, and the tokens have {self.tokens.length * size} bytes"
            )
        return (np.append(begins, end) // size).astype(np.uint64)

    def document_starts(self, first: int, last: int) -> UInt64s:
        """Starts of the documents, in tokens, then the end of the last one: uint64[last - first + 1]. Each has several
        sequences. Checked.
        """
        sequences = self.documents.read(first, last + 1)
        if (sequences[1:] < sequences[:-1]).any() or sequences[0] < 0 or sequences[-1] > self.pointers.length:
            raise ValueError(
                f"{self.lengths.path}: its documents {first} to {last} do not begin at increasing ones of its "
                f"{self.pointers.length} sequences"
            )
        starts = np.empty(last - first + 1, np.uint64)
        for at in range(int(sequences[0]), int(sequences[-1]) + 1, STARTS_AT_A_TIME):
            stop = min(at + STARTS_AT_A_TIME, self.pointers.length)
            low, high = np.searchsorted(sequences, [at, at + STARTS_AT_A_TIME])
            starts[low:high] = self.sequence_starts(at, stop)[sequences[low:high] - at]
        return starts


def open_index(store: Store, key: str) -> MegatronIndex:
    """The index *key* and its tokens; their sizes and ends are checked. ValueError, naming the file, if they are wrong."""
    path, size = store.path(key), store.size(key)
    header = store.read_range(key, 0, HEADER.size)
    if not header.startswith(MAGIC) or len(header) < HEADER.size:
        raise ValueError(f"{path}: is not the index of a Megatron-LM dataset, or is truncated")
    _, version, code, count, documents = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise ValueError(f"{path}: has version {version} and token type {code}; version 1 and types 1 to 8 are read")
    expected = HEADER.size + 12 * count + 8 * documents
    if documents < 1 or size not in (expected, expected + count):  # one more byte for each sequence if they have modes
        raise ValueError(f"{path}: has {size} bytes, but {count} sequences and {documents} document entries take {expected}")
    tokens_key = f"{key.removesuffix('.idx')}.bin"
    tokens_size, dtype = store.size(tokens_key), np.dtype(DTYPES[code])
    index = MegatronIndex(
        StoredItems(store, tokens_key, dtype, 0, tokens_size // dtype.itemsize),
        StoredItems(store, key, np.dtype("<i4"), HEADER.size, count),
        StoredItems(store, key, np.dtype("<i8"), HEADER.size + 4 * count, count),
        StoredItems(store, key, np.dtype("<i8"), HEADER.size + 12 * count, documents),
    )
    begin = int(index.pointers.read(0, 1)[0]) if count else 0
    end = begin
    if count:
        end = int(index.pointers.read(count - 1, count)[0]) + int(index.lengths.read(count - 1, count)[0]) * dtype.itemsize
    if begin != 0 or end != tokens_size:
        raise ValueError(
            f"{path}: its sequences are bytes {begin} to {end}, but {store.path(tokens_key)} has {tokens_size}. "
            "The two are not of one dataset, or one of them is truncated."
        )
    return index


def open_dataset(store: Store, key: str, options: Megatron) -> IndexedFile:
    """Open the indexed dataset of one ``.bin`` and ``.idx``, by the key of either."""
    index = open_index(store, f"{key.removesuffix('.bin').removesuffix('.idx')}.idx")
    if options.sequence == "sequence":
        return IndexedFile(index.tokens, index.pointers.length, index.sequence_starts, options.end_of_text)
    documents = index.documents
    first, last = int(documents.read(0, 1)[0]), int(documents.read(documents.length - 1, documents.length)[0])
    if first != 0 or last != index.pointers.length:
        raise ValueError(
            f"{index.lengths.path}: its documents are of sequences {first} to {last}, but it has {index.pointers.length}. "
            "Set sequence='sequence' to read it without documents."
        )
    return IndexedFile(index.tokens, documents.length - 1, index.document_starts, options.end_of_text)


def has_index(store: Store, key: str) -> bool:
    """Whether a file is an index, or the tokens next to one."""
    if key.endswith(".bin"):
        key = f"{key.removesuffix('.bin')}.idx"
        if not store.exists(key):
            return False
    return store.read_range(key, 0, len(MAGIC)) == MAGIC


MEGATRON = Format(
    name="megatron",
    summary="Megatron-LM indexed dataset (.bin and .idx), a document a sequence",
    keeps="sequences, empty ones too; ids up to 2**31 - 1",
    loses="nothing; sequences of more than 2**31 - 1 tokens are refused",
    options=Megatron,
    recognise=lambda files: any(has_index(files.store, key) for key in files.keys if key.endswith((".bin", ".idx"))),
    open=lambda files, options: contract.by_split(files, contract.members(files, has_index, ".idx"), open_dataset, options),
    plan=plan,
    write=write,
)
