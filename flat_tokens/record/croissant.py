"""A record as Croissant 1.1: JSON-LD that catalogues of datasets read. https://docs.mlcommons.org/croissant"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.record.account import COUNTS
from flat_tokens.record.forms import LANGUAGES, LICENCES, named, sources_of

CONFORMS_TO = "http://mlcommons.org/croissant/1.1"
REQUIRED = ("creator", "datePublished", "license", "url")
"""Properties that Croissant asks for and that a record may not know: left out then."""
TYPES = {int: "sc:Integer", str: "sc:Text"}
KIND_TYPES = {"bool": "sc:Boolean", "int64": "sc:Integer", "uint64": "sc:Integer", "float64": "sc:Float"}
"""Data types of kept columns; texts for all others."""
LANGUAGES_NAMED = 200


def croissant(record: JsonFacts, answers: JsonFacts | None = None) -> JsonObject:
    """The record as a Croissant document. *answers*: properties of the dataset, such as ``creator``, which replace its own."""
    run, datasets = record["run"], record["datasets"]
    first: JsonFacts = datasets[0] if datasets else {"name": "data", "path": None, "version": None, "manifest_sha256": None}
    counts = f"{record['documents']:,} documents; {record['tokens']:,} tokens, each as often as it was seen"
    if run:
        name = f"Training data of {run['ledger'].rpartition('/')[2]} before step {run['step']:,}"
        description = f"What a run has seen before step {run['step']:,}, from its ledger: {counts}."
        version = f"0.0.0+step{run['step']}.{run['sha256'][:16]}"
        history = "The history of the run: sources, weights and batch sizes by step."
        ledger = [_file("ledger", run["ledger"], run["sha256"], history)]
    else:
        name, ledger = first["name"], []
        description = f"A tokenized dataset: {record['documents']:,} documents, {record['tokens']:,} tokens."
        version = f"0.0.0+{first['version'] or (first['manifest_sha256'] or 'unnamed')[:16]}"
    fields = {"name": str, "from": str, "revision": str, "documents": int, "tokens": int}
    seen = _record_set("sources", "The sources of the documents that were seen.", fields, sources_of(record))
    made: JsonObject = {
        "@context": json.loads((files("flat_tokens.record") / "croissant_context.json").read_text("utf-8")),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": name,
        "description": description,
        "version": version,
        "isLiveDataset": False,
        "license": list(dict.fromkeys([*(one["licence"] for one in datasets if one["licence"]), *named(record, LICENCES)])),
        "inLanguage": named(record, LANGUAGES)[:LANGUAGES_NAMED],
        "url": None if run or "://" not in (first["path"] or "") else first["path"],
        "distribution": [*ledger, *(part for k, dataset in enumerate(datasets) for part in _files(k, dataset))],
        "recordSet": [one for one in (seen, _counts(record), _epochs(record), *_columns(datasets)) if one],
        "prov:wasDerivedFrom": [
            {"@type": "prov:Entity", "prov:label": f"{dataset['name']}, version {dataset['version']}, manifest {digest}"}
            for dataset in datasets
            if (digest := dataset["manifest_sha256"])
        ],
    }
    return {key: value for key, value in {**made, **(answers or {})}.items() if value not in (None, [], "")}


def missing(document: JsonFacts) -> list[str]:
    """The properties that Croissant asks for and that are not in a document, for a person to add."""
    return [name for name in REQUIRED if name not in document]


def _files(k: int, dataset: JsonFacts) -> list[JsonObject]:
    """The manifest of a dataset, which has the size and the digest of every object, and its kept columns."""
    if dataset["manifest_sha256"] is None:
        return []
    manifest = _file(
        f"manifest-{k}",
        f"{dataset['path']}/manifest.json",
        dataset["manifest_sha256"],
        f"The manifest of {dataset['name']}: its sources, and the digest of every object of its splits.",
    )
    manifest["contentSize"] = f"{dataset['manifest_bytes']} B"
    columns = _node("cr:FileSet", f"columns-{k}", f"Columns of the documents of {dataset['name']}, in their order.")
    columns |= {"encodingFormat": "application/x-parquet", "includes": f"{dataset['path']}/documents/*/columns/*.parquet"}
    return [manifest, columns] if dataset["columns"] else [manifest]


def _file(name: str, place: str, sha256: str, description: str) -> JsonObject:
    file = {"name": place.rpartition("/")[2], "contentUrl": place, "encodingFormat": "application/json", "sha256": sha256}
    return _node("cr:FileObject", name, description) | file


def _node(kind: str, name: str, description: str) -> JsonObject:
    return {"@type": kind, "@id": name, "name": name, "description": description}


def _counts(record: JsonFacts) -> JsonObject | None:
    rows = [
        {"column": column, **one, "value": "" if one["value"] is None else str(one["value"])}
        for column, values in record["by"].items()
        for one in values or ()
    ]
    fields = {"column": str, "value": str, **dict.fromkeys(COUNTS, int)}
    return _record_set("counts", "Documents and tokens that were seen, by the values of each column.", fields, rows)


def _epochs(record: JsonFacts) -> JsonObject | None:
    rows = [{"source": source["name"], **one} for source in record["sources"] for one in source["by_epoch"]]
    fields = {"source": str, **dict.fromkeys(("first", "last", "rows", *COUNTS), int)}
    return _record_set("epochs", "Each of the epochs from first to last of a source of the run.", fields, rows)


def _record_set(name: str, description: str, fields: Mapping[str, type], rows: Sequence[JsonFacts]) -> JsonObject | None:
    """Rows that are in the document itself; None for none. Numbers that no row has are left out, missing texts are empty."""
    there = {field: kind for field, kind in fields.items() if kind is str or any(row.get(field) is not None for row in rows)}
    if not rows:
        return None
    return _node("cr:RecordSet", name, description) | {
        "field": [
            {"@type": "cr:Field", "@id": f"{name}/{field}", "name": field, "dataType": TYPES[kind]}
            for field, kind in there.items()
        ],
        "data": [
            {f"{name}/{field}": "" if kind is str and row.get(field) is None else row.get(field) for field, kind in there.items()}
            for row in rows
        ],
    }


def _columns(datasets: Sequence[JsonFacts]) -> list[JsonObject]:
    """The kept columns of each dataset, a record for each document."""
    return [
        _node("cr:RecordSet", f"documents-{k}", f"The documents of {dataset['name']}.")
        | {
            "field": [
                {
                    "@type": "cr:Field",
                    "@id": f"documents-{k}/{column}",
                    "name": column,
                    "dataType": KIND_TYPES.get(kind, "sc:Text"),
                    "source": {"fileSet": {"@id": f"columns-{k}"}, "extract": {"column": column}},
                }
                for column, kind in dataset["columns"].items()
            ],
        }
        for k, dataset in enumerate(datasets)
        if dataset["columns"]
    ]
