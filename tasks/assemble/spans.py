"""Spans: where each document is in the final arrays, and which task writes which objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from flat_tokens.arrays.layouts import Layout
from tasks.assemble.choice import SplitCounts
from tasks.models import LEFT_OUT, Model, Split
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
    last_entry: int | None = None
    """The token count, for the one that ends seq_starts."""
    columns: dict[str, str] = Field({})
    """The kinds of the kept columns, by their names, for one of documents."""
    parts: tuple[Annotated[Part, Field(discriminator="kind")], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.split} {'tokens' if self.of_tokens else 'documents'} {self.start:,} to {self.stop:,}"


def span_length(layout: Layout, *, of_tokens: bool) -> int:
    """Items of a span that is not the last of its array: whole objects."""
    length = (layout.encoded_tokens if of_tokens else layout.seq_starts).object_length
    return length * max(1, (SPAN_TOKENS if of_tokens else SPAN_DOCUMENTS) // length)


class SpanLayout:
    """Lays out the spans of all splits, by prefix sums over the parts' counts. Each is returned as soon as its last part is
    known, so that objects can be written while later slices are still tokenized. Where the dataset keeps columns, spans of
    documents are returned last: the kind of a column is known with the last part, and all objects have the same kinds, however
    the sources were cut into parts.
    """

    def __init__(self, target: Target) -> None:
        self._keeps_columns, self._has_texts = bool(target.columns), bool(target.texts)
        self._waiting: list[Span] = []
        self._lines: dict[Split, tuple[_ArraySpans, _ArraySpans]] = {
            split: (_ArraySpans(split, True, target), _ArraySpans(split, False, target)) for split in target.every_split
        }

    def add(self, part: Part, counts: SplitCounts) -> Iterator[Span]:
        """The spans that end within the next part."""
        for split, (tokens, documents) in self._lines.items():
            seq_count, token_count = counts[split]
            position = Position(first_seq=documents.end, seq_count=seq_count, first_token=tokens.end, token_count=token_count)
            here = part.model_copy(update=dict(position))
            yield from tokens.add(here)
            if self._keeps_columns:
                self._waiting += documents.add(here)
            else:
                yield from documents.add(here)

    def rest(self, kinds: Mapping[str, str]) -> Iterator[Span]:
        """The last spans, when there are no more parts. *kinds*: of the kept columns."""
        for split, (tokens, documents) in self._lines.items():
            if split == LEFT_OUT and not documents.end and not self._has_texts:
                continue  # nothing is left out, and nothing is next to the version
            yield from tokens.rest(tokens.end)
            self._waiting += documents.rest(tokens.end)
        for span in self._waiting:
            yield span.model_copy(update={"columns": dict(kinds)})


class _ArraySpans:
    """The items of one array, cut into spans. (part, item) -> (split, item): parts are consecutive."""

    def __init__(self, split: Split, of_tokens: bool, target: Target) -> None:
        self.end = 0
        self._split: Split = split
        self._of_tokens = of_tokens
        # One task writes the rows of what is left out: their columns are one object.
        is_one = split == LEFT_OUT and not of_tokens
        self._step = sys.maxsize if is_one else span_length(target.layout_of(split), of_tokens=of_tokens)
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
