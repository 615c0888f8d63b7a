"""The checker: a dataset against its manifest and against every sentence of the format."""

from __future__ import annotations

import itertools
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import group_metadata
from flat_tokens.arrays.opening import read_metadata
from flat_tokens.batch import LOSS_MASK
from flat_tokens.columns import columns_of
from flat_tokens.manifest import (
    BYTES_RECORD,
    ENTRY_BYTES,
    LINK,
    MANIFEST,
    POINTER,
    RUNS,
    SPLITS,
    TOKEN_BYTES,
    VERSIONS,
    check_pointer,
    history_digest,
    implausible,
    manifest_of,
    read_token_bytes,
    splits_at,
    splits_of,
)
from flat_tokens.options import at_least, one_of, whole_number
from flat_tokens.reader import open_root, open_split, open_splits
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores import signing
from flat_tokens.stores.local import kind_of, real_path
from flat_tokens.stores.signing import SIGNATURE, Statement
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, StoredObject, json_object, read_json, read_record, stored_object

BLOCK_TOKENS = 1 << 22
MAX_PROBLEMS = 10
RUN_RECORD = re.compile(r"\d{8}T\d{12}-.+\.json")
LINK_WAITS = (0.05, 0.2, 0.5)  # seconds in which a build may move the link after the pointer
COPIED = {"shape", "chunks", "dtype", "data_type", "chunk_grid"}  # of arrays, in either version of zarr

Level = Literal["quick", "full"]
Seen = Callable[[int], object]
"""Is called with the count of bytes that have been read, from any thread."""


class CheckProgress(NamedTuple):
    """Progress of a check: the bytes read, the bytes to read, and the faults found."""

    byte_count: int
    of: int
    faults: int


Watch = Callable[[CheckProgress], object]


class DamagedError(ValueError):
    """A dataset is damaged. ``path``: the version that was checked; ``faults``: a sentence each, up to ten."""

    def __init__(self, path: str, faults: tuple[str, ...]) -> None:
        super().__init__(path, faults)
        self.path, self.faults = path, faults

    def __str__(self) -> str:
        return f"{self.path}: {faults_found(len(self.faults))}: {'; '.join(self.faults)}"


def faults_found(count: int) -> str:
    """Such as ``3 faults``; a check ends with the tenth."""
    return f"{count} or more faults" if count == MAX_PROBLEMS else f"{count} fault" + "s" * (count != 1)


class Verification(NamedTuple):
    """Result of a check that found no fault."""

    path: str
    level: str
    object_count: int
    byte_count: int
    token_count: int
    seq_count: int


def verify(
    path_or_url: PathOrUrl,
    level: Level = "quick",
    *,
    threads: int = 2,
    watch: Watch | None = None,
    key: PathOrUrl | None = None,
    number: int | None = None,
) -> Verification:
    """Check a dataset. ``quick``: the manifest, every object's existence and size, the number of objects, the arrays'
    metadata and last entries. ``full``: also every object's digest and every sentence of the format, token by token.
    *watch* is called with the progress, by one thread at a time. *key*: the file of a public ed25519 key, by whose owner the
    version has to be signed; then *number* is the least that the pointer's may be, such as one seen before.

    A dataset without a manifest (another writer's) is checked against the format alone. DamagedError, a ValueError, names
    up to ten faults; FileNotFoundError if there is no published dataset; ValueError for another level, or a *number* without
    *key*.
    """
    one_of("level", level, get_args(Level))
    threads = at_least(1, "threads", threads)
    if number is not None and key is None:
        raise ValueError(f"number is {number!r}, but nothing says who signed it: give key, too")
    number = None if number is None else whole_number("number", number)
    public = signing.public_key_in(os.fspath(key)) if key is not None else None
    root = Store.at(path_or_url)
    store, published = open_root(root)
    faults: list[str] = []
    seen = adding_up(watch, bytes_to_check(store) if level == "full" and watch else 0, faults)
    seen(0)
    signed = iter(()) if public is None else check_signed(root, store, public, number)
    found = itertools.chain(signed, check_published(root, store, published["zarr_format"], level, threads, seen))
    for fault in itertools.islice(found, MAX_PROBLEMS):
        faults.append(fault)
        seen(0)
    if faults:
        raise DamagedError(store.url, tuple(faults))
    splits = list(open_splits(store).values())
    objects = manifest_of(store).get("objects", [])
    token_count, seq_count = sum(split.token_count for split in splits), sum(split.seq_count for split in splits)
    return Verification(store.url, level, len(objects), sum(item["size"] for item in objects), token_count, seq_count)


