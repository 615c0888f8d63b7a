"""Near-duplicates of a dataset by source: their share, the sizes of their clusters, and some pairs with their texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.array_types import Int64s
from flat_tokens.keys import mix
from flat_tokens.manifest import NEAR_DUPLICATE, NEAR_DUPLICATES
from flat_tokens.rows.table import lists_of
from flat_tokens.tools import markup, terminal
from flat_tokens.tools.corpus import Corpus
from flat_tokens.tools.sources import Locator, Place, texts_of

SAMPLE = 10
"""Pairs of each source: those with the least hashes of their keys."""
SHOWN_CHARACTERS = 700
"""Characters of a text that are shown, from a little before the first difference on."""
LEAD_CHARACTERS = 80

Entries = npt.NDArray[np.void]


class _Pair(NamedTuple):
    document: Place
    of: Place
    similarity: float


def near_duplicates(corpus: Corpus, locator: Locator) -> dict[str, Any] | None:
    """The near-duplicates of a dataset, for JSON; None where it was built without looking for them. ``sizes``: clusters by how
    many documents they have, of all sources together, from 2 on in doublings. A cluster counts for each source that has one of
    its later ones. ``text``: None where the source is not found.
    """
    policy = (corpus.provenance.get("documents") or {}).get("near_duplicates")
    if not policy:
        return None
    lists = lists_of(corpus.store, corpus.manifest, NEAR_DUPLICATES, sum(len(source.files) for source in corpus.sources))
    found = np.concatenate([np.empty(0, NEAR_DUPLICATE), *(some for _, some in lists)])
    found = found[(found["file"] != found["of_file"]) | (found["row"] != found["of_row"])]
    _, cluster, later = np.unique(found[["of_file", "of_row"]], return_inverse=True, return_counts=True)
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


def _sizes(sizes: Int64s) -> dict[str, Any]:
    octaves = np.bincount(np.ceil(np.log2(sizes)).astype(np.int64)) if len(sizes) else np.zeros(0, np.int64)
    bins = [{"from": 2 ** (k - 1) + 1, "to": 2**k, "clusters": int(count)} for k, count in enumerate(octaves.tolist()) if count]
    return {"clusters": len(sizes), "largest": int(sizes.max(initial=0)), "sizes": bins}


def _pairs(corpus: Corpus, found: Entries, locator: Locator) -> list[dict[str, Any]]:
    """Some pairs of a source, with their texts."""
    order = np.lexsort((found["row"], found["file"], mix(found["key"] ^ found["of_key"])))[:SAMPLE]
    files = [file for source in corpus.sources for file in source.files]
    pairs = [
        _Pair(Place(key, files[file], row), Place(of_key, files[of_file], of_row), similarity / 1e6)
        for _, key, file, row, of_file, of_row, of_key, similarity in found[order].tolist()
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


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Near-duplicates for people."""
    fate = "left out" if found["policy"]["action"] == "drop" else "kept"
    yield f"near-duplicates, {fate}, from a similarity of {found['policy']['threshold']:g} on"
    rows = [["source", "documents", "near-duplicates", "share", "clusters", "largest"], *map(_row, found["by_source"])]
    yield from terminal.table(rows, "<>>>>>")


def _row(row: Mapping[str, Any]) -> list[str]:
    read = "" if row["read"] is None else f"{row['read']:,}"
    counts = (f"{row[name]:,}" for name in ("clusters", "largest"))
    return [row["name"], read, f"{row['near_duplicates']:,}", terminal.percent(row["share"]), *counts]


def section(found: Mapping[str, Any] | None) -> str:
    """The same as a section of a page, with the pairs side by side."""
    if found is None:
        return ""
    fate = "Left out, but for the first of each cluster" if found["policy"]["action"] == "drop" else "Kept"
    policy = found["policy"]
    about = f"{fate}; from an estimated similarity of {policy['threshold']:g} on, by runs of {policy['words']} words."
    table = markup.table(
        ["source", "documents", "near-duplicates", "share", "clusters", "largest cluster"], list(map(_row, found["by_source"]))
    )
    sizes = [[terminal.span(one["from"], one["to"]), f"{one['clusters']:,}"] for one in found["sizes"]]
    pairs = "".join(
        f'<h3 style="margin-top:20px">{escape(row["name"])}: {terminal.plural(len(row["pairs"]), "pair")}</h3>'
        + "".join(map(_side_by_side, row["pairs"]))
        for row in found["by_source"]
        if row["pairs"]
    )
    numbers = markup.numbers(["documents of a cluster", "clusters"], sizes, "Show the sizes of clusters") if sizes else ""
    return markup.section("near-duplicates", "Near-duplicates", f'<p class="soft">{escape(about)}</p>{table}{numbers}{pairs}')


def _side_by_side(pair: Mapping[str, Any]) -> str:
    one, other = pair["document"], pair["of"]
    texts = _marked(one["text"], other["text"]) if one["text"] is not None and other["text"] is not None else None
    shown = texts or tuple(
        escape(_cut(each["text"], 0)) if each["text"] else f"<em>{escape(each['problem'] or '')}</em>" for each in (one, other)
    )
    places = [f"{each['file']} row {each['row']:,}" for each in (one, other)]
    cells = "".join(
        f'<figure><p class="note">{escape(place)}</p><p class="copy">{text}</p></figure>'
        for place, text in zip(places, shown, strict=True)
    )
    summary = f"{terminal.percent(pair['similarity'])}: {places[0]}, as {places[1]}"
    return f'<details open><summary>{escape(summary)}</summary><div class="pair">{cells}</div></details>'


def _cut(text: str, begin: int) -> str:
    end = begin + SHOWN_CHARACTERS
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")


def _marked(one: str, other: str) -> tuple[str, str]:
    """Two texts as HTML, from a little before the first difference on, the words marked that differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = one.rfind(" ", 0, max(same - LEAD_CHARACTERS, 0)) + 1
    words = [re.findall(r"\s+|\S+", _cut(text, begin)) for text in (one, other)]
    parts: tuple[list[str], list[str]] = ([], [])
    for kind, *ends in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for k, (low, high) in enumerate((ends[:2], ends[2:])):
            text = escape("".join(words[k][low:high]))
            parts[k].append(text if kind == "equal" or not text else f"<mark>{text}</mark>")
    return "".join(parts[0]), "".join(parts[1])
