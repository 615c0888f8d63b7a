"""``flat-tokens verify``: whether a dataset is what was written: its objects, its structure, and tokens against their sources."""

from __future__ import annotations

import itertools
import posixpath
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from typing import Any

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.arrays.opening import read_metadata
from flat_tokens.checker import (
    MAX_PROBLEMS,
    Watch,
    adding_up,
    bytes_to_check,
    check_objects,
    check_published,
    check_signed,
    check_split,
)
from flat_tokens.forgotten import read_forgotten
from flat_tokens.formats import FLAT_TOKENS, FORMATS, Files, Readable
from flat_tokens.manifest import BYTES_RECORD, MANIFEST, POINTER, RECEIPT, latest_of
from flat_tokens.reader import resolve
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores import signing
from flat_tokens.stores.store import NO_OBJECT, Store, StoredObject, read_json, stored_object
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, open_corpus, windows
from flat_tokens.tools.remains import check_forgotten
from flat_tokens.tools.sources import SampledPart, TextSources, retokenize

SUMMARY = "check objects, structure and tokens"
EXAMPLES = """\
examples:
  flat-tokens verify out/web                   sizes, metadata, last entries: seconds
  flat-tokens verify out/web --full            every digest, every token
  flat-tokens verify out/web --forgotten       nothing is left of forgotten documents
  flat-tokens verify out/web --sample 3/30     the third of thirty parts: its digests and tokens, and 64 of its documents
                                               tokenized again from the source, where that can be reached
"""


ARGUMENTS = f"""
PATH  {cli.ANY_DATASET}
| --quick  existence and sizes of all objects, metadata (the default)
| --full  every object's digest and every sentence of the format, token by token
| --sample N/M  quick, and of part N of M the digests, the tokens, and documents tokenized again; 1/M to M/M are everything once
| --forgotten  of an output: that nothing below it has a key or a run of tokens that was forgotten
--sign  --full: sign what is right, whoever wrote it
--key PUBLIC  a public ed25519 key in a file: its owner made and published this version
--number N  --key: latest.json has at least this number, such as one that was seen before
--documents K  --sample: tokenize K documents of each split again (default: 64)
--source --trust-records --tokenizer --pattern --format --option
"""


def add_commands(commands: Any) -> None:
    kinds = {"sample": sample, "number": cli.at_least(1), "documents": cli.at_least(0)}
    cli.add_command(commands, "verify", run, SUMMARY, EXAMPLES, ARGUMENTS, **kinds)


def sample(text: str) -> SampledPart:
    try:
        number, parts = (int(number) for number in text.split("/"))
    except ValueError:
        number, parts = 0, 0
    if not 1 <= number <= parts:
        raise ArgumentTypeError(f"{text!r} is not a part such as 3/30: N from 1 to M")
    return SampledPart(number, parts)


def run(options: Namespace) -> int:
    level = "full" if options.full else "quick" if options.sample is None else "sample"
    if options.forgotten:
        if options.key is not None or options.number is not None or options.sign:
            raise ValueError("--forgotten compares no signature: give --key, --number or --sign without it")
        return _run_forgotten(options)
    if options.sign and not (options.full and signing.keys()):
        raise ValueError(f"--sign needs --full, and a key in {signing.KEY_FILE}")
    if options.number is not None and options.key is None:
        raise ValueError("--number is about what a key signed: give --key, too")
    public = signing.public_key_in(options.key) if options.key is not None else None
    with terminal.progress("verify", options.quiet) as watch, signing.using(b"" if options.sign else signing.keys()):
        faults = list(itertools.islice(check(options, watch, public), MAX_PROBLEMS + 1))
    if options.sign and not faults:
        root = Store.at(options.path)
        with signing.using(b""):
            store = resolve(root)
        sign(root, store)
    found: JsonObject = {"path": options.path, "level": level}
    documents: JsonObject = {}
    if not faults:
        corpus = cli.corpus_of(options)
        found |= {"path": corpus.url, "kind": corpus.kind, **corpus.counts}
        if options.sample is not None:
            found["part"] = f"{options.sample.number}/{options.sample.parts}"
            sources = TextSources.of(corpus, options)
            same, not_reachable, faults = retokenize(sources, options.sample, options.documents)
            documents = {"documents": {"same": same, "different": len(faults), "not_reachable": dict(not_reachable)}}
    found |= {"ok": not faults, "faults": faults[:MAX_PROBLEMS], "more_faults": len(faults) > MAX_PROBLEMS, **documents}
    terminal.show(options, found, lines(found))
    return cli.DIFFERENT if faults else cli.SAME


def _run_forgotten(options: Namespace) -> int:
    root = Store.at(options.path)
    with terminal.progress("verify", options.quiet) as watch:
        faults = list(
            check_forgotten(root, adding_up(watch, sum(size for _, size in root.listing())) if watch else lambda _: None)
        )
    facts = {"path": root.url, "level": "forgotten", "ok": not faults, "faults": faults}
    runs = len(read_forgotten(root).windows)
    nothing = f"(forgotten): nothing below {root.url} has a key or the whole text of a forgotten document"
    right = f"right {nothing}, or one of {runs:,} runs of tokens that were theirs alone"
    if not runs:
        right = f"not known {nothing}. No run of tokens is theirs alone: a part of one would not be found"
    terminal.show(options, facts, [f"not forgotten: {root.url}", *(f"  {fault}" for fault in faults)] if faults else [right])
    return cli.DIFFERENT if faults else cli.SAME


