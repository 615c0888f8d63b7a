"""Parquet and Arrow files in a store, over HTTP or on the hub, read by ranges of bytes: their outline to cut them, and what a
slice needs of them. Each range is checked to be of the version that was found.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flat_tokens.extras import pa
from flat_tokens.stores.answers import bounded, check_encoding
from flat_tokens.stores.retry import persist, status_of
from flat_tokens.stores.store import PART_BYTES, Store
from flat_tokens.text.formats import FORMATS, named_format
from flat_tokens.text.rows import Outline, Span
from tasks.config import DocumentPolicy, Source
from tasks.download.fetch import UNKNOWN_BYTES, check_remote, halves_in
from tasks.download.small import is_small
from tasks.download.sources import TIMEOUT, fetching
from tasks.download.tables import TABLE
from tasks.locations import checked_session
from tasks.models import FileRange, FoundFile, SourceFile, digest_of, version_of
from tasks.text.files import changed_meanwhile, range_of, stamp, text_file

logger = logging.getLogger(__name__)

END_BYTES = 1 << 16
"""In most cases, all of a file's footer."""
OUTLINE_BYTES = 1 << 20
REQUESTS = 8
"""Requests at a time for a slice."""
WEB = ("http://", "https://")
_sending = dict[str, bool]()
"""Whether web servers send ranges, as far as they were asked."""


class NoRangesError(ValueError):
    """A server sends no ranges of a file, or the file does not end as its format's do."""


def outline_of(found: FoundFile) -> Outline | None:
    """The outline by which a file is read in ranges; None if it is not: its store must state its size, and its version or
    digest.
    """
    if "://" not in found.uri or found.uri.startswith(("file://", "local://", "datasets://", TABLE)):
        return None  # before anything else: local files are many
    kind = named_format(found.name)
    if kind is None or not found.size or not (found.immutable or found.content):
        return None
    return FORMATS[kind].outline if found.name.lower().endswith(FORMATS[kind].endings) else None


def is_whole(found: FoundFile) -> bool:
    """Whether a file is fetched as a whole: a small one, one of another format, or one of a web server that sends no ranges."""
    return outline_of(found) is None or is_small(found) or not _sends_ranges(found)


def servers_of_whole(found: Iterable[FoundFile]) -> tuple[str, ...]:
    """Web servers whose Parquet and Arrow files are fetched as a whole: they send no ranges, or no sizes or strong ETags."""
    fit = (one for one in found if one.uri.startswith(WEB) and outline_of(one._replace(size=one.size or 1, immutable="ETag:")))
    return tuple(sorted({_server_of(one) for one in fit if not is_small(one) and is_whole(one)}))


def _server_of(found: FoundFile) -> str:
    return "{0.scheme}://{0.netloc}".format(urlsplit(found.uri))


def _sends_ranges(found: FoundFile) -> bool:
    """Whether ranges of a file are sent. A web server is asked once, for what is read first."""
    if not found.uri.startswith(WEB):
        return True
    if (server := _server_of(found)) not in _sending:
        try:
            _of_outline(found, _end_span(found))
        except NoRangesError:
            _sending[server] = False
            logger.info("%s sends no ranges: its files are fetched as a whole", server)
        except (OSError, ValueError):
            return True  # reading the file says what is wrong
        else:
            _sending[server] = True
    return _sending[server]


def _end_span(found: FoundFile) -> Span:
    size = found.size or 0
    return max(0, size - END_BYTES), size


def bytes_to_cut(found: FoundFile) -> int:
    """About how many bytes must be fetched to cut a file into slices."""
    size = UNKNOWN_BYTES if found.size is None else found.size
    return size if is_whole(found) else min(size, OUTLINE_BYTES)


def digest_by_version(found: FoundFile) -> str:
    """The digest of a file that is read by ranges, so never as a whole: of its content if the store says it, else of its URL,
    size and version. Empty for another file.
    """
    if outline_of(found) is None:
        return ""
    kind, _, digest = (found.content or "").partition(":")
    if kind == "sha256":
        return digest
    return digest_of("version", *([found.content] if found.content else [found.uri, found.immutable]), found.size)


def version_read(file: SourceFile) -> str:
    """The store's version of a file whose digest is by it. Empty: the digest is that of the content."""
    found = file.found
    if found is None or (found.content or "").startswith("sha256:") or file.sha256 != digest_by_version(found):
        return ""
    return found.content or found.immutable or ""


