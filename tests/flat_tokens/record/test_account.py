"""The record of a run, against looking at every batch: documents, tokens and text by source, column and epoch."""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import FillInMiddle, Ledger, Mixture, Schedule
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import columns_of
from flat_tokens.forgotten import LIST, Forgotten
from flat_tokens.manifest import SPLITS, read_manifest
from flat_tokens.record.account import record_of_dataset, record_of_run
from flat_tokens.rows.seen import bytes_seen, tokens_seen
from flat_tokens.stores.store import Store
from flows.pipelines.forget import forget
from tasks.derive.request import ForgetRequest
from tests.flat_tokens.record.corpora import COLUMNS, build_corpus
from tests.flat_tokens.rows.rows_by_number import VIEWS, Numbers
from tests.made import write_sequences
from tests.refusal import refusal

BYTES = np.ones(256, np.int64)
"""The tokenizer of these datasets has a token for each byte."""


def sizes(store: Store) -> Any:
    return BYTES


# Rows of views


def owners(view: Any) -> list[Counter[int]]:
    """The tokens of each document in each row: by the numbers in packs, else by where a row and its documents begin."""
    tokens = view.tokens
    entries = tokens.seq_starts.read(0, tokens.seq_count + 1).astype(np.int64)
    rows = np.arange(len(view))
    if hasattr(view, "pad_id"):
        lengths = np.minimum(np.diff(entries), view.max_length)
        return [Counter({row: int(length)}) for row, length in enumerate(lengths)]
    if hasattr(view, "padding_idx"):
        batch = view.batch(rows)  # places of pad_to are of the document
        return [Counter(ids[labels != -100].tolist()) for ids, labels in zip(batch.document_ids, batch.labels, strict=True)]
    owner = np.repeat(np.arange(tokens.seq_count), np.diff(entries))
    starts = view.starts if hasattr(view, "starts") else rows * view._stride
    return [Counter(owner[start : start + view.length].tolist()) for start in starts.tolist()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *VIEWS,
        ("packed", {"bos": 1, "eos": 2}),
        ("documents", {"bos": 1, "eos": 2, "loss_mask": True}),
        ("packed_documents", {"too_long": "cut", "pad_to": 4}),
    ],
    ids=str,
)
def test_tokens_of_documents_are_those_in_the_rows(corpora, monkeypatch, kind, options):
    monkeypatch.setattr("flat_tokens.rows.seen.ROWS_AT_A_TIME", 5)
    monkeypatch.setattr("flat_tokens.rows.seen.TOKENS_AT_A_TIME", 3)
    view = getattr(flat_tokens.open(corpora["one"]).train, kind)(20, **options)
    each = owners(view)
    some = np.random.default_rng(1).random(len(view)) < 0.4
    for rows in (None, some, np.zeros(len(view), bool)):
        chosen = each if rows is None else [row for row, is_in in zip(each, rows.tolist(), strict=True) if is_in]
        expected = sum(chosen, Counter())
        assert {d: n for d, n in enumerate(tokens_seen(view, rows).tolist()) if n} == {d: n for d, n in expected.items() if n}
    if not {"bos", "eos"} & options.keys():
        assert bytes_seen(view, BYTES, some).tolist() == tokens_seen(view, some).tolist()


def test_the_ends_that_a_view_adds_have_no_text(corpora):
    tokens = flat_tokens.open(corpora["one"]).train
    wide = np.arange(256)
    expected = [int(wide[tokens.sequence(i)].sum()) for i in range(tokens.seq_count)]
    for ends in ({"bos": 1}, {"eos": 2}):
        assert bytes_seen(tokens.documents(10_000, **ends), wide).tolist() == expected
    assert bytes_seen(tokens.packed(1), wide[:3]).sum() == 0  # no id of text is below 3


# Rows of epochs


def drawn_one_by_one(mixture: Mixture, step: int, name: str) -> dict[int, set[int]]:
    """The rows of each epoch that are in a batch before *step*."""
    found = {}
    k = mixture.names.index(name)
    for before in range(step):
        source, rows, epochs, _ = mixture._draw(before)
        for row, epoch in zip(rows[source == k].tolist(), epochs[source == k].tolist(), strict=True):
            assert row not in found.setdefault(epoch, set())
            found[epoch].add(row)
    return found


def test_epochs_that_are_alike_are_one_item():
    mixture = Mixture({"a": (Numbers(10), 1)}, 7)
    assert list(mixture.drawn_rows(0)) == []
    assert [(one.first, one.last, one.rows is None) for one in mixture.drawn_rows(50)] == [(0, 34, True)]
    assert [(one.first, one.last, one.rows is None) for one in mixture.drawn_rows(49)] == [(0, 33, True), (34, 34, False)]


# Records


