"""The documents that sequences were made of: finding their source files again, reading single rows of them, and tokenizing
some again, to compare.

A build records a file's name below its source, its size and its digest. The user says where it may be now, for whoever made a
dataset must not choose what is read here; the document's key says whether a row is the document.
"""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self
from urllib.parse import quote

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, JsonFacts, JsonObject, UInt32s
from flat_tokens.arrays.opening import open_array
from flat_tokens.columns import columns_of
from flat_tokens.extras import pa
from flat_tokens.manifest import CACHE
from flat_tokens.steps import HARMLESS, READ_BY_BUILDS, ReadySteps, open_steps
from flat_tokens.steps.patterns import program_size
from flat_tokens.stores.local import kind_of, pattern_base, real_path
from flat_tokens.stores.reading import lent, resolved_path
from flat_tokens.stores.store import REMOTE, Store
from flat_tokens.text.formats import FORMATS, HEAD_BYTES, FileFormat, compression_of, detect_format, holding, unpacked
from flat_tokens.text.rows import TextFile, as_unicode, ids_as_text, keys_of, prompts_and_completions, to_large
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, CorpusFile, CorpusSource, run_of
from flat_tokens.vocabulary import Vocabulary

UNRECORDED = "there is no record of where sequences come from"


class SourceRow(NamedTuple):
    """A row of a source file: its text, and the key that a build gives to it."""

    text: str
    key: int


class Place(NamedTuple):
    """The origin of a sequence: the key of its document, its file (None if the manifest names none) and its row, from 0."""

    key: int
    file: CorpusFile | None
    row: int

    def described(self, sources: Sequence[CorpusSource]) -> JsonObject:
        """The place for JSON, the key in hexadecimal: JSON's numbers end at 2**53."""
        source, name = (sources[self.file.source].name, self.file.name) if self.file else (None, None)
        return {"key": f"{self.key:016x}", "source": source, "file": name, "row": self.row}


def places_of(corpus: Corpus, split: str, sequences: Iterable[int]) -> list[Place] | None:
    """The origins of sequences of a split; None if they are not recorded."""
    indices = np.array(list(sequences), np.int64)
    if corpus.receipt:  # a token shard knows its file by the digest alone, and rows count from where its part begins
        key, row = (open_array(corpus.store / "documents" / name, "uint64").take(indices).tolist() for name in ("key", "row"))
        return [Place(a, None, b) for a, b in zip(key, row, strict=True)]
    documents = corpus.documents(split)
    if documents is None:
        return None
    files = [file for source in corpus.sources for file in source.files]
    facts = zip(*(array.take(indices).tolist() for array in documents), strict=True)
    return [Place(key, files[number] if number < len(files) else None, row) for key, number, row in facts]


def kept_of(corpus: Corpus, split: str, sequences: Sequence[int]) -> pa.RecordBatch | None:
    """The kept columns of sequences; None if the dataset keeps none."""
    kept = columns_of(corpus.store, corpus.manifest, split) if corpus.manifest.get("columns") and not corpus.receipt else None
    if kept is None:
        return None
    return kept.take(np.array(sequences, np.int64), list(kept.kinds))


def document_of(corpus: Corpus, split: str, sequence: int) -> JsonObject | None:
    """The origin of a sequence of a split, for JSON; None if it is not recorded."""
    places = places_of(corpus, split, [sequence])
    return places[0].described(corpus.sources) if places else None


class Locator:
    """Finds source files: below *given*, directories, URLs or files that the user named, and among those that a build left in its
    output. Only if they are *trusted*, the dataset's own records may say where else.
    """

    def __init__(self, corpus: Corpus, given: Sequence[str] = (), trusted: bool = False) -> None:
        self._sources, self._given, self._run, self._output = corpus.sources, given, run_of(corpus), corpus.output
        self._found: dict[int, str | None] = {}
        self.trusted = trusted

    def find(self, file: CorpusFile) -> str | None:
        """The path or URL of a file with the size that the manifest states; None if none is found."""
        if file.number not in self._found:
            places = (place_below(*candidate) for candidate in self._candidates(file))
            self._found[file.number] = next((place for place in places if place and _is_there(place, file)), None)
        return self._found[file.number]

    def _candidates(self, file: CorpusFile) -> Iterator[tuple[str, str]]:
        """Places where the file may be: directories or URLs, and names below them."""
        fetched = (file.sha256, f"{file.sha256}.raw")
        for place in self._given:
            yield from ((place, file.name), (place, posixpath.basename(file.name)))
            if posixpath.basename(place) == posixpath.basename(file.name):
                yield place, ""
        paths = self._run.source_paths if self.trusted else ()
        if file.source < len(paths) and (path := paths[file.source]):
            yield _directory_of(path), file.name
        if self._output is not None:
            yield from ((self._output.url, f"{CACHE}/files/{name}") for name in fetched)
        if not self.trusted:
            return
        if self._run.scratch is not None:
            yield from ((self._run.scratch, f"files/{name}") for name in fetched)
        source = self._sources[file.source]
        if source.origin.startswith("hf://datasets/") and source.revision:
            repository = source.origin.removeprefix("hf://datasets/").partition(" ")[0]
            yield f"hf://datasets/{repository}@{source.revision}", file.name
        elif "://" in source.origin:
            yield _directory_of(source.origin.partition(" (")[0]), file.name


