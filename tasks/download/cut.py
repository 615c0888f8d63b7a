"""Files cut into ranges, and brought to the machine that reads them."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flat_tokens.forgotten import LIST
from flat_tokens.stores.local import kind_of, named_errors, real_path
from flat_tokens.text.formats import PACKED
from flat_tokens.text.rows import Range, Span
from tasks.config import BuildConfig, Source
from tasks.download.fetch import MORE_ROOM, UNKNOWN_BYTES, count_more, fetch_file, kept_in, note_of, room_taken, take_room
from tasks.download.outlines import digest_by_version, fetch_spans, is_whole, outlined, spans_of, version_read
from tasks.download.small import is_small, read_small
from tasks.download.sources import NoRoomError, naming
from tasks.download.table import CutFile, forget_file, known_files
from tasks.locations import is_within, readable
from tasks.models import FileRange, FoundFile, Slice, SourceFile, stamp_of
from tasks.output.leases import Workspace
from tasks.output.places import nearest
from tasks.progress import meter
from tasks.text.files import changed_meanwhile, cuts_of, stamp, with_partitions

FETCHERS = 4


def cut_files(
    pack: tuple[FoundFile, ...], sources: tuple[Source, ...], slice_bytes: int, workspace: Workspace
) -> tuple[CutFile, ...]:
    """Stage download: fetch some small files of a source, or one large file, and cut each into ranges of about *slice_bytes* of
    text. ValueError, naming the file, if one is damaged or not as its source says.
    """
    room, source, cuts, knows_text = sum(map(scratch_for, pack)), sources[pack[0].source], list[CutFile](), False
    try:
        if len(pack) == 1 and not is_small(pack[0]):
            raise NoRoomError
        with _removed_after(workspace, 0 if workspace.keeps else room, pack[0].name) as here, naming(sources, pack[0].source):
            most = _most_of(pack, here) if here.keeps else room
            for file, content in read_small(pack, sources, Path(here.scratch), room=most):
                if file.format == "text" and knows_text and not source.keep_columns and file.size <= slice_bytes:
                    cuts.append(CutFile(file, (Range(0, file.size, None, file.size),)))  # the reader says that less fast
                    continue
                with named_errors(file.location):
                    file = with_partitions(file, source, content)
                    cuts.append(CutFile(file, cuts_of(file, source, slice_bytes, content)))
                knows_text = file.format == "text"
        cuts = cuts if workspace.keeps else list(map(_still_there, cuts))
    except NoRoomError:
        if half := len(pack) // 2:
            return tuple(cut for some in (pack[:half], pack[half:]) for cut in cut_files(some, sources, slice_bytes, workspace))
        cuts = [look_into(pack[0], sources, slice_bytes, workspace)]
    meter.add("download", sum(found.size or 0 for found in pack))
    return tuple(cuts)


def look_into(found: FoundFile, sources: tuple[Source, ...], slice_bytes: int, workspace: Workspace) -> CutFile:
    """Cut a file into ranges. It is fetched unless its outline says enough."""
    source = sources[found.source]
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming(sources, found.source))
        outline = stack.enter_context(outlined(found, source, _files(workspace)))
        here = workspace._replace(keeps=workspace.keeps and (workspace.room is None or is_whole(found)))
        file = outline or _fetched([found], 0, sources, here, stack)[0]
        with named_errors(found.uri):
            file = with_partitions(file, source)
            cut = CutFile(file, cuts_of(file, source, slice_bytes))
    return _still_there(cut)


def _still_there(cut: CutFile) -> CutFile:
    """A file that was cut, without its place on this machine if it was removed from there."""
    return cut if kind_of(cut.file.location) else cut._replace(file=cut.file._replace(location="", stamp=()))


def _files(workspace: Workspace) -> Path:
    """The directory of fetched files."""
    return Path(workspace.scratch) / "files"


UNPACKED_TIMES = 8
"""Bytes of a packed file's text for one of its own, before it has to have the room alone."""


def scratch_for(found: FoundFile) -> int:
    """Bytes of the scratch directory that a file takes, about."""
    size = 1 << 60 if found.size is None else found.size
    local, packed = "://" not in found.uri, found.name.lower().endswith(tuple(PACKED))
    return size * ((not local) + UNPACKED_TIMES * packed)


def _to_keep(found: FoundFile) -> int:
    """Bytes that are counted for a file that is kept."""
    return UNKNOWN_BYTES if found.size is None else scratch_for(found)


def _is_kept(file: SourceFile, workspace: Workspace) -> bool:
    """Whether a file stays in the scratch directory: with a bound on it, one that takes no more there than was counted for it."""
    found = file.found
    return workspace.keeps and (workspace.room is None or found is None or (is_whole(found) and not _beyond(found, file)))


