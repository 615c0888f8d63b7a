"""The same text for another tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import ValidationError

from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flat_tokens.tools.export import note_export
from flows.pipelines.build import BuildResult, build_version
from flows.pipelines.forget import forget_like
from flows.pipelines.publish import opened, timed
from flows.pipelines.stages import Runner
from flows.pipelines.text import Text, at_revisions, check_sources_apart, pin_sets, pin_sources
from tasks.config import BuildConfig, TokenizerConfig
from tasks.models import as_name
from tasks.output.changes import digests_of, file_changes, sources_of
from tasks.output.leases import shared_scratch
from tasks.output.paths import origin_key, version_store
from tasks.output.places import check_output, scratch_of
from tasks.output.pointer import read_pointer
from tasks.output.versions import at_dataset, check_distinct, if_there, read_origin
from tasks.tokenize.tokenizers import load_tokenizer

BESIDE = "{output}-{tokenizer}"
"""Where a rerun for another tokenizer is published."""
REFRESH_FIRST = "Refresh the dataset first (python -m flows refresh), so that both tokenizers get the same text."


class Base(NamedTuple):
    """The dataset whose text is tokenized again: its settings and, if it has been built, its latest version with the manifest."""

    config: BuildConfig
    version: str | None
    manifest: dict[str, Any] | None


def base_of(dataset: str | BuildConfig) -> Base:
    """The latest version of what a configuration builds, or the dataset at a path: an output or one of its versions.

    ValueError if there is no dataset, or its settings are not known.
    """
    if isinstance(dataset, BuildConfig):
        root = Store.at(dataset.output)
        latest = read_pointer(root).version
        manifest = if_there(root, latest, read_manifest)
        return Base(dataset, latest if manifest else None, manifest)
    root, version = at_dataset(dataset)
    return Base(config_of(root, version), version, read_manifest(version_store(root, version)))


def config_of(root: Store, version: str) -> BuildConfig:
    """The settings that a version was built with."""
    origin = read_origin(root, version)
    if origin is None and (inputs := read_manifest(version_store(root, version))["provenance"].get("inputs")):
        raise ValueError(
            f"{root.url}: version {version} was made of the datasets {', '.join(one['name'] for one in inputs)}, not of text. "
            "Retokenize each of them, then make it again of what that gives."
        )
    if origin is None:
        raise ValueError(
            f"{root.url}: how version {version} was built is not recorded (origins/{version}.json). Give its configuration file."
        )
    try:
        return BuildConfig.model_validate({**origin.config, "output": root.url})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(
            f"{root.path(origin_key(version))}: has settings that are not understood here ({where}: {first['msg']}). Give the "
            "configuration file of the dataset."
        ) from error


@contextmanager
def reruns(
    dataset: str | BuildConfig,
    tokenizers: Sequence[str | TokenizerConfig],
    output: str,
    runner_of: Callable[[BuildConfig], AbstractContextManager[Runner]],
) -> Iterator[tuple[list[BuildConfig], Callable[[BuildConfig], BuildResult]]]:
    """Yield a configuration for each tokenizer, and a function that publishes the text by one of them. The text is there, and
    is not removed until the block ends. ValueError, before any work, if one of them cannot be published.
    """
    base = base_of(dataset)
    configs = reruns_of(base, tokenizers, output)
    check_distinct([base.config.output, *(config.output for config in configs)])
    for config in configs:
        check_output(config)
        forget_like(Store.at(base.config.output), config.output, config.scratch)
        if base.version is not None:
            note_export(version_store(Store.at(base.config.output), base.version).url, FLAT_TOKENS, config.output)
    with shared_scratch(scratch_of(configs[0], Store.at(configs[0].output))), runner_of(base.config) as runner:
        text = read_text(base, configs[0], runner)
        yield configs, partial(rerun, text=text, runner=runner)


def rerun(config: BuildConfig, text: Text, runner: Runner) -> BuildResult:
    """Publish a text that is here as the configuration says."""
    with opened(config) as output:
        config = at_revisions(pin_sets(config, output.root), [pin.revision for pin in text.pinned])
        check_sources_apart(output.root, text.pinned)
        with timed("trial", output.seconds):
            tokenizer = load_tokenizer(config.tokenizer)
        return build_version(text.makes(config, tokenizer, output), runner, output)


def reruns_of(base: Base, tokenizers: Sequence[str | TokenizerConfig], output: str = BESIDE) -> list[BuildConfig]:
    """A configuration for each tokenizer. *output* may hold ``{output}``, where the base is, and ``{tokenizer}``, a short name.

    ValueError if two of them would be published at one place, or one at the base's own, or if a tokenizer cannot be had.
    """
    settings = base.config.model_dump(mode="json", exclude_unset=True)
    if base.version:  # its downloads are used again
        settings["scratch"] = os.path.abspath(scratch_of(base.config, Store.at(base.config.output)))
    if base.config.split.keep is not None:  # both have the same splits
        kept = version_store(Store.at(base.config.output), base.version).url if base.version else None
        settings["split"] = {**settings["split"], "keep": kept}
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
    name = PurePath(tokenizer.name).name.removesuffix(".json").removesuffix(".tiktoken").removesuffix(".model")
    return as_name(name, "tokenizer")


def read_text(base: Base, config: BuildConfig, runner: Runner) -> Text:
    """The text of the base's version, fetched again only if it is not on this machine any more. *config*: of the dataset to
    build, which has the place for fetched files. ValueError if the sources have changed: a dataset of another tokenizer would
    not be of the same text.
    """
    then = sources_of(base.manifest["provenance"]) if base.manifest else []
    revisions, root = {source["name"]: source.get("revision") for source in then}, Store.at(config.output)
    here, pinned = pin_sources(at_revisions(config, [revisions.get(source.name) for source in config.sources]), root)
    text = Text.read(here, pinned, runner, root, Store.at(base.config.output))
    if base.manifest:
        _check_same_text(base, then, text, pin_sets(config, root))
    return text


def _check_same_text(base: Base, then: list[dict[str, Any]], text: Text, config: BuildConfig) -> None:
    """ValueError if the sources no longer give the text of the base's version, which was made of those of *then*; or if an
    evaluation set is not what it was: other documents would be left out.
    """
    names = [source.name for source in base.config.sources]
    if [source["name"] for source in then] != names:
        raise ValueError(
            f"the configuration has the sources {', '.join(names)}, but version {base.version} was made of "
            f"{', '.join(source['name'] for source in then) or 'none'}. Build it first, or give the dataset instead of the "
            "configuration."
        )
    now_of: list[dict[str, str]] = [{} for _ in then]
    for file in text.files:
        now_of[file.source][file.name] = file.sha256
    for source, now in zip(then, now_of, strict=True):
        if changes := list(file_changes(source["name"], digests_of(source), now)):
            listed = ", ".join(f"{change.name} {change.kind}" for change in changes[:5]) + (" ..." if len(changes) > 5 else "")
            raise ValueError(
                f"source {source['name']!r} no longer gives the text of version {base.version}: {listed}. {REFRESH_FIRST}"
            )
    steps = [step for source in then[:1] for step in source.get("steps") or ()]
    for was, step in zip(steps, config.documents.opened().described, strict=False):
        if was["use"] == step["use"] == "decontaminate" and was["options"]["against"] != step["options"]["against"]:
            raise ValueError(
                f"the evaluation sets of the step {step['name']!r} are no longer those of version {base.version}. {REFRESH_FIRST}"
            )
