"""Separators of documents that no file of a source has: each file is one document then, which is hardly meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flat_tokens.stores.local import kind_of
from flat_tokens.stores.reading import open_plain
from flat_tokens.text import limits
from flat_tokens.text.plain import has_separator
from tasks.config import DocumentPolicy, Source
from tasks.models import SourceFile
from tasks.text.files import text_file


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
        elif not any(kind_of(file.location) != "file" or _is_separated(file, source) for file in mine):
            named = mine[0].name if len(mine) == 1 else f"none of {len(mine):,} files"
            has = "does not have it" if len(mine) == 1 else "has it"
            yield f"{begin} {named} {has}: a file is one document.{_remedy(source.document_separator, mine[0])}"


def _is_separated(file: SourceFile, source: Source) -> bool:
    return has_separator(text_file(file, source, DocumentPolicy()))


def _remedy(separator: str, file: SourceFile) -> str:
    """The separator that was probably meant; nothing where that is not to be seen."""
    if "\\" in separator:
        return ' In YAML, "\\n" in double quotes is a line feed; in single quotes, and without, it is a backslash and an n.'
    if separator.strip("\r\n"):
        return ""
    with open_plain(file.location) as opened:
        head = opened.read(limits.LOOK_BYTES)
    line_end = next((end for end in ("\r\n", "\n", "\r") if end.encode() in head), None)
    return "" if line_end in (None, separator) else f" Its lines end in {line_end!r}."
