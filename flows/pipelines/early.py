"""Faults of a configuration that are known at once, before there is a run: of its settings, local paths, and tokenizer."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from flat_tokens.stores.local import kind_of
from flat_tokens.tools.terminal import one_line
from flat_tokens.vocabulary import check_encoding, is_file_name, nearest_file
from tasks.config import BuildConfig
from tasks.download.sources import is_there, resolve_source
from tasks.faults import faults_of


def fault_of_config(settings: dict[str, Any]) -> str | None:
    """The fault of a configuration, in one line. None if it has none, as far as that is known without a network."""
    try:
        config = BuildConfig.model_validate(settings)
    except ValidationError as error:
        return "; ".join(faults_of(error, BuildConfig, "source" in settings))
    try:
        check_here(config)
        for number, source in enumerate(config.sources):
            if "://" not in source.place:
                resolve_source(source, number)
    except (ValueError, OSError) as error:
        return one_line(error)
    return None


def check_here(config: BuildConfig) -> None:
    """ValueError or OSError if nothing is at a local path or matches it, or a tokenizer's name means nothing."""
    check_tokenizer(config.tokenizer.name)
    for number, source in enumerate(config.sources):
        template = source.chat_template
        if template is not None and "://" not in template and kind_of(template) is None:
            raise ValueError(f"{source.called}: there is no chat template {template}. Set chat_template to a file.")
        if source.path is not None and "://" not in source.path and not is_there(source.path):
            resolve_source(source, number)  # it says what is there instead


def check_tokenizer(name: str) -> None:
    """ValueError if a tokenizer's name means nothing. What is on the hub, and what a file holds, is not looked up."""
    if name == "bytes" or kind_of(name) is not None:
        return
    if is_file_name(name):
        raise FileNotFoundError(f"cannot read the tokenizer {name}: No such file or directory.{nearest_file(Path(name))}")
    path = PurePath(name)
    if name.count("/") != 1 or path.is_absolute() or ".." in path.parts:
        check_encoding(name)
