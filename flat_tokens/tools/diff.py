"""``flat-tokens diff``: the changes between two datasets: sources, settings, totals, documents, layout.

Documents are identified by their keys and compared by a digest of their tokens, by a query that needs bounded memory however many
there are.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from flat_tokens.annotations import AnyArray, Int64s, IntPair, JsonFacts, JsonObject, UInt64s
from flat_tokens.columns import as_arrow, batch_of
from flat_tokens.formats import FLAT_TOKENS, Readable
from flat_tokens.keys import token_keys
from flat_tokens.manifest import compare_files
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.local import named_errors
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, batches_of, open_corpus
from flat_tokens.tools.documents import CHANGES, NAMES, REPEATED, connection, query
from flat_tokens.tools.inspect import FILES_SHOWN, describe
from flat_tokens.tools.sources import document_of

SUMMARY = "say what changed between two datasets or versions"
EXAMPLES = """\
examples:
  flat-tokens diff out/web/versions/4f0c... out/web         what the newest version changed
  flat-tokens diff out/web copy/web --totals                without looking at documents

exit status: 0 the same, 1 different, 2 it is unknown
"""


KEYS_AT_A_TIME = 1 << 20

SETTINGS = ("format", "name", "layout", "stored", "tokenizer", "policy", "split_rule", "semantics")
KINDS = {"added": "+", "removed": "-", "changed": "~", "moved": ">"}
FILE_CHANGES = {"files_added": "+", "files_removed": "-", "files_changed": "~", "files_renamed": ">"}


ARGUMENTS = f"""
a=A  {cli.ANY_DATASET}
b=B  {cli.ANY_DATASET}
--totals  compare sources, settings and totals alone, not each document
--limit N  show N documents of each kind (default: 5)
--format --option
"""


def add_commands(commands: Any) -> None:
    cli.add_command(commands, "diff", run, SUMMARY, EXAMPLES, ARGUMENTS)


def run(options: Namespace) -> int:
    a, b = open_side(options.a, options), open_side(options.b, options)
    found: JsonObject = {"a": a.url, "b": b.url, "same": True, "settings": [], "sources": [], "totals": [], "documents": None}
    is_same_bytes = set(a.splits) == set(b.splits) and a.manifest.get("objects") and a.manifest == b.manifest
    if not is_same_bytes:
        found["settings"] = differences(settings_of(a), settings_of(b))
        found["sources"] = compare_sources(a, b)
        found["totals"] = differences(totals_of(a), totals_of(b))
        found["documents"] = None if options.totals else compare_documents(a, b, options.limit)
        changed = found["documents"] is not None and not found["documents"]["same"]
        found["same"] = not (found["settings"] or found["sources"] or found["totals"] or changed)
    terminal.show(options, found, lines(found))
    return cli.SAME if found["same"] else cli.DIFFERENT


def open_side(path: str, options: Namespace) -> Corpus:
    """One of the two corpora. A format's name and options apply if it is not a flat-tokens dataset."""
    if options.format or options.option:
        with contextlib.suppress(ValueError):
            corpus = open_corpus(path)
            if corpus.format == FLAT_TOKENS:
                return corpus
    return cli.corpus_of(options, path)


