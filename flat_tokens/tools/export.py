"""``flat-tokens export``: a dataset in a neighbour's format, file by file. It continues where an earlier run was stopped.

The directory ``.export`` within an export holds its state: the dataset, format and options (``plan.json``); a receipt for
each part, with the size and sha256 of its files; and, written last, a record of all files (``export.json``). A part whose
files match its receipt is not written again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.opening import read_json
from flat_tokens.checker import Checked, adding_up
from flat_tokens.formats import FORMATS, ExportFile, Splits, source
from flat_tokens.manifest import MANIFEST, SPLITS, TOKEN_BYTES, SplitName
from flat_tokens.reader import FlatTokens, resolve
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools import arguments, terminal
from flat_tokens.tools.corpus import options_of
from flat_tokens.tools.flags import READING_ONLY, add_option_flags, given_options

SUMMARY = "write a dataset in another format"
EXAMPLES = (
    "formats:\n"
    + "\n".join(f"  {name:14} {entry.summary}" for name, entry in FORMATS.items())
    + """

examples:
  flat-tokens export out/web --to megatron corpus/web
  flat-tokens export out/web --to build-nanogpt --end-of-text 50256 corpus/shards
  flat-tokens export out/web --to parquet --split validation corpus/held-out
"""
)

BESIDE = ".export"
PLAN, RECORD = f"{BESIDE}/plan.json", f"{BESIDE}/export.json"
READERS = 4


@dataclass(frozen=True)
class ExportRequest:
    """Request of an export: a version of a dataset, by its location and the digest of its manifest (of its content if it has
    none); its splits; the format and an instance of its options.
    """

    location: str
    digest: str
    splits: tuple[SplitName, ...]
    format: str
    options: Any

    def facts(self) -> dict[str, Any]:
        """Everything that the files depend on."""
        return {"dataset": self.digest, "splits": list(self.splits), "format": self.format, "options": asdict(self.options)}

    @property
    def key(self) -> str:
        """A digest of the facts."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()

    def source(self) -> Splits:
        opened = source(self.location)
        return {split: opened[split] for split in self.splits}

    @property
    def token_count(self) -> int:
        """Number of tokens in the splits."""
        return sum(split.token_count for split in self.source().values())


