"""Files cut into slices, with a record: a file that its store names by its content need not be fetched again."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import platform
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from flat_tokens.stores.local import kind_of, named_errors, real_path
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.text.rows import Range
from tasks.config import Source
from tasks.download.fetch import fetch_file, glimpsed
from tasks.download.sources import naming
from tasks.locations import is_within, readable
from tasks.models import FORMAT_SEMANTICS, FileRange, FoundFile, Model, Slice, SourceFile, digest_of
from tasks.output.paths import FILES
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.text.documents import plan_ranges, range_of, stamp

READERS = 16
FETCHERS = 4


class CutFile(Model):
    """A file with a known content, and the ranges of its slices."""

    file: SourceFile
    cuts: tuple[Range, ...]

    @property
    def slices(self) -> list[Slice]:
        return [Slice(ranges=(FileRange(file=self.file, **cut._asdict()),)) for cut in self.cuts]


class Record(Model):
    """Record of a cut file that its store names by its content. ``sha256`` is that of the file."""

    sha256: str
    file: SourceFile
    slice_bytes: int
    cuts: tuple[Range, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json"))


def cut_file(found: FoundFile, sources: tuple[Source, ...], slice_bytes: int, place: Place) -> CutFile:
    """Fetch a file and cut it into slices of about *slice_bytes* of text. The result is recorded where the store would tell if
    the file changed. ValueError, naming the file, where it is damaged or not as its source says.
    """
    cut = look_into(found, sources, slice_bytes, place)
    if found.immutable:
        bare = _bare(cut.file).model_copy(update={"found": None})
        record = Record(sha256=bare.sha256, file=bare, slice_bytes=slice_bytes, cuts=cut.cuts)
        facts = {"digest": record.digest, **record.model_dump(mode="json")}
        place.root.put(_key(found, sources[found.source]), (json.dumps(facts) + "\n").encode())
    meter.add("download", found.size or 0)
    return cut


def look_into(found: FoundFile, sources: tuple[Source, ...], slice_bytes: int, place: Place) -> CutFile:
    """Cut a file into slices, writing nothing to the output. A file is fetched unless its store and its end tell enough."""
    with glimpsed(found, Path(place.scratch)) as glimpse, naming(sources, found.source), named_errors(found.uri):
        file = glimpse or _fetch(found, sources, place)
        cuts = tuple(range_of(part) for part in plan_ranges(file, sources[found.source], slice_bytes))
    return CutFile(file=_bare(file) if glimpse else file, cuts=cuts)


def _fetch(found: FoundFile, sources: tuple[Source, ...], place: Place) -> SourceFile:
    """Fetch a file into the scratch directory of an attempt."""
    scratch, is_own = Path(place.scratch), place.scratch == place.staging
    return fetch_file(found, sources, scratch, hub_cache=scratch / "hub" if is_own else None)


def _bare(file: SourceFile) -> SourceFile:
    """The facts of a file without its place on this machine."""
    return file.model_copy(update={"location": "", "stamp": ()})


def recorded(
    found: Sequence[FoundFile], sources: tuple[Source, ...], slice_bytes: int, roots: Sequence[Store]
) -> dict[FoundFile, CutFile]:
    """The files that have a record at one of the outputs. They need not be fetched to be cut."""

    def look_up(file: FoundFile) -> CutFile | None:
        return next(filter(None, (_recorded(file, sources[file.source], slice_bytes, root) for root in roots)), None)

    named = [file for file in found if file.immutable]
    with ThreadPoolExecutor(READERS) as readers:
        return {file: cut for file, cut in zip(named, readers.map(look_up, named), strict=True) if cut}


def _recorded(found: FoundFile, source: Source, slice_bytes: int, root: Store) -> CutFile | None:
    try:
        facts = read_json(root, _key(found, source))
        digest = facts.pop("digest")
        record = Record.model_validate(facts)
    except (*NO_OBJECT, ValueError, KeyError, TypeError):
        return None
    if digest != record.digest or record.slice_bytes != slice_bytes:
        return None
    # The same file may be of another source by now, or of another split.
    mine = {"source": found.source, "name": found.name, "split": found.split, "found": found}
    return CutFile(file=record.file.model_copy(update=mine), cuts=record.cuts)


def _key(found: FoundFile, source: Source) -> str:
    content = found.content or (found.uri, found.immutable, found.size)
    suffixes = PurePosixPath(found.name).suffixes  # they tell its format
    what = digest_of("cut", FORMAT_SEMANTICS, content, suffixes, source.format, source.reading())
    return f"{FILES}/{what}.cut.json"


_fetching: defaultdict[tuple[str, ...], threading.Lock] = defaultdict(threading.Lock)
_fetched: dict[tuple[str, ...], SourceFile] = {}


def at_hand(slice_: Slice, sources: tuple[Source, ...], place: Place) -> Slice:
    """A slice whose files this machine can read. Those that are not here are fetched, once for all threads. ValueError where one
    cannot be had here, or has changed.
    """
    here = tuple(_range_at_hand(part, sources, place) for part in slice_.ranges)
    return slice_ if all(map(operator.is_, here, slice_.ranges)) else Slice(ranges=here)


def _range_at_hand(part: FileRange, sources: tuple[Source, ...], place: Place) -> FileRange:
    file = part.file
    if real := _place_here(file, place):
        return part if real == file.location else part.model_copy(update={"file": file.model_copy(update={"location": real})})
    found = file.found
    if found is None or ("://" not in found.uri and kind_of(found.uri) is None):
        where, everywhere = file.location or file.name, "where every worker sees them: a shared file system or an object store"
        if found is not None and kind_of(os.path.dirname(found.uri)) == "directory":
            raise ValueError(f"{where} was removed while the build ran. Put it back, or run the build again without it.")
        raise ValueError(f"{platform.node()} cannot read {where}. Put sources {everywhere}.")
    key = (found.uri, file.sha256, place.scratch)
    with _fetching[key]:
        if key not in _fetched or not _place_here(_fetched[key], place):
            here = _fetch(found, sources, place)
            if here.sha256 != file.sha256:
                place.root.remove(_key(found, sources[file.source]))
                raise ValueError(f"{file.name} changed while the build read it. Run the build again when the file is complete.")
            _fetched[key] = here
        here = _fetched[key]
    return part.model_copy(update={"file": file.model_copy(update={"location": here.location, "stamp": here.stamp})})


@contextlib.contextmanager
def fetched_ahead(slices: Iterable[Slice], sources: tuple[Source, ...], place: Place) -> Iterator[None]:
    """Fetch the files of slices, in order, while the first ones are worked on. A failure is raised where the file is needed."""
    ranges = [part for slice_ in slices for part in slice_.ranges]
    first = {(one.file.source, one.file.name): one for one in reversed(ranges) if not _place_here(one.file, place)}
    with ThreadPoolExecutor(FETCHERS, "fetch") as fetchers:
        for part in reversed(first.values()):
            fetchers.submit(_range_at_hand, part, sources, place)
        try:
            yield
        finally:
            fetchers.shutdown(cancel_futures=True)


def _place_here(file: SourceFile, place: Place) -> str | None:
    """Where the file stands unchanged on this machine, links resolved; None where it does not. Another process may have said
    where: only the roots and the directories of fetched files are looked into.
    """
    with contextlib.suppress(OSError, ValueError):
        real = real_path(file.location)
        if file.stamp in ((), stamp(file.location)) and kind_of(real) == "file":
            from huggingface_hub.constants import HF_HUB_CACHE  # takes a while

            return real if is_within(real, [*filter(None, place[1:]), HF_HUB_CACHE]) else readable(real)
    return None
