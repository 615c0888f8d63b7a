"""flat-tokens completion: the scripts complete what the parsers take."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from flat_tokens.tools import cli
from flows.commands.main import main

pytestmark = pytest.mark.needs("shtab")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["flat-tokens", ""], list(cli.COMMANDS)),
        (["flat-tokens", "inspect", "out", "--color", "a"], ["auto", "always"]),
        (["flows", "re"], ["refresh", "retokenize", "reject", "relayout"]),
    ],
)
def test_bash_offers_commands_options_and_their_values(
    words: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (cli.main if words[0] == "flat-tokens" else main)(["completion", "bash", "--command", words[0]]) == 0
    text = capsys.readouterr().out
    line = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_{words[0].replace('-', '_')}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{text}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    assert "complete -c " in capsys.readouterr().out
