"""Faults that can be known before a byte is fetched are named before."""

from collections.abc import Iterator

import fsspec
import pytest

from tasks.download.sources import fault_of_config
from tests.calls import before_each_call
from tests.faults.support import build_here
from tests.refusal import refusal


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are fetched; there is one in a store, and it is called so."""
    seen: list[str] = []
    before_each_call(monkeypatch, "tasks.download.cut.fetch_file", lambda found, *_: seen.append(found.name))
    before_each_call(monkeypatch, "tasks.download.cut.read_small", lambda pack, *_: seen.extend(found.name for found in pack))
    fs = fsspec.filesystem("memory")
    fs.pipe({"/before/a.jsonl": b'{"text": "a"}\n', "/before/README.md": b"# About"})
    yield seen
    fs.rm("/before", recursive=True)


CHAT = {"path": "memory://before/*.jsonl", "messages_column": "m", "chat_template": "HERE/templte.jinja"}


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ({}, {"tokenizer": "cl100k"}, r"there is no tokenizer 'cl100k'\. Did you mean 'cl100k_base'\?"),
        ({"path": "HERE/a.txt"}, {"tokenizer": "cl100k"}, "there is no tokenizer 'cl100k'"),
        (
            {"path": "memory://before"},
            {},
            r"several formats: jsonl \(a.jsonl\), text \(README.md\).* such as memory://before/\*.jsonl;",
        ),
        (CHAT, {}, r"no chat template at HERE/templte.jinja\. Did you mean HERE/template.jinja\?"),
    ],
)
def test_a_mistake_is_told_before_the_text_is_fetched_or_much_is_read(tmp_path, fetched, monkeypatch, source, settings, words):
    monkeypatch.setattr("flows.pipelines.text.LOOKED_INTO", 5)
    (tmp_path / "a.txt").write_text("text that is long")
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    right = {"output": str(tmp_path / "out"), "source": {"path": "memory://before/*.jsonl"}, "tokenizer": "bytes"}
    given = {name: value.replace("HERE", str(tmp_path)) for name, value in source.items()}
    with refusal(words.replace("HERE", str(tmp_path))):
        build_here({**right, "source": given or right["source"], **settings}, 1)
    assert fetched == []
    build_here(right, 1)
    assert fetched == ["a.jsonl"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer": "nowhere/tokenizer.json"}, "cannot read the tokenizer nowhere/tokenizer.json: No such file"),
        ({"source": {"path": "/nowhere/*.txt"}}, "the source: there are no files at /nowhere/*.txt"),
        ({"validation_fraction": 2}, "validation_fraction"),
        ({"tokenizer": "openai-community/gpt2"}, None),
        ({"source": {"path": "s3://bucket/*.txt"}}, None),
    ],
)
def test_a_fault_is_known_before_there_is_a_run(tmp_path, change, words):
    (tmp_path / "a.txt").write_text("a")
    settings = {"output": str(tmp_path / "out"), "source": {"path": f"{tmp_path}/*.txt"}, "tokenizer": "bytes", **change}
    fault = fault_of_config(settings)
    assert (fault is None) == (words is None)
    assert words is None or words in str(fault)
    assert not (tmp_path / "out").exists()