def place_below(base: str, name: str) -> str | None:
    """The path, without links, or the URL of a file that a dataset names, below a place; the place itself for an empty name.
    None if the name leads out of the place, to something other than a regular file, or to a store that is not in `REMOTE`.
    """
    if "::" in base + name or name.startswith("/") or ".." in name.split("/"):
        return None
    scheme, is_url, rest = base.rpartition("://")
    if is_url and scheme not in ("file", "local"):
        key = quote(name) if scheme in ("http", "https") else name
        return "/".join(filter(None, (base.rstrip("/"), key))) if scheme in REMOTE else None
    try:
        root = resolved_path(os.path.expanduser(rest))
        place = real_path(os.path.join(root, name))
    except ValueError:  # what no file can be called
        return None
    return place if os.path.commonpath([root, place]) == root and kind_of(place) == "file" else None


def _directory_of(path: str) -> str:
    """The directory that a source's file names are relative to: of a glob or a file, the one that holds it."""
    path = os.path.expanduser(path.removeprefix("file://").removeprefix("local://"))
    if "://" not in path:
        return path if kind_of(path) == "directory" else pattern_base(path)[0]
    before = re.split(r"[*\[]" if path.startswith("http") else r"[*?\[]", path, maxsplit=1)[0]
    return path if before == path and not re.search(r"//.+/[^/]+\.[^/]+$", path) else before.rpartition("/")[0]


def _is_there(place: str, file: CorpusFile) -> bool:
    try:
        store = Store.at(posixpath.dirname(place) or ".")
        key = posixpath.basename(place)
        # Of a packed file, the manifest has the size of what is in it.
        return store.size(key) == file.size or compression_of(store.read_range(key, 0, HEAD_BYTES)) is not None
    except Exception:  # noqa: BLE001  # whatever a store's driver raises where nothing is to be had: it is not reachable
        return False


class TextSources(NamedTuple):
    """A dataset, and what the texts of its documents are had from: its source files, and its vocabulary. ``problem``: why there
    is none.
    """

    corpus: Corpus
    locator: Locator
    vocabulary: Vocabulary | None
    problem: str | None

    @classmethod
    def of(cls, corpus: Corpus, options: Namespace) -> Self:
        """As a command's options have them."""
        return cls(corpus, Locator(corpus, options.source, options.trust_records), *cli.vocabulary_if_any(corpus, options))

    def decoded(self, ids: UInt32s) -> str | None:
        """The text of ids; None without a vocabulary."""
        return None if self.vocabulary is None else self.vocabulary.decode(ids)[0].decode("utf-8", "replace")


class FileTexts(NamedTuple):
    """The texts of documents from one file: of *sequences*, in the file *found* at a path. ``texts`` has those whose row has the
    document's key. ``problem``: why none can be read.
    """

    file: CorpusFile | None
    sequences: list[int]
    found: str | None
    texts: Mapping[int, str]
    problem: str | None


def texts_of(sources: TextSources, places: Mapping[int, Place]) -> Iterator[FileTexts]:
    """The texts of sequences from their source files. Each file is read once; sequences without a named file come first."""
    by_file: dict[CorpusFile | None, list[int]] = {}
    for i in sorted(places, key=lambda i: places[i].file is not None):
        by_file.setdefault(places[i].file, []).append(i)
    corpus, locator, *_ = sources
    for file, sequences in by_file.items():
        found, problem, rows = None, None, dict[int, SourceRow]()
        if file is None:
            problem = _nameless(corpus)
        elif (found := locator.find(file)) is None:
            problem = f"{file.name} is not found; say where it is with --source"
            problem += "" if locator.trusted else ", or trust the dataset's own records: --trust-records"
        else:
            try:
                rows = read_rows(found, file, corpus.sources[file.source], [places[i].row for i in sequences])
            except (ValueError, ModuleNotFoundError) as error:
                problem = str(error)
        read = ((i, rows.get(places[i].row)) for i in sequences)
        texts = {i: row.text for i, row in read if row and row.key == places[i].key}
        yield FileTexts(file, sequences, found, texts, problem)


