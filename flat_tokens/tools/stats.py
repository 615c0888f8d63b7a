"""``flat-tokens stats``: document lengths, tokens by source, bytes per token, frequent tokens, unused vocabulary.

Everything is counted exactly in one pass over the tokens. There are at most as many different lengths as the square root
of twice the tokens, so their counts take little memory however many documents there are.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from flat_tokens.annotations import Int64s, Integers, IntPair, JsonFacts, JsonObject, UInt32s
from flat_tokens.formats import Readable
from flat_tokens.tools import cli, report, terminal
from flat_tokens.tools.corpus import Corpus, windows
from flat_tokens.tools.inspect import describe, heading
from flat_tokens.tools.sources import TextSources
from flat_tokens.vocabulary import MAX_TABLE_IDS, Vocabulary

SUMMARY = "count lengths, sources, bytes per token, frequent tokens, unused vocabulary"
EXAMPLES = """\
examples:
  flat-tokens stats out/web                          tables
  flat-tokens stats out/web --html report.html       a page with plots, in one file
  flat-tokens stats out/web --split train --json     all numbers
  flat-tokens stats corpus.pbin --tokenizer gpt2
  flat-tokens stats out/web --html report.html --source /data/web
                                                     with the texts of some near-duplicates, if it was built to find them
"""


COUNT_TOKENS = 1 << 18
"""Tokens counted at a time: they and their counts stay in the processor's cache."""

DENSE_VALUES = 1 << 22
DISTINCT_VALUES = 1 << 24
"""Above DENSE_VALUES, each different value costs 16 bytes; beyond this many, they are no longer distinguished."""

ID_RANGES = 96
UNUSED_SHOWN = 24
RANKS_SHOWN = 160


ARGUMENTS = f"""
PATH  {cli.ANY_DATASET}
--split NAME  count this split alone
--top N  show the N most frequent tokens (default: 25)
--html FILE  write a report with plots: one HTML file that needs no other
--tokenizer --pattern --source --trust-records --format --option
"""


def add_commands(commands: Any) -> None:
    cli.add_command(commands, "stats", run, SUMMARY, EXAMPLES, ARGUMENTS)


def run(options: argparse.Namespace) -> int:
    corpus = cli.corpus_of(options)
    sources, counted = TextSources.of(corpus, options), {name: count(corpus, name) for name in corpus.chosen(options.split)}
    summary = summarise(corpus, counted, sources.vocabulary, options.top)
    if (near := report.near_duplicates(sources)) is not None:
        summary["near_duplicates"] = near
    told = lines(summary) if options.html is None else [cli.write_file(options.html, report.page(summary))]
    if sources.problem is not None:
        cli.warn(f"tokens are shown by their ids: {sources.problem}")
    terminal.show(options, summary, told)
    return cli.SAME


class Counts(NamedTuple):
    """Occurrences of values: values int64[n] in order, counts int64[n] above 0; ``untold``: of those too many to distinguish."""

    values: Int64s
    counts: Int64s
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


class ValueCounts:
    """Counts non-negative values, given as int or uint[n]."""

    def __init__(self) -> None:
        self._dense = np.zeros(0, np.int64)
        self._pending: list[Counts] = []
        self._above = Counts(np.empty(0, np.int64), np.empty(0, np.int64))

    def add(self, values: Integers) -> None:
        if len(values) and values.max() >= DENSE_VALUES:
            above, counts = np.unique(values[values >= DENSE_VALUES].astype(np.int64), return_counts=True)
            self._pending.append(Counts(above, counts))
            if sum(len(one.values) for one in self._pending) > DENSE_VALUES:
                self._merge()
            values = values[values < DENSE_VALUES]
        found = np.bincount(values, minlength=len(self._dense))
        found[: len(self._dense)] += self._dense
        self._dense = found

    def counts(self) -> Counts:
        self._merge()
        values = np.flatnonzero(self._dense)
        above = self._above
        return Counts(np.concatenate([values, above.values]), np.concatenate([self._dense[values], above.counts]), above.untold)

    def _merge(self) -> None:
        merged = Counts.together([self._above, *self._pending])
        self._pending = []
        if len(merged.values) > DISTINCT_VALUES:
            shown = Counts(merged.values[:DISTINCT_VALUES], merged.counts[:DISTINCT_VALUES])
            merged = shown._replace(untold=merged.untold + int(merged.counts[DISTINCT_VALUES:].sum()))
        self._above = merged


