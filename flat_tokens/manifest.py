"""The manifest of a dataset: its origin, and the size and digest of every stored object. And the record next to it of the bytes
of every token id: with them a loss is reported in bits per byte.
"""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np

from flat_tokens.annotations import Int32s, JsonFacts, JsonObject
from flat_tokens.arrays.layouts import LAYOUTS, to_json
from flat_tokens.batch import TOKENS
from flat_tokens.stores import signing
from flat_tokens.stores.store import NO_OBJECT, Store, StoredObject, is_below, json_object, read_json, read_record, stored_object

POINTER = "latest.json"
VERSIONS = "versions"
CACHE = "_cache"
BESIDE = f"{CACHE}/left_out"
RUNS = "runs"
EXPORTS = "exports"
"""Below an output, a note of each export of its versions."""
LINK = "latest"
LOCK = ".latest.lock"
"""Names below a build's output: the pointer, all versions, token shards and fetched files, what versions left out, records of
runs, and on a local disk the link to the version that the pointer names, and the lock of who writes records.
"""

MANIFEST = "manifest.json"
RECEIPT = "receipt.json"
SplitName = Literal["train", "validation", "test"]
EVERY_SPLIT: tuple[SplitName, ...] = ("train", "validation", "test")
SPLITS: tuple[SplitName, ...] = EVERY_SPLIT[:2]
"""The splits that every dataset has. ``test`` is there where a build was asked for one."""

TEST: SplitName = "test"
GROUPS: dict[int, str] = {2: ".zgroup", 3: "zarr.json"}
"""The object without which there is no group, by the version of zarr."""

CLUSTER = "cluster"
"""The kept column that has the key of the document that names a cluster of near-duplicates; null of a document that is alone."""
FORMAT_VERSION = 1
TOKEN_BYTES, ENTRY_BYTES = 4, 8

PART: JsonObject = {"key": str, "size": int, "sha256": str}
"""A part of a source file, and nothing else."""
STORED: JsonObject = {"key": str, "size": int, "blake3": str}
"""A stored object, and nothing else. Older releases wrote its sha256."""
FORMER = {"version": str, "until": str}
"""A version that was the latest before, and nothing else."""
LISTED = {"documents": int, "sha256": str}
"""The list of forgotten documents, and nothing else."""
POINTER_SHAPE: JsonObject = {"version": str, "manifest_sha256": str, "sequence": int}
POINTER_SHAPE |= {"former?": [FORMER], "withdrawn?": [FORMER], "forgotten?": LISTED}
COUNTS = {"token_count": int, "seq_count": int, "max_token_id": int}
DOCUMENTS = {"read?": int, "written?": int, "token_count?": int, "text_bytes?": int, "skipped?": {"*": int}}
FILE = {"name": str, "size": int, "sha256": str, "line_ends?": str, "parts?": [PART]}
SOURCE = {"name": str, "from?": str, "revision?": str, "files": [FILE]}
TOKENIZER = {"name?": str, "digest?": str, "highest_id?": int, "revision?": str}
PROVENANCE: JsonObject = {
    "name?": str,
    "sources?": [SOURCE],
    "tokenizer?": TOKENIZER,
    "documents?": {},
    "split?": {},
    "semantics?": str,
}
PROVENANCE |= {"operation?": {}, "inputs?": [{"name": str, "version?": str}]}
TOTALS: JsonObject = {
    **dict.fromkeys(SPLITS, COUNTS),
    "test?": COUNTS,
    "documents?": {**DOCUMENTS, "by_source?": [{"name": str, **DOCUMENTS}]},
}
SHAPE = {"layout": str, "totals": TOTALS, "provenance": PROVENANCE, "columns?": {"*": str}, "objects": [STORED]}
"""Readers of a manifest rely on these. Of a name with ``?`` the value may be missing or null; there may be other names. ``*``:
all names.
"""


def split_attributes(max_token_id: int, token_arrays: Iterable[str]) -> JsonObject:
    """The attributes of a split's group. *token_arrays*: those that it has; all but the tokens are named."""
    return {"max_token_id": max_token_id, **{name: True for name in token_arrays if name != TOKENS}}


