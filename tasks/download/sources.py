"""Resolving a source to a pinned, ordered list of files, before anything is read."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import glob
import logging
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from pydantic import ValidationError

from flat_tokens.options import digits, nearest
from flat_tokens.stores.local import MAGIC, kind_of, pattern_base, real_path
from flat_tokens.stores.retry import Tries, brief, retry, retry_after, status_of, teller
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import one_line
from flat_tokens.vocabulary import check_encoding, is_file_name, is_repository, resolve
from tasks.config import BuildConfig, Source
from tasks.download.directories import TableIn, check_names, refuse_saved, refuse_tables, table_in
from tasks.download.hub import check_requests, resolve_hub
from tasks.download.tables import resolve_table
from tasks.faults import faults_of
from tasks.locations import CHECK_ACCESS, checked_session, local_path, other_meaning, readable, readable_directory
from tasks.models import FoundFile, PinnedSource, Stamp, stamp_of, version_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_NAMES = 10_000
"""Names in a directory that are compared with one that is not there."""
HIDDEN = re.compile(r"(^|/)[._]")
UNFIT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters of a file's name that no list of files can show."""
ATTEMPTS = 8
TRIES = Tries(first_wait=1.0, longest_wait=60.0, attempts=ATTEMPTS)
TIMEOUT = (10, 60)


def resolve_source(source: Source, index: int, table_in: TableIn = table_in) -> PinnedSource:
    """The files of a source, ordered by name. ValueError if there are none, or if one must not be read. *table_in*: looks for
    a table; one that remembers what it saw is for several sources.
    """
    template = None if source.chat_template is None else local_path(source.chat_template)
    if template is not None and kind_of(template) is None:
        raise ValueError(f"{source.called}: there is no chat template at {template}{_instead(template)}")
    if source.hub is not None:
        return resolve_hub(source, index)
    if source.table is not None:
        pinned = resolve_table(source, index)
        return pinned._replace(files=assign_splits(source, pinned.files))
    assert source.path is not None
    here = local_path(source.path)
    found = _remote(source, index, source.path, table_in) if here is None else _local(source, index, here, table_in)
    files = assign_splits(source, tuple(sorted(found, key=lambda file: file.name)))
    if not files:
        raise ValueError(f"{source.called}: there are no files at {source.path}{_instead(source.path)}")
    refuse_saved(source, files)
    check_names(source, files)
    origin = source.path if here is None else f"local files ({PurePosixPath(here).name or 'directory'})"
    return PinnedSource(origin=origin, revision=None, files=files)


class NoRoomError(ValueError):
    """A file takes more bytes of the scratch directory than it may."""


def _kind(error: Exception, otherwise: type[Exception]) -> type[Exception]:
    """The kind of an error that says more than *error*: who has no room tries otherwise."""
    return NoRoomError if isinstance(error, NoRoomError) else otherwise


@contextlib.contextmanager
def naming(sources: Sequence[Source], index: int) -> Iterator[None]:
    """Name the source in errors, if there are several: files of two sources may have the same name. Name a table with its
    version.
    """
    source = sources[index]
    table = f"table {source.table}, version {source.version}: " if source.table else ""
    try:
        yield
    except ValueError as error:
        if not (table or sources[1:]) or str(error).startswith(("source ", "the source")):
            raise
        raise _kind(error, ValueError)(f"{source.called}: {table}{error}") from error


def assign_splits(source: Source, files: tuple[FoundFile, ...]) -> tuple[FoundFile, ...]:
    """Mark the validation files of a source that brings its own split, and leave out the files of other splits."""
    if source.split is None and source.validation_split is None:
        return files
    chosen = []
    for file in files:
        if source.validation_split and names_split(file.name, source.validation_split):
            chosen.append(file._replace(split="validation"))
        elif source.split is None or names_split(file.name, source.split):
            chosen.append(file._replace(split="train" if source.validation_split else None))
    if source.split is None and (
        held_out := [file.name for file in chosen if file.split == "train" and names_split(file.name, "test")]
    ):
        said = "%s: %s: named as a test split, but train here. Set source.split to leave it out."
        logger.warning(said, source.called, _some(held_out))
    for split in filter(None, (source.split, source.validation_split)):
        if not any(names_split(file.name, split) for file in files):
            raise ValueError(
                f"{source.called}: no file is of split {split!r}; there are {_some([file.name for file in files])}. A split's "
                f"name stands alone in a file's name or path, as in {split}-00000.parquet."
            )
    return tuple(chosen)


