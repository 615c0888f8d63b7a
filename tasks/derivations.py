"""What is made of whole datasets: merging, choosing documents, shuffling them, storing them in another layout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flat_tokens.arrays import LayoutName
from flat_tokens.reader import SPLITS
from tasks.finalize import card_head, card_sources, card_tokenizer, counts_text
from tasks.inputs import Input
from tasks.models import FORMAT_SEMANTICS, Location, Model, Output, Split, Whole, digest_of, number

logger = logging.getLogger(__name__)

Seed = Annotated[Whole, Field(ge=0, lt=2**63)]


class Merge(Model):
    """All documents of several datasets, one behind the other, split by split."""

    operation: Literal["merge"] = "merge"
    allow_different_tokenizers: bool = Field(False, description="Or where it is not known that they are the same")


class Subset(Model):
    """The documents that all filters let through, in their order."""

    operation: Literal["subset"] = "subset"
    sources: tuple[str, ...] | None = Field(None, min_length=1, description="Only of the sources of these names")
    min_tokens: Whole | None = Field(None, ge=0)
    max_tokens: Whole | None = Field(None, ge=0)
    key_list: Location | None = Field(None, description="A file of keys: 16 hexadecimal digits a line, or .npy of uint64")
    id_list: Location | None = Field(None, description="A file of ids, one a line, whose documents are kept")
    fraction: Annotated[float | None, BeforeValidator(number)] = Field(
        None, ge=0, le=1, description="A sample by a hash of key and seed: a smaller fraction is within a larger one"
    )
    count: Whole | None = Field(None, ge=0, description="A sample of so many documents of each split")
    seed: Seed = Field(0, description="Another seed draws another sample")
    split: Split | None = Field(None, description="Filter this split alone; the other one stays as it is")
    drop: Split | None = Field(None, description="Leave this split empty")

    @model_validator(mode="after")
    def sensible(self) -> Self:
        if self.fraction is not None and self.count is not None:
            raise ValueError("a sample has a fraction or a count, not both")
        if self.key_list is not None and self.id_list is not None:
            raise ValueError("documents are listed by keys or by ids, not both")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: no document is left")
        if self.split is not None and self.split == self.drop:
            raise ValueError(f"split and drop are both {self.split}")
        filters = set(type(self).model_fields) - {"operation", "seed", "split"}
        if all(getattr(self, name) is None for name in filters):
            raise ValueError(f"a subset needs a filter: {', '.join(sorted(filters))}")
        return self

    @property
    def filtered(self) -> tuple[Split, ...]:
        return (self.split,) if self.split else SPLITS


class Shuffle(Model):
    """The same documents in an order that the seed alone decides."""

    operation: Literal["shuffle"] = "shuffle"
    seed: Seed = Field(0, description="Another seed gives another order")
    split: Split | None = Field(None, description="Shuffle this split alone; the other one stays as it is")

    @property
    def shuffled(self) -> tuple[Split, ...]:
        return (self.split,) if self.split else SPLITS


class Relayout(Model):
    """The same documents, stored in another layout."""

    operation: Literal["relayout"] = "relayout"


class Derivation(Model):
    """Everything that an operation on datasets is told."""

    operation: Merge | Subset | Shuffle | Relayout = Field(discriminator="operation")
    inputs: tuple[Location, ...] = Field(min_length=1, description="Datasets: outputs of builds, versions of them, plain zarr")
    output: Output = Field(description="Directory or URL: the version and the pointer live below it")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Without it, that of the first input")
    layout: Literal["auto", LayoutName] = Field("auto", description="auto: the first input's")
    workers: Whole | None = Field(None, ge=1, le=256, description="Tasks at a time; the number of cores without it")
    scratch: Output | None = Field(None, description="Local directory for staging, where the output is remote")
    verify_level: Literal["quick", "full"] = Field("quick", description="Check before publication; full reads every byte")

    @model_validator(mode="after")
    def complete(self) -> Self:
        if len(self.inputs) > 1 and not isinstance(self.operation, Merge):
            raise ValueError(f"{self.operation.operation} takes one dataset, not {len(self.inputs)}. Merge them first.")
        if isinstance(self.operation, Relayout) and self.layout == "auto":
            raise ValueError("relayout needs a layout: mmap, compact or zarr2")
        return self


class Derived(Model):
    """What a version was made of: everything that its bytes depend on, and nothing of when, where or by whom."""

    name: str
    sources: tuple[dict[str, Any], ...]
    tokenizer: dict[str, Any]
    documents: dict[str, Any]
    split: dict[str, Any]
    semantics: str = FORMAT_SEMANTICS
    operation: dict[str, Any]
    inputs: tuple[dict[str, Any], ...]

    def version(self, layout: LayoutName) -> str:
        return digest_of(self.model_dump(), layout)[:16]


def derived(order: Derivation, inputs: Sequence[Input], operation: dict[str, Any]) -> Derived:
    """What a version made of some inputs is; sources that get another name in it are logged.

    ValueError where tokenizers differ, or a source has a name that there is none of.
    """
    names = list(dict.fromkeys(source["name"] for one in inputs for source in one.sources))
    if isinstance(order.operation, Subset) and (unknown := sorted(set(order.operation.sources or ()) - set(names))):
        raise ValueError(f"there is no source {unknown[0]!r}; there are {', '.join(names)}")
    sources = merged_sources(inputs)
    of_inputs = [(one, source["name"]) for one in inputs for source in one.sources]
    for (one, before), source in zip(of_inputs, sources, strict=True):
        if source["name"] != before:
            logger.warning(
                "The source %r of %s is called %r here: another source has its name", before, one.label, source["name"]
            )
    return Derived(
        name=order.name or inputs[0].name,
        sources=tuple(sources),
        tokenizer=common_tokenizer(inputs, order.operation),
        documents=_common([one.documents for one in inputs]),
        split=_common([one.split for one in inputs]),
        operation=operation,
        inputs=tuple(one.facts() for one in inputs),
    )


def _common(several: list[dict[str, Any] | None]) -> dict[str, Any]:
    """What all inputs say alike, nothing where they don't."""
    return several[0] if several[0] is not None and all(one == several[0] for one in several) else {}


