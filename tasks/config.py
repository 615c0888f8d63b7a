"""Configuration of a build: frozen, strict models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.text.formats import FileFormat
from tasks.locations import Location, Output, local_path, place_of, readable
from tasks.models import Model


def number(value: Any) -> Any:
    """Refuse yes, no, on and off: YAML makes booleans of them, which would pass for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


Whole = Annotated[int, BeforeValidator(number)]
Workers = Annotated[int, Field(ge=1, le=256), BeforeValidator(number)]


READING = ("text_column", "id_column", "document_separator")
"""The settings of a source that are part of the keys of its token shards."""


class HubDataset(Model):
    """A dataset on the Hugging Face hub, or anything else that datasets.load_dataset takes by these names."""

    path: str = Field(min_length=1, description="Repository, such as HuggingFaceFW/fineweb-edu")
    name: str | None = Field(None, description="Configuration (subset), such as sample-10BT")
    split: str = Field("train", min_length=1, description="The split that is read")
    revision: str = Field("main", min_length=1, description="Branch, tag or commit; a build pins it to the commit")

    @field_validator("path")
    @classmethod
    def within_roots(cls, path: str) -> str:
        readable(f"hf://datasets/{path}")
        return path


class Source(Model):
    """Where text comes from: files (path) or a dataset on the hub (hub), one of the two."""

    name: str = Field("source", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="A name for people and the manifest")
    path: Location | None = Field(None, description="Files: a file, a directory, a glob or a URL (gs://, s3://, hf://, https://)")
    hub: HubDataset | None = Field(None, description="A dataset on the hub, instead of path")
    format: Literal["auto", FileFormat] = Field("auto", description="auto: told from the content")
    text_column: str = Field("text", min_length=1, description="The column or key that holds the text")
    id_column: str | None = Field(None, min_length=1, description="Identity of a document; without it, its content")
    document_separator: str | None = Field(
        None, min_length=1, description="Text files: what stands between documents; without it a file is one document"
    )
    split: str | None = Field(None, min_length=1, description="Files: only those of this split, by their names")
    validation_split: str | None = Field(
        None, min_length=1, description="An existing split of the source that becomes the validation split, whole"
    )

    @model_validator(mode="after")
    def one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError(
                f"source {self.name!r} has {'neither' if self.hub is None else 'both'} of 'path' and 'hub'; give one"
            )
        if self.hub is not None and self.split is not None:
            raise ValueError(f"source {self.name!r}: the split of a hub dataset is hub.split")
        return self

    @property
    def columns(self) -> list[str]:
        """The columns that are read: that of the text and, if there is another one, that of the id."""
        return list(dict.fromkeys(filter(None, (self.text_column, self.id_column))))

    def reading(self) -> tuple[Any, ...]:
        """The settings that decide which documents a file holds."""
        return tuple(getattr(self, setting) for setting in READING)


class TokenizerConfig(Model):
    """A tokenizer by name, or by the file that defines it."""

    name: str = Field(
        min_length=1,
        description="A tiktoken encoding (cl100k_base), 'bytes', a .tiktoken file, a tokenizer.json, or a hub repository",
    )
    pattern: str | None = Field(None, description=".tiktoken files: the split pattern, or the encoding whose it is")
    revision: str | None = Field(None, description="Hub repositories: branch, tag or commit")
    engine: Literal["auto", "reference"] = Field(
        "auto", description="auto: the fast engine, where it gives exactly the reference engine's tokens"
    )

    @field_validator("name")
    @classmethod
    def within_roots(cls, name: str) -> str:
        is_file = name.endswith((".json", ".tiktoken")) or os.path.isabs(name) or os.path.isdir(name)
        return readable(name) if is_file else name


class DocumentPolicy(Model):
    """Treatment of documents that are empty or not text."""

    on_bad: Literal["error", "skip", "replace"] = Field(
        "error",
        description="error: stop, naming file and row. skip: leave out and count. replace: U+FFFD for what is not Unicode; "
        "what has no text at all is skipped",
    )
    empty: Literal["keep", "skip"] = Field("keep", description="keep: an empty text is a sequence of no tokens")
    max_bytes: Whole = Field(256 << 20, gt=0, le=1 << 31, description="A longer document is a bad document; never cut")


class GroupPolicy(Model):
    """How a build is spread over the workers of a pool: slices go to them in groups, each a run of its own."""

    threshold: Whole = Field(256, ge=1, le=1_000_000, description="Fewer slices stay in the build's own process")
    slices: Whole = Field(64, ge=1, le=4096, description="Slices in a group")
    at_once: Whole = Field(256, ge=1, le=4096, description="Groups that wait for a worker or run")
    fetch_bytes: Whole = Field(
        32_000_000_000, gt=0, le=1 << 60, description="Source files in a group that fetches; below twice of it the build does it"
    )
    keep_files: bool = Field(
        True, description="Fetched files stay in scratch, for groups on the same disk. false: they go with their group"
    )
    lost_after: Whole = Field(120, ge=4, le=86_400, description="Seconds without a sign of life before a group is begun again")
    attempts: Whole = Field(4, ge=1, le=100, description="How often a group may be lost before the build gives up")


