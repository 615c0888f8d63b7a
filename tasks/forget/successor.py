"""Documents that are forgotten: finding them in the versions of an output, and what is left of them outside of versions; and
the successor of a version: the same without them. No text is read, and nothing is tokenized.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import operator
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import Bools, Int64s, IntPair, UInt32s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.forgotten import NO_KEYS, WINDOW, Forgotten, windows_of
from flat_tokens.keys import document_keys, strings_by_key
from flat_tokens.manifest import CLUSTER, EVERY_SPLIT, read_manifest, splits_at
from flat_tokens.reader import check_where, left_out_at, open_split
from flat_tokens.rows.documents import DocumentTable, matching
from flat_tokens.stores.local import kind_of, sync
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import NO_OBJECT, Store, read_json, read_record
from flat_tokens.where import parse
from tasks.derive.inputs import Input
from tasks.derive.provenance import Derived
from tasks.derive.provenance import card as card_of_derived
from tasks.finalize.seal import Provenance, build_id
from tasks.finalize.seal import card as card_of_build
from tasks.garbage import remove_below, stored_shards
from tasks.models import FORGOTTEN, LEFT_OUT, PublishedLocation, Split, TokenShard
from tasks.output import paths
from tasks.output.leases import entries, sweep
from tasks.output.paths import VERSIONS, beside_key, fact_key, home_key, origin_key, receipt_key, shard_key, version_store
from tasks.output.pointer import is_dataset, pointer_lock
from tasks.output.target import RENAMED, Target
from tasks.output.versions import names_of
from tasks.parts.opening import open_shard
from tasks.rows import FILE, KEY, OF, REASON, SIMILARITY
from tasks.shards.index import as_text, check_beside, files_of, read_index, segments_without
from tasks.shards.receipts import read_receipt
from tasks.tokenize.segments import NO_DIGEST

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


logger = logging.getLogger(__name__)

ALIKE = 1_000_000
"""The similarity of equal texts."""


class Successor(NamedTuple):
    """A version that is to take the place of another. ``former``: that one's manifest."""

    of: str
    name: str
    made_of: Provenance
    former: dict[str, Any]

    @property
    def card(self) -> Callable[[Any, Any, dict[str, Any], str], str]:
        return card_of_derived if isinstance(self.made_of, Derived) else card_of_build


def successor_of(root: Store, version: str, forgotten: Forgotten) -> Successor:
    """The successor that a version gets. Its name follows from the version and the list."""
    former = read_manifest(version_store(root, version))
    facts = former["provenance"]
    # No build gives this name: a version has the bytes that its name says, and text that is not read cannot be counted anew.
    left_out = {"count": len(forgotten.digests), "sha256": forgotten.sha256, "of": version}
    kind = Derived if "operation" in facts else Provenance
    made_of = kind.model_validate({**facts, "documents": {**(facts.get("documents") or {}), FORGOTTEN: left_out}})
    return Successor(version, build_id(made_of, former["layout"]), made_of, former)


Lost = Counter[tuple[str, str]]
"""Losses of counts of documents, by the name of the count; of documents that were left out by the reason, too."""
WRITTEN, TOKEN_COUNT, NEAR_DUPLICATES = ("written", ""), ("token_count", ""), ("near_duplicates", "")


def counts_without(counts: Mapping[str, Any], lost: Lost) -> dict[str, Any]:
    """Counts of documents without those that are *lost*, which count as forgotten. Text that was read stays counted."""
    found = {name: of - lost[name, ""] if isinstance(of, int) else of for name, of in counts.items()}
    if "skipped" in counts:
        gone = Counter({reason: count for (name, reason), count in lost.items() if name == "skipped"})
        skipped = Counter(counts["skipped"])
        skipped.subtract(gone)
        skipped[FORGOTTEN] += lost[WRITTEN] + gone.total()
        found["skipped"] = dict(sorted((+skipped).items()))
    return {name: of for name, of in found.items() if of or name != "near_duplicates"}


def totals_without(former: Mapping[str, Any], lost: Mapping[int, Lost], repeated: int) -> dict[str, Any]:
    """Totals of the documents of a successor. *former*: the manifest of the version before. *lost*: by the source's index."""
    # Examples of what steps found may be of forgotten documents.
    before = {name: counts for name, counts in former["totals"]["documents"].items() if name != "examples"}
    sources = [counts_without(source, lost.get(i, Lost())) for i, source in enumerate(before.get("by_source") or ())]
    of_all = functools.reduce(operator.add, lost.values(), Lost())
    return {**counts_without(before, of_all), "repeated_keys": repeated, "by_source": sources}


