"""Vocabularies of one's own: text in, tokenizer.json out, the smaller ones cut from the largest."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.forgotten import read_forgotten
from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.manifest import TOKEN_BYTES, manifest_digest, read_token_bytes
from flat_tokens.record.ledger import Ledger
from flat_tokens.tools.corpus import Corpus, open_corpus, vocabulary_of
from flat_tokens.tools.terminal import plural, size
from flat_tokens.vocabulary import Vocabulary
from flows.pipelines.publish import timed
from flows.pipelines.stages import Runner
from flows.pipelines.text import Text, files_of, pin_sets, pin_sources
from tasks.config import BuildConfig
from tasks.download.cut import fetching_to
from tasks.finalize.provenance import with_kept
from tasks.locations import writable
from tasks.models import Model
from tasks.output.forgotten import check_without_forgotten
from tasks.output.leases import build_lease
from tasks.output.places import check_output, reading_at, scratch_of
from tasks.output.pointer import read_pointer
from tasks.progress import meter
from tasks.vocabularies.request import VocabularyRequest
from tasks.vocabularies.training import (
    Merges,
    TextCounts,
    TrainedVocabulary,
    TrainingFacts,
    check_plain,
    done_before,
    facts_of_run,
    learn,
    place_of,
    read,
    split_pattern,
    texts_of_run,
    texts_of_sources,
    texts_of_version,
    write,
)

TO = "tokenizers/{name}-{size}"
"""Where vocabularies are written."""

Warn = Callable[[str], None]


class MadeVocabulary(Model):
    """A vocabulary that was written."""

    path: str
    vocab_size: int
    merges: int
    sha256: str


class VocabularyResult(Model):
    """Result of a training. ``was_done``: the vocabularies were there."""

    vocabularies: tuple[MadeVocabulary, ...]
    documents: int
    text_bytes: int
    was_done: bool
    seconds: dict[str, float]

    @property
    def headline(self) -> str:
        """Such as ``2 vocabularies, 32,768 and 65,536 ids, of 11,534 documents with 43.6 MB of text``."""
        *others, largest = [f"{one.vocab_size:,}" for one in self.vocabularies]
        sizes = f"{'; '.join(others)} and {largest}" if others else largest
        of = f"{plural(self.documents, 'document')} with {size(self.text_bytes)} of text"
        many = "vocabulary" if len(self.vocabularies) == 1 else "vocabularies"
        return f"{len(self.vocabularies)} {many}, {sizes} ids, of {of}{', there before' if self.was_done else ''}"


def train_on_sources(config: BuildConfig, request: VocabularyRequest, to: str, runner: Runner) -> VocabularyResult:
    """Train on the training documents of a configuration's sources."""
    check_plain(config)
    split_pattern(request.regex)
    seconds: dict[str, float] = {}
    meter.reset()
    root = check_output(config)
    with build_lease(root, scratch_of(config, root)):
        forgotten = read_forgotten(root)
        with timed("download", seconds):
            config, pinned = pin_sources(with_kept(pin_sets(config, root), root, read_pointer(root).version), root)
            text = Text.read(config, pinned, runner, root)
        sources = [
            {
                **source.model_dump(
                    mode="json",
                    exclude={"path", "hub", "table", "version", "catalog", "chat_template", "keep_columns"},
                    exclude_none=True,
                ),
                "from": pin.origin,
                "revision": pin.revision,
                "files": [
                    {"name": f.name, "size": f.size, "sha256": f.sha256, "split": f.split} for f in text.files if f.source == i
                ],
            }
            for i, (source, pin) in enumerate(zip(config.sources, pinned, strict=True))
        ]
        trained_on = {
            "name": config.name,
            "sources": sources,
            "documents": {name: value for name, value in config.documents.recorded().items() if "duplicates" not in name},
            **({"forgotten": {"count": len(forgotten.digests), "sha256": forgotten.sha256}} if len(forgotten.digests) else {}),
            "steps": list(config.documents.opened().described),
            "split": config.split_facts,
            **_sample(request),
        }
        seen = TextCounts()
        with fetching_to(config, reading_at(config, root), files_of(text.pinned)) as workspace:
            texts = texts_of_sources(config, text.slices, workspace, forgotten, request, seen)
            read_bytes = sum(slice_.text_bytes for slice_ in text.slices)
            return _train(texts, seen, read_bytes, trained_on, request, to, seconds)


def train_on_version(
    dataset: str, request: VocabularyRequest, to: str, tokenizer: str | None, trusted: bool, warn: Warn
) -> VocabularyResult:
    """Train on the training documents of a version, decoded. *tokenizer*: by which, if not by the one that its manifest names;
    *trusted*: the manifest may name a file or a repository of the hub.
    """
    split_pattern(request.regex)
    meter.reset()
    corpus, vocabulary = _decodable(dataset, "train", tokenizer, trusted, warn)
    facts = _facts(corpus, "train")
    if corpus.output is not None:
        check_without_forgotten(corpus.output, facts["version"])
    trained_on = {"name": facts["name"] or "dataset", "dataset": facts, **_sample(request)}
    seen = TextCounts()
    texts = texts_of_version(corpus, vocabulary, request, seen)
    return _train(texts, seen, TOKEN_BYTES * corpus.splits["train"].token_count, trained_on, request, to, {})


