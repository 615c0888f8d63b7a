"""``flat-tokens inspect``: the description of a dataset; a sequence of it as text; the sequences that hold a text."""

from __future__ import annotations

import codecs
import itertools
import posixpath
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject, UInt32s
from flat_tokens.arrays.opening import read_metadata
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.formats import FLAT_TOKENS, FORMATS, Files, Readable
from flat_tokens.reader import datasets_below
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import WINDOW_TOKENS, Corpus, corpora_below, windows
from flat_tokens.tools.sources import document_of
from flat_tokens.vocabulary import Vocabulary

SUMMARY = "say what is at a path; show a sequence; find text"
EXAMPLES = """\
examples:
  flat-tokens inspect out/web                        what it is, from whom, how big
  flat-tokens inspect out                            the datasets below a directory
  flat-tokens inspect out/web --sequence 7           the text of sequence 7, each token in a colour of its own
  flat-tokens inspect out/web --find "needle"        the sequences that hold it; exit status 1 where none does
  flat-tokens inspect out/web --find-ids 464,2068    the same for token ids
  flat-tokens inspect corpus.pbin --tokenizer gpt2 --sequence 0
"""

FILES_SHOWN = 8
CONTEXT_BYTES = 60
CONTEXT_TOKENS = 6
ID_BYTES = 4
OF_A_FORMAT = ("summary", "keeps", "loses")


ARGUMENTS = f"""
PATH  {cli.ANY_DATASET}
| --sequence N  show sequence N of the split; -1 is the last
| --find TEXT  find sequences whose text holds TEXT, upper and lower case distinguished
| --find-ids IDS  find sequences that hold these token ids in a row: 1,2,3
--split NAME  train, validation or test; --sequence: the first without it, --find: all
--limit N  find N sequences at most; 0: all (default: 10)
--ids  show token ids instead of text
--tokenizer --pattern --trust-records --format --option
"""


def add_commands(commands: Any) -> None:
    cli.add_command(commands, "inspect", run, SUMMARY, EXAMPLES, ARGUMENTS, sequence=int, find_ids=token_ids)


def run(options: Namespace) -> int:
    whole = options.format is None and all(getattr(options, name) is None for name in ("sequence", "find", "find_ids", "split"))
    root = Store.at(options.path)
    if whole and any(one != root for one in datasets_below(root)):
        return show_below(root, list(corpora_below(root)), options)
    try:
        corpus = cli.corpus_of(options)
    except (OSError, ValueError):
        below = list(corpora_below(root)) if whole else []
        if any(isinstance(one, Corpus) for _, one in below):
            return show_below(root, below, options)
        raise
    if options.sequence is not None:
        return show_sequence(corpus, options)
    if options.find is not None or options.find_ids is not None:
        return show_matches(corpus, options)
    description = describe(corpus)
    if options.split is not None:
        corpus.split(options.split)
        description["splits"] = {options.split: description["splits"][options.split]}
    terminal.show(options, description, description_lines(description, terminal.wants_color(options.color)))
    return cli.SAME


def show_below(root: Store, below: list[tuple[str, Corpus | str]], options: Namespace) -> int:
    """List the datasets below a directory."""
    found: list[JsonObject] = []
    rows, problems = [["path", "format", "name", "version", "tokens", "sequences"]], []
    for url, one in below:
        if isinstance(one, str):
            problems.append({"path": url, "problem": one})
            continue
        name, version, counts = one.provenance.get("name"), version_of(one), one.counts
        found.append({"path": url, "format": one.format, "name": name, "version": version, **counts})
        path, numbers = posixpath.relpath(url, root.url), [f"{count:,}" for count in counts.values()]
        rows.append([path, one.format, name or "", version or "", *numbers])
    heading = f"{root.url}: no dataset itself, {terminal.plural(len(found), 'dataset')} below"
    lines = [heading, "", *terminal.table(rows, "<<<<>>"), *(f"  not read: {one['problem']}" for one in problems)]
    terminal.show(options, {"path": root.url, "datasets": found, "not_read": problems}, lines)
    return cli.SAME


