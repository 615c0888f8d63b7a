"""Directories whose files are not all content: tables with a log, datasets that were saved to disk, data among notes."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from flat_tokens.stores.local import kind_of, pattern_base
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import Store
from flat_tokens.text.formats import COMPRESSIONS, HEAD_BYTES, FileFormat, compression_of, detect_format, named_format
from tasks.config import Source
from tasks.locations import local_path, readable
from tasks.models import FoundFile

ASKED_AT_ONCE = 16
DIRECTORIES_ASKED = 64
"""Directories of a remote store that are asked for a table's log, those nearest to its root first."""


class Table(NamedTuple):
    """A kind of table that is a directory of files and a log of which of them hold its rows. ``log``: the log's directory.
    ``entry``: how the name of a file in it ends, if other directories may have the log's name.
    """

    kind: str
    log: str
    entry: str = ""
    remedy: str = "Set source.table instead of source.path to read the table."


TABLES = (
    Table("a Delta table", "_delta_log"),
    Table("a Hudi table", ".hoodie", remedy="Write its rows to a directory of their own, and name that in source.path."),
    Table("an Iceberg table", "metadata", ".metadata.json"),
)


TableIn = Callable[[Any, str], Table | None]
"""Looks for a table that is a directory of a file system of fsspec."""


def refuse_tables(source: Source, store: Store, paths: Sequence[str], table_in: TableIn, listed: str | None = None) -> None:
    """ValueError if files of a store are in the directory of a table: they may hold rows that it has removed. *listed*: a
    directory of a remote store of which *paths* are all objects, so that nothing below it is asked for.
    """
    found: set[str] = set()
    for parent in map(posixpath.dirname, paths):
        while parent.strip("/") and parent not in found:
            found.add(parent)
            parent = posixpath.dirname(parent)
    directories = sorted(found, key=lambda directory: (directory.count("/"), directory))
    known = dict[str, Table]()
    if listed is not None:
        for kind, path in itertools.product(TABLES, paths):  # a table is known by the objects in its log
            directory, log, entry = path.partition(f"/{kind.log}/")
            if log and (not kind.entry or (entry.endswith(kind.entry) and "/" not in entry)):
                known.setdefault(directory, kind)
        directories = [one for one in directories if not f"{one}/".startswith(f"{listed}/") or one in known]
    asked = directories if store.is_local else directories[:DIRECTORIES_ASKED]
    with ThreadPoolExecutor(ASKED_AT_ONCE) as asking:
        each = map if store.is_local else asking.map
        tables = list(each(lambda directory: known.get(directory) or table_in(store.fs, directory), asked))
    for directory, table in zip(asked, tables, strict=True):
        if table is not None:
            raise ValueError(
                f"{source.called}: {directory} is {table.kind}: it has {table.log}, and its files may hold rows that the "
                f"table has removed. {table.remedy}"
            )


def table_in(fs: Any, directory: str) -> Table | None:
    """The table that a directory of a file system is, if it is one."""
    for table in TABLES:
        log = Store(posixpath.join(directory, table.log), fs)
        try:
            readable(log.url)
            if not log.ask("isdir"):  # one request; listing what is not there lists what is above it, too
                continue
            if not table.entry or any(str(name).endswith(table.entry) for name in log.ask("ls", detail=False)):
                return table
        except Exception:  # noqa: BLE001, S112  every store has errors of its own for what is not there, or not ours to see
            continue
    return None


NOTES = ("README", "LICENSE", "CHANGELOG", "DATASET_INFO")
"""How the names of files begin that describe data."""
SAVED = ("state.json", "dataset_info.json")
"""Files that ``Dataset.save_to_disk`` of the library datasets adds to its data."""
SAVED_SPLITS = "dataset_dict.json"
"""The file that ``DatasetDict.save_to_disk`` adds, above a directory for each split."""


def refuse_saved(source: Source, files: Sequence[FoundFile]) -> None:
    """ValueError if a source is what ``datasets`` has saved to disk, with the pattern that finds its data."""
    names = {file.name for file in files}
    beside = [name for name in names if name.endswith((SAVED[0], SAVED_SPLITS))]  # hardly ever any
    saved, of_splits = (
        sorted(name[: -len(of)] for name in beside if name.rpartition("/")[2] == of) for of in (SAVED[0], SAVED_SPLITS)
    )
    patterns = [f"{_place_of(source)}/{parent}data-*.arrow" for parent in saved if parent + SAVED[1] in names]
    patterns = patterns or [f"{_place_of(source)}/{parent}*/data-*.arrow" for parent in of_splits]
    if patterns:
        raise ValueError(
            f"{source.called} was written by save_to_disk of datasets: its text is in its *.arrow files alone. Set "
            f"source.path to {' or '.join(patterns)}"
        )


def check_names(source: Source, files: Sequence[FoundFile]) -> None:
    """ValueError if files of a source have names of several formats, or if another one is of no format at all."""
    if source.format != "auto":
        return
    known = [(file.name, kind, file.size or 0) for file in files if (kind := named_format(file.name))]
    check_one_format(source, known)
    for file in files if 0 < len(known) < len(files) else ():
        if named_format(file.name) is None and "://" not in file.uri:
            with open_plain(file.uri) as opened:
                head = opened.read(HEAD_BYTES)
            try:
                if compression_of(head, file.name) is None:
                    detect_format(head, file.name)
            except ValueError as error:
                pattern = _pattern(source, [name for name, _, _ in known])
                raise ValueError(f"{error} To leave it out, set source.path to a pattern, such as {pattern}") from error


def check_one_format(source: Source, files: Iterable[tuple[str, FileFormat, int]]) -> None:
    """Refuse files, by name, format and size, of several formats: notes among data are hardly meant as text to train on."""
    listed, of_format = list(files), dict[FileFormat, dict[str, int]]()
    if len({kind for _, kind, _ in listed}) < 2:
        return
    for name, kind, size in listed:
        of_format.setdefault(kind, {})[name] = 0 if name.rpartition("/")[2].upper().startswith(NOTES) else size
    found = ", ".join(f"{kind} ({list(names)[-1]})" for kind, names in sorted(of_format.items()))
    most = max(of_format.values(), key=lambda names: sum(names.values()))
    data = [name for name, size in most.items() if size] or list(most)
    raise ValueError(
        f"{source.called} holds files of several formats: {found}. Set source.path to a pattern that takes one of "
        f"them, such as {_pattern(source, data)}; give another format a source of its own."
    )


def _pattern(source: Source, names: Sequence[str]) -> str:
    """A pattern for the files of a source whose names end as most of these do."""
    each = (PurePosixPath(name).suffixes for name in names)
    endings = Counter("".join(some[-2:] if some and some[-1].lower() in COMPRESSIONS else some[-1:]) for some in each)
    ((ending, _),) = endings.most_common(1)
    return f"{_place_of(source)}/{'**/' if any('/' in name for name in names) else ''}*{ending}"


def _place_of(source: Source) -> str:
    """The directory that the names of a source's files are relative to."""
    if source.hub is not None:
        return f"hf://datasets/{source.hub.path}"
    assert source.path is not None
    if (path := local_path(source.path)) is None:
        before = re.split(r"[*?\[]", source.path, maxsplit=1)[0]
        return source.path.rstrip("/") if before == source.path else before.rpartition("/")[0]
    return path.rstrip("/") if kind_of(path) == "directory" else pattern_base(path)[0]
