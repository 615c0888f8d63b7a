"""The successor of a version: the same without documents that are forgotten. No text is read, and nothing is tokenized."""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, JsonFacts, JsonObject, Structs, UInt64s
from flat_tokens.forgotten import Forgotten
from flat_tokens.keys import strings_by_key
from flat_tokens.manifest import CLUSTER, EVERY_SPLIT, read_manifest
from flat_tokens.reader import left_out_at, open_split
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.stores.store import NO_OBJECT, Store, read_record
from tasks.derive.inputs import Input
from tasks.derive.provenance import DerivedProvenance
from tasks.finalize.provenance import Provenance
from tasks.models import ALL_SPLITS, FORGOTTEN, LEFT_OUT, PublishedLocation, Split, TokenShard
from tasks.output.paths import beside_key, origin_key, version_store
from tasks.output.pointer import pointer_lock
from tasks.output.target import RENAMED, Target
from tasks.parts.opening import open_shard
from tasks.parts.part import COMPARED
from tasks.rows import FILE, KEY, REASON, SIMILARITY
from tasks.shards.index import Index, as_text, check_beside, files_of, segments_without
from tasks.tokenize.segments import NO_DIGEST

logger = logging.getLogger(__name__)

ALIKE = 1_000_000
"""The similarity of equal texts."""

GONE = np.dtype([("split", "u1"), ("number", "<i8"), ("file", "<u8"), ("reason", "<u8"), ("length", "<i8")])
"""A forgotten document of a version: its split's place in ALL_SPLITS, its number there, the number of its file, the key of the
reason why it was left out, 0 for none, and its tokens.
"""


class OfVersion(NamedTuple):
    """Forgotten documents of a version, GONE[n], ascending in each split. ``windows``: their hashes. ``token_keys``: of their
    tokens.
    """

    version: str
    rows: Structs
    windows: UInt64s
    token_keys: UInt64s

    def of(self, split: str) -> Structs:
        """The forgotten documents of a split, or of those that the version left out."""
        rows: Structs = self.rows[self.rows["split"] == ALL_SPLITS.index(split)]
        return rows

    @property
    def lengths(self) -> Int64s:
        """The tokens of those that it has in its splits."""
        lengths: Int64s = self.rows["length"][self.rows["split"] < ALL_SPLITS.index(LEFT_OUT)]
        return lengths


def made_without(version: str, facts: JsonObject, forgotten: Forgotten) -> Provenance:
    """The provenance of the successor of a version with these *facts*. Its name follows from the version and the list."""
    # No build gives this name: a version has the bytes that its name says, and text that is not read cannot be counted anew.
    left_out = {"count": len(forgotten.digests), "sha256": forgotten.sha256, "of": version}
    kind = DerivedProvenance if "operation" in facts else Provenance
    return kind.model_validate({**facts, "documents": {**(facts.get("documents") or {}), FORGOTTEN: left_out}})


Lost = Counter[tuple[str, str]]
"""Losses of counts of documents, by the name of the count; of documents that were left out by the reason, too."""
WRITTEN, TOKEN_COUNT, NEAR_DUPLICATES = ("written", ""), ("token_count", ""), ("near_duplicates", "")


def counts_without(counts: JsonFacts, lost: Lost) -> JsonObject:
    """Counts of documents without those that are *lost*, which count as forgotten. Text that was read stays counted."""
    found = {name: of - lost[name, ""] if isinstance(of, int) else of for name, of in counts.items()}
    if "skipped" in counts:
        gone = Counter({reason: count for (name, reason), count in lost.items() if name == "skipped"})
        skipped = Counter[str](counts["skipped"])
        skipped.subtract(gone)
        skipped[FORGOTTEN] += lost[WRITTEN] + gone.total()
        found["skipped"] = dict(sorted((+skipped).items()))
    return {name: of for name, of in found.items() if of or name != "near_duplicates"}


def totals_without(former: JsonFacts, lost: Mapping[int, Lost], repeated: int) -> JsonObject:
    """Totals of the documents of a successor. *former*: the manifest of the version before. *lost*: by the source's index."""
    # Examples of what steps found may be of forgotten documents.
    before = {name: counts for name, counts in former["totals"]["documents"].items() if name != "examples"}
    sources = [counts_without(source, lost.get(i, Lost())) for i, source in enumerate(before.get("by_source") or ())]
    of_all = functools.reduce(operator.add, lost.values(), Lost())
    return {**counts_without(before, of_all), "repeated_keys": repeated, "by_source": sources}


def lost_of(rows: Structs, reasons: Iterable[str]) -> Lost:
    """The counts that go with forgotten documents, GONE[n], some of which were left out for *reasons*."""
    left_out, names = rows["reason"] > 0, strings_by_key(reasons)
    lost = Lost({WRITTEN: int((~left_out).sum()), TOKEN_COUNT: int(rows["length"][~left_out].sum())})
    lost.update(("skipped", names[reason]) for reason in rows["reason"][left_out].tolist())
    return lost


def lost_by_source(of: OfVersion, former: JsonObject, near: Mapping[int, int]) -> dict[int, Lost]:
    """The counts that a version loses with its forgotten documents, by the index of their source. *near*: how many
    near-duplicates fewer it keeps, by the number of their file.
    """
    sources = former["provenance"].get("sources") or ()
    source_of = np.repeat(np.arange(len(sources)), [len(source["files"]) for source in sources])
    mine, reasons = source_of[of.rows["file"].astype(np.int64)], former["totals"]["documents"].get("skipped") or ()
    lost = {source: lost_of(of.rows[mine == source], reasons) for source in np.unique(source_of).tolist()}
    for file, count in near.items():
        lost[source_of[file]][NEAR_DUPLICATES] += count
    return lost


