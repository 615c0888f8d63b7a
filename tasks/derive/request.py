"""Requests: the settings of a merge, subset, shuffle, relayout, import, publication on the hub, or forgetting."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.formats import FLAT_TOKENS, FORMATS
from flat_tokens.manifest import SplitName
from flat_tokens.rows.where import parse
from flat_tokens.tools.corpus import options_of
from tasks.config import Licence, Share, TokenizerConfig, Whole, Workers
from tasks.locations import Location, Output, plain_location, writable
from tasks.models import GivenName, Matching, Model, NonEmpty, Reason

Seed = Annotated[Whole, Field(ge=0, lt=2**63)]


class Merge(Model):
    """All documents of several datasets, in order, split by split."""

    operation: Literal["merge"] = "merge"
    allow_different_tokenizers: bool = False
    """Also where it is not recorded that they are the same."""


class Subset(Model):
    """The documents that all filters let through, in their order."""

    operation: Literal["subset"] = "subset"
    sources: tuple[str, ...] | None = Field(None, min_length=1)
    """Of the sources of these names."""
    min_tokens: Whole | None = Field(None, ge=0)
    """Of at least N tokens."""
    max_tokens: Whole | None = Field(None, ge=0)
    """Of at most N tokens."""
    where: NonEmpty | None = None
    """For which it is true: an expression such as source = 'web' and tokens >= 100."""
    key_list: Location | None = None
    """Whose keys are in this file: 16 hexadecimal digits a line, or .npy."""
    id_list: Location | None = None
    """Whose ids are in this file, one a line."""
    fraction: Share | None = None
    """A sample by a hash of key and seed: a smaller fraction is within a larger one."""
    count: Whole | None = Field(None, ge=0)
    """A sample of this many documents of each split."""
    seed: Seed = 0
    """Another seed draws another sample."""
    split: SplitName | None = None
    """Filter this split alone; the others stay as they are."""
    drop: SplitName | None = None
    """Leave this split empty."""

    @model_validator(mode="after")
    def sensible(self) -> Self:
        if self.fraction is not None and self.count is not None:
            raise ValueError("a sample has a fraction or a count, not both")
        if self.key_list is not None and self.id_list is not None:
            raise ValueError("documents are listed by keys or by ids, not both")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: no document is left")
        if self.where is not None:
            parse(self.where)
        if self.split is not None and self.split == self.drop:
            raise ValueError(f"split and drop are both {self.split}")
        filters = set(type(self).model_fields) - {"operation", "seed", "split"}
        if all(getattr(self, name) is None for name in filters):
            raise ValueError(f"a subset needs a filter: {', '.join(sorted(filters))}")
        return self


class Shuffle(Model):
    """The same documents in an order that the seed alone decides."""

    operation: Literal["shuffle"] = "shuffle"
    seed: Seed = 0
    """Another seed gives another order."""
    split: SplitName | None = None
    """Shuffle this split alone; the others stay as they are."""


class Relayout(Model):
    """The same documents, stored in another layout."""

    operation: Literal["relayout"] = "relayout"


class PublishSettings(Model):
    """Settings of whatever publishes a version that is not built of text."""

    output: Output
    """Directory or URL: versions, token shards and the pointer live below it."""
    name: GivenName | None = None
    """Without it, that of the first input."""
    layout: Literal["auto", LayoutName] = "auto"
    """auto: the first input's; else mmap on local disks."""
    workers: Workers | None = None
    """Tasks at a time; the number of cores without it."""
    scratch: Output | None = None
    """Local directory for staging, if the output is remote."""
    verify_level: Literal["quick", "full"] = "quick"
    """Check before publication; full reads every byte."""


class DeriveRequest(PublishSettings):
    """The settings of an operation on datasets."""

    operation: Merge | Subset | Shuffle | Relayout = Field(discriminator="operation")
    inputs: tuple[Location, ...] = Field(min_length=1)
    """Datasets: outputs of builds, versions of them, plain zarr."""

    @model_validator(mode="after")
    def complete(self) -> Self:
        if len(self.inputs) > 1 and not isinstance(self.operation, Merge):
            raise ValueError(f"{self.operation.operation} takes one dataset, not {len(self.inputs)}. Merge them first.")
        if isinstance(self.operation, Relayout) and self.layout == "auto":
            raise ValueError(f"relayout needs a layout: {', '.join(LAYOUTS)}")
        return self