def names_split(name: str, split: str) -> bool:
    """Whether a file's name or one of its directories names a split: ``train-00000.parquet``, ``data/train/x.jsonl``."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(split)}(?![A-Za-z0-9])", name) is not None


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _local(source: Source, index: int, path: str, table_in: TableIn) -> Iterator[FoundFile]:
    """The files of a source on this machine: one file, those of a directory, or those that match a pattern."""
    location = Path(path)
    hidden_too = False
    if kind_of(location) == "directory":
        base, paths = path.rstrip("/") or "/", _walk(path, source)
        begin = len(base.rstrip("/")) + 1
    elif kind_of(location, follow_links=False) is not None:
        paths, begin = iter([(os.fspath(location), "")]), len(os.fspath(location)) - len(location.name)
        base, hidden_too = "", True
    elif MAGIC & set(path):
        base, pattern = pattern_base(path)
        parts = Path(pattern).parts
        for depth in range(len(parts)):
            for above in Path(base).glob("/".join(parts[:depth])) if depth else (Path(base),):
                # The files of a directory that cannot be listed would be lost silently.
                if kind_of(above) == "directory" and not os.access(readable(os.fspath(above)), os.R_OK | os.X_OK):
                    _not_listed(PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(above)), source)
        paths, begin = _matching(Path(base), pattern), len(os.fspath(Path(base, "x"))) - 1
        hidden_too = HIDDEN.search(pattern) is not None
    else:
        raise ValueError(f"{source.called}: there is nothing at {path}{_instead(path)}")
    files = list(paths)
    parents = {file[: file.rfind("/") + 1] for file, _ in files}
    refuse_tables(source, Store.at(base or "."), [os.path.abspath(f"{parent}x") for parent in parents], table_in)
    for file, directory in files:
        name = file[begin:]
        if not hidden_too and HIDDEN.search(name):
            continue
        if (plain := _plain_file(file, directory, source)) is None:
            continue
        real, stamp = plain
        if UNFIT.search(name):
            raise ValueError(
                f"{source.called}: the name of the file {os.fsencode(file)!r} is not plain text in UTF-8. Rename it."
            )
        yield FoundFile(index, name, real, stamp[0], stamp=stamp)


def _plain_file(path: str, directory: str, source: Source) -> tuple[str, Stamp] | None:
    """The real path of a file and its stamp; None for a directory, which a pattern may match. ValueError for anything else, and
    for links that lead nowhere, in a circle or out of the roots. *directory*: of the file, as ``readable_directory`` returns
    it; empty if it is not known.
    """
    if directory:
        with contextlib.suppress(OSError):  # what it is, is asked below
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                return directory + path.rpartition("/")[2], stamp_of(status)
    if (kind := kind_of(path)) == "directory":
        return None
    if kind != "file":
        what = "a link that leads nowhere or in a circle" if kind is None else "not a plain file"
        raise ValueError(f"{source.called}: {path} is {what}")
    real = readable(real_path(path))
    return real, stamp_of(os.stat(real))


def is_there(path: str) -> bool:
    """Whether something is at a local path, or matches it."""
    if kind_of(path) is not None or not MAGIC & set(path):
        return kind_of(path) is not None
    base, pattern = pattern_base(path)
    return next(_matching(Path(base), pattern), None) is not None


def _matching(base: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Files and directories that match a pattern below *base*, each with its directory's real path, as ``_walk`` has it.
    ``Path.glob`` makes objects of each file: it is asked for directories, and for files if the last part names one.
    """
    *above, last = Path(pattern).parts
    lists = bool(MAGIC & set(last)) and "**" not in last
    for found in base.glob(os.path.join(*above, "") if lists else pattern) if above or not lists else (base,):
        parent = found if lists else found.parent
        directory = ""
        with contextlib.suppress(ValueError):  # the roots are elsewhere, where a link may lead
            directory = readable_directory(os.fspath(parent))
        if not lists:
            yield os.fspath(found), directory
            continue
        with contextlib.suppress(PermissionError, NotADirectoryError, FileNotFoundError):
            begin = os.fspath(parent / "x")[:-1]
            yield from ((begin + name, directory) for name in fnmatch.filter(os.listdir(parent), last))


