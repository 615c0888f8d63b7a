"""flat-tokens completion: the scripts complete what the parsers take."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from flat_tokens.tools import cli
from flat_tokens.tools.completion import commands_of, script
from flows.commands.main import parser as flows_parser


def completed(text: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f'{text}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _{words[0].replace("-", "_")}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", asked], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_offers_commands_options_and_their_values() -> None:
    text = script(cli.parser(), "flat-tokens", "bash")
    assert completed(text, "flat-tokens", "") == list(cli.COMMANDS)
    assert completed(text, "flat-tokens", "ex") == ["export"]
    assert completed(text, "flat-tokens", "inspect", "--find") == ["--find", "--find-ids"]
    assert completed(text, "flat-tokens", "inspect", "out", "--color", "a") == ["auto", "always"]
    assert completed(text, "flat-tokens", "completion", "f") == ["fish"]
    assert completed(text, "flat-tokens", "inspect", "") == []  # then bash offers files
    assert completed(text, "flat-tokens", "--v") == ["--version"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_commands_of_the_service_are_completed_too() -> None:
    text = script(flows_parser(), "flows", "bash")
    assert completed(text, "flows", "re") == ["refresh", "retokenize", "reject", "relayout"]
    assert "--no-server" in completed(text, "flows", "build", "web.yaml", "--")
    assert completed(text, "flows", "build", "--set", "") == []


@pytest.mark.parametrize("parser", [cli.parser, flows_parser])
def test_every_script_names_every_command_and_option(parser: object) -> None:
    made = parser()  # type: ignore[operator]
    for shell in ("bash", "zsh", "fish"):
        text = script(made, "x", shell)
        for command in commands_of(made):
            assert command.name in text
            for option in command.options:
                assert (option.flag.lstrip("-") if shell == "fish" else option.flag) in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_itself_reads_the_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    checked = subprocess.run([shell, "-n"], input=script(flows_parser(), "flows", shell), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    assert "complete -c " in capsys.readouterr().out
