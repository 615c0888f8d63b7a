"""flat-tokens duplicates: what a build left out. That it is all of it, the tests of builds show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flat_tokens.tools.cli import main
from tests.faults.support import build_here


def build_of(tmp_path: Path, duplicates: str) -> Path:
    for name, texts in (("a", ["same", "other"]), ("b", ["more", "same"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    settings = {"output": str(tmp_path / "out"), "sources": sources, "tokenizer": "bytes"}
    return Path(build_here({**settings, "documents": {"duplicates": duplicates}}).path)


def test_each_copy_is_told_with_the_document_that_stayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_of(tmp_path, "drop")
    assert main(["duplicates", str(tmp_path / "out")]) == 0
    key, _, rest = capsys.readouterr().out.partition("  ")
    assert (len(key), rest) == (16, "b b.jsonl row 1, as a a.jsonl row 0\n")
    assert main(["duplicates", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "key": key,
        "source": "b",
        "file": "b.jsonl",
        "row": 1,
        "of": {"source": "a", "file": "a.jsonl", "row": 0},
    }


def test_a_dataset_that_kept_duplicates_has_no_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_of(tmp_path, "keep")
    assert main(["duplicates", str(tmp_path / "out")]) == 2
    assert "not built with documents.duplicates: drop" in capsys.readouterr().err


def test_a_damaged_list_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (build_of(tmp_path, "drop") / "documents/duplicates").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["duplicates", str(tmp_path / "out")]) == 2
    assert "is not the list" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out"), "--full"]) == 1
