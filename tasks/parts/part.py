"""Parts: some documents of a version under way, and where they are. A version is assembled from its parts, in their order."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from pydantic import Field

from flat_tokens.annotations import UInt64s
from flat_tokens.keys import keys_of_bytes
from flat_tokens.manifest import CLUSTER, EVERY_SPLIT
from flat_tokens.rows.orders import KeyedPermutation, derive_keys
from flat_tokens.stores.store import StoredObject
from tasks.models import Model, Name, Split, TokenShard
from tasks.rows import OF_CHOICE

NEAR_DUPLICATE_REASON: Final = "near_duplicate"
"""The reason for which near-duplicates are skipped, where they are."""
COMPARED = keys_of_bytes([b"duplicate", NEAR_DUPLICATE_REASON.encode()])
"""The reasons that comparing documents gives, as rows have them: uint64[2]."""


class Position(Model):
    """A position in a split: the documents of a part have ``seq_count`` sequences and ``token_count`` tokens there, which start
    at ``first_seq`` and ``first_token``.
    """

    first_seq: int = 0
    seq_count: int = 0
    first_token: int = 0
    token_count: int = 0


REPEAT = np.dtype([(name, "<u8") for name in ("document", *OF_CHOICE)])
"""A document that repeats another one: its number in its slice, and what a version says of it."""


class Repeats(Model):
    """Documents of a slice that repeat others, for a *reason* to leave them out; None: they stay, with the first of each cluster.
    An object of the attempt has them, REPEAT[n] in order, until the version is published. ``documents`` and what follows count
    those that repeat others. ``together``: a cluster goes to one split.
    """

    attempt: Name
    number: int = Field(ge=0)
    """Of the slice."""
    reason: Literal["duplicate", "near_duplicate"] | None
    size: int
    digest: str
    documents: int
    token_count: int
    text_bytes: int
    together: bool = False

    @staticmethod
    def name_of(attempt: str, number: int, reason: str | None) -> str:
        return f"repeats-{attempt}-{number:08d}-{reason or CLUSTER}"

    @property
    def stored(self) -> StoredObject:
        """The object, by its name next to the version."""
        return StoredObject(self.name_of(self.attempt, self.number, self.reason), self.size, self.digest)


class ShardPart(Position):
    """A token shard. ``file``: the number of its first file, of which ``first_row`` is the slice's first row. ``repeats``: its
    documents that repeat others.
    """

    kind: Literal["shard"] = "shard"
    shard: TokenShard
    file: int
    first_row: int
    all_in: Split | None
    repeats: tuple[Repeats, ...] = ()

    @property
    def label(self) -> str:
        return f"of file {self.file + 1} from row {self.first_row:,}"

    @property
    def counts(self) -> TokenShard:
        """The shard with the counts of the documents that stay, those of all splits together."""
        facts, skipped = dict(self.shard), dict(self.shard.skipped)
        for some in self.repeats:
            if some.reason is None:
                continue
            facts["written"] -= some.documents
            facts["token_count"] -= some.token_count
            facts["text_bytes"] -= some.text_bytes
            skipped[some.reason] = some.documents
        return self.shard.model_copy(update={**facts, "skipped": skipped})


class InputPart(Position):
    """Sequences ``start:stop`` of one split of an input dataset. Those that are taken go to the output's split of that name."""

    kind: Literal["input"] = "input"
    location: str
    """The input's."""
    foreign: bool
    """Written by another project: read as its writer cut it, and kept by caches."""
    split: Split
    number: int
    """Among the parts of its split."""
    start: int
    stop: int
    file: int
    """The number that the input's first file has."""
    source: int
    """The number that the input's first source has."""
    source_stops: tuple[int, ...]
    """Where each source's files end, as the input counts them."""
    wanted: tuple[int, ...] | None
    """The sources that a filter lets through, by their index in the input."""
    made_keys: str | None
    """Below the staging: keys made of tokens, where the input has none."""
    ties: int = 0

    @property
    def choice(self) -> str:
        """Below the staging: which of its documents are taken, if some are and some are not."""
        return f"chosen-{self.split}-{self.number}"

    @property
    def label(self) -> str:
        return f"{self.location.rpartition('/')[2]} {self.split} {self.start:,} to {self.stop:,}"


class Shuffling(Model):
    """How a split is shuffled: its *seq_count* documents are divided into *buckets* buckets."""

    split: Split
    seed: int
    seq_count: int
    buckets: int
    kinds: dict[str, str] = Field({})
    """Of the kept columns."""

    @property
    def directory(self) -> str:
        """Directory of the stored parts, below the staging."""
        return f"shuffled/{self.split}"

    def places(self, documents: UInt64s) -> UInt64s:
        """The places of documents of the split: uint64[n]."""
        keys = derive_keys(self.seed, EVERY_SPLIT.index(self.split))
        return KeyedPermutation(self.seq_count)(documents.view(np.int64), keys).view(np.uint64)

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
