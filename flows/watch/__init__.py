"""Progress, pages and logs of runs. Foreign text in a log moves no terminal."""

from __future__ import annotations

import logging
from typing import Any

from flat_tokens.tools.terminal import line, plain, visible


class PrintableRecord(logging.LogRecord):
    """A record of a log on one line, without control characters, and with a traceback without them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.exc_info and self.exc_info[0]:
            self.exc_text = visible(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:  # noqa: N802  the name in LogRecord
        return line(plain(super().getMessage()))


logging.setLogRecordFactory(PrintableRecord)  # of workers, of runs, whose flows import this before Prefect reads parameters
