"""flat-tokens record: JSON, a page and Croissant of one record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.record.account import record_of_dataset, record_of_run
from flat_tokens.tools import record as command
from tests.flat_tokens.tools.test_report import HOSTILE, Page, self_contained
from tests.made import write_sequences


@pytest.fixture
def ledger(tmp_path: Path, corpora: dict[str, Path]) -> Path:
    dataset = flat_tokens.open(corpora["one"])
    views = {"train": dataset.train.packed(16), "held out": dataset.validation.packed(16)}
    Ledger.create(tmp_path / "run.json", {name: (view, 1) for name, view in views.items()}, 8, seed=3)
    return tmp_path / "run.json"


def test_json_is_the_record_with_its_forms(ledger, corpora, tool):
    found = tool.json("record", ledger, "--step", "40", "--digest", "0,38:40", "--bytes")
    forms = found.pop("forms")
    opened = Ledger.open(ledger)
    assert found == record_of_run(opened, 40, digests=[0, 38, 39], sizes=lambda _: np.ones(256, np.int64))
    assert [len(form["fields"]) for form in forms] == [51, 12]
    of_dataset = tool.json("record", corpora["one"], "--by", "language")
    del of_dataset["forms"]
    assert of_dataset == record_of_dataset(corpora["one"], columns=["language"])


NOT_SHOWN = {"format", "view", "stored_tokens", "manifest_bytes", "splits", "columns", "policy"}


def shown_in(value: Any) -> set[str]:
    """Every count and every text of a record, as a page shows them."""
    if isinstance(value, dict):
        value = [of for name, of in value.items() if name not in NOT_SHOWN]
    if isinstance(value, list):
        return set().union(*map(shown_in, value))
    return {f"{value:,}" if type(value) is int else value} if type(value) in (int, str) else set()


def test_the_page_holds_what_the_json_holds(ledger, tmp_path, tool):
    arguments = ["record", ledger, "--step", "40", "--digest", "7", "--bytes"]
    found = tool.json(*arguments)
    assert tool.out(*arguments, "--html", tmp_path / "record.html") == f"wrote {tmp_path / 'record.html'}\n"
    page = Page((tmp_path / "record.html").read_text())
    for dataset in found["datasets"]:
        del dataset["documents"]
    assert [one for one in shown_in([found, found["stored_tokens"]]) if one not in page.text] == []
    empty = sum(field["value"] is None for form in found["forms"] for field in form["fields"])
    assert page.text.count("not known: to be filled in") == empty > 40


def test_the_page_loads_nothing_and_strangers_names_are_text(tmp_path):
    source = {"name": HOSTILE, "from": HOSTILE, "revision": HOSTILE, "files": [{"name": HOSTILE, "size": 1, "sha256": HOSTILE}]}
    write_sequences(tmp_path / "d", [[1, 2]], provenance={"name": HOSTILE, "sources": [source]})
    record = record_of_dataset(tmp_path / "d")
    record["by"][HOSTILE] = [{"value": HOSTILE, "documents": 1, "tokens": 2, "stored_tokens": 2, "text_bytes": None}]
    field = dict.fromkeys(("id", "section", "name", "value"), HOSTILE)
    record["forms"] = [{"name": HOSTILE, "law": HOSTILE, "fields": [field]}]
    assert self_contained(command.page(record)).text.count(HOSTILE) >= 8


def test_people_see_a_summary(ledger, corpora, tool):
    said = tool.out("record", ledger, "--step", "40").splitlines()
    assert said[0] == f"{ledger}: before step 40, 320 samples"
    assert any(line.startswith("  held out ") for line in said)
    assert said[-1] == "Training data documentation: 4 of 12 fields are filled in; --html or --json has them"


def test_answers_go_into_the_forms_and_croissant(ledger, tmp_path, tool):
    answers, out = tmp_path / "answers.json", tmp_path / "run.jsonld"
    answers.write_text('{"forms": {"ca.6": "Licensed."}, "croissant": {"url": "https://example.org", "license": "mit"}}')
    arguments = ["record", ledger, "--step", "9", "--answers", answers, "--croissant", out]
    _, said, warned = tool(*arguments, "--json")
    assert ("ca.6", "Licensed.") in [(field["id"], field["value"]) for field in json.loads(said)["forms"][1]["fields"]]
    assert warned == f"flat-tokens: {out}: has no creator, datePublished: name them with --answers\n"
    assert json.loads(out.read_text())["license"] == "mit"
    for wrong, why in (('{"form": {}}', "has 'form', but answers are"), ('{"forms": []}', "'forms' is [], but it is an object")):
        answers.write_text(wrong)
        assert why in tool.errors(*arguments)


@pytest.mark.parametrize(
    ("of", "arguments", "said"),
    [
        ("run.json", [], "the run has no end. Say --step N"),
        ("run.json", ["--step", "5", "--by", "topic"], "no dataset has a column 'topic'"),
        ("plain", ["--step", "5"], "--step and --digest are of a run"),
        ("plain", ["--bytes"], "names no tokenizer, which --bytes needs"),
    ],
)
def test_mistakes_are_one_line(ledger, tmp_path, of, arguments, said, tool):
    write_sequences(tmp_path / "plain", [[1, 2]])
    assert said in tool.errors("record", ledger.with_name(of), *arguments)
