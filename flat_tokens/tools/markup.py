"""Parts of the pages that tools write: one file each, without other files, scripts or network access.

Names and texts in them come from strangers: all are escaped, and by the template's policy even others could load and run nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from flat_tokens.tools import terminal

Rows = Sequence[Sequence[str]]


def page(*, title: str, kind: str, name: str, path: str, figures: str, sections: Iterable[str], footer: str) -> str:
    """A whole page. *figures*, *sections* and *footer* are HTML, empty sections are left out; the rest is text."""
    own = files("flat_tokens.tools")
    html = Template((own / "report.html").read_text("utf-8")).substitute(
        style=(own / "report.css").read_text("utf-8"),
        title=escape(title),
        kind=escape(kind),
        name=escape(name),
        path=escape(path),
        figures=figures,
        sections="\n".join(filter(None, sections)),
        footer=footer,
    )
    return terminal.visible(html)


def figures(found: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: label, value, and what is below it."""
    cells = (f"<dt>{label}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd>" for label, value, more in found)
    return f'<dl class="figures">{"".join(f"<div>{cell}</div>" for cell in cells)}</dl>'


def large(count: int) -> tuple[str, str]:
    """A count in few digits, and all of its digits if these are others."""
    return (f"{count:,}", "") if count < 1_000_000 else (terminal.short(count), f"{count:,}")


def facts(found: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in found)
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def share(of_all: float, length: float) -> str:
    return f'<td class="share of" style="--share:{length:.4f}">{terminal.percent(of_all)}</td>'


def numbers(head: Sequence[str], rows: Rows, label: str = "Show the numbers", text: Iterable[int] = ()) -> str:
    return f"<details><summary>{label}</summary>{table(head, rows, text)}</details>"


def table(head: Sequence[str], rows: Rows, text: Iterable[int] = ()) -> str:
    kinds = ["text" if k == 0 or k in set(text) else "" for k in range(len(head))]
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{css_class(kind)}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return wide(f'aria-label="{escape(", ".join(head))}"', zip(head, kinds, strict=True), body)


def wide(label: str, head: Iterable[tuple[str, str]], body: str) -> str:
    """A table in a region of that label that scrolls by itself; *head*: the names and the classes of its columns."""
    cells = "".join(f'<th scope="col"{css_class(kind)}>{escape(name)}</th>' for name, kind in head)
    return (
        f'<div class="wide" tabindex="0" role="region" {label}><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def css_class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def section(name: str, title: str, inside: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{inside}</section>'