@contextlib.contextmanager
def outlined(found: FoundFile, source: Source, files: Path, part: FileRange | None = None) -> Iterator[SourceFile | None]:
    """A file with the outline of a remote one, in its places, until the block ends: enough to cut it, or to know what *part*
    needs. None if the file has to be fetched.
    """
    outline, kind = outline_of(found), named_format(found.name)
    if outline is None or kind is None or found.size is None or source.format not in ("auto", kind) or not _sends_ranges(found):
        yield None
        return
    check_remote(found)
    with halves_in(files) as halves:
        path = halves / "outline"
        file = SourceFile(found.source, found.name, found.size, digest_by_version(found), kind, os.fspath(path), found.split)
        try:
            # The file's footer is all up to its end.
            start, size = _end_span(found)
            end, least = _of_outline(found, (start, size)), len(outline.end) + 4
            length = int.from_bytes(end[-least : -len(outline.end)], "little") + least
            if not end.endswith(outline.end) or not least < length <= size - len(outline.end):
                raise NoRangesError(f"{found.name} does not end as such a file")
            if length > len(end):
                end = _of_outline(found, (size - length, start)) + end
            path.write_bytes(FORMATS[kind].begins[0])
            os.truncate(path, size - length)
            with path.open("ab") as opened:
                opened.write(end[-length:])
            spans = list(outline.heads(text_file(file, source, DocumentPolicy()), part and range_of(part)))
        except (NoRangesError, pa.ArrowException) as error:
            logger.info("%s is fetched as a whole: %s", found.uri, error)
            yield None
            return
        fetch_spans(found, spans, path)
        yield file._replace(stamp=stamp(os.fspath(path)), found=found)


def spans_of(part: FileRange, outline: SourceFile, source: Source) -> list[Span]:
    """The spans that reading a range takes, besides the outline of its file."""
    row = FORMATS[part.file.format].outline
    assert row is not None
    return _in_pieces(row.to_read(text_file(outline, source, DocumentPolicy()), range_of(part)))


def _in_pieces(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, neighbours joined, each of at most PART_BYTES."""
    joined = list[Span]()
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            first, last = joined.pop()
            start, stop = first, max(stop, last)
        joined.append((start, stop))
    return [(at, min(at + PART_BYTES, stop)) for start, stop in joined for at in range(start, stop, PART_BYTES)]


def fetch_spans(found: FoundFile, spans: Iterable[Span], path: Path) -> None:
    """Write spans of a remote file to their places in the file at *path*. ValueError, naming the remote one, if it changed."""
    with path.open("r+b") as file, ThreadPoolExecutor(REQUESTS, "fetch") as pool:
        # (start, stop) -> their bytes, at the same place
        list(pool.map(lambda span: os.pwrite(file.fileno(), _read(found, span), span[0]), _in_pieces(spans)))


def _read(found: FoundFile, span: Span) -> bytes:
    """Bytes of a remote file. ValueError if it is not of the version that was found any more."""
    try:
        if found.uri.startswith(WEB):
            answer = fetching(lambda: _of_server(found, span), found.uri)
            if isinstance(answer, ValueError):
                raise answer
            data = answer
        else:
            data = _of_store(found, Store.at(found.uri), span)
    except FileNotFoundError as error:
        raise ValueError(changed_meanwhile(found.name)) from error
    except Exception as error:
        if status_of(error) not in (404, 410, 412):
            raise
        raise ValueError(changed_meanwhile(found.name)) from error
    if len(data) != span[1] - span[0]:
        raise ValueError(changed_meanwhile(found.name))
    return data


_of_outline = functools.lru_cache(256)(_read)
"""Spans of outlines are small, and each slice needs them."""


def _of_store(found: FoundFile, store: Store, span: Span) -> bytes:
    if found.immutable is None or f"@{found.immutable}/" in found.uri:  # a commit
        return store.read_range("", *span)
    name, _, value = found.immutable.partition(":")
    if "s3" in store.protocols and name == "ETag":
        return persist(lambda: _of_s3(store, value, span), found.uri, store.patience)
    data = store.read_range("", *span)
    store.fs.invalidate_cache()
    if version_of(store.info("")) != found.immutable:
        raise FileNotFoundError(found.uri)
    return data


def _of_s3(store: Store, etag: str, span: Span) -> bytes:
    """Bytes of an object as long as it has this ETag: the client has no parameter for that."""
    from fsspec.asyn import sync  # a store that is not local has it

    fs: Any = store.connected()
    bucket, key, _ = fs.split_path(store.root)

    async def get() -> bytes:
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={span[0]}-{span[1] - 1}", IfMatch=etag)
        async with answer["Body"] as body:
            return bytes(await body.read())

    return bytes(sync(fs.loop, get))


def _of_server(found: FoundFile, span: Span) -> bytes | ValueError:
    """Bytes of a file of a web server, or why they are not had: another try would not help."""
    name, _, value = (found.immutable or "").partition(":")
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={span[0]}-{span[1] - 1}"}
    headers |= {"If-Match": value} if name == "ETag" else {}
    with checked_session(found.uri) as session, session.get(found.uri, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        answer.raise_for_status()
        if answer.headers.get(name, value) != value:
            return ValueError(changed_meanwhile(found.name))
        if answer.status_code != 206:
            return NoRangesError(f"{found.uri}: the server sends no ranges, by which it was read before. Run the build again.")
        if answer.headers.get("Content-Range") != f"bytes {span[0]}-{span[1] - 1}/{found.size}":
            return ValueError(changed_meanwhile(found.name))
        check_encoding(found.uri, answer.headers)
        return b"".join(bounded(found.uri, answer.raw.stream(1 << 18, decode_content=False), span[1] - span[0]))
