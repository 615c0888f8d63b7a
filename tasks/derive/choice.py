"""The choice of documents of inputs: which of a part's are taken, by a selection. It is made when they are counted, and stored
for those that write them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from flat_tokens.annotations import Bools, Int64s, IntPair, UInt64s
from flat_tokens.keys import mix
from flat_tokens.reader import open_split
from flat_tokens.rows.documents import RecordedFacts, matching, recorded_of
from flat_tokens.rows.orders import derive_keys
from flat_tokens.rows.where import parse
from flat_tokens.stores.store import Store
from tasks.derive.request import Subset
from tasks.models import Split
from tasks.output.forgotten import forgotten_at
from tasks.output.leases import Workspace
from tasks.output.target import Target
from tasks.parts.documents import Documents
from tasks.parts.input import input_documents
from tasks.parts.part import InputPart
from tasks.progress import meter
from tasks.rows import FILE, OF_VERSION

SAMPLING = 0x5A3B1E
"""Samples and validation are drawn with different keys, or a sample of the same seed would begin with validation's documents."""
DOCUMENT_BYTES = 8 * len(("start", *OF_VERSION))
RADIX_BITS = 16


LISTED, FOUND = "listed", "found"
"""Below the staging: the sorted keys of a list, and which of them were found, a byte each."""
ALL = Subset.model_construct()


class Selection(NamedTuple):
    """The documents of input datasets that are taken: those *of* a subset, whose filter by source is in the parts. ``below``: for
    each split, documents whose hash is below this are in the sample; of those with this hash, each part takes its first ``ties``.
    """

    of: Subset = ALL
    below: dict[Split, int] | None = None
    forgotten: str = ""
    """Digest of the output's list of documents that no input may bring back."""


class PartCounts(NamedTuple):
    """Counts of what is taken of a part. ``sources``: documents and tokens of each source of its input."""

    seq_count: int
    token_count: int
    sources: tuple[IntPair, ...]
    skipped: dict[str, int]


def _choose(part: InputPart, documents: Documents, target: Target, selection: Selection) -> tuple[Bools, Counter[str]]:
    """Documents of a part that are taken, bool[n], and counts of the others by the first reason against them."""
    keep, of = np.ones(len(documents), bool), selection.of
    skipped: Counter[str] = Counter()

    def without(reason: str, let_through: Bools) -> None:
        nonlocal keep
        before, keep = int(keep.sum()), keep & let_through
        skipped[reason] += before - int(keep.sum())

    if part.split == of.drop:
        without("split", np.zeros(len(keep), bool))
    if of.split not in (None, part.split):
        return keep, skipped
    if selection.forgotten:
        without("forgotten", ~forgotten_at(target.root, selection.forgotten).those(documents.keys))
    if part.wanted is not None:
        without("source", np.isin(_sources_of(part, documents), part.wanted))
    if of.min_tokens is not None:
        without("too_short", documents.lengths >= of.min_tokens)
    if of.max_tokens is not None:
        without("too_long", documents.lengths <= of.max_tokens)
    if of.where is not None:
        tokens, recorded = open_split(Store.at(part.location) / part.split), functools.partial(_recorded_at, part.location)
        without("where", matching(tokens, parse(of.where), part.start, part.stop, recorded))
    if of.key_list is not None or of.id_list is not None:
        without("not_listed", _listed(documents.keys, target.workspace))
    if selection.below is not None:
        hashes, below = sample_hashes(documents.keys, of.seed), selection.below[part.split]
        if below < 1 << 64:
            tied = np.flatnonzero(keep & (hashes == np.uint64(below)))[: part.ties]
            drawn = hashes < np.uint64(below)
            drawn[tied] = True
            without("not_sampled", drawn)
    return keep, skipped


@functools.lru_cache(4)
def _recorded_at(location: str) -> RecordedFacts:
    """The facts of an input's documents that its manifest has. They do not change."""
    return recorded_of(Store.at(location))