def adding_up(watch: Watch | None, of: int, faults: Sequence[str] = ()) -> Seen:
    """A function that adds up counts of bytes and calls *watch* with the sum, one thread at a time."""
    done, one_at_a_time = 0, threading.Lock()

    def seen(count: int) -> None:
        nonlocal done
        if watch is not None:
            with one_at_a_time:
                done += count
                watch(CheckProgress(done, of, len(faults)))

    return seen


def bytes_to_check(store: Store) -> int:
    """Number of bytes that a full check reads: the objects once for their digests, and the arrays, as they are in memory,
    once for the format. Parts that cannot be opened are not counted.
    """
    count, splits = 0, SPLITS  # of a dataset whose manifest is damaged
    with suppress(ValueError, FileNotFoundError):
        splits = splits_at(store)
        count = sum(item["size"] for item in manifest_of(store).get("objects", ()))
    for name in splits:
        with suppress(ValueError, FileNotFoundError):
            split = open_split(store / name)
            count += split.encoded_tokens.length * TOKEN_BYTES + split.seq_starts.length * ENTRY_BYTES
            count += split.loss_mask.length if split.loss_mask else 0
    return count


def check_published(
    root: Store, store: Store, zarr_format: Literal[2, 3], level: Level, threads: int, seen: Seen | None
) -> Iterator[str]:
    """Every fault of a published version, as a sentence. *seen* is called with the counts of bytes read."""
    described = manifest_of(store)
    if root.exists(POINTER):
        yield from _check_pointer(root, store, level)
    if described:
        expected = [stored_object(item) for item in described["objects"]]
        marker = group_metadata(zarr_format, {})
        yield from check_objects(store, expected, {MANIFEST, BYTES_RECORD, *marker}, level, threads, seen)
        wrong = [key for key, data in marker.items() if not store.exists(key) or store.read(key) != data]
        yield from (f"{key} is missing, or says something else than that this is a group" for key in wrong)
        try:
            if store.exists(BYTES_RECORD):
                read_token_bytes(store, described)
        except ValueError as error:
            yield str(error)
    else:
        yield from _check_copies(store)
    for name in splits_of(described["totals"]) if described else splits_at(store):
        try:
            split = open_split(store / name)
            if level == "full":
                yield from check_split(split, seen)
                yield from columns_of(store, described, name).faults()
        except (ValueError, FileNotFoundError) as error:
            yield str(error)


def check_signed(root: Store, store: Store, public: Any, number: int | None) -> Iterator[str]:
    """Faults of a version's signatures: the owner of the key did not make the version, or did not let ``latest`` name it as the
    move of that number, or a later move is known. *number*: the pointer has this number or a higher one.
    """
    if not store.exists(MANIFEST):
        yield f"{store.url} has no {MANIFEST}, so that nothing signs it"
        return
    digest = store.digest(MANIFEST, "sha256").digest
    mine = [said for said in _statements(store, public) if said.sha256 == digest]
    if not mine:
        yield f"{store.path(MANIFEST)} is not signed by this key"
    elif root.exists(POINTER):
        yield from _check_number(root, mine, public, number)
    elif number is not None:
        yield f"{root.url} has no {POINTER}, whose number could be compared with {number}. Name the output itself"


