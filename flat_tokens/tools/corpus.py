"""A dataset of any format, as the tools see it: its splits, and the record of their origin."""

from __future__ import annotations

import bisect
import itertools
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, JsonFacts, JsonObject, UInt32s
from flat_tokens.arrays.opening import open_array, read_metadata
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TokenBatch
from flat_tokens.formats import FLAT_TOKENS, FORMATS, Files, Readable, check_format, open_any, recognised
from flat_tokens.formats.contract import bounded_batches, entry
from flat_tokens.manifest import (
    CACHE,
    EVERY_SPLIT,
    PART,
    POINTER,
    PROVENANCE,
    RECEIPT,
    RUNS,
    TOTALS,
    VERSIONS,
    check,
    latest_of,
    manifest_of,
)
from flat_tokens.reader import ROOTS, config_output, datasets_below, directories_below, no_dataset, resolve, without_links
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, read_json
from flat_tokens.tools.terminal import one_line
from flat_tokens.vocabulary import Vocabulary, load_vocabulary

BESIDE = ".export"
"""The directory within an export that holds its state, and what it was made of. Readers of its format leave it out."""
ORIGIN = f"{BESIDE}/origin.json"
ORIGIN_SHAPE = {"format": str, "options": {}, "version": str, "digest": str, "provenance": PROVENANCE, "totals?": TOTALS}
SOURCE_FACTS = {"name", "from", "revision", "files"}
WINDOW_TOKENS = 1 << 17
"""Tokens processed together: their temporaries stay in the processor's cache."""


class CorpusFile(NamedTuple):
    """A file that documents came from. ``number``: its number through all sources, as in the documents' ``file`` array.
    ``line_ends``: crlf if line feeds of the source's separator may be CR LF in it.
    """

    number: int
    source: int
    name: str
    size: int
    sha256: str
    line_ends: str | None = None


class CorpusSource(NamedTuple):
    """A source as a manifest describes it; ``settings`` decide how its files are read."""

    name: str
    origin: str
    revision: str | None
    settings: JsonFacts
    files: tuple[CorpusFile, ...]


class TokenizerName(NamedTuple):
    """The tokenizer of a dataset: by name, and by the digest of every byte that decides its tokens."""

    name: str
    digest: str | None
    highest_id: int | None
    revision: str | None


class DocumentRecords(NamedTuple):
    """Next to a split, for each sequence: its document's key, its file's number and its row in the file, uint64[seq_count]."""

    key: StoredArray
    file: StoredArray
    row: StoredArray


@dataclass(frozen=True)
class Corpus:
    """A dataset of any format at ``url``. ``kind`` says what it is in words; ``store`` is a flat-tokens dataset's own root."""

    url: str
    format: str
    kind: str
    splits: Mapping[str, Readable]
    store: Store
    manifest: JsonFacts = field(default_factory=dict)
    receipt: JsonFacts = field(default_factory=dict)
    output: Store | None = None
    """The root of the build's output that the dataset belongs to, with the records of runs."""
    made_of: JsonFacts = field(default_factory=dict)
    """For an export: the ``version`` it was made of and that one's ``digest``."""

    def split(self, name: str | None) -> tuple[str, Readable]:
        """The split of that name, or the first, with its name. ValueError if there is no such split."""
        found = next(iter(self.splits)) if name is None else name
        if found not in self.splits:
            raise ValueError(f"{self.url}: there is no split {found!r}; there are {', '.join(self.splits)}")
        return found, self.splits[found]

    def chosen(self, name: str | None) -> dict[str, Readable]:
        """The split of that name, or all of them."""
        return dict(self.splits if name is None else [self.split(name)])

    @property
    def counts(self) -> dict[str, int]:
        """Tokens and sequences of all splits together, for JSON."""
        splits = self.splits.values()
        return {"token_count": sum(one.token_count for one in splits), "seq_count": sum(one.seq_count for one in splits)}

    @property
    def provenance(self) -> JsonFacts:
        found: JsonFacts = self.manifest.get("provenance", {})
        return found

    @property
    def sources(self) -> tuple[CorpusSource, ...]:
        """The sources in the manifest, which may be none. Their files are numbered through."""
        sources, numbers = [], itertools.count()
        for i, described in enumerate(self.provenance.get("sources") or ()):
            facts = ((file["name"], file["size"], file["sha256"], file.get("line_ends")) for file in described["files"])
            files = (CorpusFile(next(numbers), i, *of) for of in facts)
            settings = {key: value for key, value in described.items() if key not in SOURCE_FACTS}
            origin = described.get("from") or ""
            sources.append(CorpusSource(described["name"], origin, described.get("revision"), settings, tuple(files)))
        return tuple(sources)

    @property
    def tokenizer(self) -> TokenizerName | None:
        """The tokenizer that the manifest or receipt names."""
        found = self.provenance.get("tokenizer") or {}
        facts = map(found.get, TokenizerName._fields)
        return TokenizerName(*facts) if found.get("name") is not None else None

    def documents(self, split: str) -> DocumentRecords | None:
        """The documents of a split's sequences. None if there is no record of them."""
        store = self.store / "documents" / split
        if not self.manifest or not store.exists(""):
            return None
        found = DocumentRecords(*(open_array(store / name, "uint64") for name in DocumentRecords._fields))
        lengths = {name: array.length for name, array in zip(DocumentRecords._fields, found, strict=True)}
        if set(lengths.values()) != {self.splits[split].seq_count}:
            if self.made_of:  # one of its files, or it is read in another way
                return None
            raise ValueError(f"{store.url}: has {lengths}, but there are {self.splits[split].seq_count} sequences")
        return found