def _instead(location: str) -> str:
    """The rest of an error about a location at which nothing is: its absolute path if it is relative, and the nearest path or
    pattern as a question, or else the content of its directory, if that is local and can be listed.
    """
    brackets = ". Brackets are a pattern: [[] is one of them." if "[" in location else ""
    if (path := local_path(location)) is None:
        return brackets
    place = "" if os.path.isabs(path) else f", which is {os.path.abspath(path)}"
    if other := other_meaning(path):
        return f"{place}. It {other}"
    base, pattern = pattern_base(path) if MAGIC & set(path) else (path, "")
    here, wanted = Path(os.path.abspath(base)), pattern
    while kind_of(here) is None:
        here, wanted = here.parent, here.name
    if kind_of(here) == "file":
        return f"{place}. {here} is a file. Leave out what follows it."
    with contextlib.suppress(OSError, ValueError):
        listed = sorted(os.listdir(readable(os.fspath(here))))
        names = [name for name in listed if not HIDDEN.match(name) and not UNFIT.search(name)][:MOST_NAMES]
        endings = [f"*{Path(name).suffix}" for name in names] if wanted == pattern else []
        if near := nearest(wanted, [*endings, *names]):
            return f"{place}. Did you mean {here / near}?"
        there = f". {here} has {_some(names) or 'nothing that is not hidden'}. Name what is there, or put it there."
        return f"{place}{brackets or there}"
    return place


def _not_listed(error: OSError, source: Source) -> NoReturn:
    raise ValueError(
        f"{source.called}: the directory {error.filename} cannot be listed: {error.strerror}. Get the right to, or leave it out."
    )


def _walk(directory: str, source: Source) -> Iterator[tuple[str, str]]:
    """Every file below a directory, with the real path of its own directory, hidden ones left out. ValueError for a link to a
    directory, which may be a circle.
    """
    left = [directory.rstrip("/") or "/"]
    while left:
        parent = left.pop()
        try:
            with os.scandir(parent) as scanned:
                entries = [entry for entry in scanned if not HIDDEN.match(entry.name)]
        except OSError as error:
            _not_listed(error, source)
        here = readable_directory(parent)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
            elif entry.is_symlink() and kind_of(entry.path) == "directory":
                raise ValueError(
                    f"{source.called}: {entry.path} is a link to a directory, which is not followed. Remove it, or make "
                    f"{real_path(entry.path)} a source of its own."
                )
            else:
                yield entry.path, here


def _remote(source: Source, index: int, url: str, table_in: TableIn) -> Iterator[FoundFile]:
    """The files of a source at a URL: one file, those of a directory, or those that match a pattern."""
    http = fsspec.utils.get_protocol(url) in ("http", "https")
    if http and urlsplit(url).path.endswith("/"):
        raise ValueError(f"{source.called}: {url} names no file. Name one, or a pattern: {url}*.jsonl")
    magic = MAGIC - set("?" if http else "")  # after a question mark stands a query
    store = Store.at(url)
    if url.startswith("hf://"):
        check_requests()
    path = store.root
    store.fs.invalidate_cache()  # what a process listed before may have changed since
    hidden_too, listed = False, None
    try:
        if http and (found := magic & set(path)):
            base = path[: min(map(path.index, found))].rpartition("/")[0]
            infos = [info for info in store.ask("glob", detail=True).values() if info["type"] == "file"]
            hidden_too = HIDDEN.search(path[len(base) :]) is not None
            base = unquote(urlsplit(base).path)
        elif magic & set(path) and not store.exists(""):
            # A directory that is there by its very name is not a pattern.
            parts = store.root.split("/")
            begin = next(
                k
                for k, part in enumerate(parts)
                if k + 1 == len(parts) or (magic & set(part) and not replace(store, root="/".join(parts[: k + 1])).exists(""))
            )
            base, pattern = "/".join(parts[:begin]), "/".join(parts[begin:])
            matches = replace(store, root=f"{glob.escape(base)}/{pattern}").ask("glob", detail=True)
            infos = [info for info in matches.values() if info["type"] == "file"]
            hidden_too = HIDDEN.search(pattern) is not None
        elif http:
            base, infos, hidden_too = posixpath.dirname(urlsplit(url).path), [_http_info(url)], True
        elif (info := store.info(""))["type"] == "directory":
            base, listed = path, path.rstrip("/")
            # Consoles of stores make an object for an empty directory: of no bytes, with its name, or one that ends with a slash.
            found = store.ask("find", detail=True).values()
            infos = [one for one in found if one.get("size") or (not str(one["name"]).endswith("/") and one["name"] != listed)]
        else:
            base, infos, hidden_too = posixpath.dirname(path), [info], True
    except FileNotFoundError as error:
        raise ValueError(f"{source.called}: there is nothing at {url}. {CHECK_ACCESS}") from error
    except ValueError:
        raise
    except Exception as error:
        if http and str(error).startswith(url):
            raise  # it names the file, what the server said, and how often it was asked
        # Every store has errors of its own, and few of them are an OSError.
        raise OSError(f"{source.called}: {url} cannot be listed ({brief(error)}). {CHECK_ACCESS}") from error
    if not http:
        refuse_tables(source, store, [str(info["name"]) for info in infos], table_in, listed)
    for info in infos:
        uri = readable(store.url_of(info["name"]))
        name = (unquote(urlsplit(uri).path) if http else str(info["name"]))[len(base) :].lstrip("/")
        if HIDDEN.search(name) and not hidden_too:
            continue
        content = f"blob:{info['blob_id']}" if info.get("blob_id") else None
        if large := info.get("lfs"):
            content = f"sha256:{large['sha256']}"
        immutable = version_of(info)
        yield FoundFile(source=index, name=name, uri=uri, size=info.get("size"), immutable=immutable, content=content)