def version_of(corpus: Corpus) -> str | None:
    """The version's name if the corpus is one of a build's output."""
    return posixpath.basename(corpus.store.root) if corpus.output is not None and not corpus.receipt else None


def token_ids(text: str) -> UInt32s:
    """Token ids separated by commas or spaces."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
        raise ArgumentTypeError(f"{text!r} is not a list of token ids from 0 to {MAX_TOKEN_ID}, such as 464,2068")
    return np.array(ids, np.uint32)


def describe(corpus: Corpus) -> JsonObject:
    """The facts about a corpus that need no reading of its tokens, for JSON."""
    sizes, provenance, tokenizer = _sizes(corpus), corpus.provenance, corpus.tokenizer

    def below(*directories: str) -> int | None:
        """Bytes of the objects in some directories, if the manifest says of which they are."""
        of_split = [size for key, size in sizes.items() if key.startswith(directories)]
        return sum(of_split) if corpus.format == FLAT_TOKENS and corpus.manifest.get("objects") else None

    described: JsonObject = {
        "path": corpus.url,
        "format": corpus.format,
        "kind": corpus.kind,
        "name": provenance.get("name"),
        "version": version_of(corpus),
        "layout": corpus.manifest.get("layout"),
        "stored": _stored(corpus),
        "byte_count": sum(sizes.values()),
        "object_count": len(sizes),
        "splits": {
            name: {
                "token_count": split.token_count,
                "seq_count": split.seq_count,
                "max_token_id": getattr(split, "max_token_id", None),
                "byte_count": below(f"{name}/", f"documents/{name}/"),
            }
            for name, split in corpus.splits.items()
        },
        "tokenizer": tokenizer._asdict() if tokenizer else None,
        "documents": corpus.manifest.get("totals", {}).get("documents"),
        "policy": provenance.get("documents"),
        "split_rule": provenance.get("split"),
        "sources": [
            {"name": source.name, "from": source.origin, "revision": source.revision, "settings": dict(source.settings)}
            | {"byte_count": sum(file.size for file in source.files), "files": [file._asdict() for file in source.files]}
            for source in corpus.sources
        ],
    }
    if corpus.manifest.get("columns"):
        described["columns"] = dict(corpus.manifest["columns"])
    if corpus.made_of:
        described["made_of"] = dict(corpus.made_of)
    if corpus.receipt:
        described["receipt"] = {key: value for key, value in corpus.receipt.items() if key != "objects"}
    if corpus.format != FLAT_TOKENS:
        described |= {key: getattr(FORMATS[corpus.format], key) for key in OF_A_FORMAT}
    return described


def _sizes(corpus: Corpus) -> dict[str, int]:
    """Bytes of each stored object, from the manifest or receipt, else from the store."""
    if corpus.manifest.get("objects"):
        return {item["key"]: item["size"] for item in corpus.manifest["objects"]}
    if corpus.format == FLAT_TOKENS:
        return dict(corpus.store.listing())
    files = Files.at(corpus.url)
    return {key: files.store.size(key) for key in files.keys}


def _stored(corpus: Corpus) -> str | None:
    """The storage of the tokens, from their metadata."""
    split = next(iter(corpus.splits.values()))
    if not isinstance(split, FlatTokens):
        return None
    metadata = read_metadata(split.store / "encoded_tokens", "array")
    try:
        if metadata["zarr_format"] == 2:
            compressor = metadata["compressor"]
            return f"zarr v2, chunks of {metadata['chunks'][0]:,}, {compressor['id'] if compressor else 'raw'}"
        shape = metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
        outer = metadata["codecs"][0]
        if outer["name"] != "sharding_indexed":
            return f"zarr v3, chunks of {shape:,}, {_codecs(metadata['codecs'])}"
        inner = outer["configuration"]
        return f"zarr v3, shards of {shape:,}, chunks of {inner['chunk_shape'][0]:,}, {_codecs(inner['codecs'])}"
    except (KeyError, TypeError, IndexError):
        return None


def _codecs(codecs: list[JsonObject]) -> str:
    return " and ".join(str(codec["name"]) for codec in codecs if codec["name"] != "bytes") or "raw"


def description_lines(described: JsonFacts, color: bool) -> Iterator[str]:
    """A description for people."""
    yield from heading(described, color)
    rows = [["split", "tokens", "sequences", "mean length", "largest id", "bytes"]]
    for split, facts in described["splits"].items():
        tokens, sequences, largest = facts["token_count"], facts["seq_count"], facts["max_token_id"]
        size = "" if facts["byte_count"] is None else terminal.size(facts["byte_count"])
        mean = f"{tokens / sequences:,.1f}" if sequences else ""
        rows.append([split, f"{tokens:,}", f"{sequences:,}", mean, terminal.number(largest), size])
    # Empty columns are left out.
    kept = [k for k in range(len(rows[0])) if any(row[k] for row in rows[1:])]
    yield from terminal.table([[row[k] for k in kept] for row in rows], "<" + ">" * (len(kept) - 1))
    yield from ["", *terminal.table(list(origin_facts(described)), "<<")]
    for source in described["sources"]:
        yield from ["", *_source_lines(source, color)]


def heading(described: JsonFacts, color: bool = False) -> list[str]:
    """The first lines on a dataset: its kind and its place, and an empty line."""
    kind = f"{described['kind']} {described['name']!r}" if described["name"] else described["kind"]
    version = f", version {described['version']}" if described["version"] else ""
    path = terminal.styled(described["path"], terminal.DIM, color)
    return [terminal.styled(kind, terminal.BOLD, color) + version, f"  {path}", ""]


def origin_facts(described: JsonFacts, digits: int = 12) -> Iterator[tuple[str, str]]:
    """How a dataset is stored and what it was made of, each with its label. *digits*: of the tokenizer's digest."""
    yield "size", f"{terminal.size(described['byte_count'])} in {terminal.plural(described['object_count'], 'file')}"
    layout = ", ".join(filter(None, (described["layout"], described["stored"])))
    if layout:
        yield "layout", layout
    if tokenizer := described["tokenizer"]:
        highest = "" if tokenizer["highest_id"] is None else f", ids 0 to {tokenizer['highest_id']:,}"
        revision = f" at {tokenizer['revision']}" if tokenizer["revision"] else ""
        yield "tokenizer", f"{tokenizer['name']}{revision}{highest}, digest {(tokenizer['digest'] or 'unknown')[:digits]}"
    if documents := described["documents"]:
        read = terminal.plural(documents.get("read", 0), "document")
        text = f"{terminal.size(documents['text_bytes'])} in " if documents.get("text_bytes") is not None else ""
        yield "text", f"{text}{read} read"
        yield "written", f"{terminal.plural(documents.get('written', 0), 'document')}{_counted(documents)}"
    if policy := described["policy"]:
        yield "policy", ", ".join(f"{key} {value}" for key, value in policy.items())
    taken = [", ".join(step["name"] for step in source["settings"].get("steps") or ()) for source in described["sources"]]
    if any(taken):
        yield "steps", "; ".join(dict.fromkeys(one or "none" for one in taken))
    for one in evaluated(described):
        yield "evaluation", one.sentence
    if columns := described.get("columns"):
        yield "columns", ", ".join(f"{name} ({kind})" for name, kind in columns.items())
    if rule := described["split_rule"]:
        fraction, test = rule.get("validation_fraction"), rule.get("test_fraction")
        by = {"key": "their keys", "text": "their texts"}.get(rule.get("by", "key"), f"their values of {rule.get('by')!r}")
        drawn = f"{fraction} of the documents, by {by} and seed {rule.get('seed')}"
        yield "validation", drawn if fraction or test else "what the sources name as such; no document is drawn"
        if test:
            yield "test", f"{test} of the documents, by the same hash"
    if made_of := described.get("made_of"):
        yield "made of", f"version {made_of['version']}, manifest with sha256 {made_of['digest'][:digits]}"
    if receipt := described.get("receipt"):
        digest, kind = (receipt["inputs"].get("file") or ["unknown", ""])[:2]
        yield "made of", f"{kind} file with sha256 {digest[:12]}, part {receipt['inputs'].get('range')}"
        yield "documents", f"{receipt.get('written', 0):,} of {terminal.size(receipt.get('text_bytes', 0))} of text"
    for key in OF_A_FORMAT:
        if described.get(key):
            yield key, described[key]


