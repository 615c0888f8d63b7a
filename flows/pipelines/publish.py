"""Publication: the skeleton of everything that publishes a version - build, refresh, retokenize, derive, import."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.checker import verify
from flat_tokens.manifest import counts_of, manifest_digest, read_manifest, splits_of
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import plural, short
from tasks.finalize.facts import Comparison, Difference
from tasks.finalize.lineage import Lineage, lineage_events
from tasks.finalize.provenance import Provenance, VersionName, name_of, note_name
from tasks.garbage import remove_abandoned_objects, remove_held_shards
from tasks.gates import Finding, Gate, judge, strictest_action, summary_of
from tasks.models import Model
from tasks.output.changes import DocumentChanges
from tasks.output.forgotten import ForgottenRecord, read_record_of
from tasks.output.leases import Workspace, attempt, build_lease, sweep_homes
from tasks.output.paths import version_store
from tasks.output.places import check_output, removed_if_empty, scratch_of
from tasks.output.pointer import (
    Candidate,
    Decision,
    Pointer,
    RefreshRecord,
    is_dataset,
    publish,
    put_run,
    read_pointer,
)
from tasks.output.target import Target
from tasks.output.versions import hold
from tasks.progress import meter

if TYPE_CHECKING:
    from tasks.output.places import Request

logger = logging.getLogger(__name__)


class PublishResult(Model):
    """Result of publishing a version. ``was_published``: it was there before. ``seconds``: those each stage took.
    ``text_bytes_tokenized``: of what was made of text, less segments whose tokens were there. ``latest_before``: the version
    that ``latest`` named when the run began. ``held``: the version waits for a person, and ``latest`` has not moved.
    ``comparison``: of such a version, unless it was held before. ``changes``: of documents, if a gate looked at them.
    ``decision``: of a person who let the version through.
    """

    path: str
    version: str
    sequence: int
    was_published: bool
    layout: LayoutName
    totals: JsonObject
    byte_count: int
    seconds: dict[str, float]
    text_bytes_tokenized: int = 0
    latest_before: str | None = None
    held: Candidate | None = None
    comparison: Comparison | None = None
    changes: DocumentChanges | None = None
    decision: Decision | None = None

    @property
    def is_new(self) -> bool:
        """Whether ``latest`` names another version now than before."""
        return self.held is None and (not self.was_published or self.latest_before != self.version)

    @property
    def moved_from(self) -> str | None:
        """The version that ``latest`` named before, if this one was published before and is the latest now. None if there was
        none.
        """
        return self.latest_before if self.was_published and self.is_new else None

    @property
    def split_counts(self) -> dict[str, str]:
        """The counts of each split, for people."""
        return {
            split: f"{plural(of['token_count'], 'token')} in {plural(of['seq_count'], 'sequence')}, "
            f"largest id {of['max_token_id']:,}"
            for split in splits_of(self.totals)
            for of in (self.totals[split],)
        }

    @property
    def headline(self) -> str:
        """Such as ``version 80d2fd78, 183.8M tokens``."""
        tokens = short(counts_of(self.totals)["tokens"])
        if self.held is not None:
            return f"version {self.version[:8]}, {tokens} tokens, waits for a person: {summary_of(self.held.findings, 'hold')}"
        again = f", latest is moved to it from {self.moved_from[:8]}" if self.moved_from else ""
        return f"version {self.version[:8]}{' was published already' if self.was_published else ''}{again}, {tokens} tokens"


P = TypeVar("P", bound=PublishResult)


@dataclass
class OpenOutput:
    """An output to publish a version at, opened once. ``pointer``: as it was then. ``forgotten``: the record of forgotten
    documents, which no other process changes meanwhile. ``anyway``: why a person publishes the version whatever its gates say.
    ``lineage``: the receiver of lineage events, if there is one. ``seconds``: those of each stage so far.
    """

    request: Request
    root: Store
    scratch: Path
    pointer: Pointer
    forgotten: ForgottenRecord | None = None
    anyway: str | None = None
    lineage: Lineage | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def result(self, kind: type[P], version: str, sequence: int, was_published: bool, **particular: Any) -> P:
        """The result of the publication of a version; *particular*: the fields of *kind* that others do not have."""
        manifest = read_manifest(version_store(self.root, version))
        if self.lineage is not None:
            self.lineage.made(version, manifest, is_published=particular.get("held") is None)
        return kind(
            path=version_store(self.root, version).url,
            version=version,
            sequence=sequence,
            was_published=was_published,
            layout=manifest["layout"],
            totals=manifest["totals"],
            byte_count=sum(stored["size"] for stored in manifest["objects"]),
            seconds=self.seconds,
            latest_before=self.pointer.version,
            **particular,
        )


@dataclass
class Publication:
    """A version on its way to readers. ``workspace``: of the attempt that writes it; None if the version exists already.
    ``sequence``: the pointer's sequence number, once ``latest`` points at the version or it is ``held``. ``difference``: from
    the version before, if gates looked at it. ``findings``: theirs. ``decided``: by a person who let it through.
    """

    output: OpenOutput
    name: str
    layout: LayoutName
    workspace: Workspace | None
    sequence: int = 0
    difference: Difference | None = None
    findings: tuple[Finding, ...] = ()
    held: Candidate | None = None
    decided: RefreshRecord | None = None
    _compared: bool = False

    def target(self, **settings: Any) -> Target | None:
        """The target of the attempt, with *settings* of its documents; None if the version exists already."""
        if self.workspace is None:
            return None
        return Target(workspace=self.workspace, name=self.name, layout=self.layout, **settings)

    def finish(self, kind: type[P], facts: JsonObject | None = None, /, **particular: Any) -> P:
        """Record the run next to the versions: its time and place, its settings (with *facts* on top) and its result. Return
        the result.
        """
        comparison = self.difference.compared() if self._compared and self.difference else None
        changes = vars(self.difference).get("documents") if self.difference else None
        decision = self.decided and self.decided.decision
        judged = {"held": self.held, "decision": decision, "comparison": comparison, "changes": changes}
        result = self.output.result(kind, self.name, self.sequence, self.workspace is None, **judged, **particular)
        now = datetime.now(UTC)
        settings = {**self.output.request.model_dump(mode="json"), **(facts or {})}
        record = {
            "config": settings,
            **result.model_dump(mode="json", exclude={"changes"}),
            "latest": result.version if self.held is None else self.output.pointer.version,
            **({"findings": [one.model_dump(mode="json") for one in self.findings]} if self.findings else {}),
        }
        put_run(self.output.root, now, result.version, record)
        meter.begin("done")
        return result

    def pass_gates(self, gates: Sequence[Gate], *, keeps_waiting: bool) -> None:
        """Let gates look at the version next to the one that ``latest`` names. Then it may be published, unless it is held.
        *keeps_waiting*: a version that was held by other gates stays held. ValueError if a gate stops it, or a person rejected
        it.
        """
        root, pointer = self.output.root, self.output.pointer
        if self.name == pointer.version:
            return
        before = pointer.version if pointer.version is not None and is_dataset(root, pointer.version) else None
        now = read_pointer(root)
        same = now.candidate if now.candidate is not None and now.candidate.version == self.name else None
        if self.name in now.names("rejected") and self.output.anyway is None:
            raise ValueError(
                f"version {self.name} is not published: it was rejected. A person at a terminal can publish it all the same: "
                "--publish-anyway REASON"
            )
        if same is not None and self.output.anyway is None and (keeps_waiting or same.gates == tuple(gates)):
            self.held = hold(root, same, pointer.sequence)
            return
        self.difference = Difference(root, before, self.name)
        self.findings = tuple(judge(gates, *self.difference.facts(gates)))
        if self.output.anyway is not None and same is not None:
            self.findings = tuple(dict.fromkeys((*self.findings, *same.findings)))
        match strictest_action(self.findings):
            case None:
                return
            case "warn":
                logger.warning("Version %s is published though its gates say: %s", self.name, summary_of(self.findings))
            case _ if self.output.anyway is not None:
                logger.warning("Version %s is published all the same: %s", self.name, summary_of(self.findings))
                self.decided = self._candidate(before, gates).decided("published anyway", self.output.anyway)
            case "stop":
                raise ValueError(
                    f"version {self.name} is not published: {summary_of(self.findings, 'stop')}. Repair the sources, or change "
                    "publish.gates. A person at a terminal can publish it all the same: --publish-anyway REASON"
                )
            case "hold":
                self.held = hold(root, self._candidate(before, gates), pointer.sequence)
                self._compared = True

    def _candidate(self, before: str | None, gates: Sequence[Gate]) -> Candidate:
        """The record of this version as one that waits for a person."""
        assert self.difference is not None
        changes = self.difference.documents
        return Candidate(
            version=self.name,
            manifest_sha256=manifest_digest(version_store(self.output.root, self.name)),
            before=before,
            at=datetime.now(UTC),
            gates=tuple(gates),
            findings=self.findings,
            **counts_of(self.difference.now.manifest["totals"]),
            changes=changes.total if changes else None,
        )


@contextmanager
def opened(request: Request, anyway: str | None = None) -> Iterator[OpenOutput]:
    """Use an output, from which no garbage is collected in the block; then no token is stored twice. ValueError, at once, if
    nothing can be written there. *anyway*: see ``OpenOutput``.
    """
    if anyway is not None and not anyway.strip():
        raise ValueError("--publish-anyway needs a reason, for whoever looks at the runs later")
    meter.reset()
    with lineage_events(request) as lineage, removed_if_empty(Store.at(request.output)):
        root = check_output(request)
        scratch = scratch_of(request, root)
        if read_record_of(root) is not None:
            from flows.pipelines.forgetting import go_on_forgetting  # all of forgetting, which few outputs need

            go_on_forgetting(root, scratch)
        pointer = read_pointer(root)
        remove_abandoned_objects(root)
        with build_lease(root, scratch):
            # Nothing else clears up after a death after the commit, or one that fetched a file which is there now.
            sweep_homes(root, scratch)
            yield OpenOutput(request, root, scratch, pointer, read_record_of(root), anyway, lineage)
        meter.begin("clean up")
        remove_held_shards(root)
        meter.begin("done")


@contextmanager
def publication(
    output: OpenOutput,
    made_of: Provenance,
    layout: LayoutName,
    remember: Callable[[str], object] = lambda version: None,
    gates: Sequence[Gate] | None = None,
    *,
    keeps_waiting: bool = False,
    named: VersionName | None = None,
) -> Iterator[Publication]:
    """Publish the version that *made_of* gives. The block finalizes it, unless it is there (it has no target). Then *remember*
    is called with its name, the *gates* look at it, if there may be any, and ``latest`` points at it, unless they hold it.
    *keeps_waiting*: see ``Publication.pass_gates``. *named*: its name, if that is known.
    """
    root, named = output.root, named or name_of(output.root, output.forgotten, made_of, layout)
    version = named.version
    is_there = is_dataset(root, version, layout)
    with nullcontext() if is_there else attempt(root, output.scratch, version) as workspace:
        here = Publication(output, version, layout, workspace)
        yield here
        with timed("finalize", output.seconds):
            remember(version)
            if is_there:  # another build has published it
                url = version_store(root, version).url
                try:
                    verify(url)
                except ValueError as error:
                    raise ValueError(
                        f"{error}. Restore the version from a copy, or move {url} elsewhere and build again."
                    ) from error
            if gates is not None:
                here.pass_gates(gates, keeps_waiting=keeps_waiting)
            note_name(root, output.forgotten, named)
            since = output.pointer.sequence
            here.sequence = since if here.held else publish(root, version, since, here.decided)


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a stage, and show that it has begun. It comes before the stages within it."""
    meter.begin(name)
    begun, _ = time.monotonic(), seconds.setdefault(name, 0.0)
    yield
    seconds[name] = round(seconds[name] + time.monotonic() - begun, 3)
