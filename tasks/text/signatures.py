"""Signatures of texts: BYTES bytes each, from which the similarity of any two texts is estimated.

The shingles of a text are its runs of a few words, as ``flat_tokens.steps.words`` has them; of a shorter text all of its words.
The similarity of two texts is that of their sets of shingles: those of both, as a share of those of either (Jaccard).

MinHash of one permutation: a hash throws each shingle into one of BYTES bins, and of each bin the least hash is kept, in seven
bits. A bin that is empty borrows from the next one that is not, so that every group of bytes can be looked up as a whole, and its
eighth bit says so. An estimate counts a bin if one of the two texts has a shingle in it. It is off by about 0.025 in a long
text, and by less in a short one, whose bins hold nearly all of its shingles.

Digests of texts: equal digests, equal texts.

All is done on Arrow's buffers: no Python object a document or a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.annotations import Floats, Int64s, UInt8s, UInt32s, UInt64s
from flat_tokens.keys import mix
from flat_tokens.steps.words import Words, run_hashes, words_of
from flat_tokens.text.rows import text_buffers

EDITION = 2
"""Raised when the same text would get another signature."""
BYTES = 256
NUMBERS = BYTES // 8
"""A signature as uint64. Each of these has bins that are far from each other."""
BORROWED = 0x80
"""The bit of a byte that says that no shingle of the text is in its bin."""
NO_SHINGLE = np.uint64(0x8080808080808080)
"""All numbers of the signature of a text that has no words."""

BLOCK_BYTES = 1 << 17
"""Text hashed at a time: the temporaries stay in the processor's cache."""
BLOCK_DOCUMENTS = 1 << 10
EMPTY = np.uint32(0xFFFFFFFF)
STEP = 37
"""Change of a borrowed byte for each bin between, so that bins which borrow from the same one differ."""


def signatures(texts: pa.LargeStringArray, kind: bytes, words: int) -> UInt64s:
    """The signature of each text: uint64[n, NUMBERS]. *words*: of a shingle. *kind*: 32 bytes; texts of two kinds have nothing in
    common.
    """
    data, offsets = text_buffers(texts)
    seed = np.frombuffer(kind, "<u8").sum(dtype=np.uint64)
    found = np.empty((len(texts), NUMBERS), np.uint64)
    first = 0
    while first < len(texts):
        # Documents of about one block; a longer one is hashed piece by piece.
        last = int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, "right")) - 1
        last = min(max(last, first + 1), first + BLOCK_DOCUMENTS)
        bins = np.full((last - first, BYTES), EMPTY, np.uint32)
        if offsets[last] - offsets[first] <= BLOCK_BYTES:
            _throw(bins, *_shingles(words_of(data, offsets[first : last + 1]), words), seed)
        else:
            for shingles in _long(data[offsets[first] : offsets[last]], words):
                _throw(bins, shingles, np.zeros(len(shingles), np.int64), seed)
        found[first:last] = _numbers(bins)
        first = last
    return found


def _shingles(of: Words, words: int) -> tuple[UInt64s, Int64s]:
    """The shingles of documents: uint64[s], and the document of each: int64[s]."""
    counts = np.diff(of.bounds)
    document = np.repeat(np.arange(len(counts)), counts)
    shingles = run_hashes(of.hashes, words)
    whole = document[: len(shingles)] == document[len(document) - len(shingles) :]
    found, documents = [shingles[whole]], [document[: len(shingles)][whole]]
    for count in range(1, words):
        short = np.flatnonzero(counts == count)
        if len(short):
            each = of.hashes[(of.bounds[short, None] + np.arange(count)).reshape(-1)]
            found.append(run_hashes(each, count)[::count])
            documents.append(short)
    return np.concatenate(found), np.concatenate(documents)


