"""``flat-tokens verify``: whether a dataset is what was written: its objects, its structure, and tokens against their sources."""

from __future__ import annotations

import itertools
import posixpath
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, JsonFacts, JsonObject
from flat_tokens.arrays.opening import read_metadata
from flat_tokens.checker import (
    MAX_PROBLEMS,
    Checked,
    adding_up,
    bytes_to_check,
    check_objects,
    check_published,
    check_signed,
    check_split,
)
from flat_tokens.extras import pa
from flat_tokens.forgotten import read_forgotten
from flat_tokens.formats import FLAT_TOKENS, FORMATS, Files, Readable
from flat_tokens.manifest import BYTES_RECORD, MANIFEST, POINTER, RECEIPT, latest_of
from flat_tokens.reader import resolve
from flat_tokens.rows.split import FlatTokens
from flat_tokens.steps import HARMLESS, READ_BY_BUILDS, ReadySteps, open_steps
from flat_tokens.steps.patterns import program_size
from flat_tokens.stores import signing
from flat_tokens.stores.store import NO_OBJECT, Store, StoredObject, read_json, stored_object
from flat_tokens.text.rows import prompt_and_completion
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import Corpus, open_corpus, windows
from flat_tokens.tools.remains import check_forgotten
from flat_tokens.tools.sources import UNRECORDED, Locator, Place, digest_is, kept_of, places_of, texts_of

SUMMARY = "check objects, structure and tokens"
EXAMPLES = """\
examples:
  flat-tokens verify out/web                   sizes, metadata, last entries: seconds
  flat-tokens verify out/web --full            every digest, every token
  flat-tokens verify out/web --forgotten       nothing is left of forgotten documents
  flat-tokens verify out/web --sample 3/30     the third of thirty parts: its digests and tokens, and 64 of its documents
                                               tokenized again from the source, where that can be reached
"""


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
        splits = corpus.splits.values()
        tokens, sequences = sum(split.token_count for split in splits), sum(split.seq_count for split in splits)
        found |= {"path": corpus.url, "kind": corpus.kind, "token_count": tokens, "seq_count": sequences}
        if options.sample is not None:
            found["part"] = f"{options.sample.number}/{options.sample.parts}"
            same, not_reachable, faults = retokenize(corpus, options)
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


def check(options: Namespace, watch: Callable[[Checked], object] | None = None, public: Any = None) -> Iterator[str]:
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
                    yield from _check_sample(store, options)
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
    """Sign the records of a version that was checked, and, where *root* is the output whose latest it is, that."""
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


def _check_sample(root: Store, options: Namespace) -> Iterator[str]:
    corpus = open_corpus(root.url)
    objects = [stored_object(item) for item in corpus.manifest.get("objects", ())]
    yield from _check_digests(corpus.store, objects, options.sample)
    for name, split in corpus.splits.items():
        yield from check_sequences(name, split, *options.sample.share(split.seq_count))


def _check_digests(store: Store, objects: list[StoredObject], sample: SampledPart) -> Iterator[str]:
    start, stop = sample.share(len(objects))
    for stored in sorted(objects)[start:stop]:
        if (now := store.now(stored)) != stored:
            yield f"{stored.key} has {now.digest_text} instead of {stored.digest_text}"


def _check_other(corpus: Corpus, options: Namespace) -> Iterator[str]:
    """Faults of a token shard, a split by itself, or another format."""
    for name, split in corpus.splits.items():
        if isinstance(split, FlatTokens) and (expected := _objects(corpus, name)):
            besides = {RECEIPT} if corpus.receipt else set()
            yield from check_objects(split.store, expected, besides, "full" if options.full else "quick", 2)
            if options.sample is not None:
                yield from _check_digests(split.store, expected, options.sample)
        if options.full or options.sample is not None:
            share = (0, split.seq_count) if options.full else options.sample.share(split.seq_count)
            yield from check_sequences(name, split, *share)


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


