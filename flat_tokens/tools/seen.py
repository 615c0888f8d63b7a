"""``flat-tokens seen``: what a run has been trained on, by its ledger."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject
from flat_tokens.ledger import Ledger
from flat_tokens.rows.mixture import Mixture
from flat_tokens.rows.views import SplitView
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.corpus import DocumentRecords, open_corpus

SUMMARY = "tell which documents a run has seen, how often, at which steps, in which rows of the batch"
EXAMPLES = """\
examples:
  flat-tokens seen run.json --before 5000                 samples and epochs of each source, and its documents
  flat-tokens seen run.json --source web --before 5000    those of one source
  flat-tokens seen run.json --document 17 --before 5000   sequence 17, in each source that has so many
  flat-tokens seen run.json --document 9f1c0a3b5d7e2468   the document with this key, in a run that has an end

No batch is read: the steps are computed. Rows of batches are counted over all hosts. Status 1: nothing was seen.
"""
KEY = re.compile("[0-9a-f]{16}")
DOCUMENTS_AT_A_TIME = 1 << 14
VISITS_SHOWN = 8


ARGUMENTS = """
path=RUN.json  the ledger of a run
--document ID  this document: the number of its sequence in the split, or its key, 16 hexadecimal digits
--source NAME  of this source alone
--before N  in the steps before step N (default: to the end of the run, if there is one)
--limit N  show N documents of a source at most; 0: all (default: 20; --json: always all)
--at --trust-records
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_listed(parser, ARGUMENTS, document=document_id)


def document_id(text: str) -> str | int:
    return text if KEY.fullmatch(text) else arguments.at_least(0)(text)


def run(options: argparse.Namespace) -> int:
    ledger = Ledger.open(options.path, places=dict(options.at), trust_records=options.trust_records)
    if options.source not in (None, *ledger.names):
        raise ValueError(f"{ledger.path}: there is no source {options.source!r}; there are {', '.join(ledger.names)}")
    mixture = ledger.mixture()
    try:
        last = len(mixture)
    except TypeError:
        if options.before is None:
            raise ValueError(f"{ledger.path}: the run has no end. Say --before STEP") from None
        last = options.before
    before = last if options.before is None else min(options.before, last)
    names = ledger.names if options.source is None else [options.source]
    drawn = dict(zip(ledger.names, mixture.drawn(before).tolist(), strict=True))
    most = None if options.json or not options.limit else options.limit
    sources = []
    for name in names:
        rows = len(mixture.views[mixture.names.index(name)])
        source: JsonObject = {"name": name, "samples": drawn[name], "rows": rows, "epochs": drawn[name] / rows}
        found = list(islice(seen(ledger, mixture, name, options.document, before), most))
        sources.append(source | {"documents": found, "is_cut": len(found) == most and options.document is None})
    terminal.show(options, {"ledger": ledger.path, "before": before, "sources": sources}, lines(sources, before))
    is_any = any(source["documents"] for source in sources)
    return arguments.SAME if is_any else arguments.DIFFERENT


def seen(ledger: Ledger, mixture: Mixture, name: str, document: str | int | None, before: int) -> Iterator[JsonObject]:
    """The documents of a source that the run has seen, for JSON: each one's visits."""
    view = mixture.views[mixture.names.index(name)]
    if not isinstance(view, SplitView):
        raise ValueError(f"{ledger.path}: source {name!r} is a view of no dataset, so that there are no documents in it")
    records = _records(ledger, name)
    for documents in _asked(records, view.tokens.seq_count, document):
        found = mixture.seen(documents, before=before, source=name)
        bounds = np.flatnonzero(np.diff(found.asked, prepend=-1, append=-1))
        numbers = found.asked[bounds[:-1]]
        keys = (
            [f"{key:016x}" for key in records.key.take(numbers).tolist()] if records and len(numbers) else [None] * len(numbers)
        )
        for number, key, first, stop in zip(numbers.tolist(), keys, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            fields = {field: getattr(found, field)[first:stop].tolist() for field in ("step", "batch_row", "epoch", "row")}
            visits = [dict(zip(fields, visit, strict=True)) for visit in zip(*fields.values(), strict=True)]
            yield {"document": number, "key": key, "visits": visits}


def _records(ledger: Ledger, name: str) -> DocumentRecords | None:
    path, split = ledger.dataset(name) or ("", "")
    return open_corpus(path).documents(split)


def _asked(records: DocumentRecords | None, count: int, document: str | int | None) -> Iterator[Int64s]:
    """Numbers of the documents to look for, some at a time."""
    if isinstance(document, int):
        yield np.arange(document, min(document + 1, count))
        return
    key = None if document is None else np.uint64(int(document, 16))
    for first in range(0, count, DOCUMENTS_AT_A_TIME):
        stop = min(first + DOCUMENTS_AT_A_TIME, count)
        if key is None:
            yield np.arange(first, stop)
        elif records is not None and (there := np.flatnonzero(records.key.read(first, stop) == key)).size:
            yield there + first


def lines(sources: Sequence[JsonFacts], before: int) -> Iterator[str]:
    """The counts of what was seen, for people."""
    for source in sources:
        of = f"{source['epochs']:,.2f} epochs of {terminal.plural(source['rows'], 'row')}"
        yield f"{source['name']}: {terminal.plural(source['samples'], 'sample')} before step {before:,}, {of}"
        for document in source["documents"]:
            visits = document["visits"]
            shown = ", ".join(f"step {visit['step']:,} row {visit['batch_row']:,}" for visit in visits[:VISITS_SHOWN])
            more = f", {len(visits) - VISITS_SHOWN:,} more" if len(visits) > VISITS_SHOWN else ""
            key = f", key {document['key']}" if document["key"] else ""
            yield f"  document {document['document']:,}{key}, {terminal.plural(len(visits), 'time')}: {shown}{more}"
        if source["is_cut"]:
            yield "  ... more with --limit N, all with --limit 0"
