"""Finalizing a version, whatever it is made of: totals, repeated keys, card, seal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flat_tokens.arrays.layouts import LayoutName
from tasks.finalize.provenance import Provenance
from tasks.finalize.seal import seal
from tasks.finalize.totals import repeated_keys, split_totals
from tasks.output.paths import version_store
from tasks.output.staging import Place
from tasks.split.spans import Span
from tasks.split.write import Written


class Contents(NamedTuple):
    """All that a version is made of, its objects of tokens and documents written.

    ``documents``: totals of its documents, given how many have the key of another. ``card``: the dataset card, given
    ``made_of``, ``layout``, the totals and the version.
    """

    made_of: Provenance
    layout: LayoutName
    spans: Sequence[Span]
    written: Sequence[Written]
    documents: Callable[[int], dict[str, Any]]
    card: Callable[[Any, LayoutName, dict[str, Any], str], str]


def finalize(version: str, contents: Contents, place: Place, verify_level: str) -> str:
    """Write metadata, manifest and card of a version, check it, commit it. Return its name."""
    store = version_store(place.root, version)
    totals = split_totals(contents.spans, contents.written)
    totals["documents"] = contents.documents(repeated_keys(store, contents.layout, totals, Path(place.staging)))
    card = contents.card(contents.made_of, contents.layout, totals, version)
    seal(store, contents.layout, contents.made_of.model_dump(), totals, contents.written, card, verify_level)
    return version
