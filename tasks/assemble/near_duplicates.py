"""Near-duplicates: documents whose texts are nearly that of another. Of a cluster the first in the order of the sources stays, or
all stay, and the lowest key names it.

A document may join two clusters that were apart, so what stays is known when all documents are: their signatures go to a file of
the staging, which the system keeps in memory as far as there is room, and the clusters are found when the last part has arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from flat_tokens.array_types import Int64s, UInt64s
from tasks.assemble.clusters import clusters
from tasks.config import NearDuplicates
from tasks.output.target import Target
from tasks.parts.opening import open_part, with_repeats
from tasks.parts.part import NEAR_DUPLICATE_REASON, ShardPart
from tasks.progress import meter
from tasks.rows import KEY, OF, REASON, SIMILARITY, TEXT_BYTES
from tasks.text.signatures import NO_SHINGLE, NUMBERS, similarity

AT_A_TIME = 1 << 14


@dataclass
class SignedDocuments:
    """Signatures and keys of all documents of a version, in the order of the sources; how many there are, how many parts
    are marked and how many documents these have, and the seconds that were spent. *together*: a cluster goes to one split.
    *name*: the fact that is the signature.
    """

    target: Target
    name: str
    policy: NearDuplicates
    together: bool
    count: int = 0
    marked: int = 0
    marked_documents: int = 0
    seconds: float = 0.0

    def _path(self, name: str) -> Path:
        return Path(self.target.workspace.staging) / name

    def append(self, signatures: UInt64s, keys: UInt64s) -> None:
        """Append documents: uint64[n, NUMBERS] and uint64[n]."""
        for name, some in (("signatures", signatures), ("keys", keys)):
            with open(self._path(name), "ab") as file:
                file.write(np.ascontiguousarray(some).data)
        self.count += len(signatures)

    def _mapped(self, name: str, width: int) -> UInt64s:
        if not self.count:  # an empty file cannot be mapped
            return np.empty((0, width), np.uint64)
        return np.memmap(self._path(name), np.uint64, "r").reshape(-1, width)

    @cached_property
    def signatures(self) -> UInt64s:
        return self._mapped("signatures", NUMBERS)

    @cached_property
    def keys(self) -> UInt64s:
        return self._mapped("keys", 1)[:, 0]

    @cached_property
    def clusters(self) -> Int64s:
        """The number of the document that names each one's cluster: int64[n]. Where the others are left out, it is the first of
        them; else that of the lowest key, of those that a version keeps in train if there are any: it changes with few others.
        """
        first = clusters(self.signatures, self.policy.threshold)
        if self.policy.action == "drop":
            return first
        members, keys = np.flatnonzero(np.bincount(first, minlength=len(first))[first] > 1), self.keys
        kept = self.target.rule.kept if self.together else None
        others = np.zeros(len(members), bool) if kept is None else ~kept.has(keys[members])
        members = members[np.lexsort((keys[members], others, first[members]))]
        _, begins, sizes = np.unique(first[members], return_index=True, return_counts=True)
        first[members] = np.repeat(members[begins], sizes)
        return first

    @cached_property
    def sizes(self) -> Int64s:
        """The documents of the cluster that each names: int64[n]."""
        return np.bincount(self.clusters, minlength=len(self.clusters))


def gather_signatures(part: ShardPart, signed: SignedDocuments) -> ShardPart:
    """Stage signatures: take the signatures of a part's documents. Those that are left out already have none. Parts arrive in the
    order of the sources.
    """
    begun, target = time.monotonic(), signed.target
    signatures, keys = np.empty((0, NUMBERS), np.uint64), np.empty(0, np.uint64)
    if part.shard.seq_count:
        documents = open_part(part, target, KEY, signed.name)
        signatures, keys = documents.fact(signed.name), documents.keys
        signatures = np.where(documents.fact(REASON)[:, None], NO_SHINGLE, signatures)
    signed.append(signatures, keys)
    signed.seconds += time.monotonic() - begun
    return part


def mark_near_duplicates(part: ShardPart, signed: SignedDocuments) -> ShardPart:
    """Stage near-duplicates: a part, and which of its documents are near-duplicates. Parts arrive in the order of the sources,
    when the signatures of all have been taken.
    """
    begun, number, first = time.monotonic(), signed.marked, signed.marked_documents
    mine = np.arange(first, first + part.shard.seq_count)
    signed.marked, signed.marked_documents = number + 1, first + len(mine)
    is_later = signed.clusters[mine] != mine
    dropped = signed.policy.action == "drop"
    wanted = mine[is_later if dropped else signed.sizes[signed.clusters[mine]] > 1]
    if len(wanted):
        part = _near_of(part, number, wanted, first, signed)
    meter.add("near-duplicates", part.shard.text_bytes, part.shard.seq_count)
    signed.seconds += time.monotonic() - begun
    return part


def _near_of(part: ShardPart, number: int, wanted: Int64s, first: int, signed: SignedDocuments) -> ShardPart:
    """The part with its near-duplicates: documents *wanted*, int64[m], of which *first* is the part's first."""
    of, alike = signed.clusters[wanted], np.zeros(len(wanted), np.uint64)
    for start in range(0, len(wanted), AT_A_TIME):
        some = slice(start, start + AT_A_TIME)
        alike[some] = np.round(1e6 * similarity(signed.signatures[wanted[some]], signed.signatures[of[some]])[0])
    facts = {"document": (wanted - first).astype(np.uint64), OF: signed.keys[of], SIMILARITY: alike}
    reason: Literal["near_duplicate"] | None = NEAR_DUPLICATE_REASON if signed.policy.action == "drop" else None
    documents, later = open_part(part, signed.target, TEXT_BYTES), wanted[wanted != of] - first
    return with_repeats(part, documents, signed.target, number, reason, facts, later, together=signed.together)
