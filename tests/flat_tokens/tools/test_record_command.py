"""flat-tokens record: JSON, a page and Croissant of one record."""

import json
import re
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


def numbers_in(value: Any) -> set[str]:
    """Every count and every text of a record, as a page shows them."""
    if isinstance(value, dict | list):
        return set().union(*map(numbers_in, value.values() if isinstance(value, dict) else value))
    if isinstance(value, int) and not isinstance(value, bool):
        return {f"{value:,}"}
    return {value} if isinstance(value, str) and value else set()


def test_the_page_holds_what_the_json_holds(ledger, tmp_path, tool):
    arguments = ["record", str(ledger), "--step", "40", "--digest", "7", "--bytes"]
    found = tool.json(*arguments)
    assert tool.out(*arguments, "--html", tmp_path / "record.html") == f"wrote {tmp_path / 'record.html'}\n"
    text = (tmp_path / "record.html").read_text()
    page = Page(text)
    shown = {key: found[key] for key in ("documents", "tokens", "stored_tokens", "by", "forms")}
    shown["run"] = {key: found["run"][key] for key in ("sha256", "step", "samples", "steps")}
    shown["sources"] = [{key: value for key, value in source.items() if key != "view"} for source in found["sources"]]
    shown["datasets"] = [
        {key: dataset[key] for key in ("name", "path", "version", "manifest_sha256", "licence", "sources", "tokenizer")}
        for dataset in found["datasets"]
    ]
    for source in shown["sources"]:
        del source["rows"], source["dataset"]
        source["by"] = {
            column: [{k: v for k, v in one.items() if k in ("value", "documents", "tokens")} for one in values]
            for column, values in source["by"].items()
        }
        source["by_epoch"] = [{k: v for k, v in one.items() if k != "stored_tokens"} for one in source["by_epoch"]]
    lacking = {one for one in numbers_in(shown) if one not in page.text}
    assert lacking == set()
    empty = sum(field["value"] is None for form in found["forms"] for field in form["fields"])
    assert text.count('class="empty"') == empty > 40
    assert page.text.count("not known: to be filled in") == empty


def test_columns_that_a_phone_leaves_out_are_left_out_of_head_and_rows(ledger):
    record = record_of_run(Ledger.open(ledger), 40, sizes=lambda _: np.ones(256, np.int64))
    tables = re.findall(r"<table>.*?</table>", command.page({**record, "forms": []}), re.DOTALL)
    shown = [
        [["spare" in cell for cell in re.findall(r"<t[hd][ >][^>]*", row)] for row in table.split("<tr>")[1:]] for table in tables
    ]
    assert any(True in row for rows in shown for row in rows)
    assert all(row == rows[0] for rows in shown for row in rows)


def test_the_page_loads_nothing_and_strangers_names_are_text(tmp_path):
    source = {"name": HOSTILE, "from": HOSTILE, "revision": HOSTILE, "files": [{"name": HOSTILE, "size": 1, "sha256": HOSTILE}]}
    write_sequences(tmp_path / "d", [[1, 2]], provenance={"name": HOSTILE, "sources": [source]})
    record = record_of_dataset(tmp_path / "d")
    record["by"][HOSTILE] = [{"value": HOSTILE, "documents": 1, "tokens": 2, "stored_tokens": 2, "text_bytes": None}]
    record["forms"] = [
        {"name": HOSTILE, "law": HOSTILE, "fields": [{"id": HOSTILE, "section": HOSTILE, "name": HOSTILE, "value": HOSTILE}]}
    ]
    text = command.page(record)
    assert self_contained(text).text.count(HOSTILE) >= 8


def test_people_see_a_summary(ledger, corpora, tool):
    said = tool.out("record", ledger, "--step", "40").splitlines()
    assert said[0] == f"{ledger}: before step 40, 320 samples"
    assert said[1].startswith(f"one: {corpora['one']}, version ")
    assert said[3].split() == ["documents", "tokens", "epochs"]
    assert any(line.startswith("  held out ") for line in said)
    assert "by licence" in said
    assert said[-1] == "Training data documentation: 4 of 12 fields are filled in; --html or --json has them"


def test_answers_go_into_the_forms_and_croissant(ledger, tmp_path, tool):
    answers = {"forms": {"ca.6": "Licensed."}, "croissant": {"url": "https://example.org", "license": "mit"}}
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    out = tmp_path / "run.jsonld"
    arguments = ["record", str(ledger), "--step", "9", "--answers", str(tmp_path / "answers.json"), "--croissant", str(out)]
    status, said, warned = tool(*arguments, "--json")
    assert status == 0
    assert {field["id"]: field["value"] for field in json.loads(said)["forms"][1]["fields"]}["ca.6"] == "Licensed."
    assert warned == f"flat-tokens: {out}: has no creator, datePublished: name them with --answers\n"
    assert json.loads(out.read_text())["license"] == "mit"
    for wrong, why in (({"form": {}}, "has 'form', but answers are"), ({"forms": []}, "'forms' is [], but it is an object")):
        (tmp_path / "answers.json").write_text(json.dumps(wrong))
        assert why in tool.errors(*arguments)


@pytest.mark.parametrize(
    ("of", "arguments", "said"),
    [
        ("run.json", [], "the run has no end. Say --step N"),
        ("run.json", ["--step", "5", "--by", "topic"], "no dataset has a column 'topic'"),
        ("run.json", ["--step", "5", "--bytes", "--tokenizer", "none-such"], "none-such"),
        ("plain", ["--step", "5"], "--step and --digest are of a run"),
        ("plain", ["--bytes"], "names no tokenizer, which --bytes needs"),
    ],
)
def test_mistakes_are_one_line(ledger, tmp_path, of, arguments, said, tool):
    write_sequences(tmp_path / "plain", [[1, 2]])
    err = tool.errors("record", ledger.with_name(of), *arguments)
    assert said in err
    assert err.count("\n") == 1
