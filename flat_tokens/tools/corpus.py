"""A dataset of any format, as the tools see it: its splits, and the record of their origin."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.opening import MAX_METADATA_BYTES, open_array, read_metadata
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.formats import FLAT_TOKENS, FORMATS, Files, Readable, open_any
from flat_tokens.formats.contract import bounded_batches
from flat_tokens.manifest import CACHE, MANIFEST, POINTER, RECEIPT, RUNS, SPLITS, VERSIONS, read_manifest
from flat_tokens.reader import FlatTokens, resolve
from flat_tokens.stores.store import Store
from flat_tokens.vocabulary import Vocabulary, load_vocabulary

WINDOW_TOKENS = 1 << 17
"""Tokens processed together: their temporaries stay in the processor's cache."""


class SourceFile(NamedTuple):
    """A file that documents came from. ``number``: its number through all sources, as in the documents' ``file`` array."""

    number: int
    source: int
    name: str
    size: int
    sha256: str


class Source(NamedTuple):
    """A source as a manifest describes it; ``settings`` decide how its files are read."""

    name: str
    origin: str
    revision: str | None
    settings: Mapping[str, Any]
    files: tuple[SourceFile, ...]


class TokenizerName(NamedTuple):
    """The tokenizer of a dataset: by name, and by the digest of every byte that decides its tokens."""

    name: str
    digest: str | None
    highest_id: int | None
    revision: str | None


class Documents(NamedTuple):
    """Beside a split, for each sequence: its document's key, its file's number and its row in the file, uint64[seq_count]."""

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
    manifest: Mapping[str, Any] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)
    output: Store | None = None
    """The root of the build's output that the dataset belongs to, with the records of runs."""

    def split(self, name: str | None) -> Readable:
        """The split of that name, or the first. ValueError if there is no such split."""
        if name is None:
            return next(iter(self.splits.values()))
        if name not in self.splits:
            raise ValueError(f"{self.url}: there is no split {name!r}; there are {', '.join(self.splits)}")
        return self.splits[name]

    def chosen(self, name: str | None) -> dict[str, Readable]:
        """The split of that name, or all of them."""
        return dict(self.splits) if name is None else {name: self.split(name)}

    @property
    def provenance(self) -> Mapping[str, Any]:
        value = self.manifest.get("provenance") or {}
        return value if isinstance(value, dict) else {}

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources in the manifest, which may be none. ValueError if they can't be understood."""
        return sources_of(self.provenance, self.store.path(MANIFEST))

    @property
    def tokenizer(self) -> TokenizerName | None:
        """The tokenizer that the manifest or receipt names."""
        found = self.provenance.get("tokenizer")
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        highest = found.get("highest_id")
        return TokenizerName(
            found["name"],
            found.get("digest") if isinstance(found.get("digest"), str) else None,
            highest if type(highest) is int and highest >= 0 else None,
            found.get("revision") if isinstance(found.get("revision"), str) else None,
        )

    def documents(self, split: str) -> Documents | None:
        """The documents of a split's sequences. None if there is no record of them."""
        store = self.store / "documents" / split
        if self.format != FLAT_TOKENS or not self.manifest or not store.exists(""):
            return None
        found = Documents(*(open_array(store / name, "uint64") for name in Documents._fields))
        lengths = {name: array.length for name, array in zip(Documents._fields, found, strict=True)}
        if set(lengths.values()) != {self.splits[split].seq_count}:
            raise ValueError(f"{store.url}: has {lengths}, but there are {self.splits[split].seq_count} sequences")
        return found


def open_corpus(
    path_or_url: str | os.PathLike[str], format: str | None = None, options: Mapping[str, Any] | None = None
) -> Corpus:
    """Open a dataset, a build's output, one split, a token shard, or files of a neighbour's format, whose *options* are
    fields of its own dataclass.

    FileNotFoundError if there is nothing; ValueError, naming the fault, if it can't be read.
    """
    root = Store.at(path_or_url)
    if root.is_local:
        if not os.path.exists(root.root) and not _is_prefix(root):
            raise FileNotFoundError(f"{root.url}: there is nothing here")
        root = Store.at(os.path.realpath(root.root))  # through the symbolic link `latest` a version would not know its own path
    if format in (None, FLAT_TOKENS):
        _refuse_unpublished(root)
    path = root.root if root.is_local else path_or_url
    opened = open_any(path, format, options_of(format, options) if format and options else None)
    if options and not format:
        opened = open_any(path, opened.format, options_of(opened.format, options))
    if opened.format == FLAT_TOKENS:
        return _flat_tokens(root, dict(opened.splits))
    splits = {str(name): opened.splits[name] for name in SPLITS if name in opened.splits}
    return Corpus(root.url, opened.format, f"{opened.format} dataset", splits, root)


def options_of(format: str, options: Mapping[str, Any]) -> Any:
    """An instance of a format's own options. ValueError for one that it doesn't have."""
    if format not in FORMATS:
        raise ValueError(f"{format} has no options, but {', '.join(options)} is given")
    kind = FORMATS[format].options
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{format} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


