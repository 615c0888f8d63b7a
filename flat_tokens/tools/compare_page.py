"""The page of ``flat-tokens compare --html``. Equal comparisons give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from flat_tokens.tools import markup, terminal

WIDTH, LABEL = 400, 150
"""Width of a picture, and room in it after the longest bar for its label, in units of about a pixel of a phone."""
BAR, GROUP = 16, 20
"""Heights of a bar with its distance, and of a group's name."""
GROUPS_DRAWN = 24


def page(found: Mapping[str, Any], names: Sequence[str], head: Sequence[str], totals: markup.Rows, note: str) -> str:
    """The page as one HTML document. *names*: of the versions; *head* and *totals*: the table of all of them; *note*: a sentence
    below it.
    """
    below = f'<p class="soft">{escape(note)}</p>' if note else ""
    sections = [markup.section("versions", "Versions", markup.table(head, totals) + below)]
    for number, (kind, groups) in enumerate(found["by"].items()):
        sections.append(markup.section(f"by-{number}", f"Bytes per token by {escape(kind)}", _groups(kind, names, groups)))
    places = [(name, version["path"]) for name, version in zip(names, found["versions"], strict=True)]
    sections.append(markup.section("origin", "Where they are", markup.facts(places)))
    return markup.page(
        title="comparison of tokenizers",
        kind="comparison of tokenizers",
        name=", ".join(names),
        path=found["split"] or "all splits",
        figures="",
        sections=sections,
        footer=f"Counted from all "
        f"{terminal.plural(sum(version['token_count'] for version in found['versions']), 'token')}, none of them sampled. "
        "Written by <code>flat-tokens compare</code>; this page loads nothing.",
    )


def _groups(kind: str, names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> str:
    """A picture of the groups of a kind, and their numbers."""
    rows = [
        [group["name"], f"{group['text_bytes'] or group['of'][0]['token_bytes']:,}"]
        + [f"{of['token_count']:,}" for of in group["of"]]
        + ["-" if of["byte_token_share"] is None else terminal.percent(of["byte_token_share"]) for of in group["of"]]
        for group in groups
    ]
    head = [kind, "bytes of text", *(f"tokens, {name}" for name in names), *(f"byte tokens, {name}" for name in names)]
    more = f"The {GROUPS_DRAWN} with most text of {len(groups):,}. " if len(groups) > GROUPS_DRAWN else ""
    picture = _bars(f"Bytes per token by {kind}", names, groups[:GROUPS_DRAWN])
    note = f'<p class="note">{more}Longer bars: fewer tokens for the same text</p>'
    return f"<figure>{note}{picture}{markup.numbers(head, rows)}</figure>"


def _bars(about: str, names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> str:
    """Bars of bytes per token: a block for each group, in it a bar for each version, with its name and value."""
    most = max((of["bytes_per_token"] or 0.0 for group in groups for of in group["of"]), default=0.0) or 1.0
    shapes, y = list[str](), 0
    for group in groups:
        y += GROUP
        shapes.append(f'<text x="0" y="{y - 5}">{escape(str(group["name"]))}</text>')
        for k, (name, of) in enumerate(zip(names, group["of"], strict=True)):
            value = of["bytes_per_token"] or 0.0
            length, shade = value / most * (WIDTH - LABEL), 1 - 0.6 * k / max(len(names) - 1, 1)
            shapes.append(
                f'<rect class="bar" x="0" y="{y}" width="{length:.1f}" height="{BAR - 3}" fill-opacity="{shade:.2f}">'
                f"<title>{escape(name)}: {value:.3f}</title></rect>"
                f'<text x="{length + 5:.1f}" y="{y + 11}">{value:.2f} {escape(name)}</text>'
            )
            y += BAR
        y += 6
    return f'<svg viewBox="0 0 {WIDTH} {max(y, 1)}" role="img" aria-label="{escape(about)}">{"".join(shapes)}</svg>'
