"""flat-tokens diff: what changed, against comparing by hand; and that equal things are the same."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flat_tokens.tools.diff
import flat_tokens.tools.documents
from flat_tokens.keys import mix
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.diff import KINDS, Side, changes, compare_documents
from tests.flat_tokens.demo import TOKENIZER, build_dataset
from tests.made import in_memory, write_sequences
from tests.sources import write_rows
from tests.terminal import Terminal


def write_lines(path: Path, documents: dict[str, str]) -> Path:
    return write_rows(path, [{"id": i, "text": text} for i, text in documents.items()])


def build(tmp_path: Path, name: str, documents: dict[str, str], **settings: Any) -> Path:
    source = {"path": str(write_lines(tmp_path / name / "in/x.jsonl", documents)), "id_column": "id"}
    return build_dataset(
        tmp_path / name / "out", **{"source": source, "tokenizer": "bytes", "validation_fraction": 0, **settings}
    )


DOCUMENTS = {f"d{i}": f"text {i}" for i in range(20)}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of these documents. Nothing changes it."""
    return build(tmp_path_factory.mktemp("diff"), "before", DOCUMENTS)


Diff = Callable[..., dict[str, Any]]


@pytest.fixture
def diff(before: Path, tmp_path: Path, tool: Terminal) -> Diff:
    """Differences from it to a dataset of other documents and settings, which is *after*."""

    def differences(documents: dict[str, str] = DOCUMENTS, *more: str, **settings: Any) -> dict[str, Any]:
        after = build(tmp_path, "after", documents, **settings)
        return {"after": after, **tool.json("diff", before, after, *more, status=1)}

    return differences


def test_a_dataset_is_the_same_as_itself_and_as_its_copy(before, tmp_path, tool):
    """Equal manifests are recognised without reading tokens."""
    shutil.copytree(before, tmp_path / "copy")
    for tokens in (tmp_path / "copy").rglob("encoded_tokens/c/0"):
        tokens.unlink()
    for other in (before, tmp_path / "copy"):
        assert tool.json("diff", before, other)["same"]
    assert tool.out("diff", before, tmp_path / "copy").endswith("the same\n")


def test_documents_that_came_went_and_changed_are_told_by_their_ids(before, diff, tool):
    changed = {**DOCUMENTS, "d3": "text three", "new": "text 99"}
    del changed["d7"]
    said = diff(changed)
    documents = said["documents"]
    assert (said["same"], documents["matched_by"], documents["tokens_compared"]) == (False, "key", True)
    assert [documents[kind] for kind in KINDS] == [1, 1, 1, 0]
    examples = documents["examples"]
    (added,), (removed,), (change,), _ = (examples[kind] for kind in KINDS)
    assert (added["b"]["sequence"], removed["a"]["document"]["row"]) == (19, 7)
    assert [change[side]["sequence"] for side in "ab"] == [3, 3]
    assert said["settings"] == []
    assert said["sources"][0]["files_changed"] == ["x.jsonl"]
    totals = {one["what"]: (one["a"], one["b"]) for one in said["totals"]}
    assert totals["train.tokens"] == (sum(map(len, DOCUMENTS.values())), sum(map(len, changed.values())))
    assert totals["the source.tokens"] == totals["train.tokens"]
    assert "documents, by their keys: 1 added, 1 removed, 1 changed" in tool.out("diff", before, said["after"], status=1)


def test_another_tokenizer_and_layout_change_settings_and_totals_and_no_documents(before, diff, tool):
    said = diff(tokenizer=TOKENIZER, layout="zarr2")
    assert {one["what"] for one in said["settings"]} == {
        *("tokenizer.name", "tokenizer.digest", "tokenizer.highest_id", "layout", "stored")
    }
    assert said["sources"] == []
    assert said["documents"] | {"same": True, "same_order": True, "tokens_compared": False} == said["documents"]
    assert any(one["what"] == "train.tokens" for one in said["totals"])
    assert tool.json("diff", before, said["after"], "--totals", status=1)["documents"] is None


def test_another_split_moves_documents(diff):
    said = diff(DOCUMENTS, "--limit", "2", validation_fraction=0.5)
    assert said["documents"]["moved"] == flat_tokens.open(said["after"]).validation.seq_count > 2
    assert [(one["a"]["split"], one["b"]["split"]) for one in said["documents"]["examples"]["moved"]] == [
        ("train", "validation")
    ] * 2
    assert said["settings"] == [{"what": "split_rule.validation_fraction", "a": 0, "b": 0.5}]