def retokenize(corpus: Corpus, options: Namespace) -> tuple[int, Counter[str], list[str]]:
    """Tokenize documents of a part again, from their sources, and compare. How many gave the same tokens; how many could not be
    compared, by reason; and a sentence for each that gave others.
    """
    vocabulary, problem = cli.vocabulary_if_any(corpus, options)
    encode = None if vocabulary is None else vocabulary.encode
    if vocabulary is not None and encode is None:
        problem = f"{vocabulary.name} does not say how text is split; name its --pattern"
    locator = Locator(corpus, options.source, options.trust_records)
    same, work, not_reachable, faults = 0, 0, Counter[str](), list[str]()
    for name, split in corpus.splits.items():
        chosen = choose(options.sample, split.seq_count, options.documents).tolist()
        found = places_of(corpus, name, chosen)
        if found is None:
            not_reachable[UNRECORDED] += len(chosen)
            continue
        if encode is None:
            not_reachable[problem or "there is no record of the tokenizer; name it with --tokenizer"] += len(chosen)
            continue
        places = dict(zip(chosen, found, strict=True))
        for file, sequences, path, texts, unread in texts_of(corpus, places, locator):
            if file is None or path is None or unread is not None:
                # Files that are not found are one reason, whatever their names.
                reason = "their source files are not found; say where with --source" if file and not path else str(unread)
                not_reachable[reason] += len(sequences)
                continue
            settings = corpus.sources[file.source].settings
            if settings.get("messages_column"):
                not_reachable["conversations are tokenized by builds alone"] += len(sequences)
                continue
            steps, unusable, work = _steps_of(settings, options.trust_records, texts.values(), work)
            if steps is None:
                not_reachable[unusable] += len(sequences)
                continue
            wrong = {i: "is another document, by its key" for i in sequences if i not in texts}
            texts, left_out = _behind(steps, texts, places, kept_of(corpus, name, list(texts)))
            wrong |= left_out
            joined = settings.get("completion_column") is not None
            parts = ((i, prompt_and_completion(text) if joined else [text]) for i, text in texts.items())
            others = (i for i, of in parts if not np.array_equal(np.concatenate([*map(encode, of)]), split.sequence(i)))
            wrong |= dict.fromkeys(others, "gives other tokens")
            same += len(sequences) - len(wrong)
            if wrong and not digest_is(path, file.sha256):  # a changed file is not a proof of a fault
                not_reachable[f"{file.name} has changed since it was read"] += len(wrong)
            else:
                at = ((i, f"{name} sequence {i}: {file.name}, row {places[i].row}") for i in sequences if i in wrong)
                faults += [f"{where}, {wrong[i]}" for i, where in at]
    return same, not_reachable, faults


def _steps_of(
    settings: JsonFacts, trusted: bool, texts: Collection[str] = (), work: int = 0
) -> tuple[ReadySteps | None, str, int]:
    """The steps that *texts* of a source took; or None, and why they cannot be taken again. *work*: instructions of the files
    before; it is returned with those of this one.
    """
    described = settings.get("steps") or ()
    try:
        foreign = [step["use"] for step in described if step["use"] not in HARMLESS]
        if len(described) > MOST_STEPS and not trusted:
            return (
                None,
                f"the manifest has {terminal.plural(len(described), 'step')}, which take long: --trust-records takes them",
                work,
            )
        if foreign and not trusted:
            return (
                None,
                f"the step {foreign[0]!r} in the manifest runs what is installed here, if you trust it: --trust-records",
                work,
            )
        if reading := [step["use"] for step in described if step["use"] in READ_BY_BUILDS]:
            return None, f"the step {reading[0]!r} needs its evaluation sets, which builds alone read", work
        if not trusted:
            patterns = [_pattern_of(step["options"]) for step in described if step["use"] == "pattern"]
            if (longest := max((len(one.encode()) for one in patterns), default=0)) > MOST_PATTERN_BYTES:
                return None, f"a pattern in the manifest has {terminal.plural(longest, 'byte')}: --trust-records takes it", work
            work += sum(map(program_size, patterns)) * (COMPILING + sum(len(text.encode()) for text in texts))
            if work > MOST_WORK:
                return None, "a pattern in the manifest would take long: --trust-records waits for it", work
        return open_steps(described), "", work
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"its steps cannot be taken again: {error}", work


def _pattern_of(options: JsonFacts) -> str:
    keep = options.get("keep")
    return str(options.get("drop") if keep is None else keep)


def _behind(
    steps: ReadySteps, texts: Mapping[int, str], places: Mapping[int, Place], kept: pa.RecordBatch | None
) -> tuple[dict[int, str], dict[int, str]]:
    """Texts of sequences after the steps, which see *kept* columns; and what is wrong with those that do not come through."""
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
