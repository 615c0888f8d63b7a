"""Names and words by which people know runs in the Prefect UI. Nothing here waits for Prefect's import."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import PurePath

from flat_tokens.tools.terminal import size, speed
from flat_tokens.vocabulary import is_file_name
from flows.watch.outages import outages
from flows.watch.terminal import progress_counts, time_left
from tasks.config import BuildConfig
from tasks.progress import Progress

logger = logging.getLogger(__name__)

TAG = "flat-tokens"
"""Tag of all runs, by which the automations know them."""
UNCHANGED = "unchanged"
"""Tag of runs that have published nothing new. The UI's pages hide states whose names are not Prefect's."""
AWAITING_APPROVAL = "AwaitingApproval"
"""Name of the state that a flow returns whose version waits for a person; ``suspend`` replaces it."""
UI = "../.."
"""The UI from each of its pages of an artifact, a run or a deployment. There are two, one below /v2: links stay in theirs."""
WITHOUT_PROGRESS = ("start", "trial", "finalize", "clean up", "done")
"""Stages of the meter in which nothing is counted."""


def tags_of(config: BuildConfig) -> list[str]:
    """Tags by which people find the runs of a dataset."""
    return [f"dataset:{config.name}", f"tokenizer:{short(config.tokenizer.name)}"]


@contextlib.contextmanager
def logging_errors(what: str) -> Iterator[None]:
    """Log errors of the block instead of raising them: it only shows something."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the client, the network and the server have errors of their own
        log_not_shown(what, error)


def log_not_shown(what: str, error: Exception) -> None:
    """Log that something could not be shown, unless the server is away: that is reported as such."""
    if not outages().is_on():
        logger.warning("The %s could not be shown: %s", what, error)


def percent(now: Progress) -> float:
    """The percentage of a stage that is done; 0 if the total is unknown."""
    return round(100 * min(now.done.bytes / now.total, 1.0), 1) if now.total else 0.0


def describe(now: Progress, over: str | None = None) -> str:
    """Such as ``45%, 0:12 left: 12,345 documents, 2.1 GB of 4.7 GB at 211 MB/s``. The card it is on shows how it begins.
    The time that is left is not reported before it is known, nor of what is *over*: ``Stopped at 45%: ...``.
    """
    left = f", {time_left(now)}" if now.left is not None and not over else ""
    at = f"{over} at " if over else ""
    return f"{at}**{percent(now):.0f}%**{left}: {what_was_done(now, of_all=True) or ('nothing is done' if over else 'begun')}"


def what_was_done(now: Progress, *, of_all: bool = False) -> str:
    """The work of a stage, such as ``12,345 documents, 6,789,012 tokens, 2.1 GB (0.5 GB were stored) at 211 MB/s``, the rate of
    the part that was not stored. Empty if nothing was done.
    """
    parts = progress_counts(now)
    if now.done.bytes:
        of = f" of {size(now.total)}" if of_all and now.total else ""
        stored = f" ({size(now.done.stored)} were stored)" if now.done.stored else ""
        rate = f" at {speed(now.rate)}" if now.work else ""
        parts.append(f"{size(now.done.bytes)}{of}{stored}{rate}")
    return ", ".join(parts)


def short(tokenizer: str) -> str:
    """A tokenizer's name for people: a file's without its directories."""
    return PurePath(tokenizer).name if is_file_name(tokenizer) else tokenizer


def slug(text: str) -> str:
    """Text as an artifact's key: lowercase letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def all_done(one: Progress) -> str:
    """The work that was done in a stage that is over."""
    return what_was_done(one) or "there was nothing to do"