class BuildConfig(Model):
    """The settings of a build."""

    output: Output = Field(description="Directory or URL: versions, token shards and the pointer live below it")
    name: str = Field(
        "dataset", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="A name for people, who find its runs by it"
    )
    sources: tuple[Source, ...] = Field(min_length=1, description="Where the text comes from; read in this order")
    tokenizer: TokenizerConfig = Field(title="Tokenizer", description="What makes tokens of text")
    documents: DocumentPolicy = Field(
        DocumentPolicy(), title="Documents", description="What happens to documents that are empty or not text"
    )
    validation_fraction: Annotated[float, BeforeValidator(number)] = Field(
        0.005,
        ge=0,
        le=1,
        description="Share of all documents, by a stable hash of their keys; 0 where a source has a validation_split",
    )
    split_seed: Whole = Field(0, ge=0, lt=2**63, description="Another seed draws other documents for validation")
    layout: Literal["auto", LayoutName] = Field("auto", description="auto: mmap on local disks, compact elsewhere")
    slice_bytes: Whole = Field(128_000_000, gt=0, le=1 << 31, description="Text in a slice, the unit of work and resume")
    workers: Workers | None = Field(None, description="Slices at a time; the number of cores without it")
    runner: Literal["threads", "groups", "ray"] = Field(
        "threads", description="threads: of one process. groups: runs on a work pool. ray: the Ray cluster of this machine"
    )
    groups: GroupPolicy = Field(GroupPolicy(), title="Groups", description="With runner groups: how much work is a run")
    scratch: Output | None = Field(None, description="Local directory for downloads and staging")
    verify_level: Literal["quick", "full"] = Field("quick", description="Check before publication; full reads every byte")

    @model_validator(mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """``source: {...}`` for a single source; ``tokenizer: NAME`` for its name alone."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if "source" in value and "sources" in value:
            raise ValueError("there are both 'source' and 'sources'; list all of them in 'sources'")
        if "source" in value:
            value["sources"] = [value.pop("source")]
        if isinstance(value.get("sources"), dict):
            raise ValueError("'sources' is a list; a single one may be called 'source'")
        tokenizer = value.get("tokenizer")
        if isinstance(tokenizer, str):
            value["tokenizer"] = {"name": tokenizer}
        elif "tokenizer" in value and not isinstance(tokenizer, dict | TokenizerConfig):
            raise ValueError("'tokenizer' is a name, such as cl100k_base, or a mapping of name, pattern, revision, engine")
        return value

    @field_validator("sources")
    @classmethod
    def distinct_names(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        names = [source.name for source in sources]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are named {repeated[0]!r}; give each a name of its own")
        return sources

    @field_validator("scratch")
    @classmethod
    def on_this_machine(cls, scratch: str | None) -> str | None:
        if scratch is not None and local_path(scratch) is None:
            raise ValueError("scratch is a directory of this machine, not a URL")
        return scratch

    @model_validator(mode="after")
    def apart(self) -> Self:
        """Refuse an output within a source, or around one: the next build would read what this one wrote."""
        store, output = place_of(self.output)
        for source in self.sources:
            where, path = place_of(source.path) if source.path else (None, "")
            if where == store and os.path.commonpath([output, path]) in (output, path):
                raise ValueError(
                    f"output {self.output} and source {source.path} lie within each other. Keep them apart, so that no build "
                    "reads what another one wrote."
                )
            if self.scratch and where == "" and Path(place_of(self.scratch)[1]).is_relative_to(path):
                raise ValueError(f"scratch {self.scratch} lies within source {source.path}. Keep them apart.")
        return self

    @model_validator(mode="after")
    def one_split_rule(self) -> Self:
        by_source = [source.name for source in self.sources if source.validation_split]
        if by_source and "validation_fraction" in self.model_fields_set and self.validation_fraction > 0:
            raise ValueError(
                f"source {by_source[0]!r} names a validation_split, and validation_fraction is {self.validation_fraction}. "
                "Remove one of them, or set the fraction to 0."
            )
        return self

    @property
    def fraction(self) -> float:
        """The share of documents drawn for validation: none where a source brings its own validation split."""
        fraction = self.validation_fraction + 0.0  # -0.0 is 0
        return 0.0 if any(source.validation_split for source in self.sources) else fraction
