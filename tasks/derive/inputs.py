"""Inputs: the datasets that others are made of. Where a version lies, its counts, its tokenizer and its sources."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

from pydantic import Field

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.arrays.opening import open_array, read_metadata
from flat_tokens.checker import bytes_to_check, check_split, verify
from flat_tokens.manifest import MANIFEST, SPLITS, read_manifest
from flat_tokens.reader import FlatTokens, open_split, resolve
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.corpus import open_corpus, run_of, sources_of
from tasks.models import Model, Split, digest_of
from tasks.output.paths import DOCUMENTS, VERSIONS
from tasks.progress import meter
from tasks.split.write import DOCUMENT_ARRAYS

READERS = 4
SEEN = functools.partial(meter.add, "examine")
FOREIGN = "a flat-tokens dataset without record of its documents"


class Input(Model):
    """A version of a dataset, identified by a digest: it stays as it is now."""

    location: str = Field(description="Path or URL of the version itself, whatever 'latest' points at later")
    name: str
    version: str | None = Field(description="Its name in the output that it belongs to")
    manifest_sha256: str | None
    digest: str = Field(description="Of its manifest; where it has none, of all that is stored of its splits")
    layout: LayoutName | None
    tokenizer: dict[str, Any] = Field(description="As its manifest has it; empty where there is no record")
    documents: dict[str, Any] | None = Field(description="The policy for bad documents")
    split: dict[str, Any] | None = Field(description="How validation was chosen")
    sources: tuple[dict[str, Any], ...]
    text_bytes: int | None
    seq_counts: dict[Split, int]
    token_counts: dict[Split, int]
    has_documents: bool = Field(description="Whether key, file and row of each sequence are stored")

    @property
    def label(self) -> str:
        return f"{self.name} ({self.version or self.digest[:16]})"

    def facts(self) -> dict[str, Any]:
        """The record of this input in the manifest of a dataset made of it. It does not say where the input lies."""
        named = self.model_dump(include={"name", "version", "manifest_sha256", "digest", "tokenizer"})
        return {**named, "seq_counts": self.seq_counts, "token_counts": self.token_counts}


def examine(path_or_url: str) -> Input:
    """Look at a dataset that is to be an input. One without a manifest is read through, for its digest and to check its format.

    FileNotFoundError where there is nothing; ValueError where it is something else or damaged.
    """
    try:
        store = version_at(path_or_url)
        attributes = read_metadata(store, "group")["attributes"]
    except (FileNotFoundError, NotADirectoryError) as error:
        if not Store.at(path_or_url).exists(""):
            raise FileNotFoundError(f"{path_or_url}: there is nothing here") from error
        raise ValueError(
            f"{path_or_url}: is no flat-tokens dataset. What is in another format is imported first: python -m flows import"
        ) from error
    if "max_token_id" in attributes:
        raise ValueError(
            f"{path_or_url}: is one flat-tokens array, not a dataset with train and validation. Name the dataset, or import the "
            "array first: python -m flows import"
        )
    described = store.exists(MANIFEST)
    if described:
        verify(store.url)
    splits = {split: open_split(store / split) for split in SPLITS}
    known = _of_manifest(store, splits) if described else _of_content(store, splits)
    return Input(
        location=store.url,
        seq_counts={name: split.seq_count for name, split in splits.items()},
        token_counts={name: split.token_count for name, split in splits.items()},
        **known,
    )


def version_at(path_or_url: str) -> Store:
    """The dataset that a path means now: a pointer or a symbolic link is followed to its version."""
    store = resolve(Store.at(path_or_url))
    return Store.at(os.path.realpath(store.root)) if store.is_local else store


def _of_manifest(store: Store, splits: dict[Split, FlatTokens]) -> dict[str, Any]:
    data = store.read(MANIFEST)
    manifest = read_manifest(store)
    made_of = manifest.get("provenance")
    made_of = made_of if isinstance(made_of, dict) else {}
    tokenizer = made_of.get("tokenizer")
    digest = hashlib.sha256(data).hexdigest()
    above, _, version = store.root.rpartition("/")
    name = str(made_of.get("name") or _name_of(store))
    objects = [StoredObject(**item) for item in manifest["objects"]]
    stored = {
        split: [one._replace(key=one.key.removeprefix(f"{split}/")) for one in objects if one.key.startswith(f"{split}/")]
        for split in splits
    }
    has_documents = bool(sources_of(made_of, store.path(MANIFEST))) and _has_documents(store, splits)
    return {
        "name": name,
        "version": version if above.rpartition("/")[2] == VERSIONS else None,
        "manifest_sha256": digest,
        "digest": digest,
        "layout": manifest.get("layout") if manifest.get("layout") in get_args(LayoutName) else None,
        "tokenizer": tokenizer if isinstance(tokenizer, dict) and isinstance(tokenizer.get("digest"), str) else {},
        "documents": made_of.get("documents"),
        "split": made_of.get("split"),
        "sources": tuple(made_of["sources"]) if has_documents else (_as_source(name, stored),),
        "text_bytes": (manifest["totals"].get("documents") or {}).get("text_bytes"),
        "has_documents": has_documents,
    }


def _of_content(store: Store, splits: dict[Split, FlatTokens]) -> dict[str, Any]:
    stored = {split: sorted((store / split).listing()) for split in splits}
    meter.expect(bytes_to_check(store) + sum(size for mine in stored.values() for _, size in mine))
    for split in splits.values():
        for fault in check_split(split, SEEN):
            raise ValueError(f"{fault}. Nothing is made of a dataset that breaks the format.")
    source = _as_source(_name_of(store), {split: _digested(store / split, mine) for split, mine in stored.items()})
    return {
        "name": _name_of(store),
        "version": None,
        "manifest_sha256": None,
        "digest": digest_of([file["sha256"] for file in source["files"]]),
        "layout": None,
        "tokenizer": {},
        "documents": None,
        "split": None,
        "sources": (source,),
        "text_bytes": None,
        "has_documents": False,
    }


def _name_of(store: Store) -> str:
    """A name for a dataset without a recorded name: that of its directory."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", store.root.rpartition("/")[2]).strip(".-") or "dataset"