def _check_number(root: Store, mine: Sequence[Statement], public: Any, number: int | None) -> Iterator[str]:
    """Faults of the pointer's number: not signed, or lower than another one that is known."""
    pointer = read_json(root, POINTER)
    version, now = pointer.get("version"), pointer.get("sequence")
    numbers = sorted({said.number for said in mine if said.name == version and said.kind != "record"})
    if now not in numbers:
        known = ", ".join(map(str, numbers)) or "none"
        yield f"{POINTER} has version {version} as number {now}, but those that the key signed of it are {known}"
        return
    paths = root.ask("ls", VERSIONS, detail=False)
    names = sorted(name for path in paths if (name := posixpath.basename(path.rstrip("/"))) != version)
    for name in names:
        later = [said for said in _statements(root / VERSIONS / name, public) if said.kind == "latest" and said.number > now]
        if any(said.name == name for said in later):
            high = max(said.number for said in later)
            yield f"{POINTER} is number {now}, but version {name} became the latest as number {high}: an earlier one was put back"
            return
    if number is not None and now < number:
        yield f"{POINTER} is number {now}, but number {number} is known: an earlier one was put back"


def _statements(store: Store, public: Any) -> list[Statement]:
    """The statements of a key about a version."""
    return list(signing.statements_in(store.signatures(MANIFEST), public))


def _check_pointer(root: Store, store: Store, level: Level) -> Iterator[str]:
    """Faults of an output's pointer, which stop builds, and of the link, which lead other readers to another version."""
    value = read_json(root, POINTER)
    digest = store.digest(MANIFEST, "sha256").digest if store.exists(MANIFEST) else "missing"
    if posixpath.basename(store.root) == value.get("version") and digest != value.get("manifest_sha256"):
        yield f"{MANIFEST} is not the one that {POINTER} names ({digest[:12]})"
    try:
        check_pointer(value, root.path(POINTER))
    except ValueError as error:
        yield str(error)
    else:
        yield from _check_former(root, level)
    for wait in LINK_WAITS:
        target, version = real_path(root.path(LINK)), read_json(root, POINTER).get("version")
        if (
            not root.is_local
            or kind_of(root.path(LINK), follow_links=False) is None
            or target == real_path(root.path(f"{VERSIONS}/{version}"))
        ):
            return
        time.sleep(wait)
    yield f"{LINK} leads to {target}, but {POINTER} names {version}. A build repairs a link; move away anything else."


def _check_former(root: Store, level: Level) -> Iterator[str]:
    """Faults of a pointer's number, and of the versions that it says were the latest: builds go by these alone."""
    fault, seen = None, b""
    for _ in range(len(LINK_WAITS)):  # a build may move it between two looks
        before, seen = seen, read_record(root, POINTER)
        if seen == before:
            break
        value = json_object(seen, root.path(POINTER))
        fault = implausible(value) or (_differs_from_record(root, value) if level == "full" else None)
        if fault is None:
            return
    yield f"{POINTER} {fault}. Restore it from a copy, or remove it and build again."


def _differs_from_record(root: Store, pointer: JsonObject) -> str | None:
    """A sentence on how a pointer differs from the newest record of a run. None without a record, and for a pointer that
    was moved since.
    """
    try:
        names = sorted(filter(RUN_RECORD.fullmatch, (posixpath.basename(path) for path in root.ask("ls", RUNS, detail=False))))
        record = read_json(root, f"{RUNS}/{names[-1]}") if names else {}
        at, number = datetime.fromisoformat(record["at"]), int(record["sequence"])
    except (*NO_OBJECT, ValueError, KeyError, TypeError, OverflowError):
        return None  # none, or one of another release
    if record.get("history_sha256") == history_digest(pointer):
        return None
    entries = (*pointer.get("former", ()), *pointer.get("withdrawn", ()))
    was_moved = pointer["version"] != record.get("latest", record.get("version")) or any(
        datetime.fromisoformat(one["until"]) > at for one in entries
    )
    if pointer["sequence"] < number or (was_moved and pointer["sequence"] == number):
        return f"is number {pointer['sequence']}, but the run of {record['at']} knew of number {number}"
    if not was_moved and pointer["sequence"] > number:
        return (
            f"is number {pointer['sequence']}, but it was number {number} at {record['at']}, and no version was the latest since"
        )
    if not was_moved and "history_sha256" in record:
        return f"does not name the versions before as it did at {record['at']}, and no version was the latest since"
    return None


