"""flat-tokens seen, and trace of a ledger: what a run was trained on, against looking at its batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import Ledger, TokenBatch, write_dataset
from flat_tokens.tools.cli import main


@pytest.fixture
def run(tmp_path: Path, demo: Path) -> Path:
    """A run of 40 steps or more over a demo with a record of its documents, and a dataset without one."""
    write_dataset(tmp_path / "plain", [TokenBatch.from_sequences([[i] * (i % 40) for i in range(200)])])
    text, plain = (flat_tokens.open(path).train.packed(64) for path in (demo, tmp_path / "plain"))
    ledger = Ledger.create(tmp_path / "run.json", {"text": (text, 3)}, 8, seed=1)
    ledger.edit(20, {"text": 1, "plain": (plain, 1)}, batch_size=16)
    return tmp_path / "run.json"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(list(arguments)) == status
    return capsys.readouterr().out


def test_a_document_is_seen_where_its_tokens_are(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "seen", str(run), "--document", "5", "--before", "60", "--json"))
    mixture, train = Ledger.open(run).mixture(), flat_tokens.open(demo).train
    assert [source["name"] for source in found["sources"]] == ["text", "plain"]
    assert [source["samples"] for source in found["sources"]] == mixture.drawn(60).tolist()
    document = found["sources"][0]["documents"][0]
    first, stop = train.span(5)
    holding = set(range(first // 64, (stop - 1) // 64 + 1))
    expected = []
    for step in range(60):
        source, index = mixture.indices(step)
        expected += [(step, k, int(index[k])) for k in range(len(index)) if source[k] == 0 and int(index[k]) in holding]
    assert [(visit["step"], visit["batch_row"], visit["row"]) for visit in document["visits"]] == expected
    by_key = json.loads(printed(capsys, "seen", str(run), "--document", document["key"], "--before", "60", "--json"))
    assert by_key["sources"][0]["documents"] == [document]
    assert by_key["sources"][1]["documents"] == []


def test_all_documents_of_a_source_are_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "seen", str(run), "--source", "plain", "--before", "30", "--json"))["sources"]
    mixture, tokens = Ledger.open(run).mixture(), flat_tokens.open(tmp_path / "plain").train
    counts: dict[int, int] = {}
    for step in range(30):
        source, index = mixture.indices(step)
        for row in index[source == 1].tolist():
            for document in np.unique(tokens.slice(row * 64, row * 64 + 64) >> 1).tolist():
                counts[document] = counts.get(document, 0) + 1
    assert {document["document"]: len(document["visits"]) for document in found[0]["documents"]} == counts
    assert {document["key"] for document in found[0]["documents"]} == {None}


def test_people_see_a_summary_and_some_documents(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "seen", str(run), "--before", "30", "--limit", "2").splitlines()
    assert said[0].startswith("text: 239 samples before step 30, 0.34 epochs of 701 rows")
    assert said[1].startswith("  document 0, key ")
    assert ": step " in said[1]
    assert said[3] == "  ... more with --limit N, all with --limit 0"
    assert said[4].startswith("plain: 81 samples before step 30, ")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "the run has no end. Say --before STEP"),
        (["--before", "30", "--source", "other"], 2, "there is no source 'other'; there are text, plain"),
        (["--before", "30", "--document", "99999"], 1, ""),
        (["--before", "30", "--document", "0123456789abcdef"], 1, ""),
    ],
)
def test_what_is_not_there_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert main(["seen", str(run), *arguments]) == status
    assert said in capsys.readouterr().err


def test_a_moved_dataset_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").rename(tmp_path / "moved")
    assert main(["seen", str(run), "--before", "30"]) == 2
    assert "plain" in capsys.readouterr().err
    printed(capsys, "seen", str(run), "--before", "30", "--at", f"plain={tmp_path / 'moved'}")


def test_trace_takes_a_ledger(run: Path, demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced: dict[str, Any] = json.loads(printed(capsys, "trace", str(run), "--step", "25", "--json"))
    mixture = Ledger.open(run).mixture()
    batch = mixture[25]
    tokens = [flat_tokens.open(path).train for path in (demo, tmp_path / "plain")]
    assert [row["row"] for row in traced["rows"]] == list(range(16))
    for row in traced["rows"]:
        k = mixture.names.index(row["source"])
        assert (k, row["view_row"]) == (batch.source[row["row"]], batch.index[row["row"]])
        ids = [tokens[k].sequence(part["sequence"])[slice(*part["sequence_tokens"])] for part in row["parts"]]
        assert np.array_equal(np.concatenate(ids), batch.samples.targets[row["row"]])
    one = printed(capsys, "trace", str(run), "--step", "25", "--row", "3")
    assert f"row 3 of step 25: row {batch.index[3]:,} of source {mixture.names[batch.source[3]]}" in one
    assert main(["trace", str(run), "--token", "5"]) == 2
    assert "is a run's ledger: say --step" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{}, {"split_across_pack": True}, {"fit": "best"}], ids=["greedy", "split", "best"])
def test_trace_of_packed_documents(
    tmp_path: Path, demo: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    train = flat_tokens.open(demo).train
    ledger = Ledger.create(tmp_path / "packs.json", {"text": (train.packed_documents(1200, **settings), 1)}, 4)
    traced = json.loads(printed(capsys, "trace", str(tmp_path / "packs.json"), "--step", "2", "--json"))
    batch = ledger.mixture()[2].samples
    for row in traced["rows"]:
        for part in row["parts"]:
            place = slice(*part["row_tokens"])
            assert set(batch.document_ids[row["row"]][place].tolist()) == {part["sequence"]}
            ids = train.sequence(part["sequence"])[slice(*part["sequence_tokens"])]
            assert np.array_equal(ids, batch.tokens[row["row"]][place])
