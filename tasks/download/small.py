"""Small files, many at a time: each is read or fetched once, into memory, where its digest is taken and its text is cut."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flat_tokens.stores.local import named_errors, real_path, sync
from flat_tokens.stores.reading import descriptor
from flat_tokens.stores.store import Store
from flat_tokens.text import limits
from flat_tokens.text.formats import HEAD_BYTES, compression_of, detect_format, unpacked
from tasks.config import Source, available_memory
from tasks.download.fetch import check_remote, fetch_file, fetch_into, halves_in, may_be_crlf
from tasks.download.hub import BUCKETS, fetch_hub
from tasks.download.sources import NoRoomError, naming
from tasks.download.tables import TABLE
from tasks.locations import readable_directory
from tasks.models import FoundFile, SourceFile, Stamp, stamp_of, version_of

SMALL_BYTES = 1 << 20
"""Bytes of a small file, at most."""
PACK_FILES, PACK_BYTES = 1000, 32 << 20
MOST_UNPACKED = 16 << 20
"""A small file that becomes larger than this when it is unpacked is treated as a large one."""
FETCHERS = 16
"""Requests at a time, of servers that are asked for one file at a time."""


def packs_of(found: Iterable[FoundFile]) -> Iterator[tuple[FoundFile, ...]]:
    """Files as they are handed out: small neighbours of a source together, others alone."""
    pack, size = list[FoundFile](), 0
    for file in found:
        fits = is_small(file) and len(pack) < PACK_FILES and size + (file.size or 0) <= PACK_BYTES
        if pack and not (fits and is_small(pack[0]) and file.source == pack[0].source):
            yield tuple(pack)
            pack, size = [], 0
        pack.append(file)
        size += file.size or 0
    if pack:
        yield tuple(pack)


def is_small(found: FoundFile) -> bool:
    return found.size is not None and found.size <= SMALL_BYTES and not found.uri.startswith(TABLE)


class Raw(NamedTuple):
    """A file as its store has it: its bytes, and where they are on this machine. ``location``: empty if they are only here."""

    data: bytes
    location: str = ""
    stamp: Stamp = ()


def read_small(
    pack: Sequence[FoundFile],
    sources: tuple[Source, ...],
    scratch: Path,
    digests: Sequence[str] = (),
    room: int | None = None,
) -> Iterator[tuple[SourceFile, bytes | None]]:
    """Read or fetch small files of one source, in order. Yields each file with the bytes of its text, or None if they are not
    in memory. *digests*: of the files, if they are known. *room*: bytes that all of them may take in *scratch*. Errors as of
    ``fetch_file``.
    """
    source, files = sources[pack[0].source], scratch / "files"
    with contextlib.ExitStack() as stack, naming(sources, pack[0].source):
        keep = _Keeper(files, stack, room)
        alone = partial(fetch_file, sources=sources, scratch=scratch, room=room)
        is_local = "://" not in pack[0].uri
        raws = _from_disk(pack) if is_local else _from_store(pack, files, digests)
        for found, raw in zip(pack, raws, strict=True):
            if raw is None:  # it is not what it was, or cannot be had so: the long way says what is wrong
                yield alone(found), None
                continue
            data, location, stamp = raw
            sha256 = hashlib.sha256(data).hexdigest()
            if not location:
                location, stamp = keep(f"{sha256}.raw", data, found.name)
            text = data
            if ending := compression_of(data[:HEAD_BYTES], found.name):
                parts = _unpacked(data, ending, found.name, source.max_expansion or limits.MAX_EXPANSION)
                if parts is None:
                    yield alone(found), None
                    continue
                text = parts
                location, stamp = keep(sha256, text, found.name)
            kind = detect_format(text[:HEAD_BYTES], found.name, source.file_format)
            file = SourceFile(found.source, found.name, len(text), sha256, kind, location, found.split, stamp, found)
            yield file._replace(line_ends="crlf") if may_be_crlf(source, kind) and b"\r\n" in text else file, text


class _Keeper:
    """Keeps bytes as files of a directory, each under the name of its content. At the end of *stack* they are on the disk: a file
    of that name with other bytes would be read as text.
    """

    def __init__(self, directory: Path, stack: contextlib.ExitStack, room: int | None) -> None:
        self._directory, self._stack, self._left = directory, stack, room
        self._halves: Path | None = None
        self._new: list[Path] = []

    def __call__(self, name: str, data: bytes, of: str) -> tuple[str, Stamp]:
        """Path and stamp of the file *name*, which has *data* of the file *of* of the source. One that has it stays."""
        path = self._directory.absolute() / name
        with contextlib.suppress(OSError):
            kept, stamp = _whole(os.fspath(path), len(data))
            if kept == data:
                return os.fspath(path), stamp
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise NoRoomError(f"{of} takes {-self._left:,} bytes more than scratch_bytes leaves. Raise it.")
        if self._halves is None:
            self._stack.callback(self._sync)
            self._halves = self._stack.enter_context(halves_in(self._directory))
        half = self._halves / name
        with named_errors(half):
            half.write_bytes(data)
            os.replace(half, path)
        self._new.append(path)
        return os.fspath(path), stamp_of(os.stat(path))

    def _sync(self) -> None:
        """Sync all at once: the file system waits for the disk once for many."""
        if self._new:
            with ThreadPoolExecutor(FETCHERS, "sync") as threads:
                list(threads.map(sync, self._new))
            sync(self._directory)


def _whole(path: str, size: int) -> tuple[bytes, Stamp]:
    """The first *size* bytes of a plain file and one more, and its stamp when they had been read."""
    opened = descriptor(path, os.O_NOFOLLOW)
    try:
        data = os.read(opened, size + 1)
        while len(data) < size and (more := os.read(opened, size + 1 - len(data))):
            data += more
        return data, stamp_of(os.fstat(opened))
    finally:
        os.close(opened)


def _from_disk(pack: Sequence[FoundFile]) -> Iterator[Raw | None]:
    """Read files of this machine. None for a file that has changed since it was listed."""
    checked = set[str]()
    for found in pack:
        parent = found.uri.rpartition("/")[0]
        try:
            if parent not in checked and readable_directory(parent) == f"{parent}/":
                checked.add(parent)
            data, stamp = _whole(found.uri, found.size or 0)
        except (OSError, ValueError):
            yield None
            continue
        is_it = parent in checked and len(data) == found.size and stamp == found.stamp
        yield Raw(data, found.uri, stamp) if is_it else None


def _from_store(pack: Sequence[FoundFile], files: Path, digests: Sequence[str]) -> Iterator[Raw | None]:
    """Files from elsewhere, each fetched by one request unless a copy is here. None for one that has to be fetched alone."""
    for found in pack:
        check_remote(found)
    kept = [_kept(files, digest) for digest in digests] or [None] * len(pack)
    left = [found for found, raw in zip(pack, kept, strict=True) if raw is None]
    by_server = pack[0].uri.startswith(("http://", "https://", BUCKETS))

    def fetch(found: FoundFile) -> Raw:
        if by_server:
            content = io.BytesIO()
            fetch_into(found, content)
            return Raw(content.getvalue())
        path = real_path(fetch_hub(found, files))
        data, stamp = _whole(path, os.stat(path).st_size)
        return Raw(data, path, stamp)

    alone = by_server or pack[0].uri.startswith(("hf://", "datasets://"))
    fetched = _one_by_one(fetch, left) if alone else _at_once(left)
    for raw in kept:
        yield raw or next(fetched)


def _kept(files: Path, digest: str) -> Raw | None:
    """A copy that was fetched before, with this digest."""
    path = os.fspath(files.absolute() / f"{digest}.raw")
    with contextlib.suppress(OSError):
        data, stamp = _whole(path, os.stat(path).st_size)
        if hashlib.sha256(data).hexdigest() == digest:
            return Raw(data, path, stamp)
    return None


def _one_by_one(fetch: Callable[[FoundFile], Raw], left: Sequence[FoundFile]) -> Iterator[Raw]:
    with ThreadPoolExecutor(FETCHERS, "fetch") as fetchers:
        yield from fetchers.map(fetch, left)


def _at_once(left: Sequence[FoundFile]) -> Iterator[Raw | None]:
    """Objects of one store, all asked for at a time."""
    if not left:
        return
    store = replace(Store.at(left[0].uri), root="")
    keys = [store.fs._strip_protocol(found.uri) for found in left]
    # A byte more, so that an object that has grown shows. The empty ones have no bytes to ask for.
    stops = [(found.size or 0) + 1 for found in left]
    some = [k for k, found in enumerate(left) if found.size]
    answers = dict(zip(some, store.read_ranges([keys[k] for k in some], [0] * len(some), [stops[k] for k in some]), strict=True))
    store.fs.invalidate_cache()

    def raw(k: int) -> Raw | None:
        data, found = answers.get(k, b""), left[k]
        if not isinstance(data, bytes) or len(data) != found.size:
            return None
        md5 = hashlib.md5(data, usedforsecurity=False)  # names the version of an object that was written at once
        try:
            is_it = found.immutable is None or found.immutable.partition(":")[2].strip('"') == md5.hexdigest()
            return Raw(data) if is_it or version_of(store.info(keys[k])) == found.immutable else None
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(FETCHERS, "fetch") as pool:
        yield from pool.map(raw, range(len(left)))


def _unpacked(data: bytes, ending: str, name: str, max_expansion: int) -> bytes | None:
    """The unpacked bytes of a compressed file; None if there are many."""
    parts, size = list[bytes](), 0
    for part in unpacked(io.BytesIO(data), ending, name, max_expansion, available_memory() // 4):
        parts.append(part)
        size += len(part)
        if size > MOST_UNPACKED:
            return None
    return b"".join(parts)
