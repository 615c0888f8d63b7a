"""``flat-tokens verify``: whether a dataset is what was written: its objects, its structure, and tokens against their sources."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.opening import read_metadata
from flat_tokens.checker import MAX_PROBLEMS, Checked, adding_up, bytes_to_check, check_objects, check_published, check_split
from flat_tokens.formats import FLAT_TOKENS, FORMATS, Files, Readable
from flat_tokens.formats.contract import bounded_batches
from flat_tokens.manifest import POINTER, RECEIPT
from flat_tokens.reader import FlatTokens, resolve
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.corpus import Corpus, SourceFile, open_corpus, windows
from flat_tokens.tools.sources import Locator, Place, digest_is, nameless, places_of, read_rows
from flat_tokens.vocabulary import Vocabulary

SUMMARY = "check objects, structure and tokens"
EXAMPLES = """\
examples:
  flat-tokens verify out/web                   sizes, metadata, last entries: seconds
  flat-tokens verify out/web --full            every digest, every token
  flat-tokens verify out/web --sample 3/30     the third of thirty parts: its digests and tokens, and 64 of its documents
                                               tokenized again from the source, where that can be reached
"""


class Sample(NamedTuple):
    """Part *number*, counted from 1, of a dataset in *parts* parts."""

    number: int
    parts: int

    def share(self, length: int) -> tuple[int, int]:
        """The part of *length* items: ``start:stop``. All parts together are all items."""
        return length * (self.number - 1) // self.parts, length * self.number // self.parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_path(parser)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="existence and sizes of all objects, metadata (the default)")
    level.add_argument(
        "--full", action="store_true", help="every object's digest and every sentence of the format, token by token"
    )
    level.add_argument(
        "--sample",
        type=sample,
        metavar="N/M",
        help="quick, and of part N of M the digests, the tokens, and documents tokenized again; 1/M to M/M are everything once",
    )
    parser.add_argument(
        "--documents",
        type=arguments.at_least(0),
        default=64,
        metavar="K",
        help="--sample: tokenize K documents of each split again (default: 64)",
    )
    arguments.add_sources(parser)
    arguments.add_tokenizer(parser)
    arguments.add_format(parser)
    arguments.add_json(parser)


def sample(text: str) -> Sample:
    try:
        number, parts = (int(number) for number in text.split("/"))
    except ValueError:
        number, parts = 0, 0
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 3/30: N from 1 to M")
    return Sample(number, parts)


def run(options: argparse.Namespace) -> int:
    level = "full" if options.full else "quick" if options.sample is None else "sample"
    with terminal.progress("verify") as watch:
        faults = list(itertools.islice(check(options, watch), MAX_PROBLEMS + 1))
    found: dict[str, Any] = {"path": options.path, "level": level}
    retokenized: Retokenized | None = None
    if not faults:
        corpus = arguments.corpus_of(options)
        found |= {
            "path": corpus.url,
            "kind": corpus.kind,
            "token_count": sum(split.token_count for split in corpus.splits.values()),
            "seq_count": sum(split.seq_count for split in corpus.splits.values()),
        }
        if options.sample is not None:
            found["part"] = f"{options.sample.number}/{options.sample.parts}"
            retokenized = retokenize(corpus, options)
            faults = retokenized.faults
    found |= {"ok": not faults, "faults": faults[:MAX_PROBLEMS], "more_faults": len(faults) > MAX_PROBLEMS}
    if retokenized is not None:
        found["documents"] = {
            "same": retokenized.same,
            "different": retokenized.different,
            "not_reachable": dict(retokenized.not_reachable),
        }
    if options.json:
        arguments.print_json(found)
    else:
        print("\n".join(lines(found)))
    return arguments.DIFFERENT if faults else arguments.SAME


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["ok"]:
        yield f"damaged: {found['path']}"
        yield from (f"  {fault}" for fault in found["faults"])
        if found["more_faults"]:
            yield "  and more"
    else:
        size = f"{terminal.plural(found['token_count'], 'token')} in {terminal.plural(found['seq_count'], 'sequence')}"
        level = f"sample {found['part']}" if "part" in found else found["level"]
        yield f"right ({level}): {found['path']}, {found['kind']}, {size}"
    if documents := found.get("documents"):
        sampled = documents["same"] + documents["different"]
        yield f"  {terminal.plural(sampled, 'document')} tokenized again: {documents['same']:,} the same"
        for reason, count in documents["not_reachable"].items():
            yield f"  {terminal.plural(count, 'document')} not reachable: {reason}"


def check(options: argparse.Namespace, watch: Callable[[Checked], object] | None = None) -> Iterator[str]:
    """Every fault of the dataset at the path, as a sentence. FileNotFoundError or ValueError if there is nothing to check.
    *watch* is called with the progress of a full check.
    """
    root = Store.at(options.path)
    if options.format in (None, FLAT_TOKENS):
        try:
            store = resolve(root)
            metadata = read_metadata(store, "group")
        except (FileNotFoundError, NotADirectoryError):
            if root.exists(POINTER):
                yield f"{root.path(POINTER)} names {resolve(root).url}, where there is no dataset"
                return
        else:
            if "max_token_id" not in metadata["attributes"]:
                seen = adding_up(watch, bytes_to_check(store)) if options.full and watch else None
                yield from check_published(root, store, metadata["zarr_format"], "full" if options.full else "quick", 2, seen)
                if options.sample is not None:
                    yield from _check_sample(root, options)
                else:
                    yield from _check_documents(root)
                return
    try:
        corpus = arguments.corpus_of(options)
    except ValueError as error:
        if _is_recognised(options):
            yield str(error)
            return
        raise
    yield from _check_other(corpus, options)


def _is_recognised(options: argparse.Namespace) -> bool:
    """Whether files that cannot be opened have a known format: then they are damaged."""
    if options.format is not None:
        return True
    try:
        files = Files.at(options.path)
        return any(entry.recognise(files) for entry in FORMATS.values()) or "encoded_tokens/" in "".join(files.keys)
    except (OSError, ValueError):
        return False


def _check_documents(root: Store) -> Iterator[str]:
    """Faults of the record of the documents' origin."""
    try:
        corpus = open_corpus(root.url)
        for name in corpus.splits:
            corpus.documents(name)
    except (ValueError, FileNotFoundError) as error:
        yield str(error)


