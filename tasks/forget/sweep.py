"""Documents outside of versions: in token shards, in objects that killed builds left, in copies of source files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import TokenBatch
from flat_tokens.forgotten import Forgotten
from flat_tokens.manifest import read_manifest
from flat_tokens.stores import signing
from flat_tokens.stores.local import kind_of, make_directory, make_durable, remove_empty, sync
from flat_tokens.stores.records import read_record
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store
from tasks.forget.find import sources_of_files, versions_of
from tasks.forget.successor import counts_without
from tasks.garbage import remove_below, stored_shards
from tasks.models import TokenShard
from tasks.output import paths
from tasks.output.paths import receipt_key, shard_key, version_store
from tasks.output.staging import Workspace, entries, sweep
from tasks.output.versions import names_of
from tasks.parts.opening import open_shard
from tasks.parts.stored import open_arrays, open_digests
from tasks.shards.index import read_index
from tasks.shards.receipts import read_receipt, receipt_json
from tasks.shards.tokenized import Batch
from tasks.shards.write import staging_shard, write_shard
from tasks.text.signatures import NUMBERS

BATCH_TOKENS = 1 << 20
REWRITTEN = f"{paths.CACHE}/rewritten"
"""Below it, token shards that are whole, and about to take their places."""


class Swept(NamedTuple):
    """Names below the output of what was removed, and keys of the shards that were rewritten."""

    removed: tuple[str, ...]
    rewritten: tuple[str, ...]


def sweep_shards(root: Store, forgotten: Forgotten, workspace: Workspace) -> Swept:
    """Rewrite the token shards that versions need, without the forgotten documents; remove others that hold some, and all whose
    tokens are in an unfinished version.
    """
    end_rewriting(root)
    needed = {shard.key for version in versions_of(root) for shard in read_index(root, version).kept}
    removed, rewritten = list[str](), list[str]()
    for key in stored_shards(root):
        try:
            shard = read_receipt(read_record(root, receipt_key(key)))
            gone = None if shard.unfinished is not None else forgotten.those(open_shard(root, shard).keys)
        except (*NO_OBJECT, ValueError):
            gone = None  # it is not whole: a build makes it again
        if gone is not None and not gone.any():
            continue
        if gone is not None and key in needed:
            rewrite_shard(root, shard, gone, workspace)
            rewritten.append(shard_key(key))
        else:
            remove_below(root, shard_key(key))
            removed.append(shard_key(key))
    return Swept(tuple(removed), tuple(rewritten))


def rewrite_shard(root: Store, shard: TokenShard, gone: npt.NDArray[np.bool_], workspace: Workspace) -> None:
    """Write a stored token shard a second time without the documents *gone*, bool[n]. It takes the place of the first at once;
    on an object store, a kill in between leaves none, and a build makes it again.
    """
    documents = open_shard(root, shard)
    rows = open_arrays(root, shard)[1].row.read(0, shard.written)
    texts = open_digests(root, shard, "digest", "signature") if shard.is_compared else None
    lengths = texts.text_bytes.read(0, shard.written) if texts else None
    digests = texts.digest.read(0, 2 * shard.written).reshape(-1, 2) if texts and texts.digest else None
    signatures = texts.signature.read(0, NUMBERS * shard.written).reshape(-1, NUMBERS) if texts and texts.signature else None
    numbers = np.flatnonzero(~gone)
    edges = np.flatnonzero(np.diff(np.cumsum(documents.lengths[numbers]) // BATCH_TOKENS)) + 1
    with staging_shard(shard.key, workspace, shard.masked, shard.has_digests, shard.has_split_keys, shard.signed) as writer:
        for some in np.split(numbers, edges) if len(numbers) else ():
            those = np.zeros(len(gone), bool)
            those[some] = True
            part = documents.those(those)
            starts = np.concatenate([[0], np.cumsum(part.lengths)]).astype(np.uint64)
            tokens = np.concatenate([np.empty(0, np.uint32), *(of.copy() for of in part.tokens(0, int(starts[-1])))])
            mask = None
            if shard.masked:
                mask = np.concatenate([np.empty(0, np.uint8), *(of.copy() for of in part.masks(0, int(starts[-1])))])
            batch = TokenBatch(tokens, starts, int(tokens.max(initial=0)) >> 1, mask)
            columns = documents.columns(some) if shard.columns else None
            of_texts = None if digests is None else digests[some].reshape(-1), None if lengths is None else lengths[some]
            split_keys = None if documents.split_keys is None else documents.split_keys[some]
            mine = None if signatures is None else signatures[some].reshape(-1)
            writer.append(Batch(batch, documents.keys[some], rows[some], columns, shard.columns, *of_texts, split_keys, mine))
    lost = int(documents.lengths[gone].sum())
    made = TokenShard.model_validate({**dict(shard), **counts_without(shard, gone, lost), **writer.stored})
    if not root.is_local:
        remove_below(root, shard_key(shard.key))
        write_shard(made, workspace)
        return
    staged, receipt = Path(workspace.staging) / shard.key, receipt_json(made)
    (staged / paths.RECEIPT).write_bytes(receipt)
    if place := signing.place_of(root.path(receipt_key(shard.key))):
        (staged / f"{paths.RECEIPT}{SIGNATURE}").write_bytes(signing.with_signature(b"", place, receipt))
    make_durable(staged)
    make_directory(Path(root.path(REWRITTEN)))
    os.rename(staged, root.path(f"{REWRITTEN}/{shard.key}"))
    sync(Path(root.path(REWRITTEN)))
    end_rewriting(root)


def end_rewriting(root: Store) -> None:
    """Let rewritten token shards take the places of those that they were made of. One is whole as soon as it is there."""
    for key in names_of(root, REWRITTEN) if root.is_local else ():
        remove_below(root, shard_key(key))
        os.rename(root.path(f"{REWRITTEN}/{key}"), root.path(shard_key(key)))
        sync(Path(root.path(paths.CACHE)))
    if root.is_local:
        remove_empty(root.root, REWRITTEN)


def sweep_unfinished(root: Store) -> list[str]:
    """Remove what killed builds left: unfinished versions and their objects, staging, and what is in quarantine. Return names."""
    removed = list[str]()
    there = {*versions_of(root)}
    names = [f"{paths.VERSIONS}/{name}" for name in names_of(root, paths.VERSIONS) if name not in there]
    names += [f"{paths.UNFINISHED}/{name}" for name in names_of(root, paths.UNFINISHED)]
    names += [f"{paths.QUARANTINE}/{name}" for name in names_of(root, paths.QUARANTINE) if name != ".lock"]
    for directory in (paths.INDEX, paths.ORIGINS):
        for name in names_of(root, directory):
            if name.removesuffix(SIGNATURE).removesuffix(".json") not in there and not name.startswith("."):
                names.append(f"{directory}/{name}")
    for name in names:
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
