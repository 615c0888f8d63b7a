"""Texts that a vocabulary is trained on: of sources, of a version, or of what a run has seen. Which documents are among them
follows from their keys alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flat_tokens.annotations import Bools, Int64s, UInt64s
from flat_tokens.batch import TokenBatch
from flat_tokens.forgotten import Forgotten
from flat_tokens.ledger import MAX_LEDGER_BYTES, Ledger
from flat_tokens.reader import FlatTokens
from flat_tokens.rows.mixture import Mixture
from flat_tokens.rows.phases import ORDER
from flat_tokens.rows.views import SplitView, running_sums
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.text.rows import text_buffers
from flat_tokens.token_bytes import read_token_bytes
from flat_tokens.tools.corpus import Corpus
from flat_tokens.vocabulary import Vocabulary
from tasks.assemble.write import split_numbers
from tasks.config import BuildConfig
from tasks.download.cut import fetched_ahead, lent
from tasks.models import Slice, Split
from tasks.output.staging import Workspace
from tasks.output.target import SplitRule
from tasks.parts.input import sample_hashes
from tasks.progress import meter
from tasks.rows import drawn_by
from tasks.text.documents import Tally, read_documents
from tasks.vocabularies.request import VocabularyRequest

DOCUMENTS_AT_A_TIME = 1 << 14
BATCH_TOKENS = 1 << 18
"""Decoding takes many times the memory of the tokens."""


@dataclass
class TextCounts:
    """Counts of the texts that were given out."""

    documents: int = 0
    text_bytes: int = 0

    def add(self, documents: int, text_bytes: int) -> None:
        self.documents += documents
        self.text_bytes += text_bytes


def in_sample(keys: UInt64s, request: VocabularyRequest) -> Bools:
    """Which documents are in the sample, by a hash of key and seed: bool[n]. It is the sample of ``subset --fraction``."""
    if request.fraction == 1:
        return np.ones(len(keys), bool)
    return sample_hashes(keys, request.seed) < np.uint64(int(request.fraction * 2**64))


def check_plain(config: BuildConfig) -> None:
    """ValueError where a source has no plain texts: what a model reads of a conversation is made by a template."""
    for source in config.sources:
        if source.messages_column is not None or source.prompt_column is not None:
            kind = "conversations" if source.messages_column is not None else "prompts with completions"
            raise ValueError(
                f"{source.called} has {kind}, whose text is made when they are tokenized. Build the dataset with any "
                "tokenizer, and train on that: train-tokenizer OUTPUT"
            )


def texts_of_sources(
    config: BuildConfig,
    slices: list[Slice],
    workspace: Workspace,
    forgotten: Forgotten,
    request: VocabularyRequest,
    seen: TextCounts,
) -> Iterator[str]:
    """The texts of training documents of sources, after the steps, without those that are *forgotten*. Other splits are left out,
    by the configuration's own rule.
    """
    rule = SplitRule.of(config)
    wanted = [slice_ for slice_ in slices if slice_.split != "validation"]
    meter.add("read", sum(slice_.text_bytes for slice_ in slices) - sum(slice_.text_bytes for slice_ in wanted))
    with fetched_ahead(wanted, config.sources, workspace):
        for slice_ in wanted:
            source = config.sources[slice_.source]
            with lent(slice_, config.sources, workspace) as here:
                tally, split_by = Tally(forgotten=forgotten), config.split_by_of(source)
                for documents in read_documents(here, source, config.documents, tally, None, split_by):
                    in_train = split_numbers(slice_.split, rule, drawn_by(documents.rows)) == 0
                    keep = in_train & in_sample(documents.keys, request)
                    texts = documents.those(keep).texts
                    offsets = text_buffers(texts)[1]
                    seen.add(len(texts), int(offsets[-1] - offsets[0]))
                    yield from texts.to_pylist()
            meter.add("read", slice_.text_bytes)


def texts_of_version(corpus: Corpus, vocabulary: Vocabulary, request: VocabularyRequest, seen: TextCounts) -> Iterator[str]:
    """The texts of a version's training documents, decoded. Special tokens are none of the text."""
    count = corpus.splits["train"].seq_count
    whole = range(0, count, DOCUMENTS_AT_A_TIME)
    times = (np.ones(min(DOCUMENTS_AT_A_TIME, count - first), np.int64) for first in whole)
    yield from _decoded(corpus, "train", vocabulary, zip(whole, times, strict=True), request, seen)