def open_corpus(
    path_or_url: PathOrUrl,
    format: str | None = None,
    options: JsonFacts | None = None,
    *,
    by_origin: bool = True,
) -> Corpus:
    """Open a dataset, a build's output, one split, a token shard, or files of a neighbour's format, whose *options* are
    fields of its own dataclass. *by_origin*: an export says its format and options, and what it was made of.

    FileNotFoundError if there is nothing; ValueError, naming the fault, if it can't be read.
    """
    if format is not None:
        check_format(format, (FLAT_TOKENS, *FORMATS))
    root = Store.at(path_or_url)
    if root.is_local:
        if not root.exists(""):
            try:
                Files.at(root.root)  # those of a prefix
            except FileNotFoundError as error:
                raise no_dataset(root) from error
        root = without_links(root)  # through the symbolic link `latest` a version would not know its own path
    if format in (None, FLAT_TOKENS):
        versions = root if posixpath.basename(root.root) == VERSIONS else root / VERSIONS
        is_dataset = latest_of(root) or any(map(root.exists, ROOTS))
        if not is_dataset and versions.exists("") and versions.ask("ls", detail=False):
            raise no_dataset(root)  # with the names of the versions
        root = resolve(root)  # once, for the splits and the manifest
    origin, beside = _origin_of(root) if by_origin and format != FLAT_TOKENS else ({}, root)
    if origin and format in (None, origin["format"]):
        format, options = origin["format"], {**origin["options"], **(options or {})}
    path = path_or_url if root == Store.at(path_or_url) else root.url
    if format is None and options:
        format = open_any(path).format
    try:
        opened = open_any(path, format, options_of(format, options) if format and options else None)
    except (OSError, ValueError) as error:
        failed = not isinstance(error, NO_OBJECT) and getattr(error, "errno", None)  # the disk did; nothing says what is there
        if format is None and not failed:
            nearest = next(iter(datasets_below(root)), root)
            if nearest.root != root.root or config_output(root):
                raise no_dataset(root) from error
        raise
    if opened.format == FLAT_TOKENS:
        return _flat_tokens(root, dict(opened.splits))
    splits = {str(name): opened.splits[name] for name in EVERY_SPLIT if name in opened.splits}
    found = Corpus(root.url, opened.format, f"{opened.format} dataset", splits, root)
    if opened.format != origin.get("format"):
        return found
    made_of = {name: origin[name] for name in ("version", "digest")}
    manifest = {name: origin[name] for name in ("provenance", "totals") if origin.get(name)}
    return replace(found, store=beside / BESIDE, manifest=manifest, made_of=made_of)


def _origin_of(root: Store) -> tuple[JsonObject, Store]:
    """The origin record of the export at a path, and the directory that has it: the path or the one above. The record is empty
    if neither has one. ValueError if it is not an origin record.
    """
    if any(map(root.exists, (POINTER, *ROOTS))):
        return {}, root
    for place in (root, Store(posixpath.dirname(root.root) or "/", root.fs)):
        try:
            origin = read_json(place, ORIGIN)
        except NO_OBJECT:
            continue
        try:
            check(origin, ORIGIN_SHAPE, "it")
            options_of(origin["format"], origin["options"])
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{place.path(ORIGIN)}: is not the origin of an export ({error}). Remove it, or export again."
            ) from error
        return origin, place
    return {}, root


def options_of(format: str, options: JsonFacts) -> Any:
    """An instance of a format's own options. ValueError for one that it doesn't have."""
    if format not in FORMATS:
        raise ValueError(f"{format} has no options, but {', '.join(options)} is given")
    kind = FORMATS[format].options
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{format} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


