"""``flat-tokens trace``: the documents that a token, a sequence or a training step comes from. ``flat-tokens seen``: the steps of
a run that had a document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject
from flat_tokens.columns import in_json
from flat_tokens.forgotten import read_forgotten
from flat_tokens.record.ledger import Ledger
from flat_tokens.rows.documents import KEY, key_of
from flat_tokens.rows.loader import ShuffledLoader
from flat_tokens.rows.mixture import Mixture
from flat_tokens.rows.orders import ReferenceOrder
from flat_tokens.rows.packing import PackedDocumentsView
from flat_tokens.rows.split import FlatTokens
from flat_tokens.rows.views import BlocksView, DocumentsView, PackedView, SplitView
from flat_tokens.rows.virtual import ends_of
from flat_tokens.rows.where import parse
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, DocumentRecords, open_corpus, sequence_of
from flat_tokens.tools.documents import table_of
from flat_tokens.tools.sources import UNRECORDED, TextSources, digest_is, kept_of, places_of, texts_of

SUMMARY = "find the documents that a token, a sequence or a training step comes from"
EXAMPLES = """\
examples:
  flat-tokens trace out/web --sequence 7             key, source file and row of sequence 7, and its text
  flat-tokens trace out/web --token 123456789        the same for the sequence that holds a token of the split
  flat-tokens trace out/web --sequence 7 --source /mnt/corpus
  flat-tokens trace out/web --document 9f1c0a3b5d7e2468  a document by its key, or why it is in no split
  flat-tokens trace out/web --step 5000 --length 2048 --batch-size 64 --seed 1 --row 3
                                                     every document in row 3 of that batch; without --row, in all rows
  flat-tokens trace run.json --step 5000 --row 3     the same for a run with a ledger, which has its settings

The text is the source's where --source or --trust-records lead to the file, else the decoded tokens.
"""
CONTEXT_TOKENS = 8
OF_A_DOCUMENT = ("token_count", "document", "columns", "found", "text_from", "text", "notes")

ARGUMENTS = f"""
PATH  {cli.ANY_DATASET}; with --step also a run's ledger
|! --token K  token K of the split, counted through all of its sequences
|! --sequence N  sequence N of the split; -1 is the last
|! --document KEY  the document with this key, 16 hexadecimal digits; of one that is in no split, why it is not
|! --step S  step S of a ShuffledLoader over the split
--split NAME  train, validation or test (default: the first)
--characters N  show N characters of a text at most; 0: all (default: 1200, with --step 160; --json: always all)
--source --at --trust-records --tokenizer --pattern --format --option
"""
OF_THE_RUN = """
--batch-size N  rows of the batch, over all hosts
--length N  tokens in a row; max_length of documents
--seed N  (default: 0)
--view {packed,documents,blocks}  how rows are made (default: packed)
--overlap N  packed rows: tokens that two share (default: 0)
--order {shuffled,sequential}  (default: shuffled)
--reference-order STREAMS,BLOCKS,ROWS  the reference loader's order: streams, read blocks per shuffle buffer, sequences per read
 block
