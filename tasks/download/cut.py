"""Files cut into ranges, and brought to the machine that reads them."""

from __future__ import annotations

import contextlib
import operator
import os
import platform
import stat
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flat_tokens.stores.local import kind_of, named_errors, real_path
from flat_tokens.text.formats import PACKED
from flat_tokens.text.parquet import Room
from flat_tokens.text.rows import Range
from tasks.config import Source
from tasks.download.fetch import NoRoomError, fetch_file, halves_in
from tasks.download.outlines import digest_by_version, fetch_spans, outlined, spans_of, version_read
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
        with _removed_after(workspace, sum(map(room_for, pack)), pack[0].name) as here:
            cuts = [_without_copy(cut, here) for cut in _cut_small(pack, sources, slice_bytes, here)]
    meter.add("download", sum(found.size or 0 for found in pack))
    return tuple(cuts)


def look_into(found: FoundFile, sources: tuple[Source, ...], slice_bytes: int, workspace: Workspace) -> CutFile:
    """Cut a file into ranges. It is fetched unless its outline says enough."""
    source = sources[found.source]
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming(sources, found.source))
        outline = stack.enter_context(outlined(found, source, Path(workspace.scratch) / "files"))
        here, file = (workspace, outline) if outline else _fetch(found, sources, workspace, stack)
        with named_errors(found.uri):
            file = with_partitions(file, source)
            cut = CutFile(file, cuts_of(file, source, slice_bytes))
    return CutFile(_bare(file), cut.cuts) if outline else _without_copy(cut, here)


def _without_copy(cut: CutFile, workspace: Workspace) -> CutFile:
    """A file that was cut, without its place if that is in a directory which is removed."""
    is_removed = not workspace.keeps and is_within(cut.file.location, [workspace.scratch])
    return CutFile(_bare(cut.file), cut.cuts) if is_removed else cut


UNPACKED_TIMES = 8
"""Bytes of a packed file's text for one of its own, before it has to have the room alone."""


def room_for(found: FoundFile) -> int:
    """Bytes of the scratch directory that a file takes, about."""
    size = 1 << 60 if found.size is None else found.size
    local, packed = "://" not in found.uri, found.name.lower().endswith(tuple(PACKED))
    return size * ((not local) + UNPACKED_TIMES * packed)


def _most_kept(found: FoundFile, workspace: Workspace) -> int | None:
    """Bytes that a file may take which is kept, if these are bounded."""
    return None if workspace.room is None else room_for(found) + workspace.room


_rooms: dict[tuple[str, int], Room] = {}


@contextlib.contextmanager
def _removed_after(workspace: Workspace, size: int, name: str) -> Iterator[Workspace]:
    """The workspace. If fetched files are not kept, one with a scratch directory of its own, which is removed at the end, as soon
    as *size* bytes of the room are free for it.
    """
    if workspace.keeps or workspace.room is None:
        yield workspace
        return
    if size > workspace.room:
        raise NoRoomError(f"{name} takes {size:,} bytes, and scratch_bytes is {workspace.room:,}. Raise it.")
    room = _rooms.setdefault((workspace.scratch, workspace.room), Room(workspace.room))
    with room.taken(size), halves_in(Path(workspace.scratch) / "files") as own:
        yield workspace._replace(scratch=os.fspath(own), staging=os.fspath(own))


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


def _fetch(
    found: FoundFile, sources: tuple[Source, ...], workspace: Workspace, stack: contextlib.ExitStack
) -> tuple[Workspace, SourceFile]:
    """Fetch a file into the scratch directory; if it is not kept, until *stack* ends. Return its workspace, too."""
    room = workspace.room
    # What a packed file takes is not known before it is unpacked: at last it has all the room.
    tries = [_most_kept(found, workspace)]
    if room is not None and not workspace.keeps:
        tries = list(dict.fromkeys((min(room_for(found), max(room, found.size or 0)), room)))
    while True:
        most = tries.pop(0)
        with contextlib.ExitStack() as tried:
            here = tried.enter_context(_removed_after(workspace, most or 0, found.name))
            try:
                file = fetch_file(found, sources, Path(here.scratch), hub_cache=_hub_cache(here), room=most)
            except NoRoomError:
                if not tries:
                    raise
                continue
            stack.push(tried.pop_all())
            return here, file


def _hub_cache(workspace: Workspace) -> Path | None:
    """Where files of the hub go, if not to the user's cache: the scratch directory, where that goes with the attempt."""
    return Path(workspace.scratch) / "hub" if workspace.scratch == workspace.staging else None


def _bare(file: SourceFile) -> SourceFile:
    """The facts of a file without its place on this machine."""
    return file._replace(location="", stamp=())


_sharing = threading.Lock()
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
    if here.sha256 != part.file.sha256 and not version_read(part.file):  # that was fetched in its version
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
            room = _most_kept(found, workspace)
            here = fetch_file(found, sources, Path(workspace.scratch), hub_cache=_hub_cache(workspace), room=room)
            _at(part, here, sources, workspace)
            _fetched[key] = here
        return _at(part, _fetched[key], sources, workspace)


