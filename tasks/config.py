"""Configuration of a build: frozen, strict models; and how many workers it has without a setting."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.batch import LOSS_MASK, TOKENS
from flat_tokens.columns import RESERVED
from flat_tokens.manifest import CLUSTER, SplitName
from flat_tokens.options import did_you_mean
from flat_tokens.steps import ReadySteps, open_steps
from flat_tokens.stores.local import kind_of
from flat_tokens.text.formats import FileFormat
from flat_tokens.tools.terminal import source_called
from flat_tokens.vocabulary import is_file_name
from tasks.gates import PublishPolicy
from tasks.locations import (
    DECODED,
    WITHOUT_SECRETS,
    Location,
    Output,
    Unsigned,
    absolute,
    local_path,
    place_of,
    plain_location,
    readable,
)
from tasks.models import GivenName, Matching, Model, NonEmpty, as_name
from tasks.rows import KEY, OF_PLACE, OF_VERSION, SPLIT_KEY


def number(value: Any) -> Any:
    """Refuse yes, no, on and off: YAML makes booleans of them, which would pass for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


def byte_count(value: Any) -> Any:
    """Bytes of a size for people, such as ``128 MB`` or ``1.5 GiB``; a number stays as it is."""
    if not isinstance(value, str):
        return number(value)
    match = re.fullmatch(SIZE, value.strip())
    if match is None:
        raise ValueError("should be a size, such as 128 MB, or a number of bytes")
    amount, prefix, binary = Decimal(match[1]), match[2] or "", match[3]
    count = amount * (1024 if binary else 1000) ** " kMGT".index(prefix.replace("K", "k") or " ")
    if count != int(count):
        raise ValueError("should be a whole number of bytes")
    return int(count)


def size_for_people(count: int) -> str:
    """The shortest size that is *count* bytes: the inverse of ``byte_count``."""
    units = [(1 << 10 * k, f" {prefix}iB") for k, prefix in enumerate("KMGT", 1)] + [
        (1000**k, f" {p}B") for k, p in enumerate("kMGT", 1)
    ]
    return min((f"{count // unit}{name}" for unit, name in [(1, ""), *units] if count % unit == 0), key=len)


SIZE = r"([0-9]+(?:\.[0-9]+)?) ?(?:([kKMGT])(i)?)?B?"

Whole = Annotated[int, BeforeValidator(number)]
Size = Annotated[
    int,
    BeforeValidator(byte_count),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": f"^{SIZE}$"}, {"type": "integer"}], "examples": ["128 MB"]}),
]
Workers = Annotated[int, Field(ge=1, le=256), BeforeValidator(number)]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(number)]

ColumnName = Annotated[
    str, Field(max_length=256), Matching(r"^[^\x00-\x1f\x7f]+\Z", "the name of a column, without control characters")
]
Licence = Annotated[str, Matching(r"^[a-z0-9][a-z0-9.-]*\Z", "small letters, digits, dots and dashes, such as cc-by-4.0")]
Day = Annotated[str, Matching(r"^[0-9]{4}-[01][0-9]-[0-3][0-9]\Z", "a day, such as 2026-07-31")]


def one_character(value: str) -> str:
    """A delimiter; people write a tab as a backslash and a t, too."""
    value = "\t" if value == r"\t" else value
    if not re.fullmatch(r"[\t !#-~]", value):
        raise ValueError(r'should be one character of ASCII, such as ; or "\t", and no quote')
    return value


Delimiter = Annotated[
    str,
    AfterValidator(one_character),
    WithJsonSchema({"type": "string", "pattern": r"^([\t !#-~]|\\t)$", "examples": [";"]}),
]
TableFormat = Literal["delta", "iceberg"]
SQLITE = "sqlite:///"
"""How the URL of a catalog in a file of SQLite begins."""
READING = ("text_column", "id_column", "document_separator")
"""The settings of a source that are part of the keys of its token shards."""


class HubDataset(Model):
    """A dataset on the Hugging Face hub, or anything else that datasets.load_dataset takes by these names."""

    path: Unsigned = Field(min_length=1)
    """Repository, such as HuggingFaceFW/fineweb-edu."""
    name: str | None = None
    """Configuration (subset), such as sample-10BT."""
    split: NonEmpty = "train"
    """The split that is read."""
    revision: NonEmpty = "main"
    """Branch, tag or commit; a build pins it to the commit."""

    @field_validator("path", "revision")
    @classmethod
    def within_roots(cls, name: str, info: ValidationInfo) -> str:
        location = plain_location(f"hf://datasets/{plain_location(name)}")
        return name if info.field_name == "revision" or readable(location) else ""


