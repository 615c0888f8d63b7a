"""Forgetting documents: they go from all versions of an output, and later builds leave them out."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from flat_tokens.annotations import JsonObject
from flat_tokens.forgotten import LIST, NO_KEYS, WINDOW, Forgotten, read_forgotten
from flat_tokens.keys import concatenated
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import plural
from flows.pipelines.forgetting import finish_forgetting, go_on_forgetting
from tasks.derive.inputs import ids_with, listed_by
from tasks.derive.request import ForgetRequest
from tasks.derive.without import OfVersion
from tasks.forget.documents import (
    NamedDocuments,
    forgotten_in,
    keys_named,
    sources_of_files,
    table_of,
    versions_of,
    with_same_text,
)
from tasks.forget.exports import certificate_key, check_none_under_way, notes_of, visits_of_forgotten
from tasks.models import Model
from tasks.output.forgotten import Holder, PendingForgetting, Request, change_record, new_record, read_record_of
from tasks.output.leases import collection_lease
from tasks.output.paths import check_places, version_store
from tasks.output.places import scratch_of
from tasks.output.pointer import current_user
from tasks.output.versions import list_versions
from tasks.progress import meter


class ForgetResult(Model):
    """Result of a forgetting. ``key_count``: keys that it put on the list. ``runs_of_tokens``: that are looked for later, because
    no other document has them. ``exports``: those that could not be removed, or not completely. ``outputs``: those that were made
    of this one. ``runs``: what each run saw, by the path of its ledger. ``certificate``: its path or URL; None if there was
    nothing to do.
    """

    output: str
    key_count: int = 0
    unknown: int = 0
    same_text: int = 0
    documents: int = 0
    versions: dict[str, str] = Field({})
    latest: str | None = None
    left: tuple[str, ...] = ()
    runs_of_tokens: int = 0
    exports: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    runs: JsonObject = Field({})
    certificate: str | None = None
    seconds: float = 0.0

    @property
    def headline(self) -> str:
        """Such as ``forgot 3 documents: 2 versions were replaced``."""
        if self.certificate is None:
            return "nothing to do: these documents were forgotten before"
        names = ", ".join(f"{old[:8]} by {new[:8]}" for old, new in self.versions.items())
        replaced = f"{plural(len(self.versions), 'version')} replaced ({names})" if names else "no version had one"
        left = f". What has tokens of theirs: {len(self.left):,}" if self.left else ""
        return f"forgot {plural(self.key_count, 'key')}, {plural(self.documents, 'document')} in all versions: {replaced}{left}"

    @property
    def rest(self) -> list[str]:
        """Sentences about places that may still have the documents."""
        like = f"--like {shlex.quote(self.output)} --reason TEXT"
        return [
            *self.left,
            *(
                ["no run of tokens is theirs alone: a part of one would not be found"]
                if self.documents and not self.runs_of_tokens
                else []
            ),
            *(f"{path}: an export that is not removed, or not completely: remove it" for path in self.exports),
            *(
                f"{path}: was made of this. There, too: python -m flows forget {shlex.quote(path)} {like}"
                for path in self.outputs
            ),
        ]


class ToForget(NamedTuple):
    """The list with the documents, those of them that versions hold, and the request as it is recorded."""

    forgotten: Forgotten
    holders: list[OfVersion]
    request: Request


def forget(request: ForgetRequest) -> ForgetResult:
    """Forget documents. A forgetting that was begun before is brought to its end first. ValueError if nothing was built, a build
    is running, or no document is named.
    """
    root = Store.at(request.output)
    check_places(root)
    if request.like is None and not versions_of(root) and not root.exists(LIST):
        raise ValueError(f"{root.url}: nothing was built here")
    keys, listed = listed_by(request), None
    if request.like is not None:
        listed = read_forgotten(Store.at(request.like))
        if not len(listed.digests):
            raise ValueError(f"{request.like}: is not an output with forgotten documents")
    named, scratch = NamedDocuments(keys, listed, request.where, request.source), scratch_of(request, root)
    meter.reset()
    go_on_forgetting(root, scratch)
    with collection_lease(root) as busy:
        if busy is not None:
            raise ValueError(f"{root.url}: {busy}. Wait until it has ended, and run it again: nothing was forgotten yet.")
        meter.begin("examine")
        plan = plan_of(root, request, named)
        if plan is None:
            return ForgetResult(output=root.url)
        check_none_under_way(root, notes_of(root, {of.version for of in plan.holders}))
        before = request.skip_from if request.before is None else request.before
        runs = {
            os.path.abspath(path): visits_of_forgotten(root, path, before, request.skip_from, plan.holders)
            for path in request.runs
        }
        _begin(root, plan, runs)
        certificate = finish_forgetting(root, scratch)
    meter.begin("done")
    return _result(root, certificate)


def resume(output: str, scratch: str | None) -> ForgetResult:
    """Bring a forgetting that was begun to its end. ValueError if none was."""
    root = Store.at(output)
    request = ForgetRequest(output=output, reason="resume", source="resume", scratch=scratch)
    meter.reset()
    certificate = go_on_forgetting(root, scratch_of(request, root))
    if certificate is None:
        raise ValueError(f"{root.url}: no forgetting was begun that has not come to its end")
    return _result(root, certificate)


def plan_of(root: Store, request: ForgetRequest, named: NamedDocuments) -> ToForget | None:
    """Find the documents. None if all are forgotten already."""
    versions = versions_of(root)
    _check_source(root, versions, named)
    tables = [table_of(root, version) for version in versions]
    there = [keys_named(table, named) for table in tables]
    found = np.unique(concatenated(there))
    # Ids that no version has may come later. Of one source only documents are known that are there.
    listed = named.keys if named.keys is not None and named.source is None and named.where is None else found
    keys = listed
    for table in tables:
        keys = with_same_text(table, keys)
    if not len(keys) and named.listed is None:
        raise ValueError(f"{root.url}: no version has a document that is named so")
    before = (read_record_of(root) or new_record()).forgotten
    unknown = listed[~np.isin(listed, found) & ~before.those(listed)]
    if len(unknown) and not request.allow_unknown:
        ids = ids_with(unknown, request.id_list) if request.id_list is not None else [f"{key:016x}" for key in unknown.tolist()]
        raise ValueError(
            f"{root.url}: no version has a document of {len(unknown):,} of {plural(len(listed), request.how.removesuffix('s'))}: "
            f"{', '.join(ids)}. Nothing was forgotten. Correct them, or, if a source may give them later, "
            "--allow-unknown puts them on the list"
        )
    forgotten = (before.inheriting(named.listed) if named.listed is not None else before).with_documents(keys, NO_KEYS)
    holders = [of for version in versions if (of := forgotten_in(root, version, forgotten)) is not None]
    if forgotten.sha256 == before.sha256 and not holders:
        return None
    windows, token_keys = (concatenated(getattr(of, name) for of in holders) for name in ("windows", "token_keys"))
    forgotten = forgotten.with_documents(NO_KEYS, windows, token_keys)
    now = datetime.now(UTC)
    asked = Request(
        id=f"{now:%Y%m%dT%H%M%S}-{hashlib.sha256(np.sort(keys).tobytes()).hexdigest()[:8]}",
        at=now,
        by=request.by or current_user(),
        reason=request.reason,
        named=request.how,
        source=request.source,
        keys=len(listed),
        unknown=len(unknown),
        same_text=len(keys) - len(listed),
    )
    return ToForget(forgotten, holders, asked)


def forget_like(other: Store, output: str, scratch: str | None) -> None:
    """Forget at an output all that another one has forgotten, whose text or versions are about to be read there."""
    here = read_forgotten(Store.at(output))
    if here.inheriting(read_forgotten(other)).sha256 != here.sha256:
        forget(ForgetRequest(output=output, like=other.url, reason=f"forgotten at {other.url}", scratch=scratch))


def _check_source(root: Store, versions: Iterable[str], named: NamedDocuments) -> None:
    if named.source is None:
        return
    names: set[str] = set()
    for version in versions:
        names |= {source for source, *_ in sources_of_files(read_manifest(version_store(root, version)))}
    if named.source not in names:
        raise ValueError(f"{root.url}: no version has a source {named.source!r}; there are {', '.join(sorted(names)) or 'none'}")


def _begin(root: Store, plan: ToForget, runs: JsonObject) -> None:
    """Record the forgetting. From now on it will be completed, whatever happens to this process."""
    listed = {one.version: one for one in list_versions(root)}
    files, holders = dict[tuple[str, str, str], None](), list[Holder]()
    for of in plan.holders:
        names = sources_of_files(read_manifest(version_store(root, of.version)))
        files |= dict.fromkeys(names[file] for file in np.unique(of.rows["file"]).tolist())
        state = listed[of.version]
        counts = {"documents": len(of.lengths), "tokens": int(of.lengths.sum())}
        holders.append(Holder(version=of.version, **counts, state=state.state, pinned=state.pinned))
    pending = PendingForgetting(
        request=plan.request,
        holders=tuple(holders),
        files=tuple(files),
        short=max((int((of.lengths < WINDOW).sum()) for of in plan.holders), default=0),
        runs=runs,
    )
    held = {sha256 for *_, sha256 in files}

    def begun(record: Any) -> Any:
        if record.pending is not None:
            raise ValueError(f"{root.url}: another process has just begun to forget documents. Run it again.")
        files = tuple(sorted({*record.files, *held}))
        return record.model_copy(update={**plan.forgotten.described(), "pending": pending, "files": files})

    change_record(root, begun)


def _result(root: Store, facts: JsonObject) -> ForgetResult:
    """The result of a forgetting, from the facts of its certificate."""
    return ForgetResult(
        output=root.url,
        key_count=facts["keys"],
        unknown=facts["unknown"],
        same_text=facts["same_text"],
        documents=sum(one["documents"] for one in facts["versions"]),
        versions={one["version"]: one["successor"] for one in facts["versions"] if one["successor"]},
        latest=facts["latest"],
        left=facts["checked"]["left"],
        runs_of_tokens=facts["by_tokens"]["windows"],
        exports=facts["exports"]["not_reached"],
        outputs=facts["outputs"],
        runs=facts["runs"],
        certificate=root.path(certificate_key(facts["id"])),
        seconds=facts["seconds"],
    )