class Facts:
    """The documents of a dataset's split, one by one."""

    def __init__(self, path: Path, split: str) -> None:
        dataset = flat_tokens.open(path)
        tokens = getattr(dataset, split)
        manifest = read_manifest(dataset.store)
        files = open_array(dataset.store / f"documents/{split}/file", "uint64").read(0, tokens.seq_count).tolist()
        of_file = [source["name"] for source in manifest["provenance"]["sources"] for _ in source["files"]]
        kept = columns_of(dataset.store, manifest, split).take(np.arange(tokens.seq_count), list(COLUMNS)).to_pylist()
        self.lengths = np.diff(tokens.seq_starts.read(0, tokens.seq_count + 1).astype(np.int64)).tolist()
        self.columns = {"source": [of_file[number] for number in files], "split": [split] * tokens.seq_count}
        self.columns |= {"columns.split" if name == "split" else name: [row[name] for row in kept] for name in COLUMNS}


NAMES = ("documents", "tokens", "stored_tokens")
Seen = Mapping[tuple[str, str, int], int]
"""The tokens of documents: of a dataset, a split, a number."""


def counted(facts: dict[tuple[str, str], Facts], seen: Seen, by: str | None = None) -> dict[Any, list[int]]:
    """Documents, tokens and stored tokens by a column."""
    found = {}
    for (dataset, split, document), tokens in seen.items():
        its = facts[dataset, split]
        value = None if by is None else its.columns[by][document]
        sums = found.setdefault((type(value), value), [0, 0, 0])
        for k, amount in enumerate((1, tokens, its.lengths[document])):
            sums[k] += amount
    return found


def check_counts(record: dict[str, Any], facts: dict[tuple[str, str], Facts], seen: Seen, *columns: str) -> None:
    """The counts of a record, or of a source in it, in all and by columns."""
    assert [[record[name] for name in NAMES]] == list((counted(facts, seen) or {None: [0, 0, 0]}).values())
    for column in ("source", "language", "licence", "score", "columns.split", *columns):
        listed = {(type(one["value"]), one["value"]): [one[name] for name in NAMES] for one in record["by"][column]}
        assert listed == counted(facts, seen, column)


