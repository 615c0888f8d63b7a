"""Facts of a version that gates look at, and its difference from another version for people.

Counts are from manifests. Lengths, kept columns and differences of documents are read only if they are asked for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from flat_tokens.annotations import IntPair, JsonFacts, JsonObject
from flat_tokens.manifest import SplitName, read_manifest, read_token_bytes, splits_of
from flat_tokens.reader import open_split, open_splits
from flat_tokens.rows.documents import DocumentTable, name_of_kept
from flat_tokens.stores.store import Store
from flat_tokens.tools.documents import query
from tasks.gates import OF_CHANGES, OF_COLUMNS, OF_LENGTHS, Facts, FactValues, Gate, Subject
from tasks.models import Model
from tasks.output.changes import DocumentChanges
from tasks.output.paths import version_store
from tasks.parts.part import NEAR_DUPLICATE_REASON

logger = logging.getLogger(__name__)

ENTRIES_AT_ONCE = 1 << 22


class SourceCounts(Model):
    """Counts of a source in two versions, each (before, now); None if there was no such source, or the count is unknown."""

    name: str
    documents: tuple[int | None, int | None]
    tokens: tuple[int | None, int | None]
    text_bytes: tuple[int | None, int | None]


class LengthCounts(Model):
    """Documents of ``first`` to ``last`` tokens, (before, now)."""

    first: int
    last: int
    documents: IntPair


class Comparison(Model):
    """A version next to the one that ``latest`` names, for people: sources, documents that were left out by reason, lengths, and
    what became of documents. ``before``: None if ``latest`` names nothing.
    """

    before: str | None
    version: str
    sources: tuple[SourceCounts, ...]
    skipped: dict[str, IntPair]
    lengths: tuple[LengthCounts, ...]
    documents: DocumentChanges | None


class VersionFacts:
    """Facts of a version at an output: each is looked up when it is first asked for."""

    def __init__(self, root: Store, version: str) -> None:
        self._root, self.version = root, version

    @cached_property
    def store(self) -> Store:
        return version_store(self._root, self.version)

    @cached_property
    def manifest(self) -> JsonObject:
        return read_manifest(self.store)

    @cached_property
    def splits(self) -> tuple[SplitName, ...]:
        return splits_of(self.manifest["totals"])

    @cached_property
    def documents(self) -> JsonObject:
        """Totals of its documents, as far as they are known."""
        return self.manifest["totals"].get("documents") or {}

    @cached_property
    def sources(self) -> dict[str, JsonObject]:
        """Counts of each source; those of another writer may have none."""
        return {one["name"]: one for one in self.documents.get("by_source") or ()}

    @cached_property
    def _table(self) -> DocumentTable:
        return DocumentTable(self.store, open_splits(self.store))

    @cached_property
    def lengths(self) -> list[tuple[str, str, int, int]]:
        """How many documents of each split and source have how many tokens."""
        return query(
            self._table.read(("split", "source", "tokens")),
            "SELECT *, count(*) FROM documents WHERE split IS NOT NULL GROUP BY ALL",
        )

    def text_bytes(self, name: SplitName) -> int | None:
        """Bytes of text that the tokens of a split stand for. None if the bytes of its tokenizer's tokens are not known, or it
        changes text first.
        """
        try:
            known = read_token_bytes(self.store, self.manifest)
        except FileNotFoundError:
            return None
        tokens = open_split(self.store / name).encoded_tokens
        spans = ((start, min(start + ENTRIES_AT_ONCE, tokens.length)) for start in range(0, tokens.length, ENTRIES_AT_ONCE))
        parts = (known.lengths[tokens.read(*span) >> 1] for span in spans)  # encoded -> id
        return sum(int(part.sum(dtype=np.int64)) for part in parts) if known.is_exact else None

    def column(self, place: Subject) -> tuple[int, int, int]:
        """Rows of a kept column, how many of them are null, and how many different values the others have."""
        if place.column not in (self.manifest.get("columns") or {}):
            raise ValueError(f"{self.store.url}: keeps no column {place.column!r}")
        name = name_of_kept(place.column)
        value = '"' + name.replace('"', '""') + '"'
        counts = f"SELECT count(*), count(*) - count({value}), count(DISTINCT {value}) FROM documents WHERE split LIKE ?"  # noqa: S608  # quoted
        ((rows, nulls, distinct),) = query(self._table.read(("split", name)), counts, [place.split or "%"])
        return rows, nulls, distinct


class Difference:
    """A version next to the one that ``latest`` names, if it names one. Both are looked at as far as it is needed."""

    def __init__(self, root: Store, before: str | None, version: str) -> None:
        self._root = root
        self.now = VersionFacts(root, version)
        self.before = VersionFacts(root, before) if before is not None else None

    @cached_property
    def documents(self) -> DocumentChanges | None:
        """The changes of documents. If the version *before* is damaged, None, with a warning: that is not a fault of the new
        one.
        """
        from tasks.finalize.document_changes import document_changes  # which few gates need

        before = self.before.version if self.before else None
        try:
            return document_changes(self._root, before, self.now.version)
        except (OSError, ValueError) as error:
            logger.warning("The documents of versions %s and %s cannot be compared: %s", before, self.now.version, error)
            return None

    def facts(self, gates: Sequence[Gate]) -> tuple[Facts, Facts | None]:
        """The facts for the gates: of the version, and of the one before."""
        now = facts_of(self.now, gates)
        if self.before is None:
            return now, None
        before = facts_before(self.before, now)
        for gate in gates:
            if gate.of in OF_CHANGES:
                now |= self._changes(gate)
        return now, before

    def _changes(self, gate: Gate) -> FactValues:
        """The values of a fact of changed documents at the places of a gate; None if the changes are unknown."""
        kind = gate.of.removesuffix("_share")
        assert self.before is not None
        side = self.before if kind == "removed" else self.now
        found: FactValues = {}
        for place in _places(gate, self.now):
            if gate.of == "split_changes":
                if self.documents is not None:  # what the version before has lost is not a fault of this one
                    found[gate.of, place] = sum(one.documents for one in self.documents.of_splits)
                continue
            if self.documents is None:
                found[gate.of, place] = None
                continue
            listed = self.documents.by_source if place.source else self.documents.by_split if place.split else ()
            name = place.source or place.split
            counts = next((one for one in listed if one.name == name), None) if name else self.documents.total
            count = 0 if counts is None else getattr(counts, kind)
            whole = _count(side, "documents", place)
            found[gate.of, place] = None if count is None or whole is None else count / whole if whole else 0.0
        return found

    def compared(self) -> Comparison:
        """The difference for people."""
        then, now = (self.before.sources if self.before else {}), self.now.sources
        names = {"documents": "written", "tokens": "token_count", "text_bytes": "text_bytes"}
        sources = [
            SourceCounts(
                name=name,
                **{of: (then.get(name, {}).get(count), now.get(name, {}).get(count)) for of, count in names.items()},
            )
            for name in dict.fromkeys([*now, *then])
        ]
        skipped = [(one.documents.get("skipped") or {}) if one else {} for one in (self.before, self.now)]
        reasons = sorted({*skipped[0], *skipped[1]})
        # Lengths are counted in ranges of powers of two, from the first to the last that has any.
        lengths = Counter[int](), Counter[int]()
        for one, found in zip((self.before, self.now), lengths, strict=True):
            try:
                for *_, tokens, count in one.lengths if one is not None else ():
                    found[tokens.bit_length()] += count
            except (OSError, ValueError) as error:
                logger.warning("The lengths of version %s is unknown: %s", one and one.version, error)
        there = {*lengths[0], *lengths[1]}
        bits = range(min(there, default=0), max(there, default=-1) + 1)
        return Comparison(
            before=self.before.version if self.before else None,
            version=self.now.version,
            sources=tuple(sources),
            skipped={reason: (skipped[0].get(reason, 0), skipped[1].get(reason, 0)) for reason in reasons},
            lengths=tuple(
                LengthCounts(first=1 << bit >> 1, last=(1 << bit) - 1, documents=(lengths[0][bit], lengths[1][bit]))
                for bit in bits
            ),
            documents=self.documents,
        )


def _places(gate: Gate, of: VersionFacts) -> Iterator[Subject]:
    """The places that a gate looks at in a version."""
    place = Subject(**{name: getattr(gate, name) or "" for name in Subject._fields})
    if gate.by is None:
        yield place
        return
    for name in of.sources if gate.by == "source" else of.splits:
        yield place._replace(**{gate.by: name})


def facts_of(of: VersionFacts, gates: Sequence[Gate]) -> FactValues:
    """Facts of one version, without its difference from another one."""
    places = ((gate.of, place) for gate in gates if gate.of not in OF_CHANGES for place in _places(gate, of))
    return {(fact, place): _fact(of, fact, place) for fact, place in places}


def facts_before(of: VersionFacts, asked: Iterable[tuple[str, Subject]]) -> FactValues:
    """The facts *asked* for, of a version that others are compared with. What is unknown of it is left out."""
    found: FactValues = {}
    for fact, place in asked:
        if fact in OF_CHANGES or (place.source and place.source not in of.sources):
            continue
        try:
            value = _fact(of, fact, place)
        except (OSError, ValueError) as error:
            logger.warning("%s of version %s is unknown: %s", fact, of.version, error)
            continue
        if value is not None:
            found[fact, place] = value
    return found


def _fact(of: VersionFacts, fact: str, place: Subject) -> int | float | None:
    """The value of a fact at a place; None if it is unknown."""
    if fact in OF_LENGTHS:
        from flat_tokens.tools.stats import Counts  # which few gates need

        some = [of[2:] for of in of.lengths if place.split in ("", of[0]) and place.source in ("", of[1])]
        values, numbers = np.array(some, np.int64).reshape(-1, 2).T
        return Counts.together([Counts(values, numbers)]).percentile(100 if fact == "largest_length" else 50) or 0
    if fact in OF_COLUMNS:
        rows, nulls, distinct = of.column(place)
        return distinct if fact == "distinct" else nulls / rows if rows else 0.0
    if fact == "bytes_per_token":
        text, tokens = _count(of, "text_bytes", place), _count(of, "tokens", place)
        return None if text is None or tokens is None else text / tokens if tokens else 0.0
    if fact == "duplicate_share":
        read, repeated = of.documents.get("read"), of.documents.get("repeated_keys")
        left_out = (of.documents.get("skipped") or {}).get("duplicate", 0)
        return None if read is None or repeated is None else (left_out + repeated) / read if read else 0.0
    if fact in ("skipped_share", "near_duplicate_share"):
        counts = (of.sources.get(place.source) if place.source else of.documents) or {}
        if (read := counts.get("read")) is None:
            return None
        is_near = fact == "near_duplicate_share"
        return share_near(counts, read) if is_near else share_skipped(counts.get("skipped") or {}, read, place)
    return _count(of, fact, place)


def near_duplicates(counts: JsonFacts) -> int:
    """Number of near-duplicates, left out or kept, all but the first of each cluster."""
    found: int = (counts.get("skipped") or {}).get(NEAR_DUPLICATE_REASON, 0) + counts.get("near_duplicates", 0)
    return found


def share_near(counts: JsonFacts, read: int) -> float:
    """The share of these in the documents that were *read*."""
    return near_duplicates(counts) / read if read else 0.0


def reasons_of(step: str, counts: Mapping[str, int]) -> dict[str, int]:
    """``step.reason`` -> reason"""
    return {reason.removeprefix(f"{step}."): count for reason, count in counts.items() if reason.startswith(f"{step}.")}


def _count(of: VersionFacts, fact: str, place: Subject) -> int | None:
    """Documents, tokens or bytes of text, of a source, of a split or of all: an int, None if it is not recorded."""
    found: int | None
    if place.source:
        name = {"documents": "written", "tokens": "token_count"}.get(fact, fact)
        found = of.sources.get(place.source, {}).get(name)
    elif fact == "text_bytes":
        found = of.text_bytes(place.split) if place.split in of.splits else of.documents.get(fact)
    else:
        name = {"documents": "seq_count", "tokens": "token_count"}[fact]
        found = sum(of.manifest["totals"][split][name] for split in of.splits if place.split in ("", split))
    return found


def share_skipped(reasons: Mapping[str, int], read: int, place: Subject) -> float:
    """The share of documents that were left out, for the reasons that a place names, of those that were *read*."""
    count = sum(
        count
        for reason, count in reasons.items()
        if place.reason in ("", reason) and (not place.step or reason == place.step or reason.startswith(f"{place.step}."))
    )
    return count / read if read else 0.0
