"""``flat-tokens stats``: document lengths, tokens by source, bytes per token, frequent tokens, unused vocabulary.

Everything is counted exactly in one pass over the tokens. There are at most as many different lengths as the square root
of twice the tokens, so their counts take little memory however many documents there are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.stored import StoredArray
from flat_tokens.formats import Readable
from flat_tokens.stores.store import Store
from flat_tokens.tools import arguments, report, terminal
from flat_tokens.tools.corpus import Corpus, windows
from flat_tokens.tools.inspect import describe
from flat_tokens.vocabulary import MAX_TABLE_IDS, Vocabulary

SUMMARY = "count lengths, sources, bytes per token, frequent tokens, unused vocabulary"
EXAMPLES = """\
examples:
  flat-tokens stats out/web                          tables
  flat-tokens stats out/web --html report.html       a page with plots, in one file
  flat-tokens stats out/web --split train --json     all numbers
  flat-tokens stats corpus.pbin --tokenizer gpt2
"""

Ints = npt.NDArray[np.int64]

COUNT_TOKENS = 1 << 18
"""Tokens counted at a time: they and their counts stay in the processor's cache."""

DENSE_VALUES = 1 << 22
DISTINCT_VALUES = 1 << 24
"""Above DENSE_VALUES, each different value costs 16 bytes; beyond this many, they are no longer told apart."""

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
ID_RANGES = 96
UNUSED_SHOWN = 24
RANKS_SHOWN = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_path(parser)
    parser.add_argument("--split", metavar="NAME", help="count this split alone")
    parser.add_argument(
        "--top", type=arguments.at_least(0), default=25, metavar="N", help="show the N most frequent tokens (default: 25)"
    )
    parser.add_argument("--html", metavar="FILE", help="write a report with plots: one HTML file that needs no other")
    arguments.add_tokenizer(parser)
    arguments.add_format(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    corpus = arguments.corpus_of(options)
    vocabulary, note = None, None
    try:
        vocabulary = arguments.vocabulary_for(corpus, options)
    except (ValueError, ModuleNotFoundError) as error:
        if options.tokenizer is not None:
            raise
        note = f"tokens are shown by their ids: {error}"  # numbers need no tokenizer
    summary = summarise(corpus, {name: count(corpus, name) for name in corpus.chosen(options.split)}, vocabulary, options.top)
    if options.html is not None:
        target, _, name = options.html.rpartition("/")
        Store.at(target or ("/" if options.html.startswith("/") else ".")).put(name, report.page(summary).encode())
    if note is not None:
        arguments.warn(note)
    if options.json:
        arguments.print_json(summary)
    elif options.html is not None:
        print(f"wrote {options.html}")
    else:
        print("\n".join(lines(summary)))
    return arguments.SAME


class Counts(NamedTuple):
    """Occurrences of each value: values int64[n] in order, counts int64[n] above 0. ``untold``: occurrences of the values that
    were too many to be told apart.
    """

    values: Ints
    counts: Ints
    untold: int = 0

    @classmethod
    def together(cls, several: Sequence[Self]) -> Counts:
        values = np.concatenate([one.values for one in several])
        distinct, place = np.unique(values, return_inverse=True)
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, place, np.concatenate([one.counts for one in several]))
        return cls(distinct, counts, sum(one.untold for one in several))

    def percentile(self, percent: float) -> int | None:
        """The smallest value that at least *percent* of all occurrences don't exceed."""
        if not len(self.values):
            return None
        sums = np.cumsum(self.counts)
        return int(self.values[np.searchsorted(sums, math.ceil(sums[-1] * percent / 100 - 1e-9), side="left")])