def lost_by_source(root: Store, of: OfVersion, former: dict[str, Any], near: Mapping[int, int]) -> dict[int, Lost]:
    """The counts that a version loses with its forgotten documents, by the index of their source. *near*: how many
    near-duplicates fewer it keeps, by the number of their file.
    """
    reasons, lost = strings_by_key(former["totals"]["documents"].get("skipped") or ()), defaultdict[int, Lost](Counter)
    names = [source["name"] for source in former["provenance"].get("sources") or ()]
    source_of = [names.index(source) for source, *_ in sources_of_files(former)]

    for split, numbers in of.numbers.items():
        if len(numbers):
            starts = open_split(split_of(root, of.version, split)).seq_starts
            lengths = (starts.take(numbers + 1) - starts.take(numbers)).tolist()
            keys = _fact(root, of, split, REASON) if split == LEFT_OUT else [0] * len(lengths)
            for file, reason, length in zip(_fact(root, of, split, FILE), keys, lengths, strict=True):
                of_source = {("skipped", reasons[reason]): 1} if reason else {WRITTEN: 1, TOKEN_COUNT: length}
                lost[source_of[file]].update(of_source)
    for file, count in near.items():
        lost[source_of[file]][NEAR_DUPLICATES] += count
    return lost


def _fact(root: Store, of: OfVersion, split: Split, name: str) -> list[int]:
    found: list[int] = open_array(root / fact_key(of.version, split, name), "uint64").take(of.numbers[split]).tolist()
    return found


MEMBER = np.dtype([(name, "<u8") for name in ("split", "document", "key", "file", "cluster", "similarity")])
"""A document of a version that keeps near-duplicates, the name of its cluster, and how alike it is to the one that names it."""


def _members(root: Store, version: str) -> npt.NDArray[np.void]:
    """The documents of a version that are in clusters: MEMBER[n]."""
    table, parts = DocumentTable(version_store(root, version), {}), [np.empty(0, MEMBER)]
    for some in entries_of(root, version):
        if some.split == LEFT_OUT:
            continue
        numbers = np.arange(some.start, some.stop)
        cluster = table.recorded.columns[some.split].take(numbers, [CLUSTER]).column(0).fill_null(0).to_numpy()
        part = np.empty(len(numbers), MEMBER)
        part["split"], part["document"] = EVERY_SPLIT.index(some.split), numbers
        part["key"], part["file"], part["cluster"] = some.key, some.file, cluster
        part["similarity"] = open_array(root / fact_key(version, some.split, SIMILARITY), "uint64").read(some.start, some.stop)
        parts.append(part[cluster > 0])
    return np.concatenate(parts)


def _later(members: npt.NDArray[np.void], names: UInt64s) -> Int64s:
    """Those that count as near-duplicates, if their clusters have these *names*: all but one of each. Files: uint64[m]."""
    is_name = np.flatnonzero((members["key"] == names) & (names > 0))
    firsts = is_name[np.unique(names[is_name], return_index=True)[1]]
    return np.delete(members["file"], np.union1d(firsts, np.flatnonzero(names == 0)))


def renamed_clusters(root: Store, version: str, forgotten: Forgotten) -> tuple[npt.NDArray[np.void], Counter[int]]:
    """Documents of a version that stay and whose cluster has another name without what is forgotten, RENAMED[n]: the lowest key
    names a cluster whose document has gone. And how many near-duplicates the files lose, by their numbers.
    """
    members = _members(root, version)
    key, cluster, alike = members["key"], members["cluster"], members["similarity"]
    gone, now, similarity = forgotten.those(key), cluster.copy(), alike.copy()
    rest = np.flatnonzero(np.isin(cluster, cluster[gone]) & ~gone)
    rest = rest[np.lexsort((key[rest], key[rest] != cluster[rest], cluster[rest]))]  # the name stays as long as its document does
    _, first, mine, sizes = np.unique(cluster[rest], return_index=True, return_inverse=True, return_counts=True)
    firsts = rest[first][mine]
    now[rest] = np.where(sizes[mine] > 1, key[firsts], 0)
    now[gone] = 0
    # No text is compared. One minus the similarity is a distance, so this much is certain.
    both = alike[rest].astype(np.int64) + alike[firsts].astype(np.int64)
    at_least = np.where(rest == firsts, ALIKE, np.maximum(both - ALIKE, 0)).astype(np.uint64)
    similarity[rest] = np.where(now[rest] == 0, 0, np.where(now[rest] == cluster[rest], alike[rest], at_least))
    changed = ~gone & (now != cluster)
    renamed = np.empty(int(changed.sum()), RENAMED)
    for name, values in zip(RENAMED.names or (), (members["split"], members["document"], now, similarity), strict=True):
        renamed[name] = values[changed]
    lost = Counter(_later(members, cluster).tolist())
    lost.subtract(_later(members, now).tolist())
    return renamed, lost


