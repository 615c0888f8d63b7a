"""Partitioned directories: a version has the columns that it would have if the files had them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.manifest import SPLITS
from tests.faults.support import settings_of
from tests.flows.through_json import built
from tests.refusal import refusal
from tests.sources import Rows, expected, held, write_partitioned, write_rows

FRACTION = 0.4


def some_rows(count: int) -> Rows:
    """Documents by language and year; some have no language."""
    return [
        {"id": f"d{i}", "text": f"document {i} " * (i % 5 + 1), "lang": ("de", "en/us", None)[i % 3], "year": f"{2020 + i % 2}"}
        for i in range(count)
    ]


def settings(tmp_path: Path, output: str = "out", keep: Sequence[str] = ("year", "lang"), **more: Any) -> dict[str, Any]:
    common = {"validation_fraction": FRACTION, "scratch": str(tmp_path / "scratch")}
    return settings_of(tmp_path / output, tmp_path / "in", keep=keep, **common | more)


@pytest.mark.parametrize(
    ("ending", "slice_bytes"), [("parquet", 150), ("jsonl", 1 << 20), ("arrow", 1 << 20), ("csv", 150), ("jsonl.zst", 150)]
)
def test_columns_of_directories_are_columns(tmp_path, ending, slice_bytes):
    """In files that are cut, in files that are read together, on other workers. A second build reads none of them."""
    files = write_partitioned(tmp_path / "in", some_rows(30), ("lang", "year"), ending)
    result = built(settings(tmp_path, slice_bytes=slice_bytes))
    assert held(result.path) == expected(files, fraction=FRACTION, columns=("year", "lang"))
    other = built(settings(tmp_path, "groups", slice_bytes=slice_bytes), None)
    assert other.version == result.version
    again = built(settings(tmp_path, slice_bytes=slice_bytes))
    assert (again.version, again.text_bytes_tokenized) == (result.version, 0)


def test_text_files_have_them_too_read_together_or_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 1)
    for number, name in enumerate(["k=a/1.txt", "k=a/2.txt", "k=b/1.txt", "3.txt"]):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"{number} one\n{number} two\n")
    given = settings(tmp_path, keep=["k"], validation_fraction=0)
    (source,) = given["sources"]
    del source["id_column"]
    with refusal(r"3.txt is plain text, which has no column 'k'"):
        built(given)
    (tmp_path / "in/3.txt").unlink()
    for slice_bytes in (1 << 20, 20):
        for separator in (None, "\n"):
            source["document_separator"] = separator
            found = held(built(given | {"slice_bytes": slice_bytes}).path)["train"]
            each = 1 if separator is None else 2
            assert [one.columns["k"] for one in found] == ["a"] * 2 * each + ["b"] * each


def test_a_column_of_the_file_counts_and_then_nothing_is_other_than_without_directories(tmp_path):
    rows = some_rows(12)
    write_rows(tmp_path / "in/lang=fr/x.parquet", [{**row, "lang": "en"} for row in rows])
    found = held(built(settings(tmp_path, keep=["lang"])).path)
    assert {one.columns["lang"] for split in SPLITS for one in found[split]} == {"en"}


def test_equal_files_in_two_directories_differ_and_a_moved_one_is_read_again(tmp_path):
    rows = [{"id": f"d{i}", "text": f"text {i}"} for i in range(20)]
    for lang in ("de", "en"):
        write_rows(tmp_path / "in" / f"lang={lang}" / "x.jsonl", rows)
    given = settings(tmp_path, keep=["lang"], split={"by": "lang"})
    first = built(given)
    found = held(first.path)
    assert {(one.file, one.columns["lang"]) for split in SPLITS for one in found[split]} == {(0, "de"), (1, "en")}
    assert all(len({one.columns["lang"] for one in found[split]}) <= 1 for split in SPLITS)
    (tmp_path / "in/lang=en").rename(tmp_path / "in/lang=fr")
    moved = built(given)
    assert moved.version != first.version
    assert {one.columns["lang"] for split in SPLITS for one in held(moved.path)[split]} == {"de", "fr"}


def test_directories_above_the_source_give_nothing_and_the_error_says_so(tmp_path):
    write_rows(tmp_path / "in/lang=de/x.jsonl", [{"id": "1", "text": "a"}])
    given = settings(tmp_path, keep=["lang"])
    given["sources"][0]["path"] = str(tmp_path / "in/lang=de")
    with refusal("Directories give columns if they are below source"):
        built(given)
