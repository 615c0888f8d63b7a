"""Indexes: which slices and segments a version holds, so that their tokens are neither stored nor made a second time.

An index is one object for each version, written before the version is committed. It is a shortcut: if it is missing, what it
knew is tokenized again. The objects that it names are checked before they are used: those of a version against its manifest,
those of its left-out documents against the index.
"""

from __future__ import annotations

import base64
import functools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple, Self

import numpy as np
from pydantic import ValidationError

from flat_tokens.annotations import AnyArray, Bools, ByteStrings, Int64s, IntPair, JsonObject, Structs, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, group_metadata, to_json
from flat_tokens.batch import TOKEN_ARRAYS, TokenBatch
from flat_tokens.columns import parts_of
from flat_tokens.manifest import EVERY_SPLIT, MANIFEST, read_manifest, splits_of
from flat_tokens.reader import open_split
from flat_tokens.stores.store import NO_OBJECT, Store, StoredObject, is_below, read_json, read_record, stored_object
from tasks.models import ALL_SPLITS, Name, PublishedLocation, Slice, Split, TokenShard, digest_of
from tasks.output.paths import BESIDE, CACHE, DOCUMENTS, beside_key, index_key, receipt_key, version_key, version_store
from tasks.output.pointer import is_dataset, read_pointer
from tasks.output.versions import names_of
from tasks.parts.documents import Documents
from tasks.parts.part import ShardPart
from tasks.parts.stored import document_spec
from tasks.rows import FILE, OF_PLACE
from tasks.shards.receipts import load_shard, read_receipt
from tasks.shards.recipe import Recipe
from tasks.tokenize.segments import DIGEST_BYTES, NO_DIGEST, STORED, STORED_FILE, Segments

logger = logging.getLogger(__name__)

VERSIONS_LOOKED_INTO = 8
"""The latest versions of an output, among which slices and segments are looked for."""
STRAYS = 1000
"""Receipts of shards that no index names, of builds that did not end, which are read at most."""
OPEN = 8

VersionNames = tuple[Name, ...]
"""The versions whose indexes a build goes by, the latest first."""


def as_text(records: AnyArray) -> str:
    """A shard's segments, its files, or their rows, as its receipt has them."""
    return base64.b64encode(records.tobytes()).decode()


def segments_of(shard: TokenShard) -> Structs:
    """A shard's segments: STORED[m]; none if it has no record of them that fits its documents."""
    segments = _records(shard.segments, STORED)
    return segments if int(segments["documents"].sum(dtype=np.int64)) == shard.written else segments[:0]


def segments_without(shard: TokenShard, gone: Bools) -> Structs:
    """A shard's segments, if it loses documents: bool[n]. One that loses some has no digest."""
    segments = segments_of(shard).copy()
    ends = np.cumsum(segments["documents"], dtype=np.int64)
    lost = np.diff(np.concatenate([[0], np.cumsum(gone)])[ends], prepend=0)
    segments["digest"][lost > 0] = NO_DIGEST
    segments["documents"] -= lost.astype(segments["documents"].dtype)
    return np.compress(segments["documents"] > 0, segments)


def files_of(shard: TokenShard) -> Structs:
    """The files of a published shard's run: STORED_FILE[m]; none if it has no record of them that fits its rows."""
    files = _records(shard.files, STORED_FILE)
    return files if shard.published and len(files) == len(shard.file_starts) - 1 else files[:0]


def _records(text: str, kind: np.dtype[np.void]) -> Structs:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), kind)
    except ValueError:
        return np.empty(0, kind)


def published_shards(version: Name, parts: Iterable[tuple[ShardPart, Mapping[Split, IntPair]]]) -> list[TokenShard]:
    """The shards of a version that holds them in order, each once, from its parts and their sequences and tokens by split."""
    shards, firsts = dict[str, TokenShard](), dict.fromkeys(ALL_SPLITS, 0)
    for part, counts in parts:
        runs = {split: (first, counts[split][0]) for split, first in firsts.items()}
        first_file = part.file if part.shard.file_rows else None
        location = PublishedLocation(version=version, first_row=part.first_row, first_file=first_file, **runs)
        bare: JsonObject = {"published": location, "unfinished": None, "objects": (), "inputs": {}, "text_bytes_taken": 0}
        shards.setdefault(part.shard.key, part.shard.model_copy(update=bare))
        firsts = {split: first + count for split, (first, count) in runs.items()}
    return list(shards.values())