class Tally:
    """Counts non-negative values, given as int or uint[n]."""

    def __init__(self) -> None:
        self._dense = np.zeros(1 << 10, np.int64)
        self._pending: list[tuple[Ints, Ints]] = []
        self._pending_count = 0
        self._above = Counts(np.empty(0, np.int64), np.empty(0, np.int64))

    def add(self, values: npt.NDArray[np.integer]) -> None:
        if not len(values):
            return
        highest = int(values.max())
        if highest >= DENSE_VALUES:
            above, counts = np.unique(values[values >= DENSE_VALUES].astype(np.int64), return_counts=True)
            self._pending.append((above, counts))
            self._pending_count += len(above)
            if self._pending_count > DENSE_VALUES:
                self._merge()
            values = values[values < DENSE_VALUES]
            highest = DENSE_VALUES - 1
        if highest >= len(self._dense):
            self._dense = np.concatenate([self._dense, np.zeros((1 << highest.bit_length()) - len(self._dense), np.int64)])
        found = np.bincount(values)
        self._dense[: len(found)] += found

    def counts(self) -> Counts:
        self._merge()
        values = np.flatnonzero(self._dense)
        above = self._above
        return Counts(np.concatenate([values, above.values]), np.concatenate([self._dense[values], above.counts]), above.untold)

    def _merge(self) -> None:
        if not self._pending:
            return
        merged = Counts.together([self._above, *(Counts(values, counts) for values, counts in self._pending)])
        self._pending, self._pending_count = [], 0
        if len(merged.values) > DISTINCT_VALUES:
            told = Counts(merged.values[:DISTINCT_VALUES], merged.counts[:DISTINCT_VALUES])
            merged = told._replace(untold=merged.untold + int(merged.counts[DISTINCT_VALUES:].sum()))
        self._above = merged


class Counted(NamedTuple):
    """Counts of one pass over a split: its sequences' lengths, its token ids, and tokens and documents by source file,
    int64[files + 1] with those of no known file last.
    """

    lengths: Counts
    ids: Counts
    tokens_of_file: Ints | None
    documents_of_file: Ints | None


def count(corpus: Corpus, name: str) -> Counted:
    """Count a split. ValueError if it is damaged."""
    split = corpus.splits[name]
    documents = corpus.documents(name)
    files = sum(len(source.files) for source in corpus.sources)
    by_file = None if documents is None or not files else ByFile(documents.file, files)
    lengths, ids = Tally(), Tally()
    done = 0
    for ended, tokens in _lengths_and_tokens(split):
        ids.add(tokens)
        lengths.add(ended)
        if by_file is not None:
            by_file.add(done, ended)
        done += len(ended)
    if done != split.seq_count:
        raise ValueError(f"{corpus.url}: {name} has {done} sequences instead of {split.seq_count}. Run flat-tokens verify.")
    if by_file is None:
        return Counted(lengths.counts(), ids.counts(), None, None)
    return Counted(lengths.counts(), ids.counts(), by_file.tokens, by_file.documents)


class ByFile:
    """Tokens and documents by source file: int64[files + 1], those of no known file last."""

    def __init__(self, file: StoredArray, files: int) -> None:
        self._file, self._unknown = file, files
        self.tokens, self.documents = np.zeros(files + 1, np.int64), np.zeros(files + 1, np.int64)

    def add(self, first: int, lengths: Ints) -> None:
        """Count sequences from number *first* on, of these lengths."""
        files = np.minimum(self._file.read(first, first + len(lengths)), np.uint64(self._unknown)).astype(np.int64)
        # Floats are exact below 2**53, which one block does not reach.
        self.tokens += np.bincount(files, lengths, self._unknown + 1).astype(np.int64)
        self.documents += np.bincount(files, minlength=self._unknown + 1)


def _lengths_and_tokens(split: Readable) -> Iterator[tuple[Ints, npt.NDArray[np.uint32]]]:
    """All tokens of a split in order, each time with the lengths of the sequences that have ended since the last."""
    begun, stop = np.empty(0, np.int64), 0  # the start of the open sequence
    for window in windows(split, max_tokens=COUNT_TOKENS):
        edges = np.concatenate([begun, window.first + window.starts])
        yield np.diff(edges), window.ids
        begun, stop = edges[-1:], window.first + len(window.ids)
    yield stop - begun, np.empty(0, np.uint32)


