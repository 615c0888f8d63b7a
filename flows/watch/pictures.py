"""Pictures for the Prefect UI: SVG as images in Markdown, on a ground of their own, so that they are seen in light and dark;
and the Markdown itself: blocks, tables, places, and text as it is.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import quote

from flat_tokens.tools.terminal import duration, speed, visible
from flat_tokens.tools.terminal import markdown as as_markdown

WIDTH, ROW, TEXT = 460, 40, 14
"""Units are pixels, fewer on a phone: letters must be read there, too."""
GROUND, INK, FAINT = "#ffffff", "#1f2933", "#64707d"
BAR, FAINT_BAR = "#2f6fde", "#b3bfcd"
COLORS = ("#2f6fde", "#d97706", "#0f9d76", "#a13fb8")
PLOT_HEIGHT, LEFT = 180, 70
LONGEST = 30
"""Letters of a name that are shown."""


class Bar(NamedTuple):
    """A bar with its name to the left above it, and its value and a remark to the right. ``before``: a faint bar on top of it, of
    what it is compared with.
    """

    name: str
    value: float
    text: str
    before: float | None = None


def bars(title: str, rows: Sequence[Bar]) -> str:
    """A picture of a bar for each row, as an image in Markdown; empty if there is nothing to compare."""
    largest = max((max(row.value, row.before or 0) for row in rows), default=0)
    if not largest:
        return ""
    parts, top = list[str](), 34
    for row in rows:
        name = row.name if len(row.name) <= LONGEST else row.name[: LONGEST - 1] + "…"
        parts += [_text(12, top + TEXT, name), _text(WIDTH - 12, top + TEXT, row.text, anchor="end")]
        top += 20
        for value, color in ((row.before, FAINT_BAR), (row.value, BAR)):
            if value is not None:
                width = max((WIDTH - 24) * value / largest, 1)
                parts.append(f'<rect x="12" y="{top}" width="{width:.1f}" height="10" fill="{color}"/>')
                top += 10
        top += ROW - 30
    return _image(title, top + 4, parts)


def lines(title: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """A picture of bytes a second over time, a line for each name, as an image in Markdown; empty if no line has two points."""
    drawn = [(name, points) for name, points in series if len(points) > 1]
    largest = max((value for _, points in drawn for _, value in points), default=0.0)
    if not largest:
        return ""
    end = max(second for _, points in drawn for second, _ in points)
    wide, bottom = WIDTH - LEFT - 14, 34 + PLOT_HEIGHT
    parts = [
        f'<path d="M{LEFT} 34V{bottom}H{WIDTH - 14}" fill="none" stroke="{FAINT}"/>',
        *(_text(LEFT - 6, 34 + TEXT + 16 * k, word, anchor="end") for k, word in enumerate(speed(largest).split())),
        _text(LEFT - 6, bottom, "0", anchor="end"),
        _text(WIDTH - 14, bottom + 18, duration(end), anchor="end"),
    ]
    for number, (name, points) in enumerate(drawn):
        color = COLORS[number % len(COLORS)]
        places = (f"{LEFT + wide * x / max(end, 0.001):.1f},{bottom - PLOT_HEIGHT * y / largest:.1f}" for x, y in points)
        parts += [
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="2"/>',
            _text(LEFT + 100 * number, bottom + 38, name, color=color),
        ]
    return _image(title, bottom + 48, parts)


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = INK) -> str:
    shown = escape(visible(text))
    return f'<text x="{x}" y="{y}" font-size="{TEXT}" text-anchor="{anchor}" fill="{color}">{shown}</text>'


def _image(title: str, height: int, parts: Sequence[str]) -> str:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif"><rect width="{WIDTH}" height="{height}" rx="6" fill="{GROUND}"/>'
        f'<text x="12" y="22" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>{"".join(parts)}</svg>'
    )
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def page(*blocks: str | list[str]) -> str:
    """Markdown of blocks, each a text or its lines, with an empty line between two. Empty blocks are left out."""
    return "\n\n".join("\n".join([block] if isinstance(block, str) else block) for block in blocks if block) + "\n"


def table(heads: str, rows: Iterable[Sequence[str | int]]) -> list[str]:
    """Lines of a table in Markdown. *heads* stand between bars; # is before that of a column of numbers."""
    columns = heads.split(" | ")
    return [
        f"| {heads.replace('#', '')} |",
        f"|{'|'.join('---:' if column.startswith('#') else '---' for column in columns)}|",
        *("|" + "".join(f"{f' {cell:,}' if isinstance(cell, int) else f' {cell}'.rstrip()} |" for cell in row) for row in rows),
    ]


def link(location: str) -> str:
    """A place in Markdown: a link if a browser can follow it, else the place itself."""
    scheme, _, path = quote(location, safe="/:@?&=+,~*#%").partition("://")
    match scheme:
        case "http" | "https":
            return f"[{as_markdown(location)}]({scheme}://{path})"
        case "hf" if repository := re.match(r"datasets/[^/@]+/[^/@]+", path):
            return f"[{as_markdown(location)}](https://huggingface.co/{repository[0]})"
        case "gs" | "gcs":
            return f"[{as_markdown(location)}](https://console.cloud.google.com/storage/browser/{path})"
        case "s3" | "s3a":
            bucket, _, prefix = path.partition("/")
            url = f"https://s3.console.aws.amazon.com/s3/buckets/{bucket}?prefix={prefix.rstrip('/')}/"
            return f"[{as_markdown(location)}]({url})"
    return code(location)


def code(text: str) -> str:
    """Text as it is, whatever it holds; no line of a table ends in it."""
    return f"`{as_markdown(text)}`"
