"""Faults of a configuration as sentences for people, with the nearest known key."""

from __future__ import annotations

import re
from datetime import date, time
from typing import Any, get_args

from pydantic import ValidationError

from flat_tokens.options import did_you_mean, nearest
from tasks.config import BuildConfig
from tasks.models import Model


def faults_of(error: ValidationError, model: type[Model], one_source: bool = False) -> list[str]:
    """A sentence for each fault of a configuration; with the nearest valid key. *one_source*: it has ``source``, not a list."""
    sentences, faults = [], error.errors(include_url=False)
    for fault in faults:
        if fault["type"] == "too_short" and any(
            other["loc"][: len(fault["loc"])] == fault["loc"] != other["loc"] for other in faults
        ):
            continue  # pydantic counts an item that is refused as absent; its own fault says more
        where = ".".join(str(part) for part in fault["loc"])
        if one_source and fault["loc"][:2] == ("sources", 0):
            where = where.replace("sources.0", "source", 1)
        if fault["type"] == "extra_forbidden":
            sentences.append(f"unknown key {where!r}. {_nearest(str(fault['loc'][-1]), model, fault['loc'][:-1])}")
            continue
        if fault["type"] == "missing":
            named = "source" if where == "sources" else where
            sentences.append(f"{named} is missing. {_explained(model, fault['loc'])}")
            continue
        if fault["type"] == "invalid_key":
            within = f" of {where.rpartition('.')[0]}" if "." in where else ""
            sentences.append(f"a key{within} is {fault['input']!r}. {_quotes(fault['input'])}".rstrip())
            continue
        message = PLAIN_WORDS.get(fault["type"]) or fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if fault["type"] not in ("too_short", "value_error"):
            message += _shown(fault["input"])
        if fault["type"] in ("string_type", "literal_error") and (quotes := _quotes(fault["input"])):
            message += f". {quotes}"
        elif fault["type"] == "literal_error":
            near = nearest(str(fault["input"]), re.findall("'([^']+)'", fault["ctx"]["expected"]))
            message += f". Did you mean {near!r}?" if near else ""
        sentences.append(f"{where}: {message}" if where else message)
    return sentences


def _explained(model: type[Model], path: tuple[int | str, ...]) -> str:
    """The meaning of a setting, for people who set it."""
    here = model
    for part in path[:-1]:
        here = _nested(here).get(str(part), here)
    words = here.descriptions().get(str(path[-1]))
    return f"Set it: {words}." if words else "Set it."


def _quotes(value: Any) -> str:
    """The remedy if YAML has made another type of a text; empty if it has not."""
    if isinstance(value, bool):
        return "YAML makes that of words such as no and on: put the word in quotes"
    if isinstance(value, int | float | date | time):
        return "YAML makes that of digits such as 0123456, 1.10 and 2026-07-31: put them in quotes"
    return ""


PLAIN_WORDS = {
    "model_type": "should be a mapping of settings",
    "tuple_type": "should be a list",
    "too_short": "needs at least one item",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_type": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "string_type": "should be text",
}
"""Messages by pydantic's types of errors, where its own speak of Python."""


def _shown(value: Any) -> str:
    """The value that was given, if it is short and cannot hold a secret."""
    if isinstance(value, str) and (len(value) > 40 or "@" in value or "/" in value):
        return ""
    named = {dict: "a mapping", list: "a list", tuple: "a list", type(None): "nothing"}
    if isinstance(value, date | time):
        return f", not the {'time' if isinstance(value, time) else 'date'} {value.isoformat()}"
    return f", not {named.get(type(value)) or repr(value)}"


def _nearest(key: str, model: type[Model], path: tuple[int | str, ...]) -> str:
    """The valid keys nearest to one that the model at *path* within *model* does not have."""
    here = model
    for part in path:
        here = _nested(here).get(str(part), here)
    valid = sorted(_keys(here))
    there = [name for name in _all_keys(model) if name.rpartition(".")[2] == key]
    return f"Did you mean {' or '.join(map(repr, there))}?" if there else did_you_mean(key, valid)


def _keys(model: type[Model]) -> set[str]:
    return set(model.model_fields) | ({"source"} if model is BuildConfig else set())


def _nested(model: type[Model]) -> dict[str, type[Model]]:
    """The models in the fields of a model, by the fields' names."""
    found: dict[str, type[Model]] = {}
    for name in _keys(model):
        kinds = [model.model_fields[name if name in model.model_fields else "sources"].annotation]
        while kinds:
            kind = kinds.pop()
            kinds += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, Model):
                found[name] = kind
    return found


def _all_keys(model: type[Model]) -> list[str]:
    """Every key within a model as ``--set`` takes it."""
    within = [f"{name}.{key}" for name, kind in sorted(_nested(model).items()) if name != "sources" for key in _all_keys(kind)]
    return sorted(_keys(model)) + within
