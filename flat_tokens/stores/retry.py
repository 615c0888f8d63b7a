"""Asking a store again what it may answer later: which errors pass, how long one waits, and when one gives up."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 180.0
"""No try begins later than this after the first one failed."""
FIRST_WAIT = 0.25
LONGEST_WAIT = 20.0
SILENCE_SECONDS = 30.0
"""A server that has sent nothing for so long will not answer."""

RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)

PASSING = frozenset(
    {
        "aiohttp.ClientConnectionError",
        "aiohttp.ClientPayloadError",
        "botocore.HTTPClientError",
        "botocore.IncompleteReadError",
        "botocore.ResponseParserError",
        "gcsfs.ChecksumError",
        "httpx.TransportError",
        "requests.ChunkedEncodingError",
        "requests.ConnectionError",
        "requests.ContentDecodingError",
        "requests.Timeout",
    }
)
"""Errors of the clients of stores: their package and their name, or that of a class above theirs."""


def persist(call: Callable[[], T], what: str, patience: float = PATIENCE_SECONDS) -> T:
    """What *call* returns, asked again while its errors are such as pass, for *patience* seconds at most.

    *call* must do no harm when it is done twice: an answer may have been lost, not the question. TimeoutError, naming *what*,
    where the store never answered; other errors as they are, at once.
    """
    failures, deadline = 0, 0.0
    while True:
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            now = time.monotonic()
            deadline = deadline or now + patience
            # At random, or all that were refused together would come back together.
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**failures) * random.uniform(0.5, 1.0)  # noqa: S311
            failures += 1
            if now + wait > deadline:
                raise TimeoutError(
                    f"{what}: no answer in {failures} tries ({brief(error)}). Run the same command again when the store answers."
                ) from error
            logger.warning("%s: %s; trying again in %.1f s", what, brief(error), wait)
            time.sleep(wait)


def may_pass(error: BaseException) -> bool:
    """Whether the same question may be answered later: busy servers, broken and silent connections. What is forbidden or not
    there, and what is wrong with a name or a certificate, stays so; but for fsspec, what a web server does not tell is not there.
    """
    if (status := status_of(error)) is not None:
        return status in RETRIED_STATUS
    passes = False
    for cause in causes(error):
        if isinstance(cause, ssl.SSLError):
            return False
        if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
            return False
        passes |= isinstance(cause, ConnectionError | TimeoutError) or getattr(cause, "retryable", None) is True
        passes |= any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in PASSING for kind in type(cause).__mro__)
    return passes


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error came from, as far as its client tells it."""
    for cause in causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):  # of botocore
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            # Others than gcsfs call a code what their parser thinks of half an answer.
            code = getattr(cause, "code", None) if type(cause).__module__.startswith("gcsfs.") else None
            found = getattr(response, "status_code", None) or getattr(cause, "status", None) or code
        if isinstance(found, int | str) and str(found).isdigit() and 100 <= int(found) < 600:
            return int(found)
    return None


def brief(error: BaseException) -> str:
    """What an error of a store or the network comes down to, in one line."""
    cause = list(causes(error))[-1]
    said = getattr(cause, "strerror", None) if isinstance(cause, OSError) else None
    return " ".join(str(said or cause).split()) or type(cause).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, from the outermost to the first."""
    seen: set[int] = set()
    cause: Any = error
    while isinstance(cause, BaseException) and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        # What the library for connections raises has its reason within.
        inner = cause.args[0] if cause.args else None
        cause = inner if isinstance(inner, BaseException) else getattr(cause, "reason", None) or cause.__cause__
