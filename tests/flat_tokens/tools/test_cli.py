"""The command line: help, errors of one line, statuses, pipes that close early."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from flat_tokens import CheckProgress
from flat_tokens.tools import terminal
from flat_tokens.tools.cli import FAMILIES, main
from flows.commands import main as service
from tests.made import write_sequences

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = (np.arange(60_000) % 50_000).reshape(-1, 100)
    return Path(write_sequences(tmp_path_factory.mktemp("cli") / "data", ids))


def test_help_names_every_command_and_the_statuses(tool):
    said = tool.out("--help")
    assert all(f"    {name}" in said for name in chain(*FAMILIES.values()))
    assert "exit status:" in said


@pytest.mark.parametrize("name", [name for name in chain(*FAMILIES.values()) if name != "completion"])
def test_every_command_tells_what_is_not_there_in_one_line(name, tmp_path, tool):
    missing, out = tmp_path / "missing", tmp_path / "out"
    more = {"trace": ["--sequence", "0"], "diff": [missing], "export": [out, "--to", "parquet"], "import": [out]}
    status, said, err = tool(name, missing, *more.get(name, []))
    assert (status, said) == (2, "")
    assert re.fullmatch(f"flat-tokens {name}: {missing}: there is no.*\n", err)


@pytest.mark.parametrize("arguments", [[], ["none"], ["inspect"], ["stats", "x", "--top", "-1"], ["trace", "x"]])
def test_arguments_that_are_not_understood_are_trouble(arguments, tool):
    assert tool.errors(*arguments)


def test_an_error_that_nobody_expected_is_one_line_and_an_interruption_has_its_status(monkeypatch, tool):
    monkeypatch.setattr("flat_tokens.tools.inspect.run", Mock(side_effect=[KeyError("some\nkey")] * 2 + [KeyboardInterrupt]))
    monkeypatch.delenv("FLAT_TOKENS_DEBUG", raising=False)
    assert re.fullmatch("flat-tokens inspect: KeyError: .*\n", tool.errors("inspect", "x"))
    monkeypatch.setenv("FLAT_TOKENS_DEBUG", "1")
    with pytest.raises(KeyError):
        tool("inspect", "x")
    assert tool("inspect", "x")[0] == 130


def command(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    call = [sys.executable, "-m", "flat_tokens", *arguments]
    return subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]


def test_a_reader_that_has_seen_enough_is_no_error(data):
    """What stands behind the pipe closes it, as head does; nothing is said, whatever was still to be written."""
    running = command("inspect", str(data), "--find-ids", "5", "--limit", "0")
    running.stdout.close()
    assert running.stderr.read() == b""
    running.stderr.close()
    assert running.wait(60) == 141


def test_it_runs_as_a_module_where_the_terminal_has_no_unicode(data, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    running = command("stats", str(data), "--top", "2")
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err, b"###" in out, b"?" in out) == (0, b"", True, False)


@pytest.mark.needs("shtab")
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["flat-tokens", "inspect", "out", "--color", "a"], ["auto", "always"]),
        (["flows", "re"], ["refresh", "retokenize", "reject", "relayout"]),
    ],
)
def test_bash_offers_commands_options_and_their_values(words, offered, capsys):
    assert (main if words[0] == "flat-tokens" else service.main)(["completion", "bash", "--command", words[0]]) == 0
    text = capsys.readouterr().out
    line = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_{words[0].replace('-', '_')}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{text}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


@pytest.mark.needs("shtab")
def test_the_command_prints_the_script(tool):
    assert "complete -c " in tool.out("completion", "fish")


# What a terminal shows while something takes long


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
    return Path(write_sequences(tmp_path / "dataset", [[1, 2], [3]], [[1, 2], [3]]))


def lines(shown: Terminal) -> list[str]:
    """What stood in the line, one behind the other."""
    return [line.removesuffix(terminal.CLEAR) for line in shown.getvalue().split("\r")]


def test_a_line_says_how_much_of_all_is_done_and_how_long_the_rest_takes():
    line = terminal.progress_line("verify", CheckProgress(1_000_000_000, 4_000_000_000, 1), 10.0)
    assert line == "verify   25%  1.0 GB of 4.0 GB  100 MB/s  0:30 left  1 fault"
    assert terminal.progress_line("export", CheckProgress(0, 0, 0), 10.0) == "export    0%  0 B of 0 B  0 B/s"
    assert [terminal.duration(seconds) for seconds in (4.4, 75, 3723)] == ["0:04", "1:15", "1:02:03"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("verify DATASET --full --json", "verify  100%  "),
        ("export DATASET DATASET-out --to megatron", "export  100%  24 B of 24 B  "),
    ],
)
def test_a_command_shows_how_far_it_is(dataset, stderr, tool, command, line):
    """The line is gone at the end, and standard output has the result alone."""
    with contextlib.redirect_stderr(stderr):
        said = tool.out(*command.replace("DATASET", str(dataset)).split())
    assert json.loads(said)["ok"] if "--json" in command else said
    *shown, last = lines(stderr)
    assert any(one.startswith(line) for one in shown)
    assert last == ""


def test_what_is_no_terminal_is_told_nothing(dataset, tool):
    assert tool.errors("verify", dataset, "--full", status=0) == ""
