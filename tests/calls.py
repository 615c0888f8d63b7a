"""Calls of functions, noted or met as they happen."""

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest


def before_each_call(patch: pytest.MonkeyPatch, name: str, first: Callable[..., Any]) -> list[Any]:
    """Call *first* before each call of a function, with its arguments by position. Its results so far, in order."""
    real, results = pkgutil.resolve_name(name), []

    def call(*arguments: Any, **options: Any) -> Any:
        results.append(first(*arguments))
        return real(*arguments, **options)

    patch.setattr(name, call)
    return results
