"""Facts that tasks hand to each other."""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import inspect
import json
import os
import re
import sys
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from flat_tokens.annotations import IntPair, JsonObject, UInt64s
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.batch import TOKEN_ARRAYS, TOKENS
from flat_tokens.manifest import EVERY_SPLIT, SplitName
from flat_tokens.stores.store import StoredObject, is_below
from flat_tokens.text.formats import FileFormat
from flat_tokens.tools.terminal import plural
from tasks.rows import DIGEST, KEY, OF_PLACE, ROW

FORMAT_SEMANTICS = "1"
"""Part of every shard's key and every version's name. It is raised when the same input would give other bytes."""

LEFT_OUT: Final = "left_out"
FORGOTTEN = "forgotten"
Split = SplitName | Literal["left_out"]
"""A split of a version. What it leaves out, and a later version may need, is one more, next to the version."""
ALL_SPLITS: tuple[Split, ...] = (*EVERY_SPLIT, LEFT_OUT)
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name and never a path: what is below an output stays there."""
TokenArrayName = Annotated[str, Field(pattern=f"^({'|'.join(TOKEN_ARRAYS)})$")]
FactWidth = Annotated[int, Field(ge=1, le=256)]
Stamp = tuple[int, ...]
"""Facts that change when a file is written to: size, modification, change (which cannot be set back), inode. Empty: not known."""


T = TypeVar("T")
HereOnly = Annotated[T | None, PlainValidator(lambda _: None), PlainSerializer(lambda _: None, when_used="json")]
"""Known to this process alone: in JSON, and in any other process, it is nothing."""


class Matching(NamedTuple):
    """Annotation of a text that matches a pattern; *words* say to people what it should be."""

    pattern: str
    words: str

    def check(self, value: str) -> str:
        if not re.search(self.pattern, value):
            raise PydanticCustomError("matching", "should be {words}", {"words": self.words})
        return value

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(kind))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        return {**handler(schema), "pattern": self.pattern}


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"
GivenName = Annotated[
    str, Matching(NAME, "letters, digits, dots, dashes and underscores, of which the first is a letter or a digit")
]
"""A name that people give."""


def as_name(text: str, otherwise: str) -> str:
    """A text with dashes for what no name has; *otherwise* if nothing else is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-") or otherwise


