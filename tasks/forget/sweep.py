"""The removal of what is left of forgotten documents outside of versions: token shards, what killed builds left, files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from flat_tokens.forgotten import Forgotten
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.local import kind_of, sync
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store, read_json, read_record
from tasks.forget.documents import sources_of_files, versions_of
from tasks.garbage import remove_below, stored_shards
from tasks.output import paths
from tasks.output.leases import entries, sweep
from tasks.output.paths import receipt_key, shard_key, version_store
from tasks.output.versions import names_of
from tasks.parts.opening import open_shard
from tasks.shards.receipts import read_receipt


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
