"""``flat-tokens export``: a dataset in a neighbour's format, file by file. It continues where an earlier run was stopped.
``flat-tokens import``: a dataset from files of such a format, on one machine.

The directory ``.export`` within an export holds its state: the dataset, format and options (``plan.json``); a receipt for
each part, with the size and sha256 of its files; what it was made of (``origin.json``, ``documents``); and, written last, a
record of all files (``export.json``). A part whose files match its receipt is not rewritten.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import posixpath
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from flat_tokens.annotations import JsonFacts, JsonObject, UInt32s
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName, to_json
from flat_tokens.batch import TokenBatch
from flat_tokens.checker import Seen, Watch, adding_up
from flat_tokens.columns import NAME as COLUMNS
from flat_tokens.formats import FORMATS, STREAMS, ExportFile, Splits, check_format, source
from flat_tokens.formats.contract import EXPORT_RECORD, Files, Readable
from flat_tokens.manifest import (
    EVERY_SPLIT,
    EXPORTS,
    LOCK,
    MANIFEST,
    POINTER,
    SPLITS,
    TOKEN_BYTES,
    VERSIONS,
    SplitName,
    json_digest,
    manifest_digest,
    manifest_of,
    splits_at,
)
from flat_tokens.options import one_of
from flat_tokens.reader import ROOTS, Dataset, resolve
from flat_tokens.reader import open as open_dataset
from flat_tokens.rows.split import FlatTokens, ahead
from flat_tokens.stores.local import (
    directory_below,
    kind_of,
    locked,
    make_directory,
    named_errors,
    real_path,
    refuse_links,
    remove,
)
from flat_tokens.stores.store import PathOrUrl, Store, StoredObject, read_json
from flat_tokens.tools import cli, terminal
from flat_tokens.tools.corpus import BESIDE, ORIGIN, open_corpus, options_of
from flat_tokens.writer import write_dataset

SUMMARY = "write a dataset in another format"
EXAMPLES = f"""\
{cli.format_list()}

examples:
  flat-tokens export out/web --to megatron corpus/web
  flat-tokens export out/web --to build-nanogpt --end-of-text 50256 corpus/shards
  flat-tokens export out/web --to parquet --split validation corpus/held-out
"""

PLAN = f"{BESIDE}/plan.json"
STAGING = f"{BESIDE}/staging"
HALF_NOTED = re.compile(r"\..+\.json\.\w+\.part")
READERS = 4
ALWAYS_ROOM, SHARE_FOR_DOCUMENTS = 64 << 20, 0.1
"""Bytes that the documents' keys, files and rows may take next to an export, and their share of its size where that is more."""
SIGNS = ((POINTER, VERSIONS), (MANIFEST, *SPLITS))  # of a build's output, of a dataset: an export is in neither


@dataclass(frozen=True)
class ExportRequest:
    """A version's location and digest (of its manifest; of its content without one), splits, and a format with its options."""

    location: str
    digest: str
    splits: tuple[SplitName, ...]
    format: str
    options: Any

    def facts(self) -> JsonObject:
        """Everything that the files depend on."""
        return {"dataset": self.digest, "splits": list(self.splits), "format": self.format, "options": asdict(self.options)}

    @property
    def key(self) -> str:
        """A digest of the facts."""
        return json_digest(self.facts())

    def source(self) -> Splits:
        opened = source(self.location)
        return {split: opened[split] for split in self.splits}

    @property
    def loses_loss_mask(self) -> bool:
        """Whether the dataset has a loss mask for which the format has no place."""
        masked = any(split.loss_mask is not None for split in self.source().values())
        return masked and not FORMATS[self.format].keeps_loss_mask

    @property
    def token_count(self) -> int:
        """Number of tokens in the splits."""
        return sum(split.token_count for split in self.source().values())


@dataclass(frozen=True)
class _WatchedSplit(FlatTokens):
    """A split that calls *seen* with the range of each read of its tokens."""

    seen: Callable[[int, int], object] = field(kw_only=True)

    def slice(self, start: int, stop: int) -> UInt32s:
        tokens = super().slice(start, stop)
        self.seen(start, stop)
        return tokens


