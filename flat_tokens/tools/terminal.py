"""Text for terminals: tables, bars, numbers for people, colours if wanted. Names and texts may come from strangers: what
terminals obey, or Markdown takes for its own, is made harmless here.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flat_tokens.extras import extra

if TYPE_CHECKING:
    import argparse

    from flat_tokens.checker import CheckProgress

EIGHTHS = " ▏▎▍▌▋▊▉█"
RESET = "\x1b[0m"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
CLEAR = "\x1b[K"
MATCH = "\x1b[30;48;5;220m"

SECONDS_BETWEEN = 0.125

SHADES = tuple(f"\x1b[38;5;16;48;5;{shade}m" for shade in (152, 223, 151, 225, 189, 187))
"""Black on six pale backgrounds: neighbours differ, and the text can be read on dark and light terminals alike."""

VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Direction marks would show the tokens in another order than they have.
VISIBLE |= dict.fromkeys([0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD)
ONE_LINE = VISIBLE | {0x0A: 0x240A}
JSON_ESCAPES = {code: f"\\u{code:04x}" for code in VISIBLE if code > 0x1F}
MARKDOWN = ONE_LINE | str.maketrans({"`": "'", "|": r"\|", "<": "&lt;", ">": "&gt;", "\\": r"\\"})
IN_MARKDOWN = re.compile(f"[{re.escape(''.join(map(chr, MARKDOWN)))}]|\\](?=[(\\[])")
ONE = re.compile(
    r"(?<![\w.,:-])1 (bound|byte|character|chunk|column|crop|document|epoch|error|file|group|header|id|item|key|level|"
    r"line|message|number|object|package|pair|part|process|question|range|row|sample|second|sequence|shard|slice|source|step|stream|time|token|"
    r"value|version|window|worker)(?:es|s)\b"
)
"""One of something, with the noun of several."""
ERRNO = re.compile(r"\[Errno -?\d+\] ")
OWN_STYLES = re.compile(f"({'|'.join(map(re.escape, (RESET, BOLD, DIM, MATCH)))})")


def wants_color(when: str) -> bool:
    """Whether to colour: ``always``, ``never``, or on terminals unless NO_COLOR is set (``auto``)."""
    if when != "auto":
        return when == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, color: bool) -> str:
    return f"{style}{text}{RESET}" if color else text


def visible(text: str) -> str:
    """Text with pictures instead of the control characters that a terminal obeys."""
    return text.translate(VISIBLE)


def line(text: str, color: bool = False) -> str:
    """A text on one line of a terminal, whatever it holds; with *color*, the program's own styles stay."""
    return "".join(part if color and OWN_STYLES.fullmatch(part) else part.translate(ONE_LINE) for part in OWN_STYLES.split(text))


def markdown(value: Any) -> Any:
    """A text for Markdown, in which it stands for itself, between backticks, too; or all texts of a value of JSON. Ordinary names
    stay as they are.
    """
    if not IN_MARKDOWN.search(repr(value)):  # nearly all: a character that repr escapes is found as a backslash
        return value
    if isinstance(value, dict):
        return {markdown(key): markdown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(markdown, value))
    return re.sub(r"\](?=[(\[])", r"\]", value.translate(MARKDOWN)) if isinstance(value, str) else value


def show(options: argparse.Namespace, found: Any, lines: Iterable[str]) -> None:
    """Print a result: as JSON if that is wanted, else as *lines* for people. No name or text in it can move the terminal."""
    if options.json:
        print(json.dumps(found, indent=2, ensure_ascii=False).translate(JSON_ESCAPES))
        return
    color = wants_color(options.color)
    first, *others = [line(one, color) for one in lines] or [""]
    print("\n".join([first if RESET in first else styled(first, BOLD, color), *others]))


