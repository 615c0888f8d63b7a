"""Bringing source files to this machine, with their digests: remote ones fetched, compressed ones unpacked, others in place."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from flat_tokens.stores.answers import LEAST_BYTES, WINDOW_SECONDS, bounded, check_encoding
from flat_tokens.stores.local import kind_of, locked, make_directory, named_errors, real_path
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import Store, read_json
from flat_tokens.text import limits
from flat_tokens.text.formats import HEAD_BYTES, FileFormat, compression_of, detect_format, unpacked
from tasks.config import Source, available_memory
from tasks.download.hub import BUCKETS, check_requests, fetch_hub
from tasks.download.sources import TIMEOUT, NoRoomError, fetching, naming
from tasks.download.tables import TABLE, write_rows
from tasks.locations import checked_session, readable
from tasks.models import FoundFile, SourceFile, digest_of, version_of
from tasks.output.leases import attempt, sweep
from tasks.output.paths import STAGING
from tasks.text.files import changed_meanwhile, stamp

RECEIVED_BYTES = 1 << 18
"""Received bytes that are written at a time."""
MAX_BYTES = 10 << 30
"""Size of a file whose server does not say it, unless the source has ``max_bytes``."""
FREE_BYTES, FREE_SHARE = 1 << 30, 20
"""Bytes that downloads leave free on a disk: these, or a part of this many of a small disk. They look after each ROOM_BYTES."""
ROOM_BYTES = 16 << 20
LOOK_BYTES = 1 << 20
UNKNOWN_BYTES = 1_000_000_000
"""The size that counts for a file of unknown size."""


ROOM_SECONDS = 0.1
"""How often a full scratch directory is looked at again."""
FETCH = "fetch"
LOCKS = f"{STAGING}/{FETCH}/*.lock"
MORE_ROOM = "Raise it, or lower slice_bytes: the files of a slice are there together."


def fetch_file(found: FoundFile, sources: tuple[Source, ...], scratch: Path, room: int | None = None) -> SourceFile:
    """Fetch a file and take its digest. *room*: bytes that it may take in *scratch*. ValueError if it is damaged or of no
    known format; OSError if a server did not give it in several tries; NoRoomError.
    """
    source, files, is_local = sources[found.source], scratch / "files", "://" not in found.uri
    with naming(sources, found.source):
        limit, too_large = source.max_bytes, ValueError
        if found.size is None and room is not None and room < (limit or MAX_BYTES):
            limit, too_large = room, NoRoomError
        path = Path(readable(real_path(found.uri))) if is_local else _bring(found, files, limit, too_large)
        before = stamp(os.fspath(path))
        if is_local:
            found = found._replace(size=before[0], stamp=before)
        sha256 = Store.at(path.parent).digest(path.name, "sha256").digest
        here, ending = Path(real_path(path)), compression_of(_head(path), found.name)
        if ending:
            most = None if room is None else room - (0 if is_local else os.path.getsize(path))
            here = _unpack(path, found.name, ending, files / sha256, source.max_expansion or limits.MAX_EXPANSION, most)
        # A file that became a link meanwhile is another one, too.
        if stamp(os.fspath(path)) != before or (is_local and real_path(path) != os.fspath(path)):
            raise ValueError(changed_meanwhile(found.name))
        now, real = stamp(os.fspath(here)) if ending else before, real_path(here)
        kind, size = detect_format(_head(here), found.name, source.file_format), os.path.getsize(real)
        file = SourceFile(found.source, found.name, size, sha256, kind, real, found.split, now, found)
        return file._replace(line_ends="crlf") if may_be_crlf(source, file.format) and _has_crlf(here) else file


def may_be_crlf(source: Source, kind: FileFormat) -> bool:
    """Whether it matters if a file has CR LF: its documents end at line feeds."""
    separator = source.document_separator or ""
    return kind == "text" and "\n" in separator and "\r" not in separator


def _has_crlf(path: Path) -> bool:
    """Whether a file has CR LF anywhere."""
    before = b""
    with open_plain(path) as file:
        while block := file.read(LOOK_BYTES):
            if b"\r\n" in before + block:
                return True
            before = block[-1:]
    return False


@contextlib.contextmanager
def halves_in(files: Path) -> Iterator[Path]:
    """A directory among fetched files for what is not whole yet. If this process dies, another one sweeps it."""
    make_directory(files)
    with attempt(Store.at(files), files, FETCH) as place:
        yield Path(place.staging)


@contextlib.contextmanager
def room_taken(files: Path, size: int | None, room: int, waiting: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """A directory among fetched files for *size* bytes of the *room* that processes share there. It waits until these are free,
    at last until nobody else has any, and calls *waiting* meanwhile. Each notes what it takes in the lock of its directory, which
    ends with it. NoRoomError if files that are kept have the room.
    """
    with contextlib.ExitStack() as stack:
        while (own := take_room(files, size, room, stack)) is None:
            waiting()
            time.sleep(ROOM_SECONDS)
        yield own


def take_room(files: Path, size: int | None, room: int, stack: contextlib.ExitStack, *, keeps: bool = False) -> Path | None:
    """Take *size* bytes of the room among fetched files until *stack* ends, and return a directory there. None if the bytes are
    not free now. *size*: None for all bytes that kept files leave. *keeps*: the bytes are of files that stay after it.
    """
    make_directory(files)
    with locked(files / ".lock"):
        sweep(os.fspath(files))
        taken, kept = _taken_in(files)
        size = max(room - kept, 0) if size is None else size
        if taken + kept + size > room:
            if taken:
                return None
            raise NoRoomError(
                f"{files} keeps {kept:,} bytes of this and other builds, and {size:,} more are over scratch_bytes, {room:,}. "
                "Raise it, or remove files there while nothing is built."
            )
        own = stack.enter_context(halves_in(files))
        with named_errors(own):
            own.with_suffix(".lock").write_text(f"0 {kept + size}" if keeps else f"{size} 0")
        return own


def count_more(files: Path, size: int) -> None:
    """Count *size* bytes more than processes have noted for files that stay."""
    with locked(files / ".lock"):
        for lock in files.glob(LOCKS):
            with contextlib.suppress(FileNotFoundError), lock.open("r+") as file:
                taken, later = (file.read() or "0 0").split()
                file.seek(0)
                file.write(f"{taken} {int(later) and int(later) + size}")


def kept_in(files: Path) -> int:
    """Bytes of the fetched files that stay in a directory, or will, as processes have noted."""
    return _taken_in(files)[1] if kind_of(files) else 0


def _taken_in(files: Path) -> tuple[int, int]:
    """Bytes that are taken until files are removed, and those of the files that stay."""
    taken = kept = 0
    for entry in os.scandir(files):
        with contextlib.suppress(FileNotFoundError):
            kept += entry.stat().st_size * entry.is_file()
    for lock in files.glob(LOCKS):
        with contextlib.suppress(FileNotFoundError):  # its directory is gone, too
            size, later = map(int, (lock.read_text() or "0 0").split())
            taken, kept = taken + size, max(kept, later)
    return taken, kept


def check_remote(found: FoundFile) -> None:
    """ValueError if a remote file may not be read."""
    readable(found.uri.replace("datasets://", "hf://datasets/", 1).partition("?")[0])
    if found.uri.startswith("hf://"):
        check_requests()


def _bring(found: FoundFile, files: Path, most: int | None, too_large: type[ValueError]) -> Path:
    """Fetch a remote file, under the name of its content, unless there is a whole copy of the version that the server has."""
    if not (is_table := found.uri.startswith(TABLE)):
        check_remote(found)
    if found.uri.startswith(("hf://", "datasets://")) and not found.uri.startswith(BUCKETS):
        return fetch_hub(found, files)
    note = note_of(found, files)
    lock = files / f".{note.stem}.lock"
    # Others that wait find the file then. A late one may fetch it again.
    with halves_in(files) as halves, locked(lock), contextlib.ExitStack() as at_end:
        at_end.callback(lock.unlink, missing_ok=True)
        if found.immutable and (known := _noted(note)):
            return known
        with (halves / "raw").open("wb") as file:
            sha256 = write_rows(found, file) if is_table else fetch_into(found, file, most, too_large)
            file.flush()
            os.fsync(file.fileno())
        path = _settle(halves / "raw", files / f"{sha256}.raw", sha256)
        Store.at(files, staging=os.fspath(halves)).put(note.name, json.dumps({"uri": found.uri, "sha256": sha256}).encode())
    return path


def note_of(found: FoundFile, files: Path) -> Path:
    """The file that says which copy of a version is here."""
    return files / f"{digest_of(found.uri, found.immutable, found.size)}.json"


def _settle(temporary: Path, target: Path, sha256: str) -> Path:
    """Give a file its name. An equal one of that name stays, as somebody may be reading it."""
    with locked(target.parent / ".lock"):
        if kind_of(target) is not None and Store.at(target.parent).digest(target.name, "sha256").digest == sha256:
            temporary.unlink()
        else:
            os.replace(temporary, target)
    return target


def _noted(note: Path, target: Path | None = None) -> Path | None:
    """*target*, or a file named by its digest, if it is complete: it has the digest that is in *note*. None otherwise."""
    try:
        sha256 = read_json(Store.at(note.parent), note.name)["sha256"]
        path = target or note.with_name(f"{sha256}.raw")
        return path if Store.at(path.parent).digest(path.name, "sha256").digest == sha256 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch_into(found: FoundFile, file: BinaryIO, most: int | None = None, too_large: type[ValueError] = ValueError) -> str:
    """Write a remote file to an empty one, going on if a connection broke. Return its sha256. *most*: bytes of a file whose
    server does not say its size. OSError if it has more bytes than that, or than its server said, and if it fills the disk.
    """
    size = furthest = looked = 0
    sha256 = hashlib.sha256()
    state: dict[str, str] = {}
    limit, whose = (
        (most or MAX_BYTES, "source.max_bytes or left of scratch_bytes")
        if found.size is None
        else (found.size, "the size that the server said")
    )
    check_room(file, found.size or 0)

    def go_on() -> None:
        nonlocal size, furthest, sha256, looked
        for start, block in _blocks(found, size, state):
            if start < size:
                file.seek(start)
                file.truncate()
                sha256, size = hashlib.sha256(), start
            if size + len(block) > limit:
                remedy = "it changed while it was fetched" if found.size is not None else "raise that if it is trusted"
                raise too_large(f"it has more than {limit:,} bytes, which is {whose}: {remedy}")
            file.write(block)
            sha256.update(block)
            size += len(block)
            furthest = max(furthest, size)
            if size - looked >= ROOM_BYTES:
                looked = size
                check_room(file, 0)
        if found.size is not None and size < found.size:
            raise ConnectionError(f"ended after {size} of {found.size} bytes")

    fetching(
        go_on, found.uri, lambda: furthest // int(LEAST_BYTES * WINDOW_SECONDS)
    )  # slower than the least speed is no progress
    return sha256.hexdigest()


def check_room(file: BinaryIO, more: int) -> None:
    """OSError if the disk of a *file* would have no reserve with *more* bytes."""
    if isinstance(file, io.BytesIO):
        return
    disk = shutil.disk_usage(file.name)
    if (left := disk.free - more) < (reserve := min(FREE_BYTES, disk.total // FREE_SHARE)):
        raise OSError(f"the disk of the downloads would have {left:,} bytes left, and {reserve:,} stay free. Make room.")


def _blocks(found: FoundFile, start: int, state: dict[str, str]) -> Iterator[tuple[int, bytes]]:
    """The bytes of a remote file from *start* on, in blocks, each with where it begins. They begin at 0 if the server sends
    no parts, or does not say whether the parts are of the same file. *state*: how the server named the file when it first sent
    some of it.
    """
    if not found.uri.startswith(("http://", "https://")):
        store = Store.at(found.uri)
        for is_read in (False, True):  # an object is checked before its first request and after its last
            store.fs.invalidate_cache()
            if found.immutable and version_of(store.info("")) != found.immutable:
                raise ValueError("it changed after the build had found it. Run the build again.")
            for block in () if is_read else store.blocks("", start):
                yield start, block
                start += len(block)
        return
    etag = (found.immutable or "").partition("ETag:")[2]
    same = etag or state.get("Last-Modified", "")
    headers = {"Accept-Encoding": "identity"}
    if start and same:
        headers |= {"Range": f"bytes={start}-", "If-Range": same}
    with checked_session(found.uri) as session, session.get(found.uri, headers=headers, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        if etag and response.headers.get("ETag", etag) != etag:
            raise ValueError("it changed after the build had found it. Run the build again.")
        if response.status_code != 206:
            start = 0
            state.clear()
            state.update({name: response.headers[name] for name in ("ETag", "Last-Modified") if name in response.headers})
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise ValueError(f"the server sent {response.headers.get('Content-Range')!r} instead of bytes {start} and on")
        elif any(response.headers.get(name, value) != value for name, value in state.items()):
            raise ValueError("it changed while it was fetched. Run the build again.")
        check_encoding(found.uri, response.headers)
        read = partial(response.raw.read1, RECEIVED_BYTES, decode_content=False)
        for block in bounded(found.uri, iter(read, b""), 1 << 62):
            yield start, block
            start += len(block)


def _head(path: Path) -> bytes:
    with open_plain(path) as file:
        return file.read(HEAD_BYTES)


def _unpack(path: Path, name: str, ending: str, target: Path, max_expansion: int, most: int | None) -> Path:
    """Unpack a file, so that it can be cut into slices. Damage is found before any of it is used."""
    note = target.with_suffix(".json")
    with halves_in(target.parent) as halves:
        if _noted(note, target):
            return target
        with open_plain(path) as file, replace(Store.at(halves), digests="sha256").create("unpacked") as writer:
            for block in unpacked(file, ending, name, max_expansion, available_memory() // 4):
                writer.write(block)
                if most is not None and writer.size > most:
                    raise NoRoomError(f"{name} takes more, unpacked, than scratch_bytes leaves for it. {MORE_ROOM}")
        _settle(halves / "unpacked", target, writer.stored.digest)
        Store.at(target.parent, staging=os.fspath(halves)).put(note.name, json.dumps({"sha256": writer.stored.digest}).encode())
    return target
