"""A person's mistake is one line in the log of a run; a fault of the program keeps its traceback."""

from __future__ import annotations

import logging

import pytest

from flows.watch.failures import InOneLine, report_in_one_line


def lines_of(error: BaseException) -> list[str]:
    """The log lines of a run that fails, as Prefect writes them."""
    seen: list[str] = []

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
def test_a_failure_that_its_message_tells_is_one_line(error: BaseException) -> None:
    assert lines_of(error) == [f"Encountered exception during execution: {error!r}"]


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    lines = lines_of(IndexError("a fault"))
    assert len(lines) == 2
    assert all("Traceback" in line and "raise error" in line for line in lines)


def test_it_is_used_once_for_runs_and_tasks() -> None:
    report_in_one_line()
    report_in_one_line()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        assert [isinstance(one, InOneLine) for one in logging.getLogger(name).filters].count(True) == 1
