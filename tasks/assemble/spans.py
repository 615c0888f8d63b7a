"""Spans: where each document is in the final arrays, and which task writes which objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from flat_tokens.arrays.layouts import Layout
from flat_tokens.manifest import SPLITS
from tasks.assemble.choice import SplitCounts
from tasks.models import Model, Split
from tasks.output.target import Target
from tasks.parts.part import Part, Position

SPAN_TOKENS = 1 << 26
"""Tokens that one task writes, at least one stored object."""
SPAN_DOCUMENTS = 1 << 20


class Span(Model):
    """A range of the output that one task writes, as whole stored objects: items ``start:stop`` of one split's tokens, or of its
    arrays with an entry a document, which come from ``parts``.
    """

    split: Split
    of_tokens: bool
    start: int
    stop: int
    last_entry: int | None = Field(None, description="The token count, for the one that ends seq_starts")
    parts: tuple[Annotated[Part, Field(discriminator="kind")], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.split} {'tokens' if self.of_tokens else 'documents'} {self.start:,} to {self.stop:,}"


def span_length(layout: Layout, *, of_tokens: bool) -> int:
    """Items of a span that is not the last of its array: whole objects."""
    length = (layout.encoded_tokens if of_tokens else layout.seq_starts).object_length
    return length * max(1, (SPAN_TOKENS if of_tokens else SPAN_DOCUMENTS) // length)


class SpanLayout:
    """Lays out the spans of both splits, by prefix sums over the parts' counts. Each is returned as soon as its last part is
    known, so that objects can be written while later slices are still tokenized.
    """

    def __init__(self, target: Target) -> None:
        self._lines = [(_ArraySpans(split, True, target.specs), _ArraySpans(split, False, target.specs)) for split in SPLITS]

    def add(self, part: Part, counts: SplitCounts) -> Iterator[Span]:
        """The spans that end within the next part."""
        for (tokens, documents), (seq_count, token_count) in zip(self._lines, (counts[:2], counts[2:]), strict=True):
            position = Position(first_seq=documents.end, seq_count=seq_count, first_token=tokens.end, token_count=token_count)
            here = part.model_copy(update=dict(position))
            yield from tokens.add(here)
            yield from documents.add(here)

    def rest(self) -> Iterator[Span]:
        """The last spans, when there are no more parts."""
        for tokens, documents in self._lines:
            yield from tokens.rest(tokens.end)
            yield from documents.rest(tokens.end)


class _ArraySpans:
    """The items of one array, cut into spans. (part, item) -> (split, item): parts are consecutive."""

    def __init__(self, split: Split, of_tokens: bool, layout: Layout) -> None:
        self.end = 0
        self._split: Split = split
        self._of_tokens = of_tokens
        self._step = span_length(layout, of_tokens=of_tokens)
        self._start = 0
        self._open: list[Part] = []

    def add(self, part: Part) -> Iterator[Span]:
        if part.token_count if self._of_tokens else part.seq_count:
            self._open.append(part)
            self.end = self._end_of(part)
        while self.end >= self._start + self._step:
            yield self._span(self._start + self._step, None)

    def rest(self, token_count: int) -> Iterator[Span]:
        """The last span, where items are left. There is always one of documents, as it ends seq_starts."""
        if not self._of_tokens or self.end > self._start:
            yield self._span(self.end, None if self._of_tokens else token_count)

    def _span(self, stop: int, last_entry: int | None) -> Span:
        span = Span(
            split=self._split,
            of_tokens=self._of_tokens,
            start=self._start,
            stop=stop,
            last_entry=last_entry,
            parts=tuple(self._open),
        )
        self._start = stop
        self._open = [part for part in self._open if self._end_of(part) > stop]
        return span

    def _end_of(self, part: Part) -> int:
        return part.first_token + part.token_count if self._of_tokens else part.first_seq + part.seq_count
