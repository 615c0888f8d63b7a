"""The command line: ``flat-tokens-service COMMAND``, which is ``python -m flows COMMAND``.

Nothing heavy is imported before a configuration has been read: a mistake in it is reported at once.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from flat_tokens.tools.cli import TROUBLE, Parser, program
from flat_tokens.tools.terminal import one_line
from flows.commands.running import PROGRAM, STATUS
from flows.watch.failures import is_expected
from tasks.progress import meter

FAMILIES = {
    "flows.commands.build": ("build", "plan", "refresh", "retokenize"),
    "flows.commands.versions": ("status", "versions", "approve", "reject", "forget", "pin", "unpin", "rollback", "gc"),
    "flows.commands.vocabulary": ("vocabulary", "train-tokenizer"),
    "flows.commands.derive": ("merge", "append", "subset", "shuffle", "relayout", "export", "import", "publish"),
    "flat_tokens.tools.cli": ("completion",),
}
"""Modules, and the commands that each adds, with the functions that run them."""

LEAVING_SECONDS = 10.0
AGAIN_SECONDS = 0.05


def main(arguments: list[str]) -> int:
    """Run a command; its exit status: 0 done, 1 failed, 2 not begun, 130 interrupted."""
    try:
        options = parser(*arguments[:1]).parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    log_to_terminal()
    # A build may be stopped at any moment: what is stored is whole, and what is not is swept by the next one.
    signal.signal(signal.SIGTERM, lambda *_: _stop(143, "terminated"))
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = functools.partial(_interrupt_later, sys.unraisablehook)
    try:
        options.run(options)
        return 0
    except KeyboardInterrupt:
        _stop(130, "interrupted")
    except BrokenPipeError:
        return 141
    except MemoryError:
        status, said = 1, "out of memory. Give it more, or fewer workers."
    except Exception as error:
        if not is_expected(error):
            raise
        begun = options.begun and meter.read().stage != "examine" and not isinstance(error, FileNotFoundError)
        status, said = 1 if begun else TROUBLE, one_line(error)
    print(f"{PROGRAM} {options.command}: {said}", file=sys.stderr)
    return status


def _interrupt(*_: object) -> None:
    """Let what is under way end, but for some seconds only: a tokenizer's pattern may go on for ever."""
    _later(LEAVING_SECONDS, _stop, 130, "interrupted")
    raise KeyboardInterrupt


def _interrupt_later(others: Callable[[sys.UnraisableHookArgs], object], unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt again if code that cannot raise, such as a finalizer, was interrupted: Python would print that and go on.
    *others*: the hook for other errors.
    """
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        others(unraisable)
        return
    _later(AGAIN_SECONDS, os.kill, os.getpid(), signal.SIGINT)


def _later(seconds: float, function: Callable[..., object], *arguments: object) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _stop(status: int, why: str) -> None:
    print(f"{why}: run the same command again to resume after the last stored shard", file=sys.stderr, flush=True)
    os._exit(status)


class OnTerminal(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment: a live display takes it over, and puts lines above its own."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_terminal() -> None:
    """Log our own warnings to standard error, and only critical messages of other packages: they also log what they raise. The
    root logger is not used: Prefect has handlers of its own.
    """
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.CRITICAL)
    handler = OnTerminal()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.WARNING)  # of the loggers, a server may get more
    for name in ("flat_tokens", "flows", "tasks"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)


def parser(command: str = "-") -> Parser:
    """The parser of a command, or of all."""
    made = program(PROGRAM, "Build flat-tokens datasets from text.", STATUS, FAMILIES, command)
    made.set_defaults(begun=False)
    return made