def test_the_same_documents_in_another_order_are_not_the_same(before, diff, tool):
    said = diff(dict(reversed(DOCUMENTS.items())))
    assert (said["documents"]["same"], said["documents"]["same_order"]) == (False, False)
    assert "documents, by their keys: the same, in another order" in tool.out("diff", before, said["after"], status=1)


def test_files_that_came_went_and_were_renamed_are_told_by_their_content(tmp_path, tool):
    for i in range(4):
        write_lines(tmp_path / "in" / f"f{i}.jsonl", {f"{i}": f"text {i}"})
    settings = {"source": {"path": str(tmp_path / "in"), "name": "lines"}, "tokenizer": "bytes"}
    a = build_dataset(tmp_path / "a", **settings)
    (tmp_path / "in/f0.jsonl").rename(tmp_path / "in/g0.jsonl")
    (tmp_path / "in/f1.jsonl").unlink()
    write_lines(tmp_path / "in/h.jsonl", {"9": "text 9"})
    b = build_dataset(tmp_path / "b", **settings)
    (change,) = tool.json("diff", a, b, status=1)["sources"]
    files = [change[f"files_{kind}"] for kind in ("renamed", "added", "removed", "changed", "same")]
    assert files == [[["f0.jsonl", "g0.jsonl"]], ["h.jsonl"], ["f1.jsonl"], [], 2]
    settings["source"]["name"] = "other"
    c = build_dataset(tmp_path / "c", **settings)
    removed, added = tool.json("diff", b, c, status=1)["sources"]
    assert [(one["source"], one["change"]) for one in (removed, added)] == [("lines", "removed"), ("other", "added")]
    assert added["added_from_elsewhere"] == 4


def test_a_format_and_its_options_are_for_the_side_that_has_them(tmp_path, tool):
    """A stream of tokens without an index, in which documents are found again by the token between them."""
    write_sequences(tmp_path / "data", [[1, 2], [3]])
    (tmp_path / "train.bin").write_bytes(np.array([1, 2, 9, 3, 9], "<u2").tobytes())
    stream = ["--format", "nanogpt", "--option", "end_of_text=9"]
    for pair in ((tmp_path / "data", tmp_path / "train.bin"), (tmp_path / "train.bin", tmp_path / "data")):
        documents = tool.json("diff", *pair, *stream, status=1)["documents"]
        assert (documents["matched_by"], documents["added"], documents["removed"]) == ("tokens", 0, 0)


def test_a_query_writes_what_does_not_fit_into_memory_and_says_if_there_is_no_room(monkeypatch):
    """A million documents on each side in 100 MB."""
    keys = mix(np.arange(1_000_000, dtype=np.uint64))
    sides = [Side(keys[:last], keys[:last], np.array([0, last]), ("train",)) for last in (1_000_000, 999_990)]
    monkeypatch.setattr(flat_tokens.tools.documents, "MEMORY", "100MB")
    with changes(*sides) as found:
        assert found.execute("SELECT kind, count(*) FROM changes GROUP BY kind").fetchall() == [("removed", 10)]
    monkeypatch.setattr(flat_tokens.tools.documents, "MEMORY", "30MB")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1))
    with pytest.raises(OSError, match="has no room for a query"), changes(*sides):
        pass


def test_a_full_disk_is_an_error_that_names_the_place(before, tmp_path, tool, monkeypatch):
    """And not a signal, when the memory of a file is written for which there is no room."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    said = tool.errors("diff", before, write_sequences(tmp_path / "other", [[1]]))
    assert said.startswith("flat-tokens diff: No space left on device")
    assert tempfile.gettempdir() in said


def test_no_query_writes_a_bar_to_standard_output():
    """duckdb takes a program without a file for a notebook."""
    program = """
from flat_tokens.tools.documents import connection
with connection() as opened:
    print(opened.execute("SELECT current_setting('enable_progress_bar')").fetchone())
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "(False,)\n"


def test_counts_are_those_of_multisets(monkeypatch):
    """Documents without ids: what one has more often than the other."""
    monkeypatch.setattr(flat_tokens.tools.diff, "KEYS_AT_A_TIME", 2)
    trains = ([[1], [1], [], [2, 3], [1], [5]], [[1], [], [4], [5]])
    a, b = (open_corpus(in_memory(*splits)) for splits in zip(trains, ([[6]], [[], [2, 3], [4], [6]]), strict=True))
    found = compare_documents(a, b, 100)
    assert [found[kind] for kind in KINDS] == [3, 2, 0, 1]
    added = [b.splits[one["b"]["split"]].sequence(one["b"]["sequence"]).tolist() for one in found["examples"]["added"]]
    assert sorted(added) == [[], [4], [4]]
    assert (found["same"], compare_documents(a, a, 100)["same"]) == (False, True)
