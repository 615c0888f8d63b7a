"""What added, removed, changed and moved by document, against what was edited; and the history of refreshes."""

import errno
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from flat_tokens.stores.store import Store
from flows.pipelines.refresh import RefreshResult
from flows.refresh import history
from tasks.config import BuildConfig
from tasks.finalize.document_changes import in_both
from tasks.garbage import Policy, collect
from tasks.output.changes import DocumentChangeCounts, as_markdown, as_text
from tasks.output.pointer import read_history
from tasks.output.versions import roll_back
from tests.faults.support import refresh_here, settings_of
from tests.refusal import refusal
from tests.sources import write_rows

Text = dict[str, tuple[str, str]]
"""id -> source and text."""


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 100)
    monkeypatch.setattr("tasks.tokenize.segments.MOST_BYTES", 400)


def refreshed(directory: Path, text: Text, **settings: Any) -> RefreshResult:
    paths = [directory / source for source in ("notes", "web")]
    for path in paths:
        rows = [{"id": name, "text": content} for name, (of, content) in text.items() if of == path.name]
        write_rows(path / "a.jsonl", rows)
    common = settings_of(directory / "out", *paths, validation_fraction=0.3, slice_bytes=600)
    return refresh_here(common | settings)


def some_text(count: int = 40) -> Text:
    return {f"{i}": ("web" if i % 3 else "notes", f"{i} " + "salt wind " * (i % 5)) for i in range(count)}


def counts(found: DocumentChangeCounts) -> tuple[int, int, int | None, int]:
    return found.added, found.removed, found.changed, found.moved


def test_a_refresh_counts_documents_that_came_went_changed_and_moved(tmp_path):
    """By source and by split. Those that removed count where they were, the others where they are."""
    text = some_text()
    first = refreshed(tmp_path, text)
    assert counts(first.changes.documents.total) == (40, 0, 0, 0)
    assert first.text_bytes_tokenized == sum(len(content) for _, content in text.values())

    del text["4"]  # of web
    text["0"] = ("notes", "another text")
    text["6"] = ("web", text["6"][1])
    text["9"] = ("web", "moved and changed")
    text |= {"x": ("notes", "new"), "y": ("web", "new"), "z": ("web", "")}
    second = refreshed(tmp_path, text)
    found = second.changes.documents
    assert counts(found.total) == (3, 1, 2, 2)
    assert {one.name: counts(one) for one in found.by_source} == {"notes": (1, 0, 1, 0), "web": (2, 1, 1, 2)}
    assert np.array([counts(one) for one in found.by_split]).sum(axis=0).tolist() == [3, 1, 2, 2]
    assert 0 < second.text_bytes_tokenized < first.text_bytes_tokenized
    assert "  all documents 3 added, 1 removed, 2 changed, 2 moved to another source" in as_text(second.changes)
    assert "- source 'web': 2 added, 1 removed, 1 changed, 2 moved to another source" in as_markdown(second.changes)

    third = refreshed(tmp_path, text)
    assert (third.outcome, third.text_bytes_tokenized) == ("unchanged", 0)
    assert counts(third.changes.documents.total) == (0, 0, 0, 0)


@pytest.mark.slow
def test_histories_of_edits_are_counted(tmp_path):
    """Counts are those of a naive comparison."""
    drawn, before = random.Random(7), some_text()
    refreshed(tmp_path, before)
    for _ in range(12):
        after = dict(before)
        for name in map(str, drawn.choices(range(50), k=5)):
            source, content = after.pop(name, ("web", "new"))
            after |= drawn.choice([{}, {name: (source, f"{content}!")}, {name: ("notes", content)}])
        both = [(*before[name], *after[name]) for name in before.keys() & after]
        edited = sum(a != b for _, a, _, b in both), sum(a != b for a, _, b, _ in both)
        found = counts(refreshed(tmp_path, after).changes.documents.total)
        assert found == (len(after.keys() - before), len(before.keys() - after), *edited)
        before = after


def test_a_new_split_or_file_name_is_no_change_of_documents(tmp_path):
    text = some_text()
    refreshed(tmp_path, text)
    other = {"split_seed": 5, "publish": {"max_split_changes": 99}}
    split = refreshed(tmp_path, text, **other).changes.documents
    (tmp_path / "web/z.jsonl").write_bytes((tmp_path / "web/a.jsonl").read_bytes())
    twice = refreshed(tmp_path, text, **other).changes.documents
    assert counts(split.total) == (0, 0, 0, 0)
    assert [(one.before, one.after) for one in split.of_splits] == [("train", "validation"), ("validation", "train")]
    assert counts(twice.total) == (26, 0, 0, 0)
    (tmp_path / "web/z.jsonl").unlink()
    shutil.rmtree(tmp_path / "out/_cache/index")  # gone already: counts are as with it
    again = refreshed(tmp_path, text, **other).changes.documents
    assert counts(again.total) == (0, 26, 0, 0)


