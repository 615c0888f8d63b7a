"""Lengths of texts, and digests of them: equal digests, equal texts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.array_types import UInt64s
from flat_tokens.text.rows import text_buffers

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
