"""The forms of the law: what the data says is filled in, all else is an empty field with its name. Croissant documents."""

import json
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.record.account import record_of_dataset, record_of_run
from flat_tokens.record.croissant import croissant, missing
from flat_tokens.record.forms import filled_forms
from tests.flat_tokens.record.corpora import build_corpus
from tests.made import write_sequences
from tests.refusal import refusal


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("forms")
    return record_of_dataset(
        build_corpus(root, "one", documents={"empty": "skip", "steps": [{"use": "length", "max_bytes": 100_000}]})
    )


def values(forms: list[dict[str, Any]]) -> dict[str, str | None]:
    return {field["id"]: field["value"] for form in forms for field in form["fields"]}


def test_fields_of_which_the_data_knows_something_are_filled_in(record):
    filled = {name: value for name, value in values(filled_forms(record)).items() if value is not None}
    assert set(filled) == {
        *("eu.1.3.1", "eu.1.3.2", "eu.1.3.6", "eu.2.0.1", "eu.3.3.1"),
        *("ca.1", "ca.3", "ca.4", "ca.5", "ca.9"),
    }
    documents, tokens = record["documents"], record["stored_tokens"]
    assert (
        filled["eu.1.3.2"]
        == f"Text: less than 1 billion tokens. Exactly {documents} documents of {tokens:,} tokens (tokenizer: bytes)."
    )
    assert filled["ca.3"] == f"{documents} documents of {tokens:,} tokens (tokenizer: bytes)."
    assert all(f"{code} " in (filled["eu.1.3.6"] or "") for code in ("en", "de", "fr"))
    assert "one-web, from local files" in (filled["ca.1"] or "")
    assert "cc-by-4.0" in (filled["ca.5"] or "")
    assert filled["ca.9"] == filled["eu.3.3.1"]
    assert "step length (version" in (filled["ca.9"] or "")
    assert "documents left out: empty" in (filled["ca.9"] or "")


def test_all_fields_are_there_and_ids_are_theirs_alone(record):
    forms = filled_forms(record)
    assert [len(form["fields"]) for form in forms] == [51, 12]
    ids = [field["id"] for form in forms for field in form["fields"]]
    assert len(set(ids)) == len(ids)
    assert all(field["name"] and field["section"] for form in forms for field in form["fields"])


def test_a_person_fills_in_the_rest(record):
    given = values(filled_forms(record, {"eu.1.1.1": "The Bakery, 1 Mill Lane", "ca.3": "many"}))
    assert (given["eu.1.1.1"], given["ca.3"]) == ("The Bakery, 1 Mill Lane", "many")
    with refusal(r"there is no field 'eu\.9' in a form; there are ca\.1, ca\.10"):
        filled_forms(record, {"eu.9": "?"})


def of(tokens: int, **by: Any) -> dict[str, Any]:
    """A record of nothing but sums."""
    return {"documents": 3, "tokens": tokens, "stored_tokens": tokens, "by": by, "datasets": [], "run": None}


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (999_999_999, "less than 1 billion"),
        (10**9, "1 billion to 10 trillion"),
        (10**13, "1 billion to 10 trillion"),
        (10**13 + 1, "more than 10 trillion"),
    ],
)
def test_sizes_are_in_the_ranges_of_the_template(tokens, said):
    assert (values(filled_forms(of(tokens)))["eu.1.3.2"] or "").startswith(f"Text: {said} tokens.")


def test_domains_are_the_tenth_with_the_most_tokens():
    domains = [{"value": f"{k}.org", "documents": 1, "tokens": 100 - k} for k in range(11)]
    filled = values(filled_forms(of(1000, domain=[{"value": None, "documents": 1, "tokens": 500}, *domains])))
    assert filled["eu.2.3.8"] == "0.org, 1.org"
    assert filled["eu.2.3.1"] is None


