"""The page of ``flat-tokens record --html``: all that the record holds, and both forms with their empty fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from flat_tokens.tools import markup, terminal
from flat_tokens.tools.evaluation import set_reports

VALUES_SHOWN = 200
EMPTY = '<dd class="empty">not known: to be filled in</dd>'


def page(record: Mapping[str, Any]) -> str:
    """A record with its forms as one HTML document."""
    run, datasets = record["run"], record["datasets"]
    first: Mapping[str, Any] = datasets[0] if datasets else {"name": "data", "path": "", "version": None}
    name = run["ledger"].rpartition("/")[2] if run else first["name"]
    sections = [
        _sources(record),
        *(_column(k, column, values, record) for k, (column, values) in enumerate(record["by"].items())),
        _forgotten(record.get("forgotten")),
        _datasets(datasets),
        _steps(run),
        *(_form(k, form) for k, form in enumerate(record["forms"])),
    ]
    return markup.page(
        title=f"{name}: record",
        kind=f"what the run has seen before step {run['step']:,}" if run else f"dataset, version {first['version']}",
        name=name,
        path=run["ledger"] if run else first["path"],
        figures=markup.figures(_figures(record)),
        sections=sections,
        footer="Counted exactly, from the order of the run and the records of its datasets. Written by "
        "<code>flat-tokens record</code>; this page loads nothing.",
    )


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield "Documents", *markup.large(record["documents"])
    yield "Tokens", *markup.large(record["tokens"])
    yield "Stored tokens", *markup.large(record["stored_tokens"])
    if record["text_bytes"] is not None:
        yield "Text", terminal.size(record["text_bytes"]), f"{terminal.plural(record['text_bytes'], 'byte')}"
    if run := record["run"]:
        yield "Step", f"{run['step']:,}", f"{terminal.plural(run['samples'], 'sample')}"
    yield "Datasets", f"{len(record['datasets']):,}", ""


def _number(count: Any) -> str:
    return "" if count is None else f"{count:,.2f}" if isinstance(count, float) else f"{count:,}"


def _sources(record: Mapping[str, Any]) -> str:
    names = ("samples", "epochs", "documents", "tokens", "stored_tokens", "text_bytes")
    shown = [name for name in names if any(source.get(name) is not None for source in record["sources"])]
    rows = [
        [source["name"], source["split"] or "", *(_number(source.get(name)) for name in shown)] for source in record["sources"]
    ]
    table = markup.table(["source", "split", *(_label(name) for name in shown)], rows, {1})
    inside = [
        '<p class="soft">Documents count once, tokens as often as they were in a batch; '
        "stored tokens are those of the documents, each once.</p>",
        table,
    ]
    for source in record["sources"]:
        if source["by_epoch"]:
            inside.append(f"<h3>{escape(source['name'])}: each of its epochs</h3>{_epochs(source)}")
        by = "".join(_values(column, values) for column, values in source["by"].items() if values)
        if by and len(record["sources"]) > 1:
            inside.append(f"<details><summary>{escape(source['name'])} by column</summary>{by}</details>")
    return markup.section("sources", "Sources of the run" if record["run"] else "Splits", "".join(inside))


def _label(name: str) -> str:
    return name.replace("_", " ")


def _epochs(source: Mapping[str, Any]) -> str:
    names = [name for name in ("rows", "documents", "tokens", "text_bytes") if source["by_epoch"][0][name] is not None]
    rows = [[terminal.span(one["first"], one["last"]), *(_number(one[name]) for name in names)] for one in source["by_epoch"]]
    return markup.table(["epoch", *(_label(name) for name in names)], rows)


def _column(k: int, column: str, values: Sequence[Mapping[str, Any]] | None, record: Mapping[str, Any]) -> str:
    if values is None:
        return markup.section(
            f"column-{k}", f"By {escape(column)}", '<p class="soft">More than 1,000 different values: not listed.</p>'
        )
    if not values:
        return ""
    has_text = record["text_bytes"] is not None
    texts = [f'<td class="spare">{_number(one["text_bytes"])}</td>' if has_text else "" for one in values]
    rows = "".join(
        f'<tr><th scope="row">{escape(value_text(one["value"]))}</th><td>{one["documents"]:,}</td><td>{one["tokens"]:,}</td>'
        f'<td class="spare">{one["stored_tokens"]:,}</td>{text}'
        f"{markup.share(share, share)}</tr>"
        for one, text in zip(values[:VALUES_SHOWN], texts, strict=False)
        for share in [one["tokens"] / max(record["tokens"], 1)]
    )
    head = {
        column: "text",
        "documents": "",
        "tokens": "",
        "stored tokens": "spare",
        **({"text bytes": "spare"} if has_text else {}),
    }
    more = len(values) - VALUES_SHOWN
    note = f'<p class="note">{more:,} more values are in the JSON.</p>' if more > 0 else ""
    table = markup.wide(f'aria-labelledby="column-{k}"', {**head, "of all": "of"}.items(), rows)
    return markup.section(f"column-{k}", f"By {escape(column)}", table + note)


def _values(column: str, values: Sequence[Mapping[str, Any]]) -> str:
    rows = [[value_text(one["value"]), f"{one['documents']:,}", f"{one['tokens']:,}"] for one in values[:VALUES_SHOWN]]
    return markup.table([column, "documents", "tokens"], rows)


def value_text(value: Any) -> str:
    """A value of a column for people."""
    return "(none)" if value is None else value if isinstance(value, str) else json.dumps(value)


def _forgotten(gone: Mapping[str, Any] | None) -> str:
    """Documents that were seen and forgotten since."""
    if gone is None:
        return ""
    counts = ("documents", "tokens", "stored_tokens")
    rows = [[one["name"], *(f"{one[name]:,}" for name in counts)] for one in [*gone["sources"], {**gone, "name": "in all"}]]
    lists = [
        ("list", f"of {one['output']}: {terminal.plural(one['documents'], 'document')}, SHA-256 {one['sha256'] or 'of none'}")
        for one in gone["lists"]
    ]
    table = markup.table(["source", *(_label(name) for name in counts)], rows)
    return markup.section("forgotten", "Forgotten since", table + markup.facts(lists))


def _datasets(datasets: Sequence[Mapping[str, Any]]) -> str:
    inside = []
    for dataset in datasets:
        tokenizer = dataset["tokenizer"]
        facts = {
            "version": dataset["version"],
            "path": dataset["path"],
            "SHA-256 of its manifest": dataset["manifest_sha256"],
            "licence": dataset["licence"],
            "tokenizer": tokenizer["name"],
            "digest of the tokenizer": tokenizer["digest"],
            "kept columns": ", ".join(dataset["columns"]),
        }
        rows = [
            [
                *(source["name"], source["from"] or "", source["revision"] or ""),
                *(f"{source['files']:,}", f"{source['file_bytes']:,}"),
                ", ".join(step["name"] for step in source["steps"] or ()),
            ]
            for source in dataset["sources"]
        ]
        head = ["source", "from", "revision", "files", "bytes of files", "steps"]
        table = markup.table(head, rows, {1, 2, 5}) if rows else ""
        steps = [step for source in dataset["sources"][:1] for step in source["steps"] or ()]
        facts |= {f"evaluation set {one.name}": one.sentence for one in set_reports(steps, dataset["documents"] or {})}
        inside.append(f"<h3>{escape(dataset['name'])}</h3>{markup.facts((k, v) for k, v in facts.items() if v)}{table}")
    return markup.section("datasets", "Datasets", "".join(inside)) if inside else ""


def _steps(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return ""
    facts = [("SHA-256 of the ledger", run["sha256"]), ("seed", str(run["seed"])), ("order", str(run["order"]))]
    rows = [[f"{step['step']:,}", step["sha256"]] for step in run["steps"]]
    table = markup.table(["step", "SHA-256 of its rows"], rows, {1}) if rows else ""
    return markup.section("steps", "The run", markup.facts(facts) + table)


def _form(k: int, form: Mapping[str, Any]) -> str:
    inside, section = (
        [f'<p class="soft">{escape(form["law"])}. Filled in as far as the data says it; not legal advice.</p>'],
        None,
    )
    for field in form["fields"]:
        if field["section"] != section:
            inside.append(f'{"</dl>" if section is not None else ""}<h3>{escape(field["section"])}</h3><dl class="facts form">')
            section = field["section"]
        value = EMPTY if field["value"] is None else f"<dd>{escape(field['value'])}</dd>"
        inside.append(f'<dt>{escape(field["name"])} <code class="soft">{escape(field["id"])}</code></dt>{value}')
    return markup.section(f"form-{k}", escape(form["name"]), "".join([*inside, "</dl>"]))
