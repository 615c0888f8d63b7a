"""Configuration files: YAML, with settings from the command line on top."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tasks.config import BuildConfig
from tasks.faults import faults_of


class ConfigLoader(yaml.SafeLoader):
    """YAML in which no key stands twice in a mapping: the last of them would win without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(f"the key {key.value!r} is in line {lines[key.value]} and again in line {line}; remove one")
            lines[key.value] = line
        return node


def read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. ValueError says what is wrong with *what*, and in which line."""
    try:
        return yaml.load(text, ConfigLoader)  # noqa: S506  a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{what} is not YAML: {error.problem or error.context}{where}") from error
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deep") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is not YAML: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def read_config(path: Path, settings: list[str]) -> BuildConfig:
    """The configuration in a YAML file with settings from the command line on top. ValueError says all that is wrong."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    value = read_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a mapping of settings")
    for setting in settings:
        key, equals, new = setting.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise ValueError(f"--set {key}: write KEY=VALUE, such as --set tokenizer=gpt2 or --set source.text_column=body")
        set_at(value, names, read_yaml(new, f"--set {key}: the value"))
    try:
        return BuildConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(faults_of(error, BuildConfig, 'source' in value))}") from error


def set_at(value: Any, path: list[str], new: Any) -> None:
    """Set ``value[path[0]][path[1]]...``; numbers are places in a list, a name alone becomes a mapping where need be."""
    if path[0] == "sources" and "source" in value:
        value["sources"] = [value.pop("source")]
    whole = ".".join(path)
    for here, following in itertools.pairwise(path):
        if isinstance(value, list):
            value = value[_place(whole, value, here)]
        elif here == "source" and "source" not in value and len(value.get("sources") or []) == 1:
            value = value["sources"][0]
        else:
            if here == "tokenizer" and isinstance(value.get(here), str):
                value[here] = {"name": value[here]}
            if value.get(here) is None:
                value[here] = {}
            value = value[here]
        if not isinstance(value, dict | list):
            raise ValueError(f"--set {whole}: {here!r} has no settings within")
        if isinstance(value, dict) and following.isdecimal():
            raise ValueError(f"--set {whole}: {here!r} is not a list, so it has no item {following!r}")
    if isinstance(value, list):
        value[_place(whole, value, path[-1])] = new
    else:
        value[path[-1]] = new


def _place(whole: str, items: list[Any], text: str) -> int:
    if not text.isdecimal() or int(text) >= len(items):
        raise ValueError(f"--set {whole}: there is no item {text!r}; there are {len(items)}, counted from 0")
    return int(text)
