"""Modalities: the raw index of a JSONL file (``.idx``), and packed data (``.pbin``).

A ``.pbin`` is a header, the tokens, and a pickled list of each document's offset and length in bytes. There have been
four layouts of it, which do not say so themselves:

==========  ============================================  ==========  ===============  ============================
generation  header                                        byte order  token width      offsets count from
==========  ============================================  ==========  ===============  ============================
0           length of the tokens in bytes (8 bytes)       big         4                the file's start, so from 8
1           the length (8), width of a token (4)          big         1, 2 or 4        the file's start, so from 12
2           the length (8), width of a token (4)          little      1, 2 or 4        the file's start, so from 12
3, today's  the length (8), width of a token (4)          little      1, 2 or 4        the tokens' start, so from 0
==========  ============================================  ==========  ===============  ============================

Where Modalities has merged files (``merge_packed_data``), the offsets of each file but the first are 12 too low for every file
before it. Its own readers then look for documents at wrong places. Here such documents are found by their lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, DType, Int64s, UInt64s
from flat_tokens.formats import contract
from flat_tokens.formats.contract import (
    Closing,
    ExportFile,
    Format,
    IndexedDocuments,
    IndexedFile,
    Splits,
    StoredItems,
)
from flat_tokens.formats.pickled import read_pairs, write_pairs
from flat_tokens.stores.store import Store, StoredObject

INDEX_BLOCK_BYTES = 1 << 18
PAIRS_AT_A_TIME = 1 << 16
MAX_FILE_BYTES = 1 << 61
Generation = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Modalities(contract.DocumentOptions):
    """How ``.pbin`` files are written and read.

    ``end_of_text``: closes every document on the way out, and is removed from its end on the way in; None leaves the
    tokens as they are. ``closing``: ``unless_present`` adds none if a sequence ends with it already, as Modalities does
    it, so that such a sequence comes back without it; ``always`` makes the way back exact.
    ``vocabulary_size``: decides the width of a token; without it, the highest id there is does.
    ``tokens_per_file``: several files of about this many tokens a split. ``ignore_offsets``: believe the lengths alone of an
    index whose offsets are wrong; files that Modalities has merged do not need it. ``max_index_bytes``: a larger index is
    not read.
    """

    closing: Closing = "unless_present"
    generation: Generation = 3
    ignore_offsets: bool = False
    max_index_bytes: int = 512 << 20


def token_dtype(splits: Splits, options: Modalities) -> DType:
    """The type of the tokens in the file. ValueError if an id is not in the vocabulary."""
    size = options.size(splits)
    width = 4 if options.generation == 0 else 1 if size <= 1 << 8 else 2 if size <= 1 << 16 else 4
    return np.dtype(f"{'>' if options.generation < 2 else '<'}u{width}")


def plan(splits: Splits, options: Modalities) -> list[ExportFile]:
    token_dtype(splits, options)
    return contract.plan_files(splits, options.tokens_per_file, "{split}{number}.pbin")


def write(splits: Splits, file: ExportFile, store: Store, options: Modalities) -> list[StoredObject]:
    dtype = token_dtype(splits, options)
    documents = IndexedDocuments(splits[file.split], file.start, file.stop, options.end_of_text, options.closing)
    order: Literal["big", "little"] = "big" if options.generation < 2 else "little"
    header = (documents.token_count * dtype.itemsize).to_bytes(8, order)
    if options.generation > 0:
        header += dtype.itemsize.to_bytes(4, order)
    with store.create(file.key) as writer:
        writer.write(header)
        documents.write_tokens(writer, dtype)
        base = 0 if options.generation == 3 else len(header)
        pairs = (
            np.stack([starts[some], ends[some] - starts[some]], 1)
            for starts, ends in documents.bounds(base, dtype.itemsize)
            for some in (slice(at, at + PAIRS_AT_A_TIME) for at in range(0, len(starts), PAIRS_AT_A_TIME))
        )
        for piece in write_pairs(pairs, file.stop - file.start):
            writer.write(piece)
    return [writer.stored]


class Header(NamedTuple):
    """The layout of a ``.pbin`` file, from its first bytes."""

    tokens: StoredItems
    bases: tuple[int, ...]
    """Possible offsets of the first document."""
    lag: int
    """How much too low the offsets are after each border of files that Modalities has merged; 0 if it has not."""
    index_start: int
    index_stop: int


LAYOUTS: tuple[tuple[Literal["little", "big"], int, tuple[int, ...], int], ...] = (
    ("little", 12, (0, 12), 12),
    ("big", 12, (12,), 0),
    ("big", 8, (8,), 0),
)
"""Byte order, bytes of header, first offsets, and the lag of merged files: of generations 3 and 2, of 1, of 0."""


def headers(store: Store, key: str) -> list[Header]:
    """Possible layouts of a file: those in which the beginning of a pickle follows the tokens."""
    size = store.size(key)
    first = store.read_range(key, 0, min(12, size))
    if len(first) < 12 or size > MAX_FILE_BYTES or store.read_range(key, size - 1, size) != b".":
        return []
    found = []
    for order, offset, bases, lag in LAYOUTS:
        length = int.from_bytes(first[:8], order)
        width = int.from_bytes(first[8:12], order) if offset == 12 else 4
        start = offset + length
        if start + 2 > size or width not in (1, 2, 4) or length % width:
            continue
        proto = store.read_range(key, start, start + 2)
        if proto[0] == 0x80 and 2 <= proto[1] <= 5:
            dtype = np.dtype(f"{'>' if order == 'big' else '<'}u{width}")
            found.append(Header(StoredItems(store, key, dtype, offset, length // width), bases, lag, start, size))
    return found


def open_pbin(store: Store, key: str, options: Modalities) -> IndexedFile:
    """Open one ``.pbin`` file; its index is read and checked as a whole. ValueError, naming it, if it has none."""
    found = headers(store, key)
    if not found:
        raise ValueError(
            f"{store.path(key)}: is not a whole .pbin file: by none of the four layouts an index stands after its tokens. "
            "If it should be one, it is truncated: fetch or write it again."
        )
    refused = []
    for header in found:
        try:
            seq_starts = read_index(header, options)
            break
        except ValueError as error:
            refused.append(error)
    else:
        raise refused[0]  # for the likeliest layout
    return IndexedFile(header.tokens, len(seq_starts) - 1, lambda i, j: seq_starts[i : j + 1], options.end_of_text)


def read_index(header: Header, options: Modalities) -> UInt64s:
    """Starts of the documents, in tokens, then the end of the last one: uint64[document_count + 1]. Checked."""
    tokens = header.tokens
    width, length = tokens.dtype.itemsize, tokens.length * tokens.dtype.itemsize
    seq_starts = array("Q")  # grows in place
    # The offset of the first document; bytes of the documents so far; by the last one's offset: its end, and how much too low.
    base, end, expected_end, lag = 0 if options.ignore_offsets else None, 0, 0, 0
    for pairs in index_pairs(header, options.max_index_bytes):
        offsets, sizes = pairs[:, 0], pairs[:, 1]
        wrong = (sizes < 0) | (sizes > length) | (sizes % width != 0)
        believed = np.where(wrong, 0, sizes)
        ends = end + np.cumsum(believed)
        starts = ends - believed
        wrong |= ends > length  # at the first such document the sum cannot have overflowed
        if base is None:
            expected_end = base = int(offsets[0])
            if base not in header.bases:
                raise ValueError(f"{tokens.path}: its index begins with offset {base} instead of {header.bases[0]}")
        if options.ignore_offsets:
            offsets = starts
        lags = base + starts - offsets
        wrong |= ~_merged(lags, lag, header.lag)
        if wrong.any():
            k = int(np.flatnonzero(wrong)[0])
            before = int(offsets[k - 1] + sizes[k - 1]) if k else expected_end
            raise ValueError(
                f"{tokens.path}: its index has a document of {sizes[k]} bytes at offset {offsets[k]}. The one before it ends at "
                f"{before}, and the tokens, of {width} bytes each, at {base + length}. Files that were joined have wrong "
                "offsets at times: set ignore_offsets to go by the lengths alone."
            )
        seq_starts.frombytes((starts // width).astype(np.uint64).tobytes())
        end, expected_end, lag = int(ends[-1]), int(offsets[-1] + sizes[-1]), int(lags[-1])
    if end != length:
        raise ValueError(f"{tokens.path}: its index ends after {end} bytes of tokens, but there are {length}")
    seq_starts.append(end // width)
    return np.frombuffer(seq_starts, np.uint64)


def _merged(lags: Int64s, before: int, lag: int) -> Bools:
    """Whether offsets may be so much too low after one that is *before* too low, in a file that Modalities has merged.

    It has forgotten the *lag* of each border of files. In a file merged from merged ones it has forgotten some of them only.
    """
    allowed: Bools = lags == 0
    if lag:
        in_first_file = np.maximum.accumulate(np.append(before, lags))[1:] == 0
        allowed = (allowed & in_first_file) | ((lags > 0) & (lags % lag == 0) & (np.diff(lags, prepend=before) <= lag))
    return allowed


def index_pairs(header: Header, max_bytes: int) -> Iterator[Int64s]:
    """The pairs of the pickle after the tokens: int64[n, 2] arrays, none empty. Nothing in it is executed."""
    tokens, start, stop = header.tokens, header.index_start, header.index_stop
    if stop - start > max_bytes:
        raise ValueError(f"{tokens.path}: its index has {stop - start} bytes, but max_index_bytes is {max_bytes}. Set it higher.")
    places = range(start, stop, INDEX_BLOCK_BYTES)
    blocks = (tokens.store.read_range(tokens.key, at, min(at + INDEX_BLOCK_BYTES, stop)) for at in places)
    try:
        yield from (pairs for pairs in read_pairs(blocks) if len(pairs))
    except ValueError as error:
        raise ValueError(f"{tokens.path}: its index {error}") from error


MODALITIES = Format(
    name="modalities",
    summary="Modalities packed data (.pbin), in all four layouts there have been",
    keeps="sequences, empty ones too; ids up to 2**31 - 1",
    loses="an end-of-text token that ends a sequence already, unless closing is always",
    options=Modalities,
    recognise=lambda files: any(headers(files.store, key) for key in files.keys),
    open=lambda files, options: contract.by_split(files, contract.members(files, headers, ".pbin"), open_pbin, options),
    plan=plan,
    write=write,
)