def _flat_tokens(store: Store, splits: dict[Any, Readable]) -> Corpus:
    """The corpus of flat-tokens arrays: a dataset, a split of one, a token shard, or a bare array."""
    if "max_token_id" not in read_metadata(store, "group")["attributes"]:
        output = _output(store, VERSIONS)
        return Corpus(store.url, FLAT_TOKENS, "flat-tokens dataset", splits, store, manifest_of(store), output=output)
    (split,) = splits.values()
    if store.exists(RECEIPT):
        output, receipt = _output(store, CACHE), _read_receipt(store)
        manifest = _manifest_of_shard(output, receipt)
        return Corpus(store.url, FLAT_TOKENS, "token shard", {"shard": split}, store, manifest, receipt, output)
    parent, name = posixpath.split(store.root)
    above = Store(parent or "/", store.fs)
    if name in EVERY_SPLIT and (manifest := manifest_of(above)):
        kind = f"{name} split of a flat-tokens dataset"
        return Corpus(store.url, FLAT_TOKENS, kind, {name: split}, above, manifest, output=_output(above, VERSIONS))
    return Corpus(store.url, FLAT_TOKENS, "flat-tokens array", {name if name in EVERY_SPLIT else "array": split}, store)


def _output(store: Store, name: str) -> Store | None:
    """The build's output that *store* belongs to, if it is in the output's directory *name*."""
    output, directory = posixpath.split(posixpath.dirname(store.root))
    return Store(output or "/", store.fs) if directory == name else None


def _read_receipt(store: Store) -> JsonObject:
    try:
        receipt = read_json(store, RECEIPT)
        check(receipt, {"inputs": {"tokenizer": str}, "objects?": list}, "it")
        for item in receipt.get("objects") or ():
            check(item, list, "an object")
            check(dict(zip(PART, item, strict=False)), PART, "an object")
    except ValueError as error:
        raise ValueError(f"{store.path(RECEIPT)}: is not a token shard's receipt ({error})") from error
    return receipt


def _manifest_of_shard(output: Store | None, receipt: JsonFacts) -> JsonObject:
    """The tokenizer of a token shard, which has only its digest, as a manifest: from a version of its output that has it."""
    if output is None or not output.exists(VERSIONS):
        return {}
    for path in sorted(output.ask("ls", VERSIONS, detail=False)):
        try:
            provenance = manifest_of(output / VERSIONS / posixpath.basename(path.rstrip("/"))).get("provenance", {})
            tokenizer = provenance.get("tokenizer") or {}
            if tokenizer.get("digest") == receipt["inputs"]["tokenizer"]:
                return {"provenance": {"tokenizer": tokenizer}}
        except (OSError, ValueError):
            continue  # a version that is being written, or is damaged
    return {}


def corpora_below(root: Store) -> Iterator[tuple[str, Corpus | str]]:
    """The datasets of any format below a path, nearest first: outputs, versions, and directories with files of other formats.
    Each with its URL, or the URL with the reason why it can't be opened.
    """
    exports: list[str] = []
    for found in directories_below(root):
        if found.store.root.startswith(tuple(exports)):
            continue
        if BESIDE in found.directories:
            exports.append(f"{found.store.root}/")
        if found.is_dataset or BESIDE in found.directories or (found.files and recognised(Files(found.store, found.files))):
            try:
                yield found.store.url, open_corpus(found.store.url)
            except (OSError, ValueError) as error:
                yield found.store.url, one_line(error)


class RunRecord(NamedTuple):
    """A build's record of its inputs' paths. ``scratch``: the directory of fetched files, None if it is the output's own."""

    source_paths: tuple[str | None, ...]
    tokenizer: str | None
    pattern: str | None
    scratch: str | None


def run_of(corpus: Corpus) -> RunRecord:
    """The newest record of a run that made the corpus's version, or an empty one. It is only a hint: files move, so their
    content must be checked against the manifest; and the maker of the dataset chose the paths, so they are opened only with the
    user's consent.
    """
    nothing = RunRecord((), None, None, None)
    if corpus.output is None:
        return nothing
    runs, version = corpus.output / RUNS, posixpath.basename(corpus.store.root)
    try:
        names = [posixpath.basename(path) for path in runs.ask("ls", detail=False)]
        # A token shard is of no one version.
        ours = sorted(name for name in names if name.endswith(".json" if corpus.receipt else f"-{version}.json"))
        if not ours:
            return nothing
        config = read_json(runs, ours[-1])["config"]
        tokenizer = config.get("tokenizer") or {}
        found = [
            *(source.get("path") or source.get("table") for source in config["sources"]),
            tokenizer.get("name"),
            tokenizer.get("pattern"),
        ]
        *paths, name, pattern, scratch = (text if isinstance(text, str) else None for text in [*found, config.get("scratch")])
        return RunRecord(tuple(paths), name, pattern, scratch)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return nothing


