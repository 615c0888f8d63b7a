"""Spans: which documents are validation, where each document lands, and which task writes which objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.keys import A, mix
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from tasks.models import Model, Split, TokenShard
from tasks.output.paths import DOCUMENTS
from tasks.shards.read import open_arrays

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


class ShardPlace(Model):
    """A shard's place in a split: its sequences and tokens of that split start at ``first_seq`` and ``first_token``."""

    shard: TokenShard
    file: int
    first_row: int
    all_in: Split | None
    first_seq: int = 0
    seq_count: int = 0
    first_token: int = 0
    token_count: int = 0


class Span(Model):
    """A range of the output that one task writes: items ``start:stop`` of one split's tokens, or of its arrays with an entry a
    document. It ends where stored objects end.
    """

    split: Split
    of_tokens: bool
    start: int
    stop: int
    last_entry: int | None = Field(None, description="The token count, for the one that ends seq_starts")
    places: tuple[ShardPlace, ...] = Field((), description="The token shards that its items come from")

    @property
    def label(self) -> str:
        return f"{self.split} {'tokens' if self.of_tokens else 'documents'} {self.start:,} to {self.stop:,}"


class Counts(NamedTuple):
    """Sequences and tokens of a shard, by split."""

    train_seqs: int
    train_tokens: int
    validation_seqs: int
    validation_tokens: int


def count_documents(at: ShardPlace, rule: SplitRule, root: Store) -> Counts:
    """Count a shard's sequences and tokens of each split, from its keys and starts."""
    tokens, documents = open_arrays(root, at.shard, "seq_starts", f"{DOCUMENTS}/key")
    here = (tokens.seq_count, tokens.token_count)
    if at.all_in is not None or rule.fraction == 0:
        return Counts(0, 0, *here) if at.all_in == "validation" else Counts(*here, 0, 0)
    lengths = np.diff(tokens.seq_starts.read(0, tokens.seq_count + 1))
    drawn = rule.draws(documents.key.read(0, tokens.seq_count))
    seqs, count = int(drawn.sum()), int(lengths[drawn].sum())
    return Counts(tokens.seq_count - seqs, tokens.token_count - count, seqs, count)


def lay_out(counted: Iterable[tuple[ShardPlace, Counts]], layout: LayoutName) -> Iterator[Span]:
    """The spans of both splits, by prefix sums over the shards' counts. Each is yielded as soon as its last shard is known, so
    that objects can be written while later slices are still tokenized.
    """
    lines = [_Line(split, of_tokens, LAYOUTS[layout]) for split in SPLITS for of_tokens in (True, False)]
    for at, counts in counted:
        for line in lines:
            yield from line.add(at, counts)
    ends = {line.split: line.end for line in lines if line.of_tokens}
    for line in lines:
        yield from line.rest(ends[line.split])


def items_a_task(of_tokens: bool, layout: Layout) -> int:
    """How many items of an array one task writes: those of whole objects."""
    length = layout.encoded_tokens.object_length if of_tokens else layout.seq_starts.object_length
    return length * max(1, (SPAN_TOKENS if of_tokens else SPAN_DOCUMENTS) // length)


class _Line:
    """The items of one array, cut into spans as they come. (shard, item) -> (split, item): a shard's items begin where those of
    the shards before it end.
    """

    def __init__(self, split: Split, of_tokens: bool, layout: Layout) -> None:
        self.split, self.of_tokens = split, of_tokens
        self._step = items_a_task(of_tokens, layout)
        self._start = self._seqs = self._tokens = 0
        self._open: list[ShardPlace] = []

    @property
    def end(self) -> int:
        return self._tokens if self.of_tokens else self._seqs

    def add(self, at: ShardPlace, counts: Counts) -> Iterator[Span]:
        seqs, tokens = counts[:2] if self.split == "train" else counts[2:]
        if seqs == 0:
            return
        place = {"first_seq": self._seqs, "seq_count": seqs, "first_token": self._tokens, "token_count": tokens}
        self._open.append(at.model_copy(update=place))
        self._seqs += seqs
        self._tokens += tokens
        while self.end >= self._start + self._step:
            yield self._span(self._start + self._step, None)

    def rest(self, token_count: int) -> Iterator[Span]:
        """The last span, where items are left. That of the documents always comes, as it ends seq_starts."""
        if not self.of_tokens:
            yield self._span(self.end, token_count)
        elif self.end > self._start:
            yield self._span(self.end, None)

    def _span(self, stop: int, last_entry: int | None) -> Span:
        span = Span(
            split=self.split,
            of_tokens=self.of_tokens,
            start=self._start,
            stop=stop,
            places=tuple(self._open),
            last_entry=last_entry,
        )
        self._start = stop
        self._open = [at for at in self._open if self._end_of(at) > stop]
        return span

    def _end_of(self, at: ShardPlace) -> int:
        return at.first_token + at.token_count if self.of_tokens else at.first_seq + at.seq_count