def summarise(corpus: Corpus, counted: Mapping[str, Counted], vocabulary: Vocabulary | None, top: int) -> dict[str, Any]:
    """All numbers of a report, for JSON. ``total`` is for all splits together."""
    parts = list(counted.values())
    total = Counted(
        Counts.together([part.lengths for part in parts]),
        Counts.together([part.ids for part in parts]),
        _sum([part.tokens_of_file for part in parts]),
        _sum([part.documents_of_file for part in parts]),
    )
    described = describe(corpus)
    text_bytes = (described["documents"] or {}).get("text_bytes")
    highest = corpus.tokenizer.highest_id if corpus.tokenizer else None
    if vocabulary is not None and (highest is None or highest >= vocabulary.size):
        highest = vocabulary.size - 1
    if highest is not None and highest >= MAX_TABLE_IDS:  # no tokenizer has so many, whatever a manifest says
        highest = None
    whole = len(parts) == len(described["splits"]) and set(counted) != {"shard"}  # the manifest's counts apply
    summary = _summary(corpus, total, vocabulary, highest, top)
    for source in summary["sources"] or ():
        source["bytes_per_token"] = None
        for recorded in (described["documents"] or {}).get("by_source") or () if whole else ():
            if recorded.get("name") == source["name"] and recorded.get("text_bytes") and source["token_count"]:
                source["bytes_per_token"] = recorded["text_bytes"] / source["token_count"]
    return {
        "dataset": described,
        "vocabulary": {"name": vocabulary.name, "highest_id": highest} if vocabulary is not None else None,
        "text_bytes": text_bytes if whole else None,
        "splits": {name: _summary(corpus, part, vocabulary, highest, top) for name, part in counted.items()},
        "total": summary,
    }


def _sum(parts: Sequence[Ints | None]) -> Ints | None:
    known = [part for part in parts if part is not None]
    return np.sum(known, axis=0, dtype=np.int64) if len(known) == len(parts) else None


def _summary(corpus: Corpus, counted: Counted, vocabulary: Vocabulary | None, highest: int | None, top: int) -> dict[str, Any]:
    lengths, ids = counted.lengths, counted.ids
    tokens, sequences = int(ids.counts.sum()) + ids.untold, int(lengths.counts.sum())
    decoded = None if vocabulary is None else _decoded_bytes(ids, vocabulary)
    return {
        "token_count": tokens,
        "seq_count": sequences,
        "empty_seq_count": int(lengths.counts[lengths.values == 0].sum()),
        "lengths": {
            "mean": tokens / sequences if sequences else None,
            "min": int(lengths.values[0]) if sequences else None,
            **{f"p{percent}": lengths.percentile(percent) for percent in PERCENTILES},
            "max": int(lengths.values[-1]) if sequences else None,
            # Half of all tokens are in sequences of at most this length.
            "token_median": Counts(lengths.values, lengths.values * lengths.counts).percentile(50) if tokens else None,
        },
        "histogram": histogram(lengths),
        "decoded_bytes": decoded,
        "bytes_per_token": decoded / tokens if decoded is not None and tokens else None,
        "max_token_id": int(ids.values[-1]) if len(ids.values) else None,
        "distinct_ids": len(ids.values) if not ids.untold else None,
        "untold_tokens": ids.untold,
        "top_tokens": _top(ids, vocabulary, top, tokens),
        "rank_frequency": _ranks(ids),
        "vocabulary_use": None if highest is None else _use(ids, vocabulary, highest),
        "sources": _by_source(corpus, counted),
    }


def histogram(lengths: Counts) -> list[dict[str, int]]:
    """Sequences and tokens by length, four bins an octave from 8 tokens on, one for each length below. Both ends inclusive."""
    if not len(lengths.values):
        return []
    longest = int(lengths.values[-1])
    octaves = np.arange(4 * (longest.bit_length() + 1) + 1) / 4
    edges = np.unique(np.append(0, np.round(2**octaves).astype(np.int64)))
    edges = edges[: np.searchsorted(edges, longest, side="right") + 1]
    at = np.searchsorted(edges, lengths.values, side="right") - 1
    sequences = np.bincount(at, lengths.counts, len(edges) - 1).astype(np.int64)
    tokens = np.bincount(at, lengths.counts * lengths.values, len(edges) - 1).astype(np.int64)
    return [
        {"from": int(low), "to": int(high) - 1, "seq_count": int(s), "token_count": int(t)}
        for low, high, s, t in zip(edges[:-1], edges[1:], sequences, tokens, strict=True)
    ]


def _decoded_bytes(ids: Counts, vocabulary: Vocabulary) -> int:
    known = ids.values < vocabulary.size
    return int((vocabulary.lengths[ids.values[known]] * ids.counts[known]).sum())


