"""Cutting source files into slices."""

from __future__ import annotations

import pyarrow as pa

from flat_tokens.text.formats import FORMATS
from flat_tokens.text.rows import Range, TextFile
from tasks.config import DocumentPolicy, Source
from tasks.models import Slice, SourceFile


def plan_slices(file: SourceFile, source: Source, slice_bytes: int) -> list[Slice]:
    """The slices of a file, in order, each of about *slice_bytes* of text.

    ValueError, naming the file and what it has, where it cannot be read or has no such column.
    """
    try:
        ranges = FORMATS[file.format].ranges(text_file(file, source, DocumentPolicy()), slice_bytes)
        return [Slice(file=file, **part._asdict()) for part in ranges]
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.name} cannot be read as {file.format}: {error}") from error


def text_file(file: SourceFile, source: Source, policy: DocumentPolicy) -> TextFile:
    """A source file as its format's reader takes it."""
    return TextFile(
        path=file.location,
        name=file.name,
        size=file.size,
        text_column=source.text_column,
        id_column=source.id_column,
        separator=(source.document_separator or "").encode(),
        max_bytes=policy.max_bytes,
    )


def range_of(part: Slice) -> Range:
    return Range(part.start, part.stop, part.rows, part.text_bytes)