--epochs N  0: endless (default: 1)
--start N  samples that were had before step 0 (default: 0)
--row R  row R of the batch alone
"""


def add_commands(commands: Any) -> None:
    number, one = cli.at_least(0), cli.at_least(1)
    trace = cli.add_command(commands, "trace", run, SUMMARY, EXAMPLES, ARGUMENTS, token=int, sequence=int, step=number)
    of_the_run = trace.add_argument_group("with --step: the training run's own settings, with the loader's defaults")
    cli.add_listed(of_the_run, OF_THE_RUN, batch_size=one, length=one, row=number, reference_order=reference_order)
    about = "tell which documents a run has seen, how often, at which steps, in which rows of the batch"
    cli.add_command(
        commands,
        "seen",
        run_seen,
        about,
        EXAMPLES_OF_SEEN,
        ARGUMENTS_OF_SEEN,
        document=lambda text: text if KEY.fullmatch(text) else number(text),
    )


def reference_order(text: str) -> ReferenceOrder:
    try:
        return ReferenceOrder(*(int(part) for part in text.split(",")))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not STREAMS,BLOCKS,ROWS, such as 2,8,16 ({error})") from None


def run(options: argparse.Namespace) -> int:
    if options.characters is None:
        options.characters = 1200 if options.step is None else 160
    if options.path.endswith(".json"):
        return run_ledger(options)
    corpus = cli.corpus_of(options)
    name, _ = corpus.split(options.split)
    sources, color = TextSources.of(corpus, options), terminal.wants_color(options.color)
    if options.document is not None:
        found = find_document(corpus, options.document)
        if not isinstance(found, tuple):
            facts = [[name, str(value)] for name, value in found.items() if value is not None]
            terminal.show(options, found, ["not in the dataset: it was left out", *terminal.table(facts, "<<")])
            return cli.SAME
        name, options.sequence = found
    if options.step is not None:
        traced: JsonObject = trace_step(sources, name, options)
        shown = step_lines(traced, options.characters, color)
    else:
        traced = trace_one(sources, name, options)
        if sources.problem is not None and traced["text_from"] != "source":
            traced["notes"].append(sources.problem)
        shown = lines(traced, options.characters, color)
    terminal.show(options, traced, shown)
    return cli.SAME


def run_ledger(options: argparse.Namespace) -> int:
    """A step of a run, by its ledger: the documents of every source in it."""
    ledger = Ledger.open(options.path, places=dict(options.at), trust_records=options.trust_records)
    if options.step is None:
        raise ValueError(f"{ledger.path}: is a run's ledger: say --step, or trace the dataset itself")
    mixture = ledger.mixture()
    source, index = mixture.indices(options.step)
    rows: list[JsonObject] = []
    for k in np.unique(source).tolist():
        view, path, split = ledger.documents_of(name := mixture.names[k])
        chosen = [row for row in _wanted_rows(options, len(source)) if source[row] == k]
        sources = TextSources.of(open_corpus(path), options)
        found = traced_rows(sources, split, view, {row: int(index[row]) for row in chosen})
        rows += [{"source": name, **row} for row in found]
    traced = {"path": ledger.path, "step": options.step, "rows": sorted(rows, key=lambda row: int(row["row"]))}
    terminal.show(options, traced, step_lines(traced, options.characters, terminal.wants_color(options.color)))
    return cli.SAME


def find_document(corpus: Corpus, key: str) -> tuple[str, int] | JsonObject:
    """The split and the sequence of the document with a key, or its row in the table of documents if it is in no split. A
    forgotten document's row has only its key and the reason. LookupError if there is no such document.
    """
    wanted, table = np.array([key_of(key)], np.uint64), table_of(corpus)
    for name, split in corpus.splits.items():
        assert isinstance(split, FlatTokens)
        if (number := int(split.by_keys(wanted)[0])) >= 0:
            return name, number
    for batch in table.batches(where=parse(f"key = '{key}'")):
        row: JsonObject
        for row in batch.to_pylist():
            return row
    if corpus.output is not None and read_forgotten(corpus.output).those(wanted)[0]:
        return {"key": key, "reason": "forgotten"}
    raise LookupError(f"{corpus.url}: has no document with key {key}")


def _wanted_rows(options: argparse.Namespace, count: int) -> Sequence[int]:
    """The rows of a batch that are wanted. IndexError if there is none of that number."""
    if options.row is not None and options.row >= count:
        raise IndexError(f"there is no row {options.row} in step {options.step}; there are {count}")
    return range(count) if options.row is None else [options.row]


def trace_one(sources: TextSources, name: str, options: argparse.Namespace) -> JsonObject:
    """The document of the sequence or the token in the options."""
    split, i, token = sources.corpus.splits[name], options.sequence, {}
    if options.token is not None:
        i, within = sequence_of(split, options.token)
        ids = split.sequence(i)
        parts = {"text": (within, within + 1), "before": (max(within - CONTEXT_TOKENS, 0), within)}
        parts["after"] = within + 1, within + 1 + CONTEXT_TOKENS
        token = {"index": options.token % split.token_count, "in_sequence": within, "id": int(ids[within])}
        token = {"token": token | {part: sources.decoded(ids[low:high]) for part, (low, high) in parts.items()}}
    if not -split.seq_count <= i < split.seq_count:
        raise IndexError(f"{sources.corpus.url}: there is no sequence {i} in {name}; there are {split.seq_count}")
    return trace(sources, name, [i % split.seq_count])[0] | token


def trace(sources: TextSources, split: str, sequences: Sequence[int]) -> list[JsonObject]:
    """The origin of sequences, for JSON. ``text_from`` is ``source``, ``tokens``, or None if there is no text; ``notes`` say
    what is missing. Each source file is read once.
    """
    corpus = sources.corpus
    places = dict(zip(sequences, places_of(corpus, split, sequences) or (), strict=False))
    read: dict[int, tuple[str | None, str | None, str | None]] = {}  # where, what, or why not
    for file, of_file, found, texts, problem in texts_of(sources, places):
        for i in of_file:
            why = problem
            if file and found and not why and i not in texts:
                changed = "" if digest_is(found, file.sha256) else ": the file has changed since it was read"
                why = f"row {places[i].row} of {found} is not the document, by its key{changed}"
            read[i] = found, texts.get(i), why
    traced, columns = [], kept_of(corpus, split, sequences)
    kept = None if columns is None else columns.to_pylist()
    for k, i in enumerate(sequences):
        ids = corpus.splits[split].sequence(i)
        found, text, why = read.get(i, (None, None, UNRECORDED))
        text_from = None if text is None else "source"
        if text is None and sources.vocabulary is not None:
            text_from, text = "tokens", sources.decoded(ids)
        one = {"path": corpus.url, "split": split, "sequence": i, "token_count": len(ids)}
        one |= {"document": places[i].described(corpus.sources) if places else None, "found": found}
        one |= {} if kept is None else {"columns": {name: in_json(value) for name, value in kept[k].items()}}
        traced.append(one | {"text_from": text_from, "text": text, "ids": ids.tolist(), "notes": [why] if why else []})
    return traced


def trace_step(sources: TextSources, name: str, options: argparse.Namespace) -> JsonObject:
    """The documents of a batch, for JSON: for each row, the sequences whose tokens it holds."""
    corpus, split = sources.corpus, sources.corpus.splits[name]
    if not isinstance(split, FlatTokens):
        raise ValueError(f"{corpus.url}: is {corpus.format}; the loader reads flat-tokens datasets. Import it first.")
    if options.batch_size is None or options.length is None:
        raise ValueError("--step needs the run's --batch-size and --length, and its --seed if that was not 0")
    if options.overlap and options.view != "packed":
        raise ValueError(f"--overlap is of packed rows, not of {options.view}")
    overlap = {"overlap": options.overlap} if options.view == "packed" else {}
    view: PackedView | DocumentsView | BlocksView = getattr(split, options.view)(options.length, **overlap)
    order = options.order if options.reference_order is None else options.reference_order
    settings = {"epochs": options.epochs or None, "start": options.start, "order": order}
    loader = ShuffledLoader(view, options.batch_size, options.seed, **settings)
    numbers = loader.indices(options.step).tolist()
    wanted = {k: numbers[k] for k in _wanted_rows(options, len(numbers))}
    rows = traced_rows(sources, name, view, wanted)
    return {"path": corpus.url, "split": name, "step": options.step, "rows": rows}


def traced_rows(sources: TextSources, name: str, view: SplitView, numbers: Mapping[int, int]) -> list[JsonObject]:
    """The documents of rows of a batch, for JSON. *numbers*: each row's number in the view."""
    rows: list[JsonObject] = [
        {"row": k, "view_row": number, "parts": _sequences_in_row(view.tokens, view, number)} for k, number in numbers.items()
    ]
    if view.has_epochs:
        raise ValueError(
            f"{sources.corpus.url}: rows of {name!r} are filled in the middle, which cannot be traced. Trace its documents."
        )
    shift = "bos" in ends_of(view.tokens)  # a first token that is not stored
    for part in (part for row in rows for part in row["parts"]):
        part["sequence_tokens"] = [max(place - shift, 0) for place in part["sequence_tokens"]]
    sequences = sorted({part["sequence"] for row in rows for part in row["parts"]})
    documents = dict(zip(sequences, trace(sources, name, sequences), strict=True))
    for part in (part for row in rows for part in row["parts"]):
        document = documents[part["sequence"]]
        ids = np.array(document["ids"][slice(*part["sequence_tokens"])], np.uint32)
        part |= {"part_text": sources.decoded(ids), **{key: document[key] for key in OF_A_DOCUMENT if key in document}}
    return rows


