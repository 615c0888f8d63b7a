"""Near-duplicates of a dataset by source: their share, the sizes of their clusters, and some pairs with their texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject, UInt64s
from flat_tokens.keys import keys_of_bytes, mix
from flat_tokens.reader import FlatTokens
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.tools import terminal
from flat_tokens.tools.corpus import Corpus
from flat_tokens.tools.documents import table_of
from flat_tokens.tools.sources import Locator, Place, places_of, texts_of

SAMPLE = 10
"""Pairs of each source: those with the least hashes of their keys."""
SHOWN_CHARACTERS = 700
"""Characters of a text that are shown, from a little before the first difference on."""
LEAD_CHARACTERS = 80

Entries = npt.NDArray[np.void]
ENTRY = np.dtype([(name, "<u8") for name in ("key", "file", "row", "of", "similarity")])


class _Pair(NamedTuple):
    document: Place
    of: Place
    similarity: float


def near_duplicates(corpus: Corpus, locator: Locator) -> JsonObject | None:
    """The near-duplicates of a dataset, for JSON; None where it was built without looking for them. ``sizes``: clusters by how
    many documents they have, of all sources together, from 2 on in doublings. A cluster counts for each source that has one of
    its later ones. ``text``: None where the source is not found.
    """
    policy = (corpus.provenance.get("documents") or {}).get("near_duplicates")
    if not policy:
        return None
    found = np.concatenate([np.empty(0, ENTRY), *_entries(table_of(corpus.url))])
    _, cluster, later = np.unique(found["of"], return_inverse=True, return_counts=True)
    cluster, sizes = cluster.reshape(-1), later + 1
    counts = {one["name"]: one for one in ((corpus.manifest.get("totals") or {}).get("documents") or {}).get("by_source") or ()}
    source_of = np.array([i for i, source in enumerate(corpus.sources) for _ in source.files], np.int64)
    of_source = source_of[found["file"].astype(np.int64)]
    rows = []
    for i, source in enumerate(corpus.sources):
        mine = of_source == i
        those = np.unique(cluster[mine])
        read = counts.get(source.name, {}).get("read")
        row = {"name": source.name, "read": read, "near_duplicates": int(mine.sum())}
        row |= {"share": row["near_duplicates"] / read if read else 0.0, **_sizes(sizes[those])}
        rows.append({**row, "pairs": _pairs(corpus, found[mine], locator)})
    return {"policy": dict(policy), "near_duplicates": len(found), **_sizes(sizes), "by_source": rows}


def _entries(table: DocumentTable) -> Iterator[Entries]:
    """The documents that are nearly another one, in the order of the table: ENTRY[n] each."""
    duplicate = keys_of_bytes([b"duplicate"])[0]
    for split, *where in table.ranges():
        mine = (table.facts(split, "of", *where) > 0) & (table.facts(split, "reason", *where) != duplicate)
        found = np.empty(int(mine.sum()), ENTRY)
        for name in ENTRY.names or () if mine.any() else ():
            found[name] = table.facts(split, name, *where)[mine]
        yield found


def _sizes(sizes: Int64s) -> JsonObject:
    octaves = np.bincount(np.ceil(np.log2(sizes)).astype(np.int64)) if len(sizes) else np.zeros(0, np.int64)
    bins = [{"from": 2 ** (k - 1) + 1, "to": 2**k, "clusters": int(count)} for k, count in enumerate(octaves.tolist()) if count]
    return {"clusters": len(sizes), "largest": int(sizes.max(initial=0)), "sizes": bins}


def _pairs(corpus: Corpus, found: Entries, locator: Locator) -> list[JsonObject]:
    """Some pairs of a source, with their texts."""
    order = np.lexsort((found["row"], found["file"], mix(found["key"] ^ found["of"])))[:SAMPLE]
    files = [file for source in corpus.sources for file in source.files]
    firsts = _firsts(corpus, found["of"][order])
    pairs = [
        _Pair(Place(key, files[file], row), firsts[of], similarity / 1e6)
        for key, file, row, of, similarity in found[order].tolist()
    ]
    places = {2 * i + k: place for i, pair in enumerate(pairs) for k, place in enumerate(pair[:2])}
    texts, why = dict[int, str](), dict[int, str]()
    for some in texts_of(corpus, places, locator):
        texts |= some.texts
        why |= dict.fromkeys(some.sequences, some.problem or "the source has another document in this row now")
    return [
        {"similarity": pair.similarity}
        | {
            name: {**place.described(corpus.sources), "text": texts.get(n), "problem": None if n in texts else why[n]}
            for name, place, n in (("document", pair.document, 2 * i), ("of", pair.of, 2 * i + 1))
        }
        for i, pair in enumerate(pairs)
    ]


def _firsts(corpus: Corpus, keys: UInt64s) -> dict[int, Place]:
    """The documents with some keys."""
    found = dict[int, Place]()
    for name, split in corpus.splits.items():
        assert isinstance(split, FlatTokens)
        numbers = split.by_keys(keys)
        found |= {place.key: place for place in places_of(corpus, name, numbers[numbers >= 0].tolist()) or ()}
    return found


def lines(found: JsonFacts) -> Iterator[str]:
    """Near-duplicates for people."""
    fate = "left out" if found["policy"]["action"] == "drop" else "kept"
    yield f"near-duplicates, {fate}, from a similarity of {found['policy']['threshold']:g} on"
    rows = [["source", "documents", "near-duplicates", "share", "clusters", "largest"], *map(row, found["by_source"])]
    yield from terminal.table(rows, "<>>>>>")


def row(of: JsonFacts) -> list[str]:
    """The counts of a source: a row of a table."""
    read = "" if of["read"] is None else f"{of['read']:,}"
    counts = (f"{of[name]:,}" for name in ("clusters", "largest"))
    return [of["name"], read, f"{of['near_duplicates']:,}", terminal.percent(of["share"]), *counts]


Parts = list[tuple[str, bool]]
"""A text in parts, each with whether it differs from the other one's."""


def side_by_side(pair: JsonFacts) -> list[tuple[JsonFacts, Parts]]:
    """Both documents of a pair, each with its text; without parts, if that is not known."""
    places = (pair["document"], pair["of"])
    if all(place["text"] is not None for place in places):
        return list(zip(places, _marked(*(place["text"] for place in places)), strict=True))
    return [(place, [(_cut(place["text"], 0), False)] if place["text"] else []) for place in places]


def _cut(text: str, begin: int) -> str:
    end = begin + SHOWN_CHARACTERS
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")


def _marked(one: str, other: str) -> tuple[Parts, Parts]:
    """Two texts from a little before the first difference on, by words."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = one.rfind(" ", 0, max(same - LEAD_CHARACTERS, 0)) + 1
    words = [re.findall(r"\s+|\S+", _cut(text, begin)) for text in (one, other)]
    parts: tuple[Parts, Parts] = ([], [])
    for kind, *ends in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for k, (low, high) in enumerate((ends[:2], ends[2:])):
            if high > low:
                parts[k].append(("".join(words[k][low:high]), kind != "equal"))
    return parts