def evaluated(described: JsonFacts) -> list[SetReport]:
    """The evaluation sets that the documents were compared with, of a described dataset."""
    steps = [step for source in described["sources"][:1] for step in source["settings"].get("steps") or ()]
    return set_reports(steps, described["documents"] or {})


def _counted(documents: JsonFacts) -> str:
    """Counts of the documents that were not written as they were read."""
    counts = [f"{count:,} skipped: {reason}" for reason, count in (documents.get("skipped") or {}).items()]
    counts += [f"{count:,} repaired: {reason}" for reason, count in (documents.get("replaced") or {}).items()]
    if documents.get("repeated_keys"):
        counts.append(f"{documents['repeated_keys']:,} with the key of another")
    return "".join(f", {count}" for count in counts)


def _source_lines(source: JsonFacts, color: bool) -> Iterator[str]:
    files, (where, settings) = source["files"], source_facts(source)
    yield f"  source {terminal.styled(source['name'], terminal.BOLD, color)} from {where}"
    if settings:
        yield f"    {settings}"
    shown = files if len(files) <= FILES_SHOWN else files[: FILES_SHOWN - 1]
    rows = [[str(file["number"]), file["name"], terminal.size(file["size"]), f"sha256 {file['sha256'][:12]}"] for file in shown]
    yield from terminal.table(rows, "><><", indent=4)
    if len(shown) < len(files):
        yield f"    and {len(files) - len(shown):,} more; --json lists all"


