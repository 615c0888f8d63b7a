"""Outages of the Prefect server: one line when it stops answering and one when it is back, in place of the messages of each
part of Prefect.

While the server does not answer, Prefect's heartbeats, events, observers and workers each log that, with tracebacks, again and
again. Warnings of theirs are dropped then. Those of runs and tasks are not: they are about the work.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from flat_tokens.tools.terminal import duration, one_line

logger = logging.getLogger(__name__)

TOLD_ELSEWHERE = "FLAT_TOKENS_OUTAGES_TOLD"
"""Environment variable, 1 where another process of this terminal reports outages: make serve, for its workers and their runs."""

OF_PREFECT = ("prefect", "asyncio", "httpx", "websockets")
OF_THE_WORK = ("prefect.flow_runs", "prefect.task_runs")
"""Loggers of runs. ``prefect.flow_runs.worker`` is not one of theirs."""

LONG_AFTER = "prefect._internal"
"""Its services say at the end of a run that they failed during an outage, however long ago that was."""

ASK_SECONDS = 2.0
"""Between two looks at a server that is gone."""
ANSWER_SECONDS = 2.0
"""A server that takes longer to answer is gone."""
LATE_SECONDS = 15.0
"""Seconds after an outage during which parts of Prefect notice that there was one."""


def why_unreachable(url: str) -> str | None:
    """The reason why an API does not answer at a URL; None if it answers, or if that is unknown."""
    import urllib.error  # only a server needs them
    import urllib.request

    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=ANSWER_SECONDS).close()  # noqa: S310  an operator's setting
    except urllib.error.HTTPError as error:
        with error:  # it has the connection
            return one_line(error) if error.code in (502, 503, 504) else None
    except urllib.error.URLError as error:
        return one_line(error.reason) if isinstance(error.reason, ConnectionError | TimeoutError) else None
    except (ConnectionError, TimeoutError) as error:
        return one_line(error)
    except (OSError, ValueError):
        return None
    return None


class Outages(logging.Filter):
    """Watches a server when something warns. As a filter of handlers, it drops what Prefect says of an outage."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._lock = threading.Lock()
        self.is_gone = self._was_gone = False
        """Whether the server is known to be away, without a request."""
        self._back = -LATE_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        name = record.name
        is_of_prefect = name.startswith(OF_PREFECT) and (name == "prefect.flow_runs.worker" or not name.startswith(OF_THE_WORK))
        if record.levelno < logging.WARNING or not is_of_prefect:
            return True
        return not self.is_on() and not (self._was_gone and name.startswith(LONG_AFTER))

    def is_on(self) -> bool:
        """Whether the server is away, or was a moment ago. The first call while it is away starts the reports of the outage and
        of its end.
        """
        with self._lock:
            if self.is_gone or time.monotonic() < self._back + LATE_SECONDS:
                return True
            why = why_unreachable(self._url)
            if why is not None:
                self.is_gone = self._was_gone = True
                _tell("The Prefect server at %s does not answer (%s). What can, goes on without it", self._url, why)
                threading.Thread(target=self._wait, name="outage", daemon=True).start()
            return self.is_gone

    def _wait(self) -> None:
        since = time.monotonic()
        while why_unreachable(self._url) is not None:
            time.sleep(ASK_SECONDS)
        self.is_gone, self._back = False, time.monotonic()
        _tell("The Prefect server at %s answers again, after %s", self._url, duration(self._back - since))


def _tell(message: str, *arguments: str) -> None:
    if os.environ.get(TOLD_ELSEWHERE) != "1":
        logger.warning(message, *arguments)


_known: dict[str, Outages] = {}


def is_gone() -> bool:
    """Whether a server that is watched is known to be away."""
    return any(one.is_gone for one in list(_known.values()))


def outages() -> Outages:
    """The watch over the server that Prefect is set up for, now a filter of the handlers that Prefect logs to a terminal with."""
    # make serve reports its own server, and does not wait for Prefect.
    from prefect.logging.configuration import ensure_logging_setup
    from prefect.settings import PREFECT_API_URL

    ensure_logging_setup()
    url = PREFECT_API_URL.value() or ""
    found = _known.setdefault(url, Outages(url))
    for name in (None, "prefect._internal"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(found)  # once, however often
    return found
