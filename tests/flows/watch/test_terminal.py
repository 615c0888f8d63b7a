"""The line of progress: one line at any width, with a bar on a terminal, and every ten seconds elsewhere."""

import io
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from flows.commands.main import OnTerminal
from flows.watch.terminal import coloured_line, display, progress_line
from tasks.progress import Done, Progress, meter

MIDWAY = Progress("tokenize", 10.0, 4_000_000_000, Done(1_000_000_000, 1234, 300_000_000), recent=100e6)


@pytest.fixture(autouse=True)
def _server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have lost their server."""
    monkeypatch.setattr("flows.watch.terminal.is_gone", lambda: False)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The line on a console that is so wide."""
    from rich.console import Console

    monkeypatch.setattr(meter, "read", lambda: MIDWAY)

    def line(columns: int, **settings: Any) -> str:
        out = io.StringIO()
        Console(file=out, width=columns, **settings).print(coloured_line("a-dataset", columns), end="")
        return out.getvalue()

    return line


COLORED: dict[str, Any] = {"force_terminal": True, "color_system": "standard"}


@pytest.mark.parametrize(("columns", "counts"), [(20, 0), (45, 0), (65, 1), (80, 2), (140, 3)])
def test_it_is_one_line_at_any_width(columns, counts, shown):
    """There is room for what the terminal writes behind it when somebody presses Ctrl-C. Counts give way to the bar."""
    plain = shown(columns)
    assert [word in plain for word in ("MB/s", "tokens", "documents")] == [True] * counts + [False] * (3 - counts)
    assert "\n" not in plain
    assert "\x1b" in shown(columns, **COLORED)
    assert len(plain) + len("^C") <= columns
    assert plain.startswith("a-dataset"[: columns - 2])
    assert ("0:30 left" in plain) == (columns > 38)


def test_the_line_says_what_it_waits_for(monkeypatch):
    assert progress_line(MIDWAY) == "tokenize    25%  1,234 documents  300,000,000 tokens  100 MB/s  0:30 left"
    done = Progress("done", 20.0, 0, Done())
    assert progress_line(done, "web", has_server=True) == "web  done       0:20  telling the Prefect server"
    assert progress_line(done, "web") == "web  done       0:20"
    assert "away" not in progress_line(MIDWAY, "web")
    monkeypatch.setattr("flows.watch.terminal.is_gone", lambda: True)
    assert "the Prefect server is away" in progress_line(MIDWAY, "web")
    assert {"\x1b", "\n"}.isdisjoint(progress_line(MIDWAY, "evil\x1b[2J\n"))


def test_elsewhere_it_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr("flows.watch.terminal.EVERY_SECONDS", 0.01)
    with display("web", live=False):
        said, until = "", time.monotonic() + 60
        while said.count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert {line[:5] for line in said.splitlines()} == {"web  "}


def test_what_is_logged_meanwhile_has_lines_of_its_own(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out, log, handler = Terminal(), logging.Logger("of this test"), OnTerminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    log.addHandler(handler)
    with display("web", live=True):
        log.warning("the server is gone")
    before = out.getvalue().partition("the server is gone")[0]
    assert before.endswith("\x1b[2K")  # the line of progress is taken away first