def source_facts(source: JsonFacts) -> tuple[str, str]:
    """The origin and size of a source, and its settings without the empty ones."""
    revision = f" at {source['revision']}" if source["revision"] else ""
    size = f"{terminal.plural(len(source['files']), 'file')}, {terminal.size(source['byte_count'])}"
    settings = (f"{key} {value}" for key, value in source["settings"].items() if value not in ({}, [], None))
    return f"{source['from']}{revision}: {size}", ", ".join(settings)


def show_sequence(corpus: Corpus, options: Namespace) -> int:
    """Show a sequence as text, coloured by token, or as ids."""
    name, split = corpus.split(options.split)
    ids = split.sequence(options.sequence)
    i = options.sequence % split.seq_count
    vocabulary = None if options.ids else cli.vocabulary_for(corpus, options)
    document = document_of(corpus, name, i)
    if options.json:
        text = {} if vocabulary is None else {"text": vocabulary.decode(ids)[0].decode("utf-8", "replace")}
        facts = {"split": name, "sequence": i, "token_count": len(ids), "document": document}
        terminal.show(options, {**facts, **text, "ids": ids.tolist()}, ())
        return cli.SAME
    where = f", {document['file']} row {document['row']}, key {document['key']}" if document else ""
    heading = f"{name} sequence {i} of {split.seq_count:,}: {terminal.plural(len(ids), 'token')}{where}"
    print(terminal.line(heading), file=sys.stderr)
    if vocabulary is None:
        if not options.ids:
            cli.warn("no tokenizer is known: ids are shown. Name one with --tokenizer.")
        print(*ids.tolist())
    else:
        color = terminal.wants_color(options.color)
        sys.stdout.writelines(terminal.colored_tokens(_token_bytes(vocabulary, ids)) if color else _text(vocabulary, ids))
        if color or sys.stdout.isatty():
            print()
    return cli.SAME


def _token_bytes(vocabulary: Vocabulary, ids: UInt32s) -> Iterator[bytes]:
    for start in range(0, len(ids), WINDOW_TOKENS):
        data, ends = vocabulary.decode(ids[start : start + WINDOW_TOKENS])
        for begin, end in itertools.pairwise([0, *ends.tolist()]):
            yield data[begin:end]


