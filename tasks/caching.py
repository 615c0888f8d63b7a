"""What makes a shard the same shard, the receipts that say it is there, and whose staging is whose."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field

from flat_tokens.storage import Store
from tasks.known import digest_all
from tasks.models import FORMAT_SEMANTICS, DocumentPolicy, Model, Slice, Source, TokenizerConfig, TokenShard, digest_of

logger = logging.getLogger(__name__)

RECEIPT = "receipt.json"
CACHE = "_cache"
STAGING = "_staging"
QUARANTINE = "_quarantine"
RECEIPTS_AT_ONCE = 1000

NOT_A_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""What reading an object raises where something else, or nothing, stands under its name."""


class Place(Model):
    """Where a build writes: the output's root, the local directory of this attempt alone, and the one for fetched files."""

    output: str
    staging: str
    scratch: str = ""

    @property
    def root(self) -> Store:
        return Store.at(self.output, self.staging, read_once=True)


class Recipe(Model):
    """What a slice's tokens depend on, besides the slice, and where the shard goes."""

    place: Place
    sources: tuple[Source, ...]
    tokenizer: TokenizerConfig
    tokenizer_digest: str
    fast: bool
    documents: DocumentPolicy
    engine: str | None = Field(None, description="Named where it may decide which documents are left out")

    def source(self, part: Slice) -> Source:
        return self.sources[part.file.source]

    def key_inputs(self, part: Slice) -> dict[str, object]:
        """Every ingredient that changes the shard's bytes, and nothing else: no path, no time, no worker, and no engine
        unless documents that it does not take are left out.
        """
        return {
            "file": part.file.identity(),
            "range": (part.start, part.stop, part.rows),
            "reading": self.source(part).reading(),
            "tokenizer": self.tokenizer_digest,
            "documents": self.documents.model_dump(),
            "semantics": FORMAT_SEMANTICS,
            **({"engine": self.engine} if self.engine else {}),
        }

    def key(self, part: Slice) -> str:
        return digest_of(self.key_inputs(part))


def without_receipt(root: Store, keys: Iterable[str]) -> list[str]:
    """Those of some shards' keys that have no receipt at an output."""
    asked, missing = list(keys), list[str]()
    for first in range(0, len(asked), RECEIPTS_AT_ONCE):
        some = asked[first : first + RECEIPTS_AT_ONCE]
        names = [f"{CACHE}/{key}/{RECEIPT}" for key in some]
        if root.is_local:
            missing += [key for key, name in zip(some, names, strict=True) if not root.exists(name)]
            continue
        # A byte of each: of what is not there, a store would be asked for a listing too, whether it is a directory.
        answers = root.read_ranges(names, [0] * len(some), [1] * len(some))
        missing += [key for key, answer in zip(some, answers, strict=True) if isinstance(answer, FileNotFoundError)]
    return missing


def receipt_json(shard: TokenShard) -> bytes:
    """A shard's receipt: what is known of it, with a digest of that."""
    facts = shard.model_dump(mode="json")
    return (json.dumps({"sha256": digest_of(facts), **facts}, indent=1, ensure_ascii=False) + "\n").encode()


def read_receipt(data: bytes) -> TokenShard:
    """The shard of a receipt. ValueError where a bit of it is not as it was written."""
    try:
        facts = json.loads(data)
    except RecursionError as error:
        raise ValueError("the receipt is JSON nested too deep") from error
    if not isinstance(facts, dict) or facts.pop("sha256", None) != digest_of(facts):
        raise ValueError("the receipt does not have its own digest")
    return TokenShard.model_validate(facts)


def load_shard(root: Store, key: str) -> TokenShard | None:
    """The shard of *key*, if it is there and every byte is what its receipt says; a damaged one is put aside.

    The receipt is our own JSON: whoever can write one can at most be caught lying by the digests.
    """
    try:
        return _read_shard(root, key)
    except ValueError:
        pass
    with repairing(root):
        try:
            return _read_shard(root, key)  # another process may have mended it meanwhile
        except ValueError as problem:
            logger.warning("Token shard %s is damaged and is built again: %s", key[:12], problem)
            put_aside(root, key)
    return None