def common_tokenizer(inputs: Sequence[Input], operation: Merge | Subset | Shuffle | Relayout) -> dict[str, Any]:
    """The tokenizer of all inputs; one without a name where none has a record of it, or they differ.

    ValueError, naming two inputs, where they differ or some have no record, unless that is allowed.
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


def merged_sources(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """The sources of all inputs, one behind the other. Of equal names all but the first get a number, the first of ``name-2``,
    ``name-3`` ... that none has, and ``renamed_from`` says what they were called.
    """
    taken = {source["name"] for one in inputs for source in one.sources}
    seen: set[str] = set()
    sources = []
    for source in (source for one in inputs for source in one.sources):
        name, number = source["name"], 1
        while name in seen or (number > 1 and name in taken):
            number += 1
            name = f"{source['name']}-{number}"
        seen.add(name)
        sources.append(source if name == source["name"] else {**source, "name": name, "renamed_from": source["name"]})
    return sources


def card(made_of: Derived, layout: LayoutName, totals: dict[str, Any], version: str) -> str:
    """The dataset card."""
    documents = totals["documents"]
    settings = ", ".join(f"{key} {_short(value)}" for key, value in made_of.operation.items() if key != "operation")
    lines = [
        *card_head(made_of.name, layout, totals, version),
        *card_tokenizer(made_of.tokenizer),
        "## Made of",
        "",
        f"{made_of.operation['operation'].capitalize()}{f' ({settings})' if settings else ''} of:",
        "",
        "| dataset | version | manifest or content, sha256 | train sequences | validation sequences |",
        "|---|---|---|---:|---:|",
        *(
            f"| {one['name']} | {one['version'] or ''} | `{one['digest']}` | "
            + " | ".join(f"{one['seq_counts'][split]:,}" for split in SPLITS)
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


def _short(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
