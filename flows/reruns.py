"""The order of a refresh and of a rerun for another tokenizer, whoever runs their tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from flat_tokens.manifest import read_manifest
from flat_tokens.storage import Store
from flows.order import (
    BuildResult,
    Runner,
    Text,
    build_version,
    check_apart,
    check_output,
    cut_files,
    files_of,
    layout_of,
    pin_sources,
    scratch_of,
    stage,
)
from tasks.changes import Changes, changes_between, digests_of, file_changes
from tasks.finalize import build_id, provenance
from tasks.garbage import Policy, remove_superfluous
from tasks.leases import building
from tasks.models import BuildConfig, FoundFile, Model, Source, SourceFile, TokenizerConfig
from tasks.pointer import is_dataset, publish, read_pointer
from tasks.progress import meter
from tasks.tokenizers import load_tokenizer
from tasks.versions import VERSIONS, at_dataset, read_origin, remember_origin

BESIDE = "{output}-{tokenizer}"
"""Where a rerun for another tokenizer is published."""


class RefreshResult(Model):
    """What a refresh came to. ``withdrawn``: the sources give a version that was rolled back, so ``latest`` stays where it is.
    ``removed``: versions that the policy no longer keeps.
    """

    outcome: Literal["published", "unchanged", "withdrawn"]
    path: str
    version: str
    sequence: int
    changes: Changes
    build: BuildResult | None
    removed: tuple[str, ...]
    seconds: dict[str, float]

    @property
    def headline(self) -> str:
        if self.outcome == "withdrawn":
            return (
                f"the sources give version {self.changes.after}, which was rolled back: latest stays at {self.version}. "
                "To publish it all the same, build it: python -m flows build"
            )
        if self.outcome == "unchanged":
            return f"nothing changed: {self.version} is what the sources give"
        again = " again" if self.build and self.build.was_published else ""
        return f"published {self.version}{again}: {self.changes.headline}"


def refresh(config: BuildConfig, runner: Runner, policy: Policy | None = None) -> RefreshResult:
    """Look the sources up again and publish what they give now, tokenizing only content that is new; nothing is done where it
    is the latest version. With a *policy*, versions that it does not keep are removed at the end.

    Files that their store names by content (a commit, an ETag, a generation) are not even fetched to find that out.
    """
    meter.reset()
    seconds: dict[str, float] = {}
    root = check_output(config)
    pointer = read_pointer(root)
    built = None
    with building(root, scratch_of(config)):
        with stage("download", seconds), ThreadPoolExecutor(1) as beside:
            loading = beside.submit(load_tokenizer, config.tokenizer)
            pinned = pin_sources(config, root)
            found = files_of(pinned)
            known = known_files(root, pointer.version)
            fresh = [file for file in found if file not in known]
            cut = dict(zip(fresh, cut_files(config, fresh, runner), strict=True))
            tokenizer = loading.result()
            files = [cut[file].file if file in cut else known[file] for file in found]
            version = build_id(provenance(config, pinned, files, tokenizer), layout_of(config))
        old = manifest_of(root, pointer.version)
        if version == pointer.version and old is not None:
            remember_origin(root, version, config, pinned, files)
            publish(root, version, pointer.sequence)  # checks the manifest, mends a lost link
            outcome: Literal["published", "unchanged", "withdrawn"] = "unchanged"
        elif any(version == one.version for one in pointer.withdrawn):
            if old is None:
                raise ValueError(
                    f"{root.url}: the latest version, {pointer.version}, is gone, and the sources give {version}, which was "
                    "rolled back. Restore the one, or publish the other: python -m flows build"
                )
            outcome = "withdrawn"
        else:
            with stage("download", seconds):
                absent = [file for file in found if file not in cut]
                cut |= dict(zip(absent, cut_files(config, absent, runner), strict=True))
            text = Text(pinned, [cut[file] for file in found])
            built = build_version(config, text, tokenizer, runner, pointer.sequence, seconds)
            outcome = "published"
    now = read_pointer(root)
    assert now.version is not None
    new = read_manifest(root / VERSIONS / now.version)
    changes = changes_between(pointer.version if old else None, old, version, new)
    removed = remove_superfluous(root, policy) if policy else []
    return RefreshResult(
        outcome=outcome,
        path=f"{root.url}/{VERSIONS}/{now.version}",
        version=now.version,
        sequence=now.sequence,
        changes=changes,
        build=built,
        removed=tuple(item.name.rpartition("/")[2] for item in removed),
        seconds=seconds,
    )


def known_files(root: Store, version: str | None) -> dict[FoundFile, SourceFile]:
    """Files whose content is known without reading them: what their store calls it is what it was called for *version*."""
    origin = read_origin(root, version) if version else None
    if origin is None:
        return {}
    found = files_of(origin.pinned)
    return {here: file for here, file in zip(found, origin.files, strict=False) if here.immutable}


def manifest_of(root: Store, version: str | None) -> dict[str, Any] | None:
    """The manifest of a version, None where it is not there."""
    if version is None or not is_dataset(root, version):
        return None
    return read_manifest(root / VERSIONS / version)


class Base(NamedTuple):
    """What is tokenized again: settings, and, where it has been built, the version whose text it is and its manifest."""

    config: BuildConfig
    version: str | None
    manifest: dict[str, Any] | None


def base_of(dataset: str | BuildConfig) -> Base:
    """The latest version of what a configuration builds, or the dataset at a path: an output or one of its versions.

    ValueError where there is no dataset, or its settings are not known.
    """
    if isinstance(dataset, BuildConfig):
        root = Store.at(dataset.output)
        latest = read_pointer(root).version
        manifest = manifest_of(root, latest)
        return Base(dataset, latest if manifest else None, manifest)
    root, version = at_dataset(dataset)
    return Base(config_of(root, version), version, read_manifest(root / VERSIONS / version))


def config_of(root: Store, version: str) -> BuildConfig:
    """The settings that a version was built with."""
    origin = read_origin(root, version)
    if origin is None and (inputs := read_manifest(root / VERSIONS / version)["provenance"].get("inputs")):
        raise ValueError(
            f"{root.url}: version {version} was made of the datasets {', '.join(one['name'] for one in inputs)}, not of text. "
            "Retokenize each of them, then make it again of what that gives."
        )
    if origin is None:
        raise ValueError(
            f"{root.url}: how version {version} was built is not recorded (origins/{version}.json). Give its configuration file."
        )
    return BuildConfig.model_validate({**origin.config, "output": root.url})


def reruns_of(base: Base, tokenizers: Sequence[str | TokenizerConfig], output: str = BESIDE) -> list[BuildConfig]:
    """A configuration for each tokenizer. *output* may hold ``{output}``, where the base is, and ``{tokenizer}``, a short name.

    ValueError where two of them would be published at one place, or one at the base's own, or where a tokenizer cannot be had.
    """
    settings = base.config.model_dump(mode="json", exclude_unset=True)
    if base.version:  # its downloads are used again
        settings["scratch"] = os.path.abspath(scratch_of(base.config))
    configs: list[BuildConfig] = []
    for given in tokenizers:
        tokenizer = TokenizerConfig(name=given) if isinstance(given, str) else given
        place = output.replace("{output}", base.config.output.rstrip("/")).replace("{tokenizer}", short_name(tokenizer))
        if unknown := re.findall(r"\{\w*\}", place):
            raise ValueError(f"output {output}: {unknown[0]} is not known; {{output}} and {{tokenizer}} are.")
        if place in [base.config.output, *(config.output for config in configs)]:
            raise ValueError(f"{place}: would be the output of two tokenizers. Set output to a name with {{tokenizer}} in it.")
        load_tokenizer(tokenizer)
        configs.append(BuildConfig.model_validate({**settings, "output": place, "tokenizer": tokenizer.model_dump()}))
    return configs


def short_name(tokenizer: TokenizerConfig) -> str:
    """A tokenizer's name as a part of a path: without directories, organisation and suffix."""
    name = PurePath(tokenizer.name).name.removesuffix(".json").removesuffix(".tiktoken")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "tokenizer"