def manifest_bytes(
    objects: Iterable[StoredObject],
    totals: JsonObject,
    layout: str,
    provenance: JsonObject,
    columns: Mapping[str, str] | None = None,
) -> bytes:
    """The manifest's bytes: the dataset's origin and every object's size and digest, except the root's metadata. *columns*: the
    kinds of those that are kept.
    """
    return to_json(
        {
            "format": "flat-tokens",
            "format_version": FORMAT_VERSION,
            "layout": layout,
            "totals": totals,
            "provenance": provenance,
            **({"columns": dict(columns)} if columns else {}),
            "objects": [stored.described() for stored in sorted(objects)],
        }
    )


def splits_of(totals: Mapping[Any, Any]) -> tuple[SplitName, ...]:
    """The splits of a dataset, in their order, by the totals of its manifest."""
    return tuple(split for split in EVERY_SPLIT if split in SPLITS or totals.get(split) is not None)


def counts_of(totals: Mapping[Any, Any]) -> dict[str, int]:
    """The documents and tokens of a dataset, by the totals of its manifest."""
    names = {"documents": "seq_count", "tokens": "token_count"}
    return {kind: sum(totals[split][name] for split in splits_of(totals)) for kind, name in names.items()}


def splits_at(store: Store) -> tuple[SplitName, ...]:
    """The splits of the dataset at *store*: by its manifest, else by the groups that there are."""
    if manifest := manifest_of(store):
        return splits_of(manifest["totals"])
    return EVERY_SPLIT if any(store.exists(f"{TEST}/{key}") for key in GROUPS.values()) else SPLITS


def dataset_of(split: Store) -> Store:
    """The store of the dataset that a split belongs to."""
    return replace(split, root=posixpath.dirname(split.root))


def manifest_of(store: Store) -> JsonObject:
    """The manifest at *store*, empty if another writer wrote none. If a key is set, ValueError if there is none."""
    if store.exists(MANIFEST):
        return read_manifest(store)
    if signing.keys():
        raise ValueError(f"{store.url}: has no {MANIFEST}, so that nothing signs it. Restore it, or unset {signing.KEY_FILE}")
    return {}


def read_manifest(store: Store) -> JsonObject:
    """The manifest at *store*, of the types in SHAPE, which nobody changes. FileNotFoundError if there is none; ValueError if it
    is not right.
    """
    return _parse(read_record(store, MANIFEST), store.path(MANIFEST))


def check_format(record: JsonFacts, name: str, version: int) -> None:
    """ValueError for a record of another format, or another version of it."""
    found, its = (record.get(fact) for fact in ("format", "format_version"))
    if found != name or isinstance(its, bool) or its != version:
        raise ValueError(f"format {found!r}, version {its!r}")


@functools.lru_cache(2)  # a refresh reads two manifests again and again: with many files, each takes a while to parse
def _parse(data: bytes, path: str) -> JsonObject:
    try:
        manifest = json_object(data, path)
        check_format(manifest, "flat-tokens", FORMAT_VERSION)
        check(manifest, SHAPE, "it")
        if manifest["layout"] not in LAYOUTS:
            raise ValueError(f"layout {reprlib.repr(manifest['layout'])}")
    except ValueError as error:
        remedy = "Restore it from a copy, or make the dataset again."
        raise ValueError(f"{path}: is not a manifest that is understood here ({error}). {remedy}") from error
    return manifest


def check(value: Any, shape: Any, where: str) -> None:
    """ValueError, naming the place, if a value has not its *shape*: a type, ``[shape]`` of its items, or a mapping's shapes by
    its names. Integers are those of 64 bits that count something.
    """
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if shape is STORED and type(value) is dict and "sha256" in value:
        shape = PART
    is_exact = kind is dict and shape in (STORED, PART, FORMER, LISTED)
    if type(value) is not kind or (kind is int and not 0 <= value < 1 << 63) or (is_exact and {*value} != {*shape}):
        raise ValueError(f"{where} is {reprlib.repr(value)}")
    if is_exact and "key" in shape and not is_below(value["key"]):
        raise ValueError(f"{reprlib.repr(value['key'])} is not a name of an object below it")
    if isinstance(shape, list):
        for item in value if shape[0] is not FILE else _unusual_files(value):
            check(item, shape[0], f"an item of {where}")
    elif isinstance(shape, dict):
        for name, item in value.items() if "*" in shape else ():
            check(item, shape["*"], name)
        for name, inner in shape.items() if "*" not in shape else ():
            item = value.get(name.rstrip("?"))
            if item is not None or not name.endswith("?"):
                check(item, inner, name.rstrip("?"))