def differences(a: JsonFacts, b: JsonFacts) -> list[JsonObject]:
    """Facts that differ, in order, None on a side that doesn't have them; names of nested ones have dots."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    found = ({"what": name, "a": flat_a.get(name), "b": flat_b.get(name)} for name in dict.fromkeys([*flat_a, *flat_b]))
    return [one for one in found if one["a"] != one["b"]]


def _flat(facts: JsonFacts, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def settings_of(corpus: Corpus) -> JsonObject:
    """The settings that decide the bytes of a dataset next to its sources."""
    described = {**describe(corpus), "semantics": corpus.provenance.get("semantics")}
    return {name: described[name] for name in SETTINGS}


def compare_sources(a: Corpus, b: Corpus) -> list[JsonObject]:
    """Sources, by their names, that differ: in their settings, or by files that were added, removed, changed their content or
    their name.
    """
    in_a, in_b = ({source.name: source for source in corpus.sources} for corpus in (a, b))
    everything = {file.sha256 for source in in_a.values() for file in source.files}
    changes = []
    for name in dict.fromkeys([*in_a, *in_b]):
        old, new = in_a.get(name), in_b.get(name)
        before, after = ({file.name: file.sha256 for file in one.files} if one else {} for one in (old, new))
        files = compare_files(before, after)
        either = ({"from": one.origin, "revision": one.revision, **one.settings} for one in (old, new) if one)
        settings = differences(*either) if old and new else []
        change: JsonObject = {
            "source": name,
            "change": "changed" if old and new else "added" if new else "removed",
            "settings": settings,
            **{f"files_{kind}": names for kind, names in files._asdict().items()},
            "files_same": sum(before.get(file) == digest for file, digest in after.items()),
            # The same content under another source's name: a renamed source is not a new text.
            "added_from_elsewhere": sum(after[file] in everything for file in files.added),
        }
        if change["change"] != "changed" or settings or any(files):
            changes.append(change)
    return changes


def totals_of(corpus: Corpus) -> JsonObject:
    """Counts of each split, of each source, and of what was read."""
    described = describe(corpus)
    totals: JsonObject = {
        name: {"tokens": split.token_count, "sequences": split.seq_count, "largest id": described["splits"][name]["max_token_id"]}
        for name, split in corpus.splits.items()
    }
    for name, (tokens, documents) in _by_source(corpus).items():
        totals[terminal.source_called(name)] = {"tokens": tokens, "documents": documents}
    read = {key: value for key, value in (described["documents"] or {}).items() if not isinstance(value, list)}
    return totals | {"documents": read, "bytes stored": described["byte_count"]}


def _by_source(corpus: Corpus) -> dict[str, IntPair]:
    """Tokens and documents of each source, from the indexes alone. Empty if there is no record of sources."""
    recorded = (corpus.documents(name) is not None and isinstance(of, FlatTokens) for name, of in corpus.splits.items())
    if not corpus.sources or not all(recorded):
        return {}
    sums = "SELECT source, sum(tokens), count(*) FROM documents WHERE split IS NOT NULL GROUP BY source"
    table = DocumentTable(corpus.store, corpus.splits)
    found = {name: of for name, *of in query(table.read(("split", "source", "tokens")), sums)}
    return {source.name: tuple(found.get(source.name, (0, 0))) for source in corpus.sources}


class Side(NamedTuple):
    """All documents of a corpus, split after split: key and digest of the tokens, uint64[n] each, on disk; and
    where each split begins, with the count after the last.
    """

    keys: UInt64s
    digests: UInt64s
    firsts: Int64s
    names: tuple[str, ...]

    @classmethod
    def on_disk(cls, file: Any, firsts: Int64s, names: tuple[str, ...]) -> Self:
        """A side whose keys and digests are in a temporary file, zeros so far. OSError if the disk has no room."""
        count = int(firsts[-1])
        with named_errors(tempfile.gettempdir()):
            if hasattr(os, "posix_fallocate"):  # a full disk would be a signal when memory is written
                os.posix_fallocate(file.fileno(), 0, 16 * max(count, 1))
        keys, digests = np.memmap(file, np.uint64, "w+", shape=(2, max(count, 1)))[:, :count]
        return cls(keys, digests, firsts, names)


def compare_documents(a: Corpus, b: Corpus, limit: int) -> JsonObject:
    """Documents that were added, removed, changed their tokens, or moved to another split, with the first *limit* of each."""
    by_key = all(corpus.documents(name) is not None for corpus in (a, b) for name in corpus.splits)
    digests = [corpus.tokenizer.digest if corpus.tokenizer else None for corpus in (a, b)]
    # Tokens of another tokenizer cannot be compared. Without keys, only the tokens can.
    by_tokens = digests[0] == digests[1] or not by_key
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        sides = (_read_side(a, by_key, by_tokens, one), _read_side(b, by_key, by_tokens, other))
        with changes(*sides) as found:
            counts = dict.fromkeys(KINDS, 0) | dict(found.execute("SELECT kind, count(*) FROM changes GROUP BY kind").fetchall())
            first = "SELECT coalesce(a, -1), coalesce(b, -1) FROM changes WHERE kind = ? ORDER BY a, b LIMIT ?"
            examples = {kind: found.execute(first, [kind, limit]).fetchall() for kind in KINDS}
            moves = "SELECT name_a, name_b, count(*) FROM changes WHERE kind = 'moved' GROUP BY ALL"
            of_splits = {f"{before} → {after}": count for before, after, count in found.execute(moves).fetchall()}
        in_order = None if any(counts.values()) else _is_same_order(*sides)
        return {
            "same": not any(counts.values()) and in_order is not False,
            "matched_by": "key" if by_key else "tokens",
            "tokens_compared": by_tokens,
            **counts,
            "moved_of_splits": dict(sorted(of_splits.items())),
            "same_order": in_order,
            "examples": {kind: [_example((a, b), sides, pair) for pair in pairs] for kind, pairs in examples.items()},
        }


def _read_side(corpus: Corpus, by_key: bool, by_tokens: bool, file: Any) -> Side:
    """The keys of all documents of a corpus, or the digests of their tokens, in a file."""
    counts = [split.seq_count for split in corpus.splits.values()]
    side = Side.on_disk(file, np.append(0, np.cumsum(counts)).astype(np.int64), tuple(corpus.splits))
    for first, (name, split) in zip(side.firsts, corpus.splits.items(), strict=False):
        if by_tokens:
            at = int(first)
            for some in token_digests(split):
                side.digests[at : at + len(some)] = some
                at += len(some)
        documents = corpus.documents(name) if by_key else None
        for start in range(0, split.seq_count, KEYS_AT_A_TIME):
            stop = min(start + KEYS_AT_A_TIME, split.seq_count)
            whole = slice(int(first) + start, int(first) + stop)
            side.keys[whole] = side.digests[whole] if documents is None else documents.key.read(start, stop)
    return side


def token_digests(split: Readable) -> Iterator[UInt64s]:
    """A 64-bit digest of each sequence's tokens, in order, in blocks: uint64[n]."""
    return token_keys(batches_of(split))


