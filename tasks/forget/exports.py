"""Exports of versions that held forgotten documents, as far as the output knows of them; and runs that saw these, by their
ledgers: at which steps, how often, and the edit that leaves them out.

The certificate of a forgetting, as JSON and a page: the request, what was done and checked, and what is not known here.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flat_tokens import __version__
from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.arrays.layouts import to_json
from flat_tokens.forgotten import DIRECTORY, STEP, WINDOW, Forgotten
from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.formats.contract import EXPORT_RECORD
from flat_tokens.record.ledger import Ledger
from flat_tokens.rows.views import SplitView
from flat_tokens.stores.local import kind_of, real_path
from flat_tokens.stores.store import NO_OBJECT, Store, is_below, read_json
from flat_tokens.tools import terminal
from flat_tokens.tools.corpus import BESIDE
from flat_tokens.tools.export import PLAN, holding
from flat_tokens.tools.terminal import one_line, plural
from tasks.derive.without import OfVersion
from tasks.locations import writable
from tasks.output.forgotten import PendingForgetting
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
    """ValueError if a process is writing an export."""
    for note in notes:
        if _is_begun(root, note):
            with holding(Store.at(note.path)):
                pass


def remove_export(root: Store, note: Note) -> bool:
    """Remove the files of an export on a local disk. Return whether it is gone: False if it cannot be reached, if the place
    has something else by now, or if an unfinished export has files that no record names. ValueError while a process writes it.
    """
    if "://" not in note.path and kind_of(note.path) is None:
        return True
    if not _is_begun(root, note):
        return False
    with holding(store := Store.at(note.path)):
        try:
            is_finished = store.exists(EXPORT_RECORD)
            records = [EXPORT_RECORD, *(f"{BESIDE}/parts/{key}" for key, _ in (store / BESIDE / "parts").listing())]
            keys = list[str]()
            for record in filter(store.exists, records):
                keys += [str(one[0]) for one in read_json(store, record)["objects"]]
            for key in filter(store.exists, filter(is_below, keys)):
                store.remove(key)
            store.remove(BESIDE)
            return is_finished or not any(store.listing())
        except (*NO_OBJECT, ValueError, KeyError, TypeError, PermissionError):
            return False


logger = logging.getLogger(__name__)

STEPS = 1_000
"""Steps of a run that are listed."""


def visits_of_forgotten(
    root: Store, path: str, before: int | None, skip_from: int | None, holders: Sequence[OfVersion]
) -> JsonObject:
    """The visits of forgotten documents in a run, by its ledger, before a step; without one to its end. No batch is read.
    ValueError if the run has no end and no step is given, or the ledger is not understood.
    """
    ledger = Ledger.open(path)
    mixture = ledger.mixture()
    last = ledger.steps_before(before, "--before STEP, or --skip-from STEP")
    versions = {_place(version_store(root, of.version).url): of for of in holders}
    documents, steps, sources = 0, [np.empty(0, np.int64)], dict[str, str]()
    for name in ledger.names:
        where = ledger.dataset(name)
        if where is None or (of := versions.get(_place(where[0]))) is None or not isinstance(ledger.view(name), SplitView):
            continue
        sources[name] = of.version
        found = mixture.seen(of.of(where[1])["number"], before=last, source=name)
        documents += len(np.unique(found.asked))
        steps.append(found.step)
    visits = np.concatenate(steps)
    at = np.unique(visits)
    return {
        "before": last,
        "documents": documents,
        "visits": len(visits),
        "first_step": int(at[0]) if len(at) else None,
        "last_step": int(at[-1]) if len(at) else None,
        "steps": at[:STEPS].tolist(),
        "sources": sources,
        "skip_from": skip_from,
    }


def _place(path_or_url: str) -> str:
    return path_or_url.rstrip("/") if "://" in path_or_url else real_path(path_or_url)


def skip_forgotten(root: Store, path: str, run: JsonFacts, successors: Mapping[str, str]) -> JsonObject:
    """Edit the ledger of a run, so that from its ``skip_from`` on it reads successors of the versions that it names. Return the
    facts of the run with the names of its new sources, or why there are none.
    """
    if run["skip_from"] is None:
        return dict(run)
    try:
        replaced = {}
        for name, version in run["sources"].items():
            place = version_store(root, successors[version]).url
            replaced[name] = Ledger.open(path).replace(run["skip_from"], name, place)
    except (OSError, ValueError) as error:
        logger.warning("The ledger %s is not edited: %s", path, error)
        return {**run, "not_edited": one_line(error)}
    return {**run, "replaced_by": replaced}


FORMAT = "flat-tokens-forgotten"
NOT_KNOWN = (
    "The sources still hold the documents, unless whoever owns them removes them. Builds here leave them out. Other outputs that "
    "are built of the same sources do not, unless they are named here and forget them, too.",
    "Backups, snapshots of disks and older states of objects in a versioned bucket are not looked at.",
    "Copies that people or programs made of versions are not known, nor what readers keep in their caches.",
    "What a model has learned is not undone.",
)
REPLACED = ("version", "replaced by", "documents", "tokens")
SOURCE_FILES = ("source", "file", "sha256")


def certificate_key(id: str) -> str:
    """Key of a certificate below its output."""
    return f"{DIRECTORY}/{id}.json"


def certificate_of(pending: PendingForgetting, forgotten: Forgotten, facts: JsonObject) -> JsonObject:
    """The certificate as JSON. *facts*: what was done and checked."""
    request = pending.request
    return {
        "format": FORMAT,
        "format_version": 1,
        "made_by": f"flat-tokens {__version__}",
        **request.model_dump(mode="json"),
        "list_sha256": forgotten.sha256,
        "holders": [one.model_dump(mode="json") for one in pending.holders],
        "source_files": [{"source": source, "name": name, "sha256": sha256} for source, name, sha256 in pending.files],
        "runs": pending.runs,
        **facts,
        "not_known": list(NOT_KNOWN),
    }


def write_certificate(root: Store, certificate: JsonObject) -> None:
    """Write a certificate and its page, signed if a key is set. A second time, it replaces what was there."""
    key = certificate_key(certificate["id"])
    data = to_json(certificate)
    root.put(key.removesuffix(".json") + ".html", page(certificate, hashlib.sha256(data).hexdigest()).encode())
    root.put(key, data)


def page(certificate: JsonObject, sha256: str) -> str:
    """The page of a certificate: HTML without anything from elsewhere."""
    source, tokens, checked = certificate["source"], certificate["by_tokens"], certificate["checked"]
    exports = certificate["exports"]
    request = [
        ("When", certificate["at"]),
        ("By", certificate["by"]),
        ("Why", certificate["reason"]),
        ("Named by", certificate["named"] + (f", of source {source}" if source else "")),
        ("Keys", f"{certificate['keys']:,}, of which {certificate['unknown']:,} are of no document here"),
        ("Same text", f"{certificate['same_text']:,} more documents, which have the text of one that was named"),
        ("List", certificate["list_sha256"]),
    ]
    done = [
        ("Versions replaced", plural(len(certificate["versions"]), "version")),
        ("latest", certificate["latest"] or "nothing"),
        ("Removed", ", ".join(certificate["removed"]) or "nothing else"),
        ("Exports removed", ", ".join(exports["removed"]) or "none is known"),
        ("Exports not reached", ", ".join(exports["not_reached"]) or "none"),
        ("Outputs made of this one", ", ".join(certificate["outputs"]) or "none is known"),
    ]
    looked = [
        ("Looked through", f"{plural(checked['objects'], 'object')}, {plural(checked['tokens'], 'token')}"),
        ("Left", "; ".join(checked["left"]) or "no key, and no run of tokens that is theirs alone"),
        (
            "By their tokens",
            f"{tokens['windows']:,} runs of {WINDOW} tokens are looked for, {STEP} tokens apart in documents of up to 500. "
            f"{tokens['shared']:,} more are in other documents, too, and say nothing. {plural(tokens['short'], 'document')} "
            f"with fewer than {WINDOW} tokens cannot be recognised by tokens: only the keys are looked for.",
        ),
    ]
    versions = [
        (one["version"], str(one["successor"]), f"{one['documents']:,}", f"{one['tokens']:,}") for one in certificate["versions"]
    ]
    files = [(one["source"], one["name"], one["sha256"]) for one in certificate["source_files"]]
    runs = []
    for path, run in certificate["runs"].items():
        steps = f", first at step {run['first_step']:,}, last at step {run['last_step']:,}" if run["visits"] else ""
        seen = f"{plural(run['documents'], 'document')}, {plural(run['visits'], 'time')} before step {run['before']:,}{steps}"
        runs.append((path, seen))
    sections: list[JsonObject] = [
        {"id": "request", "title": "Request", "facts": request},
        {"id": "done", "title": "Done", "facts": done},
        {"id": "versions", "title": "Versions", "head": REPLACED, "rows": versions, "text": (1,)},
        {"id": "checked", "title": "Checked", "facts": looked},
        {"id": "files", "title": "Source files that held them", "head": SOURCE_FILES, "rows": files, "text": (1, 2)},
        {"id": "runs", "title": "Runs", "head": ("ledger", "saw"), "rows": runs, "text": (1,)},
        {"id": "not-known", "title": "Not known", "paragraphs": certificate["not_known"]},
    ]
    return terminal.page(
        "sections.html",
        title=f"forgotten {certificate['id']}",
        kind="certificate",
        name="Documents that were forgotten",
        path=certificate["id"],
        sections=[one for one in sections if one["id"] not in ("files", "runs") or one["rows"]],
        footer="The certificate as JSON has the SHA-256",
        digest=sha256,
    )
