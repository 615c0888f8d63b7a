"""``flat-tokens trace``: from a token, a sequence or a training step to the document that it comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from flat_tokens import arguments, terminal
from flat_tokens.corpus import Corpus, sequence_of
from flat_tokens.documents import Locator, Place, digest_is, places_of, read_rows
from flat_tokens.formats import Readable
from flat_tokens.vocabulary import Vocabulary

SUMMARY = "find the document that a token, a sequence or a training step comes from"
EXAMPLES = """\
examples:
  flat-tokens trace out/web --sequence 7             key, source file and row of sequence 7, and its text from there
  flat-tokens trace out/web --token 123456789        the same for the sequence that holds a token of the split
  flat-tokens trace out/web --sequence 7 --source /mnt/corpus

The text is the source's where the file can be reached, else the decoded tokens.
"""
CONTEXT_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_path(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--token", type=int, metavar="K", help="token K of the split, counted through all of its sequences")
    what.add_argument("--sequence", type=int, metavar="N", help="sequence N of the split; -1 is the last")
    parser.add_argument("--split", metavar="NAME", help="train or validation (default: the first)")
    parser.add_argument(
        "--characters",
        type=arguments.at_least(0),
        default=1200,
        metavar="N",
        help="show N characters of the text at most; 0: all (default: 1200; --json: always all)",
    )
    arguments.add_sources(parser)
    arguments.add_tokenizer(parser)
    arguments.add_format(parser)
    arguments.add_color(parser)
    arguments.add_json(parser)


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
    within = None
    if options.sequence is not None:
        if not -split.seq_count <= options.sequence < split.seq_count:
            raise IndexError(f"{corpus.url}: there is no sequence {options.sequence} in {name}; there are {split.seq_count}")
        i = options.sequence % split.seq_count
    else:
        i, within = sequence_of(split, options.token)
    traced = trace(corpus, name, i, Locator(corpus, options.source), vocabulary)
    if within is not None:
        traced["token"] = {
            "index": options.token % split.token_count,
            "in_sequence": within,
            **_token(split, i, within, vocabulary),
        }
    if problem is not None and traced["text_from"] != "source":
        traced["notes"].append(problem)
    if options.json:
        arguments.print_json(traced)
    else:
        print("\n".join(lines(traced, options.characters, terminal.wants_color(options.color))))
    return arguments.SAME


def _token(split: Readable, i: int, within: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """A token, and what stands around it."""
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


def trace(corpus: Corpus, split: str, i: int, locator: Locator, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Where a sequence comes from, for JSON. ``text_from`` is ``source``, ``tokens``, or None where there is no text; ``notes``
    say what could not be had.
    """
    ids = corpus.splits[split].sequence(i)
    traced: dict[str, Any] = {"path": corpus.url, "split": split, "sequence": i, "token_count": len(ids)}
    places, notes, text, found = places_of(corpus, split, [i]), [], None, None
    if places is None:
        notes.append("there is no record of where sequences come from")
        traced["document"] = None
    else:
        traced["document"] = places[0].described(corpus.sources)
        found, text, problem = _from_source(corpus, places[0], locator)
        notes += [problem] if problem else []
    source = "source" if text is not None else None
    if text is None and vocabulary is not None:
        source, text = "tokens", vocabulary.decode(ids)[0].decode("utf-8", "replace")
    return traced | {"found": found, "text_from": source, "text": text, "ids": ids.tolist(), "notes": notes}


def _from_source(corpus: Corpus, place: Place, locator: Locator) -> tuple[str | None, str | None, str | None]:
    """Where the document's file is, the document's text, and what was in the way."""
    if place.file is None:
        return None, None, "the manifest names no file with this number"
    found = locator.find(place.file)
    if found is None:
        return None, None, f"{place.file.name} is not found; say where it is with --source"
    try:
        row = read_rows(found, place.file, corpus.sources[place.file.source], [place.row]).get(place.row)
    except (ValueError, ModuleNotFoundError) as error:
        return found, None, str(error)
    if row is None or row.key != place.key:
        changed = "" if digest_is(found, place.file.sha256) else ": the file has changed since it was read"
        return found, None, f"row {place.row} of {found} is not the document, by its key{changed}"
    return found, row.text, None


def lines(traced: Mapping[str, Any], characters: int, color: bool) -> Iterator[str]:
    dim, mark, reset = (terminal.DIM, terminal.BOLD, terminal.RESET) if color else ("", "", "")
    facts = [("sequence", f"{traced['sequence']:,} of {traced['split']}, {terminal.plural(traced['token_count'], 'token')}")]
    if token := traced.get("token"):
        shown = "" if token["text"] is None else f" {token['text']!r}"
        facts.insert(
            0, ("token", f"{token['index']:,}: id {token['id']}{shown}, number {token['in_sequence']:,} of its sequence")
        )
    if document := traced["document"]:
        facts.append(("key", document["key"]))
        facts.append(("source", document["source"] or "not named"))
        facts.append(("file", document["file"] or "not named"))
        facts.append(("row", f"{document['row']:,}"))
    if traced["found"]:
        facts.append(("found at", traced["found"]))
    facts += [("note", note) for note in traced["notes"]]
    if traced["text_from"]:
        facts.append(("text from", {"source": "the source", "tokens": "the decoded tokens"}[traced["text_from"]]))
    yield from (
        line.replace(label, f"{mark}{label}{reset}", 1)
        for line, (label, _) in zip(terminal.table([list(fact) for fact in facts], "<<", indent=0), facts, strict=True)
    )
    yield ""
    text = " ".join(map(str, traced["ids"])) if traced["text"] is None else terminal.visible(traced["text"])
    yield (
        text
        if not characters or len(text) <= characters
        else f"{text[:characters]}{dim} ... {len(text) - characters:,} more{reset}"
    )