def _text(vocabulary: Vocabulary, ids: UInt32s) -> Iterator[str]:
    """The text of ids; on a terminal, without control characters."""
    parts = (vocabulary.decode(ids[start : start + WINDOW_TOKENS])[0] for start in range(0, len(ids), WINDOW_TOKENS))
    return map(terminal.visible if sys.stdout.isatty() else str, codecs.iterdecode(parts, "utf-8", "replace"))


class Match(NamedTuple):
    """The first place of a sequence that holds the text or the ids: at *token* of the sequence."""

    sequence: int
    token: int
    before: str
    found: str
    after: str


def show_matches(corpus: Corpus, options: Namespace) -> int:
    """Show the places of a text or of ids, and return the exit status: whether there are any."""
    vocabulary = None if options.ids else cli.vocabulary_for(corpus, options)
    find: Callable[[Readable], Iterator[Match]] = partial(find_ids, needle=options.find_ids, vocabulary=vocabulary)
    if options.find is not None:
        if not options.find:
            raise ValueError("--find needs a text that is not empty")
        if vocabulary is None:
            raise ValueError("no tokenizer is known to find text with. Name one with --tokenizer, or look for ids: --find-ids")
        find = partial(find_text, vocabulary=vocabulary, needle=options.find.encode())
    color = terminal.wants_color(options.color)
    mark, reset = (terminal.MATCH, terminal.RESET) if color else ("»", "«")
    gap = " " if vocabulary is None else ""
    found: list[JsonObject] = []
    matches = ((name, match) for name, split in corpus.chosen(options.split).items() for match in find(split))
    for name, match in itertools.islice(matches, options.limit or None):
        found.append({"split": name, **match._asdict()})
        if not options.json:
            before, text, after = (part.replace("\n", " ") for part in match[2:])
            left, right = gap if before else "", gap if after else ""
            line = f"{name} {match.sequence}:{match.token}  {before}{left}{mark}{text}{reset}{right}{after}"
            print(terminal.line(line, color), flush=True)
    more = next(matches, None) is not None
    if options.json:
        terminal.show(options, {"matches": found, "more": more}, ())
    elif not found:
        cli.warn("nothing was found")
    elif more:
        cli.warn(f"there are more than {options.limit}: --limit 0 shows all")
    return cli.SAME if found else cli.DIFFERENT


def find_text(split: Readable, vocabulary: Vocabulary, needle: bytes) -> Iterator[Match]:
    """The first match of each sequence whose text holds *needle*, wherever tokens end."""
    return _matches(split, needle, vocabulary.decode, lambda part: part.decode("utf-8", "ignore"), CONTEXT_BYTES)


def find_ids(split: Readable, needle: UInt32s, vocabulary: Vocabulary | None) -> Iterator[Match]:
    """The first match of each sequence that holds the ids of *needle* in a row."""

    def shown(part: bytes) -> str:
        ids = np.frombuffer(part, np.uint32)
        return " ".join(map(str, ids.tolist())) if vocabulary is None else vocabulary.decode(ids)[0].decode("utf-8", "replace")

    def as_bytes(ids: UInt32s) -> tuple[bytes, Int64s]:
        return ids.tobytes(), np.arange(ID_BYTES, ids.nbytes + 1, ID_BYTES)

    return _matches(split, needle.tobytes(), as_bytes, shown, CONTEXT_TOKENS * ID_BYTES, ID_BYTES)


def _matches(
    split: Readable,
    needle: bytes,
    decode: Callable[[UInt32s], tuple[bytes, Int64s]],
    shown: Callable[[bytes], str],
    context: int,
    width: int = 1,
) -> Iterator[Match]:
    """The first match of each sequence whose bytes, as *decode* has them, hold *needle* at a multiple of *width*, in memory of
    one window. *context*: bytes before and after it.
    """
    last = -1
    # Every token has at least one byte, so a match that begins before a window begins at most this many tokens before.
    for ids, edges, sequences, skipped in overlapping_windows(split, len(needle) - 1):
        data, ends = decode(ids)
        at = data.find(needle)
        while at >= 0:
            first, final = np.searchsorted(ends, [at, at + len(needle) - 1], side="right").tolist()
            k = int(np.searchsorted(edges, first, side="right")) - 1
            start, stop = edges[k : k + 2].tolist()
            if at % width or final >= stop:  # it is within an id, or crosses the sequence's end
                at = data.find(needle, at + 1)
                continue
            low, high, behind = int(ends[start - 1]) if start else 0, int(ends[stop - 1]), at + len(needle)
            if sequences[k] != last:
                last = int(sequences[k])
                texts = (data[max(at - context, low) : at], needle, data[behind : min(behind + context, high)])
                yield Match(last, first - start + (skipped if k == 0 else 0), *map(shown, texts))
            at = data.find(needle, high)


