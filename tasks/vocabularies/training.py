"""Vocabularies that are learned from texts: of sources, of a version, or of what a run has seen. Which documents are among the
texts follows from their keys alone.

Byte-pair merges are learned from texts, cut to smaller vocabularies, and written as a tokenizer.json. The training library
counts the pieces that a pattern splits texts into, and joins the most frequent pair of neighbouring tokens again and again; of
pairs that are equally frequent the one with the smaller ids. Counts are sums, so the order of texts and the number of threads
decide nothing. The merges of a smaller vocabulary are the first ones of a larger.

On the disk a vocabulary is a directory with tokenizer.json, and what it was trained on in training.json. training.json is
written first, with the digest of tokenizer.json: without tokenizer.json nothing is there, and with it all is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, Int64s, JsonObject, UInt64s
from flat_tokens.arrays.layouts import to_json
from flat_tokens.batch import TokenBatch
from flat_tokens.extras import extra
from flat_tokens.forgotten import Forgotten
from flat_tokens.manifest import check, check_format, read_token_bytes
from flat_tokens.record.ledger import MAX_LEDGER_BYTES, Ledger
from flat_tokens.rows.mixture import Mixture
from flat_tokens.rows.phases import ORDER
from flat_tokens.rows.split import FlatTokens
from flat_tokens.rows.views import SplitView, running_sums
from flat_tokens.stores.local import directory_below, make_directory
from flat_tokens.stores.reading import OUTPUT_ROOTS
from flat_tokens.stores.store import NO_OBJECT, Store, read_json
from flat_tokens.text.rows import text_buffers
from flat_tokens.tools.corpus import Corpus
from flat_tokens.vocabulary import Vocabulary, byte_level_alphabet
from tasks.config import BuildConfig
from tasks.derive.choice import sample_hashes
from tasks.download.cut import fetched_ahead, local_slice
from tasks.models import Slice, as_name
from tasks.output.leases import Workspace
from tasks.output.target import SplitRule
from tasks.progress import meter
from tasks.rows import drawn_by
from tasks.text.documents import Tally, read_documents
from tasks.vocabularies.request import BYTES, VocabularyRequest

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
    """ValueError if a source has no plain texts: the text of a conversation is made by a template."""
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
            with local_slice(slice_, config.sources, workspace) as here:
                tally, split_by = Tally(forgotten=forgotten), config.split_by_of(source)
                for documents in read_documents(here, source, config.documents, tally, None, split_by):
                    in_train = rule.numbers(drawn_by(documents.rows), slice_.split) == 0
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


def facts_of_run(ledger: Ledger, step: int) -> JsonObject:
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
    corpora: Mapping[str, tuple[Corpus, str, Vocabulary]],
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
    split: str,
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


WHY = "training a vocabulary"


class Merges(NamedTuple):
    """Learned merges. ``tokens``: by id, as tokenizer.json spells them: bytes first. ``pairs``: in the order of learning. Two
    pairs may give one token.
    """

    tokens: list[str]
    pairs: list[tuple[str, str]]

    def first(self, size: int) -> Merges:
        """The merges of a vocabulary of *size* tokens: those that a training which stops there learns."""
        if size == len(self.tokens):
            return self
        tokens = self.tokens[:size]
        last = tokens[-1]
        # Training stops as soon as the last token is there.
        stop = next(i for i, (a, b) in enumerate(self.pairs, 1) if a + b == last) if size > BYTES else 0
        return Merges(tokens, self.pairs[:stop])


def split_pattern(pattern: str) -> Any:
    """The pattern as the training library has it. ValueError if it is not a pattern."""
    tokenizers = extra("tokenizers", WHY)
    try:
        return tokenizers.Regex(pattern)
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"pattern {pattern!r}: {error}. Name one of docs/vocabularies.md, or spell another") from error


def learn(texts: Iterable[str], request: VocabularyRequest) -> Merges:
    """Learn the merges of the request's largest vocabulary from texts. There are fewer if the texts have no more."""
    tokenizers = extra("tokenizers", WHY)
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from tokenizers.trainers import BpeTrainer

    tokenizer = tokenizers.Tokenizer(BPE())
    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(split_pattern(request.regex), "isolated"), bytes_of])
    trainer = BpeTrainer(
        vocab_size=request.learned, initial_alphabet=sorted(byte_level_alphabet()), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return merges_of(json.loads(tokenizer.to_str()))


def merges_of(definition: JsonObject) -> Merges:
    """The merges of a tokenizer.json that was made here, its special tokens left out."""
    model = definition["model"]
    return Merges(sorted(model["vocab"], key=model["vocab"].__getitem__), [(a, b) for a, b in model["merges"]])


def definition_of(merges: Merges, pattern: str, special_tokens: Sequence[str]) -> bytes:
    """A tokenizer.json of these merges. Special tokens have the ids after the last one. ValueError if a special token is
    spelled as a learned one.
    """
    spelled = {token: "".join(byte_level_alphabet()[byte] for byte in token.encode()) for token in special_tokens}
    known = set(merges.tokens)
    if clash := [token for token, spelling in spelled.items() if spelling in known or token in known]:
        raise ValueError(f"special token {clash[0]!r}: the text has it so often that it was learned as text. Choose another")
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **added} for i, token in enumerate(special_tokens, len(merges.tokens))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_of]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(merges.tokens)},
            "merges": [list(pair) for pair in merges.pairs],
        },
    }
    return to_json(definition, 1)


