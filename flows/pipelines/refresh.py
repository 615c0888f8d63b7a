"""A refresh: what the sources hold now, published if it is new."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Literal

from flat_tokens.manifest import SPLITS, read_manifest
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult, Text, build_version, download, files_of, is_much, pin_sources, tokenizer_of
from flows.pipelines.publish import layout_of, opened, timed
from flows.pipelines.stages import Runner
from tasks.config import BuildConfig
from tasks.download.table import known_files
from tasks.finalize.facts import Difference
from tasks.finalize.provenance import build_id, provenance
from tasks.garbage import Policy, remove_superfluous
from tasks.models import FoundFile, Model, SourceFile
from tasks.output.changes import Changes, DocumentChanges, changes_between
from tasks.output.held import read_held, record_decision, settle
from tasks.output.history import Refreshed, read_history, remember
from tasks.output.paths import version_store
from tasks.output.pointer import is_dataset, publish, read_pointer
from tasks.output.versions import if_there, read_origin_files, remember_origin
from tasks.tokenize.chat import chats_of

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
    built, began = None, time.monotonic()
    with opened(config, publish_anyway) as output:
        root, pointer, seconds = output.root, output.pointer, output.seconds
        read_history(root)  # what is wrong with it is reported before any work
        held = read_held(root)
        record_decision(root, held)
        with timed("download", seconds), ThreadPoolExecutor(1) as beside:
            loading = beside.submit(tokenizer_of, config, is_first=pointer.version is None)
            pinned = pin_sources(config, root)
            found = files_of(pinned)
            known = known_files(found, config.sources, config.slice_bytes, [root])
            # Lists of copies depend on the slices, which only a file that was cut says.
            drops = config.documents.duplicates == "drop"
            uncut = {} if all(known) or drops else files_of_origin(root, pointer.version)
            needed = [number for number, cut in enumerate(known) if cut or found[number] not in uncut]
            fresh, cuts = [found[number] for number in needed], [known[number] for number in needed]
            if is_much([file for file, cut in zip(fresh, cuts, strict=True) if cut is None]):
                loading.result()  # a wrong tokenizer is an error before so much is fetched
            cut = dict(zip(fresh, download(config, fresh, runner, root, known=cuts), strict=True))
            tokenizer = loading.result()
            files = [cut[file].file if file in cut else uncut[file] for file in found]
            text = Text.of(config, pinned, [cut[file] for file in found]) if len(cut) == len(found) else None
            chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
            made_of = provenance(config, pinned, files, tokenizer, chats, text is not None and text.has_runs)
            version = build_id(made_of, layout_of(config, root))
        old = if_there(root, pointer.version, read_manifest)
        if version == pointer.version and old is not None:
            remember_origin(root, version, config, pinned, files)
            publish(root, version, pointer.sequence)  # checks the manifest, repairs a lost link
            outcome: Outcome = "unchanged"
            settle(root)
            if output.lineage is not None:
                output.lineage.made(version, old, is_published=True)
        elif any(version == one.version for one in pointer.withdrawn):
            if old is None:
                raise ValueError(
                    f"{root.url}: the latest version, {pointer.version}, is gone, and the sources give {version}, which was "
                    "rolled back. Restore the one, or publish the other: python -m flows build"
                )
            outcome = "withdrawn"
        elif publish_anyway is None and version in held.rejected_names and is_dataset(root, version):
            outcome = "rejected"
        else:
            with timed("download", seconds):
                text = text or Text.of(config, pinned, download(config, found, runner, root))
            built = build_version(config, text, tokenizer, runner, output, config.publish.of_refresh())
            if built.held is None:
                outcome = "published"
            elif built.held.decision is not None:
                outcome = "rejected"
            else:
                outcome = "held" if built.comparison else "still held"
        now, published_at = read_pointer(root), time.monotonic()
        before = pointer.version if old else None
        new = read_manifest(version_store(root, version if built or now.version is None else now.version))
        changes = changes_between(before, old, version, new)
        if outcome == "unchanged":
            changes = changes.model_copy(update={"documents": DocumentChanges()})
        elif built is not None and built.comparison is not None:
            changes = changes.model_copy(update={"documents": built.comparison.documents})
        elif outcome == "published":
            changes = changes.model_copy(update={"documents": Difference(root, before, version).documents})
            seconds["changes"] = round(time.monotonic() - published_at, 3)
    if built is not None and built.held is None and (built.decision is None or built.decision.what != "approved"):
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
        seconds=seconds,
        text_bytes_tokenized=built.text_bytes_tokenized if built else 0,
    )


def refreshed(built: BuildResult, changes: Changes, seconds: float) -> Refreshed:
    """The line in the history for a refresh that ends now."""
    kinds = ("added", "removed", "changed", "moved")
    total = changes.documents.total.model_dump(include={*kinds}) if changes.documents else dict.fromkeys(kinds)
    return Refreshed(
        at=datetime.now(UTC).replace(microsecond=0),
        version=built.version,
        documents=sum(built.totals[split]["seq_count"] for split in SPLITS),
        tokens=sum(built.totals[split]["token_count"] for split in SPLITS),
        text_bytes_tokenized=built.text_bytes_tokenized,
        seconds=round(seconds, 3),
        decision=built.decision,
        **total,
    )


def files_of_origin(root: Store, version: str | None) -> dict[FoundFile, SourceFile]:
    """Files whose content is known from an origin: what their store calls it is what it was called for *version*."""
    origin = read_origin_files(root, version) if version else None
    if origin is None:
        return {}
    found = files_of(origin.pinned)
    return {here: file for here, file in zip(found, origin.files, strict=False) if here.immutable}
