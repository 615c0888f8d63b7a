"""Progress on a terminal: a line that is brought up to date; elsewhere a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flat_tokens.tools.terminal import bar, duration, line, plural, speed
from flows.watch.outages import is_gone
from tasks.progress import Progress, meter, repeating

if TYPE_CHECKING:
    from rich.text import Text

EVERY_SECONDS = 10.0
TELLING_SECONDS = 2.0
"""A server that answers has the rest of a run before."""
SHORTEST_BAR, LONGEST_BAR = 8, 30
STYLES = {"name": "bold", "stage": "cyan", "bar": "green", "share": "bold", "left": "bold"}
"""Of the parts of a line that have one. Colours are left out as NO_COLOR and TERM say."""


@contextlib.contextmanager
def display(name: str, live: bool, *, has_server: bool = False) -> Iterator[None]:
    """Show the progress of what is called *name* while the block runs. *live*: on a terminal. *has_server*: a Prefect server
    watches.
    """

    def show() -> None:
        print(progress_line(meter.read(), name, has_server=has_server), file=sys.stderr, flush=True)

    if not live:
        with repeating(EVERY_SECONDS, show, "lines"):
            yield
        return
    from rich.console import Console  # only a terminal needs it
    from rich.live import Live

    console = Console(stderr=True)
    # It takes standard error over meanwhile: what is logged goes above the line.
    with Live(
        get_renderable=lambda: coloured_line(name, console.width, has_server=has_server),
        console=console,
        refresh_per_second=8,
        transient=True,
    ) as shown:
        shown.refresh()
        yield


def coloured_line(name: str, width: int, *, has_server: bool = False) -> Text:
    """The line of progress at this moment, on a terminal of *width* columns."""
    from rich.text import Text  # as above

    columns = width - len("^C")  # which the terminal writes after it
    parts = fitting(meter.read(), name, columns, has_server=has_server)
    text = Text("  ", no_wrap=True, overflow="crop", end="").join(Text(text, STYLES.get(kind, "")) for kind, text in parts)
    text.truncate(columns)
    return text


def progress_line(now: Progress, name: str = "", *, has_server: bool = False) -> str:
    """Such as ``web  tokenize   45%  12,345 documents  6,789,012 tokens  211 MB/s  0:12 left``."""
    return "  ".join(text for _, text in _parts(now, name, has_server))


def fitting(now: Progress, name: str, columns: int, *, has_server: bool = False) -> list[tuple[str, str]]:
    """The parts of a progress line, each with its kind, with a bar, and without the counts that do not fit into *columns*
    columns.
    """
    parts = _parts(now, name, has_server)
    least = SHORTEST_BAR + 2 if now.total else 0
    for counts in [part for part in parts if part[0] == "count"]:
        if _width(parts) + least > columns:
            parts.remove(counts)
    room = min(columns - _width(parts) - 2, LONGEST_BAR)
    if now.total and room >= SHORTEST_BAR:
        place = next(i for i, (kind, _) in enumerate(parts) if kind == "share")
        parts.insert(place, ("bar", f"{bar(now.done.bytes / now.total, room):{room}}"))
    return parts


def _width(parts: list[tuple[str, str]]) -> int:
    return sum(len(text) for _, text in parts) + 2 * (len(parts) - 1)


def _parts(now: Progress, name: str, has_server: bool) -> list[tuple[str, str]]:
    """The parts of a line with their kinds; those that may be left out are counts, the least important first."""
    parts = [("name", line(name))] if name else []
    parts.append(("stage", f"{now.stage:9}"))
    if now.total:
        parts.append(("share", f"{min(now.done.bytes / now.total, 1):4.0%}"))
    parts += [("count", text) for text in progress_counts(now)]
    if is_gone():  # tasks that are to begin wait for it
        parts.append(("count", "the Prefect server is away"))
    if now.work and now.seconds > 0.2:
        parts.append(("count", speed(now.rate)))
        if now.left is not None:
            parts.append(("left", time_left(now)))
    else:
        parts.append(("left", duration(now.seconds)))
        if has_server and now.stage == "done" and now.seconds > TELLING_SECONDS:
            parts.append(("count", "telling the Prefect server"))
    return parts


def time_left(now: Progress) -> str:
    """Such as ``0:12 left``, or ``~0:12 left`` before the rate is steady; empty if it is not known."""
    return "" if now.left is None else f"{'~' if now.recent is None else ''}{duration(now.left)} left"


def progress_counts(now: Progress) -> list[str]:
    """Documents, tokens and faults of a stage, as far as it counts them."""
    done = now.done
    counts = ((done.documents, "document"), (done.tokens, "token"), (done.faults, "fault"))
    return [plural(count, noun) for count, noun in counts if count]