class MessageNames(Model):
    """The keys of messages, and their roles as templates know them."""

    model_config = ConfigDict(title="with other names")

    role: NonEmpty = "role"
    """The key of a message's role, such as from."""
    content: NonEmpty = "content"
    """The key of its content, such as value."""
    roles: dict[str, str] = Field({})
    """Roles by their names here, such as human: user; others stay as they are."""

    @model_validator(mode="after")
    def two_keys(self) -> Self:
        if self.role == self.content:
            raise ValueError(f"role and content are both {self.role!r}; give the key of each")
        return self


class TextPlace(Model):
    """A place of texts: files (path), a dataset on the hub (hub) or a table (table), one of the three."""

    path: Location | None = None
    """Files: a file, a directory, a glob or a URL, such as /data/*.parquet or s3://bucket/text."""
    hub: HubDataset | None = None
    """A dataset on the hub, instead of path."""
    text_column: NonEmpty = "text"
    """The column or key that holds the text."""
    name: GivenName = "source"
    """A name for people and the manifest."""
    format: Literal["auto", FileFormat, TableFormat] = "auto"
    """auto: told from the content."""
    split: NonEmpty | None = None
    """Files: only those of this split, by their names."""
    delimiter: Delimiter | None = None
    r"""CSV files: the character between fields, such as ; or \t; without it a comma, of .tsv files a tab."""
    table: Annotated[Unsigned, DECODED] | None = Field(None, min_length=1)
    """A Delta or Iceberg table, instead of path: its directory or URL, its metadata file, or its name in catalog."""
    version: Whole | str | None = None
    """Tables: latest, a version of Delta, or a snapshot, branch or tag of Iceberg; latest without it."""
    catalog: Unsigned | None = Field(None, min_length=1)
    """Iceberg: a catalog of pyiceberg's settings, or its URL: http, https or sqlite:///PATH."""

    @model_validator(mode="after")
    def one_place_within_roots(self) -> Self:
        given = [name for name in ("path", "hub", "table") if getattr(self, name) is not None]
        if len(given) != 1:
            found = "more than one" if given else "neither"
            raise ValueError(f"{self.called} has {found} of 'path', 'hub' and 'table'; give one")
        is_table = self.format in get_args(TableFormat)
        if self.table is None and (set_ := [name for name in ("version", "catalog") if getattr(self, name) is not None]):
            raise ValueError(f"{self.called} has {set_[0]}, which is for tables; give its table, too")
        if self.table is not None and not is_table and self.format != "auto":
            raise ValueError(f"{self.called} is a table, whose format is delta or iceberg, not {self.format}")
        if self.table is None and is_table:
            raise ValueError(f"{self.called}: {self.format} is a format of tables. Set table instead of {given[0]}")
        if self.hub is not None and self.split is not None:
            raise ValueError(f"{self.called}: the split of a hub dataset is hub.split")
        if self.table is not None and self.catalog is None:
            readable(plain_location(self.table))
        if self.catalog is not None and self.format == "delta":
            raise ValueError(f"{self.called} has a catalog, which is for Iceberg; name the directory of a Delta table in table")
        if self.catalog is not None and "://" in self.catalog:
            is_file = self.catalog.startswith(SQLITE)
            if not is_file and not self.catalog.startswith(("http://", "https://")):
                raise ValueError(
                    f"{self.called}: a catalog is http://, https:// or {SQLITE}PATH, or a name in the settings of pyiceberg"
                )
            readable(plain_location(self.catalog.removeprefix(SQLITE)))
        return self

    @property
    def place(self) -> str:
        """Its path or URL, for people and lineage."""
        if self.catalog is not None:
            return f"{self.catalog if '://' in self.catalog else f'iceberg://{self.catalog}'}/{self.table}"
        return self.path or self.table or f"hf://datasets/{self.hub and self.hub.path}"

    @property
    def file_format(self) -> Literal["auto", FileFormat]:
        """The format of its files. Those of a table say it by their content."""
        return "auto" if self.table is not None else cast("Literal['auto', FileFormat]", self.format)

    @property
    def called(self) -> str:
        """Its name in messages: its own, unless that is the one it has without a setting."""
        return source_called(self.name)


