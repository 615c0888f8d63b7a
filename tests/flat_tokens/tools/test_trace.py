"""flat-tokens trace: from tokens, sequences and training steps to the documents they come from, against looking by hand."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.rows.loader import ShuffledLoader
from flat_tokens.rows.orders import ReferenceOrder
from tests.flat_tokens.demo import DEMO, build_lines
from tests.made import write_sequences


@functools.cache
def source_texts() -> dict[str, list[str]]:
    notes = [json.loads(line)["text"] for line in (DEMO / "notes.jsonl").read_text().splitlines()]
    return {"stories.parquet": pq.read_table(DEMO / "stories.parquet")["text"].to_pylist(), "notes.jsonl": notes}


def text_of(document: dict[str, Any]) -> str:
    return source_texts()[document["file"]][document["row"]]


@pytest.mark.parametrize(
    ("where", "kind", "split"),
    [
        ("", "flat-tokens dataset", "train"),
        ("latest", "flat-tokens dataset", "validation"),
        ("latest/validation", "validation split of a flat-tokens dataset", "validation"),
    ],
)
def test_a_sequence_leads_to_its_row_and_its_text(demo, trusting, where, kind, split):
    """In an output, its newest version, and a split of it."""
    assert trusting.json("inspect", demo / where)["kind"] == kind
    for i in (0, 30, -1):
        found = trusting.json("trace", demo / where, "--split", split, "--sequence", i)
        assert found["text_from"] == "source"
        assert found["text"] == text_of(found["document"])
        assert found["found"] == str(DEMO / found["document"]["file"])
        assert found["ids"] == getattr(flat_tokens.open(demo), split).sequence(i).tolist()


def test_a_token_leads_to_the_sequence_that_holds_it(demo, trusting):
    train = flat_tokens.open(demo).train
    first, stop = train.span(5)
    for token, index, sequence in ((first, first, 5), (stop - 1, stop - 1, 5), (-1, train.token_count - 1, train.seq_count - 1)):
        found = trusting.json("trace", demo, "--token", token)
        told, within = found["token"], index - train.span(sequence)[0]
        assert (found["sequence"], told["index"], told["in_sequence"]) == (sequence, index, within)
        assert told["id"] == int(train.sequence(sequence)[within])
        assert told["before"] + told["text"] + told["after"] in found["text"]


def test_people_see_where_it_is_from(demo, trusting):
    said = trusting.out("trace", demo, "--token", "100", "--characters", "20")
    for part in ("token      100: id ", "file       stories.parquet", "text from  the source", " more", "»"):
        assert part in said
    said = trusting.out("trace", demo, "--step", "2", "--batch-size", "4", "--length", "64", "--row", "3")
    assert said.startswith("row 3 of step 2: row ")
    assert "stories.parquet" in said


def test_without_the_source_there_is_the_decoded_text(tmp_path, trusting):
    path, trace = build_lines(tmp_path, "one", "zwei\né"), ["trace", tmp_path / "out", "--sequence", "1"]
    assert trusting.json(*trace)["text_from"] == "source"
    path.parent.rename(tmp_path / "there")
    found = trusting.json(*trace)
    assert (found["text_from"], found["text"], found["document"]["row"]) == ("tokens", "zwei\né", 1)
    assert found["notes"] == ["x.jsonl is not found; say where it is with --source"]
    found = trusting.json(*trace, "--source", tmp_path / "there")
    assert (found["text_from"], found["text"]) == ("source", "zwei\né")


def test_a_source_that_has_changed_is_not_taken_for_the_document(tmp_path, trusting):
    path = build_lines(tmp_path, "one", "two")
    path.write_text(path.read_text().replace("two", "TWO"))
    found = trusting.json("trace", tmp_path / "out", "--sequence", "1")
    assert (found["text_from"], found["text"]) == ("tokens", "two")
    assert found["notes"] == [f"row 1 of {path} is not the document, by its key: the file has changed since it was read"]


def test_a_dataset_without_a_record_shows_its_tokens(tmp_path, trusting):
    write_sequences(tmp_path / "data", [[5], [], [6, 7]])
    found = trusting.json("trace", tmp_path / "data", "--token", "1")
    assert (found["sequence"], found["ids"], found["document"], found["text"]) == (2, [6, 7], None, None)
    assert "there is no record of where sequences come from" in found["notes"]


def test_a_token_shard_knows_its_documents_by_key_and_row(demo, trusting):
    shards = sorted(path.parent for path in demo.glob("_cache/*/receipt.json"))
    found = [trusting.json("trace", shard, "--sequence", "2") for shard in shards]
    assert sorted(len(one["text"]) for one in found) == sorted(len(texts[2]) for texts in source_texts().values())
    assert [one["document"]["row"] for one in found] == [2, 2]
    assert "a token shard's rows count from the beginning of its part, [0, " in found[0]["notes"][0]


def rows_of(found: dict[str, Any], train: flat_tokens.FlatTokens) -> list[list[int]]:
    """The tokens of a traced batch's rows, put together from the sequences that it names."""
    rows = []
    for row in found["rows"]:
        tokens = []
        for part in row["parts"]:
            assert part["row_tokens"][0] == len(tokens)
            low, high = part["sequence_tokens"]
            tokens += train.sequence(part["sequence"])[low:high].tolist()
            assert part["row_tokens"][1] == len(tokens)
        rows.append(tokens)
    return rows


ORDERS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--seed", "7", "--epochs", "0", "--start", "12"], {"seed": 7, "epochs": None, "start": 12}),
    (["--reference-order", "2,4,3"], {"order": ReferenceOrder(2, 4, 3)}),
]


