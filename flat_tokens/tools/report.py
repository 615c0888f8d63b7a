"""The report of ``flat-tokens stats --html``: one page without other files, scripts or network access.

It draws the summary that ``--json`` prints. Equal summaries give equal bytes.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, JsonFacts, JsonObject, Structs, UInt64s
from flat_tokens.keys import keys_of_bytes, mix
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.rows.split import FlatTokens
from flat_tokens.tools import terminal
from flat_tokens.tools.corpus import Corpus
from flat_tokens.tools.documents import table_of
from flat_tokens.tools.inspect import evaluated, origin_facts, source_facts
from flat_tokens.tools.sources import Place, TextSources, places_of, texts_of

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BASE = 44, WIDTH - 27, 12, HEIGHT - 34
"""Sizes of a plot and the places of its axes, in units of about a pixel of a phone."""

Marks = Sequence[tuple[float, str]]

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
COUNTS = (("tokens", "token_count"), ("sequences", "seq_count"), ("of these empty", "empty_seq_count"))
LENGTHS = (
    ("mean length", "mean"),
    ("shortest", "min"),
    *(("median" if percent == 50 else f"{percent} % up to", f"p{percent}") for percent in PERCENTILES),
    ("longest", "max"),
)
"""Rows of the table of lengths: their names, and their keys in a summary."""
WIDTHS = {1: "quarter of a doubling", 2: "half of a doubling", 4: "doubling"}


SAMPLE = 10
"""Pairs of each source: those with the least hashes of their keys."""
SHOWN_CHARACTERS = 700
"""Characters of a text that are shown, from a little before the first difference on."""
LEAD_CHARACTERS = 80

Entries = Structs
ENTRY = np.dtype([(name, "<u8") for name in ("key", "file", "row", "of", "similarity")])


class Plot(NamedTuple):
    """A plot of columns, or of a line. ``rows``, ``columns``: heights and places from the left of labels at its axes, whose name
    is ``label``. ``areas``: left, right, top and title of each column.
    """

    about: str
    rows: Marks
    columns: Marks
    label: str
    areas: Sequence[tuple[float, float, float, str]] = ()
    points: Sequence[tuple[float, float]] = ()


def page(summary: JsonFacts) -> str:
    """The report as one HTML document."""
    dataset, total, use = summary["dataset"], summary["total"], summary["total"]["vocabulary_use"]
    splits = {name: part for name, part in summary["splits"].items() if part["seq_count"]}
    near, sets, points = summary.get("near_duplicates"), evaluated(dataset), total["rank_frequency"]
    return terminal.page(
        "stats.html",
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "base": BASE},
        summary=summary,
        dataset=dataset,
        name=dataset["name"] or dataset["path"].rstrip("/").rpartition("/")[2] or dataset["path"],
        rate=bytes_per_token(summary),
        splits=splits,
        halves=[f"{part['lengths']['token_median']:,} in {name}" for name, part in splits.items() if part["token_count"]],
        length_plots={name: _length_plot(name, part) for name, part in splits.items()},
        length_rows=[
            *([label, *(f"{part[key]:,}" for part in splits.values())] for label, key in COUNTS),
            *([label, *(f"{part['lengths'][key]:,.0f}" for part in splits.values())] for label, key in LENGTHS),
        ],
        evaluated=[
            [one.name, f"{one.documents:,}", terminal.percent(one.share), terminal.number(one.questions), one.step]
            for one in sets
        ],
        examples=[[one.name, line] for one in sets for line in one.lines()],
        near=near,
        near_rows=near and list(map(near_row, near["by_source"])),
        side_by_side=side_by_side,
        vocabulary_facts=list(vocabulary_facts(summary)),
        rank_plot=_rank_plot(points) if points else None,
        ranks=[[f"{rank:,}", f"{count:,}"] for rank, count in points[:: max(1, len(points) // 24)]],
        use_plot=_use_plot(use) if use else None,
        id_ranges=[[_span(found), f"{found['size']:,}", f"{found['used']:,}"] for found in (use["by_id"] if use else ())],
        origin=list(origin_facts(dataset, digits=64)),
        sources=[(source, *source_facts(source)) for source in dataset["sources"]],
    )


def bytes_per_token(summary: JsonFacts) -> tuple[float, int] | None:
    """Bytes of text for each token, and bytes of text: from the manifest, else from decoding. None if neither is known."""
    total = summary["total"]
    text_bytes = total["decoded_bytes"] if summary["text_bytes"] is None else summary["text_bytes"]
    return None if text_bytes is None or not total["token_count"] else (text_bytes / total["token_count"], text_bytes)


def _length_plot(name: str, part: JsonFacts) -> tuple[Sequence[Sequence[str]], str, Plot]:
    """The numbers of a plot of lengths, what each of its columns is, and itself."""
    # A few sequences in narrow bins would show only noise.
    merged = 1 if part["seq_count"] >= 5000 else 2 if part["seq_count"] >= 500 else 4
    bins = merged_bins(part, merged)
    edges = [(-1.0 if found["from"] == 0 else math.log2(found["from"]), math.log2(found["to"] + 1)) for found in bins]
    low, high = math.floor(edges[0][0]), math.ceil(edges[-1][1])
    # Short lengths are whole numbers, so bins differ in width: the plot shows the share in a bin of the full width.
    of_sequences, of_tokens = (
        [found[of] / max(part[of], 1) / (b - a) * merged / 4 for found, (a, b) in zip(bins, edges, strict=True)]
        for of in ("seq_count", "token_count")
    )
    ticks = _ticks(max(*of_sequences, *of_tokens))
    x, y = _scale(low, high, LEFT, RIGHT), _scale(0, ticks[-1], BASE, TOP)
    step = max(1, math.ceil((high - max(low, 0)) / 5.5))
    marks: list[tuple[float, str]] = [(k, f"{2**k:,}") for k in range(max(low, 0), high + 1, step)]
    if low < 0:
        marks = [(-0.5, "0"), *(mark for mark in marks if mark[0] > 0)]
    titles = [
        f"{_span(found)} tokens: {terminal.plural(found['seq_count'], 'sequence')}, "
        f"{terminal.plural(found['token_count'], 'token')}"
        for found in bins
    ]
    columns = zip(bins, edges, of_sequences, titles, strict=True)
    lengths = part["lengths"]
    plot = Plot(
        f"Lengths of the sequences of {name}. From {lengths['min']:,} to {terminal.plural(lengths['max'], 'token')}, "
        f"median {lengths['p50']:,}.",
        [(y(tick), f"{100 * tick:g} %") for tick in ticks],
        [(x(k), label) for k, label in marks],
        "tokens in a sequence",
        [(x(a), x(b), y(share), title) for found, (a, b), share, title in columns if found["seq_count"]],
        [(x(edge), y(share)) for pair, share in zip(edges, of_tokens, strict=True) for edge in pair],
    )
    return [[_span(found), f"{found['seq_count']:,}", f"{found['token_count']:,}"] for found in bins], WIDTHS[merged], plot


def merged_bins(part: JsonFacts, merged: int) -> list[dict[str, int]]:
    """The histogram from the shortest sequence on, with *merged* of its bins, four an octave, as one."""
    bins: dict[int, dict[str, int]] = {}
    for found in part["histogram"]:
        if not found["seq_count"] and not bins:
            continue
        octave = -1 if found["from"] == 0 else round(math.log2(found["from"]) * 4) // merged
        low = min(found["from"], round(2 ** (octave * merged / 4)))
        wider = bins.setdefault(octave, {"from": low, "to": found["to"], "seq_count": 0, "token_count": 0})
        wider["to"] = max(found["to"], round(2 ** ((octave + 1) * merged / 4)) - 1)
        for key in ("seq_count", "token_count"):
            wider[key] += found[key]
    return list(bins.values())


def _span(found: Mapping[str, int]) -> str:
    return terminal.span(found["from"], found["to"])


def vocabulary_facts(summary: JsonFacts) -> Iterator[tuple[str, str]]:
    """Bytes per token and the use of the vocabulary, each with its label."""
    total, use = summary["total"], summary["total"]["vocabulary_use"]
    if summary["text_bytes"] is not None and (rate := bytes_per_token(summary)) is not None:
        yield "bytes per token", f"{rate[0]:.3f}, from {rate[1]:,} bytes of text, as the build recorded them"
    for name, part in summary["splits"].items():
        if part["bytes_per_token"] is not None:
            yield f"{name}, decoded", f"{part['bytes_per_token']:.3f}, from {terminal.plural(part['decoded_bytes'], 'byte')}"
    if total["distinct_ids"] is not None:
        largest = f", the largest {total['max_token_id']:,}" if total["distinct_ids"] else ""
        yield "different ids", f"{total['distinct_ids']:,}{largest}"
    if use:
        yield (
            "never used",
            f"{use['unused']:,} of {use['size']:,} ids ({terminal.percent(use['unused'] / max(use['size'], 1))})",
        )
        if use["outside"]:
            yield "not in the vocabulary", f"{use['outside']:,} different ids"


def _rank_plot(points: Sequence[IntPair]) -> Plot:
    right, top = max(math.log10(points[-1][0]), 1), max(math.ceil(math.log10(points[0][1])), 1)
    x, y = _scale(0, right, LEFT, RIGHT), _scale(0, top, BASE, TOP)
    (_, most), (last, least) = points[0], points[-1]
    return Plot(
        "Tokens by rank and frequency. "
        f"The most frequent token occurs {most:,} times; number {last:,}, the last, {terminal.plural(least, 'time')}.",
        [(y(k), terminal.short(10**k)) for k in range(0, top + 1, max(1, math.ceil(top / 5)))],
        [(x(k), terminal.short(10**k)) for k in range(math.floor(right) + 1)],
        "rank",
        points=[(x(math.log10(rank)), y(math.log10(count))) for rank, count in points],
    )


def _use_plot(use: JsonFacts) -> Plot:
    """The plot of the share of used ids, by ranges of ids."""
    last = use["by_id"][-1]["to"] + 1
    x, y = _scale(0, last, LEFT, RIGHT), _scale(0, 1, BASE, TOP)
    return Plot(
        f"Use of the vocabulary by token id. {use['used']:,} of {terminal.plural(use['size'], 'id')} occur.",
        [(y(k / 4), f"{k * 25} %") for k in range(5)],
        [(x(tick), terminal.short(tick)) for tick in _ticks(last, 5) if tick <= last],
        "token id",
        [
            (
                *(x(found["from"]), x(found["to"] + 1), y(found["used"] / max(found["size"], 1))),
                f"ids {_span(found)}: {found['used']:,} of {found['size']:,} used",
            )
            for found in use["by_id"]
            if found["used"]
        ],
    )


def _scale(low: float, high: float, start: float, stop: float) -> Any:
    """The linear function that maps *low* to *start* and *high* to *stop*."""
    factor = (stop - start) / (high - low or 1)
    return lambda value: start + (value - low) * factor


def _ticks(highest: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to the first at or above *highest*, about *count* of them."""
    rough = (highest or 1) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [k * step for k in range(math.ceil(highest / step - 1e-9) + 1 or 1)] if highest else [0.0, 1.0]


