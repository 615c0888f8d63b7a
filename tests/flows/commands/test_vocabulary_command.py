"""``python -m flows vocabulary`` writes a tokenizer's file, and says how a configuration names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flows.commands.main import main
from tasks.config import BuildConfig


def test_the_file_and_its_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "x.tiktoken"
    assert main(["vocabulary", "cl100k_base", "--to", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert path.stat().st_size == told["bytes"] > 1_000_000
    tokenizer = yaml.safe_load(told["tokenizer"])
    config = {"output": "x", "source": {"path": "x.txt"}, "tokenizer": tokenizer}
    assert BuildConfig.model_validate(config).tokenizer.name == str(path)


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("cl100k_base", "x", "end with .tiktoken"),
        ("a/b", "x.tiktoken", "end with .json"),
        ("bytes", "x.tiktoken", "another machine"),
    ],
)
def test_what_is_no_such_file_is_refused(
    name: str, file: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vocabulary", name, "--to", str(tmp_path / file)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / file).exists()
