"""Faults that can be known before a byte is fetched are named before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest

import flows.pipelines.text
import tasks.download.cut
from flows.pipelines.build import build
from flows.pipelines.refresh import refresh
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tasks.models import FoundFile
from tests.refusal import refusal


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are fetched; there is one in a store, and it is called so."""
    seen = []
    fetch, read = tasks.download.cut.fetch_file, tasks.download.cut.read_small

    def note(found: FoundFile, *arguments: Any, **settings: Any) -> Any:
        seen.append(found.name)
        return fetch(found, *arguments, **settings)

    def note_all(pack: Sequence[FoundFile], *arguments: Any, **settings: Any) -> Any:
        seen.extend(found.name for found in pack)
        return read(pack, *arguments, **settings)

    monkeypatch.setattr(tasks.download.cut, "fetch_file", note)
    monkeypatch.setattr(tasks.download.cut, "read_small", note_all)
    fs = fsspec.filesystem("memory")
    fs.pipe({"/before/a.jsonl": b'{"text": "a"}\n'})
    yield seen
    fs.rm("/before", recursive=True)


def run(
    tmp_path: Path, pipeline: Callable[[BuildConfig, Threads], Any], path: str = "memory://before/*.jsonl", **settings: Any
) -> None:
    told = {"output": str(tmp_path / "out"), "source": {"path": path}, "tokenizer": "bytes", **settings}
    with Threads(1) as runner:
        pipeline(BuildConfig.model_validate(told), runner)


@pytest.mark.parametrize("pipeline", [build, refresh])
def test_a_mistyped_tokenizer_is_told_before_the_text_is_fetched(tmp_path, fetched, pipeline):
    with refusal(r"there is no tokenizer 'cl100k'\. Did you mean 'cl100k_base'\?"):
        run(tmp_path, pipeline, tokenizer="cl100k")
    assert fetched == []
    run(tmp_path, pipeline)
    assert fetched == ["a.jsonl"]


def test_a_mistyped_tokenizer_is_told_before_much_is_read(tmp_path, fetched, monkeypatch):
    monkeypatch.setattr(flows.pipelines.text, "LOOKED_INTO", 5)
    (tmp_path / "a.txt").write_text("text that is long")
    with refusal("there is no tokenizer 'cl100k'"):
        run(tmp_path, build, str(tmp_path / "a.txt"), tokenizer="cl100k")
    assert fetched == []


def test_files_whose_names_say_that_they_are_of_several_formats_are_not_fetched(tmp_path, fetched):
    fsspec.filesystem("memory").pipe({"/before/README.md": b"# About"})
    with refusal(r"several formats: jsonl \(a.jsonl\), text \(README.md\).* such as memory://before/\*.jsonl;"):
        run(tmp_path, build, "memory://before")
    assert fetched == []


def test_a_chat_template_that_is_not_there_is_told_before_the_text_is_fetched(tmp_path, fetched):
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    source = {"path": "memory://before/*.jsonl", "messages_column": "m", "chat_template": str(tmp_path / "templte.jinja")}
    words = rf"no chat template at {tmp_path}/templte.jinja\. Did you mean {tmp_path}/template.jinja\?"
    with refusal(words):
        run(tmp_path, build, source=source)
    assert fetched == []