RUNS: dict[str, dict[str, tuple[str, str, str, dict[str, Any]]]] = {
    "two datasets": {"a": ("one", "train", "packed", {"length": 16}), "b": ("two", "train", "packed", {"length": 16})},
    "a dataset twice": {
        "a": ("one", "train", "packed", {"length": 8}),
        "b": ("one", "train", "packed", {"length": 8, "overlap": 4}),
    },
    "both splits": {
        "a": ("one", "train", "packed_documents", {"length": 9, "fit": "crop"}),
        "b": ("one", "validation", "packed_documents", {"length": 9, "fit": "crop"}),
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_seen_what_was_in_its_batches(corpora, tmp_path, name):
    """Of runs that were edited twice, at several steps: before an edit, at one, after epochs."""
    views = {
        source: getattr(getattr(flat_tokens.open(corpora[dataset]), split), kind)(**options)
        for source, (dataset, split, kind, options) in RUNS[name].items()
    }
    path = tmp_path / "run.json"
    ledger = Ledger.create(path, {"a": (views["a"], 1)}, 6, seed=11)
    ledger.edit(5, {"a": 1, "b": (views["b"], Schedule([(0, 1), (40, 2)]))}, batch_size=9)
    ledger.edit(11, {"b": 1}, batch_size=4)
    ledger.edit(14, dict.fromkeys(views, 1.0))
    mixture, each = ledger.mixture(), {source: owners(view) for source, view in views.items()}
    facts = {(of[0], split): Facts(corpora[of[0]], split) for of in RUNS[name].values() for split in SPLITS}
    for step in (0, 3, 12, 60):
        record = record_of_run(ledger, step, sizes=sizes)
        together = Counter()
        for found in record["sources"]:
            source = found["name"]
            seen, by_epoch = Counter(), drawn_one_by_one(mixture, step, source)
            for row in itertools.chain(*by_epoch.values()):
                seen.update({(*RUNS[name][source][:2], document): n for document, n in each[source][row].items() if n})
            check_counts(found, facts, seen)
            assert found["text_bytes"] == found["tokens"]
            assert found["samples"] == sum(map(len, by_epoch.values()))
            for epochs in found["by_epoch"]:
                for epoch in range(epochs["first"], epochs["last"] + 1):
                    rows = by_epoch.pop(epoch)
                    in_epoch = sum((each[source][row] for row in rows), Counter())
                    assert epochs["rows"] == len(rows)
                    assert epochs["documents"] == len([n for n in in_epoch.values() if n])
                    assert epochs["tokens"] == sum(in_epoch.values())
            assert by_epoch == {}
            together += seen
        check_counts(record, facts, together, "split")
        assert record["run"]["samples"] == mixture.position(step)


def test_a_record_is_json_and_the_same_each_time(corpora, tmp_path):
    view = flat_tokens.open(corpora["one"]).train.packed(16)
    ledger = Ledger.create(tmp_path / "run.json", {"a": (view, 1)}, 4)
    one, other = (record_of_run(ledger, 9, digests=[0, 8], sizes=sizes) for _ in range(2))
    assert json.loads(json.dumps(one)) == one == other
    mixture = ledger.mixture()
    assert one["run"]["steps"] == [{"step": step, "sha256": mixture.digest(step)} for step in (0, 8)]
    assert one["run"]["sha256"] == ledger.digest
    with pytest.raises(IndexError):
        record_of_run(Ledger.create(tmp_path / "end.json", {"a": (view, 1, 1)}, 4), 10_000)


def test_columns_of_many_values_are_named_and_counted_if_asked_for(corpora, monkeypatch):
    monkeypatch.setattr("flat_tokens.record.account.MOST_VALUES", 20)
    monkeypatch.setattr("flat_tokens.record.account.DOCUMENTS_AT_A_TIME", 16)  # no part has so many, all together have
    record = record_of_dataset(corpora["one"])
    assert record["by"]["url"] is None
    assert {one["value"] for one in record["by"]["language"]} == {"en", "de", "fr"}
    asked = record_of_dataset(corpora["one"], columns=["url", "file"])
    assert list(asked["by"]) == ["url", "file"]
    assert len(asked["by"]["url"]) == 120
    with refusal(r"no dataset has a column 'topic'; there are split, source, language, licence, score, columns.split"):
        record_of_dataset(corpora["one"], columns=["topic"])


def test_a_version_is_a_run_that_saw_each_document_once(corpora):
    record = record_of_dataset(corpora["one"], sizes=sizes)
    manifest = read_manifest(Store.at(corpora["one"]))
    totals = manifest["totals"]
    assert record["run"] is None
    assert record["documents"] == sum(totals[split]["seq_count"] for split in SPLITS) == 120
    assert record["tokens"] == record["stored_tokens"] == sum(totals[split]["token_count"] for split in SPLITS)
    assert record["text_bytes"] == totals["documents"]["text_bytes"]
    assert [(one["name"], one["documents"]) for one in record["sources"]] == [(s, totals[s]["seq_count"]) for s in SPLITS]
    by_source = {one["value"]: one["text_bytes"] for one in record["by"]["source"]}
    assert by_source == {one["name"]: one["text_bytes"] for one in totals["documents"]["by_source"]}
    facts = {("one", split): Facts(corpora["one"], split) for split in SPLITS}
    check_counts(record, facts, {(*of, k): n for of, one in facts.items() for k, n in enumerate(one.lengths)}, "split")
    (dataset,) = record["datasets"]
    assert (dataset["name"], dataset["licence"], dataset["version"]) == ("one", "odc-by", corpora["one"].name)
    assert record_of_dataset(corpora["one"])["text_bytes"] is None


def test_a_dataset_without_records_has_documents_without_a_source(tmp_path, corpora):
    plain = write_sequences(tmp_path / "plain", [[i] * (i % 5) for i in range(50)])
    record = record_of_dataset(plain, forgotten=[list_at(tmp_path / "x", keys_of(corpora["one"]))])
    assert (record["documents"], record["tokens"], list(record["by"])) == (50, 100, ["split"])
    assert record["forgotten"]["documents"] == 0
    views = {path: (flat_tokens.open(path).train.packed(8), 1) for path in (str(plain), str(corpora["one"]))}
    record = record_of_run(Ledger.create(tmp_path / "run.json", views, 8), 2)
    (without,) = [one for one in record["by"]["language"] if one["value"] is None]
    assert [without[name] for name in NAMES] == [record["sources"][0][name] for name in NAMES]


def test_a_view_of_no_dataset_has_samples_alone(tmp_path):
    ledger = Ledger.create(tmp_path / "run.json", {"numbers": (Numbers(10), 1)}, 4)
    record = record_of_run(ledger, 5)
    (source,) = record["sources"]
    assert (source["samples"], source["epochs"], source["dataset"], source["documents"]) == (20, 2.0, None, None)
    assert (record["documents"], record["datasets"]) == (0, [])


def test_a_selection_is_counted_by_the_numbers_of_its_split(corpora, tmp_path):
    tokens = flat_tokens.open(corpora["one"]).train
    view = tokens.select(where="language = 'de'").packed(4)
    record = record_of_run(Ledger.create(tmp_path / "run.json", {"german": (view, 1)}, 8), 200)
    assert [one["value"] for one in record["by"]["language"]] == ["de"]
    every = tokens_seen(view)
    assert record["documents"] == int((every > 0).sum())


def test_documents_that_are_filled_in_the_middle_have_no_count_of_text(corpora, tmp_path):
    fim = FillInMiddle(1.0, 0.5, 1, 2, 3)
    view = flat_tokens.open(corpora["one"]).train.packed(16, fim=fim)
    record = record_of_run(Ledger.create(tmp_path / "run.json", {"a": (view, 1)}, 8), 3, sizes=sizes)
    assert record["text_bytes"] is None
    assert record["tokens"] == 3 * 8 * 16
    with refusal("not the same in every epoch"):
        bytes_seen(view, BYTES)


# Documents that were forgotten since


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
    assert [record["forgotten"][name] for name in NAMES] == [german[name] for name in NAMES]
    tool.out("record", ledger.path, *options, "--html", html)
    assert "Forgotten since" in html.read_text()
    assert record["forgotten"]["lists"][0]["sha256"] in html.read_text()
    said = tool.out("record", ledger.path, *options)
    assert f"forgotten since: {german['documents']} documents, {german['tokens']:,} tokens of those that were seen" in said
