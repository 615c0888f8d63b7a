"""Looking for what is left of forgotten documents below an output: their keys, runs of their tokens, files that hold them."""

from __future__ import annotations

import contextlib
import posixpath
import shlex
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import zstandard

from flat_tokens.annotations import Bools, Int64s, UInt32s, UInt64s
from flat_tokens.arrays.opening import open_array, read_metadata
from flat_tokens.checker import Seen
from flat_tokens.forgotten import LIST, NO_KEYS, Forgotten, Scan, check_certificates, check_list, read_forgotten
from flat_tokens.keys import token_keys
from flat_tokens.manifest import (
    CACHE,
    LINK,
    MANIFEST,
    POINTER,
    SPLITS,
    VERSIONS,
    manifest_of,
    splits_at,
)
from flat_tokens.reader import open_split
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store, read_json
from flat_tokens.tools.terminal import plural

AT_A_TIME = 1 << 20
WHOLE_BYTES = 1 << 28
"""Objects that no manifest lists are unpacked up to this size."""
FRAME = b"\x28\xb5\x2f\xfd"
"""A frame of zstd begins so, alone or within an object of many."""


class FoundAgain(NamedTuple):
    """Documents with a run of tokens of a forgotten one: the array, their numbers, int64[n], keys, uint64[n], and the windows.
    Without windows, documents with the same text.
    """

    where: str
    numbers: Int64s
    keys: UInt64s
    windows: UInt64s


