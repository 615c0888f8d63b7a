"""Duplicates through the whole pipeline: the first of equal texts stays, however the build is spread and whatever went before."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from flows.commands.build import summary as told_summary
from flows.pipelines.build import BuildResult
from flows.pipelines.plan import plan
from flows.pipelines.refresh import RefreshResult
from flows.watch.summaries import summary
from tasks.config import BuildConfig
from tasks.garbage import Policy, collect
from tasks.models import digest_of
from tests.faults.support import build_here, refresh_here, same_bytes, settings_of
from tests.sources import by_place, held, write_rows

Document = tuple[int, int, str]
"""File, row and text."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 200)
    monkeypatch.setattr("tasks.assemble.write.SPAN_TOKENS", 1)
    monkeypatch.setattr("tasks.assemble.write.SPAN_DOCUMENTS", 1)


def put(path: Path, texts: list[str]) -> Path:
    """JSONL with ids of their own; no two documents have the same key."""
    return write_rows(path, [{"id": f"{path}-{i}", "text": text} for i, text in enumerate(texts)])


told = partial(settings_of, documents={"duplicates": "drop"}, validation_fraction=0.3, slice_bytes=300)


def documents_of(result: BuildResult) -> list[Document]:
    """The documents of a version of byte tokens, in the order of the sources."""
    return sorted((*place, one.text) for place, (_, one) in by_place(result.path).items())


def first_ones(*files: list[str]) -> tuple[list[Document], list[tuple[int, int, int, int]]]:
    """What a set makes of files: the documents that stay, and file and row of each other one and of the one that it repeats."""
    seen = {}
    stay, copies = [], []
    for file, texts in enumerate(files):
        for row, text in enumerate(texts):
            if text in seen:
                copies.append((file, row, *seen[text]))
            else:
                seen[text] = (file, row)
                stay.append((file, row, text))
    return stay, copies


def listed(result: BuildResult) -> list[tuple[int, int, int, int]]:
    """The duplicates in the table of documents, with those that stayed; files by their numbers."""
    dataset = flat_tokens.open(result.path)
    files = [file["name"] for source in dataset.manifest["provenance"]["sources"] for file in source["files"]]
    rows = dataset.documents.read_all().to_pylist()
    place = {row["key"]: (files.index(row["file"]), row["row"]) for row in rows}
    return sorted(place[row["key"]] + place[row["of"]] for row in rows if row["reason"] == "duplicate")


def test_counts_are_told_by_source(tmp_path):
    paths = put(tmp_path / "a.jsonl", ["x", "yy", "x"]), put(tmp_path / "b.jsonl", ["yy", "z"])
    settings = told(tmp_path / "out", *paths)
    forecast = plan(BuildConfig.model_validate(settings))
    assert (forecast.documents, forecast.slices_stored) == (5, 0)
    assert build_here({**settings, "documents": {}}).text_bytes_tokenized > 0
    result = build_here(settings)
    assert result.text_bytes_tokenized == 0  # segments are shared
    documents = result.totals["documents"]
    assert [documents[name] for name in ("read", "written", "text_bytes", "skipped")] == [5, 3, 4, {"duplicate": 2}]
    assert [one["text_bytes"] for one in documents["by_source"]] == [3, 1]
    assert "2 skipped: duplicate" in "\n".join(told_summary(result))
    shown = summary(BuildConfig.model_validate(settings), result, "x")
    assert "Duplicates: 2 documents with the text of an earlier one are left out." in shown.splitlines()
    assert "Skipped: 2 duplicate." in Path(result.path, "README.md").read_text()


def test_texts_are_compared_behind_the_steps(tmp_path):
    path = put(tmp_path / "a.jsonl", ["one\r\n", "one\n", "x", "\u00e9", "e\u0301"])
    steps = [{"use": "length", "min_bytes": 2}, {"use": "normalize"}]
    result = build_here(told(tmp_path / "out", path, documents={"duplicates": "drop", "steps": steps}))
    assert documents_of(result) == [(0, 0, "one\n"), (0, 3, "\u00e9")]
    assert result.totals["documents"]["skipped"]["duplicate"] == 2


def test_pairs_are_equal_where_both_parts_are(tmp_path):
    """A text that has the same bytes as a pair is no copy of it: other tokens of it count."""
    pairs = [{"q": q, "a": a} for q, a in [("2+2=", "4"), ("2+2=4", ""), ("2+2=", "4"), ("", "2+2=4")]]
    path = str(write_rows(tmp_path / "pairs.parquet", pairs))
    masked = {"name": "pairs", "path": path, "prompt_column": "q", "completion_column": "a"}
    plain = {"name": "plain", "path": str(put(tmp_path / "plain.jsonl", ["2+2=4", "2+2=\0\0014", "2+2=4"]))}
    found = held(build_here(told(tmp_path / "out", validation_fraction=0) | {"sources": [masked, plain]}).path)["train"]
    assert [one.text for one in found] == ["2+2=4"] * 4 + ["2+2=\0\0014"]
    assert ["".join(map(str, one.mask)) for one in found] == ["00001", "00000", "11111", "11111", "1111111"]


