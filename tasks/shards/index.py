"""Indexes: which slices and segments a version holds, so that their tokens are neither stored nor made a second time.

An index is one object for each version, written before the version is committed. It is a shortcut: where it is missing, what it
knew is tokenized again. What it leads to is checked before it is used: a version's objects against its manifest, those of what
it left out against the index.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from flat_tokens.annotations import Int64s, IntPair, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, group_metadata
from flat_tokens.batch import TOKEN_ARRAYS, TokenBatch
from flat_tokens.columns import parts_of
from flat_tokens.manifest import EVERY_SPLIT, MANIFEST, read_manifest, splits_of
from flat_tokens.reader import open_split
from flat_tokens.stores.records import read_json, read_record
from flat_tokens.stores.store import NO_OBJECT, Store, StoredObject, is_below, stored_object
from tasks.models import ALL_SPLITS, Name, PublishedLocation, TokenShard, digest_of
from tasks.output.paths import BESIDE, CACHE, DOCUMENTS, beside_key, index_key, receipt_key, version_key, version_store
from tasks.output.pointer import is_dataset, read_pointer
from tasks.output.versions import names_of
from tasks.parts.documents import Documents
from tasks.parts.stored import document_spec
from tasks.rows import FILE, OF_PLACE, REASON
from tasks.shards.receipts import load_shard, read_receipt
from tasks.tokenize.segments import STORED, Segments

logger = logging.getLogger(__name__)

VERSIONS_LOOKED_INTO = 8
"""The latest versions of an output, among which slices and segments are looked for."""
STRAYS = 1000
"""Receipts of shards that no index names, of builds that did not end, which are read at most."""
OPEN = 8

VersionNames = tuple[Name, ...]
"""The versions whose indexes a build goes by, the latest first."""


def segments_as_text(digests: Sequence[npt.NDArray[np.void]], documents: Sequence[Int64s]) -> str:
    """A shard's segments as its receipt has them, from some at a time."""
    stored = np.empty(sum(map(len, digests)), STORED)
    for name, parts in (("digest", digests), ("documents", documents)):
        stored[name] = np.concatenate([*parts, np.empty(0, STORED[name])])
    return base64.b64encode(stored.tobytes()).decode()


def segments_of(shard: TokenShard) -> npt.NDArray[np.void]:
    """A shard's segments: STORED[m]; none where it has no record of them that fits its documents."""
    try:
        segments = np.frombuffer(base64.b64decode(shard.segments, validate=True), STORED)
    except ValueError:
        segments = np.empty(0, STORED)
    return segments if int(segments["documents"].sum(dtype=np.int64)) == shard.written else segments[:0]


class IndexEntry(NamedTuple):
    """A shard, the number of its first file, the row of that at which it begins, and its number of sequences in each of
    ALL_SPLITS.
    """

    shard: TokenShard
    file: int
    first_row: int
    seq_counts: tuple[int, ...]


def published_shards(version: Name, entries: Iterable[IndexEntry]) -> list[TokenShard]:
    """The shards of a version that holds them in order, each once."""
    shards: dict[str, TokenShard] = {}
    firsts = [0] * len(ALL_SPLITS)
    for shard, file, first_row, counts in entries:
        first_file, runs = file if shard.file_rows else None, dict(zip(ALL_SPLITS, zip(firsts, counts, strict=True), strict=True))
        location = PublishedLocation(version=version, first_row=first_row, first_file=first_file, **runs)
        bare: dict[str, Any] = {"published": location, "unfinished": None, "objects": (), "inputs": {}, "text_bytes_taken": 0}
        shards.setdefault(shard.key, shard.model_copy(update=bare))
        firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
    return list(shards.values())


def write_index(root: Store, version: Name, shards: Sequence[TokenShard], beside: Sequence[StoredObject] = ()) -> None:
    """Write the index of a version that holds *shards*, and of the objects next to it."""
    facts: dict[str, Any] = {"shards": [shard.model_dump(mode="json", exclude_defaults=True) for shard in shards]}
    facts |= {"beside": [stored.described() for stored in beside]} if beside else {}
    root.put(index_key(version), (json.dumps({"sha256": digest_of(facts), **facts}, ensure_ascii=False) + "\n").encode())