def lines(found: JsonFacts) -> Iterator[str]:
    """The result of a check, for people."""
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


def check(options: Namespace, watch: Watch | None, public: Any) -> Iterator[str]:
    """Every fault of the dataset at the path, as a sentence. FileNotFoundError or ValueError if there is nothing to check.
    *watch* is called with the progress of a full check. *public*: a key by whose owner it has to be signed.
    """
    root = Store.at(options.path)
    if options.format in (None, FLAT_TOKENS):
        try:
            store = resolve(root)
            metadata = read_metadata(store, "group")
        except (FileNotFoundError, NotADirectoryError):
            if latest_of(root):
                yield f"{root.path(POINTER)} names {resolve(root).url}, if there is no dataset"
                return
        else:
            if "max_token_id" not in metadata["attributes"]:
                seen = adding_up(watch, bytes_to_check(store)) if options.full and watch else None
                if public is not None:
                    yield from check_signed(root, store, public, options.number)
                yield from check_published(root, store, metadata["zarr_format"], "full" if options.full else "quick", 2, seen)
                if options.sample is not None:
                    corpus = open_corpus(store.url)
                    objects = [stored_object(item) for item in corpus.manifest.get("objects", ())]
                    yield from _check_sample(corpus, corpus.store, objects, options.sample)
                else:
                    yield from _check_documents(store)
                return
    if public is not None:
        yield f"{options.path} is not a version of a dataset: only these are signed"
        return
    try:
        corpus = cli.corpus_of(options)
    except ValueError as error:
        if _is_recognised(options):
            yield terminal.one_line(error)
            return
        raise
    yield from _check_other(corpus, options)


def sign(root: Store, store: Store) -> None:
    """Sign the records of a version that was checked, and, if *root* is the output whose latest it is, that."""
    for there, key in ((root, POINTER), (store, MANIFEST), (store, BYTES_RECORD), (store, RECEIPT)):
        if there.exists(key):
            there.sign(key, there.read(key))
    if root.exists(POINTER) and (pointer := read_json(root, POINTER))["version"] == posixpath.basename(store.root):
        lines = store.signatures(MANIFEST)
        for kind in ("offered", "latest"):
            said = signing.Statement(kind, pointer["sequence"], pointer["version"], pointer["manifest_sha256"])
            lines = signing.with_statement(lines, said)
        store.put(MANIFEST + signing.SIGNATURE, lines)


def _is_recognised(options: Namespace) -> bool:
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
        yield terminal.one_line(error)


def _check_sample(corpus: Corpus, store: Store, objects: list[StoredObject], sample: SampledPart) -> Iterator[str]:
    """Faults of a part: in the digests of its share of the objects of a store, and in its sequences."""
    start, stop = sample.share(len(objects))
    for stored in sorted(objects)[start:stop]:
        if (now := store.now(stored)) != stored:
            yield f"{stored.key} has {now.digest_text} instead of {stored.digest_text}"
    for name, split in corpus.splits.items():
        yield from check_sequences(name, split, *sample.share(split.seq_count))


def _check_other(corpus: Corpus, options: Namespace) -> Iterator[str]:
    """Faults of a token shard, a split by itself, or another format."""
    store, objects = corpus.store, list[StoredObject]()
    for name, split in corpus.splits.items():
        if isinstance(split, FlatTokens) and (objects := _objects(corpus, name)):
            store, besides = split.store, {RECEIPT} if corpus.receipt else set()
            yield from check_objects(store, objects, besides, "full" if options.full else "quick", 2)
        if options.full:
            yield from check_sequences(name, split, 0, split.seq_count)
    if options.sample is not None:
        yield from _check_sample(corpus, store, objects, options.sample)


def _objects(corpus: Corpus, name: str) -> list[StoredObject]:
    """A split's objects in a receipt or manifest, with keys below the split."""
    if corpus.receipt:
        return [StoredObject(*item) for item in corpus.receipt.get("objects", ())]
    whole = (stored_object(item) for item in corpus.manifest.get("objects", ()))
    return [stored._replace(key=stored.key.removeprefix(f"{name}/")) for stored in whole if stored.key.startswith(f"{name}/")]


def check_sequences(name: str, split: Readable, start: int, stop: int) -> Iterator[str]:
    """Faults of sequences ``start:stop`` of any format: unreadable data, ids too large, wrong marks of starts."""
    try:
        if isinstance(split, FlatTokens):
            yield from check_split(split, None, start, stop)
        elif (begun := sum(len(window.starts) for window in windows(split, start, stop))) != stop - start:
            yield f"{name} has {begun} sequences from {start} to {stop}"
    except (ValueError, *NO_OBJECT) as error:  # other errors of the system are not a fault of the files
        yield terminal.one_line(error)