def _check_copies(store: Store) -> Iterator[str]:
    """Faults of consolidated metadata, from which plain zarr takes shapes: an array differs from its copy there."""
    for group in (store, *(store / name for name in splits_at(store))):
        try:
            copies = (read_metadata(group, "group").get("consolidated_metadata") or {}).get("metadata", {})
            arrays = {f"{name}/zarr.json": copy for name, copy in copies.items()}
            if group.exists(".zmetadata"):
                arrays |= read_json(group, ".zmetadata")["metadata"]
            for key, copy in arrays.items():
                if "shape" in copy and any(
                    value != copy.get(name) for name, value in read_json(group, key).items() if name in COPIED
                ):
                    yield f"{group.path(key)} differs from its copy in the consolidated metadata of {group.url}"
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{group.url}: its consolidated metadata cannot be compared ({error})"


def check_objects(
    store: Store, expected: list[StoredObject], besides: set[str], level: Level, threads: int, seen: Seen | None = None
) -> Iterator[str]:
    """Faults of the stored objects: missing, of another size or digest, or there without reason. Signatures may be there."""
    found = dict(store.listing())
    for stored in expected:
        if stored.key not in found and not store.is_local:
            with suppress(FileNotFoundError):  # listings of object stores may lag
                found[stored.key] = store.size(stored.key)
        if stored.key not in found:
            yield f"{stored.key} is missing"
        elif (size := found[stored.key]) != stored.size:
            yield f"{stored.key} has {size} bytes instead of {stored.size}"
    besides |= {key + SIGNATURE for key in besides}
    for key in sorted(set(found) - {stored.key for stored in expected} - besides):
        yield f"{key} is not in the manifest"
    if level == "full":
        # Objects of another size are a fault already; keys that leave the root are not read.
        there = [stored for stored in expected if found.get(stored.key) == stored.size]
        with ThreadPoolExecutor(threads) as pool:
            for stored, now in zip(there, pool.map(lambda s: store.now(s, seen), there), strict=True):
                if now != stored:
                    yield f"{stored.key} has {now.digest_text} instead of {stored.digest_text}"


def check_split(split: FlatTokens, seen: Seen | None = None, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Every sentence of the format that sequences ``start:stop`` of one flat-tokens array break, in one pass."""
    name, stop, largest = split.store.url, split.seq_count if stop is None else stop, 0
    add = seen or (lambda _: None)
    for first in range(start, max(stop, start + 1), BLOCK_TOKENS):
        last = min(first + BLOCK_TOKENS, stop)
        entries = split.seq_starts.read(first, last + 1)
        if (entries[1:] < entries[:-1]).any() or entries[-1] > split.token_count:
            yield f"{name}/seq_starts decreases"
            return
        add((len(entries) - (last < stop)) * ENTRY_BYTES)
        for begin in range(int(entries[0]), int(entries[-1]), BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS, int(entries[-1]))
            block, mask = split.slice(begin, end), split.mask(begin, end)
            marked = np.flatnonzero(block & np.uint32(1)).astype(np.uint64) + np.uint64(begin)
            # First tokens of the sequences that have one
            here = np.unique(entries[slice(*np.searchsorted(entries, np.array([begin, end], np.uint64)))])
            if not np.array_equal(marked, here):
                wrong = np.setxor1d(marked, here)[0]
                yield f"{name}: token {wrong} is marked as a start where seq_starts says otherwise, or the reverse"
                return
            if (wrong_ones := np.flatnonzero(mask > 1)).size:
                token = begin + int(wrong_ones[0])
                yield f"{name}/{LOSS_MASK}: token {token} has {mask[wrong_ones[0]]}, but the mask is 1 or 0"
                return
            largest = max(largest, int(block.max()) >> 1)
            add(block.nbytes + (mask.nbytes if split.loss_mask is not None else 0))
    if largest > split.max_token_id:
        yield f"{name}: token id {largest} is above max_token_id {split.max_token_id}"
