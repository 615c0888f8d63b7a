"""The one loop that retries: which errors are transient, how long it waits, and when it gives up."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from flat_tokens.options import digits

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 180.0
"""No try of a store begins later than this after the first one failed."""
FIRST_WAIT = 0.25
LONGEST_WAIT = 20.0
SILENCE_SECONDS = 30.0
"""A server that has sent nothing for this long will not answer."""

RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)

PASSING = {
    "aiohttp": {"ClientConnectionError", "ClientPayloadError"},
    "azure": {"ServiceRequestError", "ServiceResponseError"},
    "botocore": {"HTTPClientError", "IncompleteReadError", "ResponseParserError"},
    "gcsfs": {"ChecksumError"},
    "httpx": {"TransportError"},
    "httpx2": {"TransportError"},
    "requests": {"ChunkedEncodingError", "ConnectionError", "ContentDecodingError", "Timeout"},
    "urllib3": {"ProtocolError", "TimeoutError"},
}
"""Errors of the clients of stores: their package and their name, or that of a class above theirs."""


UNIDENTIFIED = {
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
}
"""Errors of the same: no credentials were found."""
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or gcloud auth application-default login; for a public bucket FSSPEC_GS_TOKEN=anon",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_CONNECTION_STRING, or az login",
}
"""Where the clients look for credentials, by the protocol of a URL."""


class Tries(NamedTuple):
    """How long to wait for an answer. The waits double from the first to the longest, and each is shortened at random by up to
    a half. The call is given up after this number of *attempts*, and *patience* seconds after the first failure.
    """

    first_wait: float
    longest_wait: float
    attempts: int | None = None
    patience: float | None = None


def retry(
    call: Callable[[], T],
    tries: Tries,
    tell: Callable[[Exception, float], None],
    *,
    passes: Callable[[Exception], bool] | None = None,
    give_up: Callable[[Exception, int], Exception] = lambda error, failures: error,
    asked_wait: Callable[[Exception], float] = lambda error: 0.0,
    progress: Callable[[], int] = int,
) -> T:
    """Call *call* and return its result. Retry after errors that pass, by default those of ``may_pass``.

    *call* must do no harm when it is done twice: an answer may have been lost, not the question. Each failure is handed to
    *tell*, with the seconds until the next try. *give_up* makes the error that is raised of the last one and the number of
    failures. *asked_wait*: how long the server wants us to wait. *progress*: a number whose growth makes the failures before it
    count no more.
    """
    failures, reached, deadline = 0, progress(), 0.0
    while True:
        try:
            return call()
        except Exception as error:
            now, before, reached = time.monotonic(), reached, progress()
            if reached > before or not failures:
                failures, deadline = 0, now + (math.inf if tries.patience is None else tries.patience)
            # At random, or all that were refused together would come back together.
            wait = min(tries.longest_wait, tries.first_wait * 2**failures) * random.uniform(0.5, 1.0)  # noqa: S311
            wait = min(tries.longest_wait, max(wait, asked_wait(error)))
            failures += 1
            if failures == tries.attempts or now + wait > deadline or not (passes or may_pass)(error):
                if (final := give_up(error, failures)) is error:
                    raise
                raise final from error
            tell(error, wait)
            time.sleep(wait)


def teller(log: logging.Logger, what: str, describe: Callable[[Exception], str]) -> Callable[[Exception, float], None]:
    """Warns of each failure of *what* in a line."""

    def tell(error: Exception, wait: float) -> None:
        log.warning("%s: %s; trying again in %s s", what, describe(error), f"{wait:.1f}".removesuffix(".0"))

    return tell


def persist(call: Callable[[], T], what: str, patience: float = PATIENCE_SECONDS) -> T:
    """Call *call* and return its result. Retry transient errors of a store for up to *patience* seconds. TimeoutError, naming
    *what*, if the store never answered; PermissionError, naming it too, if it forbids the request or no credentials are found.
    Other errors are raised as they are, at once.
    """
    names = CREDENTIALS.get(what.partition("://")[0].replace("abfss", "abfs"))
    where = f" ({names})" if names else ""

    def give_up(error: Exception, failures: int) -> Exception:
        if status_of(error) in (401, 403) or str(error).startswith("Forbidden: "):  # as gcsfs says without a status
            remedy = f"Repair the credentials{where} or the rights, and run the same command again."
            return PermissionError(f"{what}: {brief(error).rstrip('.')}. {remedy}")
        if any(type(cause).__name__ in UNIDENTIFIED for cause in causes(error)):
            return PermissionError(f"{what}: {brief(error).rstrip('.')}. Set the credentials{where}.")
        if not may_pass(error):
            return error
        return TimeoutError(
            f"{what}: no answer in {failures} tries ({brief(error)}). Run the same command again when the store answers."
        )

    tries = Tries(FIRST_WAIT, LONGEST_WAIT, patience=patience)
    return retry(call, tries, teller(logger, what, brief), give_up=give_up)


def may_pass(error: BaseException) -> bool:
    """Whether an error is transient: a busy server, or a broken or silent connection. Forbidden or missing objects and wrong
    names or certificates are not. A FileNotFoundError that fsspec made from a transient error is, and so is the error of its
    store in memory if it is listed while another thread writes there.
    """
    import socket  # a store that fails needs them, a local dataset does not
    import ssl

    if (status := status_of(error)) is not None:
        return status in RETRIED_STATUS
    passes = False
    for cause in causes(error):
        if isinstance(cause, ssl.SSLError):
            return False
        if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
            return False
        passes |= isinstance(cause, ConnectionError | TimeoutError) or getattr(cause, "retryable", None) is True
        passes |= isinstance(cause, RuntimeError) and str(cause).endswith("changed size during iteration")
        passes |= any(kind.__name__ in PASSING.get(kind.__module__.partition(".")[0], ()) for kind in type(cause).__mro__)
    return passes


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error came from, as far as its client says it."""
    return next((status for cause in causes(error) if (status := own_status(cause)) is not None), None)


def own_status(error: BaseException) -> int | None:
    """The HTTP status that an error says itself, whatever led to it."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        # Others than gcsfs call a code what their parser thinks of half an answer.
        code = getattr(error, "code", None) if type(error).__module__.startswith("gcsfs.") else None
        found = getattr(response, "status_code", None) or getattr(error, "status", None) or code
    status = digits(found)
    return status if status is not None and 100 <= status < 600 else None


def retry_after(error: BaseException) -> float:
    """Seconds that a server wants us to wait, by the ``Retry-After`` of its answer; 0 if it names none, or a date."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return float(digits(str(headers.get("Retry-After", "")).strip()) or 0)


def brief(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    cause = list(causes(error))[-1]
    said = getattr(cause, "strerror", None) if isinstance(cause, OSError) else None
    return " ".join(str(said or cause).split()).partition(" RequestId:")[0] or type(cause).__name__


def causes(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """An error and what led to it, from the outermost to the first. *hidden*: also the errors that were handled when another
    one was raised.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        # The library for connections puts the reason into its errors' arguments.
        inner = cause.args[0] if cause.args else None
        links = (inner, getattr(cause, "reason", None), cause.__cause__, cause.__context__ if hidden else None)
        cause = next((link for link in links if isinstance(link, BaseException)), None)