def check_as_anew(settings: dict[str, Any], tmp_path: Path, *files: list[str]) -> RefreshResult:
    """Refresh. The bytes are those of a build from nothing, and the documents those that a set would leave."""
    result = refresh_here(settings)
    assert result.build is not None
    anew = build_here({**settings, "output": str(tmp_path / f"anew-{result.version}")})
    assert same_bytes(result, anew)
    assert (documents_of(result.build), listed(result.build)) == first_ones(*files)
    return result


def test_the_next_copy_takes_the_place_of_one_that_leaves(tmp_path, caplog):
    """Its tokens are among those that were left out: none is made again. If they are damaged, they are made again.
    Other slices give the same version.
    """
    texts = [f"text {i if i % 3 else i // 2} " + "salt wind " * 3 for i in range(40)]  # some stand before, in either file
    one, other = texts[:20], texts[20:]
    sources, settings = tmp_path / "in", told(tmp_path / "out", tmp_path / "in")
    put(sources / "a.jsonl", one)
    put(sources / "b.jsonl", other)
    first = check_as_anew(settings, tmp_path, one, other)
    assert same_bytes(first, build_here({**settings, "output": str(tmp_path / "slices"), "slice_bytes": 900}))
    (sources / "a.jsonl").unlink()
    result = check_as_anew(settings, tmp_path, other)
    assert result.text_bytes_tokenized == 0
    put(sources / "a.jsonl", other[:5])
    result = check_as_anew(settings, tmp_path, other[:5], other)
    assert 0 <= result.text_bytes_tokenized <= sum(len(text.encode()) for text in other[:5])
    (sources / "a.jsonl").unlink()
    put(sources / "c.jsonl", one)
    for path in (tmp_path / "out/_cache/left_out").glob("*/texts/train/digest/c/0"):
        path.write_bytes(path.read_bytes()[::-1])
    with caplog.at_level("WARNING", "tasks.shards.index"):
        result = check_as_anew(settings, tmp_path, other, one)
    assert "texts/train/digest/c/0 is not what was written" in caplog.text
    assert result.text_bytes_tokenized == sum(len(text.encode()) for text in (*other, *one))


def test_garbage_collection_leaves_what_the_next_copy_needs(tmp_path):
    """What a version left out goes with it, and that of one that stays gives a later one what it needs."""
    sources, settings = tmp_path / "in", told(tmp_path / "out", tmp_path / "in")
    put(sources / "a.jsonl", ["same", "a"])
    put(sources / "b.jsonl", ["same", "b"])
    check_as_anew(settings, tmp_path, ["same", "a"], ["same", "b"])
    policy = Policy(keep_versions=1, grace_days=0)
    assert collect(Store.at(tmp_path / "out"), policy, delete=True).garbage == ()
    (sources / "a.jsonl").unlink()
    assert check_as_anew(settings, tmp_path, ["same", "b"]).text_bytes_tokenized == 0
    left_out = {path.name for path in (tmp_path / "out/_cache/left_out").iterdir()}
    (tmp_path / "out/_cache/left_out/gone").mkdir()
    (tmp_path / "out/_cache/left_out/gone/zarr.json").write_text("{}")
    kinds = {item.kind for item in collect(Store.at(tmp_path / "out"), policy, delete=True).garbage}
    assert kinds == {"version", "record", "left out"}
    assert {path.name for path in (tmp_path / "out/_cache/left_out").iterdir()} < left_out


def test_what_a_dead_build_left_is_written_again_or_collected(tmp_path, monkeypatch):
    path = put(tmp_path / "a.jsonl", ["same", "a", "same"])
    settings = told(tmp_path / "out", path, shutil.copy(path, tmp_path / "b.jsonl"))  # the slice of both is the same
    with monkeypatch.context() as patch:
        patch.setattr("tasks.finalize.seal.write_index", Mock(side_effect=OSError("stop")))
        with pytest.raises(OSError, match="stop"):
            build_here(settings)
    found = collect(Store.at(tmp_path / "out"), Policy(grace_days=0)).garbage
    assert "unfinished version" in {item.kind for item in found}
    assert documents_of(build_here(settings)) == [(0, 0, "same"), (0, 1, "a")]
    assert list((tmp_path / "out").rglob("repeats-*")) == []


@pytest.mark.parametrize("planted", ["an object next to the version", "an array of texts"])
def test_an_index_leads_nowhere_else(tmp_path, caplog, planted):
    settings = told(tmp_path / "out", put(tmp_path / "a.jsonl", ["same", "other", "same"]))
    first = build_here(settings)
    index = tmp_path / f"out/_cache/index/{first.version}.json"
    facts = json.loads(index.read_bytes())
    del facts["sha256"]
    if planted == "an object next to the version":
        facts["beside"][0]["key"] = "../../../../secret"
    else:
        facts["shards"][0]["texts"] = ["../../../../secret"]
    index.write_text(json.dumps({"sha256": digest_of(facts), **facts}))
    again = build_here({**settings, "split_seed": 5})
    assert "is not used" in caplog.text
    assert again.text_bytes_tokenized > 0
    assert documents_of(again) == documents_of(first)
