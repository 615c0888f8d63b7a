"""Forms that providers of models must publish by law, filled in as far as a record has the facts.

The fields are those of the European Commission's template for the public summary of training content (Article 53(1)(d) of the
AI Act, July 2025), and of California's AB 2013 (Civil Code, section 3111(a)), by short names of our own; they are in
``forms.toml``. A field that no record can fill has no value: a person fills it in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TypeAlias

from flat_tokens.annotations import JsonFacts, JsonObject

Record: TypeAlias = JsonFacts

LANGUAGES = ("language", "lang", "languages")
LICENCES = ("licence", "license")
DOMAINS = ("domain", "host", "hostname")
"""Names of kept columns whose meaning is clear."""
VALUES_SHOWN = 40
SMALL, LARGE = 10**9, 10**13
"""Tokens of text at which the template's ranges of sizes end."""
HUB = "hf://datasets/"


def filled_forms(record: Record, answers: Mapping[str, str] | None = None) -> list[JsonObject]:
    """Both forms for JSON: each field with its value, None if it is unknown. *answers*: values by a field's id, which replace
    those of the record. ValueError for an id that no field has.
    """
    answers = answers or {}
    forms = tomllib.loads((files("flat_tokens.record") / "forms.toml").read_text("utf-8"))["forms"]
    known = {id for form in forms for section in form["sections"].values() for id in section}
    if unknown := sorted(answers.keys() - known):
        raise ValueError(f"there is no field {unknown[0]!r} in a form; there are {', '.join(sorted(known))}")
    values = {id: fill(record) for id, fill in FILLS.items()} | dict(answers)
    return [
        {
            "name": form["name"],
            "law": form["law"],
            "fields": [
                {"id": id, "section": section, "name": name, "value": values.get(id)}
                for section, names in form["sections"].items()
                for id, name in names.items()
            ],
        }
        for form in forms
    ]


def column_of(record: Record, names: Sequence[str]) -> tuple[str, list[JsonObject]] | None:
    """The first of the columns by which the record counts documents, and its values; None if there is none."""
    return next(((name, record["by"][name]) for name in names if record["by"].get(name)), None)


def named(record: Record, names: Sequence[str]) -> list[str]:
    """The values of the first of these columns, as texts, without the documents that have none."""
    _, values = column_of(record, names) or ("", [])
    return [str(one["value"]) for one in values if one["value"] is not None]


def _size(record: Record) -> str | None:
    if not (tokens := record["stored_tokens"]):
        return None
    in_range = (
        "less than 1 billion" if tokens < SMALL else "1 billion to 10 trillion" if tokens <= LARGE else "more than 10 trillion"
    )
    return f"Text: {in_range} tokens. Exactly {_amounts(record)}."


def _amounts(record: Record) -> str:
    tokenizers = sorted({one["tokenizer"]["name"] for one in record["datasets"] if one["tokenizer"]["name"]})
    by = f" (tokenizer: {', '.join(tokenizers)})" if tokenizers else ""
    fed = f"; {record['tokens']:,} tokens with all repetitions" if record["run"] else ""
    return f"{record['documents']:,} documents of {record['stored_tokens']:,} tokens{by}{fed}"


def _shares(record: Record, names: Sequence[str]) -> str | None:
    """The values of a column with their shares of the tokens."""
    if (found := column_of(record, names)) is None:
        return None
    name, values = found
    shown = [
        f"{'(none recorded)' if one['value'] is None else one['value']} {one['tokens'] / max(record['tokens'], 1):.2%}"
        for one in values[:VALUES_SHOWN]
    ]
    more = f" and {len(values) - VALUES_SHOWN:,} more" if len(values) > VALUES_SHOWN else ""
    return f"By the column {name!r}, in shares of the tokens: {', '.join(shown)}{more}."


def _licences(record: Record) -> str | None:
    """The licences that the data names. It does not answer whether something in it is protected."""
    of_datasets = [f"{one['name']}: {one['licence']}" for one in record["datasets"] if one["licence"]]
    parts = [_shares(record, LICENCES), f"Licences of the datasets: {', '.join(of_datasets)}." if of_datasets else None]
    return " ".join(filter(None, parts)) or None


def sources_of(record: Record) -> list[JsonObject]:
    """The sources whose documents were seen: name, origin, revision, licence of the dataset, and counts."""
    known: dict[str, JsonObject] = {}
    for dataset in record["datasets"]:
        for source in dataset["sources"]:
            known.setdefault(source["name"], {"from": source["from"], "revision": source["revision"]})
    nothing = {"from": None, "revision": None}
    return [
        {"name": one["value"], **known.get(one["value"], nothing), "documents": one["documents"], "tokens": one["tokens"]}
        for one in record["by"].get("source") or ()
    ]


def _sources(record: Record, of: str = "") -> str | None:
    """The sources whose documents were seen, those that are from an address that begins with *of*."""
    described = [
        f"{'(no source recorded)' if one['name'] is None else one['name']}"
        + (f", from {one['from']}" if one["from"] else "")
        + (f" at revision {one['revision']}" if one["revision"] else "")
        + f": {one['documents']:,} documents, {one['tokens']:,} tokens"
        for one in sources_of(record)
        if (one["from"] or "").startswith(of)
    ]
    return "; ".join(described) or None


def _processing(record: Record) -> str | None:
    """Steps, filters and duplicates, as the manifests record them."""
    parts = []
    for dataset in record["datasets"]:
        steps = {step["name"]: step["version"] for source in dataset["sources"] for step in source["steps"] or ()}
        changes = [f"step {name} (version {version})" for name, version in steps.items()]
        skipped = (dataset["documents"] or {}).get("skipped") or {}
        changes += [f"{count:,} documents left out: {reason}" for reason, count in skipped.items() if count]
        changes += ["duplicates dropped"] if dataset["policy"].get("duplicates") == "drop" else []
        if near := dataset["policy"].get("near_duplicates"):
            what = {"drop": "dropped", "keep": "marked"}[near["action"]]
            changes.append(f"near-duplicates {what} from a similarity of {near['threshold']:g} on")
        if changes:
            parts.append(f"{dataset['name']}: {'; '.join(changes)}.")
    return " ".join(parts) or None


def _types(record: Record) -> str | None:
    if not record["documents"]:
        return None
    columns = list(dict.fromkeys(name for dataset in record["datasets"] for name in dataset["columns"]))
    kept = f" Recorded next to them: {', '.join(columns)}." if columns else ""
    return f"Text documents, as tokens.{kept}"


FILLS: dict[str, Callable[[Record], str | None]] = {
    "eu.1.3.1": lambda record: "Text" if record["documents"] else None,
    "eu.1.3.2": _size,
    "eu.1.3.6": lambda record: _shares(record, LANGUAGES),
    "eu.2.0.1": _sources,
    "eu.2.1.3": lambda record: _sources(record, HUB),  # a person says whether they are public, and large
    # The tenth of the domains that have the most tokens
    "eu.2.3.8": lambda record: ", ".join((found := named(record, DOMAINS))[: -(-len(found) // 10)]) or None,
    "eu.3.3.1": _processing,
    "ca.1": _sources,
    "ca.3": lambda record: f"{_amounts(record)}." if record["documents"] else None,
    "ca.4": _types,
    "ca.5": _licences,
    "ca.9": _processing,
}
"""How a record answers those of the fields that it can, by their ids."""