def train_on_run(
    ledger: Ledger, step: int, request: VocabularyRequest, to: str, tokenizer: str | None, trusted: bool, warn: Warn
) -> VocabularyResult:
    """Train on the documents that a run has seen before a step, decoded, each as often as epochs have seen any of it."""
    split_pattern(request.regex)
    meter.reset()
    mixture = ledger.mixture()
    sources = [name for name, count in zip(ledger.names, mixture.drawn(step).tolist(), strict=True) if count]
    if not sources:
        raise ValueError(f"{ledger.path}: before step {step} the run has seen nothing. Name a later --step")
    corpora: dict[str, tuple[Corpus, str, Vocabulary]] = {}
    for source in sources:
        _, path, split = ledger.documents_of(source)
        corpus, vocabulary = _decodable(path, split, tokenizer, trusted, warn)
        corpora[source] = corpus, split, vocabulary
    facts = {source: _facts(of, split) for source, (of, split, _) in corpora.items()}
    trained_on = {"name": Path(ledger.path).stem, "run": facts_of_run(ledger, step), "datasets": facts, **_sample(request)}
    seen = TextCounts()
    texts = texts_of_run(ledger, step, corpora, request, seen)
    read_bytes = sum(TOKEN_BYTES * of.splits[split].token_count for of, split, _ in corpora.values())
    return _train(texts, seen, read_bytes, trained_on, request, to, {})


def cut_trained(tokenizer: str, sizes: tuple[int, ...], to: str) -> VocabularyResult:
    """Cut smaller vocabularies from a trained one: the first of its merges. No text is read."""
    meter.reset()
    made, merges, its = read(tokenizer)
    request = VocabularyRequest.model_validate({**its.model_dump(), "vocab_sizes": sizes})
    if request.vocab_sizes[-1] > made.vocab_size:
        raise ValueError(
            f"{tokenizer}: has {plural(made.vocab_size, 'id')}, of which {request.vocab_sizes[-1]:,} cannot be cut. Train on text"
        )
    places = _places(to, made.training.trained_on, request)
    written = _write_all(places, merges, made.training, request)
    return _result(written, was_done=False, seconds={})


def _train(
    texts: Iterator[str],
    seen: TextCounts,
    read_bytes: int,
    trained_on: JsonObject,
    request: VocabularyRequest,
    to: str,
    seconds: dict[str, float],
) -> VocabularyResult:
    """Learn the merges of texts, if the vocabularies are not there, and write those of every size."""
    places = _places(to, trained_on, request)
    found = [done_before(place, wanted, trained_on, request) for wanted, place in places.items()]
    if None not in found:
        return _result([one for one in found if one is not None], was_done=True, seconds=seconds)
    with timed("read", seconds):
        meter.begin("read", read_bytes)
        merges = learn(texts, request)
    if len(merges.tokens) < request.learned:
        most = len(merges.tokens) + len(request.special_tokens)
        raise ValueError(
            f"{plural(seen.documents, 'document')} with {seen.text_bytes:,} bytes of text have "
            f"{plural(len(merges.pairs), 'merge')}, enough for "
            f"{plural(most, 'id')}, not for {request.vocab_sizes[-1]:,}. Train on more text, or set --vocab-size to "
            f"{most} at most"
        )
    training = TrainingFacts(
        trained_on, {"documents": seen.documents, "text_bytes": seen.text_bytes}, f"tokenizers {version('tokenizers')}"
    )
    return _result(_write_all(places, merges, training, request), was_done=False, seconds=seconds)


def _places(to: str, trained_on: JsonFacts, request: VocabularyRequest) -> dict[int, str]:
    """The directory of each size. ValueError if two sizes have one."""
    places = {wanted: writable(place_of(to, str(trained_on["name"]), wanted)) for wanted in request.vocab_sizes}
    if len(set(places.values())) < len(places):
        raise ValueError(f"--to {to}: is one directory for {len(places)} vocabularies. Put {{size}} in it")
    return places


def _write_all(
    places: Mapping[int, str], merges: Merges, training: TrainingFacts, request: VocabularyRequest
) -> list[TrainedVocabulary]:
    learned = {wanted: merges.first(wanted - len(request.special_tokens)) for wanted in places}
    return [write(place, learned[wanted], training, request) for wanted, place in places.items()]


def _result(written: Sequence[TrainedVocabulary], *, was_done: bool, seconds: dict[str, float]) -> VocabularyResult:
    meter.begin("done")
    made = [MadeVocabulary.model_validate(one, from_attributes=True) for one in written]
    return VocabularyResult(vocabularies=tuple(made), was_done=was_done, seconds=seconds, **written[0].training.read)


def _decodable(path: str, split: str, tokenizer: str | None, trusted: bool, warn: Warn) -> tuple[Corpus, Vocabulary]:
    """A dataset and the vocabulary that decodes its tokens."""
    corpus = open_corpus(path)
    corpus.split(split)
    if corpus.format != FLAT_TOKENS or not corpus.manifest:
        raise ValueError(f"{corpus.url}: is not a dataset with a manifest, which says what it was made of. Import it first")
    vocabulary = vocabulary_of(corpus, tokenizer, None, warn, trusted)
    if vocabulary is None:
        raise ValueError(f"{corpus.url}: its manifest names no tokenizer. Name the one that made its tokens: --tokenizer")
    with contextlib.suppress(FileNotFoundError):
        if not read_token_bytes(corpus.store, corpus.manifest).is_exact:
            warn(f"{corpus.url}: {vocabulary.name} changes text before it is tokenized: the vocabulary is of what it makes of it")
    return corpus, vocabulary


def _facts(corpus: Corpus, split: str) -> JsonObject:
    """A split of a version, by the digest of its manifest."""
    digest = manifest_digest(corpus.store)
    name = corpus.manifest["provenance"].get("name")
    return {"name": name, "version": posixpath.basename(corpus.store.root), "manifest_sha256": digest, "split": split}


def _sample(request: VocabularyRequest) -> JsonObject:
    return {} if request.fraction == 1 else {"fraction": request.fraction, "seed": request.seed}
