"""Of an outage of the Prefect server there is a line when it goes and one when it is back. Nothing is lost of what runs say."""

import http.server
import io
import logging
import time
from contextlib import AbstractContextManager

import pytest

from flows.watch.failures import InOneLine, report_in_one_line
from flows.watch.outages import TOLD_ELSEWHERE, Outages, why_unreachable
from tests.processes import free_port, serving, until


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def answering(port: int) -> AbstractContextManager[str]:
    return serving(http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow, as on a busy machine, is there: the tests' servers refuse at once when they are gone."""
    monkeypatch.setattr("flows.watch.outages.ANSWER_SECONDS", 60.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.watch.outages.ASK_SECONDS", 0.05)
    monkeypatch.setattr("flows.watch.outages.LATE_SECONDS", 0.0)
    monkeypatch.delenv(TOLD_ELSEWHERE, raising=False)


def record(name: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, "a line", None, None)


FLOOD = (
    "prefect.events.clients",
    "prefect._internal.concurrency",
    "prefect.FlowRunCancellingObserver",
    "prefect.flow_runs.worker",
)
KEPT = ("prefect.flow_runs", "prefect.task_runs", "flows.build", "tasks.download.fetch")


@pytest.mark.usefixtures("quick")
def test_an_outage_is_told_once_when_it_begins_and_once_when_it_ends(caplog):
    port = free_port()
    watch = Outages(f"http://127.0.0.1:{port}/api")
    with caplog.at_level(logging.WARNING, "flows.watch.outages"):
        with answering(port):
            assert all(watch.filter(record(name)) for name in FLOOD)  # it answers: they warn of something else
            assert caplog.messages == []
        assert not any(watch.filter(record(name)) for name in FLOOD * 3)
        assert all(watch.filter(record(name)) for name in KEPT)
        assert watch.filter(record("prefect.events.clients", logging.INFO))
        with answering(port):
            until(lambda: not watch.is_on(), "the end of the outage", 60)
            assert watch.filter(record("prefect.events.clients"))
    first, second = caplog.messages
    assert first.startswith(f"The Prefect server at http://127.0.0.1:{port}/api does not answer (")
    assert second.startswith(f"The Prefect server at http://127.0.0.1:{port}/api answers again, after 0:0")


@pytest.mark.usefixtures("quick")
def test_what_another_process_tells_is_not_told_again(caplog, monkeypatch):
    """As the workers of make serve, which watches its server itself."""
    monkeypatch.setenv(TOLD_ELSEWHERE, "1")
    watch = Outages(f"http://127.0.0.1:{free_port()}/api")
    assert not watch.filter(record("prefect.events.clients"))
    assert caplog.messages == []


def test_what_follows_an_outage_is_of_it(monkeypatch):
    """Parts of Prefect notice late that there was one; services that failed in it say so in vain however late."""
    monkeypatch.setattr("flows.watch.outages.why_unreachable", lambda url: None)
    monkeypatch.setattr("flows.watch.outages.LATE_SECONDS", 600.0)
    watch = Outages("http://127.0.0.1:9/api")
    watch._back = time.monotonic()
    assert not watch.filter(record("prefect.events.clients"))
    watch._back -= 600
    assert watch.filter(record("prefect.events.clients"))
    service = record("prefect._internal.concurrency", logging.ERROR)
    assert watch.filter(service)
    watch._was_gone = True
    assert not watch.filter(service)


def test_only_silence_is_an_outage():
    """A server that refuses is there; of an address that is none nothing can be told."""
    with answering(0) as url:
        assert why_unreachable(f"{url}/api/") is None
        assert why_unreachable(f"{url}/elsewhere") is None
    assert "refused" in str(why_unreachable(f"{url}/api"))
    assert why_unreachable("nowhere") is None


def lines_of(error: BaseException) -> list[str]:
    """The log lines of a run that fails, as Prefect writes them."""
    seen = []

    class Listed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record))

    logger = logging.Logger("runs")
    logger.addHandler(Listed())
    logger.addFilter(InOneLine())
    try:
        raise error
    except BaseException:
        logger.exception("Encountered exception during execution: %r", error)
        logger.exception("Engine execution exited with unexpected exception")
    return seen


@pytest.mark.parametrize("error", [ValueError("no files"), OSError(28, "No space left on device"), KeyboardInterrupt("ended")])
def test_a_failure_that_its_message_tells_is_one_line(error):
    assert lines_of(error) == [f"Encountered exception during execution: {error!r}"]


def test_a_fault_of_the_program_keeps_its_traceback():
    lines = lines_of(IndexError("a fault"))
    assert len(lines) == 2
    assert all("Traceback" in line and "raise error" in line for line in lines)


def test_it_is_used_once_for_runs_and_tasks():
    report_in_one_line()
    report_in_one_line()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        assert [isinstance(one, InOneLine) for one in logging.getLogger(name).filters].count(True) == 1


def test_foreign_text_moves_no_terminal_and_begins_no_line():
    logger, shown = logging.Logger("of this test"), io.StringIO()
    logger.addHandler(logging.StreamHandler(shown))
    foreign = "name\x1b[2J\x07\x9b1m\r\nforged"
    logger.error("%s of %s", foreign, {foreign: 1}, exc_info=ValueError(foreign))
    assert not set(shown.getvalue()) & set("\x1b\x07\x9b\r")
    assert shown.getvalue().splitlines()[1].startswith("ValueError")
