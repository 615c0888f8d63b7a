"""Segments: runs of documents of about a megabyte of text, whose ends follow from the documents alone.

They are the unit of reuse. If a document is added, removed or changed, the segments before and after it stay the same,
whichever file, row group or slice has them. A segment is known by a digest of its keys and texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from blake3 import blake3

from flat_tokens.annotations import Int64s, Structs
from flat_tokens.keys import mix
from flat_tokens.text.rows import text_buffers
from tasks.rows import joined
from tasks.text.documents import TextBatch

MEAN_BYTES = 1 << 19
"""Of a segment. One that is met by chance, as a changed document meets it, has twice as many: long ones are met more often."""
MOST_BYTES = 1 << 22
"""A segment that grew so long ends anyway."""
ENTRY_BYTES = 8
"""A document counts this many bytes next to its text: many empty ones come to an end, too."""
SALT = np.uint64(0x9E3779B97F4A7C15)
EXACT = 1 << 53
"""Integers below this are exact as float64."""

DIGEST_BYTES = 16
STORED = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("documents", "<u4")])
"""A segment as a receipt and an index have it. A digest of zeros: its tokens are not those of all its documents."""
NO_DIGEST = np.void(bytes(DIGEST_BYTES))
STORED_FILE = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("text_bytes", "<u4")])
"""A file of a run, in the same way. A digest of zeros: its documents, or what is counted of them, are not all there."""


class Segments(NamedTuple):
    """Some whole segments: their documents, and where each ends in them, int64[m]."""

    documents: TextBatch
    ends: Int64s

    def digests(self, recipe: bytes) -> Structs:
        """The digest by which each segment is known: STORED["digest"][m]. *recipe* decides its tokens besides, always as long."""
        data, offsets = text_buffers(self.documents.texts)
        keys = self.documents.keys
        found = np.empty(len(self.ends), STORED["digest"])
        start = 0
        for i, end in enumerate(self.ends.tolist()):
            known = blake3(recipe)
            known.update((end - start).to_bytes(8, "little"))
            known.update(keys[start:end].view(np.uint8).data)
            known.update(np.diff(offsets[start : end + 1]).view(np.uint8).data)
            known.update(data[offsets[start] : offsets[end]].data)
            found[i] = np.void(known.digest(DIGEST_BYTES))
            start = end
        return found


def cut(batches: Iterable[TextBatch]) -> Iterator[Segments]:
    """The documents of a slice as complete segments, in order, independent of the batches. The last segment ends with the
    documents.
    """
    begun: list[TextBatch] = []  # documents of a segment that has not ended yet
    byte_count = 0
    for batch in batches:
        ends, byte_count = _ends(batch, byte_count)
        at = int(ends[-1]) if len(ends) else 0
        if at:
            documents = _joined([*begun, batch.part(0, at)])
            # (batch, document) -> (what is given, document): those that were begun come first
            yield Segments(documents, ends + len(documents.texts) - at)
            begun = []
        if at < len(batch.texts):
            begun.append(batch.part(at, len(batch.texts)))
    if begun:
        last = _joined(begun)
        yield Segments(last, np.array([len(last.texts)]))


def _joined(parts: list[TextBatch]) -> TextBatch:
    if len(parts) == 1:
        return parts[0]
    return TextBatch(pa.concat_arrays([part.texts for part in parts]), joined([part.rows for part in parts]))


def _ends(batch: TextBatch, before: int) -> tuple[Int64s, int]:
    """The ends of segments in a batch, int64[m], if the open segment has *before* bytes; and the bytes of the open segment
    after the batch. The chance that a document ends a segment grows with its length, so the size of segments does not depend on
    that of documents.
    """
    sizes = np.diff(text_buffers(batch.texts)[1]) + ENTRY_BYTES
    if not len(sizes):
        return np.empty(0, np.int64), before
    drawn = (mix(batch.keys ^ SALT) >> np.uint64(11)).astype(np.float64)  # 0 to 2**53
    natural = np.flatnonzero(drawn < sizes * (EXACT / MEAN_BYTES)) + 1
    behind = np.cumsum(sizes)
    ends: list[int] = []
    begun, at = -before, 0  # where the open segment begins: in bytes, and in documents
    for end, ends_here in [*((end, True) for end in natural.tolist()), (len(sizes), False)]:
        while int(behind[end - 1]) - begun > MOST_BYTES:
            at = max(int(np.searchsorted(behind, begun + MOST_BYTES, "right")), at + 1)
            if at >= end:
                break
            ends.append(at)
            begun = int(behind[at - 1])
        if ends_here:
            ends.append(end)
            begun, at = int(behind[end - 1]), end
    return np.array(ends, np.int64), int(behind[-1]) - begun
