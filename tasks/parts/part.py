"""Parts: some documents of a version under way, and where they are. A version is assembled from its parts, in their order."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from flat_tokens.array_types import UInt64s
from flat_tokens.manifest import DUPLICATES, EVERY_SPLIT, NEAR_DUPLICATES
from flat_tokens.rows.orders import KeyedPermutation, derive_keys
from flat_tokens.stores.store import StoredObject
from tasks.models import Model, Split, TokenShard

NEAR_DUPLICATE_REASON = "near_duplicate"
"""The reason for which near-duplicates are skipped, where they are."""


class Position(Model):
    """A position in a split: the documents of a part have ``seq_count`` sequences and ``token_count`` tokens there, which start
    at ``first_seq`` and ``first_token``.
    """

    first_seq: int = 0
    seq_count: int = 0
    first_token: int = 0
    token_count: int = 0


class Copies(Model):
    """Documents of a slice that are left out, as earlier ones have their texts. The list of them is an object of the version."""

    number: int = Field(ge=0, description="Of the slice, which names the list")
    size: int
    digest: str
    documents: int
    token_count: int
    text_bytes: int

    @staticmethod
    def name_of(number: int) -> str:
        return f"{DUPLICATES}/{number:08d}"

    @property
    def stored(self) -> StoredObject:
        """The list, by its name below the version."""
        return StoredObject(self.name_of(self.number), self.size, self.digest)


class NearCopies(Copies):
    """Near-duplicates of a slice, all but the first of each cluster. ``dropped``: they are left out. Else the list has all of
    their clusters, and ``together`` says that a cluster goes to one split.
    """

    dropped: bool
    together: bool = False

    @staticmethod
    def name_of(number: int) -> str:
        return f"{NEAR_DUPLICATES}/{number:08d}"


class DocumentCounts(NamedTuple):
    """Counts of one slice: documents read and written, text and tokens of the written ones, documents skipped by reason, and
    near-duplicates that are kept, all but the first of each cluster.
    """

    read: int
    written: int
    text_bytes: int
    token_count: int
    skipped: dict[str, int]
    near_duplicates: int = 0

    def without(self, copies: Copies, reason: str) -> DocumentCounts:
        """The counts, where *copies* are skipped for a reason."""
        return self._replace(
            written=self.written - copies.documents,
            text_bytes=self.text_bytes - copies.text_bytes,
            token_count=self.token_count - copies.token_count,
            skipped={**self.skipped, reason: copies.documents},
        )


class ShardPart(Position):
    """A token shard. ``file``: the number of its first file, of which ``first_row`` is the slice's first row. ``copies``:
    documents that are left out. ``near``: its near-duplicates.
    """

    kind: Literal["shard"] = "shard"
    shard: TokenShard
    file: int
    first_row: int
    all_in: Split | None
    copies: Copies | None = None
    near: NearCopies | None = None

    @property
    def counts(self) -> DocumentCounts:
        """Counts of the shard's documents, those of all splits together."""
        shard, near = self.shard, self.near
        counts = DocumentCounts(shard.read, shard.written, shard.text_bytes, shard.token_count, shard.skipped)
        counts = counts if self.copies is None else counts.without(self.copies, "duplicate")
        if near is None:
            return counts
        return counts.without(near, NEAR_DUPLICATE_REASON) if near.dropped else counts._replace(near_duplicates=near.documents)

    @property
    def left_out(self) -> list[Copies]:
        """Lists of documents that are left out."""
        return [copies for copies in (self.copies, self.near if self.near and self.near.dropped else None) if copies is not None]

    @property
    def lists(self) -> list[StoredObject]:
        """Its objects of the version."""
        return [copies.stored for copies in (self.copies, self.near) if copies is not None]


class InputPart(Position):
    """Sequences ``start:stop`` of one split of an input dataset. Those that are taken go to the output's split of that name."""

    kind: Literal["input"] = "input"
    location: str = Field(description="The input's")
    foreign: bool = Field(description="Written by another project: read as its writer cut it, and kept by caches")
    split: Split
    number: int = Field(description="Among the parts of its split")
    start: int
    stop: int
    file: int = Field(description="The number that the input's first file has")
    source: int = Field(description="The number that the input's first source has")
    source_stops: tuple[int, ...] = Field(description="Where each source's files end, as the input counts them")
    wanted: tuple[int, ...] | None = Field(description="The sources that a filter lets through, by their index in the input")
    made_keys: str | None = Field(description="Below the staging: keys made of tokens, where the input has none")
    ties: int = 0

    @property
    def label(self) -> str:
        return f"{self.location.rpartition('/')[2]} {self.split} {self.start:,} to {self.stop:,}"


class Shuffling(Model):
    """How a split is shuffled: its *seq_count* documents go to so many *buckets*."""

    split: Split
    seed: int
    seq_count: int
    buckets: int
    kinds: dict[str, str] = Field({}, description="Of the kept columns")

    @property
    def directory(self) -> str:
        """Directory of the stored parts, below the staging."""
        return f"shuffled/{self.split}"

    def places(self, documents: UInt64s) -> UInt64s:
        """The places of documents of the split: uint64[n]."""
        return KeyedPermutation(self.seq_count)(documents, derive_keys(self.seed, EVERY_SPLIT.index(self.split)))

    def bounds(self) -> UInt64s:
        """The first place of each bucket, and the end of the last one: uint64[buckets + 1]."""
        return np.array([self.seq_count * b // self.buckets for b in range(self.buckets + 1)], np.uint64)


class BucketPart(Position):
    """A range of places of a shuffled split. Its documents are in *stored_parts* parts of the staging."""

    kind: Literal["bucket"] = "bucket"
    shuffling: Shuffling
    stored_parts: int
    number: int

    @property
    def split(self) -> Split:
        return self.shuffling.split


Part = ShardPart | InputPart | BucketPart
