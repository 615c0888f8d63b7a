"""Slices of files: the ranges of each large one, and runs of small ones, whose ends follow from the files themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tasks.download.table import CutFile
from tasks.models import FileRange, Slice

SMALL_PART = 8
"""A file with no more text than this part of a slice joins a run."""
MEAN_PART = 4
"""The part of a slice that a run has on average. A changed file costs the reading of its run, but each run is stored
separately.
"""
MOST_FILES = 1 << 13
"""Files of a slice, at most: to open and read so many takes as long as to read a slice of large ones."""


def slices_of(cuts: Iterable[CutFile], slice_bytes: int) -> Iterator[Slice]:
    """The slices of files, in order. A file that is small and in one piece joins its neighbours, if they are of the same source,
    format and split.

    Each file may be the last of its run, by its digest and with a chance that grows with its size. So a file that is added,
    removed or changed leaves the runs before and after it as they are.
    """
    entry_bytes = slice_bytes // MOST_FILES
    run, size, ended = list[FileRange](), 0, set[str]()
    for file, ranges in cuts:
        parts = [FileRange(file, *one) for one in ranges]
        is_small = len(parts) == 1 and SMALL_PART * parts[0].text_bytes <= slice_bytes
        own = parts[0].text_bytes + entry_bytes if is_small else 0
        if run and (not is_small or size + own > slice_bytes or _run_of(run[0]) != _run_of(parts[0])):
            yield Slice(tuple(run))
            run, size = [], 0
        if not is_small:
            yield from (Slice((part,)) for part in parts)
            continue
        run.append(parts[0])
        size += own
        # A number from 0 to 1, by the digest. Of equal files only the first one ends a run, or there might be as many slices as
        # files.
        drawn = int(file.sha256[:13].ljust(13, "0"), 16) / (1 << 52)
        if file.sha256 not in ended and drawn * slice_bytes < MEAN_PART * own:
            ended.add(file.sha256)
            yield Slice(tuple(run))
            run, size = [], 0
    if run:
        yield Slice(tuple(run))


def _run_of(part: FileRange) -> tuple[object, ...]:
    """The source, format and split that the files of a run share."""
    return part.file.source, part.file.format, part.file.split