def _sequences_in_row(split: FlatTokens, view: SplitView, number: int) -> list[JsonObject]:
    """The sequences whose tokens a row of a view holds: their numbers, and the ranges in the row and in the sequence."""
    if isinstance(view, PackedDocumentsView):
        parts = view.parts(np.array([number]))
        documents, offsets, lengths = parts.documents, parts.offsets, parts.lengths
    else:
        (start,), (length,) = (values.tolist() for values in view.token_ranges(np.array([number])))
        if not length:
            return []
        first, last = (sequence_of(split, token)[0] for token in (start, start + length - 1))
        begun = split.seq_starts.read(first, last + 2).astype(np.int64)
        edges = np.clip(begun, start, start + length)
        documents, offsets, lengths = np.arange(first, last + 1), (edges - begun)[:-1], np.diff(edges)
    ends = np.cumsum(lengths)
    facts = np.stack([documents, ends - lengths, ends, offsets, offsets + lengths], axis=1)
    return [
        {"sequence": document, "row_tokens": [low, high], "sequence_tokens": [begin, stop]}
        for document, low, high, begin, stop in facts[lengths > 0].tolist()
    ]


def lines(traced: JsonFacts, characters: int, color: bool) -> Iterator[str]:
    """One traced sequence for people."""
    facts = list(_facts(traced))
    for line, (label, _) in zip(terminal.table(facts, "<<", indent=0), facts, strict=True):
        yield terminal.styled(label, terminal.BOLD, color) + line[len(label) :]
    yield ""
    text = " ".join(map(str, traced["ids"])) if traced["text"] is None else traced["text"]
    yield from _cut(text, characters, color).split("\n")


