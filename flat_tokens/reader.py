"""Reading a dataset: ``flat_tokens.open(path_or_url)`` and its splits; and the message for a path that is not a dataset:
what is there, and the nearest path that is one.
"""

from __future__ import annotations

import os
import posixpath
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int32s, JsonObject
from flat_tokens.arrays.opening import open_array, read_metadata
from flat_tokens.batch import LOSS_MASK, MAX_TOKEN_ID
from flat_tokens.manifest import (
    BYTES_RECORD,
    EVERY_SPLIT,
    GROUPS,
    LINK,
    MANIFEST,
    POINTER,
    RECEIPT,
    SPLITS,
    TEST,
    VERSIONS,
    SplitName,
    latest_of,
    manifest_of,
    read_manifest,
    read_token_bytes,
    splits_at,
    splits_of,
)
from flat_tokens.options import at_least, nearest
from flat_tokens.rows.documents import LEFT_OUT, DocumentTable, beside
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores import signing
from flat_tokens.stores.cached import READ_AHEAD_BYTES, CachedStore
from flat_tokens.stores.disk_cache import DiskCache
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.reading import resolved_path
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, read_json, stored_object

ROOTS = ("zarr.json", ".zgroup")
DEPTH, DIRECTORIES = 4, 1000
"""How deep datasets are looked for below a path, and in how many directories."""
NAMED = 5
CONFIG_BYTES = 1 << 16
OUTPUT = re.compile(rb"^output:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
WANTED = f"A dataset is a build's output, with {POINTER}, or one version, with {' and '.join(SPLITS)}."

OTHERS = "flat-tokens inspect says whether it is of another format, and flat-tokens import makes a dataset of it."


class Directory(NamedTuple):
    """A directory with the names of what is right in it."""

    store: Store
    files: tuple[str, ...]
    directories: tuple[str, ...]

    @property
    def is_dataset(self) -> bool:
        """Whether it is a build's output or a version, by the names in it."""
        has_latest = POINTER in self.files
        with suppress(ValueError, OSError):  # a pointer that cannot be read is one, too
            has_latest = has_latest and latest_of(self.store) is not None
        return has_latest or (set(SPLITS) <= {*self.directories} and not {*ROOTS}.isdisjoint(self.files))


def directory(store: Store) -> Directory:
    """The directory at *store*, by one listing. Links are left out. FileNotFoundError or NotADirectoryError if there is none."""
    found = [info for info in store.ask("ls", detail=True) if not info.get("islink")]
    names: dict[bool, list[str]] = {False: [], True: []}
    for info in found:
        path = info["name"].rstrip("/")
        if posixpath.dirname(path) == store.root.rstrip("/"):  # web servers list links to anywhere
            names[info["type"] == "directory"].append(posixpath.basename(path))
        elif path == store.root and info["type"] != "directory":
            raise NotADirectoryError(path)
    return Directory(store, tuple(sorted(names[False])), tuple(sorted(names[True])))


def _if_listed(store: Store) -> Directory | None:
    """The directory at *store*; None if there is none, or it cannot be listed."""
    with suppress(*NO_OBJECT, PermissionError):
        return directory(store)
    return None


def directories_below(store: Store) -> Iterator[Directory]:
    """The directories at and below a path, nearest first, without hidden ones and those within a dataset. Directories that
    cannot be listed are left out.
    """
    level, left = [store], DIRECTORIES
    for _ in range(DEPTH + 1):
        following: list[Store] = []
        for found in filter(None, map(_if_listed, level[:left])):
            yield found
            if not found.is_dataset:
                following += [found.store / name for name in found.directories if not name.startswith(".")]
        level, left = following, left - len(level)
        if left <= 0:
            return


def datasets_below(store: Store) -> list[Store]:
    """The outputs and datasets below a path, nearest first."""
    return [found.store for found in directories_below(store) if found.is_dataset]


def no_dataset(store: Store) -> FileNotFoundError:
    """The error that says what is at *store*, that a dataset was wanted, and the nearest that is one."""
    return FileNotFoundError(f"{store.url}: {_seen(store)}")


def _seen(store: Store) -> str:
    try:
        here = directory(store)
    except NO_OBJECT:
        if not store.exists(""):
            return f"there is nothing here.{_beside(store)}"
        if output := config_output(store):
            return f"is a configuration, not a dataset. Name the output of its build: {output}"
        around = _around(store)
        return f"is a file of a dataset.{around}" if around else f"is a file, no flat-tokens dataset. {WANTED} {OTHERS}"
    if RECEIPT in here.files:
        return f"is a token shard, not a dataset.{_around(store) or ' flat-tokens inspect shows it.'}"
    if not {*ROOTS}.isdisjoint(here.files) and "encoded_tokens" in here.directories:
        return f"is one flat-tokens array, not a dataset with {' and '.join(SPLITS)}.{_around(store)}"
    versions = here if posixpath.basename(store.root) == VERSIONS else None
    if versions is None and VERSIONS in here.directories:
        versions = directory(store / VERSIONS)
    if versions is not None:
        names = [versions.store.path(name) for name in versions.directories]
        if above := _around(store):
            return f"holds the versions of an output.{above}"
        return f"no version here is the latest. {_one_of(names, 'Name a version')}" if names else "nothing is published here yet."
    if around := _around(store):
        return f"is a part of a dataset, not a dataset.{around}"
    if not here.files and not here.directories:
        return f"is an empty directory. {WANTED}"
    if below := datasets_below(store):
        return f"is not a dataset itself. {_one_of([one.url for one in below], 'Name one below')}"
    holds = ", ".join([*(f"{name}/" for name in here.directories), *here.files][:NAMED])
    return f"is not a flat-tokens dataset. {WANTED} Here are {holds}. {OTHERS}"


def config_output(store: Store) -> str | None:
    """The output that a build's configuration names, if *store* is such a file."""
    if not store.root.endswith((".yaml", ".yml")):
        return None
    with suppress(*NO_OBJECT):
        found = OUTPUT.search(store.read_range("", 0, CONFIG_BYTES))
        return found[1].decode(errors="replace") if found else None
    return None


def _around(store: Store) -> str:
    """The remedy if a path is within a dataset."""
    path = posixpath.dirname(store.root)
    while path not in ("", "/"):
        if (found := _if_listed(replace(store, root=path))) and found.is_dataset:
            return f" Name the dataset around it: {found.store.url}"
        path = posixpath.dirname(path)
    return ""


def _beside(store: Store) -> str:
    """The remedy if nothing is at a path: datasets around or next to it, the most similar name first."""
    if around := _around(store):
        return around
    path, name = posixpath.split(store.root)
    while (above := _if_listed(replace(store, root=path)) if path else None) is None:
        if path == posixpath.dirname(path):
            return ""
        path, name = posixpath.split(path)
    for names in (filter(None, [nearest(name, above.directories)]), above.directories[:DIRECTORIES]):
        found = [one.store.url for one in map(_if_listed, (above.store / other for other in names)) if one and one.is_dataset]
        if found:
            return f" {_one_of(found, 'Did you mean')}?"
    return f" The nearest directory that is there is {above.store.url}."


def _one_of(names: Sequence[str] | Iterable[str], lead: str) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{lead}: {', '.join(names[:NAMED])}{more}"


MAX_LINKS = 40
"""The most links that a path leads through, as in Linux."""


@dataclass(frozen=True)
class Dataset:
    """An immutable version of a dataset: the splits ``train``, ``validation`` and ``test``, None if there is no such split."""

    store: Store
    train: FlatTokens
    validation: FlatTokens
    test: FlatTokens | None = None

    @property
    def splits(self) -> dict[SplitName, FlatTokens]:
        """The splits that there are, by their names."""
        return {name: split for name in EVERY_SPLIT if (split := getattr(self, name)) is not None}

    @property
    def path(self) -> str:
        """The version's own path or URL, whose content never changes."""
        return self.store.url

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {split.token_count:,} tokens" for name, split in self.splits.items())
        return f"Dataset({self.store.url!r}: {counts})"

    @cached_property
    def manifest(self) -> JsonObject:
        """The manifest: the origin of the tokens, totals, digests. FileNotFoundError if the dataset has none; ValueError if it
        is not valid.
        """
        return read_manifest(self.store)

    @property
    def documents(self) -> Any:
        """The documents, those that were left out among them, a row each: a pyarrow.RecordBatchReader, which duckdb, polars and
        pandas take. ``split`` and ``place``: where it is; ``reason``: why it is in no split; ``of``: the key of the document that
        stayed. It warns if the dataset does not know all that it left out. It needs pyarrow.
        """
        table = document_table(self.store, self.splits)
        if table.unknown:
            warnings.warn(table.unknown, stacklevel=2)
        return table.read()

    @cached_property
    def token_bytes(self) -> Int32s:
        """The bytes that each token id stands for: int32[highest id + 1]. Special tokens have 0, as ids without a token have.

        Loss in bits per byte is the sum of the losses of tokens with bytes, over the sum of their bytes and ln 2.
        FileNotFoundError for tokens from elsewhere; ValueError if the record is damaged.
        """
        try:
            return read_token_bytes(self.store, self.manifest).lengths
        except NO_OBJECT as error:
            raise FileNotFoundError(
                f"{self.store.url}: has no {BYTES_RECORD}: its tokens are from elsewhere. "
                "flat_tokens.vocabulary.token_bytes has the bytes of a tokenizer by its name."
            ) from error


def open(
    path_or_url: PathOrUrl,
    *,
    cache: PathOrUrl | None = None,
    cache_bytes: int | None = None,
    read_ahead: int = READ_AHEAD_BYTES,
) -> Dataset:
    """Open a dataset at a local path or fsspec URL.

    The path is a dataset, or a build's output with ``latest.json``. The pointer and links are resolved once: later versions do
    not change an open dataset. FileNotFoundError if there is no published dataset; ValueError, naming the array, if it does
    not have the format, or naming the pointer or manifest, if a key is set and it is not signed.

    *cache*: a local directory for at most *cache_bytes* of what is read from a store, shared by the processes of the machine; a
    local dataset needs none and takes none. Then ``steps()`` of loaders fetch up to *read_ahead* bytes of the steps to come, and
    up to twice as many are in memory. ValueError for a dataset without a manifest: nothing says what its objects hold.
    """
    if (cache is None) != (cache_bytes is None):
        raise ValueError(f"cache is {cache!r} and cache_bytes {cache_bytes}: give both, the directory and its bound, or none")
    checked_bytes, read_ahead = at_least(1, "cache_bytes", cache_bytes or 1), at_least(0, "read_ahead", read_ahead)
    store, metadata = open_root(Store.at(path_or_url))
    has_cache = cache is not None and not store.is_local
    manifest = manifest_of(store) if has_cache or not store.reads_last_bytes or signing.keys() else {}
    objects = [stored_object(stored) for stored in manifest.get("objects", ())]
    if cache is not None and has_cache:
        if not manifest:
            raise ValueError(f"{store.url}: has no {MANIFEST}, which a cache needs. Open it without one, or make it again.")
        store = CachedStore.over(store, objects, DiskCache(cache, checked_bytes), read_ahead)
    elif not store.reads_last_bytes:  # its sizes are those of the manifest, where there is one
        store = replace(store, sizes={store.path(stored.key): stored.size for stored in objects})
    # Datasets with a manifest were written by this library. Local ones are checked in any case.
    in_order = bool(manifest or store.exists(MANIFEST)) and not store.is_local
    marker = f"{TEST}/{GROUPS[metadata['zarr_format']]}"

    def opened(split: SplitName) -> FlatTokens | None:
        if split not in SPLITS and not (split in splits_of(manifest["totals"]) if manifest else store.exists(marker)):
            return None
        return open_split(store / split, in_order=in_order)

    with ThreadPoolExecutor(len(EVERY_SPLIT)) as pool:
        # Round trips of an object store pass together. A local split is opened in less time than a thread is started.
        train, validation, test = (map if store.is_local else pool.map)(opened, EVERY_SPLIT)
    assert train is not None
    assert validation is not None
    return Dataset(store, train, validation, test)


def open_root(root: Store) -> tuple[Store, JsonObject]:
    """The version at a path, and the zarr metadata of its root group. FileNotFoundError, with what is there instead and the
    nearest dataset, if there is no dataset.
    """
    store = resolve(root)
    try:
        metadata = read_metadata(store, "group")
    except NO_OBJECT as error:
        raise no_dataset(store) from error
    if "max_token_id" in metadata["attributes"]:
        raise no_dataset(store)
    return store, metadata


def check_where(root: Store, where: str) -> None:
    """ValueError for an expression that cannot be true or false of a dataset's documents, even if there are none."""
    store, _ = open_root(root)
    for split in open_splits(store).values():
        split.select(indices=[]).select(where=where)


def resolve(store: Store) -> Store:
    """The version that ``latest.json`` points at, or *store* itself if it points at none. Local links are followed, once."""
    store = without_links(store)
    version = latest_of(store)
    return store if version is None else store / VERSIONS / version


def without_links(store: Store) -> Store:
    """The store at its real path. With a key, a link ``latest`` is the output itself: its signed pointer says which version is
    the latest, and whoever writes to the output can change a link. ValueError if there is no pointer.
    """
    if not store.is_local:
        return store
    path = store.root
    for _ in range(MAX_LINKS if signing.keys() else 0):
        above, name = os.path.split(path)
        if name == LINK:
            if kind_of(os.path.join(above, POINTER)) != "file":
                raise ValueError(
                    f"{path}: there is no {POINTER} next to it, whose signature would say which version is the latest. "
                    f"Restore it, or name a version: {os.path.join(above, VERSIONS)}/ID"
                )
            return replace(store, root=resolved_path(above))
        if kind_of(path, follow_links=False) != "link":
            break
        path = os.path.join(above, os.readlink(path)).rstrip("/")
    return replace(store, root=resolved_path(store.root))


def open_splits(store: Store) -> dict[SplitName, FlatTokens]:
    """The splits of a dataset, by their names."""
    return {split: open_split(store / split) for split in splits_at(store)}


def document_table(store: Store, splits: Mapping[Any, Any]) -> DocumentTable:
    """The documents of a version, those of its *splits* first, then those that it left out."""
    return DocumentTable(store, {**splits, **left_out_at(store)})


def left_out_at(version: Store) -> dict[str, FlatTokens]:
    """The documents that a version left out, by LEFT_OUT; nothing if they are not there, as next to a copy of the version."""
    at, is_built = beside(version), posixpath.basename(posixpath.dirname(version.root)) == VERSIONS
    return {LEFT_OUT: open_split(at / LEFT_OUT)} if is_built and at.exists(f"texts/{LEFT_OUT}/of/zarr.json") else {}


def open_split(store: Store, *, in_order: bool = False) -> FlatTokens:
    """Open one flat-tokens array. Its few numbers are checked against each other; no token is read."""
    metadata = read_metadata(store, "group")
    attributes = metadata["attributes"]
    if not attributes and metadata["zarr_format"] == 2:
        read_json(store, ".zattrs")  # FileNotFoundError while the version is removed, file by file
    max_token_id = attributes.get("max_token_id")
    if type(max_token_id) is not int or not 0 <= max_token_id <= MAX_TOKEN_ID:
        raise ValueError(f"{store.url}: max_token_id is {reprlib.repr(max_token_id)}, but the format says 0 to {MAX_TOKEN_ID}")
    tokens = open_array(store / "encoded_tokens", "uint32", in_order=in_order)
    starts = open_array(store / "seq_starts", "uint64", in_order=in_order)
    if starts.length == 0:
        raise ValueError(f"{starts.store.url}: is empty, but it ends with the token count")
    begin, end = starts.take(np.array([0, starts.length - 1])).tolist()
    if begin:
        raise ValueError(f"{starts.store.url}: begins with {begin} instead of 0")
    if end != tokens.length:
        raise ValueError(
            f"{starts.store.url}: ends at {end}, but encoded_tokens has {tokens.length} tokens. "
            "The dataset is damaged or was not written to its end."
        )
    if attributes.get(LOSS_MASK) is not True:
        if LOSS_MASK in attributes or (store.is_local and store.exists(LOSS_MASK)):  # a request more, of a remote store
            raise ValueError(
                f"{store.url}: loss_mask is {reprlib.repr(attributes.get(LOSS_MASK))}, but where there is one it is true. "
                "The dataset is damaged."
            )
        return FlatTokens(store, max_token_id, tokens, starts)
    mask = open_array(store / LOSS_MASK, "uint8", in_order=in_order)
    if mask.length != tokens.length:
        raise ValueError(
            f"{mask.store.url}: has {mask.length} entries, but encoded_tokens has {tokens.length} tokens. "
            "The dataset is damaged or was not written to its end."
        )
    return FlatTokens(store, max_token_id, tokens, starts, mask)