Reason = Annotated[str, Matching(r"\S", "a reason in words")]
NonEmpty = Annotated[str, Field(min_length=1)]


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file that has this status."""
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def version_of(info: JsonObject) -> str | None:
    """A store's name for an object's content, which changes whenever the content does."""
    for name in ("generation", "ETag", "etag", "md5Hash", "sha256", "content-md5", "blob_id", "xet_hash"):
        if info.get(name):
            return f"{name}:{info[name]}"
    return None


def digest_of(*parts: Any) -> str:
    """A hexadecimal digest of values that JSON can write: equal values, equal digest, on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class Model(BaseModel):
    """Frozen and strict: unknown fields are refused, not ignored."""

    # What is refused may hold a secret: a fault names the setting, never its value.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, defer_build=True)

    @classmethod
    @functools.cache
    def descriptions(cls) -> dict[str, str]:
        """Meanings of the fields, by name: the docstrings below them. Pydantic's `use_attribute_docstrings` reads a file once for
        each of its classes, 0.1 s of a start; this is read when somebody asks.
        """
        found = {}
        for kind in reversed(cls.__mro__):
            for field, text in pairwise(_classes_in(kind.__module__)[kind.__name__].body if issubclass(kind, Model) else ()):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        found[name] = " ".join(words.split()).removesuffix(".")
        return {name: field.description or found.get(name, "") for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        made = handler(schema)
        fields = handler.resolve_ref_schema(made)["properties"]
        for name, words in cls.descriptions().items():
            fields[name] |= {"description": words} if words else {}
        return made


@functools.cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


class FoundFile(NamedTuple):
    """A file of a source before its content is known. ``immutable``: a revision, etag or generation that names it. ``content``:
    sha256:... or blob:..., if the store reports it: the same under every name. ``split``: where all its documents go; None: by
    their keys. ``stamp``: of a local file, when it was listed.
    """

    source: int
    name: str
    uri: str
    size: int | None
    immutable: str | None = None
    content: str | None = None
    split: SplitName | None = None
    stamp: Stamp = ()


class SourceFile(NamedTuple):
    """A file with a known content. ``location``: its local path, if it was brought to a machine, which is not part of its
    identity; it is readable only there. ``stamp``: of the file at that path, when the digest was taken. ``found``: where the file
    can be had again. ``line_ends``: crlf if line feeds of the source's separator may be CR LF in it. ``partitions``: kept
    columns that its directories give, with their values.
    """

    source: int
    name: str
    size: int
    sha256: Digest
    format: FileFormat
    location: str = ""
    split: SplitName | None = None
    stamp: Stamp = ()
    found: FoundFile | None = None
    line_ends: Literal["crlf"] | None = None
    partitions: tuple[tuple[str, str | None], ...] = ()

    def identity(self) -> tuple[Any, ...]:
        given = [{"partitions": self.partitions}] if self.partitions else []
        return (self.sha256, self.format, *([self.line_ends] if self.line_ends else []), *given)


class FileRange(NamedTuple):
    """A range of a file's text: row groups or record batches ``start:stop``, of those the rows ``rows``; or bytes
    ``start:stop`` at ends of documents. ``rows``: where it is cut within one row group. ``text_bytes``: about how much text.
    """

    file: SourceFile
    start: int
    stop: int
    rows: IntPair | None
    text_bytes: int

    @property
    def label(self) -> str:
        return f"{self.file.name}[{self.start}:{self.stop}]" + (f"@{self.rows[0]}" if self.rows else "")

    def identity(self) -> tuple[Any, ...]:
        """The facts that decide its text, besides how the file is read."""
        return (self.file.identity(), (self.start, self.stop, self.rows))


class Slice(NamedTuple):
    """The unit of work and resume: one range of a large file, or a run of whole small files of one source, in their order. Its
    rows count through all of its ranges. ``rows_before``: rows of the run before these files, if others of the run are not read.
    """

    ranges: Annotated[tuple[FileRange, ...], Field(min_length=1)]
    rows_before: int = 0

    @property
    def source(self) -> int:
        """Index of its source."""
        return self.ranges[0].file.source

    @property
    def split(self) -> SplitName | None:
        """The split of all its documents; None: by their keys."""
        return self.ranges[0].file.split

    @property
    def text_bytes(self) -> int:
        """About how much text."""
        return sum(part.text_bytes for part in self.ranges)

    @property
    def label(self) -> str:
        first, *more = self.ranges
        return f"{first.file.name} and {plural(len(more), 'more file')}" if more else first.label


class PublishedLocation(Model):
    """Where a published version has the documents of a slice: in each split a run of them, ``(first, count)``, in the order of
    their files and rows but for those that are left out. ``first_row``: the row of the file at which the slice begins.
    """

    version: Name
    first_row: int
    first_file: int | None = None
    """The number of its first file in the version, for a run of files."""
    train: IntPair = (0, 0)
    validation: IntPair = (0, 0)
    test: IntPair = (0, 0)
    left_out: IntPair = (0, 0)

    def of(self, split: Split) -> IntPair:
        run: IntPair = getattr(self, split)
        return run


class TokenRange(Model):
    """Tokens ``first:stop`` of a split, and the digest of the bytes that each token array has of them. The last ``tail`` of them
    are in an object of the shard.
    """

    first: int = Field(ge=0)
    count: int = Field(ge=0)
    digests: dict[TokenArrayName, str]
    tail: int = Field(0, ge=0)

    @property
    def stop(self) -> int:
        return self.first + self.count


class UnfinishedLocation(Model):
    """Where an unfinished version has the tokens of a slice: a range in each split, in the order of the documents. ``attempt``:
    the one that has those of its objects that are not whole.
    """

    version: Name
    attempt: Name
    layout: LayoutName = "mmap"
    train: TokenRange
    validation: TokenRange
    test: TokenRange | None = None
    """Of a version that has one."""
    left_out: TokenRange | None = None
    """Of a version that leaves documents out."""

    def of(self, split: Split) -> TokenRange:
        found: TokenRange | None = getattr(self, split)
        if found is None:
            raise ValueError(f"the unfinished version {self.version} has no {split}")
        return found

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the version."""
        return tuple(split for split in ALL_SPLITS if getattr(self, split) is not None)


class TokenShard(Model):
    """A tokenized slice. Its tokens are in exactly one place: objects of its own, an unfinished version, or a published one.

    Written next to its objects it is their receipt: it is written last, so that its presence proves that the shard is whole. A
    published slice is listed in its version's index.
    """

    key: Name
    inputs: JsonObject
    """The values that the key is a digest of."""
    objects: tuple[StoredObject, ...]
    text_bytes: int
    rows: int
    """Rows or lines of the slice, blank lines included."""
    read: int
    """Documents."""
    written: int
    left_out: int = 0
    """Documents that were skipped and have rows, after the others."""
    skipped: dict[str, int]
    replaced: dict[str, int]
    token_count: int
    max_token_id: int
    segments: str = ""
    """Digest and documents of each segment, base64; empty: not known."""
    text_bytes_taken: int = 0
    """Text whose tokens were there already, in other shards."""
    token_arrays: tuple[TokenArrayName, ...] = (TOKENS,)
    """Those that it has; without a loss mask all of its tokens count."""
    columns: dict[str, str] = {}
    """The kind of each kept column, by its name."""
    facts: dict[Name, FactWidth] = {KEY: 1, ROW: 1}
    """The schema of its rows: uint64 numbers of each fact."""
    matches: dict[str, int] = {}
    """Documents in which steps found something, by step and what it was."""
    examples: dict[str, list[JsonObject]] = {}
    """The first few of each of these, by their rows."""
    file_rows: str = ""
    """Rows of each file of a run of files: uint32, base64; empty: one range of one file."""
    files: str = ""
    """Digest and bytes of text of each file of a run of files, base64; empty: not known."""
    unfinished: UnfinishedLocation | None = None
    """The unfinished version that has the tokens."""
    published: PublishedLocation | None = None
    """The published version that has the tokens."""

    @model_validator(mode="after")
    def in_one_place_and_whole(self) -> Self:
        if self.published is not None and (self.unfinished is not None or self.objects):
            raise ValueError(f"shard {self.key[:12]}: its tokens are in version {self.published.version} and elsewhere, too")
        if self.unfinished is not None and any(stored.key.startswith("encoded_tokens") for stored in self.objects):
            raise ValueError(f"shard {self.key[:12]}: its tokens are in an unfinished version and in objects of its own")
        if self.unfinished is not None and DIGEST in self.facts and self.unfinished.left_out is None:
            raise ValueError(f"shard {self.key[:12]}: does not say where its duplicates are")
        if wrong := [stored.key for stored in self.objects if not is_below(stored.key)]:
            raise ValueError(f"shard {self.key[:12]}: {wrong[0]!r} is not a name of an object below it")
        if self.file_rows and int(self.file_starts[-1]) != self.rows:
            raise ValueError(f"shard {self.key[:12]}: has {self.rows} rows, but its files have {self.file_starts[-1]}")
        if self.read != self.written + sum(self.skipped.values()):
            raise ValueError(f"shard {self.key[:12]}: read {self.read}, written {self.written}, skipped {self.skipped}")
        return self

    @property
    def file_starts(self) -> UInt64s:
        """The row of the slice at which each file of a run of files begins, and the end of the last one: uint64[files + 1]. For
        one range of one file, its only start.
        """
        counts = np.frombuffer(base64.b64decode(self.file_rows), "<u4").astype(np.uint64)
        return np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts, dtype=np.uint64)])

    @property
    def of_texts(self) -> tuple[str, ...]:
        """The facts of its texts."""
        return tuple(name for name in self.facts if name not in OF_PLACE)

    @property
    def seq_count(self) -> int:
        """Sequences: its documents, and those that were left out, which have no tokens."""
        return self.written + self.left_out

    @property
    def byte_count(self) -> int:
        return sum(stored.size for stored in self.objects)


class PinnedSource(NamedTuple):
    """A source that no longer moves: its place, as it may be shown, its revision and its files."""

    origin: str
    revision: str | None
    files: tuple[FoundFile, ...]