def export_of(
    path_or_url: PathOrUrl,
    format: str,
    options: JsonFacts,
    splits: Sequence[SplitName] | None = None,
    watch: Watch | None = None,
) -> ExportRequest:
    """The request to export the dataset that is at a path now. *splits*: all that it has without
    them. *watch* is called with the progress of reading one without a manifest.

    FileNotFoundError if there is no dataset; ValueError for an unknown format or option.
    """
    check_format(format, FORMATS)
    chosen = options_of(format, options)
    if splits is not None and not splits:
        raise ValueError(f"no split is named; there are {', '.join(SPLITS)}")
    store = resolve(Store.at(path_or_url))
    there = tuple(source(store.url))
    for name in splits or ():
        one_of("a split", name, there)
    return ExportRequest(store.url, _digest(store, watch), there if splits is None else tuple(splits), format, chosen)


def _digest(store: Store, watch: Watch | None) -> str:
    if manifest_of(store):
        return manifest_digest(store)
    stored = sorted((f"{split}/{key}", size) for split in splits_at(store) for key, size in (store / split).listing())
    seen = adding_up(watch, sum(size for _, size in stored))
    with ThreadPoolExecutor(READERS) as readers:
        digests = list(readers.map(lambda one: store.digest(one[0], "sha256", seen), stored))
    return json_digest(digests)


def target(path_or_url: str) -> Store:
    """The store that an export is written to. Files get their names when they are complete, and sha256
    as their digest, which other tools check.
    """
    store = Store.at(path_or_url)
    return replace(store, staging=store.path(STAGING) if store.is_local else None, digests="sha256")


def note_export(location: str, format: str, path_or_url: str) -> None:
    """Note at the output of the version at *location* that it is exported, for ``forget`` there. Nothing is noted if this
    process may only read. OSError, naming the path, if a local output may be written and the note cannot: ``forget`` would
    not know of the export.
    """
    above, _, version = location.rpartition("/")
    output, _, versions = above.rpartition("/")
    if versions != VERSIONS:
        return
    place = Store.at(path_or_url).url
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    facts = {"path": place, "format": format, "version": version}
    root, key, data = Store.at(output), f"{name}-{version}.json", to_json(facts, indent=1)
    if root.is_local:
        places = (root.root, root.path(LOCK), root.path(EXPORTS))
        if root.exists(POINTER) and all(os.access(path, os.W_OK) or not os.access(path, os.F_OK) for path in places):
            _note_locally(root, key, data)
        return
    with suppress(Exception):  # each store has errors of its own for who may only read
        if root.exists(POINTER):
            (root / EXPORTS).put(key, data)


def _note_locally(root: Store, key: str, data: bytes) -> None:
    """Write a note, unless it is there, under the lock of the output's records: what else is half written is of the dead."""
    notes = root / EXPORTS
    refuse_links(Path(notes.root), root.root)
    if kind_of(notes.path(key), follow_links=False) == "file" and notes.read(key) == data:
        return
    with locked(root.path(LOCK)):
        make_directory(Path(notes.root))
        with directory_below(root.root, EXPORTS) as directory, named_errors(notes.root):
            left = list(filter(HALF_NOTED.fullmatch, os.listdir(directory)))
        for name in left:
            remove(root.root, f"{EXPORTS}/{name}")
        notes.put(key, data)


@contextmanager
def writing(request: ExportRequest, store: Store) -> Iterator[None]:
    """Hold the directory of an export during the block. ValueError if something else is there, or another process writes it."""
    if store.is_local:
        _check_free(request, store)
    with holding(store):
        _check_free(request, store)
        if _plan_at(store) != request.key:
            store.put(PLAN, to_json({"key": request.key, "from": request.location, **request.facts()}, indent=1))
        yield


@contextmanager
def holding(store: Store) -> Iterator[None]:
    """Lock a local directory, and remove the staging there, also that of a killed process. ValueError if another holds it."""
    if not store.is_local:
        yield
        return
    make_directory(Path(store.path(BESIDE)))
    with ExitStack() as held:
        try:
            held.enter_context(locked(store.path(f"{BESIDE}/lock"), waits=False))
        except BlockingIOError as error:
            raise ValueError(f"{store.url}: another process is writing here. Wait until it has ended.") from error
        store.remove(STAGING)
        yield
        store.remove(STAGING)


