"""What a build is told (frozen, strict models at the edge) and the small facts its tasks hand to each other."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from flat_tokens.arrays import LayoutName
from flat_tokens.reader import SplitName
from flat_tokens.storage import StoredObject

FORMAT_SEMANTICS = "1"
"""Raised when the same input would give other bytes: it is part of every shard's key and every build's id."""

Split = SplitName
FileFormat = Literal["parquet", "jsonl", "text", "arrow", "csv"]
SCHEMES = ("file", "local", "http", "https", "gs", "gcs", "s3", "s3a", "hf", "memory")
SECRET_PARAMETERS = re.compile(r"token|secret|signature|password|credential|apikey|api_key|^sig$|^key$", re.I)


def digest_of(*parts: Any) -> str:
    """A hexadecimal digest of values that JSON can write: equal values, equal digest, on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class Model(BaseModel):
    """Frozen and strict: what is not understood is refused, not ignored."""

    # What is refused may hold a secret: a fault names the setting, never its value.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


def plain_location(location: str) -> str:
    """Refuse what must not stand in a run's parameters, and what cannot be a location."""
    if not location.strip() or "\0" in location:
        raise ValueError(f"{location!r} is not a path or URL")
    if "::" in location:
        raise ValueError("chained URLs ('::') are not accepted; name the file itself")
    if re.search(r"(^|/)(?!\.{1,2}/)[^/:]+/\.\.(/|$)", location):
        raise ValueError(f"{location} goes down and up again ('..'); write where it leads")
    parts = urlsplit(location)
    if "://" in location and parts.scheme not in SCHEMES:
        raise ValueError(f"{location.partition('://')[0]}:// is not known here; {', '.join(SCHEMES)} are")
    if "@" in parts.netloc and parts.scheme not in ("", "hf"):
        raise ValueError(
            f"the URL of {parts.hostname} carries credentials. Parameters are shown in plain text: use ambient credentials "
            "(environment, instance role) instead."
        )
    if secrets := [name for name, _ in parse_qsl(parts.query) if SECRET_PARAMETERS.search(name)]:
        raise ValueError(f"the URL of {parts.hostname} is signed ({secrets[0]}). Use ambient credentials instead.")
    return location


Location = Annotated[str, BeforeValidator(lambda v: plain_location(os.fspath(v)) if isinstance(v, str | os.PathLike) else v)]


class HubDataset(Model):
    """A dataset on the Hugging Face hub, or anything else that ``datasets.load_dataset`` takes by these names."""

    path: str = Field(min_length=1, description="Repository, such as HuggingFaceFW/fineweb-edu")
    name: str | None = Field(None, description="Configuration (subset), such as sample-10BT")
    split: str = Field("train", min_length=1, description="The split that is read")
    revision: str = Field("main", min_length=1, description="Branch, tag or commit; a build pins it to the commit")


class Source(Model):
    """Where text comes from: files (``path``) or a hub dataset (``hub``)."""

    name: str = Field("source", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="A name for people and the manifest")
    path: Location | None = Field(None, description="File, directory, glob or fsspec URL")
    hub: HubDataset | None = Field(None, description="A dataset on the hub")
    format: Literal["auto", FileFormat] = Field("auto", description="Told from the content where it is 'auto'")
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
        """The columns that are read: the text's and, where there is another one, the id's."""
        return list(dict.fromkeys(filter(None, (self.text_column, self.id_column))))

    def reading(self) -> tuple[Any, ...]:
        """The settings that decide which documents a file holds."""
        return (self.text_column, self.id_column, self.document_separator)


class TokenizerConfig(Model):
    """A tokenizer by name, or by the file that defines it."""

    name: str = Field(
        min_length=1,
        description="A tiktoken encoding (cl100k_base), 'bytes', a .tiktoken file, a tokenizer.json, or a hub repository",
    )
    pattern: str | None = Field(None, description=".tiktoken files: the split pattern, or the encoding whose it is")
    revision: str | None = Field(None, description="Hub repositories: branch, tag or commit")
    engine: Literal["auto", "reference"] = Field(
        "auto", description="'auto' takes the fast engine where it gives exactly the reference engine's tokens"
    )


class DocumentPolicy(Model):
    """What happens to a document that is not text."""

    on_bad: Literal["error", "skip", "replace"] = Field(
        "error",
        description="error: stop, naming file and row. skip: leave out and count. replace: U+FFFD for what is not Unicode; "
        "what has no text at all is skipped",
    )
    empty: Literal["keep", "skip"] = Field("keep", description="keep: an empty text is a sequence of no tokens")
    max_bytes: int = Field(256 << 20, gt=0, le=1 << 31, description="A longer document is a bad document; never cut")