@contextlib.contextmanager
def changes(a: Side, b: Side) -> Iterator[Any]:
    """A connection with a table ``changes`` of two sides: the kind, the numbers of the documents in a and in b, and the names of
    the splits that they are in; null for none.
    """
    names = sorted({*a.names, *b.names})
    with connection() as opened:
        opened.execute(NAMES, {"names": names})
        for name, side in (("a", a), ("b", b)):
            places = np.repeat(np.searchsorted(names, side.names or [""]), np.diff(side.firsts)).astype(np.int32)
            columns: dict[str, AnyArray] = {
                "key": side.keys,
                "digest": side.digests,
                "number": np.arange(len(side.keys)),
                "place": places,
            }
            opened.register(name, batch_of({of: as_arrow(values) for of, values in columns.items()}))
        opened.execute(REPEATED)
        opened.execute(CHANGES)
        yield opened


def _is_same_order(a: Side, b: Side) -> bool:
    """Whether the documents are in the same order, and the splits begin at the same ones."""
    if a.names != b.names or not np.array_equal(a.firsts, b.firsts):
        return False
    blocks = [slice(i, i + KEYS_AT_A_TIME) for i in range(0, len(a.keys), KEYS_AT_A_TIME)]
    return all(np.array_equal(x[i], y[i]) for x, y in ((a.keys, b.keys), (a.digests, b.digests)) for i in blocks)


