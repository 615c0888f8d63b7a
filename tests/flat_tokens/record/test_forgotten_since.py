"""Documents that a run has seen and that were forgotten since: counted by the lists of outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.arrays.opening import open_array
from flat_tokens.forgotten import LIST, Forgotten
from flat_tokens.record.account import record_of_dataset, record_of_run
from flat_tokens.rows.seen import tokens_seen
from flat_tokens.stores.store import Store
from flows.pipelines.forget import forget
from tasks.derive.request import ForgetRequest
from tests.flat_tokens.record.corpora import build_corpus
from tests.made import write_sequences


def keys_of(version: Path, split: str = "train") -> Any:
    stored = open_array(Store.at(version) / f"documents/{split}/key", "uint64")
    return stored.read(0, stored.length)


def list_at(path: Path, keys: Any) -> Store:
    """An output with nothing but a list of these keys."""
    listed = Forgotten(b"saltsalt").with_documents(keys, np.empty(0, np.uint64))
    (path / LIST).parent.mkdir(parents=True)
    (path / LIST).write_text(json.dumps(listed.described()))
    return Store.at(path)


def test_those_that_were_seen_are_counted_by_source(corpora, tmp_path):
    dataset = flat_tokens.open(corpora["one"])
    views = {"a": dataset.train.packed(16), "b": dataset.train.packed(16), "c": dataset.validation.packed(16)}
    ledger = Ledger.create(tmp_path / "run.json", {name: (view, 1) for name, view in views.items()}, 8, seed=2)
    keys = keys_of(corpora["one"])
    lists = [list_at(tmp_path / "x", keys[3:9]), list_at(tmp_path / "y", np.append(keys[7:20], np.uint64(5)))]
    for step in (0, 2, 30):
        record = record_of_run(ledger, step, forgotten=lists)
        together = np.zeros(len(keys), np.int64)
        for found, name in zip(record["forgotten"]["sources"], views, strict=True):
            assert found["name"] == name
            tokens = np.zeros(len(keys), np.int64)
            for one in ledger.mixture().drawn_rows(step, name) if name != "c" else ():
                tokens += tokens_seen(views[name], one.rows) * (one.last - one.first + 1)
            gone = tokens[3:20]
            assert (found["documents"], found["tokens"]) == (np.count_nonzero(gone), gone.sum())
            together += tokens
        gone = together[3:20]
        assert (record["forgotten"]["documents"], record["forgotten"]["tokens"]) == (np.count_nonzero(gone), gone.sum())
    assert [one["documents"] for one in record["forgotten"]["lists"]] == [6, 14]
    assert record["forgotten"]["lists"][0]["output"] == lists[0].url
    assert json.loads(json.dumps(record)) == record


def test_without_a_list_there_is_no_such_field(corpora, tmp_path):
    assert "forgotten" not in record_of_dataset(corpora["one"])
    nothing = record_of_dataset(corpora["one"], forgotten=[Store.at(tmp_path)])["forgotten"]
    assert (nothing["documents"], nothing["lists"][0]["documents"], nothing["lists"][0]["sha256"]) == (0, 0, "")
    write_sequences(tmp_path / "plain", [[1, 2]])
    of_plain = record_of_dataset(tmp_path / "plain", forgotten=[list_at(tmp_path / "x", keys_of(corpora["one"]))])
    assert of_plain["forgotten"]["documents"] == 0


def test_a_version_that_was_kept_elsewhere_says_what_its_output_forgot(tmp_path, tool):
    """The run's version has gone from the output: a copy of it, and the output's list."""
    version = build_corpus(tmp_path, "two", 30)
    ledger = Ledger.create(tmp_path / "run.json", {"a": (flat_tokens.open(version).train.documents(999), 1)}, 4)
    shutil.copytree(version, tmp_path / "kept")
    where = "language = 'de' and tokens > 0"
    forget(ForgetRequest(output=str(tmp_path / "two"), where=where, reason="they asked"))
    assert not version.exists()
    html = tmp_path / "record.html"
    options = ["--step", "200", "--at", f"a={tmp_path / 'kept'}", "--forgotten", str(tmp_path / "two")]
    record = tool.json("record", ledger.path, *options)
    german = next(one for one in record["by"]["language"] if one["value"] == "de")
    names = ("documents", "tokens", "stored_tokens")
    assert [record["forgotten"][name] for name in names] == [german[name] for name in names]
    tool.out("record", ledger.path, *options, "--html", html)
    assert "Forgotten since" in html.read_text()
    assert record["forgotten"]["lists"][0]["sha256"] in html.read_text()
    said = tool.out("record", ledger.path, *options)
    assert f"forgotten since: {german['documents']} documents, {german['tokens']:,} tokens of those that were seen" in said