def _top(ids: Counts, vocabulary: Vocabulary | None, top: int, tokens: int) -> list[dict[str, Any]]:
    order = np.argsort(-ids.counts, kind="stable")[:top]
    return [
        {
            "id": (i := int(ids.values[k])),
            "text": None if vocabulary is None else terminal.shown(vocabulary.piece(i)),
            "count": int(ids.counts[k]),
            "share": int(ids.counts[k]) / tokens,
        }
        for k in order
    ]


def _ranks(ids: Counts) -> list[tuple[int, int]]:
    """(rank, count) of tokens from the most frequent on, ranks evenly spaced in the logarithm."""
    if not len(ids.counts):
        return []
    ordered = np.sort(ids.counts)[::-1]
    ranks = np.unique(np.round(np.geomspace(1, len(ordered), RANKS_SHOWN)).astype(np.int64))
    return list(zip(ranks.tolist(), ordered[ranks - 1].tolist(), strict=True))


def _use(ids: Counts, vocabulary: Vocabulary | None, highest: int) -> dict[str, Any]:
    """The used part of the vocabulary: ids from 0 to *highest* that have bytes."""
    is_token = np.ones(highest + 1, bool) if vocabulary is None else vocabulary.lengths[: highest + 1] > 0
    is_used = np.zeros(highest + 1, bool)
    is_used[ids.values[ids.values <= highest]] = True
    unused = np.flatnonzero(is_token & ~is_used)
    examples = (
        unused[np.unique(np.linspace(0, len(unused) - 1, UNUSED_SHOWN).round().astype(np.int64))] if len(unused) else unused
    )
    edges = np.unique(np.linspace(0, highest + 1, min(ID_RANGES, highest + 1) + 1).round().astype(np.int64))
    size = np.add.reduceat(is_token.astype(np.int64), edges[:-1])
    used = np.add.reduceat((is_token & is_used).astype(np.int64), edges[:-1])
    return {
        "size": int(is_token.sum()),
        "used": int((is_token & is_used).sum()),
        "unused": len(unused),
        "outside": int((~np.isin(ids.values, np.flatnonzero(is_token))).sum()),
        "unused_examples": [
            {"id": int(i), "text": None if vocabulary is None else terminal.shown(vocabulary.piece(int(i)))} for i in examples
        ],
        "by_id": [
            {"from": int(low), "to": int(high) - 1, "size": int(n), "used": int(u)}
            for low, high, n, u in zip(edges[:-1], edges[1:], size, used, strict=True)
        ],
    }


def _by_source(corpus: Corpus, counted: Counted) -> list[dict[str, Any]] | None:
    tokens, documents = counted.tokens_of_file, counted.documents_of_file
    if tokens is None or documents is None:
        return None
    rows = []
    for source in corpus.sources:
        numbers = [file.number for file in source.files]
        rows.append((source.name, len(numbers), int(tokens[numbers].sum()), int(documents[numbers].sum())))
    if documents[-1]:
        rows.append(("(no known file)", 0, int(tokens[-1]), int(documents[-1])))
    return [{"name": name, "files": files, "token_count": t, "seq_count": d} for name, files, t, d in rows]


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """A summary for people."""
    dataset, total, splits = summary["dataset"], summary["total"], summary["splits"]
    name = f" {dataset['name']!r}" if dataset["name"] else ""
    version = f", version {dataset['version']}" if dataset["version"] else ""
    yield f"{dataset['kind']}{name}{version}"
    yield f"  {dataset['path']}"
    yield ""
    yield "sequences, in tokens"
    columns = ["mean", "min", *(f"p{percent}" for percent in PERCENTILES), "max"]
    rows = [["split", "tokens", "sequences", "empty", *("median" if c == "p50" else c for c in columns)]]
    for split, part in splits.items():
        lengths = ["" if part["lengths"][c] is None else f"{part['lengths'][c]:,.0f}" for c in columns]
        rows.append([split, f"{part['token_count']:,}", f"{part['seq_count']:,}", f"{part['empty_seq_count']:,}", *lengths])
    yield from terminal.table(rows, "<" + ">" * (len(rows[0]) - 1))
    for split, part in splits.items():
        if part["seq_count"]:
            yield ""
            yield from _histogram_lines(split, part)
    if total["sources"]:
        yield ""
        yield "tokens by source"
        yield from _source_lines(total)
    yield ""
    yield from _vocabulary_lines(summary)
    if total["top_tokens"]:
        yield ""
        yield "most frequent tokens"
        most = total["top_tokens"][0]["share"]
        room = max(terminal.width() - 56, 10)
        rows = [
            [
                f"{token['id']:,}",
                (token["text"] or "")[:24],
                f"{token['count']:,}",
                terminal.percent(token["share"]),
                terminal.bar(token["share"] / most, room),
            ]
            for token in total["top_tokens"]
        ]
        yield from terminal.table(rows, "><>><")