def shown(piece: bytes) -> str:
    """A token's bytes on one line, quoted: as text, or as bytes if they are not text by themselves."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)


def colored_tokens(pieces: Iterable[bytes]) -> Iterator[str]:
    """Tokens in alternating colours. A character of several tokens is shown with the last of them."""
    for i, text in enumerate(codecs.iterdecode(pieces, "utf-8", "replace")):
        shade = SHADES[i % len(SHADES)]
        # The colour ends before a line does: terminals would fill the rest of the line with it.
        yield shade + visible(text).replace("\n", f"⏎{RESET}\n{shade}") + RESET


def table(rows: Sequence[Sequence[str]], align: str, *, indent: int = 2) -> list[str]:
    """Rows as lines of columns; *align* has ``<`` or ``>`` for each column."""
    widths = [max((len(row[k]) for row in rows), default=0) for k in range(len(align))]
    padded = [[f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)] for row in rows]
    return [(" " * indent + "  ".join(row)).rstrip() for row in padded]


def bar(share: float, width: int) -> str:
    """A bar for a share of 1, in eighths of a character, or in whole ones if the terminal's encoding has no eighths."""
    eighths = round(min(max(share, 0), 1) * width * 8)
    try:
        EIGHTHS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#" * (-(-eighths // 8))
    if share > 0:
        eighths = max(eighths, 1)
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def width() -> int:
    """Columns to fill."""
    return max(min(shutil.get_terminal_size((100, 24)).columns, 110), 40)


def size(count: float) -> str:
    """Bytes for people, such as ``12 B`` or ``1.5 GB``."""
    power = 0
    while count >= 1000 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:,.1f} {' kMGT'[power]}B" if power else f"{count:,.0f} B"


def speed(rate: float) -> str:
    """Bytes a second for people, such as ``1.5 kB/s`` or ``211 MB/s``."""
    amount, unit = size(rate).split()
    return f"{amount.partition('.')[0] if len(amount) > len('99.9') else amount} {unit}/s"


def duration(seconds: float) -> str:
    """Such as ``0:12`` or ``1:02:03``."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


@contextlib.contextmanager
def progress(what: str, quiet: bool) -> Iterator[Callable[[CheckProgress], None] | None]:
    """Show the progress of the block in a line of the terminal. The function to call with it, or None if standard error is
    no terminal, or it is to be *quiet*.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    begun = shown = time.monotonic()

    def show(now: CheckProgress) -> None:
        nonlocal shown
        at = time.monotonic()
        if at - shown >= SECONDS_BETWEEN:
            shown = at
            print(f"\r{progress_line(what, now, at - begun)[: width() - 1]}{CLEAR}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(f"\r{CLEAR}", end="", file=sys.stderr, flush=True)


def progress_line(what: str, now: CheckProgress, seconds: float) -> str:
    """Such as ``verify   45%  2.1 GB of 4.7 GB  211 MB/s  0:12 left``."""
    share, rate = now.byte_count / now.of if now.of else 0, now.byte_count / max(seconds, 1e-3)
    parts = [what, f"{min(share, 1):4.0%}", f"{size(now.byte_count)} of {size(now.of)}", speed(rate)]
    if rate and now.of > now.byte_count:
        parts.append(f"{duration((now.of - now.byte_count) / rate)} left")
    return "  ".join(parts + ([plural(now.faults, "fault")] if now.faults else []))


def short(count: float) -> str:
    """A count in three digits and a letter."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.3g}T"


def span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def value_text(value: Any) -> str:
    """A value of a column for people."""
    return "(none)" if value is None else value if isinstance(value, str) else json.dumps(value)


def percent(share: float) -> str:
    """A share for people. Small ones are not shown as 0."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share:.1%}".replace("%", " %")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def source_called(name: str) -> str:
    """The name of a source in messages: its own, unless that is the one it has without a setting."""
    return "the source" if name == "source" else f"source {name!r}"


def plain(text: str) -> str:
    """A message without the numbers of the system's errors, and with one of something in the singular."""
    return ONE.sub(r"1 \1", ERRNO.sub("", text))


def one_line(error: BaseException) -> str:
    """The message of an error on one line, or the name of its type if it has no message."""
    return line(" ".join(plain(str(error)).split())) or type(error).__name__


def number(count: float | None) -> str:
    """A count, of floats with two digits after the point; nothing for one that is not known."""
    return "" if count is None else f"{count:,.2f}" if isinstance(count, float) else f"{count:,}"


FILTERS = {
    "digits": "{:,}".format,
    "point": "{:.1f}".format,
    **{function.__name__: function for function in (number, percent, plural, short, size, span, value_text)},
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
    return visible(_environment().get_template(template).render(values))