def near_duplicates(sources: TextSources) -> JsonObject | None:
    """The near-duplicates of a dataset, for JSON; None if it was built without looking for them. ``sizes``: clusters by how
    many documents they have, of all sources together, from 2 on in doublings. A cluster counts for each source that has one of
    its later ones. ``text``: None if the source is not found.
    """
    corpus = sources.corpus
    policy = (corpus.provenance.get("documents") or {}).get("near_duplicates")
    if not policy:
        return None
    found = np.concatenate([np.empty(0, ENTRY), *_entries(table_of(corpus))])
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
        row |= {"share": row["near_duplicates"] / read if read else 0.0, **_cluster_sizes(sizes[those])}
        rows.append({**row, "pairs": _pairs(sources, found[mine])})
    return {"policy": dict(policy), "near_duplicates": len(found), **_cluster_sizes(sizes), "by_source": rows}


def _entries(table: DocumentTable) -> Iterator[Entries]:
    """The documents that are nearly another one, in the order of the table: ENTRY[n] each."""
    duplicate = keys_of_bytes([b"duplicate"])[0]
    for split, *where in table.ranges():
        mine = (table.facts(split, "of", *where) > 0) & (table.facts(split, "reason", *where) != duplicate)
        found = np.empty(int(mine.sum()), ENTRY)
        for name in ENTRY.names or () if mine.any() else ():
            found[name] = table.facts(split, name, *where)[mine]
        yield found