class SplitCounts(NamedTuple):
    """Counts of one pass over a split: its sequences' lengths, its token ids, and by source file its tokens and documents:
    int64[2, files + 1], those of no known file last; None if that is not recorded.
    """

    lengths: Counts
    ids: Counts
    of_files: Int64s | None


def count(corpus: Corpus, name: str) -> SplitCounts:
    """Count a split. ValueError if it is damaged."""
    split = corpus.splits[name]
    documents = corpus.documents(name)
    files = sum(len(source.files) for source in corpus.sources)
    of_files = None if documents is None or not files else np.zeros((2, files + 1), np.int64)
    lengths, ids, done = ValueCounts(), ValueCounts(), 0
    for ended, tokens in _lengths_and_tokens(split):
        ids.add(tokens)
        lengths.add(ended)
        if documents is not None and of_files is not None:
            numbers = np.minimum(documents.file.read(done, done + len(ended)), np.uint64(files)).astype(np.int64)
            # Floats are exact below 2**53, which one block does not reach.
            of_files += np.array([np.bincount(numbers, of_each, files + 1) for of_each in (ended, None)]).astype(np.int64)
        done += len(ended)
    if done != split.seq_count:
        raise ValueError(f"{corpus.url}: {name} has {done} sequences instead of {split.seq_count}. Run flat-tokens verify.")
    return SplitCounts(lengths.counts(), ids.counts(), of_files)


def _lengths_and_tokens(split: Readable) -> Iterator[tuple[Int64s, UInt32s]]:
    """All tokens of a split in order, each time with the lengths of the sequences that have ended since the last."""
    begun, stop = np.empty(0, np.int64), 0  # the start of the open sequence
    for window in windows(split, max_tokens=COUNT_TOKENS):
        edges = np.concatenate([begun, window.first + window.starts])
        yield np.diff(edges), window.ids
        begun, stop = edges[-1:], window.first + len(window.ids)
    yield stop - begun, np.empty(0, np.uint32)


def summarise(corpus: Corpus, counted: Mapping[str, SplitCounts], vocabulary: Vocabulary | None, top: int) -> JsonObject:
    """All numbers of a report, for JSON. ``total`` is for all splits together."""
    lengths, ids, of_files = zip(*counted.values(), strict=True)
    known = [part for part in of_files if part is not None]
    all_files = np.stack(known).sum(axis=0) if len(known) == len(of_files) else None
    total = SplitCounts(Counts.together(lengths), Counts.together(ids), all_files)
    described = describe(corpus)
    documents = described["documents"] or {}
    highest = corpus.tokenizer.highest_id if corpus.tokenizer else None
    if vocabulary is not None and (highest is None or highest >= vocabulary.size):
        highest = vocabulary.size - 1
    if highest is not None and highest >= MAX_TABLE_IDS:  # no tokenizer has so many, whatever a manifest says
        highest = None
    # The manifest's counts are of the whole dataset.
    recorded = documents if len(counted) == len(described["splits"]) and set(counted) != {"shard"} else {}
    bytes_of = {one["name"]: one.get("text_bytes") for one in recorded.get("by_source") or ()}
    summary = _summary(corpus, total, vocabulary, highest, top)
    for source in summary["sources"] or ():
        of_text, tokens = bytes_of.get(source["name"]), source["token_count"]
        source["bytes_per_token"] = of_text / tokens if of_text and tokens else None
    return {
        "dataset": described,
        "vocabulary": {"name": vocabulary.name, "highest_id": highest} if vocabulary is not None else None,
        "text_bytes": recorded.get("text_bytes"),
        "splits": {name: _summary(corpus, part, vocabulary, highest, top) for name, part in counted.items()},
        "total": summary,
    }


