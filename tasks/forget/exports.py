"""Exports of versions that held forgotten documents, as far as the output knows of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.formats.contract import EXPORT_RECORD
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import NO_OBJECT, Store, is_below
from flat_tokens.tools.corpus import BESIDE
from flat_tokens.tools.export import PLAN, holding
from tasks.locations import writable
from tasks.output.paths import EXPORTS, version_store
from tasks.output.versions import names_of


class Note(NamedTuple):
    """A note of an export: its key below the output, the place of the files, their format, and the version that they are of.
    ``flat-tokens``: the place is another output, which reads this one's text or versions.
    """

    key: str
    path: str
    format: str
    version: str


def notes_of(root: Store, versions: set[str]) -> list[Note]:
    """The notes of exports of *versions*, and of other outputs. One that is not understood is left out."""
    found = []
    for name in names_of(root, EXPORTS):
        with contextlib.suppress(*NO_OBJECT, ValueError, KeyError):
            record = read_json(root, f"{EXPORTS}/{name}")
            note = Note(f"{EXPORTS}/{name}", *(str(record[fact]) for fact in ("path", "format", "version")))
            if note.version in versions or note.format == FLAT_TOKENS:
                found.append(note)
    return found


def _is_begun(root: Store, note: Note) -> bool:
    """Whether the place of an export is on a local disk and has this export, or a beginning of it."""
    try:
        writable(note.path)
        return (
            "://" not in note.path and read_json(Store.at(note.path), PLAN).get("from") == version_store(root, note.version).url
        )
    except (*NO_OBJECT, ValueError, PermissionError):
        return False


def check_none_under_way(root: Store, notes: Sequence[Note]) -> None:
    """ValueError where a process is writing an export."""
    for note in notes:
        if _is_begun(root, note):
            with holding(Store.at(note.path)):
                pass


def remove_export(root: Store, note: Note) -> bool:
    """Remove the files of an export on a local disk. Return whether it is gone: False where it cannot be reached, where the place
    has something else by now, or where an unfinished export has files that no record names. ValueError while a process writes it.
    """
    if "://" not in note.path and kind_of(note.path) is None:
        return True
    if not _is_begun(root, note):
        return False
    with holding(store := Store.at(note.path)):
        return _remove_files(store)


def _remove_files(store: Store) -> bool:
    try:
        is_finished = store.exists(EXPORT_RECORD)
        records = [EXPORT_RECORD, *(f"{BESIDE}/parts/{key}" for key, _ in (store / BESIDE / "parts").listing())]
        keys = list[str]()
        for record in filter(store.exists, records):
            keys += [str(one[0]) for one in read_json(store, record)["objects"]]
        for key in filter(is_below, keys):
            if store.exists(key):
                store.remove(key)
        store.remove(BESIDE)
        return is_finished or not any(store.listing())
    except (*NO_OBJECT, ValueError, KeyError, TypeError, PermissionError):
        return False