def _read_shard(root: Store, key: str) -> TokenShard | None:
    """The shard of *key*, None where it has no receipt. ValueError where it is not what was written."""
    store = root / CACHE / key
    try:
        receipt = store.read(RECEIPT)
    except FileNotFoundError:
        return None
    except NOT_A_FILE as error:
        raise ValueError(str(error)) from error
    try:
        shard = read_receipt(receipt)
        if shard.key != key or digest_of(shard.inputs) != key:
            raise ValueError("it has the receipt of another shard")
        for stored in shard.objects:
            if ".." in stored.key.split("/") or stored.key.startswith("/"):
                raise ValueError(f"{stored.key!r} is not the name of an object")
        for stored, now in zip(shard.objects, digest_all(store, shard.objects), strict=True):
            if now != stored:
                raise ValueError(f"{stored.key} has {now.size} bytes, sha256 {now.sha256[:12]}; not what was written")
    except NOT_A_FILE as error:
        if isinstance(error, FileNotFoundError) and not store.exists(RECEIPT):
            return None  # it went away meanwhile
        raise ValueError(str(error)) from error
    return shard


@contextlib.contextmanager
def repairing(root: Store) -> Iterator[None]:
    """Processes of this machine judge and put aside damaged shards one after the other: none takes away what another has
    just mended.
    """
    if not root.is_local:
        yield
        return
    quarantine = Path(root.path(QUARANTINE))
    quarantine.mkdir(parents=True, exist_ok=True)
    with open(quarantine / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def put_aside(root: Store, key: str) -> None:
    """Move what lies under a shard's name out of the way, the receipt first, so that no half of it is ever trusted.
    To be called while ``repairing``.
    """
    cache = root / CACHE
    if root.is_local:
        with contextlib.suppress(FileNotFoundError):
            os.replace(cache.path(key), root.path(f"{QUARANTINE}/{key}-{uuid.uuid4().hex[:8]}"))
        return
    cache.remove(f"{key}/{RECEIPT}")
    cache.remove(key)


@contextlib.contextmanager
def attempt(output: str, scratch: Path, build_id: str) -> Iterator[Place]:
    """A staging directory for this process alone, removed at the end; those of dead processes are swept before.

    A lock held by a live process says who lives: the system releases it when a process dies, however it dies.
    """
    root = Store.at(output)
    staging = Path(root.root) / STAGING if root.is_local else scratch / STAGING
    sweep(staging)
    lock, descriptor = _lock_in(staging / build_id)
    directory = lock.with_suffix("")
    try:
        directory.mkdir()
        yield Place(output=output, staging=os.fspath(directory), scratch=os.fspath(scratch))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)
        _remove_empty(directory.parent, staging)


def _lock_in(parent: Path) -> tuple[Path, int]:
    """A new file in *parent*, and the descriptor that locks it. It stands before the directory that it guards: where there
    is no lock, nobody lives.
    """
    while True:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock = parent / f"{uuid.uuid4().hex[:12]}.lock"
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except (FileNotFoundError, FileExistsError):
            if parent.exists() and not parent.is_dir():
                raise
            continue  # it was empty, and swept between the two lines
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if lock.exists():
            return lock, descriptor
        os.close(descriptor)  # it was not locked yet, and swept


def sweep(staging: Path) -> None:
    """Remove the staging of attempts whose process is gone."""
    builds = _entries(staging)
    # Listed before the locks are looked for: a directory that is here by now had its lock before.
    directories = [path for build in builds for path in _entries(build) if path.suffix != ".lock"]
    locks = [path for build in builds for path in _entries(build) if path.suffix == ".lock"]
    for lock in locks:
        with contextlib.suppress(FileNotFoundError), lock.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    for directory in directories:
        if not directory.with_suffix(".lock").exists():
            shutil.rmtree(directory, ignore_errors=True)
    _remove_empty(*builds, staging)


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, nothing where it has just gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(directory.iterdir())
    return []


def _remove_empty(*directories: Path) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # another attempt is in it, or it is gone
            directory.rmdir()