class Index(NamedTuple):
    """The slices that a version has, and the objects next to it: of what it left out, and of texts."""

    published: list[TokenShard]
    beside: tuple[StoredObject, ...] = ()


def read_index(root: Store, version: str) -> Index:
    """The index of a version, without shards where it has none that can be trusted."""
    try:
        facts = read_json(root, index_key(version))
        if facts.pop("sha256", None) != digest_of(facts):
            raise ValueError(f"{root.path(index_key(version))}: does not have its own digest")
        published = [TokenShard.model_validate(one) for one in facts["shards"]]
        beside = tuple(stored_object(one) for one in facts.get("beside", ()))
        if wrong := [stored.key for stored in beside if not is_below(stored.key)]:
            raise ValueError(f"{root.path(index_key(version))}: {wrong[0]!r} is not a name of an object next to a version")
        if any(shard.published is None or shard.published.version != version for shard in published):
            raise ValueError(f"{root.path(index_key(version))}: is the index of another version")
    except FileNotFoundError:
        return Index([])
    except (*NO_OBJECT, ValueError, KeyError, TypeError) as error:
        why = "it is not an index" if isinstance(error, ValidationError | KeyError | TypeError) else error
        logger.warning("The index of version %s is not used: %s", version, why)
        return Index([])
    return Index(published, beside)


def check_beside(root: Store, version: Name, index: Index) -> None:
    """ValueError if an object next to a version is not what its index says."""
    store = root / beside_key(version)
    for stored in index.beside:
        if store.now(stored) != stored:
            raise ValueError(f"{store.path(stored.key)} is not what was written")


def indexed_versions(root: Store) -> VersionNames:
    """The versions that a build begun now looks into."""
    pointer = read_pointer(root)
    names = dict.fromkeys(filter(None, (pointer.version, *reversed(pointer.names("former")))))
    return tuple(islice((name for name in names if is_dataset(root, name)), VERSIONS_LOOKED_INTO))


class _KnownSegments(NamedTuple):
    """Known segments, in the order of their digests: S16[m]; the shard of each, its first document there, and how many."""

    digests: npt.NDArray[np.bytes_]
    shard: Int64s
    first: Int64s
    documents: Int64s
    shards: list[TokenShard]


class VersionObjects(NamedTuple):
    """The parts of a version's manifest that are wanted here: its layout, its totals, its objects by their keys."""

    layout: Layout
    totals: dict[str, Any]
    objects: dict[str, StoredObject]


