"""``flat-tokens record``: what a run has seen, or what a version holds, for people, programs, catalogues and the law."""

from __future__ import annotations

import json
import posixpath
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.record.account import record_of_dataset, record_of_run
from flat_tokens.record.croissant import croissant, missing
from flat_tokens.record.forms import filled_forms
from flat_tokens.record.ledger import Ledger
from flat_tokens.stores.store import Store, json_object
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.inspect import set_reports

SUMMARY = "record what a run has seen before a step, or what a version holds: counts, Croissant, forms of the law"
EXAMPLES = """\
examples:
  flat-tokens record run.json --step 5000                       documents and tokens by source, split and kept column, by epoch
  flat-tokens record run.json --step 5000 --digest 0,4990:5000  and the SHA-256 of the rows of these steps
  flat-tokens record run.json --step 5000 --html record.html    a page with all of it, and both forms
  flat-tokens record run.json --step 5000 --croissant run.jsonld --answers answers.json
  flat-tokens record out/web --by language --by licence --json  a version, without a run
  flat-tokens record run.json --step 5000 --at web=/backup/web --forgotten out/web    which of its documents are forgotten since
  flat-tokens record out/web --bytes                            also the bytes of text, which reads every token

No token is read, but for --bytes and --digest. Documents count once, tokens as often as they were in a batch. The forms are those
of the European Commission's template (AI Act, Article 53(1)(d)) and of California's AB 2013; what the data does not say is left
empty. --answers names a file {"forms": {"eu.1.1.1": "..."}, "croissant": {"creator": ...}} with the rest.
"""
LEDGER = ".json"
VALUES_SHOWN = 12
OF_A_SOURCE = ("samples", "epochs", "documents", "tokens", "stored_tokens", "text_bytes")
OF_AN_EPOCH = ("rows", "documents", "tokens", "text_bytes")


ARGUMENTS = """
path=RUN.json|DATASET  the ledger of a run, or a dataset or output
--step N  of a run: before step N, which a checkpoint has seen (default: to the end of the run)
--digest STEPS...  of a run: the SHA-256 of the rows of these steps, such as 17 or 100:104 or both with a comma; may be given
 several times
--by COLUMN...  count by this column alone, however many values it has; may be given several times (default: all of up to 1,000
 values)
--bytes  count the bytes of text too, by the tokenizer: reads the tokens
--forgotten OUTPUT...  an output with a list of forgotten documents: which of those that were seen are on it; may be given several
 times
--html FILE  write a page with the record and the forms: one HTML file
--croissant FILE  write Croissant 1.1, as JSON-LD
--answers FILE  JSON with values of fields that the data does not say
--at --tokenizer --pattern --trust-records
"""


def add_commands(commands: Any) -> None:
    cli.add_command(commands, "record", run, SUMMARY, EXAMPLES, ARGUMENTS, digest=steps)


