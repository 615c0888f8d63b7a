"""The record of what a run has seen before a step, or of what a version holds: documents, tokens and text, by anything that is
known of a document.

Documents are counted once, however often they were seen; tokens as often as they were in a batch.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from flat_tokens.annotations import Bools, Int64s, JsonObject
from flat_tokens.columns import in_json
from flat_tokens.forgotten import Forgotten, read_forgotten
from flat_tokens.manifest import EVERY_SPLIT, MANIFEST, VERSIONS, dataset_of, manifest_digest, manifest_of, splits_at
from flat_tokens.reader import open_root, open_split
from flat_tokens.record.ledger import Ledger
from flat_tokens.rows.documents import NAMES, RecordedFacts, recorded_of, stored_fact, values_of
from flat_tokens.rows.mixture import EpochRows
from flat_tokens.rows.seen import bytes_seen, tokens_seen
from flat_tokens.rows.split import FlatTokens
from flat_tokens.rows.views import SplitView, all_starts
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, read_json

FORMAT, FORMAT_VERSION = "flat-tokens-record", 1
MOST_VALUES = 1000
"""A column with more different values is left out of a record that does not ask for it by name."""
DOCUMENTS_AT_A_TIME = 1 << 18
KEPT_SPLIT = "columns.split"
"""The name of a kept column that is called split, as the table of documents has it."""
MAX_ORIGIN_BYTES = 1 << 24
COUNTS = ("documents", "tokens", "stored_tokens", "text_bytes")

Amounts: TypeAlias = Int64s
"""The numbers of COUNTS of each document of a split: int64[4, seq_count]. Of one that was seen the first is 1, else all are 0.
Where text was not counted: int64[3, seq_count].
"""
Sums: TypeAlias = Int64s
"""The numbers of COUNTS of some documents together: int64[4], or int64[3]."""
TokenSizes: TypeAlias = Callable[[Store], Int64s]
"""A dataset -> the bytes of text of each of its token ids: int64[n]."""


def record_of_run(
    ledger: Ledger,
    step: int,
    *,
    columns: Sequence[str] | None = None,
    digests: Iterable[int] = (),
    sizes: TokenSizes | None = None,
    forgotten: Sequence[Store] = (),
) -> JsonObject:
    """The record of what a run has seen before *step*, for JSON. It reads no token, but for *digests* and *sizes*.

    *columns*: those by which documents are counted; without them the source and all kept columns of up to 1,000 different values.
    *digests*: steps of which it has the SHA-256 of their rows. *sizes*: text is counted, too, if a view has the same rows in
    each epoch. *forgotten*: outputs whose lists say which of the documents that were seen are forgotten. IndexError for a step
    that the run does not have; ValueError for columns that no dataset has.
    """
    mixture = ledger.mixture()
    drawn = mixture.drawn(step).tolist()
    splits, sources = _Splits(), list[_ViewSource]()
    for name, view, samples in zip(mixture.names, mixture.views, drawn, strict=True):
        facts = {"samples": samples, "rows": len(view), "epochs": samples / len(view)}
        source = _ViewSource(name, facts, None)
        if isinstance(view, SplitView):
            source = _ViewSource(name, facts | {"view": view.described()}, splits.at(view.tokens.store))
            source.see(view, mixture.drawn_rows(step, name), sizes)
        sources.append(source)
    run = {
        "ledger": ledger.path,
        "sha256": ledger.digest,
        "step": step,
        "seed": mixture.seed,
        **mixture.versions(),
        "samples": mixture.position(step),
        "steps": [{"step": number, "sha256": mixture.digest(number)} for number in digests],
    }
    return _record(run, sources, splits, columns, forgotten)


def record_of_dataset(
    path: PathOrUrl | Store,
    *,
    columns: Sequence[str] | None = None,
    sizes: TokenSizes | None = None,
    forgotten: Sequence[Store] = (),
) -> JsonObject:
    """The record of a version, as of a run that has seen each of its documents once: its sources are the splits.

    The path is a dataset, or an output with ``latest.json``. FileNotFoundError if there is none; else as `record_of_run`.
    """
    store, _ = open_root(path if isinstance(path, Store) else Store.at(path))
    splits, sources = _Splits(), list[_ViewSource]()
    for name in splits_at(store):
        split = splits.at(store / name)
        source = _ViewSource(name, {}, split)
        source.amounts = split.whole(sizes)
        sources.append(source)
    return _record(None, sources, splits, columns, forgotten)


@dataclass
class _Split:
    """A split of a dataset, and the facts of its documents. ``dataset``: the number of the dataset in the record."""

    tokens: FlatTokens
    dataset: int
    recorded: RecordedFacts

    @property
    def name(self) -> str:
        return posixpath.basename(self.tokens.store.root)

    @cached_property
    def lengths(self) -> Int64s:
        """The stored tokens of each document: int64[seq_count]."""
        return np.diff(all_starts(self.tokens))

    @property
    def columns(self) -> list[str]:
        """The facts by which its documents can be counted: their source if it is recorded, and the kept columns."""
        kept = self.recorded.columns.get(self.name)
        return [
            *(["source"] if self.has_records else []),
            *(KEPT_SPLIT if name == "split" else name for name in (kept.kinds if kept else ())),
        ]

    @cached_property
    def has_records(self) -> bool:
        """Whether the dataset says which file and row each document is."""
        try:
            stored_fact(self.tokens, "file")
        except NO_OBJECT:
            return False
        return bool(self.recorded.sources)

    def forgotten(self, lists: Sequence[Forgotten]) -> Bools:
        """Which documents are on one of the lists: bool[seq_count]. All are False if the dataset does not record their keys."""
        found = np.zeros(len(self.lengths), bool)
        try:
            keys = stored_fact(self.tokens, "key")
        except NO_OBJECT:
            return found
        for first in range(0, len(found), DOCUMENTS_AT_A_TIME):
            stop = min(first + DOCUMENTS_AT_A_TIME, len(found))
            its = keys.read(first, stop)
            for one in lists:
                found[first:stop] |= one.those(its)
        return found

    def amounts(self, tokens: Int64s, text: Int64s | None = None, is_seen: Bools | None = None) -> Amounts:
        """The amounts of its documents, whose *tokens* and bytes of *text* were in batches: int64[seq_count] each. *is_seen*:
        bool[seq_count]; those with tokens without it.
        """
        seen = tokens > 0 if is_seen is None else is_seen
        return np.stack([seen, tokens, np.where(seen, self.lengths, 0), *([] if text is None else [text])])

    def whole(self, sizes: TokenSizes | None) -> Amounts:
        """All documents, each once."""
        view = self.tokens.documents(max(int(self.lengths.max(initial=1)), 1))
        text = None if sizes is None else bytes_seen(view, sizes(dataset_of(self.tokens.store)))
        return self.amounts(self.lengths, text, np.ones(len(self.lengths), bool))


Key: TypeAlias = tuple[bool, Any]
"""A value of a column, and whether it is true or false: these are not 1 and 0."""


@dataclass
class _ViewSource:
    """A source of the run: a view of a split, or of no dataset."""

    name: str
    facts: JsonObject
    split: _Split | None
    amounts: Amounts = field(init=False)
    by_epoch: list[JsonObject] = field(default_factory=list)
    by: JsonObject = field(default_factory=dict)

    def see(self, view: SplitView, drawn: Iterable[EpochRows], sizes: TokenSizes | None) -> None:
        """Count the documents in the rows that were drawn."""
        assert self.split is not None
        sizes_of_ids = None if sizes is None or view.has_epochs else sizes(dataset_of(view.tokens.store))
        total = np.zeros((1 if sizes_of_ids is None else 2, len(self.split.lengths)), np.int64)  # tokens, and text
        for epochs in drawn:
            found = [tokens_seen(view, epochs.rows)]
            if sizes_of_ids is not None:
                found.append(bytes_seen(view, sizes_of_ids, epochs.rows))
            in_epoch = np.stack(found)
            if view.tokens.numbers is not None:  # a selection numbers documents in another way than its split
                in_selection, in_epoch = in_epoch, np.zeros_like(total)
                np.add.at(in_epoch.T, view.tokens.numbers, in_selection.T)
            total += in_epoch * (epochs.last - epochs.first + 1)
            rows = len(view) if epochs.rows is None else int(np.count_nonzero(epochs.rows))
            counts = _counts(self.split.amounts(*in_epoch).sum(axis=1))
            self.by_epoch.append({"first": epochs.first, "last": epochs.last, "rows": rows, **counts})
        self.amounts = self.split.amounts(*total)

    def described(self) -> JsonObject:
        facts: JsonObject = {"name": self.name, **self.facts}
        if self.split is None:
            return facts | {"dataset": None, "split": None, **dict.fromkeys(COUNTS), "by_epoch": [], "by": {}}
        facts |= {"dataset": self.split.dataset, "split": self.split.name, **_counts(self.amounts.sum(axis=1))}
        return facts | {"by_epoch": self.by_epoch, "by": {name: _listed(found) for name, found in self.by.items()}}


class _Splits:
    """The splits that the sources are views of, each once, and the datasets that they belong to."""

    def __init__(self) -> None:
        self.all, self.datasets = dict[str, _Split](), list[JsonObject]()
        self._known = dict[str, tuple[int, RecordedFacts]]()

    def at(self, store: Store) -> _Split:
        dataset = dataset_of(store)
        if dataset.url not in self._known:
            self._known[dataset.url] = len(self.datasets), recorded_of(dataset)
            self.datasets.append(dataset_facts(dataset))
        if store.url not in self.all:
            self.all[store.url] = _Split(open_split(store), *self._known[dataset.url])
        return self.all[store.url]


def dataset_facts(dataset: Store) -> JsonObject:
    """The facts of a dataset that its manifest has, for the record; and the licence of the configuration, if it is known."""
    manifest = manifest_of(dataset)
    made_of, totals = manifest.get("provenance") or {}, manifest.get("totals") or {}
    above, version = posixpath.split(dataset.root)
    output, directory = posixpath.split(above)
    is_version = directory == VERSIONS
    sources = [
        {
            "name": source["name"],
            **{key: source.get(key) for key in ("from", "revision", "config", "steps")},
            "files": len(source["files"]),
            "file_bytes": sum(file["size"] for file in source["files"]),
        }
        for source in made_of.get("sources") or ()
    ]
    return {
        "name": made_of.get("name") or posixpath.basename(output if is_version else dataset.root),
        "path": dataset.url,
        "version": version if is_version else None,
        "manifest_sha256": manifest_digest(dataset) if manifest else None,
        "manifest_bytes": dataset.size(MANIFEST) if manifest else None,
        "licence": _licence_of(Store(output or "/", dataset.fs), version) if is_version else None,
        "tokenizer": {key: (made_of.get("tokenizer") or {}).get(key) for key in ("name", "digest", "revision")},
        "splits": {name: totals.get(name) for name in EVERY_SPLIT if name in totals},
        "columns": manifest.get("columns") or {},
        "documents": totals.get("documents"),
        "policy": made_of.get("documents") or {},
        "sources": sources,
    }


def _licence_of(output: Store, version: str) -> str | None:
    """The licence in the settings that a version was built with; None if there is no record of one."""
    try:
        origin = read_json(output, f"origins/{version}.json", MAX_ORIGIN_BYTES, "an origin")
        licence = origin["config"]["licence"]
    except (*NO_OBJECT, ValueError, KeyError, TypeError):
        return None
    return licence if isinstance(licence, str) else None


def _record(
    run: JsonObject | None,
    sources: Sequence[_ViewSource],
    splits: _Splits,
    columns: Sequence[str] | None,
    forgotten: Sequence[Store],
) -> JsonObject:
    """The record of the sources, whose documents were counted."""
    groups = [(split, [source for source in sources if source.split is split]) for split in splits.all.values()]
    known = list(dict.fromkeys(name for split, _ in groups for name in split.columns))
    if columns is not None and (unknown := [name for name in columns if name not in (*known, *NAMES, "split")]):
        raise ValueError(f"no dataset has a column {unknown[0]!r}; there are {', '.join(('split', *known, *NAMES))}")
    lists = {output.url: read_forgotten(output) for output in forgotten}
    totals, gone = np.zeros((2, len(COUNTS)), np.int64)
    gone_of, by_split, together = dict[str, Any](), dict[Key, Sums](), dict[str, dict[Key, Sums] | None]()
    asked = known if columns is None else [name for name in dict.fromkeys(columns) if name != "split"]
    for split, its in groups:
        amounts = its[0].amounts if len(its) == 1 else _together(split, [source.amounts for source in its])
        sums = amounts.sum(axis=1)
        totals = _added(totals, sums)
        if lists:
            is_gone = split.forgotten(list(lists.values()))
            gone = _added(gone, amounts[:, is_gone].sum(axis=1))
            gone_of |= {source.name: _counts(source.amounts[:, is_gone].sum(axis=1)) for source in its}
        _add(by_split, (False, split.name), sums)
        for name in asked:
            found = _by_value(split, [amounts, *(source.amounts for source in its)], name, columns is not None)
            before = together.setdefault(name, {})
            if found is None or before is None:
                together[name] = None
            else:
                for key, several in found.items():
                    _add(before, key, several[0])
                if columns is None and len(before) > MOST_VALUES:
                    together[name] = None
            for number, source in enumerate(its, 1):
                source.by[name] = None if found is None else {key: several[number] for key, several in found.items()}
    by: JsonObject = {} if columns is not None and "split" not in columns else {"split": _listed(by_split)}
    by |= {name: _listed(together.get(name, {})) for name in asked}
    # Documents that were seen and are on a list now, in all and by source
    found_again = {
        "lists": [{"output": url, "documents": len(one.digests), "sha256": one.sha256} for url, one in lists.items()],
        **_counts(gone),
        "sources": [{"name": name, **counts} for name, counts in gone_of.items()],
    }
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "run": run,
        **_counts(totals),
        **({"forgotten": found_again} if lists else {}),
        "by": by,
        "sources": [source.described() for source in sources],
        "datasets": splits.datasets,
    }


def _together(split: _Split, several: Sequence[Amounts]) -> Amounts:
    """The amounts of several sources of the same split: a document that two have seen is one."""
    least = min(map(len, several))
    return split.amounts(*np.sum([one[1:least:2] for one in several], axis=0))


def _by_value(split: _Split, amounts: Sequence[Amounts], name: str, is_asked: bool) -> dict[Key, list[Sums]] | None:
    """The sums of each of the amounts by the values of a column; None if there are too many values.

    A split that has no such column has documents without a value.
    """
    numbers, sums = dict[Key, int](), [np.zeros((len(one), 0), np.int64) for one in amounts]
    is_there = name in split.columns or name == "tokens" or (name in NAMES and split.has_records)
    for first in range(0, len(split.lengths), DOCUMENTS_AT_A_TIME):
        stop = min(first + DOCUMENTS_AT_A_TIME, len(split.lengths))
        if is_there:
            encoded = values_of(
                split.tokens, "split" if name == KEPT_SPLIT else name, first, stop, lambda: split.recorded
            ).dictionary_encode("encode")
            if not is_asked and len(encoded.dictionary) > MOST_VALUES:
                return None
            codes = encoded.indices.to_numpy().astype(np.int64)
            keys = [_key(value) for value in encoded.dictionary.to_pylist()]
        else:
            codes, keys = np.zeros(stop - first, np.int64), [_key(None)]
        places = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)[codes]
        if not is_asked and len(numbers) > MOST_VALUES:
            return None
        for k, one in enumerate(amounts):
            sums[k] = np.pad(sums[k], ((0, 0), (0, len(numbers) - sums[k].shape[1])))
            for found, of_documents in zip(sums[k], one[:, first:stop], strict=True):
                np.add.at(found, places, of_documents)
    return {key: [found[:, place] for found in sums] for key, place in numbers.items()}


def _key(value: Any) -> Key:
    """A value as JSON has it, and whether it is a truth value: True equals 1."""
    return isinstance(value, bool), in_json(value)


def _added(one: Sums, other: Sums) -> Sums:
    """The sum of both, in which text that one has not counted is not counted."""
    least = min(len(one), len(other))
    return one[:least] + other[:least]


def _add(into: dict[Key, Sums], key: Key, sums: Sums) -> None:
    into[key] = _added(into[key], sums) if key in into else sums


def _counts(sums: Sums) -> dict[str, int | None]:
    return dict.fromkeys(COUNTS) | dict(zip(COUNTS, sums.tolist(), strict=False))


def _listed(found: Mapping[Key, Sums] | None) -> list[JsonObject] | None:
    """The values of which a document was seen, most tokens first; None if there are too many."""
    if found is None:
        return None
    listed = [{"value": value, **_counts(sums)} for (_, value), sums in found.items() if sums[0]]
    return sorted(listed, key=lambda one: (-one["tokens"], str(one["value"])))
