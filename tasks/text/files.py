"""Source files and ranges of them, as the readers of their formats take them; and separators of documents that no file of a
source has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NoReturn

from flat_tokens.extras import pa
from flat_tokens.stores.local import kind_of, named_errors
from flat_tokens.stores.reading import open_plain
from flat_tokens.text import limits
from flat_tokens.text.formats import FORMATS
from flat_tokens.text.partitions import partitions_of
from flat_tokens.text.plain import has_separator
from flat_tokens.text.rows import Range, Rows, TextFile
from tasks.config import DocumentPolicy, Source
from tasks.models import FileRange, SourceFile, Stamp, stamp_of


def plan_ranges(file: SourceFile, source: Source, range_bytes: int) -> list[FileRange]:
    """The ranges of a file, in order, each of about *range_bytes* of text. ValueError, naming the file and what it has, if it
    cannot be read or has no such column.
    """
    return [FileRange(file, *cut) for cut in cuts_of(file, source, range_bytes)]


def cuts_of(file: SourceFile, source: Source, range_bytes: int, content: bytes | None = None) -> tuple[Range, ...]:
    """The ranges of a file, in order, as tuples. *content*: its bytes, if they are known. Errors as of ``plan_ranges``."""
    for setting in ("delimiter", "quotes"):
        if getattr(source, setting) is not None and file.format != "csv":
            raise ValueError(f"{file.name} is {file.format}, which has no {setting}. Leave source.{setting} out.")
    with _as_unreadable(file):
        read = text_file(file, source, DocumentPolicy())._replace(content=content)
        return tuple(FORMATS[file.format].ranges(read, range_bytes))


@contextlib.contextmanager
def _as_unreadable(file: SourceFile) -> Iterator[None]:
    """Raise a library's errors as those of a file that cannot be read."""
    try:
        with named_errors(file.location):
            yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for names of columns
        raise ValueError(f"{file.name} cannot be read as {file.format}: {error}") from error


def with_partitions(file: SourceFile, source: Source, content: bytes | None = None) -> SourceFile:
    """The file with the kept columns that its directories give: those that it has not itself. *content*: its bytes, if they
    are known. Raises as ``plan_ranges`` does.
    """
    given = partitions_of(file.name)
    if source.table is not None:  # a file that is older than a column lacks it
        given = dict.fromkeys(source.keep_columns or ()) | given
    names = [name for name in source.keep_columns or () if name in given]
    if not names:
        return file
    with _as_unreadable(file):
        own = FORMATS[file.format].columns(text_file(file, source, DocumentPolicy())._replace(content=content))
    return file if own is None else file._replace(partitions=tuple((name, given[name]) for name in names if name not in own))


def text_file(file: SourceFile, source: Source, policy: DocumentPolicy) -> TextFile:
    """A source file as its format's reader takes it."""
    return TextFile.of(
        file.location,
        file.name,
        file.size,
        vars(source),
        max_bytes=policy.max_bytes,
        kept_columns=source.keep_columns or (),
        crlf=file.line_ends is not None,
        partitions=file.partitions,
    )


def range_of(part: FileRange) -> Range:
    return Range(part.start, part.stop, part.rows, part.text_bytes)


def rows_of(
    part: FileRange, source: Source, policy: DocumentPolicy, batch_bytes: int | None = None, content: bytes | None = None
) -> Iterator[Rows]:
    """The rows of a range. *content*: the bytes of its file, if they have been read. ValueError if the file is damaged, or
    changes meanwhile.
    """
    if content is None:
        check_unchanged(part.file)
    file = text_file(part.file, source, policy)._replace(batch_bytes=batch_bytes, content=content)
    try:
        with named_errors(part.file.location):
            yield from FORMATS[part.file.format].read(file, range_of(part))
    except (pa.ArrowException, OSError) as error:
        raise_unread(part, error)
    if content is None:
        check_unchanged(part.file)


def raise_unread(part: FileRange, error: Exception) -> NoReturn:
    """Raise the ValueError for a range that could not be read: its file has changed, or is damaged."""
    check_unchanged(part.file)
    raise ValueError(f"{part.label} cannot be read to its end: {error}") from error


def stamp(path: str) -> Stamp:
    """The stamp of the file at a path, links followed."""
    return stamp_of(os.stat(path))


def check_unchanged(file: SourceFile) -> None:
    """ValueError if a file has changed since its digest was taken."""
    try:
        changed = bool(file.stamp) and stamp(file.location) != file.stamp
    except FileNotFoundError:
        changed = True
    if changed:
        raise ValueError(changed_meanwhile(file.name))


def changed_meanwhile(name: str) -> str:
    """The message for a file that is another one than it was."""
    return f"{name} changed while the build read it. Run the build again when the file is complete."


def unused_separators(sources: Sequence[Source], files: Sequence[SourceFile]) -> Iterator[str]:
    """A warning for each source whose separator none of its files has, as far as all of them are on this machine."""
    of_source: list[list[SourceFile]] = [[] for _ in sources]
    for file in files:
        of_source[file.source].append(file)
    for source, mine in zip(sources, of_source, strict=True):
        if not source.document_separator or not mine:
            continue
        begin = f"{source.called}: document_separator is {source.document_separator!r}, but"
        if mine[0].format != "text":
            yield f"{begin} {mine[0].name} is {mine[0].format}, where it means nothing. Leave it out."
        elif not any(
            kind_of(file.location) != "file" or has_separator(text_file(file, source, DocumentPolicy())) for file in mine
        ):
            named = mine[0].name if len(mine) == 1 else f"none of {len(mine):,} files"
            has = "does not have it" if len(mine) == 1 else "has it"
            yield f"{begin} {named} {has}: a file is one document.{_remedy(source.document_separator, mine[0])}"


def _remedy(separator: str, file: SourceFile) -> str:
    """The separator that was probably meant; nothing if that is not to be seen."""
    if "\\" in separator:
        return ' In YAML, "\\n" in double quotes is a line feed; in single quotes, and without, it is a backslash and an n.'
    if separator.strip("\r\n"):
        return ""
    with open_plain(file.location) as opened:
        head = opened.read(limits.LOOK_BYTES)
    line_end = next((end for end in ("\r\n", "\n", "\r") if end.encode() in head), None)
    return "" if line_end in (None, separator) else f" Its lines end in {line_end!r}."
