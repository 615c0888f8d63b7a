"""A refresh: what the sources hold now, published if it is new."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from flat_tokens.annotations import JsonObject
from flat_tokens.manifest import counts_of, read_manifest
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult, after_trial, build_version, tokenizer_of
from flows.pipelines.publish import OpenOutput, opened, timed
from flows.pipelines.stages import Runner
from flows.pipelines.text import Made, Text, at_revisions, download, files_of, is_much, pin_sets, pin_sources, unknown
from tasks.config import BuildConfig
from tasks.download.table import known_files
from tasks.finalize.facts import Difference
from tasks.finalize.seal import VersionName
from tasks.garbage import Policy, remove_superfluous
from tasks.models import FoundFile, Model, PinnedSource, SourceFile
from tasks.output.changes import Changes, DocumentChanges, changes_between
from tasks.output.paths import version_store
from tasks.output.pointer import Pointer, Refreshed, change, publish, read_history, read_pointer, remember
from tasks.output.versions import if_there, read_origin_files, remember_origin
from tasks.tokenize.engines import Tokenizer, import_ahead

logger = logging.getLogger(__name__)

Outcome = Literal["published", "unchanged", "withdrawn", "rejected", "held", "still held"]


class RefreshResult(Model):
    """Result of a refresh. ``withdrawn``, ``rejected``: the sources give a version that was rolled back, or that a person
    rejected, so ``latest`` stays where it is. ``held``, ``still held``: theirs waits for a person. ``version``: what ``latest``
    names, None where that is nothing; ``path``: where it is. ``removed``: versions that the policy no longer keeps.
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
    """Look the sources up again and publish what they give now, tokenizing only content that is new; nothing is done where it
    is the latest version. With a *policy*, versions that it does not keep are removed at the end. *publish_anyway*: why a person
    publishes it whatever its gates say.

    Files that their store names by content (a commit, an ETag, a generation) are not even fetched to find that out.
    """
    began = time.monotonic()
    with opened(config, publish_anyway) as output:
        root, pointer = output.root, output.pointer
        read_history(root)  # what is wrong with it is reported before any work
        with timed("download", output.seconds):
            asked, config = config, pin_sets(config, root)
            found = look_up(config, runner, output)
            config = at_revisions(config, [pin.revision for pin in found.pinned])
        old = if_there(root, pointer.version, read_manifest)
        outcome = outcome_before(found, old, output)
        built = None
        if outcome == "unchanged":
            confirm(asked, found, output)
        elif outcome is not None:
            remember_origin(root, found.named.version, asked, found.pinned, found.files)  # when they were looked up
        else:
            text, gates = text_of(config, found, runner, output), config.publish.of_refresh()
            made = found.made if found.text else text.makes(config, found.tokenizer, output)
            built = build_version(made, text, found.tokenizer, runner, output, gates)
            outcome = outcome_of(built, root)
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


class SourcesNow(NamedTuple):
    """The sources as they are now, and what they make. ``text``: None where a file was not read, whose
    content is known by the name that its store gives it.
    """

    pinned: tuple[PinnedSource, ...]
    files: list[SourceFile]
    text: Text | None
    tokenizer: Tokenizer
    made: Made

    @property
    def named(self) -> VersionName:
        """The name of the version that they give."""
        return self.made.named


def look_up(config: BuildConfig, runner: Runner, output: OpenOutput) -> SourcesNow:
    """Look the sources up, and read the files of which neither the output nor their store knows the content."""
    root, latest = output.root, output.pointer.version
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(tokenizer_of, config, is_first=latest is None)
        config, pinned = pin_sources(config, root)
        found = files_of(pinned)
        known = known_files(found, config.sources, config.slice_bytes, [root])
        named_by_store = any(file.immutable for file, cut in zip(found, known, strict=True) if cut is None)
        uncut = files_of_origin(root, latest) if named_by_store else {}
        needed = [number for number, cut in enumerate(known) if cut or found[number] not in uncut]
        fresh, cuts = [found[number] for number in needed], [known[number] for number in needed]
        much = is_much(unknown(fresh, cuts))
        if latest is None or much:
            beside.submit(import_ahead, loading)
        if much:
            after_trial(loading, output.seconds)  # a wrong tokenizer is an error before so much is fetched
        cut = dict(zip(needed, download(config, fresh, runner, root, known=cuts), strict=True))
        tokenizer = after_trial(loading, output.seconds)
    files = [cut[number].file if number in cut else uncut[file] for number, file in enumerate(found)]
    text = Text.of(config, pinned, list(cut.values())) if len(cut) == len(found) else None
    return SourcesNow(pinned, files, text, tokenizer, (text or Text(pinned, files)).makes(config, tokenizer, output))


def outcome_before(found: SourcesNow, old: JsonObject | None, output: OpenOutput) -> Outcome | None:
    """The outcome where nothing is built. *old*: the manifest of the latest version, if it is there. ValueError where the latest
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


def confirm(asked: BuildConfig, found: SourcesNow, output: OpenOutput) -> None:
    """The latest version is what the sources give: check its manifest, repair a lost link, and let no other version wait."""
    root, version = output.root, found.named.version
    remember_origin(root, version, asked, found.pinned, found.files)
    publish(root, version, output.pointer.sequence)
    change(root, lambda now: now.model_copy(update={"candidate": None}))
    if output.lineage is not None:
        output.lineage.made(version, read_manifest(version_store(root, version)), is_published=True)


def text_of(config: BuildConfig, found: SourcesNow, runner: Runner, output: OpenOutput) -> Text:
    """The text of the sources: all files are read where some were not."""
    with timed("download", output.seconds):
        return found.text or Text.of(config, found.pinned, download(config, files_of(found.pinned), runner, output.root))


def outcome_of(built: BuildResult, root: Store) -> Outcome:
    if built.held is None:
        return "published"
    if built.version in read_pointer(root).names("rejected"):  # just now
        return "rejected"
    return "held" if built.comparison else "still held"


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


def refreshed(built: BuildResult, changes: Changes, seconds: float) -> Refreshed:
    """The line in the history for a refresh that ends now."""
    kinds = ("added", "removed", "changed", "moved")
    total = changes.documents.total.model_dump(include={*kinds}) if changes.documents else dict.fromkeys(kinds)
    of_splits = sum(one.documents for one in changes.documents.of_splits) if changes.documents else None
    return Refreshed(
        at=datetime.now(UTC).replace(microsecond=0),
        version=built.version,
        **counts_of(built.totals),
        text_bytes_tokenized=built.text_bytes_tokenized,
        seconds=round(seconds, 3),
        split_changes=of_splits,
        **total,
    )


def files_of_origin(root: Store, version: str | None) -> dict[FoundFile, SourceFile]:
    """Files whose content is known from an origin: what their store calls it is what it was called for *version*."""
    origin = read_origin_files(root, version) if version else None
    if origin is None:
        return {}
    found = files_of(origin.pinned)
    return {here: file for here, file in zip(found, origin.files, strict=False) if here.immutable}