@contextlib.contextmanager
def lent(slice_: Slice, sources: tuple[Source, ...], workspace: Workspace) -> Iterator[Slice]:
    """A slice as ``at_hand`` returns it, within the block. Fetched files that are not kept are removed after it: one of several
    slices after the last of them that ``fetched_ahead`` knows, and of a Parquet file only what the slice needs is
    fetched.
    """
    part, *more = slice_.ranges
    with contextlib.ExitStack() as stack:
        if is_by_ranges(part.file, workspace):
            yield Slice((stack.enter_context(_shared(part, sources, workspace)),))
        elif workspace.keeps or not all(_can_be_brought(one.file) for one in slice_.ranges):
            yield at_hand(slice_, sources, workspace)
        elif more or (part.file.found and is_small(part.file.found)):
            wanted = sum(room_for(one.file.found) for one in slice_.ranges if one.file.found)
            here = stack.enter_context(_removed_after(workspace, wanted, part.label))
            yield at_hand(slice_, sources, here)
        else:
            yield Slice((stack.enter_context(_shared(part, sources, workspace)),))


def is_by_ranges(file: SourceFile, workspace: Workspace) -> bool:
    """Whether only what slices need is fetched of a file."""
    found = file.found
    return workspace.room is not None and found is not None and not is_small(found) and file.sha256 == digest_by_version(found)


def _needed_alone(
    part: FileRange, sources: tuple[Source, ...], workspace: Workspace, stack: contextlib.ExitStack
) -> SourceFile | None:
    """A file of which only what a range needs is here, until *stack* ends. None for one that is fetched."""
    found, source = part.file.found, sources[part.file.source]
    assert found is not None
    stack.enter_context(naming(sources, part.file.source))
    if (outline := stack.enter_context(outlined(found, source, Path(workspace.scratch) / "files"))) is None:
        return None
    spans = spans_of(part, outline._replace(partitions=part.file.partitions), source)
    stack.enter_context(_removed_after(workspace._replace(keeps=False), sum(stop - start for start, stop in spans), part.label))
    fetch_spans(found, spans, Path(outline.location))
    return outline._replace(stamp=stamp(outline.location))


class Lent:
    """A fetched file that slices share, or what they need of it: how many read it now, and the stack that removes it."""

    def __init__(self) -> None:
        self.lock, self.readers = threading.Lock(), 0
        self.stack = contextlib.ExitStack()
        self.file: SourceFile | None = None


_lent: defaultdict[tuple[Any, ...], Lent] = defaultdict(Lent)
_awaited: Counter[tuple[Any, ...]] = Counter()
"""Slices of each file that are still to be read."""


@contextlib.contextmanager
def _shared(part: FileRange, sources: tuple[Source, ...], workspace: Workspace) -> Iterator[FileRange]:
    """A range of a file that was fetched once for all who read it now or wait for it."""
    key, found = _key(part, workspace), part.file.found
    assert found is not None
    with _sharing:
        shared = _lent[key]
        shared.readers += 1
    try:
        with shared.lock:
            if shared.file is None:
                with contextlib.ExitStack() as tried:
                    by_ranges = is_by_ranges(part.file, workspace)
                    file = _needed_alone(part, sources, workspace, tried) if by_ranges else None
                    shared.file = file or _fetch(found, sources, workspace, tried)[1]
                    shared.stack.push(tried.pop_all())
        yield _at(part, shared.file, sources, workspace)
    finally:
        with _sharing:
            shared.readers -= 1
            _awaited[key] -= 1
            _return(key)


def _return(key: tuple[Any, ...]) -> None:
    """Remove a file that nobody reads or waits for."""
    if _awaited[key] <= 0:
        del _awaited[key]
        if not _lent[key].readers:
            _lent.pop(key).stack.close()


def _key(part: FileRange, workspace: Workspace) -> tuple[Any, ...]:
    """The name of a file that slices share, or of row groups that they share."""
    groups = (part.start, part.stop) if is_by_ranges(part.file, workspace) else ()
    return part.file.found and part.file.found.uri, part.file.sha256, workspace.scratch, groups


@contextlib.contextmanager
def fetched_ahead(slices: Iterable[Slice], sources: tuple[Source, ...], workspace: Workspace) -> Iterator[None]:
    """Fetch the files of slices, in order, while the first ones are worked on. A failure is raised where the file is needed.
    Files that are not kept are not fetched in advance: each stays until all of its slices were lent.
    """
    missing: dict[tuple[int, str], Slice] = {}
    keys = list[tuple[Any, ...]]()
    for slice_ in slices:
        first = slice_.ranges[0].file
        if not workspace.keeps or is_by_ranges(first, workspace):
            keys.append(_key(slice_.ranges[0], workspace))
        elif not all(_located(slice_.ranges, workspace)):
            missing.setdefault((first.source, first.name), slice_)
    with _sharing:
        _awaited.update(keys)
    with ThreadPoolExecutor(FETCHERS, "fetch") as fetchers:
        for slice_ in missing.values():
            fetchers.submit(at_hand, slice_, sources, workspace)
        try:
            yield
        finally:
            fetchers.shutdown(cancel_futures=True)
            with _sharing:
                for key in set(keys):
                    _awaited[key] = 0
                    _return(key)


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

        return real if is_within(real, [*filter(None, workspace[1:3]), HF_HUB_CACHE]) else None
    return None
