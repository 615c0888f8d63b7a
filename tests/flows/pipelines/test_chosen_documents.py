"""Documents that an expression chooses: a subset of them, and a selection in training, hold the same."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import flat_tokens
from flows.pipelines.derive import DerivedResult
from tasks.derive.request import Subset
from tests.faults.support import build_here, derive_here, settings_of, write_notes
from tests.made import read_docs, sequences, write_sequences
from tests.refusal import refusal


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two sources, one of which has two files."""
    here = tmp_path_factory.mktemp("where")
    write_notes(here / "in/web/a.jsonl", 9)
    write_notes(here / "in/web/b.jsonl", 8)
    write_notes(here / "in/wiki/c.jsonl", 7)
    build_here(settings_of(here / "out", here / "in/web", here / "in/wiki"))
    return here / "out"


def subset(dataset: Path, output: Path, **filters: Any) -> DerivedResult:
    return derive_here({"operation": "subset", **filters}, dataset, output=output)


def test_an_expression_names_lengths_sources_files_rows_and_keys(output, tmp_path, monkeypatch):
    """A subset has the documents of a selection. They are several pieces, and several reads of facts."""
    monkeypatch.setattr("tasks.derive.inputs.PART_DOCUMENTS", 5)
    monkeypatch.setattr("flat_tokens.rows.documents.DOCUMENTS_AT_A_TIME", 4)
    train, docs = flat_tokens.open(output).train, read_docs(output)["train"]
    for where, is_it in {
        "tokens > 150": lambda doc: len(doc.ids) > 150,
        "source = 'web' and not row < 2 or tokens = 130": lambda doc: (doc.file < 2 <= doc.row) or len(doc.ids) == 130,
        "file like '%b.jsonl'": lambda doc: doc.file == 1,
        "key is null": lambda _: False,
        f"key = '{docs[1].key:016x}'": lambda doc: doc.key == docs[1].key,
    }.items():
        numbers = [i for i, doc in enumerate(docs) if is_it(doc)]
        assert train.select(where=where).numbers.tolist() == numbers
        made = flat_tokens.open(subset(output, tmp_path / f"made-{where[:6]}", where=where).path)
        assert sequences(made.train) == [list(docs[i].ids) for i in numbers]
    again = train.select(where="row > 2").select(where="source = 'web'")
    assert again.numbers.tolist() == [i for i, doc in enumerate(docs) if doc.row > 2 and doc.file < 2]


def test_what_cannot_be_chosen_is_refused_before_any_work(output, tmp_path):
    with refusal("character 7 is the end", ValidationError):
        Subset(where="tokens")
    for refused in (partial(subset, output, tmp_path / "made"), flat_tokens.open(output).validation.select):
        with refusal("there is no column 'score'; there are tokens, source, file, row, key"):
            refused(where="score > 1")
        with refusal("row is a number"):
            refused(where="row = 'a'")
    assert not (tmp_path / "made").exists()
    for both in ({}, {"where": "tokens > 1", "indices": [1]}):
        with refusal("where or indices, one of them"):
            flat_tokens.open(output).train.select(**both)


def test_a_dataset_without_records_has_lengths_alone(tmp_path):
    train = flat_tokens.open(write_sequences(tmp_path / "plain", [[1], [2, 3], [4, 5, 6]])).train
    assert sequences(train.select(where="tokens <> 2")) == [[1], [4, 5, 6]]
    result = subset(tmp_path / "plain", tmp_path / "made", where="tokens <> 2")
    assert sequences(flat_tokens.open(result.path).train) == [[1], [4, 5, 6]]
    with refusal(r"there is no column 'source': .* has no record of its documents"):
        train.select(where="source = 'web'")


def test_the_manifest_and_the_command_tell_the_expression(output, tmp_path, terminal):
    where = "source = 'wiki' and tokens > 1"
    assert "7 of 24, 17 for which --where is not true" in terminal.out("subset", output, tmp_path / "made", "--where", where)
    told = flat_tokens.open(tmp_path / "made").manifest["provenance"]["operation"]
    assert told == {"operation": "subset", "where": where}
