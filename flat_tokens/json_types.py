"""Values of JSON, for annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON."""
JsonFacts: TypeAlias = Mapping[str, Any]
"""The same, which nobody changes."""
