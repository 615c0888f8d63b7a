"""Spans: which documents are validation, where each document lands, and which task writes which objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.keys import A, mix
from flat_tokens.manifest import DUPLICATE, DUPLICATES, SPLITS
from flat_tokens.stores.store import Store, StoredObject
from tasks.models import Model, Split, TokenShard
from tasks.output.paths import version_store
from tasks.shards.contents import Opened, open_contents

UInt64s = npt.NDArray[np.uint64]

SPAN_TOKENS = 1 << 26
"""Tokens that one task writes, at least one stored object."""
SPAN_DOCUMENTS = 1 << 20


class SplitRule(Model):
    """A document is validation if a hash of its key and the seed is below the fraction. It depends on the document alone, not
    on the tokenizer, the number of workers or the rest of the dataset.
    """

    fraction: float
    seed: int

    def draws(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which documents are validation: bool[n]."""
        if self.fraction >= 1:
            return np.ones(len(keys), bool)
        salt = mix(np.array([self.seed], np.uint64) * A + A)
        return mix(keys ^ salt) < np.uint64(int(self.fraction * 2**64))


def chosen(split: Split, all_in: Split | None, rule: SplitRule, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which documents of a shard belong to *split*: bool[n]."""
    if all_in is not None:
        return np.full(len(keys), all_in == split)
    drawn = rule.draws(keys)
    return drawn if split == "validation" else ~drawn


class Placed(Model):
    """Documents with a place in a split: their sequences and tokens start there at ``first_seq`` and ``first_token``."""

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


class Kept(NamedTuple):
    """Documents of a slice that were read and that are written; text and tokens of the latter; and why others are not there."""

    read: int
    written: int
    text_bytes: int
    token_count: int
    skipped: dict[str, int]


class ShardPlace(Placed):
    """A token shard, and the place of its documents of one split. ``file``: the number of its first file, of which ``first_row``
    is the slice's first row. ``copies``: documents that are left out.
    """

    shard: TokenShard
    file: int
    first_row: int
    all_in: Split | None
    copies: Copies | None = None

    def files_and_rows(self, rows: UInt64s) -> tuple[UInt64s, UInt64s]:
        """The number of the file and the row within it of each *row* of the slice: uint64[n], uint64[n]."""
        starts = self.shard.file_starts
        # (slice, row) -> (file, row)
        file = np.maximum(np.searchsorted(starts, rows, "right") - 1, 0) if len(starts) > 1 else np.zeros(len(rows), np.int64)
        return (file + self.file).astype(np.uint64), rows - starts[file] + np.uint64(self.first_row)

    @property
    def kept(self) -> Kept:
        """Counts of the shard's documents, those of both splits together."""
        shard, copies = self.shard, self.copies
        whole = Kept(shard.read, shard.written, shard.text_bytes, shard.token_count, shard.skipped)
        if copies is None:
            return whole
        return Kept(
            whole.read,
            whole.written - copies.documents,
            whole.text_bytes - copies.text_bytes,
            whole.token_count - copies.token_count,
            {**whole.skipped, "duplicate": copies.documents},
        )


def staying(at: ShardPlace, version: Store) -> npt.NDArray[np.bool_]:
    """Which documents of a shard are not left out as copies: bool[n]. ValueError where the version's list has changed."""
    stay = np.ones(at.shard.written, bool)
    if at.copies is not None:
        stored = at.copies.stored
        data = version.read(stored.key)
        if not stored.is_of(data):
            raise ValueError(f"{version.path(stored.key)}: is not what was written. Run the build again.")
        stay[np.frombuffer(data, DUPLICATE)["document"].astype(np.int64)] = False
    return stay


class Span(Model):
    """A range of the output that one task writes, as whole stored objects: items ``start:stop`` of one split's tokens, or of its
    arrays with an entry a document. Kinds of it have ``places``: where the items come from.
    """

    split: Split
    of_tokens: bool
    start: int
    stop: int
    last_entry: int | None = Field(None, description="The token count, for the one that ends seq_starts")
    masked: bool = Field(False, description="Whether the dataset has a loss mask, which is written with the tokens")
    columns: tuple[str, ...] = Field((), description="The columns that the dataset keeps, which are written with the documents")

    @property
    def label(self) -> str:
        return f"{self.split} {'tokens' if self.of_tokens else 'documents'} {self.start:,} to {self.stop:,}"


def span_length(layout: Layout, *, of_tokens: bool) -> int:
    """Items of a span that is not the last of its array: whole objects."""
    length = (layout.encoded_tokens if of_tokens else layout.seq_starts).object_length
    return length * max(1, (SPAN_TOKENS if of_tokens else SPAN_DOCUMENTS) // length)


class ShardSpan(Span):
    """A span whose items come from token shards."""

    places: tuple[ShardPlace, ...]


class Counts(NamedTuple):
    """Sequences and tokens of a shard, by split."""

    train_seqs: int
    train_tokens: int
    validation_seqs: int
    validation_tokens: int


CountedPlace = tuple[ShardPlace, Counts]


def count_documents(at: ShardPlace, rule: SplitRule, root: Store, version: str = "", opened: Opened = open_contents) -> Counts:
    """Count a shard's sequences and tokens of each split, from its keys and starts. *version* has the lists of copies."""
    here = (at.kept.written, at.kept.token_count)
    if at.all_in is not None or rule.fraction == 0:
        return Counts(0, 0, *here) if at.all_in == "validation" else Counts(*here, 0, 0)
    contents = opened(root, at.shard)
    drawn = rule.draws(contents.keys)
    if at.copies is not None:
        drawn &= staying(at, version_store(root, version))
    seqs, count = int(drawn.sum()), int(contents.lengths[drawn].sum())
    return Counts(here[0] - seqs, here[1] - count, seqs, count)


def lay_out(
    counted: Iterable[CountedPlace], layout: LayoutName, masked: bool = False, columns: tuple[str, ...] = ()
) -> Iterator[ShardSpan]:
    """The spans of both splits, by prefix sums over the shards' counts. Each is yielded as soon as its last shard is known, so
    that objects can be written while later slices are still tokenized. *masked*: the dataset has a loss mask. *columns*: those
    that it keeps.
    """
    kind, chosen_layout = functools.partial(ShardSpan, masked=masked, columns=columns), LAYOUTS[layout]
    lines = [(Line(kind, split, True, chosen_layout), Line(kind, split, False, chosen_layout)) for split in SPLITS]
    for at, counts in counted:
        for (tokens, documents), (seq_count, token_count) in zip(lines, (counts[:2], counts[2:]), strict=True):
            place = {"first_seq": documents.end, "seq_count": seq_count, "first_token": tokens.end, "token_count": token_count}
            here = at.model_copy(update=place)
            yield from tokens.add(here)
            yield from documents.add(here)
    for tokens, documents in lines:
        yield from tokens.rest(tokens.end)
        yield from documents.rest(tokens.end)


S = TypeVar("S", bound=Span)


class Line(Generic[S]):
    """The items of one array, cut into spans of a *kind*. (part, item) -> (split, item): parts lie one behind the other."""

    def __init__(self, kind: Callable[..., S], split: Split, of_tokens: bool, layout: Layout) -> None:
        self.end = 0
        self._kind, self._of_tokens = functools.partial(kind, split=split, of_tokens=of_tokens), of_tokens
        self._step = span_length(layout, of_tokens=of_tokens)
        self._start = 0
        self._open: list[Placed] = []

    def add(self, part: Placed) -> Iterator[S]:
        """The spans that end within the next part."""
        if part.token_count if self._of_tokens else part.seq_count:
            self._open.append(part)
            self.end = self._end_of(part)
        while self.end >= self._start + self._step:
            yield self._span(self._start + self._step, None)

    def rest(self, token_count: int) -> Iterator[S]:
        """The last span, where items are left. That of the documents always comes, as it ends seq_starts."""
        if not self._of_tokens or self.end > self._start:
            yield self._span(self.end, None if self._of_tokens else token_count)

    def _span(self, stop: int, last_entry: int | None) -> S:
        span = self._kind(start=self._start, stop=stop, last_entry=last_entry, places=tuple(self._open))
        self._start = stop
        self._open = [at for at in self._open if self._end_of(at) > stop]
        return span

    def _end_of(self, at: Placed) -> int:
        return at.first_token + at.token_count if self._of_tokens else at.first_seq + at.seq_count