def _cluster_sizes(sizes: Int64s) -> JsonObject:
    octaves = np.bincount(np.ceil(np.log2(sizes)).astype(np.int64)) if len(sizes) else np.zeros(0, np.int64)
    bins = [{"from": 2 ** (k - 1) + 1, "to": 2**k, "clusters": int(count)} for k, count in enumerate(octaves.tolist()) if count]
    return {"clusters": len(sizes), "largest": int(sizes.max(initial=0)), "sizes": bins}


def _pairs(sources: TextSources, found: Entries) -> list[JsonObject]:
    """Some pairs of a source, with their texts."""
    corpus = sources.corpus
    order = np.lexsort((found["row"], found["file"], mix(found["key"] ^ found["of"])))[:SAMPLE]
    files = [file for source in corpus.sources for file in source.files]
    firsts = _firsts(corpus, found["of"][order])
    rows = found[order].tolist()
    places = dict(enumerate(place for key, file, row, of, _ in rows for place in (Place(key, files[file], row), firsts[of])))
    texts, why = dict[int, str](), dict[int, str]()
    for some in texts_of(sources, places):
        texts |= some.texts
        why |= dict.fromkeys(some.sequences, some.problem or "the source has another document in this row now")
    described = [
        {**place.described(corpus.sources), "text": texts.get(n), "problem": None if n in texts else why[n]}
        for n, place in places.items()
    ]
    return [
        {"similarity": row[-1] / 1e6, "document": document, "of": of}
        for row, document, of in zip(rows, described[::2], described[1::2], strict=True)
    ]