def _example(corpora: Sequence[Corpus], sides: Sequence[Side], pair: IntPair) -> JsonObject:
    example: JsonObject = {}
    for letter, corpus, side, i in zip("ab", corpora, sides, pair, strict=True):
        if i >= 0:
            k = int(np.searchsorted(side.firsts, i, side="right")) - 1
            split, sequence = side.names[k], i - int(side.firsts[k])
            example[letter] = {"split": split, "sequence": sequence, "document": document_of(corpus, split, sequence)}
    return example


def lines(found: JsonFacts) -> Iterator[str]:
    """The differences for people."""
    yield f"a  {found['a']}"
    yield f"b  {found['b']}"
    if found["same"]:
        yield "the same"
        return
    for title, align in (("settings", "<<<<"), ("totals", "<><><")):
        if found[title]:
            rows = [[one["what"], _shown(one["a"]), "→", _shown(one["b"]), _change(one)] for one in found[title]]
            yield from ["", title, *terminal.table([row[: len(align)] for row in rows], align)]
    if found["sources"]:
        yield from ["", "sources", *(line for change in found["sources"] for line in _source_lines(change))]
    if (documents := found["documents"]) is not None:
        yield from ["", *_document_lines(documents)]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text, most = str(value), 12 if isinstance(value, str) and len(value) == 64 else 56
    return text if len(text) <= most else f"{text[:most]}..."


def _change(one: JsonFacts) -> str:
    a, b = one["a"], one["b"]
    if not all(isinstance(value, int | float) for value in (a, b)):
        return ""
    share = f" ({(b - a) / a:+.1%})".replace("%", " %") if a else ""
    return f"{b - a:+,}{share}"


def _source_lines(change: JsonFacts) -> Iterator[str]:
    """The changes of a source, for people."""
    counts = [f"{len(change[key]):,} {key.removeprefix('files_')}" for key in FILE_CHANGES if change[key]]
    counts.append(f"{change['files_same']:,} the same")
    if change["added_from_elsewhere"]:
        counts.append(
            f"{change['added_from_elsewhere']:,} of those that were added with the content of another source's file in a"
        )
    yield f"  {KINDS[change['change']]} {change['source']}: files {', '.join(counts)}"
    for one in change["settings"]:
        yield f"      {one['what']} {_shown(one['a'])} → {_shown(one['b'])}"
    for key, mark in FILE_CHANGES.items():
        for file in change[key][:FILES_SHOWN]:
            yield f"    {mark} {file if isinstance(file, str) else ' → '.join(file)}"
        if len(change[key]) > FILES_SHOWN:
            yield f"    {mark} and {len(change[key]) - FILES_SHOWN:,} more"


def _document_lines(documents: JsonFacts) -> Iterator[str]:
    """The changes of documents, for people."""
    by = "their keys" if documents["matched_by"] == "key" else "their tokens"
    counts = [f"{documents[kind]:,} {kind}" for kind in KINDS if documents[kind]]
    counts += [f"of these {count:,} {splits}" for splits, count in documents["moved_of_splits"].items()]
    if documents["same"]:
        counts = ["the same, in the same order"]
    elif not counts:
        counts = ["the same, in another order"]
    yield f"documents, by {by}: {', '.join(counts)}"
    if not documents["tokens_compared"]:
        yield "  the tokenizers differ, so tokens were not compared"
    for kind, mark in KINDS.items():
        for example in documents["examples"][kind]:
            yield f"  {mark} {' → '.join(_place(example[letter]) for letter in 'ab' if letter in example)}"
        if 0 < len(documents["examples"][kind]) < documents[kind]:
            yield f"  {mark} and {documents[kind] - len(documents['examples'][kind]):,} more {kind}"


def _place(example: JsonFacts) -> str:
    document = example["document"]
    where = f" ({document['file']} row {document['row']:,}, key {document['key']})" if document else ""
    return f"{example['split']} {example['sequence']:,}{where}"
