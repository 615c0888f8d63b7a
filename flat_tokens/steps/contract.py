"""A step: a function of an Arrow batch of documents that says which stay, and with which text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from flat_tokens.annotations import Bools, JsonFacts
from flat_tokens.extras import pa


class TextMatch(NamedTuple):
    """A match of a step in a document: the document's number in the batch, the name of the match, and facts of it, for reports.
    Facts are numbers, never text, because a document may have to be forgotten.
    """

    document: int
    name: str
    example: JsonFacts


class Outcome(NamedTuple):
    """The outcome of a step for a batch of n documents. None: all stay, as they are.

    ``keep``: which documents stay, n booleans. ``reason``: why the others go, one text for all of them or n texts. ``text``: the
    n texts from here on; those of documents that go do not matter. ``spans``: which characters of each text count for the loss,
    n lists of pairs ``[start, stop]``; null: all of them. ``columns``: the columns of ``gives_columns``, n values each.
    ``matches``: what was found in which document, each name once a document; in the order of the documents. Builds count them
    by name and keep a few as examples.
    """

    keep: pa.Array | Bools | None = None
    reason: pa.Array | str | None = None
    text: pa.Array | None = None
    spans: pa.Array | None = None
    columns: Mapping[str, pa.Array] | None = None
    matches: Sequence[TextMatch] = ()


Step: TypeAlias = "Callable[[pa.RecordBatch], Outcome]"
"""Batches have the columns ``text`` (large_string, no nulls) and ``key`` (uint64), one document a row, and the columns that the
source keeps or earlier steps give. What becomes of a document follows from its own row alone: batches end anywhere. Several
threads call a step at a time.

A step may have attributes: ``version``, a text that changes when the same document comes to another end, instead of the version
of its package; ``gives_spans``, true if it gives spans, so that the dataset gets a loss mask; ``gives_columns``, the names of the
columns that it gives, which the dataset keeps; ``described_as``, the options by which keys and manifests know it, where these
are not those that it was made of.
"""

MakeStep: TypeAlias = Callable[..., Step]
"""Makes a step of its options, which are keywords. ValueError or TypeError for options that it does not take."""
