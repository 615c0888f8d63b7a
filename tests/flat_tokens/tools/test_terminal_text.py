"""What a terminal shows while something takes long, and that nothing else is told of it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens import Checked, TokenBatch
from flat_tokens.tools import cli, terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal that is told everything at once."""
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN", 0.0)
    return Terminal()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    batch = TokenBatch.from_sequences([[1, 2], [3]])
    flat_tokens.write_dataset(tmp_path / "dataset", [batch], [batch], provenance={"name": "small"})
    return tmp_path / "dataset"


def lines(shown: Terminal) -> list[str]:
    """What stood in the line, one behind the other."""
    return [line.removesuffix(terminal.CLEAR) for line in shown.getvalue().split("\r")]


def test_a_line_says_how_much_of_all_is_done_and_how_long_the_rest_takes():
    line = terminal.progress_line("verify", Checked(1_000_000_000, 4_000_000_000, 1), 10.0)
    assert line == "verify   25%  1.0 GB of 4.0 GB  100 MB/s  0:30 left  1 fault"
    assert terminal.progress_line("export", Checked(0, 0, 0), 10.0) == "export    0%  0 B of 0 B  0 B/s"
    assert [terminal.duration(seconds) for seconds in (4.4, 75, 3723)] == ["0:04", "1:15", "1:02:03"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("verify DATASET --full --json", "verify  100%  "),
        ("export DATASET DATASET-out --to megatron", "export  100%  24 B of 24 B  "),
    ],
)
def test_a_command_shows_how_far_it_is(dataset, stderr, capsys, command, line):
    """The line is gone at the end, and standard output has the result alone."""
    with contextlib.redirect_stderr(stderr):
        assert cli.main(command.replace("DATASET", str(dataset)).split()) == 0
    said = capsys.readouterr().out
    assert json.loads(said)["ok"] if "--json" in command else said
    *shown, last = lines(stderr)
    assert any(one.startswith(line) for one in shown)
    assert last == ""


def test_what_is_no_terminal_is_told_nothing(dataset, capsys):
    with terminal.progress("verify", quiet=False) as watch:
        assert watch is None
    assert cli.main(["verify", str(dataset), "--full"]) == 0
    assert capsys.readouterr().err == ""
