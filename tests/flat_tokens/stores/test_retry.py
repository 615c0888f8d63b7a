"""Which errors of stores pass, how long is waited for the next try, and when it is the last one."""

import errno
import logging
import socket
import ssl
from collections.abc import Callable

import aiohttp
import pytest
import requests
from aiohttp.http_exceptions import ContentLengthError

import flat_tokens.stores.retry
from flat_tokens.stores.retry import FIRST_WAIT, LONGEST_WAIT, Tries, brief, may_pass, persist, retry, status_of
from tests.refusal import refusal


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.waits = 1000.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(flat_tokens.stores.retry, "time", clock)
    return clock


def failing(times: int, error: Exception) -> Callable[[], str]:
    """What fails so often, then answers."""
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "answer"

    return call


def test_waits_grow_at_random_up_to_a_limit(clock, caplog):
    """Each is between half of what it may be and that, so that those who were refused together do not come together again."""
    assert persist(failing(10, ConnectionResetError(errno.ECONNRESET, "reset")), "gs://bucket/object") == "answer"
    for i, wait in enumerate(clock.waits):
        most = min(LONGEST_WAIT, FIRST_WAIT * 2**i)
        assert most / 2 <= wait <= most
    assert len(set(clock.waits)) == 10
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 10
    assert caplog.messages[0].startswith("gs://bucket/object: reset; trying again in 0.")


def test_patience_ends(clock):
    """The error names what was asked for, how often, what was wrong, and the next step."""
    with pytest.raises(TimeoutError, match=r"^gs://b/object: no answer in \d+ tries \(reset\)\. Run the same command") as raised:
        persist(failing(10**6, ConnectionResetError(errno.ECONNRESET, "reset")), "gs://b/object", 60)
    assert 40 < sum(clock.waits) <= 60
    assert isinstance(raised.value.__cause__, ConnectionResetError)


def test_patience_begins_with_the_first_failure(clock):
    """A large object takes longer than anybody's patience, and may fail at its end."""
    real = failing(1, ConnectionResetError())

    def slow() -> str:
        clock.now += 10_000
        return real()

    assert persist(slow, "store") == "answer"


@pytest.mark.parametrize("error", [FileNotFoundError("x"), PermissionError("x"), ValueError("x"), OSError(errno.ENOSPC, "full")])
def test_what_does_not_pass_is_raised_as_it_is(clock, error):
    with pytest.raises(type(error)) as raised:
        persist(failing(1, error), "store")
    assert raised.value is error
    assert clock.waits == []


@pytest.mark.parametrize(("progress", "tries"), [([0] * 9, 3), ([0, 1, 1, 2, 2, 2], 5)], ids=["none", "some"])
def test_tries_are_counted_since_the_last_progress(clock, progress, tries):
    """The last error is handed on with their number; a server may ask for longer waits, up to the longest one."""
    reached, told = iter(progress), []
    with pytest.raises(OSError, match=r"^given up after 3$") as raised:
        retry(
            failing(10**6, ConnectionResetError("reset")),
            Tries(first_wait=1, longest_wait=30, attempts=3),
            lambda error, wait: told.append(f"{error} {wait}"),
            give_up=lambda error, failures: OSError(f"given up after {failures}"),
            asked_wait=lambda error: 20 if len(told) else 100,
            progress=lambda: next(reached),
        )
    assert str(raised.value.__cause__) == "reset"
    assert clock.waits == [30, *[20] * (tries - 2)]
    assert told == [f"reset {wait}" for wait in clock.waits]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def answered(status: int) -> Exception:
    """An error with a status, as requests raises it."""
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


def of_botocore(status: int, code: str) -> Exception:
    exceptions = pytest.importorskip("botocore.exceptions")
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return exceptions.ClientError(response, "GetObject")  # type: ignore[no-any-return]


def of_gcsfs(status: int) -> Exception:
    return pytest.importorskip("gcsfs.retry").HttpError({"code": status, "message": "said"})  # type: ignore[no-any-return]