def read_text(base: Base, config: BuildConfig, runner: Runner) -> Text:
    """The text of the base's version, fetched again only where it is not here any more. *config*: where to fetch it to.

    ValueError where the sources no longer give it: then a dataset of another tokenizer would not be of the same text.
    """
    revisions = {source["name"]: source["revision"] for source in base.manifest["provenance"]["sources"]} if base.manifest else {}
    sources = tuple(_pinned(source, revisions.get(source.name)) for source in config.sources)
    here = config.model_copy(update={"sources": sources})
    pinned = pin_sources(here, Store.at(config.output))
    text = Text(pinned, cut_files(here, files_of(pinned), runner, Store.at(base.config.output)))
    if base.manifest:
        _check_same_text(base, text)
    return text


def _pinned(source: Source, revision: str | None) -> Source:
    if source.hub is None or revision is None:
        return source
    return source.model_copy(update={"hub": source.hub.model_copy(update={"revision": revision})})


def _check_same_text(base: Base, text: Text) -> None:
    assert base.manifest is not None
    then = base.manifest["provenance"]["sources"]
    names = [source.name for source in base.config.sources]
    if [source["name"] for source in then] != names:
        raise ValueError(
            f"the configuration has the sources {', '.join(names)}, but version {base.version} was made of "
            f"{', '.join(source['name'] for source in then)}. Build it first, or give the dataset instead of the configuration."
        )
    for index, source in enumerate(then):
        now = {file.name: file.sha256 for file in text.files if file.source == index}
        if changes := list(file_changes(source["name"], digests_of(source), now)):
            listed = ", ".join(f"{change.name} {change.kind}" for change in changes[:5]) + (" ..." if len(changes) > 5 else "")
            raise ValueError(
                f"source {source['name']!r} no longer gives the text of version {base.version}: {listed}. Refresh the dataset "
                "first (python -m flows refresh), so that both tokenizers get the same text."
            )


def rerun(config: BuildConfig, text: Text, runner: Runner) -> BuildResult:
    """Publish a text that is here as the configuration says."""
    meter.reset()
    root = check_output(config)
    since = read_pointer(root).sequence
    check_apart(root, text.pinned)
    with building(root, scratch_of(config)):
        return build_version(config, text, load_tokenizer(config.tokenizer), runner, since, {})