def _check_free(request: ExportRequest, store: Store) -> None:
    """ValueError if there is anything but a beginning of this export, or of one without files."""
    if f"{store.url}/".startswith(f"{request.location}/"):
        raise ValueError(f"{store.url}: is within the dataset that is exported. Choose another directory.")
    above = replace(store, root=real_path(store.root)) if store.is_local else store
    while above.root.strip("/"):
        if any(all(map(above.exists, names)) for names in SIGNS):
            raise ValueError(f"{store.url}: is within {above.url}, a build's output or a dataset. Choose another directory.")
        above = replace(above, root=posixpath.dirname(above.root))
    if not store.exists("") or _plan_at(store) == request.key:
        return
    if others := [key for key, _ in store.listing() if not key.startswith(f"{BESIDE}/")]:
        if _plan_at(store) is None:
            raise ValueError(f"{store.url}: is not empty; there is {others[0]}. Choose another directory.")
        wrong = f"holds an export of another dataset, or in another way ({PLAN})"
        raise ValueError(f"{store.url}: {wrong}. Remove it, or choose another directory.")


def _plan_at(store: Store) -> str | None:
    """The key of the export that was begun at *store*."""
    try:
        return str(read_json(store, PLAN).get("key"))
    except FileNotFoundError:
        return None


def write_file(file: ExportFile, request: ExportRequest, path_or_url: str, seen: Seen | None = None) -> WrittenPart:
    """Write a part, which is one file of the plan and those next to it, and its receipt, unless it is there already. *seen* is
    called with counts of tokens as they are exported or found.
    """
    store, receipt = target(path_or_url), f"{BESIDE}/parts/{file.key}.json"
    finished = _record(request, store, receipt, lambda one: store.now(one) == one)
    if finished and finished.get("part") == list(file):
        if seen is not None:
            seen(finished.get("token_count", 0))
        return WrittenPart(finished["objects"], reused=True)
    count = furthest = 0

    def read(start: int, stop: int) -> None:
        """Count tokens when they are first read: some formats read a file's range twice, each time in order and by one thread."""
        nonlocal count, furthest
        new = max(stop - max(start, furthest), 0)
        count, furthest = count + new, max(stop, furthest)
        if seen is not None:
            seen(new)

    splits: Splits = {name: _WatchedSplit(**vars(split), seen=read) for name, split in request.source().items()}
    stored = tuple(FORMATS[request.format].write(splits, file, store, request.options))
    facts = {"key": request.key, "part": list(file), "objects": [list(one) for one in stored], "token_count": count}
    store.put(receipt, to_json(facts, indent=1))
    return WrittenPart(stored, reused=False)


class WrittenPart(NamedTuple):
    """The files of a part, and whether an earlier run wrote them."""

    objects: tuple[StoredObject, ...]
    reused: bool


