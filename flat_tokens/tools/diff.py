"""``flat-tokens diff``: the changes between two datasets: sources, settings, totals, documents, layout.

Documents are identified by their keys and compared by a digest of their tokens. Both are arrays of 64-bit integers, sorted
a share at a time, so that memory is bounded however many documents there are.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.formats import FLAT_TOKENS, Readable
from flat_tokens.keys import A, B, mix
from flat_tokens.manifest import compare_files
from flat_tokens.reader import FlatTokens
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.corpus import Corpus, open_corpus, windows
from flat_tokens.tools.inspect import FILES_SHOWN, describe
from flat_tokens.tools.sources import places_of
from flat_tokens.tools.stats import ByFile

SUMMARY = "say what changed between two datasets or versions"
EXAMPLES = """\
examples:
  flat-tokens diff out/web/versions/4f0c... out/web         what the newest version changed
  flat-tokens diff out/web copy/web --totals                without looking at documents

exit status: 0 the same, 1 different, 2 it could not be told
"""

Keys = npt.NDArray[np.uint64]

DOCUMENTS_AT_ONCE = 1 << 21
KEYS_AT_A_TIME = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_path(parser, "a")
    arguments.add_path(parser, "b")
    parser.add_argument("--totals", action="store_true", help="compare sources, settings and totals alone, not each document")
    parser.add_argument(
        "--limit", type=arguments.at_least(0), default=5, metavar="N", help="show N documents of each kind (default: 5)"
    )
    arguments.add_format(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    a, b = open_side(options.a, options), open_side(options.b, options)
    found: dict[str, Any] = {"a": a.url, "b": b.url, "same": True, "settings": [], "sources": [], "totals": [], "documents": None}
    if not is_same_bytes(a, b):
        settings, sources, totals = compare_settings(a, b), compare_sources(a, b), compare_totals(a, b)
        documents = None if options.totals else compare_documents(a, b, options.limit)
        changed = documents is not None and not documents["same"]
        same = not (settings or sources or totals or changed)
        found |= {"same": same, "settings": settings, "sources": sources, "totals": totals, "documents": documents}
    if options.json:
        arguments.print_json(found)
    else:
        print("\n".join(lines(found)))
    return arguments.SAME if found["same"] else arguments.DIFFERENT


def open_side(path: str, options: argparse.Namespace) -> Corpus:
    """One of the two corpora. A format's name and options apply if it is not a flat-tokens dataset."""
    if options.format or options.option:
        with contextlib.suppress(ValueError):
            corpus = open_corpus(path)
            if corpus.format == FLAT_TOKENS:
                return corpus
    return arguments.corpus_of(options, path)


def is_same_bytes(a: Corpus, b: Corpus) -> bool:
    """Whether the datasets are identical according to their manifests."""
    if set(a.splits) != set(b.splits) or not a.manifest.get("objects"):
        return False
    return a.manifest == b.manifest


class Difference(NamedTuple):
    """A fact that differs. None if one of the corpora doesn't have it."""

    what: str
    a: Any
    b: Any


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts that differ, in order; names of nested ones have dots."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    names = dict.fromkeys([*flat_a, *flat_b])
    found = (Difference(name, flat_a.get(name), flat_b.get(name)) for name in names)
    return [one._asdict() for one in found if one.a != one.b]


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def compare_settings(a: Corpus, b: Corpus) -> list[dict[str, Any]]:
    def settings(corpus: Corpus) -> dict[str, Any]:
        described = describe(corpus)
        names = ("format", "name", "layout", "stored", "tokenizer", "policy", "split_rule")
        return {name: described[name] for name in names} | {"semantics": corpus.provenance.get("semantics")}

    return differences(settings(a), settings(b))


def compare_sources(a: Corpus, b: Corpus) -> list[dict[str, Any]]:
    """Sources, by their names, that differ: in their settings, or by files that came, went, changed their content or their
    name.
    """
    in_a, in_b = ({source.name: source for source in corpus.sources} for corpus in (a, b))
    everything = {file.sha256 for source in in_a.values() for file in source.files}
    changes = []
    for name in dict.fromkeys([*in_a, *in_b]):
        old, new = in_a.get(name), in_b.get(name)
        before = {file.name: file.sha256 for file in old.files} if old else {}
        after = {file.name: file.sha256 for file in new.files} if new else {}
        files = compare_files(before, after)
        settings = []
        if old and new:
            settings = differences(
                {"from": old.origin, "revision": old.revision, **old.settings},
                {"from": new.origin, "revision": new.revision, **new.settings},
            )
        change: dict[str, Any] = {
            "source": name,
            "change": "changed" if old and new else "came" if new else "went",
            "settings": settings,
            **{f"files_{kind}": names for kind, names in files._asdict().items()},
            "files_same": sum(before.get(file) == digest for file, digest in after.items()),
        }
        # The same content under another source's name: a renamed source is no new text.
        change["came_from_elsewhere"] = sum(after[file] in everything for file in files.came)
        if change["change"] != "changed" or settings or any(change[key] for key in change if key in FILE_CHANGES):
            changes.append(change)
    return changes


