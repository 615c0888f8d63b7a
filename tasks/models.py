"""What a build is told (frozen, strict models at the edge) and the small facts its tasks hand to each other."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from flat_tokens.arrays import LayoutName
from flat_tokens.reader import SplitName
from flat_tokens.storage import StoredObject

FORMAT_SEMANTICS = "1"
"""Raised when the same input would give other bytes: it is part of every shard's key and every build's id."""

Split = SplitName
FileFormat = Literal["parquet", "jsonl", "text", "arrow", "csv"]
SCHEMES = ("file", "local", "http", "https", "gs", "gcs", "s3", "s3a", "hf", "memory")
NEED_A_HOST = ("http", "https", "gs", "gcs", "s3", "s3a")
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
    if parts.scheme in NEED_A_HOST and not parts.netloc:
        raise ValueError(f"{location} names no {'server' if parts.scheme.startswith('http') else 'bucket'}")
    if "@" in parts.netloc and parts.scheme not in ("", "hf"):
        raise ValueError(
            f"the URL of {parts.hostname} carries credentials. Parameters are shown in plain text: use ambient credentials "
            "(environment, instance role) instead."
        )
    if secrets := [name for name, _ in parse_qsl(parts.query) if SECRET_PARAMETERS.search(name)]:
        raise ValueError(f"the URL of {parts.hostname} is signed ({secrets[0]}). Use ambient credentials instead.")
    return location


INPUT_ROOTS, OUTPUT_ROOTS = "FLAT_TOKENS_INPUT_ROOTS", "FLAT_TOKENS_OUTPUT_ROOTS"
"""Environment variables of the workers: who may only start runs can have them read and write below these paths and URLs alone,
which stand with commas between them. What may be written may be read. Without a variable there is no such bound.
"""


def readable(location: str) -> str:
    """Refuse what lies outside of the roots for input, where the operator has set any."""
    return _within(location, "read", INPUT_ROOTS, OUTPUT_ROOTS)


def writable(location: str) -> str:
    """Refuse what cannot be written, and what lies outside of the roots for output, where the operator has set any."""
    if location.startswith(("http://", "https://")):
        raise ValueError("nothing can be written to http; name a directory or an object store, such as gs://bucket/path")
    return _within(location, "written", OUTPUT_ROOTS)


def _within(location: str, verb: str, variable: str, *more: str) -> str:
    if not os.environ.get(variable):
        return location
    listed = ",".join(os.environ.get(name, "") for name in (variable, *more))
    roots = [root.strip() for root in listed.split(",") if root.strip()]
    store, path = _place(location)
    for root in map(_place, roots):
        if root[0] == store and os.path.commonpath([root[1], path]) == root[1]:
            return location
    raise ValueError(
        f"{location} may not be {verb} here: {variable} allows {', '.join(roots)}. Ask who runs the workers for more."
    )


def _path(value: Any) -> Any:
    return plain_location(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


Location = Annotated[str, BeforeValidator(_path), AfterValidator(readable)]
Output = Annotated[str, BeforeValidator(_path), AfterValidator(writable)]


def number(value: Any) -> Any:
    """Refuse yes, no, on and off, which YAML makes booleans of, and which would then pass for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


Whole = Annotated[int, BeforeValidator(number)]
Workers = Annotated[int, Field(ge=1, le=256), BeforeValidator(number)]


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
        "auto", description="auto: the fast engine, where it gives exactly the reference engine's tokens"
    )

    @field_validator("name")
    @classmethod
    def within_roots(cls, name: str) -> str:
        is_file = name.endswith((".json", ".tiktoken")) or os.path.isabs(name) or os.path.isdir(name)
        return readable(name) if is_file else name


class DocumentPolicy(Model):
    """What happens to a document that is not text."""

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
    """Everything a build is told."""

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
        """The next build would read what this one wrote."""
        store, output = _place(self.output)
        for source in self.sources:
            where, path = _place(source.path) if source.path else (None, "")
            if where == store and os.path.commonpath([output, path]) in (output, path):
                raise ValueError(
                    f"output {self.output} and source {source.path} lie within each other. Keep them apart, so that no build "
                    "reads what another one wrote."
                )
            if self.scratch and where == "" and Path(_place(self.scratch)[1]).is_relative_to(path):
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