PASSING: dict[str, Callable[[], Exception]] = {
    "reset": ConnectionResetError,
    "silence": TimeoutError,
    "requests 503": lambda: answered(503),
    "requests 429": lambda: answered(429),
    "requests cut": lambda: requests.exceptions.ChunkedEncodingError("cut"),
    "aiohttp cut": lambda: caused(aiohttp.ClientPayloadError("cut"), ContentLengthError("12 of 24 bytes")),
    "aiohttp gone": lambda: aiohttp.ServerDisconnectedError(),
    "aiohttp silent": lambda: aiohttp.SocketTimeoutError(),
    "botocore 503": lambda: of_botocore(503, "SlowDown"),
    "botocore 500, as s3fs raises it": lambda: caused(OSError(errno.EIO, "x"), of_botocore(500, "InternalError")),
    "botocore silent": lambda: pytest.importorskip("botocore.exceptions").ReadTimeoutError(endpoint_url="x"),
    "gcsfs 503": lambda: of_gcsfs(503),
    "gcsfs 429": lambda: of_gcsfs(429),
    "gcsfs other bytes": lambda: pytest.importorskip("gcsfs.retry").ChecksumError(),
    "credentials cannot be renewed now": lambda: pytest.importorskip("google.auth.exceptions").RefreshError("x", retryable=True),
    "a web server's silence, as fsspec raises it": lambda: caused(FileNotFoundError("x"), aiohttp.ServerDisconnectedError()),
    "a busy web server, as fsspec raises it": lambda: caused(FileNotFoundError("x"), answered(503)),
    "a store in memory, changed meanwhile": lambda: RuntimeError("dictionary changed size during iteration"),
    "name server busy": lambda: caused(ConnectionError(), socket.gaierror(socket.EAI_AGAIN, "again")),
}
LASTING: dict[str, Callable[[], Exception]] = {
    "requests 404": lambda: answered(404),
    "a web server's 404, as fsspec raises it": lambda: caused(FileNotFoundError("x"), answered(404)),
    "not there": lambda: FileNotFoundError("x"),
    "requests 501": lambda: answered(501),
    "botocore 403, as s3fs raises it": lambda: caused(PermissionError("x"), of_botocore(403, "AccessDenied")),
    "botocore 412": lambda: of_botocore(412, "PreconditionFailed"),
    "no credentials": lambda: pytest.importorskip("botocore.exceptions").NoCredentialsError(),
    "gcsfs 400": lambda: of_gcsfs(400),
    "no credentials at Google": lambda: pytest.importorskip("google.auth.exceptions").DefaultCredentialsError("x"),
    "credentials withdrawn": lambda: pytest.importorskip("google.auth.exceptions").RefreshError("x"),
    "no such server": lambda: caused(ConnectionError(), socket.gaierror(socket.EAI_NONAME, "no name")),
    "wrong certificate": lambda: caused(requests.ConnectionError("x"), ssl.SSLCertVerificationError("x")),
    "disk": lambda: OSError(errno.EIO, "x"),
    "fault of ours": lambda: TypeError("x"),
}


@pytest.mark.parametrize("name", [*PASSING, *LASTING])
def test_busy_servers_and_broken_connections_pass_and_what_is_wrong_with_the_question_does_not(name):
    assert may_pass((PASSING | LASTING)[name]()) is (name in PASSING)


def test_what_is_forbidden_is_told_with_its_place(clock):
    """The clients of stores name the operation alone."""

    def refuse() -> None:
        raise caused(PermissionError("x"), of_botocore(403, "AccessDenied"))

    with refusal(r"^gs://bucket/key: Forbidden: b/bucket/o no\. Repair the credentials", PermissionError):
        persist(failing(1, OSError("Forbidden: b/bucket/o\nno")), "gs://bucket/key")
    with pytest.raises(PermissionError, match=r"^s3://bucket/key: .*AccessDenied.* Repair the credentials") as raised:
        persist(refuse, "s3://bucket/key")
    assert status_of(raised.value) == 403
    assert clock.waits == []


def test_the_status_is_found_in_whatever_holds_it():
    assert status_of(caused(OSError("x"), of_gcsfs(503))) == 503
    assert status_of(OSError(errno.EIO, "x")) is None
    assert status_of(SystemExit(2)) is None


def test_an_error_in_one_line_is_its_first_cause():
    assert brief(caused(OSError("outer"), ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))) == (
        "Connection reset by peer"
    )
    assert brief(ValueError("two\n  lines")) == "two lines"
    assert brief(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("url", "error", "variable"),
    [
        ("s3://bucket/key", "no credentials", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/key", "no credentials at Google", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfss://c@account.dfs.core.windows.net/key", "no credentials", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_missing_credentials_are_told_with_the_place_and_the_remedy(url, error, variable):
    with refusal(rf"^{url}: .*\. Set the credentials \({variable}", PermissionError):
        persist(failing(1, LASTING[error]()), url)
