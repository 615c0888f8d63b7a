"""Croissant documents, against its own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.record.account import record_of_dataset, record_of_run
from flat_tokens.record.croissant import croissant, missing
from tests.made import write_sequences

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
    assert fields == {"language": "sc:Text", "licence": "sc:Text", "score": "sc:Float", "good": "sc:Boolean", "url": "sc:Text"}


def test_what_is_not_known_is_left_out_and_named(records):
    assert missing(croissant(records["dataset"])) == ["creator", "datePublished", "url"]
    assert missing(croissant(records["plain"])) == ["creator", "datePublished", "license", "url"]
    assert missing(croissant(records["plain"], {**ADDED, "license": "mit"})) == []
    assert croissant(records["run"])["prov:wasDerivedFrom"][0]["@type"] == "prov:Entity"
    assert croissant(records["run"])["distribution"][0]["sha256"] == records["run"]["run"]["sha256"]
