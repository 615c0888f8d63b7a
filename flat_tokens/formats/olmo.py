"""OLMo-core's token files, as the Dolma toolkit writes them: tokens in a ``.npy``, each document's bounds in a ``.csv.gz``.

The ``.npy`` has no header of numpy's: it is the tokens and nothing else. A line of the ``.csv.gz`` is the first token of a
document and the one after its last, which is its end-of-text token; Dolma's lines go on with other columns. The width of a
token follows from the last document's end and the size of the tokens.

OLMo-core's label mask is a file of a byte a token, 1 where the token counts for the loss, else 0. Its name is free: here
it ends with ``.label_mask``; those that begin with ``labels_mask`` where the tokens' begin with ``token_ids`` are read as well.
"""

from __future__ import annotations

import csv
import io
import posixpath
import re
import reprlib
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flat_tokens.annotations import UInt64s
from flat_tokens.formats import contract
from flat_tokens.formats.contract import (
    ExportFile,
    Files,
    Format,
    IndexedDocuments,
    IndexedFile,
    Splits,
    StoredItems,
    mask_beside,
)
from flat_tokens.formats.nanogpt import NPY_MAGIC
from flat_tokens.manifest import dataset_of, manifest_of
from flat_tokens.rows.documents import sources_of, stored_fact
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store, StoredObject

TOKENS, METADATA, MASK = ".npy", ".csv.gz", ".label_mask"
IDS, LABELS = "token_ids", "labels_mask"
LINES_AT_A_TIME = 1 << 16
TEXT_AT_A_TIME = 1 << 20
ALWAYS_TEXT, TEXT_A_BYTE = 64 << 20, 64
"""Bytes of text that metadata may have anyway, and for each byte of tokens: documents may be empty, but not without end."""
WIDTHS = (2, 4, 1, 8)
BOUNDS = re.compile(rb"(?:[0-9]{1,18},[0-9]{1,18}\n)*")
MORE_COLUMNS = re.compile(rb"^([0-9]{1,18},[0-9]{1,18}),[^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Olmo(contract.DocumentOptions):
    """How token files of OLMo-core are written and read.

    ``end_of_text``: closes every document on the way out, and is removed from its end on the way in; None leaves the
    tokens as they are, but OLMo-core finds documents by it. ``vocabulary_size``: up to 65,536 ids have two bytes, else four;
    without it, the highest id there is decides. ``tokens_per_file``: several files of about this many tokens a split.
    ``provenance``: lines of the metadata go on as Dolma's: the document's key, its source file's name, its row there, from 1.
    """

    provenance: bool = False


def plan(splits: Splits, options: Olmo) -> list[ExportFile]:
    options.narrow_dtype(splits)
    return contract.plan_files(splits, options.tokens_per_file, "{split}/part-{i:05d}.npy")


def write(splits: Splits, file: ExportFile, store: Store, options: Olmo) -> list[StoredObject]:
    documents = IndexedDocuments.of(splits, file, options)
    with store.create(file.key) as tokens_writer:
        documents.write_tokens(tokens_writer, options.narrow_dtype(splits))
    done = 0
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)  # gzip, without a time in its header
    with store.create(file.key.removesuffix(TOKENS) + METADATA) as writer:
        for starts, ends in documents.bounds():
            for at in range(0, len(starts), LINES_AT_A_TIME):
                some = slice(at, at + LINES_AT_A_TIME)
                bounds = np.stack([starts[some], ends[some]], 1)
                lines = (b"%d,%d\n" * len(bounds)) % tuple(bounds.ravel().tolist())
                if options.provenance:
                    lines = _with_provenance(splits[file.split], lines, file.start + done)
                writer.write(packer.compress(lines))
                done += len(bounds)
        writer.write(packer.flush())
    masks = contract.write_mask(store, file.key.removesuffix(TOKENS) + MASK, splits[file.split], documents.masks())
    return [tokens_writer.stored, writer.stored, *masks]


def _with_provenance(split: FlatTokens, lines: bytes, first: int) -> bytes:
    """The lines with each document's key, source file and row. ValueError if the dataset does not record them."""
    bounds = lines.decode().splitlines()
    dataset = dataset_of(split.store)
    try:
        arrays = [stored_fact(split, fact) for fact in ("key", "file", "row")]
    except FileNotFoundError as error:
        raise ValueError(f"{dataset.url}: has no record of its documents. Export it without provenance.") from error
    facts = [array.read(first, first + len(bounds)).tolist() for array in arrays]
    names = [file for _, files in sources_of(manifest_of(dataset)) for file in files]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        (*bound.split(","), f"{key:016x}", names[file], row + 1) for bound, key, file, row in zip(bounds, *facts, strict=True)
    )
    return text.getvalue().encode()


