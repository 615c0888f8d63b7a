"""Documents that are forgotten: those that somebody names, where the versions of an output have them, and the removal of what is
left of them outside of versions: token shards, what killed builds left, files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, JsonObject, UInt64s
from flat_tokens.forgotten import NO_KEYS, Forgotten, windows_of
from flat_tokens.keys import document_keys
from flat_tokens.manifest import VERSIONS, read_manifest
from flat_tokens.reader import check_where, document_table, open_splits
from flat_tokens.rows.documents import DocumentTable, matching
from flat_tokens.rows.where import parse
from flat_tokens.stores.local import kind_of, sync
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store, read_json, read_record
from tasks.derive.without import GONE, OfVersion
from tasks.garbage import remove_below, stored_shards
from tasks.models import ALL_SPLITS, LEFT_OUT
from tasks.output import paths
from tasks.output.leases import entries, sweep
from tasks.output.paths import receipt_key, shard_key, version_store
from tasks.output.pointer import is_dataset
from tasks.output.versions import names_of
from tasks.parts.opening import open_shard
from tasks.rows import FILE, KEY, OF, REASON
from tasks.shards.receipts import read_receipt


class NamedDocuments(NamedTuple):
    """The documents that somebody names: by *keys*, uint64[n], sorted, by the list of another output, or an expression; all
    without any of them; of one source.
    """

    keys: UInt64s | None = None
    listed: Forgotten | None = None
    where: str | None = None
    source: str | None = None

    def those(self, keys: UInt64s) -> Bools:
        """Which documents with these *keys*, uint64[n], keys or a list name; all without any: bool[n]."""
        if self.listed is not None:
            return self.listed.those(keys)
        return np.ones(len(keys), bool) if self.keys is None else np.isin(keys, self.keys)


def versions_of(root: Store) -> list[str]:
    """The versions that are at an output, complete."""
    return [name for name in names_of(root, VERSIONS) if is_dataset(root, name)]


def table_of(root: Store, version: str) -> DocumentTable:
    """The documents of a version, those that it left out last."""
    store = version_store(root, version)
    return document_table(store, open_splits(store))


def sources_of_files(manifest: JsonObject) -> list[tuple[str, str, str]]:
    """The source, name and digest of each file of a version, by its number."""
    sources = manifest["provenance"].get("sources") or ()
    return [(source["name"], file["name"], file["sha256"]) for source in sources for file in source["files"]]


def keys_named(table: DocumentTable, named: NamedDocuments) -> UInt64s:
    """Keys of the documents of a version that somebody names, of the copies that it left out among them: uint64[n], sorted."""
    of_source = np.array([named.source in (None, source) for source, *_ in sources_of_files(read_manifest(table.store))], bool)
    where = parse(named.where) if named.where is not None else None
    found = [NO_KEYS]
    if where is not None:
        check_where(table.store, where.text)
    for split, start, stop in table.ranges():
        keys = table.facts(split, KEY, start, stop)
        mine = named.those(keys)
        if named.source is not None:
            mine &= of_source[table.facts(split, FILE, start, stop).astype(np.int64)]
        if where is not None and mine.any():
            mine &= matching(table.splits[split], where, start, stop, lambda: table.recorded)
        found.append(keys[mine])
    return np.unique(np.concatenate(found))


def with_same_text(table: DocumentTable, keys: UInt64s) -> UInt64s:
    """Keys of documents, with those that have the text of one of them, or nearly, as far as the version left them out. Or a copy
    would take the place of a document that is forgotten.
    """
    if LEFT_OUT not in table.splits:
        return keys
    key, of = (table.facts(LEFT_OUT, name, 0, table.splits[LEFT_OUT].seq_count) for name in (KEY, OF))
    key, of = key[of > 0], of[of > 0]
    while True:
        more = np.unique(np.concatenate([keys, key[np.isin(of, keys)], of[np.isin(key, keys)]]))
        if len(more) == len(np.unique(keys)):
            return keys if len(more) == len(keys) else more
        keys = more


def forgotten_in(root: Store, version: str, forgotten: Forgotten) -> OfVersion | None:
    """The forgotten documents that a version holds; None if it has none. Their tokens are read."""
    table, parts, windows, token_keys = table_of(root, version), [np.empty(0, GONE)], [NO_KEYS], [NO_KEYS]
    for split, start, stop in table.ranges():
        at = np.flatnonzero(forgotten.those(table.facts(split, KEY, start, stop)))
        if not len(at):
            continue
        starts = table.splits[split].seq_starts.read(start, stop + 1).astype(np.int64)
        part = np.empty(len(at), GONE)
        part["split"], part["number"], part["length"] = ALL_SPLITS.index(split), at + start, np.diff(starts)[at]
        for name in (FILE, REASON):
            part[name] = table.facts(split, name, start, stop)[at]
        parts.append(part)
        for first, length in zip(starts[at].tolist(), part["length"].tolist(), strict=True) if split != LEFT_OUT else ():
            ids = table.splits[split].encoded_tokens.read(first, first + length) >> np.uint32(1)
            windows.append(windows_of(ids, forgotten.salt))
            if length:  # all empty texts are equal
                token_keys.append(document_keys(ids.view(np.uint8), np.array([0, ids.nbytes])))
    hashes = np.unique(np.concatenate(windows)), np.unique(np.concatenate(token_keys))
    return OfVersion(version, rows, *hashes) if len(rows := np.concatenate(parts)) else None


def sweep_shards(root: Store, forgotten: Forgotten) -> list[str]:
    """Remove the token shards that hold forgotten documents, and all whose tokens are in an unfinished version. Return names."""
    removed = list[str]()
    for key in stored_shards(root):
        try:
            shard = read_receipt(read_record(root, receipt_key(key)))
            gone = None if shard.unfinished is not None else forgotten.those_or_text(open_shard(root, shard).keys)
        except (*NO_OBJECT, ValueError):
            gone = None  # it is not whole: a build makes it again
        if gone is None or gone.any():
            remove_below(root, shard_key(key))
            removed.append(shard_key(key))
    return removed


def sweep_unfinished(root: Store) -> list[str]:
    """Remove what killed builds left: unfinished versions and their objects, staging, and what is in quarantine. Return names."""
    removed = list[str]()
    there = {*versions_of(root)}
    names = [f"{paths.VERSIONS}/{name}" for name in names_of(root, paths.VERSIONS) if name not in there]
    names += [f"{paths.UNFINISHED}/{name}" for name in names_of(root, paths.UNFINISHED)]
    names += [f"{paths.QUARANTINE}/{name}" for name in names_of(root, paths.QUARANTINE) if name != ".lock"]
    for directory in (paths.INDEX, paths.ORIGINS, paths.BESIDE):
        for name in names_of(root, directory):
            if name.removesuffix(SIGNATURE).removesuffix(".json") not in there and not name.startswith("."):
                names.append(f"{directory}/{name}")
    for name in names:
        remove_below(root, name)
        removed.append(name)
    return removed


def sweep_examples(root: Store) -> list[str]:
    """Take examples of what steps found out of the records of runs: earlier releases wrote words of documents there. Remove the
    records that are damaged. Return names.
    """
    removed = list[str]()
    for name in (f"{paths.RUNS}/{one}" for one in names_of(root, paths.RUNS) if one.endswith(".json")):
        try:
            facts = read_json(root, name)
            if (facts.get("totals") or {}).get("documents", {}).pop("examples", None):
                root.put(name, (json.dumps(facts, indent=2) + "\n").encode())
        except ValueError:
            remove_below(root, name)
            removed.append(name)
    return removed


def make_removals_durable(root: Store) -> None:
    """Let a power loss bring nothing back that was removed from an output on a local disk."""
    names = ("", *paths.DIRECTORIES, f"{paths.STAGING}/collected")
    for name in names if root.is_local else ():
        if kind_of(path := root.path(name) if name else root.root) == "directory":
            sync(Path(path))


def sweep_files(root: Store, scratch: str, held: frozenset[str]) -> list[str]:
    """Remove copies of source files that hold forgotten documents, and all copies below the output of which no version was
    made: their content is unknown. A build fetches again what it needs. *held*: digests of files. Return names.
    """
    known = {sha256 for name in versions_of(root) for *_, sha256 in sources_of_files(read_manifest(version_store(root, name)))}
    own = {f"{paths.FILES}/{name}": name for name in names_of(root, paths.FILES)}
    removed = [key for key, name in own.items() if _is_content(name) and (_stem(name) in held or _stem(name) not in known)]
    for key in removed:
        remove_below(root, key)
    if scratch != os.path.join(root.root, paths.CACHE):
        removed += list(_swept_scratch(scratch, held))
    return removed


def _swept_scratch(scratch: str, held: frozenset[str]) -> Iterator[str]:
    """Remove copies of source files that hold forgotten documents from a directory that other outputs may use, too. Yield their
    names.
    """
    if kind_of(scratch) != "directory":
        return
    for home in (scratch, os.path.join(scratch, "files")):
        if kind_of(home) == "directory":
            sweep(home)
    at = Store.at(scratch)
    for name in entries(scratch, "files"):
        if _is_content(name) and _stem(name) in held:
            with contextlib.suppress(FileNotFoundError):
                at.remove(f"files/{name}")
            yield f"{scratch}/files/{name}"


def _is_content(name: str) -> bool:
    """Whether a file of the downloads has text, rather than a record or a lock."""
    return not name.startswith((".", "_")) and not name.removesuffix(SIGNATURE).endswith((".json", ".table", ".lock"))


def _stem(name: str) -> str:
    return name.partition(".")[0]