def _has_documents(store: Store, splits: dict[Split, FlatTokens]) -> bool:
    for name, split in splits.items():
        for column in DOCUMENT_ARRAYS:
            try:
                array = open_array(store / f"{DOCUMENTS}/{name}/{column}", "uint64")
            except FileNotFoundError:
                return False
            if array.length != split.seq_count:
                raise ValueError(f"{array.store.url}: has {array.length} items for {split.seq_count} sequences")
    return True


def _as_source(name: str, stored: dict[Split, list[StoredObject]]) -> dict[str, Any]:
    """A dataset without record of its documents, as a source: each split a file, each sequence a row."""
    files = [
        {"name": split, "size": sum(one.size for one in mine), "sha256": digest_of(*map(list, sorted(mine))), "split": split}
        for split, mine in stored.items()
    ]
    return {"name": name, "from": FOREIGN, "revision": None, "files": files}


def _digested(store: Store, stored: Sequence[tuple[str, int]]) -> list[StoredObject]:
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(lambda one: store.digest(one[0], SEEN), stored))


def settings_of_sources(inputs: Sequence[Input]) -> dict[str, Any]:
    """Where the sources of inputs lay when they were built, and their tokenizer, as far as it is recorded. Tools look there for
    a text.
    """
    runs = [run_of(open_corpus(one.location)) if one.has_documents else None for one in inputs]
    paths: list[str | None] = []
    for one, run in zip(inputs, runs, strict=True):
        found = run.source_paths if run else ()
        paths += [found[i] if i < len(found) else None for i in range(len(one.sources))]
    tokenizer = {"name": runs[0].tokenizer, "pattern": runs[0].pattern} if runs[0] else {}
    return {"sources": [{"path": path} for path in paths], "tokenizer": tokenizer}
