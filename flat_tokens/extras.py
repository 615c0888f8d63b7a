"""Optional packages, which are not installed with the library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "extra", "pa"]


def extra(name: str, purpose: str) -> Any:
    """Import the package. ModuleNotFoundError says what needs it and how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but one of its own requirements is not
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package!r}. Install it: pip install {package}", name=name
        ) from error


class LazyModule:
    """An optional package, imported at the first use of one of its names; its modules too."""

    def __init__(self, name: str, purpose: str) -> None:
        self._name, self._purpose = name, purpose
        self._package: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self._package is None:
            self._package = extra(self._name, self._purpose)
        found = getattr(self._package, attribute, None)
        return extra(f"{self._name}.{attribute}", self._purpose) if found is None else found


if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = LazyModule("pyarrow", "what reads and writes tables, such as Parquet")
