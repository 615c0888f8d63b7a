"""The report of ``flat-tokens stats --html``: one page without other files, scripts or network access.

It draws the summary that ``--json`` prints. Equal summaries give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from flat_tokens.tools import terminal

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 27, 12, 34
"""Sizes of a plot and the margins around its axes, in units of about a pixel of a phone."""

COUNTS = (("tokens", "token_count"), ("sequences", "seq_count"), ("of these empty", "empty_seq_count"))
LENGTHS = (
    ("mean length", "mean"),
    ("shortest", "min"),
    *((f"{percent} % up to", f"p{percent}") for percent in (1, 5, 25)),
    ("median", "p50"),
    *((f"{percent} % up to", f"p{percent}") for percent in (75, 95, 99)),
    ("longest", "max"),
)
"""Rows of the table of lengths: their names, and their keys in a summary."""


def page(summary: Mapping[str, Any]) -> str:
    """The report as one HTML document."""
    dataset = summary["dataset"]
    style = (files("flat_tokens.tools") / "report.css").read_text("utf-8")
    name = dataset["name"] or dataset["path"].rstrip("/").rpartition("/")[2] or dataset["path"]
    version = f" · version {dataset['version']}" if dataset["version"] else ""
    body = [
        f'<header><div class="soft">{escape(dataset["kind"] + version)}</div><h1>{escape(name)}</h1>'
        f'<div class="path">{escape(dataset["path"])}</div>{_key_figures(summary)}</header>',
        "<main>",
        _lengths(summary),
        _sources(summary),
        _vocabulary(summary),
        _frequent(summary),
        _origin(dataset),
        "</main>",
        f"<footer>Counted from all {summary['total']['token_count']:,} tokens, none of them sampled. Written by "
        "<code>flat-tokens stats</code>; this page loads nothing.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Token text and names come from strangers: even unescaped they could load and run nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(name)}: token statistics</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _key_figures(summary: Mapping[str, Any]) -> str:
    total, dataset = summary["total"], summary["dataset"]
    figures = [("Tokens", *_large(total["token_count"])), ("Sequences", *_large(total["seq_count"]))]
    if total["lengths"]["p50"] is not None:
        figures.append(("Median length", f"{total['lengths']['p50']:,}", f"mean {total['lengths']['mean']:,.0f}"))
    if (rate := bytes_per_token(summary)) is not None:
        figures.append(("Bytes per token", f"{rate[0]:.2f}", f"{terminal.size(rate[1])} of text"))
    if use := total["vocabulary_use"]:
        figures.append(
            ("Vocabulary used", terminal.percent(use["used"] / max(use["size"], 1)), f"{use['used']:,} of {use['size']:,}")
        )
    figures.append(("Size", terminal.size(dataset["byte_count"]), dataset["layout"] or ""))
    cells = (
        f"<div><dt>{label}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>" for label, value, more in figures
    )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _large(count: int) -> tuple[str, str]:
    """A count in few digits, and all of its digits if these are others."""
    return (f"{count:,}", "") if count < 1_000_000 else (terminal.short(count), f"{count:,}")


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
    table = _table(["", *splits], rows)
    return (
        '<section aria-labelledby="lengths"><h2 id="lengths">Document lengths</h2>'
        f'<p class="soft">In tokens, on a scale of doublings. {escape(note)}</p>'
        '<p class="key"><span><i class="area"></i>share of sequences</span><span><i class="second"></i>share of tokens</span></p>'
        f'<div class="pair">{figures}</div><div class="lengths">{table}</div></section>'
    )


WIDTHS = {1: "quarter of a doubling", 2: "half of a doubling", 4: "doubling"}


def _length_figure(name: str, part: Mapping[str, Any]) -> str:
    # A few sequences in narrow bins would show only noise.
    merged = 1 if part["seq_count"] >= 5000 else 2 if part["seq_count"] >= 500 else 4
    bins = _bins(part, merged)
    # Short lengths are whole numbers, so bins differ in width: the plot shows the share in a bin of the full width.
    edges = [(-1.0 if found["from"] == 0 else math.log2(found["from"]), math.log2(found["to"] + 1)) for found in bins]
    low, high = math.floor(edges[0][0]), math.ceil(edges[-1][1])
    of_sequences = [
        found["seq_count"] / part["seq_count"] / (b - a) * merged / 4 for found, (a, b) in zip(bins, edges, strict=True)
    ]
    all_tokens = max(part["token_count"], 1)
    of_tokens = [found["token_count"] / all_tokens / (b - a) * merged / 4 for found, (a, b) in zip(bins, edges, strict=True)]
    ticks = _ticks(max(*of_sequences, *of_tokens))
    x, y = _scale(low, high, LEFT, WIDTH - RIGHT), _scale(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    step = max(1, math.ceil((high - max(low, 0)) / 5.5))
    marks: list[tuple[float, str]] = [(k, f"{2**k:,}") for k in range(max(low, 0), high + 1, step)]
    if low < 0:
        marks = [(-0.5, "0"), *(mark for mark in marks if mark[0] > 0)]
    shape = "".join(
        f'<rect class="area" x="{x(a):.1f}" y="{y(share):.1f}" width="{max(x(b) - x(a) - 0.6, 0.6):.1f}" '
        f'height="{y(0) - y(share):.1f}"><title>{_span(found)} tokens: {found["seq_count"]:,} sequences, '
        f"{found['token_count']:,} tokens</title></rect>"
        for found, (a, b), share in zip(bins, edges, of_sequences, strict=True)
        if found["seq_count"]
    )
    outline = " ".join(
        f"{x(a):.1f},{y(share):.1f} {x(b):.1f},{y(share):.1f}" for (a, b), share in zip(edges, of_tokens, strict=True)
    )
    svg = _svg(
        f"Lengths of the sequences of {name}",
        f"From {part['lengths']['min']:,} to {part['lengths']['max']:,} tokens, median {part['lengths']['p50']:,}.",
        _axes([(y(tick), f"{100 * tick:g} %") for tick in ticks], [(x(k), label) for k, label in marks], "tokens in a sequence")
        + shape
        + f'<polyline class="line second" points="{outline}"/>',
    )
    rows = [[_span(found), f"{found['seq_count']:,}", f"{found['token_count']:,}"] for found in bins]
    return (
        f"<figure><figcaption>{escape(name)}: {terminal.plural(part['seq_count'], 'sequence')}</figcaption>"
        f'<p class="note">Share in each {WIDTHS[merged]} of the length</p>{svg}'
        f"{_numbers(['tokens', 'sequences', 'tokens in them'], rows)}</figure>"
    )


def _bins(part: Mapping[str, Any], merged: int) -> list[dict[str, int]]:
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
    return f"{found['from']:,}" if found["from"] == found["to"] else f"{found['from']:,} to {found['to']:,}"


def _sources(summary: Mapping[str, Any]) -> str:
    total = summary["total"]
    if not total["sources"] or not total["token_count"]:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(source["name"])}</th><td class="spare">{source["files"]:,}</td>'
        f"<td>{source['seq_count']:,}</td><td>{source['token_count']:,}</td>"
        f'<td class="spare">{"" if source["bytes_per_token"] is None else format(source["bytes_per_token"], ".3f")}</td>'
        f"{_share(share, share)}</tr>"
        for source in total["sources"]
        for share in [source["token_count"] / total["token_count"]]
    )
    return (
        '<section aria-labelledby="sources"><h2 id="sources">Tokens by source</h2><div class="wide" tabindex="0" role="region" '
        'aria-labelledby="sources"><table><thead><tr><th scope="col" class="text">source</th>'
        '<th scope="col" class="spare">files</th>'
        '<th scope="col">sequences</th><th scope="col">tokens</th><th scope="col" class="spare">bytes per token</th>'
        '<th scope="col" class="of">of all</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _vocabulary(summary: Mapping[str, Any]) -> str:
    total, use = summary["total"], summary["total"]["vocabulary_use"]
    if not total["rank_frequency"]:
        return ""
    facts = []
    if summary["text_bytes"] is not None and (rate := bytes_per_token(summary)) is not None:
        facts.append(("Bytes per token", f"{rate[0]:.3f} ({summary['text_bytes']:,} bytes of text, as the build recorded them)"))
    for name, part in summary["splits"].items():
        if part["bytes_per_token"] is not None:
            facts.append((f"{name}, decoded", f"{part['bytes_per_token']:.3f} ({part['decoded_bytes']:,} bytes)"))
    if total["distinct_ids"] is not None:
        facts.append(("Different ids", f"{total['distinct_ids']:,}, the largest {total['max_token_id']:,}"))
    chips = ""
    if use:
        share = terminal.percent(use["unused"] / use["size"]) if use["size"] else ""
        facts.append(("Never used", f"{use['unused']:,} of {use['size']:,} ids ({share})"))
        if use["outside"]:
            facts.append(("Not in the vocabulary", f"{use['outside']:,} different ids"))
        if use["unused_examples"]:
            items = (f"<li><code>{escape(one['text'] or str(one['id']))}</code></li>" for one in use["unused_examples"])
            chips = f'<h3 style="margin-top:20px">Some that never occur</h3><ul class="chips">{"".join(items)}</ul>'
    figures = _rank_figure(total) + (_use_figure(use) if use else "")
    return (
        '<section aria-labelledby="vocabulary"><h2 id="vocabulary">Vocabulary</h2>'
        f'{_facts(facts)}<div class="pair">{figures}</div>{chips}</section>'
    )


def _rank_figure(total: Mapping[str, Any]) -> str:
    points = total["rank_frequency"]
    right, top = max(math.log10(points[-1][0]), 1), max(math.ceil(math.log10(points[0][1])), 1)
    x, y = _scale(0, right, LEFT, WIDTH - RIGHT), _scale(0, top, HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{x(math.log10(rank)):.1f},{y(math.log10(count)):.1f}" for rank, count in points)
    step = max(1, math.ceil(top / 5))
    rows = [(y(k), terminal.short(10**k)) for k in range(0, top + 1, step)]
    columns = [(x(k), terminal.short(10**k)) for k in range(math.floor(right) + 1)]
    svg = _svg(
        "Tokens by rank and frequency",
        f"The most frequent token occurs {points[0][1]:,} times; number {points[-1][0]:,}, the last, {points[-1][1]:,} times.",
        _axes(rows, columns, "rank") + f'<polyline class="line" points="{line}"/>',
    )
    shown = [[f"{rank:,}", f"{count:,}"] for rank, count in points[:: max(1, len(points) // 24)]]
    return (
        '<figure><figcaption>Frequency by rank</figcaption><p class="note">Occurrences of a token; both scales logarithmic</p>'
        f"{svg}{_numbers(['rank', 'occurrences'], shown)}</figure>"
    )


def _use_figure(use: Mapping[str, Any]) -> str:
    ranges = use["by_id"]
    last = ranges[-1]["to"] + 1
    x, y = _scale(0, last, LEFT, WIDTH - RIGHT), _scale(0, 1, HEIGHT - BOTTOM, TOP)
    shape = "".join(
        f'<rect class="area" x="{x(found["from"]):.1f}" y="{y(share):.1f}" '
        f'width="{max(x(found["to"] + 1) - x(found["from"]) - 0.6, 0.6):.1f}" height="{y(0) - y(share):.1f}">'
        f"<title>ids {_span(found)}: {found['used']:,} of {found['size']:,} used</title></rect>"
        for found in ranges
        if (share := found["used"] / max(found["size"], 1))
    )
    ticks = [tick for tick in _ticks(last, 5) if tick <= last]
    svg = _svg(
        "Use of the vocabulary by token id",
        f"{use['used']:,} of {use['size']:,} ids occur.",
        _axes([(y(k / 4), f"{k * 25} %") for k in range(5)], [(x(tick), terminal.short(tick)) for tick in ticks], "token id")
        + shape,
    )
    rows = [[_span(found), f"{found['size']:,}", f"{found['used']:,}"] for found in ranges]
    return (
        '<figure><figcaption>Ids that occur, by id</figcaption><p class="note">Share of each range of ids that is used at all</p>'
        f"{svg}{_numbers(['ids', 'in the vocabulary', 'used'], rows)}</figure>"
    )


def _frequent(summary: Mapping[str, Any]) -> str:
    top = summary["total"]["top_tokens"]
    if not top:
        return ""
    most, half = top[0]["share"], -(-len(top) // 2)
    tables = []
    for first, part in ((0, top[:half]), (half, top[half:])):
        rows = "".join(
            f'<tr><td class="soft">{rank}</td><td class="text">{_token(token)}</td><td>{token["id"]:,}</td>'
            f"<td>{token['count']:,}</td>{_share(token['share'], token['share'] / most)}</tr>"
            for rank, token in enumerate(part, first + 1)
        )
        if rows:
            tables.append(
                '<div class="wide" tabindex="0" role="region" aria-label="most frequent tokens"><table><thead><tr>'
                '<th scope="col">#</th><th scope="col" class="text">token</th><th scope="col">id</th><th scope="col">count</th>'
                f'<th scope="col" class="of">of all</th></tr></thead><tbody>{rows}</tbody></table></div>'
            )
    return (
        '<section aria-labelledby="frequent"><h2 id="frequent">Most frequent tokens</h2>'
        f'<div class="pair" style="margin-top:8px;row-gap:0">{"".join(tables)}</div></section>'
    )


def _token(token: Mapping[str, Any]) -> str:
    return "" if token["text"] is None else f"<code>{escape(token['text'])}</code>"


def _origin(dataset: Mapping[str, Any]) -> str:
    facts = []
    layout = ", ".join(filter(None, (dataset["layout"], dataset["stored"])))
    if layout:
        facts.append(("Layout", layout))
    facts.append(("Stored", f"{dataset['byte_count']:,} bytes in {terminal.plural(dataset['object_count'], 'file')}"))
    if tokenizer := dataset["tokenizer"]:
        revision = f" at {tokenizer['revision']}" if tokenizer["revision"] else ""
        facts.append(("Tokenizer", f"{tokenizer['name']}{revision}, digest {tokenizer['digest'] or 'unknown'}"))
    for label, key in (("Documents", "documents"), ("Policy", "policy"), ("Split", "split_rule")):
        if dataset[key]:
            plain = [(name, value) for name, value in dataset[key].items() if not isinstance(value, list)]
            facts.append((label, ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in plain)))
    sources = "".join(_source(source) for source in dataset["sources"])
    return f'<section aria-labelledby="origin"><h2 id="origin">What it was made of</h2>{_facts(facts)}{sources}</section>'


def _source(source: Mapping[str, Any]) -> str:
    revision = f" at {source['revision']}" if source["revision"] else ""
    rows = [[str(file["number"]), file["name"], f"{file['size']:,}", file["sha256"][:16]] for file in source["files"]]
    settings = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in source["settings"].items())
    files = f"{terminal.plural(len(rows), 'file')}, {terminal.size(source['byte_count'])}"
    return (
        f'<h3 style="margin-top:20px">{escape(source["name"])}</h3><p class="soft" style="margin:0;overflow-wrap:anywhere">From '
        f"{escape(source['from'] + revision)}: {files}. {escape(settings)}</p>"
        + _numbers(["#", "file", "bytes", "sha256"], rows, "Show the files", text={1, 3})
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {count:,}" for name, count in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in facts)
    return f'<dl class="facts">{cells}</dl>' if facts else ""


def _share(share: float, length: float) -> str:
    return f'<td class="share of" style="--share:{length:.4f}">{terminal.percent(share)}</td>'


def _numbers(
    head: Sequence[str], rows: Sequence[Sequence[str]], label: str = "Show the numbers", text: Iterable[int] = ()
) -> str:
    return f"<details><summary>{label}</summary>{_table(head, rows, text)}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Iterable[int] = ()) -> str:
    kinds = [' class="text"' if k == 0 or k in set(text) else "" for k in range(len(head))]
    cells = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    label = escape(", ".join(head))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _svg(title: str, description: str, inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}. {description}")}">{inside}</svg>'


def _axes(rows: Sequence[tuple[float, str]], columns: Sequence[tuple[float, str]], label: str) -> str:
    """Grid lines with their labels: *rows* at heights, *columns* at places from the left."""
    base = HEIGHT - BOTTOM
    lines = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        for at, text in rows
    ]
    lines += [
        f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
        f'<text x="{at:.1f}" y="{base + 16}" text-anchor="middle">{escape(text)}</text>'
        for at, text in columns
    ]
    lines.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">{escape(label)}</text>')
    return "".join(lines)


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
