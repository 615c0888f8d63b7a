"""Forgetting, once it is recorded: versions get successors without the documents, everything else that held them is removed,
remains are looked for, and a certificate is written. Each step looks at the state of the output, so that all can be done again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flat_tokens.annotations import JsonObject
from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.stores.store import Store
from flat_tokens.tools.remains import Remains, sentence
from flows.pipelines.successors import make_successor
from tasks.forget.documents import (
    forgotten_in,
    make_removals_durable,
    sweep_examples,
    sweep_files,
    sweep_shards,
    sweep_unfinished,
    versions_of,
)
from tasks.forget.exports import Note, certificate_of, notes_of, remove_export, skip_forgotten, write_certificate
from tasks.garbage import remove_version
from tasks.output.forgotten import ForgottenRecord, PendingForgetting, change_record, read_record_of
from tasks.output.leases import collection_lease, sweep_homes
from tasks.output.pointer import change_pointer, put_run, read_pointer, renamed
from tasks.progress import meter

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
ROUNDS = 5
"""Versions that are pinned, or become the latest, while they are about to go are looked at again so often."""


def go_on_forgetting(root: Store, scratch: Path) -> JsonObject | None:
    """Complete a forgetting that was begun. Return its certificate; None if none was begun."""
    while (record := read_record_of(root)) is not None and record.pending is not None:
        with collection_lease(root) as busy:
            if busy is None and (record := read_record_of(root)) is not None and record.pending is not None:
                logger.info("%s: documents are being forgotten since %s", root.url, record.pending.request.at)
                return finish_forgetting(root, scratch)
        time.sleep(WAIT_SECONDS)  # another process goes on with it
    return None


def finish_forgetting(root: Store, scratch: Path) -> JsonObject:
    """Complete a forgetting, in a block in which no build runs. Return its certificate."""
    begun = time.monotonic()
    sweep_homes(root, scratch)
    record = _record(root)
    removed, replaced = sweep_shards(root, record.forgotten), dict[str, str]()
    for _ in range(ROUNDS):
        holders = [of for name in versions_of(root) if (of := forgotten_in(root, name, record.forgotten)) is not None]
        mapping = {of.version: make_successor(root, scratch, record.forgotten, of) for of in holders}
        record = change_record(root, lambda now, mapping=mapping: now.renamed(mapping, versions_of(root)))  # type: ignore[misc]
        replaced |= mapping
        change_pointer(root, partial(renamed, root, mapping=record.successors))
        if record.pending is not None and record.pending.runs:  # ledgers of runs that are to go on without the documents
            runs = {path: skip_forgotten(root, path, run, record.successors) for path, run in record.pending.runs.items()}
            record = _change_pending(root, runs=runs)
        gone = [remove_version(root, version) for version in mapping]
        removed += [f"versions/{version}" for version, went in zip(mapping, gone, strict=True) if went]
        if all(gone):
            break
    else:
        raise ValueError(f"{root.url}: somebody pins or publishes versions that are being replaced. Run it again.")
    for note in _notes(root):
        if note.format != FLAT_TOKENS and remove_export(root, note):  # the certificate lists it
            _change_pending(root, exports=tuple(dict.fromkeys((*_pending(root).exports, note.path))))
            root.remove(note.key)
    removed += sweep_unfinished(root) + sweep_examples(root)
    removed += sweep_files(root, os.fspath(scratch), frozenset(record.files))
    sweep_homes(root, scratch)
    make_removals_durable(root)
    return _attest(root, removed, time.monotonic() - begun)


def _record(root: Store) -> ForgottenRecord:
    record = read_record_of(root)
    assert record is not None
    return record


def _pending(root: Store) -> PendingForgetting:
    pending = _record(root).pending
    assert pending is not None
    return pending


def _notes(root: Store) -> list[Note]:
    """Notes of other outputs, and of exports of versions that held the documents, or that were replaced by one that did."""
    record = _record(root)
    holders = {one.version for one in _pending(root).holders}
    now = {record.successors.get(version, version) for version in holders}
    return notes_of(root, holders | {former for former, successor in record.successors.items() if successor in now})


def _change_pending(root: Store, **facts: Any) -> ForgottenRecord:
    return change_record(
        root, lambda now: now.model_copy(update={"pending": now.pending and now.pending.model_copy(update=facts)})
    )


def _attest(root: Store, removed: Sequence[str], seconds: float) -> JsonObject:
    """Look through everything, leave windows out that other documents have, too, write the certificate, and mark it as done."""
    record, pending = _record(root), _pending(root)
    meter.begin("verify")
    shared, same = np.empty(0, np.uint64), list[str]()
    others = Remains(root, record.forgotten)
    for version in versions_of(root):
        for found in others.of_version(version):
            shared = np.union1d(shared, found.windows)
            if not len(found.windows):
                same.append(sentence(found, root.url))
    forgotten = record.forgotten.without_windows(shared)
    remains = Remains(root, forgotten)
    # What versions have of the other windows, there is none: it would be among those that are shared.
    left = [*same, *remains.all(record.files, tokens_of_versions=False)]
    pointer, notes = read_pointer(root), _notes(root)
    versions = [
        {**one.model_dump(mode="json"), "successor": record.successors.get(one.version)}
        for one in pending.holders
        if one.documents or one.version in record.successors
    ]
    facts = {
        "versions": versions,
        "latest": pointer.version,
        "number": pointer.sequence,
        "removed": sorted({*removed, *(f"versions/{one.version}" for one in pending.holders)}),
        "exports": {"removed": list(pending.exports), "not_reached": [note.path for note in notes if note.format != FLAT_TOKENS]},
        "outputs": sorted({note.path for note in notes if note.format == FLAT_TOKENS}),
        "by_tokens": {"windows": len(forgotten.windows), "shared": len(shared), "short": pending.short},
        "checked": {
            "objects": others.objects + remains.objects,
            "tokens": others.tokens + remains.tokens,
            "left": left,
        },
        "seconds": round(seconds, 3),
    }
    certificate = certificate_of(pending, forgotten, facts)
    write_certificate(root, certificate)
    names = ("id", "by", "reason", "keys", "unknown", "same_text", "versions")
    run: JsonObject = {
        "version": certificate["latest"],
        "latest": certificate["latest"],
        "sequence": certificate["number"],
        "forgotten": {name: certificate[name] for name in names},
    }
    put_run(root, datetime.now(UTC), certificate["latest"] or "none", run)
    change_record(root, partial(_done, windows=forgotten.described()["windows"]))
    return certificate


def _done(record: ForgottenRecord, windows: str) -> ForgottenRecord:
    assert record.pending is not None
    requests = (*record.requests, record.pending.request)[-1000:]
    return record.model_copy(update={"pending": None, "windows": windows, "requests": requests})