def _is_prefix(root: Store) -> bool:
    try:
        return bool(Files.at(root.root).keys)
    except OSError:
        return False


def _refuse_unpublished(root: Store) -> None:
    """ValueError, naming the versions, if a path holds some but no pointer to one of them."""
    versions = root if posixpath.basename(root.root) == VERSIONS else root / VERSIONS
    if root.exists(POINTER) or any(root.exists(key) for key in ("zarr.json", ".zgroup")) or not versions.exists(""):
        return
    names = sorted(posixpath.basename(path.rstrip("/")) for path in versions.ask("ls", detail=False))
    if names:
        raise ValueError(f"{root.url}: has no {POINTER}. Name a version: {', '.join(versions.path(name) for name in names[:5])}")


def _flat_tokens(root: Store, splits: dict[Any, Readable]) -> Corpus:
    store = resolve(root)
    parent, name = posixpath.split(store.root)
    above = Store(parent or "/", store.fs)
    if "max_token_id" not in read_metadata(store, "group")["attributes"]:
        output = root if root != store else _output(above, VERSIONS)
        return Corpus(store.url, FLAT_TOKENS, "flat-tokens dataset", splits, store, manifest_of(store), output=output)
    (split,) = splits.values()
    if store.exists(RECEIPT):
        output = _output(above, CACHE)
        receipt = _read_receipt(store)
        return Corpus(
            store.url, FLAT_TOKENS, "token shard", {"shard": split}, store, _manifest_of_shard(output, receipt), receipt, output
        )
    if name in SPLITS and (manifest := manifest_of(above)):
        grand = Store(posixpath.dirname(above.root) or "/", above.fs)
        kind = f"{name} split of a flat-tokens dataset"
        return Corpus(store.url, FLAT_TOKENS, kind, {name: split}, above, manifest, output=_output(grand, VERSIONS))
    return Corpus(store.url, FLAT_TOKENS, "flat-tokens array", {name if name in SPLITS else "array": split}, store)


def _output(store: Store, name: str) -> Store | None:
    """The directory above *store*, if *store* is the directory *name* of a build's output."""
    parent, own = posixpath.split(store.root)
    return Store(parent or "/", store.fs) if own == name else None


def manifest_of(store: Store) -> dict[str, Any]:
    """The manifest at *store*, empty if another writer wrote none."""
    return read_manifest(store) if store.exists(MANIFEST) else {}


def _read_receipt(store: Store) -> dict[str, Any]:
    try:
        receipt = json.loads(store.read(RECEIPT))
        inputs = receipt["inputs"]
        if not all(isinstance(part, dict) for part in (receipt, inputs)) or not isinstance(inputs["tokenizer"], str):
            raise TypeError("its inputs are not a mapping")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{store.path(RECEIPT)}: is not a token shard's receipt ({error!r})") from error
    return receipt  # type: ignore[no-any-return]


