"""``flat-tokens export``: a dataset in a neighbour's format, file by file, going on where an earlier run was stopped.

What an export has come to is kept in the directory ``.export`` within it: of which dataset it is, in what format and with
which options (``plan.json``); a receipt for each part that is written, with the size and sha256 of its files; and, last of
all, a record of all files (``export.json``). A part whose files are what its receipt says is not written again.
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
class Export:
    """What is exported and how: a version of a dataset, by where it lies and by the digest of its manifest (of its content,
    where it has none); its splits; the format and an instance of its options.
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
        """A digest of that."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()

    def source(self) -> Splits:
        opened = source(self.location)
        return {split: opened[split] for split in self.splits}

    @property
    def token_count(self) -> int:
        """Tokens of all that is exported."""
        return sum(split.token_count for split in self.source().values())


@dataclass(frozen=True)
class _Watched(FlatTokens):
    """A split that tells which tokens are read of it."""

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
) -> Export:
    """The export of what is a dataset at a path now. *watch* is told how far it is with reading one that has no manifest.

    FileNotFoundError where there is none; ValueError for a format or an option that there is none of.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    chosen = options_of(format, options)
    store = resolve(Store.at(path_or_url))
    if store.is_local:
        store = Store.at(os.path.realpath(store.root))
    source(store.url)
    return Export(store.url, _digest(store, watch), tuple(splits), format, chosen)


def _digest(store: Store, watch: Callable[[Checked], object] | None) -> str:
    if store.exists(MANIFEST):
        return hashlib.sha256(store.read(MANIFEST)).hexdigest()
    stored = sorted((f"{split}/{key}", size) for split in SPLITS for key, size in (store / split).listing())
    seen = adding_up(watch, sum(size for _, size in stored))
    with ThreadPoolExecutor(READERS) as readers:
        digests = list(readers.map(lambda one: store.digest(one[0], seen), stored))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def target(path_or_url: str) -> Store:
    """Where an export is written; files get their names when they are whole."""
    store = Store.at(path_or_url)
    return Store(store.root, store.fs, staging=store.path(f"{BESIDE}/staging") if store.is_local else None)


@contextlib.contextmanager
def writing(export: Export, store: Store) -> Iterator[None]:
    """Write an export until the block ends. ValueError where something else is there, or another process writes it."""
    with contextlib.ExitStack() as held:
        if store.is_local:
            beside = Path(store.path(BESIDE))
            _check_free(export, store)
            beside.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(beside / "lock", "ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{store.url}: another process is writing here. Wait until it has ended.") from error
            # What a process left that was killed.
            shutil.rmtree(beside / "staging", ignore_errors=True)
        _check_free(export, store)
        if _plan_at(store) != export.key:
            store.put(PLAN, _json({"key": export.key, "from": export.location, **export.facts()}))
        yield
        if store.is_local:
            shutil.rmtree(beside / "staging", ignore_errors=True)


def _check_free(export: Export, store: Store) -> None:
    """ValueError where something else stands than the beginning of this export, or of one that came to no file."""
    if f"{store.url}/".startswith(f"{export.location}/"):
        raise ValueError(f"{store.url}: lies within the dataset that is exported. Choose another directory.")
    if not store.exists("") or _plan_at(store) == export.key:
        return
    if others := [key for key, _ in store.listing() if not key.startswith(f"{BESIDE}/")]:
        if _plan_at(store) is None:
            raise ValueError(f"{store.url}: is not empty; there is {others[0]}. Choose another directory.")
        raise ValueError(
            f"{store.url}: holds an export of another dataset, or in another way ({PLAN}). Remove it, or choose another "
            "directory."
        )


def _plan_at(store: Store) -> str | None:
    """The key of the export that was begun there."""
    try:
        return str(read_json(store, PLAN).get("key"))
    except FileNotFoundError:
        return None


def write_part(part: ExportFile, export: Export, path_or_url: str, seen: Callable[[int], object] | None = None) -> Written:
    """Write a part's files, unless they are there already, and its receipt. *seen* is told of tokens as they are exported,
    and of those of a part that is there.
    """
    store, receipt = target(path_or_url), f"{BESIDE}/parts/{part.key}.json"
    if (finished := _finished(part, export, store, receipt)) is not None:
        stored, count = finished
        if seen is not None:
            seen(count)
        return Written(stored, reused=True)
    count = furthest = 0

    def read(start: int, stop: int) -> None:
        """Some formats pass over a part twice, each time in order and by one thread: tokens count when they are first read."""
        nonlocal count, furthest
        new = max(stop - max(start, furthest), 0)
        count, furthest = count + new, max(stop, furthest)
        if seen is not None:
            seen(new)

    splits: Splits = {name: _Watched(**vars(split), seen=read) for name, split in export.source().items()}
    stored = tuple(FORMATS[export.format].write(splits, part, store, export.options))
    facts = {"key": export.key, "part": list(part), "objects": [list(one) for one in stored], "token_count": count}
    store.put(receipt, _json(facts))
    return Written(stored, reused=False)


