"""The successor of a version: the same without the documents that are forgotten. No text is read, and nothing is tokenized."""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import Int64s, IntPair, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.forgotten import Forgotten
from flat_tokens.keys import strings_by_key
from flat_tokens.manifest import CLUSTER, EVERY_SPLIT, read_manifest
from flat_tokens.reader import left_out_at, open_split
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.stores.records import read_record
from flat_tokens.stores.store import NO_OBJECT, Store
from tasks.derive.inputs import Input
from tasks.derive.provenance import Derived
from tasks.derive.provenance import card as card_of_derived
from tasks.finalize.seal import Provenance, build_id
from tasks.finalize.seal import card as card_of_build
from tasks.forget.find import OfVersion, entries_of, sources_of_files, split_of
from tasks.models import FORGOTTEN, LEFT_OUT, PublishedLocation, Split, TokenShard
from tasks.output.paths import beside_key, fact_key, origin_key, version_store
from tasks.output.pointer import pointer_lock
from tasks.output.target import RENAMED, Target
from tasks.parts.opening import open_shard
from tasks.rows import FILE, REASON, SIMILARITY
from tasks.shards.index import as_text, check_beside, files_of, read_index, segments_without
from tasks.tokenize.segments import NO_DIGEST

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