MEMBER = np.dtype([(name, "<u8") for name in ("split", "document", "key", "file", "cluster", "similarity")])
"""A document of a version that keeps near-duplicates, the name of its cluster, and how alike it is to the one that names it."""


def _members(table: DocumentTable) -> Structs:
    """The documents of a version that are in clusters: MEMBER[n]."""
    parts = [np.empty(0, MEMBER)]
    for split, start, stop in table.ranges():
        if split == LEFT_OUT:
            continue
        numbers = np.arange(start, stop)
        cluster = table.recorded.columns[split].take(numbers, [CLUSTER]).column(0).fill_null(0).to_numpy()
        part = np.empty(len(numbers), MEMBER)
        part["split"], part["document"], part["cluster"] = EVERY_SPLIT.index(split), numbers, cluster
        for name in (KEY, FILE, SIMILARITY):
            part[name] = table.facts(split, name, start, stop)
        parts.append(part[cluster > 0])
    return np.concatenate(parts)


def _later(members: Structs, names: UInt64s) -> Int64s:
    """The files of documents that count as near-duplicates, if their clusters have these *names*: all but one of each cluster.
    uint64[m].
    """
    is_name = np.flatnonzero((members["key"] == names) & (names > 0))
    firsts = is_name[np.unique(names[is_name], return_index=True)[1]]
    return np.delete(members["file"], np.union1d(firsts, np.flatnonzero(names == 0)))


def renamed_clusters(table: DocumentTable, forgotten: Forgotten) -> tuple[Structs, Counter[int]]:
    """Documents of a version that stay and whose cluster has another name without what is forgotten, RENAMED[n]: the lowest key
    names a cluster whose document has gone. And how many near-duplicates the files lose, by their numbers.
    """
    members = _members(table)
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


def keeps_clusters(manifest: JsonFacts) -> bool:
    """Whether a version says which of its documents are near-duplicates of each other."""
    return ((manifest["provenance"].get("documents") or {}).get("near_duplicates") or {}).get("action") == "keep"


def facts_beside(root: Store, version: str, index: Index) -> JsonObject:
    """The settings of the successor of a version that follow from what is next to it: the facts of texts, and whether there are
    documents that it left out. None if they are not what was written: slices that need them are then tokenized again.
    """
    store = version_store(root, version)
    try:
        if not index.beside or not left_out_at(store):
            return {}
        check_beside(root, version, index)
    except (*NO_OBJECT, ValueError) as problem:
        logger.warning("What version %s left out is not trusted, and is rebuilt: %s", version, problem)
        return {}
    kept = {SIMILARITY: 1} if keeps_clusters(read_manifest(store)) else {}
    texts = {name: shard.facts[name] for shard in index.published for name in shard.of_texts} | kept
    return {"texts": texts, "leaves_out": True}


def left_out_by(one: Input, target: Target) -> Input:
    """The documents that a version left out, as an input."""
    store = target.root / beside_key(one.location.rpartition("/")[2])
    counts = {LEFT_OUT: open_split(store / LEFT_OUT).seq_count} if target.leaves_out else {}
    return one.model_copy(update={"location": store.url, "seq_counts": counts})


def successor_shards(target: Target, index: Index, forgotten: Forgotten, of: OfVersion) -> list[TokenShard]:
    """The slices of a version, by its *index*, without what is forgotten *of* it. Segments that lose documents are not known by
    their digests any more.
    """
    shards = list[TokenShard]()
    for shard in index.published:
        was = shard.published
        if was is None or not (target.leaves_out or not (shard.of_texts or was.left_out[1])):
            continue
        runs, parts = dict[Split, IntPair](), [of.rows[:0]]
        for split in (*target.splits, LEFT_OUT):
            (first, count), gone = was.of(split), of.of(split)
            before, within = np.searchsorted(gone["number"], (first, first + count)).tolist()
            runs[split] = first - before, count - (within - before)
            parts.append(gone[before:within])
        location = PublishedLocation.model_validate({**dict(was), "version": target.name, **runs})
        facts: JsonObject = {"published": location, "examples": {}}  # they may be of forgotten documents
        if len(rows := np.concatenate(parts)):
            rows["reason"][np.isin(rows["reason"], COMPARED)] = 0  # in its slice, such a document is like the others
            less = lost_of(rows, shard.skipped)
            facts |= counts_without({name: getattr(shard, name) for name in ("written", "token_count", "skipped")}, less)
            facts["left_out"] = shard.left_out - int((rows["reason"] > 0).sum())
            files, documents = files_of(shard).copy(), open_shard(target.root, shard)
            if len(files):
                files["digest"][rows["file"].astype(np.int64) - (was.first_file or 0)] = NO_DIGEST
            segments = segments_without(shard, forgotten.those(documents.keys)[documents.fact(REASON) == 0])
            facts |= {"segments": as_text(segments), "files": as_text(files)}
        shards.append(shard.model_copy(update=facts))
    return shards


def copy_origin(root: Store, to: str, of: str) -> None:
    """Record the origin of a version as that of its successor: a refresh compares with the same sources and files."""
    try:
        record = read_record(root, origin_key(of))
    except FileNotFoundError:
        return
    with pointer_lock(root):
        root.put(origin_key(to), record)