@pytest.mark.parametrize(("arguments", "settings"), ORDERS)
@pytest.mark.parametrize(("view", "overlap"), [("packed", {"overlap": 1}), ("blocks", {}), ("documents", {})])
def test_a_step_leads_to_the_documents_of_the_loaders_batch(demo, trusting, view, overlap, arguments, settings):
    train = flat_tokens.open(demo).train
    loader = ShuffledLoader(getattr(train, view)(200, **overlap), 4, **settings)
    told = [*arguments, "--view", view, "--overlap", len(overlap), "--batch-size", "4", "--length", "200"]
    for step in (0, 3):
        found = trusting.json("trace", demo, "--step", step, *told)
        batch = loader[step]
        lengths = batch.length if view == "documents" else [None] * 4
        expected = [(row >> 1).tolist()[:length] for row, length in zip(batch.encoded, lengths, strict=True)]
        assert rows_of(found, train) == expected
        assert [row["view_row"] for row in found["rows"]] == loader.indices(step).tolist()
        for row in found["rows"]:
            for part in row["parts"]:
                assert part["text"] == text_of(part["document"])
                assert part["part_text"].strip("\ufffd") in part["text"]


def test_empty_sequences_have_no_part_in_a_row(tmp_path, trusting):
    """However many stand between two tokens of a row."""
    write_sequences(tmp_path / "data", [[], [1, 2], *[[]] * 50, [3], [4, 5]])
    step = ["--step", "0", "--batch-size", "1", "--length", "4", "--order", "sequential"]
    (row,) = trusting.json("trace", tmp_path / "data", *step)["rows"]
    assert [(part["sequence"], part["row_tokens"]) for part in row["parts"]] == [(1, [0, 2]), (52, [2, 3]), (53, [3, 4])]


@pytest.fixture
def run(tmp_path: Path, demo: Path) -> Path:
    """A run of 40 steps or more over a demo with a record of its documents, and a dataset without one."""
    write_sequences(tmp_path / "plain", [[i] * (i % 40) for i in range(200)])
    text, plain = (flat_tokens.open(path).train.packed(64) for path in (demo, tmp_path / "plain"))
    ledger = Ledger.create(tmp_path / "run.json", {"text": (text, 3)}, 8, seed=1)
    ledger.edit(20, {"text": 1, "plain": (plain, 1)}, batch_size=16)
    return tmp_path / "run.json"


def test_a_document_is_seen_where_its_tokens_are(run, demo, tool):
    text, plain = tool.json("seen", run, "--before", "60")["sources"]
    mixture, train = Ledger.open(run).mixture(), flat_tokens.open(demo).train
    assert [text["samples"], plain["samples"]] == mixture.drawn(60).tolist()
    assert [(one["document"], one["key"]) for one in plain["documents"]] == [(i, None) for i in range(1, 199) if i % 40]
    document = text["documents"][5]
    first, stop = train.span(5)
    holding = {(0, row) for row in range(first // 64, (stop - 1) // 64 + 1)}
    batches = ((step, *of) for step in range(60) for of in enumerate(zip(*mixture.indices(step), strict=True)))
    expected = [(step, k, place[1]) for step, k, place in batches if place in holding]
    assert [(visit["step"], visit["batch_row"], visit["row"]) for visit in document["visits"]] == expected
    for told in (document["document"], document["key"]):
        found = tool.json("seen", run, "--source", "text", "--document", told, "--before", "60")["sources"]
        assert [source["documents"] for source in found] == [[document]]


def test_people_see_a_summary_and_some_documents(run, tmp_path, tool):
    said = tool.out("seen", run, "--before", "30", "--limit", "2").splitlines()
    assert said[0].startswith("text: 239 samples before step 30, 0.34 epochs of 701 rows")
    assert said[3] == "  ... more with --limit N, all with --limit 0"
    Ledger.open(run).replace(30, "plain", str(tmp_path / "plain"))
    assert "  its dataset was replaced, as documents were forgotten" in tool.out("seen", run, "--before", "30")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "the run has no end. Say --before STEP"),
        (["--before", "30", "--source", "other"], 2, "there is no source 'other'; there are 'text', 'plain'"),
        (["--before", "30", "--document", "0123456789abcdef"], 1, ""),
    ],
)
def test_what_is_not_there_is_told(run, tool, arguments, status, said):
    assert said in tool.errors("seen", run, *arguments, status=status)


def test_a_moved_dataset_is_named(run, demo, tmp_path, tool):
    (tmp_path / "plain").rename(tmp_path / "moved")
    tool.out("seen", run, "--before", "30", "--at", f"plain={tmp_path / 'moved'}", "--at", f"text={demo}")


def test_trace_takes_a_ledger(run, demo, tmp_path, tool):
    traced = tool.json("trace", run, "--step", "25")
    mixture = Ledger.open(run).mixture()
    batch = mixture[25]
    tokens = [flat_tokens.open(path).train for path in (demo, tmp_path / "plain")]
    for n, row in enumerate(traced["rows"]):
        k = mixture.names.index(row["source"])
        assert (row["row"], k, row["view_row"]) == (n, batch.source[n], batch.index[n])
        ids = [tokens[k].sequence(part["sequence"])[slice(*part["sequence_tokens"])] for part in row["parts"]]
        assert np.array_equal(np.concatenate(ids), batch.samples.targets[n])
    one = tool.out("trace", run, "--step", "25", "--row", "3")
    assert f"row 3 of step 25: row {batch.index[3]:,} of source {mixture.names[batch.source[3]]}" in one
    assert "is a run's ledger: say --step" in tool.errors("trace", run, "--token", "5")


@pytest.mark.parametrize("settings", [{"split_across_pack": True}, {"fit": "best"}])
def test_trace_of_packed_documents(tmp_path, demo, tool, settings):
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
