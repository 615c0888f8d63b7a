"""What an export was made of travels with it: its documents are found again, whatever the format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.formats import FORMATS
from flat_tokens.tools.cli import main
from flat_tokens.tools.corpus import ORIGIN, open_corpus
from tests.damage import change_file
from tests.flat_tokens.demo import DEMO
from tests.flat_tokens.tools.test_export import MARKED
from tests.refusal import refusal
from tests.terminal import Terminal

END = "4096"


def exported(version: Path, out: Path, format: str, *more: str) -> Path:
    marks = ["--end-of-text", END] if format in MARKED else []
    assert main(["export", str(version), str(out), "--to", format, *marks, *more]) == 0
    return out


def traced(path: Path, tool: Terminal, split: str = "train", sequence: int = 7) -> dict[str, Any]:
    return tool.json("trace", path, "--split", split, "--sequence", sequence, "--source", DEMO)


@pytest.mark.parametrize("format", FORMATS)
def test_trace_and_inspect_find_an_exports_documents_again(version, tmp_path, format, tool):
    """Also of formats that nobody recognises, and without naming the end-of-text token: the origin tells them."""
    out = exported(version, tmp_path / "moved" / format, format)
    for split, sequence in (("train", 7), ("validation", 0)):
        here, there = traced(out, tool, split, sequence), traced(version, tool, split, sequence)
        assert here["text_from"] == "source"
        assert {key: here[key] for key in ("document", "found", "text")} == {
            key: there[key] for key in ("document", "found", "text")
        }
    told = tool.json("inspect", out)
    assert told["made_of"]["version"] == version.name
    assert told["tokenizer"]["name"] == "tokenizer.json"
    assert [source["name"] for source in told["sources"]] == ["stories", "notes"]


def test_one_split_and_a_directory_of_an_export_have_its_origin(version, tmp_path, tool):
    out = exported(version, tmp_path / "held-out", "mds", "--split", "validation")
    assert traced(out, tool, "validation", 3) == {**traced(out / "validation", tool, "validation", 3), "path": str(out)}
    assert not (out / "train").exists()
    assert not (out / ".export/documents/train").exists()


def test_a_file_of_several_has_no_documents_but_its_sources(version, tmp_path):
    out = exported(version, tmp_path / "out", "megatron", "--tokens-per-file", "5000")
    corpus = open_corpus(out / "train_00000.bin")
    assert corpus.documents("train") is None
    assert [source.name for source in corpus.sources] == ["stories", "notes"]
    assert open_corpus(out).documents("train") is not None


def test_without_room_or_origin_an_export_is_read_all_the_same(version, tmp_path, monkeypatch, tool):
    monkeypatch.setattr("flat_tokens.tools.export.ALWAYS_ROOM", -(10**9))
    out = exported(version, tmp_path / "out", "parquet")
    assert not (out / ".export/documents").exists()
    assert traced(out, tool)["document"] is None
    shutil.rmtree(out / ".export")
    assert open_corpus(out).provenance == {}


@pytest.mark.parametrize("wrong", [{"options": {"end_of_text": "x"}}, {"format": "tar"}, {"provenance": []}, {"version": 1}])
def test_an_origin_that_is_something_else_is_refused_by_name(version, tmp_path, wrong):
    out = exported(version, tmp_path / "out", "parquet")
    change_file(out / ORIGIN, wrong)
    with refusal(r"origin\.json: is not the origin of an export"):
        open_corpus(out)
