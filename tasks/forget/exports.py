"""Exports of versions that held forgotten documents, as far as the output knows of them."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from flat_tokens.formats.contract import EXPORT_RECORD
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import NO_OBJECT, Store, is_below
from flat_tokens.tools.corpus import BESIDE
from flat_tokens.tools.export import PLAN
from tasks.locations import writable
from tasks.output.paths import EXPORTS, version_store
from tasks.output.versions import names_of


class Note(NamedTuple):
    """A note of an export: its key below the output, the place of the files, and the version that they are of."""

    key: str
    path: str
    version: str


def notes_of(root: Store, versions: set[str]) -> list[Note]:
    """The notes of exports of *versions*. One that is not understood is left out."""
    found = []
    for name in names_of(root, EXPORTS):
        with contextlib.suppress(*NO_OBJECT, ValueError, KeyError):
            record = read_json(root, f"{EXPORTS}/{name}")
            note = Note(f"{EXPORTS}/{name}", str(record["path"]), str(record["version"]))
            if note.version in versions:
                found.append(note)
    return found


def remove_export(root: Store, note: Note) -> bool:
    """Remove the files of an export on a local disk. Return whether it is gone: False where it cannot be reached, or where the
    place has something else by now.
    """
    if "://" in note.path:
        return False
    if kind_of(note.path) is None:
        return True
    store = Store.at(note.path)
    try:
        writable(note.path)
        if read_json(store, PLAN).get("from") != version_store(root, note.version).url:
            return False
        records = [EXPORT_RECORD, *(f"{BESIDE}/parts/{key}" for key, _ in (store / BESIDE / "parts").listing())]
        keys = list[str]()
        for record in filter(store.exists, records):
            keys += [str(one[0]) for one in read_json(store, record)["objects"]]
        for key in filter(is_below, keys):
            if store.exists(key):
                store.remove(key)
        store.remove(BESIDE)
    except (*NO_OBJECT, ValueError, KeyError, TypeError, PermissionError):
        return False
    return True
