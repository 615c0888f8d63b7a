"""Stores: a local directory or any fsspec URL, with durable, digested writes of whole objects.

An object appears under its name complete or not at all: on a local disk it is written under a staging name, synced and renamed;
an object store shows an upload when it is finished. Requests of a remote store that fail because it is busy or the connection
broke are repeated. Records are JSON documents: manifests, receipts, metadata. A record that a stranger wrote must not stop its
readers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Self, TypeAlias, cast

import numpy as np
from blake3 import blake3

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.extras import LazyModule, extra
from flat_tokens.stores import local, reading, signing
from flat_tokens.stores.local import DIRECT_ALIGNMENT, WRITE_BUFFER_BYTES
from flat_tokens.stores.retry import CREDENTIALS, PATIENCE_SECONDS, SILENCE_SECONDS, persist, status_of

if TYPE_CHECKING:
    import fsspec
else:
    fsspec = LazyModule("fsspec", "a store")  # takes as long as numpy, and a local dataset is read without it

DIRECT_READ_BYTES = 1 << 18
PART_BYTES = 16 << 20
"""Larger objects of object stores are read and written in parts of this size."""
PARTS_AT_ONCE = 4
UPLOADS = 6
"""Times that an upload in parts is begun, if it fails with errors that a repeated request does not cure."""
CONNECTIONS = 64
SIZES_AT_ONCE = 16
"""Objects of a remote store whose sizes are asked for together."""
AZURE = ("az", "abfs", "abfss")
REMOTE = ("http", "https", "gs", "gcs", "s3", "s3a", *AZURE, "hf", "memory")
"""Stores that are read next to local files. Drivers of others may run, or request, what a name says."""
LAST_BYTES = {"s3", "gs", "http", "https"}
"""Protocols whose clients read the last bytes of an object without knowing its size. That of Azure does not."""
CONNECT_SECONDS = 10.0
OTHER_THAN_A_PATH = re.compile(r"://|::|^[~.]|^$")
"""In what fsspec makes a path of. Else it is one."""
REQUEST_SECONDS = 300.0
"""For the data of one request, which is mostly a part of an object."""

PathOrUrl: TypeAlias = str | os.PathLike[str]
NO_OBJECT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors that mean "there is no such object"."""


DigestKind = Literal["blake3", "sha256"]
DIGESTS: dict[DigestKind, Callable[..., Any]] = {"blake3": blake3, "sha256": hashlib.sha256}
"""The kinds of digests. BLAKE3 takes a third of the time; sha256 is what others tell, and what older releases wrote."""


class StoredObject(NamedTuple):
    """A stored object: its *key* below the store's root, *size* in bytes, *digest* of its content, hexadecimal: a sha256, or
    ``blake3:`` and a BLAKE3.
    """

    key: str
    size: int
    digest: str

    @property
    def kind(self) -> DigestKind:
        """The kind of the digest."""
        return "blake3" if self.digest.startswith(BLAKE3) else "sha256"

    @property
    def hexadecimal(self) -> str:
        """The digest's digits."""
        return self.digest.removeprefix(BLAKE3)

    @property
    def digest_text(self) -> str:
        """The beginning of the digest, for people."""
        return f"{self.kind} {self.hexadecimal[:12]}"

    def is_of(self, data: bytes) -> bool:
        """Whether *data* is the object's content."""
        return len(data) == self.size and content_digest(data, self.kind) == self.digest

    def described(self) -> JsonObject:
        """The object as a manifest has it."""
        return {"key": self.key, "size": self.size, self.kind: self.hexadecimal}


BLAKE3 = "blake3:"


def is_below(key: object) -> bool:
    """Whether a name in a manifest, a receipt or an index is that of an object next to it, or below."""
    return isinstance(key, str) and not {"\0", "\\"} & set(key) and not {"", ".", ".."} & set(key.split("/"))


def stored_object(described: JsonFacts) -> StoredObject:
    """The object that a manifest describes."""
    digest = described["sha256"] if "sha256" in described else f"{BLAKE3}{described['blake3']}"
    return StoredObject(described["key"], described["size"], digest)


