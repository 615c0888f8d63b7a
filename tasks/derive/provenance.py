"""Provenance and card of a dataset that is made of datasets."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.manifest import splits_of
from flat_tokens.reader import check_where
from flat_tokens.stores.store import Store
from tasks.derive.inputs import Input, splits_in
from tasks.derive.request import DeriveRequest, Merge, Relayout, Shuffle, Subset
from tasks.finalize.card import card_head, card_sources, card_tokenizer, counts_text
from tasks.finalize.provenance import Provenance
from tasks.rows import JoinedKinds

logger = logging.getLogger(__name__)


class DerivedProvenance(Provenance):
    """The provenance of a version made of other datasets."""

    operation: JsonObject
    inputs: tuple[JsonObject, ...]


def derived(request: DeriveRequest, inputs: Sequence[Input], operation: JsonObject) -> DerivedProvenance:
    """The provenance of a version made of *inputs*. ValueError if tokenizers differ, or a source or column
    that is named does not exist.
    """
    names = list(dict.fromkeys(source["name"] for one in inputs for source in one.sources))
    chosen = {getattr(request.operation, name, None) for name in ("split", "drop")} - {None, *(splits := splits_in(inputs))}
    if chosen:
        raise ValueError(f"there is no split {chosen.pop()!r}; there are {', '.join(splits)}")
    if isinstance(request.operation, Subset):
        if unknown := sorted(set(request.operation.sources or ()) - set(names)):
            raise ValueError(f"there is no source {unknown[0]!r}; there are {', '.join(names)}")
        if request.operation.where is not None:
            check_where(Store.at(inputs[0].location), request.operation.where)
    return DerivedProvenance(
        name=request.name or inputs[0].name,
        sources=tuple(merged_sources(inputs)),
        tokenizer=common_tokenizer(inputs, request.operation),
        documents=_common([one.documents for one in inputs]),
        split=_common([one.split for one in inputs]),
        operation=operation,
        inputs=tuple(one.facts() for one in inputs),
    )


def kept_columns(inputs: Sequence[Input]) -> dict[str, str]:
    """The kinds of the columns that a dataset made of *inputs* keeps: all columns of all inputs. ValueError, naming two inputs,
    if a column has kinds that have no common one.
    """
    kinds = JoinedKinds()
    for one in inputs:
        kinds.add(one.columns, one.location, "Build one of them again without it in source.keep_columns.")
    return kinds.now


def _common(several: list[JsonObject | None]) -> JsonObject:
    """The value that all inputs share; empty if they differ."""
    return several[0] if several[0] is not None and all(one == several[0] for one in several) else {}


def common_tokenizer(inputs: Sequence[Input], operation: Merge | Subset | Shuffle | Relayout) -> JsonObject:
    """The tokenizer of all inputs; one without a name if none is recorded, or if they differ. ValueError, naming two
    inputs, if they differ or some are not recorded, unless the operation allows it.
    """
    digests = [one.tokenizer.get("digest") for one in inputs]
    if len(set(digests)) == 1:
        return inputs[0].tokenizer or {"digest": None}
    if not (isinstance(operation, Merge) and operation.allow_different_tokenizers):
        k = next(k for k, digest in enumerate(digests) if digest != digests[0])
        raise ValueError(
            f"{_tokenizer_of(inputs[0])}, but {_tokenizer_of(inputs[k])}. Tokens of different tokenizers mean different things. "
            "Tokenize one of them again (python -m flows retokenize), or, if you know that they belong together, allow it: "
            "--allow-different-tokenizers"
        )
    known = [one.tokenizer for one in inputs if one.tokenizer]
    return known[0] if len({one["digest"] for one in known}) == 1 else {"digest": None}


def _tokenizer_of(one: Input) -> str:
    if not one.tokenizer:
        return f"of {one.location} no tokenizer is recorded"
    return f"{one.location} has tokens of {one.tokenizer.get('name') or 'a tokenizer'} (digest {one.tokenizer['digest'][:12]})"


def merged_sources(inputs: Sequence[Input]) -> list[JsonObject]:
    """All inputs' sources, in order. One whose name is taken gets the first free ``name-2`` ..., logged, and ``renamed_from``."""
    taken = {source["name"] for one in inputs for source in one.sources}
    sources: dict[str, JsonObject] = {}
    for of, source in ((one, source) for one in inputs for source in one.sources):
        former, number = source["name"], 1
        name = former
        while name in sources or (number > 1 and name in taken):
            number += 1
            name = f"{former}-{number}"
        if name != former:
            logger.warning("The source %r of %s is called %r here: another source has its name", former, of.label, name)
        sources[name] = source if name == former else {**source, "name": name, "renamed_from": former}
    return list(sources.values())


def card(made_of: DerivedProvenance, layout: LayoutName, totals: JsonObject, version: str) -> str:
    """The dataset card."""
    documents, splits = totals["documents"], splits_of(totals)
    named = {
        key: ", ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, dict) else value
        for key, value in made_of.operation.items()
        if key != "operation"
    }
    settings = ", ".join(f"{key} {value}" for key, value in named.items())
    lines = [
        *card_head(made_of.name, layout, totals, version),
        *card_tokenizer(made_of.tokenizer),
        "## Made of",
        "",
        f"{made_of.operation['operation'].capitalize()}{f' ({settings})' if settings else ''} of:",
        "",
        "| dataset | version | manifest or content, sha256 | " + " | ".join(f"{split} sequences" for split in splits) + " |",
        "|---|---|---|" + "---:|" * len(splits),
        *(
            f"| {one['name']} | {one['version'] or ''} | `{one['digest']}` | "
            + " | ".join(f"{one['seq_counts'].get(split, 0):,}" for split in splits)
            + " |"
            for one in made_of.inputs
        ),
        "",
        "## Documents",
        "",
        f"{documents['read']:,} in the inputs, {documents['written']:,} here, {documents['repeated_keys']:,} with the key of "
        f"another. Left out: {counts_text(documents['skipped'])}.",
        "",
        *card_sources(made_of.sources),
    ]
    return "\n".join(lines) + "\n"