def _nameless(corpus: Corpus) -> str:
    """Why a place has no file."""
    if not corpus.receipt:
        return "the manifest names no file with this number"
    inputs = corpus.receipt["inputs"]
    digest = next(iter(inputs.get("file") or ["unknown"]))
    part = f"{inputs.get('range')} of the file with sha256 {digest[:12]}"
    return f"a token shard's rows count from the beginning of its part, {part}"


def read_rows(place: str, file: CorpusFile, source: CorpusSource, rows: Iterable[int]) -> dict[int, SourceRow]:
    """Rows of a source file, counted from 0, read by the readers of builds. Rows that are missing or not text are left out.

    ValueError if the file is not of its format; ModuleNotFoundError if a package is needed that is not installed.
    """
    wanted, kind = np.unique(np.fromiter(rows, np.int64)), "a source file"
    if not len(wanted):
        return {}
    with ExitStack() as stack:
        try:
            text = _unpacked(TextFile.of(place, file.name, 0, source.settings, crlf=file.line_ends is not None), stack)
            with text.open() as opened:
                kind = detect_format(opened.read(HEAD_BYTES), file.name, source.settings.get("format", "auto"))
            return dict(_rows(kind, text, wanted))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # of whatever library reads the format
            raise ValueError(f"{place}: cannot be read as {kind}: {error}") from error


def _unpacked(file: TextFile, stack: ExitStack) -> TextFile:
    """The unpacked file: the file itself, or a temporary one that goes with *stack*."""
    with file.open() as stored:
        ending = compression_of(stored.read(HEAD_BYTES), file.name)
        if ending is None:
            return file._replace(size=stored.seek(0, os.SEEK_END))
        stored.seek(0)
        temporary = stack.enter_context(tempfile.NamedTemporaryFile())  # noqa: SIM115  the stack closes it
        for block in unpacked(stored, ending, file.name, file.max_expansion):
            temporary.write(block)
        temporary.flush()
        stack.enter_context(lent(temporary.name))
        return file._replace(path=temporary.name, size=temporary.tell())


def _rows(kind: FileFormat, file: TextFile, wanted: Int64s) -> Iterator[tuple[int, SourceRow]]:
    """The *wanted* rows that are documents. Characters that builds replace are replaced here, too."""
    for part, first in holding(kind, file, wanted.tolist()):
        for batch in FORMATS[kind].read(file, part):
            chosen = np.isin(batch.rows + first, wanted)
            for values in (batch.texts, batch.ids):
                if values is not None:
                    chosen &= ~np.asarray(values.is_null())
            if chosen.any():
                texts, _ = as_unicode(to_large(batch.texts).filter(chosen))
                keys = keys_of(texts, None if batch.ids is None else ids_as_text(batch.ids).filter(chosen))
                found = zip(batch.rows[chosen] + first, texts.to_pylist(), keys, strict=True)
                yield from ((int(row), SourceRow(text, int(key))) for row, text, key in found)
            if first + batch.end > wanted[-1]:
                return


def digest_is(place: str, sha256: str) -> bool:
    """Whether a file has the content with this digest; a build's own copies are named after it."""
    name = posixpath.basename(place)
    return name.partition(".")[0] == sha256 or Store.at(posixpath.dirname(place) or ".").digest(name, "sha256").digest == sha256


MOST_WORK = 1 << 32
"""Instructions of the patterns that a stranger's dataset names: some 20 seconds."""
MOST_STEPS, MOST_PATTERN_BYTES = 100, 10_000
"""Steps of a source that a stranger's dataset names, and bytes of each pattern."""
COMPILING = 512
"""A pattern is compiled in about the time in which it is matched with this many bytes."""


class SampledPart(NamedTuple):
    """Part *number*, counted from 1, of a dataset in *parts* parts."""

    number: int
    parts: int

    def share(self, length: int) -> IntPair:
        """The part of *length* items: ``start:stop``. All parts together are all items."""
        return length * (self.number - 1) // self.parts, length * self.number // self.parts