@dataclass(frozen=True)
class _Watched(FlatTokens):
    """A split that calls *seen* with the range of each read of its tokens."""

    seen: Callable[[int, int], object]

    def slice(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        tokens = super().slice(start, stop)
        self.seen(start, stop)
        return tokens


def export_of(
    path_or_url: str | os.PathLike[str],
    format: str,
    options: Mapping[str, Any],
    splits: Sequence[SplitName] = SPLITS,
    watch: Callable[[Checked], object] | None = None,
) -> ExportRequest:
    """The request to export the dataset that is at a path now. *watch* is called with the progress of reading one without a
    manifest.

    FileNotFoundError if there is no dataset; ValueError for an unknown format or option.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    chosen = options_of(format, options)
    store = resolve(Store.at(path_or_url))
    if store.is_local:
        store = Store.at(os.path.realpath(store.root))
    source(store.url)
    return ExportRequest(store.url, _digest(store, watch), tuple(splits), format, chosen)


def _digest(store: Store, watch: Callable[[Checked], object] | None) -> str:
    if store.exists(MANIFEST):
        return hashlib.sha256(store.read(MANIFEST)).hexdigest()
    stored = sorted((f"{split}/{key}", size) for split in SPLITS for key, size in (store / split).listing())
    seen = adding_up(watch, sum(size for _, size in stored))
    with ThreadPoolExecutor(READERS) as readers:
        digests = list(readers.map(lambda one: store.digest(one[0], seen), stored))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def target(path_or_url: str) -> Store:
    """The store that an export is written to. Files get their names when they are complete."""
    store = Store.at(path_or_url)
    return Store(store.root, store.fs, staging=store.path(f"{BESIDE}/staging") if store.is_local else None)


@contextlib.contextmanager
def writing(request: ExportRequest, store: Store) -> Iterator[None]:
    """Hold the directory of an export during the block. ValueError if something else is there, or another process writes it."""
    with contextlib.ExitStack() as held:
        if store.is_local:
            beside = Path(store.path(BESIDE))
            _check_free(request, store)
            beside.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(beside / "lock", "ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{store.url}: another process is writing here. Wait until it has ended.") from error
            # Left by a killed process.
            shutil.rmtree(beside / "staging", ignore_errors=True)
        _check_free(request, store)
        if _plan_at(store) != request.key:
            store.put(PLAN, _json({"key": request.key, "from": request.location, **request.facts()}))
        yield
        if store.is_local:
            shutil.rmtree(beside / "staging", ignore_errors=True)


def _check_free(request: ExportRequest, store: Store) -> None:
    """ValueError if there is anything but a beginning of this export, or of one without files."""
    if f"{store.url}/".startswith(f"{request.location}/"):
        raise ValueError(f"{store.url}: lies within the dataset that is exported. Choose another directory.")
    if not store.exists("") or _plan_at(store) == request.key:
        return
    if others := [key for key, _ in store.listing() if not key.startswith(f"{BESIDE}/")]:
        if _plan_at(store) is None:
            raise ValueError(f"{store.url}: is not empty; there is {others[0]}. Choose another directory.")
        raise ValueError(
            f"{store.url}: holds an export of another dataset, or in another way ({PLAN}). Remove it, or choose another "
            "directory."
        )


def _plan_at(store: Store) -> str | None:
    """The key of the export that was begun at *store*."""
    try:
        return str(read_json(store, PLAN).get("key"))
    except FileNotFoundError:
        return None


def write_file(
    file: ExportFile, request: ExportRequest, path_or_url: str, seen: Callable[[int], object] | None = None
) -> Written:
    """Write a part, which is one file of the plan and those beside it, and its receipt, unless it is there already. *seen* is
    called with counts of tokens as they are exported or found.
    """
    store, receipt = target(path_or_url), f"{BESIDE}/parts/{file.key}.json"
    if (finished := _finished(file, request, store, receipt)) is not None:
        stored, count = finished
        if seen is not None:
            seen(count)
        return Written(stored, reused=True)
    count = furthest = 0

    def read(start: int, stop: int) -> None:
        """Count tokens when they are first read: some formats read a file's range twice, each time in order and by one thread."""
        nonlocal count, furthest
        new = max(stop - max(start, furthest), 0)
        count, furthest = count + new, max(stop, furthest)
        if seen is not None:
            seen(new)

    splits: Splits = {name: _Watched(**vars(split), seen=read) for name, split in request.source().items()}
    stored = tuple(FORMATS[request.format].write(splits, file, store, request.options))
    facts = {"key": request.key, "part": list(file), "objects": [list(one) for one in stored], "token_count": count}
    store.put(receipt, _json(facts))
    return Written(stored, reused=False)


class Written(NamedTuple):
    """The files of a part, and whether an earlier run wrote them."""

    objects: tuple[StoredObject, ...]
    reused: bool


def _finished(
    file: ExportFile, request: ExportRequest, store: Store, receipt: str
) -> tuple[tuple[StoredObject, ...], int] | None:
    """The files of a part that an earlier run wrote, if each is there with every byte, and the number of their tokens."""
    try:
        facts = read_json(store, receipt)
        stored = tuple(StoredObject(*one) for one in facts["objects"])
        same = facts["key"] == request.key and facts["part"] == list(file)
        if not same or any(store.digest(one.key) != one for one in stored):
            return None
        return stored, int(facts.get("token_count", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the part is written again


class Exported(NamedTuple):
    """Result of an export. ``reused``: parts that an earlier run had written. ``was_done``: there was nothing to do."""

    path: str
    format: str
    objects: tuple[StoredObject, ...]
    parts: int
    reused: int
    was_done: bool

    @property
    def byte_count(self) -> int:
        return sum(stored.size for stored in self.objects)


def done_before(request: ExportRequest, store: Store) -> Exported | None:
    """The result of the export if an earlier run finished it and its files are there."""
    try:
        record = read_json(store, RECORD)
        stored = tuple(StoredObject(*one) for one in record["objects"])
        if record["key"] != request.key or any(store.size(one.key) != one.size for one in stored):
            return None
        return Exported(store.url, request.format, stored, record["parts"], record["parts"], was_done=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(request: ExportRequest, written: Sequence[Written], path_or_url: str) -> Exported:
    """Write the files that need all parts, and the record of the export."""
    store = target(path_or_url)
    objects = [stored for one in written for stored in one.objects]
    objects += FORMATS[request.format].finish(request.source(), objects, store, request.options)
    record = {"key": request.key, **request.facts(), "parts": len(written), "objects": [list(one) for one in objects]}
    store.put(RECORD, _json(record))
    reused = sum(one.reused for one in written)
    return Exported(store.url, request.format, tuple(objects), len(written), reused, was_done=False)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def write(
    request: ExportRequest, path_or_url: str, threads: int | None = None, watch: Callable[[Checked], object] | None = None
) -> Exported:
    """ExportRequest on this machine, several files at a time. *watch* is called with the progress, in bytes of tokens."""
    store = target(path_or_url)
    if done := done_before(request, store):
        return done
    files = FORMATS[request.format].plan(request.source(), request.options)
    with writing(request, store), ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        seen = adding_up(watch, TOKEN_BYTES * request.token_count)
        tasks = [pool.submit(write_file, file, request, path_or_url, lambda tokens: seen(TOKEN_BYTES * tokens)) for file in files]
        try:
            return finish(request, [task.result() for task in tasks], path_or_url)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a dataset or a build's output; a local path or a URL")
    parser.add_argument("out", metavar="OUT", help="an empty directory, or one where this export was begun")
    add_target(parser)
    arguments.add_json(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that define an export."""
    parser.add_argument("--to", required=True, choices=FORMATS, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("--split", choices=SPLITS, help="this split alone")
    add_option_flags(parser, except_for=READING_ONLY)


def run(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    splits = SPLITS if options.split is None else (options.split,)
    with terminal.progress("examine") as watch:
        request = export_of(options.path, options.to, given_options(options), splits, watch)
    with terminal.progress("export") as watch:
        done = write(request, options.out, watch=watch)
    seconds = time.monotonic() - begun
    if options.json:
        arguments.print_json(described(done, seconds))
    else:
        print("\n".join(lines(done, seconds)))
    return arguments.SAME


def described(done: Exported, seconds: float) -> dict[str, Any]:
    """A result for JSON."""
    objects = [stored._asdict() for stored in done.objects]
    return {**done._asdict(), "objects": objects, "byte_count": done.byte_count, "seconds": round(seconds, 3)}


def lines(done: Exported, seconds: float) -> Iterator[str]:
    """A result for people."""
    size = f"{terminal.size(done.byte_count)} in {terminal.plural(len(done.objects), 'file')}"
    if done.was_done:
        yield f"nothing to do: {done.path} is this export, {size}"
        return
    yield f"exported to {done.path}: {done.format}, {size}, {seconds:.1f} s"
    if done.reused:
        yield f"  {done.reused:,} of {terminal.plural(done.parts, 'part')} had been written before"
