"""The report of ``flat-tokens stats --html``: one page without other files, scripts or network access.

It draws the summary that ``--json`` prints. Equal summaries give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from flat_tokens.tools import markup, near_duplicates, terminal
from flat_tokens.tools.inspect import evaluated, origin_facts, source_facts

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 27, 12, 34
HALF_A_DIGIT = 3.4
"""Sizes of a plot and the margins around its axes, in units of about a pixel of a phone."""

Rows = Sequence[Sequence[str]]
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


def page(summary: Mapping[str, Any]) -> str:
    """The report as one HTML document."""
    dataset = summary["dataset"]
    name = dataset["name"] or dataset["path"].rstrip("/").rpartition("/")[2] or dataset["path"]
    version = f" · version {dataset['version']}" if dataset["version"] else ""
    near, vocabulary = near_duplicates.section(summary.get("near_duplicates")), (_vocabulary(summary), _frequent(summary))
    sections = (_lengths(summary), _sources(summary), _evaluation(dataset), near, *vocabulary, _origin(dataset))
    return markup.page(
        title=f"{name}: token statistics",
        kind=dataset["kind"] + version,
        name=name,
        path=dataset["path"],
        figures=_key_figures(summary),
        sections=sections,
        footer=f"Counted from all {terminal.plural(summary['total']['token_count'], 'token')}, none of them sampled. "
        "Written by <code>flat-tokens stats</code>; this page loads nothing.",
    )


def _key_figures(summary: Mapping[str, Any]) -> str:
    total, dataset = summary["total"], summary["dataset"]
    figures = [("Tokens", *markup.large(total["token_count"])), ("Sequences", *markup.large(total["seq_count"]))]
    if total["lengths"]["p50"] is not None:
        figures.append(("Median length", f"{total['lengths']['p50']:,}", f"mean {total['lengths']['mean']:,.0f}"))
    if (rate := bytes_per_token(summary)) is not None:
        figures.append(("Bytes per token", f"{rate[0]:.2f}", f"{terminal.size(rate[1])} of text"))
    if use := total["vocabulary_use"]:
        share = terminal.percent(use["used"] / max(use["size"], 1))
        figures.append(("Vocabulary used", share, f"{use['used']:,} of {use['size']:,}"))
    figures.append(("Size", terminal.size(dataset["byte_count"]), dataset["layout"] or ""))
    return markup.figures(figures)


def bytes_per_token(summary: Mapping[str, Any]) -> tuple[float, int] | None:
    """Bytes of text for each token, and bytes of text: from the manifest, else from decoding. None if neither is known."""
    total = summary["total"]
    text_bytes = total["decoded_bytes"] if summary["text_bytes"] is None else summary["text_bytes"]
    return None if text_bytes is None or not total["token_count"] else (text_bytes / total["token_count"], text_bytes)


def _lengths(summary: Mapping[str, Any]) -> str:
    splits = {name: part for name, part in summary["splits"].items() if part["seq_count"]}
    if not splits:
        return ""
    rows = [
        *([label, *(f"{part[key]:,}" for part in splits.values())] for label, key in COUNTS),
        *([label, *(f"{part['lengths'][key]:,.0f}" for part in splits.values())] for label, key in LENGTHS),
    ]
    half = "; ".join(f"{part['lengths']['token_median']:,} in {name}" for name, part in splits.items() if part["token_count"])
    note = f"Half of all tokens are in sequences no longer than {half}." if half else ""
    figures = "".join(_length_figure(name, part) for name, part in splits.items())
    return markup.section(
        "lengths",
        "Document lengths",
        f'<p class="soft">In tokens, on a scale of doublings. {escape(note)}</p>'
        '<p class="key"><span><i class="area"></i>share of sequences</span><span><i class="second"></i>share of tokens</span></p>'
        f'<div class="pair">{figures}</div><div class="lengths">{markup.table(["", *splits], rows)}</div>',
    )


def _length_figure(name: str, part: Mapping[str, Any]) -> str:
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
    x, y = _scale(low, high, LEFT, WIDTH - RIGHT), _scale(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    step = max(1, math.ceil((high - max(low, 0)) / 5.5))
    marks: list[tuple[float, str]] = [(k, f"{2**k:,}") for k in range(max(low, 0), high + 1, step)]
    if low < 0:
        marks = [(-0.5, "0"), *(mark for mark in marks if mark[0] > 0)]
    shape = "".join(
        _column(
            x(a),
            x(b),
            y(share),
            (
                f"{_span(found)} tokens: {terminal.plural(found['seq_count'], 'sequence')}, "
                f"{terminal.plural(found['token_count'], 'token')}"
            ),
        )
        for found, (a, b), share in zip(bins, edges, of_sequences, strict=True)
        if found["seq_count"]
    )
    outline = " ".join(
        f"{x(a):.1f},{y(share):.1f} {x(b):.1f},{y(share):.1f}" for (a, b), share in zip(edges, of_tokens, strict=True)
    )
    lengths = part["lengths"]
    plot = _plot(
        (
            f"Lengths of the sequences of {name}. From {lengths['min']:,} to {terminal.plural(lengths['max'], 'token')}, "
            f"median {lengths['p50']:,}."
        ),
        [(y(tick), f"{100 * tick:g} %") for tick in ticks],
        [(x(k), label) for k, label in marks],
        "tokens in a sequence",
        shape + f'<polyline class="line second" points="{outline}"/>',
    )
    rows = [[_span(found), f"{found['seq_count']:,}", f"{found['token_count']:,}"] for found in bins]
    caption = f"{escape(name)}: {terminal.plural(part['seq_count'], 'sequence')}"
    numbers = markup.numbers(["tokens", "sequences", "tokens in them"], rows)
    return _figure(caption, f"Share in each {WIDTHS[merged]} of the length", plot + numbers)


def merged_bins(part: Mapping[str, Any], merged: int) -> list[dict[str, int]]:
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


def _sources(summary: Mapping[str, Any]) -> str:
    total = summary["total"]
    if not total["sources"] or not total["token_count"]:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(source["name"])}</th><td class="spare">{source["files"]:,}</td>'
        f"<td>{source['seq_count']:,}</td><td>{source['token_count']:,}</td>"
        f'<td class="spare">{"" if source["bytes_per_token"] is None else format(source["bytes_per_token"], ".3f")}</td>'
        f"{markup.share(share, share)}</tr>"
        for source in total["sources"]
        for share in [source["token_count"] / total["token_count"]]
    )
    head = {"source": "text", "files": "spare", "sequences": "", "tokens": "", "bytes per token": "spare", "of all": "of"}
    return markup.section("sources", "Tokens by source", markup.wide('aria-labelledby="sources"', head.items(), rows))


def _vocabulary(summary: Mapping[str, Any]) -> str:
    total, use = summary["total"], summary["total"]["vocabulary_use"]
    if not total["rank_frequency"]:
        return ""
    chips = ""
    if use and use["unused_examples"]:
        items = (f"<li><code>{escape(one['text'] or str(one['id']))}</code></li>" for one in use["unused_examples"])
        chips = f'<h3 style="margin-top:20px">Some that never occur</h3><ul class="chips">{"".join(items)}</ul>'
    figures = _rank_figure(total) + (_use_figure(use) if use else "")
    facts = markup.facts(vocabulary_facts(summary))
    return markup.section("vocabulary", "Vocabulary", f'{facts}<div class="pair">{figures}</div>{chips}')


def vocabulary_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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


def _rank_figure(total: Mapping[str, Any]) -> str:
    points = total["rank_frequency"]
    right, top = max(math.log10(points[-1][0]), 1), max(math.ceil(math.log10(points[0][1])), 1)
    x, y = _scale(0, right, LEFT, WIDTH - RIGHT), _scale(0, top, HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{x(math.log10(rank)):.1f},{y(math.log10(count)):.1f}" for rank, count in points)
    step = max(1, math.ceil(top / 5))
    (_, most), (last, least) = points[0], points[-1]
    plot = _plot(
        "Tokens by rank and frequency. "
        f"The most frequent token occurs {most:,} times; number {last:,}, the last, {terminal.plural(least, 'time')}.",
        [(y(k), terminal.short(10**k)) for k in range(0, top + 1, step)],
        [(x(k), terminal.short(10**k)) for k in range(math.floor(right) + 1)],
        "rank",
        f'<polyline class="line" points="{line}"/>',
    )
    shown = [[f"{rank:,}", f"{count:,}"] for rank, count in points[:: max(1, len(points) // 24)]]
    numbers = markup.numbers(["rank", "occurrences"], shown)
    return _figure("Frequency by rank", "Occurrences of a token; both scales logarithmic", plot + numbers)


def _use_figure(use: Mapping[str, Any]) -> str:
    ranges = use["by_id"]
    last = ranges[-1]["to"] + 1
    x, y = _scale(0, last, LEFT, WIDTH - RIGHT), _scale(0, 1, HEIGHT - BOTTOM, TOP)
    shape = "".join(
        _column(
            x(found["from"]), x(found["to"] + 1), y(share), f"ids {_span(found)}: {found['used']:,} of {found['size']:,} used"
        )
        for found in ranges
        if (share := found["used"] / max(found["size"], 1))
    )
    ticks = [tick for tick in _ticks(last, 5) if tick <= last]
    plot = _plot(
        f"Use of the vocabulary by token id. {use['used']:,} of {terminal.plural(use['size'], 'id')} occur.",
        [(y(k / 4), f"{k * 25} %") for k in range(5)],
        [(x(tick), terminal.short(tick)) for tick in ticks],
        "token id",
        shape,
    )
    rows = [[_span(found), f"{found['size']:,}", f"{found['used']:,}"] for found in ranges]
    numbers = markup.numbers(["ids", "in the vocabulary", "used"], rows)
    return _figure("Ids that occur, by id", "Share of each range of ids that is used at all", plot + numbers)


def _frequent(summary: Mapping[str, Any]) -> str:
    top = summary["total"]["top_tokens"]
    if not top:
        return ""
    most, half = top[0]["share"], -(-len(top) // 2)
    rows = [
        f'<tr><td class="soft">{rank}</td><td class="text">{text}</td><td>{token["id"]:,}</td>'
        f"<td>{token['count']:,}</td>{markup.share(token['share'], token['share'] / most)}</tr>"
        for rank, token in enumerate(top, 1)
        for text in ["" if token["text"] is None else f"<code>{escape(token['text'])}</code>"]
    ]
    head = {"#": "", "token": "text", "id": "", "count": "", "of all": "of"}
    halves = filter(None, ("".join(rows[:half]), "".join(rows[half:])))
    tables = "".join(markup.wide('aria-label="most frequent tokens"', head.items(), part) for part in halves)
    pair = f'<div class="pair" style="margin-top:8px;row-gap:0">{tables}</div>'
    return markup.section("frequent", "Most frequent tokens", pair)


def _evaluation(dataset: Mapping[str, Any]) -> str:
    reports = evaluated(dataset)
    if not reports:
        return ""
    rows = [
        [
            one.name,
            f"{one.documents:,}",
            terminal.percent(one.share),
            "" if one.questions is None else f"{one.questions:,}",
            one.step,
        ]
        for one in reports
    ]
    examples = [[one.name, line] for one in reports for line in one.lines()]
    shown = markup.numbers(["set", "example"], examples, "Show examples", text={1}) if examples else ""
    head = ["evaluation set", "documents with some of it", "of all read", "questions", "step"]
    return markup.section("evaluation", "Evaluation sets", markup.table(head, rows, {4}) + shown)


def _origin(dataset: Mapping[str, Any]) -> str:
    sources = "".join(_source(source) for source in dataset["sources"])
    return markup.section("origin", "What it was made of", markup.facts(origin_facts(dataset, digits=64)) + sources)


def _source(source: Mapping[str, Any]) -> str:
    rows = [[str(file["number"]), file["name"], f"{file['size']:,}", file["sha256"][:16]] for file in source["files"]]
    where, settings = source_facts(source)
    return (
        f'<h3 style="margin-top:20px">{escape(source["name"])}</h3><p class="soft" style="margin:0;overflow-wrap:anywhere">'
        f"From {escape(where)}. {escape(settings)}</p>"
        + markup.numbers(["#", "file", "bytes", "sha256"], rows, "Show the files", text={1, 3})
    )


def _figure(caption: str, note: str, inside: str) -> str:
    return f'<figure><figcaption>{caption}</figcaption><p class="note">{note}</p>{inside}</figure>'


def _column(left: float, right: float, top: float, title: str) -> str:
    """A column of a plot, from *top* down to its axis."""
    return (
        f'<rect class="area" x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 0.6, 0.6):.1f}" '
        f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{title}</title></rect>'
    )


def _plot(about: str, rows: Marks, columns: Marks, label: str, shapes: str) -> str:
    """A plot: shapes on grid lines with their labels, *rows* at heights and *columns* at places from the left."""
    base = HEIGHT - BOTTOM
    lines = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        for at, text in rows
    ]
    lines += [
        f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
        f'<text x="{min(at, WIDTH - HALF_A_DIGIT * len(text)):.1f}" y="{base + 16}" text-anchor="middle">{escape(text)}</text>'
        for at, text in columns
    ]
    lines.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">{escape(label)}</text>')
    inside = "".join(lines) + shapes
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(about)}">{inside}</svg>'


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
