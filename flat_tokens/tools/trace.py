"""``flat-tokens trace``: the documents that a token, a sequence or a training step comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from flat_tokens.formats import Readable
from flat_tokens.reader import FlatTokens
from flat_tokens.rows.blocks import BlocksView
from flat_tokens.rows.documents import DocumentsView
from flat_tokens.rows.loader import ShuffledLoader
from flat_tokens.rows.order import ReferenceOrder
from flat_tokens.rows.packed import PackedView
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.corpus import Corpus, SourceFile, sequence_of
from flat_tokens.tools.sources import Locator, Place, digest_is, nameless, places_of, read_rows
from flat_tokens.vocabulary import Vocabulary

SUMMARY = "find the documents that a token, a sequence or a training step comes from"
EXAMPLES = """\
examples:
  flat-tokens trace out/web --sequence 7             key, source file and row of sequence 7, and its text from there
  flat-tokens trace out/web --token 123456789        the same for the sequence that holds a token of the split
  flat-tokens trace out/web --sequence 7 --source /mnt/corpus
  flat-tokens trace out/web --step 5000 --length 2048 --batch-size 64 --seed 1 --row 3
                                                     every document in row 3 of that batch; without --row, in all rows

The text is the source's where the file can be reached, else the decoded tokens.
"""
CONTEXT_TOKENS = 8

ViewName = Literal["packed", "documents", "blocks"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_path(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--token", type=int, metavar="K", help="token K of the split, counted through all of its sequences")
    what.add_argument("--sequence", type=int, metavar="N", help="sequence N of the split; -1 is the last")
    what.add_argument("--step", type=arguments.at_least(0), metavar="S", help="step S of a ShuffledLoader over the split")
    parser.add_argument("--split", metavar="NAME", help="train or validation (default: the first)")
    parser.add_argument(
        "--characters",
        type=arguments.at_least(0),
        metavar="N",
        help="show N characters of a text at most; 0: all (default: 1200, with --step 160; --json: always all)",
    )
    arguments.add_sources(parser)
    arguments.add_tokenizer(parser)
    arguments.add_format(parser)
    arguments.add_color(parser)
    arguments.add_json(parser)
    step = parser.add_argument_group("with --step: the training run's own settings, with the loader's defaults")
    step.add_argument("--batch-size", type=arguments.at_least(1), metavar="N", help="rows of the batch, over all hosts")
    step.add_argument("--length", type=arguments.at_least(1), metavar="N", help="tokens in a row; max_length of documents")
    step.add_argument("--seed", type=arguments.at_least(0), default=0, metavar="N", help="(default: 0)")
    step.add_argument("--view", choices=get_args(ViewName), default="packed", help="how rows are made (default: packed)")
    step.add_argument("--overlap", type=arguments.at_least(0), default=0, metavar="N", help="packed rows: tokens that two share")
    step.add_argument("--order", choices=("shuffled", "sequential"), default="shuffled", help="(default: shuffled)")
    step.add_argument(
        "--reference-order",
        type=reference_order,
        metavar="STREAMS,BLOCKS,ROWS",
        help="the reference loader's order: streams, read blocks per shuffle buffer, sequences per read block",
    )
    step.add_argument("--epochs", type=arguments.at_least(0), default=1, metavar="N", help="0: endless (default: 1)")
    step.add_argument("--start", type=arguments.at_least(0), default=0, metavar="N", help="samples that were had before step 0")
    step.add_argument("--row", type=arguments.at_least(0), metavar="R", help="row R of the batch alone")


def reference_order(text: str) -> ReferenceOrder:
    try:
        return ReferenceOrder(*(int(part) for part in text.split(",")))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not STREAMS,BLOCKS,ROWS, such as 2,8,16 ({error})") from None


def run(options: argparse.Namespace) -> int:
    corpus = arguments.corpus_of(options)
    split = corpus.split(options.split)
    name = next(name for name, found in corpus.splits.items() if found is split)
    vocabulary, problem = None, None
    try:
        vocabulary = arguments.vocabulary_for(corpus, options)
    except (ValueError, ModuleNotFoundError) as error:
        if options.tokenizer is not None:
            raise
        problem = str(error)
    color = terminal.wants_color(options.color)
    locator = Locator(corpus, options.source)
    if options.step is not None:
        traced: dict[str, Any] = trace_step(corpus, name, split, options, locator, vocabulary)
        shown = step_lines(traced, 160 if options.characters is None else options.characters, color)
    else:
        traced = trace_one(corpus, name, split, options, locator, vocabulary)
        if problem is not None and traced["text_from"] != "source":
            traced["notes"].append(problem)
        shown = lines(traced, 1200 if options.characters is None else options.characters, color)
    if options.json:
        arguments.print_json(traced)
    else:
        print("\n".join(shown))
    return arguments.SAME


def trace_one(
    corpus: Corpus, name: str, split: Readable, options: argparse.Namespace, locator: Locator, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """The document of the sequence or the token in the options."""
    if options.token is not None:
        i, within = sequence_of(split, options.token)
        token = {"index": options.token % split.token_count, "in_sequence": within, **_token(split, i, within, vocabulary)}
        return trace(corpus, name, [i], locator, vocabulary)[0] | {"token": token}
    if not -split.seq_count <= options.sequence < split.seq_count:
        raise IndexError(f"{corpus.url}: there is no sequence {options.sequence} in {name}; there are {split.seq_count}")
    return trace(corpus, name, [options.sequence % split.seq_count], locator, vocabulary)[0]


def _token(split: Readable, i: int, within: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """A token and its context."""
    ids = split.sequence(i)
    if vocabulary is None:
        return {"id": int(ids[within]), "text": None, "before": None, "after": None}
    before, after = ids[max(within - CONTEXT_TOKENS, 0) : within], ids[within + 1 : within + 1 + CONTEXT_TOKENS]
    return {
        "id": int(ids[within]),
        "text": vocabulary.piece(int(ids[within])).decode("utf-8", "replace"),
        "before": vocabulary.decode(before)[0].decode("utf-8", "replace"),
        "after": vocabulary.decode(after)[0].decode("utf-8", "replace"),
    }


def trace(
    corpus: Corpus, split: str, sequences: Sequence[int], locator: Locator, vocabulary: Vocabulary | None
) -> list[dict[str, Any]]:
    """The origin of sequences, for JSON. ``text_from`` is ``source``, ``tokens``, or None if there is no text; ``notes`` say
    what is missing. Each source file is read once.
    """
    places = places_of(corpus, split, sequences)
    texts: dict[int, FromSource] = {}
    if places is not None:
        by_file: dict[SourceFile | None, list[int]] = {}
        for i, place in zip(sequences, places, strict=True):
            by_file.setdefault(place.file, []).append(i)
        where = dict(zip(sequences, places, strict=True))
        for file, of_file in by_file.items():
            texts |= dict(zip(of_file, _from_source(corpus, file, [where[i] for i in of_file], locator), strict=True))
    traced = []
    for k, i in enumerate(sequences):
        ids = corpus.splits[split].sequence(i)
        found, text, problem = texts.get(i, FromSource(None, None, "there is no record of where sequences come from"))
        text_from = None if text is None else "source"
        if text is None and vocabulary is not None:
            text_from, text = "tokens", vocabulary.decode(ids)[0].decode("utf-8", "replace")
        one = {"path": corpus.url, "split": split, "sequence": i, "token_count": len(ids)}
        one |= {"document": None if places is None else places[k].described(corpus.sources), "found": found}
        traced.append(one | {"text_from": text_from, "text": text, "ids": ids.tolist(), "notes": [problem] if problem else []})
    return traced


class FromSource(NamedTuple):
    """The path of a document's file, the document's text there, and the reason if it is not available."""

    found: str | None
    text: str | None
    problem: str | None


def _from_source(corpus: Corpus, file: SourceFile | None, places: Sequence[Place], locator: Locator) -> list[FromSource]:
    """The documents of one source file."""
    if file is None:
        return [FromSource(None, None, nameless(corpus))] * len(places)
    found = locator.find(file)
    if found is None:
        return [FromSource(None, None, f"{file.name} is not found; say where it is with --source")] * len(places)
    try:
        rows = read_rows(found, file, corpus.sources[file.source], [place.row for place in places])
    except (ValueError, ModuleNotFoundError) as error:
        return [FromSource(found, None, str(error))] * len(places)
    texts = []
    for place in places:
        row = rows.get(place.row)
        if row is not None and row.key == place.key:
            texts.append(FromSource(found, row.text, None))
            continue
        why = "" if digest_is(found, file.sha256) else ": the file has changed since it was read"
        texts.append(FromSource(found, None, f"row {place.row} of {found} is not the document, by its key{why}"))
    return texts


def trace_step(
    corpus: Corpus, name: str, split: Readable, options: argparse.Namespace, locator: Locator, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """The documents of a batch, for JSON: for each row, the sequences whose tokens it holds."""
    if not isinstance(split, FlatTokens):
        raise ValueError(f"{corpus.url}: is {corpus.format}; the loader reads flat-tokens datasets. Import it first.")
    if options.batch_size is None or options.length is None:
        raise ValueError("--step needs the run's --batch-size and --length, and its --seed if that was not 0")
    view = _view(split, options.view, options.length, options.overlap)
    order = options.order if options.reference_order is None else options.reference_order
    epochs = options.epochs or None
    loader = ShuffledLoader(view, options.batch_size, options.seed, epochs=epochs, start=options.start, order=order)
    numbers = loader.indices(options.step).tolist()
    if options.row is not None and options.row >= len(numbers):
        raise IndexError(f"there is no row {options.row} in step {options.step}; there are {len(numbers)}")
    rows = [
        {"row": k, "view_row": number, "parts": _parts(split, view, number)}
        for k, number in enumerate(numbers)
        if options.row in (None, k)
    ]
    sequences = sorted({part["sequence"] for row in rows for part in row["parts"]})
    documents = dict(zip(sequences, trace(corpus, name, sequences, locator, vocabulary), strict=True))
    for row in rows:
        row["parts"] = [_described(part, documents[part["sequence"]], vocabulary) for part in row["parts"]]
    return {"path": corpus.url, "split": name, "step": options.step, "rows": rows}


OF_A_DOCUMENT = ("token_count", "document", "found", "text_from", "text", "notes")


def _described(part: Mapping[str, Any], document: Mapping[str, Any], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """A part of a row with its document and its own text."""
    ids = np.array(document["ids"][slice(*part["sequence_tokens"])], np.uint32)
    text = None if vocabulary is None else vocabulary.decode(ids)[0].decode("utf-8", "replace")
    return {**part, "part_text": text, **{key: document[key] for key in OF_A_DOCUMENT}}


def _view(split: FlatTokens, name: ViewName, length: int, overlap: int) -> PackedView | DocumentsView | BlocksView:
    if overlap and name != "packed":
        raise ValueError(f"--overlap is of packed rows, not of {name}")
    match name:
        case "packed":
            return split.packed(length, overlap=overlap)
        case "documents":
            return split.documents(length)
        case "blocks":
            return split.blocks(length)


def _parts(split: FlatTokens, view: PackedView | DocumentsView | BlocksView, number: int) -> list[dict[str, Any]]:
    """The sequences whose tokens a row of a view holds: their numbers, and the ranges in the row and in the sequence."""
    if isinstance(view, DocumentsView):
        start, stop = (int(entry) for entry in split.seq_starts.read(number, number + 2))
        first, stop = number, min(stop, start + view.max_length)
    else:
        start = int(view.starts[number]) if isinstance(view, BlocksView) else number * (view.length - view.overlap)
        first, stop = sequence_of(split, start)[0], start + view.length
    # Apart from empty ones, a row has at most as many sequences as tokens.
    begun = split.seq_starts.read(first, min(first + stop - start + 1, split.seq_count + 1)).astype(np.int64)
    while begun[-1] < stop:
        begun = np.append(begun, split.seq_starts.read(first + len(begun), min(first + 2 * len(begun), split.seq_count + 1)))
        begun = begun.astype(np.int64)
    return [
        {
            "sequence": first + k,
            "row_tokens": [max(low, start) - start, min(high, stop) - start],
            "sequence_tokens": [max(low, start) - low, min(high, stop) - low],
        }
        for k, (low, high) in enumerate(zip(begun[:-1].tolist(), begun[1:].tolist(), strict=True))
        if max(low, start) < min(high, stop)
    ]


def lines(traced: Mapping[str, Any], characters: int, color: bool) -> Iterator[str]:
    """One traced sequence for people."""
    facts = [("sequence", f"{traced['sequence']:,} of {traced['split']}, {terminal.plural(traced['token_count'], 'token')}")]
    if token := traced.get("token"):
        shown = "" if token["text"] is None else f" {token['text']!r}"
        within = f"number {token['in_sequence']:,} of its sequence, from 0"
        facts.insert(0, ("token", f"{token['index']:,}: id {token['id']}{shown}, {within}"))
        if token["before"] is not None:
            around = f"{token['before']}»{token['text']}«{token['after']}".replace("\n", " ")
            facts.insert(1, ("in", terminal.visible(around)))
    if document := traced["document"]:
        facts += [("key", document["key"]), ("source", document["source"] or "not named")]
        facts += [("file", document["file"] or "not named"), ("row", f"{document['row']:,}")]
    if traced["found"]:
        facts.append(("found at", traced["found"]))
    facts += [("note", note) for note in traced["notes"]]
    if traced["text_from"]:
        facts.append(("text from", {"source": "the source", "tokens": "the decoded tokens"}[traced["text_from"]]))
    bold, reset = (terminal.BOLD, terminal.RESET) if color else ("", "")
    for line, (label, _) in zip(terminal.table([list(fact) for fact in facts], "<<", indent=0), facts, strict=True):
        yield f"{bold}{line[: len(label)]}{reset}{line[len(label) :]}"
    yield ""
    text = " ".join(map(str, traced["ids"])) if traced["text"] is None else traced["text"]
    yield _cut(text, characters, color)


def step_lines(traced: Mapping[str, Any], characters: int, color: bool) -> Iterator[str]:
    """The documents of a batch for people."""
    bold, reset = (terminal.BOLD, terminal.RESET) if color else ("", "")
    for row in traced["rows"]:
        yield f"{bold}row {row['row']}{reset} of step {traced['step']}: row {row['view_row']:,} of the view"
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
    dim, reset = (terminal.DIM, terminal.RESET) if color else ("", "")
    if not characters or len(text) <= characters:
        return terminal.visible(text)
    return f"{terminal.visible(text[:characters])}{dim} ... {len(text) - characters:,} more{reset}"