def facts_of_run(ledger: Ledger, step: int) -> dict[str, Any]:
    """Facts of a run that decide what it has seen before a step, without the places of its datasets."""
    directory, name = posixpath.split(ledger.path)
    content = read_json(Store.at(directory or "."), name, MAX_LEDGER_BYTES, "a ledger")
    edits = [edit for edit in content["edits"] if edit["step"] < step]
    named = {source for edit in edits for source in edit["weights"]}
    sources = [
        {**source, "dataset": {key: value for key, value in (source.get("dataset") or {}).items() if key != "path"}}
        for source in content["sources"]
        if source["name"] in named
    ]
    return {"step": step, "seed": content["seed"], "order": ORDER, "sources": sources, "edits": edits}


def texts_of_run(
    ledger: Ledger,
    step: int,
    corpora: Mapping[str, tuple[Corpus, Split, Vocabulary]],
    request: VocabularyRequest,
    seen: TextCounts,
) -> Iterator[str]:
    """The texts of the documents that a run has seen before a step, decoded, each as often as epochs have seen any of it."""
    mixture = ledger.mixture()
    for name, (corpus, split, vocabulary) in corpora.items():
        yield from _decoded(corpus, split, vocabulary, _epochs_of_run(mixture, name, step), request, seen)


def _epochs_of_run(mixture: Mixture, name: str, step: int) -> Iterator[tuple[int, Int64s]]:
    """The documents of a source's split, some at a time: the number of the first, and of each how many epochs have seen it."""
    view = mixture.views[mixture.names.index(name)]
    assert isinstance(view, SplitView)
    numbers, count = view.tokens.numbers, view.tokens.seq_count
    for first in range(0, count, DOCUMENTS_AT_A_TIME):
        asked = np.arange(first, min(first + DOCUMENTS_AT_A_TIME, count))
        found = mixture.seen(asked, before=step, source=name)
        visits = np.unique(np.stack([found.asked, found.epoch]), axis=1)[0]
        # (document of a selection) -> document of the split: one that is chosen twice is seen twice as often
        chosen = np.sort(visits if numbers is None else numbers[visits])
        for some in np.split(chosen, np.flatnonzero(np.diff(chosen // DOCUMENTS_AT_A_TIME)) + 1) if len(chosen) else ():
            yield int(some[0]), np.bincount(some - some[0])


def _decoded(
    corpus: Corpus,
    split: Split,
    vocabulary: Vocabulary,
    wanted: Iterable[tuple[int, Int64s]],
    request: VocabularyRequest,
    seen: TextCounts,
) -> Iterator[str]:
    """The texts of documents of a split, each as often as it is *wanted*: the first document of some, and the times of each."""
    documents, tokens = corpus.documents(split) if request.fraction < 1 else None, corpus.splits[split]
    assert isinstance(tokens, FlatTokens)
    if documents is None and request.fraction < 1:
        raise ValueError(f"{corpus.url}: has no record of its documents' keys, by which a sample is drawn. Train on all of it")
    try:
        lengths = read_token_bytes(corpus.store, corpus.manifest).lengths.astype(np.int64)
    except NO_OBJECT:
        lengths = vocabulary.lengths
    for first, times in wanted:
        if documents is not None:
            times = times * in_sample(documents.key.read(first, first + len(times)), request)
        done = first
        for batch in tokens.batches(first, first + len(times), max_tokens=BATCH_TOKENS) if times.any() else ():
            mine = times[done - first : done - first + len(batch.seq_starts) - 1]
            meter.add("read", 4 * batch.token_count)
            for text, often in zip(_texts(batch, mine > 0, vocabulary, lengths), mine.tolist(), strict=True):
                seen.add(often, often * len(text))
                for _ in range(often):
                    yield text.decode("utf-8", "replace")
            done += len(mine)


def _texts(batch: TokenBatch, wanted: Bools, vocabulary: Vocabulary, lengths: Int64s) -> Iterator[bytes]:
    """The bytes of each sequence of a batch, special tokens left out; none of a sequence that is not *wanted*, bool[n]."""
    ids, starts = batch.encoded_tokens >> np.uint32(1), batch.seq_starts.astype(np.int64)
    keep = (lengths[np.minimum(ids, len(lengths) - 1)] > 0) & np.repeat(wanted, np.diff(starts))
    data, ends = vocabulary.decode(ids[keep])
    # (token) -> tokens that are kept before it -> their bytes
    places = np.append(0, ends)[running_sums(keep)[starts]].tolist()
    for start, stop in pairwise(places):
        yield data[start:stop]