def open_file(store: Store, key: str, options: Olmo) -> IndexedFile:
    """Open one file of tokens with its metadata, by the key of either. ValueError, naming the file, if they do not fit."""
    key = key.removesuffix(METADATA).removesuffix(TOKENS)
    tokens_key, metadata = key + TOKENS, key + METADATA
    if not store.exists(metadata):
        raise ValueError(f"{store.path(tokens_key)}: has no {metadata} next to it. Without it, where documents end is not known.")
    size = store.size(tokens_key)
    seq_starts = _bounds(store, metadata, size)
    end = int(seq_starts[-1])
    width = next((width for width in WIDTHS if end * width == size), None)
    if width is None:
        raise ValueError(
            f"{store.path(metadata)}: its last document ends at token {end}, but the tokens have {size} bytes, which is no such "
            "number of 1, 2, 4 or 8 bytes each. The two are not of one dataset, or one of them is truncated."
        )
    tokens = StoredItems(store, tokens_key, np.dtype(f"<u{width}"), 0, end)
    directory, name = posixpath.split(key)
    other = posixpath.join(directory, name.replace(IDS, LABELS, 1) + TOKENS)
    mask = mask_beside(store, other if name.startswith(IDS) and store.exists(other) else key + MASK, end)
    return IndexedFile(tokens, len(seq_starts) - 1, lambda i, j: seq_starts[i : j + 1], options.end_of_text, mask)


def tokens_files(files: Files) -> list[str]:
    """The files of tokens, which label masks are not."""
    masks = {key for key in files.keys if posixpath.basename(key).startswith(LABELS)}
    rest = tuple(key for key in files.keys if key not in masks and not key.endswith(MASK))
    return contract.members(files._replace(keys=rest) if rest and len(files.keys) > 1 else files, has_metadata, TOKENS)


def _bounds(store: Store, key: str, most: int) -> UInt64s:
    """The first token of each document, then the end of the last one: uint64[documents + 1]. ValueError if they are not one
    after the other, from 0 to at most *most*.
    """
    found, end = array("Q", [0]), 0
    for lines in _text(store, key, ALWAYS_TEXT + TEXT_A_BYTE * most):
        if BOUNDS.fullmatch(lines) is None:
            lines = MORE_COLUMNS.sub(rb"\1", lines)
        if (matched := BOUNDS.match(lines)) is None or matched.end() != len(lines):
            wrong = lines[matched.end() if matched else 0 :].partition(b"\n")[0]
            raise ValueError(f"{store.path(key)}: has the line {reprlib.repr(wrong)}, but a line begins with two numbers")
        numbers = np.fromstring(lines[:-1].replace(b"\n", b","), np.int64, sep=",").reshape(-1, 2)
        starts, ends = numbers[:, 0], numbers[:, 1]
        wrong_at = np.flatnonzero((starts != np.append(end, ends[:-1])) | (ends < starts) | (ends > most))
        if len(wrong_at):
            start, stop = numbers[wrong_at[0]].tolist()
            raise ValueError(
                f"{store.path(key)}: has a document from token {start} to {stop}, but documents are in order, and "
                f"the tokens have {most} bytes"
            )
        found.frombytes(ends.astype(np.uint64).tobytes())
        end = int(ends[-1])
    return np.frombuffer(found, np.uint64)


def _text(store: Store, key: str, limit: int) -> Iterator[bytes]:
    """The lines of a gzipped text, some at a time, each whole. ValueError if it is damaged, or longer than *limit* bytes."""
    unpacker, rest, size = zlib.decompressobj(31), b"", 0
    try:
        for block in store.blocks(key):
            while block and not unpacker.eof:
                text = unpacker.decompress(block, TEXT_AT_A_TIME)
                block, size = unpacker.unconsumed_tail, size + len(text)
                if size > limit:
                    raise ValueError(f"has more than {limit} bytes of text")
                whole, newline, rest = (rest + text).rpartition(b"\n")
                if len(rest) > TEXT_AT_A_TIME:
                    raise ValueError("has a line that is not a line of two numbers")
                if newline:
                    yield whole + newline
    except (zlib.error, ValueError) as error:
        raise ValueError(f"{store.path(key)}: cannot be read as gzipped lines ({error})") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"{store.path(key)}: is truncated, or continues after its end. Fetch or write it again.")
    if rest:
        yield rest + b"\n"


def has_metadata(store: Store, key: str) -> bool:
    """Whether a file is tokens without a header, with metadata next to them, or the metadata of such."""
    stem = key.removesuffix(METADATA).removesuffix(TOKENS)
    if stem == key or not store.exists(stem + TOKENS) or not store.exists(stem + METADATA):
        return False
    return store.read_range(stem + TOKENS, 0, len(NPY_MAGIC)) != NPY_MAGIC


OLMO = Format(
    name="olmo-core",
    summary="OLMo-core's token files, as of the Dolma toolkit (.npy without a header, and .csv.gz)",
    keeps="sequences, empty ones too; ids up to 2**31 - 1",
    loses="nothing",
    options=Olmo,
    recognise=lambda files: any(has_metadata(files.store, key) for key in files.keys),
    open=lambda files, options: contract.by_split(files, tokens_files(files), open_file, options),
    plan=plan,
    write=write,
    keeps_loss_mask=True,
)