def _long(text: UInt8s, words: int) -> Iterator[UInt64s]:
    """The shingles of a long document, some at a time. A word that fills a piece is cut."""
    hashes, has_any, begin = np.empty(0, np.uint64), False, 0
    while begin < len(text):
        stop = min(begin + BLOCK_BYTES, len(text))
        while stop < len(text) and text[stop] & 0xC0 == 0x80:
            stop -= 1  # a whole character
        piece = words_of(text, np.array([begin, stop], np.int64))
        some, following = piece.hashes, stop
        if stop < len(text) and len(some) > 1:  # the last one may go on
            some, following = some[:-1], begin + int(piece.in_texts(piece.starts[-1:])[0])
        hashes, begin = np.concatenate([hashes, some]), following
        if len(hashes) >= words:
            yield run_hashes(hashes, words)
            has_any, hashes = True, hashes[len(hashes) - words + 1 :]
    if not has_any and len(hashes):
        yield run_hashes(hashes, len(hashes))


def _throw(bins: UInt32s, shingles: UInt64s, document: Int64s, seed: np.uint64) -> None:
    """Throw the shingles of documents into their bins: uint32[n, BYTES], in which the least value stays."""
    hashes = mix(shingles ^ seed)
    values = ((hashes >> np.uint64(24)) & np.uint64(0x7FFFFFFF)).astype(np.uint32)  # 31 other bits: none is EMPTY
    np.minimum.at(bins.reshape(-1), document * BYTES + (hashes >> np.uint64(56)).astype(np.int64), values)


def _numbers(bins: UInt32s) -> UInt64s:
    """(bins) -> (signatures): uint64[n, NUMBERS]. Bins i, i + 32, i + 64, ... are the bytes of number i."""
    own = bins != EMPTY
    found = (bins & np.uint32(BORROWED - 1)).astype(np.uint8)
    lacking = np.flatnonzero(~own.all(axis=1))
    if len(lacking):
        places = np.arange(2 * BYTES, dtype=np.int16)
        there = np.tile(own[lacking], 2)
        following = np.minimum.accumulate(np.where(there, places, np.int16(2 * BYTES))[:, ::-1], axis=1)[:, ::-1][:, :BYTES]
        away = following - places[:BYTES]
        values = np.take_along_axis(found[lacking], (following % BYTES).astype(np.int64), axis=1)
        borrowed = (values + (away * STEP).astype(np.uint8)) & np.uint8(BORROWED - 1) | np.uint8(BORROWED)
        borrowed[~there.any(axis=1)] = BORROWED
        found[lacking] = np.where(own[lacking], found[lacking], borrowed)
    bytes_ = found.reshape(-1, 8, NUMBERS).transpose(0, 2, 1)
    return np.ascontiguousarray(bytes_).reshape(-1, BYTES).view("<u8").astype(np.uint64, copy=False)


def similarity(one: UInt64s, other: UInt64s) -> tuple[Floats, Int64s]:
    """The estimated similarity of pairs of texts by their signatures, uint64[n, NUMBERS] each: float64[n], and the bins that it
    goes by: int64[n].
    """
    a, b = np.asarray(one), np.asarray(other)
    # One bit for each bin: the highest bit of its byte.
    mine_too, differs = ~(a | b) & NO_SHINGLE, ((a ^ b) & ~NO_SHINGLE) + ~NO_SHINGLE
    bits = ~(a & b) & NO_SHINGLE, mine_too, mine_too & ~differs
    bins, both, same = (np.bitwise_count(some).sum(axis=1, dtype=np.int64) for some in bits)
    # Of the bins in which the shingles differ, one in 128 has the same seven bits.
    return np.maximum(same - (both - same) / (BORROWED - 1), 0) / np.maximum(bins, 1), bins


DIGEST_BYTES = 16


def text_lengths(texts: pa.LargeStringArray) -> UInt64s:
    """The bytes of each text: uint64[n]."""
    return np.diff(text_buffers(texts)[1]).astype(np.uint64)


def text_digests(texts: pa.LargeStringArray, kind: bytes) -> UInt64s:
    """The digest of each text, 16 bytes of BLAKE3 as two numbers: uint64[n, 2]. *kind*: 32 bytes; another one, other digests."""
    data, offsets = text_buffers(texts)
    view = data.data
    # A call for each text: no cryptographic hash takes many texts at once. See docs/measured/benchmarks.md for what it costs.
    found = b"".join(blake3(view[start:stop], key=kind).digest(DIGEST_BYTES) for start, stop in pairwise(offsets.tolist()))
    return np.frombuffer(found, "<u8").astype(np.uint64, copy=False).reshape(-1, 2)