class Remains:
    """Looks through everything below an output. ``objects``, ``tokens``: what was looked through so far."""

    def __init__(self, root: Store, forgotten: Forgotten, seen: Seen = lambda count: None) -> None:
        self._root, self._forgotten, self._scan, self._seen = root, forgotten, Scan(forgotten), seen
        self.objects = self.tokens = 0

    def all(self, files: Collection[str] = (), *, tokens_of_versions: bool = True) -> Iterator[str]:
        """Everything that is left, as sentences. *files*: digests of source files that hold forgotten documents.
        *tokens_of_versions*: not if these have been looked through already.
        """
        paths = self._root.ask("ls", VERSIONS, detail=False) if self._root.exists(VERSIONS) else ()
        names = sorted(posixpath.basename(path.rstrip("/")) for path in paths)
        versions = [name for name in names if (self._root / VERSIONS / name).exists(MANIFEST) and self._is_complete(name)]
        for version in versions:
            yield from self.keys_of(version)
            if tokens_of_versions:
                yield from (sentence(found, self._root.url) for found in self.of_version(version))
        yield from self.of_others(versions)
        for key, _ in (self._root / CACHE / "files").listing() if self._root.exists(f"{CACHE}/files") else ():
            if key.partition(".")[0] in files and not key.removesuffix(SIGNATURE).endswith((".json", ".table")):
                yield f"{CACHE}/files/{key}: is a copy of a source file that holds forgotten documents, or was read with one"

    def _is_complete(self, version: str) -> bool:
        try:
            open_split(self._root / VERSIONS / version / SPLITS[0])
            read_metadata(self._root / VERSIONS / version, "group")
        except (*NO_OBJECT, ValueError):
            return False
        return True

    def of_version(self, version: str) -> Iterator[FoundAgain]:
        """Documents of a version that have tokens of a forgotten one."""
        store = self._root / VERSIONS / version
        for split in splits_at(store):
            yield from self._in_split(store / split, store / f"documents/{split}/key", f"versions/{version}/{split}")
        self.objects += len(manifest_of(store).get("objects") or ())

    def keys_of(self, version: str) -> Iterator[str]:
        """Sentences that say where a version has the keys of forgotten documents."""
        store = self._root / VERSIONS / version
        for split in splits_at(store):
            yield from self._keys_in(store / f"documents/{split}/key", f"version {version}, {split}")

    def of_others(self, versions: list[str]) -> Iterator[str]:
        """Sentences about everything that is in no version of *versions*: token shards, what versions left out, unfinished
        objects, records.
        """
        below = tuple(f"{VERSIONS}/{version}/" for version in versions)
        arrays, rest = dict[str, tuple[str, str]](), list[tuple[str, int]]()
        for key, size in sorted(self._root.listing()):
            if key.startswith(below) or key == LINK:
                continue
            parts = key.split("/")
            if parts[0] == CACHE and len(parts) > 2 and len(parts[1]) == 64:
                arrays["/".join(parts[:2])] = "documents/key", f"token shard {parts[1][:12]}"
            if parts[:2] == [CACHE, "left_out"] and parts[3:4] == ["left_out"]:
                arrays["/".join(parts[:4])] = "../documents/left_out/key", f"what version {parts[2]} left out"
            rest.append((key, size))
        for name, (key, called) in sorted(arrays.items()):
            keys = self._root / posixpath.normpath(f"{name}/{key}")
            try:
                for found in self._in_split(self._root / name, keys, name):
                    yield sentence(found, self._root.url)
                yield from self._keys_in(keys, called)
            except (*NO_OBJECT, ValueError):
                pass  # it has no arrays of its own, or is not whole: its objects are looked through one by one
        for key, size in rest:
            self.objects += 1
            if count := self._in_bytes(key, size):
                yield f"{key}: has {count:,} runs of tokens of forgotten documents"
            self._seen(size)

    def _in_split(self, store: Store, keys: Store, where: str) -> Iterator[FoundAgain]:
        """The documents of a split that have tokens or windows of forgotten ones."""
        tokens = open_split(store)
        windows, at, same = [NO_KEYS], [np.empty(0, np.int64)], [np.empty(0, bool)]
        for begins, found in self._scan.of(self._ids_of(tokens, same)):
            at.append(begins)
            windows.append(found)
        begins, numbers = np.concatenate(at), np.flatnonzero(np.concatenate(same))
        if len(numbers):
            yield FoundAgain(where, numbers, _taken(keys, numbers), NO_KEYS)
        if not len(begins):
            return
        starts = tokens.seq_starts.read(0, tokens.seq_count + 1).astype(np.int64)
        inside = np.searchsorted(starts, begins, "right") - 1
        whole = begins + 1 < starts[np.minimum(inside + 1, len(starts) - 1)]
        numbers = np.unique(inside[whole])
        yield FoundAgain(where, numbers, _taken(keys, numbers), np.unique(np.concatenate(windows)))

    def _ids_of(self, tokens: FlatTokens, same: list[Bools]) -> Iterator[UInt32s]:
        """The ids of a split, some documents at a time. Append to *same* which of them have the text of a forgotten one."""
        for batch in tokens.batches(max_tokens=AT_A_TIME):
            yield batch.encoded_tokens >> np.uint32(1)
            same.extend(map(self._forgotten.with_text, token_keys([batch])))
            self.tokens += batch.token_count
            self._seen(batch.encoded_tokens.nbytes)

    def _keys_in(self, keys: Store, where: str) -> Iterator[str]:
        array = open_array(keys, "uint64")
        gone = 0
        for start in range(0, array.length, AT_A_TIME):
            gone += int(self._forgotten.those(array.read(start, min(start + AT_A_TIME, array.length))).sum())
        if gone:
            yield f"{where}: has {plural(gone, 'forgotten document')}"

    def _in_bytes(self, key: str, size: int) -> int:
        """The number of forgotten windows in the bytes of an object, as ids or as encoded tokens, at any place of a token's
        begin.
        """
        try:
            contents = [self._root.read(key)] if size <= WHOLE_BYTES else self._root.blocks(key)
            found = 0
            for content in contents:
                for data in (content, *_unpacked(content)):
                    for first in range(4):
                        ids = np.frombuffer(data[first : first + (len(data) - first) // 4 * 4], "<u4").astype(np.uint32)
                        found += sum(len(some) for _, some in self._scan.of([ids]))
                        found += sum(len(some) for _, some in self._scan.of([ids >> np.uint32(1)]))
            return found
        except NO_OBJECT:
            return 0  # it has just gone, or is a link


def _unpacked(data: bytes) -> Iterator[bytes]:
    """The content of the frames in an object."""
    at = data.find(FRAME)
    while at >= 0:
        with contextlib.suppress(zstandard.ZstdError, MemoryError):
            yield zstandard.ZstdDecompressor(max_window_size=WHOLE_BYTES).decompressobj().decompress(data[at:])
        at = data.find(FRAME, at + 1)


def _taken(keys: Store, numbers: Int64s) -> UInt64s:
    """Keys of documents, uint64[n]; zeros if they are not known."""
    try:
        return open_array(keys, "uint64").take(numbers)
    except (*NO_OBJECT, ValueError):
        return np.zeros(len(numbers), np.uint64)


def sentence(found: FoundAgain, output: str) -> str:
    """A sentence about documents that have tokens of forgotten ones."""
    if not len(found.windows):
        shown = " ".join(f"{key:016x}" for key in found.keys.tolist())
        return (
            f"{found.where}: {plural(len(found.keys), 'document')} with the text of a forgotten one under another key. "
            f"Forget them, too: echo {shown} > keys.txt; "
            f"python -m flows forget {shlex.quote(output)} --keys keys.txt --reason TEXT"
        )
    named = ", ".join(f"{number:,} (key {key:016x})" for number, key in zip(found.numbers, found.keys, strict=True))
    return (
        f"{found.where}: {len(found.windows):,} runs of tokens of forgotten documents, in documents {named}. If these have "
        "the same text, forget them, too: --keys"
    )


def check_forgotten(root: Store, seen: Seen = lambda count: None) -> Iterator[str]:
    """Everything below an output that is left of forgotten documents, as sentences. ValueError if nothing was forgotten."""
    forgotten, record = read_forgotten(root), read_json(root, LIST) if root.exists(LIST) else {}
    check_list(root, (read_json(root, POINTER) if root.exists(POINTER) else {}).get("forgotten"), forgotten)
    if not record.get("pending"):
        check_certificates(root, forgotten)
    if not record:
        raise ValueError(f"{root.url}: nothing was forgotten here, so that there is nothing to look for")
    if record.get("pending"):
        yield f"{root.path(LIST)}: documents are being forgotten. Go on: python -m flows forget {root.url} --resume"
    yield from Remains(root, forgotten, seen).all(record.get("files") or ())