def content_digest(data: bytes, kind: DigestKind = "blake3") -> str:
    """The digest of an object's content."""
    return _as_text(DIGESTS[kind](data), kind)


def _as_text(digest: Any, kind: DigestKind) -> str:
    return f"{BLAKE3}{digest.hexdigest()}" if kind == "blake3" else str(digest.hexdigest())


@dataclass(frozen=True)
class LocalFiles:
    """fsspec's local file system, imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(fsspec.filesystem("file"), name)


@dataclass(frozen=True)
class Store:
    """A tree of objects below *root*. Keys are relative and use forward slashes.

    *staging*: local objects are written in this directory, on the same disk, before they get their names; large objects of
    remote stores are kept here until they are complete. *read_once*: the data is read once, so large reads from a local
    disk go past the page cache. *patience*: requests of a remote store are repeated for this many seconds. *top*: the store that
    ``/`` led down from; from there on, writes follow no link. *digests*: the kind of the digests of written objects. *durable*:
    a local object that is written survives a power loss; else ``local.make_durable`` sees to it for many objects together.
    *sizes*: those of remote objects, as far as somebody knows them, by their whole path.
    """

    root: str
    fs: fsspec.AbstractFileSystem | LocalFiles = field(repr=False)
    staging: str | None = None
    read_once: bool = False
    patience: float = PATIENCE_SECONDS
    top: str | None = field(default=None, repr=False, compare=False)
    digests: DigestKind = field(default="blake3", repr=False)
    durable: bool = field(default=True, repr=False, compare=False)
    sizes: Mapping[str, int] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def at(cls, path_or_url: PathOrUrl, staging: str | None = None, read_once: bool = False) -> Self:
        """The store at a local path or fsspec URL."""
        url = os.fspath(path_or_url)
        if OTHER_THAN_A_PATH.search(url):
            fs, root = fsspec.core.url_to_fs(url, **client_options(url))
            fs = LocalFiles() if "file" in fs.protocol else fs
        else:
            fs, root = LocalFiles(), os.path.join(os.getcwd(), url)
        return cls(root.rstrip("/") or "/", fs, staging, read_once)

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFiles)

    @property
    def url(self) -> str:
        """The root as a person writes it: a plain path if it is local, else a URL."""
        return self.root if self.is_local else self.url_of(self.root)

    def __truediv__(self, name: str) -> Store:
        return replace(self, root=posixpath.join(self.root, name), top=self.top or self.root)

    def path(self, key: str) -> str:
        return posixpath.join(self.root, key) if key else self.root

    def ask(self, operation: str, key: str = "", /, *arguments: Any, **options: Any) -> Any:
        """Result of one of the file system's own operations on a path, which is repeated if the store is remote and its error
        transient. For those of fsspec's operations that may be done twice: ``info``, ``ls``, ``find``, ``cat_file``.
        """
        if self.is_local:
            return getattr(self.fs, operation)(self.path(key), *arguments, **options)
        fs, path = self.connected(), self.path(key)
        return persist(lambda: getattr(fs, operation)(path, *arguments, **options), self._named(key), self.patience)

    def read(self, key: str) -> bytes:
        """The whole object. FileNotFoundError if there is none."""
        if self.is_local:
            with local.named_errors(self.path(key)), reading.open_plain(self.path(key)) as file:
                return file.read()
        # Without a start, the client of S3 asks for the size first.
        return self._remote_bytes(key, start=0 if "s3" in self.protocols else None)

    def _remote_bytes(self, key: str, **bounds: int | None) -> bytes:
        """The bytes of a remote object from ``start`` to ``end``. None, if no byte is there."""
        try:
            return bytes(self.ask("cat_file", key, **bounds))
        except Exception as error:
            if status_of(error) == 416:
                return b""
            raise

    def open(self, key: str) -> BinaryIO:
        """An object, open for reading."""
        if self.is_local:
            return reading.open_plain(self.path(key))
        return cast("BinaryIO", self.connected().open(self.path(key), "rb"))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes ``start:stop`` of an object."""
        if not self.is_local:
            return _checked(self.ask("cat_file", key, start=start, end=stop), start, stop) if start < stop else b""
        fd = reading.descriptor(self.path(key))
        try:
            parts = []
            while start < stop and (part := os.pread(fd, stop - start, start)):
                parts.append(part)
                start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except OSError as error:
            local.raise_named(error, self.path(key))
        finally:
            os.close(fd)

    def read_ranges(
        self, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int | None]
    ) -> list[bytes | FileNotFoundError]:
        """Bytes ``starts[k]:stops[k]`` of object ``keys[k]`` for every k; ``-n:None`` are its last n bytes.

        From an object store all are read at once. For a missing object its FileNotFoundError is returned; bytes after an
        object's end are left out.
        """
        if self.is_local:
            return [self._read_local(key, start, stop) for key, start, stop in zip(keys, starts, stops, strict=True)]
        fs, paths = self.connected(), [self.path(key) for key in keys]
        answers: list[bytes | FileNotFoundError] = [b""] * len(keys)
        starts, stops, answered = self._from_the_beginning(keys, starts, stops)
        for k, answer in answered.items():
            answers[k] = answer
        left = [k for k in range(len(keys)) if k not in answered]

        def ask_for_the_rest() -> None:
            asked = [paths[k] for k in left], [starts[k] for k in left], [stops[k] for k in left]
            failed: dict[int, BaseException] = {}
            for k, part in zip(left, fs.cat_ranges(*asked, on_error="return"), strict=True):
                if isinstance(part, BaseException) and not isinstance(part, FileNotFoundError):
                    failed[k] = part
                else:
                    answers[k] = part if isinstance(part, FileNotFoundError) else _checked(part, starts[k], stops[k])
            left[:] = failed
            for error in failed.values():
                raise error

        persist(ask_for_the_rest, self._named(keys[0] if keys else ""), self.patience)
        return answers

    @property
    def reads_last_bytes(self) -> bool:
        """Whether the last bytes of an object can be read without its size."""
        return self.is_local or bool(LAST_BYTES & self.protocols)

    def _from_the_beginning(
        self, keys: Sequence[str], starts: Sequence[int], stops: Sequence[int | None]
    ) -> tuple[list[int], list[int | None], dict[int, bytes | FileNotFoundError]]:
        """Starts and stops with the sizes of objects in place of last bytes, if the store does not read these; and, by their
        numbers, the answers that are known with the sizes: of missing and empty objects.
        """
        counted, ends, answered = list(starts), list(stops), dict[int, bytes | FileNotFoundError]()
        if self.reads_last_bytes or not (last := [k for k, stop in enumerate(stops) if stop is None]):
            return counted, ends, answered

        def size_of(k: int) -> int | FileNotFoundError:
            if (size := (self.sizes or {}).get(self.path(keys[k]))) is not None:
                return size
            try:
                return self.size(keys[k])
            except FileNotFoundError as error:
                return error

        with ThreadPoolExecutor(min(len(last), SIZES_AT_ONCE)) as pool:
            for k, size in zip(last, pool.map(size_of, last), strict=True):
                if isinstance(size, FileNotFoundError):
                    answered[k] = size
                elif not size:
                    answered[k] = b""
                else:
                    counted[k], ends[k] = max(size + starts[k], 0), size
        return counted, ends, answered

    def _read_local(self, key: str, start: int, stop: int | None) -> bytes | FileNotFoundError:
        try:
            if stop is None:
                size = self.size(key)
                start, stop = max(size + start, 0), size
            return self.read_range(key, start, stop)
        except FileNotFoundError as error:
            return error

    def connected(self) -> fsspec.AbstractFileSystem:
        """The file system for this process: a forked child must not use its parent's connections and event loop."""
        if getattr(self.fs, "_pid", None) in (None, os.getpid()):
            return self.fs
        return type(self.fs)(*self.fs.storage_args, **self.fs.storage_options)

    @contextlib.contextmanager
    def borrow_range(self, key: str, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes ``start:stop`` of an object, in a buffer that is reused after the ``with`` block."""
        if self.read_once and self.is_local and DIRECT_READ_BYTES <= stop - start <= WRITE_BUFFER_BYTES - 2 * DIRECT_ALIGNMENT:
            buffer = local.take_buffer()
            try:
                if (data := reading.read_direct(self.path(key), start, stop, buffer)) is not None:
                    yield data
                    return
            finally:
                local.give_back(buffer)
        yield memoryview(self.read_range(key, start, stop))

    def info(self, key: str) -> dict[str, Any]:
        """The store's description of an object: its size, the time of its writing, its etag or generation."""
        return dict(self.ask("info", key))

    def size(self, key: str) -> int:
        """Size in bytes; FileNotFoundError if there is no such object."""
        return os.stat(self.path(key)).st_size if self.is_local else int(self.info(key)["size"])

    def exists(self, key: str) -> bool:
        """Whether there is an object, or anything below a prefix. A store that does not answer raises an error."""
        if self.is_local:
            return local.kind_of(self.path(key)) is not None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.info(key)
            return True
        return False

    def has(self, key: str) -> bool:
        """Whether there is an object with exactly this name: one request. ``exists`` also asks for a prefix if there is none."""
        if self.is_local:
            return local.kind_of(self.path(key)) == "file"
        with contextlib.suppress(FileNotFoundError):
            self._remote_bytes(key, start=0, end=1)
            return True
        return False

    def blocks(self, key: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of an object from *start* on, in order, in blocks of bounded size."""
        if self.is_local:
            with local.named_errors(self.path(key)), reading.open_plain(self.path(key)) as file:
                file.seek(start)
                while block := file.read(WRITE_BUFFER_BYTES):
                    yield block
            return
        while True:
            part = self._remote_bytes(key, start=start, end=start + PART_BYTES)
            # A server that knows no ranges sends the whole object.
            yield part if len(part) <= PART_BYTES else part[start:]
            if len(part) != PART_BYTES:
                return
            start += PART_BYTES

    def digest(self, key: str, kind: DigestKind | None = None, seen: Callable[[int], object] | None = None) -> StoredObject:
        """Read an object and return its size and digest as they are now, of a *kind*, or else of that which the store writes.
        *seen* is called with the size of each block.
        """
        kind = kind or self.digests
        digest, size = DIGESTS[kind](), 0
        for block in self.blocks(key):
            digest.update(block)
            size += len(block)
            if seen is not None:
                seen(len(block))
        return StoredObject(key, size, _as_text(digest, kind))

    def now(self, stored: StoredObject, seen: Callable[[int], object] | None = None) -> StoredObject:
        """Read an object again: what it is now, with a digest of the same kind."""
        return self.digest(stored.key, stored.kind, seen)

    def listing(self) -> Iterator[tuple[str, int]]:
        """Every object below the root as (key, size). For checks and clean-up only: listings of object stores lag."""
        return ((key, int(info["size"] or 0)) for key, info in self.infos())

    def infos(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every object below the root as (key, info), as ``listing`` does. Of a local one, info has ``size`` and ``mtime``."""
        prefix = len(self.root.rstrip("/")) + 1
        if not self.is_local:
            self.fs.invalidate_cache()
            found = self.ask("find", detail=True, withdirs=False)
            # A list is what the client of Azure answers if the root is an object.
            found = found if isinstance(found, dict) else {self.root: self.info("")}
            yield from ((path[prefix:], info) for path, info in found.items())
            return
        for directory, below, names in os.walk(self.root, onerror=_tell):  # fsspec leaves out what it cannot look up
            links = [name for name in below if local.kind_of(os.path.join(directory, name), follow_links=False) == "link"]
            below[:] = [name for name in below if name not in links]
            for path in (os.path.join(directory, name) for name in (*names, *links)):
                with contextlib.suppress(FileNotFoundError):  # it has just gone
                    status = os.stat(path)
                    yield path[prefix:], {"size": status.st_size, "mtime": status.st_mtime}

    def create(self, key: str, unfinished: Path | None = None) -> ObjectWriter:
        """A writer for one object, which appears under *key* when the ``with`` block ends without an exception. *unfinished*: the
        path of a local one until then.
        """
        return ObjectWriter(self, key, unfinished)

    def put(self, key: str, data: bytes) -> StoredObject:
        """Write a small object at once. The signature of a record comes before it, and the previous record keeps its own."""
        self.sign(key, data)
        with self.create(key) as writer:
            writer.write(data)
        return writer.stored

    def sign(self, key: str, data: bytes) -> None:
        """Sign what a record is, or is to be, if a key is set and such records are signed."""
        if place := signing.place_of(self.path(key)):
            self.put(key + signing.SIGNATURE, signing.with_statement(self.signatures(key), signing.of_record(place, data)))

    def signatures(self, key: str) -> bytes:
        """The lines of signatures next to a record; empty if there are none."""
        with contextlib.suppress(*NO_OBJECT):
            return next(self.blocks(key + signing.SIGNATURE), b"")
        return b""

    def upload(self, key: str, path: PathOrUrl) -> None:
        """Put a local file into a remote store."""
        if os.path.getsize(path) <= PART_BYTES:
            with open(path, "rb") as file:  # made by this process
                self.ask("pipe_file", key, file.read())
            return
        fs, parts = self.connected(), {"chunksize": PART_BYTES} if {"s3", "gs"} & self.protocols else {}
        if {"s3", "abfs"} & self.protocols:
            parts["max_concurrency"] = PARTS_AT_ONCE
        for begun in range(1, UPLOADS + 1):
            try:
                persist(lambda: fs.put_file(os.fspath(path), self.path(key), **parts), self._named(key), self.patience)
                return
            except Exception as error:
                # The store may have forgotten an upload in parts whose last acknowledgement was lost.
                if begun == UPLOADS or isinstance(error, TimeoutError) or status_of(error) in (401, 403):
                    raise

    def remove(self, key: str) -> None:
        """Remove an object or everything below a prefix. Nothing happens if there is none. Locally, no link is followed."""
        if self.is_local:
            local.remove(self.root, key)
            return
        for _ in range(UPLOADS):
            with contextlib.suppress(FileNotFoundError):
                self.ask("rm", key, recursive=True)
            if "abfs" not in self.protocols or not self.exists(key):  # its client hides errors if an object went meanwhile
                return
        raise OSError(f"{self._named(key)}: is still there, though its store was asked {UPLOADS} times to remove it")

    def remove_object(self, key: str) -> None:
        """Remove one object, by one request of a store. Nothing happens if there is none."""
        if self.is_local:
            local.remove(self.root, key)
        else:
            with contextlib.suppress(FileNotFoundError):
                self.ask("rm_file", key)

    @property
    def protocols(self) -> set[str]:
        """All names of the store's kind in URLs."""
        return {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)

    def url_of(self, path: str) -> str:
        """The URL of a path of a remote store. That of Azure names the account, unless the environment does."""
        account = self.fs.storage_options.get("account_name") if "abfs" in self.protocols else None
        if account not in (None, azure_setting("account_name")):
            container, _, below = path.partition("/")
            return f"abfss://{container}@{account}.dfs.core.windows.net/{below}"
        return str(self.fs.unstrip_protocol(path))

    def _named(self, key: str) -> str:
        return self.url_of(self.path(key))


def file_at(path_or_url: PathOrUrl) -> tuple[Store, str]:
    """The directory of a file, as a store, and the file's key in it."""
    store = Store.at(path_or_url)
    parent, name = posixpath.split(store.root)
    return Store(parent or "/", store.fs), name


def _tell(error: Exception) -> None:
    if not isinstance(error, NO_OBJECT):
        raise error


def _checked(part: Any, start: int, stop: int | None) -> bytes:
    """The bytes of a range, of which some servers send the whole object instead."""
    if stop is not None and len(part) > stop - start:
        return bytes(part[start:stop])
    return bytes(part[start:]) if stop is None and len(part) > -start else bytes(part)


def client_options(url: str) -> dict[str, Any]:
    """Settings of a store's client, unless fsspec's configuration has others: it waits no longer than a time limit, retries a
    few times by itself, and caches no listings, because others write too. ValueError if it is not clear in which account of
    Azure a container is.
    """
    protocol, options = url.partition("://")[0], dict[str, Any]()
    if protocol in ("s3", "s3a"):
        waits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": SILENCE_SECONDS}
        retries = {"mode": "standard", "total_max_attempts": 3}
        # Its client would ask for ten ranges at a time.
        config = {"max_pool_connections": CONNECTIONS, "retries": retries, **waits}
        options = {"config_kwargs": config, "use_listings_cache": False}
    elif protocol in AZURE:
        extra("adlfs", "a store of Azure")
        named, string = re.match(r"\w+://[^/]*@(\w+)", url), azure_setting("connection_string")
        if named and string and f"AccountName={named[1]};" not in f"{string};":  # the client would use the string's account
            raise ValueError(
                f"{url}: AZURE_STORAGE_CONNECTION_STRING is of another account. Unset it, or write az://CONTAINER/PATH."
            )
        if not named and not string and not azure_setting("account_name"):
            raise ValueError(f"{url}: the account is not known. Set {CREDENTIALS['abfs']}.")
        options = {"connection_timeout": CONNECT_SECONDS, "read_timeout": SILENCE_SECONDS, "use_listings_cache": False}
    elif protocol in ("gs", "gcs", "http", "https"):
        import aiohttp  # only the clients of these protocols need it

        waiting = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        if protocol in ("http", "https"):
            from flat_tokens.stores.web import Answer  # as above

            unasked = ["Accept-Encoding"]
            options = {"client_kwargs": {"timeout": waiting, "response_class": Answer, "skip_auto_headers": unasked}}
        else:
            options = {"requests_timeout": waiting, "use_listings_cache": False}
    configured = fsspec.config.conf.get(protocol, {})
    return {
        name: {**ours, **configured.get(name, {})} if isinstance(ours, dict) else configured.get(name, ours)
        for name, ours in options.items()
    }


def azure_setting(name: str) -> str | None:
    """A setting of Azure's client that is not in a URL, such as ``account_name``."""
    configured = (fsspec.config.conf.get(protocol, {}).get(name) for protocol in AZURE)
    return next(filter(None, configured), os.environ.get(f"AZURE_STORAGE_{name.upper()}"))


class RemoteSink:
    """An object kept in memory or, if it is large, on a local disk until it is complete; then uploaded. *seen* gets its bytes in
    order.
    """

    def __init__(self, store: Store, key: str, seen: Callable[[memoryview], object]) -> None:
        self._store, self._key, self._seen = store, key, seen
        self._held = bytearray()
        self._file: Any = None

    def write(self, data: memoryview) -> None:
        self._seen(data)
        if self._file is None and len(self._held) + len(data) > WRITE_BUFFER_BYTES:
            if self._store.staging:
                local.make_directory(Path(self._store.staging))
            self._file = tempfile.NamedTemporaryFile(dir=self._store.staging, prefix=".upload.")  # noqa: SIM115  # see discard()
            self._file.write(self._held)
            self._held.clear()
        if self._file is None:
            self._held += data
        else:
            with local.named_errors(Path(self._file.name)):
                self._file.write(data)

    def write_rows(self, count: int, width: int, fill: local.Fill) -> None:
        """Append *count* rows of *width* bytes."""
        rows = np.empty((count, width), np.uint8)
        fill(rows, 0)
        self.write(rows.reshape(-1).data)

    def commit(self) -> None:
        try:
            if self._file is None:
                self._store.ask("pipe_file", self._key, bytes(self._held))
            else:
                with local.named_errors(Path(self._file.name)):
                    self._file.flush()
                self._store.upload(self._key, self._file.name)
        finally:
            self.discard()

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()


class ObjectWriter:
    """Writes one object and computes its digest. Nothing is visible under the object's name until the block has ended."""

    stored: StoredObject

    def __init__(self, store: Store, key: str, unfinished: Path | None = None) -> None:
        self._store, self._key = store, key
        self._digest, self.size = DIGESTS[store.digests](), 0
        target = Path(store.path(key))
        staging = Path(store.staging or target.parent)
        see = self._digest.update
        self._sink = (
            local.LocalSink(target, staging, see, store.top, store.durable, unfinished)
            if store.is_local
            else RemoteSink(store, key, see)
        )

    def write(self, data: Any) -> None:
        """Append the bytes of anything with a contiguous buffer."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        self._sink.write(view)

    def write_rows(self, count: int, width: int, fill: local.Fill) -> None:
        """Append *count* rows of *width* bytes. *fill* writes them, some at a time, straight into a local file's buffer."""
        self.size += count * width
        self._sink.write_rows(count, width, fill)

    def settle(self, rest: Any) -> None:
        """Make what was written to a local object, and *rest* after it, survive in the unfinished file. *rest* is none of the
        object: what is written next takes its place.
        """
        assert isinstance(self._sink, local.LocalSink), "only local objects have an unfinished file"
        self._sink.settle(memoryview(rest).cast("B"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._sink.discard()
            return
        self._sink.commit()
        self.stored = StoredObject(self._key, self.size, _as_text(self._digest, self._store.digests))


RECORD_LIMIT = "FLAT_TOKENS_MAX_RECORD_BYTES"
MAX_RECORD_BYTES = int(os.environ.get(RECORD_LIMIT, 1 << 28))
"""More than a manifest of a million objects has."""

MAX_DEPTH = 100
CONTAINERS = (dict, list)
HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def read_record(store: Store, key: str, most: int = MAX_RECORD_BYTES, what: str = "a record") -> bytes:
    """A whole object of *most* bytes at most. FileNotFoundError if there is none; ValueError if it is larger, or not signed."""
    data, size = b"", store.size(key) if store.is_local else 0
    try:
        if size <= most:
            data = store.read(key) if store.is_local else _beginning(store, key, most + 1)
    except Exception as error:
        if status_of(error) != 416:  # no byte is there
            raise
    if max(size, len(data)) > most:
        remedy = f" Set {RECORD_LIMIT} to read larger ones." if most == MAX_RECORD_BYTES else ""
        raise ValueError(f"{store.path(key)}: is larger than {what} may be ({most} bytes).{remedy}")
    if place := signing.place_of(store.path(key)):
        lines = store.signatures(key)  # after the record, whose signature was there before it
        if not signing.is_signed(lines, place, data):
            wrong = "the signature next to it is of something else, or by another key" if lines else "is not signed"
            remedy = "Restore it, or have it rebuilt. If you trust it: flat-tokens verify PATH --full --sign"
            raise ValueError(f"{store.path(key)}: {wrong}. {remedy}")
    return data


def _beginning(store: Store, key: str, length: int) -> bytes:
    """The first *length* bytes, by ``read_ranges``: a store that keeps records answers it without a request."""
    (found,) = store.read_ranges([key], [0], [length])
    if isinstance(found, FileNotFoundError):
        raise found
    return found


def read_json(store: Store, key: str, most: int = MAX_RECORD_BYTES, what: str = "a record") -> JsonObject:
    """Read a JSON object, in one request. FileNotFoundError if it is missing; ValueError, naming it, if it is not a JSON object
    or too large.
    """
    return json_object(read_record(store, key, most, what), store.path(key))


def json_object(data: bytes, path: str) -> JsonObject:
    """The JSON object in *data*. ValueError, naming the file at *path*, if it is none, nested deeper than any of ours, or has
    strings that are not Unicode.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if HALF_OF_A_PAIR.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [item for items in inner for item in items if type(item) in CONTAINERS]
        if not level:
            return value
    raise ValueError(f"{path}: is JSON nested deeper than {MAX_DEPTH} levels")
