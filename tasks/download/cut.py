"""Files cut into ranges, and brought to the machine that reads them."""

from __future__ import annotations

import contextlib
import operator
import os
import platform
import stat
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flat_tokens.stores.local import kind_of, named_errors, real_path
from flat_tokens.text.rows import Range
from tasks.config import Source
from tasks.download.fetch import fetch_file, parquet_footer_only
from tasks.download.small import is_small, read_small
from tasks.download.sources import naming
from tasks.download.table import CutFile, forget_file
from tasks.locations import is_within, readable
from tasks.models import FileRange, FoundFile, Slice, SourceFile, stamp_of
from tasks.output.staging import Workspace
from tasks.progress import meter
from tasks.text.files import changed_meanwhile, cuts_of, stamp, with_partitions

FETCHERS = 4


def cut_files(
    pack: tuple[FoundFile, ...], sources: tuple[Source, ...], slice_bytes: int, workspace: Workspace
) -> tuple[CutFile, ...]:
    """Stage download: fetch some small files of a source, or one large file, and cut each into ranges of about *slice_bytes* of
    text. ValueError, naming the file, where one is damaged or not as its source says.
    """
    if len(pack) == 1 and not is_small(pack[0]):
        cuts = [look_into(pack[0], sources, slice_bytes, workspace)]
    else:
        cuts = list(_cut_small(pack, sources, slice_bytes, workspace))
    meter.add("download", sum(found.size or 0 for found in pack))
    return tuple(cuts)


def look_into(found: FoundFile, sources: tuple[Source, ...], slice_bytes: int, workspace: Workspace) -> CutFile:
    """Cut a file into ranges. It is fetched unless its store and its end tell enough."""
    with parquet_footer_only(found, Path(workspace.scratch)) as glimpse, naming(sources, found.source), named_errors(found.uri):
        file = with_partitions(glimpse or _fetch(found, sources, workspace), sources[found.source])
        cuts = cuts_of(file, sources[found.source], slice_bytes)
    return CutFile(file._replace(location="", stamp=()) if glimpse else file, cuts)


def _cut_small(
    pack: tuple[FoundFile, ...], sources: tuple[Source, ...], slice_bytes: int, workspace: Workspace
) -> Iterator[CutFile]:
    source, knows_text = sources[pack[0].source], False
    with naming(sources, pack[0].source):
        for file, content in read_small(pack, sources, Path(workspace.scratch), hub_cache=_hub_cache(workspace)):
            if file.format == "text" and knows_text and not source.keep_columns and file.size <= slice_bytes:
                yield CutFile(file, (Range(0, file.size, None, file.size),))  # which the reader says, too, but not as fast
                continue
            with named_errors(file.location):
                file = with_partitions(file, source, content)
                yield CutFile(file, cuts_of(file, source, slice_bytes, content))
            knows_text = file.format == "text"


def _fetch(found: FoundFile, sources: tuple[Source, ...], workspace: Workspace) -> SourceFile:
    """Fetch a file into the scratch directory of an attempt."""
    return fetch_file(found, sources, Path(workspace.scratch), hub_cache=_hub_cache(workspace))


def _hub_cache(workspace: Workspace) -> Path | None:
    """Where files of the hub go, if not to the user's cache: the scratch directory, where that goes with the attempt."""
    return Path(workspace.scratch) / "hub" if workspace.scratch == workspace.staging else None


_fetching: defaultdict[tuple[Any, ...], threading.Lock] = defaultdict(threading.Lock)
_fetched: dict[tuple[Any, ...], SourceFile] = {}


def at_hand(slice_: Slice, sources: tuple[Source, ...], workspace: Workspace) -> Slice:
    """A slice whose files this machine can read. Those that are not here are fetched, once for all threads. ValueError where one
    cannot be had here, or has changed.
    """
    here = list(_located(slice_.ranges, workspace))
    if all(map(operator.is_, here, slice_.ranges)):
        return slice_
    missing = [part for part, found in zip(slice_.ranges, here, strict=True) if found is None]
    brought = iter(_brought(missing, sources, workspace))
    return Slice(tuple(part or next(brought) for part in here))


def _brought(missing: Sequence[FileRange], sources: tuple[Source, ...], workspace: Workspace) -> list[FileRange]:
    """Ranges of files that were not here, with the places where they are now."""
    small = [part for part in missing if part.file.found and is_small(part.file.found) and _can_be_brought(part.file)]
    if not small or len(small) < len(missing):
        return [_range_at_hand(part, sources, workspace) for part in missing]
    first = small[0].file
    with _fetching[len(small), first.name, first.sha256, workspace.scratch]:
        pack = [part.file.found for part in small if part.file.found]
        digests = [part.file.sha256 for part in small]
        read = read_small(pack, sources, Path(workspace.scratch), hub_cache=_hub_cache(workspace), digests=digests)
        return [_at(part, file, sources, workspace) for part, (file, _) in zip(small, read, strict=True)]


