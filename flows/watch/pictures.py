"""Pictures for the Prefect UI: SVG as images in Markdown, on a ground of their own, so that they are seen in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from flat_tokens.tools.terminal import duration, speed, visible

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