class FoundFile(Model):
    """A file of a source before its content is known. ``immutable``: a revision, etag or generation that names it."""

    source: int = Field(description="Index of its source")
    name: str = Field(description="Name below its source, for people and the manifest")
    uri: str
    size: int | None
    immutable: str | None = None
    content: str | None = Field(None, description="sha256:... or blob:..., where the store tells: the same under every name")
    split: Split | None = Field(None, description="Where all its documents go; None: by their keys")

    @property
    def label(self) -> str:
        return self.name


class SourceFile(Model):
    """A file with a known content. It is readable at its location only where somebody has brought it there."""

    source: int = Field(description="Index of its source")
    name: str = Field(description="Name below its source, for people and the manifest")
    location: str = Field("", description="Local path, if it was brought to a machine; not part of its identity")
    size: int
    sha256: str
    format: FileFormat
    split: Split | None = Field(None, description="Where all its documents go; None: by their keys")
    stamp: tuple[int, ...] = Field((), description="Size, times and inode when the digest was taken")
    found: FoundFile | None = Field(None, description="Where it can be had again")

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


def local_path(location: str) -> str | None:
    """The path of a location on this machine; None where it is elsewhere."""
    path = location.removeprefix("file://").removeprefix("local://")
    return None if "://" in path else os.path.expanduser(path)


def _place(location: str) -> tuple[str, str]:
    """Which store a location is in, and its path there, links resolved where it is local."""
    path = local_path(location)
    if path is not None:
        return "", os.path.realpath(path)
    scheme, _, rest = location.partition("://")
    return {"gcs": "gs", "s3a": "s3"}.get(scheme, scheme), posixpath.normpath("/" + rest.lstrip("/"))


def faults_of(error: ValidationError, model: type[BaseModel], one_source: bool = False) -> list[str]:
    """One sentence for each fault of a configuration, with the nearest valid key for an unknown one. *one_source*: it was
    written as ``source``, not as a list.
    """
    sentences = []
    faults = error.errors(include_url=False)
    for fault in faults:
        if fault["type"] == "too_short" and any(other["loc"][:1] == fault["loc"] != other["loc"] for other in faults):
            continue  # pydantic counts an item that is refused as absent; its own fault says more
        where = ".".join(str(part) for part in fault["loc"])
        if one_source and fault["loc"][:2] == ("sources", 0):
            where = where.replace("sources.0", "source", 1)
        if fault["type"] == "extra_forbidden":
            sentences.append(f"unknown key {where!r}. {_nearest(str(fault['loc'][-1]), model, fault['loc'][:-1])}")
            continue
        message = PLAIN_WORDS.get(fault["type"]) or fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if fault["type"] not in ("missing", "too_short", "value_error"):
            message += _shown(fault["input"])
        sentences.append(f"{where}: {message}" if where else message)
    return sentences


PLAIN_WORDS = {
    "model_type": "should be a mapping of settings",
    "tuple_type": "should be a list",
    "too_short": "needs at least one item",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_type": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "string_type": "should be text",
}
"""What pydantic says in terms of Python, by its names for it."""


def _shown(value: Any) -> str:
    """What was given instead, if it is short and cannot hold a secret."""
    if isinstance(value, str) and (len(value) > 40 or "@" in value or "/" in value):
        return ""
    named = {dict: "a mapping", list: "a list", tuple: "a list", type(None): "nothing"}
    return f", not {named.get(type(value)) or repr(value)}"


def _nearest(key: str, model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    """What may have been meant by a key that the model at *path* within *model* does not have."""
    here = model
    for part in path:
        here = _nested(here).get(str(part), here)
    valid = sorted(_keys(here))
    near = [name for name in _all_keys(model) if name.rpartition(".")[2] == key] or difflib.get_close_matches(
        key.lower(), valid, 1, 0.5
    )
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Valid keys: {', '.join(valid)}."


def _keys(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields) | ({"source"} if model is BuildConfig else set())


def _nested(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The models that stand in the fields of a model, by the fields' names."""
    found: dict[str, type[BaseModel]] = {}
    for name in _keys(model):
        kinds = [model.model_fields["sources" if name == "source" else name].annotation]
        while kinds:
            kind = kinds.pop()
            kinds += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def _all_keys(model: type[BaseModel]) -> list[str]:
    """Every key within a model as ``--set`` takes it."""
    within = [f"{name}.{key}" for name, kind in sorted(_nested(model).items()) if name != "sources" for key in _all_keys(kind)]
    return sorted(_keys(model)) + within