class Source(TextPlace):
    """The origin of text: files (path), a dataset on the hub (hub) or a table (table), one of the three."""

    # So that the form refuses neither, when it is submitted. Not anyOf: the form would take it for a choice between schemas.
    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"path": {"type": "null"}, "table": {"type": "null"}}},
            "then": {"required": ["hub"], "properties": {"hub": {"type": "object"}}},
        }
    )

    id_column: NonEmpty | None = None
    """The column that names a document, such as id; without it, its text does."""
    keep_columns: tuple[ColumnName, ...] | None = Field(None, min_length=1, max_length=256)
    """Columns that are kept next to the tokens, such as url, language, score."""
    validation_split: NonEmpty | None = None
    """An existing split of the source that becomes the validation split, whole."""
    prompt_column: NonEmpty | None = None
    """Instead of text_column: text that does not count."""
    completion_column: NonEmpty | None = None
    """With prompt_column: the text after it, which counts."""
    messages_column: NonEmpty | None = None
    """Instead of text_column: lists of messages."""
    messages: MessageNames | None = None
    """With messages: their keys and roles, where these are not role and content, user and assistant."""
    chat_template: Location | None = None
    """With messages: a file; without it, the tokenizer's own."""
    roles: tuple[str, ...] | None = Field(None, min_length=1)
    """With messages: whose count; assistant without it."""
    chat_date: Day | None = None
    """With messages: the day, to a template that asks for it."""
    tools_column: NonEmpty | None = None
    """With messages: the tools that each may call, or null."""
    count: tuple[Literal["content", "tool_calls", "thinking"], ...] | None = Field(None, min_length=1)
    """With messages: the parts of a message of roles that count; all of it without it."""
    document_separator: NonEmpty | None = None
    """Text files: what stands between documents; without it a file is one document."""
    quotes: Literal["csv", "none"] | None = None
    """CSV files: csv: a field in quotes may hold delimiters and line ends. none: quotes are text. Without it csv, but rows that
    may well be several are refused.
    """
    max_bytes: Whole | None = Field(None, ge=1, le=1 << 50)
    """Bytes of a file whose server does not say its size; 10 GiB without it."""
    max_expansion: Whole | None = Field(None, ge=1, le=1 << 40)
    """Bytes of text that a byte of a compressed or Parquet file may stand for; 500 without it."""

    @field_validator("keep_columns")
    @classmethod
    def names_of_their_own(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if taken := sorted(set(names or ()) & set(RESERVED)):
            raise ValueError(f"{taken[0]!r} is what every document has already, as {', '.join(RESERVED)}. Rename the column")
        if repeated := sorted({name for name in names or () if (names or ()).count(name) > 1}):
            raise ValueError(f"{repeated[0]!r} is named twice")
        return names

    @model_validator(mode="after")
    def one_kind_of_text(self) -> Self:
        if (self.prompt_column is None) != (self.completion_column is None):
            given, other = ("completion", "prompt") if self.prompt_column is None else ("prompt", "completion")
            raise ValueError(f"{self.called} has a {given}_column; give its {other}_column, too")
        kinds = [kind for kind in ("text_column", "prompt_column", "messages_column") if kind in self.model_fields_set]
        kinds = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise ValueError(f"{self.called} has {' and '.join(kinds)}; give one of them")
        if self.messages_column is None:
            for setting in ("messages", "chat_template", "roles", "chat_date", "tools_column", "count"):
                if getattr(self, setting) is not None:
                    raise ValueError(f"{self.called} has {setting}, which is for messages; give its messages_column, too")
        if self.prompt_column is not None and self.prompt_column == self.completion_column:
            raise ValueError(f"{self.called}: prompt_column and completion_column are both {self.prompt_column!r}")
        if self.tools_column is not None and self.tools_column == self.messages_column:
            raise ValueError(f"{self.called}: messages_column and tools_column are both {self.tools_column!r}")
        return self

    @property
    def masked(self) -> bool:
        """Whether its documents say which of their tokens count for the loss."""
        return self.prompt_column is not None or self.messages_column is not None

    def split_by(self, by: str, given: Collection[str] = ()) -> str | None:
        """The value that decides on splits of its documents, by a build's rule: ``text``, or a column; None: their keys.
        *given*: columns that steps give.
        """
        if by == "text":
            return "text" if self.id_column else None  # without ids, keys are made of texts
        return by if by in (*(self.keep_columns or ()), *given) else None

    def reading(self) -> tuple[Any, ...]:
        """The settings that decide which documents a file holds."""
        columns = (self.prompt_column, self.completion_column, self.messages_column)
        tools = [{"tools": self.tools_column}] if self.tools_column else []
        kept = [{"kept": self.keep_columns}] if self.keep_columns else []
        csv = {name: value for name in ("delimiter", "quotes") if (value := getattr(self, name)) is not None}
        return (
            *(getattr(self, setting) for setting in READING),
            *([columns] if self.masked else []),
            *tools,
            *kept,
            *([{"csv": csv}] if csv else []),
        )


TOKENIZERS = (
    "A tiktoken encoding (cl100k_base), 'bytes', a .tiktoken file, a tokenizer.json, a tekken.json, a SentencePiece .model, or a "
    "hub repository"
)


def or_name(schema: JsonObject) -> None:
    """Let a schema of a tokenizer take its name alone, which is what the form asks for first."""
    name = {"type": "string", "title": "name", "minLength": 1, "pattern": WITHOUT_SECRETS}
    schema["anyOf"] = [name, {"$ref": schema.pop("$ref")}]


def or_none(schema: JsonObject) -> None:
    """Let the form show a group of settings only to who wants to change one."""
    schema["anyOf"] = [{"type": "null", "title": "as usual"}, {"$ref": schema.pop("$ref")}]
    schema["default"] = None


PATHS = ("_url", "_path", "_file")
"""How the options of steps end that name a place."""


def is_path(name: str) -> bool:
    """Whether the name of a tokenizer is that of a file or a directory."""
    return is_file_name(name) or os.path.isabs(name) or kind_of(name) == "directory"


class TokenizerConfig(Model):
    """A tokenizer by name, or by the file that defines it."""

    model_config = ConfigDict(title="with settings")

    name: Unsigned = Field(
        min_length=1,
        description=TOKENIZERS,
    )
    pattern: str | None = None
    """Files of ranks: the split pattern, or the encoding whose it is."""
    revision: str | None = None
    """Hub repositories: branch, tag or commit."""
    engine: Literal["auto", "reference"] = "auto"
    """auto: the fast engine, where it gives exactly the reference engine's tokens."""
    lossy: bool = False
    """true: the tokenizer of a file may have no tokens at all for some text, which is lost."""
    max_seconds: Whole = Field(60, ge=1, le=1 << 20)
    """For a file's tokenizer: to pass its trial; 8 MB of text may take ten times as long."""
    max_memory: Size = Field(8 << 30, ge=1 << 28, le=1 << 50)
    """For the trial of a file's tokenizer, such as 8 GiB."""

    @field_validator("name")
    @classmethod
    def within_roots(cls, name: str) -> str:
        if is_path(name):
            return readable(plain_location(name))
        if "/" in name:  # a repository
            readable(plain_location(f"hf://{name}"))
        return name


class EvaluationSet(TextPlace):
    """A set of questions that documents are not to have: files, or a dataset on the hub, with a column of texts."""

    @model_validator(mode="before")
    @classmethod
    def by_its_place(cls, value: Any) -> Any:
        """A path alone; and a name made of the place."""
        value = {"path": value} if isinstance(value, str | os.PathLike) else value
        if not isinstance(value, dict) or "name" in value:
            return value
        hub = value.get("hub")
        place = hub.get("path") if isinstance(hub, dict) else value.get("path")
        base = os.fspath(place or "").rstrip("/").rpartition("/")[2]
        return {**value, "name": as_name(base.partition(".")[0], "set")}

    def source(self) -> Source:
        """The set as a source, which is looked up, fetched and read."""
        return Source.model_validate(self.model_dump(exclude_unset=True))

    def absolute(self) -> JsonObject:
        """The settings with a local path that means the same from any directory."""
        return with_absolute(self.model_dump(mode="json", exclude_unset=True))


def evaluation_sets(step: DocumentStep) -> tuple[EvaluationSet, ...]:
    """The sets of a step ``decontaminate``. ValueError if one is not a set, or may not be read, or two have one name."""
    given = (step.model_extra or {}).get("against")
    sets = list[EvaluationSet]()
    for number, one in enumerate(given if isinstance(given, list | tuple) else ()):
        try:
            sets.append(EvaluationSet.model_validate(one))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("against", number, *first["loc"])))
            raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
    check_names_differ("evaluation sets", [one.name for one in sets])
    return tuple(sets)


