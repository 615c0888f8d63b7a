"""OpenLineage events: what a run reads and makes, told to whom a variable names."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.config import BuildConfig
from tasks.finalize.lineage import URL, LineageDataset, inputs_of, with_digests
from tests.faults.support import build_here, settings_of, write_notes
from tests.processes import serving
from tests.refusal import refusal


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The events that a server got, which the variable names."""
    told = []

    class Hearer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.end_headers()

    with serving(HTTPServer(("127.0.0.1", 0), Hearer)) as url:
        monkeypatch.setenv(URL, url)
        yield told


@pytest.mark.parametrize(
    ("location", "namespace", "name"),
    [
        ("/data/web", "file", "/data/web"),
        ("s3://bucket/text/*.parquet", "s3://bucket", "text/*.parquet"),
        ("https://host.example/a.jsonl", "https://host.example", "a.jsonl"),
        ("hf://datasets/owner/web", "hf", "datasets/owner/web"),
    ],
)
def test_datasets_are_named_as_openlineage_names_them(location, namespace, name):
    assert LineageDataset.at(location)[:2] == (namespace, name)


def test_inputs_get_digests_of_what_they_held(tmp_path):
    paths = [write_notes(tmp_path / "in" / f"{name}.jsonl", 3) for name in "ab"]
    inputs = inputs_of(BuildConfig.model_validate(settings_of(tmp_path / "out", *paths)))
    digest = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    files = [{"name": path.name, "size": 7, "sha256": digest} for path in paths]
    made_of = {"sources": [{"name": "a", "files": files[:1]}, {"name": "b", "files": files}]}
    found = with_digests(inputs, made_of, {"by_source": [{"name": "a", "read": 3}]})
    assert found[0] == LineageDataset("file", str(paths[0]), f"sha256:{digest}", 3, 7, 1)
    assert (found[1].files, found[1].byte_count, found[1].rows) == (2, 14, None)
    derived = with_digests([LineageDataset.at("/out")], {"inputs": [{"name": "web", "version": "80d2"}]}, {})
    assert derived == [LineageDataset("file", "/out", "80d2")]


def test_a_build_tells_its_start_and_its_end(heard, tmp_path):
    pytest.importorskip("openlineage.client")
    path = write_notes(tmp_path / "in/a.jsonl", 4)
    settings = settings_of(tmp_path / "out", path, name="notes")
    made = build_here(settings)
    with refusal("is not published"):
        build_here({**settings, "split_seed": 1, "publish": {"gates": [{"of": "documents", "at_least": 5}]}})
    assert [event["eventType"] for event in heard] == ["START", "COMPLETE", "START", "FAIL"]
    assert {event["job"]["name"] for event in heard} == {"notes"}
    assert len({event["run"]["runId"] for event in heard}) == 2
    (read,), (written,) = heard[1]["inputs"], heard[1]["outputs"]
    assert (read["namespace"], read["name"]) == ("file", str(path))
    assert read["facets"]["version"]["datasetVersion"] == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert (written["name"], written["facets"]["version"]["datasetVersion"]) == (str(tmp_path / "out"), made.version)
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == 4
    assert "documents: 4; wanted is at least 5" in heard[3]["run"]["facets"]["errorMessage"]["message"]
    assert heard[3]["outputs"] == []


def test_a_build_goes_on_without_the_package(heard, tmp_path, monkeypatch, caplog):
    for name in ("openlineage", "openlineage.client"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING):
        made = build_here(settings_of(tmp_path / "out", write_notes(tmp_path / "in/a.jsonl", 4)))
    assert (Path(made.path) / "manifest.json").exists()
    (line,) = [record.getMessage() for record in caplog.records if "lineage" in record.getMessage()]
    assert "pip install openlineage-python" in line
    assert heard == []