FILE_CHANGES = {"files_came": "+", "files_went": "-", "files_changed": "~", "files_renamed": ">"}


def compare_totals(a: Corpus, b: Corpus) -> list[dict[str, Any]]:
    """Counts that differ: of each split, of each source, and of what was read."""
    return differences(_totals(a), _totals(b))


def _totals(corpus: Corpus) -> dict[str, Any]:
    described = describe(corpus)
    totals: dict[str, Any] = {
        name: {"tokens": split.token_count, "sequences": split.seq_count, "largest id": described["splits"][name]["max_token_id"]}
        for name, split in corpus.splits.items()
    }
    for name, (tokens, documents) in _by_source(corpus).items():
        totals[f"source {name}"] = {"tokens": tokens, "documents": documents}
    read = {key: value for key, value in (described["documents"] or {}).items() if not isinstance(value, list)}
    return totals | {"documents": read, "bytes stored": described["byte_count"]}


def _by_source(corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Tokens and documents of each source, from the indexes alone. Empty if there is no record of sources."""
    files = sum(len(source.files) for source in corpus.sources)
    if not files:
        return {}
    tokens, documents = np.zeros(files + 1, np.int64), np.zeros(files + 1, np.int64)
    for name, split in corpus.splits.items():
        recorded = corpus.documents(name)
        if recorded is None or not isinstance(split, FlatTokens):
            return {}
        by_file = ByFile(recorded.file, files)
        for start in range(0, split.seq_count, KEYS_AT_A_TIME):
            starts = split.seq_starts.read(start, min(start + KEYS_AT_A_TIME, split.seq_count) + 1)
            by_file.add(start, (starts[1:] - starts[:-1]).astype(np.int64))
        tokens, documents = tokens + by_file.tokens, documents + by_file.documents
    numbers = {source.name: [file.number for file in source.files] for source in corpus.sources}
    return {name: (int(tokens[of].sum()), int(documents[of].sum())) for name, of in numbers.items()}


class Side(NamedTuple):
    """All documents of a corpus, split after split: key and digest of the tokens, uint64[n] each, on disk; and
    where each split begins, with the count behind the last.
    """

    keys: Keys
    digests: Keys
    firsts: npt.NDArray[np.int64]
    names: tuple[str, ...]

    def place(self, i: int) -> tuple[str, int]:
        """Split and sequence of document *i*."""
        k = int(np.searchsorted(self.firsts, i, side="right")) - 1
        return self.names[k], i - int(self.firsts[k])


def compare_documents(a: Corpus, b: Corpus, limit: int) -> dict[str, Any]:
    """Documents that came, went, changed their tokens, or moved to another split, with the first *limit* of each."""
    by_key = all(corpus.documents(name) is not None for corpus in (a, b) for name in corpus.splits)
    digests = [corpus.tokenizer.digest if corpus.tokenizer else None for corpus in (a, b)]
    # Tokens of another tokenizer cannot be compared. Without keys, only the tokens can.
    by_tokens = digests[0] == digests[1] or not by_key
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        sides = (_read_side(a, by_key, by_tokens, one), _read_side(b, by_key, by_tokens, other))
        found = Found(dict.fromkeys(KINDS, 0), {kind: [] for kind in KINDS})
        largest = max(len(side.keys) for side in sides)
        parts = max(1, -(-largest // DOCUMENTS_AT_ONCE))
        for part in range(parts):
            _compare_share(*sides, Share(part, parts), limit, found)
        in_order = None if any(found.counts.values()) else _is_same_order(*sides)
        return {
            "same": not any(found.counts.values()) and in_order is not False,
            "matched_by": "key" if by_key else "tokens",
            "tokens_compared": by_tokens,
            **found.counts,
            "same_order": in_order,
            "examples": {kind: _examples(a, b, sides, kind, found.examples[kind]) for kind in KINDS},
        }


KINDS = {"came": "+", "went": "-", "changed": "~", "moved": ">"}


class Found(NamedTuple):
    """Number of documents of each kind, and the first of them: (document of a, document of b), -1 for none."""

    counts: dict[str, int]
    examples: dict[str, list[tuple[int, int]]]

    def add(self, kind: str, count: int, limit: int, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> None:
        self.counts[kind] += count
        left = limit - len(self.examples[kind])
        self.examples[kind] += zip(a[:left].tolist(), b[:left].tolist(), strict=True)


def _read_side(corpus: Corpus, by_key: bool, by_tokens: bool, file: Any) -> Side:
    counts = [split.seq_count for split in corpus.splits.values()]
    firsts = np.append(0, np.cumsum(counts)).astype(np.int64)
    arrays = np.memmap(file, np.uint64, "w+", shape=(2, max(int(firsts[-1]), 1)))
    keys, digests = arrays[0, : firsts[-1]], arrays[1, : firsts[-1]]
    for first, (name, split) in zip(firsts, corpus.splits.items(), strict=False):
        if by_tokens:
            at = int(first)
            for some in token_digests(split):
                digests[at : at + len(some)] = some
                at += len(some)
        documents = corpus.documents(name) if by_key else None
        for start in range(0, split.seq_count, KEYS_AT_A_TIME):
            stop = min(start + KEYS_AT_A_TIME, split.seq_count)
            whole = slice(int(first) + start, int(first) + stop)
            keys[whole] = digests[whole] if documents is None else documents.key.read(start, stop)
    return Side(keys, digests, firsts, tuple(corpus.splits))


def token_digests(split: Readable) -> Iterator[Keys]:
    """A 64-bit digest of each sequence's tokens, in order, in blocks: uint64[n].

    The digest of n tokens is ``mix(n * A + sum over j of mix(token_j ^ ((j + 1) * B)))``, the formula of document keys with
    tokens for words. It does not depend on the windows, since a sum can be computed in parts.
    """
    is_open, place, partial = False, 0, np.zeros(1, np.uint64)  # the open sequence: its tokens so far, and their sum
    for window in windows(split):
        # Range 0 continues the sequence before; range k is the window's k-th sequence.
        bounds = np.concatenate([[0], window.starts, [len(window.ids)]])
        lengths = np.diff(bounds)
        words = window.ids.astype(np.uint64)
        positions = np.arange(1, len(words) + 1, dtype=np.uint64)
        positions -= np.repeat(bounds[:-1], lengths).astype(np.uint64)
        positions[: lengths[0]] += np.uint64(place)
        positions *= B
        words ^= positions
        sums = np.zeros(len(lengths), np.uint64)
        full = lengths > 0  # reduceat gives an empty group its neighbour's first element
        sums[full] = np.add.reduceat(mix(words), bounds[:-1][full]) if len(words) else 0
        sums[:1] += partial
        lengths[0] += place
        ended = slice(0 if is_open else 1, -1)
        yield mix(lengths[ended].astype(np.uint64) * A + sums[ended])
        is_open, place, partial = is_open or len(window.starts) > 0, int(lengths[-1]), sums[-1:]
    if is_open:
        yield mix(np.array([place], np.uint64) * A + partial)


def _compare_share(a: Side, b: Side, share: Share, limit: int, found: Found) -> None:
    """Compare the documents of a share of the keys."""
    (keys_a, digests_a, of_a), (keys_b, digests_b, of_b) = (_sorted_share(side, share) for side in (a, b))
    distinct_a, first_a, count_a = np.unique(keys_a, return_index=True, return_counts=True)
    distinct_b, first_b, count_b = np.unique(keys_b, return_index=True, return_counts=True)
    _, in_a, in_b = np.intersect1d(distinct_a, distinct_b, assume_unique=True, return_indices=True)
    # Of several documents with one key, as many came or went as one side has more of them.
    more, less = count_b.copy(), count_a.copy()
    more[in_b] -= np.minimum(count_a[in_a], count_b[in_b])
    less[in_a] -= np.minimum(count_a[in_a], count_b[in_b])
    came, went = _spread(of_b, first_b + count_b - more, more), _spread(of_a, first_a + count_a - less, less)
    found.add("came", len(came), limit, np.full(len(came), -1), np.sort(came))
    found.add("went", len(went), limit, np.sort(went), np.full(len(went), -1))
    # Where both have a key equally often, its documents are in the order of their digests on both sides.
    equal = count_a[in_a] == count_b[in_b]
    places_a = _spread(np.arange(len(keys_a)), first_a[in_a][equal], count_a[in_a][equal])
    places_b = _spread(np.arange(len(keys_b)), first_b[in_b][equal], count_b[in_b][equal])
    differ = digests_a[places_a] != digests_b[places_b]
    both_a, both_b = of_a[places_a], of_b[places_b]
    found.add("changed", int(differ.sum()), limit, both_a[differ], both_b[differ])
    names = np.array(sorted({*a.names, *b.names}))
    split_a = np.searchsorted(names, np.array(a.names))[np.searchsorted(a.firsts, both_a, side="right") - 1]
    split_b = np.searchsorted(names, np.array(b.names))[np.searchsorted(b.firsts, both_b, side="right") - 1]
    moved = split_a != split_b
    found.add("moved", int(moved.sum()), limit, both_a[moved], both_b[moved])


class Share(NamedTuple):
    """The keys that leave *remainder* when divided by *divisor*."""

    remainder: int
    divisor: int


def _sorted_share(side: Side, share: Share) -> tuple[Keys, Keys, npt.NDArray[np.int64]]:
    """Keys of a share in order, digests in order among equal keys, and the number of each document."""
    chosen = []
    for start in range(0, len(side.keys), KEYS_AT_A_TIME):
        block = side.keys[start : start + KEYS_AT_A_TIME]
        chosen.append(np.flatnonzero(block % np.uint64(share.divisor) == np.uint64(share.remainder)) + start)
    of = np.concatenate([*chosen, np.empty(0, np.int64)])
    keys, digests = np.asarray(side.keys[of]), np.asarray(side.digests[of])
    order = np.lexsort((digests, keys))
    return keys[order], digests[order], of[order]


def _spread(items: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The items of many ranges, one range after another."""
    ends = np.cumsum(lengths)
    places: npt.NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return items[places]


def _is_same_order(a: Side, b: Side) -> bool:
    """Whether the documents are in the same order, and the splits begin at the same ones."""
    if a.names != b.names or not np.array_equal(a.firsts, b.firsts):
        return False
    steps = range(0, len(a.keys), KEYS_AT_A_TIME)
    return all(
        np.array_equal(x[i : i + KEYS_AT_A_TIME], y[i : i + KEYS_AT_A_TIME])
        for x, y in ((a.keys, b.keys), (a.digests, b.digests))
        for i in steps
    )


def _examples(a: Corpus, b: Corpus, sides: Sequence[Side], kind: str, pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    examples = []
    for pair in pairs:
        example: dict[str, Any] = {}
        for letter, corpus, side, i in zip("ab", (a, b), sides, pair, strict=True):
            if i >= 0:
                split, sequence = side.place(i)
                places = places_of(corpus, split, [sequence])
                document = places[0].described(corpus.sources) if places else None
                example[letter] = {"split": split, "sequence": sequence, "document": document}
        examples.append(example)
    return examples


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The differences for people."""
    yield f"a  {found['a']}"
    yield f"b  {found['b']}"
    if found["same"]:
        yield "the same"
        return
    for title in ("settings", "totals"):
        if found[title]:
            yield ""
            yield title
            numbers = title == "totals"
            rows = [
                [one["what"], _shown(one["a"]), "→", _shown(one["b"]), _change(one) if numbers else ""] for one in found[title]
            ]
            yield from terminal.table(rows, "<><><" if numbers else "<<<<<")
    if found["sources"]:
        yield ""
        yield "sources"
        for change in found["sources"]:
            yield from _source_lines(change)
    if (documents := found["documents"]) is not None:
        yield ""
        yield from _document_lines(documents)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text, most = str(value), 12 if isinstance(value, str) and len(value) == 64 else 56
    return text if len(text) <= most else f"{text[:most]}..."


def _change(one: Mapping[str, Any]) -> str:
    a, b = one["a"], one["b"]
    if not all(isinstance(value, int | float) for value in (a, b)):
        return ""
    share = f" ({(b - a) / a:+.1%})".replace("%", " %") if a else ""
    return f"{b - a:+,}{share}"


def _source_lines(change: Mapping[str, Any]) -> Iterator[str]:
    sign = {"came": "+", "went": "-", "changed": "~"}[change["change"]]
    counts = [f"{len(change[key]):,} {key.removeprefix('files_')}" for key in FILE_CHANGES if change[key]]
    counts.append(f"{change['files_same']:,} the same")
    if change["came_from_elsewhere"]:
        counts.append(f"{change['came_from_elsewhere']:,} of those that came with the content of another source's file in a")
    yield f"  {sign} {change['source']}: files {', '.join(counts)}"
    for one in change["settings"]:
        yield f"      {one['what']} {_shown(one['a'])} → {_shown(one['b'])}"
    for key, mark in FILE_CHANGES.items():
        for file in change[key][:FILES_SHOWN]:
            yield f"    {mark} {file if isinstance(file, str) else ' → '.join(file)}"
        if len(change[key]) > FILES_SHOWN:
            yield f"    {mark} and {len(change[key]) - FILES_SHOWN:,} more"


def _document_lines(documents: Mapping[str, Any]) -> Iterator[str]:
    by = "their keys" if documents["matched_by"] == "key" else "their tokens"
    counts = [f"{documents[kind]:,} {kind}" for kind in KINDS if documents[kind]]
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


def _place(example: Mapping[str, Any]) -> str:
    document = example["document"]
    where = f" ({document['file']} row {document['row']:,}, key {document['key']})" if document else ""
    return f"{example['split']} {example['sequence']:,}{where}"