def check_names_differ(what: str, names: Sequence[str]) -> None:
    """ValueError if two of some things have one name."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what} are named {repeated[0]!r}; give each a name of its own")


class DocumentStep(Model):
    """A step that documents take before they are tokenized. Keys besides these are the step's own options."""

    model_config = ConfigDict(extra="allow")

    use: str = Field(min_length=1)
    """length, pattern, normalize, language, html, decontaminate, datatrove, or a step of an installed package."""
    name: NonEmpty | None = None
    """For counts, where one step is used twice."""

    @model_validator(mode="after")
    def within_roots(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name.endswith(PATHS) and isinstance(value, str):
                readable(plain_location(value))
        if self.reads_sets and not self.has_pinned_sets:
            evaluation_sets(self)
        return self

    @property
    def reads_sets(self) -> bool:
        """Whether it looks for the questions of evaluation sets."""
        return self.use == "decontaminate"

    @property
    def has_pinned_sets(self) -> bool:
        """Whether a build has read its evaluation sets already, and says where they are."""
        return "sets_url" in (self.model_extra or {})

    def absolute(self) -> JsonObject:
        """The step with local paths that mean the same from any directory."""
        settings = self.model_dump(mode="json", exclude_unset=True)
        paths = {name: absolute(value) for name, value in settings.items() if name.endswith(PATHS) and isinstance(value, str)}
        sets = (
            {"against": [one.absolute() for one in evaluation_sets(self)]} if self.reads_sets and not self.has_pinned_sets else {}
        )
        return settings | paths | sets

    def asked(self) -> JsonObject:
        """The step as ``open_steps`` takes it."""
        return {"use": self.use, "name": self.name, "options": self.model_extra or {}}


class NearDuplicates(Model):
    """The documents that count as copies of each other, though their texts differ a little, and what happens to them."""

    model_config = ConfigDict(title="with settings")

    threshold: Annotated[float, BeforeValidator(number)] = Field(0.8, ge=0.5, le=1)
    """Least share of common runs of words, of those that either text has."""
    action: Literal["drop", "keep"] = "drop"
    """drop: of each cluster the first stays. keep: all stay, and a kept column, cluster, says which are one."""
    words: Whole = Field(5, ge=1, le=64)
    """Words in a run."""


class DocumentPolicy(Model):
    """Treatment of documents before they are tokenized."""

    model_config = ConfigDict(title="with settings")

    on_bad: Literal["error", "skip", "replace"] = "error"
    """error: stop, naming file and row. skip: leave out and count. replace: U+FFFD for what is not Unicode; what has no text at
    all is skipped.
    """
    empty: Literal["keep", "skip"] = "keep"
    """keep: an empty text is a sequence of no tokens."""
    max_bytes: Size = Field(256 << 20, gt=0, le=1 << 31)
    """A longer document is a bad document, such as 256 MiB; never cut."""
    steps: tuple[DocumentStep, ...] = ()
    """Steps that the others go through, in order: docs/steps.md."""
    duplicates: Literal["keep", "drop"] = "keep"
    """drop: of texts that are equal byte for byte, in all sources, the first stays; after the steps."""
    near_duplicates: NearDuplicates | None = None
    """Find texts that are nearly the same, in all sources; after the steps, and after duplicates."""

    @field_validator("steps")
    @classmethod
    def usable(cls, steps: tuple[DocumentStep, ...]) -> tuple[DocumentStep, ...]:
        open_steps([step.asked() for step in steps])
        return steps

    def recorded(self) -> JsonObject:
        """The settings besides steps, as keys and manifests have them."""
        unused = {
            name
            for name, is_used in (("duplicates", self.duplicates == "drop"), ("near_duplicates", self.near_duplicates))
            if not is_used
        }
        return self.model_dump(exclude={"steps", *unused})

    @property
    def compares(self) -> bool:
        """Whether documents are compared with each other. A version may then lack some that the next one needs."""
        return self.duplicates == "drop" or self.near_duplicates is not None

    @property
    def keeps_clusters(self) -> bool:
        """Whether a kept column says which documents are near-duplicates of each other."""
        return self.near_duplicates is not None and self.near_duplicates.action == "keep"

    def opened(self) -> ReadySteps:
        """The steps, ready to be taken."""
        return open_steps([step.asked() for step in self.steps])


class SplitPolicy(Model):
    """The value of a document that decides on its split."""

    model_config = ConfigDict(title="with settings")

    by: str = Field("key", min_length=1, max_length=256)
    """key: its id, else its text. text: equal texts go to one split. A column of keep_columns, such as domain: documents that
    share its value go to one split. cluster: near-duplicates that are kept.
    """
    keep: str | None = Field(None, min_length=1, max_length=4096)
    """latest, or a version: documents that it has in train stay in train."""


class GroupPolicy(Model):
    """How a build is spread over the workers of a pool: slices go to them in groups, each a run of its own."""

    model_config = ConfigDict(title="with settings")

    threshold: Whole = Field(256, ge=1, le=1_000_000)
    """Fewer slices stay in the build's own process."""
    slices: Whole = Field(64, ge=1, le=4096)
    """Slices in a group."""
    at_once: Whole = Field(256, ge=1, le=4096)
    """Groups that wait for a worker or run, at most."""
    fetch_bytes: Size = Field(32_000_000_000, gt=0, le=1 << 60)
    """Source files in a group that fetches, such as 32 GB; below twice of it the build does it."""
    lost_after: Whole = Field(120, ge=4, le=86_400)
    """Seconds without a sign of life before a group is begun again."""
    attempts: Whole = Field(4, ge=1, le=100)
    """How often a group may be lost before the build gives up."""


class BuildConfig(Model):
    """The settings of a build."""

    output: Output
    """Directory or URL, such as /data/web: versions, token shards and the pointer are below it."""
    name: GivenName = "dataset"
    """A name for people, who find its runs by it."""
    sources: tuple[Source, ...] = Field(min_length=1)
    """Where the text comes from; read in this order."""
    tokenizer: TokenizerConfig = Field(title="Tokenizer", description=TOKENIZERS, json_schema_extra=or_name)
    validation_fraction: Share = 0.005
    """Share of all documents, by a stable hash of their keys; 0 if a source has a validation_split."""
    test_fraction: Share = 0.0
    """Share of all documents that are a third split, test, by the same hash."""
    split: SplitPolicy = Field(SplitPolicy(), title="Split", json_schema_extra=or_none)
    """The rule by which documents go to splits."""
    layout: Literal["auto", LayoutName] = "auto"
    """auto: mmap on local disks, compact elsewhere."""
    licence: Licence | None = None
    """As the hub names licences, such as cc-by-4.0; for the card of a publication."""
    workers: Workers | None = None
    """Slices at a time; the number of cores without it."""
    documents: DocumentPolicy = Field(DocumentPolicy(), title="Documents", json_schema_extra=or_none)
    """Changes of documents before they are tokenized."""
    split_seed: Whole = Field(0, ge=0, lt=2**63)
    """Another seed draws other documents for validation."""
    slice_bytes: Size = Field(128_000_000, gt=0, le=1 << 31)
    """Text in a slice, the unit of work and resume, such as 128 MB."""
    runner: Literal["threads", "groups", "ray"] = "threads"
    """threads: of one process. groups: runs on a work pool. ray: the Ray cluster of this machine."""
    groups: GroupPolicy = Field(GroupPolicy(), title="Groups", json_schema_extra=or_none)
    """With runner groups: how much work is a run."""
    publish: PublishPolicy = Field(PublishPolicy(), title="Publish", json_schema_extra=or_none)
    """Conditions on a version before latest names it."""
    scratch: Output | None = None
    """Local directory for downloads and staging."""
    scratch_bytes: Size | None = Field(None, gt=0)
    """Most that fetched files take in scratch, such as 200 GB; half of the free disk without it."""
    keep_files: Literal["auto"] | bool = "auto"
    """true: fetched files stay in scratch. false: each is removed when its slices are settled. auto: they stay if all fit. Of
    Parquet, auto and false fetch only what is read.
    """
    verify_level: Literal["quick", "full"] = "quick"
    """Check before publication; full reads every byte."""

    @model_validator(mode="before")
    @classmethod
    def shorthand(cls, value: Any) -> Any:
        """``source: {...}`` for a single source; ``tokenizer: NAME`` for its name alone; null for settings as they are."""
        if not isinstance(value, dict):
            return value
        value = {
            name: of for name, of in value.items() if of is not None or name not in ("documents", "groups", "publish", "split")
        }
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
            quotes = ", in quotes if it is a number or a word such as no" if isinstance(tokenizer, bool | int | float) else ""
            raise ValueError(
                f"'tokenizer' is a name, such as cl100k_base{quotes}, or a mapping of name, pattern, revision, engine"
            )
        return value

    @field_validator("sources")
    @classmethod
    def distinct_names(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        check_names_differ("sources", [source.name for source in sources])
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
            named = source.path or (source.table if source.catalog is None else None)
            where, path = place_of(named) if named else (None, "")
            if where == store and os.path.commonpath([output, path]) in (output, path):
                raise ValueError(
                    f"output {self.output} and source {named} are within each other. Keep them apart, so that no build "
                    "reads what another one wrote."
                )
            if self.scratch and where == "" and Path(place_of(self.scratch)[1]).is_relative_to(path):
                raise ValueError(f"scratch {self.scratch} is within source {named}. Keep them apart.")
        return self

    @model_validator(mode="after")
    def one_split_rule(self) -> Self:
        by_source = [source.name for source in self.sources if source.validation_split]
        if by_source and "validation_fraction" in self.model_fields_set and self.validation_fraction > 0:
            raise ValueError(
                f"source {by_source[0]!r} names a validation_split, and validation_fraction is {self.validation_fraction}. "
                "Remove one of them, or set the fraction to 0."
            )
        if by_source and self.test_fraction > 0:
            raise ValueError(
                f"source {by_source[0]!r} names a validation_split, so that no document is drawn, but test_fraction is "
                f"{self.test_fraction}. Remove one of them."
            )
        if self.fraction + self.test_fraction > 1:
            raise ValueError(
                f"validation_fraction {self.fraction} and test_fraction {self.test_fraction} are more than 1 together"
            )
        if self.split.by not in ("key", "text", *self.kept_columns):
            kept = f"Kept are {', '.join(self.kept_columns)}." if self.kept_columns else "No column is kept."
            raise ValueError(
                f"split.by is {self.split.by!r}, which is neither key nor text, nor a column that a source keeps. {kept} "
                "Add it to source.keep_columns."
            )
        return self

    @model_validator(mode="after")
    def columns_of_their_own(self) -> Self:
        """Refuse a column that a source keeps and a step gives."""
        given = self.documents.opened().gives_columns
        if self.documents.keeps_clusters and CLUSTER in (
            *given,
            *(name for one in self.sources for name in one.keep_columns or ()),
        ):
            raise ValueError(
                f"documents.near_duplicates gives the column {CLUSTER!r}, and a source or a step has one of that name. Rename "
                "it, or leave it out of source.keep_columns."
            )
        for source in self.sources:
            if taken := [name for name in source.keep_columns or () if name in given]:
                raise ValueError(
                    f"a step of documents.steps gives the column {taken[0]!r}, and {source.called} keeps one of that "
                    "name. Leave it out of source.keep_columns, or give the step's another name."
                )
        return self

    @model_validator(mode="after")
    def one_kind_of_mask(self) -> Self:
        masked = [source.name for source in self.sources if source.masked]
        if masked and self.documents.opened().gives_spans:
            raise ValueError(
                "a step of documents.steps says which characters count for the loss, and so do the columns of "
                f"{source_called(masked[0])}. Leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def gates_of_what_there_is(self) -> Self:
        """Refuse gates of sources, steps and columns that there are not."""
        known = {
            "source": [source.name for source in self.sources],
            "step": [step["name"] for step in self.documents.opened().described],
            "column": list(self.kept_columns),
        }
        for number, gate in enumerate(self.publish.gates):
            for kind, names in known.items():
                if (name := getattr(gate, kind)) is None or name in names:
                    continue
                raise ValueError(f"publish.gates.{number}: there is no {kind} {name!r}. {did_you_mean(name, names)}")
        return self

    @property
    def token_arrays(self) -> tuple[str, ...]:
        """The token arrays of the dataset."""
        masked = any(source.masked for source in self.sources) or self.documents.opened().gives_spans
        return (TOKENS, LOSS_MASK) if masked else (TOKENS,)

    @property
    def processors(self) -> int:
        """The processors that its workers use here."""
        return min(self.workers or available_cores(), available_cores())

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """The columns that the dataset keeps: those of all sources, and those that steps give."""
        of_sources = [name for source in self.sources for name in source.keep_columns or ()]
        clusters = [CLUSTER] if self.documents.keeps_clusters else []
        return tuple(dict.fromkeys((*of_sources, *self.documents.opened().gives_columns, *clusters)))

    @property
    def splits_clusters(self) -> bool:
        """Whether near-duplicates go to one split."""
        return self.documents.keeps_clusters and self.split.by == CLUSTER

    @property
    def waits_for_clusters(self) -> bool:
        """Whether the splits of documents are known when their near-duplicates are."""
        return self.documents.near_duplicates is not None and (self.splits_clusters or not self.documents.keeps_clusters)

    def keeping(self, version: str | None) -> BuildConfig:
        """With a version, by its URL, whose train split is kept; None: with none."""
        if version == self.split.keep:
            return self
        return self.model_copy(update={"split": self.split.model_copy(update={"keep": version})})

    @property
    def split_fact(self) -> str:
        """The fact by which documents of a version that is kept went to splits. Keys name clusters, too."""
        return KEY if self.split.by in ("key", CLUSTER) else SPLIT_KEY

    @property
    def fraction(self) -> float:
        """The share of documents drawn for validation: none if a source brings its own validation split."""
        fraction = self.validation_fraction + 0.0  # -0.0 is 0
        return 0.0 if any(source.validation_split for source in self.sources) else fraction

    @property
    def split_facts(self) -> JsonObject:
        """The rule by which documents go to splits, as manifests have it."""
        return {
            "validation_fraction": self.fraction,
            "seed": self.split_seed,
            **({"test_fraction": self.test_fraction} if self.test_fraction else {}),
            **({"by": self.split.by} if self.split.by != "key" else {}),
            **({"keep": self.split.keep.rpartition("/")[2]} if self.split.keep else {}),
        }

    def split_by_of(self, source: Source) -> str | None:
        """The value that decides on splits of a source's documents: ``text``, or a column; None: their keys."""
        return source.split_by(self.split.by, self.documents.opened().gives_columns)

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that a version has of its documents. Split keys are among them if other values than keys decide on splits."""
        return OF_PLACE if self.splits_clusters or any(map(self.split_by_of, self.sources)) else OF_VERSION

    @property
    def may_part_equal_texts(self) -> bool:
        """Whether documents with the same text may be in two splits, if settings concern splits. Looking for them takes some
        tenths of a second for 100 MB of text, and up to a second in compressed layouts.
        """
        if not self.model_fields_set & {"split", "test_fraction"}:
            return False
        if any(source.validation_split for source in self.sources):
            return True
        is_drawn = self.fraction > 0 or self.test_fraction > 0
        return is_drawn and self.split.by != "text" and (self.split.by != "key" or any(one.id_column for one in self.sources))

    @property
    def shares(self) -> dict[SplitName, float]:
        """The share of documents that each split gets, if they are drawn."""
        held_out: dict[SplitName, float] = {"validation": self.fraction}
        if self.test_fraction:
            held_out["test"] = self.test_fraction
        return {"train": 1 - sum(held_out.values()), **held_out}


def with_absolute(source: JsonObject) -> JsonObject:
    """The settings of a source with local paths that mean the same from any directory."""
    places = ("path", "chat_template", *(() if source.get("catalog") else ("table",)))
    return {**source, **{name: absolute(source[name]) for name in places if source.get(name) is not None}}


def with_absolute_paths(config: BuildConfig) -> BuildConfig:
    """The same settings with local paths that mean the same from any directory: those that are relative now begin here."""
    settings = config.model_dump(mode="json", exclude_unset=True)
    for setting in ("output", "scratch"):
        if settings.get(setting) is not None:
            settings[setting] = absolute(settings[setting])
    settings["sources"] = list(map(with_absolute, settings["sources"]))
    if is_path(settings["tokenizer"]["name"]):
        settings["tokenizer"]["name"] = absolute(settings["tokenizer"]["name"])
    if config.documents.steps:
        settings["documents"]["steps"] = [step.absolute() for step in config.documents.steps]
    return BuildConfig.model_validate(settings)


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use at a time, at least one: the machine's, or fewer if it is bound to some (taskset,
    cpusets) or its container has a share of their time (cgroup v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_share(cgroup))))


@functools.cache
def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or what its container has (cgroup v2 ``memory.max``, v1
    ``memory.limit_in_bytes``).
    """
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int((cgroup / name).read_text()))
    return found


def _share(cgroup: Path) -> float:
    """The cores whose time the container may use; more than there are if nothing limits it."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return 1 << 20
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else 1 << 20
