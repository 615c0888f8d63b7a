"""Forgetting documents: they go from all versions of an output, and later builds leave them out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from flat_tokens.forgotten import LIST, Forgotten
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import plural
from flat_tokens.where import parse
from flows.pipelines.publish import scratch_of
from flows.pipelines.successors import finish_forgetting, go_on_forgetting, nobody_builds
from tasks.derive.pieces import read_ids, read_keys
from tasks.forget.certificate import certificate_key
from tasks.forget.find import NamedDocuments, OfVersion, forgotten_in, keys_named, sources_of_files, versions_of, with_same_text
from tasks.forget.runs import saw
from tasks.locations import Location, Output
from tasks.models import Model
from tasks.output.forgotten import Holder, Pending, Request, change_record, new_record, read_record_of
from tasks.output.held import who
from tasks.output.paths import check_places, version_store
from tasks.output.versions import list_versions
from tasks.progress import meter


class ForgetRequest(Model):
    """Documents that are to be forgotten: by their keys, by their ids, or by an expression; of one source, or of all."""

    output: Output = Field(description="Directory or URL with the versions")
    reason: str = Field(min_length=1, pattern=r"\S", description="For whoever reads the certificate")
    key_list: Location | None = Field(None, description="A file of keys: 16 hexadecimal digits a line, or .npy of uint64")
    id_list: Location | None = Field(None, description="A file of ids, one a line")
    where: str | None = Field(None, min_length=1, description="An expression, such as: file = 'a.jsonl' and row = 7")
    source: str | None = Field(None, min_length=1, description="Only documents of the source of this name")
    runs: tuple[Location, ...] = Field((), description="Ledgers of runs: which steps saw the documents is on the certificate")
    before: int | None = Field(None, ge=0, description="Steps of these runs before this one; without it, all")
    skip_from: int | None = Field(None, ge=0, description="The ledgers are edited: from this step on, runs read the successors")
    by: str | None = Field(None, description="Who asks for it; the user of the process without it")
    scratch: Output | None = Field(None, description="Local directory for staging, where the output is remote")
    layout: Literal["auto"] = "auto"

    @model_validator(mode="after")
    def names_documents(self) -> ForgetRequest:
        given = [one for one in (self.key_list, self.id_list, self.where) if one is not None]
        if len(given) > 1 or not (given or self.source):
            raise ValueError("documents are named by one of keys, ids or where; or all of a source, by its name")
        if self.where is not None:
            parse(self.where)
        return self

    def named(self) -> NamedDocuments:
        """The documents, their lists read. ValueError where a list is not understood."""
        keys = None
        if self.key_list is not None:
            keys = read_keys(self.key_list).keys
        elif self.id_list is not None:
            keys = read_ids(self.id_list).keys
        return NamedDocuments(keys, self.where, self.source)

    @property
    def how(self) -> str:
        """How documents are named, without any name of one."""
        given = {"keys": self.key_list, "ids": self.id_list, "where": self.where}
        return next((how for how, value in given.items() if value is not None), "source")


class ForgetResult(Model):
    """Result of a forgetting. ``key_count``: keys that it put on the list. ``certificate``: its path or URL; None if there was
    nothing to do.
    """

    output: str
    key_count: int
    unknown: int
    same_text: int
    documents: int
    versions: dict[str, str]
    latest: str | None
    left: tuple[str, ...]
    runs: dict[str, Any] = Field({}, description="What each run saw, by the path of its ledger")
    certificate: str | None
    seconds: float

    @property
    def headline(self) -> str:
        """Such as ``forgot 3 documents: 2 versions were replaced``."""
        if self.certificate is None:
            return "nothing to do: these documents were forgotten before"
        names = ", ".join(f"{old[:8]} by {new[:8]}" for old, new in self.versions.items())
        replaced = f"{plural(len(self.versions), 'version')} replaced ({names})" if names else "no version had one"
        left = (
            f". {plural(len(self.left), 'thing')} still {'has' if len(self.left) == 1 else 'have'} tokens of theirs"
            if self.left
            else ""
        )
        return f"forgot {plural(self.key_count, 'key')}, {plural(self.documents, 'document')} in all versions: {replaced}{left}"


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
    if not versions_of(root) and not root.exists(LIST):
        raise ValueError(f"{root.url}: nothing was built here")
    named, scratch = request.named(), scratch_of(request, root)
    meter.reset()
    go_on_forgetting(root, scratch)
    with nobody_builds(root):
        meter.begin("examine")
        plan = plan_of(root, request, named)
        if plan is None:
            return _result(root, None)
        before = request.skip_from if request.before is None else request.before
        runs = {os.path.abspath(path): saw(root, path, before, request.skip_from, plan.holders) for path in request.runs}
        _begin(root, plan, runs)
        certificate = finish_forgetting(root, scratch)
    meter.begin("done")
    return _result(root, certificate)


def resume(output: str, scratch: str | None = None) -> ForgetResult:
    """Bring a forgetting that was begun to its end. ValueError where none was."""
    root = Store.at(output)
    request = ForgetRequest(output=output, reason="resume", source="resume", scratch=scratch)
    meter.reset()
    certificate = go_on_forgetting(root, scratch_of(request, root))
    if certificate is None:
        raise ValueError(f"{root.url}: no forgetting was begun that has not come to its end")
    return _result(root, certificate)


def plan_of(root: Store, request: ForgetRequest, named: NamedDocuments) -> ToForget | None:
    """Find the documents. None where all are forgotten already."""
    versions = versions_of(root)
    _check_source(root, versions, named)
    there = [keys_named(root, version, named) for version in versions]
    found = np.unique(np.concatenate([np.empty(0, np.uint64), *there]))
    # Ids that no version has may come later. Of one source only documents are known that are there.
    listed = named.keys if named.keys is not None and named.source is None and named.where is None else found
    keys = listed
    for version in versions:
        keys = with_same_text(root, version, keys)
    if not len(keys):
        raise ValueError(f"{root.url}: no version has a document that is named so")
    record = read_record_of(root) or new_record()
    before = record.forgotten
    forgotten = before.with_documents(keys, np.empty(0, np.uint64))
    holders = [of for version in versions if (of := forgotten_in(root, version, forgotten)) is not None]
    if len(forgotten.digests) == len(before.digests) and not holders:
        return None
    forgotten = forgotten.with_documents(keys[:0], np.unique(np.concatenate([keys[:0], *(of.windows for of in holders)])))
    now = datetime.now(UTC)
    asked = Request(
        id=f"{now:%Y%m%dT%H%M%S}-{hashlib.sha256(np.sort(keys).tobytes()).hexdigest()[:8]}",
        at=now,
        by=request.by or who(),
        reason=request.reason,
        named=request.how,
        source=request.source,
        keys=len(listed),
        unknown=int((~np.isin(listed, found)).sum()),
        same_text=len(keys) - len(listed),
    )
    return ToForget(Forgotten(bytes.fromhex(record.salt), forgotten.digests, forgotten.windows), holders, asked)


def _check_source(root: Store, versions: Iterable[str], named: NamedDocuments) -> None:
    if named.source is None:
        return
    names: set[str] = set()
    for version in versions:
        names |= {source for source, *_ in sources_of_files(read_manifest(version_store(root, version)))}
    if named.source not in names:
        raise ValueError(f"{root.url}: no version has a source {named.source!r}; there are {', '.join(sorted(names)) or 'none'}")


def _begin(root: Store, plan: ToForget, runs: dict[str, Any]) -> None:
    """Record what is to be done. From now on it is done, whatever happens to this process."""
    listed = {one.version: one for one in list_versions(root)}
    files, holders = dict[tuple[str, str, str], None](), list[Holder]()
    for of in plan.holders:
        names = sources_of_files(read_manifest(version_store(root, of.version)))
        files |= dict.fromkeys(names[file] for file in sorted(of.files))
        state = listed[of.version]
        counts = {"documents": of.documents, "tokens": of.token_count}
        holders.append(Holder(version=of.version, **counts, state=state.state, pinned=state.pinned))
    pending = Pending(
        request=plan.request,
        holders=tuple(holders),
        files=tuple(files),
        short=max((of.short for of in plan.holders), default=0),
        runs=runs,
    )
    held = {sha256 for *_, sha256 in files}

    def begun(record: Any) -> Any:
        if record.pending is not None:
            raise ValueError(f"{root.url}: another process has just begun to forget documents. Run it again.")
        made = record.with_list(plan.forgotten)
        return made.model_copy(update={"pending": pending, "files": tuple(sorted({*record.files, *held}))})

    change_record(root, begun)


def _result(root: Store, certificate: dict[str, Any] | None) -> ForgetResult:
    asked = certificate or {"keys": 0, "unknown": 0}
    facts = certificate or {"versions": [], "latest": None, "checked": {"left": []}, "seconds": 0.0}
    return ForgetResult(
        output=root.url,
        key_count=asked["keys"],
        unknown=asked["unknown"],
        same_text=asked.get("same_text", 0),
        documents=sum(one["documents"] for one in facts["versions"]),
        versions={one["version"]: one["successor"] for one in facts["versions"] if one["successor"]},
        latest=facts["latest"],
        left=tuple(facts["checked"]["left"]),
        runs=facts.get("runs", {}),
        certificate=root.path(certificate_key(certificate["id"])) if certificate else None,
        seconds=facts["seconds"],
    )