def _left(workspace: Workspace) -> int:
    """Bytes of the scratch directory that kept files leave."""
    return max((workspace.room or 0) - kept_in(_files(workspace)), 0)


def _most_of(found: Iterable[FoundFile], workspace: Workspace) -> int | None:
    """Bytes that files may take that are kept: those that were counted for them. None: any."""
    return None if workspace.room is None else sum(map(_to_keep, found))


@contextlib.contextmanager
def _removed_after(
    workspace: Workspace, size: int | None, name: str, waiting: Callable[[], object] = lambda: None
) -> Iterator[Workspace]:
    """The workspace. If fetched files are not kept, one with a scratch directory of its own, which is removed at the end. All
    processes of a machine share the room: it waits until *size* bytes of that are free, at last until nobody else has any. None:
    all that is left.
    """
    if workspace.room is None or (workspace.keeps and size == 0):
        yield workspace
        return
    if (size or 0) > workspace.room:
        raise NoRoomError(f"{name} takes {size:,} bytes, and scratch_bytes is {workspace.room:,}. Raise it.")
    with room_taken(_files(workspace), size, workspace.room, waiting) as own:
        yield workspace if workspace.keeps else workspace._replace(scratch=os.fspath(own))


def _fetched(
    found: Sequence[FoundFile],
    more: int,
    sources: tuple[Source, ...],
    workspace: Workspace,
    stack: contextlib.ExitStack,
    digests: Sequence[str] = (),
    waiting: Callable[[], object] = lambda: None,
) -> list[SourceFile]:
    """Fetch files into the scratch directory. They are kept there, or removed when *stack* ends; until then *more* bytes of its
    room are taken, too. *digests*: of the files, if they are known.
    """
    size, left = sum(one.size or 0 for one in found if "://" in one.uri), _left(workspace)
    wanted = more + min(sum(map(scratch_for, found)), max(left - more, size))
    # What a packed file takes is not known before it is unpacked. One that takes more than was counted for it is kept where half
    # of what is left is enough, so that there is room for another one. At last it has all the room, and what was counted for it.
    kept: list[tuple[int | None, bool]] = [(more, True), (None, True)] if workspace.keeps else []
    tries = [*kept, *[(wanted, False), (None, False)][: 1 + (wanted < left)], *kept[1:]]
    while True:
        most, keeps = tries.pop(0)
        with contextlib.ExitStack() as tried:
            name = ", ".join(one.name for one in found[:3]) or "a range"
            here = tried.enter_context(_removed_after(workspace._replace(keeps=keeps), most, name, waiting))
            room = (_left(workspace) // (2 if keeps and tries else 1) if most is None else most) - more
            try:
                files = list(_read_files(found, room, sources, here, digests))
            except NoRoomError:
                if not tries:
                    raise
                continue
            if keeps and most is None:
                count_more(_files(workspace), sum(map(_beyond, found, files)))
            else:
                stack.push(tried.pop_all())
            return files


def copied_bytes(found: FoundFile, file: SourceFile) -> int:
    """Bytes that a file takes next to the source: fetched, unpacked."""
    unpacked = 0 if file.location == found.uri else file.size
    return unpacked + (found.size or 0 if "://" in found.uri and found.size != file.size else 0)


def _beyond(found: FoundFile, file: SourceFile) -> int:
    """Bytes that a kept file takes beyond those that were counted for it."""
    return max(copied_bytes(found, file) - _to_keep(found), 0)


def _read_files(
    found: Sequence[FoundFile], left: int, sources: tuple[Source, ...], here: Workspace, digests: Sequence[str]
) -> Iterator[SourceFile]:
    """Fetch files. *left*: bytes that all of them may take, besides those that were counted for files that are kept."""

    def most(*some: FoundFile) -> int | None:
        counted = _most_of(some, here) if here.keeps else 0
        return None if counted is None else counted + left

    scratch = Path(here.scratch)
    alone = ((fetch_file(one, sources, scratch, room=most(one)), None) for one in found)
    is_pack = found and all(map(is_small, found))
    files = read_small(found, sources, scratch, digests, most(*found)) if is_pack else alone
    for one, (file, _) in zip(found, files, strict=True):
        left -= _beyond(one, file) if here.keeps else copied_bytes(one, file)
        if left < 0 and here.room is not None:
            raise NoRoomError(f"{one.name} and what is read with it take more than scratch_bytes. {MORE_ROOM}")
        yield file


def _at(part: FileRange, here: SourceFile, sources: tuple[Source, ...], workspace: Workspace) -> FileRange:
    """A range of a file that is *here* now. ValueError if it is another file; then its entry in the table is removed."""
    if here.sha256 != part.file.sha256 and not version_read(part.file):  # that was fetched in its version
        forget_file(workspace.root, sources[part.file.source], part.file.name)
        raise ValueError(changed_meanwhile(part.file.name))
    return part._replace(file=part.file._replace(location=here.location, stamp=here.stamp))


def is_by_ranges(file: SourceFile, workspace: Workspace) -> bool:
    """Whether only the parts of a file that slices need are fetched."""
    found = file.found
    return workspace.room is not None and found is not None and not is_small(found) and file.sha256 == digest_by_version(found)


def _brought(
    parts: Sequence[FileRange],
    sources: tuple[Source, ...],
    workspace: Workspace,
    stack: contextlib.ExitStack,
    waiting: Callable[[], object],
) -> Iterator[SourceFile]:
    """The files of ranges, fetched until *stack* ends, or to be kept. Of a file that is read by ranges, what its range needs."""
    spans = dict[int, tuple[SourceFile, list[Span]]]()
    for number, part in enumerate(parts):
        source, found = sources[part.file.source], _there(part.file)
        if is_by_ranges(part.file, workspace) and (
            outline := stack.enter_context(outlined(found, source, _files(workspace), part))
        ):
            spans[number] = outline, spans_of(part, outline._replace(partitions=part.file.partitions), source)
    whole = [part.file for number, part in enumerate(parts) if number not in spans]
    more = sum(stop - start for _, some in spans.values() for start, stop in some)
    digests = [file.sha256 for file in whole]
    here = workspace._replace(keeps=all(_is_kept(file, workspace) for file in whole))
    fetched = _fetched([*map(_there, whole)], more, sources, here, stack, digests, waiting)
    for number, part in enumerate(parts):
        if number not in spans:
            yield fetched.pop(0)
            continue
        outline, some = spans[number]
        fetch_spans(_there(part.file), some, Path(outline.location))
        yield outline._replace(stamp=stamp(outline.location))


def _there(file: SourceFile) -> FoundFile:
    """A file as it was found. ValueError if it cannot be had from here."""
    if (found := file.found) is not None and ("://" in found.uri or kind_of(found.uri) is not None):
        return found
    where, everywhere = file.location or file.name, "where every worker sees them: a shared file system or an object store"
    if found is not None and kind_of(os.path.dirname(found.uri)) == "directory":
        raise ValueError(f"{where} was removed while the build ran. Put it back, or run the build again without it.")
    raise ValueError(f"{platform.node()} cannot read {where}. Put sources {everywhere}.")


class SharedFiles:
    """The files of a slice, fetched, or what it needs of them: how many threads read them now, how many slices of them are still
    to be read (of files that are kept, any number), and the stack that removes them.
    """

    def __init__(self) -> None:
        self.lock, self.readers, self.awaited = threading.Lock(), 0, 0.0
        self.stack = contextlib.ExitStack()
        self.files: list[SourceFile] = []


_sharing = threading.Lock()
_lent: defaultdict[tuple[Any, ...], SharedFiles] = defaultdict(SharedFiles)


@contextlib.contextmanager
def local_slice(
    slice_: Slice, sources: tuple[Source, ...], workspace: Workspace, waiting: Callable[[], object] = lambda: None
) -> Iterator[Slice]:
    """A slice that this machine can read, within the block. Files that are not here are fetched, once for all threads. They are
    kept, or removed after the last slice of them that ``fetched_ahead`` knows. *waiting* is called while there is no room for
    them: slices that have it may wait for this one. ValueError if one cannot be had here, or has changed.
    """
    here = list(_located(slice_.ranges, workspace))
    missing = [part for part, found in zip(slice_.ranges, here, strict=True) if found is None]
    if not missing:
        yield Slice(tuple(filter(None, here)))
        return
    key = _key(slice_, workspace)
    with _sharing:
        shared = _lent[key]
        shared.readers += 1
    try:
        with shared.lock, naming(sources, slice_.source):
            ready = [part._replace(file=file) for part, file in zip(slice_.ranges, shared.files, strict=False)]
            if not ready or not all(_located(ready, workspace)):
                with contextlib.ExitStack() as tried:
                    brought = _brought(missing, sources, workspace, tried, waiting)
                    files = [next(brought) if found is None else found.file for found in here]
                    ready = [_at(part, file, sources, workspace) for part, file in zip(slice_.ranges, files, strict=True)]
                    shared.files = [part.file for part in ready]
                    shared.stack.push(tried.pop_all())
        yield Slice(tuple(ready))
    finally:
        with _sharing:
            shared.readers -= 1
            shared.awaited = math.inf if _stays(slice_, workspace) else shared.awaited - 1
            _return(key)


def _return(key: tuple[Any, ...]) -> None:
    """Remove a file that nobody reads or waits for."""
    if not _lent[key].readers and _lent[key].awaited <= 0:
        _lent.pop(key).stack.close()


def _stays(slice_: Slice, workspace: Workspace) -> bool:
    """Whether all that is fetched for a slice is kept."""
    return all(_is_kept(part.file, workspace) for part in slice_.ranges)


def _key(slice_: Slice, workspace: Workspace) -> tuple[Any, ...]:
    """The name of the files of a slice, which others may share, or of row groups that they share."""
    groups = [(part.start, part.stop) if is_by_ranges(part.file, workspace) else () for part in slice_.ranges]
    files = [(part.file.found and part.file.found.uri, part.file.sha256) for part in slice_.ranges]
    return workspace.scratch, *zip(files, groups, strict=True)


@contextlib.contextmanager
def fetched_ahead(slices: Iterable[Slice], sources: tuple[Source, ...], workspace: Workspace) -> Iterator[None]:
    """Fetch the files of slices, in order, while the first ones are worked on. A failure is raised where the file is needed.
    Files that are not kept are not fetched in advance: each stays until all of its slices were lent.
    """
    missing: dict[tuple[int, str], Slice] = {}
    keys = list[tuple[Any, ...]]()
    for slice_ in slices:
        first = slice_.ranges[0].file
        if not _stays(slice_, workspace):
            keys.append(_key(slice_, workspace))
        elif not all(_located(slice_.ranges, workspace)):
            missing.setdefault((first.source, first.name), slice_)
    with _sharing:
        for key in keys:
            _lent[key].awaited += 1

    def fetch(slice_: Slice) -> None:
        with local_slice(slice_, sources, workspace):
            pass

    with ThreadPoolExecutor(FETCHERS, "fetch") as fetchers:
        for slice_ in missing.values():
            fetchers.submit(fetch, slice_)
        try:
            yield
        finally:
            fetchers.shutdown(cancel_futures=True)
            with _sharing:
                for key in set(keys):
                    _lent[key].awaited = 0
                    _return(key)


def _located(ranges: Iterable[FileRange], workspace: Workspace) -> Iterator[FileRange | None]:
    """Each range whose file is unchanged on this machine, its location without links; None for another one. Another process may
    have said where the files are: only the roots and the directories of fetched files are looked into.
    """
    directories: dict[str, str | None] = {}
    for part in ranges:
        place, real = part.file.location, None
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISLNK((status := os.lstat(place)).st_mode):
                place = real_path(place)
                status = os.lstat(place)
            head, _, name = place.rpartition("/")
            if head not in directories:
                directories[head] = _may_be_read(head, workspace)
            if stat.S_ISREG(status.st_mode) and part.file.stamp in ((), stamp_of(status)) and directories[head]:
                real = f"{directories[head]}/{name}"
        yield None if real is None else part._replace(file=part.file._replace(location=real))


def _may_be_read(path: str, workspace: Workspace) -> str | None:
    """A path without links, if it is within the roots or among fetched files."""
    with contextlib.suppress(OSError, ValueError):
        real = real_path(path)
        with contextlib.suppress(ValueError):
            return readable(real)
        from huggingface_hub.constants import HF_HUB_CACHE  # takes a while

        return real if is_within(real, [*filter(None, workspace[1:3]), HF_HUB_CACHE]) else None
    return None


@contextlib.contextmanager
def fetching_to(config: BuildConfig, workspace: Workspace, found: Iterable[FoundFile]) -> Iterator[Workspace]:
    """The workspace, which says whether fetched files are kept, by their sizes and the room in scratch. Within the block, room
    is taken for files that are kept.
    """
    if config.keep_files is True:
        yield workspace
        return
    files = _files(workspace)
    room = config.scratch_bytes or kept_in(files) + shutil.disk_usage(nearest(files)).free // 2
    with contextlib.ExitStack() as stack:
        keeps, size = config.keep_files == "auto" and not workspace.root.exists(LIST), 0  # a copy would have what is forgotten
        if keeps:
            # Files that are fetched as a whole stay. Only of large ones does a note say which copy is here.
            whole = [one for one in found if _to_keep(one) and is_whole(one)]
            known = known_files(whole, config.sources, config.slice_bytes, [workspace.root])
            for one, cut in zip(whole, known, strict=True):
                copy = files / f"{cut and cut.file.sha256}.raw" if is_small(one) else note_of(one, files)
                size += 0 if kind_of(copy) else _to_keep(one)
        if size:
            keeps = False
            with contextlib.suppress(NoRoomError):
                keeps = take_room(files, size, room, stack, keeps=True) is not None
        yield workspace._replace(keeps=keeps, room=room)