def _facts(traced: JsonFacts) -> Iterator[tuple[str, str]]:
    """The labels and values of a traced sequence, for people."""
    if token := traced.get("token"):
        shown = "" if token["text"] is None else f" {token['text']!r}"
        yield "token", f"{token['index']:,}: id {token['id']}{shown}, number {token['in_sequence']:,} of its sequence, from 0"
        if token["before"] is not None:
            yield "in", f"{token['before']}»{token['text']}«{token['after']}".replace("\n", " ")
    yield "sequence", f"{traced['sequence']:,} of {traced['split']}, {terminal.plural(traced['token_count'], 'token')}"
    if document := traced["document"]:
        yield from [("key", document["key"]), ("source", document["source"] or "not named")]
        yield from [("file", document["file"] or "not named"), ("row", f"{document['row']:,}")]
    for name, value in (traced.get("columns") or {}).items():
        yield f"column {name}", "null" if value is None else str(value)
    if traced["found"]:
        yield "found at", traced["found"]
    yield from (("note", note) for note in traced["notes"])
    if traced["text_from"]:
        yield "text from", {"source": "the source", "tokens": "the decoded tokens"}[traced["text_from"]]


def step_lines(traced: JsonFacts, characters: int, color: bool) -> Iterator[str]:
    """The documents of a batch for people."""
    for row in traced["rows"]:
        label = terminal.styled(f"row {row['row']}", terminal.BOLD, color)
        of = f"source {row['source']}" if "source" in row else "the view"
        yield f"{label} of step {traced['step']}: row {row['view_row']:,} of {of}"
        for part in row["parts"]:
            (low, high), (begin, end) = part["row_tokens"], part["sequence_tokens"]
            document = part["document"]
            where = f", {document['file']} row {document['row']:,}, key {document['key']}" if document else ""
            of = f"tokens {begin:,} to {end:,} of {part['token_count']:,} of sequence {part['sequence']:,}"
            yield f"  {low:,} to {high:,}: {of}{where}"
            for note in part["notes"]:
                yield f"    note: {note}"
            if text := part["part_text"] or part["text"]:
                yield f"    {_cut(text.replace(chr(10), ' '), characters, color)}"