def _histogram_lines(split: str, part: Mapping[str, Any]) -> Iterator[str]:
    """One line an octave; the bins of a summary are finer."""
    yield f"{split}: sequences by length"
    octaves: dict[int, list[int]] = {}  # sequences and tokens of lengths with so many bits
    for found in part["histogram"]:
        octave = octaves.setdefault(found["from"].bit_length(), [0, 0])
        octave[:] = octave[0] + found["seq_count"], octave[1] + found["token_count"]
    most = max(sequences for sequences, _ in octaves.values())
    room = max(terminal.width() - 62, 10)
    rows = [["tokens", "sequences", "of all", "of tokens", ""]]
    for bits, (sequences, tokens) in sorted(octaves.items()):
        if not sequences and len(rows) == 1:
            continue  # before the shortest
        low, high = (1 << bits) >> 1, (1 << bits) - 1
        rows.append(
            [
                f"{low:,}" if low == high else f"{low:,} to {high:,}",
                f"{sequences:,}",
                terminal.percent(sequences / part["seq_count"]),
                terminal.percent(tokens / part["token_count"]) if part["token_count"] else "",
                terminal.bar(sequences / most, room),
            ]
        )
    yield from terminal.table(rows, ">>>><")


def _source_lines(total: Mapping[str, Any]) -> Iterator[str]:
    room = max(terminal.width() - 92, 10)
    rows = [["source", "files", "sequences", "tokens", "bytes/token", "of all", ""]]
    for source in total["sources"]:
        share = source["token_count"] / total["token_count"] if total["token_count"] else 0
        rows.append(
            [
                source["name"],
                f"{source['files']:,}",
                f"{source['seq_count']:,}",
                f"{source['token_count']:,}",
                "" if source["bytes_per_token"] is None else f"{source['bytes_per_token']:.3f}",
                terminal.percent(share),
                terminal.bar(share, room),
            ]
        )
    yield from terminal.table(rows, "<>>>>><")


def _vocabulary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    total, use = summary["total"], summary["total"]["vocabulary_use"]
    yield "vocabulary"
    facts = []
    if summary["text_bytes"] is not None and total["token_count"]:
        facts.append(
            (
                "bytes per token",
                f"{summary['text_bytes'] / total['token_count']:.3f}, from {summary['text_bytes']:,} bytes of text",
            )
        )
    for name, part in summary["splits"].items():
        if part["bytes_per_token"] is not None:
            facts.append((f"{name}, decoded", f"{part['bytes_per_token']:.3f}, from {part['decoded_bytes']:,} bytes"))
    if total["distinct_ids"] is not None:
        facts.append(("different ids", f"{total['distinct_ids']:,}"))
    if use:
        share = use["unused"] / use["size"] if use["size"] else 0
        facts.append(("unused", f"{use['unused']:,} of {use['size']:,} ({terminal.percent(share)})"))
        if use["outside"]:
            facts.append(("not in the vocabulary", f"{use['outside']:,} different ids"))
        if use["unused_examples"]:
            shown = [str(one["id"]) if one["text"] is None else one["text"] for one in use["unused_examples"]]
            facts.append(("such as", _cut(shown, max(terminal.width() - 26, 30))))
    yield from terminal.table([list(fact) for fact in facts], "<<")


def _cut(words: Sequence[str], room: int) -> str:
    """As many words as there is room for."""
    text = ""
    for word in words:
        if len(text) + len(word) + 1 > room:
            break
        text += f" {word}" if text else word
    return text
