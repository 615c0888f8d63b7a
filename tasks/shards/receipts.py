"""Receipts: the proof that a token shard is stored, storing it, and the check of its bytes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flat_tokens.arrays.layouts import to_json
from flat_tokens.stores.local import kind_of, locked, make_directory, make_durable, sync
from flat_tokens.stores.store import NO_OBJECT, Store, json_object, read_record
from tasks.models import TokenShard, digest_of
from tasks.output.leases import Workspace
from tasks.output.paths import QUARANTINE, RECEIPT, receipt_key, shard_key
from tasks.parts.stored import check_unfinished, digest_all

logger = logging.getLogger(__name__)
RECEIPTS_AT_ONCE = 1000
UPLOADERS = 4
RECEIPT_SECONDS = 0.2
"""The receipt of a shard that another process writes comes sooner."""


def without_receipt(root: Store, keys: Iterable[str]) -> list[str]:
    """The *keys* whose token shard has no receipt at an output."""
    asked, missing = list(keys), list[str]()
    for first in range(0, len(asked), RECEIPTS_AT_ONCE):
        some = asked[first : first + RECEIPTS_AT_ONCE]
        names = [receipt_key(key) for key in some]
        if root.is_local:
            missing += [key for key, name in zip(some, names, strict=True) if not root.exists(name)]
            continue
        # A byte of each: to see whether an object exists, a store would also be asked for a listing, as it may be a directory.
        answers = root.read_ranges(names, [0] * len(some), [1] * len(some))
        missing += [key for key, answer in zip(some, answers, strict=True) if isinstance(answer, FileNotFoundError)]
    return missing


def receipt_json(shard: TokenShard) -> bytes:
    """A shard's receipt: its facts, with a digest of them."""
    often_unused = ("columns", "matches", "examples", "file_rows", "files", "unfinished", "published", "left_out")
    unused = {name for name in often_unused if not getattr(shard, name)}
    facts = shard.model_dump(mode="json", exclude=unused)
    if shard.unfinished is not None and shard.unfinished.test is None:
        del facts["unfinished"]["test"]
    return to_json({"sha256": digest_of(facts), **facts}, 1)


def read_receipt(data: bytes) -> TokenShard:
    """The shard of a receipt. ValueError if the receipt is damaged."""
    facts = json_object(data, RECEIPT)
    if facts.pop("sha256", None) != digest_of(facts):
        raise ValueError("the receipt does not have its own digest")
    return TokenShard.model_validate(facts)


def load_shard(root: Store, key: str) -> TokenShard | None:
    """The stored shard of *key*, after every byte was checked against its receipt. One damaged or not signed is moved aside."""
    with contextlib.suppress(ValueError):
        return _read_shard(root, key)
    with repairing(root):
        try:
            return _read_shard(root, key)  # another process may have repaired it meanwhile
        except ValueError as problem:
            logger.warning("Token shard %s is not trusted and is rebuilt: %s", key[:12], problem)
            put_aside(root, key)
    return None


def _read_shard(root: Store, key: str) -> TokenShard | None:
    """The stored shard of *key*; None if it has no receipt. ValueError if it is damaged."""
    store = root / shard_key(key)
    try:
        receipt = read_record(store, RECEIPT)
    except FileNotFoundError:
        return None
    except NO_OBJECT as error:
        raise ValueError(str(error)) from error
    try:
        shard = read_receipt(receipt)
        if shard.key != key or digest_of(shard.inputs) != key:
            raise ValueError("it has the receipt of another shard")
        for stored, now in zip(shard.objects, digest_all(store, shard.objects), strict=True):
            if now != stored:
                raise ValueError(f"{stored.key} has {now.size} bytes, {now.digest_text}; not what was written")
        if shard.unfinished is not None:
            check_unfinished(root, shard)
    except NO_OBJECT as error:
        if isinstance(error, FileNotFoundError) and not store.exists(RECEIPT):
            return None  # it went away meanwhile
        raise ValueError(str(error)) from error
    return shard


@contextlib.contextmanager
def repairing(root: Store) -> Iterator[None]:
    """Let processes of this machine move damaged shards aside in order: none takes one that another just repaired."""
    if not root.is_local:
        yield
        return
    quarantine = Path(root.path(QUARANTINE))
    make_directory(quarantine)
    with locked(quarantine / ".lock"):
        yield


def put_aside(root: Store, key: str) -> None:
    """Move a damaged shard aside, the receipt first: no half of it is ever trusted. The caller holds ``repairing``."""
    if root.is_local:
        with contextlib.suppress(FileNotFoundError):
            os.replace(root.path(shard_key(key)), root.path(f"{QUARANTINE}/{key}-{uuid.uuid4().hex[:8]}"))
        return
    root.remove_object(receipt_key(key))
    root.remove(shard_key(key))


def write_shard(draft: TokenShard, workspace: Workspace) -> TokenShard:
    """Put a tokenized slice under its content's name, the receipt last. Whoever else did the same wrote the same tokens: the one
    that is stored is returned.
    """
    root = workspace.root
    staged, target = Path(workspace.staging) / draft.key, root / shard_key(draft.key)
    stored = None
    if root.is_local:
        stored = _move(root, staged, Path(target.root), draft)
    else:
        with ThreadPoolExecutor(UPLOADERS) as uploaders:
            list(uploaders.map(lambda stored: target.upload(stored.key, staged / stored.key), draft.objects))
    if stored is None:
        target.put(RECEIPT, receipt_json(draft))
    shutil.rmtree(staged, ignore_errors=True)  # last, so that all of this can be done again
    return stored or draft


def _move(root: Store, staged: Path, target: Path, draft: TokenShard) -> TokenShard | None:
    """Move a staged shard to its place. Return the one that is stored there already, with its receipt, if another one is."""
    make_durable(staged)
    make_directory(target.parent)
    for attempt in range(3):
        try:
            os.rename(staged, target)
        except OSError:
            if kind_of(target) is None:
                raise
        else:
            sync(target.parent)
            return None
        # Left by a dead process, or being written by another one at this moment.
        if _is_whole(root / shard_key(draft.key), draft):
            return None
        # Another process has its tokens elsewhere: in an unfinished version, or next to them.
        if (stored := load_shard(root, draft.key)) is not None:
            return stored
        if attempt == 0:
            time.sleep(RECEIPT_SECONDS)
            continue
        with repairing(root):
            # It has no receipt, so nobody counts on it. It is not damaged either: it goes with this attempt's staging.
            if not _is_whole(root / shard_key(draft.key), draft):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target, staged.with_name(f"{draft.key}.former-{attempt}"))
    raise OSError(f"{target}: something else keeps writing there. Run the build again.")


def _is_whole(store: Store, shard: TokenShard) -> bool:
    try:
        return all(store.now(stored) == stored for stored in shard.objects)
    except NO_OBJECT:
        return False