def _sources_of(part: InputPart, documents: Documents) -> Int64s:
    """The source of each document of the part, by its index in the input: int64[n]."""
    files = documents.fact(FILE) - np.uint64(part.file)
    return np.searchsorted(np.array(part.source_stops, np.uint64), files, side="right")


def save_list(listed: UInt64s, workspace: Workspace) -> None:
    """Save the keys of a list, sorted, for those that choose by it."""
    workspace.write(LISTED, listed)
    workspace.write(FOUND, np.zeros(len(listed), bool))


def count_unfound(workspace: Workspace) -> int:
    """The number of keys of the saved list that no document has."""
    return int((~np.fromfile(workspace.path(FOUND), bool)).sum())


def _listed(keys: UInt64s, workspace: Workspace) -> Bools:
    """Whether each key is in the saved list. Those that were found are noted."""
    if not workspace.path(LISTED).stat().st_size:  # an empty file is not mapped
        return np.zeros(len(keys), bool)
    listed = np.memmap(workspace.path(LISTED), np.uint64, "r")
    at = np.minimum(np.searchsorted(listed, keys), len(listed) - 1)
    found = cast("Bools", listed[at] == keys)
    # Threads write the same byte: that it was found.
    np.memmap(workspace.path(FOUND), bool, "r+")[at[found]] = True
    return found


def sample_hashes(keys: UInt64s, seed: int) -> UInt64s:
    """Hashes that decide whether documents are in a sample: uint64[n]. Different keys have different hashes."""
    return mix(keys ^ derive_keys(seed, SAMPLING))


def count_hashes(part: InputPart, target: Target, selection: Selection, prefix: dict[Split, int], digits: int) -> Int64s:
    """How many documents have each value in the next 16 bits of their hash: int64[65536]. Counted are those that would be taken
    without a sample and whose hash begins with *prefix*, which has *digits* groups of 16 bits.
    """
    documents = input_documents(part, target)
    meter.add("count", DOCUMENT_BYTES * len(documents))
    keep, _ = _choose(part, documents, target, selection)
    hashes = sample_hashes(documents.keys[keep], selection.of.seed)
    if digits:
        hashes = hashes[hashes >> np.uint64(64 - RADIX_BITS * digits) == np.uint64(prefix[part.split])]
    values = (hashes >> np.uint64(64 - RADIX_BITS * (digits + 1))) & np.uint64((1 << RADIX_BITS) - 1)
    return np.bincount(values.astype(np.int64), minlength=1 << RADIX_BITS)


def count_taken(part: InputPart, target: Target, selection: Selection) -> PartCounts:
    """Choose the documents of a part, and count those that are taken, with their tokens."""
    documents = input_documents(part, target)
    meter.add("count", DOCUMENT_BYTES * len(documents), len(documents))
    keep, skipped = _choose(part, documents, target, selection)
    if keep.any() and not keep.all():
        target.workspace.write(part.choice, keep)
    lengths, of_source = documents.lengths[keep], _sources_of(part, documents)[keep]
    counts = np.bincount(of_source, minlength=len(part.source_stops))
    tokens = np.bincount(of_source, lengths, minlength=len(part.source_stops))  # float64, which is exact up to 2**53
    return PartCounts(
        int(keep.sum()),
        int(lengths.sum()),
        tuple(zip(counts.tolist(), map(int, tokens), strict=True)),
        {reason: count for reason, count in skipped.items() if count},
    )


def positioned(counted: Sequence[tuple[InputPart, PartCounts]], split: Split) -> list[InputPart]:
    """The parts of a split with their counts and positions."""
    parts, seqs, tokens = list[InputPart](), 0, 0
    for part, count in counted:
        if part.split == split:
            counts = {"seq_count": count.seq_count, "token_count": count.token_count}
            parts.append(part.model_copy(update={**counts, "first_seq": seqs, "first_token": tokens}))
            seqs, tokens = seqs + count.seq_count, tokens + count.token_count
    return parts
