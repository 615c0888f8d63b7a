"""flat-tokens seen, and trace of a ledger: what a run was trained on, against looking at its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import Ledger, TokenBatch, write_dataset
from tests.terminal import Terminal


@pytest.fixture
def run(tmp_path: Path, demo: Path) -> Path:
    """A run of 40 steps or more over a demo with a record of its documents, and a dataset without one."""
    write_dataset(tmp_path / "plain", [TokenBatch.from_sequences([[i] * (i % 40) for i in range(200)])])
    text, plain = (flat_tokens.open(path).train.packed(64) for path in (demo, tmp_path / "plain"))
    ledger = Ledger.create(tmp_path / "run.json", {"text": (text, 3)}, 8, seed=1)
    ledger.edit(20, {"text": 1, "plain": (plain, 1)}, batch_size=16)
    return tmp_path / "run.json"


def test_a_document_is_seen_where_its_tokens_are(run: Path, demo: Path, tool: Terminal) -> None:
    found = tool.json("seen", run, "--document", "5", "--before", "60")
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
    by_key = tool.json("seen", run, "--document", document["key"], "--before", "60")
    assert by_key["sources"][0]["documents"] == [document]
    assert by_key["sources"][1]["documents"] == []


def test_all_documents_of_a_source_are_told(run: Path, tmp_path: Path, tool: Terminal) -> None:
    found = tool.json("seen", run, "--source", "plain", "--before", "30")["sources"]
    mixture, tokens = Ledger.open(run).mixture(), flat_tokens.open(tmp_path / "plain").train
    counts: dict[int, int] = {}
    for step in range(30):
        source, index = mixture.indices(step)
        for row in index[source == 1].tolist():
            for document in np.unique(tokens.slice(row * 64, row * 64 + 64) >> 1).tolist():
                counts[document] = counts.get(document, 0) + 1
    assert {document["document"]: len(document["visits"]) for document in found[0]["documents"]} == counts
    assert {document["key"] for document in found[0]["documents"]} == {None}


def test_people_see_a_summary_and_some_documents(run: Path, tool: Terminal) -> None:
    said = tool.out("seen", run, "--before", "30", "--limit", "2").splitlines()
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
def test_what_is_not_there_is_told(run: Path, tool: Terminal, arguments: list[str], status: int, said: str) -> None:
    assert said in tool.errors("seen", run, *arguments, status=status)


def test_a_moved_dataset_is_named(run: Path, tmp_path: Path, tool: Terminal) -> None:
    (tmp_path / "plain").rename(tmp_path / "moved")
    assert "plain" in tool.errors("seen", run, "--before", "30")
    tool.out("seen", run, "--before", "30", "--at", f"plain={tmp_path / 'moved'}")


def test_trace_takes_a_ledger(run: Path, demo: Path, tmp_path: Path, tool: Terminal) -> None:
    traced: dict[str, Any] = tool.json("trace", run, "--step", "25")
    mixture = Ledger.open(run).mixture()
    batch = mixture[25]
    tokens = [flat_tokens.open(path).train for path in (demo, tmp_path / "plain")]
    assert [row["row"] for row in traced["rows"]] == list(range(16))
    for row in traced["rows"]:
        k = mixture.names.index(row["source"])
        assert (k, row["view_row"]) == (batch.source[row["row"]], batch.index[row["row"]])
        ids = [tokens[k].sequence(part["sequence"])[slice(*part["sequence_tokens"])] for part in row["parts"]]
        assert np.array_equal(np.concatenate(ids), batch.samples.targets[row["row"]])
    one = tool.out("trace", run, "--step", "25", "--row", "3")
    assert f"row 3 of step 25: row {batch.index[3]:,} of source {mixture.names[batch.source[3]]}" in one
    assert "is a run's ledger: say --step" in tool.errors("trace", run, "--token", "5")


@pytest.mark.parametrize("settings", [{}, {"split_across_pack": True}, {"fit": "best"}], ids=["greedy", "split", "best"])
def test_trace_of_packed_documents(tmp_path: Path, demo: Path, tool: Terminal, settings: dict[str, Any]) -> None:
    train = flat_tokens.open(demo).train
    ledger = Ledger.create(tmp_path / "packs.json", {"text": (train.packed_documents(1200, **settings), 1)}, 4)
    traced = tool.json("trace", tmp_path / "packs.json", "--step", "2")
    batch = ledger.mixture()[2].samples
    for row in traced["rows"]:
        for part in row["parts"]:
            place = slice(*part["row_tokens"])
            assert set(batch.document_ids[row["row"]][place].tolist()) == {part["sequence"]}
            ids = train.sequence(part["sequence"])[slice(*part["sequence_tokens"])]
            assert np.array_equal(ids, batch.tokens[row["row"]][place])