@dataclass
class StoredTokens:
    """Tokens that an output has already: of slices, by their keys, and of segments. Threads may share it."""

    root: Store
    versions: VersionNames
    _checked: dict[tuple[str, str], bool] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _open: dict[str, Documents | None] = field(default_factory=dict)
    _manifests: dict[str, VersionObjects] = field(default_factory=dict)

    @functools.cached_property
    def _indexes(self) -> dict[str, Index]:
        """The indexes of the versions, the latest last."""
        with self._lock:
            return {version: read_index(self.root, version) for version in reversed(self.versions)}

    @functools.cached_property
    def shards(self) -> dict[str, TokenShard]:
        """The places of the slices that versions hold, by the slices' keys; the latest version first."""
        return {shard.key: shard for index in self._indexes.values() for shard in index.published}

    def shard(self, key: str) -> TokenShard | None:
        """The place of a slice in a version, whose objects were checked; None if no version has it whole."""
        shard = self.shards.get(key)
        return shard if shard is not None and self._is_whole(shard) else None

    def find(self, segments: Segments, recipe: bytes) -> tuple[npt.NDArray[np.void], Int64s]:
        """The digests of the segments, and the number of each among the known ones: int64[m], -1 where it is not known."""
        digests = segments.digests(recipe)
        known = self._found.digests
        if not len(known):
            return digests, np.full(len(digests), -1)
        wanted = digests.view(known.dtype)
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        same = (known[at] == wanted) & (self._found.documents[at] == np.diff(segments.ends, prepend=0))
        return digests, np.where(same, at, -1)

    def take(self, numbers: Int64s, facts: Iterable[str]) -> tuple[TokenBatch | None, dict[str, UInt64s]]:
        """The tokens of known segments that stand side by side, and those of *facts* that their shard has; None where they are
        damaged or have gone.
        """
        found = self._found
        shard, first = found.shards[found.shard[numbers[0]]], int(found.first[numbers[0]])
        count = int(found.documents[numbers].sum())
        with self._lock:
            documents = self._opened(shard)
        if documents is None:
            return None, {}
        wanted = np.zeros(len(documents), bool)
        wanted[first : first + count] = True
        known = {name: documents.read(name, first, first + count) for name in facts if name in shard.facts}
        return documents.those(wanted).batch(shard.token_arrays), known

    def stretches(self, numbers: Int64s) -> Iterator[IntPair]:
        """Ranges of segments that are all unknown, or stand side by side in one shard."""
        if not len(numbers):
            return
        found = self._found
        known = numbers[1:] >= 0
        same = (numbers[1:] < 0) & (numbers[:-1] < 0)
        if len(found.digests):
            here, before = numbers[1:], numbers[:-1]
            behind = found.first[here] == found.first[before] + found.documents[before]
            same |= known & (before >= 0) & (found.shard[here] == found.shard[before]) & behind
        edges = [0, *(np.flatnonzero(~same) + 1).tolist(), len(numbers)]
        yield from pairwise(edges)

    @functools.cached_property
    def _found(self) -> _KnownSegments:
        """The segments of all versions and stray shards. Looked up when a slice has to be tokenized, not before."""
        with self._lock:
            # Of the same segment the one of which most is known, then that of the latest version: it has most of what a slice had
            # before, and each other version's objects would be read through, too.
            age = {version: number for number, version in enumerate(self.versions)}
            shards = [*self.shards.values(), *self._strays()]
            shards.sort(key=lambda one: (-len(one.facts), age[one.published.version] if one.published else len(age)))
            parts = [segments_of(shard) for shard in shards]
            counts = [len(part) for part in parts]
            stored = np.concatenate([*parts, np.empty(0, STORED)])
            documents = stored["documents"].astype(np.int64)
            ends = np.cumsum(documents)
            shard = np.repeat(np.arange(len(shards)), counts)
            # (all segments, document) -> (shard, document)
            before = np.array([0, *accumulate(one.written if len(part) else 0 for one, part in zip(shards, parts, strict=True))])
            first = ends - documents - before[shard]
            digests = np.ascontiguousarray(stored["digest"]).view(f"S{STORED['digest'].itemsize}")
            order = np.argsort(digests, kind="stable")
            order = order[digests[order] != b""]
            return _KnownSegments(digests[order], shard[order], first[order], documents[order], shards)

    def _strays(self) -> Iterator[TokenShard]:
        """Stored shards that no index names: builds made them that did not end."""
        keys = (name for name in names_of(self.root, CACHE) if len(name) == 64 and name not in self.shards)
        for key in islice(keys, STRAYS):
            try:
                yield read_receipt(read_record(self.root, receipt_key(key)))
            except (*NO_OBJECT, ValueError):
                continue  # who wants it will say what is wrong with it

    def _opened(self, shard: TokenShard) -> Documents | None:
        from tasks.parts.opening import open_shard  # what has nothing to do opens none

        if shard.key not in self._open:
            while len(self._open) >= OPEN:
                del self._open[next(iter(self._open))]
            whole = self._is_whole(shard) if shard.published else load_shard(self.root, shard.key) is not None
            documents = open_shard(self.root, shard) if whole else None
            self._open[shard.key] = documents and documents.those(documents.fact(REASON) == 0)
        return self._open[shard.key]

    def _is_whole(self, shard: TokenShard) -> bool:
        """Whether the version's objects that hold a slice are what its manifest says, and those next to it what its index says,
        if it has anything there. Each is read through once.
        """
        assert shard.published is not None
        version = shard.published.version
        store = version_store(self.root, version)
        try:
            for key in objects_of(self._manifest(version), store, shard):
                with self._lock:
                    where = (version, key)
                    if where not in self._checked:
                        wanted = self._manifest(version).objects.get(key)
                        self._checked[where] = wanted is not None and store.now(wanted) == wanted
                        if not self._checked[where]:
                            raise ValueError(f"{store.path(key)} is not what was published")
                    if not self._checked[where]:
                        return False  # it was reported before
            if not shard.of_texts and not shard.published.left_out[1]:
                return True
            with self._lock:
                if (where := (version, BESIDE)) not in self._checked:
                    self._checked[where] = False
                    check_beside(self.root, version, self._indexes[version])
                    self._checked[where] = True
                return self._checked[where]
        except (*NO_OBJECT, ValueError) as problem:
            logger.warning("Version %s is not trusted, and what it holds is rebuilt: %s", version, problem)
            return False

    def _manifest(self, version: str) -> VersionObjects:
        with self._lock:
            if version not in self._manifests:
                manifest = read_manifest(version_store(self.root, version))
                objects = {one["key"]: stored_object(one) for one in manifest["objects"]}
                self._manifests[version] = VersionObjects(LAYOUTS[manifest["layout"]], manifest["totals"], objects)
            return self._manifests[version]