def _cut(text: str, characters: int, color: bool) -> str:
    if not characters or len(text) <= characters:
        return text
    return text[:characters] + terminal.styled(f" ... {len(text) - characters:,} more", terminal.DIM, color)


EXAMPLES_OF_SEEN = """\
examples:
  flat-tokens seen run.json --before 5000                 samples and epochs of each source, and its documents
  flat-tokens seen run.json --source web --before 5000    those of one source
  flat-tokens seen run.json --document 17 --before 5000   sequence 17, in each source that has so many
  flat-tokens seen run.json --document 9f1c0a3b5d7e2468   the document with this key, in a run that has an end

No batch is read: the steps are computed. Rows of batches are counted over all hosts. Status 1: nothing was seen.
"""
DOCUMENTS_AT_A_TIME = 1 << 14
VISITS_SHOWN = 8
ARGUMENTS_OF_SEEN = """
path=RUN.json  the ledger of a run
--document ID  this document: the number of its sequence in the split, or its key, 16 hexadecimal digits
--source NAME  of this source alone
--before N  in the steps before step N (default: to the end of the run, if there is one)
--limit N  show N documents of a source at most; 0: all (default: 20; --json: always all)
--at --trust-records
"""


def run_seen(options: argparse.Namespace) -> int:
    ledger = Ledger.open(options.path, places=dict(options.at), trust_records=options.trust_records)
    mixture = ledger.mixture()
    before = ledger.steps_before(options.before, "--before STEP")
    names = ledger.names if options.source is None else [options.source]
    drawn = dict(zip(ledger.names, mixture.drawn(before).tolist(), strict=True))
    most = None if options.json or not options.limit else options.limit
    sources = []
    for name in names:
        rows = len(view := ledger.view(name))
        source: JsonObject = {"name": name, "samples": drawn[name], "rows": rows, "epochs": drawn[name] / rows}
        source |= {"documents": None, "is_cut": False}
        if isinstance(view, SplitView):
            found = list(islice(seen(ledger, mixture, name, options.document, before), most))
            source |= {"documents": found, "is_cut": len(found) == most and options.document is None}
        sources.append(source)
    terminal.show(options, {"ledger": ledger.path, "before": before, "sources": sources}, seen_lines(sources, before))
    return cli.SAME if any(source["documents"] for source in sources) else cli.DIFFERENT


def seen(ledger: Ledger, mixture: Mixture, name: str, document: str | int | None, before: int) -> Iterator[JsonObject]:
    """The documents of a source that the run has seen, for JSON: each one's visits."""
    view, path, split = ledger.documents_of(name)
    records = open_corpus(path).documents(split)
    for documents in _documents_to_find(records, view.tokens.seq_count, document):
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


def _documents_to_find(records: DocumentRecords | None, count: int, document: str | int | None) -> Iterator[Int64s]:
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


def seen_lines(sources: Sequence[JsonFacts], before: int) -> Iterator[str]:
    """The counts of what was seen, for people."""
    for source in sources:
        of = f"{source['epochs']:,.2f} epochs of {terminal.plural(source['rows'], 'row')}"
        yield f"{source['name']}: {terminal.plural(source['samples'], 'sample')} before step {before:,}, {of}"
        if source["documents"] is None:
            yield "  its dataset was replaced, as documents were forgotten; --at NAME=PATH names a copy"
        for document in source["documents"] or ():
            visits = document["visits"]
            shown = ", ".join(f"step {visit['step']:,} row {visit['batch_row']:,}" for visit in visits[:VISITS_SHOWN])
            more = f", {len(visits) - VISITS_SHOWN:,} more" if len(visits) > VISITS_SHOWN else ""
            key = f", key {document['key']}" if document["key"] else ""
            yield f"  document {document['document']:,}{key}, {terminal.plural(len(visits), 'time')}: {shown}{more}"
        if source["is_cut"]:
            yield "  ... more with --limit N, all with --limit 0"
