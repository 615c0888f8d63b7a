"""Pages that tools write, of the templates next to this module: one file each, without other files, scripts or network access.

Names and texts in them come from strangers: all are escaped, and by the page's policy even others could load and run nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from flat_tokens.extras import extra
from flat_tokens.tools import terminal


def number(count: float | None) -> str:
    """A count, of floats with two digits after the point; nothing for one that is not known."""
    return "" if count is None else f"{count:,.2f}" if isinstance(count, float) else f"{count:,}"


FILTERS = {
    "digits": "{:,}".format,
    "point": "{:.1f}".format,
    "number": number,
    "percent": terminal.percent,
    "plural": terminal.plural,
    "short": terminal.short,
    "size": terminal.size,
    "span": terminal.span,
    "value_text": terminal.value_text,
}


@functools.cache
def _environment() -> Any:
    jinja2 = extra("jinja2", "a page")
    loader = jinja2.PackageLoader("flat_tokens.tools")
    strict = jinja2.StrictUndefined
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=strict)
    made.filters |= FILTERS
    return made


def page(template: str, **values: Any) -> str:
    """A whole page. Equal values give equal bytes."""
    return terminal.visible(_environment().get_template(template).render(values))
