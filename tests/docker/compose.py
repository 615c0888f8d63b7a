"""Compose files, read as ``docker compose`` reads them, as far as docker/compose.yaml goes: variables, merges, order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")

Service = dict[str, Any]


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Put in variables; ``${NAME:-default}`` and ``${NAME:?message}`` as in a shell. KeyError with the message."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == "-":
            return str(rest)
        raise KeyError(rest or name)

    return _VARIABLE.sub(value, text)


def _interpolated(node: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _interpolated(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [_interpolated(value, variables) for value in node]
    return interpolate(node, variables) if isinstance(node, str) else node


def read_services(variables: Mapping[str, str]) -> dict[str, Service]:
    """The services of docker/compose.yaml by name, those that others depend on first."""
    services = _interpolated(yaml.safe_load(COMPOSE.read_text("utf-8"))["services"], variables)
    ordered: dict[str, Service] = {}
    while waiting := {name: service for name, service in services.items() if name not in ordered}:
        ready = {name: service for name, service in waiting.items() if set(service.get("depends_on", ())) <= set(ordered)}
        if not ready:
            raise ValueError(f"{', '.join(waiting)} wait for each other")
        ordered |= ready
    return ordered
