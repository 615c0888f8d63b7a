"""Errors of people and of the world, such as a wrong path or a full disk: reported in one line. Any other error is a fault of the
program, and keeps its traceback.
"""

from __future__ import annotations

import logging

from flows.watch.outages import OF_THE_WORK

EXPECTED = (ValueError, OSError, ImportError)
"""Errors of bad input, a full disk or an absent package."""
FOREIGN = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "httpx", "huggingface_hub", "requests", "s3fs")
"""Libraries of stores and the hub: their errors are mostly about the network, a name or a right."""
INTERRUPTS = ("KeyboardInterrupt", "TerminationSignal", "SystemExit", "CancelledError", "Cancelled")
"""Exceptions that end a run because somebody, or the system, ended it."""
SAID_BEFORE = "Engine execution "
"""Prefect logs an error once more, with its traceback, when the process of the run ends."""


def is_expected(error: BaseException) -> bool:
    """Whether an error is fully reported by its message."""
    return isinstance(error, EXPECTED) or type(error).__module__.startswith(FOREIGN) or type(error).__name__ in INTERRUPTS


class InOneLine(logging.Filter):
    """Removes the tracebacks of expected errors from the lines in which Prefect says that a run or a task failed."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not is_expected(error):
            return True
        record.exc_info = record.exc_text = None
        return not str(record.msg).startswith(SAID_BEFORE)


_in_one_line = InOneLine()


def report_in_one_line() -> None:
    """Let Prefect report expected errors of this process's runs and tasks without their tracebacks."""
    for name in OF_THE_WORK:
        logging.getLogger(name).addFilter(_in_one_line)  # once, however often