def _summary(corpus: Corpus, counted: SplitCounts, vocabulary: Vocabulary | None, highest: int | None, top: int) -> JsonObject:
    """The statistics of a split, for JSON. *highest*: the highest id of the vocabulary, if it is known."""
    lengths, ids = counted.lengths, counted.ids
    tokens, sequences = int(ids.counts.sum()) + ids.untold, int(lengths.counts.sum())
    decoded = None
    if vocabulary is not None:
        known = ids.values < vocabulary.size
        decoded = int((vocabulary.lengths[ids.values[known]] * ids.counts[known]).sum())
    return {
        "token_count": tokens,
        "seq_count": sequences,
        "empty_seq_count": int(lengths.counts[lengths.values == 0].sum()),
        "lengths": {
            "mean": tokens / sequences if sequences else None,
            "min": int(lengths.values[0]) if sequences else None,
            **{f"p{percent}": lengths.percentile(percent) for percent in report.PERCENTILES},
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
        "top_tokens": _most_frequent(ids, vocabulary, top, tokens),
        "rank_frequency": _rank_frequency(ids),
        "vocabulary_use": None if highest is None else _vocabulary_use(ids, vocabulary, highest),
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
    return _by_range(edges, seq_count=sequences, token_count=tokens)


def _by_range(edges: Int64s, **counts: Int64s) -> list[JsonObject]:
    """Counts of each range of whole numbers between two edges."""
    columns = {"from": edges[:-1], "to": edges[1:] - 1, **counts}
    return [dict(zip(columns, row, strict=True)) for row in zip(*(values.tolist() for values in columns.values()), strict=True)]


def _most_frequent(ids: Counts, vocabulary: Vocabulary | None, top: int, tokens: int) -> list[JsonObject]:
    order = np.argsort(-ids.counts, kind="stable")[:top]
    most = zip(ids.values[order].tolist(), ids.counts[order].tolist(), strict=True)
    return [{"id": i, "text": _piece(vocabulary, i), "count": n, "share": n / tokens} for i, n in most]


def _piece(vocabulary: Vocabulary | None, i: int) -> str | None:
    return None if vocabulary is None else terminal.shown(vocabulary.piece(i))


def _rank_frequency(ids: Counts) -> list[IntPair]:
    """(rank, count) of tokens from the most frequent on, ranks evenly spaced in the logarithm."""
    if not len(ids.counts):
        return []
    ordered = np.sort(ids.counts)[::-1]
    ranks = np.unique(np.round(np.geomspace(1, len(ordered), RANKS_SHOWN)).astype(np.int64))
    return list(zip(ranks.tolist(), ordered[ranks - 1].tolist(), strict=True))


def _vocabulary_use(ids: Counts, vocabulary: Vocabulary | None, highest: int) -> JsonObject:
    """The used part of the vocabulary: ids from 0 to *highest* that have bytes."""
    is_token = np.ones(highest + 1, bool) if vocabulary is None else vocabulary.lengths[: highest + 1] > 0
    is_used = np.zeros(highest + 1, bool)
    is_used[ids.values[ids.values <= highest]] = True
    unused = np.flatnonzero(is_token & ~is_used)
    spread = np.unique(np.linspace(0, len(unused) - 1, UNUSED_SHOWN).round().astype(np.int64))
    examples = unused[spread] if len(unused) else unused
    edges = np.unique(np.linspace(0, highest + 1, min(ID_RANGES, highest + 1) + 1).round().astype(np.int64))
    size = np.add.reduceat(is_token.astype(np.int64), edges[:-1])
    used = np.add.reduceat((is_token & is_used).astype(np.int64), edges[:-1])
    return {
        "size": int(is_token.sum()),
        "used": int((is_token & is_used).sum()),
        "unused": len(unused),
        "outside": int((~np.isin(ids.values, np.flatnonzero(is_token))).sum()),
        "unused_examples": [{"id": i, "text": _piece(vocabulary, i)} for i in examples.tolist()],
        "by_id": _by_range(edges, size=size, used=used),
    }


def _by_source(corpus: Corpus, counted: SplitCounts) -> list[JsonObject] | None:
    if counted.of_files is None:
        return None
    numbers = {source.name: [file.number for file in source.files] for source in corpus.sources}
    rows = [(name, len(its), *counted.of_files[:, its].sum(axis=1).tolist()) for name, its in numbers.items()]
    if counted.of_files[1, -1]:
        rows.append(("(no known file)", 0, *counted.of_files[:, -1].tolist()))
    return [dict(zip(("name", "files", "token_count", "seq_count"), row, strict=True)) for row in rows]


def lines(summary: JsonFacts) -> Iterator[str]:
    """A summary for people."""
    total, splits = summary["total"], summary["splits"]
    yield from heading(summary["dataset"])
    yield "sequences, in tokens"
    columns = [key for _, key in report.LENGTHS]
    rows = [["split", "tokens", "sequences", "empty", *("median" if c == "p50" else c for c in columns)]]
    for split, part in splits.items():
        lengths = ["" if part["lengths"][c] is None else f"{part['lengths'][c]:,.0f}" for c in columns]
        rows.append([split, f"{part['token_count']:,}", f"{part['seq_count']:,}", f"{part['empty_seq_count']:,}", *lengths])
    yield from terminal.table(rows, "<" + ">" * (len(rows[0]) - 1))
    for split, part in splits.items():
        if part["seq_count"]:
            yield from ["", *_histogram_lines(split, part)]
    if total["sources"]:
        yield from ["", "tokens by source", *_source_lines(total)]
    if near := summary.get("near_duplicates"):
        yield from ["", *report.near_lines(near)]
    vocabulary = list(report.vocabulary_facts(summary))
    if total["vocabulary_use"] and (unused := total["vocabulary_use"]["unused_examples"]):
        shown = [one["text"] or str(one["id"]) for one in unused]
        vocabulary.append(("such as", _cut(shown, max(terminal.width() - 26, 30))))
    yield from ["", "vocabulary", *terminal.table(vocabulary, "<<")]
    if total["top_tokens"]:
        most = total["top_tokens"][0]["share"]
        room = max(terminal.width() - 56, 10)
        rows = []
        for token in total["top_tokens"]:
            share = [terminal.percent(token["share"]), terminal.bar(token["share"] / most, room)]
            rows.append([f"{token['id']:,}", (token["text"] or "")[:24], f"{token['count']:,}", *share])
        yield from ["", "most frequent tokens", *terminal.table(rows, "><>><")]


def _histogram_lines(split: str, part: JsonFacts) -> Iterator[str]:
    """One line an octave; the bins of a summary are finer."""
    yield f"{split}: sequences by length"
    octaves = report.merged_bins(part, 4)
    most = max(octave["seq_count"] for octave in octaves)
    room = max(terminal.width() - 62, 10)
    rows = [["tokens", "sequences", "of all", "of tokens", ""]]
    for octave in octaves:
        sequences, tokens = octave["seq_count"], octave["token_count"]
        of_all = terminal.percent(sequences / part["seq_count"])
        of_tokens = terminal.percent(tokens / part["token_count"]) if part["token_count"] else ""
        lengths = terminal.span(octave["from"], octave["to"])
        rows.append([lengths, f"{sequences:,}", of_all, of_tokens, terminal.bar(sequences / most, room)])
    yield from terminal.table(rows, ">>>><")


def _source_lines(total: JsonFacts) -> Iterator[str]:
    room = max(terminal.width() - 92, 10)
    rows = [["source", "files", "sequences", "tokens", "bytes/token", "of all", ""]]
    for source in total["sources"]:
        share = source["token_count"] / total["token_count"] if total["token_count"] else 0
        counts = [f"{source[key]:,}" for key in ("files", "seq_count", "token_count")]
        rate = "" if source["bytes_per_token"] is None else f"{source['bytes_per_token']:.3f}"
        rows.append([source["name"], *counts, rate, terminal.percent(share), terminal.bar(share, room)])
    yield from terminal.table(rows, "<>>>>><")


def _cut(words: Sequence[str], room: int) -> str:
    """The beginning of a text, cut after a word, as far as there is room."""
    ends = itertools.accumulate(len(word) + 1 for word in words)
    return " ".join(word for word, end in zip(words, ends, strict=True) if end - 1 <= room)
