"""A version of a table: what is known of it before its files are read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from flat_tokens.extras import extra, pa
from flat_tokens.stores.retry import brief
from flat_tokens.text.rows import TextFile
from tasks.config import DocumentPolicy, Source
from tasks.models import SourceFile
from tasks.text.files import text_file

T = TypeVar("T")
BATCH_ROWS = 1 << 12
"""Rows of a data file that are rewritten at a time."""


class DataFile(NamedTuple):
    """A data file of a version of a table. ``since``: a number that is larger for files that came later. ``partition``: columns
    with one value for all of its rows, as text. ``changed``: what the table has changed in it, as a digest; empty: nothing.
    """

    uri: str
    since: int
    partition: Mapping[str, str | None] = MappingProxyType({})
    changed: str = ""


class TableVersion(NamedTuple):
    """A version of a table. ``place``: what finds it again, for good. ``directory``: that its files' names are below."""

    version: str
    place: str
    directory: str
    schema: pa.Schema
    files: Sequence[DataFile]


class TableError(ValueError):
    """A table that cannot be read. The message names it and the next step, unlike those of the libraries."""


def reading(what: str, read: Callable[[], T]) -> T:
    """Call *read*. Errors of tables' libraries and of stores become a TableError that names the table, as *what*."""
    try:
        return read()
    except (TableError, ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:  # every library and store has errors of its own
        # The cause of what pyiceberg raises for a catalog's answer is an HTTP status, without the catalog's words.
        said = " ".join(str(error).split()) if type(error).__module__.startswith("pyiceberg.") else brief(error)
        if isinstance(error, FileNotFoundError):
            said = f"there is no file {error.filename or error}, as after its snapshot expired"
        first = said.split(" 0: <unknown>")[0]
        raise TableError(
            f"{what} cannot be read: {first}. If it is being written, try again later; else check the address, the version and "
            "the credentials in the environment."
        ) from error


def library(name: str) -> Any:
    """A module that reads tables. ModuleNotFoundError says what to install."""
    return extra(name, "a table as a source")


def as_text_file(source: Source, what: str) -> TextFile:
    """A table as a file with its columns."""
    return text_file(SourceFile(0, what, 0, "", "parquet"), source, DocumentPolicy())


def columns_of(source: Source) -> list[str]:
    """The columns that a source reads."""
    return as_text_file(source, "").columns


def top_level(columns: Iterable[str], names: Container[str]) -> list[str]:
    """The columns of a table that *columns* are, or are fields of."""
    return [name if name in names else name.partition(".")[0] for name in columns]