TOKENIZER, TRAINING = "tokenizer.json", "training.json"
HALF_WRITTEN = re.compile(r"\.(tokenizer|training)\.json\.\w+\.part")
FORMAT, FORMAT_VERSION = "flat-tokens-vocabulary", 1
MADE = {"vocab_size": int, "merges": int, "special_tokens": [str], "pattern": str, "sha256": str}
SHAPE: JsonObject = {"trained_on": {}, "read": {"documents": int, "text_bytes": int}, "by": str, "tokenizer": MADE}


class TrainingFacts(NamedTuple):
    """The facts of a training: ``trained_on`` decides the merges; ``read``: documents and bytes of text; ``by``: the library."""

    trained_on: JsonObject
    read: dict[str, int]
    by: str


class TrainedVocabulary(NamedTuple):
    """A vocabulary that was written: its directory, the digest of its tokenizer.json, its ids and merges."""

    path: str
    sha256: str
    vocab_size: int
    merges: int
    training: TrainingFacts


def write(directory: str, merges: Merges, training: TrainingFacts, request: VocabularyRequest) -> TrainedVocabulary:
    """Write a vocabulary, training.json before tokenizer.json. ValueError if another one is there. No other process writes to a
    local directory meanwhile, and half-written files of killed processes are removed from it, unless roots limit what may be
    written: then only the store may write there.
    """
    data = definition_of(merges, request.regex, request.special_tokens)
    made = TrainedVocabulary(
        directory,
        hashlib.sha256(data).hexdigest(),
        len(merges.tokens) + len(request.special_tokens),
        len(merges.pairs),
        training,
    )
    store = Store.at(directory)
    with contextlib.ExitStack() as held:
        if store.is_local and not os.environ.get(OUTPUT_ROOTS):
            make_directory(Path(store.root))
            above, name = os.path.split(store.root)
            with contextlib.suppress(OSError):  # a link, or a file system without locks
                descriptor = held.enter_context(directory_below(above, name))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                for left in filter(HALF_WRITTEN.fullmatch, os.listdir(descriptor)):
                    os.unlink(left, dir_fd=descriptor)
        if store.exists(TOKENIZER) and hashlib.sha256(store.read(TOKENIZER)).hexdigest() != made.sha256:
            raise ValueError(f"{store.path(TOKENIZER)}: is another tokenizer. Name another directory: --to")
        described = {
            "vocab_size": made.vocab_size,
            "merges": made.merges,
            "special_tokens": list(request.special_tokens),
            "pattern": request.regex,
            "sha256": made.sha256,
        }
        facts = {"format": FORMAT, "format_version": FORMAT_VERSION, **training._asdict()}
        store.put(TRAINING, to_json({**facts, "tokenizer": described}))
        store.put(TOKENIZER, data)
    return made


def read(directory: str) -> tuple[TrainedVocabulary, Merges, VocabularyRequest]:
    """A vocabulary that was trained here, its merges, and the request for it. ValueError if it is not there, or if
    tokenizer.json is not the one that training.json names.
    """
    store = Store.at(directory.removesuffix(f"/{TOKENIZER}"))
    try:
        record, data = read_json(store, TRAINING), store.read(TOKENIZER)
    except NO_OBJECT as error:
        raise ValueError(
            f"{directory}: is not a vocabulary of train-tokenizer, which has {TOKENIZER} and {TRAINING}. Only its merges are "
            "known to be in the order of learning"
        ) from error
    try:
        check_format(record, FORMAT, FORMAT_VERSION)
        check(record, SHAPE, "it")
        if (made := record["tokenizer"])["sha256"] != hashlib.sha256(data).hexdigest():
            raise ValueError(f"{TOKENIZER} has another digest")
        training = TrainingFacts(*(record[name] for name in TrainingFacts._fields))
        request = VocabularyRequest(
            vocab_sizes=(made["vocab_size"],), pattern=made["pattern"], special_tokens=tuple(made["special_tokens"])
        )
    except ValueError as error:
        raise ValueError(
            f"{store.path(TRAINING)}: does not describe the vocabulary next to it ({error}). Train it again"
        ) from error
    merges = merges_of(json.loads(data))
    return TrainedVocabulary(directory, made["sha256"], made["vocab_size"], made["merges"], training), merges, request


def done_before(directory: str, size: int, trained_on: JsonObject, request: VocabularyRequest) -> TrainedVocabulary | None:
    """The vocabulary of *size* ids at a place, if it is there. ValueError if one of other text or settings is."""
    store = Store.at(directory)
    if not store.exists(TOKENIZER):
        return None
    made, _, its = read(directory)
    asked = (size, request.regex, request.special_tokens, json.loads(to_json(trained_on)))
    if (made.vocab_size, its.regex, its.special_tokens, made.training.trained_on) != asked:
        raise ValueError(
            f"{store.path(TOKENIZER)}: was trained on other text, or with other settings. Name another directory: --to"
        )
    return made


def place_of(to: str, name: str, size: int) -> str:
    """The directory of a vocabulary. ``{name}`` and ``{size}`` are replaced in *to*."""
    return to.replace("{name}", as_name(name, "tokenizer")).replace("{size}", str(size))