def keeps_clusters(manifest: Mapping[str, Any]) -> bool:
    """Whether a version says which of its documents are near-duplicates of each other."""
    return ((manifest["provenance"].get("documents") or {}).get("near_duplicates") or {}).get("action") == "keep"


def facts_beside(root: Store, version: str) -> dict[str, Any]:
    """The settings of the successor of a version that follow from what is next to it: the facts of texts, and whether there are
    documents that it left out. None if they are not what was written: slices that need them are then tokenized again.
    """
    index = read_index(root, version)
    try:
        if not index.beside or not left_out_at(version_store(root, version)):
            return {}
        check_beside(root, version, index)
    except (*NO_OBJECT, ValueError) as problem:
        logger.warning("What version %s left out is not trusted, and is rebuilt: %s", version, problem)
        return {}
    kept = {SIMILARITY: 1} if keeps_clusters(read_manifest(version_store(root, version))) else {}
    texts = {name: shard.facts[name] for shard in index.published for name in shard.of_texts} | kept
    return {"texts": texts, "leaves_out": True}


def left_out_by(one: Input, target: Target) -> Input:
    """The documents that a version left out, as an input."""
    store = target.root / beside_key(one.location.rpartition("/")[2])
    counts = {LEFT_OUT: open_split(store / LEFT_OUT).seq_count} if target.leaves_out else {}
    return one.model_copy(update={"location": store.url, "seq_counts": counts})


def successor_shards(target: Target, of: str, forgotten: Forgotten, gone: Mapping[Split, Int64s]) -> list[TokenShard]:
    """The slices of the version *of* without the documents *gone*, by their ascending numbers in each split, int64[n]. Segments
    that lose documents are not known by their digests any more.
    """
    return [
        _without(target.root, shard, was, target.name, forgotten, gone)
        for shard in read_index(target.root, of).published
        if (was := shard.published) and (target.leaves_out or not (shard.of_texts or was.left_out[1]))
    ]


def _without(
    root: Store, shard: TokenShard, was: PublishedLocation, to: str, forgotten: Forgotten, gone: Mapping[Split, Int64s]
) -> TokenShard:
    runs, lost = dict[Split, IntPair](), 0
    for split, numbers in gone.items():
        first, count = was.of(split)
        before, within = np.searchsorted(numbers, (first, first + count)).tolist()
        runs[split] = first - before, count - (within - before)
        lost += within - before
    location = PublishedLocation.model_validate({**dict(was), "version": to, **runs})
    here = shard.model_copy(update={"published": location, "examples": {}})  # they may be of forgotten documents
    if not lost:
        return here
    documents = open_shard(root, shard)
    mine, reasons, names = forgotten.those(documents.keys), documents.fact(REASON), strings_by_key(shard.skipped)
    less = Lost({WRITTEN: int((mine & (reasons == 0)).sum()), TOKEN_COUNT: int(documents.lengths[mine].sum())})
    less.update(("skipped", names[reason]) for reason in reasons[mine & (reasons > 0)].tolist())
    counts = counts_without({name: getattr(shard, name) for name in ("written", "token_count", "skipped")}, less)
    counts["left_out"] = shard.left_out - int((mine & (reasons > 0)).sum())
    files = files_of(shard).copy()
    if len(files):
        files["digest"][documents.fact(FILE)[mine].astype(np.int64)] = NO_DIGEST
    segments = segments_without(shard, mine[reasons == 0])
    return here.model_copy(update={**counts, "segments": as_text(segments), "files": as_text(files)})


def copy_origin(root: Store, to: str, of: str) -> None:
    """Record the origin of a version as that of its successor: a refresh goes by the same sources and files."""
    try:
        record = read_record(root, origin_key(of))
    except FileNotFoundError:
        return
    with pointer_lock(root):
        root.put(origin_key(to), record)
