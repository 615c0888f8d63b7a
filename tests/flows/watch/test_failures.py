"""A person's mistake is one line in the log of a run; a fault of the program keeps its traceback."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from flows.watch.failures import InOneLine, report_in_one_line


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Of the log of runs, as a handler formats them."""
    report_in_one_line()
    report_in_one_line()  # as each run of a process does
    seen: list[str] = []

    class Listed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record))

    logger, handler = logging.getLogger("prefect.flow_runs"), Listed()
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    for known in [known for known in logger.filters if isinstance(known, InOneLine)]:
        logger.removeFilter(known)


def failing(error: BaseException) -> None:
    logger = logging.getLogger("prefect.flow_runs")
    try:
        raise error
    except BaseException:
        logger.exception("Encountered exception during execution: %r", error)
        logger.exception("Engine execution exited with unexpected exception")


@pytest.mark.parametrize("error", [ValueError("no files"), OSError(28, "No space left on device"), KeyboardInterrupt("ended")])
def test_a_failure_that_its_message_tells_is_one_line(lines: list[str], error: BaseException) -> None:
    failing(error)
    assert lines == [f"Encountered exception during execution: {error!r}"]


def test_a_fault_of_the_program_keeps_its_traceback(lines: list[str]) -> None:
    failing(IndexError("a fault"))
    assert len(lines) == 2
    assert all("Traceback" in line and "raise error" in line for line in lines)