class Written(NamedTuple):
    """The files of a part; whether an earlier run wrote them."""

    objects: tuple[StoredObject, ...]
    reused: bool


def _finished(part: ExportFile, export: Export, store: Store, receipt: str) -> tuple[tuple[StoredObject, ...], int] | None:
    """The files of a part that was written before, if each is there with every byte, and how many tokens they took."""
    try:
        facts = read_json(store, receipt)
        stored = tuple(StoredObject(*one) for one in facts["objects"])
        same = facts["key"] == export.key and facts["part"] == list(part)
        if not same or any(store.digest(one.key) != one for one in stored):
            return None
        return stored, int(facts.get("token_count", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whatever is there instead is written again


class Exported(NamedTuple):
    """What an export came to. ``reused``: parts that an earlier run had written. ``was_done``: there was nothing to do."""

    path: str
    format: str
    objects: tuple[StoredObject, ...]
    parts: int
    reused: int
    was_done: bool

    @property
    def byte_count(self) -> int:
        return sum(stored.size for stored in self.objects)


def done_before(export: Export, store: Store) -> Exported | None:
    """What the export came to, if an earlier run brought it to its end and its files are there."""
    try:
        record = read_json(store, RECORD)
        stored = tuple(StoredObject(*one) for one in record["objects"])
        if record["key"] != export.key or any(store.size(one.key) != one.size for one in stored):
            return None
        return Exported(store.url, export.format, stored, record["parts"], record["parts"], was_done=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(export: Export, written: Sequence[Written], path_or_url: str) -> Exported:
    """Write what needs all parts, and the record of the export."""
    store = target(path_or_url)
    objects = [stored for part in written for stored in part.objects]
    objects += FORMATS[export.format].finish(export.source(), objects, store, export.options)
    record = {"key": export.key, **export.facts(), "parts": len(written), "objects": [list(one) for one in objects]}
    store.put(RECORD, _json(record))
    reused = sum(part.reused for part in written)
    return Exported(store.url, export.format, tuple(objects), len(written), reused, was_done=False)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def write(
    export: Export, path_or_url: str, threads: int | None = None, watch: Callable[[Checked], object] | None = None
) -> Exported:
    """Export on this machine, several files at a time. *watch* is told again and again how far it is, in bytes of tokens."""
    store = target(path_or_url)
    if done := done_before(export, store):
        return done
    parts = FORMATS[export.format].plan(export.source(), export.options)
    with writing(export, store), ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        seen = adding_up(watch, TOKEN_BYTES * export.token_count)
        tasks = [pool.submit(write_part, part, export, path_or_url, lambda tokens: seen(TOKEN_BYTES * tokens)) for part in parts]
        try:
            return finish(export, [task.result() for task in tasks], path_or_url)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a dataset or a build's output; a local path or a URL")
    parser.add_argument("out", metavar="OUT", help="an empty directory, or one where this export was begun")
    add_target(parser)
    arguments.add_json(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how a dataset is exported."""
    parser.add_argument("--to", required=True, choices=FORMATS, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("--split", choices=SPLITS, help="this split alone")
    add_option_flags(parser, except_for=READING_ONLY)


def run(options: argparse.Namespace) -> int:
    begun = time.monotonic()
    splits = SPLITS if options.split is None else (options.split,)
    with terminal.progress("examine") as watch:
        order = export_of(options.path, options.to, given_options(options), splits, watch)
    with terminal.progress("export") as watch:
        done = write(order, options.out, watch=watch)
    seconds = time.monotonic() - begun
    if options.json:
        arguments.print_json(described(done, seconds))
    else:
        print("\n".join(lines(done, seconds)))
    return arguments.SAME


def described(done: Exported, seconds: float) -> dict[str, Any]:
    """For JSON."""
    objects = [stored._asdict() for stored in done.objects]
    return {**done._asdict(), "objects": objects, "byte_count": done.byte_count, "seconds": round(seconds, 3)}


def lines(done: Exported, seconds: float) -> Iterator[str]:
    """For people."""
    size = f"{terminal.size(done.byte_count)} in {terminal.plural(len(done.objects), 'file')}"
    if done.was_done:
        yield f"nothing to do: {done.path} is this export, {size}"
        return
    yield f"exported to {done.path}: {done.format}, {size}, {seconds:.1f} s"
    if done.reused:
        yield f"  {done.reused:,} of {terminal.plural(done.parts, 'part')} had been written before"
