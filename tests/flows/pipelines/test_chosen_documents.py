"""Documents that an expression chooses: a subset of them, and a selection in training, hold the same."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import flat_tokens
from flat_tokens.manifest import SPLITS
from flows.pipelines.derive import DerivedResult
from tasks.derive.request import Subset
from tests.examples import examples
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


expressions = st.recursive(
    st.one_of(
        st.builds("tokens {} {}".format, st.sampled_from(["<", ">=", "="]), st.integers(120, 180)),
        st.builds("row {} {}".format, st.sampled_from(["<", ">"]), st.integers(0, 9)),
        st.sampled_from(["source = 'web'", "source in ('wiki', 'x')", "file like '%b.jsonl'", "key < '8'", "key is null"]),
    ),
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("not {}".format, inner),
    ),
    max_leaves=4,
)


@pytest.mark.slow
@given(expressions)
@examples(25)
def test_a_selection_has_the_documents_of_a_subset(output, tmp_path_factory, where):
    with pytest.MonkeyPatch.context() as patch:  # several pieces, and several reads of facts
        patch.setattr("tasks.derive.inputs.PART_DOCUMENTS", 5)
        patch.setattr("flat_tokens.rows.documents.DOCUMENTS_AT_A_TIME", 4)
        result = subset(output, tmp_path_factory.mktemp("subset"), where=where)
        whole, made = flat_tokens.open(output), flat_tokens.open(result.path)
        for split in SPLITS:
            chosen, written = getattr(whole, split).select(where=where), getattr(made, split)
            assert sequences(chosen) == sequences(written)
    assert result.totals["documents"]["skipped"].get("where", 0) == 24 - result.totals["documents"]["written"]


def test_an_expression_names_lengths_sources_files_rows_and_keys(output):
    train, docs = flat_tokens.open(output).train, read_docs(output)["train"]
    for where, is_it in {
        "tokens > 150": lambda doc: len(doc.ids) > 150,
        "source = 'web'": lambda doc: doc.file < 2,
        "file like '%b.jsonl'": lambda doc: doc.file == 1,
        "row = 3": lambda doc: doc.row == 3,
        f"key = '{docs[1].key:016x}'": lambda doc: doc.key == docs[1].key,
    }.items():
        assert train.select(where=where).numbers.tolist() == [i for i, doc in enumerate(docs) if is_it(doc)]
    again = train.select(where="row > 2").select(where="source = 'web'")
    assert again.numbers.tolist() == [i for i, doc in enumerate(docs) if doc.row > 2 and doc.file < 2]


def test_what_cannot_be_chosen_is_refused_before_any_work(output, tmp_path):
    with refusal("character 7 is the end", ValidationError):
        Subset(where="tokens")
    for where, told in (
        ("score > 1", "there is no column 'score'; there are tokens, source, file, row, key"),
        ("row = 'a'", "row = 'a'"),
    ):
        with refusal(told):
            subset(output, tmp_path / "made", where=where)
        with refusal(told):
            flat_tokens.open(output).validation.select(where=where)
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
    with refusal("there is no column 'source'"):
        subset(tmp_path / "plain", tmp_path / "made", where="source = 'web'")


def test_the_manifest_and_the_command_tell_the_expression(output, tmp_path, terminal):
    where = "source = 'wiki' and tokens > 1"
    assert "7 of 24, 17 for which --where is not true" in terminal.out("subset", output, tmp_path / "made", "--where", where)
    told = flat_tokens.open(tmp_path / "made").manifest["provenance"]["operation"]
    assert told == {"operation": "subset", "where": where}