def _http_info(url: str) -> dict[str, Any]:
    """Name, size and strong ETag of a file, as far as its server says them."""
    options: dict[str, Any] = {"headers": {"Accept-Encoding": "identity"}, "stream": True, "timeout": TIMEOUT}
    method = "HEAD"

    def look() -> Any:
        nonlocal method
        with checked_session(url) as session, session.request(method, url, **options) as response:
            if response.status_code in (403, 405, 501) and method == "HEAD":  # not every server answers HEAD
                method = "GET"
                return look()
            if response.status_code not in (404, 410):
                response.raise_for_status()
            return response

    response = fetching(look, url)
    if not response.ok:
        raise FileNotFoundError(url)
    length = response.headers.get("Content-Length", "") if "Content-Encoding" not in response.headers else ""
    etag = response.headers.get("ETag", "")
    strong = None if etag.startswith("W/") else etag
    return {"name": url, "size": digits(length), "ETag": strong}


def fetching(call: Callable[[], T], what: str, progress: Callable[[], int] = int) -> T:
    """Call *call*, which asks a server for *what*, and return its result. Retry transient errors, no sooner than the server
    wants; *progress* gives it new tries. OSError if another try would not help, and after enough of them.
    """

    def give_up(error: Exception, failures: int) -> Exception:
        tries = "1 try" if failures == 1 else f"{failures} tries"
        return _kind(error, OSError)(f"{what} cannot be fetched ({tries}): {_problem(error)}")

    tell = teller(logger, what, _problem)
    return retry(call, TRIES, tell, give_up=give_up, asked_wait=retry_after, progress=progress)


def _problem(error: Exception) -> str:
    """The HTTP status or first cause of an error. The library's own words may hold the signed address of a redirection."""
    if (status := status_of(error)) is None:
        return brief(error)
    return f"HTTP status {status} {getattr(getattr(error, 'response', None), 'reason', '')}".rstrip()


def fault_of_config(settings: dict[str, Any]) -> str | None:
    """The fault of a configuration, in one line. None if it has none, as far as that is known without a network."""
    try:
        config = BuildConfig.model_validate(settings)
    except ValidationError as error:
        return "; ".join(faults_of(error, BuildConfig, "source" in settings))
    try:
        check_here(config)
        tables = functools.cache(table_in)
        for number, source in enumerate(config.sources):
            if "://" not in source.place:
                resolve_source(source, number, tables)
    except (ValueError, OSError) as error:
        return one_line(error)
    return None


def check_here(config: BuildConfig) -> None:
    """ValueError or OSError if nothing is at a local path or matches it, or a tokenizer's name means nothing."""
    check_tokenizer(config.tokenizer.name)
    for number, source in enumerate(config.sources):
        paths = (source.path, source.chat_template)
        if not all(path is None or "://" in path or is_there(path) for path in paths):
            resolve_source(source, number)  # it says what is there instead


def check_tokenizer(name: str) -> None:
    """ValueError if a tokenizer's name is unknown. Neither the hub nor the content of a file is looked up."""
    if name == "bytes" or kind_of(name) is not None:
        return
    if is_file_name(name):
        resolve(name)  # it says what is there instead
    elif not is_repository(name):
        check_encoding(name)