def test_hub_datasets_are_named_where_public_ones_are_asked_for():
    source = {"name": "tales", "from": "hf://datasets/a/tales (default, train)", "revision": "abc", "steps": None}
    dataset = {
        "name": "d",
        "licence": None,
        "tokenizer": {"name": None},
        "columns": {},
        "documents": None,
        "policy": {},
        "sources": [source, {**source, "name": "own", "from": "local files", "revision": None}],
    }
    by = [{"value": name, "documents": 2, "tokens": 9} for name in ("tales", "own", None)]
    filled = values(filled_forms({**of(18, source=by), "datasets": [dataset]}))
    assert filled["eu.2.1.3"] == "tales, from hf://datasets/a/tales (default, train) at revision abc: 2 documents, 9 tokens"
    assert (filled["ca.1"] or "").endswith("(no source recorded): 2 documents, 9 tokens")
    assert filled["eu.2.1.1"] is None


def test_of_nothing_nothing_is_said():
    assert set(values(filled_forms({**of(0), "documents": 0})).values()) == {None}


# Croissant documents, against its own library


ADDED = {
    "creator": {"@type": "sc:Organization", "name": "The Bakery", "url": "https://example.org"},
    "datePublished": "2026-11-26",
    "url": "https://example.org/data",
    "citeAs": "@misc{bakery}",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, corpora: dict[str, Path]) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("croissant")
    write_sequences(root / "plain", [[5, 6, 7]] * 20)
    views = {name: flat_tokens.open(path).train.packed(8) for name, path in {**corpora, "plain": root / "plain"}.items()}
    ledger = Ledger.create(root / "run.json", {name: (view, 1) for name, view in views.items()}, 8)
    return {
        "run": record_of_run(ledger, 200),
        "dataset": record_of_dataset(corpora["one"]),
        "plain": record_of_dataset(root / "plain"),
    }


@pytest.mark.needs("mlcroissant")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["run", "dataset", "plain"])
@pytest.mark.parametrize("added", [{}, ADDED], ids=["by itself", "with answers"])
def test_its_library_finds_no_fault(records, name, added, tmp_path):
    import mlcroissant

    document = croissant(records[name], added)
    (tmp_path / "croissant.json").write_text(json.dumps(document))
    dataset = mlcroissant.Dataset(tmp_path / "croissant.json")
    issues = dataset.metadata.ctx.issues
    assert issues.errors == set()
    unknown = {"citeAs", "datePublished"} - added.keys() | ({"license"} if name == "plain" else set())
    found = {next((word for word in unknown if f"/{word}" in warning), warning) for warning in map(str, issues.warnings)}
    assert found == unknown
    assert str(dataset.metadata.ctx.conforms_to.value) == "http://mlcommons.org/croissant/1.1"
    if name == "run":
        rows = list(dataset.records("epochs"))
        expected = [one for source in records[name]["sources"] for one in source["by_epoch"]]
        assert [row["epochs/tokens"] for row in rows] == [one["tokens"] for one in expected]
    if name != "plain":
        texts = [
            row["counts/documents"] for row in dataset.records("counts") if row["counts/column"] in (b"language", "language")
        ]
        assert sum(texts) == records[name]["documents"]


def test_a_dataset_is_described_by_its_manifest(records):
    record = records["dataset"]
    document = croissant(record)
    (dataset,) = record["datasets"]
    manifest, columns = document["distribution"]
    assert manifest["sha256"] == dataset["manifest_sha256"]
    assert manifest["contentUrl"] == f"{dataset['path']}/manifest.json"
    assert columns["@type"] == "cr:FileSet"
    assert document["version"] == f"0.0.0+{dataset['version']}"
    assert document["license"][0] == "odc-by"
    assert set(document["license"]) == {"odc-by", "cc-by-4.0", "cc0-1.0"}
    assert set(document["inLanguage"]) == {"en", "de", "fr"}
    fields = {field["name"]: field["dataType"] for field in document["recordSet"][-1]["field"]}
    assert fields == {"language": "sc:Text", "licence": "sc:Text", "score": "sc:Float", "split": "sc:Boolean", "url": "sc:Text"}


def test_what_is_not_known_is_left_out_and_named(records):
    assert missing(croissant(records["dataset"])) == ["creator", "datePublished", "url"]
    assert missing(croissant(records["plain"])) == ["creator", "datePublished", "license", "url"]
    assert missing(croissant(records["plain"], {**ADDED, "license": "mit"})) == []
    assert croissant(records["run"])["prov:wasDerivedFrom"][0]["@type"] == "prov:Entity"
    assert croissant(records["run"])["distribution"][0]["sha256"] == records["run"]["run"]["sha256"]