def write_index(root: Store, version: Name, shards: Sequence[TokenShard], beside: Sequence[StoredObject]) -> None:
    """Write the index of a version that holds *shards*, and of the objects next to it."""
    facts: JsonObject = {"shards": [shard.model_dump(mode="json", exclude_defaults=True) for shard in shards]}
    facts |= {"beside": [stored.described() for stored in beside]} if beside else {}
    root.put(index_key(version), to_json({"sha256": digest_of(facts), **facts}, None))


class Index(NamedTuple):
    """The slices that a version has, and the objects next to it: of what it left out, and of texts."""

    published: list[TokenShard]
    beside: tuple[StoredObject, ...] = ()


def read_index(root: Store, version: str) -> Index:
    """The index of a version, without shards if it has none that can be trusted."""
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


class _KnownDigests(NamedTuple):
    """Known segments or files, in the order of their digests: S16[m]; the shard of each, its first document or its number there,
    and how many.
    """

    digests: ByteStrings
    shard: Int64s
    first: Int64s
    counts: Int64s
    shards: list[TokenShard]

    @classmethod
    def of(cls, shards: list[TokenShard], parts: list[Structs], counts: list[Int64s]) -> Self:
        """The segments or files of shards that have digests, from those of each shard and their *counts*."""
        none, shard = np.empty(0, np.int64), np.repeat(np.arange(len(shards)), [*map(len, parts)])
        count, first = np.concatenate([none, *counts]), np.concatenate([none, *(np.cumsum(some) - some for some in counts)])
        digests = np.concatenate([np.empty(0, STORED["digest"]), *(part["digest"] for part in parts)]).view(f"S{DIGEST_BYTES}")
        order = np.argsort(digests, kind="stable")
        order = order[digests[order] != b""]
        return cls(digests[order], shard[order], first[order], count[order], shards)

    def find(self, digests: Structs) -> Int64s:
        """The numbers of segments or files among the known ones, by their digests: int64[m], -1 if one is not known."""
        if not len(self.digests):
            return np.full(len(digests), -1)
        wanted = digests.view(self.digests.dtype)
        at = np.minimum(np.searchsorted(self.digests, wanted), len(self.digests) - 1)
        return np.where(self.digests[at] == wanted, at, -1)

    def stretches(self, numbers: Int64s) -> Iterator[IntPair]:
        """Ranges of segments or files that are all unknown, or stand side by side in one shard."""
        if not len(numbers):
            return
        here, before = numbers[1:], numbers[:-1]
        same = (here < 0) & (before < 0)
        if len(self.digests):
            behind = self.first[here] == self.first[before] + self.counts[before]
            same |= (here >= 0) & (before >= 0) & (self.shard[here] == self.shard[before]) & behind
        yield from pairwise([0, *(np.flatnonzero(~same) + 1).tolist(), len(numbers)])


class VersionObjects(NamedTuple):
    """The parts of a version's manifest that are wanted here: its layout, its totals, its objects by their keys."""

    layout: Layout
    totals: JsonObject
    objects: dict[str, StoredObject]