def _manifest_of_shard(output: Store | None, receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a manifest that hold for a token shard too: its tokenizer. The shard has only its digest; the rest comes
    from a version of the same output with that tokenizer.
    """
    if output is None or not output.exists(VERSIONS):
        return {}
    for path in sorted(output.ask("ls", VERSIONS, detail=False)):
        try:
            provenance = manifest_of(output / VERSIONS / posixpath.basename(path.rstrip("/"))).get("provenance") or {}
            tokenizer = provenance.get("tokenizer") or {}
            if tokenizer.get("digest") == receipt["inputs"]["tokenizer"]:
                return {"provenance": {"tokenizer": tokenizer}}
        except (OSError, ValueError, AttributeError):
            continue  # a version that is being written, or is damaged
    return {}


SOURCE_FACTS = {"name", "from", "revision", "files"}


def sources_of(provenance: Mapping[str, Any], where: str) -> tuple[Source, ...]:
    """The sources of a manifest's provenance, their files numbered through. ValueError, naming *where*, if it is malformed."""
    sources, number = [], 0
    try:
        for i, described in enumerate(provenance.get("sources") or ()):
            files = []
            for file in described.get("files") or ():
                files.append(SourceFile(number, i, str(file["name"]), int(file["size"]), str(file["sha256"])))
                number += 1
            settings = {key: value for key, value in described.items() if key not in SOURCE_FACTS}
            name, origin = str(described.get("name", f"source {i}")), str(described.get("from", ""))
            sources.append(Source(name, origin, described.get("revision"), settings, tuple(files)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: its list of sources is not understood here ({error!r})") from error
    return tuple(sources)


class RunRecord(NamedTuple):
    """The record of a run that built a version: the paths of its inputs on the machine of the build."""

    source_paths: tuple[str | None, ...]
    tokenizer: str | None
    pattern: str | None
    files: str | None


def run_of(corpus: Corpus) -> RunRecord:
    """The newest record of a run that made the corpus's version, or an empty one. It is only a hint: files move, so their
    content must be checked against the manifest.
    """
    nothing = RunRecord((), None, None, None)
    if corpus.output is None:
        return nothing
    runs, version = corpus.output / RUNS, posixpath.basename(corpus.store.root)
    try:
        names = [posixpath.basename(path) for path in runs.ask("ls", detail=False)]
        # A token shard is of no one version.
        ours = sorted(name for name in names if name.endswith(".json" if corpus.receipt else f"-{version}.json"))
        if not ours or runs.size(ours[-1]) > MAX_METADATA_BYTES:
            return nothing
        config = json.loads(runs.read(ours[-1]))["config"]
        tokenizer, scratch = config.get("tokenizer") or {}, config.get("scratch")
        return RunRecord(
            tuple(source.get("path") for source in config["sources"]),
            tokenizer.get("name"),
            tokenizer.get("pattern"),
            posixpath.join(scratch or corpus.output.path(CACHE), "files"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return nothing


def vocabulary_of(
    corpus: Corpus, name_or_path: str | None, pattern: str | None, warn: Callable[[str], None]
) -> Vocabulary | None:
    """The vocabulary of *name_or_path*, else of the tokenizer in the manifest. None if there is neither.

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
    for name, of_name in dict.fromkeys([(known.name, pattern), *_recorded(corpus, known)]):
        try:
            vocabulary = load_vocabulary(name, pattern=of_name, revision=known.revision)
        except ValueError as error:
            problem = str(error)
            continue
        if known.digest is None or vocabulary.digest in (None, known.digest):
            return vocabulary
        problem = f"the tokenizer {name!r} found here is not the dataset's own: {_digests(vocabulary, known)}."
    raise ValueError(f"{problem.rstrip('.')}. {remedy}")


def _recorded(corpus: Corpus, known: TokenizerName) -> Sequence[tuple[str, str | None]]:
    """The tokenizer's file at the path in the build's record, if it is still there."""
    run = run_of(corpus)
    if run.tokenizer is None or posixpath.basename(run.tokenizer) != known.name or not os.path.exists(run.tokenizer):
        return []
    return [(run.tokenizer, run.pattern)]


def _digests(vocabulary: Vocabulary, known: TokenizerName) -> str:
    return f"its digest is {(vocabulary.digest or '')[:12]}, that of {known.name} in the manifest {(known.digest or '')[:12]}"


class Window(NamedTuple):
    """Neighbouring tokens of a split: decoded ids uint32[n], the first of which is token ``first`` of the split.

    ``starts``: int64[k], where in the window the sequences ``first_seq`` to ``first_seq + k - 1`` begin. Tokens before the
    first start belong to sequence ``first_seq - 1``; a start at n is of an empty sequence, or of one that begins behind.
    """

    ids: npt.NDArray[np.uint32]
    first: int
    starts: npt.NDArray[np.int64]
    first_seq: int

    def sequence_at(self, i: npt.NDArray[np.int64] | int) -> Any:
        """The sequences that tokens *i* of the window belong to."""
        return self.first_seq - 1 + np.searchsorted(self.starts, i, side="right")


def windows(split: Readable, start: int = 0, stop: int | None = None, *, max_tokens: int = WINDOW_TOKENS) -> Iterator[Window]:
    """Sequences ``start:stop`` of a split in windows of up to *max_tokens*, every start in exactly one of them."""
    read = split.batches if not isinstance(split, FlatTokens) else lambda a, b: bounded_batches(split, a, b)
    first, first_seq = 0, start
    for batch in read(start, split.seq_count if stop is None else stop):
        starts = batch.seq_starts[:-1].astype(np.int64)
        for low in range(0, max(batch.token_count, 1), max_tokens):
            high = min(low + max_tokens, batch.token_count)
            # A start at the batch's end is of an empty sequence: no later window of this batch has it.
            begun = np.searchsorted(starts, low)
            until = len(starts) if high == batch.token_count else np.searchsorted(starts, high)
            ids = batch.encoded_tokens[low:high] >> np.uint32(1)
            yield Window(ids, first + low, starts[begun:until] - low, first_seq + int(begun))
        first, first_seq = first + batch.token_count, first_seq + len(starts)


def sequence_of(split: Readable, token: int) -> tuple[int, int]:
    """The sequence that holds a token of the split, and the token's place in it. Takes a few index reads. IndexError if there
    is no such token.
    """
    if not -split.token_count <= token < split.token_count:
        raise IndexError(f"there is no token {token}; there are {split.token_count}")
    token %= split.token_count
    if not isinstance(split, FlatTokens):  # there is no index to look into
        begun = 0
        for window in windows(split, max_tokens=1 << 20):
            stop = window.first + len(window.ids)
            if token < stop:
                before = window.starts[window.starts <= token - window.first]
                begun = window.first + int(before[-1]) if len(before) else begun
                return window.first_seq - 1 + len(before), token - begun
            begun = window.first + int(window.starts[-1]) if len(window.starts) else begun
        raise ValueError(f"its sequences end before token {token}, though it has {split.token_count} tokens")
    low, high = 0, split.seq_count  # the sequence is one of low:high
    while high - low > 1:
        middle = (low + high) // 2
        if int(split.seq_starts.read(middle, middle + 1)[0]) <= token:
            low = middle
        else:
            high = middle
    return low, token - int(split.seq_starts.read(low, low + 1)[0])
