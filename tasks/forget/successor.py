"""The successor of a version: the same without the documents that are forgotten. No text is read, and nothing is tokenized."""

from __future__ import annotations

import base64
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import Bools, Int64s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.forgotten import Forgotten
from flat_tokens.manifest import EVERY_SPLIT, NEAR_DUPLICATE, read_manifest
from flat_tokens.reader import open_split
from flat_tokens.rows.documents import numbered
from flat_tokens.stores.records import read_record
from flat_tokens.stores.store import NO_OBJECT, Store, StoredObject
from tasks.derive.inputs import Input
from tasks.derive.pieces import Counted
from tasks.derive.provenance import Derived
from tasks.derive.provenance import card as card_of_derived
from tasks.finalize.naming import FORGOTTEN
from tasks.finalize.provenance import Provenance, build_id
from tasks.finalize.provenance import card as card_of_build
from tasks.forget.find import duplicates_of, entries_of
from tasks.models import LEFT_OUT, PublishedLocation, Split, TokenShard
from tasks.output.paths import DOCUMENTS, beside_key, fact_key, origin_key, version_store
from tasks.output.pointer import pointer_lock
from tasks.output.target import RENAMED, Target
from tasks.parts.opening import open_shard
from tasks.parts.part import InputPart
from tasks.rows import KEY
from tasks.shards.index import check_beside, read_index, segments_of
from tasks.tokenize.segments import DIGEST_BYTES

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


def totals_without(
    former: Mapping[str, Any], counted: Sequence[tuple[InputPart, Counted]], copies: Mapping[int, LostCopies], repeated: int
) -> dict[str, Any]:
    """Totals of the documents of a successor. *former*: those of the version before. *counted*: what stays, by part. *copies*:
    entries that the lists of duplicates lose, by the index of their source. Text that was read stays counted.
    """
    # Examples of what steps found may be of forgotten documents.
    before = {name: counts for name, counts in former["totals"]["documents"].items() if name != "examples"}
    kept = np.zeros((len(before.get("by_source") or ()), 2), np.int64)
    for _, count in counted:
        kept += np.array(count.sources).reshape(-1, 2)
    sources, gone = [], 0
    for i, source in enumerate(before.get("by_source") or ()):
        written, tokens = kept[i].tolist()
        lost = source["written"] - written
        counts = {**source, "written": written, "token_count": tokens}
        if "skipped" in source:
            counts["skipped"] = skipped_without(source["skipped"], lost, copies.get(i, {}))
        sources.append(_kept_without(counts, copies.get(i, {})))
        gone += lost
    of_all = Counter[str | None]()
    for some in copies.values():
        of_all.update(some)
    totals = {
        **before,
        "written": before["written"] - gone,
        "skipped": skipped_without(before["skipped"], gone, of_all),
        "repeated_keys": repeated,
        "by_source": sources,
    }
    return _kept_without(totals, of_all)


LostCopies = Mapping[str | None, int]
"""Entries that lists of copies lose, by the reason for which these were skipped; None: they were kept."""


def _kept_without(counts: dict[str, Any], copies: LostCopies) -> dict[str, Any]:
    """Counts of documents, with fewer near-duplicates that are kept."""
    found = counts.get("near_duplicates", 0) - copies.get(None, 0)
    return {
        **{name: of for name, of in counts.items() if name != "near_duplicates"},
        **({"near_duplicates": found} if found else {}),
    }


def skipped_without(skipped: Mapping[str, int], lost: int, copies: LostCopies) -> dict[str, int]:
    """Counts of skipped documents by reason, where *lost* more are forgotten, and *copies* that were left out as such."""
    counts = Counter(skipped)
    counts[FORGOTTEN] += lost
    for reason, count in copies.items():
        if reason is not None:
            counts[FORGOTTEN] += count
            counts[reason] -= count
    return dict(sorted((+counts).items()))


def write_duplicates(
    target: Target, of: Store, forgotten: Forgotten
) -> tuple[tuple[StoredObject, ...], Counter[tuple[int, str | None]]]:
    """Write the lists of duplicates of a successor of the version at *of*. Return them, and how many entries they lose by the
    number of their file and the reason for which these were skipped.
    """
    lists, objects, lost = duplicates_of(of), list[StoredObject](), Counter[tuple[int, str | None]]()
    if not lists:
        return (), lost
    clusters, in_clusters = clusters_without(_all_of([copies for _, copies, reason in lists if reason is None]), forgotten)
    begin = 0
    for name, copies, reason in lists:
        now, stays = copies, ~forgotten.those(copies["key"])
        counted = np.ones((2, len(copies)), bool)
        if reason is None:
            now, stays = clusters[begin : begin + len(copies)], in_clusters[begin : begin + len(copies)]
            begin += len(copies)
            counted = np.array([_places(some) != numbered(some["of_file"], some["of_row"]) for some in (copies, now)])
        lost.update((file, reason) for file in copies["file"][counted[0] & ~(stays & counted[1])].tolist())
        if stays.any():
            objects.append(target.store.put(name, now[stays].tobytes()))
    return tuple(objects), lost