def _check_sample(root: Store, options: argparse.Namespace) -> Iterator[str]:
    corpus = open_corpus(root.url)
    objects = [StoredObject(**item) for item in corpus.manifest.get("objects", ())]
    yield from _check_digests(corpus.store, objects, options.sample)
    for name, split in corpus.splits.items():
        yield from check_sequences(name, split, *options.sample.share(split.seq_count))


def _check_digests(store: Store, objects: list[StoredObject], sample: Sample) -> Iterator[str]:
    start, stop = sample.share(len(objects))
    for stored in sorted(objects)[start:stop]:
        if (now := store.digest(stored.key)) != stored:
            yield f"{stored.key} has sha256 {now.sha256[:12]} instead of {stored.sha256[:12]}"


def _check_other(corpus: Corpus, options: argparse.Namespace) -> Iterator[str]:
    """Faults of a token shard, a split by itself, or another format."""
    for name, split in corpus.splits.items():
        if isinstance(split, FlatTokens) and (expected := _objects(corpus, name)):
            besides = {RECEIPT} if corpus.receipt else set()
            yield from check_objects(split.store, expected, besides, "full" if options.full else "quick", 2)
            if options.sample is not None:
                yield from _check_digests(split.store, expected, options.sample)
        if options.full and isinstance(split, FlatTokens):
            try:
                yield from check_split(split)
            except (ValueError, FileNotFoundError) as error:  # it can't even be read
                yield str(error)
        elif options.full or options.sample is not None:
            share = (0, split.seq_count) if options.full else options.sample.share(split.seq_count)
            yield from check_sequences(name, split, *share)


def _objects(corpus: Corpus, name: str) -> list[StoredObject]:
    """A split's objects in a receipt or manifest, with keys below the split."""
    if corpus.receipt:
        return [StoredObject(*item) for item in corpus.receipt.get("objects", ())]
    whole = (StoredObject(**item) for item in corpus.manifest.get("objects", ()))
    return [stored._replace(key=stored.key.removeprefix(f"{name}/")) for stored in whole if stored.key.startswith(f"{name}/")]


