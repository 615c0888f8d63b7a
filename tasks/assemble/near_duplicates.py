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

import numpy as np

from flat_tokens.array_types import Int64s, UInt64s
from flat_tokens.manifest import NEAR_DUPLICATE
from tasks.assemble.choice import not_duplicate
from tasks.assemble.clusters import clusters
from tasks.config import NearDuplicates
from tasks.output.target import Target
from tasks.parts.opening import open_part
from tasks.parts.part import NearCopies, ShardPart
from tasks.progress import meter
from tasks.rows import OF_VERSION, TEXT_BYTES
from tasks.text.signatures import NO_SHINGLE, NUMBERS, similarity

PLACE = OF_VERSION
AT_A_TIME = 1 << 14


@dataclass
class SignedDocuments:
    """Signatures, keys and places of all documents of a version, in the order of the sources; how many there are, how many parts
    have their lists and how many documents these have, and the seconds that were spent. *together*: a cluster goes to one split.
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

    def append(self, signatures: UInt64s, places: UInt64s) -> None:
        """Append documents: uint64[n, NUMBERS] and, of each, what PLACE says: uint64[n, 3]."""
        for name, some in (("signatures", signatures), ("places", places)):
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
    def places(self) -> UInt64s:
        return self._mapped("places", len(PLACE))

    @cached_property
    def clusters(self) -> Int64s:
        """The number of the document that names each one's cluster: int64[n]. Where the others are left out, it is the first of
        them; else that of the lowest key, of those that a version keeps in train if there are any: it changes with few others.
        """
        first = clusters(self.signatures, self.policy.threshold)
        if self.policy.action == "drop":
            return first
        members, keys = np.flatnonzero(np.bincount(first, minlength=len(first))[first] > 1), self.places[:, 0]
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
    signatures, places = np.empty((0, NUMBERS), np.uint64), np.empty((0, len(PLACE)), np.uint64)
    if part.shard.written:
        documents = open_part(part, target, *PLACE, signed.name)
        signatures = documents.fact(signed.name)
        if part.left_out:
            signatures = np.where(not_duplicate(part, target.store)[:, None], signatures, NO_SHINGLE)
        places = np.stack([documents.fact(name) for name in PLACE], axis=1)
    signed.append(signatures, places)
    signed.seconds += time.monotonic() - begun
    return part


def mark_near_duplicates(part: ShardPart, signed: SignedDocuments) -> ShardPart:
    """Stage near-duplicates: a part, with the list of its near-duplicates, which is an object of the version. Parts arrive in the
    order of the sources, when the signatures of all have been taken.
    """
    begun, number, first = time.monotonic(), signed.marked, signed.marked_documents
    mine = np.arange(first, first + part.shard.written)
    signed.marked, signed.marked_documents = number + 1, first + len(mine)
    is_later = signed.clusters[mine] != mine
    dropped = signed.policy.action == "drop"
    wanted = mine[is_later if dropped else signed.sizes[signed.clusters[mine]] > 1]
    if len(wanted):
        part = part.model_copy(update={"near": _near_of(part, number, wanted, first, signed)})
    meter.add("near-duplicates", part.shard.text_bytes, part.shard.written)
    signed.seconds += time.monotonic() - begun
    return part


def _near_of(part: ShardPart, number: int, wanted: Int64s, first: int, signed: SignedDocuments) -> NearCopies:
    """Write the list of a part's near-duplicates: documents *wanted*, int64[m], of which *first* is the part's first."""
    target, of = signed.target, signed.clusters[wanted]
    listed = np.empty(len(wanted), NEAR_DUPLICATE)
    listed["document"] = wanted - first
    (listed["key"], listed["file"], listed["row"]) = signed.places[wanted].T
    (listed["of_key"], listed["of_file"], listed["of_row"]) = signed.places[of].T
    for start in range(0, len(wanted), AT_A_TIME):
        some = slice(start, start + AT_A_TIME)
        listed["similarity"][some] = np.round(1e6 * similarity(signed.signatures[wanted[some]], signed.signatures[of[some]])[0])
    stored = target.store.put(NearCopies.name_of(number), listed.tobytes())
    later = wanted[wanted != of] - first
    documents = open_part(part, target, TEXT_BYTES)
    return NearCopies(
        number=number,
        size=stored.size,
        digest=stored.digest,
        documents=len(later),
        token_count=int(documents.lengths[later].sum()),
        text_bytes=int(documents.fact(TEXT_BYTES)[later].sum()),
        dropped=signed.policy.action == "drop",
        together=signed.together,
    )