class BuildConfig(Model):
    """Everything a build is told."""

    output: Location = Field(description="Directory or URL: versions, token shards and the pointer live below it")
    name: str = Field("dataset", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="A name for people")
    sources: tuple[Source, ...] = Field(min_length=1, description="Read in this order")
    tokenizer: TokenizerConfig = Field(description="A name, or name with pattern, revision, engine")
    documents: DocumentPolicy = Field(DocumentPolicy(), description="What happens to documents that are empty or not text")
    validation_fraction: float = Field(0.005, ge=0, le=1, description="Of all documents, by a stable hash of their keys")
    split_seed: int = Field(0, ge=0, lt=2**63, description="Another seed draws other documents for validation")
    layout: Literal["auto", LayoutName] = Field("auto", description="auto: mmap on local disks, compact elsewhere")
    slice_bytes: int = Field(128_000_000, gt=0, le=1 << 31, description="Text in a slice, the unit of work and resume")
    workers: int | None = Field(None, ge=1, le=256, description="Slices at a time; the number of cores without it")
    scratch: Location | None = Field(None, description="Local directory for downloads and staging")
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
        if isinstance(value.get("tokenizer"), str):
            value["tokenizer"] = {"name": value["tokenizer"]}
        return value

    @field_validator("sources")
    @classmethod
    def distinct_names(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        names = [source.name for source in sources]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are named {repeated[0]!r}; give each a name of its own")
        return sources

    @field_validator("output")
    @classmethod
    def writable(cls, output: str) -> str:
        if output.startswith(("http://", "https://")):
            raise ValueError("nothing can be written to http; name a directory or an object store, such as gs://bucket/path")
        return output

    @model_validator(mode="after")
    def apart(self) -> Self:
        """The next build would read what this one wrote."""
        output = _local_path(self.output)
        for source in self.sources:
            path = _local_path(source.path) if source.path else None
            if output and path and os.path.commonpath([output, path]) in (output, path):
                raise ValueError(f"output {output} and source {path} lie within each other. Keep them apart.")
        return self

    @model_validator(mode="after")
    def one_split_rule(self) -> Self:
        by_source = [source.name for source in self.sources if source.validation_split]
        if by_source and "validation_fraction" in self.model_fields_set and self.validation_fraction > 0:
            raise ValueError(
                f"source {by_source[0]!r} names a validation_split, and validation_fraction is {self.validation_fraction}. "
                "Remove one of them."
            )
        return self

    @property
    def fraction(self) -> float:
        """The share of documents drawn for validation: none where a source brings its own validation split."""
        return 0.0 if any(source.validation_split for source in self.sources) else self.validation_fraction


class SourceFile(Model):
    """A file with a known content, readable on this machine."""

    source: int = Field(description="Index of its source")
    name: str = Field(description="Name below its source, for people and the manifest")
    location: str = Field(description="Local path; not part of its identity")
    size: int
    sha256: str
    format: FileFormat
    split: Split | None = Field(None, description="Where all its documents go; None: by their keys")
    stamp: tuple[int, ...] = Field((), description="Size, times and inode when the digest was taken")

    def identity(self) -> tuple[Any, ...]:
        return (self.sha256, self.format)


class Slice(Model):
    """A part of a file: row groups or record batches ``start:stop``, of those rows ``first_row`` to ``last_row``; or bytes
    ``start:stop`` at document ends.
    """

    file: SourceFile
    start: int
    stop: int
    rows: tuple[int, int] | None = Field(None, description="Rows of the part, where it is cut within one row group")
    text_bytes: int = Field(description="About how much text")

    @property
    def label(self) -> str:
        return f"{self.file.name}[{self.start}:{self.stop}]" + (f"@{self.rows[0]}" if self.rows else "")


class TokenShard(Model):
    """The receipt of a slice's tokens: written last, so that its presence says the shard is whole."""

    key: str
    inputs: dict[str, Any] = Field(description="What the key is a digest of")
    objects: tuple[StoredObject, ...]
    text_bytes: int
    rows: int = Field(description="Rows or lines of the slice, blank lines included")
    read: int = Field(description="Documents")
    written: int
    skipped: dict[str, int]
    replaced: dict[str, int]
    token_count: int
    max_token_id: int

    @model_validator(mode="after")
    def nothing_lost(self) -> Self:
        if self.read != self.written + sum(self.skipped.values()):
            raise ValueError(f"shard {self.key[:12]}: read {self.read}, written {self.written}, skipped {self.skipped}")
        return self

    @property
    def byte_count(self) -> int:
        return sum(stored.size for stored in self.objects)


def _local_path(location: str) -> str | None:
    """A local path with its links resolved; None of a URL."""
    path = location.removeprefix("file://").removeprefix("local://")
    if "://" in path:
        return None
    return os.path.realpath(os.path.expanduser(path))


def unknown_key_hint(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence for each fault of a configuration, with the nearest valid key for an unknown one."""
    sentences = []
    faults = error.errors(include_url=False)
    for fault in faults:
        if fault["type"] == "too_short" and any(other["loc"][:1] == fault["loc"] != other["loc"] for other in faults):
            continue  # pydantic counts an item that is refused as absent; its own fault says more
        where = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            valid = sorted(_fields_at(model, fault["loc"][:-1]))
            near = difflib.get_close_matches(str(fault["loc"][-1]), valid, 1, 0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Valid keys: {', '.join(valid)}."
            sentences.append(f"unknown key {where!r}. {hint}")
        else:
            said = fault["msg"].removeprefix("Value error, ")
            message = "should be a mapping of settings" if fault["type"] == "model_type" else said
            sentences.append(f"{where}: {message}" if where else message)
    return sentences


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> set[str]:
    """Names of the fields of the model that stands at *path* within *model*."""
    nested: dict[str, type[BaseModel]] = {
        "sources": Source,
        "source": Source,
        "hub": HubDataset,
        "tokenizer": TokenizerConfig,
        "documents": DocumentPolicy,
    }
    for part in path:
        if isinstance(part, str) and part in nested:
            model = nested[part]
    return set(model.model_fields) | ({"source"} if model is BuildConfig else set())
