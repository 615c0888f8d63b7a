"""Packages that are not installed with the library, for what needs one of them."""

from __future__ import annotations

import importlib
from typing import Any


def extra(name: str, purpose: str) -> Any:
    """The package, or ModuleNotFoundError that says what it is needed for and how to have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there, and something that it needs itself is not
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package!r}. Install it: pip install {package}", name=name
        ) from error
