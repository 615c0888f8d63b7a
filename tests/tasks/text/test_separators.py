"""Separators that no file has are told before their text is tokenized."""

from pathlib import Path

import pytest

from flows.pipelines.build import build
from flows.pipelines.plan import plan
from flows.pipelines.refresh import refresh
from flows.runners.processes import Threads
from tasks.config import BuildConfig, Source
from tasks.download.fetch import fetch_file
from tasks.download.sources import resolve_source
from tasks.text.files import unused_separators


def warnings(root: Path, separator: str, **files: bytes) -> list[str]:
    """The warnings of a source of these files."""
    (root / "in").mkdir(exist_ok=True)
    for name, content in files.items():
        (root / "in" / name.replace("_", ".")).write_bytes(content)
    source = Source(path=root / "in", document_separator=separator)
    found = resolve_source(source, 0).files
    return list(unused_separators((source,), [fetch_file(one, (source,), root / "scratch") for one in found]))


BEGIN = "the source: document_separator is {!r}, but "
ONE, TWO = BEGIN + "a.txt does not have it: a file is one document.", BEGIN + "none of 2 files has it: a file is one document."


@pytest.mark.parametrize(
    ("separator", "files", "words"),
    [
        ("\\n", {"a_txt": b"one\ntwo\n"}, ONE + ' In YAML, "\\n" in double quotes is a line feed'),
        ("\n", {"a_txt": b"one\rtwo\r"}, ONE + " Its lines end in '\\r'."),
        ("\r\n", {"a_txt": b"one\ntwo\n"}, ONE + " Its lines end in '\\n'."),
        ("<|endoftext|>", {"a_txt": b"one<|end|>two"}, ONE),
        ("--", {"a_txt": b"one-", "b_txt": b"-two"}, TWO),
        ("\n", {"a_jsonl": b'{"text": "a"}\n'}, BEGIN + "a.jsonl is jsonl, where it means nothing. Leave it out."),
    ],
)
def test_a_separator_that_no_file_has_is_told(tmp_path, separator, files, words):
    (found,) = warnings(tmp_path, separator, **files)
    assert found.startswith(words.format(separator))


@pytest.mark.parametrize(
    ("separator", "files"),
    [
        ("\n", {"a_txt": b"one\n"}),
        ("\n\n", {"a_txt": b"one\r\n\r\ntwo"}),
        ("--", {"a_txt": b"one", "b_txt": b"x" * 15 + b"--"}),  # where one block ends and the next begins
    ],
)
def test_one_separator_of_all_files_is_enough(tmp_path, monkeypatch, separator, files):
    monkeypatch.setattr("flat_tokens.text.limits.LOOK_BYTES", 16)
    assert warnings(tmp_path, separator, **files) == []


def test_builds_and_plans_tell_it(tmp_path, caplog):
    """A refresh with a new file that has no separator does not, where the others have it."""
    (tmp_path / "a.txt").write_text("one|two")

    def config(separator: str) -> BuildConfig:
        source = {"path": str(tmp_path / "*.txt"), "document_separator": separator}
        return BuildConfig.model_validate({"output": str(tmp_path / "out"), "tokenizer": "bytes", "source": source})

    plan(config("--"))
    with Threads(1) as runner:
        build(config("--"), runner)
        assert sum("a.txt does not have it" in message for message in caplog.messages) == 2
        caplog.clear()
        build(config("|"), runner)
        (tmp_path / "b.txt").write_text("three")
        refresh(config("|"), runner)
    assert not any("document_separator" in message for message in caplog.messages)
