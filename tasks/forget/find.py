"""Finding documents in the versions of an output: those that somebody names, those that were forgotten, and their tokens;
and what is left of them outside of versions: in token shards, in objects that killed builds left, in copies of source files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, Int64s, UInt32s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.forgotten import NO_KEYS, WINDOW, Forgotten, windows_of
from flat_tokens.keys import document_keys
from flat_tokens.manifest import read_manifest, splits_at
from flat_tokens.reader import check_where, left_out_at, open_split
from flat_tokens.rows.documents import DocumentTable, matching
from flat_tokens.stores.local import kind_of, sync
from flat_tokens.stores.records import read_json, read_record
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.where import parse
from tasks.garbage import remove_below, stored_shards
from tasks.models import LEFT_OUT, Split
from tasks.output import paths
from tasks.output.paths import VERSIONS, fact_key, home_key, receipt_key, shard_key, version_store
from tasks.output.pointer import is_dataset
from tasks.output.staging import entries, sweep
from tasks.output.versions import names_of
from tasks.parts.opening import open_shard
from tasks.rows import FILE, KEY, OF
from tasks.shards.receipts import read_receipt

AT_A_TIME = 1 << 20


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


class Entries(NamedTuple):
    """Entries of documents ``start:stop`` of a split: keys and files, uint64[n] each."""

    split: Split
    start: int
    stop: int
    key: UInt64s
    file: UInt64s


class OfVersion(NamedTuple):
    """Forgotten documents of a version. ``numbers``: of each split, and of what it left out, ascending, int64[n]. ``windows``:
    their hashes.
    ``token_keys``: of their tokens. ``files``: the numbers of their files. ``short``: documents without a window.
    """

    version: str
    numbers: dict[Split, Int64s]
    token_count: int
    windows: UInt64s
    token_keys: UInt64s
    files: frozenset[int]
    short: int

    @property
    def documents(self) -> int:
        return sum(len(numbers) for split, numbers in self.numbers.items() if split != LEFT_OUT)


def versions_of(root: Store) -> list[str]:
    """The versions that are at an output, complete."""
    return [name for name in names_of(root, VERSIONS) if is_dataset(root, name)]


def split_of(root: Store, version: str, split: Split) -> Store:
    """The store of a split of a version, or of what it left out."""
    return root / home_key(version, split) / split


def entries_of(root: Store, version: str) -> Iterator[Entries]:
    """The entries of all documents of a version, some at a time, those that it left out last."""
    store = version_store(root, version)
    splits: list[Split] = list(splits_at(store))
    splits += [LEFT_OUT] if left_out_at(store) else []
    for split in splits:
        count = open_split(split_of(root, version, split)).seq_count
        for start in range(0, count, AT_A_TIME):
            stop = min(start + AT_A_TIME, count)
            key, file = (open_array(root / fact_key(version, split, name), "uint64").read(start, stop) for name in (KEY, FILE))
            yield Entries(split, start, stop, key, file)


def sources_of_files(manifest: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The source, name and digest of each file of a version, by its number."""
    sources = manifest["provenance"].get("sources") or ()
    return [(source["name"], file["name"], file["sha256"]) for source in sources for file in source["files"]]


def keys_named(root: Store, version: str, named: NamedDocuments) -> UInt64s:
    """Keys of the documents of a version that somebody names, of the copies that it left out among them: uint64[n], sorted."""
    store = version_store(root, version)
    manifest = read_manifest(store)
    files = sources_of_files(manifest)
    of_source = np.array([named.source in (None, source) for source, _, _ in files], bool)
    where = parse(named.where) if named.where is not None else None
    table = DocumentTable(store, left_out_at(store))
    found = [np.empty(0, np.uint64)]
    if where is not None:
        check_where(store, where.text)
    for some in entries_of(root, version):
        mine = named.those(some.key)
        if named.source is not None:
            mine &= of_source[some.file.astype(np.int64)]
        if where is not None and mine.any():
            tokens = open_split(split_of(root, version, some.split))
            mine &= matching(tokens, where, some.start, some.stop, lambda: table.recorded)
        found.append(some.key[mine])
    return np.unique(np.concatenate(found))


def with_same_text(root: Store, version: str, keys: UInt64s) -> UInt64s:
    """Keys of documents, with those that have the text of one of them, or nearly, as far as the version left them out. Or a copy
    would take the place of a document that is forgotten.
    """
    if not left_out_at(version_store(root, version)):
        return keys
    both = (open_array(root / fact_key(version, LEFT_OUT, name), "uint64") for name in (KEY, OF))
    key, of = (array.read(0, array.length) for array in both)
    key, of = key[of > 0], of[of > 0]
    while True:
        more = np.unique(np.concatenate([keys, key[np.isin(of, keys)], of[np.isin(key, keys)]]))
        if len(more) == len(np.unique(keys)):
            return keys if len(more) == len(keys) else more
        keys = more


def forgotten_in(root: Store, version: str, forgotten: Forgotten) -> OfVersion | None:
    """The forgotten documents that a version holds; None where it has none. Their tokens are read."""
    store = version_store(root, version)
    splits: list[Split] = [*splits_at(store), LEFT_OUT]
    numbers = {split: [np.empty(0, np.int64)] for split in splits}
    files = set[int]()
    for some in entries_of(root, version):
        if (mine := forgotten.those(some.key)).any():
            numbers[some.split].append(np.flatnonzero(mine) + some.start)
            files |= set(np.unique(some.file[mine]).tolist())
    found = {split: np.concatenate(some) for split, some in numbers.items()}
    if not any(map(len, found.values())) and not _has_lists(store):
        return None
    tokens, short, windows, token_keys = 0, 0, [NO_KEYS], [NO_KEYS]
    for split, those in found.items():
        for ids in _ids_of(store, split, those) if split != LEFT_OUT else ():
            tokens += len(ids)
            short += len(ids) < WINDOW
            windows.append(windows_of(ids, forgotten.salt))
            if len(ids):  # all empty texts are equal
                token_keys.append(document_keys(ids.view(np.uint8), np.array([0, ids.nbytes])))
    hashes = np.unique(np.concatenate(windows)), np.unique(np.concatenate(token_keys))
    return OfVersion(version, found, tokens, hashes[0], hashes[1], frozenset(files), short)


def _has_lists(store: Store) -> bool:
    """Whether an older release wrote keys of documents that a version left out into lists, which its successor has not."""
    objects = read_manifest(store)["objects"]
    return any(one["key"].startswith(("documents/duplicates/", "documents/near_duplicates/")) for one in objects)


def _ids_of(store: Store, split: Split, numbers: Int64s) -> Iterator[UInt32s]:
    """Token ids of documents *numbers* of a split."""
    tokens = open_split(store / split)
    for number in numbers.tolist():
        start, stop = tokens.seq_starts.read(number, number + 2).tolist()
        yield tokens.encoded_tokens.read(int(start), int(stop)) >> np.uint32(1)


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
    for directory in (paths.INDEX, paths.ORIGINS, paths.BESIDE, paths.FORMER_BESIDE):
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
    """Remove copies of source files that hold forgotten documents, and below the output those that no version was made of: nobody
    knows what these hold. A build fetches again what it needs. *held*: digests of files. Return names.
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
    """The same in a directory that other outputs may use, too."""
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
