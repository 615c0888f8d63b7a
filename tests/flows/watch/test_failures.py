"""A person's mistake is one line in the log of a run; a fault of the program keeps its traceback."""

from __future__ import annotations

import io
import logging

import pytest

from flows.watch.failures import InOneLine, report_in_one_line


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
    try:
        raise ValueError(foreign)
    except ValueError:
        logger.exception("%s of %s", foreign, {foreign: 1})
    assert not set(shown.getvalue()) & set("\x1b\x07\x9b\r")
    assert shown.getvalue().splitlines()[1].startswith("Traceback")
