"""Progress on a terminal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from flat_tokens.tools.terminal import duration
from tasks.progress import Progress, meter, repeating


@contextlib.contextmanager
def display(live: bool) -> Iterator[None]:
    """Show progress on a terminal while the block runs."""
    if not live:
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(
        get_renderable=lambda: Text(progress_line(meter.read())),
        console=Console(stderr=True),
        refresh_per_second=8,
        transient=True,
    ):
        yield


@contextlib.contextmanager
def log_progress(every: float = 10.0) -> Iterator[None]:
    """Log progress now and then while the block runs."""

    def log() -> None:
        logging.getLogger("flows").info(progress_line(meter.read()))

    with repeating(every, log, "log"):
        yield


def progress_line(now: Progress) -> str:
    """Such as ``tokenize  45%  12,345 documents  6,789,012 tokens  211 MB/s  0:12 left``."""
    done, parts = now.done, [f"{now.stage:9}"]
    if now.total:
        parts.append(f"{min(done.bytes / now.total, 1):4.0%}")
    parts += progress_counts(now)
    if done.bytes and now.seconds > 0.2:
        parts.append(f"{now.rate / 1e6:,.0f} MB/s")
        if now.left is not None:
            parts.append(f"{duration(now.left)} left")
    else:
        parts.append(duration(now.seconds))
    return "  ".join(parts)


def progress_counts(now: Progress) -> list[str]:
    """Documents, tokens and faults of a stage, as far as it counts them."""
    done = now.done
    counts = [(done.documents, "documents"), (done.tokens, "tokens"), (done.faults, "fault" if done.faults == 1 else "faults")]
    return [f"{count:,} {noun}" for count, noun in counts if count]