class ImportRequest(PublishSettings):
    """The settings of an import."""

    path: Location
    """A file, a directory, the prefix that several files share, or a URL."""
    format: str | None = None
    """Where the content does not tell it."""
    options: JsonObject = Field(default_factory=dict)
    """Options of the format, such as end_of_text."""
    tokenizer: TokenizerConfig | None = None
    """Whose tokens they are, if that is to be on record."""
    validation_fraction: Share | None = None
    """Share of all documents, by a stable hash of their keys; without it, the files' own splits."""
    split_seed: Seed = 0
    """Another seed draws other documents for validation."""

    @model_validator(mode="after")
    def options_of_the_format(self) -> Self:
        if self.format is not None and self.format not in (FLAT_TOKENS, *FORMATS):
            raise ValueError(f"there is no format {self.format!r}; there are {', '.join(FORMATS)}")
        if self.format is not None and self.options:
            options_of(self.format, self.options)
        return self


Repository = Annotated[str, Matching(r"^(buckets/)?[\w.-]+/[\w.-]+\Z", "ORG/NAME or buckets/ORG/NAME")]


def place_on_hub(repo: str) -> str:
    """The URL of a dataset repository or a bucket."""
    return f"hf://{repo}" if repo.startswith("buckets/") else f"hf://datasets/{repo}"


class HubRequest(Model):
    """The settings of a publication on the hub."""

    dataset: Location
    """An output, whose latest version is published, or a version."""
    repo: Repository
    """ORG/NAME, or buckets/ORG/NAME; it is made if it is not there."""
    form: Literal["parquet", "zarr"] = "parquet"
    """Token ids in lists, or the version as it is."""
    private: bool | None = None
    """For whom the repository is made; one that is there stays as it is."""
    licence: Licence | None = None
    """Such as cc-by-4.0; without it that of the configuration."""
    workers: Workers | None = None
    """Files at a time; the number of cores without it."""
    scratch: Output | None = None
    """Local directory for files on their way."""

    @field_validator("repo")
    @classmethod
    def within_roots(cls, repo: str) -> str:
        writable(plain_location(place_on_hub(repo)))
        return repo


class ForgetRequest(Model):
    """Documents that are to be forgotten, named in one of several ways; of one source, or of all."""

    output: Output
    """Where the versions are."""
    reason: Reason = Field(min_length=1)
    """For whoever reads the certificate."""
    key_list: Location | None = None
    """A file with their keys: 16 hexadecimal digits a line, or .npy."""
    id_list: Location | None = None
    """A file with their ids, one a line."""
    where: NonEmpty | None = None
    """For which an expression is true, such as: file = 'a.jsonl' and row = 7."""
    like: Location | None = None
    """Another output: all that it has forgotten."""
    source: NonEmpty | None = None
    """Of this source alone."""
    allow_unknown: bool = False
    """With keys or ids: also those that no document has, for later builds."""
    runs: tuple[Location, ...] = ()
    """A ledger: the certificate says which steps of that run saw them."""
    before: int | None = Field(None, ge=0)
    """With a ledger: steps before this one; all without it."""
    skip_from: int | None = Field(None, ge=0)
    """With a ledger: the run leaves them out from this step on."""
    by: str | None = None
    """The person who asks for it; without it who runs the command."""
    scratch: Output | None = None
    """Local directory for staging, if the output is remote."""

    @model_validator(mode="after")
    def names_documents(self) -> Self:
        if len(self._given) > 1 or not (self._given or self.source) or (self.like and self.source):
            raise ValueError("documents are named by one of keys, ids, where or like; or all of a source, by its name")
        if self.where is not None:
            parse(self.where)
        return self

    @property
    def _given(self) -> list[str]:
        given = {"keys": self.key_list, "ids": self.id_list, "where": self.where, "like": self.like}
        return [how for how, value in given.items() if value is not None]

    @property
    def how(self) -> str:
        """The way in which documents are named, without a name of any."""
        return self._given[0] if self._given else "source"