@dataclass
class StoredTokens:
    """Tokens that an output has already: of slices, by their keys, and of segments. Threads may share it."""

    root: Store
    versions: VersionNames
    _checked: dict[tuple[str, str], bool] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _open: dict[str, tuple[Documents, Documents] | None] = field(default_factory=dict)
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

    def find(self, segments: Segments, recipe: bytes) -> tuple[Structs, Int64s]:
        """The digests of the segments, and the number of each among the known ones: int64[m], -1 if it is not known."""
        digests = segments.digests(recipe)
        return digests, self.segments.find(digests)

    def take(self, numbers: Int64s, facts: Iterable[str]) -> tuple[TokenBatch | None, dict[str, UInt64s]]:
        """The tokens of consecutive known segments, and those *facts* that their shard has. None if they are damaged or gone."""
        found = self.segments
        shard, first = found.shards[found.shard[numbers[0]]], int(found.first[numbers[0]])
        stop = first + int(found.counts[numbers].sum())
        documents = self.opened(shard)
        if documents is None:
            return None, {}
        kept = documents[0]
        known = {name: kept.read(name, first, stop) for name in facts if name in shard.facts}
        return kept.part(first, stop).batch(shard.token_arrays), known

    def find_files(self, slice_: Slice, recipe: Recipe) -> Int64s:
        """The number of each file of a slice among the known ones: int64[m], -1 if it is not known."""
        if not len(self.files.digests):
            return np.full(len(slice_.ranges), -1)
        return self.files.find(recipe.of_files(slice_))

    def sound_files(self, slice_: Slice, recipe: Recipe) -> Int64s:
        """The number of each file of a slice among the known ones: int64[m], -1 if it is not known or damaged."""
        numbers = self.find_files(slice_, recipe)
        for shard in np.unique(self.files.shard[numbers[numbers >= 0]]).tolist():
            if self.opened(self.files.shards[shard]) is None:
                numbers[self.files.shard[numbers] == shard] = -1
        return numbers

    @functools.cached_property
    def files(self) -> _KnownDigests:
        """The files of the runs of all versions. A stray shard may go while a build takes its documents."""
        parts = [*map(files_of, self._all)]
        return _KnownDigests.of(self._all, parts, [np.ones(len(part), np.int64) for part in parts])

    @functools.cached_property
    def segments(self) -> _KnownDigests:
        """The segments of all versions and stray shards."""
        parts = [*map(segments_of, self._all)]
        return _KnownDigests.of(self._all, parts, [part["documents"].astype(np.int64) for part in parts])

    @functools.cached_property
    def _all(self) -> list[TokenShard]:
        """All published and stray shards. Looked up when a slice has to be tokenized, not before."""
        with self._lock:
            # Of the same segment the one of which most is known, then that of the latest version: it has most of what a slice had
            # before, and each other version's objects would be read through, too.
            age = {version: number for number, version in enumerate(self.versions)}
            shards, stored = [*self.shards.values()], (name for name in names_of(self.root, CACHE) if len(name) == 64)
            for key in islice((name for name in stored if name not in self.shards), STRAYS):
                with suppress(*NO_OBJECT, ValueError):  # who wants it will say what is wrong with it
                    shards.append(read_receipt(read_record(self.root, receipt_key(key))))
            shards.sort(key=lambda one: (-len(one.facts), age[one.published.version] if one.published else len(age)))
            return shards

    def opened(self, shard: TokenShard) -> tuple[Documents, Documents] | None:
        """The documents of a shard, and those that are left out; None if they are damaged or have gone."""
        from tasks.parts.opening import open_shard  # what has nothing to do opens none

        with self._lock:
            if shard.key not in self._open:
                while len(self._open) >= OPEN:
                    del self._open[next(iter(self._open))]
                whole = self._is_whole(shard) if shard.published else load_shard(self.root, shard.key) is not None
                self._open[shard.key] = None
                if whole:
                    with suppress(*NO_OBJECT):  # its tokens may be in objects of another build by now
                        documents, kept = open_shard(self.root, shard), shard.written
                        self._open[shard.key] = documents.part(0, kept), documents.part(kept, shard.seq_count)
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


stored_tokens = functools.lru_cache(OPEN)(StoredTokens)
"""The slices and segments that an output holds, for all threads of an attempt alike."""


def load_or_published(root: Store, versions: VersionNames, key: str) -> TokenShard | None:
    """The tokens of a slice that are there already: the stored shard, or what a version holds; checked."""
    return load_shard(root, key) or stored_tokens(root, versions).shard(key)


def without_tokens(root: Store, versions: VersionNames, keys: Sequence[str]) -> list[str]:
    """The *keys* that no version holds, by the versions' indexes."""
    return [key for key in keys if key not in stored_tokens(root, versions).shards]


def unread(slice_: Slice, files: Int64s) -> Slice:
    """A slice without those of its *files* that are known, by their numbers."""
    return Slice(tuple(part for part, number in zip(slice_.ranges, files.tolist(), strict=True) if number < 0))


def unread_slices(slices: Iterable[Slice], recipe: Recipe, known: StoredTokens) -> list[Slice]:
    """The files of slices that have to be read."""
    left = (unread(slice_, known.find_files(slice_, recipe)) for slice_ in slices)
    return [slice_ for slice_ in left if slice_.ranges]


def location_key(shard: TokenShard) -> str:
    """Key of the object without which the tokens of a slice are not there: the shard's receipt, or the version's manifest."""
    return f"{version_key(shard.published.version)}/{MANIFEST}" if shard.published else receipt_key(shard.key)
