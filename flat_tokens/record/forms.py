"""Forms that the law asks providers of models to publish, filled in as far as a record says it.

The fields are those of the European Commission's template for the public summary of training content (Article 53(1)(d) of the AI
Act, July 2025), and of California's AB 2013 (Civil Code, section 3111(a)), by short names of our own. Whatever a record cannot
know is a field with no value: a person fills it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Record: TypeAlias = Mapping[str, Any]

LANGUAGES = ("language", "lang", "languages")
LICENCES = ("licence", "license")
DOMAINS = ("domain", "host", "hostname")
"""Names of kept columns whose meaning is clear."""
VALUES_SHOWN = 40
SMALL, LARGE = 10**9, 10**13
"""Tokens of text at which the template's ranges of sizes end."""
HUB = "hf://datasets/"


class FormField(NamedTuple):
    """A field of a form. ``id``: the form, the number of the law's or the template's section, and the field's in it."""

    id: str
    section: str
    name: str
    fill: Callable[[Record], str | None]


def filled_forms(record: Record, answers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Both forms for JSON: their fields with a value, None where nobody knows one. *answers*: values by a field's id, which
    replace those of the record. ValueError for an id that no field has.
    """
    answers = answers or {}
    known = {field.id for _, _, fields in FORMS for field in fields}
    if unknown := sorted(answers.keys() - known):
        raise ValueError(f"there is no field {unknown[0]!r} in a form; there are {', '.join(sorted(known))}")
    return [
        {
            "name": name,
            "law": law,
            "fields": [
                {"id": field.id, "section": field.section, "name": field.name, "value": answers.get(field.id, field.fill(record))}
                for field in fields
            ],
        }
        for name, law, fields in FORMS
    ]


def column_of(record: Record, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]] | None:
    """The first of the columns by which the record counts documents, and its values; None if there is none."""
    return next(((name, record["by"][name]) for name in names if record["by"].get(name)), None)


def _nobody(record: Record) -> None:
    return None


def _modality(record: Record) -> str | None:
    return "Text" if record["documents"] else None


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


def _languages(record: Record) -> str | None:
    return _shares(record, LANGUAGES)


def _licences(record: Record) -> str | None:
    """The licences that the data names. It does not answer whether something in it is protected."""
    of_datasets = [f"{one['name']}: {one['licence']}" for one in record["datasets"] if one["licence"]]
    parts = [_shares(record, LICENCES), f"Licences of the datasets: {', '.join(of_datasets)}." if of_datasets else None]
    return " ".join(filter(None, parts)) or None


def sources_of(record: Record) -> list[dict[str, Any]]:
    """The sources whose documents were seen: name, origin, revision, licence of the dataset, and counts."""
    known: dict[str, dict[str, Any]] = {}
    for dataset in record["datasets"]:
        for source in dataset["sources"]:
            known.setdefault(source["name"], {"from": source["from"], "revision": source["revision"]})
    nothing = {"from": None, "revision": None}
    return [
        {"name": one["value"], **known.get(one["value"], nothing), "documents": one["documents"], "tokens": one["tokens"]}
        for one in record["by"].get("source") or ()
    ]


def _listed(sources: Sequence[Mapping[str, Any]]) -> str | None:
    described = [
        f"{'(no source recorded)' if one['name'] is None else one['name']}"
        + (f", from {one['from']}" if one["from"] else "")
        + (f" at revision {one['revision']}" if one["revision"] else "")
        + f": {one['documents']:,} documents, {one['tokens']:,} tokens"
        for one in sources
    ]
    return "; ".join(described) or None


def _sources(record: Record) -> str | None:
    return _listed(sources_of(record))


def _hub_sources(record: Record) -> str | None:
    """Datasets of the hub. Whether they are public, and large, is for a person to say."""
    return _listed([one for one in sources_of(record) if (one["from"] or "").startswith(HUB)])


def _domains(record: Record) -> str | None:
    """The tenth of the domains that have the most tokens."""
    if (found := column_of(record, DOMAINS)) is None:
        return None
    named = [one for one in found[1] if one["value"] is not None]
    return ", ".join(str(one["value"]) for one in named[: -(-len(named) // 10)]) or None


def _processing(record: Record) -> str | None:
    """Steps, filters and duplicates, as the manifests record them."""
    parts = []
    for dataset in record["datasets"]:
        steps = {step["name"]: step["version"] for source in dataset["sources"] for step in source["steps"] or ()}
        changes = [f"step {name} (version {version})" for name, version in steps.items()]
        changes += [f"{count:,} documents left out: {reason}" for reason, count in (_skipped(dataset)).items() if count]
        changes += ["duplicates dropped"] if dataset["policy"].get("duplicates") == "drop" else []
        if near := dataset["policy"].get("near_duplicates"):
            what = {"drop": "dropped", "keep": "marked"}[near["action"]]
            changes.append(f"near-duplicates {what} from a similarity of {near['threshold']:g} on")
        if changes:
            parts.append(f"{dataset['name']}: {'; '.join(changes)}.")
    return " ".join(parts) or None


def _skipped(dataset: Mapping[str, Any]) -> Mapping[str, int]:
    return (dataset["documents"] or {}).get("skipped") or {}


def _points(record: Record) -> str | None:
    return f"{_amounts(record)}." if record["documents"] else None


def _types(record: Record) -> str | None:
    if not record["documents"]:
        return None
    columns = list(dict.fromkeys(name for dataset in record["datasets"] for name in dataset["columns"]))
    kept = f" Recorded next to them: {', '.join(columns)}." if columns else ""
    return f"Text documents, as tokens.{kept}"


EUROPE = (
    FormField("eu.1.1.1", "1.1 Provider", "Provider: name and contact details", _nobody),
    FormField("eu.1.1.2", "1.1 Provider", "Authorised representative: name and contact details", _nobody),
    FormField("eu.1.2.1", "1.2 Model", "Names of the model, with versions", _nobody),
    FormField("eu.1.2.2", "1.2 Model", "Models that it depends on", _nobody),
    FormField("eu.1.2.3", "1.2 Model", "Date of placement on the Union market", _nobody),
    FormField("eu.1.3.1", "1.3 Modalities, size, characteristics", "Modalities", _modality),
    FormField("eu.1.3.2", "1.3 Modalities, size, characteristics", "Size of the training data", _size),
    FormField("eu.1.3.3", "1.3 Modalities, size, characteristics", "Types of content", _nobody),
    FormField("eu.1.3.4", "1.3 Modalities, size, characteristics", "Latest date at which data was acquired", _nobody),
    FormField("eu.1.3.5", "1.3 Modalities, size, characteristics", "Is it trained on new data after that date?", _nobody),
    FormField("eu.1.3.6", "1.3 Modalities, size, characteristics", "Linguistic characteristics", _languages),
    FormField("eu.1.3.7", "1.3 Modalities, size, characteristics", "Other characteristics", _nobody),
    FormField("eu.1.3.8", "1.3 Modalities, size, characteristics", "Comments (optional)", _nobody),
    FormField("eu.2.0.1", "2 Sources of data", "All sources that the data names, to be assigned to 2.1 to 2.6", _sources),
    FormField("eu.2.1.1", "2.1 Public datasets", "Were publicly available datasets used?", _nobody),
    FormField("eu.2.1.2", "2.1 Public datasets", "Their modalities", _nobody),
    FormField("eu.2.1.3", "2.1 Public datasets", "Large public datasets (here: those of the hub)", _hub_sources),
    FormField("eu.2.1.4", "2.1 Public datasets", "Other public datasets", _nobody),
    FormField("eu.2.1.5", "2.1 Public datasets", "Comments (optional)", _nobody),
    FormField("eu.2.2.1", "2.2.1 Licensed datasets", "Are there commercial licence agreements with rightsholders?", _nobody),
    FormField("eu.2.2.2", "2.2.1 Licensed datasets", "Their modalities", _nobody),
    FormField("eu.2.2.3", "2.2.2 Other private datasets", "Were private datasets obtained from other third parties?", _nobody),
    FormField("eu.2.2.4", "2.2.2 Other private datasets", "Their modalities", _nobody),
    FormField("eu.2.2.5", "2.2.2 Other private datasets", "Those that are publicly known", _nobody),
    FormField("eu.2.2.6", "2.2.2 Other private datasets", "Description of the others", _nobody),
    FormField("eu.2.2.7", "2.2.2 Other private datasets", "Comments (optional)", _nobody),
    FormField("eu.2.3.1", "2.3 Crawled data", "Were crawlers used by the provider or for it?", _nobody),
    FormField("eu.2.3.2", "2.3 Crawled data", "Names or identifiers of the crawlers", _nobody),
    FormField("eu.2.3.3", "2.3 Crawled data", "Purposes of the crawlers", _nobody),
    FormField("eu.2.3.4", "2.3 Crawled data", "Behaviour of the crawlers", _nobody),
    FormField("eu.2.3.5", "2.3 Crawled data", "Period of collection", _nobody),
    FormField("eu.2.3.6", "2.3 Crawled data", "Kinds of content and of sites", _nobody),
    FormField("eu.2.3.7", "2.3 Crawled data", "Modalities", _nobody),
    FormField("eu.2.3.8", "2.3 Crawled data", "Most relevant domain names (here: a tenth of those recorded)", _domains),
    FormField("eu.2.3.9", "2.3 Crawled data", "Comments (optional)", _nobody),
    FormField("eu.2.4.1", "2.4 User data", "Was data of interactions with the model used?", _nobody),
    FormField("eu.2.4.2", "2.4 User data", "Was data of the provider's other services used?", _nobody),
    FormField("eu.2.4.3", "2.4 User data", "Modalities", _nobody),
    FormField("eu.2.4.4", "2.4 User data", "Description of these services", _nobody),
    FormField("eu.2.4.5", "2.4 User data", "Comments (optional)", _nobody),
    FormField("eu.2.5.1", "2.5 Synthetic data", "Was synthetic data made by the provider or for it?", _nobody),
    FormField("eu.2.5.2", "2.5 Synthetic data", "Modalities", _nobody),
    FormField("eu.2.5.3", "2.5 Synthetic data", "General-purpose models that made it", _nobody),
    FormField("eu.2.5.4", "2.5 Synthetic data", "Other models that made it", _nobody),
    FormField("eu.2.5.5", "2.5 Synthetic data", "Comments (optional)", _nobody),
    FormField("eu.2.6.1", "2.6 Other sources", "Were other sources used?", _nobody),
    FormField("eu.2.6.2", "2.6 Other sources", "Description", _nobody),
    FormField("eu.3.1.1", "3.1 Reservations of rights", "Signatory of the code of practice?", _nobody),
    FormField("eu.3.1.2", "3.1 Reservations of rights", "Measures to respect reservations before training", _nobody),
    FormField("eu.3.2.1", "3.2 Illegal content", "Measures to avoid or remove it", _nobody),
    FormField("eu.3.3.1", "3.3 Other information", "Other processing (optional)", _processing),
)

CALIFORNIA = (
    FormField("ca.1", "(1)", "Sources or owners of the datasets", _sources),
    FormField("ca.2", "(2)", "How the datasets further the intended purpose", _nobody),
    FormField("ca.3", "(3)", "Number of data points", _points),
    FormField("ca.4", "(4)", "Types of data points", _types),
    FormField("ca.5", "(5)", "Is data protected by copyright, trademark or patent, or all in the public domain?", _licences),
    FormField("ca.6", "(6)", "Were the datasets purchased or licensed?", _nobody),
    FormField("ca.7", "(7)", "Do they include personal information?", _nobody),
    FormField("ca.8", "(8)", "Do they include aggregate consumer information?", _nobody),
    FormField("ca.9", "(9)", "Cleaning, processing or other modification, and its purpose", _processing),
    FormField("ca.10", "(10)", "Time in which the data was collected; is collection ongoing?", _nobody),
    FormField("ca.11", "(11)", "Dates at which the datasets were first used in development", _nobody),
    FormField("ca.12", "(12)", "Is synthetic data generated, or was it?", _nobody),
)

FORMS = (
    (
        "Public summary of training content",
        "Regulation (EU) 2024/1689 (AI Act), Article 53(1)(d); the European Commission's template of July 2025",
        EUROPE,
    ),
    ("Training data documentation", "California AB 2013; Civil Code, section 3111(a)", CALIFORNIA),
)