def _can_be_brought(file: SourceFile) -> bool:
    """Whether a file that is not here can be: it is elsewhere, or compressed."""
    return file.found is not None and ("://" in file.found.uri or (not file.location and kind_of(file.found.uri) is not None))


def _at(part: FileRange, here: SourceFile, sources: tuple[Source, ...], workspace: Workspace) -> FileRange:
    """A range of a file that is *here* now. ValueError where that is another one; then no table says what it was."""
    if here.sha256 != part.file.sha256:
        forget_file(workspace.root, sources[part.file.source], part.file.name)
        raise ValueError(changed_meanwhile(part.file.name))
    return part._replace(file=part.file._replace(location=here.location, stamp=here.stamp))


def _range_at_hand(part: FileRange, sources: tuple[Source, ...], workspace: Workspace) -> FileRange:
    if (located := next(_located([part], workspace))) is not None:
        return located
    file = part.file
    found = file.found
    if found is None or ("://" not in found.uri and kind_of(found.uri) is None):
        where, everywhere = file.location or file.name, "where every worker sees them: a shared file system or an object store"
        if found is not None and kind_of(os.path.dirname(found.uri)) == "directory":
            raise ValueError(f"{where} was removed while the build ran. Put it back, or run the build again without it.")
        raise ValueError(f"{platform.node()} cannot read {where}. Put sources {everywhere}.")
    key = (found.uri, file.sha256, workspace.scratch)
    with _fetching[key]:
        if key not in _fetched or next(_located([part._replace(file=_fetched[key])], workspace)) is None:
            here = _fetch(found, sources, workspace)
            _at(part, here, sources, workspace)
            _fetched[key] = here
        return _at(part, _fetched[key], sources, workspace)


@contextlib.contextmanager
def fetched_ahead(slices: Iterable[Slice], sources: tuple[Source, ...], workspace: Workspace) -> Iterator[None]:
    """Fetch the files of slices, in order, while the first ones are worked on. A failure is raised where the file is needed."""
    missing: dict[tuple[int, str], Slice] = {}
    for slice_ in slices:
        first = slice_.ranges[0].file
        if not all(_located(slice_.ranges, workspace)):
            missing.setdefault((first.source, first.name), slice_)
    with ThreadPoolExecutor(FETCHERS, "fetch") as fetchers:
        for slice_ in missing.values():
            fetchers.submit(at_hand, slice_, sources, workspace)
        try:
            yield
        finally:
            fetchers.shutdown(cancel_futures=True)


def _located(ranges: Iterable[FileRange], workspace: Workspace) -> Iterator[FileRange | None]:
    """Each range whose file is unchanged on this machine, its location without links; None for another one. Another process may
    have said where the files are: only the roots and the directories of fetched files are looked into.
    """
    directories: dict[str, str | None] = {}
    for part in ranges:
        head, _, name = part.file.location.rpartition("/")
        if not name:
            yield None
            continue
        try:
            status = os.lstat(part.file.location)
        except (OSError, ValueError):
            yield None
            continue
        if stat.S_ISLNK(status.st_mode) or not head:
            real = _real_place(part.file, workspace)
        else:
            if head not in directories:
                directories[head] = _may_be_read(head, workspace)
            is_it = stat.S_ISREG(status.st_mode) and part.file.stamp in ((), stamp_of(status))
            real = f"{directories[head]}/{name}" if is_it and directories[head] is not None else None
        if real is None or real == part.file.location:
            yield part if real else None
        else:
            yield part._replace(file=part.file._replace(location=real))


def _real_place(file: SourceFile, workspace: Workspace) -> str | None:
    """The path of a file without links, where it is unchanged and may be read."""
    with contextlib.suppress(OSError, ValueError):
        if file.stamp in ((), stamp(file.location)) and kind_of(file.location) == "file":
            return _may_be_read(file.location, workspace)
    return None


def _may_be_read(path: str, workspace: Workspace) -> str | None:
    """A path without links, if it is within the roots or among fetched files."""
    with contextlib.suppress(OSError, ValueError):
        real = real_path(path)
        with contextlib.suppress(ValueError):
            return readable(real)
        from huggingface_hub.constants import HF_HUB_CACHE  # takes a while

        return real if is_within(real, [*filter(None, workspace[1:]), HF_HUB_CACHE]) else None
    return None
