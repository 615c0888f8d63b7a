"""Documents that were added, removed, changed or moved between two versions of an output.

Segments that both versions hold of a source are passed over, by their indexes. The documents of all others are compared by key,
and by a digest of their tokens.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, ByteStrings, Int64Pair, Int64s, IntPair, JsonObject, Structs
from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.manifest import EVERY_SPLIT, read_manifest, splits_of
from flat_tokens.reader import open_split, open_splits
from flat_tokens.rows.documents import DocumentTable
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store
from flat_tokens.tools.diff import KEYS_AT_A_TIME, Side, changes, token_digests
from flat_tokens.tools.documents import query
from tasks.models import Split, TokenShard
from tasks.output.changes import DocumentChangeCounts, DocumentChanges, SplitChange
from tasks.output.paths import DOCUMENTS, version_store
from tasks.shards.index import read_index, segments_of
from tasks.tokenize.segments import STORED

KNOWN = np.dtype([("source", ">u4"), ("split", "u1"), ("digest", STORED["digest"])])
"""A segment of a source, and the split that has all documents of its slice, if one has. It is compared as bytes, so its source
counts from 1: zeros at the end are not difference.
"""


OF_THE_PLACE = ("files", "from", "revision")
"""Manifest keys of a source that identify its texts (not how they are processed)."""


class _ComparedSplit(NamedTuple):
    """One split of a version, and the arrays with an entry a document."""

    tokens: FlatTokens
    key: StoredArray
    file: StoredArray
    row: StoredArray


class _ComparedVersion(NamedTuple):
    """A version whose documents are compared. ``source_of``: the source of each file, int64[files]. ``rules``: what decides the
    tokens of a text next to the tokenizer; ``split_rule``: what decides on its split.
    """

    names: tuple[str, ...]
    source_of: Int64s
    splits: tuple[_ComparedSplit, ...]
    split_names: tuple[Split, ...]
    shards: list[TokenShard]
    segments: list[Structs]
    has_ids: bool
    tokenizer: str | None
    rules: tuple[Any, ...]
    split_rule: JsonObject

    @classmethod
    def opened(cls, root: Store, version: str) -> _ComparedVersion:
        """Open a version to compare its documents."""
        store = version_store(root, version)
        manifest = read_manifest(store)
        made_of, split_names = manifest["provenance"], splits_of(manifest["totals"])
        sources = made_of.get("sources") or []
        splits = []
        for name in split_names:
            beside = (open_array(store / f"{DOCUMENTS}/{name}/{array}", "uint64") for array in ("key", "file", "row"))
            splits.append(_ComparedSplit(open_split(store / name), *beside))
        # Segments of compared slices may have lost documents in one version and not in the other.
        found = [(shard, segments_of(shard)) for shard in read_index(root, version).published if not shard.of_texts]
        return cls(
            names=tuple(source["name"] for source in sources),
            source_of=np.repeat(np.arange(len(sources)), [len(source["files"]) for source in sources]),
            splits=tuple(splits),
            split_names=split_names,
            shards=[shard for shard, segments in found if len(segments)],
            segments=[segments for _, segments in found if len(segments)],
            has_ids=any(source.get("id_column") for source in sources),
            tokenizer=(made_of.get("tokenizer") or {}).get("digest"),
            rules=(
                made_of.get("semantics"),
                made_of.get("documents"),
                [{name: value for name, value in source.items() if name not in OF_THE_PLACE} for source in sources],
            ),
            split_rule=made_of.get("split") or {},
        )

    def range_of(self, shard: int, split: int) -> IntPair:
        """The first document of a shard in a split, and how many. ValueError if the split has fewer."""
        location = self.shards[shard].published
        assert location is not None
        first, count = location.of(self.split_names[split])
        tokens = self.splits[split].tokens
        if not 0 <= first <= first + count <= tokens.seq_count:
            raise ValueError(f"{tokens.store.url}: its index reports sequences {first} to {first + count} of {tokens.seq_count}")
        return first, count

    def sources(self, split: int, documents: Int64s) -> Int64s:
        """The source of each document."""
        files = self.splits[split].file.take(documents)
        if len(files) and int(files.max()) >= len(self.source_of):
            raise ValueError(
                f"{self.splits[split].file.store.url}: has file {files.max()}, but the manifest has {len(self.source_of)} files. "
                "The dataset is damaged: run flat_tokens.verify on it."
            )
        return self.source_of[files]

    def known(self, numbers: dict[str, int]) -> ByteStrings:
        """Its segments with their sources, by *numbers* of their names: KNOWN as bytes, n of them."""
        of, (source, in_splits) = (
            np.array([numbers[name] for name in self.names], np.int64),
            np.zeros((2, len(self.shards)), np.int64),
        )
        for split, name in enumerate(self.split_names):
            held = np.array([self.range_of(shard, split) for shard in range(len(self.shards))], np.int64).reshape(-1, 2)
            some = np.flatnonzero(held[:, 1])
            source[some] = of[self.sources(split, held[some, 0])]
            in_splits[some] |= 1 << EVERY_SPLIT.index(name)
        found = np.zeros(sum(map(len, self.segments)), KNOWN)
        found["source"], found["split"] = np.repeat([source, in_splits], [len(segments) for segments in self.segments], axis=1)
        found["digest"] = np.concatenate([*self.segments, np.empty(0, STORED)])["digest"]
        return found.view(f"S{KNOWN.itemsize}")

    def documents(self, split: int, is_passed_over: Bools) -> Iterator[Int64Pair]:
        """Numbers of the documents to compare in a split, some at a time, and their sources. *is_passed_over*: bool[segments]."""
        covered, at = [(0, 0)], 0
        for shard, segments in enumerate(self.segments):
            passed_over, at = is_passed_over[at : at + len(segments)], at + len(segments)
            ranges = [self.range_of(shard, i) for i in range(len(self.splits))]
            covered.append((ranges[split][0], sum(ranges[split])))
            if passed_over.all():
                continue
            # document of the slice, in the order of rows -> its split and number
            rows = [part.row.read(first, first + count) for part, (first, count) in zip(self.splits, ranges, strict=True)]
            files = [part.file.read(first, first + count) for part, (first, count) in zip(self.splits, ranges, strict=True)]
            order = np.lexsort((np.concatenate(rows), np.concatenate(files)))
            wanted = np.empty(len(order), bool)
            wanted[order] = np.repeat(~passed_over, segments["documents"])
            begin = sum(map(len, rows[:split]))
            numbers = np.flatnonzero(wanted[begin : begin + len(rows[split])]) + ranges[split][0]
            yield numbers, self.sources(split, numbers)
        covered.append((self.splits[split].tokens.seq_count,) * 2)
        for (_, begin), (end, _) in pairwise(sorted(covered)):
            for start in range(begin, end, KEYS_AT_A_TIME):
                numbers = np.arange(start, min(start + KEYS_AT_A_TIME, end))
                yield numbers, self.sources(split, numbers)

    def read(self, is_passed_over: Bools, by_tokens: bool, file: Any) -> Side:
        """The documents to compare, in groups: of each split, those of each source. Digests are zeros without *by_tokens*."""
        counts = np.zeros((len(self.splits), len(self.names)), np.int64)
        for i in range(len(self.splits)):
            for _, sources in self.documents(i, is_passed_over):
                counts[i] += np.bincount(sources, minlength=len(self.names))
        names = tuple(f"{split}/{name}" for split in self.split_names for name in self.names)
        side = Side.on_disk(file, np.append(0, np.cumsum(counts.reshape(-1))), names)
        places = side.firsts[:-1].reshape(counts.shape).copy()
        for i, split in enumerate(self.splits):
            for numbers, sources in self.documents(i, is_passed_over):
                for source in np.unique(sources).tolist():
                    mine, place = numbers[sources == source], int(places[i, source])
                    places[i, source] += len(mine)
                    side.keys[place : place + len(mine)] = split.key.take(mine)
                    for some in token_digests(split.tokens.select(indices=mine)) if by_tokens else ():
                        side.digests[place : place + len(some)] = some
                        place += len(some)
        return side


def document_changes(root: Store, before: str | None, after: str) -> DocumentChanges:
    """Compare two versions; if there was none *before*, all documents were added. Memory is bounded, however many there are.

    ValueError for a version that is damaged, FileNotFoundError for one without a record of its documents.
    """
    b = _ComparedVersion.opened(root, after)
    if before is None:
        store = version_store(root, after)
        table = DocumentTable(store, open_splits(store))
        sql = "SELECT split, source, count(*) FROM documents WHERE split IS NOT NULL GROUP BY ALL"
        found = query(table.read(("split", "source")), sql)
        return summed({(split, source): Counter(added=count) for split, source, count in found}, b.names)
    a = _ComparedVersion.opened(root, before)
    names = tuple(dict.fromkeys((*b.names, *a.names)))
    numbers = {name: i for i, name in enumerate(names, 1)}
    # By another rule a document of the same segment may be in another split.
    if a.split_rule == b.split_rule or a.split_rule | {"keep": before} == b.split_rule:
        in_a, in_b = in_both(a.known(numbers), b.known(numbers))
    else:
        in_a, in_b = (np.zeros(sum(map(len, one.segments)), bool) for one in (a, b))
    # A key that is made of the text says all where the same becomes of it: then no tokens change under their key.
    may_change, same_tokenizer = a.has_ids or b.has_ids or a.rules != b.rules, a.tokenizer == b.tokenizer
    by_tokens = may_change and same_tokenizer
    counts: Counts = {}
    of_splits = Counter[tuple[str, str]]()  # documents that moved between splits, by both splits
    with (
        tempfile.TemporaryFile() as one,
        tempfile.TemporaryFile() as other,
        changes(a.read(in_a, by_tokens, one), b.read(in_b, by_tokens, other)) as found,
    ):
        rows = found.execute("SELECT kind, name_a, name_b, count(*) FROM changes GROUP BY ALL").fetchall()
    for kind, was, now, count in rows:
        split, _, source = (was if kind == "removed" else now).partition("/")
        if kind == "moved":
            split_before, _, source_before = was.partition("/")
            of_splits[split_before, split] += count if split_before != split else 0
            if source_before == source:
                continue
        counts.setdefault((split, source), Counter())[kind] += count
    return summed(counts, names, same_tokenizer, of_splits)


def in_both(a: ByteStrings, b: ByteStrings) -> list[Bools]:
    """Which segments of each side are on the other side, too, equally often: bool[len(a)], bool[len(b)]. A segment without a
    digest is on neither.
    """
    names, which = np.unique(np.concatenate([a, b]), return_inverse=True)
    sides = which[: len(a)], which[len(a) :]
    counts = np.minimum(*(np.bincount(side, minlength=len(names)) for side in sides))
    counts[np.char.str_len(names) <= KNOWN.itemsize - STORED["digest"].itemsize] = 0
    found = []
    for side in sides:
        order = np.argsort(side, kind="stable")
        # segment -> how many like it are before it
        before = np.arange(len(side)) - np.searchsorted(side[order], side[order])
        is_there = np.empty(len(side), bool)
        is_there[order] = before < counts[side[order]]
        found.append(is_there)
    return found


Counts = dict[tuple[str, str], Counter[str]]
"""(split, source) -> kind of change -> documents"""


def summed(
    counts: Counts, sources: Sequence[str], knows_changed: bool = True, of_splits: Mapping[tuple[str, str], int] = {}
) -> DocumentChanges:
    """Counts by source, by split and of all."""

    def total(name: str, some: list[Counter[str]]) -> DocumentChangeCounts:
        added, removed, changed, moved = (sum(one[kind] for one in some) for kind in ("added", "removed", "changed", "moved"))
        return DocumentChangeCounts(
            name=name, added=added, removed=removed, changed=changed if knows_changed else None, moved=moved
        )

    by_source = [(name, [one for place, one in counts.items() if place[1] == name]) for name in sources]
    by_split = [(name, [one for place, one in counts.items() if place[0] == name]) for name in EVERY_SPLIT]
    return DocumentChanges(
        total=total("all", list(counts.values())),
        by_source=tuple(total(name, some) for name, some in by_source if some),
        by_split=tuple(total(name, some) for name, some in by_split if some),
        of_splits=tuple(
            SplitChange(before=before, after=after, documents=count)
            for (before, after), count in sorted(of_splits.items())
            if count
        ),
    )