def _firsts(corpus: Corpus, keys: UInt64s) -> dict[int, Place]:
    """The documents with some keys."""
    found = dict[int, Place]()
    for name, split in corpus.splits.items():
        assert isinstance(split, FlatTokens)
        numbers = split.by_keys(keys)
        found |= {place.key: place for place in places_of(corpus, name, numbers[numbers >= 0].tolist()) or ()}
    return found


def near_lines(found: JsonFacts) -> Iterator[str]:
    """Near-duplicates for people."""
    fate = "left out" if found["policy"]["action"] == "drop" else "kept"
    yield f"near-duplicates, {fate}, from a similarity of {found['policy']['threshold']:g} on"
    rows = [["source", "documents", "near-duplicates", "share", "clusters", "largest"], *map(near_row, found["by_source"])]
    yield from terminal.table(rows, "<>>>>>")


def near_row(of: JsonFacts) -> list[str]:
    """The counts of a source: a row of a table."""
    read, near, clusters, largest = (terminal.number(of[name]) for name in ("read", "near_duplicates", "clusters", "largest"))
    return [of["name"], read, near, terminal.percent(of["share"]), clusters, largest]


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
    same = len(commonprefix([one, other]))  # noqa: RUF071  of texts
    begin = one.rfind(" ", 0, max(same - LEAD_CHARACTERS, 0)) + 1
    words = [re.findall(r"\s+|\S+", _cut(text, begin)) for text in (one, other)]
    parts: tuple[Parts, Parts] = ([], [])
    for kind, *ends in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for k, (low, high) in enumerate((ends[:2], ends[2:])):
            if high > low:
                parts[k].append(("".join(words[k][low:high]), kind != "equal"))
    return parts