def objects_of(manifest: VersionObjects, store: Store, shard: TokenShard) -> Iterator[str]:
    """Keys of the objects of a version that hold the documents of a published slice, with those that tell what they are."""
    layout, location = manifest.layout, shard.published
    assert location is not None
    if any(location.of(split)[1] for split in EVERY_SPLIT if split not in splits_of(manifest.totals)):
        raise ValueError(f"its index reports {location.test[1]} sequences of a test split, which it has not")
    of_runs = (FILE,) if location.first_file is not None else ()
    facts = (*of_runs, *(name for name in shard.facts if name in OF_PLACE))
    for split in splits_of(manifest.totals):
        first, count = location.of(split)
        totals, start, stop = manifest.totals[split], 0, 0
        # All splits are opened, whichever has the documents.
        yield from (f"{split}/{key}" for key in group_metadata(layout.zarr_format, {}))
        if first + count > totals["seq_count"]:
            raise ValueError(f"its index reports {first + count} sequences of {split}, but there are {totals['seq_count']}")
        yield from _objects(f"{split}/seq_starts", layout.seq_starts, totals["seq_count"] + 1, first, first + count + 1)
        for column in facts:
            yield from _objects(f"{DOCUMENTS}/{split}/{column}", document_spec(layout), totals["seq_count"], first, first + count)
        if shard.columns:
            parts = parts_of(manifest.objects, split, totals["seq_count"])
            yield from (part.key for part in parts if part.first < first + count and part.stop > first)
        if count:
            start, stop = open_split(store / split).seq_starts.take(np.array([first, first + count])).tolist()
        there = [name for name in TOKEN_ARRAYS if any(key.startswith(f"{split}/{name}/") for key in manifest.objects)]
        for name in {*there, *shard.token_arrays}:
            # Of an array that a slice has not nothing is read, but its version's is opened.
            where = (start, stop) if name in shard.token_arrays else (0, 0)
            yield from _objects(f"{split}/{name}", layout.token_array(name), totals["token_count"], *where)


def _objects(name: str, spec: ArraySpec, length: int, start: int, stop: int) -> Iterator[str]:
    """Keys of an array's metadata and of the objects that hold its items ``start:stop``."""
    yield from (f"{name}/{key}" for key in spec.metadata(length))
    if start < stop:
        for i in range(start // spec.object_length, (stop - 1) // spec.object_length + 1):
            yield f"{name}/{spec.object_key(i)}"


_all: dict[tuple[str, VersionNames, str | None], StoredTokens] = {}
_all_lock = threading.Lock()


def stored_tokens(root: Store, versions: VersionNames) -> StoredTokens:
    """The slices and segments that an output holds, for all threads of an attempt alike."""
    key = (root.url, versions, root.staging)
    with _all_lock:
        while key not in _all and len(_all) >= OPEN:
            del _all[next(iter(_all))]
        return _all.setdefault(key, StoredTokens(root, versions))


def load_or_published(root: Store, versions: VersionNames, key: str) -> TokenShard | None:
    """The tokens of a slice that are there already: the stored shard, or what a version holds; checked."""
    return load_shard(root, key) or stored_tokens(root, versions).shard(key)


def without_tokens(root: Store, versions: VersionNames, keys: Sequence[str]) -> list[str]:
    """Those of *keys* that no version holds, by their indexes."""
    return [key for key in keys if key not in stored_tokens(root, versions).shards]


def location_key(shard: TokenShard) -> str:
    """Key of the object without which the tokens of a slice are not there: the shard's receipt, or the version's manifest."""
    return f"{version_key(shard.published.version)}/{MANIFEST}" if shard.published else receipt_key(shard.key)
