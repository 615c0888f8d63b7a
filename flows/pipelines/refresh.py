"""A refresh: what the sources hold now, published if it is new."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Literal

from flat_tokens.annotations import JsonObject
from flat_tokens.manifest import counts_of, read_manifest
from flows.pipelines.build import BuildResult, build_version
from flows.pipelines.publish import OpenOutput, opened
from flows.pipelines.stages import Runner
from flows.pipelines.text import Made, look_up
from tasks.config import BuildConfig
from tasks.finalize.facts import Difference
from tasks.garbage import Policy, remove_superfluous
from tasks.models import Model
from tasks.output.changes import Changes, DocumentChanges, changes_between
from tasks.output.paths import version_store
from tasks.output.pointer import Pointer, RefreshRecord, change_pointer, publish, read_history, read_pointer, remember
from tasks.output.versions import if_there, remember_origin

logger = logging.getLogger(__name__)

Outcome = Literal["published", "unchanged", "withdrawn", "rejected", "held", "still held"]


class RefreshResult(Model):
    """Result of a refresh. ``withdrawn``, ``rejected``: the sources give a version that was rolled back, or that a person
    rejected, so ``latest`` stays where it is. ``held``, ``still held``: theirs waits for a person. ``version``: the one that
    ``latest`` names, None if there is none; ``path``: its place. ``removed``: versions that the policy no longer keeps.
    """

    outcome: Outcome
    path: str
    version: str | None
    sequence: int
    changes: Changes
    build: BuildResult | None
    removed: tuple[str, ...]
    seconds: dict[str, float]
    text_bytes_tokenized: int

    @property
    def headline(self) -> str:
        if self.outcome == "withdrawn":
            return (
                f"the sources give version {self.changes.after}, which was rolled back: latest stays at {self.version}. "
                "To publish it all the same, build it: python -m flows build"
            )
        if self.outcome == "rejected":
            return (
                f"the sources give version {self.changes.after}, which was rejected: latest stays at "
                f"{self.version or 'nothing'}. To publish it all the same: python -m flows refresh --publish-anyway REASON"
            )
        if self.build is not None and self.build.held is not None:
            return f"{self.outcome}: {self.build.headline}. Latest stays at {self.version or 'nothing'}"
        if self.outcome == "unchanged":
            return f"nothing changed: {self.version} is what the sources give"
        again = " again" if self.build and self.build.was_published else ""
        return f"published {self.version}{again}: {self.changes.headline}"


def refresh(
    config: BuildConfig, runner: Runner, policy: Policy | None = None, publish_anyway: str | None = None
) -> RefreshResult:
    """Look the sources up again and publish their content, tokenizing only what is new. Nothing is done if it is that of the
    latest version. With a *policy*, versions that it does not keep are removed at the end. *publish_anyway*: why a person
    publishes it whatever its gates say.

    Files whose store names their content (a commit, an ETag, a generation) are not even fetched to compare them.
    """
    began = time.monotonic()
    with opened(config, publish_anyway) as output:
        root, pointer = output.root, output.pointer
        read_history(root)  # what is wrong with it is reported before any work
        found = look_up(config, runner, output)
        assert found is not None
        old = if_there(root, pointer.version, read_manifest)
        outcome = outcome_before(found, old, output)
        built = None
        if outcome == "unchanged":
            confirm(config, found, output)
        elif outcome is not None:
            remember_origin(root, found.named.version, config, found.text.pinned, found.text.files)  # when they were looked up
        else:
            built = build_version(found, runner, output, config.publish.of_refresh())
            if built.held is None:
                outcome = "published"
            elif built.version in read_pointer(root).names("rejected"):  # just now
                outcome = "rejected"
            else:
                outcome = "held" if built.comparison else "still held"
        now = read_pointer(root)
        changes = changes_of(found.named.version, old, built, outcome, now, output)
        if changes.documents and changes.documents.of_splits:
            logger.warning("Documents changed their split: %s: docs/configuration.md, Splits.", changes.documents.split_changes)
    if built is not None and built.held is None:
        remember(root, refreshed(built, changes, time.monotonic() - began))
    removed = remove_superfluous(root, policy) if policy else []
    return RefreshResult(
        outcome=outcome,
        path=version_store(root, now.version).url if now.version else root.url,
        version=now.version,
        sequence=now.sequence,
        changes=changes,
        build=built,
        removed=tuple(item.name.rpartition("/")[2] for item in removed),
        seconds=output.seconds,
        text_bytes_tokenized=built.text_bytes_tokenized if built else 0,
    )


def outcome_before(found: Made, old: JsonObject | None, output: OpenOutput) -> Outcome | None:
    """The outcome if nothing is built. *old*: the manifest of the latest version, if it is there. ValueError if the latest
    version has gone and the sources give one that was rolled back.
    """
    root, pointer, version = output.root, output.pointer, found.named.version
    if version == pointer.version and old is not None:
        return "unchanged"
    if found.named.names & {*pointer.names("withdrawn")}:
        if old is None:
            raise ValueError(
                f"{root.url}: the latest version, {pointer.version}, is gone, and the sources give {version}, which was "
                "rolled back. Restore the one, or publish the other: python -m flows build"
            )
        return "withdrawn"
    if output.anyway is None and found.named.names & {*pointer.names("rejected")}:
        return "rejected"
    return None


def confirm(asked: BuildConfig, found: Made, output: OpenOutput) -> None:
    """The latest version is what the sources give: check its manifest, repair a lost link, and let no other version wait."""
    root, version = output.root, found.named.version
    remember_origin(root, version, asked, found.text.pinned, found.text.files)
    publish(root, version, output.pointer.sequence)
    change_pointer(root, lambda now: now.model_copy(update={"candidate": None}))
    if output.lineage is not None:
        output.lineage.made(version, read_manifest(version_store(root, version)), is_published=True)


def changes_of(
    version: str, old: JsonObject | None, built: BuildResult | None, outcome: Outcome, now: Pointer, output: OpenOutput
) -> Changes:
    """The changes from the version that was the latest, whose manifest is *old*, to the one that the sources give."""
    root, begun = output.root, time.monotonic()
    before = output.pointer.version if old else None
    new = read_manifest(version_store(root, version if built or now.version is None else now.version))
    changes = changes_between(before, old, version, new)
    if outcome == "unchanged":
        return changes.model_copy(update={"documents": DocumentChanges()})
    if built is not None and built.changes is not None:
        return changes.model_copy(update={"documents": built.changes})
    if outcome == "published":
        changes = changes.model_copy(update={"documents": Difference(root, before, version).documents})
        output.seconds["changes"] = round(time.monotonic() - begun, 3)
    return changes


def refreshed(built: BuildResult, changes: Changes, seconds: float) -> RefreshRecord:
    """The line in the history for a refresh that ends now."""
    kinds = ("added", "removed", "changed", "moved")
    total = changes.documents.total.model_dump(include={*kinds}) if changes.documents else dict.fromkeys(kinds)
    of_splits = sum(one.documents for one in changes.documents.of_splits) if changes.documents else None
    return RefreshRecord(
        at=datetime.now(UTC).replace(microsecond=0),
        version=built.version,
        **counts_of(built.totals),
        text_bytes_tokenized=built.text_bytes_tokenized,
        seconds=round(seconds, 3),
        split_changes=of_splits,
        **total,
    )