def retokenize(sources: TextSources, sample: SampledPart, documents: int) -> tuple[int, Counter[str], list[str]]:
    """Tokenize *documents* documents of each split of a part again, from their sources, and compare. How many gave the same
    tokens; how many could not be compared, by reason; and a sentence for each that gave others.
    """
    corpus, locator, vocabulary, problem = sources
    encode = None if vocabulary is None else vocabulary.encode
    if vocabulary is not None and encode is None:
        problem = f"{vocabulary.name} does not say how text is split; name its --pattern"
    same, spent, not_reachable, faults = 0, list[int](), Counter[str](), list[str]()
    for name, split in corpus.splits.items():
        chosen = choose(sample, split.seq_count, documents).tolist()
        found = places_of(corpus, name, chosen)
        if found is None:
            not_reachable[UNRECORDED] += len(chosen)
            continue
        if encode is None:
            not_reachable[problem or "there is no record of the tokenizer; name it with --tokenizer"] += len(chosen)
            continue
        places = dict(zip(chosen, found, strict=True))
        for file, sequences, path, texts, unread in texts_of(sources, places):
            if file is None or path is None or unread is not None:
                # Files that are not found are one reason, whatever their names.
                reason = "their source files are not found; say where with --source" if file and not path else str(unread)
                not_reachable[reason] += len(sequences)
                continue
            settings = corpus.sources[file.source].settings
            if settings.get("messages_column"):
                not_reachable["conversations are tokenized by builds alone"] += len(sequences)
                continue
            steps = _steps_of(settings, locator.trusted, texts.values(), spent)
            if isinstance(steps, str):
                not_reachable[steps] += len(sequences)
                continue
            wrong = {i: "is another document, by its key" for i in sequences if i not in texts}
            texts, left_out = _after_steps(steps, texts, places, kept_of(corpus, name, list(texts)))
            wrong |= left_out
            joined = settings.get("completion_column") is not None
            arrays = ((i, pa.array([text], pa.large_string())) for i, text in texts.items())
            parts = ((i, (prompts_and_completions(text) if joined else text).to_pylist()) for i, text in arrays)
            others = (i for i, of in parts if not np.array_equal(np.concatenate([*map(encode, of)]), split.sequence(i)))
            wrong |= dict.fromkeys(others, "gives other tokens")
            same += len(sequences) - len(wrong)
            if wrong and not digest_is(path, file.sha256):  # a changed file is not a proof of a fault
                not_reachable[f"{file.name} has changed since it was read"] += len(wrong)
            else:
                at = ((i, f"{name} sequence {i}: {file.name}, row {places[i].row}") for i in sequences if i in wrong)
                faults += [f"{where}, {wrong[i]}" for i, where in at]
    return same, not_reachable, faults


def _steps_of(settings: JsonFacts, trusted: bool, texts: Collection[str], spent: list[int]) -> ReadySteps | str:
    """The steps that *texts* of a source took; or why they cannot be taken again. *spent*: the instructions of each file before,
    to which those of this one are added.
    """
    described = settings.get("steps") or ()
    try:
        foreign = [step["use"] for step in described if step["use"] not in HARMLESS]
        if len(described) > MOST_STEPS and not trusted:
            return f"the manifest has {terminal.plural(len(described), 'step')}, which take long: --trust-records takes them"
        if foreign and not trusted:
            return f"the step {foreign[0]!r} in the manifest runs what is installed here, if you trust it: --trust-records"
        if reading := [step["use"] for step in described if step["use"] in READ_BY_BUILDS]:
            return f"the step {reading[0]!r} needs its evaluation sets, which builds alone read"
        if not trusted:
            options = [step["options"] for step in described if step["use"] == "pattern"]
            patterns = [str(one.get("drop") if one.get("keep") is None else one["keep"]) for one in options]
            if (longest := max((len(one.encode()) for one in patterns), default=0)) > MOST_PATTERN_BYTES:
                return f"a pattern in the manifest has {terminal.plural(longest, 'byte')}: --trust-records takes it"
            spent.append(sum(map(program_size, patterns)) * (COMPILING + sum(len(text.encode()) for text in texts)))
            if sum(spent) > MOST_WORK:
                return "a pattern in the manifest would take long: --trust-records waits for it"
        return open_steps(described)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its steps cannot be taken again: {error}"


def _after_steps(
    steps: ReadySteps, texts: Mapping[int, str], places: Mapping[int, Place], kept: pa.RecordBatch | None
) -> tuple[dict[int, str], dict[int, str]]:
    """Texts of sequences after the steps, which see *kept* columns; and a reason for each text that the steps leave out or fail
    on.
    """
    if not steps.described or not texts:
        return dict(texts), {}
    numbers = list(texts)
    keys = np.array([places[i].key for i in numbers], np.uint64)
    found = steps(pa.array([texts[i] for i in numbers], pa.large_string()), keys, kept)
    stayed = [i for i, stays in zip(numbers, found.keep, strict=True) if stays]
    gone = {*numbers} - {*stayed}
    wrong = dict.fromkeys(gone, f"does not come through its steps ({', '.join(found.skipped) or 'failed'})")
    return dict(zip(stayed, found.texts.to_pylist(), strict=True)), wrong


def choose(sample: SampledPart, seq_count: int, documents: int) -> Int64s:
    """Sequences of a part, one from each of equal ranges: int64[up to *documents*]. The same ones each time."""
    start, stop = sample.share(seq_count)
    edges = np.linspace(start, stop, min(documents, stop - start) + 1).astype(np.int64)
    return np.random.default_rng([sample.number, sample.parts]).integers(edges[:-1], edges[1:]) if len(edges) > 1 else edges[:0]