def check_sequences(name: str, split: Readable, start: int, stop: int) -> Iterator[str]:
    """Faults of sequences ``start:stop`` of any format: unreadable data, ids too large, wrong marks of starts."""
    try:
        if not isinstance(split, FlatTokens):
            begun = sum(len(window.starts) for window in windows(split, start, stop))
            if begun != stop - start:
                yield f"{name} has {begun} sequences from {start} to {stop}"
            return
        for batch in bounded_batches(split, start, stop):
            firsts = np.unique(batch.seq_starts[:-1][batch.seq_starts[:-1] < batch.token_count])
            marked = np.flatnonzero(batch.encoded_tokens & np.uint32(1)).astype(np.uint64)
            if not np.array_equal(firsts, marked):
                yield f"{name}, sequences {start} to {stop}: tokens are marked as starts where seq_starts says otherwise"
                return
            if batch.max_token_id > split.max_token_id:
                yield f"{name}: token id {batch.max_token_id} is above max_token_id {split.max_token_id}"
                return
    except (ValueError, OSError) as error:
        yield str(error)


class Retokenized(NamedTuple):
    """Result of tokenizing documents again: how many gave the same tokens, how many others, how many could not be compared,
    by reason; and a sentence for each that differs.
    """

    same: int
    different: int
    not_reachable: Counter[str]
    faults: list[str]


def retokenize(corpus: Corpus, options: argparse.Namespace) -> Retokenized:
    """Tokenize documents of a part again, from their sources, and compare."""
    out = Retokenized(0, 0, Counter(), [])
    vocabulary, missing = None, "there is no record of the tokenizer; name it with --tokenizer"
    try:
        vocabulary = arguments.vocabulary_for(corpus, options)
    except (ValueError, ModuleNotFoundError) as error:
        if options.tokenizer is not None:
            raise
        missing = str(error)
    if vocabulary is not None and vocabulary.encode is None:
        missing = f"{vocabulary.name} does not say how text is split; name its --pattern"
        vocabulary = None
    locator = Locator(corpus, options.source)
    for name, split in corpus.splits.items():
        chosen = choose(options.sample, split.seq_count, options.documents)
        places = places_of(corpus, name, chosen.tolist())
        if places is None:
            out.not_reachable["there is no record of where sequences come from"] += len(chosen)
            continue
        if vocabulary is None:
            out.not_reachable[missing] += len(chosen)
            continue
        out = _compare(corpus, name, dict(zip(chosen.tolist(), places, strict=True)), vocabulary, locator, out)
    return out


def choose(sample: Sample, seq_count: int, documents: int) -> npt.NDArray[np.int64]:
    """Sequences of a part, one from each of equal ranges: int64[up to *documents*]. The same ones each time."""
    start, stop = sample.share(seq_count)
    edges = np.linspace(start, stop, min(documents, stop - start) + 1).astype(np.int64)
    return np.random.default_rng([sample.number, sample.parts]).integers(edges[:-1], edges[1:]) if len(edges) > 1 else edges[:0]


def _compare(
    corpus: Corpus, split: str, places: Mapping[int, Place], vocabulary: Vocabulary, locator: Locator, so_far: Retokenized
) -> Retokenized:
    same, different, not_reachable, faults = so_far
    by_file: dict[SourceFile, list[int]] = {}
    for i, place in places.items():
        if place.file is None:
            not_reachable[nameless(corpus)] += 1
        else:
            by_file.setdefault(place.file, []).append(i)
    for file, sequences in by_file.items():
        found = locator.find(file)
        if found is None:
            not_reachable["their source files are not found; say where with --source"] += len(sequences)
            continue
        try:
            rows = read_rows(found, file, corpus.sources[file.source], [places[i].row for i in sequences])
        except (ValueError, ModuleNotFoundError) as error:
            not_reachable[str(error)] += len(sequences)
            continue
        wrong = []
        for i in sequences:
            row = rows.get(places[i].row)
            assert vocabulary.encode is not None
            if row is None or row.key != places[i].key:
                wrong.append((i, "is another document, by its key"))
            elif not np.array_equal(vocabulary.encode(row.text), corpus.splits[split].sequence(i)):
                wrong.append((i, "gives other tokens"))
            else:
                same += 1
        # A changed file is no proof of a fault.
        if wrong and not digest_is(found, file.sha256):
            not_reachable[f"{file.name} has changed since it was read"] += len(wrong)
            continue
        different += len(wrong)
        faults += [f"{split} sequence {i}: {file.name}, row {places[i].row}, {what}" for i, what in wrong]
    return Retokenized(same, different, not_reachable, faults)