def steps(text: str) -> list[int]:
    """Steps, some of them as ranges whose end is not in them: ``17`` or ``0,100:104``."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, stop = part.partition(":")
        begin = cli.at_least(0)(first)
        found += range(begin, cli.at_least(begin)(stop)) if colon else [begin]
    return found


def run(options: Namespace) -> int:
    sizes = partial(_token_lengths, options) if options.bytes else None
    forgotten = [Store.at(path) for path in options.forgotten]
    answers = _answers(options.answers) if options.answers else {}
    if options.path.endswith(LEDGER):
        ledger = Ledger.open(options.path, places=dict(options.at), trust_records=options.trust_records)
        digests = sorted({step for several in options.digest for step in several})
        step = ledger.steps_before(None, "--step N") if options.step is None else options.step
        record = record_of_run(ledger, step, columns=options.by or None, digests=digests, sizes=sizes, forgotten=forgotten)
    else:
        if options.step is not None or options.digest:
            raise ValueError(f"{options.path}: --step and --digest are of a run: give its ledger, RUN.json")
        record = record_of_dataset(options.path, columns=options.by or None, sizes=sizes, forgotten=forgotten)
    record["forms"] = filled_forms(record, answers.get("forms"))
    written = []
    if options.html is not None:
        written.append(cli.write_file(options.html, page(record)))
    if options.croissant is not None:
        document = croissant(record, answers.get("croissant"))
        written.append(cli.write_file(options.croissant, json.dumps(document, indent=2, ensure_ascii=False) + "\n"))
        if unknown := missing(document):
            cli.warn(f"{options.croissant}: has no {', '.join(unknown)}: name them with --answers")
    terminal.show(options, record, written or lines(record))
    return cli.SAME if record["documents"] or record["sources"] else cli.DIFFERENT


def _token_lengths(options: Namespace, dataset: Store) -> Any:
    """The bytes of each token id, by the tokenizer of a dataset."""
    vocabulary = cli.vocabulary_for(open_corpus(dataset.url), options)
    if vocabulary is None:
        raise ValueError(f"{dataset.url}: names no tokenizer, which --bytes needs. Name it with --tokenizer.")
    return vocabulary.lengths


def _answers(path: str) -> dict[str, JsonObject]:
    directory, name = posixpath.split(path)
    answers = json_object(Store.at(directory or ".").read(name), path)
    if unknown := answers.keys() - {"forms", "croissant"}:
        raise ValueError(f"{path}: has {min(unknown)!r}, but answers are of 'forms' and of 'croissant'")
    if wrong := [name for name, given in answers.items() if not isinstance(given, dict)]:
        raise ValueError(f"{path}: {wrong[0]!r} is {answers[wrong[0]]!r}, but it is an object of names and values")
    return answers


def lines(record: JsonFacts) -> Iterator[str]:
    """A record for people: without the forms' empty fields."""
    run = record["run"]
    if run:
        yield f"{run['ledger']}: before step {run['step']:,}, {terminal.plural(run['samples'], 'sample')}"
    for dataset in record["datasets"]:
        version = f", version {dataset['version']}" if dataset["version"] else ""
        yield f"{dataset['name']}: {dataset['path']}{version}"
    yield ""
    columns = {"documents": "documents", "tokens": "tokens", "text_bytes": "bytes of text", "epochs": "epochs"}
    if record["text_bytes"] is None:
        del columns["text_bytes"]
    rows = [["", *columns.values()]]
    for source in (*record["sources"], {**record, "name": "in all"}):
        rows.append([source["name"], *(terminal.number(source.get(name)) for name in columns)])
    yield from terminal.table(rows, "<" + ">" * len(columns))
    for column, values in record["by"].items():
        yield ""
        if values is None:
            yield f"{column}: more than 1,000 different values; --by {column} counts them all"
            continue
        yield f"by {column}"
        counted = [
            [
                terminal.value_text(one["value"]),
                terminal.plural(one["documents"], "document"),
                terminal.plural(one["tokens"], "token"),
                terminal.percent(one["tokens"] / max(record["tokens"], 1)),
            ]
            for one in values[:VALUES_SHOWN]
        ]
        yield from terminal.table(counted, "<>>>")
        if len(values) > VALUES_SHOWN:
            yield f"  ... {len(values) - VALUES_SHOWN:,} more with --json or --html"
    if (gone := record.get("forgotten")) is not None:
        documents, tokens = terminal.plural(gone["documents"], "document"), terminal.plural(gone["tokens"], "token")
        yield from ("", f"forgotten since: {documents}, {tokens} of those that were seen")
    for step in run["steps"] if run else ():
        yield f"step {step['step']:,}: {step['sha256']}"
    yield ""
    for form in record["forms"]:
        filled = sum(field["value"] is not None for field in form["fields"])
        yield f"{form['name']}: {filled} of {len(form['fields'])} fields are filled in; --html or --json has them"


def page(record: JsonFacts) -> str:
    """A record with its forms as one HTML document."""
    sources = record["sources"]
    names = [[source["name"], source["split"] or ""] for source in sources]
    epochs = [[[terminal.span(one["first"], one["last"])] for one in source["by_epoch"]] for source in sources]
    return terminal.page(
        "record.html",
        record=record,
        sources=_counted(["source", "split"], names, sources, OF_A_SOURCE),
        epochs=[
            _counted(["epoch"], first, source["by_epoch"], OF_AN_EPOCH) for first, source in zip(epochs, sources, strict=True)
        ],
        dataset_facts=_dataset_facts,
    )


def _counted(
    head: list[str], firsts: list[list[str]], counts: Sequence[JsonFacts], names: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """A table of those of the counts *names* that one of the rows has. *firsts*: the first cells of each row."""
    shown = [name for name in names if any(one.get(name) is not None for one in counts)]
    rows = [[*first, *(terminal.number(one.get(name)) for name in shown)] for first, one in zip(firsts, counts, strict=True)]
    return [*head, *(name.replace("_", " ") for name in shown)], rows


def _dataset_facts(dataset: JsonFacts) -> list[tuple[str, str]]:
    """The labels and values of a dataset in a record, for people."""
    tokenizer = dataset["tokenizer"]
    steps = [step for source in dataset["sources"][:1] for step in source["steps"] or ()]
    facts = {
        "version": dataset["version"],
        "path": dataset["path"],
        "SHA-256 of its manifest": dataset["manifest_sha256"],
        "licence": dataset["licence"],
        "tokenizer": tokenizer["name"],
        "digest of the tokenizer": tokenizer["digest"],
        "kept columns": ", ".join(dataset["columns"]),
        **{f"evaluation set {one.name}": one.sentence for one in set_reports(steps, dataset["documents"] or {})},
    }
    return [(name, value) for name, value in facts.items() if value]