@pytest.mark.slow
def test_texts_of_other_tokenizers_are_not_compared(tmp_path):
    """Which documents changed their text is unknown then; which added and removed is told."""
    text = some_text(10)
    refreshed(tmp_path, text)
    del text["3"]
    found = refreshed(tmp_path, text, tokenizer={"name": "gpt2", "engine": "reference"}).changes
    assert counts(found.documents.total) == (0, 1, None, 0)
    assert "  all documents 0 added, 1 removed, unknown how many changed, 0 moved to another source" in as_text(found)
    assert "- all documents: 0 added, 1 removed, unknown how many changed, 0 moved" in as_markdown(found)


def test_other_steps_change_documents_whose_keys_are_made_of_their_texts(tmp_path):
    """They are the same documents, and have other tokens; those that a step leaves out removed."""
    text = {"a": ("web", "one\r\ntwo"), "b": ("web", "one line"), "c": ("notes", "x")}
    sources = [{"name": name, "path": str(tmp_path / name)} for name in ("notes", "web")]
    refreshed(tmp_path, text, sources=sources)
    steps = {"steps": [{"use": "normalize"}, {"use": "length", "min_characters": 2}]}
    found = refreshed(tmp_path, text, sources=sources, documents=steps).changes.documents
    assert counts(found.total) == (0, 1, 1, 0)
    assert {one.name: counts(one) for one in found.by_source} == {"notes": (0, 1, 0, 0), "web": (0, 0, 1, 0)}


def test_documents_that_cannot_be_compared_are_no_error(tmp_path, caplog, monkeypatch):
    """A version lost its documents, or the disk is full: it is told, and the version is published."""
    text = some_text(10)
    first = refreshed(tmp_path, text)
    shutil.rmtree(tmp_path / "out/versions" / first.version / "documents/train/file")
    del text["0"]
    with caplog.at_level(logging.WARNING):
        second = refreshed(tmp_path, text)
        del text["3"]
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error), raising=False)
        third = refreshed(tmp_path, text)
    for found in (second, third):
        assert (found.outcome, found.changes.documents) == ("published", None)
    assert f"The documents of versions {first.version} and {second.version} cannot be compared" in caplog.text
    assert "cannot be compared: No space left on device" in caplog.text
    assert [one.added for one in read_history(Store.at(tmp_path / "out"))] == [10, None, None]


def test_segments_are_passed_over_as_often_as_both_sides_have_them():
    """Those without a digest are not."""
    a = np.array([b"\0\0\0\1\1x", b"\0\0\0\1\1x", b"\0\0\0\2\1x", b"\0\0\0\1\1"], "S21")
    assert [found.tolist() for found in in_both(a, a[[3, 0]])] == [[True, False, False, False], [False, True]]


def test_each_refresh_that_publishes_has_a_line_in_the_history(tmp_path):
    """The others write nothing: where nothing changed, and where the version was rolled back."""
    text, output = some_text(10), Store.at(tmp_path / "out")
    first = refreshed(tmp_path, text)
    text["new"] = ("web", "new")
    second = refreshed(tmp_path, text)
    refreshed(tmp_path, text)
    roll_back(output)
    refreshed(tmp_path, text)
    found = read_history(output)
    assert [(one.version, one.documents, one.added, one.text_bytes_tokenized) for one in found] == [
        (first.version, 10, 10, first.text_bytes_tokenized),
        (second.version, 11, 1, second.text_bytes_tokenized),
    ]
    config = BuildConfig.model_validate({"output": str(tmp_path / "out"), "source": {"path": "/x"}, "tokenizer": "bytes"})
    lines = [line for line in history(config, found).splitlines() if line.startswith("- 20")]
    assert (len(lines), second.version in lines[0]) == (2, True)
    assert ": 11 documents (1 added, 0 removed, 0 changed, 0 moved), " in lines[0]
    collect(output, Policy(keep_versions=1, grace_days=0), delete=True)
    assert read_history(output) == found


def test_a_history_that_cannot_be_read_is_told_before_any_work(tmp_path):
    refreshed(tmp_path, some_text(4))
    (tmp_path / "out/runs/refreshes.jsonl").write_text("{}\n")
    with refusal(r"refreshes.jsonl: is not a history of refreshes. Restore it or remove it"):
        refreshed(tmp_path, some_text(5))
    assert len(list((tmp_path / "out/versions").iterdir())) == 1
