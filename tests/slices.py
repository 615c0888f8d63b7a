"""Slices of files as tests make them."""

from typing import Any

from tasks.config import Source
from tasks.download.cut import local_slice
from tasks.models import FileRange, Slice, SourceFile
from tasks.output.leases import Workspace
from tasks.text.files import plan_ranges


def slices_of(file: SourceFile, source: Source, slice_bytes: int) -> list[Slice]:
    """A file's ranges, each a slice of its own."""
    return [Slice(ranges=(part,)) for part in plan_ranges(file, source, slice_bytes)]


def at_hand(slice_: Slice, sources: tuple[Source, ...], workspace: Workspace) -> Slice:
    """A slice whose files are kept on this machine."""
    with local_slice(slice_, sources, workspace) as here:
        return here


def changed(slice_: Slice, **changes: Any) -> Slice:
    """A slice of one range with other facts of that."""
    (part,) = slice_.ranges
    return Slice(ranges=(part._replace(**changes),))


def range_of_slice(file: SourceFile, start: int, stop: int, text_bytes: int) -> Slice:
    """A slice of one range."""
    return Slice(ranges=(FileRange(file, start, stop, None, text_bytes),))