def vocabulary_of(
    corpus: Corpus, name_or_path: str | None, pattern: str | None, warn: Callable[[str], None], trusted: bool = False
) -> Vocabulary | None:
    """The vocabulary of *name_or_path*, else of the tokenizer in the manifest, which names no file and no repository of the hub
    unless it is *trusted* to. None if there is neither.

    A vocabulary from the manifest must have the manifest's digest, else ValueError. For a given one, *warn* is called with
    the difference.
    """
    known = corpus.tokenizer
    if name_or_path is not None:
        vocabulary = load_vocabulary(name_or_path, pattern=pattern)
        if known is not None and known.digest and vocabulary.digest and vocabulary.digest != known.digest:
            warn(f"{name_or_path} is not the tokenizer of the dataset: {_digests(vocabulary, known)}")
        return vocabulary
    if known is None:
        return None
    remedy = "Name the tokenizer or its file with --tokenizer."
    if not trusted and (not re.fullmatch(r"[\w-]+", known.name) or kind_of(known.name) == "directory"):
        reason = f"the dataset says that its tokenizer is {known.name!r}, a file or a repository of the hub"
        raise ValueError(f"{reason}. {remedy} If you trust who made the dataset: --trust-records")
    named = [(known.name, pattern)]
    run = run_of(corpus)
    if trusted and run.tokenizer and posixpath.basename(run.tokenizer) == known.name and kind_of(run.tokenizer) is not None:
        named.append((run.tokenizer, run.pattern))  # where the build found it
    for name, of_name in dict.fromkeys(named):
        try:
            vocabulary = load_vocabulary(name, pattern=of_name, revision=known.revision)
        except ValueError as error:
            problem = str(error)
            continue
        if known.digest is None or vocabulary.digest in (None, known.digest):
            return vocabulary
        problem = f"the tokenizer {name!r} found here is not the dataset's own: {_digests(vocabulary, known)}."
    raise ValueError(f"{problem.rstrip('.')}. {remedy}")


def _digests(vocabulary: Vocabulary, known: TokenizerName) -> str:
    return f"its digest is {(vocabulary.digest or '')[:12]}, that of {known.name} in the manifest {(known.digest or '')[:12]}"


def batches_of(split: Readable, start: int = 0, stop: int | None = None) -> Iterator[TokenBatch]:
    """Sequences ``start:stop`` of a split in batches of bounded size, as `Readable.batches` has them."""
    return bounded_batches(split, start, stop) if isinstance(split, FlatTokens) else split.batches(start, stop)


class Window(NamedTuple):
    """Neighbouring tokens of a split: decoded ids uint32[n], the first of which is token ``first`` of the split.

    ``starts``: int64[k], where in the window the sequences ``first_seq`` to ``first_seq + k - 1`` begin. Tokens before the
    first start belong to sequence ``first_seq - 1``; a start at n is of an empty sequence, or of one that begins after.
    """

    ids: UInt32s
    first: int
    starts: Int64s
    first_seq: int


def windows(split: Readable, start: int = 0, stop: int | None = None, *, max_tokens: int = WINDOW_TOKENS) -> Iterator[Window]:
    """Sequences ``start:stop`` of a split in windows of up to *max_tokens*, every start in exactly one of them."""
    first, first_seq = 0, start
    for batch in batches_of(split, start, split.seq_count if stop is None else stop):
        starts = batch.seq_starts[:-1].astype(np.int64)
        for low in range(0, max(batch.token_count, 1), max_tokens):
            high = min(low + max_tokens, batch.token_count)
            # A start at the batch's end is of an empty sequence: no later window of this batch has it.
            begun = np.searchsorted(starts, low)
            until = len(starts) if high == batch.token_count else np.searchsorted(starts, high)
            ids = batch.encoded_tokens[low:high] >> np.uint32(1)
            yield Window(ids, first + low, starts[begun:until] - low, first_seq + int(begun))
        first, first_seq = first + batch.token_count, first_seq + len(starts)


def sequence_of(split: Readable, token: int) -> IntPair:
    """The sequence that holds a token, and the token's place in it, by a few index reads. IndexError if there is none."""
    if not -split.token_count <= token < split.token_count:
        raise IndexError(f"there is no token {token}; there are {split.token_count}")
    token %= split.token_count
    if not isinstance(split, FlatTokens):  # there is no index to look into
        begun = 0
        for window in windows(split, max_tokens=1 << 20):
            before = window.starts[window.starts <= token - window.first]
            begun = window.first + int(before[-1]) if len(before) else begun
            if token < window.first + len(window.ids):
                return window.first_seq - 1 + len(before), token - begun
        raise ValueError(f"its sequences end before token {token}, though it has {split.token_count} tokens")
    i = bisect.bisect_right(range(split.seq_count), token, 1, key=partial(entry, split)) - 1
    return i, token - entry(split, i)