def _record(request: ExportRequest, store: Store, key: str, is_there: Callable[[StoredObject], bool]) -> JsonObject | None:
    """The record of this export or of a part that an earlier run wrote, if all of its files are there."""
    try:
        record = read_json(store, key)
        record["objects"] = tuple(StoredObject(*one) for one in record["objects"])
        return record if record["key"] == request.key and all(map(is_there, record["objects"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is rewritten


class ExportResult(NamedTuple):
    """Result of an export. ``reused``: parts that an earlier run had written. ``was_done``: there was nothing to do.
    ``loses_loss_mask``: the dataset has one, for which the format has no place. ``seconds``: that writing took.
    """

    path: str
    format: str
    objects: tuple[StoredObject, ...]
    parts: int
    reused: int
    was_done: bool
    loses_loss_mask: bool
    seconds: float = 0.0

    @property
    def byte_count(self) -> int:
        return sum(stored.size for stored in self.objects)

    @property
    def headline(self) -> str:
        """Such as ``3 megatron files, 1.2 GB, 0 of 4 parts reused``."""
        files = f"{terminal.plural(len(self.objects), f'{self.format} file')}, {terminal.size(self.byte_count)}"
        lost = ", without the loss mask" if self.loses_loss_mask else ""
        reused = "written already" if self.was_done else f"{self.reused:,} of {terminal.plural(self.parts, 'part')} reused"
        return f"{files}{lost}, {reused}"


def done_before(request: ExportRequest, store: Store) -> ExportResult | None:
    """The result of the export if an earlier run finished it and its files are there."""
    record = _record(request, store, EXPORT_RECORD, lambda one: store.size(one.key) == one.size)
    if record is None or type(record.get("parts")) is not int:
        return None
    if store.is_local and store.exists(STAGING):  # its removal failed, or was lost with the power
        with holding(store):
            pass
    return ExportResult(
        store.url, request.format, record["objects"], record["parts"], record["parts"], True, request.loses_loss_mask
    )


def finish(request: ExportRequest, written: Sequence[WrittenPart], path_or_url: str) -> ExportResult:
    """Write the files that need all parts, and the record of the export."""
    store = target(path_or_url)
    objects = [stored for one in written for stored in one.objects]
    objects += FORMATS[request.format].finish(request.source(), objects, store, request.options)
    _tell_origin(request, store, sum(stored.size for stored in objects))
    record = {"key": request.key, **request.facts(), "parts": len(written), "objects": [list(one) for one in objects]}
    store.put(EXPORT_RECORD, to_json(record, indent=1))
    reused = sum(one.reused for one in written)
    return ExportResult(store.url, request.format, tuple(objects), len(written), reused, False, request.loses_loss_mask)


def _tell_origin(request: ExportRequest, store: Store, byte_count: int) -> None:
    """Record next to an export of *byte_count* bytes its origin, and the document of each sequence if that takes little room."""
    dataset = Store.at(request.location)
    if not (manifest := manifest_of(dataset)):
        return
    facts = {"version": posixpath.basename(dataset.root), "digest": request.digest, **request.facts()}
    store.put(ORIGIN, to_json({**facts, "provenance": manifest["provenance"], "totals": manifest["totals"]}, indent=1))
    wanted = tuple(f"documents/{split}/" for split in request.splits)
    beside = (one for one in manifest["objects"] if one["key"].startswith(wanted) and not COLUMNS.fullmatch(one["key"]))
    stored = {one["key"]: one["size"] for one in beside}
    if sum(stored.values()) > ALWAYS_ROOM + byte_count * SHARE_FOR_DOCUMENTS:
        return
    for key in stored:
        with store.create(f"{BESIDE}/{key}") as writer:
            for block in dataset.blocks(key):
                writer.write(block)


def write(request: ExportRequest, path_or_url: str, watch: Watch | None = None) -> ExportResult:
    """Export on this machine, several files at a time. *watch* is called with the progress, in bytes of tokens."""

    def work(files: list[ExportFile]) -> ExportResult:
        seen = adding_up(watch, TOKEN_BYTES * request.token_count)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            tasks = [pool.submit(write_file, file, request, path_or_url, lambda n: seen(TOKEN_BYTES * n)) for file in files]
            try:
                return finish(request, [task.result() for task in tasks], path_or_url)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    return export(request, path_or_url, work)


def export(
    request: ExportRequest, path_or_url: str, work: Callable[[list[ExportFile]], ExportResult], *, is_noted: bool = True
) -> ExportResult:
    """Export a dataset, unless an earlier run has. *work* writes the planned files that are not there, and finishes. *is_noted*:
    whether the dataset's output knows of the export afterwards.
    """
    store, begun = target(path_or_url), time.monotonic()
    done = done_before(request, store)
    files = [] if done else FORMATS[request.format].plan(request.source(), request.options)
    with nullcontext() if done else writing(request, store):
        if is_noted:
            note_export(request.location, request.format, path_or_url)
        if done:
            return done
        done = work(files)
    return done._replace(seconds=round(time.monotonic() - begun, 3))


ARGUMENTS = """
PATH  a dataset or a build's output; a local path or a URL
OUT  an empty directory, or one where this export was begun
"""


def add_commands(commands: Any) -> None:
    add_target(cli.add_command(commands, "export", run, SUMMARY, EXAMPLES, ARGUMENTS))
    about = "make a dataset of files in another format"
    import_ = cli.add_command(commands, "import", run_import, about, EXAMPLES_OF_IMPORT, ARGUMENTS_OF_IMPORT, format=FORMATS)
    cli.add_option_flags(import_, except_for=cli.WRITING_ONLY)


def add_target(parser: ArgumentParser) -> None:
    """Add the arguments that define an export."""
    formats = f"--to FORMAT!  one of {', '.join(FORMATS)}"
    cli.add_listed(parser, f"{formats}\n--split {{{','.join(EVERY_SPLIT)}}}  this split alone", to=FORMATS)
    cli.add_option_flags(parser, except_for=cli.READING_ONLY)


def run(options: Namespace) -> int:
    splits = None if options.split is None else (options.split,)
    with terminal.progress("examine", options.quiet) as watch:
        request = export_of(options.path, options.to, cli.given_options(options), splits, watch)
    with terminal.progress("export", options.quiet) as watch:
        done = write(request, options.out, watch=watch)
    terminal.show(options, described(done), lines(done))
    return cli.SAME


def described(done: ExportResult) -> JsonObject:
    """A result for JSON."""
    return {**done._asdict(), "objects": [stored._asdict() for stored in done.objects], "byte_count": done.byte_count}


def lines(done: ExportResult) -> Iterator[str]:
    """A result for people."""
    if done.loses_loss_mask:
        kept = ", ".join(name for name, entry in FORMATS.items() if entry.keeps_loss_mask)
        yield f"the loss mask is not exported: {done.format} has no place for it, so that all tokens count there; {kept} keep it"
    size = f"{terminal.size(done.byte_count)} in {terminal.plural(len(done.objects), 'file')}"
    if done.was_done:
        yield f"nothing to do: {done.path} is this export, {size}"
        return
    yield f"exported to {done.path}: {done.format}, {size}, {done.seconds:.1f} s"
    if not done.parts:
        yield "  there are no sequences, so there is nothing for a reader of this format"
    if done.reused:
        yield f"  {done.reused:,} of {terminal.plural(done.parts, 'part')} had been written before"


EXAMPLES_OF_IMPORT = f"""\
{cli.format_list()}

examples:
  flat-tokens import corpus/train.pbin out/web
  flat-tokens import fineweb/ out/web --format build-nanogpt --end-of-text 50256

A token that closes documents is removed where --end-of-text names it. python -m flows import does the same on several
machines, gives every document a key, and publishes a version.
"""
ARGUMENTS_OF_IMPORT = f"""
PATH  a file, a directory, or the prefix that several files share; or a URL
OUT  where the dataset is written; there must be nothing yet
--format FORMAT  where the content does not tell it
--layout {{{",".join(LAYOUTS)}}}  how the dataset is stored (default: mmap)
"""


def import_dataset(
    path_or_url: PathOrUrl,
    out: PathOrUrl,
    format: str | None = None,
    options: JsonFacts | None = None,
    *,
    layout: LayoutName = "mmap",
) -> Dataset:
    """Write the dataset at a path, of any format, as a flat-tokens dataset.

    FileExistsError if something is at *out* already; ValueError, naming the file, if a file is damaged, and for an option or a
    layout that there is not.
    """
    one_of("layout", layout, LAYOUTS)
    corpus = open_corpus(path_or_url, format, options, by_origin=False)  # what the caller says alone decides what is stored
    store = Store.at(out)
    if store.exists("") and not any(map(store.exists, ROOTS)):
        raise FileExistsError(
            f"{store.url}: exists, and is not a dataset. If an import was stopped there, remove it and try again."
        )
    files = Files.at(path_or_url)
    provenance = {
        "name": posixpath.basename(files.url.rstrip("/")),
        "imported": {
            "format": corpus.format,
            "options": dict(options or {}),
            "files": [{"name": key, "size": files.store.size(key)} for key in files.keys],
        },
    }
    named = {name: corpus.splits.get(name) for name in EVERY_SPLIT}
    if all(split is None for split in named.values()):  # an array by itself
        named["train"] = corpus.split(None)[1]
    test = None if named["test"] is None else _batches(named["test"])
    write_dataset(out, _batches(named["train"]), _batches(named["validation"]), test=test, layout=layout, provenance=provenance)
    return open_dataset(out)


def lost_bounds(format: str, options: JsonFacts) -> str | None:
    """A warning if an import with these options cannot tell documents apart."""
    if format not in STREAMS or options.get("end_of_text") is not None:
        return None
    return (
        f"each split is one long sequence: {format} keeps documents apart by an end-of-text token alone. "
        "Name it: --end-of-text 50256 for gpt2, 128000 for Llama 3"
    )


def _batches(split: Readable | None) -> Iterator[TokenBatch]:
    return iter(()) if split is None else ahead(split.batches())


def run_import(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    dataset = import_dataset(options.path, options.out, options.format, cli.given_options(options), layout=options.layout)
    splits = dataset.splits
    if hint := lost_bounds(dataset.manifest["provenance"]["imported"]["format"], cli.given_options(options)):
        cli.warn(hint)
    counts = {name: {"token_count": split.token_count, "seq_count": split.seq_count} for name, split in splits.items()}
    seconds = time.monotonic() - begun
    lines = [f"imported to {dataset.path}, {seconds:.1f} s"]
    for name, split in splits.items():
        sequences = terminal.plural(split.seq_count, "sequence")
        lines.append(f"  {name:10}  {terminal.plural(split.token_count, 'token')} in {sequences}")
    terminal.show(options, {"path": dataset.path, "splits": counts, "seconds": round(seconds, 3)}, lines)
    return cli.SAME