def clusters_without(copies: npt.NDArray[np.void], forgotten: Forgotten) -> tuple[npt.NDArray[np.void], Bools]:
    """Entries of clusters that are kept, NEAR_DUPLICATE[n] and all of a version, as they are without what is forgotten: the
    lowest key names a cluster whose document has gone. And which of them a list still has, bool[n]: neither a forgotten
    one nor one left alone.
    """
    gone, place, cluster = forgotten.those(copies["key"]), _places(copies), numbered(copies["of_file"], copies["of_row"])
    rest = np.flatnonzero(np.isin(cluster, cluster[gone]) & ~gone)
    rest = rest[np.lexsort((copies["key"][rest], place[rest] != cluster[rest]))]  # the name stays as long as its document does
    _, first, mine, sizes = np.unique(cluster[rest], return_index=True, return_inverse=True, return_counts=True)
    firsts = rest[first][mine]
    now, stays = copies.copy(), ~gone
    for of, name in (("of_key", "key"), ("of_file", "file"), ("of_row", "row")):
        now[of][rest] = copies[name][firsts]
    # No text is compared. One minus the similarity is a distance, so this much is certain.
    both = copies["similarity"][rest].astype(np.int64) + copies["similarity"][firsts].astype(np.int64)
    at_least = np.where(rest == firsts, ALIKE, np.maximum(both - ALIKE, 0)).astype(np.uint64)
    now["similarity"][rest] = np.where(place[firsts] == cluster[rest], copies["similarity"][rest], at_least)
    stays[rest[sizes[mine] == 1]] = False
    return now, stays


def renamed_clusters(of: Store, forgotten: Forgotten) -> npt.NDArray[np.void]:
    """Documents of the version *of* that stay and whose cluster has another name without what is forgotten: RENAMED[n]."""
    copies = _all_of([copies for _, copies, reason in duplicates_of(of) if reason is None])
    now, stays = clusters_without(copies, forgotten)
    changed = ~forgotten.those(copies["key"]) & (~stays | (now["of_key"] != copies["of_key"]))
    now, alone = now[changed], ~stays[changed]
    order = np.argsort(_places(now))
    now, alone = now[order], alone[order]
    renamed = [np.empty(0, RENAMED)]
    for some in entries_of(of) if len(now) else ():
        row = open_array(of / f"{DOCUMENTS}/{some.split}/row", "uint64").read(some.start, some.stop)
        place = numbered(some.file, row)
        chosen = np.flatnonzero(np.isin(place, _places(now)))
        at = np.searchsorted(_places(now), place[chosen])
        found = np.empty(len(chosen), RENAMED)
        found["split"], found["document"] = EVERY_SPLIT.index(some.split), chosen + some.start
        found["name"], found["alone"] = now["of_key"][at], alone[at]
        renamed.append(found)
    return np.concatenate(renamed)


def _all_of(lists: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    return np.concatenate([np.empty(0, NEAR_DUPLICATE), *lists])


def _places(copies: npt.NDArray[np.void]) -> UInt64s:
    return numbered(copies["file"], copies["row"])


def facts_beside(root: Store, version: str) -> dict[str, int]:
    """The facts of texts that are next to a version, and how many numbers each has; none if they are not what was written:
    compared slices are then tokenized again.
    """
    index = read_index(root, version)
    try:
        check_beside(root, version, index)
    except (*NO_OBJECT, ValueError) as problem:
        logger.warning("What version %s left out is not trusted, and is rebuilt: %s", version, problem)
        return {}
    return {name: shard.facts[name] for shard in index.published for name in shard.of_texts}


def left_out_by(one: Input, target: Target) -> Input:
    """The documents that a version left out, as an input."""
    store = target.root / beside_key(one.location.rpartition("/")[2])
    counts = {LEFT_OUT: open_split(store / LEFT_OUT).seq_count} if target.texts else {}
    return one.model_copy(update={"location": store.url, "seq_counts": counts})


def successor_shards(target: Target, of: str, forgotten: Forgotten, gone: Mapping[Split, Int64s]) -> list[TokenShard]:
    """The slices of the version *of* without the documents *gone*, by their ascending numbers in each split, int64[n], and those
    that it left out. Segments that lose documents are not known by their digests any more.
    """
    numbers = dict(gone)
    if target.texts:
        keys = open_array(target.root / fact_key(of, LEFT_OUT, KEY), "uint64")
        numbers[LEFT_OUT] = np.flatnonzero(forgotten.those(keys.read(0, keys.length)))
    shards = (shard for shard in read_index(target.root, of).published if target.texts or not shard.of_texts)
    return [_without(target.root, shard, target.name, forgotten, numbers) for shard in shards]


def _without(root: Store, shard: TokenShard, to: str, forgotten: Forgotten, gone: Mapping[Split, Int64s]) -> TokenShard:
    was = shard.published
    assert was is not None
    runs, lost = dict[Split, tuple[int, int]](), 0
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
    mine = forgotten.those(documents.keys)
    return here.model_copy(update=counts_without(shard, mine, int(documents.lengths[mine].sum())))


def counts_without(shard: TokenShard, gone: Bools, token_count: int) -> dict[str, Any]:
    """The facts of a shard that change where it loses documents, bool[n], that have *token_count* tokens together."""
    lost = int(gone.sum())
    return {
        "written": shard.written - lost,
        "skipped": skipped_without(shard.skipped, lost, {}),
        "token_count": shard.token_count - token_count,
        "segments": segments_without(shard, gone),
    }


def segments_without(shard: TokenShard, gone: Bools) -> str:
    """A shard's segments, where it loses documents: bool[n]."""
    segments = segments_of(shard).copy()
    if not len(segments):
        return ""
    ends = np.cumsum(segments["documents"].astype(np.int64))
    before = np.concatenate([[0], np.cumsum(gone)])
    lost = np.diff(before[ends], prepend=0)
    segments["digest"][lost > 0] = np.void(bytes(DIGEST_BYTES))
    segments["documents"] -= lost.astype(segments["documents"].dtype)
    return base64.b64encode(segments[segments["documents"] > 0].tobytes()).decode()


def copy_origin(root: Store, to: str, of: str) -> None:
    """Record the origin of a version as that of its successor: a refresh goes by the same sources and files."""
    try:
        record = read_record(root, origin_key(of))
    except FileNotFoundError:
        return
    with pointer_lock(root):
        root.put(origin_key(to), record)