def _unusual_files(files: list[Any]) -> Iterator[Any]:
    """The items of a list that are not files with a name, a size, a digest and no parts: a dataset may have very many files."""
    for file in files:
        try:
            name, size, sha256 = file["name"], file["size"], file["sha256"]
            is_usual = type(file) is dict and type(name) is type(sha256) is str and type(size) is int and 0 <= size < 1 << 63
        except (TypeError, KeyError, IndexError):
            is_usual = False
        if not is_usual or "parts" in file:
            yield file


def latest_of(store: Store) -> str | None:
    """The version that an output's ``latest.json`` points at; None if it points at none. ValueError if it can be none."""
    try:
        version = json_object(read_record(store, POINTER), store.path(POINTER)).get("version", "")
    except NO_OBJECT:
        return None
    return version if version is None else check_name(version, f"{store.path(POINTER)}: ")


def check_pointer(value: JsonObject, path: str) -> None:
    """ValueError if the content of ``latest.json``, which is at *path*, is not a pointer to a version."""
    try:
        if value.keys() & {*OF_PEOPLE} and value["sha256"] != pointer_digest(value):
            raise ValueError
        if value["version"] is value["manifest_sha256"] is None and value["sequence"] == 0:  # a first version may wait
            value = {**value, "version": "none", "manifest_sha256": "", "sequence": 1}
        check(value, POINTER_SHAPE, "it")
        former = (*value.get("former", ()), *value.get("withdrawn", ()))
        if value["sequence"] < 1 or any(datetime.fromisoformat(one["until"]).tzinfo is None for one in former):
            raise ValueError
        for one in (value, *former):
            check_name(one["version"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: is not a pointer to a version. {RESTORE}") from error


RESTORE = "Restore it or remove it, and run again. Without it, pins and decisions are lost."
OF_PEOPLE = ("candidate", "rejected", "pins", "decisions")
"""Facts of a pointer of which readers know nothing. A digest of all facts is next to them."""
POINTER_NAMES = {*(name.rstrip("?") for name in POINTER_SHAPE), "sha256", *OF_PEOPLE}
CLOCKS = timedelta(days=1)
"""Clocks of machines that share an output differ by less."""


def implausible(value: JsonObject) -> str | None:
    """The fault of a pointer that no build or rollback can have written, as a sentence; None if one of them can."""
    if unknown := sorted(value.keys() - POINTER_NAMES):
        return f"has {reprlib.repr(unknown[0])}, which no pointer has"
    former, withdrawn = (value.get(name, []) for name in ("former", "withdrawn"))
    names = [value["version"], *(one["version"] for one in (*former, *withdrawn))]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"names version {reprlib.repr(twice)} twice"
    if value["sequence"] < len(names):
        return f"is number {value['sequence']}, but names {len(names)} versions that were the latest in order"
    for several in (former, withdrawn):
        times = [datetime.fromisoformat(one["until"]) for one in several]
        for one, time, before in zip(several, times, [datetime.min.replace(tzinfo=UTC), *times], strict=False):
            if time.isoformat() != one["until"] or time.utcoffset():
                return f"says {reprlib.repr(one['until'])}, which is not a time as builds write it"
            if before > time and before - time > CLOCKS:
                return f"says that version {one['version']} was the latest until {one['until']}, which cannot be"
    return None


def pointer_digest(value: JsonFacts) -> str:
    """SHA-256 of all other facts of a pointer."""
    facts = {name: fact for name, fact in value.items() if name != "sha256"}
    return json_digest(facts)


def history_digest(pointer: JsonFacts) -> str:
    """SHA-256 of the facts that a pointer alone has: its number, and the versions before."""
    state = [pointer.get(name) or None for name in ("sequence", "former", "withdrawn")]
    return json_digest(state)


def json_digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def manifest_digest(dataset: Store) -> str:
    """SHA-256 of the manifest of a dataset that has one."""
    return hashlib.sha256(read_record(dataset, MANIFEST)).hexdigest()


def digest_below(dataset: Store, prefix: str) -> str | None:
    """A digest of the objects whose keys begin so, by the manifest. None if it has none; FileNotFoundError without a manifest."""
    objects = map(stored_object, read_manifest(dataset)["objects"])
    listed = sorted([key, digest] for key, _, digest in objects if key.startswith(prefix))
    return json_digest(listed) if listed else None


def check_name(version: object, where: str = "") -> str:
    """A version's name. ValueError if it can be none: a path would lead out of the output."""
    if not isinstance(version, str) or {"/", "\0"} & set(version) or version in ("", ".", ".."):
        raise ValueError(f"{where}{reprlib.repr(version)} is not the name of a version")
    return version


class FileChanges(NamedTuple):
    """Names of a source's files that differ between two versions; *renamed* are pairs of the old and the new name."""

    added: list[str]
    removed: list[str]
    changed: list[str]
    renamed: list[tuple[str, str]]


def compare_files(before: Mapping[str, str], after: Mapping[str, str]) -> FileChanges:
    """Compare the files of a source, each a name with the digest of its content. A file with the content of a removed one is
    that one, renamed.
    """
    by_digest = {digest: name for name, digest in before.items() if name not in after}
    renamed = [(by_digest.pop(digest), name) for name, digest in after.items() if name not in before and digest in by_digest]
    old_names, new_names = {old for old, _ in renamed}, {new for _, new in renamed}
    return FileChanges(
        added=[name for name in after if name not in before and name not in new_names],
        removed=[name for name in before if name not in after and name not in old_names],
        changed=[name for name in after if name in before and before[name] != after[name]],
        renamed=renamed,
    )


BYTES_RECORD = "token_bytes.json"
BYTES_FORMAT, BYTES_VERSION = "flat-tokens-token-bytes", 1
BYTES_SHAPE = {"tokenizer": str, "sha256": str, "token_bytes": list}
MOST_BYTES = 1 << 16
"""Bytes of a token, at most."""


class TokenBytes(NamedTuple):
    """Bytes that each id of a tokenizer stands for: int32[highest id + 1]. Special tokens, and ids without a token, have 0.

    ``tokenizer``: its digest. ``is_exact``: the bytes of a text's tokens are those of the text. Without it a tokenizer changes
    text first, such as to small letters, or puts a space before it.
    """

    lengths: Int32s
    tokenizer: str
    is_exact: bool

    def record(self) -> bytes:
        """The record's bytes."""
        facts = {"format": BYTES_FORMAT, "format_version": BYTES_VERSION, "tokenizer": self.tokenizer, "exact": self.is_exact}
        return to_json({**facts, "sha256": self.sha256, "token_bytes": self.lengths.tolist()}, indent=None)

    @property
    def sha256(self) -> str:
        """A digest of all of it."""
        facts = f"{self.tokenizer} {self.is_exact}".encode()
        return hashlib.sha256(facts + b"\0" + self.lengths.astype("<i4").tobytes()).hexdigest()


def read_token_bytes(store: Store, manifest: JsonFacts) -> TokenBytes:
    """The record next to a dataset's manifest. FileNotFoundError if there is none; ValueError, naming it, if it is not one, or is
    of another tokenizer than the manifest's.
    """
    found = read_json(store, BYTES_RECORD)
    try:
        check_format(found, BYTES_FORMAT, BYTES_VERSION)
        check(found, BYTES_SHAPE, "it")
        lengths = np.array(found["token_bytes"] or [0])
        if type(found.get("exact")) is not bool or lengths.dtype != np.int64 or lengths.ndim != 1:
            raise ValueError("it is not a number of bytes for each id")
        if lengths.min() < 0 or lengths.max() > MOST_BYTES:
            raise ValueError(f"a token has {lengths.min()} bytes, another one {lengths.max()}")
        tokenizer = (manifest.get("provenance", {}).get("tokenizer") or {}).get("digest")
        if found["tokenizer"] != tokenizer:
            raise ValueError(f"it is of the tokenizer {found['tokenizer'][:12]}, but the manifest names {str(tokenizer)[:12]}")
        totals = manifest.get("totals", {})
        largest = max((totals[split]["max_token_id"] for split in splits_of(totals) if split in totals), default=0)
        if largest >= len(lengths):
            raise ValueError(f"it ends with id {len(lengths) - 1}, but the dataset has id {largest}")
        read = TokenBytes(lengths.astype(np.int32), found["tokenizer"], found["exact"])
        if found["sha256"] != read.sha256:
            raise ValueError("it has another digest than it says")
    except (ValueError, OverflowError) as error:
        remedy = "Restore it from a copy, or remove it."
        raise ValueError(
            f"{store.path(BYTES_RECORD)}: does not tell the bytes of the dataset's tokens ({error}). {remedy}"
        ) from error
    return read