def overlapping_windows(split: Readable, overlap: int) -> Iterator[tuple[UInt32s, Int64s, Int64s, int]]:
    """All tokens of a split in order, in windows. If a window cuts a sequence, its last *overlap* tokens are repeated in the
    next one. Yields the ids, uint32[n]; the first token of each sequence (0 for the first) and n, int64[k + 1]; the sequences'
    numbers, int64[k]; and the number of earlier tokens of the first sequence.
    """
    carried, place = np.empty(0, np.uint32), 0  # the last tokens of the sequence that continues, and its tokens so far
    for window in windows(split):
        if not len(window.ids):
            continue
        starts, sequences = window.starts, window.first_seq + np.arange(len(window.starts))
        ids, skipped = window.ids, 0
        if not len(starts) or starts[0] > 0:
            ids, skipped = np.concatenate([carried, ids]), place - len(carried)
            starts = np.append(0, starts + len(carried))
            sequences = np.append(window.first_seq - 1, sequences)
        yield ids, np.append(starts, len(ids)), sequences, skipped
        place = len(ids) - int(starts[-1]) + (skipped if len(starts) == 1 else 0)
        carried = ids[max(int(starts[-1]), len(ids) - overlap) :] if overlap else ids[:0]


def sets_by_name(steps: Sequence[JsonFacts]) -> dict[str, JsonFacts]:
    """The evaluation sets of *steps* of a manifest that its build has read, by names such as ``decontaminate.gsm8k``."""
    found: dict[str, JsonFacts] = {}
    for step in steps:
        against = (step.get("options") or {}).get("against") if step.get("use") == "decontaminate" else None
        read = (one for one in against or () if isinstance(one, Mapping) and "digest" in one)
        found |= {f"{step['name']}.{one['name']}": one for one in read}
    return found


class SetReport(NamedTuple):
    """An evaluation set in the totals of a dataset. ``questions``: of the set, None if that is not recorded; ``too_short``: of
    these, with too few words to be looked for. ``documents``: that have some of it, ``share``: of all that were read.
    ``examples``: some of these documents.
    """

    step: str
    name: str
    questions: int | None
    too_short: int
    documents: int
    share: float
    examples: Sequence[JsonFacts]

    @property
    def sentence(self) -> str:
        """Such as ``gsm8k: in 12 documents, 0.03%, of 1,319 questions (7 too short)``."""
        short = f" ({self.too_short:,} too short)" if self.too_short else ""
        of = "" if self.questions is None else f", of {terminal.plural(self.questions, 'question')}{short}"
        return f"{self.name}: in {terminal.plural(self.documents, 'document')}, {self.share:.2%}{of}"

    def lines(self) -> Iterator[str]:
        """Each example in a sentence."""
        for one in self.examples:
            yield f"{one.get('file')}, row {one.get('row')}: question {one.get('question')}"


def set_reports(steps: Sequence[JsonFacts], documents: JsonFacts) -> list[SetReport]:
    """Reports of all evaluation sets, of the *steps* and the totals of *documents* of a manifest."""
    facts, reports = sets_by_name(steps), []
    for name, count in (documents.get("matches") or {}).items():
        step, _, of = name.partition(".")
        one = facts.get(name, {})
        questions, too_short = one.get("questions"), one.get("too_short", 0)
        share = count / max(documents.get("read", 0), 1)
        examples = (documents.get("examples") or {}).get(name, ())
        reports.append(SetReport(step, of, questions, too_short, count, share, examples))
    return reports
